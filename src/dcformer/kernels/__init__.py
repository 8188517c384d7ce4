"""Composed attention in Triton: `composed_attention`, and "dcformer_triton" for Transformers.

Importing this package needs no Triton; using it does (`pip install "dcformer[kernels]"`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from ..attention_dcformer import chunked_mask

_PUBLIC = {"composed_attention": ".ops", "composed_decode": ".decode", "generate_weights": ".generator"}


def is_available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _triton_attention(*args: Any, **kwargs: Any) -> Any:
    """`ops.triton_attention`, imported when first used."""
    return import_module(".ops", __name__).triton_attention(*args, **kwargs)


def register() -> None:
    """Makes "dcformer_triton" an attention implementation of Transformers, if Triton is installed."""
    if is_available():
        AttentionInterface.register("dcformer_triton", _triton_attention)
        AttentionMaskInterface.register("dcformer_triton", chunked_mask)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if not is_available():
            raise ImportError(f'{__name__}.{name} needs triton, not installed here: pip install "dcformer[kernels]"')
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["composed_attention", "composed_decode", "generate_weights", "is_available", "register"]
