"""The command line `dcformer-selfcheck`."""

import argparse
from collections.abc import Sequence

from . import ends_quietly

DTYPES = ("bfloat16", "float16", "float32")
MARKS = ("scores", "precision", "gradients")  # `dcformer.kernels.overflow.Beyond`


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and prints a table.

    Args:
        arguments: of the command line; the process's when not given.

    Returns:
        0 when every result is within its bound, otherwise 1. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="dcformer-selfcheck",
        description="Compares the fused kernels with the eager definition on this device, at small shapes of a "
        "model's kind: attention forward and backward, decoding, weight generators. Keeps the verdict for models whose "
        "attn_implementation is unset. Exit status 1 when a result is off, or when the check cannot run.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="PATH", help="model folder, or name on the Hub; only its config.json is read")
    which.add_argument("--preset", default="dcformer-2.8b", help="published size (default: %(default)s)")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], metavar="DTYPE",
        help=f"of the model: {', '.join(DTYPES)} (default: bfloat16)",
    )  # fmt: skip
    parser.add_argument("--autocast", action="store_true", help="a float32 model, run under autocast to each --dtype")
    parser.add_argument(
        "--beyond", nargs="+", choices=MARKS, default=[], metavar="MARK",
        help=f"check the kernels that follow once these marks were left: {', '.join(MARKS)} (docs/kernels.md)",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda:0, or cpu with TRITON_INTERPRET=1 (default: the one that is available)")
    options = parser.parse_args(arguments)

    from dcformer.selfcheck import run

    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
