"""Composed attention by its definition, "eager": every map is materialized, and can be traced.

Letters: B batch, T queries, S keys, H query heads, Hkv key/value heads, D head dim, Dv that of values.

What all implementations compute (paper section 3.1), composition inside groups of heads:

    scores  = q kᵀ · scaling                  [B, H, T, S], from inputs in the model's dtype, kept in float32
    weights = softmax(mask(compose(scores)))  float32; a row with nothing to see is all zeros
    output  = compose(weights) v              the composed weights are rounded to the model's dtype first
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .compose_dcformer import ComposeWeights, accumulation_dtype, autocast_dtype, compose, without_autocast
from .heads_dcformer import HeadMap, matmul_shared
from .implementations_dcformer import can_compose
from .masks_dcformer import causal_rows, visible_and_bias

LOAD_EAGER = "Load the model with attn_implementation='eager', or call model.set_attn_implementation('eager')."


def why_no_trace(implementation: str) -> str:
    """Why no `ComposeTrace` is filled by an attention implementation of this name."""
    return (
        f"compose_trace cannot be filled: attn_implementation={implementation!r} never holds the attention maps. "
        f"{LOAD_EAGER}"
    )


def refuse_without_composition(implementation: str, pre: ComposeWeights | None, post: ComposeWeights | None) -> None:
    """Refuses an attention function that would drop what heads are composed with: one of the library.

    The name may have reached the configuration around the model: `config._attn_implementation = "sdpa"`.

    Raises:
        ValueError: naming the implementation, if there are composition weights.
    """
    if (pre is not None or post is not None) and not can_compose(implementation):
        raise ValueError(
            f"attn_implementation={implementation!r}, which the configuration names, cannot compose attention heads: "
            "call model.set_attn_implementation(None) for the default, or name one that can, such as 'eager'."
        )


def no_transform(implementation: str, what: str) -> NotImplementedError:
    """The error of an implementation that does not support a transform."""
    return NotImplementedError(
        f"attn_implementation={implementation!r} does not support {what}: use attn_implementation='eager', or call "
        "model.set_attn_implementation('eager'); in models that `convert_attention` has made it is 'dcmha'."
    )


def active_transform(*tensors: torch.Tensor | None) -> str | None:
    """Name of an active transform that custom operators do not support (`torch.func`, forward mode), or None."""
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func (grad, vmap, jvp, ...)"
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return None
    unpack = torch.autograd.forward_ad.unpack_dual
    is_dual = any(t is not None and unpack(t).tangent is not None for t in tensors)
    return "forward-mode differentiation" if is_dual else None


def refuse_transforms(implementation: str, *tensors: torch.Tensor | None) -> None:
    """Raises a clear error where PyTorch would raise an obscure one, or leave a derivative out.

    Raises:
        NotImplementedError: naming the implementation, and the one that can.
    """
    if what := active_transform(*tensors):
        raise no_transform(implementation, what)


def refuse_batched(implementation: str, grad_output: torch.Tensor) -> None:
    """Refuses batched gradients (`is_grads_batched`), which only the backward pass can detect.

    Raises:
        NotImplementedError: as `refuse_transforms`.
    """
    if torch._C._functorch.is_legacy_batchedtensor(grad_output):
        raise no_transform(implementation, "batched gradients (is_grads_batched, vectorize)")


@dataclass
class LayerTrace:
    """Maps of one layer, each [B, H, T, S] in float32: scores and weights before and after composition."""

    scores: torch.Tensor
    composed_scores: torch.Tensor
    weights: torch.Tensor
    composed_weights: torch.Tensor


class ComposeTrace:
    """Collects the maps of every layer with `attn_implementation="eager"`.

    Example: `trace = ComposeTrace(); model(**inputs, compose_trace=trace); trace.layers[3].composed_scores`.

    Attributes:
        layers: one `LayerTrace` per layer, in the order in which the layers ran. Several forward passes add theirs one
            after another: in `generate`, layer i of step n is `layers[n * model.config.num_hidden_layers + i]`, where
            step 0 is the prompt; with `prefill_chunk_size` each chunk of the prompt is a step.
    """

    # No dataclass: FSDP replaces those, where it casts what a layer is called with, by copies that are lost.
    def __init__(self, layers: list[LayerTrace] | None = None):
        self.layers: list[LayerTrace] = [] if layers is None else layers


def runs_twice(layers: Iterable[nn.Module], training: bool) -> bool:
    """Whether a backward pass is to compute layers again: by the library's checkpointing, in training, or because they
    are in torch's `CheckpointWrapper`, as accelerate makes them."""
    return torch.is_grad_enabled() and any(
        hasattr(layer, "_checkpoint_wrapped_module") or (training and getattr(layer, "gradient_checkpointing", False))
        for layer in layers
    )


def check_trace(trace: Any, layers: Iterable[nn.Module], training: bool) -> None:
    """Refuses what collects no maps, and layers that a backward pass runs, and records, a second time.

    Raises:
        ValueError: naming the type, or gradient checkpointing.
    """
    if trace is None:
        return
    if not isinstance(trace, ComposeTrace):
        raise ValueError(f"compose_trace is of type {type(trace).__name__}: expected a ComposeTrace.")
    if runs_twice(layers, training):
        raise ValueError(
            "compose_trace with gradient checkpointing would hold every layer twice, as the backward pass runs layers "
            "again: trace under torch.no_grad(), or switch gradient checkpointing off."
        )


