"""Pruned heads: one learned gate for a head and layer (arXiv 1905.09418), pressed to zero by L0 (arXiv 1712.01312).

    training:    u uniform,  s = sigmoid((ln u - ln(1 - u) + a) / β),  g = clip(1.2·s - 0.1, 0, 1),  β = 0.33
    evaluation:  g = clip(1.2·sigmoid(a) - 0.1, 0, 1)
    penalty:     λ Σ sigmoid(a - β ln(0.1 / 1.1)), summed over heads and layers

Heads whose gate is 0 in evaluation can be removed: `prune_heads`. With composition their queries and keys stay, as the
other heads read their maps.
Letters: B batch, T queries, S keys, H heads, H' heads kept, D head dim, E hidden size.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import initialization as init

from .base import HeadSystem
from .head_pruning_options import HeadPruningOptions
from .options import HeadSizes

BETA, LOW, HIGH = 0.33, -0.1, 1.1
START = 3.0  # of a, at which the gate is 1 in evaluation: sigmoid(3)·1.2 - 0.1 > 1


class HeadPruning(HeadSystem):
    """Heads with a gate that can close for good."""

    options_class = HeadPruningOptions
    aux_loss_is_mean = False
    transient = ("_open",)

    def __init__(self, sizes: HeadSizes, options: HeadPruningOptions):
        super().__init__(sizes, options)
        self.aux_loss_coef = options.l0_penalty

    def make_projections(self) -> None:
        """Projections of the heads that are left; with composition queries and keys of all."""
        s, kept = self.sizes, self.options.kept_heads
        self.kept = list(range(s.num_heads)) if kept is None else list(kept[s.layer])
        repeats = s.num_heads // s.num_kv_heads
        self.kv_kept = sorted({head // repeats for head in self.kept})
        self.keeps_shapes = len(self.kept) == s.num_heads
        queries, keys = (s.num_heads, s.num_kv_heads) if s.composed else (len(self.kept), len(self.kv_kept))
        self.q_proj = nn.Linear(s.hidden_size, queries * s.head_dim, bias=s.bias)
        self.k_proj = nn.Linear(s.hidden_size, keys * s.head_dim, bias=s.bias)
        self.v_proj = nn.Linear(s.hidden_size, len(self.kv_kept) * s.head_dim, bias=s.bias)
        self.cache_heads, self.output_width = keys, len(self.kept) * s.head_dim
        # the key head of each query head; None where attention finds it itself
        of_head = [self.kv_kept.index(head // repeats) for head in self.kept]
        even = len(self.kept) // len(self.kv_kept)
        self.kv_index = None if s.composed or of_head == [i // even for i in range(len(of_head))] else of_head
        self.log_alpha = nn.Parameter(torch.full((len(self.kept),), START))
        self.fixed_gates: torch.Tensor | None = None  # [H'], instead of the learned ones: see `head_importance`
        self._open: torch.Tensor | None = None  # `open_gates` of a forward pass, until its loss is made

    def init_weights(self) -> None:
        """Gates that are 1 in evaluation."""
        init.constant_(self.log_alpha, START)

    def head_gates(self) -> torch.Tensor:
        """[H'] in [0, 1]; drawn anew in training."""
        if self.fixed_gates is not None:
            return self.fixed_gates
        logits: torch.Tensor = self.log_alpha
        if self.training:
            u = torch.empty_like(logits).uniform_(1e-6, 1 - 1e-6)
            logits = (u.log() - (-u).log1p() + logits) / BETA
        return (logits.sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)

    def open_gates(self) -> torch.Tensor:
        """How many gates are open, on average."""
        return (self.log_alpha - BETA * math.log(-LOW / HIGH)).sigmoid().sum()

    def project(self, x_q: torch.Tensor, x_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As plain attention's; with composition zeros are the values of key heads that are not left."""
        query, key, value = super().project(x_q, x_kv)
        if value.shape[1] < key.shape[1]:
            places = {head: place for place, head in enumerate(self.kv_kept)}
            nothing = torch.zeros_like(value[:, :1])
            value = torch.cat([value, nothing], dim=1)[:, [places.get(h, -1) for h in range(key.shape[1])]]
        return query, key, value

    def expand(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every query head's key and value, where no rule says which they are."""
        return (query, key, value) if self.kv_index is None else (query, key[:, self.kv_index], value[:, self.kv_index])

    def output(self, z: torch.Tensor, x_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] -> [B, T, H', D], each head times its gate."""
        self._open = self.open_gates()
        gates = self.head_gates().to(z.dtype)
        z = z[:, :, self.kept] if z.shape[2] > len(self.kept) else z
        self.gates = gates.detach().expand(*z.shape[:2], -1)
        return z * gates[:, None]

    def loss_parameters(self) -> Iterable[nn.Parameter]:
        """The gates'."""
        return (self.log_alpha,)

    def losses(self, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The expected number of open gates."""
        found, self._open = self._open, None  # behind the forward pass parameters may be offloaded, or sharded again
        is_lost = torch.is_grad_enabled() and self.log_alpha.requires_grad  # its gradient, by reentrant checkpointing
        if found is None or (is_lost and not found.requires_grad):
            found = self.open_gates()
        return {"l0": found}

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """All gates 1 in evaluation: exact there."""
        if len(self.kept) != self.sizes.num_heads:
            raise ValueError("kept_heads: a conversion begins with all heads; prune_heads removes some afterwards.")
        self.log_alpha.fill_(START)
        return super().from_mha(q, k, v, o)

    def flops(self, length: int) -> int:
        """As plain attention with the heads that are left; with composition the attention function has them all."""
        rows = sum(linear.out_features for linear in (self.q_proj, self.k_proj, self.v_proj)) + self.output_width
        return 2 * self.sizes.hidden_size * rows + 4 * length * self.q_proj.out_features


__all__ = ["BETA", "HIGH", "LOW", "HeadPruning"]
