"""The attention module of models with a head system: everything that is not a system's own business.

Letters: B batch, T queries, S keys, H query heads, D head dim, E hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention_dcformer import attend_composed, eager_attention
from ..cache_dcformer import check_cache_rows
from ..compose_dcformer import CHUNKED, DEFAULT_ATTENTION, ComposeSettings, DCFormerCompose, default_implementation
from ..modeling_dcformer import DCFormerAttention, DCFormerRMSNorm, apply_rotary
from .configuration_head_systems import HeadSystemsConfig
from .registry import make_system

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
        """As `DCFormerAttention.forward`: [B, T, E] -> output [B, T, E], and composed weights of eager."""
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


__all__ = ["HeadSystemsAttention"]
