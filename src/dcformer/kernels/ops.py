"""Composed attention of many queries, and the implementation "dcformer_triton" for Transformers.

`composed_attention` is the public function. Beneath it are two custom operators (`schemas`), so that `torch.compile`,
CUDA graphs, FSDP and activation checkpointing see one opaque operation.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention_dcformer import check_shapes, refuse_transforms
from ..compose_dcformer import ComposeWeights
from ..implementations_dcformer import TRITON
from ..masks_dcformer import QueryBlockMask, causal_rows, intervals, is_captured, visible_and_bias
from .decode import composed_decode
from .layout import Layout, check_states, check_types, check_weights, packed_weights, plain_groups, stages_of
from .limits import MAX_QUERIES, require_supported, unsupported_reason
from .overflow import beyond
from .passes import Passes
from .problem import Visibility
from .repeated import keep
from .schemas import DEVICES, UNBOUNDED, attention_backward_op, attention_op, is_watched, place_tensors

logger = logging.get_logger(__name__)

_Seen = tuple[torch.Tensor, int, int]  # bounds of `attention_op`; low and high of `Visibility`
_MOST_BOUNDS = 16
_known_bounds: dict[tuple, torch.Tensor] = {}  # those that follow from numbers alone

# --- kernels of the operators -----------------------------------------------------------------------------------------


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bounds: torch.Tensor,
    plan: Sequence[int],
    scale: float,
) -> Passes:
    """What the operators' arguments stand for."""
    groups, low, high, chunk_bytes, keeps, *places = plan
    given, (first, last) = stages_of(place_tensors(weights, places, 6)), bounds.unbind()
    return Passes(
        query, key, value, given, Visibility(first, last, low, high), Layout.of(given, groups), scale,
        None if chunk_bytes < 0 else chunk_bytes, beyond(query.device), bool(keeps),
    )  # fmt: skip


@attention_op.register_kernel(DEVICES)
def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _problem(*arguments).forward()


@attention_backward_op.register_kernel(DEVICES)
def _backward(
    grad_out: torch.Tensor, saved: Sequence[torch.Tensor], grad_lse: torch.Tensor | None, *arguments: Any
) -> list[torch.Tensor]:
    lse, kept, norms = saved
    grads = _problem(*arguments).backward(grad_out, lse, kept, norms, grad_lse)
    of_weights = [grad for stage in grads.weights for grad in stage if grad is not None]
    found = [grads.query, grads.key, grads.value, *of_weights]
    query, key, value, weights, *_ = arguments
    return [grad.to(like.dtype) for grad, like in zip(found, (query, key, value, *weights), strict=True)]


# --- the function -----------------------------------------------------------------------------------------------------


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
    save_maps: bool = False,
    chunk_bytes: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Composed attention (paper section 3) with fused kernels: softmax(compose(q kᵀ)), composed again, times v.

    Memory beyond inputs and outputs is linear in T and S: log-sum-exps, and the maps that cross heads for a chunk of
    queries, unless all of these are to be kept. Differentiable in query, key, value and all weights; the gradients are
    deterministic.

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
        cu_seqlens: int [documents + 1]: ascending bounds of packed documents, which do not see each other; tokens
            outside all see nothing. Needs B = 1, T = S. Their order is not checked: that would wait for the device.
        visible: (first, last), int [B or 1, T]: query t sees keys first <= s < last at most, besides the above.
        return_lse: return the log-sum-exp of the composed scores too, differentiable like the output.
        save_maps: where there are gradients, keep three maps of 16 bits (32 with float32) for the backward pass, which
            makes them anew otherwise: 6 bytes for each head, query (up to multiples of 128) and key, seen or not; with
            a window as many keys as 5 to 9 windows have, or some 144. Results are the same up to the order of sums.
        chunk_bytes: bound of the memory that the maps and tiles of a chunk of queries take, above what 128 queries of
            one sequence need; None for 256 MiB, or 1/64 of the device's memory where that is more.

    Returns:
        output [B, H, T, DV] in the dtype of `query`, zeros for queries that see nothing; with `return_lse` also
        [B, H, T] in float32, +inf for those.

    Raises:
        ValueError: on shapes or options that do not fit together, naming them, and beyond `unsupported_reason`.
        NotImplementedError: under transforms of `torch.func` and forward-mode differentiation.
    """
    of_keys = _given_bounds(key_start, key_end, cu_seqlens, visible)
    check_types(pre, post, scale, {"query": query, "key": key, "value": value} | of_keys)
    _check_switches(causal=causal, save_maps=save_maps, return_lse=return_lse)
    _check_numbers(causal, causal_offset, sliding_window, chunk_bytes)
    groups = _check_call(query, key, value, pre, post, cu_seqlens)
    _check_bounds(query.shape[0], query.shape[2], query.device, of_keys)
    seen = _visibility(query, key, causal, causal_offset, sliding_window, of_keys)
    return _attend(query, key, value, pre, post, groups, seen, scale, return_lse, save_maps, chunk_bytes)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    groups: int,
    seen: _Seen,
    scale: float | None,
    return_lse: bool = False,
    save_maps: bool = False,
    chunk_bytes: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`composed_attention` of what has been checked; `groups` is what `_check_call` returns."""
    query, key, value = map(_rows_contiguous, (query, key, value))
    weights, places = packed_weights(pre, post, key.shape[1])
    keeps = save_maps and _needs_gradients(query, key, value, pre, post)
    bounds, low, high = seen
    plan = [groups, low, high, -1 if chunk_bytes is None else min(chunk_bytes, 2**62), int(keeps), *places]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    out, lse, *_ = attention_op(query, key, value, weights, bounds, plan, scale)
    out = out.transpose(1, 2)  # [B, H, T, DV]
    return (out, lse * math.log(2)) if return_lse else out


