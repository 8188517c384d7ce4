"""DCFormer models whose attention layers hold a `HeadSystem`. Everything but the attention module is inherited.

Letters: B batch, T queries, S keys, H query heads, D head dim, E hidden size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from ..attention_dcformer import attend_composed, eager_attention
from ..cache_dcformer import check_cache_rows
from ..compose_dcformer import (
    CHUNKED,
    DEFAULT_ATTENTION,
    FUSED_ATTENTION,
    ComposeSettings,
    DCFormerCompose,
    default_implementation,
)
from ..modeling_dcformer import (
    DCFormerAttention,
    DCFormerDecoderLayer,
    DCFormerForCausalLM,
    DCFormerModel,
    DCFormerPreTrainedModel,
    DCFormerRMSNorm,
    apply_rotary,
)
from .base import HeadSystem
from .collaborative_mixing import Mixing
from .configuration_head_systems import HeadSystemsConfig
from .registry import make_system, system_class

_COMPOSE = ("rank", "groups", "pre", "post", "query", "key", "projection", "gate", "static", "act")


class HeadSystemsAttention(DCFormerAttention):
    """Attention as a head system has it, with composition of its maps. The system holds q, k and v projections."""

    def __init__(self, config: HeadSystemsConfig, layer_idx: int):
        nn.Module.__init__(self)  # none of the projections of plain attention
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.attention_dropout = config.attention_dropout
        self.system = make_system(config, layer_idx)
        self.scaling = self.system.scaling
        self.o_proj = nn.Linear(self.system.output_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        heads, cached = config.num_attention_heads, self.system.cache_heads
        is_pruned = not self.system.sizes.composed  # then there may be any number of heads, and nothing to compose
        self.compose = DCFormerCompose(
            ComposeSettings(
                hidden_size=config.hidden_size,
                num_attention_heads=heads,
                num_key_value_heads=heads if is_pruned else cached,
                **{f"compose_{name}": getattr(config, f"compose_{name}") for name in _COMPOSE},
            )
        )
        self.fused = None

    def _turn(self, norm: nn.Module, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Callable:
        """Norm and RoPE of heads [B, any, N, at most D]; narrower ones have the first of the angles."""

        def turn(states: torch.Tensor) -> torch.Tensor:
            cos, sin = position_embeddings
            half = min(cos.shape[-1], states.shape[-1]) // 2
            if 2 * half < cos.shape[-1]:
                cos, sin = (torch.cat([angles[..., :half]] * 2, dim=-1) for angles in (cos, sin))
            return apply_rotary(norm(states), cos, sin)

        return turn

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `DCFormerAttention.forward`: [B, T, E] -> output [B, T, E], and composed weights [B, H, T, S] from eager."""
        system = self.system
        raw_query, key, value = system.project(hidden_states, hidden_states)
        query = system.position(raw_query, self._turn(self.q_norm, position_embeddings))
        key = system.position(key, self._turn(self.k_norm, position_embeddings))
        implementation = self.config._attn_implementation
        if implementation == DEFAULT_ATTENTION:  # kernels are chosen by the shapes of plain attention
            implementation = CHUNKED
            if system.keeps_shapes:
                implementation = default_implementation(self, hidden_states, query, key, attention_mask)
        if past_key_values is None:
            generated, statics = self.compose(hidden_states, implementation)
            pre_key, post_key = generated.get(("pre", "key")), generated.get(("post", "key"))
        else:
            key, value, (generated, statics) = self.compose.packed(hidden_states, key, value, implementation)
            layer_idx = self.layer_idx if layer_idx is None else layer_idx
            if layer_idx == 0:
                check_cache_rows(past_key_values, key, value, system.cache_widths[0])
            key, value = past_key_values.update(key, value, layer_idx)
            key, pre_key = self.compose.unpack(key, system.cache_widths[0], "pre", gather=True)
            value, post_key = self.compose.unpack(value, system.cache_widths[1], "post", gather=True)
        query, key, value = system.expand(query, key, value)
        output, weights = attend_composed(
            ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention),
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            pre=self.compose.stage_weights(generated.get(("pre", "query")), pre_key, statics.get("pre")),
            post=self.compose.stage_weights(generated.get(("post", "query")), post_key, statics.get("post")),
            **kwargs,
        )  # [B, T, H, Dz]
        return self.o_proj(system.output(output, hidden_states, raw_query).flatten(2)), weights


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
        name = super().get_correct_attn_implementation(requested_attention, is_init_check)
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
        if mesh_manager is not None and distributed_config.tp_size > 1 and distributed_config.tp_plan != {}:
            if not system_class(name).splits_by_heads:
                raise ValueError(
                    f"head_system={name!r} has no tensor parallelism: its heads share channels, or a choice among all "
                    "of them, so that they cannot be divided over devices. Use FSDP, which splits parameters."
                )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)


