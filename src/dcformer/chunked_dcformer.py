"""Composed attention by blocks of queries, "dcformer_chunked": the numbers of "eager" in memory linear in T and S.

The work is one custom operator, so that a traced graph does not depend on the length; its backward pass is another and
recomputes the maps of each block from q, k, v and the weights. Rows are complete, so the softmax needs no saved
log-sum-exp. Where nothing is composed or masked, torch's own attention does it (`plain_dcformer`).

Groups of heads are independent: the work is a loop over (group, slice of the batch, block of queries). Inside, maps
are [b, t, M, S'], queries before heads: b sequences, t queries, M heads of a group, S' the keys that the block can see.
All that depends on the query (low rank, gate, static projection and the skip connection) is then one matrix [M, M] per
query, and mixing with it one batched matrix product. What depends on the key is mixed rank by rank, in place.

Other letters: B batch, T queries, S keys, N either, H query heads, Hkv key/value heads, D head dim, Dv that of values,
G groups, R rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from .attention_dcformer import (
    ComposeTrace,
    attend,
    check_shapes,
    no_transform,
    refuse_batched,
    refuse_transforms,
    sum_values,
    why_no_trace,
)
from .compose_dcformer import ComposeWeights, SideWeights, accumulation_dtype, without_autocast
from .heads_dcformer import HeadMap, add_value_bias, with_ones
from .implementations_dcformer import CHUNKED, DEFAULT_ATTENTION
from .masks_dcformer import QueryBlockMask, causal_intervals, causal_rows, interval_rows, is_few, visible_and_bias
from .plain_dcformer import attend_plain, can_attend_plain

# Scores of one block of queries: at most this many (a soft bound, per group). Its maps should stay in the processor's
# cache, but the smaller blocks are, the more there is of Python between them.
BLOCK_SCORES = 1 << 21
MAX_QUERY_BLOCK = 128
# The same limits for one thread of a CPU, the second where sequences share a block. Small blocks leave out more of what
# causality and windows hide, and stay in the cache; but several threads share out every operation, and GPUs launch it.
ONE_THREAD_BLOCK = (48, 1 << 19)
ONE_THREAD_LEAST = 1 << 17  # scores of so many queries of all sequences and heads: of fewer, Python takes what is saved
ALIGNMENT = 16  # of the numbers of keys and queries of a block, where there are enough: products are faster


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
    is_causal: bool | None = None,
    compose_trace: ComposeTrace | None = None,
    key_heads: HeadMap | None = None,
    value_heads: HeadMap | None = None,
    value_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Composed attention by blocks of queries, forward and backward in memory linear in T and S. Same numbers as eager.

    Arguments as for `eager_attention`; the mask may also be a `QueryBlockMask`, which knows of its window itself.

    Returns:
        output [B, T, H, Dv], and None in the place of weights.

    Raises:
        ValueError: on shapes that do not fit, when a trace of the maps is asked for, or for a mask to be trained.
        NotImplementedError: with more than `masks_dcformer.FEW_QUERIES` queries, where an operator does it, under
            transforms of `torch.func`, in forward mode, and by differentiating twice.
    """
    check_shapes(query, key, value, attention_mask, key_heads, value_heads)
    if compose_trace is not None:
        raise ValueError(why_no_trace(CHUNKED))
    if isinstance(attention_mask, torch.Tensor) and attention_mask.requires_grad:
        raise ValueError("an attention mask that requires gradients needs attn_implementation='eager'.")
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if isinstance(attention_mask, QueryBlockMask) and attention_mask.is_plain:
        causal, sliding_window, attention_mask = True, attention_mask.window, None
    dropout = dropout if module.training else 0.0
    length, key_length = query.shape[2], key.shape[2]
    if is_few(length) and not dropout:  # the definition: maps of a few queries are linear in S
        mask = attention_mask.rows(0, length) if isinstance(attention_mask, QueryBlockMask) else attention_mask
        if causal and (length > 1 or (sliding_window is not None and key_length > sliding_window)):
            mask = causal_rows(length, key_length, sliding_window, query.device)[:, None]
        visible, bias = (None, None) if mask is None else visible_and_bias(mask.to(query.device))
        maps = attend(query, key, visible, bias, scaling, pre, post, mix=_compose_few, key_heads=key_heads)
        return sum_values(maps.composed_weights.to(query.dtype), value, value_heads, value_bias), None
    if value_bias is not None:
        value = with_ones(value)
    if key_heads is not None and value_heads is not None:  # little beside the work on maps
        key, value = key_heads.gather(key), value_heads.gather(value)  # [B, H, S, D]
    weights = flatten_weights(pre, post)
    refuse_transforms(CHUNKED, query, key, value, *weights)
    if attention_mask is None:
        masks: list[torch.Tensor] = []
    else:
        tensors = attention_mask.tensors() if isinstance(attention_mask, QueryBlockMask) else [attention_mask]
        masks = [tensor.to(query.device) for tensor in tensors]  # a model's layers may be on several devices
    given = [w for w in weights if w is not None]
    is_plain = not given and not masks and not dropout
    if is_plain and can_attend_plain(query, key, value, causal, sliding_window, scaling):
        output = attend_plain(query, key, value, causal, scaling)
    else:
        output = _forward(
            query,
            key,
            value,
            given,
            _plan((pre or post or ComposeWeights()).groups, causal, sliding_window, weights),
            masks,
            scaling,
            dropout,
            torch.randint(2**31, ()) if dropout else None,
        )
    if value_bias is not None:
        output = add_value_bias(output, value_bias)
    return output, None


