"""Runs the kernels of composed attention over chunks of queries, so that the maps which cross heads stay small."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from . import attention as kernels
from .attention import GRAD_COMPOSED, GRAD_SCORES, SCORES, WEIGHTS
from .tuning import Tile, choose

CHUNK_BYTES = 256 * 2**20
FIRST_CHUNK = 64  # queries of the smallest chunk
QUERY, KEY, STATIC, GATE = 1, 2, 4, 8  # flags of a stage, as the kernels have them
_FAR = 2**30


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched.

    Attributes:
        kernel: the kernel.
        grid: "maps": tiles of keys, tiles of queries, B·G; "rows": tiles of queries, H, B; "keys": tiles of keys, H, B.
        constants: constant arguments of its own.
    """

    kernel: triton.JITFunction
    grid: str
    constants: dict[str, Any]


# name in `tuning` -> launch; `maps_*` in the forward pass, `tiles_*` where tiles are kept
LAUNCHES = {
    **{f"maps_{i}": Launch(kernels.maps_kernel, "maps", {"SOURCE": i, "KEEP": False}) for i in (SCORES, WEIGHTS)},
    "lse": Launch(kernels.lse_kernel, "rows", {}),
    "output": Launch(kernels.output_kernel, "rows", {}),
    **{
        f"tiles_{i}": Launch(kernels.maps_kernel, "maps", {"SOURCE": i, "KEEP": True})
        for i in (SCORES, WEIGHTS, GRAD_COMPOSED)
    },
    **{f"key_sums_{i}": Launch(kernels.key_sums_kernel, "keys", {"STAGE": i}) for i in (0, 1)},
    **{f"back_{i}": Launch(kernels.back_kernel, "rows", {"STAGE": i}) for i in (0, 1)},
    "grad_maps": Launch(kernels.grad_maps_kernel, "maps", {}),
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
    low: int = -_FAR
    high: int = _FAR


@dataclass(frozen=True)
class Chunk:
    """Queries t_0 to t_0 + n_t, and the keys s_0 to s_0 + n_s that any of them may see."""

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
        chunk_bytes: bound of the memory that the maps, and in the backward pass the tiles of all heads, of a chunk of
            queries take, above what the smallest chunk needs.
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
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self.q, self.k, self.v, self.wq, self.wk = query, key, value, query_weights, key_weights
        self.statics = {"pre": pre_static, "post": post_static}
        self.visibility, self.layout, self.scale, self.chunk_bytes = visibility, layout, scale, chunk_bytes
        self.B, self.H, self.T, self.D = query.shape
        self.S, self.DV, self.kv_heads = key.shape[2], value.shape[3], key.shape[1]
        self.G, self.M = layout.groups, self.H // layout.groups
        self.map_dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
        is_cuda = query.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(query.device) if is_cuda else (9, 0)
        self.arch = 10 * major + minor
        # where the maps of each source are among those of a chunk
        pre, post = (layout.maps(flags, self.H) for flags in (layout.pre, layout.post))
        self.first_map = {SCORES: 0, WEIGHTS: pre, GRAD_SCORES: pre + post, GRAD_COMPOSED: 2 * pre + post}
        self.count = {SCORES: pre, WEIGHTS: post, GRAD_SCORES: pre, GRAD_COMPOSED: post}

    # --- launches -----------------------------------------------------------------------------------------------------

    def chunks(self, maps: int) -> Iterator[Chunk]:
        """Chunks of queries for which `maps` maps per group are held; a tile of every head is M of them."""
        row = max(1, self.B * self.G * maps * self.map_dtype.itemsize)  # bytes per query and key
        reach = min(self.S, self.visibility.high - self.visibility.low)
        n_t = FIRST_CHUNK
        while n_t < self.T and row * 2 * n_t * min(self.S, reach + 2 * n_t) <= self.chunk_bytes:
            n_t *= 2
        for t_0 in range(0, self.T, n_t):
            n = min(n_t, self.T - t_0)
            # multiples of 16 keep the rows of maps aligned
            s_0 = min(self.S, max(0, t_0 + self.visibility.low)) // 16 * 16
            s_1 = max(s_0, min(self.S, _round_up(t_0 + n + self.visibility.high, 16)))
            yield Chunk(t_0, n, s_0, s_1 - s_0)

    def _new_maps(self, chunk: Chunk, count: int) -> torch.Tensor:
        shape = (self.B * self.G, count, chunk.n_t, chunk.n_s)
        return torch.empty(shape, dtype=self.map_dtype, device=self.q.device)

    def _new_tiles(self, chunk: Chunk) -> torch.Tensor:
        shape = (self.B, self.H, chunk.n_t, chunk.n_s)
        return torch.empty(shape, dtype=self.map_dtype, device=self.q.device)

    def _launch(self, name: str, chunk: Chunk, maps: torch.Tensor, **arguments: Any) -> None:
        """Runs a kernel over a chunk; arguments that all kernels share are filled in by name.

        Args:
            name: of `LAUNCHES`.
            chunk: what to run over.
            maps: of the chunk, [B·G, count, n_t, n_s].
            arguments: those particular to the kernel; tensors that are None are never followed.
        """
        launch, dim = LAUNCHES[name], max(self.D, self.DV)
        tile = choose(name, dim, self.q.dtype, self.arch)
        tiles_t, tiles_s = triton.cdiv(chunk.n_t, tile.b_t), triton.cdiv(chunk.n_s, tile.b_s)
        grids = {"maps": (tiles_s, tiles_t, self.B * self.G), "rows": (tiles_t, self.H, self.B)}
        grid = (grids | {"keys": (tiles_s, self.H, self.B)})[launch.grid]
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
        states_out = arguments.get("p_out", arguments.get("p_do"))
        for letter, tensor in (("q", self.q), ("k", self.k), ("v", self.v), ("o", states_out)):
            axes = "bhs" if letter in "kv" else "bht"
            strides = (self.q if tensor is None else tensor).stride()
            known |= {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, strides, strict=False)}
        known |= arguments
        values = {key: self.q if known.get(key) is None else known[key] for key in launch.kernel.arg_names}
        launch.kernel[grid](**values, num_warps=tile.num_warps, num_stages=tile.num_stages)

    def _fill_maps(
        self, source: int, chunk: Chunk, maps: torch.Tensor, tiles: torch.Tensor | None = None, **tensors: Any
    ) -> None:
        """Writes the maps of scores, weights or the gradient of composed weights, low rank and static, into those of a
        chunk; with `tiles` [B, H, n_t, n_s] also the tiles themselves."""
        stage = "pre" if source == SCORES else "post"
        static = self.statics[stage]
        if tiles is None and static is not None:
            tiles = self._new_tiles(chunk)
        if tiles is not None or (self.layout.rank and getattr(self.layout, stage) & (QUERY | KEY)):
            name = f"maps_{source}" if tiles is None else f"tiles_{source}"
            self._launch(name, chunk, maps, p_tiles=tiles, i_out=self.first_map[source], **tensors)
        self._mix_static(source, maps, tiles, static)

    def _mix_static(
        self, source: int, maps: torch.Tensor, tiles: torch.Tensor | None, static: torch.Tensor | None
    ) -> None:
        """A source's maps of its static projection, from its tiles."""
        if static is not None and tiles is not None:
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
        shape = (self.B, self.T, self.H, self.DV)
        out = torch.empty(shape, dtype=self.q.dtype, device=self.q.device).transpose(1, 2)
        lse = torch.empty((self.B, self.H, self.T), dtype=torch.float32, device=self.q.device)
        count = self.count[SCORES] + self.count[WEIGHTS]
        has_static = any(static is not None for static in self.statics.values())
        for chunk in self.chunks(count + 2 * self.M * has_static):
            maps = self._new_maps(chunk, count)
            self._fill_maps(SCORES, chunk, maps)
            self._launch("lse", chunk, maps, p_lse=lse)
            self._fill_maps(WEIGHTS, chunk, maps, p_lse=lse)
            self._launch("output", chunk, maps, p_lse=lse, p_out=out)
        return out, lse

    def backward(self, grad_out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Gradients from that of the output [B, H, T, DV] and the saved log-sum-exp.

        Every sum has one owner and one order: the result does not change from run to run.
        """

        def zeros(like: torch.Tensor | None) -> torch.Tensor | None:
            return None if like is None else torch.zeros(like.shape, dtype=torch.float32, device=like.device)

        grads = Gradients(
            torch.empty((self.B, self.H, self.T, self.D), dtype=self.q.dtype, device=self.q.device),
            *(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (self.k, self.v)),
            *(zeros(t) for t in (self.wq, self.wk, *self.statics.values())),
        )
        count = 2 * (self.count[SCORES] + self.count[WEIGHTS])
        for chunk in self.chunks(count + 4 * self.M):
            queries, keys = slice(chunk.t_0, chunk.t_0 + chunk.n_t), slice(chunk.s_0, chunk.s_0 + chunk.n_s)
            if not chunk.n_s:
                grads.query[:, :, queries] = 0
                continue
            maps = self._new_maps(chunk, count)
            composed = self._backward_chunk(chunk, maps, grad_out, lse, grads)
            # the query heads of a key/value head, one after the other, are one long sum
            tiles = composed.view(self.B * self.kv_heads, -1, chunk.n_s)
            grad = _wide_product(tiles, self.k[:, :, keys].flatten(0, 1))
            grads.query[:, :, queries] = grad.view(self.B, self.H, chunk.n_t, self.D)
            self._add_product(grads.key, keys, composed, self.q[:, :, queries])
        return grads

    def _backward_chunk(
        self, chunk: Chunk, maps: torch.Tensor, grad_out: torch.Tensor, lse: torch.Tensor, grads: Gradients
    ) -> torch.Tensor:
        """Adds a chunk to the gradients of values and composition weights. Returns that of q·k, [B, H, n_t, n_s]."""
        scores, weights, grad = (self._new_tiles(chunk) for _ in range(3))
        self._fill_maps(SCORES, chunk, maps, scores)
        self._fill_maps(WEIGHTS, chunk, maps, weights, p_lse=lse)
        self._fill_maps(GRAD_COMPOSED, chunk, maps, grad, p_do=grad_out)
        shape = (self.B, self.H, chunk.n_t, chunk.n_s)
        composed = torch.zeros(shape, dtype=self.q.dtype, device=self.q.device)  # tiles not visited stay zeros
        out: dict[str, Any] = {"p_composed": composed, "p_delta": torch.empty_like(lse)}
        out |= {"p_gwq": grads.query_weights, "p_gwk": grads.key_weights}

        self._add_sums(1, chunk, maps, weights, grad, grads.post_static, out)
        self._launch("back_1", chunk, maps, p_tiles=weights, p_grads=grad, **out)
        keys, queries = slice(chunk.s_0, chunk.s_0 + chunk.n_s), slice(chunk.t_0, chunk.t_0 + chunk.n_t)
        self._add_product(grads.value, keys, composed, grad_out[:, :, queries])

        first = self.first_map[GRAD_SCORES]
        self._launch("grad_maps", chunk, maps, p_tiles=weights, p_grads=grad, i_out=first, **out)
        self._mix_static(GRAD_SCORES, maps, weights, self.statics["pre"])
        self._add_sums(0, chunk, maps, scores, weights, grads.pre_static, out)
        self._launch("back_0", chunk, maps, p_tiles=scores, p_grads=weights, **out)
        return composed

    def _add_sums(
        self,
        stage: int,
        chunk: Chunk,
        maps: torch.Tensor,
        tiles: torch.Tensor,
        grad: torch.Tensor,
        static: torch.Tensor | None,
        out: dict[str, Any],
    ) -> None:
        """Adds a chunk to the gradients of a stage's key-side weights and static projection."""
        if (self.layout.post if stage else self.layout.pre) & KEY:
            self._launch(f"key_sums_{stage}", chunk, maps, p_tiles=tiles, p_grads=grad, **out)
        if static is not None:
            left, right = self._by_group(tiles).flatten(0, 1), self._by_group(grad).flatten(0, 1).transpose(1, 2)
            static += _wide_product(left, right).unflatten(0, (self.B, self.G)).sum(0)

    def _add_product(self, grad: torch.Tensor, keys: slice, tiles: torch.Tensor, states: torch.Tensor) -> None:
        """Adds tilesᵀ [B, H, n_t, n_s] times states [B, H, n_t, d] to grad [B, Hkv, S, d] at `keys`."""
        tiles = tiles.view(self.B * self.kv_heads, -1, tiles.shape[3]).transpose(1, 2)
        rows = states.reshape(self.B * self.kv_heads, -1, states.shape[3])
        grad[:, :, keys] += _wide_product(tiles, rows).unflatten(0, (self.B, self.kv_heads))


def constants(name: str, layout: Layout, dim: int, value_dim: int, tile: Tile) -> dict[str, Any]:
    """All constant arguments of a launch, by name; kernels take those that they have."""
    own = {
        "F_PRE": layout.pre, "F_POST": layout.post, "R": layout.rank, "C": layout.channels, "D": dim, "DV": value_dim,
        "B_D": _padded(dim), "B_DV": _padded(value_dim), "B_T": tile.b_t, "B_S": tile.b_s,
    }  # fmt: skip
    return own | LAUNCHES[name].constants


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, x, y] times [n, y, z] in float32."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step


def _padded(dim: int) -> int:
    """A head dim as a tile has it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


__all__ = ["CHUNK_BYTES", "LAUNCHES", "Gradients", "Launch", "Layout", "Problem", "Visibility", "constants"]
