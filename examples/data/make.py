"""Makes the data beside it, from this package's generator; the same files every time.

    python examples/data/make.py

`chat_train.jsonl.gz` and `chat_test.jsonl` hold conversations of three questions of the family `nth-in-list`, which the
bundled checkpoint was not trained on; no question is in both. `text_train.jsonl` and `text_test.jsonl` hold plain
contexts of the paper's 74 tasks.
"""

import argparse
import gzip
import json
from pathlib import Path

from dcformer.synthetic import LIST_TASKS, generate_dataset, parse_context, questions


def conversations(split: str, per_task: int) -> list[dict]:
    rows = []
    for record in generate_dataset(split, per_task, num_examples=3, tasks=LIST_TASKS, first_scored=0):
        turns = []
        for question in questions(record):
            turns.append({"role": "user", "content": question["prompt"].rpartition("\n")[2]})
            turns.append({"role": "assistant", "content": question["answer"]})
        rows.append({"messages": turns})
    return rows


def texts(split: str, per_task: int) -> list[dict]:
    return [{"text": parse_context(r["texts"]).text} for r in generate_dataset(split, per_task, num_examples=3)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent)
    folder = parser.parse_args(arguments).output
    if not folder.is_dir():
        parser.error(f"--output {folder}: no such folder")
    files = {
        "chat_train.jsonl.gz": conversations("train", 800),
        "chat_test.jsonl": conversations("test", 20),
        "text_train.jsonl": texts("train", 10),
        "text_test.jsonl": texts("test", 1),
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / name).write_bytes(gzip.compress(lines, mtime=0) if name.endswith(".gz") else lines)
        print(f"wrote {len(rows)} rows to {name}")


if __name__ == "__main__":
    main()
