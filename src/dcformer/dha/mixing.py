"""`HeadMixer`: trained mixtures of the heads of a part, between a projection and whatever follows it.

A mixed head takes each channel from the heads of its group with a weight per channel. The mixture acts on the
projection's output, after its bias and before any QK-norm and RoPE, so it can be folded into the projection. At the
start it changes nothing. Source: arXiv 2406.06567, section 4.2. Letters: n heads of a part, G groups of g = n / G, D
head dim, B batch, T tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..shards import gathered
from .plan import Groups
from .sources import HeadSource

Part = tuple[int, str]  # (layer, kind)


class HeadMixer(nn.Module):
    """The operator of a part: factors by which a head of a group takes the channels of the others.

    Args:
        groups: of the part, [G][g]. Heads mix within their group only.
        head_dim: D.
        slots, slot: parts side by side in a head's rows of the projection, and this part's place among them.
        dtype, device: of the factors.

    Attributes:
        weight: [G, g, g, D]; weight[m, i, j, c] is what the i-th head of group m takes of channel c of the j-th. At the
            start 1 where i = j and 0 elsewhere.
    """

    def __init__(
        self,
        groups: Groups,
        head_dim: int,
        slots: int = 1,
        slot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ):
        super().__init__()
        count, size = len(groups), len(groups[0])
        members = torch.tensor(groups, device=device)  # [G, g]
        self.members: torch.Tensor
        self.places: torch.Tensor
        self.register_buffer("members", members.flatten(), persistent=False)  # [n]: heads in the order of groups
        self.register_buffer("places", members.flatten().argsort(), persistent=False)  # [n]: back again
        self.slots, self.slot, self.shape = slots, slot, (count, size)
        identity = torch.eye(size, dtype=dtype, device=device)[None, :, :, None]
        self.weight = nn.Parameter(identity.expand(count, size, size, head_dim).clone())
        self.handle: Any = None  # of the hook

    def mix(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads of the part [..., n, D] -> mixed heads, in the same order and dtype."""
        grouped = heads[..., self.members, :].unflatten(-2, self.shape)  # [..., G, g, D]
        mixed = torch.einsum("...mjd,mijd->...mid", grouped.to(self.weight.dtype), self.weight)
        return mixed.flatten(-3, -2)[..., self.places, :].to(heads.dtype)  # [..., n, D]

    def hook(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """[B, T, n·slots·D] -> the same with this part's heads mixed; a forward hook of the projection."""
        heads = output.unflatten(-1, (len(self.members), self.slots, -1))  # [B, T, n, slots, D]
        parts = [*heads.unbind(-2)]
        parts[self.slot] = self.mix(parts[self.slot])
        return (parts[0] if self.slots == 1 else torch.stack(parts, -2)).flatten(2)

    def fusion_loss(self) -> torch.Tensor:
        """How far the heads of a group are from equal: the mean over groups and pairs (i, i') of a group of
        Σ_jc (weight[i, j, c] - weight[i', j, c])² / (g·D); 2/g at the start, 0 for groups of one."""
        weight = gathered(self.weight)
        count, size, _, head_dim = weight.shape
        if size == 1:
            return weight.new_zeros(())
        # Σ over pairs of |w_i - w_i'|² = g · Σ_i |w_i - mean|²
        squares = (weight - weight.mean(1, keepdim=True)).square().sum()
        return squares * 2 / (count * size * (size - 1) * head_dim)

    @torch.no_grad()
    def close(self, share: float) -> None:
        """Moves the rows of every group by a share of the way to their mean; 1 makes them equal."""
        # the shards of a distributed weight are whole groups
        weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight  # type: ignore[operator]
        weight.lerp_(weight.mean(1, keepdim=True).expand_as(weight), share)

    @torch.no_grad()
    def gap(self) -> float:
        """The largest difference of a row from the mean row of its group; 0 if folding is exact."""
        weight = gathered(self.weight)
        return (weight - weight.mean(1, keepdim=True)).abs().max().item()

    def extra_repr(self) -> str:
        return f"{self.shape[0]} groups of {self.shape[1]} heads"


def attach_mixers(source: HeadSource, groups: Mapping[Part, Groups]) -> dict[Part, HeadMixer]:
    """Puts mixers that change nothing yet behind the projections of a model.

    Args:
        source: a model in memory, without mixers so far.
        groups: of the parts that get one.

    Returns:
        the mixers. They are submodules `key_mixer` and `value_mixer` of the attention modules.
    """
    model, mixers = source.model, {}
    head_dim = source.head_dim
    for (layer, kind), of_part in groups.items():
        name, slot = source.family.projection(layer, kind)
        attention, projection = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
        weight = projection.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        mixer = HeadMixer(of_part, head_dim, source.family.slots, slot, dtype, weight.device)
        attention.add_module(f"{kind}_mixer", mixer)
        mixer.handle = projection.register_forward_hook(mixer.hook)
        mixers[layer, kind] = mixer
    return mixers


def mixers_of(source: HeadSource) -> dict[Part, HeadMixer]:
    """The mixers that a model has."""
    found = {}
    for layer in range(source.config.num_hidden_layers):
        for kind in ("key", "value"):
            name = source.family.projection(layer, kind)[0].rpartition(".")[0]
            mixer = getattr(source.model.get_submodule(name), f"{kind}_mixer", None)
            if mixer is not None:
                found[layer, kind] = mixer
    return found


def detach_mixers(source: HeadSource) -> None:
    """Takes the mixers of a model away."""
    for layer, kind in mixers_of(source):
        name = source.family.projection(layer, kind)[0].rpartition(".")[0]
        attention: Any = source.model.get_submodule(name)
        attention.get_submodule(f"{kind}_mixer").handle.remove()
        delattr(attention, f"{kind}_mixer")


@contextmanager
def only_trains(model: nn.Module, parameters: Any) -> Iterator[None]:
    """Inside, only these parameters of a model have gradients; afterwards each is as it was, in its mode too."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, chosen = model.training, set(map(id, parameters))
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        yield
    finally:
        for parameter, was in before:
            parameter.requires_grad_(was)
            parameter.grad = None
        model.train(training)


__all__ = ["HeadMixer", "Part", "attach_mixers", "detach_mixers", "mixers_of", "only_trains"]