@dataclass
class HeadSystemsModelOutput(BaseModelOutputWithPast):
    """As `BaseModelOutputWithPast`, and what the head systems have to say.

    Args:
        aux_loss: the systems' loss, a mean or sum over layers, without its coefficient.
        router_logits: of each layer, [B, T, routed heads].
        head_gates: of each layer, the factors of the heads' outputs [B, T, H].
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    head_gates: tuple[torch.Tensor, ...] | None = None


@dataclass
class HeadSystemsCausalLMOutput(CausalLMOutputWithPast):
    """As `CausalLMOutputWithPast`, and the last fields of `HeadSystemsModelOutput`; `loss` contains `aux_loss`."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    head_gates: tuple[torch.Tensor, ...] | None = None


@dataclass
class HeadSystemsSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """As `SequenceClassifierOutputWithPast`, and as in `HeadSystemsCausalLMOutput`."""

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    head_gates: tuple[torch.Tensor, ...] | None = None


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
        systems = [layer.self_attn.system for layer in self.layers[: self.config.num_hidden_layers]]
        if wants_logits is None:
            wants_logits = bool(systems) and getattr(systems[0].options, "output_router_logits", False)
        self._extras = {
            "aux_loss": self._aux_loss(systems, mask),
            "router_logits": _all_or_none([system.router_logits for system in systems]) if wants_logits else None,
            "head_gates": _all_or_none([system.gates for system in systems]) if wants_logits or wants_gates else None,
        }
        for system in systems:  # graphs are not kept longer than the outputs
            system.router_logits = system.gates = None
        return HeadSystemsModelOutput(**outputs, **self._extras)

    def _aux_loss(self, systems: list[HeadSystem], mask: Any) -> torch.Tensor | None:
        """The systems' losses over the layers, where padding is known from a mask [B, S]; None where there are none."""
        mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        found = [sum(losses.values()) for system in systems if (losses := system.losses(mask))]
        if not found:
            return None
        if self.training and torch.is_grad_enabled() and not found[0].requires_grad:
            if any(parameter.requires_grad for parameter in systems[0].parameters()):
                raise ValueError(
                    "the head systems' loss has no gradient, as with reentrant gradient checkpointing: pass "
                    'gradient_checkpointing_kwargs={"use_reentrant": False}.'
                )
        total = torch.stack([loss.to(found[0].device) for loss in found]).sum()
        return total / len(found) if systems[0].aux_loss_is_mean else total


def _all_or_none(tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
    there = tuple(tensor for tensor in tensors if tensor is not None)
    return there or None


def _finished(model: Any, output_class: type, outputs: Any) -> Any:
    """Outputs of a head with what the decoder's systems have to say, and their loss in its loss."""
    decoder = model.base_model
    extras, decoder._extras = decoder._extras, {}
    if outputs.loss is not None and extras["aux_loss"] is not None:
        coefficient = decoder.layers[0].self_attn.system.aux_loss_coef
        outputs.loss = outputs.loss + coefficient * extras["aux_loss"].to(outputs.loss.device)
    return output_class(**outputs, **extras)


class HeadSystemsForCausalLM(HeadSystemsPreTrainedModel, DCFormerForCausalLM):
    """The language model."""

    decoder_class = HeadSystemsModel

    @can_return_tuple
    @wraps(DCFormerForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsCausalLMOutput:
        return _finished(self, HeadSystemsCausalLMOutput, super().forward(*args, **kwargs, return_dict=True))

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
        return _finished(self, HeadSystemsSequenceClassifierOutput, super().forward(*args, **kwargs, return_dict=True))


__all__ = [
    "HeadSystemsAttention",
    "HeadSystemsForCausalLM",
    "HeadSystemsForSequenceClassification",
    "HeadSystemsModel",
    "HeadSystemsPreTrainedModel",
]
