"""What models with a head system return: Transformers' outputs, and the systems' losses, routing and gates."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    SequenceClassifierOutputWithPast,
)

from .base import HeadSystem


@dataclass
class _OfSystems:
    """What head systems have to say, behind the fields of any output.

    Args:
        aux_loss: the systems' loss, a mean or sum over layers, without its coefficient; in `loss` where there is one.
        router_logits: of each layer, [B, T, routed heads].
        head_gates: of each layer, the factors of the heads' outputs [B, T, H].
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    head_gates: tuple[torch.Tensor, ...] | None = None


@dataclass
class HeadSystemsModelOutput(_OfSystems, BaseModelOutputWithPast):
    """As `BaseModelOutputWithPast`, and `aux_loss`, `router_logits` and `head_gates`."""


@dataclass
class HeadSystemsCausalLMOutput(_OfSystems, CausalLMOutputWithPast):
    """As `CausalLMOutputWithPast`, and the last fields of `HeadSystemsModelOutput`; `loss` contains `aux_loss`."""


@dataclass
class HeadSystemsSequenceClassifierOutput(_OfSystems, SequenceClassifierOutputWithPast):
    """As `SequenceClassifierOutputWithPast`, and as in `HeadSystemsCausalLMOutput`."""


@dataclass
class HeadSystemsImageClassifierOutput(_OfSystems, ImageClassifierOutput):
    """As `ImageClassifierOutput`, and as in `HeadSystemsCausalLMOutput`."""


def extras(
    systems: list[HeadSystem], attention_mask: Any, is_training: bool, wants_logits: bool | None, wants_gates: bool
) -> dict[str, Any]:
    """What the systems of all layers have to say of the last forward pass, as the last fields of the outputs; then they
    forget it, so that graphs are not kept longer than the outputs.

    Args:
        systems, attention_mask, is_training: as for `aux_loss`.
        wants_logits: whether the routers' logits are returned; None: as the systems' options say.
        wants_gates: whether gates are, which come with logits, too.
    """
    if wants_logits is None:
        wants_logits = len(systems) > 0 and getattr(systems[0].options, "output_router_logits", False)
    found = {
        "aux_loss": aux_loss(systems, attention_mask, is_training),
        "router_logits": collected([system.router_logits for system in systems]) if wants_logits else None,
        "head_gates": collected([system.gates for system in systems]) if wants_logits or wants_gates else None,
    }
    for system in systems:
        system.router_logits = system.gates = None
    return found


def aux_loss(systems: list[HeadSystem], attention_mask: Any, is_training: bool) -> torch.Tensor | None:
    """The systems' losses of the last forward pass over all layers, without their coefficient.

    Args:
        systems: of the layers.
        attention_mask: [B, S] with 0 for padding; of other masks no padding is known.
        is_training: whether the loss is to be differentiated.

    Returns:
        their mean or sum, or None where there are none.

    Raises:
        ValueError: when it should have a gradient and has none.
    """
    is_padding = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
    mask = attention_mask if is_padding else None
    found = [loss for system in systems for loss in system.losses(mask).values()]
    if not found:
        return None
    trains = is_training and torch.is_grad_enabled()
    if trains and not any(loss.requires_grad for loss in found) and _trains_losses(systems):
        raise ValueError(
            "the head systems' loss has no gradient, as with reentrant gradient checkpointing: pass "
            'gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )
    total = torch.stack([loss.to(found[0].device) for loss in found]).sum()
    return total / len(found) if systems[0].aux_loss_is_mean else total


def _trains_losses(systems: list[HeadSystem]) -> bool:
    """Whether losses are made of parameters that are trained. Not so with adapters elsewhere alone."""
    return any(p.requires_grad for system in systems for p in system.loss_parameters())


def collected(tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
    """The tensors that are not None; None if all are."""
    return tuple(tensor for tensor in tensors if tensor is not None) or None


def finished(model: Any, output_class: type, outputs: Any, share: Any = 1) -> Any:
    """Outputs of a head with what the decoder's systems have to say, and a share of their loss in its loss."""
    decoder = model.base_model
    fields = dict(decoder._extras)
    decoder._extras.clear()  # in place: a wrapper, as FSDP's, would keep what is set to itself
    return with_loss(output_class, outputs, fields, [layer.self_attn.system for layer in decoder.layers], share)


def with_loss(
    output_class: type, outputs: Any, fields: dict[str, Any], systems: list[HeadSystem], share: Any = 1
) -> Any:
    """Outputs of a head with the `extras` of its systems, and a share of their loss in its loss."""
    if outputs.loss is not None and fields["aux_loss"] is not None:
        outputs.loss = outputs.loss + share * systems[0].aux_loss_coef * fields["aux_loss"].to(outputs.loss.device)
    return output_class(**outputs, **fields)


__all__ = [
    "HeadSystemsCausalLMOutput",
    "HeadSystemsImageClassifierOutput",
    "HeadSystemsModelOutput",
    "HeadSystemsSequenceClassifierOutput",
    "aux_loss",
    "extras",
    "finished",
    "with_loss",
]
