"""Attention where nothing is composed, and nothing masked but later keys: torch's own, in memory linear in T and S.

Letters: B batch, T queries, S keys, H query heads, D head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .attention_dcformer import no_transform, refuse_batched
from .compose_dcformer import without_autocast
from .implementations_dcformer import CHUNKED
from .masks_dcformer import has_values


def can_attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, window: int | None, scaling: float
) -> bool:
    """Whether `attend_plain` is right for these: where torch would not hold maps.

    Args:
        query, key, value, causal, scaling: as for `attend_plain`.
        window: keys that a query sees where `causal`, its own included; None for all.
    """
    is_compiling = torch.compiler.is_compiling()
    if type(query) is not torch.Tensor or not (is_compiling or has_values(query.device)):
        return False
    if query.dtype == torch.float64 and query.device.type != "cpu":  # for which torch has the definition only
        return False
    length, key_length = query.shape[2], key.shape[2]
    is_square = statically_known_true(length == key_length)  # no guard: a graph of any length stays one
    is_open = window is None or (not is_compiling and window >= key_length)
    sees_all = not causal or (is_square and is_open)
    return sees_all and query.shape[3] == value.shape[3] and scaling > 0 and statically_known_true(key_length > 0)


def attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scaling: float
) -> torch.Tensor:
    """Attention of all queries to all keys, or to those up to their own.

    Args:
        query, key, value: [B, H, T, D], [B, Hkv, S, D], [B, Hkv, S, D].
        causal: query t sees keys up to t; T = S.
        scaling: factor of the scores.

    Returns:
        [B, T, H, D], contiguous. The backward pass computes it anew: beside its inputs nothing is kept, but for what a
        graph that is traced keeps.
    """
    if torch.compiler.is_compiling():
        return _attend(query, key, value, causal, scaling).transpose(1, 2).contiguous()
    return _AttendPlain.apply(query, key, value, causal, scaling)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scaling: float) -> torch.Tensor:
    if (sharing := query.shape[1] // key.shape[1]) > 1:  # some of torch's kernels would take the definition instead
        key, value = (states.repeat_interleave(sharing, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)  # [B, H, T, D]


class _AttendPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        return _attend(query, key, value, *options).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        refuse_batched(CHUNKED, grad_output)
        return (*_Gradients.apply(grad_output, *ctx.saved_tensors, *ctx.options), None, None)


class _Gradients(torch.autograd.Function):
    """Those of query, key and value. A function of its own, so that it can say that it has no derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scaling: float,
    ) -> tuple[torch.Tensor, ...]:
        query, key, value = (states.detach().requires_grad_() for states in (query, key, value))
        with torch.enable_grad(), without_autocast(query.device.type):
            output = _attend(query, key, value, causal, scaling)
            return torch.autograd.grad(output, (query, key, value), grad_output.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        raise no_transform(CHUNKED, "second derivatives")


__all__ = ["attend_plain", "can_attend_plain"]
