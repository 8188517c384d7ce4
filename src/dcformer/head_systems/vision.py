"""DCViT with a head system: the same systems on images, where all tokens see all others and nothing is cached.

Letters: B batch, T tokens, E hidden size, H heads, D head dim.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.utils import can_return_tuple

from ..arguments_dcformer import share_of_labels
from ..compose_dcformer import DCFormerCompose
from ..vision.configuration_dcvit import DCViTConfig
from ..vision.modeling_dcvit import (
    DCViTAttention,
    DCViTForImageClassification,
    DCViTLayer,
    DCViTModel,
    DCViTPreTrainedModel,
    make_qk_norm,
)
from .attention_head_systems import SystemProjections
from .options import OptionsOfLayers
from .outputs_head_systems import HeadSystemsImageClassifierOutput, extras, with_loss
from .pretrained_head_systems import HeadSystemsMixin
from .registry import image_sizes_of, make_system, options_of


@strict
class HeadSystemsViTConfig(OptionsOfLayers, DCViTConfig):
    """Configuration of a DCViT with a head system, model type "dcvit_heads"; arguments as in `HeadSystemsConfig`."""

    model_type = "dcvit_heads"
    keys_to_ignore_at_inference = ["aux_loss", "router_logits", "head_gates"]

    head_system: str = "plain"
    head_system_options: dict | None = None

    def validate_architecture(self):
        """As `DCViTConfig`'s, and checks the head system and its options for every layer."""
        super().validate_architecture()
        options = options_of(self)
        for layer in range(self.num_hidden_layers):
            options.check(image_sizes_of(self, layer))
        options.check_config(self)


class HeadSystemsViTAttention(SystemProjections, DCViTAttention):
    """Attention of all tokens to all tokens, as a head system has it."""

    keeps_shapes = False  # no kernels have been tried with any system

    def __init__(self, config: HeadSystemsViTConfig, layer_idx: int = 0):
        nn.Module.__init__(self)  # none of the projections of plain attention
        self.config = config
        self.attention_dropout = config.attention_probs_dropout_prob
        self.system = make_system(config, sizes=image_sizes_of(config, layer_idx))
        self.scaling = self.system.scaling
        self.o_proj = nn.Linear(self.system.output_width, config.hidden_size)
        self.q_norm, self.k_norm = make_qk_norm(config), make_qk_norm(config)
        self.compose = DCFormerCompose(config)

    def _place(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of `_project` for the attention function: normalized and expanded by the system."""
        query, key = self.system.position(query, self.q_norm), self.system.position(key, self.k_norm)
        return self.system.expand(query, key, value)


class HeadSystemsViTLayer(DCViTLayer):
    """A layer with a head system."""

    attention_class = HeadSystemsViTAttention


class HeadSystemsViTPreTrainedModel(HeadSystemsMixin, DCViTPreTrainedModel):
    """What both models have in common."""

    config: HeadSystemsViTConfig
    _no_split_modules = ["HeadSystemsViTLayer"]
    _can_record_outputs = {"hidden_states": HeadSystemsViTLayer, "attentions": HeadSystemsViTAttention}


class HeadSystemsViTModel(HeadSystemsViTPreTrainedModel, DCViTModel):
    """The vision Transformer."""

    layer_class = HeadSystemsViTLayer


class HeadSystemsViTForImageClassification(HeadSystemsViTPreTrainedModel, DCViTForImageClassification):
    """The vision Transformer with a classifier."""

    model_class = HeadSystemsViTModel

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> HeadSystemsImageClassifierOutput:
        """As `DCViTForImageClassification.forward`, and as language models with head systems return it."""
        wants_logits = kwargs.pop("output_router_logits", None)
        wants_gates = kwargs.get("output_attentions", self.config.output_attentions)
        outputs = super().forward(
            pixel_values, labels, interpolate_pos_encoding, attention_mask, **kwargs, return_dict=True
        )
        layers: Any = self.dcvit.running_layers()
        systems = [layer.attention.system for layer in layers]
        fields = extras(systems, attention_mask, self.training, wants_logits, wants_gates)
        share = 1 if labels is None else share_of_labels(labels, **kwargs)
        return with_loss(HeadSystemsImageClassifierOutput, outputs, fields, systems, share)


__all__ = ["HeadSystemsViTConfig", "HeadSystemsViTForImageClassification", "HeadSystemsViTModel"]
