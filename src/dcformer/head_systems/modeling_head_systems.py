"""DCFormer models whose attention layers hold a `HeadSystem`. Everything but the attention module is inherited.

Letters: B batch, T queries.
"""

import copy
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import can_return_tuple

from ..compose_dcformer import FUSED_ATTENTION
from ..modeling_dcformer import DCFormerDecoderLayer, DCFormerForCausalLM, DCFormerModel, DCFormerPreTrainedModel
from .attention_head_systems import HeadSystemsAttention
from .base import HeadSystem
from .collaborative_mixing import Mixing
from .configuration_head_systems import HeadSystemsConfig
from .outputs_head_systems import (
    HeadSystemsCausalLMOutput,
    HeadSystemsModelOutput,
    HeadSystemsSequenceClassifierOutput,
    aux_loss,
    collected,
    finished,
)
from .registry import make_system, system_class


class HeadSystemsDecoderLayer(DCFormerDecoderLayer):
    """A layer with a head system."""

    attention_class = HeadSystemsAttention


class HeadSystemsPreTrainedModel(DCFormerPreTrainedModel):
    """What all models with a head system have in common."""

    config: HeadSystemsConfig
    _no_split_modules = ["HeadSystemsDecoderLayer"]
    _can_record_outputs = {"hidden_states": HeadSystemsDecoderLayer, "attentions": HeadSystemsAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadSystem | Mixing):
            module.init_weights()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As for DCFormer, with the widths that the system gives queries, keys and values."""
        name: str = super().get_correct_attn_implementation(requested_attention, is_init_check)
        if name in FUSED_ATTENTION:
            widths = [w for i in range(self.config.num_hidden_layers) for w in make_system(self.config, i).map_widths]
            wide = copy.copy(self.config)
            wide.head_dim = max(widths, default=self.config.head_dim)
            if (reason := FUSED_ATTENTION[name].unsupported_reason(wide)) is not None:
                raise ValueError(f"attn_implementation={name!r} cannot run this model: {reason}.")
        return name

    def fuse_projections(self) -> None:
        """Refused: the projections are the head system's.

        Raises:
            ValueError: always.
        """
        raise ValueError("fuse_projections fuses the projections of plain attention; a head system has its own.")

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """As for DCFormer, for systems whose parameters can be divided by heads.

        Raises:
            ValueError: for the others.
        """
        name = model.config.head_system
        is_split = mesh_manager is not None and distributed_config.tp_size > 1 and distributed_config.tp_plan != {}
        if is_split and not system_class(name).splits_by_heads:
            raise ValueError(
                f"head_system={name!r} has no tensor parallelism: its heads share channels, or a choice among all of "
                "them, so that they cannot be divided over devices. Use FSDP, which splits parameters."
            )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)


class HeadSystemsModel(HeadSystemsPreTrainedModel, DCFormerModel):
    """The decoder, with a head system in every layer."""

    layer_class = HeadSystemsDecoderLayer

    def __init__(self, config: HeadSystemsConfig):
        super().__init__(config)
        self._extras: dict[str, Any] = {}  # of the last forward pass, for the heads

    @can_return_tuple
    @wraps(DCFormerModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsModelOutput:
        wants_logits = kwargs.pop("output_router_logits", None)
        wants_gates = kwargs.get("output_attentions", self.config.output_attentions)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        outputs = super().forward(*args, **kwargs, return_dict=True)
        layers: Any = self.layers[: self.config.num_hidden_layers]
        systems = [layer.self_attn.system for layer in layers]
        if wants_logits is None:
            wants_logits = bool(systems) and getattr(systems[0].options, "output_router_logits", False)
        self._extras = {
            "aux_loss": aux_loss(systems, mask, self.training),
            "router_logits": collected([system.router_logits for system in systems]) if wants_logits else None,
            "head_gates": collected([system.gates for system in systems]) if wants_logits or wants_gates else None,
        }
        for system in systems:  # graphs are not kept longer than the outputs
            system.router_logits = system.gates = None
        return HeadSystemsModelOutput(**outputs, **self._extras)


class HeadSystemsForCausalLM(HeadSystemsPreTrainedModel, DCFormerForCausalLM):
    """The language model."""

    decoder_class = HeadSystemsModel

    @can_return_tuple
    @wraps(DCFormerForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsCausalLMOutput:
        return finished(self, HeadSystemsCausalLMOutput, super().forward(*args, **kwargs, return_dict=True))

    def _get_static_cache_init_shape(self) -> tuple[Any, Any] | None:
        """None, to allocate static caches on the first forward, where the cache is not that of plain attention."""
        systems = [layer.self_attn.system for layer in self.model.layers]
        plain = (self.config.num_key_value_heads, (self.config.head_dim, self.config.head_dim))
        is_plain = all((system.cache_heads, system.cache_widths) == plain for system in systems)
        return super()._get_static_cache_init_shape() if is_plain else None


class HeadSystemsForSequenceClassification(GenericForSequenceClassification, HeadSystemsPreTrainedModel):
    """The decoder with a classifier of whole sequences."""

    @can_return_tuple
    @wraps(GenericForSequenceClassification.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsSequenceClassifierOutput:
        return finished(self, HeadSystemsSequenceClassifierOutput, super().forward(*args, **kwargs, return_dict=True))


__all__ = [
    "HeadSystemsAttention",
    "HeadSystemsForCausalLM",
    "HeadSystemsForSequenceClassification",
    "HeadSystemsModel",
    "HeadSystemsPreTrainedModel",
]
