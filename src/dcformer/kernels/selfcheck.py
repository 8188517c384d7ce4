"""The self-check: whether the fused kernels compute the definition on this device, and the default that follows.

With `attn_implementation` unset, each layer asks `is_default` for the tensors at hand. On a CUDA device the first such
question of a kind of layer runs `checks`: attention forward and backward, decoding, the weight generators and steps of
fused layers, at small shapes, against the eager definition. The verdict is remembered, and kept in the cache folder
(`verdicts`).

Tolerances: the definition in float64 is the yardstick. Of a result the largest error and the norm of all errors may be
at most twice those of the definition in the low precision, plus a band, relative to the largest number and to the norm:
one unit in the last place of the dtype, and for attention the unit of float32 times the largest log-sum-exp, as the
kernels make weights as exp(score - log-sum-exp). For gradients of attention the kernels keep scores, composed weights
and gradients of maps in 16 bits, where the definition has float32: there the yardstick is the definition with all its
maps and their gradients rounded so.

Once a device has a mark of `overflow`, kernels keep other maps there: layers are of another kind then, and are checked
again, with larger scores.

Importing this needs no Triton; running a check does.
"""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import logging

from ..attention_dcformer import ComposeTrace, active_transform, attend, eager_attention
from ..cache_dcformer import Room
from ..compose_dcformer import ComposeWeights, DCFormerCompose, SideWeights, autocast_dtype, compose
from ..configuration_dcformer import DCFormerConfig
from ..fusion_dcformer import FusedProjections
from ..heads_dcformer import matmul_shared
from ..masks_dcformer import QueryBlockMask, is_captured, is_few
from ..plain_dcformer import can_attend_plain
from . import verdicts
from .limits import MAX_QUERIES, is_interpreted, unsupported_reason
from .overflow import NOTHING, Beyond, assumed, beyond

logger = logging.get_logger(__name__)

_HIDDEN_SIZE = 64  # E of the weight generators: their first layer is torch's
_WINDOW = 11
_LARGE = 8  # times ordinary scores: up to 30, for which float16 is too coarse


@dataclass(frozen=True)
class Kind:
    """What the kernels are compiled for and chosen by: layers of one kind stand or fall together.

    Attributes:
        heads, kv_heads: H and Hkv, those of a device under tensor parallelism.
        groups: G.
        head_dim: D.
        rank: R; 0 without a low-rank part.
        gate, static: whether there are gates and static projections.
        pre, post, query, key: the stages and sides that compose.
        activation: of the weight generators.
        windowed: whether queries see a window of keys only.
        dtype: of queries, keys and values, as "bfloat16".
        states: of hidden states and composition weights; another one under autocast.
        beyond: the marks on the device, which decide what maps are kept; none for float32.
    """

    heads: int
    kv_heads: int
    groups: int
    head_dim: int
    rank: int
    gate: bool
    static: bool
    pre: bool
    post: bool
    query: bool
    key: bool
    activation: str
    windowed: bool
    dtype: str
    states: str
    beyond: Beyond = NOTHING

    def __str__(self) -> str:
        parts = [f"heads={self.heads}/{self.kv_heads} groups={self.groups} head_dim={self.head_dim} rank={self.rank}"]
        parts += [name for name in ("pre", "post", "query", "key", "gate", "static") if getattr(self, name)]
        parts += ["window" if self.windowed else "global", self.dtype]
        parts += [f"autocast from {self.states}"] * (self.states != self.dtype)
        parts += [f"after the mark of {mark.name}".lower() for mark in self.beyond]
        return " ".join(parts)

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Why the kernels cannot have layers of this kind on a device; None if they can."""
        return unsupported_reason(
            device=device, dtype=getattr(torch, self.dtype), head_dim=self.head_dim, rank=self.rank,
            heads=self.heads // self.groups, activation=self.activation,
        )  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A result of the kernels beside the definition's.

    Attributes:
        name: what was computed.
        measure: "largest" error, or "norm" of all: the one that is nearer to its bound, or further beyond.
        error: of the kernels, against float64.
        eager: of the definition in the low precision.
        allowed: twice that, and a band.
    """

    name: str
    measure: str
    error: float
    eager: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # not so for NaN

    def __str__(self) -> str:
        return f"{self.name} is off by {self.error:.3g} ({self.measure}), {self.allowed:.3g} is allowed"


