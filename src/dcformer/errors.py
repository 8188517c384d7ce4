"""Errors that the user can correct. Command lines print them in one line.

Anything else that is raised is a bug, in this package or in a library, and keeps its traceback.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec

from huggingface_hub.errors import StrictDataclassError

# What a configuration class raises on invalid values; see `raise_bug`.
CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)
# Libraries raise these on invalid values as well. In our own code they are mistakes.
_AMBIGUOUS = (AttributeError, ImportError, KeyError, RuntimeError, TypeError)
_OURS = {"dcformer", "dcformer_commands"}
_LIBRARIES = {"accelerate", "datasets", "huggingface_hub", "lm_eval", "peft", "torch", "transformers", "trl"}
_LIBRARIES |= {"fastapi", "pydantic", "starlette", "uvicorn"}  # the server's
_P = ParamSpec("_P")


class DCFormerError(ValueError):
    """Refused input; the message names the bad value, what was expected and what to do."""


class ConversionError(DCFormerError):
    """A checkpoint, a configuration or a target that cannot be converted; the message says why and what to do."""


class MissingExtraError(DCFormerError, ImportError):
    """The request needs an extra of this package; the message says how to install it."""


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Checks that the libraries of an extra are installed, without importing them.

    Args:
        extra: its name in pyproject.toml.
        what: what needs it.
        modules: top-level modules that the extra provides.

    Raises:
        MissingExtraError: naming the modules that are missing, and the command that installs them.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        raise missing_extra(extra, what, ", ".join(missing))


def missing_extra(extra: str, what: str, missing: str) -> MissingExtraError:
    """The error for a missing extra; `missing` names the absent modules."""
    are = "are" if ", " in missing else "is"
    return MissingExtraError(f'{what} needs {missing}, which {are} not installed: pip install "dcformer[{extra}]"')


def first_line(error: BaseException) -> str:
    """The first line of an error's message, as libraries append traces; its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def loading_reason(name: str | os.PathLike, error: Exception) -> str:
    """What `from_pretrained` of `name` raised, in one line. Libraries tell of the Hub alone, this of folders too."""
    reason = " ".join(str(error).split())
    if isinstance(error, OSError) and not os.path.exists(name):
        return f"no such file or folder, and not found on the Hub by that name either: {reason}"
    return reason


def raise_bug(error: Exception, kinds: tuple[type[Exception], ...] = _AMBIGUOUS) -> None:
    """Re-raises an error that bad input does not explain; the caller then reports the others in one line.

    Args:
        error: caught around a call of a library with the user's input. It counts as a bug if it is not a
            `DCFormerError` and the last frame of this package or a known library is in this package.
        kinds: the errors to consider. A `ValueError` or `OSError` from a model file (`*_dcformer.py`) is never a bug:
            those files refuse values as models of Transformers do.
    """
    if not isinstance(error, kinds) or isinstance(error, DCFormerError) or "ignore_mismatched_sizes" in str(error):
        return
    module, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in _OURS | _LIBRARIES:
            module = name
        traceback = traceback.tb_next
    is_refusal = module.endswith("_dcformer") and isinstance(error, OSError | ValueError)
    if module.partition(".")[0] not in _LIBRARIES and not is_refusal:
        raise error


@contextmanager
def refused(*kinds: type[Exception], what: str = "", loads: str | os.PathLike | None = None) -> Iterator[None]:
    """Around a single call of a library: turns what it raises on invalid input into a `DCFormerError`.

    Args:
        kinds: the errors that the library is known to raise; see `raise_bug`.
        what: the input, put before the library's message.
        loads: the folder or name that `from_pretrained` loads there; see `loading_reason`.

    Raises:
        DCFormerError: in one line, with the library's error as its cause.
    """
    try:
        yield
    except DCFormerError:
        raise
    except kinds as error:
        raise_bug(error)
        reason = " ".join(str(error).split()) if loads is None else loading_reason(loads, error)
        raise DCFormerError(f"{what}{': ' * bool(what)}{reason}") from error


def is_of_package(kind: type) -> bool:
    """Whether a class is one of this package, and not one that others derive from it."""
    return kind.__module__.partition(".")[0] in _OURS


def reports(command: Callable[_P, int]) -> Callable[_P, int]:
    """A command that prints an error that the user can correct, `error: ...`, and returns 1 then."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except DCFormerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run


__all__ = [
    "CONFIG_ERRORS",
    "ConversionError",
    "DCFormerError",
    "MissingExtraError",
    "first_line",
    "is_of_package",
    "loading_reason",
    "missing_extra",
    "raise_bug",
    "refused",
    "reports",
    "require_extra",
]
