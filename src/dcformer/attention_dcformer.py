"""Composed attention in plain torch: "eager", the definition, and "dcformer_chunked", linear in memory.

Both are registered with Transformers under these names (`attn_implementation`). Letters: B batch, T queries, S keys,
H query heads, M heads of a group, D head dim, R rank, t queries of a block.

What both compute (paper section 3.1), composition inside groups of heads:

    scores  = q kᵀ · scaling                  [B, H, T, S], from inputs in the model's dtype, kept in float32
    weights = softmax(mask(compose(scores)))  float32; a row with nothing to see is all zeros
    output  = compose(weights) v              the composed weights are rounded to the model's dtype first
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from .compose_dcformer import ComposeWeights, SideWeights, accumulation_dtype, compose

logger = logging.get_logger(__name__)

# Scores of one block of queries in the chunked implementation: at most this many (a soft bound, per problem).
BLOCK_SCORES = 1 << 22
MAX_QUERY_BLOCK = 128
_NO_MAPS = (
    "attn_implementation='dcformer_chunked' never holds the attention maps. Load the model with "
    "attn_implementation='eager', or call model.set_attn_implementation('eager')."
)
# Up to this many queries (decoding, assisted decoding) the definition itself is linear in S and has the least overhead.
FEW_QUERIES = 16


# query, key, value and the flattened weights of both stages
Tensors = Sequence[torch.Tensor | None]


@dataclass
class LayerTrace:
    """Maps of one layer, each [B, H, T, S] in float32: scores and weights before and after composition."""

    scores: torch.Tensor
    composed_scores: torch.Tensor
    weights: torch.Tensor
    composed_weights: torch.Tensor


@dataclass
class ComposeTrace:
    """Collects the maps of every layer in one forward pass with `attn_implementation="eager"`.

    Example: `trace = ComposeTrace(); model(**inputs, compose_trace=trace); trace.layers[3].composed_scores`.

    Attributes:
        layers: one `LayerTrace` per layer, in the order in which the layers ran.
    """

    layers: list[LayerTrace] = field(default_factory=list)


@dataclass
class QueryBlockMask:
    """A mask that is made block by block of queries instead of being held whole ([T, S] is not linear in memory).

    Arguments are those of Transformers' mask functions (`AttentionMaskInterface`). `intervals` is for implementations
    that want to know no more of it than the first and the last key of each query: they may keep that here.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: Any
    mask_function: Any
    attention_mask: torch.Tensor | None
    use_vmap: bool
    device: Any
    intervals: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask this stands for: [B, 1, T, S]."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def offset(self) -> int | None:
        """How far the first query is beyond the first key, where that is known without looking at the device."""
        return self.q_offset - self.kv_offset if isinstance(self.q_offset, int) else None

    def contiguous(self) -> "QueryBlockMask":
        """Itself: `generate` asks this of every mask that it prepares."""
        return self

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The mask of queries `start` to `stop`: [B, 1, stop - start, S], True where a query sees a key."""
        return sdpa_mask(
            batch_size=self.batch_size,
            q_length=stop - start,
            kv_length=self.kv_length,
            q_offset=self.q_offset + start,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )


def chunked_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | QueryBlockMask | None:
    """Mask function of "dcformer_chunked", with the arguments of Transformers' own (`AttentionMaskInterface`).

    Returns:
        None where causality (and the layer's window) says everything and the last query is the last key; a boolean
        [B, 1, T, S] for few queries; otherwise a `QueryBlockMask`.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and aligned and _nothing_padded(attention_mask):
        return None
    if isinstance(q_offset, torch.Tensor):  # a static cache's own length, which its layers advance before rows are made
        q_offset = q_offset.clone()
    mask = QueryBlockMask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
    )
    return mask.rows(0, q_length) if q_length <= FEW_QUERIES else mask