def kinds(config: Any, dtype: str, states: str | None = None, found: Beyond = NOTHING) -> list[Kind]:
    """The kinds of layers of a model.

    Args:
        config: of the model, a `DCFormerConfig` or `DCViTConfig`, whose layers have no windows.
        dtype: of queries, keys and values, as "bfloat16".
        states: of hidden states, where autocast makes it another one.
        found: marks on the device.
    """
    windows = sorted({kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ("full",)})
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    switches = _switches(config, heads, kv_heads or heads, config.compose_groups)
    found = NOTHING if dtype == "float32" else found
    return [Kind(*(*switches, windowed, dtype, states or dtype, found)) for windowed in windows]


def _switches(config: Any, heads: int, kv_heads: int, groups: int) -> tuple[Any, ...]:
    """The first fields of `Kind`, up to `activation`."""
    own = vars(config)  # asked by every layer in every step of decoding: attributes of a configuration are slow
    pre, post, query, key = (own[f"compose_{name}"] for name in ("pre", "post", "query", "key"))
    is_dynamic = (pre or post) and (query or key)
    return (
        heads, kv_heads, groups, config.head_dim, own["compose_rank"] * (is_dynamic and own["compose_projection"]),
        is_dynamic and own["compose_gate"], own["compose_static"], pre, post,
        is_dynamic and query, is_dynamic and key, own["compose_act"],
    )  # fmt: skip


# --- the default ------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_passed: dict[tuple[Any, ...], tuple[Beyond, bool]] = {}  # marks on the device then, and whether
_told: set[str] = set()


def is_gpu(device: torch.device) -> bool:
    """Whether the default asks about kernels at all for tensors on a device."""
    return device.type == "cuda"


def is_default(
    attention: Any, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, attention_mask: Any
) -> bool:
    """Whether a layer for which no implementation is named takes the fused kernels; see `FusedAttention.is_default`.

    The self-check runs here where it has not yet, outside of the graph where one is traced. A program of `torch.export`
    has no kernels; nor have transforms of `torch.func`, of which the chunked implementation says what can be done.
    Nor have calls for which the chunked implementation takes torch's own attention, which keeps no maps in memory.
    """
    device = query.device
    if not is_gpu(device) or _is_exporting() or active_transform(query, key) is not None:
        return False
    if not attention.config.composes and _is_for_torch(query, key, attention_mask):
        return False
    reason = unsupported_reason(
        dropout=attention.attention_dropout if attention.training else 0.0,
        head_maps=getattr(attention, "key_heads", None) is not None,  # other modules have none
        head_embeddings=getattr(attention, "head_embeddings", None) is not None,
    )
    reason = reason or _mask_reason(attention_mask, query.shape[2], device)
    if reason is not None:
        return _warn_chunked(reason)
    groups = query.shape[1] // attention.compose.heads_per_group
    switches = _switches(attention.config, query.shape[1], key.shape[1], groups)
    dtype = autocast_dtype(device.type) or query.dtype
    windowed = isinstance(attention_mask, QueryBlockMask) and attention_mask.window is not None
    return may_use(device.type, device.index, *switches, windowed, dtype, hidden_states.dtype)


def _is_for_torch(query: torch.Tensor, key: torch.Tensor, mask: Any) -> bool:
    """Whether the chunked implementation gives more than a few queries without composition to torch's attention."""
    if is_few(query.shape[2]) or not (mask is None or (isinstance(mask, QueryBlockMask) and mask.is_plain)):
        return False
    is_whole = mask is None or mask.q_length == mask.kv_length
    return is_whole and can_attend_plain(query, key, key, True, None if mask is None else mask.window, 1.0)


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """Asked outside of a graph that is traced: there torch 2.11 says so of `torch.compile`, too."""
    return torch.compiler.is_exporting()


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _mask_reason(mask: Any, length: int, device: torch.device) -> str | None:
    """Why the default leaves a mask to the chunked implementation.

    Masks that a model makes itself are looked at once per forward pass; not in graphs, where an assertion of the
    kernels finds gaps. Of those that it is given, only what can hold no surprise goes to the kernels.
    """
    if mask is None:
        return None
    if isinstance(mask, QueryBlockMask):
        if mask.is_plain or torch.compiler.is_compiling() or is_captured(device) or len(mask.tensors()) == 2:
            return None
        return unsupported_reason(mask="gaps")
    if mask.shape[1] != 1:
        return unsupported_reason(mask="per head")
    if mask.is_floating_point():
        return unsupported_reason(mask="bias")
    if length > MAX_QUERIES or torch.is_grad_enabled():
        return unsupported_reason(mask="gaps")
    return None


