"""The mixing weights of collaborative heads: equal within the pairs of channels that RoPE rotates.

Shared channels come in blocks of the head dim D, of which RoPE rotates the pairs (c, c + half); the last block may be
narrower. One weight is stored for each pair and each channel that is not rotated.
Letters: H heads, D head dim, Dk shared dims.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init

from .options import HeadSizes


class Mixing(nn.Module):
    """How much each head takes of each shared channel: `weight`, [H, Dk less the number of rotated pairs].

    Args:
        sizes: the layer.
        dims: Dk.
        start: initial values: "normal" of standard deviation 0.2, "ones", or "concatenate", to every head its own part.
    """

    def __init__(self, sizes: HeadSizes, dims: int, start: str):
        super().__init__()
        self.start = start
        self.width, self.rotary_dim, self.dims = sizes.head_dim, sizes.rotary_dim, dims
        self.blocks, self.rest = divmod(dims, sizes.head_dim)
        self.stored = self.blocks * (self.width - self._half(self.width)) + self.rest - self._half(self.rest)
        self.weight = nn.Parameter(torch.ones(sizes.num_heads, self.stored))

    def _half(self, width: int) -> int:
        """Rotated pairs in a block."""
        return min(self.rotary_dim, width) // 2

    def _spread(self, weight: torch.Tensor, width: int) -> torch.Tensor:
        """[..., stored of a block] -> [..., width]."""
        half = self._half(width)
        return torch.cat([weight[..., :half], weight], dim=-1)

    def forward(self) -> torch.Tensor:
        """The weights of all channels, M [H, Dk]."""
        parts, start = [], self.weight.shape[1] - (self.rest - self._half(self.rest))
        if self.blocks:
            blocks = self.weight[:, :start].unflatten(-1, (self.blocks, -1))
            parts.append(self._spread(blocks, self.width).flatten(1))
        if self.rest:
            parts.append(self._spread(self.weight[:, start:], self.rest))
        return torch.cat(parts, dim=-1)

    def rotated(self, states: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Shared channels [B, 1, N, Dk] with `rotate` applied to each block, as heads [B, any, N, at most D]."""
        blocks, rest = states.split([self.blocks * self.width, self.rest], dim=-1)
        if self.blocks:
            heads = rotate(blocks[:, 0].unflatten(-1, (self.blocks, -1)).transpose(1, 2))  # [B, blocks, N, D]
            blocks = heads.transpose(1, 2).flatten(2)[:, None]
        return torch.cat([blocks, rotate(rest)], dim=-1) if self.rest else blocks

    @torch.no_grad()
    def set(self, mixing: torch.Tensor) -> None:
        """Sets the weights of all channels, M [H, Dk].

        Raises:
            ValueError: on another shape, or if RoPE rotates a pair of channels with different weights.
        """
        expected = (len(self.weight), self.dims)
        if mixing.shape != expected:
            raise ValueError(f"mixing of shape {tuple(mixing.shape)}: expected {expected}, heads and shared dims.")
        blocks = [block[:, self._half(block.shape[1]) :] for block in mixing.split(self.width, dim=1)]
        stored, before = torch.cat(blocks, dim=1), self.weight.clone()
        self.weight.copy_(stored)
        if not torch.equal(self(), mixing.to(self.weight)):
            self.weight.copy_(before)
            raise ValueError(
                "mixing differs within pairs of channels that RoPE rotates, so that scores would depend on absolute "
                f"positions: tie channels c and c + {self._half(self.width)} of each block of {self.width}."
            )

    def init_weights(self, start: str | None = None) -> None:
        """Sets initial values, those of `start` where it is given."""
        start = start or self.start
        if start == "normal":
            init.normal_(self.weight, std=0.2)
            return
        values = torch.ones_like(self.weight)
        if start == "concatenate":
            heads, count = self.weight.shape
            owner = torch.arange(count, device=values.device) * heads // count
            values = (owner == torch.arange(heads, device=values.device)[:, None]).to(values)
        init.copy_(self.weight, values)


__all__ = ["Mixing"]