# --- A few queries ----------------------------------------------------------------------------------------------------


def _compose_few(maps: torch.Tensor, weights: ComposeWeights | None) -> torch.Tensor:
    """`compose` for a few queries and many keys, in few operations: what a decoding step waits for is their number."""
    if weights is None:
        return maps
    rows = maps.unflatten(1, (weights.groups, -1)).transpose(2, 3)  # [B, G, T, M, S]
    a = out = rows.flatten(0, 2)  # [B·G·T, M, S]
    if weights.static is not None:
        static = weights.static.to(maps.dtype).transpose(1, 2).unsqueeze(1)  # [G, 1, M, M], from column to row
        out = out + (static @ rows).flatten(0, 2)
    if weights.query is not None:
        rank = weights.query.rank
        channels = _few_channels(weights.query, maps.dtype, weights.groups)  # [B, G, M, channels, T]
        channels = channels.permute(0, 1, 4, 2, 3).flatten(0, 2)  # [B·G·T, M, channels]
        if rank:
            hidden = torch.bmm(channels.narrow(2, 0, rank).transpose(1, 2), a)  # [B·G·T, R, S]
            out = torch.baddbmm(out, channels.narrow(2, rank, rank), hidden)
        if channels.shape[2] > 2 * rank:
            out = torch.addcmul(out, a, channels.narrow(2, 2 * rank, 1))
    out = out.view(rows.shape)  # [B, G, T, M, S]
    if weights.key is not None:
        rank = weights.key.rank
        channels = _few_channels(weights.key, maps.dtype, weights.groups).unsqueeze(2)  # [B, G, 1, M, channels, S]
        for i in range(rank):
            hidden = (rows * channels.select(4, i)).sum(dim=3, keepdim=True)  # [B, G, T, 1, S]
            out = torch.addcmul(out, hidden, channels.select(4, rank + i))
        if channels.shape[4] > 2 * rank:
            out = torch.addcmul(out, rows, channels.select(4, 2 * rank))
    return out.transpose(2, 3).flatten(1, 2)  # [B, H, T, S]


def _few_channels(side: SideWeights, dtype: torch.dtype, groups: int) -> torch.Tensor:
    """All channels by group: [B, G, M, channels, N]."""
    return side.by_head.to(dtype).unflatten(1, (groups, -1))


# --- The operators ----------------------------------------------------------------------------------------------------

# A copy of this file that travels with a checkpoint (remote code) has operators of its own.
_NAMESPACE = "".join(c if c.isalnum() else "_" for c in __name__.rpartition(".")[0])


def flatten_weights(pre: ComposeWeights | None, post: ComposeWeights | None) -> list[torch.Tensor | None]:
    """The 6 tensors of both stages, each query side and key side [B, H, channels, N], and static [G, M, M]."""
    found: list[torch.Tensor | None] = []
    for weights in (pre or ComposeWeights(), post or ComposeWeights()):
        found += [None if side is None else side.by_head for side in (weights.query, weights.key)]
        found.append(weights.static)
    return found


def _plan(groups: int, causal: bool, window: int | None, weights: Sequence[torch.Tensor | None]) -> list[int]:
    """Integers of the operators: G, whether causal, the window or -1, and places of the weights that are not None."""
    places = [i for i, w in enumerate(weights) if w is not None]
    return [groups, int(causal), -1 if window is None else window, *places]


