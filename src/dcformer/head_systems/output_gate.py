"""Gated heads (arXiv 2505.06708): a sigmoid of the layer's input scales what each head has found.

    z_h <- s · sigmoid(x W_g + b_g) ∘ z_h      after the values, before the output projection

W_g is [E, H] (headwise) or [E, H·D] (elementwise). With s = 2 the gates are 1 at W_g = 0, and as 2·sigmoid(2u) = 1 +
tanh(u), the headwise gate is the query-wise gate of composition after the softmax, with twice its weights.

Letters: B batch, T queries, H heads, D head dim, E hidden size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.utils import logging

from .base import HeadSystem
from .options import HeadSizes, HeadSystemOptions, check_bool, check_range

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class OutputGateOptions(HeadSystemOptions):
    """Options of gated heads.

    Attributes:
        output_gate: "headwise", one gate for a head, or "elementwise", one for each of its channels.
        output_gate_scale: s: 1 as in the paper; 2 for gates of 1 where W_g is 0, which a conversion uses.
        output_gate_bias: whether there is a b_g.
    """

    output_gate: str = "headwise"
    output_gate_scale: float = 1.0
    output_gate_bias: bool = False

    def check(self, sizes: HeadSizes) -> None:
        """Refuses unknown kinds and scales that are not positive."""
        if self.output_gate not in ("headwise", "elementwise"):
            raise ValueError(f"output_gate={self.output_gate!r}: expected 'headwise' or 'elementwise'.")
        check_bool("output_gate_bias", self.output_gate_bias)
        check_range("output_gate_scale", self.output_gate_scale, 1e-6, 1e6, "1 in the paper, 2 for conversions")

    @classmethod
    def for_conversion(cls, has_lost_biases: bool) -> dict[str, Any]:
        """Gates of 1."""
        return {"output_gate_scale": 2.0}

    def check_config(self, config: Any) -> None:
        """Warns where composition has a gate at the same place."""
        if config.compose_gate and ("post", "query") in config.compose_generators:
            logger.warning_once(
                "head_system='output_gate' and compose_gate=True with compose_post and compose_query: two gates of one "
                "kind scale the heads' outputs, output_gate and the query-wise gate of composition after the softmax."
            )


class OutputGate(HeadSystem):
    """Heads whose outputs are gated."""

    options_class = OutputGateOptions
    splits_by_heads = True
    tp_plan: ClassVar = {"gate_proj": "colwise"}

    def __init__(self, sizes: HeadSizes, options: OutputGateOptions):
        super().__init__(sizes, options)
        self.scale = options.output_gate_scale
        width = sizes.head_dim if options.output_gate == "elementwise" else 1
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.num_heads * width, bias=options.output_gate_bias)

    def output(self, z: torch.Tensor, x_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D], gated."""
        gates = self.scale * torch.sigmoid(self.gate_proj(x_q)).unflatten(-1, (z.shape[2], -1))  # [B, T, H, 1 or D]
        self.gates = gates[..., 0].detach() if self.options.output_gate == "headwise" else None
        return gates.to(z.dtype) * z

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """Gates of s/2: exact with `output_gate_scale` 2."""
        nn.init.zeros_(self.gate_proj.weight)
        if self.gate_proj.bias is not None:
            nn.init.zeros_(self.gate_proj.bias)
        return super().from_mha(q, k, v, o)

    def flops(self, length: int) -> int:
        """As plain attention, and 2·E·H or 2·E·H·D."""
        return super().flops(length) + 2 * self.sizes.hidden_size * self.gate_proj.out_features


__all__ = ["OutputGate", "OutputGateOptions"]
