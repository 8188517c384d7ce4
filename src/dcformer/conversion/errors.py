"""The error of everything that converts checkpoints."""

from huggingface_hub.errors import StrictDataclassError

# What a configuration class raises on values that do not describe a model.
CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)


class ConversionError(ValueError):
    """A checkpoint, a configuration or a target that cannot be converted; the message says why and what to do."""


__all__ = ["CONFIG_ERRORS", "ConversionError"]
