"""Composition of attention heads: the dynamic weights, where they come from, and what they do to a map of scores.

The readable definition of DCMHA's Compose function (arXiv 2405.08553, section 3.1, equations 4 to 10, and figure 2).
Letters: B batch, T queries, S keys, N either, H query heads, Hkv key/value heads, D head dim, E hidden size, R rank, G
groups, M = H/G heads of a group, K = 2·R·M hidden width of a weight generator, C generators in use.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .heads_dcformer import HeadMap
from .implementations_dcformer import FirstLayer, LayerKernels, layer_kernels

COMPOSE_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh")
COMPOSE_NORM_EPS = 1e-6

# What `DCFormerCompose` makes: (stage, side) -> weights of a generator, and stage -> static projection [G, M, M].
Generated = tuple[dict[tuple[str, str], "SideWeights"], dict[str, torch.Tensor]]
# What the scores and the attention weights are composed with; None for a stage that does not compose.
Stages = tuple["ComposeWeights | None", "ComposeWeights | None"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, softmax, norms and mixing are computed: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of matrix products under autocast on a type of device; None where it is off, or not to be had."""
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)  # "meta" has none, and asking is an error
    return torch.get_autocast_dtype(device_type) if is_on else None


def without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast off on a type of device, where it is on."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


class ComposeFields:
    """What follows from the fields of composition, for an object that has them: `ComposeSettings`, `DCFormerConfig`."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None
    compose_rank: int
    compose_groups: int
    compose_pre: bool
    compose_post: bool
    compose_query: bool
    compose_key: bool
    compose_projection: bool
    compose_gate: bool
    compose_static: bool
    compose_act: str

    def check_names(self, others: Iterable[str]) -> None:
        """Refuses unknown names that begin with `compose_`: probably misspelt fields.

        Raises:
            ValueError: naming them, and the fields.
        """
        if unknown := sorted(name for name in others if name.startswith("compose_")):
            known = ", ".join(name for name in vars(self) if name.startswith("compose_"))
            raise ValueError(f"unknown fields of composition: {', '.join(unknown)}. Expected some of {known}.")

    @property
    def compose_generators(self) -> tuple[tuple[str, str], ...]:
        """The dynamic weight generators that exist, as (stage, side), in the order of stored tensors.

        Of ("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"); their number is C <= 4.
        """
        stages = [stage for stage in ("pre", "post") if getattr(self, f"compose_{stage}")]
        sides = [side for side in ("query", "key") if getattr(self, f"compose_{side}")]
        return tuple((stage, side) for stage in stages for side in sides)

    @property
    def composes(self) -> bool:
        """Whether anything is composed: without composition a model is a plain Transformer."""
        return bool(self.compose_generators) or self.compose_static

    def cached_heads(self, stage: str, layer_idx: int = 0) -> int:
        """Key heads (stage "pre") or value heads ("post") that a layer caches."""
        return self.num_key_value_heads  # type: ignore[return-value]  # None only until __post_init__

    def compose_cache_channels(self, stage: str, layer_idx: int = 0) -> int:
        """Channels that composition adds behind each cached key (stage "pre") or value (stage "post").

        The key-wise outputs of all query heads of a key/value head, 2R + 1 numbers each (low-rank pair and gate),
        padded to a multiple of 8 channels so that rows stay 16-byte aligned in 16-bit dtypes.

        Args:
            stage: "pre" or "post".
            layer_idx: the layer's number; layers differ where `key_head_map` or `value_head_map` make them.
        """
        if (stage, "key") not in self.compose_generators:
            return 0
        per_head = 2 * self.compose_rank * self.compose_projection + self.compose_gate
        used = per_head * (self.num_attention_heads // self.cached_heads(stage, layer_idx))
        return -(-used // 8) * 8

    def check_composition(self) -> None:
        """Raises a `ValueError` that names the fields when they describe no composition."""
        for name in ("compose_rank", "compose_groups"):
            if not isinstance(number := getattr(self, name), Integral) or isinstance(number, bool):
                raise ValueError(f"{name}={number!r} must be a whole number.")
        switches = ("pre", "post", "query", "key", "projection", "gate", "static")
        for name in (f"compose_{switch}" for switch in switches):
            if not isinstance(is_on := getattr(self, name), bool):
                raise ValueError(f"{name}={is_on!r}: expected True or False.")
        if self.compose_rank < 1:
            raise ValueError(
                f"compose_rank={self.compose_rank} must be at least 1; to have no low-rank projections set "
                "compose_projection=False."
            )
        if self.compose_groups < 1 or self.num_attention_heads % self.compose_groups:
            raise ValueError(
                f"compose_groups={self.compose_groups} does not divide num_attention_heads={self.num_attention_heads}: "
                "choose a divisor of it."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}: choose a divisor of it."
            )
        if self.compose_act not in COMPOSE_ACTIVATIONS:
            raise ValueError(f"compose_act={self.compose_act!r} is unknown: expected one of {COMPOSE_ACTIVATIONS}.")
        stages = [name for name in ("compose_pre", "compose_post") if getattr(self, name)]
        sides = [name for name in ("compose_query", "compose_key") if getattr(self, name)]
        branches = sides + ["compose_static"] * self.compose_static
        if branches and not stages:
            raise ValueError(
                f"{' and '.join(branches)} on, but compose_pre and compose_post are both off: turn one of them on, or "
                "all of these off for a plain Transformer."
            )
        if stages and not branches:
            raise ValueError(
                f"{' and '.join(stages)} on, but compose_query, compose_key and compose_static are all off, so there "
                "is nothing to compose with: turn one of them on, or all of these off for a plain Transformer."
            )
        if sides and not (self.compose_projection or self.compose_gate):
            raise ValueError(
                f"{' and '.join(sides)} on, but compose_projection and compose_gate are both off: turn one of them on."
            )


@dataclass(frozen=True)
class ComposeSettings(ComposeFields):
    """What `DCFormerCompose` is made from, for models with a configuration of their own.

    Attributes:
        hidden_size, num_attention_heads, num_key_value_heads: E, H and Hkv of the attention that is composed.
        compose_rank, ...: as in `DCFormerConfig`, which has the same fields.

    Raises:
        ValueError: on settings that describe no composition; the message names the fields.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    compose_rank: int = 2
    compose_groups: int = 1
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_projection: bool = True
    compose_gate: bool = True
    compose_static: bool = False
    compose_act: str = "gelu_pytorch_tanh"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        self.check_composition()


