"""Composed attention as PyTorch operators, and the implementation "dcformer_triton" for Transformers.

`composed_attention` is the public function. Beneath it are two custom operators, `dcformer::composed_attention` and its
backward, with fake kernels and registered autograd, so that `torch.compile`, CUDA graphs, FSDP and activation
checkpointing see one opaque operation. Packing of the composition weights is ordinary torch, outside of them.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention_dcformer import check_shapes
from ..chunked_dcformer import flatten_weights
from ..compose_dcformer import ComposeWeights, SideWeights
from ..masks_dcformer import QueryBlockMask, causal_rows, intervals, visible_and_bias
from .decode import composed_decode
from .generator import GeneratedSide
from .launch import FAR, GATE, KEY, QUERY, STATIC, Layout, Problem, Visibility
from .limits import MAX_QUERIES, require_supported, unsupported_reason

logger = logging.get_logger(__name__)


def _problem(tensors: list[torch.Tensor | None], bounds: torch.Tensor, plan: list[int], scale: float) -> Problem:
    """What the operators' arguments stand for; those of `_forward`, its first six as a list."""
    query, key, value, query_weights, key_weights, statics = tensors
    pre, post, groups, rank, low, high, chunk_bytes = plan
    flags, given = (pre, post), iter(() if statics is None else statics.unbind())
    first, last = bounds.unbind()
    pre_static, post_static = (next(given) if flag & STATIC else None for flag in flags)
    assert query is not None and key is not None and value is not None
    return Problem(
        query, key, value, query_weights, key_weights, pre_static, post_static, Visibility(first, last, low, high),
        Layout(pre, post, groups, rank), scale, None if chunk_bytes < 0 else chunk_bytes,
    )  # fmt: skip


