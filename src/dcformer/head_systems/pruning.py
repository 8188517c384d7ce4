"""Which heads matter, and models without those that do not."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .convert import to_head_system
from .head_pruning import HeadPruning


def _attentions(model: Any) -> list[Any]:
    found = [layer.self_attn for layer in model.base_model.layers]
    if not found or not all(isinstance(getattr(attention, "system", None), HeadPruning) for attention in found):
        raise ValueError(
            "the model's head_system is not 'head_pruning': to_head_system(model, 'head_pruning') makes it so."
        )
    return found


def _rows(heads: list[int], width: int) -> list[int]:
    return [head * width + channel for head in heads for channel in range(width)]


def _shrink(linear: nn.Linear, dim: int, kept: list[int]) -> None:
    """Keeps some rows (dim 0) or columns (dim 1) of a linear layer."""
    if len(kept) == linear.weight.shape[dim]:
        return
    index = torch.tensor(kept, device=linear.weight.device)
    linear.weight = nn.Parameter(linear.weight.detach().index_select(dim, index), linear.weight.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[index], linear.bias.requires_grad)


@torch.no_grad()
def prune_heads(model: Any) -> int:
    """Removes the heads whose gate is 0 in evaluation, in place; the logits in evaluation stay as they are.

    Of a layer without open gates one head stays, closed. With composition, queries and keys of removed heads stay: the
    other heads read their maps. An optimizer of the model must be made anew.

    Args:
        model: with head_system "head_pruning".

    Returns:
        the number of parameters removed.

    Raises:
        ValueError: when the model has another system, or projections that are no plain linear layers, such as adapters.
    """
    before = sum(p.numel() for p in model.parameters())
    attentions = _attentions(model)
    kept_heads = []
    for attention in attentions:
        system = attention.system
        for linear in (system.q_proj, system.k_proj, system.v_proj, attention.o_proj):
            if type(linear) is not nn.Linear:
                raise ValueError(f"a projection is a {type(linear).__name__}: merge adapters before heads are removed.")
        gates = (system.log_alpha.sigmoid() * 1.2 - 0.1).clamp(0, 1)
        open_ = [place for place, gate in enumerate(gates.tolist()) if gate > 0] or [0]
        kept_heads.append([system.kept[place] for place in open_])
    options = dict(model.config.head_system_options, kept_heads=kept_heads)
    for attention in attentions:
        old = attention.system
        new = HeadPruning(old.sizes, type(old.options).of(options))
        width, places = old.sizes.head_dim, [old.kept.index(head) for head in new.kept]
        kv_places = [old.kv_kept.index(head) for head in new.kv_kept]
        if not old.sizes.composed:
            _shrink(old.q_proj, 0, _rows(places, width))
            _shrink(old.k_proj, 0, _rows(kv_places, width))
        _shrink(old.v_proj, 0, _rows(kv_places, width))
        _shrink(attention.o_proj, 1, _rows(places, width))
        new.q_proj, new.k_proj, new.v_proj = old.q_proj, old.k_proj, old.v_proj
        new.log_alpha = nn.Parameter(old.log_alpha.detach()[places], old.log_alpha.requires_grad)
        attention.system = new.train(old.training)
    model.config.head_system_options = options
    return before - sum(p.numel() for p in model.parameters())


def head_importance(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean |g·∂L/∂g| of every head at g = 1, over batches: what a loss would change if the head were closed a little.

    Args:
        model: a causal model of this package, of any composition; one with another head system is refused.
        batches: arguments of the model with `labels`; the mean is over them, so give sequences one by one.

    Returns:
        [layers, H], float32 on the CPU.

    Raises:
        ValueError: without batches.
    """
    pruned = to_head_system(model, "head_pruning", l0_penalty=0.0).eval()
    attentions, total, count = _attentions(pruned), None, 0
    for batch in batches:
        gates = [torch.ones_like(attention.system.log_alpha, requires_grad=True) for attention in attentions]
        for attention, gate in zip(attentions, gates, strict=True):
            attention.system.fixed_gates = gate
        loss = pruned(**batch).loss
        found = torch.stack([g.abs().float().cpu() for g in torch.autograd.grad(loss, gates)])
        total, count = found if total is None else total + found, count + 1
    if total is None:
        raise ValueError("there are no batches to rank heads by: give at least one.")
    return total / count


__all__ = ["head_importance", "prune_heads"]
