"""Collaborative heads (arXiv 2006.16362): all heads read the same query and key channels, each with its own weights.

    A_h(t, s) = scaling · ( Σ_c (x_t W̃_Q)_c · M[h, c] · (x_s W̃_K)_c  +  x_s · B[:, h] )     content bias B, optional

Plain attention is the case of W̃ the concatenated projections and M one-hot in blocks. Of its biases only the queries'
matters under the softmax, B[:, h] = W_K^h b_Q^h; with RoPE or a norm of queries and keys, where that is not so, the
shared projections keep their biases. The rotation is by pairs of channels, in blocks of the head dim, and M is equal
within a pair: otherwise scores would not depend on relative positions only.

In the cache there is one key head, with the content bias behind it (met by a one-hot row behind the queries), and one
value head of Hkv·D channels, as static caches have the keys' number of heads for values, too.
Letters: B batch, N tokens, H heads, Hkv value heads, D head dim, E hidden size, Dk shared dims.
"""

from collections.abc import Callable

import torch
from torch import nn

from .base import HeadSystem, copy_linears
from .collaborative_cp import decompose
from .collaborative_mixing import Mixing
from .collaborative_options import CollaborativeOptions
from .options import HeadSizes


class Collaborative(HeadSystem):
    """Heads that share their query and key channels."""

    options_class = CollaborativeOptions
    keeps_shapes = False

    def __init__(self, sizes: HeadSizes, options: CollaborativeOptions):
        super().__init__(sizes, options)
        self.scaling = sizes.head_dim**-0.5 if options.scaling is None else options.scaling
        key_width = self.dims + options.content_bias * sizes.num_heads
        self.cache_heads, self.cache_widths = 1, (key_width, sizes.num_kv_heads * sizes.head_dim)
        self.map_widths = (key_width, sizes.head_dim)

    def make_projections(self) -> None:
        """Shared queries and keys, values for each head, mixing weights for each head and pair of channels."""
        s = self.sizes
        self.dims = self.options.shared_key_query_dim or s.num_heads * s.head_dim
        self.keeps_biases = s.bias and bool(s.rotary_dim or s.qk_norm)
        self.q_proj, self.k_proj = (nn.Linear(s.hidden_size, self.dims, bias=self.keeps_biases) for _ in "qk")
        self.v_proj = nn.Linear(s.hidden_size, s.num_kv_heads * s.head_dim, bias=s.bias)
        self.content_bias = nn.Linear(s.hidden_size, s.num_heads, bias=False) if self.options.content_bias else None
        self.mixing = Mixing(s, self.dims, self.options.mixing_init or "normal")

    def project(self, x_q: torch.Tensor, x_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One query and key head of Dk channels, the content bias behind the key, one value head of Hkv·D."""
        query, key, value = self.q_proj(x_q), self.k_proj(x_kv), self.v_proj(x_kv)
        if self.content_bias is not None:
            key = torch.cat([key, self.content_bias(x_kv)], dim=-1)
        return query[:, None], key[:, None], value[:, None]

    def position(self, states: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Norm and RoPE of blocks of D channels, and of what is left; the content bias passes."""
        return torch.cat([self.mixing.rotated(states[..., : self.dims], rotate), states[..., self.dims :]], dim=-1)

    def expand(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixed queries [B, H, T, Dk (+ H)], the key for each value head, values [B, Hkv, S, D]."""
        query = query * self.mixing().to(query.dtype)[:, None]  # [B, H, T, Dk]
        if self.content_bias is not None:
            own = torch.eye(self.sizes.num_heads, dtype=query.dtype, device=query.device)[:, None]
            query = torch.cat([query, own.expand(*query.shape[:3], -1)], dim=-1)
        value = value[:, 0].unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)
        return query, key.expand(-1, value.shape[1], -1, -1), value

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """A copy at Dk = H·D, exact with `content_bias` where biases are not kept; else a CP decomposition.

        With `mixing_init` "normal" or "ones" all but the mixing is copied.
        """
        s, repeats = self.sizes, self.sizes.num_heads // self.sizes.num_kv_heads
        if self.keeps_biases and self.content_bias is not None:
            raise ValueError(
                "content_bias=True: under RoPE or qk_norm b_Q is not such a bias; use False, which keeps it."
            )
        if self.content_bias is None and not self.keeps_biases and q.bias is not None and q.bias.any():
            raise ValueError(
                "content_bias=False: the queries' biases would be lost; use True, which keeps what they do."
            )
        copy_linears((v, self.v_proj))
        queries = q.weight.T.unflatten(1, (s.num_heads, -1)).transpose(0, 1)  # [H, E, D]
        keys = k.weight.T.unflatten(1, (s.num_kv_heads, -1)).transpose(0, 1).repeat_interleave(repeats, dim=0)
        if self.dims == s.num_heads * s.head_dim:
            copy_linears((q, self.q_proj))
            self.k_proj.weight.copy_(keys.transpose(0, 1).flatten(1).T)
            if self.k_proj.bias is not None:
                self.k_proj.bias.copy_(
                    k.bias.unflatten(0, (s.num_kv_heads, -1)).repeat_interleave(repeats, 0).flatten()
                )
            self.mixing.init_weights(self.options.mixing_init or "concatenate")
        elif self.options.mixing_init not in (None, "concatenate"):
            raise ValueError(
                f"mixing_init={self.options.mixing_init!r}: at shared_key_query_dim={self.dims} the mixing is that of "
                "a decomposition. Leave it out."
            )
        elif s.rotary_dim or s.qk_norm:
            raise ValueError(
                f"shared_key_query_dim={self.dims}: a pretrained layer with RoPE or qk_norm can only be copied, at "
                f"{s.num_heads * s.head_dim}; a decomposition of W_Q W_Kᵀ knows nothing of what is between the two."
            )
        else:
            found = decompose(queries, keys, self.dims)
            self.q_proj.weight.copy_(found.query.T)
            self.k_proj.weight.copy_(found.key.T)
            self.mixing.set(found.mixing)
        if self.content_bias is not None:
            bias = torch.zeros_like(q.weight[:, 0]) if q.bias is None else q.bias
            self.content_bias.weight.copy_(torch.einsum("hed,hd->he", keys, bias.unflatten(0, (s.num_heads, -1))))
        return o.weight

    def flops(self, length: int) -> int:
        """4·E·Dk + 4·E·H·D + 2·S·H·Dk + 2·S·H·D: scores cost Dk/D times as much as before, and H more for B."""
        s = self.sizes
        width = self.dims + self.map_widths[0] + (s.num_kv_heads + s.num_heads) * s.head_dim
        return 2 * s.hidden_size * width + 2 * length * s.num_heads * sum(self.map_widths)


__all__ = ["Collaborative"]
