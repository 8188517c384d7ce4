"""Composed attention in Triton: `composed_attention`, and "dcformer_triton" for Transformers.

Importing this package needs no Triton; using it does (`pip install "dcformer[kernels]"`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from ..compose_dcformer import Generated
from ..configuration_dcformer import DCFormerConfig
from ..heads_dcformer import MAP_FIELDS
from ..implementations_dcformer import FUSED_ATTENTION, TRITON, FusedAttention, LayerKernels
from ..masks_dcformer import chunked_mask
from .limits import unsupported_reason

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


def _prepare(*args: Any) -> Any:
    from .prepare import prepare

    return prepare(*args)


def _decode_step(*args: Any, **kwargs: Any) -> Any:
    from .step import decode_step

    return decode_step(*args, **kwargs)


def _is_default(*args: Any) -> bool:
    from .selfcheck import is_default

    return is_default(*args)


def _unsupported_model(config: DCFormerConfig) -> str | None:
    """Why no model of a configuration can use the kernels, on any device and in any dtype; None where it can."""
    rank = config.compose_rank if config.compose_generators and config.compose_projection else 0
    heads = config.num_attention_heads // config.compose_groups
    return unsupported_reason(
        head_dim=config.head_dim,
        heads=heads,
        rank=rank,
        activation=config.compose_act,
        # fields that the configuration of a DCViT does not have
        head_maps=any(getattr(config, name, None) is not None for name in MAP_FIELDS),
        head_embeddings=getattr(config, "head_embeddings", None) is not None,
    )


def register() -> None:
    """Makes "dcformer_triton" an attention implementation of Transformers, if Triton is installed.

    It is in `FUSED_ATTENTION` without Triton, too: models that name it then say what is missing, and those that name
    none, which ask `is_default` in each call, are told why not.
    """
    layer = None
    if is_available():
        AttentionInterface.register(TRITON, _triton_attention)
        AttentionMaskInterface.register(TRITON, chunked_mask)
        layer = LayerKernels(
            can_replace=_can_replace,
            generate=_generate_weights,
            generate_packed=_generate_packed,
            prepare=_prepare,
            step=_decode_step,
        )
    FUSED_ATTENTION[TRITON] = FusedAttention(unsupported_reason=_unsupported_model, is_default=_is_default, layer=layer)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if not is_available():
            raise ImportError(f'{__name__}.{name} needs triton, not installed here: pip install "dcformer[kernels]"')
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "composed_attention",
    "composed_decode",
    "generate_weights",
    "is_available",
    "register",
    "unsupported_reason",
]
