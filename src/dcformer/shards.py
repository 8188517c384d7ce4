"""Parameters that lie in shards over several processes, as FSDP2 and tensor parallelism put them (`DTensor`)."""

import torch
from torch import nn

from .errors import DCFormerError


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a plain one, of the same shape and dtype; differentiable.

    Args:
        tensor: collected where it is in shards: all processes have to call this then. Others are returned.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or a part of it, has parameters in shards."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def refuse_shards(model: nn.Module, advice: str) -> None:
    """Refuses a model, or a part of it, with parameters in shards.

    Args:
        model: any.
        advice: what to do instead.

    Raises:
        DCFormerError: naming its class, with the advice.
    """
    if is_sharded(model):
        raise DCFormerError(
            f"{type(model).__name__} is in shards over several processes (FSDP or tensor parallelism): {advice}."
        )


__all__ = ["gathered", "is_sharded", "refuse_shards"]
