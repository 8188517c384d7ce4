"""`HeadSystem`: how the heads of an attention layer interact, apart from the composition of their maps.

A system is what surrounds the attention function: the projections in front of it and what happens to the heads' outputs
behind it. It knows nothing of causal models, caches and masks, so that any attention module can hold one:

    x -> [project] -> position -> cache -> [expand] -> scores, softmax, values -> [output] -> output projection

Letters: B batch, T queries, S keys, E hidden size, H query heads, Hkv key/value heads, D head dim.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from .options import HeadSizes, HeadSystemOptions


class HeadSystem(nn.Module):
    """Plain attention, and the interface of all systems.

    Attributes:
        scaling: factor of the scores.
        cache_heads: heads of the keys and values that `project` returns: that is what a cache holds.
        cache_widths: channels of a cached key and value.
        map_widths: channels of queries and keys, and of values, in the attention function.
        output_width: inputs of the output projection, H·Dz.
        keeps_shapes: queries, keys and values have the shapes of plain attention.
        splits_by_heads: the parameters can be divided over devices by heads, as in tensor parallelism.
        tp_plan: module -> style of tensor parallelism, beside q, k and v projections.
        transient: names of attributes that are of the last forward pass alone, beside `gates` and `router_logits`.
        aux_loss_coef: what the model multiplies the sum of `losses` by; 0 where there are none.
        gates: factors of the heads' outputs in the last forward pass, [B, T, H] or None.
        router_logits: [B, T, routed heads] of the last forward pass, or None.

    Args:
        sizes: the layer.
        options: of the system's own `options_class`.
    """

    options_class: ClassVar[type[HeadSystemOptions]] = HeadSystemOptions
    keeps_shapes: bool = True
    splits_by_heads: bool = False
    tp_plan: ClassVar[dict[str, str]] = {}
    transient: ClassVar[tuple[str, ...]] = ()
    aux_loss_coef: float = 0.0
    aux_loss_is_mean: bool = True  # over layers; else their sum
    gates: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None

    def __init__(self, sizes: HeadSizes, options: Any):
        super().__init__()
        options.check(sizes)
        self.sizes, self.options = sizes, options
        self.scaling = sizes.head_dim**-0.5
        self.cache_heads, self.cache_widths = sizes.num_kv_heads, (sizes.head_dim, sizes.head_dim)
        self.map_widths, self.output_width = self.cache_widths, sizes.num_heads * sizes.head_dim
        self.make_projections()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of the last forward pass: copies have no part in its graph."""
        return super().__getstate__() | dict.fromkeys({"gates", "router_logits", *self.transient} & vars(self).keys())

    def make_projections(self) -> None:
        """Makes the layers in front of attention."""
        size, width, bias = self.sizes.hidden_size, self.sizes.head_dim, self.sizes.bias
        self.q_proj = nn.Linear(size, self.sizes.num_heads * width, bias=bias)
        self.k_proj = nn.Linear(size, self.sizes.num_kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(size, self.sizes.num_kv_heads * width, bias=bias)

    def project(self, x_q: torch.Tensor, x_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalized states [B, T, E] and [B, S, E] -> queries, keys, values [B, heads, N, width] as cached."""
        projected = (self.q_proj(x_q), self.k_proj(x_kv), self.v_proj(x_kv))
        query, key, value = (states.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for states in projected)
        return query, key, value

    def position(self, states: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Queries or keys of `project` with norm and RoPE, which `rotate` applies to heads [B, any, N, at most D]."""
        return rotate(states)

    def expand(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the attention function takes, from the queries and what the cache gave back, composition removed."""
        return query, key, value

    def output(self, z: torch.Tensor, x_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """The heads' outputs [B, T, H, Dz] for the output projection, of the same or fewer heads.

        Args:
            z: what the attention function returned.
            x_q: the states of the queries, [B, T, E].
            query: the queries of `project`, before norm and RoPE.
        """
        return z

    def forward(self, z: torch.Tensor, x_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """`output`, as a module: its hooks (offloading) see to parameters that are in no layer of their own."""
        return self.output(z, x_q, query)

    def loss_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that `losses` are made of in the first place."""
        return ()

    def losses(self, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Losses of the last forward pass by name, without their coefficient.

        Args:
            attention_mask: [B, at least T], 0 for padding; None where there is none.
        """
        return {}

    def init_weights(self) -> None:
        """Sets parameters that are not in layers of their own to their initial values."""

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """Takes the parameters of plain attention over, under `torch.no_grad`.

        Args:
            q, k, v, o: its projections, [H·D, E], [Hkv·D, E] twice and [E, H·D].

        Returns:
            the weight of the output projection, [E, output_width].

        Raises:
            ValueError: where the system cannot be made from it.
        """
        copy_linears((q, self.q_proj), (k, self.k_proj), (v, self.v_proj))
        return o.weight

    def flops(self, length: int) -> int:
        """Operations of matrix products per token at `length` keys, 2 per multiply-add; 8EHD + 4SHD for plain MHA."""
        s = self.sizes
        return 4 * s.head_dim * (s.hidden_size * (s.num_heads + s.num_kv_heads) + length * s.num_heads)

    def activated_flops(self, length: int) -> int:
        """`flops` where scores, values and output of heads that a token does not take are left out."""
        return self.flops(length)


def copy_linears(*pairs: tuple[nn.Linear, nn.Linear]) -> None:
    """Copies weights and biases of each first layer to the second."""
    for source, target in pairs:
        target.weight.copy_(source.weight)
        if target.bias is not None:
            target.bias.copy_(source.bias)


__all__ = ["HeadSystem", "copy_linears"]
