"""Composed attention in plain torch: "eager", the definition, and "dcformer_chunked", linear in memory.

Both are registered with Transformers under these names (`attn_implementation`). Letters: B batch, T queries, S keys,
H query heads, M heads of a group, D head dim, R rank, t queries of a block.

What both compute (paper section 3.1), composition inside groups of heads:

    scores  = q kᵀ · scaling                  [B, H, T, S], from inputs in the model's dtype, kept in float32
    weights = softmax(mask(compose(scores)))  float32; a row with nothing to see is all zeros
    output  = compose(weights) v              the composed weights are rounded to the model's dtype first
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .compose_dcformer import ComposeWeights, SideWeights, accumulation_dtype, compose

# Scores of one block of queries in the chunked implementation: at most this many (a soft bound, per problem).
BLOCK_SCORES = 1 << 20
MAX_QUERY_BLOCK = 128
# Up to this many queries (decoding, assisted decoding) the definition itself is linear in S and has the least overhead.
FEW_QUERIES = 16


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

    Arguments are those of Transformers' mask functions (`AttentionMaskInterface`).
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: int
    mask_function: Any
    attention_mask: torch.Tensor | None
    use_vmap: bool
    device: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask this stands for: [B, 1, T, S]."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

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


def _causal_rows(
    start: int, stop: int, query_length: int, key_length: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Causal (and windowed) mask of queries `start` to `stop` when the last query is the last key: [t, S] bool."""
    position = torch.arange(start, stop, device=device)[:, None] + (key_length - query_length)
    keys = torch.arange(key_length, device=device)[None]
    visible = keys <= position
    return visible if window is None else visible & (keys > position - window)


