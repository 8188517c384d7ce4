"""Runs the kernels of composed attention, over chunks of queries where the maps of all would be too large.

One pass over a map of all heads is what costs most; the passes of a chunk:

    forward      scores  q, k -> S        lse  S            compose  S -> W       values  W, v -> out
    backward     scores  q, k -> S        weights  S -> P, W                      keys  W, dO -> dV
                 scores  v, dO -> dW      back_1  P, dW -> dP
                 back_0  S, P, dP -> dS   values  dS, k -> dQ                     keys  dS, q -> dK

W of the forward pass takes the place of S, dP and dS that of dW. `expand` makes each key's matrix of the key side
before, `project` takes their gradients back. In 16 bits all maps and the matrices are float16, gradients times powers
of two that `scale` finds, and what is bfloat16 is copied in float16 for products with them (`norms`, `halves`); where
that is not sufficient, see `overflow`. Maps lie in tiles of as many queries as the kernels of composition have:
[B, S, tiles, H, queries of a tile].
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import triton

from .balance import keys_of_a_program, lengths
from .layout import Layout, Part, Stage, StagePair
from .overflow import LARGEST, LARGEST_EXACT, NOTHING, Beyond, beyond, look, mark_of
from .repeated import start
from .search import LEAST_QUERIES, Trial, can_search, find_tiles, searched
from .sizes import ceil_div, power_of_2, round_up
from .triton.backward import back_0_kernel, back_1_kernel
from .triton.compose import compose_kernel, join_kernel, lse_kernel
from .triton.heads import KEPT, SCORES_GRAD
from .triton.key_side import expand_kernel, project_kernel
from .triton.precision import INTERPRETED
from .triton.products import keys_kernel, scores_kernel, values_kernel
from .triton.scales import halves_kernel, norms_kernel, scale_kernel
from .tuning import (
    Key,
    Tile,
    autotune_is_on,
    choose,
    found_tile,
    keep_tiles,
    launch_options,
    resident_programs,
)

_Result = TypeVar("_Result")

FIRST_CHUNK = 128  # queries of the smallest chunk
_LEAST_BYTES = 256 * 2**20  # of a chunk, and more where a device has it: chunks cost launches
UNBOUNDED = 2**30  # of `Visibility`: more than any number of keys
_MOST_PROGRAMS = 65535  # along a grid's second and third axis
_JOINED = 64  # queries whose log-sum-exps one program joins
_ROWS = 64  # of states, of one program
_STATES = "vgkq"  # values, gradients of the output, keys, queries: their order in the kernels of `scales`
_NO_STRIDES: dict[str, Any] = {f"stride_{letter}{axis}": 0 for letter in _STATES for axis in "bhn"}
_MOST_INT32 = 2**31 - 1
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
_INTERPRETED_KEYS = 32  # of a program, in the interpreter: so that short sequences have several

# name in `tuning` -> kernel and constants of its own
LAUNCHES: dict[str, tuple[triton.JITFunction, dict[str, Any]]] = {
    "scores": (scores_kernel, {}),
    "lse": (lse_kernel, {}),
    "compose": (compose_kernel, {"KEEP": False}),
    "values": (values_kernel, {}),
    "weights": (compose_kernel, {"KEEP": True}),
    "back_1": (back_1_kernel, {}),
    "back_0": (back_0_kernel, {}),
    "keys": (keys_kernel, {}),
}
_UNLIMITED: dict[str, Any] = {"largest": torch.inf, "MARK": False, "p_mark": None}  # see `Problem._limit`
# kernels with parts of keys -> what a program does besides, in keys: for composition about what it reads and writes for
# each query, in what it does for each key
BESIDES = {"scores": 64, "lse": 6, "compose": 6, "weights": 6, "back_1": 12, "back_0": 12}
_COMPOSITION = ("lse", "compose", "weights", "back_1", "back_0")


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: an interval of them.

    Attributes:
        first, last: int32 [B or 1, T]: query t sees keys first <= s < last <= S; nothing where first >= last.
        low, high: key s is seen by no query before s - high and none after s - low: bounds that hold for all, so that
            chunks hold no more keys than they need.
    """

    first: torch.Tensor
    last: torch.Tensor
    low: int = -UNBOUNDED
    high: int = UNBOUNDED


@dataclass(frozen=True)
class Chunk:
    """Queries t_0 to t_0 + n_t, and the keys s_0 to s_0 + n_s that any of them may see; the last may not exist.

    Maps have n_p queries, a multiple of every tile. s_0 and n_s are multiples of 16.
    """

    t_0: int
    n_t: int
    n_p: int
    s_0: int
    n_s: int