def _nothing_padded(attention_mask: torch.Tensor | None) -> bool:
    if attention_mask is None:
        return True
    if torch.compiler.is_compiling():  # reading the mask would break the graph
        return False
    return bool(attention_mask.all())


def causal_rows(
    start: int, stop: int, query_length: int, key_length: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Causal (and windowed) mask of queries `start` to `stop` when the last query is the last key: [t, S] bool."""
    position = torch.arange(start, stop, device=device)[:, None] + (key_length - query_length)
    keys = torch.arange(key_length, device=device)[None]
    visible = keys <= position
    return visible if window is None else visible & (keys > position - window)


def visible_and_bias(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Splits a mask into what is visible (bool) and what is added to scores; additive ones hide with huge negatives."""
    if not mask.is_floating_point():
        return mask.bool(), None
    return mask > torch.finfo(mask.dtype).min / 2, mask


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


def _repeat_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, Hkv, S, D] -> [B, H, S, D] for grouped-query attention."""
    repeats = heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any) -> None:
    heads_fit = query.shape[0] == key.shape[0] and query.shape[1] % key.shape[1] == 0
    if not heads_fit or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together: "
            "expected [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, Dv] with H a multiple of Hkv."
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


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    mix: Callable[[torch.Tensor, ComposeWeights | None], torch.Tensor] = compose,
) -> LayerTrace:
    """The definition of composed attention up to the composed weights; see the head of this file."""
    compute = accumulation_dtype(query.dtype)
    key = _repeat_heads(key, query.shape[1])
    scores = torch.matmul(query.to(compute), key.to(compute).transpose(-1, -2)) * scaling  # [B, H, T, S]
    composed_scores = mix(scores, pre)
    weights = _masked_softmax(composed_scores, visible, bias)
    return LayerTrace(scores, composed_scores, weights, mix(weights, post))


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
    compose_trace: ComposeTrace | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Composed attention by its definition: every map is materialised. The yardstick for all other implementations.

    Args:
        module: the attention module; `is_causal` and `training` are read.
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, D].
        attention_mask: [B or 1, 1 or H, T, S], boolean (True: visible) or additive; used as it is. None: causal, if the
            module is, with the last query at the last key, inside `sliding_window`.
        scaling: factor of the scores, usually D ** -0.5.
        dropout: probability of dropping a composed weight (in training).
        pre, post: what to compose scores and weights with; None for no composition.
        sliding_window: keys a query sees, its own included; read when `attention_mask` is None.
        compose_trace: collects this layer's maps.

    Returns:
        output [B, T, H, D] and composed weights [B, H, T, S], both in the dtype of `query`.

    Raises:
        ValueError: on shapes that do not fit.
    """
    check_shapes(query, key, value, attention_mask)
    visible = bias = None
    if attention_mask is not None:
        visible, bias = visible_and_bias(attention_mask)
    elif getattr(module, "is_causal", True):
        length, key_length = query.shape[2], key.shape[2]
        visible = causal_rows(0, length, length, key_length, sliding_window, query.device)
    maps = _attend(query, key, value, visible, bias, scaling, pre, post)
    if compose_trace is not None:
        compose_trace.layers.append(maps)
    weights = maps.composed_weights.to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    output = torch.matmul(weights, _repeat_heads(value, query.shape[1]))  # [B, H, T, D]
    return output.transpose(1, 2).contiguous(), weights


