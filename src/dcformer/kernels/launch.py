"""Runs the kernels of composed attention over chunks of queries, so that the maps which cross heads stay small."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import triton

from . import attention as kernels
from .attention import GRAD_SCORES, GRAD_WEIGHTS, SCORES, WEIGHTS
from .search import LEAST_QUERIES, Trial, can_search, find_tiles, searched
from .tuning import Key, Tile, autotune_is_on, choose, found_tile, keep_tiles

_Result = TypeVar("_Result")

FIRST_CHUNK = 64  # queries of the smallest chunk
_CAUSAL_CHUNK = 512  # of the largest, where queries see keys up to their own
_LEAST_BYTES = 256 * 2**20  # of a chunk, and more where a device has it: chunks cost launches
QUERY, KEY, STATIC, GATE = 1, 2, 4, 8  # flags of a stage, as the kernels have them
FAR = 2**30  # beyond every key, as a bound that there is not
_MOST_PROGRAMS = 65535  # along a grid's third axis
_JOINED = 64  # queries whose log-sum-exps one program joins
_MOST_INT32 = 2**31 - 1


# name in `tuning` -> kernel and constants of its own; `tiles_*` and those after it are the backward pass. All take one
# tile of queries and keys of a group of heads.
LAUNCHES: dict[str, tuple[triton.JITFunction, dict[str, Any]]] = {
    **{f"maps_{i}": (kernels.maps_kernel, {"SOURCE": i, "KEEP": False}) for i in (SCORES, WEIGHTS)},
    "lse": (kernels.lse_kernel, {}),
    "composed": (kernels.composed_kernel, {}),
    **{f"tiles_{i}": (kernels.maps_kernel, {"SOURCE": i, "KEEP": True}) for i in (SCORES, WEIGHTS)},
    **{f"grads_{i}": (kernels.grads_kernel, {"STAGE": i}) for i in (1, 0)},
    **{f"back_{i}": (kernels.back_kernel, {"STAGE": i}) for i in (1, 0)},
}


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: an interval of them.

    Attributes:
        first, last: int32 [B or 1, T]: query t sees keys first <= s < last; nothing where first >= last.
        low, high: key s is seen by no query before s - high and none after s - low: bounds that hold for all, so that
            whole tiles are skipped without looking.
    """

    first: torch.Tensor
    last: torch.Tensor
    low: int = -FAR
    high: int = FAR


@dataclass(frozen=True)
class Chunk:
    """Queries t_0 to t_0 + n_t, and the keys s_0 to s_0 + n_s that any of them may see; the last may not exist.

    s_0 and n_s are multiples of 16: that keeps rows of maps aligned, without which the kernels spill registers.
    """

    t_0: int
    n_t: int
    s_0: int
    n_s: int


