"""The command line ``dcformer-eval``: that of lm-eval, parsed without importing PyTorch."""

import sys
from collections.abc import Sequence
from itertools import pairwise

from . import ends_quietly


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, with all options of ``lm_eval``.

    Args:
        arguments: the arguments; the process's when not given.

    Returns:
        0, or 1 on an error that is found before items are evaluated: it is printed as one line. Wrong usage exits
        with 2.

    Raises:
        Exception: whatever goes wrong once items are evaluated, and bugs.
    """
    before = sys.argv
    if arguments is not None:
        sys.argv = ["dcformer-eval", *arguments]  # lm-eval reads it from there
    try:
        try:
            from lm_eval.__main__ import HarnessCLI, setup_logging
        except ModuleNotFoundError as error:
            print(
                f'error: dcformer-eval needs lm-eval (no module {error.name!r}): pip install "dcformer[eval]"',
                file=sys.stderr,
            )
            return 1
        setup_logging()
        parser = HarnessCLI()
        try:
            args = parser.parse_args()
        except ValueError as error:  # lm-eval's, of options that hold JSON, whose name it leaves out
            words = [part for word in sys.argv for part in (word.split("=", 1) if word[:2] == "--" else [word])]
            named = (f"argument {option}: " for option, value in pairwise(words) if f": {value}. " in str(error))
            print(f"error: {next(named, '')}{error}", file=sys.stderr)
            return 2
        if args.command is None:  # it prints its help
            parser.execute(args)
            return 0

        from dcformer.evaluation.cli import run

        return run(parser, args)
    finally:
        sys.argv = before


if __name__ == "__main__":
    raise SystemExit(main())
