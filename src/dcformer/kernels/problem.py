"""What a call of composed attention is, and how it is cut: tensors, dtypes of maps, chunks of queries, tiles.

`launch` has what runs kernels over a chunk of it, `passes` the order in which they run.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar

import torch

from .layout import Layout, Part, StagePair
from .overflow import NOTHING, Beyond
from .recording import Recording
from .schemas import KEPT_MAPS, ROWS, UNBOUNDED, kept_queries
from .search import LEAST_QUERIES, Trial, can_search, find_tiles, searched
from .sizes import ceil_div, round_up
from .triton.heads import WEIGHT_SHIFT, matrix_side
from .tuning import Key, Tile, autotune_is_on, choose, found_tile, is_allowed, keep_tiles

_Result = TypeVar("_Result")

FIRST_CHUNK = 128  # queries of the smallest chunk
_LEAST_BYTES = 256 * 2**20  # of a chunk, and more where a device has it: chunks cost launches
_MOST_PROGRAMS = 65535  # along a grid's second and third axis
_MOST_INT32 = 2**31 - 1
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

    @property
    def window(self) -> int | None:
        """The most keys that a query sees; None where nothing is known of it."""
        is_bounded = self.low > -UNBOUNDED and self.high < UNBOUNDED
        return self.high - self.low + 1 if is_bounded else None


@dataclass(frozen=True)
class Chunk:
    """Queries t_0 to t_0 + n_t, and the keys s_0 to s_0 + n_s that any of them may see.

    Maps have n_p queries, a multiple of every tile. t_0 and s_0 are multiples of `ROWS`, n_s of 16. The last queries of
    a map, and the last keys, may not exist.
    """

    t_0: int
    n_t: int
    n_p: int
    s_0: int
    n_s: int


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
        keeps: whether the forward pass keeps its maps for the backward pass, which then makes none of them anew.

    Attributes:
        map_dtype: of weights that the key side composes, and of its matrices M(s): float16, or float32.
        score_dtype: of scores and of the matrices that compose them: the same, or float32.
        splits_scores: whether scores alone are float32, and products take two parts of each in float16, see
            `heads.split`.
        sums_exactly: whether gradients of the matrices of scores are float32 then: those of static projections are
            sums of them in which what is common to scores cancels.
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
        keeps: bool = False,
    ):
        self.q, self.k, self.v, self.weights = query, key, value, weights
        self.visibility, self.layout, self.scale = visibility, layout, scale
        self.B, self.H, self.T, self.D = query.shape
        self.S, self.DV, self.kv_heads = key.shape[2], value.shape[3], key.shape[1]
        self.G, self.M = layout.groups, self.H // layout.groups
        self.heads = head_blocks(self.M)
        self._known: dict[Hashable, Any] = {}
        self.beyond, self.keeps = beyond, keeps
        is_cuda = query.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(query.device) if is_cuda else (9, 0)
        self.arch = 10 * major + minor
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else _LEAST_BYTES
        if is_cuda and chunk_bytes is None:
            total = torch.cuda.get_device_properties(query.device).total_memory
            self.chunk_bytes = max(_LEAST_BYTES, total // 64)
        self.trial = None
        self.recording: Recording | None = None  # in which a pass is being written down
        self._check_int32()

    def _check_int32(self) -> None:
        """Kernels count in 64 bits from key to key of a map, in 32 bits within a key, and within the composition
        weights of one group's heads.

        Raises:
            ValueError: when composition weights do not fit. (`chunks` sees to it that the queries of a key do.)
        """
        count = self.M * self.layout.channels * max(self.T, self.S)
        if count > _MOST_INT32:
            raise ValueError(
                f"composition weights of {self.M} heads x {max(self.T, self.S)} tokens are {count} numbers, the fused "
                f"kernels count to {_MOST_INT32}: use shorter sequences or attn_implementation='dcformer_chunked'."
            )

    @property
    def beyond(self) -> Beyond:
        """What has exceeded float16, by which the dtypes of maps are chosen: they change when it is set."""
        return self._beyond

    @beyond.setter
    def beyond(self, found: Beyond) -> None:
        self._beyond = found
        needs_more = Beyond.SCORES in found
        if Beyond.GRADIENTS in found:  # bfloat16 is much less exact than float16 models, and than large scores need
            needs_more |= self.q.dtype == torch.float16 or Beyond.PRECISION in found
        self.map_dtype = torch.float32 if needs_more or self.q.dtype == torch.float32 else torch.float16
        is_half = self.map_dtype == torch.float16
        self.splits_scores = is_half and Beyond.PRECISION in found
        self.sums_exactly = self.splits_scores and bool(self.layout.pre & Part.STATIC)
        self.score_dtype = torch.float32 if self.splits_scores else self.map_dtype
        self.grad_dtype = torch.bfloat16 if is_half and Beyond.GRADIENTS in found else self.map_dtype
        self.weight_dtype = torch.float16 if self.grad_dtype == torch.float16 else self.q.dtype
        self.shift = WEIGHT_SHIFT.value if is_half else 0
        self._copies = self.weight_dtype != self.q.dtype  # products take float16, the states are bfloat16
        self._is_widened = self.map_dtype == torch.float32 != self.q.dtype  # maps are wider than the states
        # tiles are searched for where maps are the usual ones
        self._is_searchable = not self._is_widened and self.score_dtype == self.grad_dtype
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
    def unit(self) -> int:
        """Queries that lie together in a map: as many as the largest tile of the kernels of composition has."""
        return self._remembered("unit", lambda: max(self._tile(name).b_t for name in _COMPOSITION))

    @property
    def block(self) -> int:
        """Queries that gradients have one power of two for: a multiple of the tiles of all kernels with it."""
        return self._remembered("block", lambda: max(self.unit, self._tile("scores").b_t, self._tile("keys").b_t))

    def _chunk(self, t_0: int, n_t: int) -> Chunk:
        """n_t queries from t_0 on, with the keys that they may see by the bounds of `Visibility`."""
        s_0 = min(self.S, max(0, t_0 + self.visibility.low)) // ROWS * ROWS
        s_1 = max(s_0, round_up(max(0, min(self.S, t_0 + n_t + self.visibility.high)), 16))
        return Chunk(t_0, n_t, round_up(n_t, self.unit), s_0, s_1 - s_0)

    def bytes_of_chunk(self, chunk: Chunk, maps: int) -> int:
        """Bytes of a chunk of one sequence: of its maps, matrices of keys and, with three maps, their gradients. Where
        maps are kept they are not part of it: then it is what the backward pass needs besides, with one map of its own.
        """
        matrix = self.G * matrix_side(self.M) ** 2
        stages = sum(bool(flags & (Part.KEY | Part.STATIC)) for flags in (self.layout.pre, self.layout.post))
        maps, is_backward = (1, True) if self.is_keeping else (maps, maps > 1)
        tiles = ceil_div(chunk.n_t, self._tile("back_1").b_t)
        matrices = stages + bool(stages and is_backward) * tiles  # gradients of one stage at a time
        size, of_scores, of_weights = (t.itemsize for t in (self.map_dtype, self.score_dtype, self.weight_dtype))
        of_maps = of_scores + (maps - 1) * size
        if not is_backward and of_weights != of_scores:  # else W takes the memory of scores in the forward pass
            of_maps += of_weights
        of_matrices = size * matrices
        if self.layout.pre & (Part.KEY | Part.STATIC):
            wider = 1 + (tiles if is_backward and self.sums_exactly else 0)
            of_matrices += (of_scores - size) * wider
        return chunk.n_s * (of_maps * self.H * chunk.n_p + of_matrices * matrix)

    def _most_bytes(self, chunks: list[Chunk], maps: int) -> int:
        """`bytes_of_chunk` of the largest: of as many queries, that with the most keys."""
        largest = {chunk.n_t: chunk for chunk in sorted(chunks, key=lambda chunk: chunk.n_s)}
        return max(self.bytes_of_chunk(chunk, maps) for chunk in largest.values())

    def chunks(self, maps: int) -> list[Chunk]:
        """Chunks of queries, of which one sequence keeps within the bytes; `maps` are held at once. Where maps are kept
        they are the same in both passes."""
        most = kept_queries(self.visibility.low, self.visibility.high) if self.is_keeping else self.T

        def cut(n_t: int) -> list[Chunk]:
            return [self._chunk(t_0, min(n_t, self.T - t_0)) for t_0 in range(0, self.T, n_t)]

        def fits(n_t: int) -> bool:
            if n_t > most or round_up(n_t, self.unit) * self.H > _MOST_INT32:
                return False
            return self._most_bytes(cut(n_t), maps) <= self.chunk_bytes

        n_t = self.T
        if not fits(n_t):
            n_t = min(FIRST_CHUNK, self.T)
            while fits(2 * n_t):
                n_t *= 2
        return cut(n_t)

    def _rows(self, chunks: list[Chunk], maps: int) -> Iterator[tuple[slice, Self]]:
        """The problem in parts of the batch, as many sequences as keep within the bytes."""
        sequence = self._most_bytes(chunks, maps)
        n_b = max(1, min(self.B, self.chunk_bytes // max(1, sequence), _MOST_PROGRAMS // self.H))
        if n_b == self.B:
            yield slice(None), self
            return
        for b_0 in range(0, self.B, n_b):
            rows = slice(b_0, b_0 + n_b)
            first, last = (t if t.shape[0] == 1 else t[rows] for t in (self.visibility.first, self.visibility.last))
            seen = replace(self.visibility, first=first, last=last)
            pre, post = self.weights
            part = type(self)(
                self.q[rows], self.k[rows], self.v[rows], (pre.at(rows), post.at(rows)), seen, self.layout, self.scale,
                self.chunk_bytes, self.beyond, self.keeps,
            )  # fmt: skip
            part.trial, part.recording = self.trial, self.recording
            yield rows, part

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The tensors' device, as Triton launches on the current one; no autocast, so that products keep dtypes."""
        with torch.cuda.device_of(self.q), torch.autocast(self.q.device.type, enabled=False):
            yield

    # --- maps that are kept -------------------------------------------------------------------------------------------

    @property
    def is_keeping(self) -> bool:
        """Whether maps are kept, or kept ones used: while nothing is beyond float16, which is never taken back, they
        are what the other pass would make of them."""
        return self.keeps and (self.q.dtype == torch.float32 or not self.beyond)

    def kept_maps(self, kept: torch.Tensor | None, chunks: list[Chunk]) -> list[Sequence[torch.Tensor]]:
        """S, P and W of each chunk, [B, n_s, tiles, H, queries of a tile], in the memory of `schemas.new_kept`; of each
        nothing where none are kept."""
        if not self.is_keeping or kept is None:
            return [()] * len(chunks)
        maps: list[Sequence[torch.Tensor]] = []
        for chunk in chunks:
            shape = (KEPT_MAPS, self.B, chunk.n_s, chunk.n_p // self.unit, self.H, self.unit)
            maps.append(kept[chunk.t_0 :].flatten()[: math.prod(shape)].view(shape).unbind())
        return maps

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
        dim, window = max(self.D, self.DV), self.visibility.window
        tile = choose(name, self.M, dim, dtype, self.arch, self.layout.rank, window, self.beyond)
        found = self._found_tile(name, tile) if autotune_is_on() and self._is_searchable else None
        return found or tile

    def _found_tile(self, name: str, usual: Tile) -> Tile | None:
        """The tile that a search has found, perhaps of another version, if the kernel may have it."""
        found = found_tile(self.gpu, self._key(name))
        return found if found is not None and is_allowed(name, found, usual) else None

    def _key(self, name: str) -> Key:
        layout, dtype = self.layout, str(self.q.dtype).removeprefix("torch.")
        is_windowed, dim = self.visibility.window is not None, max(self.D, self.DV)
        return Key(name, self.arch, self.M, dim, dtype, is_windowed, layout.pre, layout.post, layout.rank)

    def _searched(self, name: str, run: Callable[[], _Result]) -> _Result:
        """Result of a pass; with DCFORMER_AUTOTUNE=1, tiles of its kernels are searched for first, once per process."""
        is_long = self.B * self.T >= LEAST_QUERIES and self._is_searchable
        if autotune_is_on() and self.trial is None and is_long and can_search(self.q):
            this = (self.gpu, self._key(name), self.is_keeping)  # passes with kept maps launch other kernels
            if this not in searched:
                with torch.cuda.device_of(self.q):  # by which the search waits
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
            self._known.clear()  # `find_tiles` has asked for the tile before


def head_blocks(heads: int) -> tuple[int, int]:
    """The blocks in which the kernels have the heads of a group, up to 64: one of 16 or 32, or 32 and 16 or 32 more."""
    if heads <= 32:
        return (16 if heads <= 16 else 32), 0
    return 32, (16 if heads <= 48 else 32)


__all__ = ["Chunk", "Problem", "Visibility", "head_blocks"]