def _unfold(
    query: torch.Tensor,
    key: torch.Tensor,
    plan: Sequence[int],
    mask: Sequence[torch.Tensor],
    dropout: float,
    seed: torch.Tensor | None,
) -> "tuple[int, list[int], _Call]":
    """From the operators' arguments: groups, places of the weights, and the call."""
    groups, causal, window, *places = plan
    call = _Call(
        query, key, mask, bool(causal), None if window < 0 else window, dropout, seed, query.shape[1] // groups
    )
    return groups, places, call


@torch.library.custom_op(f"{_NAMESPACE}::chunked_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    plan: Sequence[int],
    mask: Sequence[torch.Tensor],
    scaling: float,
    dropout: float,
    seed: torch.Tensor | None,
) -> torch.Tensor:
    """Composed attention.

    Args:
        query, key, value: [B, H, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
        weights: those of `flatten_weights` that are not None.
        plan: G; whether, without a mask, the last query is at the last key, and none sees a later one; keys that a
            query sees then, its own included, -1 for all; and the places of the weights among `flatten_weights`.
        mask: nothing, [first, last] or [mask], as `QueryBlockMask.tensors` gives them; a mask may be additive.
        scaling: factor of the scores.
        dropout: probability of dropping a composed weight.
        seed: of the dropout, an integer on the CPU.

    Returns:
        [B, T, H, Dv].
    """
    groups, places, call = _unfold(query, key, plan, mask, dropout, seed)
    batch, heads, length, _ = query.shape
    output = query.new_zeros((batch, length, heads, value.shape[3]))
    for group in range(groups):
        part = _Group(query, key, value, scaling, weights, places, groups, group)
        for block in call.blocks:
            output[block.batch, block.queries, part.heads] = part.output(call, block)
    return output


@_forward.register_fake
def _(query, key, value, *args):
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[3]))


