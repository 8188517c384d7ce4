"""Errors that the user can put right. The command lines show them in one line.

Whatever else is raised is a bug, of this package or of a library, and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from huggingface_hub.errors import StrictDataclassError

# What a configuration class raises on values that describe no model; see `raise_bug`.
CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)
# Libraries say with these, too, that they do not take a value. In our own code they are mistakes.
_AMBIGUOUS = (AttributeError, KeyError, RuntimeError, TypeError)
_OURS = {"dcformer", "dcformer_commands"}
_LIBRARIES = {"accelerate", "datasets", "huggingface_hub", "lm_eval", "peft", "torch", "transformers", "trl"}


class DCFormerError(ValueError):
    """Input that is refused; the message names the bad value, what was expected and what to do."""


class ConversionError(DCFormerError):
    """A checkpoint, a configuration or a target that cannot be converted; the message says why and what to do."""


class MissingExtraError(DCFormerError, ImportError):
    """Something that is asked for needs an extra of this package; the message says how to install it."""


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Makes sure that the libraries of an extra are installed, without importing them.

    Args:
        extra: its name in pyproject.toml.
        what: what needs it.
        modules: top-level modules that it brings.

    Raises:
        MissingExtraError: naming the modules that are missing, and the command that installs them.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        raise missing_extra(extra, what, ", ".join(missing))


def missing_extra(extra: str, what: str, missing: str) -> MissingExtraError:
    """The error for an extra that is not there; `missing` names what it would bring."""
    return MissingExtraError(f'{what} needs {missing}, which is not installed: pip install "dcformer[{extra}]"')


def first_line(error: BaseException) -> str:
    """What an error says, without the traces that libraries append; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def raise_bug(error: Exception, kinds: tuple[type[Exception], ...] = _AMBIGUOUS) -> None:
    """Raises an error again that no bad value explains, for a caller that shows the others in one line.

    Args:
        error: as caught around a call of a library with what the user gave. It is a bug when it is none of our refusals
            and this package, not a library, raised it or called what raised it.
        kinds: the errors to look at. A `ValueError` or `OSError` of a model file (`*_dcformer.py`) is never a bug:
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
    is_model_file = module.endswith("_dcformer") and not isinstance(error, _AMBIGUOUS)
    if module.partition(".")[0] not in _LIBRARIES and not is_model_file:
        raise error


@contextmanager
def refused(*kinds: type[Exception], what: str = "") -> Iterator[None]:
    """Around a single call of a library: what it raises on input that it does not take becomes a `DCFormerError`.

    Args:
        kinds: the errors that the library is known to raise then; see `raise_bug`.
        what: what was given, put before the library's words.

    Raises:
        DCFormerError: in one line, with the library's error as its cause.
    """
    try:
        yield
    except DCFormerError:
        raise
    except kinds as error:
        raise_bug(error)
        raise DCFormerError(f"{what}{': ' * bool(what)}{' '.join(str(error).split())}") from error


__all__ = [
    "CONFIG_ERRORS",
    "ConversionError",
    "DCFormerError",
    "MissingExtraError",
    "first_line",
    "missing_extra",
    "raise_bug",
    "refused",
    "require_extra",
]
