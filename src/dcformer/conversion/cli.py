"""What the subcommands of `dcformer-convert` do; `dcformer_commands.convert` has their arguments."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConversionError, reports
from .checkpoint import open_checkpoint
from .convert import convert_hub_to_safetensors, convert_jax_to_safetensors, convert_safetensors_to_jax
from .verification import (
    check_length,
    check_tolerance,
    compare_configs,
    compare_logits,
    compare_tensors,
    format_table,
)

_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "jax-to-safetensors": convert_jax_to_safetensors,
    "safetensors-to-jax": convert_safetensors_to_jax,
    "hub-to-safetensors": convert_hub_to_safetensors,
}


@reports
def run(command: str, args: argparse.Namespace) -> int:
    """Runs a subcommand.

    Args:
        command: its name.
        args: its arguments.

    Returns:
        0, or 1 on an error or a difference.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax starts JAX, which would occupy a GPU for nothing
    try:
        if command == "verify":
            return _verify(args)
        print(_CONVERSIONS[command](**vars(args)))
        return 0
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _verify(args: argparse.Namespace) -> int:
    check_tolerance(args.atol, "--atol")
    check_tolerance(args.logits_atol, "--logits-atol")
    if args.num_tokens < 0:
        raise ConversionError(f"--num-tokens {args.num_tokens}: expected at least 0, which compares no logits.")
    first, second = (
        open_checkpoint(
            getattr(args, side),
            getattr(args, f"{side}_format"),
            config=getattr(args, f"{side}_config"),
            step=getattr(args, f"{side}_step"),
        )
        for side in ("first", "second")
    )
    for checkpoint in (first, second):
        print(f"{checkpoint.path} ({checkpoint.format})", *(f"  {note}" for note in checkpoint.notes), sep="\n")
    folders = first.is_folder and second.is_folder
    tokens = _tokens(args.tokens)
    if tokens is not None and not folders:
        raise ConversionError("--tokens compares logits, which needs two model folders: convert the checkpoint first.")
    configs = [checkpoint.config for checkpoint in (first, second) if folders]
    if tokens is not None and tokens.ndim:
        check_length(tokens.shape[-1], *configs, is_random=False)
    elif tokens is None and args.num_tokens:
        check_length(args.num_tokens, *configs)
    comparisons = compare_tensors(first, second, atol=args.atol, progress=args.progress)
    same_shapes = first.shapes == second.shapes
    if folders and same_shapes and (tokens is not None or args.num_tokens):
        comparisons.append(
            compare_logits(
                first.path,
                second.path,
                tokens=tokens,
                num_tokens=args.num_tokens,
                seed=args.seed,
                atol=args.logits_atol,
            )
        )
    print(format_table(comparisons, every=args.all))
    differing = compare_configs(first, second) if folders else []
    for line in differing:
        print(f"configurations differ in {line}")
    return int(bool(differing) or not all(comparison.is_equal for comparison in comparisons))


def _tokens(words: Sequence[str] | None) -> np.ndarray | None:
    if not words:
        return None
    if len(words) == 1 and words[0].endswith(".npy"):
        try:
            return np.load(words[0], allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConversionError(f"--tokens {words[0]} cannot be read ({error}).") from error
    try:
        return np.array([int(word) for text in words for word in text.replace(",", " ").split()])
    except ValueError as error:
        raise ConversionError(f"--tokens {' '.join(words)}: expected numbers, or a .npy file ({error}).") from error


__all__ = ["run"]
