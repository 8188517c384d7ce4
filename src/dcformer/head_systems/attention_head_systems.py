"""The attention module of models with a head system: everything that is not a system's own business.

Letters: B batch, T queries, S keys, H query heads, D head dim, E hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..compose_dcformer import ComposeSettings
from ..heads_dcformer import apply_rotary
from ..modeling_dcformer import DCFormerAttention, DCFormerRMSNorm
from .base import HeadSystem
from .configuration_head_systems import HeadSystemsConfig
from .registry import make_system

_COMPOSE = ("rank", "groups", "pre", "post", "query", "key", "projection", "gate", "static", "act")


class SystemProjections:
    """Where hidden states become heads and heads become hidden states: steps of any attention that holds a system."""

    system: HeadSystem
    o_proj: nn.Linear

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, E] -> queries, keys and values [B, heads, T, width], as the system caches them."""
        return self.system.project(hidden_states, hidden_states)

    def _output(self, output: torch.Tensor, hidden_states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, Dz] of the heads -> [B, T, E], through what the system does to them."""
        return self.o_proj(self.system(output, hidden_states, query).flatten(2))


class HeadSystemsAttention(SystemProjections, DCFormerAttention):
    """Attention as a head system has it, with composition of its maps. The system holds q, k and v projections."""

    def __init__(self, config: HeadSystemsConfig, layer_idx: int):
        nn.Module.__init__(self)  # none of the projections of plain attention
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.key_heads = self.value_heads = None
        self.attention_dropout = config.attention_dropout
        self.system = make_system(config, layer_idx)
        self.scaling = self.system.scaling
        self.num_key_value_groups = 1
        self.o_proj = nn.Linear(self.system.output_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.qk_norm else nn.Identity()
        heads, cached = config.num_attention_heads, self.system.cache_heads
        is_pruned = not self.system.sizes.composed  # then there may be any number of heads, and nothing to compose
        self.compose = self.compose_class(
            ComposeSettings(
                hidden_size=config.hidden_size,
                num_attention_heads=heads,
                num_key_value_heads=heads if is_pruned else cached,
                **{f"compose_{name}": getattr(config, f"compose_{name}") for name in _COMPOSE},
            )
        )
        self.fused = None

    @property
    def keeps_shapes(self) -> bool:  # type: ignore[override]  # a constant of plain attention
        """Whether queries, keys and values have the shapes of plain attention, which kernels are made for."""
        return self.system.keeps_shapes

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Channels of a cached key and of a cached value, without composition weights."""
        return self.system.cache_widths

    def _place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        is_cached: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [B, heads, T, width] of `_project`, normalized and rotated in the system's way."""
        query = self.system.position(query, self._rotate(self.q_norm, rope))
        key = self.system.position(key, self._rotate(self.k_norm, rope))
        return query, key, value

    def _rotate(self, norm: nn.Module, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Callable:
        """Norm and RoPE of heads [B, any, N, at most D]; narrower ones have the first of the angles."""

        def rotate(states: torch.Tensor) -> torch.Tensor:
            cos, sin = position_embeddings
            half = min(cos.shape[-1], states.shape[-1]) // 2
            if 2 * half < cos.shape[-1]:
                cos, sin = (torch.cat([angles[..., :half]] * 2, dim=-1) for angles in (cos, sin))
            return apply_rotary(norm(states), cos, sin)

        return rotate

    def _attend(
        self,
        implementation: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `DCFormerAttention` has it, with what the system makes of queries and cached keys and values."""
        return super()._attend(implementation, *self.system.expand(query, key, value), attention_mask, **kwargs)


__all__ = ["HeadSystemsAttention", "SystemProjections"]
