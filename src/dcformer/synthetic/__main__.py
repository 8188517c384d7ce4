"""Write a synthetic data set: ``python -m dcformer.synthetic --split test --output test.jsonl``."""

import argparse
import os
import sys
from collections.abc import Sequence

from tqdm.auto import tqdm

from ..errors import DCFormerError
from .dataset import SPLITS, iterate_contexts, write_dataset
from .tasks import TASKS
from .tokenization import build_tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcformer.synthetic",
        description="Generate few-shot contexts of the DCFormer paper's head-composition tasks as jsonl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", required=True, help="jsonl file to write")
    parser.add_argument("--split", choices=SPLITS, default="train", help="no question is in two splits")
    parser.add_argument("--contexts-per-task", type=int, default=12, help=f"contexts of each of the {len(TASKS)} tasks")
    parser.add_argument("--num-examples", type=int, default=8, help="examples in a context")
    parser.add_argument("--first-scored", type=int, default=2, help="index of the first example that is scored")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same file")
    parser.add_argument("--tokenizer", metavar="DIR", help="also save the word-level tokenizer in this folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate a data set and write it.

    Args:
        arguments: the command line, ``sys.argv[1:]`` by default.

    Returns:
        The exit status, 0. Wrong arguments or a file that cannot be written end the program with a message.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.contexts_per_task < 1:
        parser.error(f"--contexts-per-task is {options.contexts_per_task}: expected at least 1")
    if options.tokenizer and os.path.isfile(options.tokenizer):
        parser.error(f"--tokenizer {options.tokenizer} is a file: expected a folder")
    total = len(TASKS) * options.contexts_per_task
    try:
        rows = iterate_contexts(
            options.split,
            options.contexts_per_task,
            options.num_examples,
            options.seed,
            first_scored=options.first_scored,
        )
        contexts = list(tqdm(rows, total=total, unit=" contexts"))
        write_dataset(contexts, options.output)
        saved = ""
        if options.tokenizer:
            tokenizer = build_tokenizer()
            tokenizer.save_pretrained(options.tokenizer)
            saved = f" and a tokenizer of {len(tokenizer)} tokens to {options.tokenizer}"
    except DCFormerError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--output {options.output} or --tokenizer cannot be written: {error.strerror}")
    print(
        f"Wrote {len(contexts)} {options.split} contexts of {len(TASKS)} tasks, {options.num_examples} examples each, "
        f"to {options.output}{saved}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
