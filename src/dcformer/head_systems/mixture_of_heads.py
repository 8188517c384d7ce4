"""Mixture of heads, MoH (arXiv 2410.11842): every token chooses the heads whose outputs it takes.

    p = softmax(W_r x) over the routed heads;  on = the K largest of p;  [a1, a2] = softmax(W_h x)       (eq. 5 to 7)
    "paper": g = a1·softmax(W_s x) on the shared heads, a2·p on `on`, 0 elsewhere
    "code" : g = 2·a1·Hs·softmax(W_s x), 2·a2·K·p / Σ_on p, 0 elsewhere
    out = Σ_h g_h z_h W_O^h;      balance loss: Σ_i mean_t p_i · mean_t on_i, in "code" times Hr

"code" is what the authors trained: uniform routing gives gates of 1, so that it begins as plain attention. Without
shared heads there is no W_s and W_h; one shared head has no W_s. The choice has no gradient, p has. Routers are in
float32. Router "query_norm" (section 4.4, for pretrained models) has no parameters: logits are the norms of the heads'
queries over their standard deviation, 0 where norms are equal; gates are 0 or 1 forwards and p backwards.

All heads are computed: a dense implementation saves nothing, and keys and values of all heads are needed anyway.
Letters: B batch, T queries, H heads: Hs shared ones first, then Hr routed ones; E hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .base import HeadSystem
from .options import HeadSizes, HeadSystemOptions, check_bool, check_range
from .router import Router


@dataclass(frozen=True)
class MixtureOfHeadsOptions(HeadSystemOptions):
    """Options of a mixture of heads.

    Attributes:
        num_shared_heads: Hs, the first heads, which every token takes; 0 to H - 1.
        num_routed_heads_per_tok: K, from 1 to Hr = H - Hs; all of them when not given.
        router: "linear" or "query_norm".
        routing_form: "code" or "paper": how gates are scaled.
        router_aux_loss_coef: factor of the balance loss, which is a mean over layers.
        output_router_logits: whether models return the routers' logits.
    """

    num_shared_heads: int = 0
    num_routed_heads_per_tok: int | None = None
    router: str = "linear"
    routing_form: str = "code"
    router_aux_loss_coef: float = 0.01
    output_router_logits: bool = False

    def check(self, sizes: HeadSizes) -> None:
        """Refuses numbers of heads that are out of range, and unknown names."""
        heads = sizes.num_heads
        check_range("num_shared_heads", self.num_shared_heads, 0, heads - 1, f"of {heads} heads one must be routed")
        routed = heads - self.num_shared_heads
        if self.num_routed_heads_per_tok is not None:
            why = f"num_attention_heads={heads} less num_shared_heads={self.num_shared_heads}"
            check_range("num_routed_heads_per_tok", self.num_routed_heads_per_tok, 1, routed, why)
        for name, known in (("router", ("linear", "query_norm")), ("routing_form", ("code", "paper"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {known}.")
        if self.router == "query_norm" and routed < 2:
            raise ValueError(f"router='query_norm' with {routed} routed head: expected at least 2, which vary.")
        check_range("router_aux_loss_coef", self.router_aux_loss_coef, 0.0, 1e6, "a factor of the loss")
        check_bool("output_router_logits", self.output_router_logits)


class MixtureOfHeads(HeadSystem):
    """Heads of which every token takes the shared ones and K others."""

    options_class = MixtureOfHeadsOptions
    transient = ("_routed_by",)
    router: nn.Module | None  # `Router`, or an adapter around one; so the others
    shared_router: nn.Module | None
    balance_router: nn.Module

    def __init__(self, sizes: HeadSizes, options: MixtureOfHeadsOptions):
        super().__init__(sizes, options)
        self.shared, self.routed = options.num_shared_heads, sizes.num_heads - options.num_shared_heads
        self.kept = options.num_routed_heads_per_tok or self.routed
        self.aux_loss_coef = options.router_aux_loss_coef
        is_linear, shared = options.router == "linear", self.shared if self.shared > 1 else 0
        rows = {"router": self.routed, "shared_router": shared, "balance_router": 2 if self.shared else 0}  # [a1, a2]
        self.router_rows = {name: n * is_linear for name, n in rows.items()}
        for name, n in self.router_rows.items():
            setattr(self, name, Router(sizes.hidden_size, n) if n else None)
        self._routed_by: tuple[torch.Tensor, torch.Tensor] | None = None

    def route(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """States [B, T, E] and queries [B, H, T, D] -> gates [B, T, H] in float32."""
        if self.router is not None:
            logits = self.router(x)  # [B, T, Hr]
        else:
            norms = query[:, self.shared :].to(torch.promote_types(query.dtype, torch.float32)).norm(dim=-1).mT
            std, largest = norms.std(dim=-1, keepdim=True), norms.amax(dim=-1, keepdim=True)
            is_equal = std <= query.shape[-1] * torch.finfo(norms.dtype).eps * largest  # but for rounding
            logits = norms / std.masked_fill(is_equal, torch.inf)  # [B, T, Hr]
        p = logits.softmax(dim=-1)
        on = torch.zeros_like(p).scatter(-1, p.topk(self.kept, dim=-1).indices, 1.0)
        self.router_logits, self._routed_by = logits, (p, on)
        taken = p * on
        if self.router is None:
            return torch.cat([p.new_ones(*p.shape[:-1], self.shared), on + (taken - taken.detach())], dim=-1)
        is_code = self.options.routing_form == "code"
        routed = taken * (self.kept / taken.sum(-1, keepdim=True)) if is_code else taken
        if not self.shared:
            return routed
        parts = self.balance_router(x).softmax(dim=-1)
        shared = torch.ones_like(p[..., :1]) if self.shared_router is None else self.shared_router(x).softmax(dim=-1)
        if is_code:
            shared, parts = shared * self.shared, 2 * parts
        return torch.cat([parts[..., :1] * shared, parts[..., 1:] * routed], dim=-1)

    def output(self, z: torch.Tensor, x_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D], each head times its gate; exactly zero where a head is not taken."""
        gates = self.route(x_q, query)
        self.gates = gates.detach()
        return z * gates.to(z.dtype)[..., None]

    def loss_parameters(self) -> Iterable[nn.Parameter]:
        """Those behind the routed heads' probabilities."""
        return (self.q_proj if self.router is None else self.router).parameters()

    def losses(self, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The balance loss over the tokens that are not padding: K/Hr ("paper") or K ("code") at uniform routing."""
        if self._routed_by is None:
            return {}
        p, on = self._routed_by
        self._routed_by = None  # the graph of a forward pass is not kept longer than it is needed
        seen = torch.ones_like(p[..., :1])
        if attention_mask is not None:
            seen = attention_mask[:, -p.shape[1] :, None].to(p)  # [B, T, 1]
        p, on = ((states * seen).sum((0, 1)) / seen.sum().clamp(min=1) for states in (p, on))  # [Hr]
        return {"load_balance": (p * on).sum() * (self.routed if self.options.routing_form == "code" else 1)}

    def from_mha(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> torch.Tensor:
        """Routers of zeros: exact in the form "code" while all heads are taken."""
        for router in self.children():
            if isinstance(router, Router):
                router.weight.zero_()
        return super().from_mha(q, k, v, o)

    def flops(self, length: int) -> int:
        """As plain attention, and the routers."""
        return super().flops(length) + 2 * self.sizes.hidden_size * sum(self.router_rows.values())

    def activated_flops(self, length: int) -> int:
        """`flops` with scores, values and output of the heads taken alone."""
        channels = (self.routed - self.kept) * self.sizes.head_dim
        return self.flops(length) - channels * (4 * length + 2 * self.sizes.hidden_size)


__all__ = ["MixtureOfHeads", "MixtureOfHeadsOptions"]