def _masked_softmax(
    scores: torch.Tensor, visible: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax over the visible keys of each row; zeros, with finite gradients, for rows that see no key."""
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if visible is None:
        return scores.softmax(dim=-1)
    empty = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    return scores.softmax(dim=-1).masked_fill(empty, 0.0)


def check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    key_heads: HeadMap | None = None,
    value_heads: HeadMap | None = None,
) -> None:
    """Raises a `ValueError` on shapes that do not fit; the arguments are those of `eager_attention`."""
    fits = query.dim() == key.dim() == value.dim() == 4 and key.shape[1] > 0
    if fits and key_heads is not None and value_heads is not None:
        fits = (key.shape[1], value.shape[1]) == (key_heads.count, value_heads.count)
    elif fits:
        fits = query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    if not fits or not (
        query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[2] == value.shape[2]
        and query.shape[3] == key.shape[3]
    ):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together: "
            "expected [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, Dv] with H a multiple of Hkv, or, with head maps, "
            "the numbers of heads that they read."
        )
    if attention_mask is not None:
        expected = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        shape = tuple(attention_mask.shape)
        if (
            len(shape) != 4
            or any(n not in (1, m) for n, m in zip(shape[:2], expected[:2], strict=True))
            or (shape[2:] != expected[2:])
        ):
            raise ValueError(
                f"attention mask of shape {shape} does not fit {expected[0]} sequences, {expected[1]} heads, "
                f"{expected[2]} queries and {expected[3]} keys: expected [B or 1, 1 or H, T, S]."
            )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    mix: Callable[[torch.Tensor, ComposeWeights | None], torch.Tensor] = compose,
    key_heads: HeadMap | None = None,
) -> LayerTrace:
    """The definition of composed attention up to the composed weights; see the head of this file.

    Args:
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        visible: which keys a query sees, bool [B or 1, 1 or H, T, S]; None: all.
        bias: what is added to composed scores, likewise; None: nothing.
        scaling: factor of the scores.
        pre, post: what to compose scores and weights with; None for no composition.
        mix: (map [B, H, T, S], weights) -> the composed map; `compose`, or the same in other operations.
        key_heads: which key head each query head reads; None: consecutive query heads share one.

    Returns:
        the four maps, each [B, H, T, S] in float32 (float64 for float64).
    """
    compute = accumulation_dtype(query.dtype)
    scores = matmul_shared(query.to(compute), key.to(compute).transpose(-1, -2), key_heads) * scaling  # [B, H, T, S]
    composed_scores = mix(scores, pre)
    weights = _masked_softmax(composed_scores, visible, bias)
    return LayerTrace(scores, composed_scores, weights, mix(weights, post))


def sum_values(
    weights: torch.Tensor,
    value: torch.Tensor,
    value_heads: HeadMap | None = None,
    value_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of values, weighted: [B, H, T, S], [B, Hkv, S, Dv] -> [B, T, H, Dv]. Arguments as for `eager_attention`."""
    output = matmul_shared(weights, value, value_heads)  # [B, H, T, Dv]
    if value_bias is not None:
        output = output + weights.sum(-1, keepdim=True) * value_bias[:, None].to(output.dtype)
    return output.transpose(1, 2).contiguous()


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    compose_trace: ComposeTrace | None = None,
    key_heads: HeadMap | None = None,
    value_heads: HeadMap | None = None,
    value_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Composed attention by its definition: every map is materialized. The yardstick for all other implementations.

    Args:
        module: the attention module; `training` is read, and `is_causal`.
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        attention_mask: [B or 1, 1 or H, T, S], boolean (True: visible) or additive; used as it is. None: causal, if
            `is_causal`, with the last query at the last key, inside `sliding_window`; else all keys.
        scaling: factor of the scores, usually D ** -0.5.
        dropout: probability of dropping a composed weight (in training).
        pre, post: what to compose scores and weights with; None for no composition.
        sliding_window: keys a query sees, its own included; read when `attention_mask` is None.
        is_causal: read then too; `module.is_causal` when not given.
        compose_trace: collects this layer's maps.
        key_heads, value_heads: which of the keys' and values' heads each query head reads, whose numbers may then
            differ; None: consecutive query heads share one.
        value_bias: [H, Dv] or None: what each query head adds to all values that it reads.

    Returns:
        output [B, T, H, Dv] and composed weights [B, H, T, S], both in the dtype of `query`.

    Raises:
        ValueError: on shapes that do not fit.
    """
    check_shapes(query, key, value, attention_mask, key_heads, value_heads)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    visible = bias = None
    if attention_mask is not None:
        visible, bias = visible_and_bias(attention_mask)
    elif is_causal:
        visible = causal_rows(query.shape[2], key.shape[2], sliding_window, query.device)[:, None]
    maps = attend(query, key, visible, bias, scaling, pre, post, key_heads=key_heads)
    if compose_trace is not None:
        compose_trace.layers.append(maps)
    weights = maps.composed_weights.to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return sum_values(weights, value, value_heads, value_bias), weights


def attend_without_autocast(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls an attention function, the package's or the library's, with autocast switched off.

    Where it is on, queries, keys and values are cast to its dtype before, as its products would cast them. The function
    is free of it, as autocast would also make scores in its dtype, which are float32.

    Args:
        function: one whose first arguments are those of `eager_attention`.
        module: the attention module.
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        arguments, options: the function's others.

    Returns:
        what the function returns.
    """
    device = query.device.type
    mixed_precision = autocast_dtype(device)
    if mixed_precision is not None:
        query, key, value = (states.to(mixed_precision) for states in (query, key, value))
    with without_autocast(device):
        return function(module, query, key, value, *arguments, **options)


__all__ = [
    "LOAD_EAGER",
    "ComposeTrace",
    "LayerTrace",
    "attend",
    "attend_without_autocast",
    "check_shapes",
    "eager_attention",
    "refuse_without_composition",
    "runs_twice",
    "sum_values",
    "why_no_trace",
]
