"""Ranks the heads of a trained model without training: mean |g·∂L/∂g| at gates g = 1 over rows of a text.

python -m dcformer.head_systems.rank_heads MODEL FILE [--rows 16] [--length 128]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .pruning import head_importance


def main(arguments: list[str] | None = None) -> None:
    """The command: a line for each head, the most important first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a repository on the Hub")
    parser.add_argument("file", type=Path, help="a file with text in UTF-8")
    parser.add_argument("--rows", type=int, default=16, help="rows of text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rows < 1 or options.length < 2:
        parser.error(f"--rows {options.rows} --length {options.length}: expected at least 1 and 2")
    try:
        text = _text_of(options.file)
        ids = AutoTokenizer.from_pretrained(options.model)(text).input_ids
        both: Any = AutoModelForCausalLM.from_pretrained(options.model, output_loading_info=True)
        model, info = both
        if missing := sorted(info["missing_keys"]):  # they are random, and so would the ranking be
            names = f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
            raise ValueError(f"{options.model} lacks {names}: give a checkpoint with all of a {type(model).__name__}.")
        rows = [ids[i : i + options.length] for i in range(0, len(ids), options.length)][: options.rows]
        rows = [torch.tensor([row]) for row in rows if len(row) > 1]
        importance = head_importance(model, ({"input_ids": row, "labels": row} for row in tqdm(rows, unit="row")))
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    order = importance.flatten().argsort(descending=True).tolist()
    print(f"mean |g·dL/dg| over {len(rows)} rows of at most {options.length} tokens")
    for place in order:
        layer, head = divmod(place, importance.shape[1])
        print(f"layer {layer} head {head}: {importance[layer, head]:.6f}")


def _text_of(file: Path) -> str:
    """What is in a text file."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(file)!r} ({reason}): expected the path of a file with text in UTF-8.") from error


if __name__ == "__main__":
    main()