@dataclass
class SideWeights:
    """Weights of one stage that depend on one token: all of the queries' or all of the keys'. N is T or S.

    One tensor holds them, from the generator to the cache to every kernel. A head and a token have R channels `down`, R
    channels `up` and one of the gate, in this order; a low rank or a gate that is switched off has none. The number of
    channels therefore tells which there are: it is odd with a gate.

    Attributes:
        packed: [B, H, channels, N]; or [B, Hkv, H / Hkv, channels, N], a view of what rides behind cached keys or
            values: there, with grouped-query attention, no stride leads from every head to the next.
    """

    packed: torch.Tensor

    @classmethod
    def of(
        cls, down: torch.Tensor | None = None, up: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> "SideWeights":
        """Packs weights that come one by one; differentiable.

        Args:
            down: [B, H, N, R] or None: mixes the heads of a group into R hidden maps (RMS-normalized over the group).
            up: [B, H, N, R], or None as `down` is: mixes the R hidden maps back into heads.
            gate: [B, H, N] or None: scales each head's own map; in (-1, 1).

        Raises:
            ValueError: when only one of `down` and `up` is given, or nothing at all, and on shapes that do not fit.
        """
        shapes = {name: tuple(w.shape) for name, w in (("down", down), ("up", up), ("gate", gate)) if w is not None}
        tokens = {shape if name == "gate" else shape[:3] for name, shape in shapes.items()}
        if len(tokens) != 1 or shapes.get("down") != shapes.get("up"):
            raise ValueError(
                f"weights of {shapes} do not make a side: expected down and up of one shape [B, H, N, R], a gate "
                "[B, H, N], or all three. Where there are none, a stage's side is None."
            )
        parts = [w.transpose(2, 3) for w in (down, up) if w is not None]  # [B, H, R, N]
        parts += [] if gate is None else [gate.unsqueeze(2)]  # [B, H, 1, N]
        return cls(torch.cat(parts, dim=2))

    @property
    def rank(self) -> int:
        """R; 0 without low rank."""
        return self.packed.shape[-2] // 2

    @property
    def by_head(self) -> torch.Tensor:
        """[B, H, channels, N]: `packed`, or a copy of it where query heads share a cached key head."""
        return self.packed.flatten(1, -3)

    @property
    def down(self) -> torch.Tensor | None:
        """[B, H, N, R] or None: mixes the heads of a group into R hidden maps (RMS-normalized over the group)."""
        return self._channels(0, self.rank)

    @property
    def up(self) -> torch.Tensor | None:
        """[B, H, N, R] or None: mixes the R hidden maps back into heads."""
        return self._channels(self.rank, 2 * self.rank)

    @property
    def gate(self) -> torch.Tensor | None:
        """[B, H, N] or None: scales each head's own map; in (-1, 1)."""
        gate = self._channels(2 * self.rank, self.packed.shape[-2])
        return None if gate is None else gate[..., 0]

    def _channels(self, start: int, stop: int) -> torch.Tensor | None:
        """[B, H, N, stop - start]; a view if `by_head` is one."""
        if start == stop:
            return None
        return self.packed[..., start:stop, :].flatten(1, -3).transpose(2, 3)

    def tensors(self) -> list[torch.Tensor]:
        """Down, up and gate, without those that are None."""
        return [w for w in (self.down, self.up, self.gate) if w is not None]


@dataclass
class ComposeWeights:
    """All weights of one stage (before or after the softmax) of one layer.

    Attributes:
        query: query-wise weights, N = T, or None.
        key: key-wise weights, N = S, or None.
        static: [G, M, M] or None: the input-independent projection, from head (row) to head (column).
        groups: G.
    """

    query: SideWeights | None = None
    key: SideWeights | None = None
    static: torch.Tensor | None = None
    groups: int = 1

    def tensors(self) -> list[torch.Tensor]:
        """Both sides as they are packed and the static projection, without those that are None."""
        sides = [side.packed for side in (self.query, self.key) if side is not None]
        return sides if self.static is None else [*sides, self.static]


def compose(maps: torch.Tensor, weights: ComposeWeights | None) -> torch.Tensor:
    """Mixes the heads of attention maps: the definition of Compose (paper section 3.1, equation 4).

    Each of the five branches reads the same input, and a skip connection is always there:
    static projection, query-wise low rank, query-wise gate, key-wise low rank, key-wise gate.

    Args:
        maps: scores or weights, [B, H, T, S], float32 or float64.
        weights: what to mix with; None leaves the maps as they are.

    Returns:
        the composed maps, [B, H, T, S], in the dtype of `maps`.
    """
    if weights is None:
        return maps

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(maps.dtype).unflatten(1, (weights.groups, -1))  # [B, H, ...] -> [B, G, M, ...]

    a = grouped(maps)  # [B, G, M, T, S]
    out = a
    if weights.static is not None:
        out = out + torch.einsum("bgjts,gjm->bgmts", a, weights.static.to(maps.dtype))
    if (query := weights.query) is not None:
        if query.down is not None and query.up is not None:
            hidden = torch.einsum("bgjts,bgjtr->bgrts", a, grouped(query.down))  # [B, G, R, T, S]
            out = out + torch.einsum("bgrts,bgmtr->bgmts", hidden, grouped(query.up))
        if query.gate is not None:
            out = out + a * grouped(query.gate)[..., :, None]
    if (key := weights.key) is not None:
        if key.down is not None and key.up is not None:
            hidden = torch.einsum("bgjts,bgjsr->bgrts", a, grouped(key.down))  # [B, G, R, T, S]
            out = out + torch.einsum("bgrts,bgmsr->bgmts", hidden, grouped(key.up))
        if key.gate is not None:
            out = out + a * grouped(key.gate)[..., None, :]
    return out.flatten(1, 2)  # [B, H, T, S]


class DCFormerCompose(nn.Module):
    """Makes a layer's composition weights from its normalized hidden states (paper section 3.1, equations 5 to 8).

    Parameters, each present only when its switch is on; groups lead, so that tensor parallelism by groups of heads is a
    plain split of the first dimension:
        dw1_proj.weight: [G·C·K, E], hidden layer of all weight generators.
        qkw: [G·C·K, 2·R·M], second layer: for each (group, generator) a [K, 2R, M] block; the first R of its 2R rows
            give `down`, the others `up`.
        gate_proj.weight: [G·C·M, E], gates of all generators.
        pre_static, post_static: [G·M, M], static projections.
    Generators are in the order of `settings.compose_generators`.

    Args:
        settings: a `ComposeSettings`, or a `DCFormerConfig`.
        layer_idx: the layer's number; layers differ in what a cache holds where they have head maps.
        key_heads, value_heads: which key and value head each query head reads; None: consecutive ones share one.
    """

    pre_static: nn.Parameter | None
    post_static: nn.Parameter | None

    def __init__(
        self,
        settings: ComposeFields,
        layer_idx: int = 0,
        key_heads: HeadMap | None = None,
        value_heads: HeadMap | None = None,
    ):
        super().__init__()
        # Not registered, as attention holds them: of two names `torch.func.functional_call` restores the wrong buffer.
        self._head_maps = {"pre": key_heads, "post": value_heads}
        heads = settings.num_attention_heads
        self.generators = settings.compose_generators
        self.heads_per_group = heads // settings.compose_groups
        self.key_value_repeats = {stage: heads // settings.cached_heads(stage, layer_idx) for stage in ("pre", "post")}
        self.channels = {stage: settings.compose_cache_channels(stage, layer_idx) for stage in ("pre", "post")}
        rows = settings.compose_groups * len(self.generators)  # G·C
        has_low_rank = bool(rows) and settings.compose_projection
        self.rank = settings.compose_rank if has_low_rank else 0
        hidden = 2 * self.rank * self.heads_per_group  # K
        has_gate = bool(rows) and settings.compose_gate
        self.dw1_proj = nn.Linear(settings.hidden_size, rows * hidden, bias=False) if has_low_rank else None
        self.qkw = nn.Parameter(torch.empty(rows * hidden, hidden)) if has_low_rank else None
        self.gate_proj = nn.Linear(settings.hidden_size, rows * self.heads_per_group, bias=False) if has_gate else None
        self.act_fn = ACT2FN[settings.compose_act]
        for stage in ("pre", "post"):
            has_static = settings.compose_static and getattr(settings, f"compose_{stage}")
            static = nn.Parameter(torch.empty(heads, self.heads_per_group)) if has_static else None
            self.register_parameter(f"{stage}_static", static)

    def init_weights(self) -> None:
        """Sets parameters that a variant has itself, in no module of its own, to their initial values: here none."""

    def forward(
        self, hidden_states: torch.Tensor, implementation: str | None = None, first_layer: FirstLayer = ()
    ) -> Generated:
        """Makes the dynamic weights, and hands out the static ones.

        Args:
            hidden_states: [B, N, E], the normalized states that also feed the q, k and v projections.
            implementation: the attention implementation, whose kernels are used where it has some.
            first_layer: what `dw1_proj` and `gate_proj` make of the hidden states, where that is known.

        Returns:
            for each generator, (stage, side) -> `SideWeights` over H heads and N tokens, in the dtype of
            `hidden_states` (the norm and the tanh are computed in float32); and stage -> static projection [G, M, M].

        Raises:
            ValueError: when tensor parallelism has cut through a group of heads.
        """
        kernels = self._kernels(hidden_states, implementation)
        if kernels is not None:
            return kernels.generate(hidden_states, self, first_layer)
        hidden, gate = first_layer or self.first_layer(hidden_states)
        batch, length, _ = hidden_states.shape
        count, m, r = len(self.generators), self.heads_per_group, self.rank
        dtype, compute = hidden_states.dtype, accumulation_dtype(hidden_states.dtype)
        parts = []  # of the channels of a side, in their order: each [C, B, H, channels, N]
        if hidden is not None and self.qkw is not None:
            hidden = self.act_fn(hidden)  # [B, N, G·C·K]
            k = 2 * r * m
            self._check_whole_groups(hidden.shape[-1], count * k)
            hidden = hidden.view(batch * length, hidden.shape[-1] // k, k).transpose(0, 1)  # [G·C, B·N, K]
            pair = torch.bmm(hidden, self.qkw.view(-1, k, k))  # [G·C, B·N, 2·R·M]
            pair = pair.view(len(pair) // count, count, batch, length, 2, r, m)  # [G, C, B, N, 2, R, M]
            pair = pair.permute(4, 1, 2, 0, 6, 3, 5)  # [2, C, B, G, M, N, R]
            down = pair[0].to(compute)
            mean_square = down.pow(2).mean(dim=3, keepdim=True)  # over the heads of a group
            down = (down * torch.rsqrt(mean_square + COMPOSE_NORM_EPS)).to(dtype).flatten(2, 3)  # [C, B, H, N, R]
            up = pair[1].flatten(2, 3)  # [C, B, H, N, R]
            parts += [down.transpose(3, 4), up.transpose(3, 4)]
        if gate is not None:
            gate = torch.tanh(gate.to(compute)).to(dtype)  # [B, N, G·C·M]
            self._check_whole_groups(gate.shape[-1], count * m)
            gate = gate.unflatten(-1, (-1, count, m)).permute(3, 0, 2, 4, 1)  # [C, B, G, M, N]
            parts.append(gate.flatten(2, 3).unsqueeze(3))
        packed = torch.cat(parts, dim=3).unbind() if parts else ()  # each [B, H, channels, N]
        dynamic = {generator: SideWeights(w) for generator, w in zip(self.generators, packed, strict=True)}
        # here and not where they are used: this module's hooks (offloading, tensor parallelism) see to its parameters
        return dynamic, self.static_projections()

    def first_layer(self, hidden_states: torch.Tensor) -> FirstLayer:
        """[B, N, E] -> what `dw1_proj` and `gate_proj` make of it."""
        return [None if linear is None else linear(hidden_states) for linear in (self.dw1_proj, self.gate_proj)]

    def static_projections(self) -> dict[str, torch.Tensor]:
        """Stage -> static projection [G, M, M], of the stages that have one."""
        return {
            stage: static.view(-1, self.heads_per_group, self.heads_per_group)
            for stage, static in (("pre", self.pre_static), ("post", self.post_static))
            if static is not None
        }

    def _kernels(self, hidden_states: torch.Tensor, implementation: str | None) -> LayerKernels | None:
        """The kernels of an attention implementation, if it has some and this module is one that they can replace."""
        kernels = layer_kernels(implementation)
        return kernels if kernels is not None and kernels.can_replace(self, hidden_states) else None

    @staticmethod
    def _check_whole_groups(width: int, per_group: int) -> None:
        if width % per_group:
            raise ValueError(
                f"a rank holds {width} composition channels, which is not a multiple of a group's {per_group}: tensor "
                "parallelism must not cut through a group of heads. Use a tensor-parallel size that divides "
                "compose_groups (a model with compose_groups=1 cannot be split this way)."
            )

    def packed(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        implementation: str | None = None,
        first_layer: FirstLayer = (),
    ) -> tuple[torch.Tensor, torch.Tensor, Generated]:
        """`forward` and `pack` in one: keys and values as a cache takes them, and the weights of the queries.

        Args:
            hidden_states: [B, N, E].
            key, value: [B, Hkv, N, D].
            implementation: as for `forward`; without gradients its kernels write straight behind keys and values.
            first_layer: as for `forward`.

        Returns:
            keys and values [B, Hkv, N, D + channels], and what `forward` returns (perhaps without key-wise weights).
        """
        kernels = None if torch.is_grad_enabled() else self._kernels(hidden_states, implementation)
        if kernels is None:
            generated, statics = self(hidden_states, implementation, first_layer)
            key = self.pack(key, generated.get(("pre", "key")), "pre")
            value = self.pack(value, generated.get(("post", "key")), "post")
        else:
            key, value = self._widen(key, hidden_states.dtype, "pre"), self._widen(value, hidden_states.dtype, "post")
            generated, statics = kernels.generate_packed(hidden_states, self, key, value, first_layer)
        cached = torch.promote_types(key.dtype, value.dtype)  # of caches, which have one: autocast leaves two
        return key.to(cached), value.to(cached), (generated, statics)

    def _widen(self, states: torch.Tensor, dtype: torch.dtype, stage: str) -> torch.Tensor:
        """Keys or values [B, Hkv, N, D] with room for the stage's channels behind them, as `pack` leaves it."""
        if (stage, "key") not in self.generators:
            return states
        head_dim = states.shape[-1]
        shape = (*states.shape[:-1], head_dim + self.channels[stage])
        wide = states.new_empty(shape, dtype=torch.promote_types(states.dtype, dtype))
        wide[..., :head_dim] = states
        return wide

    def pack(self, states: torch.Tensor, side: SideWeights | None, stage: str) -> torch.Tensor:
        """Puts key-wise weights behind keys (stage "pre") or values (stage "post"), where any cache carries them along.

        Args:
            states: keys or values, [B, Hkv, N, D].
            side: key-wise weights of the stage, or None.
            stage: "pre" or "post".

        Returns:
            [B, Hkv, N, D + channels]: the weights of all query heads of a key/value head, then zeros up to the multiple
            of 8 given by `compose_cache_channels`. `states` itself when there is nothing to pack.
        """
        if side is None:
            return states
        head_map, packed = self._head_maps[stage], side.by_head  # [B, H, channels, N] -> [B, Hkv, rep, channels, N]
        packed = packed.unflatten(1, (states.shape[1], -1)) if head_map is None else head_map.by_shared_head(packed)
        packed = packed.permute(0, 1, 4, 2, 3).flatten(3)  # [B, Hkv, N, rep · channels]
        padding = self.channels[stage] - packed.shape[-1]
        return torch.cat([states, packed, packed.new_zeros(()).expand(*packed.shape[:-1], padding)], dim=-1)

    def unpack(
        self, packed: torch.Tensor, head_dim: int, stage: str, gather: bool = False, heads: int | None = None
    ) -> tuple[torch.Tensor, SideWeights | None]:
        """Takes apart what `pack` made.

        Args:
            packed: [B, Hkv, S, D + channels].
            head_dim: D.
            stage: "pre" or "post".
            gather: copy the weights, the tokens of each channel together; behind keys and values, those of neighboring
                tokens lie far apart, and reading them so costs more than the copy when it is done more than once.
            heads: query heads on this process, fewer than H under tensor parallelism; None for as many as the module
                was made with.

        Returns:
            keys or values [B, Hkv, S, D], and the key-wise weights of H heads and S tokens or None: views, unless the
            weights are gathered.
        """
        if (stage, "key") not in self.generators:
            return packed, None
        repeats = self.key_value_repeats[stage] if heads is None else heads // packed.shape[1]
        width = 2 * self.rank + (self.gate_proj is not None)
        weights = key_weights_behind(packed, head_dim, repeats, width)  # [B, Hkv, rep, 2R + 1, S]
        if (head_map := self._head_maps[stage]) is not None:
            weights = head_map.by_query_head(weights)  # [B, H, 2R + 1, S]
        if gather:
            weights = weights.flatten(1, -3).contiguous()  # [B, H, 2R + 1, S]
        return packed[..., :head_dim], SideWeights(weights)

    def stage_weights(
        self, query: SideWeights | None, key: SideWeights | None, static: torch.Tensor | None
    ) -> ComposeWeights | None:
        """Puts together what one stage composes with.

        Args:
            query: query-wise weights of the T queries, or None.
            key: key-wise weights of all S keys, or None.
            static: static projection [G, M, M], or None.

        Returns:
            `ComposeWeights`, or None when the stage is off.
        """
        if query is None and key is None and static is None:
            return None
        if static is not None:
            groups = static.shape[0]
        else:
            heads = (query or key).packed.shape[1:-2].numel()  # type: ignore[union-attr]
            groups = heads // self.heads_per_group
        return ComposeWeights(query, key, static, groups)


def key_weights_behind(packed: torch.Tensor, head_dim: int, repeats: int, width: int) -> torch.Tensor:
    """Key-wise weights where `DCFormerCompose.pack` has put them: a view.

    Args:
        packed: keys or values, [B, Hkv, S, D + channels].
        head_dim: D.
        repeats: query heads of a key/value head.
        width: channels of a query head.

    Returns:
        [B, Hkv, repeats, width, S].
    """
    weights = packed[..., head_dim : head_dim + repeats * width]
    return weights.unflatten(-1, (repeats, width)).permute(0, 1, 3, 4, 2)


def stages(module: DCFormerCompose, *generated: Generated) -> Stages:
    """Both stages' composition weights, from what one or two modules have made (in cross-attention, one for each side).

    Args:
        module: any of them.
        generated: what each returned.
    """
    dynamic = {at: side for sides, _ in generated for at, side in sides.items()}
    static = {stage: projection for _, projections in generated for stage, projection in projections.items()}
    pre, post = (
        module.stage_weights(dynamic.get((stage, "query")), dynamic.get((stage, "key")), static.get(stage))
        for stage in ("pre", "post")
    )
    return pre, post


def init_compose(module: DCFormerCompose, std: Mapping[str, float]) -> None:
    """Sets parameters of composition to their initial values, except those that a checkpoint has.

    Args:
        module: the parameters' module, of any class.
        std: parameter name -> standard deviation, as `compose_init_std` has them.

    Raises:
        NotImplementedError: when a variant has other parameters, and does not say how they begin: where a checkpoint
            lacks them, they would be what memory holds.
    """
    for name, parameter in module.named_parameters():
        if name in std:  # others are a variant's
            init.normal_(parameter, mean=0.0, std=std[name])
    others = [name for name, _ in module.named_parameters(recurse=False) if name not in std]
    if others and type(module).init_weights is DCFormerCompose.init_weights:
        raise NotImplementedError(
            f"{type(module).__name__} has parameters of its own ({', '.join(others[:3])}): give it an init_weights "
            "that sets their initial values, by functions of transformers.initialization. An _init_weights of the "
            "model does not count."
        )
    module.init_weights()


def compose_init_std(settings: ComposeFields) -> dict[str, float]:
    """Standard deviations of composition's parameters at initialization (paper section 4.1 and the training code).

    Small dynamic weights at the start are what the paper found critical.

    Args:
        settings: as for `DCFormerCompose`.

    Returns:
        parameter name within `DCFormerCompose` -> standard deviation of its normal distribution.
    """
    e, h, r = settings.hidden_size, settings.num_attention_heads, settings.compose_rank
    m = h // settings.compose_groups
    return {
        "dw1_proj.weight": math.sqrt(2 / (e + 2 * r * m)),  # Xavier: fan in E, fan out K
        "qkw": 0.02 / (math.sqrt(2 * h * r) * (h + r)),
        "gate_proj.weight": 0.05 * math.sqrt(2 / (e + h)),
        "pre_static": 0.1 * math.sqrt(1 / m),
        "post_static": 0.1 * math.sqrt(1 / m),
    }


__all__ = [
    "COMPOSE_ACTIVATIONS",
    "COMPOSE_NORM_EPS",
    "ComposeFields",
    "ComposeSettings",
    "ComposeWeights",
    "DCFormerCompose",
    "SideWeights",
    "Stages",
    "accumulation_dtype",
    "autocast_dtype",
    "compose",
    "compose_init_std",
    "init_compose",
    "key_weights_behind",
    "stages",
    "without_autocast",
]
