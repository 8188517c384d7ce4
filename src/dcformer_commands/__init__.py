"""The command lines. Each reads its arguments before it imports `dcformer`, and with it PyTorch.

This package is separate because importing `dcformer` takes seconds: `--help` and wrong usage are answered at once.
"""

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")


def ends_quietly(main: Callable[_P, int]) -> Callable[_P, int]:
    """A command that ends without a traceback on Ctrl-C, while it imports too, and where nobody reads what it prints.

    Its status is then that of a program that the signal ends, SIGINT or SIGPIPE.
    """

    @functools.wraps(main)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # here, where its failure is caught
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:
            output = select.poll()
            output.register(sys.stdout.fileno(), 0)
            if not output.poll(0):  # somebody reads it: the error is another pipe's
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
            return 141

    return run