def _visibility(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    causal_offset: int | None,
    sliding_window: int | None,
    of_keys: dict[str, torch.Tensor],
) -> _Seen:
    """What arguments of `composed_attention` say of the keys that queries see. Where no tensor says it, the bounds are
    made once for all calls alike: layers and steps, for each of which it would be some six launches."""
    length, key_length, device = query.shape[2], key.shape[2], query.device
    offset = key_length - length if causal_offset is None else causal_offset
    low = None if sliding_window is None else _countable(offset - sliding_window + 1)
    high = _countable(offset) if causal else None
    sizes = length, key_length, low, high
    limits = -UNBOUNDED if low is None else low, UNBOUNDED if high is None else high
    if of_keys or not _may_remember(query, key):
        return _make_bounds(*sizes, device, of_keys), *limits
    known = (*sizes, *_place(device))
    bounds = _known_bounds.get(known)
    if bounds is None:
        with torch.inference_mode(False):  # a later call may have gradients
            bounds = _make_bounds(*sizes, device, of_keys)
        keep(_known_bounds, known, bounds, _MOST_BOUNDS)
    return bounds, *limits


def _may_remember(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a tensor that is made now may serve later calls."""
    return not (is_watched(query, key) or is_captured(query.device))


def _place(device: torch.device) -> tuple[torch.device, int]:
    """Where a tensor that is made now is ready: a device, and the stream of a GPU."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _make_bounds(
    length: int,
    key_length: int,
    low: int | None,
    high: int | None,
    device: torch.device,
    of_keys: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The first key that each query sees, and the one after the last: int32 [2, B or 1, T].

    Args:
        length, key_length: T and S.
        low, high: query t sees keys t + low to t + high at most; None for no bound.
        device: of the queries.
        of_keys: what `_given_bounds` returns.
    """
    position = torch.arange(length, device=device, dtype=torch.int32)[None]
    first, last = torch.zeros_like(position), torch.full_like(position, key_length)
    if high is not None:
        last = torch.minimum(last, position + (high + 1))
    if low is not None:
        first = (position + low).clamp(min=0)
    for name, bound in of_keys.items():
        places = _bounds(bound, key_length, device)
        if name == "cu_seqlens":
            document = torch.searchsorted(places, position[0], right=True) - 1  # [T]
            is_inside = (document >= 0) & (document < len(places) - 1)
            document = document.clamp(0, len(places) - 2)
            first = torch.maximum(first, places[document][None])
            last = torch.minimum(last, torch.where(is_inside, places[document + 1], 0)[None])
        elif name in ("key_start", "visible[0]"):
            first = torch.maximum(first, places[:, None] if places.dim() == 1 else places)  # of sequences, of queries
        else:
            last = torch.minimum(last, places[:, None] if places.dim() == 1 else places)
    return torch.stack(torch.broadcast_tensors(first, last))


def _rows_contiguous(states: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] with neighboring channels: itself, or a copy."""
    if states.stride(-1) == 1 or states.shape[-1] == 1:
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _countable(number: int) -> int:
    """A number of keys, no larger than kernels count; those of traced graphs never are."""
    return max(-UNBOUNDED, min(number, UNBOUNDED)) if isinstance(number, int) else number


def _bounds(keys: torch.Tensor, key_length: int, device: torch.device) -> torch.Tensor:
    """Places among the keys, of any integer dtype, as int32 from 0 to S."""
    return keys.to(device, torch.int64).clamp(0, key_length).to(torch.int32)  # a narrow dtype may not hold S


def _given_bounds(
    key_start: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    visible: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The places among the keys that were given, by name."""
    bounds = {"key_start": key_start, "key_end": key_end, "cu_seqlens": cu_seqlens}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if visible is not None:
        if not (isinstance(visible, (tuple, list)) and len(visible) == 2):
            raise ValueError(f"visible is of type {type(visible).__name__}: expected two tensors, (first, last).")
        given |= {"visible[0]": visible[0], "visible[1]": visible[1]}
    return given


def _check_switches(**switches: Any) -> None:
    """Refuses switches that are not truth values."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ValueError(f"{name}={switch!r}: expected True or False.")


def _check_numbers(causal: bool, offset: Any, window: Any, chunk_bytes: Any = None) -> None:
    """Refuses numbers of keys or bytes that are not whole numbers."""
    numbers = {"causal_offset": offset, "sliding_window": window, "chunk_bytes": chunk_bytes}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, (int, torch.SymInt)) or isinstance(number, bool)):
            raise ValueError(f"{name}={number!r}: expected an integer or None.")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window={window}: expected at least 1 (a query's own key), or None for all keys.")
    if window is not None and not causal:
        raise ValueError(f"sliding_window={window} needs causal=True.")
    if offset is not None and not causal:
        raise ValueError(f"causal_offset={offset} needs causal=True.")
    if chunk_bytes is not None and chunk_bytes < 0:
        raise ValueError(f"chunk_bytes={chunk_bytes}: expected at least 0 (the smallest chunks), or None.")


def _check_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    cu_seqlens: torch.Tensor | None = None,
) -> int:
    """Refuses what does not fit. Returns the number of groups of heads that mix."""
    of_composition = [weight for stage in (pre, post) if stage is not None for weight in stage.tensors()]
    refuse_transforms(TRITON, query, key, value, *of_composition)
    check_states(query, key, value, pre, post)
    batch, heads, length, _ = query.shape
    if cu_seqlens is not None and (batch != 1 or length != key.shape[2]):
        raise ValueError(f"cu_seqlens needs one packed row and as many keys as queries, got B={batch}, T={length}.")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) < 2):
        raise ValueError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)}: expected the bounds of documents, (documents + 1,)."
        )
    groups = check_weights(pre, post, query, key)
    if groups is None:  # no heads mix
        groups = plain_groups(heads, 1)
    require_supported(heads=heads // groups)
    return groups


def _check_bounds(batch: int, length: int, device: torch.device, of_keys: dict[str, torch.Tensor]) -> None:
    for name, bound in of_keys.items():
        if bound.is_floating_point() or bound.is_complex() or bound.dtype == torch.bool:
            raise ValueError(f"{name} is {bound.dtype}: expected integers, places among the keys.")
        _require_data(name, bound, device)
        if name in ("key_start", "key_end") and bound.shape != (batch,):
            raise ValueError(f"{name} is {tuple(bound.shape)}: expected one bound per sequence, ({batch},).")
        of_queries = name.startswith("visible")
        if of_queries and (bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] != length):
            raise ValueError(
                f"visible has a tensor of {tuple(bound.shape)}: expected ({batch} or 1, {length}) for both."
            )