@dataclass(frozen=True)
class Layout:
    """What composition there is.

    Attributes:
        pre, post: flags of the stages: 1 query side, 2 key side, 4 static, 8 gates.
        groups: G.
        rank: R; 0 for no low rank.
    """

    pre: int
    post: int
    groups: int = 1
    rank: int = 0

    @property
    def channels(self) -> int:
        """C: packed channels of a stage and side."""
        return 2 * self.rank + bool((self.pre | self.post) & GATE)

    def maps(self, flags: int, heads: int) -> int:
        """How many maps a stage has: R per side, and one per head of a group for a static projection."""
        sides = bool(flags & QUERY) + bool(flags & KEY)
        return self.rank * sides + (heads // self.groups if flags & STATIC else 0)


@dataclass(frozen=True)
class Gradients:
    """Gradients of a problem's tensors; float32 but for the query's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_weights: torch.Tensor | None
    key_weights: torch.Tensor | None
    pre_static: torch.Tensor | None
    post_static: torch.Tensor | None

    def at(self, rows: slice) -> "Gradients":
        """Those of some rows of a batch, as views; static projections belong to all."""
        views = {f.name: getattr(self, f.name) for f in fields(self)}
        return Gradients(**{name: t if t is None or name.endswith("static") else t[rows] for name, t in views.items()})


class Problem:
    """One call: its tensors, and what the launches share.

    Args:
        query [B, H, T, D], key [B, Hkv, S, D], value [B, Hkv, S, DV]: any strides but that of the last dimension.
        query_weights, key_weights: packed composition weights [B, H, channels, T] and [B, H, channels, S], contiguous;
            None where no stage has that side.
        pre_static, post_static: [G, M, M] or None.
        visibility: who sees what.
        layout: what composition there is.
        scale: factor of the scores.
        chunk_bytes: bound of the memory that the maps and tiles of a chunk take, above what the smallest chunk needs:
            64 queries of one sequence. None for 256 MiB, or 1/64 of the device's memory where that is more.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_weights: torch.Tensor | None,
        key_weights: torch.Tensor | None,
        pre_static: torch.Tensor | None,
        post_static: torch.Tensor | None,
        visibility: Visibility,
        layout: Layout,
        scale: float,
        chunk_bytes: int | None = None,
    ):
        self.q, self.k, self.v, self.wq, self.wk = query, key, value, query_weights, key_weights
        self.statics = {"pre": pre_static, "post": post_static}
        self.visibility, self.layout, self.scale = visibility, layout, scale
        self.B, self.H, self.T, self.D = query.shape
        self.S, self.DV, self.kv_heads = key.shape[2], value.shape[3], key.shape[1]
        self.G, self.M = layout.groups, self.H // layout.groups
        self.map_dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
        is_cuda = query.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(query.device) if is_cuda else (9, 0)
        self.arch = 10 * major + minor
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else _LEAST_BYTES
        if is_cuda and chunk_bytes is None:
            total = torch.cuda.get_device_properties(query.device).total_memory
            self.chunk_bytes = max(_LEAST_BYTES, total // 64)
        self.trial: Trial | None = None  # what a search is trying
        # where the maps of each source are among those of a chunk
        pre, post = (layout.maps(flags, self.H) for flags in (layout.pre, layout.post))
        self.first_map = {SCORES: 0, WEIGHTS: pre, GRAD_SCORES: pre + post, GRAD_WEIGHTS: 2 * pre + post}
        self.count = {SCORES: pre, WEIGHTS: post, GRAD_SCORES: pre, GRAD_WEIGHTS: post}
        self._check_int32()

    def _check_int32(self) -> None:
        """Kernels count in 64 bits from head to head and from map to map, in 32 bits within a map, and within the
        composition weights and sums of one group's heads.

        Raises:
            ValueError: when the least of these do not fit.
        """
        within = {
            f"{FIRST_CHUNK} queries x {self.S} keys of a map": FIRST_CHUNK * (self.S + 15),
            f"composition weights of {self.M} heads x {max(self.T, self.S)} tokens": (
                self.M * 2 * self.layout.channels * max(self.T, self.S)
            ),
        }
        for what, count in within.items():
            if count > _MOST_INT32:
                raise ValueError(
                    f"{what} are {count} numbers, the fused kernels count to {_MOST_INT32}: use shorter sequences or "
                    "attn_implementation='dcformer_chunked'."
                )

    @property
    def gpu(self) -> str:
        """Name of the device, by which found tiles are kept."""
        return torch.cuda.get_device_name(self.q.device) if self.q.is_cuda else self.q.device.type

    # --- launches -----------------------------------------------------------------------------------------------------

    def chunks(self, maps: int) -> Iterator[Chunk]:
        """Chunks of queries for which `maps` maps per group are held; a tile of every head is M of them."""
        row = max(1, self.B * self.G * maps * self.map_dtype.itemsize)  # bytes per query and key
        reach = min(self.S, self.visibility.high - self.visibility.low)
        # what no query sees is stored, too: the corner of a causal chunk, those of a band
        longest = self.T if self.visibility.high == FAR else min(self.T, _CAUSAL_CHUNK)
        n_t = FIRST_CHUNK
        while n_t < longest and row * 2 * n_t * min(self.S, reach + 2 * n_t) <= self.chunk_bytes:
            if 2 * n_t * (min(self.S, reach + 2 * n_t) + 31) > _MOST_INT32:  # 31: of aligned ends
                break
            n_t *= 2
        for t_0 in range(0, self.T, n_t):
            n = min(n_t, self.T - t_0)
            s_0 = min(self.S, max(0, t_0 + self.visibility.low)) // 16 * 16
            s_1 = max(s_0, _round_up(min(self.S, t_0 + n + self.visibility.high), 16))
            yield Chunk(t_0, n, s_0, s_1 - s_0)

    def _rows(self, maps: int) -> Iterator[tuple[slice, "Problem"]]:
        """The problem in parts of the batch, whose smallest chunks keep within the bytes if one sequence's does."""
        reach = min(self.S, self.visibility.high - self.visibility.low + FIRST_CHUNK)
        sequence = self.G * maps * self.map_dtype.itemsize * min(FIRST_CHUNK, self.T) * reach
        n_b = max(1, min(self.B, self.chunk_bytes // max(1, sequence), _MOST_PROGRAMS // self.G))
        if n_b == self.B:
            yield slice(None), self
            return
        for b_0 in range(0, self.B, n_b):
            rows = slice(b_0, b_0 + n_b)
            first, last = (t if t.shape[0] == 1 else t[rows] for t in (self.visibility.first, self.visibility.last))
            wq, wk = (t if t is None else t[rows] for t in (self.wq, self.wk))
            part = Problem(
                self.q[rows], self.k[rows], self.v[rows], wq, wk, self.statics["pre"], self.statics["post"],
                replace(self.visibility, first=first, last=last), self.layout, self.scale, self.chunk_bytes,
            )  # fmt: skip
            part.trial = self.trial
            yield rows, part

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The tensors' device, as Triton launches on the current one; no autocast, so that products keep dtypes."""
        with torch.cuda.device_of(self.q), torch.autocast(self.q.device.type, enabled=False):
            yield

    def _tile(self, name: str) -> Tile:
        if self.trial is not None and self.trial.kernel == name:
            return self.trial.tile
        found = found_tile(self.gpu, self._key(name)) if autotune_is_on() else None
        return found or choose(name, max(self.D, self.DV), self.q.dtype, self.arch, self.layout.rank)

    def _key(self, name: str) -> Key:
        layout, dtype = self.layout, str(self.q.dtype).removeprefix("torch.")
        windowed = self.visibility.low > -FAR and self.visibility.high < FAR
        dim = max(self.D, self.DV)
        return Key(name, self.arch, self.M, dim, dtype, windowed, layout.pre, layout.post, layout.rank)

    def _searched(self, name: str, run: Callable[[], _Result]) -> _Result:
        """Result of a pass; with DCFORMER_AUTOTUNE=1, tiles of its kernels are searched for first, once per process."""
        is_long = self.B * self.T >= LEAST_QUERIES
        if autotune_is_on() and self.trial is None and is_long and can_search(self.q):
            this = (self.gpu, self._key(name))
            if this not in searched:
                self._search(run)
                searched.add(this)
        return run()

    def _search(self, run: Callable[[], Any]) -> None:
        """Finds and keeps the tiles of a pass's kernels that have none from a search yet."""

        def is_new(name: str) -> bool:
            return found_tile(self.gpu, self._key(name)) is None

        def attempt(trial: Trial) -> None:
            self.trial = trial
            try:
                run()
            finally:
                self.trial = None

        for name, tile in find_tiles(attempt, is_new, self._tile):
            keep_tiles(self.gpu, {self._key(name): tile})

    def _new_maps(self, chunk: Chunk, count: int) -> torch.Tensor:
        shape = (self.B * self.G, count, chunk.n_t, chunk.n_s)
        return torch.empty(shape, dtype=self.map_dtype, device=self.q.device)

    def _new_tiles(self, chunk: Chunk, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = (self.B, self.H, chunk.n_t, chunk.n_s)
        return torch.empty(shape, dtype=dtype or self.map_dtype, device=self.q.device)

    def _launch(self, name: str, chunk: Chunk, maps: torch.Tensor, **arguments: Any) -> None:
        """Runs a kernel over a chunk; arguments that all kernels share are filled in by name.

        Args:
            name: of `LAUNCHES`.
            chunk: what to run over.
            maps: of the chunk, [B·G, count, n_t, n_s].
            arguments: those particular to the kernel; tensors that are None are never followed.
        """
        (kernel, _), tile = LAUNCHES[name], self._tile(name)
        tiles_t, tiles_s = _tiles(chunk, tile)
        grid = (tiles_s, tiles_t, self.B * self.G)
        if not all(grid):
            return
        first, last = self.visibility.first, self.visibility.last
        known: dict[str, Any] = {
            "p_q": self.q, "p_k": self.k, "p_v": self.v, "p_wq": self.wq, "p_wk": self.wk, "p_maps": maps,
            "p_first": first, "p_last": last, "stride_ib": first.stride(0) if first.shape[0] > 1 else 0,
            "n_maps": maps.shape[1], "stride_map": chunk.n_t * chunk.n_s,
            "n_wq": 0 if self.wq is None else self.wq.shape[2], "n_wk": 0 if self.wk is None else self.wk.shape[2],
            "H": self.H, "G": self.G, "rep": self.H // self.kv_heads, "T": self.T, "S": self.S,
            "t_0": chunk.t_0, "n_t": chunk.n_t, "s_0": chunk.s_0, "n_s": chunk.n_s, "scale": self.scale,
        }  # fmt: skip
        known |= constants(name, self.layout, self.D, self.DV, tile)
        states_out = arguments.get("p_do")
        for letter, tensor in (("q", self.q), ("k", self.k), ("v", self.v), ("o", states_out)):
            axes = "bhs" if letter in "kv" else "bht"
            strides = (self.q if tensor is None else tensor).stride()
            known |= {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, strides, strict=False)}
        known |= arguments
        values = {key: self.q if known.get(key) is None else known[key] for key in kernel.arg_names}
        launch = partial(kernel[grid], **values, num_warps=tile.num_warps, num_stages=tile.num_stages)
        if self.trial is None:
            launch()
        else:
            self.trial.launch(name, launch)

    def _fill_maps(
        self, source: int, chunk: Chunk, maps: torch.Tensor, tiles: torch.Tensor | None = None, **tensors: Any
    ) -> None:
        """Writes the maps of scores or weights, low rank and static, into those of a chunk; with `tiles`
        [B, H, n_t, n_s] also the tiles themselves."""
        stage = "post" if source == WEIGHTS else "pre"
        if tiles is None and self.statics[stage] is not None:
            tiles = self._new_tiles(chunk)
        if tiles is not None or (self.layout.rank and getattr(self.layout, stage) & (QUERY | KEY)):
            name = f"maps_{source}" if tiles is None else f"tiles_{source}"
            self._launch(name, chunk, maps, p_tiles=tiles, **tensors)
        if tiles is not None:
            self._mix_static(source, maps, tiles)

    def _mix_static(self, source: int, maps: torch.Tensor, tiles: torch.Tensor) -> None:
        """A source's maps of its static projection, from its tiles."""
        static = self.statics["pre" if source in (SCORES, GRAD_SCORES) else "post"]
        if static is not None:
            # scores and weights are mixed from row to column, gradients go back
            mixer = static.transpose(1, 2) if source in (SCORES, WEIGHTS) else static
            end = self.first_map[source] + self.count[source]
            mixed = torch.matmul(mixer.to(tiles.dtype), self._by_group(tiles))  # [B, G, M, n_t·n_s]
            maps[:, end - self.M : end] = mixed.view(-1, self.M, *maps.shape[2:])

    def _by_group(self, tiles: torch.Tensor) -> torch.Tensor:
        """[B, H, n_t, n_s] as [B, G, M, n_t·n_s]."""
        return tiles.view(self.B, self.G, self.M, -1)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, T, DV] (a view of [B, T, H, DV]) and log-sum-exp [B, H, T] in float32."""
        return self._searched("forward", self._forward)

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.B, self.T, self.H, self.DV)
        out = torch.empty(shape, dtype=self.q.dtype, device=self.q.device).transpose(1, 2)
        lse = torch.empty((self.B, self.H, self.T), dtype=torch.float32, device=self.q.device)
        has_static = any(static is not None for static in self.statics.values())
        maps = self.count[SCORES] + self.count[WEIGHTS] + self.M * (1 + has_static)
        with self._surroundings():
            for rows, part in self._rows(maps):
                for chunk in part.chunks(maps):
                    part._forward_chunk(chunk, out[rows], lse[rows])
        return out, lse

    def _forward_chunk(self, chunk: Chunk, out: torch.Tensor, lse: torch.Tensor) -> None:
        queries, keys = slice(chunk.t_0, chunk.t_0 + chunk.n_t), slice(chunk.s_0, chunk.s_0 + chunk.n_s)
        if not chunk.n_s:
            out[:, :, queries], lse[:, :, queries] = 0, torch.inf
            return
        maps = self._new_maps(chunk, self.count[SCORES] + self.count[WEIGHTS])
        self._fill_maps(SCORES, chunk, maps)
        self._fill_lse(chunk, maps, lse)
        self._fill_maps(WEIGHTS, chunk, maps, p_lse=lse)
        composed = self._new_tiles(chunk, self.q.dtype)
        self._launch("composed", chunk, maps, p_composed=composed, p_lse=lse)
        # the query heads of a key/value head, one after the other, are one product
        tiles = composed.view(self.B * self.kv_heads, -1, chunk.n_s)[..., : self.S - chunk.s_0]
        result = torch.bmm(tiles, self.v[:, :, keys].flatten(0, 1))
        out[:, :, queries] = result.view(self.B, self.H, chunk.n_t, self.DV)

    def _fill_lse(self, chunk: Chunk, maps: torch.Tensor, lse: torch.Tensor) -> None:
        """Writes a chunk's log-sum-exps, from those of its tiles."""
        n_parts, n_bh = _tiles(chunk, self._tile("lse"))[1], self.B * self.H
        parts = torch.empty((n_parts, n_bh, chunk.n_t), dtype=torch.float32, device=self.q.device)
        self._launch("lse", chunk, maps, p_lse_parts=parts)
        grid = (n_bh, triton.cdiv(chunk.n_t, _JOINED))
        kernels.join_kernel[grid](parts, lse, self.T, chunk.t_0, chunk.n_t, n_parts, n_bh, B_P=16, B_T=_JOINED)

    def backward(self, grad_out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Gradients from that of the output [B, H, T, DV] and the saved log-sum-exp.

        Every sum has one owner and one order: the result does not change from run to run.
        """
        return self._searched("backward", partial(self._backward, grad_out, lse))

    def _backward(self, grad_out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        def zeros(like: torch.Tensor | None) -> torch.Tensor | None:
            return None if like is None else torch.zeros(like.shape, dtype=torch.float32, device=like.device)

        grads = Gradients(
            torch.empty((self.B, self.H, self.T, self.D), dtype=self.q.dtype, device=self.q.device),
            *(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (self.k, self.v)),
            *(zeros(t) for t in (self.wq, self.wk, *self.statics.values())),
        )
        # four tiles of a head, and parts of sums
        maps = 2 * (self.count[SCORES] + self.count[WEIGHTS]) + 5 * self.M
        with self._surroundings():
            for rows, part in self._rows(maps):
                for chunk in part.chunks(maps):
                    part._backward_chunk(chunk, grad_out[rows], lse[rows], grads.at(rows))
        return grads

    def _backward_chunk(self, chunk: Chunk, grad_out: torch.Tensor, lse: torch.Tensor, grads: Gradients) -> None:
        """Adds a chunk to the gradients; writes those of its queries."""
        queries, keys = slice(chunk.t_0, chunk.t_0 + chunk.n_t), slice(chunk.s_0, chunk.s_0 + chunk.n_s)
        if not chunk.n_s:
            grads.query[:, :, queries] = 0
            return
        scores, weights, weight_grads = (self._new_tiles(chunk) for _ in range(3))
        composed = self._new_tiles(chunk, self.q.dtype)
        maps = self._new_maps(chunk, 2 * (self.count[SCORES] + self.count[WEIGHTS]))
        self._fill_maps(SCORES, chunk, maps, scores)
        self._fill_maps(WEIGHTS, chunk, maps, weights, p_lse=lse)

        self._launch("grads_1", chunk, maps, p_grads=weight_grads, p_do=grad_out)
        self._mix_static(GRAD_WEIGHTS, maps, weight_grads)
        parts = self._back(1, chunk, maps, grads, weights, weight_grads, composed)
        self._add_product(grads.value, keys, composed, grad_out[:, :, queries])

        # Weights made from a rounded log-sum-exp do not quite sum to one. Divided by their sum, gradients of composed
        # scores sum to zero, as they must.
        delta, total = parts.sum(0)  # [B, H, n_t]
        delta = torch.where(total > 0, delta / total, 0.0)
        self._launch("grads_0", chunk, maps, p_grads=weights, p_weight_grads=weight_grads, p_delta=delta)
        self._mix_static(GRAD_SCORES, maps, weights)
        self._back(0, chunk, maps, grads, scores, weights, composed)

        # the query heads of a key/value head, one after the other, are one long sum
        tiles = composed.view(self.B * self.kv_heads, -1, chunk.n_s)[..., : self.S - chunk.s_0]
        grad = _wide_product(tiles, self.k[:, :, keys].flatten(0, 1))
        grads.query[:, :, queries] = grad.view(self.B, self.H, chunk.n_t, self.D)
        self._add_product(grads.key, keys, composed, self.q[:, :, queries])

    def _back(
        self,
        stage: int,
        chunk: Chunk,
        maps: torch.Tensor,
        grads: Gradients,
        tiles: torch.Tensor,
        tile_grads: torch.Tensor,
        composed: torch.Tensor,
    ) -> torch.Tensor:
        """Takes a chunk's gradients back through a stage, and adds to those of its weights; see `back_kernel`.

        Returns:
            after the softmax, parts of two sums, [tiles of keys, 2, B, H, n_t].
        """
        name, flags = f"back_{stage}", self.layout.post if stage else self.layout.pre
        static_grad = grads.post_static if stage else grads.pre_static
        if static_grad is not None:
            left, right = self._by_group(tiles).flatten(0, 1), self._by_group(tile_grads).flatten(0, 1)
            static_grad += _wide_product(left, right.transpose(1, 2)).unflatten(0, (self.B, self.G)).sum(0)

        (tiles_t, tiles_s), channels = _tiles(chunk, self._tile(name)), self.layout.channels

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self.q.device)

        query_parts = new(tiles_s, self.B, self.H, channels, chunk.n_t)
        key_parts = new(tiles_t, self.B, self.H, channels, chunk.n_s)
        delta_parts = new(tiles_s, 2, self.B, self.H, chunk.n_t)
        tensors = {"p_tiles": tiles, "p_grads": tile_grads, "p_composed": composed, "p_delta": delta_parts}
        self._launch(name, chunk, maps, **tensors, p_gwq=query_parts, p_gwk=key_parts)
        for side, grad, parts, first, length in (
            (QUERY, grads.query_weights, query_parts, chunk.t_0, chunk.n_t),
            (KEY, grads.key_weights, key_parts, chunk.s_0, chunk.n_s),
        ):
            if flags & side and grad is not None:
                i = channels if stage and self.layout.pre & side else 0  # the stage before the softmax comes first
                grad = grad[:, :, i : i + channels, first : first + length]
                grad += parts.sum(0)[..., : grad.shape[3]]
        return delta_parts

    def _add_product(self, grad: torch.Tensor, keys: slice, tiles: torch.Tensor, states: torch.Tensor) -> None:
        """Adds tilesᵀ [B, H, n_t, n_s] times states [B, H, n_t, d] to grad [B, Hkv, S, d] at `keys`."""
        existing = grad[:, :, keys].shape[2]
        tiles = tiles.view(self.B * self.kv_heads, -1, tiles.shape[3])[..., :existing].transpose(1, 2)
        rows = states.reshape(self.B * self.kv_heads, -1, states.shape[3])
        grad[:, :, keys] += _wide_product(tiles, rows).unflatten(0, (self.B, self.kv_heads))


def constants(name: str, layout: Layout, dim: int, value_dim: int, tile: Tile) -> dict[str, Any]:
    """All constant arguments of a launch, by name; kernels take those that they have."""
    own = {
        "F_PRE": layout.pre, "F_POST": layout.post, "R": layout.rank, "C": layout.channels, "D": dim, "DV": value_dim,
        "B_D": padded(dim), "B_DV": padded(value_dim), "B_T": tile.b_t, "B_S": tile.b_s,
    }  # fmt: skip
    return own | LAUNCHES[name][1]


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, x, y] times [n, y, z] in float32."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _tiles(chunk: Chunk, tile: Tile) -> tuple[int, int]:
    """How many tiles a chunk has: of queries, of keys."""
    return triton.cdiv(chunk.n_t, tile.b_t), triton.cdiv(chunk.n_s, tile.b_s)


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step


def padded(dim: int) -> int:
    """A head dim as a tile has it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


__all__ = ["FAR", "LAUNCHES", "Gradients", "Layout", "Problem", "Visibility", "constants"]
