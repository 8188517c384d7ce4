"""The error of everything that converts checkpoints."""

from huggingface_hub.errors import StrictDataclassError

from ..errors import DCFormerError

# What a configuration class raises on values that do not describe a model; see `errors.raise_bug`.
CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)


def first_line(error: BaseException) -> str:
    """What an error says, without the traces that libraries append; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class ConversionError(DCFormerError):
    """A checkpoint, a configuration or a target that cannot be converted; the message says why and what to do."""


__all__ = ["CONFIG_ERRORS", "ConversionError", "first_line"]
