"""Which heads matter, and models without those that do not."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..shards import refuse_shards
from .configuration_head_systems import own_head_fields
from .convert import to_head_system
from .head_pruning import HeadPruning


def _attentions(model: Any) -> list[Any]:
    found = [getattr(layer, "self_attn", None) or layer.attention for layer in model.base_model.layers]  # or of images
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
        ValueError: when the model has another system, or projections that are not plain linear layers, such as
            adapters, or is in shards (FSDP2).
    """
    attentions = _attentions(model)
    refuse_shards(model, "load it again, whole")
    before = sum(p.numel() for p in model.parameters())
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
        model: with a loss, a causal model say, of any composition. Without a head system, or with "head_pruning", whose
            learned gates are left out.
        batches: arguments of the model with `labels`; the mean is over them, so give sequences one by one.

    Returns:
        [layers, H], float32 on the CPU; 0 for heads that `prune_heads` has removed.

    Raises:
        TypeError: on a model of another kind, and on batches that are not dictionaries.
        ValueError: without batches or labels, on a model with another head system, head maps (DHA) or head embeddings
            (MHE) or in shards (FSDP2), and on a loss or gradients that are not finite.
    """
    system = getattr(model.config, "head_system", "plain") if isinstance(model, PreTrainedModel) else "plain"
    if system not in ("plain", "head_pruning"):
        raise ValueError(
            f"the model has head_system={system!r}: heads are ranked in models without a head system, and in those "
            "with 'plain' or 'head_pruning'."
        )
    if fields := own_head_fields(getattr(model, "config", None)):
        raise ValueError(
            f"the model has {' and '.join(fields)}: heads are ranked by gates of 'head_pruning', which does not go "
            "with these. dcformer.analysis.attribute_heads says what its heads do for a target."
        )
    if system == "head_pruning":
        refuse_shards(model, "load it again, whole")
    gated = (copy.deepcopy(model) if system == "head_pruning" else to_head_system(model, "head_pruning")).eval()
    attentions, count = _attentions(gated), 0
    total = torch.zeros(len(attentions), attentions[0].system.sizes.num_heads)
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"batches is a {type(batches).__name__} of {type(batch).__name__}: expected dictionaries of the "
                'model\'s arguments, such as [{"input_ids": ids, "labels": ids}].'
            )
        gates = [torch.ones_like(attention.system.log_alpha, requires_grad=True) for attention in attentions]
        for attention, gate in zip(attentions, gates, strict=True):
            attention.system.fixed_gates = gate
        if (loss := getattr(gated(**batch), "loss", None)) is None:
            raise ValueError(
                f"a {type(model).__name__} has no loss for a batch of {', '.join(batch)}: give `labels`, and a model "
                "with a head, such as a causal language model."
            )
        gradients = torch.autograd.grad(loss, gates)
        if not all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients)):
            raise ValueError(
                f"batch {count} (loss {loss:.4g}) has a loss or gradients that are not finite: look for parameters "
                "that are not, for labels that are all -100, and for overflow in float16."
            )
        for row, attention, gradient in zip(total, attentions, gradients, strict=True):
            row[attention.system.kept] += gradient.abs().float().cpu()
        count += 1
    if not count:
        raise ValueError("there are no batches to rank heads by: give at least one.")
    return total / count


__all__ = ["head_importance", "prune_heads"]