@torch.library.custom_op("dcformer::composed_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weights: torch.Tensor | None,
    key_weights: torch.Tensor | None,
    statics: torch.Tensor | None,
    bounds: torch.Tensor,
    plan: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and log-sum-exp in base 2.

    Args:
        query, key, value, query_weights, key_weights, scale: as for `Problem`.
        statics: static projections of the stages that have one, [1 or 2, G, M, M].
        bounds: the first key that each query sees, and the one after the last, int32 [2, B or 1, T].
        plan: flags of both stages, G, R, low and high of `Visibility`, and chunk_bytes, -1 for None.
    """
    tensors = [query, key, value, query_weights, key_weights, statics]
    return _problem(tensors, bounds, plan, scale).forward()


@_forward.register_fake
def _(query, key, value, *args):
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("dcformer::composed_attention_backward", mutates_args=())
def _backward(
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    tensors: list[torch.Tensor | None],
    bounds: torch.Tensor,
    plan: list[int],
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of those of the six tensors that there are, in their dtypes."""
    grads = _problem(tensors, bounds, plan, scale).backward(grad_out, lse)
    statics = [grad for grad in (grads.pre_static, grads.post_static) if grad is not None]
    found = [grads.query, grads.key, grads.value, grads.query_weights, grads.key_weights]
    found.append(torch.stack(statics) if statics else None)
    return [grad.to(like.dtype) for grad, like in zip(found, tensors, strict=True) if grad is not None is not like]


@_backward.register_fake
def _(grad_out, lse, tensors, *args):
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors if t is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.plan = inputs[7:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *inputs[:7])


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple:
    lse, *tensors, bounds = ctx.saved_tensors
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    grads = iter(_backward(grad_out, lse, tensors, bounds, *ctx.plan))
    return (*(None if t is None else next(grads) for t in tensors), None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _packed(*sides: SideWeights | None) -> torch.Tensor | None:
    """A side's weights of both stages, each down, up and gate, as [B, H, channels, N] contiguous."""
    given = [side for side in sides if side is not None]
    weights = [w if w.dim() == 4 else w[..., None] for side in given for w in side.tensors()]
    whole = given[0].packed if given and isinstance(given[0], GeneratedSide) else None
    if whole is not None and whole.shape[2] == sum(w.shape[3] for w in weights):  # nothing is missing from it
        is_whole = [isinstance(s, GeneratedSide) and s.packed is whole and s.is_as_made(i) for i, s in enumerate(given)]
        if all(is_whole):
            return whole
    return torch.cat(weights, dim=-1).transpose(2, 3).contiguous() if weights else None


def _flags(stage: ComposeWeights) -> int:
    """A stage as the kernels' flags."""
    sides = [side for side in (stage.query, stage.key) if side is not None]
    flags = QUERY * (stage.query is not None) + KEY * (stage.key is not None) + STATIC * (stage.static is not None)
    return flags + GATE * any(side.gate is not None for side in sides)


def composed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    causal_offset: int | None = None,
    sliding_window: int | None = None,
    key_start: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    visible: tuple[torch.Tensor, torch.Tensor] | None = None,
    return_lse: bool = False,
    chunk_bytes: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Composed attention (paper section 3) with fused kernels: softmax(compose(q kᵀ)), composed again, times v.

    Memory beyond inputs and outputs is linear in T and S: log-sum-exps, and the maps that cross heads for a chunk of
    queries. Differentiable in query, key, value and all weights; the gradients are deterministic.

    Args:
        query: [B, H, T, D]; float32, bfloat16 or float16.
        key: [B, Hkv, S, D], H a multiple of Hkv.
        value: [B, Hkv, S, DV].
        pre, post: what scores and weights are composed with; None for no composition.
        scale: factor of the scores; D ** -0.5 when not given.
        causal: query t sees keys up to t + causal_offset.
        causal_offset: S - T when not given: the last query is at the last key.
        sliding_window: keys that a query sees, its own included; needs `causal`.
        key_start, key_end: int [B]: keys before (left padding), and from (right padding) these are not seen.
        cu_seqlens: int [documents + 1]: bounds of packed documents, which do not see each other; tokens outside all see
            nothing. Needs B = 1, T = S.
        visible: (first, last), int [B or 1, T]: query t sees keys first <= s < last at most, besides the above.
        return_lse: return the log-sum-exp of the composed scores too; no gradient flows through it.
        chunk_bytes: bound of the memory that the maps and tiles of a chunk of queries take, above what 64 queries of
            one sequence need; None for 256 MiB, or 1/64 of the device's memory where that is more.

    Returns:
        output [B, H, T, DV] in the dtype of `query`, zeros for queries that see nothing; with `return_lse` also
        [B, H, T] in float32, +inf for those.

    Raises:
        ValueError: on shapes or options that do not fit together, naming them, and beyond `unsupported_reason`.
    """
    _check(query, key, value, pre, post, causal, sliding_window, cu_seqlens)
    _check_bounds(query.shape[0], query.shape[2], key_start, key_end, visible)
    (_, _, length, dim), key_length = query.shape, key.shape[2]
    offset = key_length - length if causal_offset is None else causal_offset
    position = torch.arange(length, device=query.device, dtype=torch.int32)[None]
    first, last = torch.zeros_like(position), torch.full_like(position, key_length)
    low, high = -FAR, FAR
    if causal:
        last, high = torch.minimum(last, position + (offset + 1)), offset
    if sliding_window is not None:
        first, low = (position + (offset - sliding_window + 1)).clamp(min=0), offset - sliding_window + 1
    for bound, start in ((key_start, True), (key_end, False)):
        if bound is not None:
            bound = bound.to(device=query.device, dtype=torch.int32)[:, None]  # [B, 1]
            first, last = (torch.maximum(first, bound), last) if start else (first, torch.minimum(last, bound))
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=query.device, dtype=torch.int32)
        document = torch.searchsorted(bounds, position[0], right=True) - 1  # [T]
        is_inside = (document >= 0) & (document < len(bounds) - 1)
        document = document.clamp(0, len(bounds) - 2)
        first = torch.maximum(first, bounds[document][None])
        last = torch.minimum(last, torch.where(is_inside, bounds[document + 1], 0)[None])
    if visible is not None:
        first = torch.maximum(first, visible[0].to(device=query.device, dtype=torch.int32))
        last = torch.minimum(last, visible[1].to(device=query.device, dtype=torch.int32))
    bounds = torch.stack(torch.broadcast_tensors(first, last))

    pre, post = pre or ComposeWeights(), post or ComposeWeights()
    rank = next((s.down.shape[-1] for w in (pre, post) for s in (w.query, w.key) if s and s.down is not None), 0)
    groups = max(pre.groups, post.groups)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    statics = [w.static for w in (pre, post) if w.static is not None]
    out, lse = _forward(
        query, key, value, _packed(pre.query, post.query), _packed(pre.key, post.key),
        torch.stack(statics) if statics else None, bounds,
        [_flags(pre), _flags(post), groups, rank, low, high, -1 if chunk_bytes is None else chunk_bytes],
        dim**-0.5 if scale is None else scale,
    )  # fmt: skip
    return (out, lse * math.log(2)) if return_lse else out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    causal: bool,
    sliding_window: int | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError("query, key and value must be [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, DV].")
    (batch, heads, length, dim), (kv_batch, kv_heads, key_length, key_dim) = query.shape, key.shape
    if kv_batch != batch or heads % kv_heads or key_dim != dim or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together: "
            "expected [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, DV] with H a multiple of Hkv."
        )
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: expected one dtype.")
    require_supported(device=query.device, dtype=query.dtype, head_dim=max(dim, value.shape[3]))
    if sliding_window is not None and (not causal or sliding_window < 1):
        raise ValueError(f"sliding_window={sliding_window} must be at least 1, and needs causal=True.")
    if cu_seqlens is not None and (batch != 1 or length != key_length):
        raise ValueError(f"cu_seqlens needs one packed row and as many keys as queries, got B={batch}, T={length}.")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) < 2):
        raise ValueError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)}: expected the bounds of documents, (documents + 1,)."
        )
    ranks, parts = set(), {}
    for name, stage in (("pre", pre), ("post", post)):
        for kind, side, count in (("query", stage and stage.query, length), ("key", stage and stage.key, key_length)):
            if side:
                parts[f"{name}.{kind}"] = [getattr(side, part) is not None for part in ("down", "up", "gate")]
            for part in ("down", "up", "gate"):
                weight = getattr(side, part) if side else None
                if weight is None:
                    continue
                if weight.shape[:3] != (batch, heads, count):
                    raise ValueError(
                        f"{name}.{kind}.{part} is {tuple(weight.shape)}, expected {(batch, heads, count)}"
                        f"{' and R' if part != 'gate' else ''}."
                    )
                ranks |= {weight.shape[3]} if part != "gate" else set()
        if stage is not None and heads % stage.groups:
            raise ValueError(f"{name}.groups={stage.groups} must divide the number of heads, {heads}.")
        if stage is not None and stage.static is not None:
            expected = (stage.groups, heads // stage.groups, heads // stage.groups)
            if stage.static.shape != expected:
                raise ValueError(f"{name}.static is {tuple(stage.static.shape)}, expected {expected}.")
    if pre is not None and post is not None and pre.groups != post.groups:
        raise ValueError(f"pre and post have different groups, {pre.groups} and {post.groups}.")
    if any(there != next(iter(parts.values())) or there[0] != there[1] for there in parts.values()):
        raise ValueError(f"{', '.join(parts)} must have the same parts: down and up, a gate, or all three.")
    if len(ranks) > 1:
        raise ValueError(f"ranks {sorted(ranks)}: expected one.")
    groups = max(stage.groups if stage else 1 for stage in (pre, post))
    require_supported(rank=max(ranks, default=0), heads=heads // groups)


def _check_bounds(
    batch: int,
    length: int,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    visible: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    for name, bound in (("key_start", key_start), ("key_end", key_end)):
        if bound is not None and bound.shape != (batch,):
            raise ValueError(f"{name} is {tuple(bound.shape)}: expected one bound per sequence, ({batch},).")
    for bound in visible or ():
        if bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] != length:
            raise ValueError(
                f"visible has a tensor of {tuple(bound.shape)}: expected ({batch} or 1, {length}) for both."
            )


# --- Transformers -----------------------------------------------------------------------------------------------------


def _require(condition: torch.Tensor, otherwise: str) -> None:
    """Raises ValueError unless a boolean holds: otherwise a mask has that. Where it cannot be read (graphs), asserts
    when the graph runs."""
    if torch.compiler.is_compiling() or (condition.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(condition, unsupported_reason(mask=otherwise) or "")
    elif not bool(condition):
        require_supported(mask=otherwise)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask [B or 1, 1, t, S], boolean or additive, as a boolean one: True where a query sees a key.

    Raises:
        ValueError: when the mask has heads, or adds something else than zero to what is seen.
    """
    if mask.shape[1] != 1:
        require_supported(mask="per head")
    visible, bias = visible_and_bias(mask)
    if bias is not None:
        _require(((bias == 0) | ~visible).all(), "bias")
    return visible


def _intervals(mask: torch.Tensor | QueryBlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [B or 1, 1, T, S] as an interval of keys per query: (first, last), int32 [B or 1, T].

    Raises:
        ValueError: when the keys that some query sees are no interval; as for `_visible`.
    """
    if isinstance(mask, QueryBlockMask):  # found once for all layers that share it, where values can be looked at
        tensors = mask.tensors()
        if len(tensors) == 2:
            return tensors[0], tensors[1]
        mask = tensors[0]
    first, last, complete = intervals(_visible(mask)[:, 0])
    _require(complete, "gaps")
    return first, last


def triton_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | QueryBlockMask | None,
    scaling: float,
    dropout: float = 0.0,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    compose_trace: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Composed attention by fused kernels, as Transformers calls it: those of decoding for a few queries.

    Arguments as for `eager_attention`; the mask may also be a `QueryBlockMask`. Of an additive mask it is read which
    keys are visible, nothing is added.

    Returns:
        output [B, T, H, D], and None: there are no weights to return.

    Raises:
        ValueError: for what `unsupported_reason` names: it never falls back to another implementation. Where a graph is
            traced or captured the contents of masks are asserted when it runs.
    """
    dropout = dropout if module.training else 0.0
    require_supported(trace=compose_trace is not None)
    require_supported(device=query.device, dtype=query.dtype, dropout=dropout)
    check_shapes(query, key, value, attention_mask)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.requires_grad:
        require_supported(mask="gradients")
    is_causal, length = getattr(module, "is_causal", True) if is_causal is None else is_causal, query.shape[2]
    if isinstance(attention_mask, QueryBlockMask) and attention_mask.is_plain:
        is_causal, sliding_window, attention_mask = True, attention_mask.window, None
    if length <= MAX_QUERIES and not _needs_gradients(query, key, value, *flatten_weights(pre), *flatten_weights(post)):
        visible = None
        if attention_mask is not None:
            rows = attention_mask.rows(0, length) if isinstance(attention_mask, QueryBlockMask) else attention_mask
            visible = _visible(rows)
        elif is_causal and (length > 1 or (sliding_window is not None and key.shape[2] > sliding_window)):
            visible = causal_rows(length, key.shape[2], sliding_window, query.device)[:, None]
        return composed_decode(query, key, value, pre, post, scale=scaling, visible=visible), None
    options: dict[str, Any] = {"scale": scaling, "causal": is_causal, "sliding_window": sliding_window}
    if attention_mask is not None:
        options = {"scale": scaling, "causal": False, "visible": _intervals(attention_mask)}
        if isinstance(attention_mask, QueryBlockMask) and attention_mask.causal_offset is not None:  # skips whole tiles
            options |= {"causal": True, "causal_offset": attention_mask.causal_offset}
            options |= {"sliding_window": attention_mask.window}
    return composed_attention(query, key, value, pre, post, **options).transpose(1, 2), None  # type: ignore[union-attr]


def _needs_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


__all__ = ["composed_attention", "triton_attention"]