def _require_data(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuses a tensor on device "meta" for queries on another one."""
    if tensor.device.type == "meta" and device.type != "meta":
        raise ValueError(f"{name} is on device 'meta', where tensors have no data: expected it beside the queries.")


# --- Transformers -----------------------------------------------------------------------------------------------------


def _require(condition: torch.Tensor, otherwise: str) -> None:
    """Raises a ValueError that refuses a mask with `otherwise`, unless a condition, one boolean, is true. In a graph,
    where it cannot be read, the graph asserts it when it runs."""
    if torch.compiler.is_compiling() or is_captured(condition.device):
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
        ValueError: when the keys that some query sees are not an interval; as for `_visible`.
    """
    if isinstance(mask, QueryBlockMask):  # found once for all layers that share it, where values can be looked at
        tensors = mask.tensors()
        if len(tensors) == 2:
            return tensors[0], tensors[1]
        mask = tensors[0]
    first, last, complete = intervals(_visible(mask)[:, 0])
    _require(complete, "gaps")
    return first, last


def _seen_by(mask: torch.Tensor | QueryBlockMask, query: torch.Tensor, key: torch.Tensor) -> _Seen:
    """What a mask says of the keys that queries see; found once for all layers of a device that share it."""
    offset, window = None, None
    if isinstance(mask, QueryBlockMask) and mask.causal_offset is not None:  # skips whole tiles
        offset, window = mask.causal_offset, mask.window
        _check_numbers(True, offset, window)

    def find() -> _Seen:
        return _visibility(query, key, offset is not None, offset, window, _given_bounds(visible=_intervals(mask)))

    if not isinstance(mask, QueryBlockMask) or not _may_remember(query, key):
        return find()
    known = mask.seen = mask.seen or {}
    if (place := _place(query.device)) not in known:
        with torch.inference_mode(False):  # a later call may have gradients
            known[place] = find()
    return known[place]


def _check_mask(mask: torch.Tensor | QueryBlockMask | None, device: torch.device) -> None:
    """Refuses a mask without data, on another device than the queries, or with gradients."""
    if isinstance(mask, torch.Tensor):
        _require_data("attention_mask", mask, device)
        if mask.device != device:
            raise ValueError(f"attention_mask is on {mask.device}, the queries are on {device}: expected one device.")
        if mask.requires_grad:
            require_supported(mask="gradients")


def _causality(
    module: nn.Module,
    mask: torch.Tensor | QueryBlockMask | None,
    sliding_window: int | None,
    is_causal: bool | None,
) -> tuple[bool, int | None, torch.Tensor | QueryBlockMask | None]:
    """Whether attention is causal and in which window, and the mask where that is not all."""
    if isinstance(mask, QueryBlockMask) and mask.is_plain:
        return True, mask.window, None
    return getattr(module, "is_causal", True) if is_causal is None else is_causal, sliding_window, mask


def visible_keys(
    module: nn.Module,
    attention_mask: torch.Tensor | QueryBlockMask | None,
    sliding_window: int | None,
    is_causal: bool | None,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> torch.Tensor | None:
    """Which keys each of a few queries sees.

    Args:
        module, attention_mask, sliding_window, is_causal: as for `triton_attention`.
        sizes: B, T and S.
        device: of the queries.

    Returns:
        bool [B or 1, 1, T, S]; None where every query sees all keys.

    Raises:
        ValueError: for masks that `unsupported_reason` names, and of another shape.
    """
    (_, length, keys), mask = sizes, attention_mask
    _check_mask(mask, device)
    if mask is not None and (mask.shape[0] not in (1, sizes[0]) or tuple(mask.shape[2:]) != sizes[1:]):
        raise ValueError(
            f"attention mask of shape {tuple(mask.shape)} does not fit {sizes[0]} sequences, {length} queries and "
            f"{keys} keys: expected [B or 1, 1, T, S]."
        )
    is_causal, sliding_window, mask = _causality(module, mask, sliding_window, is_causal)
    if mask is not None:
        return _visible(mask.rows(0, length) if isinstance(mask, QueryBlockMask) else mask)
    if is_causal and (length > 1 or (sliding_window is not None and keys > sliding_window)):
        return causal_rows(length, keys, sliding_window, device)[:, None]
    return None


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
    require_supported(trace=compose_trace is not None, dropout=dropout)
    length = query.shape[2]
    if 1 <= length <= MAX_QUERIES and not _needs_gradients(query, key, value, pre, post):
        sizes = (query.shape[0], length, key.shape[2])
        visible = visible_keys(module, attention_mask, sliding_window, is_causal, sizes, query.device)
        query, key, value = map(_rows_contiguous, (query, key, value))
        return composed_decode(query, key, value, pre, post, scale=scaling, visible=visible).transpose(1, 2), None
    if attention_mask is not None:
        check_shapes(query, key, value, attention_mask)
    _check_mask(attention_mask, query.device)
    is_causal, sliding_window, attention_mask = _causality(module, attention_mask, sliding_window, is_causal)
    options: dict[str, Any] = {"save_maps": getattr(getattr(module, "config", None), "save_maps", False)}
    if attention_mask is None:
        options |= {"scale": scaling, "causal": is_causal}
        options |= {"sliding_window": sliding_window if is_causal else None}  # as in the other implementations
        out = composed_attention(query, key, value, pre, post, **options)
    else:
        check_types(pre, post, scaling, {"query": query, "key": key, "value": value})
        _check_switches(save_maps=options["save_maps"])
        groups = _check_call(query, key, value, pre, post)
        out = _attend(query, key, value, pre, post, groups, _seen_by(attention_mask, query, key), scaling, **options)
    return out.transpose(1, 2), None  # type: ignore[union-attr]


def _needs_gradients(*inputs: torch.Tensor | ComposeWeights | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors = [t for x in inputs if x is not None for t in (x.tensors() if isinstance(x, ComposeWeights) else [x])]
    return any(t.requires_grad for t in tensors)


__all__ = ["composed_attention", "triton_attention", "visible_keys"]
