"""Composed attention in Triton: `composed_attention`, and "dcformer_triton" for Transformers.

Importing this package needs no Triton; using it does (`pip install "dcformer[kernels]"`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from ..attention_dcformer import chunked_mask
from ..compose_dcformer import FUSED_GENERATORS, FusedGenerators, Generated

_PUBLIC = {"composed_attention": ".ops", "composed_decode": ".decode", "generate_weights": ".generator"}


def is_available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


# What is registered imports Triton when first called, by statements that torch.compile can trace.


def _triton_attention(*args: Any, **kwargs: Any) -> Any:
    from .ops import triton_attention

    return triton_attention(*args, **kwargs)


def _can_replace(*args: Any) -> bool:
    from .generator import can_replace

    return can_replace(*args)


def _generate_weights(*args: Any) -> Generated:
    from .generator import generate_weights

    return generate_weights(*args)


def _generate_packed(*args: Any) -> Generated:
    from .generator import generate_packed

    return generate_packed(*args)


def register() -> None:
    """Makes "dcformer_triton" an attention implementation of Transformers, if Triton is installed."""
    if is_available():
        AttentionInterface.register("dcformer_triton", _triton_attention)
        AttentionMaskInterface.register("dcformer_triton", chunked_mask)
        FUSED_GENERATORS["dcformer_triton"] = FusedGenerators(_can_replace, _generate_weights, _generate_packed)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if not is_available():
            raise ImportError(f'{__name__}.{name} needs triton, not installed here: pip install "dcformer[kernels]"')
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["composed_attention", "composed_decode", "generate_weights", "is_available", "register"]