@torch.compiler.assume_constant_result
def may_use(device_type: str, index: int | None, *fields: Any) -> bool:
    """Whether the kernels may be the default for a `Kind` on a device: within the limits, and checked.

    `fields` are the kind's, in order, without `beyond`; the dtypes may be torch's.

    Warns once of each reason why not. A constant of a graph that is traced.
    """
    device, key = torch.device(device_type, index), (device_type, index, *fields)
    marks = beyond(device)
    # asked by every layer in every step of decoding
    if (known := _passed.get(key)) is not None and (known[0] == marks or _must_not_recheck(device)):
        return known[1]
    *switches, dtype, states = fields
    kind = Kind(*(*switches, _name(dtype), _name(states), NOTHING if _name(dtype) == "float32" else marks))
    with _lock:
        if (known := _passed.get(key)) is None or known[0] != marks:
            if is_captured(device):  # not remembered
                return _warn_chunked("a CUDA graph is captured before their self-check: run a forward pass before")
            reason = kind.unsupported_reason(device)
            if reason is None and is_interpreted():
                reason = "TRITON_INTERPRET is set, and the interpreter is slow"
            if reason is not None:
                _warn_chunked(reason)
            elif (reason := _decide(device, kind)) is not None:
                _warn_chunked(reason, f"self-check on {device}")  # other kinds of layers fail there for the same reason
            _passed[key] = known = marks, reason is None
        return known[1]


def _must_not_recheck(device: torch.device) -> bool:
    """Whether a layer goes on as it was checked before a mark: in CUDA graphs, and where it is computed again for its
    gradients. A check there would wait for ever, as its own backward pass waits for this thread."""
    return torch._C._current_graph_task_id() >= 0 or is_captured(device)


def _decide(device: torch.device, kind: Kind) -> str | None:
    """Runs the self-check, or reads what it said before. Returns why the kernels are not used; None if they may be."""
    on, of = verdicts.machine(device), asdict(kind)
    kept = verdicts.kept_verdict(on, of)
    if kept is None:
        logger.info(f"self-check of the fused kernels on {on['device']}, once for {kind}")
        try:
            kept = check_and_keep(device, kind)[1:]
        except Exception as error:  # compilers and drivers raise anything; a bug of ours must not stop the model
            logger.debug("the self-check ended here", exc_info=True)
            return _impossible(error, on, of, kind)
    passed, summary = kept
    return None if passed else f"their self-check found on {on['device']}, for {kind}: {summary}"


def check_and_keep(device: torch.device, kind: Kind) -> tuple[list[Check], bool, str]:
    """Runs the self-check; on a CUDA device keeps its verdict, whatever was kept before.

    Returns:
        all results, whether they are within their bounds, and those that are not in words.
    """
    results = run(device, kind)
    failed = [check for check in results if not check.passed]
    passed, summary = not failed, "; ".join(map(str, failed))
    if is_gpu(device) and not is_interpreted():
        verdicts.keep_verdict(verdicts.machine(device), asdict(kind), passed, summary)
    return results, passed, summary