@dataclass(frozen=True)
class Gradients:
    """Gradients of a problem's tensors: float32 those that are sums of many, also over chunks if there are several."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: StagePair

    def at(self, rows: slice) -> "Gradients":
        """Those of some rows of a batch, as views; static projections belong to all."""
        pre, post = self.weights
        return Gradients(self.query[rows], self.key[rows], self.value[rows], (pre.at(rows), post.at(rows)))


@dataclass(frozen=True)
class States:
    """Queries, keys, values or gradients of the output, as a product with a map takes them.

    Attributes:
        tensor: [B, heads, N, d].
        undo: what undoes the powers of two that they are times, float32 [B, Hkv]; None where there are none.
    """

    tensor: torch.Tensor
    undo: torch.Tensor | None = None


@dataclass(frozen=True)
class Sources:
    """What a backward pass starts from.

    Attributes:
        query, key, grad: queries, keys and gradients of the output, for products with dS and W.
        grad_out: these gradients as they were given.
        grad_norms: their norms, [B, H, T].
        value_norms: the largest norms of values, [B, Hkv, blocks of `_ROWS`].
    """

    query: States
    key: States
    grad: States
    grad_out: torch.Tensor
    grad_norms: torch.Tensor
    value_norms: torch.Tensor


class Problem:
    """One call: its tensors, and what the launches share.

    Args:
        query [B, H, T, D], key [B, Hkv, S, D], value [B, Hkv, S, DV]: any strides but that of the last dimension.
        weights: what both stages compose with.
        visibility: who sees what.
        layout: what composition there is.
        scale: factor of the scores.
        chunk_bytes: bound of the memory that the maps of a chunk take, above what the smallest chunk needs:
            128 queries of one sequence. None for 256 MiB, or 1/64 of the device's memory where that is more.
        beyond: what has exceeded float16, see `overflow`.

    Attributes:
        map_dtype: of scores, of weights that the key side composes, and of the matrices M(s): float16, or float32.
        grad_dtype: of the gradients of both kinds of weights, of scores and of the matrices: the same, or bfloat16.
        weight_dtype: of W: float16 where `grad_dtype` is, or that of the states.
        shift: log2 of what P and W are times.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        weights: StagePair,
        visibility: Visibility,
        layout: Layout,
        scale: float,
        chunk_bytes: int | None = None,
        beyond: Beyond = NOTHING,
    ):
        self.q, self.k, self.v, self.weights = query, key, value, weights
        self.visibility, self.layout, self.scale = visibility, layout, scale
        self.B, self.H, self.T, self.D = query.shape
        self.S, self.DV, self.kv_heads = key.shape[2], value.shape[3], key.shape[1]
        self.G, self.M = layout.groups, self.H // layout.groups
        self.heads = head_blocks(self.M)
        self._known: dict[Hashable, Any] = {}
        self.beyond = beyond
        is_cuda = query.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(query.device) if is_cuda else (9, 0)
        self.arch = 10 * major + minor
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else _LEAST_BYTES
        if is_cuda and chunk_bytes is None:
            total = torch.cuda.get_device_properties(query.device).total_memory
            self.chunk_bytes = max(_LEAST_BYTES, total // 64)
        self.trial = None
        self._check_int32()

    def _check_int32(self) -> None:
        """Kernels count in 64 bits from key to key of a map, in 32 bits within a key, and within the composition
        weights of one group's heads.

        Raises:
            ValueError: when the latter do not fit. (Chunks see to the former.)
        """
        count = self.M * self.layout.channels * max(self.T, self.S)
        if count > _MOST_INT32:
            raise ValueError(
                f"composition weights of {self.M} heads x {max(self.T, self.S)} tokens are {count} numbers, the fused "
                f"kernels count to {_MOST_INT32}: use shorter sequences or attn_implementation='dcformer_chunked'."
            )

    @property
    def beyond(self) -> Beyond:
        return self._beyond

    @beyond.setter
    def beyond(self, found: Beyond) -> None:
        self._beyond = found
        too_large = found
        if self.q.dtype != torch.float16:  # which bfloat16 would be much less exact than
            too_large &= Beyond.SCORES
        self.map_dtype = torch.float32 if too_large or self.q.dtype == torch.float32 else torch.float16
        is_half = self.map_dtype == torch.float16
        self.grad_dtype = torch.bfloat16 if is_half and Beyond.GRADIENTS in found else self.map_dtype
        self.weight_dtype = torch.float16 if self.grad_dtype == torch.float16 else self.q.dtype
        self.shift = KEPT.value if is_half else 0
        self._is_widened = self.map_dtype == torch.float32 != self.q.dtype  # maps are wider than the states
        self._known.clear()

    @property
    def trial(self) -> Trial | None:
        """What a search is trying."""
        return self._trial

    @trial.setter
    def trial(self, trial: Trial | None) -> None:
        self._trial = trial
        self._known.clear()

    @property
    def gpu(self) -> str:
        """Name of the device, by which found tiles are kept."""
        return torch.cuda.get_device_name(self.q.device) if self.q.is_cuda else self.q.device.type

    @cached_property
    def _multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 132

    # --- chunks -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Queries that those of a map are a multiple of: the largest tile of the kernels of composition."""
        return self._remembered("step", lambda: max(self._tile(name).b_t for name in _COMPOSITION))

    @property
    def block(self) -> int:
        """Queries that gradients have one power of two for: a multiple of the tiles of all kernels with it."""
        return self._remembered("block", lambda: max(self.step, self._tile("scores").b_t, self._tile("keys").b_t))

    def _chunk(self, t_0: int, n_t: int) -> Chunk:
        s_0 = min(self.S, max(0, t_0 + self.visibility.low)) // 16 * 16
        s_1 = max(s_0, round_up(max(0, min(self.S, t_0 + n_t + self.visibility.high)), 16))
        return Chunk(t_0, n_t, round_up(n_t, self.step), s_0, s_1 - s_0)

    def chunk_size(self, chunk: Chunk, maps: int) -> int:
        """Bytes of a chunk of one sequence: of its maps, matrices of keys and, with three maps, their gradients."""
        matrix = self.G * sum(self.heads) ** 2
        stages = sum(bool(flags & (Part.KEY | Part.STATIC)) for flags in (self.layout.pre, self.layout.post))
        # one stage's gradients at a time
        matrices = stages + bool(stages and maps > 1) * ceil_div(chunk.n_t, self._tile("back_1").b_t)
        size = self.map_dtype.itemsize
        # W takes the memory of scores in the forward pass, where its numbers have that size
        sizes = maps * size + (self.weight_dtype.itemsize if maps == 1 and self._is_widened else 0)
        return chunk.n_s * (sizes * self.H * chunk.n_p + size * matrices * matrix)

    def chunks(self, maps: int) -> list[Chunk]:
        """Chunks of queries, of which one sequence keeps within the bytes; `maps` are held at once."""

        def fits(n_t: int) -> bool:
            worst = max((self._chunk(t_0, n_t) for t_0 in (0, self.T - n_t)), key=lambda chunk: chunk.n_s)
            is_small = worst.n_p * self.H <= _MOST_INT32
            return is_small and self.chunk_size(worst, maps) <= self.chunk_bytes

        n_t = self.T
        if not fits(n_t):
            n_t = min(FIRST_CHUNK, self.T)
            while fits(2 * n_t):
                n_t *= 2
        return [self._chunk(t_0, min(n_t, self.T - t_0)) for t_0 in range(0, self.T, n_t)]

    def _rows(self, chunks: list[Chunk], maps: int) -> Iterator[tuple[slice, "Problem"]]:
        """The problem in parts of the batch, as many sequences as keep within the bytes."""
        sequence = max(self.chunk_size(chunk, maps) for chunk in chunks)
        n_b = max(1, min(self.B, self.chunk_bytes // max(1, sequence), _MOST_PROGRAMS // self.H))
        if n_b == self.B:
            yield slice(None), self
            return
        for b_0 in range(0, self.B, n_b):
            rows = slice(b_0, b_0 + n_b)
            first, last = (t if t.shape[0] == 1 else t[rows] for t in (self.visibility.first, self.visibility.last))
            seen = replace(self.visibility, first=first, last=last)
            pre, post = self.weights
            part = Problem(
                self.q[rows], self.k[rows], self.v[rows], (pre.at(rows), post.at(rows)), seen, self.layout, self.scale,
                self.chunk_bytes, self.beyond,
            )  # fmt: skip
            part.trial = self.trial
            yield rows, part

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The tensors' device, as Triton launches on the current one; no autocast, so that products keep dtypes."""
        with torch.cuda.device_of(self.q), torch.autocast(self.q.device.type, enabled=False):
            yield

    # --- tiles --------------------------------------------------------------------------------------------------------

    def _remembered(self, key: Hashable, find: Callable[[], _Result]) -> _Result:
        """What `find` returns, of the first call while neither maps nor a trial change: launches ask often."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _tile(self, name: str) -> Tile:
        return self._remembered(("tile", name), partial(self._choose_tile, name))

    def _choose_tile(self, name: str) -> Tile:
        if self.trial is not None and self.trial.kernel == name:
            return self.trial.tile
        dtype = torch.float32 if self._is_widened and name != "scores" else self.q.dtype  # of what it multiplies
        tile = choose(name, self.M, max(self.D, self.DV), dtype, self.arch, self.layout.rank)
        found = self._found_tile(name, tile) if autotune_is_on() and not self._is_widened else None
        return found or tile

    def _found_tile(self, name: str, usual: Tile) -> Tile | None:
        """The tile that a search has found, unless it is of composition with other queries than the usual one: maps are
        laid out by these."""
        found = found_tile(self.gpu, self._key(name))
        return None if found is None or (name in _COMPOSITION and found.b_t != usual.b_t) else found

    def _key(self, name: str) -> Key:
        layout, dtype = self.layout, str(self.q.dtype).removeprefix("torch.")
        windowed = self.visibility.low > -UNBOUNDED and self.visibility.high < UNBOUNDED
        dim = max(self.D, self.DV)
        return Key(name, self.arch, self.M, dim, dtype, windowed, layout.pre, layout.post, layout.rank)

    def _searched(self, name: str, run: Callable[[], _Result]) -> _Result:
        """Result of a pass; with DCFORMER_AUTOTUNE=1, tiles of its kernels are searched for first, once per process."""
        is_long = self.B * self.T >= LEAST_QUERIES and not self._is_widened
        if autotune_is_on() and self.trial is None and is_long and can_search(self.q):
            this = (self.gpu, self._key(name))
            if this not in searched:
                self._search(run)
                searched.add(this)
        return run()

    def _search(self, run: Callable[[], Any]) -> None:
        """Finds and keeps the tiles of a pass's kernels that have none from a search yet."""

        def is_new(name: str) -> bool:
            return self._found_tile(name, self._tile(name)) is None

        def attempt(trial: Trial) -> None:
            self.trial = trial
            try:
                run()
            finally:
                self.trial = None

        for name, tile in find_tiles(attempt, is_new, self._tile):
            keep_tiles(self.gpu, {self._key(name): tile})

    # --- launches -----------------------------------------------------------------------------------------------------

    def _launch(
        self,
        kernel: triton.JITFunction,
        grid: tuple[int, ...],
        chunk: Chunk,
        name: str = "",
        tile: Tile | None = None,
        **arguments: Any,
    ) -> None:
        """Runs a kernel; arguments that kernels share are filled in by name.

        Args:
            kernel: to run.
            grid: number of programs along each axis.
            chunk: what to run over.
            name: of `LAUNCHES`, where it is one of them.
            tile: its tile.
            arguments: those particular to the kernel; tensors that are None are never followed.
        """
        if not all(grid):
            return
        known = self._remembered(chunk, partial(self._shared, chunk)) | arguments
        values = {key: self.q if known[key] is None else known[key] for key in kernel.arg_names}
        self._start(kernel, grid, name, tile, values)

    def _shared(self, chunk: Chunk) -> dict[str, Any]:
        """Arguments that kernels share, by name."""
        first, last = self.visibility.first, self.visibility.last
        pre, post = self.weights
        return {
            "p_first": first, "p_last": last, "stride_ib": first.stride(0) if first.shape[0] > 1 else 0,
            "p_w0": pre.query, "p_w1": post.query, "stride_s": self.H * chunk.n_p,
            "H": self.H, "G": self.G, "T": self.T, "S": self.S,
            "rep": self.H // self.kv_heads, "n_bh": self.B * self.H, "n_bg": self.B * self.G,
            "t_0": chunk.t_0, "n_t": chunk.n_t, "n_p": chunk.n_p, "s_0": chunk.s_0, "n_s": chunk.n_s,
            "UNIT": self.step, "SHIFT": self.shift, "BLOCK": self.block, "n_scales": ceil_div(chunk.n_t, self.block),
            **composition_constants(self.layout, self.M),
        }  # fmt: skip

    def _start(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], name: str, tile: Tile | None, values: dict[str, Any]
    ) -> None:
        """Starts a kernel; by itself, so that others can look at what is launched."""
        options = {} if tile is None else launch_options(name, tile)
        launch = partial(start, kernel, grid, values, options, self.q.device)
        if self.trial is None or not name:
            launch()
        else:
            self.trial.launch(name, launch)

    def _compose(self, name: str, chunk: Chunk, **arguments: Any) -> None:
        """Runs a kernel of composition over a chunk; see `_parts`."""
        (kernel, own), tile = LAUNCHES[name], self._tile(name)
        parts, n_keys = self._parts(name, chunk)
        grid = (ceil_div(chunk.n_t, tile.b_t), parts, self.B * self.G)
        blocks = {"B_T": tile.b_t, "B_S": tile.b_s}
        self._launch(kernel, grid, chunk, name, tile, n_keys=n_keys, **own | blocks | arguments)

    def _parts(self, name: str, chunk: Chunk) -> tuple[int, int]:
        """Into how many parts `scores` or a kernel of composition splits the keys of a tile of queries, and the keys of
        each."""
        tile, seen, is_product = self._tile(name), self.visibility, name == "scores"
        block, step, heads = (self.block, tile.b_s, self.H) if is_product else (tile.b_t, 16, self.G)
        ahead = chunk.t_0 - chunk.s_0
        low, high = max(seen.low + ahead, -chunk.n_t), min(seen.high + ahead, chunk.n_s)
        spans = lengths(chunk.n_t, chunk.n_s, low, high, tile.b_t, block, step)
        n_keys = _INTERPRETED_KEYS
        if not INTERPRETED.value:
            resident = self._multiprocessors * resident_programs(name, tile, self.M, self.arch)
            n_keys = keys_of_a_program(spans, self.B * heads, resident, BESIDES[name], step, is_product)
        return max(1, ceil_div(max(spans, default=0), n_keys)), n_keys

    def _fill_scores(
        self, chunk: Chunk, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, limit: dict[str, Any],
        scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """out, a map, = scale · a [B, Hkv, S, d] · b [B, H, T, d], times `scales` [B·G, blocks] of queries."""
        tile = self._tile("scores")
        parts, n_keys = self._parts("scores", chunk)
        grid = (ceil_div(chunk.n_p, tile.b_t) * self.B * self.H, parts)
        self._launch(
            scores_kernel, grid, chunk, "scores", tile, p_a=a, p_b=b, p_map=out, n_keys=n_keys, scale=scale, **limit,
            **_strides("a", a, "bhs"), **_strides("b", b, "bht"), **product_constants(a.shape[3], tile),
            p_scale=scales, SCALED=scales is not None,
        )  # fmt: skip

    def _limit(self, what: Beyond, largest: float = LARGEST) -> dict[str, Any]:
        """Arguments of kernels that leave a mark where float16 is not sufficient, for numbers beyond the largest."""
        dtype = self.map_dtype if what == Beyond.SCORES else self.grad_dtype
        if dtype != torch.float16:
            return _UNLIMITED
        return {"largest": largest, "MARK": True, "p_mark": mark_of(self.q.device, what)}

    def _fill_values(
        self, chunk: Chunk, tiles: torch.Tensor, v: States, out: torch.Tensor, scale: float = 1.0,
        scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """out [B, H, T, d] = scale · tiles, a map, times v [B, Hkv, S, d], for a chunk's queries. With `scales`, those
        of `_scales`, tiles are float16 and times these."""
        tile = self._tile("values")
        grid = (ceil_div(chunk.n_t, tile.b_t) * self.B * self.H,)
        self._launch(
            values_kernel, grid, chunk, "values", tile, p_map=tiles, p_v=v.tensor, p_out=out, scale=scale,
            **self._undone(v, scales), **_strides("v", v.tensor, "bhs"), **_strides("o", out, "bht"),
            **product_constants(out.shape[3], tile),
        )  # fmt: skip

    def _add_keys(
        self, chunk: Chunk, tiles: torch.Tensor, q: States, out: torch.Tensor, scale: float = 1.0,
        scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """out [B, Hkv, S, d] = scale · tiles, a map, times q [B, H, T, d], summed over the heads of a key; of
        several chunks the sum. `scales` is as for `_fill_values`."""
        tile = self._tile("keys")
        grid = (ceil_div(chunk.n_s, tile.b_s) * self.B * self.kv_heads,)
        self._launch(
            keys_kernel, grid, chunk, "keys", tile, p_map=tiles, p_q=q.tensor, p_out=out, scale=scale,
            ADD=chunk.n_t < self.T, **self._undone(q, scales), **_strides("q", q.tensor, "bht"),
            **_strides("o", out, "bhs"), **product_constants(out.shape[3], tile),
        )  # fmt: skip

    def _undone(self, states: States, scales: torch.Tensor | None) -> dict[str, Any]:
        """Arguments of products that undo powers of two: of states, and of a map."""
        inverse, finite = (None, None) if scales is None else scales[1:]
        return {
            "SCALED": scales is not None, "p_inverse": inverse, "p_finite": finite,
            "COPIED": states.undo is not None, "p_undo": states.undo,
            **self._limit(Beyond.GRADIENTS),  # of W, too
        }  # fmt: skip

    # --- states -------------------------------------------------------------------------------------------------------

    def _norms(self, *states: torch.Tensor, rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The largest norms of each few rows of the first of `_STATES`, negative where one is not finite, and the
        least: each [2, B, heads, blocks]. Fills `rows` with those of each row of gradients of the output, [B, H, T].
        """
        out = [self._new(2, *x.shape[:2], max(1, ceil_div(x.shape[2], _ROWS))) for x in states]
        self._run_states(norms_kernel, states, p_rows=rows, **_of_states("_norms", out))
        return out

    def _halves(self, states: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], first: int = 0) -> list[States]:
        """The first of `_STATES`, but for so many, as products take them; given the norms of all."""
        undo = self._new(len(_STATES), self.B, self.kv_heads)
        halves = [self._new(*x.shape, dtype=torch.float16) for x in states[first:]]
        arguments = _of_states("_norms", norms) | _of_states("_half", halves, first)
        self._run_states(halves_kernel, states, first, p_undo=undo, **arguments, **self._limit(Beyond.GRADIENTS))
        return [States(*pair) for pair in zip(halves, undo.unbind()[first:], strict=False)]

    def _run_states(
        self, kernel: triton.JITFunction, states: Sequence[torch.Tensor], first: int = 0, **arguments: Any
    ) -> None:
        """Runs a kernel of `scales` over the first of `_STATES`, but for so many."""
        for letter, x in zip(_STATES, states, strict=False):
            arguments |= _strides(letter, x, "bhn")
        whole = self._remembered("whole", lambda: self._chunk(0, self.T))  # these kernels know no chunks
        of_grid = states[first:]
        blocks = max(1, *(ceil_div(x.shape[2], _ROWS) for x in of_grid))
        grid = (blocks, len(of_grid), max(x.shape[0] * x.shape[1] for x in of_grid))
        dims = {"start": first, "D": self.D, "DV": self.DV, "B_D": padded(max(self.D, self.DV)), "B_N": _ROWS}
        self._launch(kernel, grid, whole, **_NO_STRIDES | dims | _of_states("", states) | arguments)

    def _values(self) -> States:
        """Values, for a product with W."""
        if self.weight_dtype == self.q.dtype:
            return States(self.v)
        return self._halves([self.v], self._norms(self.v))[0]

    def _sources(self, grad_out: torch.Tensor) -> Sources:
        """What a backward pass starts from, given gradients of the output [B, H, T, DV]."""
        rows = self._new(self.B, self.H, self.T)
        if self.weight_dtype == self.q.dtype:
            q, k = (t.float() if self._is_widened else t for t in (self.q, self.k))  # as dS is
            query, key, grad = States(q), States(k), States(grad_out)
            of_values, _ = self._norms(self.v, grad_out, rows=rows)
        else:
            states = (self.v, grad_out, self.k, self.q)
            of_values, *others = self._norms(*states, rows=rows)
            grad, key, query = self._halves(states, [of_values, *others], first=1)
        return Sources(query, key, grad, grad_out, rows, of_values[0])

    def _matrices(self, chunk: Chunk, amplified: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """The key side of both stages as matrices [B·G, n_s, heads, heads]; None where there is none.

        Args:
            chunk: of which keys.
            amplified: [B·G, programs], to be filled with what that after the softmax makes of gradients.
        """
        out: list[torch.Tensor | None] = []
        for stage in range(2):
            flags = self.layout.post if stage else self.layout.pre
            if not flags & (Part.KEY | Part.STATIC):
                out.append(None)
                continue
            shape = (self.B * self.G, chunk.n_s, sum(self.heads), sum(self.heads))
            matrices = torch.empty(shape, dtype=self.map_dtype, device=self.q.device)
            constants = matrix_constants(self.layout, self.M, stage)
            grid = (ceil_div(chunk.n_s, constants["B_S"]), self.B * self.G)
            self._launch(
                expand_kernel, grid, chunk, p_m=matrices, p_amplified=amplified, **self._key_side(stage), **constants,
                **self._limit(Beyond.SCORES), AMPLIFIED=bool(stage) and amplified is not None,
            )  # fmt: skip
            out.append(matrices)
        return out

    def _key_side(self, stage: int) -> dict[str, Any]:
        """Arguments of kernels of the key side."""
        _, key, static = self.weights[stage]
        strides = (0,) * 5 if key is None else key.stride()
        return {"p_wk": key, "p_static": static} | {
            f"stride_w{axis}": stride for axis, stride in zip("bhrcs", strides, strict=True)
        }

    def _scales(
        self, chunk: Chunk, sources: Sources, extra: torch.Tensor | None, amplified: torch.Tensor
    ) -> torch.Tensor:
        """Powers of two that gradients of maps are multiplied by, what undoes them, and whether they are of finite
        numbers: [3, B·G, blocks of queries].

        Args:
            chunk: of which queries and keys.
            sources: of this pass.
            extra: what is added to gradients of composed scores, [B, H, n_t].
            amplified: see `_matrices`.
        """
        scales = self._new(3, self.B * self.G, ceil_div(chunk.n_t, self.block))
        self._launch(
            scale_kernel, (scales.shape[2], self.B * self.G), chunk, p_norms=sources.grad_norms,
            p_largest=sources.value_norms, p_amplified=amplified, p_extra=extra, p_scale=scales,
            kv_heads=self.kv_heads, n_largest=sources.value_norms.shape[2],
            n_amplified=amplified.shape[1], B_H=power_of_2(self.M), B_T=min(64, self.block), B_N=_ROWS,
            EXTRA=extra is not None, FEW=self.q.dtype == torch.bfloat16, **self._limit(Beyond.GRADIENTS),
        )  # fmt: skip
        return scales

    def _project(self, stage: int, chunk: Chunk, parts: torch.Tensor, scales: torch.Tensor, grads: Gradients) -> None:
        """Adds a chunk's gradients of a stage's key side and static projection, from those of the matrices."""
        _, key, static = grads.weights[stage]
        # with more, registers for few warps; but each program has a gradient of the static projection
        constants = matrix_constants(self.layout, self.M, stage, numbers=4096 if static is None else 8192)
        grid = (ceil_div(chunk.n_s, constants["B_S"]), self.B * self.G)
        parts_of_static = None if static is None else self._new(grid[0], self.B, self.G, self.M, self.M)
        tile = self._tile(f"back_{stage}")
        self._launch(
            project_kernel, grid, chunk, p_gm=parts, p_gwk=key, p_gstatic=parts_of_static, **self._key_side(stage),
            factor=1.0 if stage else _LN_2 / SCORES_GRAD.value, B_T=tile.b_t, TRANSPOSED=bool(stage),
            ADD=chunk.n_t < self.T, p_inverse=scales[1], p_finite=scales[2], **self._limit(Beyond.GRADIENTS),
            **constants,
        )  # fmt: skip
        if static is not None and parts_of_static is not None:
            static += parts_of_static.sum((0, 1))

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def _new_map(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """One number for each key, query and head, in tiles of queries: [B, n_s, tiles, H, queries of a tile]."""
        return self._new(self.B, chunk.n_s, chunk.n_p // self.step, self.H, self.step, dtype=dtype)

    def _weights_in(self, chunk: Chunk, memory: torch.Tensor) -> torch.Tensor:
        """A map of composed weights: in the memory of another, where its numbers have that size, or in its own."""
        is_of_size = memory.itemsize == self.weight_dtype.itemsize
        return memory.view(self.weight_dtype) if is_of_size else self._new_map(chunk, self.weight_dtype)

    def _make_scores(self, chunk: Chunk) -> torch.Tensor:
        """The map of scores times log2(e)."""
        scores = self._new_map(chunk, self.map_dtype)
        # Composition may take away what makes them large, and leaves what they were rounded by.
        limit = self._limit(Beyond.SCORES, LARGEST_EXACT if self.layout.pre else LARGEST)
        self._fill_scores(chunk, scores, self.k, self.q, self.scale * _LOG2_E, limit)
        return scores

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, T, DV] (a view of [B, T, H, DV]) and log-sum-exp [B, H, T] in float32, base 2."""
        return self._run_pass("forward", self._forward)

    def _run_pass(self, name: str, run: Callable[[], _Result]) -> _Result:
        """Result of a pass; of another one, with other maps, where something went beyond float16."""
        found = self._searched(name, run)
        while look(self.q.device) and self.q.dtype != torch.float32:
            self.beyond = beyond(self.q.device)
            found = run()
        return found

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._new(self.B, self.T, self.H, self.DV, dtype=self.q.dtype).transpose(1, 2)
        lse = self._new(self.B, self.H, self.T)
        if lse.numel():
            with self._surroundings():
                chunks = self.chunks(maps=1)
                for rows, part in self._rows(chunks, maps=1):
                    values = part._values()
                    for chunk in chunks:
                        part._forward_chunk(chunk, values, out[rows], lse[rows])
        return out, lse

    def _forward_chunk(self, chunk: Chunk, values: States, out: torch.Tensor, lse: torch.Tensor) -> None:
        pre, post = self._matrices(chunk)
        scores = self._make_scores(chunk)
        self._fill_lse(chunk, scores, pre, lse)
        weights = self._weights_in(chunk, scores)
        self._compose("compose", chunk, p_scores=scores, p_m0=pre, p_m1=post, p_lse=lse, p_out=weights, p_weights=None)
        self._fill_values(chunk, weights, values, out, 2.0**-self.shift)

    def _fill_lse(self, chunk: Chunk, scores: torch.Tensor, pre: torch.Tensor | None, lse: torch.Tensor) -> None:
        """Writes a chunk's log-sum-exps, from those of parts of its keys."""
        n_parts, n_bh = self._parts("lse", chunk)[0], self.B * self.H
        tensors = {"p_scores": scores, "p_m0": pre} | self._limit(Beyond.SCORES, LARGEST_EXACT)
        if n_parts == 1:
            here = lse[:, :, chunk.t_0 :]
            self._compose("lse", chunk, p_lse=here, stride_l=self.T, unseen=torch.inf, **tensors)
            return
        parts = self._new(n_parts, n_bh, chunk.n_t)
        self._compose("lse", chunk, p_lse=parts, stride_l=chunk.n_t, unseen=-torch.inf, **tensors)
        grid = (n_bh, ceil_div(chunk.n_t, _JOINED))
        self._launch(join_kernel, grid, chunk, p_parts=parts, p_lse=lse, n_parts=n_parts, B_P=16, B_T=_JOINED)

    def backward(self, grad_out: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor | None = None) -> Gradients:
        """Gradients from those of the output [B, H, T, DV] and of the log-sum-exp [B, H, T], and the saved log-sum-exp.

        Every sum has one owner and one order: the result does not change from run to run.
        """
        return self._run_pass("backward", partial(self._backward, grad_out, lse, grad_lse))

    def _backward(self, grad_out: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor | None) -> Gradients:
        def zeros(like: torch.Tensor) -> torch.Tensor:
            return torch.zeros(like.shape, dtype=torch.float32, device=like.device)

        chunks = self.chunks(maps=3) if lse.numel() else []
        is_covered = len(chunks) == 1 and chunks[0].s_0 == 0 and chunks[0].n_s >= self.S

        def of_keys(like: torch.Tensor) -> torch.Tensor:
            """One chunk that sees all keys writes them, several are added up."""
            if is_covered:
                return self._new(*like.shape, dtype=like.dtype)
            return torch.zeros(like.shape, dtype=torch.float32 if len(chunks) > 1 else like.dtype, device=like.device)

        def of_queries(like: torch.Tensor) -> torch.Tensor:
            """Each chunk writes its own."""
            return self._new(*like.shape) if chunks else zeros(like)

        def of_stage(stage: Stage) -> Stage:
            made = zip((of_queries, of_keys, zeros), stage, strict=True)
            return Stage(*(None if like is None else new(like) for new, like in made))

        pre, post = self.weights
        grads = Gradients(
            self._new(*self.q.shape, dtype=self.q.dtype), of_keys(self.k), of_keys(self.v),
            (of_stage(pre), of_stage(post)),
        )  # fmt: skip
        with self._surroundings():
            for rows, part in self._rows(chunks, maps=3) if chunks else ():
                sources, grad_rows = part._sources(grad_out[rows]), None if grad_lse is None else grad_lse[rows]
                for chunk in chunks:
                    part._backward_chunk(chunk, sources, lse[rows], grad_rows, grads.at(rows))
        return grads

    def _backward_chunk(
        self, chunk: Chunk, sources: Sources, lse: torch.Tensor, grad_lse: torch.Tensor | None, grads: Gradients
    ) -> None:
        """Adds a chunk to the gradients; writes those of its queries."""
        programs = ceil_div(chunk.n_s, matrix_constants(self.layout, self.M, 1)["B_S"])
        amplified = self._new(self.B * self.G, programs)
        pre, post = self._matrices(chunk, amplified)
        extra = None  # derivative of a base 2 log-sum-exp by a composed score: a weight over ln 2
        if grad_lse is not None:
            these = slice(chunk.t_0, chunk.t_0 + chunk.n_t)
            is_blind = (self.visibility.first >= self.visibility.last)[:, None, these]
            extra = (grad_lse[:, :, these] / _LN_2).masked_fill(is_blind, 0.0).contiguous()  # [B, H, n_t]
        scales = self._scales(chunk, sources, extra, amplified)
        scores = self._make_scores(chunk)
        if self._is_widened:  # in the forward pass they may have been float16, and rounded
            lse = torch.empty_like(lse)
            self._fill_lse(chunk, scores, pre, lse)
        weights, composed = self._new_map(chunk, self.map_dtype), self._new_map(chunk, self.weight_dtype)  # P, W
        self._compose(
            "weights", chunk, p_scores=scores, p_m0=pre, p_m1=post, p_lse=lse, p_out=composed, p_weights=weights
        )
        self._add_keys(chunk, composed, sources.grad, grads.value, 2.0**-self.shift)
        del composed
        maps = self._new_map(chunk, self.grad_dtype)  # of dW, then dP, both times `scales`, then dS
        self._fill_scores(chunk, maps, self.v, sources.grad_out, 1.0, _UNLIMITED, scales[0])
        grad_scores = maps.view(self.q.dtype) if self.grad_dtype == torch.bfloat16 else maps
        tensors = {"p_weights": weights, "p_grads": maps, "p_m0": pre, "p_m1": post, "p_inverse": scales[1]}
        n_parts = self._parts("back_1", chunk)[0]
        sums = self._new(n_parts, 2, self.B, self.H, chunk.n_t)
        self._back(1, chunk, grads, scales, n_parts, p_sums=sums, **tensors)
        sums = sums.sum(0)  # of P dP and of P, [2, B, H, n_t]
        if extra is not None:
            of_heads = scales[0].view(self.B, self.G, -1).repeat_interleave(self.M, 1)  # [B, H, blocks]
            sums[0] -= extra * of_heads.repeat_interleave(self.block, 2)[:, :, : chunk.n_t] * sums[1]
        n_parts = self._parts("back_0", chunk)[0]
        is_scaled = self.grad_dtype == torch.float16
        outputs = {"p_out": grad_scores, "p_sums": sums}
        constants: dict[str, Any] = {"factor": _LN_2, "SCALED": is_scaled}
        self._back(0, chunk, grads, scales, n_parts, p_scores=scores, **constants, **outputs, **tensors)
        still = scales if is_scaled else None
        self._fill_values(chunk, grad_scores, sources.key, grads.query, self.scale, still)
        self._add_keys(chunk, grad_scores, sources.query, grads.key, self.scale, still)

    def _back(
        self, stage: int, chunk: Chunk, grads: Gradients, scales: torch.Tensor, n_parts: int, **tensors: Any
    ) -> None:
        """Takes a chunk's gradients back through a stage, and adds to those of its weights."""
        name, flags = f"back_{stage}", self.layout.post if stage else self.layout.pre
        side_parts, matrix_parts = None, None
        if flags & Part.QUERY:
            side_parts = self._new(n_parts, self.B, self.H, self.layout.channels, chunk.n_t)
        if flags & (Part.KEY | Part.STATIC):
            heads, tiles = sum(self.heads), ceil_div(chunk.n_t, self._tile(name).b_t)
            matrix_parts = self._new(tiles, self.B * self.G, chunk.n_s, heads, heads, dtype=self.grad_dtype)
        self._compose(name, chunk, p_gwq=side_parts, p_gm=matrix_parts, **tensors)
        if side_parts is not None and (side := grads.weights[stage].query) is not None:
            torch.sum(side_parts, 0, out=side[..., chunk.t_0 : chunk.t_0 + chunk.n_t])
        if matrix_parts is not None:
            self._project(stage, chunk, matrix_parts, scales, grads)


# --- constants of kernels ---------------------------------------------------------------------------------------------


def head_blocks(heads: int) -> tuple[int, int]:
    """The blocks in which the kernels have the heads of a group, up to 64: one of 16 or 32, or 32 and 16 or 32 more."""
    if heads <= 32:
        return (16 if heads <= 16 else 32), 0
    return 32, (16 if heads <= 48 else 32)


def composition_constants(layout: Layout, heads: int) -> dict[str, Any]:
    """Constant arguments of the kernels of composition, by name; kernels take those that they have."""
    blocks = head_blocks(heads)
    return {
        "F_PRE": int(layout.pre), "F_POST": int(layout.post), "R": layout.rank, "C": layout.channels, "M": heads,
        "H0": blocks[0], "H1": blocks[1],
    }  # fmt: skip


def matrix_constants(layout: Layout, heads: int, stage: int, numbers: int = 8192) -> dict[str, Any]:
    """Constant arguments of the kernels of the key side; a program has as many keys as have that many numbers."""
    padded_heads = sum(head_blocks(heads))
    block = power_of_2(padded_heads)
    return {
        "F": int(layout.post if stage else layout.pre), "R": layout.rank, "C": layout.channels, "M": heads,
        "HP": padded_heads, "B_H": block, "B_S": numbers // block**2,
    }  # fmt: skip


def product_constants(dim: int, tile: Tile) -> dict[str, Any]:
    """Constant arguments of a product."""
    return {"D": dim, "B_D": padded(dim), "B_T": tile.b_t, "B_S": tile.b_s}


def _of_states(what: str, tensors: Sequence[torch.Tensor], first: int = 0) -> dict[str, Any]:
    """Arguments of kernels of `scales`, by name: a tensor for each of the first of `_STATES` but for so many, others
    None."""
    named = [*[None] * first, *tensors, *[None] * len(_STATES)]
    return {f"p_{letter}{what}": tensor for letter, tensor in zip(_STATES, named, strict=False)}


def _strides(letter: str, tensor: torch.Tensor, axes: str) -> dict[str, int]:
    return {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, tensor.stride(), strict=False)}


def padded(dim: int) -> int:
    """A head dim as a tile has it: a power of two, at least 16."""
    return max(16, power_of_2(dim))


__all__ = ["BESIDES", "LAUNCHES", "UNBOUNDED", "Gradients", "Problem", "Visibility", "head_blocks"]