def chunked_attention(
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
    compose_trace: ComposeTrace | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Composed attention by blocks of queries, forward and backward in memory linear in T and S. Same numbers as eager.

    Arguments as for `eager_attention`; the mask may also be a `QueryBlockMask`.

    Returns:
        output [B, T, H, D], and None: there are no weights to return.

    Raises:
        ValueError: on shapes that do not fit, when a trace of the maps is asked for, or for a mask to be trained.
    """
    check_shapes(query, key, value, attention_mask)
    if compose_trace is not None:
        raise ValueError(f"compose_trace cannot be filled: {_NO_MAPS}")
    if kwargs.get("output_attentions"):  # as Transformers' own fused implementations: nothing to return, and a warning
        logger.warning_once(f"output_attentions=True returns nothing: {_NO_MAPS}")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.requires_grad:
        raise ValueError("an attention mask that requires gradients needs attn_implementation='eager'.")
    causal = attention_mask is None and getattr(module, "is_causal", True)
    dropout = dropout if module.training else 0.0
    if query.shape[2] <= FEW_QUERIES and not dropout:
        return _attend_few(query, key, value, attention_mask, scaling, pre, post, sliding_window, causal), None
    seed = int(torch.randint(2**31, ())) if dropout else 0
    plan = _Plan(scaling, attention_mask, sliding_window, causal, dropout, seed)
    tensors = (query, key, value, *flatten_weights(pre), *flatten_weights(post))
    groups = (pre or post or ComposeWeights()).groups
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        output = _ChunkedAttention.apply(plan, groups, *tensors)
    else:
        output = _chunked_forward(plan, groups, tensors)
    return output.transpose(1, 2).contiguous(), None


def _attend_few(query, key, value, attention_mask, scaling, pre, post, sliding_window, causal):
    """A few queries against many keys: the definition, one map of [B, H, few, S]. Returns [B, T, H, D]."""
    visible = bias = None
    if attention_mask is not None:
        mask = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask.rows(0, query.shape[2])
        visible, bias = visible_and_bias(mask)
    elif causal and (query.shape[2] > 1 or sliding_window is not None):
        visible = causal_rows(0, query.shape[2], query.shape[2], key.shape[2], sliding_window, query.device)
    maps = _attend(query, key, value, visible, bias, scaling, pre, post, mix=_compose_few)
    weights = maps.composed_weights.to(query.dtype)
    return torch.matmul(weights, _repeat_heads(value, query.shape[1])).transpose(1, 2).contiguous()


def _compose_few(maps: torch.Tensor, weights: ComposeWeights | None) -> torch.Tensor:
    """`compose` for a few queries and many keys: the key side elementwise, in half the time of a product per key."""
    if weights is None or weights.key is None:
        return compose(maps, weights)

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(maps.dtype).unflatten(1, (weights.groups, -1))  # [B, H, ...] -> [B, G, M, ...]

    out = grouped(compose(maps, replace(weights, key=None)))
    a, key = grouped(maps), weights.key  # [B, G, M, T, S]
    if key.down is not None and key.up is not None:
        ranks = (grouped(w).movedim(-1, 0).unsqueeze(-2).unbind(0) for w in (key.down, key.up))
        for down, up in zip(*ranks, strict=True):  # [B, G, M, 1, S]
            out = torch.addcmul(out, (a * down).sum(dim=2, keepdim=True), up)
    if key.gate is not None:
        out = torch.addcmul(out, a, grouped(key.gate).unsqueeze(-2))
    return out.flatten(1, 2)  # [B, H, T, S]


# --- dcformer_chunked -------------------------------------------------------------------------------------------------
#
# Groups of heads are independent, so the work is a loop over (group, slice of the batch, block of queries). Inside, all
# maps are [M, b, t, S'], heads first: b sequences, t queries, S' the keys that the block can see. The mixing never
# forms an [H, H] matrix: R hidden maps [b, t, S'] per side and stage are accumulated head by head, and added back head
# by head, while they sit in cache.
#
# The backward pass recomputes a block's maps from q, k, v and the weights. Rows are complete, so the softmax needs no
# saved log-sum-exp.


@dataclass
class _Block:
    """One block of work: which sequences, queries and keys, and what is visible among them."""

    batch: slice
    queries: slice
    keys: slice
    visible: torch.Tensor | None = None  # [1 or M, 1 or b, t, S']
    bias: torch.Tensor | None = None


@dataclass
class _Plan:
    """What stays the same for all blocks of one call."""

    scaling: float
    mask: torch.Tensor | QueryBlockMask | None
    window: int | None
    causal: bool
    dropout: float
    seed: int

    def blocks(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> Iterator[_Block]:
        """Yields the blocks of one group's problem: `query` [B, H, T, D], `key` [B, Hkv, S, D]."""
        (batch, _, length, _), key_length, count = query.shape, key.shape[2], heads.stop - heads.start
        windowed = self.window is not None and self.causal
        span = min(key_length, self.window + MAX_QUERY_BLOCK) if windowed else key_length
        rows = max(1, BLOCK_SCORES // max(1, count * span))
        size = min(length, MAX_QUERY_BLOCK, max(8, rows))
        sequences = max(1, rows // size)
        for first in range(0, batch, sequences):
            for start in range(0, length, size):
                block = _Block(
                    slice(first, min(batch, first + sequences)), slice(start, min(length, start + size)), slice(None)
                )
                self._find_keys(block, heads, length, key_length, query.device)
                if block.keys.start < block.keys.stop:
                    yield block

    def _find_keys(self, block: _Block, heads: slice, length: int, key_length: int, device: torch.device) -> None:
        """Sets the keys that a block needs, and which of them each query sees."""
        start, stop, first, last = block.queries.start, block.queries.stop, 0, key_length
        if self.mask is None:
            if self.causal:
                offset = key_length - length
                last = min(key_length, max(0, stop + offset))
                first = 0 if self.window is None else min(last, max(0, start + offset - self.window + 1))
                rows = causal_rows(start, stop, length, key_length, self.window, device)
                block.visible = rows[None, None, :, first:last]
            block.keys = slice(first, last)
            return
        rows = self.mask.rows(start, stop) if isinstance(self.mask, QueryBlockMask) else self.mask[:, :, start:stop]
        rows = rows[block.batch] if rows.shape[0] > 1 else rows
        rows = (rows[:, heads] if rows.shape[1] > 1 else rows).transpose(0, 1).to(device)  # [1 or M, 1 or b, t, S]
        visible, bias = visible_and_bias(rows)
        if not torch.compiler.is_compiling():  # what no query of the block sees need not be computed
            seen = visible.flatten(0, 2).any(dim=0).nonzero()
            first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        block.keys = slice(first, last)
        block.visible = visible[..., first:last]
        block.bias = None if bias is None else bias[..., first:last]

    def keep(self, block: _Block, heads: slice, like: torch.Tensor) -> torch.Tensor | None:
        """Dropout factors of a block, the same whenever they are asked for."""
        if not self.dropout:
            return None
        place = 1_000_003 * block.batch.start + 10_007 * heads.start + block.queries.start
        generator = torch.Generator(like.device).manual_seed(self.seed + place)
        kept = torch.rand(like.shape, generator=generator, device=like.device) >= self.dropout
        return kept.to(like.dtype) / (1 - self.dropout)


def flatten_weights(weights: ComposeWeights | None) -> tuple[torch.Tensor | None, ...]:
    """The 7 tensors of a stage: query down, up, gate, key down, up, gate, static."""
    weights = weights or ComposeWeights()
    query, key = weights.query or SideWeights(), weights.key or SideWeights()
    return (query.down, query.up, query.gate, key.down, key.up, key.gate, weights.static)


def _hide(scores: torch.Tensor, block: _Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Adds a block's mask to its scores. Returns too, where some row sees no key, 1 for the rows that do and 0 else."""
    visible = block.visible
    if visible is None:
        return scores, None
    hidden = torch.zeros(visible.shape, dtype=scores.dtype, device=scores.device)
    if block.bias is not None:
        hidden += block.bias
    hidden.masked_fill_(~visible, float("-inf"))
    nonempty = visible.any(dim=-1, keepdim=True)
    if not torch.compiler.is_compiling() and bool(nonempty.all()):
        return scores + hidden, None
    hidden.masked_fill_(~nonempty, 0.0)
    return scores + hidden, nonempty.to(scores.dtype)


def _weighted_sum(maps: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ_m maps[m] · factors[m] of [b, t, S'] maps and [b, t, 1] or [b, 1, S'] factors -> [b, t, S']."""
    out = maps[0] * factors[0]
    for one, factor in zip(maps[1:], factors[1:], strict=True):
        out.addcmul_(one, factor)
    return out


class _Side:
    """One side's weights of one group, as factors that broadcast against maps [M, b, t, S']; and their gradients.

    down, up: [R, M, B, T, 1] (queries) or [R, M, B, 1, S] (keys); gate: [M, B, T, 1] or [M, B, 1, S].
    """

    def __init__(self, tensors: Tensors, heads: slice, compute: torch.dtype, is_query: bool):
        down, up, gate = (None if w is None else w[:, heads].to(compute) for w in tensors)
        self.axis = -1 if is_query else -2
        self.down, self.up = (
            None if w is None else w.permute(3, 1, 0, 2).contiguous().unsqueeze(self.axis) for w in (down, up)
        )
        self.gate = None if gate is None else gate.transpose(0, 1).contiguous().unsqueeze(self.axis)
        self.grads: dict[str, torch.Tensor] = {}

    def _at(self, block: _Block) -> tuple:
        """Index of a block's tokens in `down`, `up` and `gate`."""
        tokens = (block.queries, slice(None)) if self.axis == -1 else (slice(None), block.keys)
        return (..., block.batch, *tokens)

    def add(self, out: torch.Tensor, maps: torch.Tensor, block: _Block, transposed: bool = False) -> None:
        """Adds this side's low-rank and gate branches of `maps` to `out`, both [M, b, t, S'].

        With `transposed`, the transpose of that linear map: what takes gradients back.
        """
        at, maps_of, out_of = self._at(block), maps.unbind(0), out.unbind(0)
        if self.down is not None and self.up is not None:
            inner, outer = (self.up, self.down) if transposed else (self.down, self.up)
            for inner_rank, outer_rank in zip(inner[at], outer[at], strict=True):
                hidden = _weighted_sum(maps_of, inner_rank.unbind(0))  # [b, t, S']
                for one, factor in zip(out_of, outer_rank.unbind(0), strict=True):
                    one.addcmul_(hidden, factor)
        if self.gate is not None:
            for one, own, factor in zip(out_of, maps_of, self.gate[at].unbind(0), strict=True):
                one.addcmul_(own, factor)

    def add_grads(self, maps: torch.Tensor, grad: torch.Tensor, block: _Block) -> None:
        """Adds to the gradients of the weights, from maps and the gradient of the composed maps, both [M, b, t, S']."""
        if not self.grads:
            self.grads = {n: torch.zeros_like(w) for n in ("down", "up", "gate") if (w := getattr(self, n)) is not None}
        at, maps_of, grad_of = self._at(block), maps.unbind(0), grad.unbind(0)
        if self.down is not None and self.up is not None:
            for down, up, to_down, to_up in zip(
                self.down[at], self.up[at], self.grads["down"][at], self.grads["up"][at], strict=True
            ):
                hidden, grad_hidden = _weighted_sum(maps_of, down.unbind(0)), _weighted_sum(grad_of, up.unbind(0))
                for head, (own, its_grad) in enumerate(zip(maps_of, grad_of, strict=True)):
                    to_up[head] += (hidden * its_grad).sum(self.axis, keepdim=True)
                    to_down[head] += (grad_hidden * own).sum(self.axis, keepdim=True)
        if self.gate is not None:
            to_gate = self.grads["gate"][at]
            for head, (own, its_grad) in enumerate(zip(maps_of, grad_of, strict=True)):
                to_gate[head] += (own * its_grad).sum(self.axis, keepdim=True)

    def flat_grads(self) -> list[torch.Tensor | None]:
        """Gradients of down, up [B, M, N, R] and gate [B, M, N]."""
        down, up, gate = (
            None if (g := self.grads.get(n)) is None else g.squeeze(self.axis) for n in ("down", "up", "gate")
        )
        low_rank = [None if g is None else g.permute(2, 1, 3, 0) for g in (down, up)]
        return [*low_rank, None if gate is None else gate.transpose(0, 1)]


class _Stage:
    """One stage of one group: both sides and the static projection [M, M]."""

    def __init__(self, tensors: Tensors, group: int, heads: slice, compute: torch.dtype):
        self.sides = [
            _Side(part, heads, compute, is_query)
            for part, is_query in ((tensors[0:3], True), (tensors[3:6], False))
            if any(w is not None for w in part)
        ]
        self.side_places = [i for i in (0, 3) if any(w is not None for w in tensors[i : i + 3])]
        self.static = None if tensors[6] is None else tensors[6][group].to(compute)
        self.static_grad = None if self.static is None else torch.zeros_like(self.static)

    def _apply(self, maps: torch.Tensor, block: _Block, transposed: bool) -> torch.Tensor:
        if not self.sides and self.static is None:
            return maps
        if self.static is None:
            out = maps.clone()
        else:
            static = self.static if transposed else self.static.T
            out = torch.addmm(maps.flatten(1), static, maps.flatten(1)).view_as(maps)
        for side in self.sides:
            side.add(out, maps, block, transposed)
        return out

    def mix(self, maps: torch.Tensor, block: _Block) -> torch.Tensor:
        """Composes maps [M, b, t, S']."""
        return self._apply(maps, block, transposed=False)

    def mix_backward(self, maps: torch.Tensor, grad: torch.Tensor, block: _Block) -> torch.Tensor:
        """From the gradient of the composed maps to that of `maps`, both [M, b, t, S']; keeps those of the weights."""
        for side in self.sides:
            side.add_grads(maps, grad, block)
        if self.static_grad is not None:
            self.static_grad += maps.flatten(1) @ grad.flatten(1).T
        return self._apply(grad, block, transposed=True)

    def flat_grads(self) -> list[torch.Tensor | None]:
        """Gradients in the order and layout of `flatten_weights`, for this group's heads."""
        grads: list[torch.Tensor | None] = [None] * 6 + [self.static_grad]
        for place, side in zip(self.side_places, self.sides, strict=True):
            grads[place : place + 3] = side.flat_grads()
        return grads


class _Problem:
    """One group of heads: its queries, keys and values [M, B, T or S, D] in the accumulation dtype, and its stages."""

    def __init__(self, tensors: Tensors, groups: int, group: int):
        query, key, value = tensors[:3]
        compute = accumulation_dtype(query.dtype)
        total = query.shape[1]
        self.dtype, self.compute = query.dtype, compute
        self.heads = heads = slice(group * (total // groups), (group + 1) * (total // groups))
        indices = torch.arange(heads.start, heads.stop, device=query.device)
        self.q, self.k, self.v = (
            states[:, indices // (total // states.shape[1])].transpose(0, 1).to(compute).contiguous()
            for states in (query, key, value)
        )
        self.pre, self.post = (_Stage(tensors[i : i + 7], group, heads, compute) for i in (3, 10))

    def at(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [M, b, t, D], keys and values [M, b, S', D] of a block."""
        keys = (slice(None), block.batch, block.keys)
        return self.q[:, block.batch, block.queries], self.k[keys], self.v[keys]

    def maps(self, plan: _Plan, block: _Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores, weights and composed weights of a block, each [M, b, t, S']."""
        q, k, _ = self.at(block)
        scores = torch.bmm((q * plan.scaling).flatten(0, 1), k.transpose(2, 3).flatten(0, 1)).unflatten(0, q.shape[:2])
        masked, nonempty = _hide(self.pre.mix(scores, block), block)
        weights = masked.softmax(dim=-1)
        if nonempty is not None:
            weights = weights * nonempty
        composed = self.post.mix(weights, block)
        return scores, weights, composed if self.dtype == self.compute else composed.to(self.dtype).to(self.compute)


def _chunked_forward(plan: _Plan, groups: int, tensors: Tensors) -> torch.Tensor:
    """Forward pass; `tensors` are query, key, value and the flattened stages. Returns [B, H, T, D]."""
    query, key, value = tensors[:3]
    output = query.new_zeros((*query.shape[:3], value.shape[-1]))
    for group in range(groups):
        problem = _Problem(tensors, groups, group)
        for block in plan.blocks(query, key, problem.heads):
            composed = problem.maps(plan, block)[2]
            if (keep := plan.keep(block, problem.heads, composed)) is not None:
                composed = composed * keep
            out = torch.matmul(composed, problem.at(block)[2])  # [M, b, t, D]
            output[block.batch, problem.heads, block.queries] = out.transpose(0, 1).to(query.dtype)
    return output


class _ChunkedAttention(torch.autograd.Function):
    """Saves the inputs only; the backward pass recomputes each block's maps."""

    @staticmethod
    def forward(ctx, plan, groups, *tensors):
        ctx.plan, ctx.groups = plan, groups
        ctx.save_for_backward(*tensors)
        return _chunked_forward(plan, groups, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        plan, groups, tensors = ctx.plan, ctx.groups, ctx.saved_tensors
        query, key = tensors[:2]
        compute = accumulation_dtype(query.dtype)
        grads = [None if t is None else torch.zeros_like(t, dtype=compute) for t in tensors]
        repeats = query.shape[1] // key.shape[1]
        for group in range(groups):
            problem = _Problem(tensors, groups, group)
            heads, pre, post = problem.heads, problem.pre, problem.post
            grad_q, grad_k, grad_v = (torch.zeros_like(states) for states in (problem.q, problem.k, problem.v))
            for block in plan.blocks(query, key, heads):
                q, k, v = problem.at(block)
                scores, weights, composed = problem.maps(plan, block)
                grad_out = grad_output[block.batch, heads, block.queries].to(compute).transpose(0, 1)  # [M, b, t, D]
                grad_map = torch.matmul(grad_out, v.transpose(2, 3))  # [M, b, t, S']
                if (keep := plan.keep(block, heads, composed)) is not None:
                    composed, grad_map = composed * keep, grad_map * keep
                at_keys = (slice(None), block.batch, block.keys)
                grad_v[at_keys] += torch.matmul(composed.transpose(2, 3), grad_out)
                grad_map = post.mix_backward(weights, grad_map, block)
                grad_map = torch._softmax_backward_data(grad_map, weights, -1, weights.dtype)
                grad_map = pre.mix_backward(scores, grad_map, block)
                grad_q[:, block.batch, block.queries] = torch.matmul(grad_map, k) * plan.scaling
                grad_k[at_keys] += torch.matmul(grad_map.transpose(2, 3), q * plan.scaling)
            grads[0][:, heads] = grad_q.transpose(0, 1)
            kv_heads = torch.arange(heads.start, heads.stop, device=query.device) // repeats
            grads[1].index_add_(1, kv_heads, grad_k.transpose(0, 1))
            grads[2].index_add_(1, kv_heads, grad_v.transpose(0, 1))
            for offset, stage in ((3, pre), (10, post)):
                for i, grad in enumerate(stage.flat_grads()):
                    if grad is not None and i == 6:
                        grads[offset + i][group] = grad
                    elif grad is not None:
                        grads[offset + i][:, heads] = grad
        return None, None, *(None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


AttentionInterface.register("dcformer_chunked", chunked_attention)
AttentionMaskInterface.register("dcformer_chunked", chunked_mask)

__all__ = ["ComposeTrace", "LayerTrace", "QueryBlockMask", "chunked_attention", "chunked_mask", "eager_attention"]
