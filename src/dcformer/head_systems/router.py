"""`Router`: the layer that a mixture of heads chooses by."""

import torch
import torch.nn.functional as F
from torch import nn

from ..compose_dcformer import without_autocast


class Router(nn.Linear):
    """A linear layer without bias that computes in float32, whatever the dtype of its weight and autocast say.

    Args:
        width: channels of the states, E.
        rows: outputs, one for each of what it chooses from.
    """

    def __init__(self, width: int, rows: int):
        super().__init__(width, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., rows] in float32; in float64 for float64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            return F.linear(x.to(wide), self.weight.to(wide))


__all__ = ["Router"]