def _impossible(error: Exception, on: dict[str, str], of: dict[str, Any], kind: Kind) -> str:
    """What to say of a check that raised. It is kept if it has left the device unusable, so that the next process can
    do without; whatever else it was (memory, a compiler) may be over by then."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError):
        verdicts.keep_verdict(on, of, False, text)
    return f"their self-check could not run on {on['device']}, for {kind}: {text}"


@torch.compiler.assume_constant_result
def _warn_chunked(reason: str, subject: str | None = None) -> bool:
    """Warns, once for a subject, why the default is chunked where kernels might have been. Returns False."""
    subject = subject or reason
    log = logger.info if subject in _told else logger.warning
    _told.add(subject)
    log(
        "attn_implementation is unset, and 'dcformer_chunked' is used on a GPU instead of the fused kernels: "
        f"{reason}. (`dcformer-selfcheck` prints the whole check; naming 'dcformer_chunked' silences this.)"
    )
    return False


# --- the check --------------------------------------------------------------------------------------------------------


def run(device: torch.device, kind: Kind) -> list[Check]:
    """All `checks`, in a thread of their own: what is thread-local around the caller (autocast, no_grad, tracing, fake
    tensors) does not reach them. Random numbers come from generators of their own."""

    def work() -> list[Check]:
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with current, assumed(device, kind.beyond):
            return list(checks(device, kind))

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def checks(device: torch.device, kind: Kind) -> Iterator[Check]:
    """Compares the kernels with the definition, one result after the other.

    Args:
        device: CUDA, or the CPU in Triton's interpreter.
        kind: of layer.

    Raises:
        ValueError: beyond `unsupported_reason`.
        RuntimeError: what compilation, or the device, may raise.
    """
    reason = kind.unsupported_reason(device)
    if reason is not None:
        raise ValueError(reason)
    # Odd lengths, more than one tile of each kernel; the interpreter's tiles are smaller.
    lengths = _Lengths(131, 300, 67) if device.type == "cuda" else _Lengths(21, 40, 18)
    subject = _Subject(kind, device, lengths)
    yield from subject.attention()
    if not kind.windowed:
        yield from subject.attention(is_causal=False)  # images
    yield from subject.decoding(1)
    yield from subject.decoding(3)
    if kind.rank or kind.gate:
        yield from subject.generators()
        if kind.key:
            yield from subject.packed_generators()
    if kind.states == kind.dtype and kind.head_dim > 1:  # autocast goes another way, and RoPE needs two channels
        yield from subject.fused_steps()


@dataclass(frozen=True)
class _Lengths:
    tokens: int  # of attention, T = S
    keys: int  # while decoding
    generated: int  # N of the generators


_Results = dict[str, torch.Tensor]


class _Subject:
    """What is compared: each method computes the same three times, in float64, by the definition, by the kernels."""

    def __init__(self, kind: Kind, device: torch.device, lengths: _Lengths):
        self.kind, self.device, self.lengths = kind, device, lengths
        self.dtype: torch.dtype = getattr(torch, kind.dtype)
        self.states: torch.dtype = getattr(torch, kind.states)
        self.has_large_scores = bool(kind.beyond & (Beyond.SCORES | Beyond.PRECISION))
        self.generator = torch.Generator().manual_seed(0)
        self.eager_module: Any = SimpleNamespace(is_causal=True, training=False)
        self.exact, self.compose = self._make(partial(DCFormerCompose, self._config(head_dim=2)))

    def _config(self, head_dim: int) -> DCFormerConfig:
        kind, rotated = self.kind, 1.0
        if head_dim % 2:  # RoPE rotates pairs of channels
            rotated = (head_dim - 0.5) / head_dim
        return DCFormerConfig(
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated},
            hidden_size=_HIDDEN_SIZE, num_attention_heads=kind.heads, num_key_value_heads=kind.kv_heads,
            head_dim=head_dim, num_hidden_layers=1, compose_groups=kind.groups, compose_rank=max(1, kind.rank),
            compose_projection=kind.rank > 0, compose_gate=kind.gate, compose_static=kind.static, compose_pre=kind.pre,
            compose_post=kind.post, compose_query=kind.query, compose_key=kind.key, compose_act=kind.activation,
        )  # fmt: skip

    def _make(self, make: Callable[[], nn.Module]) -> tuple[Any, Any]:
        """A module with parameters that make composition matter, in float64 and in the dtype of states."""
        with torch.device("meta"):  # no draw from the global generator
            module = make()
        exact = module.to(torch.float64).to_empty(device=self.device)
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.copy_(self._new(*parameter.shape, scale=2 * parameter.shape[-1] ** -0.5, dtype=self.states))
        with torch.device("meta"):
            module = make()
        low = module.to(self.states).to_empty(device=self.device)
        low.load_state_dict(exact.state_dict())
        return exact.eval(), low.eval()

    def _new(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers in float64 that the dtype has."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu") * scale
        return values.to(dtype or self.dtype).to(device=self.device, dtype=torch.float64)

    def _autocast(self) -> AbstractContextManager:
        if self.states == self.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _weights(self, tokens: int, keys: int) -> _Results:
        """Composition weights by name, as large as trained ones get: "pre.query.down" and so on."""
        kind, out = self.kind, {}
        for stage in [name for name in ("pre", "post") if getattr(kind, name)]:
            for side, length in (("query", tokens), ("key", keys)):
                if not getattr(kind, side):
                    continue
                shape = (2, kind.heads, length)
                if kind.rank:
                    out[f"{stage}.{side}.down"] = self._new(*shape, kind.rank, scale=0.5, dtype=self.states)
                    out[f"{stage}.{side}.up"] = self._new(*shape, kind.rank, scale=0.5, dtype=self.states)
                if kind.gate:
                    out[f"{stage}.{side}.gate"] = self._new(*shape, scale=0.5, dtype=self.states)
            if kind.static:
                m = kind.heads // kind.groups
                out[f"{stage}.static"] = self._new(kind.groups, m, m, scale=m**-0.5, dtype=self.states)
        return out

    def _stage(self, weights: _Results, stage: str) -> ComposeWeights | None:
        parts = {name.removeprefix(f"{stage}."): w for name, w in weights.items() if name.startswith(f"{stage}.")}
        if not parts:
            return None
        sides = {
            side: SideWeights.of(*(parts.get(f"{side}.{part}") for part in ("down", "up", "gate")))
            for side in ("query", "key")
            if any(name.startswith(side) for name in parts)
        }
        return ComposeWeights(**sides, static=parts.get("static"), groups=self.kind.groups)

    def _states(self, tokens: int, keys: int) -> _Results:
        kind = self.kind
        return {
            "query": self._new(2, kind.heads, tokens, kind.head_dim, scale=_LARGE if self.has_large_scores else 1.0),
            "key": self._new(2, kind.kv_heads, keys, kind.head_dim),
            "value": self._new(2, kind.kv_heads, keys, kind.head_dim),
        }

    def _visible(self, tokens: int, keys: int, is_causal: bool = True) -> torch.Tensor:
        """[2, 1, T, S]: causal, in the window; the second row has padding on the left."""
        t, s = torch.arange(tokens, device=self.device)[:, None] + keys - tokens, torch.arange(keys, device=self.device)
        visible = (s <= t) | (not is_causal)
        if self.kind.windowed:
            visible = visible & (s > t - _WINDOW)
        start = torch.tensor([0, keys // 4], device=self.device)[:, None, None]
        return (visible[None] & (s >= start))[:, None]

    def _eager(self, states: _Results, weights: _Results, visible: torch.Tensor) -> torch.Tensor:
        """Output of the definition [B, H, T, D]."""
        output, _ = eager_attention(
            self.eager_module, states["query"], states["key"], states["value"], visible, self.kind.head_dim**-0.5,
            pre=self._stage(weights, "pre"), post=self._stage(weights, "post"),
        )  # fmt: skip
        return output.transpose(1, 2)

    def _eager_with_rounded_maps(self, states: _Results, weights: _Results, visible: torch.Tensor) -> torch.Tensor:
        """Output of the definition [B, H, T, D], every map and every gradient of one rounded to the dtype; not large
        scores, which kernels keep in float32."""
        dtypes = iter((torch.float32 if self.has_large_scores else self.dtype, self.dtype))  # of scores and of weights

        def mix(maps: torch.Tensor, stage: ComposeWeights | None) -> torch.Tensor:
            dtype = next(dtypes)
            return _Rounded.apply(compose(_Rounded.apply(maps, dtype, self.dtype), stage), dtype, self.dtype)

        maps = attend(
            states["query"], states["key"], visible, None, self.kind.head_dim**-0.5,
            self._stage(weights, "pre"), self._stage(weights, "post"), mix=mix,
        )  # fmt: skip
        return matmul_shared(maps.composed_weights.to(self.dtype), states["value"])

    def _span(self, states: _Results, weights: _Results, visible: torch.Tensor) -> float:
        keys = states["key"].repeat_interleave(self.kind.heads // self.kind.kv_heads, dim=1)
        scores = torch.matmul(states["query"], keys.mT) * self.kind.head_dim**-0.5
        return _span_of(compose(scores, self._stage(weights, "pre")), visible)

    # --- comparisons --------------------------------------------------------------------------------------------------

    def attention(self, is_causal: bool = True) -> Iterator[Check]:
        """Output and every gradient, of tokens that see the tokens before them, or all."""
        from .ops import composed_attention

        tokens = self.lengths.tokens
        states, weights = self._states(tokens, tokens), self._weights(tokens, tokens)
        visible, grad = self._visible(tokens, tokens, is_causal), self._new(*states["query"].shape)
        start = torch.tensor([0, tokens // 4], device=self.device)

        def by_kernels(states: _Results, weights: _Results) -> torch.Tensor:
            output: Any = composed_attention(
                states["query"], states["key"], states["value"], self._stage(weights, "pre"),
                self._stage(weights, "post"), causal=is_causal, key_start=start,
                sliding_window=_WINDOW if self.kind.windowed else None,
            )  # fmt: skip
            return output

        by_definition = partial(self._eager, visible=visible)

        def results(attention: Callable[[_Results, _Results], torch.Tensor], is_exact: bool = False) -> _Results:
            dtypes = (torch.float64,) * 2 if is_exact else (self.dtype, self.states)
            given, made = (
                {name: t.to(dtype, copy=True).requires_grad_() for name, t in tensors.items()}
                for tensors, dtype in zip((states, weights), dtypes, strict=True)
            )
            output = attention(given, made)
            output.backward(grad.to(output.dtype))
            grads = {f"gradient of {name}": t.grad for name, t in (given | made).items() if t.grad is not None}
            return {"forward": output.detach()} | grads

        span = self._span(states, weights, visible)
        truth, low, found = results(by_definition, True), results(by_definition), results(by_kernels)
        if is_gpu(self.device):  # the third time launches are repeated, as in models; the interpreter repeats none
            _, found = results(by_kernels), results(by_kernels)
        if self.dtype != torch.float32:
            low = results(partial(self._eager_with_rounded_maps, visible=visible)) | {"forward": low["forward"]}
        yield from self._compare("attention" if is_causal else "attention to all keys", truth, low, found, span)

    def decoding(self, queries: int) -> Iterator[Check]:
        """A few queries over a cache, whose rows hold key-wise weights behind keys and values."""
        from .decode import composed_decode

        keys, kind = self.lengths.keys, self.kind
        states, weights = self._states(queries, keys), self._weights(queries, keys)
        visible = self._visible(queries, keys)

        def cached(stage: str, name: str) -> tuple[torch.Tensor, SideWeights | None]:
            this = self._stage(weights, stage)
            key_side = None if this is None or this.key is None else this.key
            if key_side is not None:
                key_side = SideWeights(key_side.packed.to(self.states))
            rows = self.compose.pack(states[name].to(self.dtype), key_side, stage)
            return self.compose.unpack(rows, kind.head_dim, stage)

        (key, pre_key), (value, post_key) = cached("pre", "key"), cached("post", "value")

        def stage_of(stage: str, key_side: SideWeights | None) -> ComposeWeights | None:
            this = self._stage({name: w.to(self.states) for name, w in weights.items()}, stage)
            return None if this is None else ComposeWeights(this.query, key_side, this.static, this.groups)

        with torch.no_grad():
            for _ in range(2):  # the second call repeats the launches that the first one chose, as models do
                found = composed_decode(
                    states["query"].to(self.dtype), key.to(self.dtype), value.to(self.dtype), stage_of("pre", pre_key),
                    stage_of("post", post_key), scale=kind.head_dim**-0.5, visible=visible,
                )  # fmt: skip
            low = self._eager(
                {name: t.to(self.dtype) for name, t in states.items()},
                {name: w.to(self.states) for name, w in weights.items()},
                visible,
            )
            truth, span = self._eager(states, weights, visible), self._span(states, weights, visible)
        name = "1 query" if queries == 1 else f"{queries} queries"
        yield from self._compare("decoding", {name: truth}, {name: low}, {name: found}, span)

    def generators(self) -> Iterator[Check]:
        """Weights that the generators make, and every gradient."""
        from .generator import generate_weights

        hidden = self._new(2, self.lengths.generated, _HIDDEN_SIZE, dtype=self.states)
        grads: dict[str, torch.Tensor] = {}

        def results(module: DCFormerCompose, generate: Callable, around: AbstractContextManager) -> _Results:
            states = hidden.to(next(module.parameters()).dtype, copy=True).requires_grad_()
            module.zero_grad()
            with around:
                made = _named(generate(states, module)[0])
            for name, weight in made.items():
                if name not in grads:
                    grads[name] = self._new(*weight.shape, dtype=self.states)
            torch.autograd.backward(list(made.values()), [grads[name].to(w.dtype) for name, w in made.items()])
            parameters = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            tensors = {"hidden states": states.grad, **parameters}
            out = {name: weight.detach() for name, weight in made.items()}
            return out | {f"gradient of {name}": grad.clone() for name, grad in tensors.items() if grad is not None}

        def by_module(states: torch.Tensor, module: DCFormerCompose) -> Any:
            return module(states)

        truth = results(self.exact, by_module, nullcontext())
        low = results(self.compose, by_module, self._autocast())
        found = results(self.compose, generate_weights, self._autocast())
        yield from self._compare("generators", truth, low, found)

    def packed_generators(self) -> Iterator[Check]:
        """Key-wise weights, written behind keys and values as a cache keeps them; query-wise ones beside them."""
        from .generator import generate_packed

        length, kind = self.lengths.generated, self.kind
        hidden, states = self._new(2, length, _HIDDEN_SIZE, dtype=self.states), self._states(1, length)

        def results(module: DCFormerCompose, around: AbstractContextManager, fused: bool = False) -> _Results:
            dtype = next(module.parameters()).dtype
            key, value = (states[name].to(dtype) for name in ("key", "value"))
            with around:
                if fused:
                    key, value = module._widen(key, dtype, "pre"), module._widen(value, dtype, "post")
                    made, _ = generate_packed(hidden.to(dtype), module, key, value)
                else:
                    made, _ = module(hidden.to(dtype))
                    key = module.pack(key, made.get(("pre", "key")), "pre")
                    value = module.pack(value, made.get(("post", "key")), "post")
            rows = {"key": key[..., kind.head_dim :], "value": value[..., kind.head_dim :]}
            query = {name: w for name, w in _named(made).items() if ".query." in name}
            return query | {f"weights behind each {name}": row for name, row in rows.items() if row.numel()}

        with torch.no_grad():
            truth = results(self.exact, nullcontext())
            # the last call repeats the launches that the one before chose, as models do
            low, _, found = (results(self.compose, self._autocast(), fused) for fused in (False, True, True))
        yield from self._compare("generators into the cache", truth, low, found)

    def fused_steps(self) -> Iterator[Check]:
        """Two tokens of a layer with fused projections, up to the output of the heads; with a window a third one.

        That is QK-norm, RoPE, generators, and the rows of a cache, which are written and read in place: of the third
        token in a ring, as in static caches.
        """
        from ..modeling_dcformer import DCFormerAttention, DCFormerRotaryEmbedding
        from .step import decode_step

        config, keys = self._config(self.kind.head_dim), self.lengths.keys
        modules: tuple[DCFormerAttention, DCFormerAttention] = self._make(partial(DCFormerAttention, config, 0))
        rotary, total = DCFormerRotaryEmbedding(config).to(self.device), keys + 2 + self.kind.windowed
        hidden = self._new(2, total, _HIDDEN_SIZE)
        for module in modules:
            module.o_proj = nn.Identity()  # type: ignore[assignment]
        low = modules[1]
        low.fused = FusedProjections(tuple(low.projections().values()))  # type: ignore[arg-type]
        trace = ComposeTrace()  # of the exact module

        def results(module: DCFormerAttention, by_kernels: bool = False) -> _Results:
            cache, out, start = DynamicCache(), {}, 0
            memory: list[torch.Tensor] = []  # with room, as a growing cache lends it
            states = hidden.to(module.q_proj.weight.dtype)
            for stop in range(keys, total + 1):
                x, mask = states[:, start:stop], self._visible(stop - start, stop)
                rope = rotary(x, torch.arange(start, stop, device=self.device)[None])
                is_third = start == keys + 2
                if is_third:
                    mask[1, ..., start - 4 : start - 1] = False  # who is who matters only where keys are hidden
                if by_kernels and start:
                    room = Room(None, memory[0], memory[1], None, start)
                    if is_third:
                        room, mask = _ring_of(memory[0], memory[1], start), mask[..., -_WINDOW:]
                    stepped = decode_step(module, x, module.fused(x), rope, lambda *_, room=room: room, mask)
                    if stepped is None:
                        raise RuntimeError("a fused step was left to the layer's own operations")
                    found, _ = stepped
                else:
                    maps = trace if module is modules[0] else None
                    found, _ = module(x, rope, mask, cache, 0, attn_implementation="eager", compose_trace=maps)
                if start:
                    out[f"token {start - keys + 1}"] = found.reshape(2, -1)
                elif by_kernels:
                    layer: Any = cache.layers[0]
                    memory += [nn.functional.pad(rows, (0, 0, 0, 16)) for rows in (layer.keys, layer.values)]
                start = stop
            return out

        with torch.no_grad():
            truth, by_definition, found = results(modules[0]), results(low), results(low, True)
        spans = [_span_of(maps.composed_scores, self._visible(1, maps.scores.shape[3])) for maps in trace.layers[1:]]
        yield from self._compare("fused steps", truth, by_definition, found, max(spans))

    def _compare(
        self, name: str, truth: _Results, low: _Results, found: _Results, span: float = 0.0
    ) -> Iterator[Check]:
        if truth.keys() != found.keys():
            raise RuntimeError(f"{name}: the kernels made {sorted(found)}, the definition {sorted(truth)}")
        for part, expected in truth.items():
            band = torch.finfo(self.dtype).eps + span
            errors, yardsticks = ((x[part].double() - expected).flatten() for x in (found, low))
            expected = expected.flatten()
            candidates = []
            for measure, order in (("largest", math.inf), ("norm", 2)):
                error, eager, size = (float(torch.linalg.vector_norm(x, order)) for x in (errors, yardsticks, expected))
                candidates.append(Check(f"{name}, {part}", measure, error, eager, 2 * eager + band * size))
            yield max(candidates, key=lambda check: (not check.passed, check.error / (check.allowed or math.inf)))


def _ring_of(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> Room:
    """The last rows of so many tokens [B, G, S, channels], as a window of a static cache has them."""
    last = torch.arange(tokens - _WINDOW, tokens, device=keys.device)
    rings = [rows.index_select(2, last).index_copy_(2, last % _WINDOW, rows[:, :, last]) for rows in (keys, values)]
    return Room(None, rings[0], rings[1], torch.tensor(tokens, device=keys.device), 0, is_ring=True)


class _Rounded(torch.autograd.Function):
    """What a tensor and its gradient are after a way through memory in other dtypes."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.dtype = grad_dtype
        return tensor.to(dtype).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad.to(ctx.dtype).to(grad.dtype), None, None


def _span_of(composed_scores: torch.Tensor, visible: torch.Tensor) -> float:
    """Relative errors of weights that come from rounding the log-sum-exp of scores [B, H, T, S] to float32."""
    sums = composed_scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    return torch.finfo(torch.float32).eps * float(sums[sums.isfinite()].abs().max())


def _named(generated: dict[tuple[str, str], SideWeights]) -> _Results:
    parts = ("down", "up", "gate")
    named = {f"{stage}.{side}.{p}": getattr(w, p) for (stage, side), w in generated.items() for p in parts}
    return {name: weight for name, weight in named.items() if weight is not None}


__all__ = ["Check", "Kind", "check_and_keep", "checks", "is_default", "kinds", "may_use", "run"]
