"""DCViT with a head system: the same systems on images, where all tokens see all others and nothing is cached.

Letters: B batch, T tokens, E hidden size, H heads, D head dim.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.utils import can_return_tuple

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
from .base import HeadSystem
from .collaborative_mixing import Mixing
from .options import with_lists
from .outputs_head_systems import aux_loss
from .registry import image_sizes_of, make_system, options_of


@strict
class HeadSystemsViTConfig(DCViTConfig):
    """Configuration of a DCViT with a head system, model type "dcvit_heads"; arguments as in `HeadSystemsConfig`."""

    model_type = "dcvit_heads"

    head_system: str = "plain"
    head_system_options: dict | None = None

    def __post_init__(self, **kwargs):
        self.head_system_options = with_lists(dict(self.head_system_options or {}))
        super().__post_init__(**kwargs)

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
        """Queries, keys and values of `_project` for the attention function: normalised and expanded by the system."""
        query, key = self.system.position(query, self.q_norm), self.system.position(key, self.k_norm)
        return self.system.expand(query, key, value)


class HeadSystemsViTLayer(DCViTLayer):
    """A layer with a head system."""

    attention_class = HeadSystemsViTAttention


class HeadSystemsViTPreTrainedModel(DCViTPreTrainedModel):
    """What both models have in common."""

    config: HeadSystemsViTConfig
    _no_split_modules = ["DCViTEmbeddings", "HeadSystemsViTLayer"]
    _can_record_outputs = {"hidden_states": HeadSystemsViTLayer, "attentions": HeadSystemsViTAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadSystem | Mixing):
            module.init_weights()


class HeadSystemsViTModel(HeadSystemsViTPreTrainedModel, DCViTModel):
    """The vision Transformer."""

    layer_class = HeadSystemsViTLayer


class HeadSystemsViTForImageClassification(HeadSystemsViTPreTrainedModel, DCViTForImageClassification):
    """The vision Transformer with a classifier; the systems' loss is in `loss`."""

    model_class = HeadSystemsViTModel

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As `DCViTForImageClassification.forward`."""
        outputs = super().forward(pixel_values, labels=labels, **kwargs, return_dict=True)
        layers: Any = self.dcvit.layers
        systems = [layer.attention.system for layer in layers]
        visible = kwargs.get("attention_mask")
        found = aux_loss(systems, visible, self.training)
        for system in systems:  # graphs are not kept longer than the outputs
            system.router_logits = None if system.router_logits is None else system.router_logits.detach()
        if outputs.loss is not None and found is not None:
            outputs.loss = outputs.loss + systems[0].aux_loss_coef * found
        return outputs


__all__ = ["HeadSystemsViTConfig", "HeadSystemsViTForImageClassification", "HeadSystemsViTModel"]