@torch.library.custom_op(f"{_NAMESPACE}::chunked_attention_backward", mutates_args=())
def _backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    plan: Sequence[int],
    mask: Sequence[torch.Tensor],
    scaling: float,
    dropout: float,
    seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Gradients of query, key, value and each of `weights`, from that of the output [B, T, H, Dv]."""
    groups, places, call = _unfold(query, key, plan, mask, dropout, seed)
    inputs = (query, key, value, *weights)
    grads: list[torch.Tensor] = []
    with without_autocast(query.device.type):  # the forward pass is called so, but `backward()` may be inside of it
        for group in range(groups):
            part = _Group(query, key, value, scaling, weights, places, groups, group)
            for block in call.blocks:
                part.add_grads(call, block, grad_output[block.batch, block.queries, part.heads])
            found = part.gradients(places)
            if groups == 1 and query.shape[1] == key.shape[1]:
                grads = found  # no memory beside theirs
            else:
                grads = grads or [t.new_zeros(t.shape, dtype=part.compute) for t in inputs]
                part.add_to(grads, found)
    return [grad.to(t.dtype) for grad, t in zip(grads, inputs, strict=True)]


@_backward.register_fake
def _(grad_output, query, key, value, weights, *args):
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value, *weights)]


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    query, key, value, weights, plan, mask, scaling, dropout, seed = inputs
    ctx.counts = (len(weights), len(mask))
    ctx.plan, ctx.numbers = list(plan), (scaling, dropout)
    ctx.save_for_backward(query, key, value, *weights, *mask, seed)


def _differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple:
    refuse_batched(CHUNKED, grad_output)
    (query, key, value, *others, seed), (weights, masks) = ctx.saved_tensors, ctx.counts
    grads = _backward(grad_output, query, key, value, others[:weights], ctx.plan, others[weights:], *ctx.numbers, seed)
    return (*grads[:3], grads[3:], None, [None] * masks, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivative(ctx: Any, grads: list[torch.Tensor]) -> None:
    raise no_transform(CHUNKED, "second derivatives")


_backward.register_autograd(_refuse_second_derivative)


# --- What a call is made of -------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """One block of work: which sequences, queries and keys, and what is hidden among them.

    Attributes:
        batch, queries, keys: slices of B, T and S.
        clear: start and stop, counted from the first of these keys, of those that all queries see.
        some_empty: whether a query of the block may see nothing.
    """

    batch: slice
    queries: slice
    keys: slice
    clear: tuple[int, int] = (0, 0)
    some_empty: bool = False

    def size(self) -> int:
        """Scores of one head."""
        (b, t, s) = (part.stop - part.start for part in (self.batch, self.queries, self.keys))
        return b * t * s


class _Call:
    """What stays the same for all groups of one call: blocks, mask, dropout and working memory."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: Sequence[torch.Tensor],
        causal: bool,
        window: int | None,
        dropout: float,
        seed: torch.Tensor | None,
        heads: int,
    ):
        self.dropout = dropout
        self.seed = 0 if seed is None else int(seed)
        # not with dropout: both passes need the same blocks, and may run with different numbers of threads
        self.one_thread = query.device.type == "cpu" and torch.get_num_threads() == 1 and not dropout
        self.causal = causal
        self.window = window if causal else None
        self.whole = mask[0] if len(mask) == 1 else None  # a mask of all pairs, [B or 1, 1 or H, T, S]
        self.batch, self.length, self.key_length = query.shape[0], query.shape[2], key.shape[2]
        self.intervals: Sequence[torch.Tensor] = mask if len(mask) == 2 else ()  # first and last, [B or 1, T]
        if causal and not mask:
            self.intervals = causal_intervals(self.length, self.key_length, window, query.device)
        self.memory: dict[str, torch.Tensor] = {}
        blocks = list(self._cut(heads))
        if self.whole is not None:
            blocks = self._bounded_by_mask(blocks, self.whole)
        elif causal:  # the intervals follow from lengths: no look at the device
            blocks = self._bounded_by_causality(blocks)
        elif self.intervals:
            blocks = self._bounded_by_intervals(blocks)
        else:
            blocks = [replace(b, keys=slice(0, self.key_length), clear=(0, self.key_length)) for b in blocks]
        blocks = [block for block in blocks if block.keys.start < block.keys.stop]
        self.blocks = sorted(blocks, key=_Block.size, reverse=True)  # the largest first, in whose memory the others fit

    def _cut(self, heads: int) -> Iterator[_Block]:
        """Blocks of queries and sequences, whose keys are not known yet."""
        most, shared = ONE_THREAD_BLOCK
        seen = self.key_length if self.window is None else min(self.key_length, self.window + most)
        if not self.one_thread or self.batch * heads * most * seen < ONE_THREAD_LEAST:
            most, shared = MAX_QUERY_BLOCK, BLOCK_SCORES
        start = 0
        while start < self.length:
            span = self.key_length
            if self.causal:  # the keys that the largest block from here sees
                span = min(span, start + most + max(0, span - self.length))
            if self.window is not None:
                span = min(span, self.window + most)
            row = max(1, heads * span)  # scores of a query
            size = min(self.length - start, most, max(8, BLOCK_SCORES // row))
            if ALIGNMENT < size < self.length - start:
                size -= size % ALIGNMENT
            sequences = max(1, min(shared, BLOCK_SCORES) // (row * size))
            for first in range(0, self.batch, sequences):
                batch = slice(first, min(self.batch, first + sequences))
                yield _Block(batch, slice(start, start + size), slice(0, 0))
            start += size

    def _bounded_by_causality(self, blocks: list[_Block]) -> list[_Block]:
        bounded = []
        for block in blocks:
            # of the first and the last query: how many keys lie before its window, and how many up to itself
            ends = [i + 1 + self.key_length - self.length for i in (block.queries.start, block.queries.stop - 1)]
            starts = [0 if self.window is None else end - self.window for end in ends]
            bounds = (max(0, n) for n in (*starts, *ends))  # both grow from query to query
            bounded.append(self._bound(block, ends[0] <= 0, *bounds))
        return bounded

    def _bounded_by_intervals(self, blocks: list[_Block]) -> list[_Block]:
        bounds = []
        for block in blocks:
            first, last = self._interval_of(block)
            lengths = last - first
            bounds.append(torch.stack([first.min(), first.max(), last.min(), last.max(), lengths.min()]))
        found = torch.stack(bounds).tolist() if bounds else []  # the one look at the device
        return [
            self._bound(block, shortest <= 0, *of_block)
            for block, (*of_block, shortest) in zip(blocks, found, strict=True)
        ]

    def _bound(
        self, block: _Block, some_empty: bool, some_from: int, all_from: int, all_to: int, some_to: int
    ) -> _Block:
        """A block of which some queries see the keys `some_from` to `some_to`, and all see `all_from` to `all_to`."""
        keys = self._aligned(some_from, max(some_from, some_to))
        clear = (all_from - keys.start, max(all_from, all_to) - keys.start)
        return replace(block, keys=keys, clear=clear, some_empty=some_empty)

    def _aligned(self, start: int, stop: int) -> slice:
        """These keys, and some around them which are hidden."""
        if start == stop:
            return slice(start, stop)
        return slice(start - start % ALIGNMENT, min(self.key_length, stop + -stop % ALIGNMENT))

    def _bounded_by_mask(self, blocks: list[_Block], mask: torch.Tensor) -> list[_Block]:
        if not self.key_length:
            return []
        bounds = []
        for block in blocks:
            visible, _ = visible_and_bias(mask[self._rows(mask, block), :, block.queries])
            seen = visible.flatten(0, 2).any(dim=0).to(torch.uint8)  # [S]
            bounds.append(
                torch.stack(
                    [seen.argmax(), self.key_length - seen.flip(0).argmax(), seen.any(), ~visible.any(dim=-1).all()]
                )
            )
        found = torch.stack(bounds).tolist() if bounds else []  # the one look at the device
        return [
            replace(block, keys=self._aligned(first, last if any_seen else first), some_empty=bool(some_empty))
            for block, (first, last, any_seen, some_empty) in zip(blocks, found, strict=True)
        ]

    @staticmethod
    def _rows(tensor: torch.Tensor, block: _Block) -> slice:
        return block.batch if tensor.shape[0] > 1 else slice(None)

    def space(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Working memory of a name, the same for every block: fresh memory costs more than the work done in it."""
        count = math.prod(shape)
        held = self.memory.get(name)
        if held is None or held.numel() < count:
            held = self.memory[name] = torch.empty(count, dtype=like.dtype, device=like.device)
        return held[:count].view(*shape)

    def hide(self, scores: torch.Tensor, block: _Block, heads: slice) -> torch.Tensor | None:
        """Masks scores [b, t, M, S'] in place. Returns the rows that see nothing, [b or 1, t, 1 or M, 1], if any do."""
        if self.whole is not None:
            rows = self.whole[self._rows(self.whole, block), :, block.queries, block.keys]
            rows = (rows[:, heads] if rows.shape[1] > 1 else rows).transpose(1, 2)  # [b or 1, t, 1 or M, S']
            visible, bias = visible_and_bias(rows)
            if bias is not None:
                scores += bias
            scores.masked_fill_(~visible, float("-inf"))
            empty = ~visible.any(dim=-1, keepdim=True)
        else:
            low, high = block.clear
            width = scores.shape[-1]
            if low == 0 and high == width:
                return None
            first, last = self._interval_of(block)
            for start, stop in ((0, min(low, width)), (min(high, width), width)):
                if start < stop:
                    rows = interval_rows(first, last, block.keys.start + start, block.keys.start + stop)
                    scores[..., start:stop].masked_fill_(~rows[:, :, None], float("-inf"))
            empty = (first >= last)[..., None, None]
        if not block.some_empty:
            return None
        scores.masked_fill_(empty, 0.0)
        return empty

    def _interval_of(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
        """The first key that each query of a block sees, and the one after its last, [b or 1, t]."""
        first, last = (t[self._rows(t, block), block.queries] for t in self.intervals)
        return first, last

    def drop(self, maps: torch.Tensor, block: _Block, heads: slice) -> torch.Tensor:
        """Drops composed weights [b, t, M, S'] of a block, or their gradients: the same ones whenever it is asked."""
        if not self.dropout:
            return maps
        place = 1_000_003 * block.batch.start + 10_007 * heads.start + block.queries.start
        generator = torch.Generator(maps.device).manual_seed(self.seed + place)
        kept = torch.rand(maps.shape, generator=generator, device=maps.device) >= self.dropout
        return maps * (kept.to(maps.dtype) / (1 - self.dropout))


# --- One group of heads -----------------------------------------------------------------------------------------------


def _weighted_sums(maps: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Σ_m maps[:, :, m] · factors[:, :, m]: [b, t, M, S'] and [R, b, M, S'] -> `out` [R, b, t, S']."""
    (first, factor), *others = zip(maps.unbind(2), factors.unsqueeze(3).unbind(2), strict=True)
    torch.mul(first, factor, out=out)
    for one, factor in others:
        out.addcmul_(one, factor)
    return out


class _Stage:
    """One stage of one group of heads: its weights, what they do to maps [b, t, M, S'], and their gradients.

    Query side, in the accumulation dtype: down, up [B, T, M, R], gate [B, T, M]. Key side: down, up [R, B, M, S],
    gate [B, M, S]. Static: [M, M]. Each None where it is not there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], group: int, heads: slice, compute: torch.dtype):
        *sides, static = tensors
        query, key = (None if w is None else SideWeights(w[:, heads].to(compute)) for w in sides)
        self.static = None if static is None else static[group].to(compute)
        self.query_down = self.query_up = self.query_gate = self.key_down = self.key_up = self.key_gate = None
        if query is not None:  # [B, M, T, ...] -> [B, T, M, ...]
            parts = (None if w is None else w.transpose(1, 2).contiguous() for w in (query.down, query.up, query.gate))
            self.query_down, self.query_up, self.query_gate = parts
        if key is not None:  # [B, M, S, R] -> [R, B, M, S]
            pair = (None if w is None else w.permute(3, 0, 1, 2).contiguous() for w in (key.down, key.up))
            self.key_down, self.key_up = pair
            self.key_gate = None if key.gate is None else key.gate.contiguous()
        self.has_matrix = self.query_up is not None or self.query_gate is not None or self.static is not None
        self.is_empty = not self.has_matrix and self.key_up is None and self.key_gate is None
        self.grads: dict[str, torch.Tensor] = {}

    def matrices(self, block: _Block, maps: torch.Tensor) -> torch.Tensor | None:
        """All that depends on the query, the skip connection included: [b, t, M, M], from column to row.

        None where that is the skip connection alone. Of the maps [b, t, M, S'] only sizes and dtype are read.
        """
        if not self.has_matrix:
            return None
        at = (block.batch, block.queries)
        if self.query_up is not None and self.query_down is not None:
            matrix = torch.matmul(self.query_up[at], self.query_down[at].transpose(-1, -2))  # [b, t, M, M]
        else:
            b, t, heads, _ = maps.shape
            matrix = maps.new_zeros((b, t, heads, heads))
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal += 1 if self.query_gate is None else 1 + self.query_gate[at]
        if self.static is not None:
            matrix += self.static.T
        return matrix

    def hidden(self, call: _Call, name: str, maps: torch.Tensor, factors: torch.Tensor, block: _Block) -> torch.Tensor:
        """The hidden maps of the key side, [R, b, t, S'], in working memory."""
        b, t, _, s = maps.shape
        hidden = call.space(name, (factors.shape[0], b, t, s), maps)
        return _weighted_sums(maps, factors[:, block.batch, :, block.keys], hidden)

    def mix(
        self, call: _Call, name: str, maps: torch.Tensor, block: _Block
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Composes maps [b, t, M, S'] into working memory.

        Returns:
            the composed maps, `maps` itself where there is nothing to compose with; and the key side's hidden maps.
        """
        if self.is_empty:
            return maps, None
        out, hidden = call.space(name, maps.shape, maps), None
        matrix = self.matrices(block, maps)
        if matrix is None:
            out.copy_(maps)
        else:
            torch.bmm(matrix.flatten(0, 1), maps.flatten(0, 1), out=out.flatten(0, 1))
        if self.key_down is not None and self.key_up is not None:
            hidden = self.hidden(call, f"{name} hidden", maps, self.key_down, block)
            self._add_ranks(out, hidden, self.key_up, block)
        if self.key_gate is not None:
            out.addcmul_(maps, self.key_gate[block.batch, None, :, block.keys])
        return out, hidden

    @staticmethod
    def _add_ranks(out: torch.Tensor, hidden: torch.Tensor, factors: torch.Tensor, block: _Block) -> None:
        """Adds hidden maps [R, b, t, S'] times factors [R, B, M, S] to maps [b, t, M, S']."""
        for rank, one in zip(factors, hidden, strict=True):
            out.addcmul_(one[:, :, None], rank[block.batch, None, :, block.keys])

    def back(
        self, call: _Call, name: str, maps: torch.Tensor, hidden: torch.Tensor | None, grad: torch.Tensor, block: _Block
    ) -> torch.Tensor:
        """The gradient of `maps`, from the one of the composed maps, both [b, t, M, S']; keeps the weights' gradients.

        `hidden` is what `mix` returned beside the composed maps.
        """
        if self.is_empty:
            return grad
        out = call.space(name, grad.shape, grad)
        matrix = self.matrices(block, maps)
        if matrix is None:
            out.copy_(grad)
        else:
            torch.bmm(matrix.flatten(0, 1).transpose(1, 2), grad.flatten(0, 1), out=out.flatten(0, 1))
            products = torch.bmm(grad.flatten(0, 1), maps.flatten(0, 1).transpose(1, 2))
            self._keep_query_grads(products.unflatten(0, grad.shape[:2]), block)
        if self.key_down is not None and self.key_up is not None and hidden is not None:
            grad_hidden = self.hidden(call, f"{name} hidden", grad, self.key_up, block)
            self._add_ranks(out, grad_hidden, self.key_down, block)
            for rank in range(len(hidden)):
                self._add_key_grad(call, "key_up", rank, grad, hidden[rank, :, :, None], block)
                self._add_key_grad(call, "key_down", rank, maps, grad_hidden[rank, :, :, None], block)
        if self.key_gate is not None:
            out.addcmul_(grad, self.key_gate[block.batch, None, :, block.keys])
            self._add_key_grad(call, "key_gate", ..., grad, maps, block)
        return out

    def _grad(self, name: str) -> torch.Tensor:
        if name not in self.grads:
            like = getattr(self, name)
            self.grads[name] = like.new_zeros(like.shape)  # contiguous
        return self.grads[name]

    def _keep_query_grads(self, products: torch.Tensor, block: _Block) -> None:
        """Takes the gradient of `matrices`, [b, t, M, M], back to the weights that they are made of.

        Those of the query side are not added up: no query is in two blocks of a group.
        """
        at = (block.batch, block.queries)
        if self.query_up is not None and self.query_down is not None:
            self._grad("query_up")[at] = torch.matmul(products, self.query_down[at])
            self._grad("query_down")[at] = torch.matmul(products.transpose(-1, -2), self.query_up[at])
        if self.query_gate is not None:
            self._grad("query_gate")[at] = products.diagonal(dim1=-2, dim2=-1)
        if self.static is not None:
            self._grad("static").add_(products.sum((0, 1)).T)

    def _add_key_grad(
        self, call: _Call, name: str, rank: Any, maps: torch.Tensor, others: torch.Tensor, block: _Block
    ) -> None:
        """Adds Σ_t maps · others, of [b, t, M, S'], to a gradient [B, M, S]."""
        product = torch.mul(maps, others, out=call.space("product", maps.shape, maps))
        self._grad(name)[rank][block.batch, :, block.keys].add_(product.sum(1))

    def flat_grads(self) -> list[torch.Tensor | None]:
        """Gradients in the order of `flatten_weights`, [B, M, channels, N] and [1, M, M]; None where there is none."""
        sides = []
        for side, rank_dim, dims in (("query", 3, (0, 2, 1)), ("key", 0, (0, 1, 2))):
            channels: list[torch.Tensor] = []
            for part in ("down", "up", "gate"):
                if getattr(self, f"{side}_{part}") is not None:
                    grad = self._grad(f"{side}_{part}")
                    channels += [grad] if part == "gate" else grad.unbind(rank_dim)
            parts = [channel.permute(dims) for channel in channels]  # [B, T, M] and [B, M, S] -> [B, M, N]
            sides.append(torch.stack(parts, dim=2) if parts else None)  # [B, M, channels, N]
        return [*sides, None if self.static is None else self._grad("static")[None]]


@dataclass
class _Maps:
    """Maps of a block, [b, t, M, S'], in working memory; hidden maps [R, b, t, S'] of the key side."""

    scores: torch.Tensor
    weights: torch.Tensor
    composed: torch.Tensor
    pre_hidden: torch.Tensor | None
    post_hidden: torch.Tensor | None


class _Group:
    """One group of heads: queries (scaled), keys and values [B, M, T or S, D] and both stages, for accumulation."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        weights: Sequence[torch.Tensor],
        places: Sequence[int],
        groups: int,
        group: int,
    ):
        self.group, self.dtype, self.compute = group, query.dtype, accumulation_dtype(query.dtype)
        size, repeats = query.shape[1] // groups, query.shape[1] // key.shape[1]
        self.heads = slice(group * size, (group + 1) * size)
        self.kv_heads = torch.arange(self.heads.start, self.heads.stop, device=query.device) // repeats
        of_group = self.heads if repeats == 1 else self.kv_heads  # a slice copies nothing
        self.q = query[:, self.heads].to(self.compute) * scaling
        self.k, self.v = (states[:, of_group].to(self.compute) for states in (key, value))
        self.scaling = scaling
        flat: list[torch.Tensor | None] = [None] * 6
        for place, weight in zip(places, weights, strict=True):
            flat[place] = weight
        self.pre, self.post = (_Stage(flat[i : i + 3], group, self.heads, self.compute) for i in (0, 3))

    @staticmethod
    def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Per sequence and head: left [b, M, x, y] times right [b, M, y, z] -> out [b, M, x, z], of any strides."""
        for one, other, result in zip(left, right, out, strict=True):
            torch.bmm(one, other, out=result)

    @classmethod
    def _products(cls, call: _Call, name: str, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Of [b, M, t, D] and [b, M, S', D]: a map [b, t, M, S'] in working memory, where its heads come first.

        A product is written faster so than with queries first, and what reads it does not mind.
        """
        (b, heads, t, _), s = rows.shape, columns.shape[2]
        products = call.space(name, (heads, b, t, s), rows).transpose(0, 1)  # [b, M, t, S']
        cls._multiply(rows, columns.transpose(-1, -2), products)
        return products.transpose(1, 2)

    def maps(self, call: _Call, block: _Block, keep: bool = False) -> _Maps:
        """Scores, weights and composed weights of a block; without `keep` only the last are still there afterwards."""
        q, k = self.q[block.batch, :, block.queries], self.k[block.batch, :, block.keys]
        scores = self._products(call, "scores", q, k)  # [b, t, M, S']
        composed_scores, pre_hidden = self.pre.mix(call, "composed scores", scores, block)
        empty = call.hide(composed_scores, block, self.heads)
        reused = "scores" if composed_scores is not scores else "composed scores"
        weights = call.space("weights" if keep else reused, scores.shape, scores)
        torch.softmax(composed_scores, dim=-1, out=weights)
        if empty is not None:
            weights.masked_fill_(empty, 0.0)
        reused = "composed scores" if reused == "scores" else "scores"
        composed, post_hidden = self.post.mix(call, "composed" if keep else reused, weights, block)
        if self.dtype != self.compute:
            composed = composed.to(self.dtype).to(self.compute)
        return _Maps(scores, weights, composed, pre_hidden, post_hidden)

    def output(self, call: _Call, block: _Block) -> torch.Tensor:
        """The composed weights times the values, [b, t, M, Dv]."""
        composed = call.drop(self.maps(call, block).composed, block, self.heads)
        v = self.v[block.batch, :, block.keys]
        (b, t, heads, _), d = composed.shape, v.shape[-1]
        out = call.space("output", (b, heads, t, d), composed)  # a product is written faster so
        self._multiply(composed.transpose(1, 2), v, out)
        return out.transpose(1, 2)

    def add_grads(self, call: _Call, block: _Block, grad_output: torch.Tensor) -> None:
        """Adds to all gradients, from that of a block's output [b, t, M, Dv]."""
        grad_q, grad_k, grad_v = self.grads
        grad_output = grad_output.to(self.compute).transpose(1, 2)  # [b, M, t, Dv]
        at_queries, at_keys = (block.batch, slice(None), block.queries), (block.batch, slice(None), block.keys)
        maps = self.maps(call, block, keep=True)
        composed = call.drop(maps.composed, block, self.heads)
        for total, one, other in zip(grad_v[at_keys], composed.permute(0, 2, 3, 1), grad_output, strict=True):
            total.baddbmm_(one, other)  # [M, S', t] times [M, t, Dv]
        # The fewer maps there are, the longer they stay in the processor's cache: gradients take turns in two pieces of
        # memory, one of them that of the composed weights.
        first, second = "composed", "grad"
        grad = self._products(call, first, grad_output, self.v[at_keys])  # [b, t, M, S']
        grad = call.drop(grad, block, self.heads)
        if not self.post.is_empty:
            grad = self.post.back(call, second, maps.weights, maps.post_hidden, grad, block)
            first, second = second, first
        out = call.space(second, grad.shape, grad)
        grad = torch._softmax_backward_data(grad, maps.weights, -1, grad.dtype, grad_input=out)
        grad = self.pre.back(call, first, maps.scores, maps.pre_hidden, grad, block)
        self._multiply(grad.transpose(1, 2), self.k[at_keys], grad_q[at_queries])
        for total, one, other in zip(grad_k[at_keys], grad.permute(0, 2, 3, 1), self.q[at_queries], strict=True):
            total.baddbmm_(one, other)

    @cached_property
    def grads(self) -> list[torch.Tensor]:
        """Of q, k and v, to be added to; the forward pass has none."""
        return [states.new_zeros(states.shape) for states in (self.q, self.k, self.v)]

    def gradients(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Of this group's heads of query, key and value [B, M, T or S, D], and of the weights at `places`."""
        grad_q, grad_k, grad_v = self.grads
        flat: list[Any] = [*self.pre.flat_grads(), *self.post.flat_grads()]
        return [grad_q.mul_(self.scaling), grad_k, grad_v, *(flat[place] for place in places)]

    def add_to(self, totals: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Adds `gradients` to those of all groups; heads may share a key and a value, in a group or across groups."""
        for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
            if i in (1, 2):
                total.index_add_(1, self.kv_heads, grad)
            elif total.dim() == 3:  # [G, M, M], a static projection
                total[self.group] = grad[0]
            else:
                total[:, self.heads] = grad


for _name in (CHUNKED, DEFAULT_ATTENTION):  # the default's layers decide themselves what they use
    AttentionInterface.register(_name, chunked_attention)

__all__ = ["CHUNKED", "chunked_attention", "flatten_weights"]
