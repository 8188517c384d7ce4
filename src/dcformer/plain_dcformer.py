"""Attention where nothing is composed: torch's own, in memory linear in T and S whoever sees what.

Letters: B batch, T queries, S keys, H query heads, D head dim; t queries of a block, S' the keys that it may see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .compose_dcformer import accumulation_dtype, without_autocast
from .masks_dcformer import causal_intervals, interval_rows, visible_and_bias

QUERY_BLOCK = 512  # queries of a block, and no fewer than
LEAST_QUERIES = 16
MASK_NUMBERS = 1 << 21  # of a block's mask: at most so many, if there may be so few queries


def attend_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: Sequence[torch.Tensor],
    causal: bool,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Attention without composition, by blocks of queries where a mask says who sees what.

    Args:
        query, key, value: [B, H, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv], S > 0.
        masks: nothing, [mask] or [first, last], as `QueryBlockMask.tensors` gives them; a mask may be additive.
        causal: without masks: the last query is at the last key, and none sees a later one.
        window: keys that a query sees then, its own included; None for all.
        scaling: factor of the scores.

    Returns:
        [B, T, H, Dv]. In a graph that is traced there may be neither masks nor a window, and S must be T if `causal`.
    """
    length, key_length = query.shape[2], key.shape[2]
    blocks = [_PlainBlock(slice(0, length), slice(0, key_length), causal)]
    if not masks and causal and (window is not None or length != key_length):
        masks = causal_intervals(length, key_length, window, query.device)
    if masks:
        size = max(LEAST_QUERIES, min(QUERY_BLOCK, MASK_NUMBERS // max(1, masks[0].shape[0] * key_length)))
        parts = [slice(t, min(length, t + size)) for t in range(0, length, size)]
        spans = [[0, key_length]] * len(parts)
        if len(masks) == 2:
            ends = (torch.stack([masks[0][:, part].min(), masks[1][:, part].max()]) for part in parts)
            spans = torch.stack(list(ends)).tolist()  # the one look at the device
        blocks = [  # where nothing is seen, of a key that is hidden
            _PlainBlock(part, slice(low, max(low + 1, high))) for part, (low, high) in zip(parts, spans, strict=True)
        ]
    if torch.compiler.is_compiling():
        (block,) = blocks
        output = block.output([query, key, value], masks, scaling)
    else:
        output = _AttendPlain.apply(query, key, value, masks, blocks, scaling)
    return output.transpose(1, 2)


@dataclass
class _PlainBlock:
    """A block of queries and the keys that they may see, without composition.

    Attributes:
        queries, keys: slices of T and S.
        is_causal: whether there is no mask but causality.
    """

    queries: slice
    keys: slice
    is_causal: bool = False

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        return [query[:, :, self.queries], key[:, :, self.keys], value[:, :, self.keys]]

    def output(self, inputs: list[torch.Tensor], masks: Sequence[torch.Tensor], scaling: float) -> torch.Tensor:
        """[B, H, t, Dv] of the block's `inputs`, zeros where a query sees nothing."""
        query, key, value = inputs
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        if not masks:
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, **options)
        if len(masks) == 2:
            first, last = (t[:, self.queries] for t in masks)
            visible, bias = interval_rows(first, last, self.keys.start, self.keys.stop)[:, None], None
        else:
            visible, bias = visible_and_bias(masks[0][:, :, self.queries])
        mask = visible if bias is None else bias.to(query.dtype).masked_fill(~visible, float("-inf"))
        output = F.scaled_dot_product_attention(query, key, value, mask, **options)
        return output.masked_fill(~visible.any(-1, keepdim=True), 0.0)


class _AttendPlain(torch.autograd.Function):
    """Blocks one after the other, [B, H, T, Dv]. The backward pass does each anew: masks of all would be [T, S]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        masks: Sequence[torch.Tensor],
        blocks: Sequence[_PlainBlock],
        scaling: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.masks, ctx.blocks, ctx.scaling = masks, blocks, scaling
        outputs = [block.output(block.inputs(query, key, value), masks, scaling) for block in blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        query, key, value = ctx.saved_tensors
        compute = accumulation_dtype(query.dtype)
        grads = [torch.zeros_like(t, dtype=compute) for t in (query, key, value)]
        for block in ctx.blocks:
            inputs = [t.detach().requires_grad_() for t in block.inputs(query, key, value)]
            with torch.enable_grad(), without_autocast(query.device.type):
                output = block.output(inputs, ctx.masks, ctx.scaling)
                found = torch.autograd.grad(output, inputs, grad_output[:, :, block.queries])
            for total, one in zip(block.inputs(*grads), found, strict=True):
                total += one
        return (*(grad.to(query.dtype) for grad in grads), None, None, None)


__all__ = ["attend_plain"]