def _visible_and_bias(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Splits a mask into what is visible (bool) and what is added to scores. Additive masks hide with huge negatives."""
    if mask.dtype == torch.bool:
        return mask, None
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


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any) -> None:
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not belong together: "
            "expected [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, Dv] with H a multiple of Hkv."
        )
    if attention_mask is not None:
        expected = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        shape = tuple(attention_mask.shape)
        if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape[:2], expected[:2], strict=True)) or (
            shape[2:] != expected[2:]
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
) -> LayerTrace:
    """The definition of composed attention up to the composed weights; see the head of this file."""
    compute = accumulation_dtype(query.dtype)
    key = _repeat_heads(key, query.shape[1])
    scores = torch.matmul(query.to(compute), key.to(compute).transpose(-1, -2)) * scaling  # [B, H, T, S]
    composed_scores = compose(scores, pre)
    weights = _masked_softmax(composed_scores, visible, bias)
    return LayerTrace(scores, composed_scores, weights, compose(weights, post))


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
    _check_shapes(query, key, value, attention_mask)
    visible = bias = None
    if attention_mask is not None:
        visible, bias = _visible_and_bias(attention_mask)
    elif getattr(module, "is_causal", True):
        length, key_length = query.shape[2], key.shape[2]
        visible = _causal_rows(0, length, length, key_length, sliding_window, query.device)
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
        ValueError: on shapes that do not fit, or when attention maps are asked for.
    """
    _check_shapes(query, key, value, attention_mask)
    if compose_trace is not None or kwargs.get("output_attentions"):
        raise ValueError(
            "attn_implementation='dcformer_chunked' never holds the attention maps, so it cannot return them: load the "
            "model with attn_implementation='eager', or call model.set_attn_implementation('eager')."
        )
    causal = attention_mask is None and getattr(module, "is_causal", True)
    dropout = dropout if module.training else 0.0
    if query.shape[2] <= FEW_QUERIES and not dropout:
        return _attend_few(query, key, value, attention_mask, scaling, pre, post, sliding_window, causal), None
    seed = int(torch.randint(2**31, ())) if dropout else 0
    plan = _Plan(scaling, attention_mask, sliding_window, causal, dropout, seed)
    tensors = (query, key, value, *_flatten(pre), *_flatten(post))
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
        visible, bias = _visible_and_bias(mask)
    elif causal and (query.shape[2] > 1 or sliding_window is not None):
        visible = _causal_rows(0, query.shape[2], query.shape[2], key.shape[2], sliding_window, query.device)
    weights = _attend(query, key, value, visible, bias, scaling, pre, post).composed_weights.to(query.dtype)
    return torch.matmul(weights, _repeat_heads(value, query.shape[1])).transpose(1, 2).contiguous()


# --- dcformer_chunked -------------------------------------------------------------------------------------------------
#
# Groups of heads and sequences of a batch are independent, so the work is a loop over (sequence, group, block of
# queries). Inside, a map is [M, t, S'] with S' the keys the block can see. The mixing is done the cheap way round:
#
#   query side: for each query one [M, M] matrix, I + static + Σ_r down upᵀ + diag(gate), applied to [M, S'] (one bmm);
#   key side: R hidden maps [t, S'] per stage, accumulated head by head in cache.
#
# The backward pass recomputes a block's maps from q, k, v and the weights. Rows are complete, so the softmax needs no
# saved log-sum-exp.


@dataclass
class _Plan:
    """What stays the same for all blocks of one call."""

    scaling: float
    mask: torch.Tensor | QueryBlockMask | None
    window: int | None
    causal: bool
    dropout: float
    seed: int

    def blocks(self, heads: int, query_length: int, key_length: int):
        """Yields (start, stop, first key, key after the last) for each block of queries of a [M, T, S] problem."""
        offset = key_length - query_length
        span = key_length if self.window is None or not self.causal else min(key_length, self.window + MAX_QUERY_BLOCK)
        size = max(8, min(MAX_QUERY_BLOCK, BLOCK_SCORES // max(1, heads * span)))
        for start in range(0, query_length, size):
            stop = min(start + size, query_length)
            first, last = 0, key_length
            if self.causal:
                last = min(key_length, max(0, stop + offset))
                first = 0 if self.window is None else min(last, max(0, start + offset - self.window + 1))
            yield start, stop, first, last

    def block_mask(self, batch: int, heads: slice, start: int, stop: int, first: int, last: int, shape, device):
        """Visible keys and bias of a block, [1 or M, t, S'] each or None, and the key range narrowed to what is seen."""
        if self.mask is None:
            if not self.causal:
                return None, None, first, last
            return _causal_rows(start, stop, shape[0], shape[1], self.window, device)[None, :, first:last], None, first, last
        if isinstance(self.mask, QueryBlockMask):
            rows = self.mask.rows(start, stop)
        else:
            rows = self.mask[:, :, start:stop]
        rows = rows[batch if rows.shape[0] > 1 else 0].to(device)
        rows = rows[heads] if rows.shape[0] > 1 else rows
        visible, bias = _visible_and_bias(rows)
        if not torch.compiler.is_compiling():
            seen = visible.any(dim=0).any(dim=0).nonzero()
            first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        return visible[..., first:last], None if bias is None else bias[..., first:last], first, last

    def keep(self, batch: int, group: int, start: int, like: torch.Tensor) -> torch.Tensor | None:
        """Dropout factors of a block, the same whenever they are asked for."""
        if not self.dropout:
            return None
        generator = torch.Generator(like.device).manual_seed(self.seed + 1_000_003 * batch + 10_007 * group + start)
        kept = torch.rand(like.shape, generator=generator, device=like.device) >= self.dropout
        return kept.to(like.dtype) / (1 - self.dropout)


def _flatten(weights: ComposeWeights | None) -> tuple[torch.Tensor | None, ...]:
    """The 7 tensors of a stage: query down, up, gate, key down, up, gate, static."""
    weights = weights or ComposeWeights()
    query, key = weights.query or SideWeights(), weights.key or SideWeights()
    return (query.down, query.up, query.gate, key.down, key.up, key.gate, weights.static)


class _Stage:
    """One stage's weights for one sequence and one group, in the layout in which the blocks use them."""

    def __init__(self, tensors, batch: int, group: int, heads: slice, compute: torch.dtype):
        q_down, q_up, q_gate, k_down, k_up, k_gate, static = (
            None if w is None else (w[group] if i == 6 else w[batch, heads]).to(compute) for i, w in enumerate(tensors)
        )
        self.q_down, self.q_up, self.q_gate, self.static = q_down, q_up, q_gate, static  # [M, T, R], [M, T], [M, M]
        self.k_down = None if k_down is None else k_down.permute(2, 0, 1).contiguous()  # [R, M, S]
        self.k_up = None if k_up is None else k_up.permute(2, 0, 1).contiguous()  # [R, M, S]
        self.k_gate = None if k_gate is None else k_gate.contiguous()  # [M, S]
        self.mixes_query = q_down is not None or q_gate is not None or static is not None
        self.mixes_key = k_down is not None or k_gate is not None

    def matrix(self, start: int, stop: int) -> torch.Tensor:
        """One mixing matrix per query, from head (row) to head (column), the skip connection included: [t, M, M]."""
        heads = next(w for w in (self.q_down, self.q_gate, self.static) if w is not None)
        out = torch.eye(heads.shape[0], dtype=heads.dtype, device=heads.device)
        if self.static is not None:
            out = out + self.static
        out = out.expand(stop - start, -1, -1)
        if self.q_down is not None:
            down, up = self.q_down[:, start:stop], self.q_up[:, start:stop]  # [M, t, R]
            out = torch.baddbmm(out, down.transpose(0, 1), up.permute(1, 2, 0))
        if self.q_gate is not None:
            out = out + torch.diag_embed(self.q_gate[:, start:stop].T)
        return out

    def mix(self, maps: torch.Tensor, start: int, stop: int, keys: slice) -> torch.Tensor:
        """Composes [M, t, S'] maps of queries `start` to `stop` and keys `keys`."""
        if not self.mixes_query and not self.mixes_key:
            return maps
        if self.mixes_query:
            # [t, M, M] x [t, M, S'] -> [t, M, S'], seen as [M, t, S']
            out = torch.bmm(self.matrix(start, stop).transpose(1, 2), maps.transpose(0, 1)).transpose(0, 1)
        else:
            out = maps.clone()
        if self.k_down is not None:
            down, up = self.k_down[..., keys], self.k_up[..., keys]  # [R, M, S']
            for rank in range(down.shape[0]):
                hidden = _weighted_sum(maps, down[rank])  # [t, S']
                for head in range(maps.shape[0]):
                    out[head].addcmul_(hidden, up[rank, head])
        if self.k_gate is not None:
            gate = self.k_gate[:, keys]
            for head in range(maps.shape[0]):
                out[head].addcmul_(maps[head], gate[head])
        return out


def _weighted_sum(maps: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Σ_m maps[m] · factors[m]: [M, t, S'] and [M, S'] -> [t, S']."""
    out = maps[0] * factors[0]
    for head in range(1, maps.shape[0]):
        out.addcmul_(maps[head], factors[head])
    return out


class _StageGradients:
    """Gradients of one `_Stage`, accumulated over blocks, and the way back through its mixing."""

    def __init__(self, stage: _Stage):
        self.stage = stage
        for name in ("q_down", "q_up", "q_gate", "static", "k_down", "k_up", "k_gate"):
            weight = getattr(stage, name)
            setattr(self, name, None if weight is None else torch.zeros_like(weight))

    def mix_backward(
        self, maps: torch.Tensor, grad: torch.Tensor, start: int, stop: int, keys: slice
    ) -> torch.Tensor:
        """From the gradient of the composed maps to that of `maps`; both [M, t, S']. Adds to the weights' gradients."""
        stage = self.stage
        if not stage.mixes_query and not stage.mixes_key:
            return grad
        if stage.mixes_query:
            out = torch.bmm(stage.matrix(start, stop), grad.transpose(0, 1)).transpose(0, 1)
            pairs = torch.bmm(maps.transpose(0, 1), grad.permute(1, 2, 0))  # [t, M, M]: Σ_s maps[j] grad[m]
            if stage.static is not None:
                self.static += pairs.sum(0)
            if stage.q_down is not None:
                down, up = stage.q_down[:, start:stop], stage.q_up[:, start:stop]  # [M, t, R]
                self.q_down[:, start:stop] = torch.bmm(pairs, up.transpose(0, 1)).transpose(0, 1)
                self.q_up[:, start:stop] = torch.bmm(pairs.transpose(1, 2), down.transpose(0, 1)).transpose(0, 1)
            if stage.q_gate is not None:
                self.q_gate[:, start:stop] = pairs.diagonal(dim1=1, dim2=2).T
        else:
            out = grad.clone()
        heads = range(maps.shape[0])
        if stage.k_down is not None:
            down, up = stage.k_down[..., keys], stage.k_up[..., keys]  # [R, M, S']
            for rank in range(down.shape[0]):
                hidden = _weighted_sum(maps, down[rank])  # [t, S']
                grad_hidden = _weighted_sum(grad, up[rank])  # [t, S']
                for head in heads:
                    self.k_up[rank, head, keys] += (hidden * grad[head]).sum(0)
                    self.k_down[rank, head, keys] += (grad_hidden * maps[head]).sum(0)
                    out[head].addcmul_(grad_hidden, down[rank, head])
        if stage.k_gate is not None:
            gate = stage.k_gate[:, keys]
            for head in heads:
                self.k_gate[head, keys] += (maps[head] * grad[head]).sum(0)
                out[head].addcmul_(grad[head], gate[head])
        return out

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order and layout of `_flatten`, without the batch and head axes: [M, N, R], [M, N], [M, M]."""
        k_down, k_up = (None if w is None else w.permute(1, 2, 0) for w in (self.k_down, self.k_up))
        return (self.q_down, self.q_up, self.q_gate, k_down, k_up, self.k_gate, self.static)


def _problems(groups: int, tensors, compute: torch.dtype):
    """Splits a call into independent problems: yields (sequence, group, heads, q, k, v, pre, post).

    q is [M, T, D], k and v are [M, S, D], in the accumulation dtype.
    """
    query, key, value = tensors[:3]
    batch, total = query.shape[:2]
    per_group = total // groups
    for b in range(batch):
        repeated = [_repeat_heads(states[b : b + 1], total)[0].to(compute) for states in (key, value)]
        for group in range(groups):
            heads = slice(group * per_group, (group + 1) * per_group)
            pre, post = (_Stage(tensors[i : i + 7], b, group, heads, compute) for i in (3, 10))
            yield b, group, heads, query[b, heads].to(compute), repeated[0][heads], repeated[1][heads], pre, post


def _block_maps(q, k, plan: _Plan, pre: _Stage, post: _Stage, visible, bias, start, stop, keys: slice):
    """Scores, weights and composed weights of a block, each [M, t, S']."""
    scores = torch.bmm(q[:, start:stop] * plan.scaling, k[:, keys].transpose(1, 2))
    weights = _masked_softmax(pre.mix(scores, start, stop, keys), visible, bias)
    return scores, weights, post.mix(weights, start, stop, keys)


def _chunked_forward(plan: _Plan, groups: int, tensors) -> torch.Tensor:
    """Forward pass; `tensors` are query, key, value and the flattened stages. Returns [B, H, T, D]."""
    query, key, value = tensors[:3]
    compute = accumulation_dtype(query.dtype)
    output = query.new_zeros((*query.shape[:3], value.shape[-1]))
    shape = (query.shape[2], key.shape[2])
    for b, group, heads, q, k, v, pre, post in _problems(groups, tensors, compute):
        for start, stop, first, last in plan.blocks(q.shape[0], *shape):
            visible, bias, first, last = plan.block_mask(b, heads, start, stop, first, last, shape, q.device)
            if first == last:
                continue
            keys = slice(first, last)
            _, _, composed = _block_maps(q, k, plan, pre, post, visible, bias, start, stop, keys)
            composed = composed.to(query.dtype).to(compute)
            if (keep := plan.keep(b, group, start, composed)) is not None:
                composed = composed * keep
            output[b, heads, start:stop] = torch.bmm(composed, v[:, keys]).to(query.dtype)
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
        query, key, value = tensors[:3]
        compute = accumulation_dtype(query.dtype)
        shape = (query.shape[2], key.shape[2])
        grads = [None if t is None else torch.zeros_like(t, dtype=compute) for t in tensors]
        repeats = query.shape[1] // key.shape[1]
        for b, group, heads, q, k, v, pre, post in _problems(groups, tensors, compute):
            grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            grad_pre, grad_post = _StageGradients(pre), _StageGradients(post)
            for start, stop, first, last in plan.blocks(q.shape[0], *shape):
                visible, bias, first, last = plan.block_mask(b, heads, start, stop, first, last, shape, q.device)
                if first == last:
                    continue
                keys = slice(first, last)
                scores, weights, composed = _block_maps(
                    q, k, plan, pre, post, visible, bias, start, stop, keys
                )
                composed = composed.to(query.dtype).to(compute)
                grad_out = grad_output[b, heads, start:stop].to(compute)  # [M, t, D]
                grad_map = torch.bmm(grad_out, v[:, keys].transpose(1, 2))  # [M, t, S']
                if (keep := plan.keep(b, group, start, composed)) is not None:
                    composed, grad_map = composed * keep, grad_map * keep
                grad_v[:, keys] += torch.bmm(composed.transpose(1, 2), grad_out)
                grad_map = grad_post.mix_backward(weights, grad_map, start, stop, keys)
                grad_map = torch._softmax_backward_data(grad_map, weights, -1, weights.dtype)
                grad_map = grad_pre.mix_backward(scores, grad_map, start, stop, keys)
                grad_q[:, start:stop] = torch.bmm(grad_map, k[:, keys]) * plan.scaling
                grad_k[:, keys] += torch.bmm(grad_map.transpose(1, 2), q[:, start:stop] * plan.scaling)
            grads[0][b, heads] = grad_q
            kv_heads = torch.arange(heads.start, heads.stop, device=q.device) // repeats
            grads[1][b].index_add_(0, kv_heads, grad_k)
            grads[2][b].index_add_(0, kv_heads, grad_v)
            for offset, stage in ((3, grad_pre), (10, grad_post)):
                for i, grad in enumerate(stage.tensors(), start=offset):
                    if grad is None:
                        continue
                    if i == offset + 6:
                        grads[i][group] += grad
                    else:
                        grads[i][b, heads] = grad
        return None, None, *(None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


AttentionInterface.register("dcformer_chunked", chunked_attention)
AttentionMaskInterface.register("dcformer_chunked", chunked_mask)

__all__ = ["ComposeTrace", "LayerTrace", "QueryBlockMask", "chunked_attention", "chunked_mask", "eager_attention"]
