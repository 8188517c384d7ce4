"""Attention implementations, by the names that ask for them: eager, chunked, and what packages of kernels register.

Models never import kernels: they ask this module what is registered.
Letters: B batch, T queries, S keys, N either, H query heads, Hkv key/value heads, D head dim, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# The torch implementation of `chunked_dcformer`, which every model can use.
CHUNKED = "dcformer_chunked"
# The kernels of this package. Models name it in messages also where Triton is missing.
TRITON = "dcformer_triton"
# What `config._attn_implementation` says where none is named: `default_implementation` decides for each call.
DEFAULT_ATTENTION = "dcformer_default"

_MAX_FLASH_WIDTH = 256  # channels of a head that flash attention takes
_LIBRARY_ATTENTION = ("sdpa", "flex_attention")  # of Transformers, beside flash attention: without composition


# What the linear layers of `DCFormerCompose` make of the hidden states: `dw1_proj` [B, N, G·C·K] and `gate_proj`
# [B, N, G·C·M], None for an absent layer; empty where they have not been asked yet.
FirstLayer = Sequence[torch.Tensor | None]


@dataclass
class LayerKernels:
    """Kernels in the place of a layer's own operations around attention, with the same numbers.

    The first three take the layer's `DCFormerCompose`, the others its `DCFormerAttention`. Hidden states: [B, N, E].

    Attributes:
        can_replace: (compose, hidden states) -> whether kernels may do what the module does: they read its parameters
            past the modules that hold them, so that hooks, adapters and the like of these would not be seen.
        generate: (hidden states, compose, first layer) -> what `DCFormerCompose.forward` returns; differentiable.
        generate_packed: (hidden states, compose, keys, values, first layer) -> the same without the key-wise weights,
            which it writes where `DCFormerCompose.pack` puts them, into keys and values [B, Hkv, N, D + channels]. Not
            differentiable.
        prepare: (attention, hidden states, parts of its fused product, (cos, sin)) -> all that a layer with a cache
            does before the cache: queries [B, H, N, D], keys and values [B, Hkv, N, D + channels], and composition
            weights as from `generate_packed`; or None where it cannot.
        step: (attention, hidden states, its fused product, (cos, sin), `lend_room` of its place in the cache, attention
            mask, window, whether it is causal or None) -> all that the layer does before the projection of its output,
            [B, N, H, D], and the `Room` that was lent, its rows filled and not counted; or None where it cannot.
    """

    can_replace: Callable[[Any, torch.Tensor], bool]
    generate: Callable[[torch.Tensor, Any, FirstLayer], Any]
    generate_packed: Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor, FirstLayer], Any]
    prepare: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None] = lambda *_: None
    step: Callable[..., tuple[torch.Tensor, Any] | None] = lambda *_, **__: None


@dataclass
class FusedAttention:
    """What a package of attention kernels registers.

    Attributes:
        unsupported_reason: (`DCFormerConfig`) -> why no model of it can use them, naming what to use instead; or None.
        is_default: (attention module, hidden states [B, T, E], query [B, H, T, D], key [B, Hkv, T, D], attention mask)
            -> whether they are used for these where no implementation is named. Asked by every layer in every forward
            pass, in graphs that are traced too.
        layer: its kernels for the rest of a layer; None where there are none, or what they need is not installed.
    """

    unsupported_reason: Callable[[Any], str | None]
    is_default: Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any], bool]
    layer: LayerKernels | None = None


# By the name of the attention implementation. Kernels register themselves; without any, the default is chunked.
FUSED_ATTENTION: dict[str, FusedAttention] = {}


def layer_kernels(implementation: str | None) -> LayerKernels | None:
    """The kernels that an attention implementation has for the rest of a layer, if it has some."""
    fused = None if implementation is None else FUSED_ATTENTION.get(implementation)
    return None if fused is None else fused.layer


def can_compose(implementation: str) -> bool:
    """Whether an attention implementation of this name is the package's, and takes what heads are composed with."""
    return implementation in ("eager", CHUNKED) or implementation in FUSED_ATTENTION


def check_implementation(name: str, config: Any, model: str, takes_library: bool) -> bool:
    """Refuses a named attention implementation that a model cannot use.

    Args:
        name: as it was asked for.
        config: the model's `DCFormerConfig`.
        model: name of its class.
        takes_library: whether Transformers' own functions serve it: nothing is composed.

    Returns:
        whether it is one of Transformers', whose requirements the library knows.

    Raises:
        ValueError: on a name that cannot compose heads, one whose requirements are missing here, or one whose limits
            the model exceeds.
    """
    known = tuple(dict.fromkeys(("eager", CHUNKED, TRITON, *FUSED_ATTENTION)))
    is_flash = "flash" in name
    if takes_library and (is_flash or name in _LIBRARY_ATTENTION):
        width = config.cached_head_dim("pre")
        if config.head_embeddings and is_flash and width > _MAX_FLASH_WIDTH:
            raise ValueError(
                f"attn_implementation={name!r} takes up to {_MAX_FLASH_WIDTH} channels, and with head_embeddings a "
                f"cached key has head_dim + rotary dim = {width}. Use 'sdpa', or leave it unset."
            )
        return True
    if name not in known and takes_library:
        raise ValueError(
            f'Specified `attn_implementation="{name}"` is not supported by {model}: use one of '
            f"{(*known, *_LIBRARY_ATTENTION)}, flash attention, or none."
        )
    if name not in known:
        why = " cannot compose attention heads, and" if config.composes else ""
        raise ValueError(
            f"attn_implementation={name!r}{why} is not supported by {model}: use one of {known}, or leave it unset for "
            "the best that runs where the model is."
        )
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        has_registered = name in FUSED_ATTENTION  # not so in a folder with its own code
        missing = "Triton is not installed" if has_registered else "its kernels are not loaded"
        raise ValueError(
            f"attn_implementation={name!r} is not available here: {missing}. "
            'pip install "dcformer[kernels]" and import dcformer, use one of the others, or leave it unset.'
        )
    fused = FUSED_ATTENTION.get(name)
    if fused is not None and (reason := fused.unsupported_reason(config)) is not None:
        raise ValueError(f"attn_implementation={name!r} cannot run this model: {reason}.")
    return False


def default_implementation(
    attention: nn.Module, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, attention_mask: Any
) -> str:
    """The attention implementation for these tensors, where none is named: chunked, unless kernels say otherwise.

    Args:
        attention: the layer's `DCFormerAttention`, or another with its `keeps_shapes`.
        hidden_states: [B, T, E].
        query: [B, H, T, D], on the device that decides.
        key: [B, Hkv, T, D].
        attention_mask: what the layer was given.
    """
    for name, fused in FUSED_ATTENTION.items():
        if attention.keeps_shapes and fused.is_default(attention, hidden_states, query, key, attention_mask):
            return name
    return CHUNKED


__all__ = [
    "CHUNKED",
    "DEFAULT_ATTENTION",
    "FUSED_ATTENTION",
    "TRITON",
    "FirstLayer",
    "FusedAttention",
    "LayerKernels",
    "can_compose",
    "check_implementation",
    "default_implementation",
    "layer_kernels",
]
