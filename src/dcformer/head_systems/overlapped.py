"""Overlapped heads, MOHSA (arXiv 2410.14874): a head also has the neighbors' nearest channels of q, k and v.

    head h has columns h·D - o ... (h+1)·D + o of the concatenated heads, zeros beyond the ends: width D + 2o
    A_h = own score + scaling · ( q_{h-1}[-o:]·k_{h-1}[-o:] + q_{h+1}[:o]·k_{h+1}[:o] )

The scaling stays D^-0.5; the output projection reads H·(D + 2o) channels. Heads are widened behind the cache, which is
that of plain attention, and behind RoPE. RoPE rotates pairs of channels that lie half a head apart, of which an overlap
of less than D takes one without the other: the neighbors' part then depends on absolute positions, too.

Letters: B batch, N tokens, H heads, D head dim, o overlap, E hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .base import HeadSystem
from .options import HeadSizes, HeadSystemOptions, check_range

# The overlap of layer l of n, as in the authors' code: by depth, or its half, from the first layer or from the last.
PARADIGMS = {
    "depth0": lambda layer, layers: layer,
    "depth1": lambda layer, layers: layer + 1,
    "depth0_half": lambda layer, layers: layer // 2,
    "depth1_half": lambda layer, layers: layer // 2 + 1,
    "depth0_reverse": lambda layer, layers: layers - layer - 1,
    "depth1_reverse": lambda layer, layers: layers - layer,
    "depth0_half_reverse": lambda layer, layers: (layers - layer - 1) // 2,
    "depth1_half_reverse": lambda layer, layers: (layers - layer - 1) // 2 + 1,
}


@dataclass(frozen=True)
class OverlappedOptions(HeadSystemOptions):
    """Options of overlapped heads.

    Attributes:
        overlap: o in channels, from 0 (plain attention) to D: one number, a list with one for each layer, or a name of
            `PARADIGMS`, which make it grow or shrink with depth.
    """

    overlap: int | str | list[int] | tuple[int, ...] = "depth0_half"

    def of_layer(self, sizes: HeadSizes) -> Any:
        """The overlap of a layer, unchecked."""
        if isinstance(self.overlap, str):
            if self.overlap not in PARADIGMS:
                raise ValueError(f"overlap={self.overlap!r}: expected an integer, a list or one of {[*PARADIGMS]}.")
            if not sizes.knows_layer:
                raise ValueError(
                    f"overlap={self.overlap!r} goes by the number of a layer, which a module of its own does not know: "
                    f"give a whole number from 0 to head_dim={sizes.head_dim}."
                )
            return PARADIGMS[self.overlap](sizes.layer, sizes.num_layers)
        if isinstance(self.overlap, list | tuple):
            if len(self.overlap) != sizes.num_layers:
                raise ValueError(
                    f"overlap={list(self.overlap)} has {len(self.overlap)} entries: expected one for each of the "
                    f"{sizes.num_layers} layers."
                )
            return self.overlap[sizes.layer]
        return self.overlap

    def check(self, sizes: HeadSizes) -> None:
        """Refuses overlaps beyond the neighbor, and grouped keys and values, which have no neighbors."""
        overlap, name = self.of_layer(sizes), "overlap"
        if overlap is not self.overlap:
            name = f"overlap[{sizes.layer}]"
        if isinstance(self.overlap, str):
            name = f"overlap={self.overlap!r}: {name}"
        check_range(name, overlap, 0, sizes.head_dim, "head_dim, as only neighbors overlap")
        if sizes.num_kv_heads != sizes.num_heads:
            raise ValueError(
                f"head_system='overlapped' with num_key_value_heads={sizes.num_kv_heads} and num_attention_heads="
                f"{sizes.num_heads}: overlapped heads need as many keys and values as queries, not grouped ones."
            )


class Overlapped(HeadSystem):
    """Heads that share their outermost channels with their neighbors."""

    options_class = OverlappedOptions
    keeps_shapes = False

    def __init__(self, sizes: HeadSizes, options: OverlappedOptions):
        super().__init__(sizes, options)
        self.overlap: int = options.of_layer(sizes)
        width = sizes.head_dim + 2 * self.overlap
        self.map_widths, self.output_width = (width, width), sizes.num_heads * width

    def expand(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heads [B, H, N, D] -> [B, H, N, D + 2o]."""
        return self._widen(query), self._widen(key), self._widen(value)

    def _widen(self, heads: torch.Tensor) -> torch.Tensor:
        if not self.overlap:
            return heads
        left = F.pad(heads[:, :-1, :, -self.overlap :], (0, 0, 0, 0, 1, 0))  # [B, H, N, o]; the first head's are zeros
        right = F.pad(heads[:, 1:, :, : self.overlap], (0, 0, 0, 0, 0, 1))
        return torch.cat([left, heads, right], dim=-1)

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """Exact at o = 0. Else zeros meet the neighbors' values, but scores have the neighbors' parts."""
        own = super().from_mha(q, k, v, o).unflatten(1, (self.sizes.num_heads, -1))  # [E, H, D]
        return F.pad(own, (self.overlap, self.overlap)).flatten(1)

    def flops(self, length: int) -> int:
        """As plain attention, with scores, values and output projection 1 + 2o/D times as wide."""
        wider = 2 * self.overlap * self.sizes.num_heads  # channels of all heads
        return super().flops(length) + 4 * length * wider + 2 * self.sizes.hidden_size * wider


__all__ = ["PARADIGMS", "Overlapped", "OverlappedOptions"]
