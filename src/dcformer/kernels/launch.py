"""Launches the kernels of composed attention over a chunk of a problem.

Arguments that kernels share are filled in by name. What a kernel writes is new memory, or memory that is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from .balance import keys_of_a_program, lengths
from .layout import Layout, Part, StagePair
from .overflow import LARGEST, LARGEST_EXACT, LARGEST_SPLIT, Beyond, mark_of
from .problem import Chunk, Problem, head_blocks
from .repeated import start
from .schemas import ROWS
from .sizes import ceil_div, power_of_2
from .triton.backward import back_0_kernel, back_1_kernel
from .triton.compose import compose_kernel, join_kernel, lse_kernel
from .triton.heads import MATRIX_GRAD_UNIT, matrix_side
from .triton.key_side import expand_kernel, project_kernel
from .triton.precision import INTERPRETED
from .triton.products import keys_kernel, scores_kernel, values_kernel
from .triton.scales import scale_kernel, states_kernel
from .tuning import Tile, launch_options, resident_programs, wide_channels

_LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
_JOINED = 64  # queries whose log-sum-exps one program joins
_STATES = "vgkq"  # values, gradients of the output, keys, queries: their order in the kernels of `scales`
_INTERPRETED_KEYS = 32  # of a program, in the interpreter: so that short sequences have several
_FEW_PROGRAMS = 4  # of `keys`, to a multiprocessor: two at once, twice
_FEW_INTERPRETED = 8  # in the interpreter, in all

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
UNLIMITED: dict[str, Any] = {"largest": torch.inf, "MARK": False, "p_mark": None}  # see `Launcher._limit`
# kernels with parts of keys -> what a program costs apart from its keys, in keys that it could do in that time: for
# composition about what it reads and writes for each query
BESIDES = {"scores": 64, "lse": 6, "compose": 6, "weights": 6, "back_1": 12, "back_0": 12}


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
        undo: what undoes the powers of two that they are times, float32 [B, heads, blocks of `ROWS`]; None where there
            are none.
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
        value_norms: the largest norms of values, [B, Hkv, blocks of `ROWS`].
    """

    query: States
    key: States
    grad: States
    grad_out: torch.Tensor
    grad_norms: torch.Tensor
    value_norms: torch.Tensor


class Launcher(Problem):
    """A problem with what launches kernels over its chunks."""

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
        """Runs a kernel; arguments that kernels share (`_shared`) are filled in by name; those given take precedence.

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
        nowhere = self.q  # a tensor that stands where there is none
        values = {key: nowhere if known[key] is None else known[key] for key in kernel.arg_names}
        run = self._start(kernel, grid, name, tile, values)
        if self.recording is not None:
            self.recording.launch(run, list(values.values()))

    def _shared(self, chunk: Chunk) -> dict[str, Any]:
        """Arguments that kernels share, by name."""
        first, last = self.visibility.first, self.visibility.last
        pre, post = self.weights
        return {
            "p_first": first, "p_last": last, "stride_ib": first.stride(0) if first.shape[0] > 1 else 0,
            "p_w0": pre.query, "p_w1": post.query, "stride_s": self.H * chunk.n_p, "stride_m": matrix_side(self.M) ** 2,
            "H": self.H, "G": self.G, "T": self.T, "S": self.S,
            "rep": self.H // self.kv_heads, "n_bh": self.B * self.H, "n_bg": self.B * self.G,
            "t_0": chunk.t_0, "n_t": chunk.n_t, "n_p": chunk.n_p, "s_0": chunk.s_0, "n_s": chunk.n_s,
            "UNIT": self.unit, "SHIFT": self.shift, "BLOCK": self.block, "n_scales": ceil_div(chunk.n_t, self.block),
            "SPLIT": self.splits_scores,
            **composition_constants(self.layout, self.M),
        }  # fmt: skip

    def _start(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], name: str, tile: Tile | None, values: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """Starts a kernel, and returns what `start` does. A method of its own, so that tests and tools can replace it
        and see what is launched."""
        options = {} if tile is None else launch_options(tile)
        launch = partial(start, kernel, grid, values, options, self.q.device)
        if self.trial is None or not name:
            return launch()
        self.trial.launch(name, launch)
        return None

    def _compose(self, name: str, chunk: Chunk, **arguments: Any) -> None:
        """Runs a kernel of composition over a chunk; see `_parts`."""
        (kernel, own), tile = LAUNCHES[name], self._tile(name)
        parts, n_keys = self._parts(name, chunk)
        grid = (ceil_div(chunk.n_t, tile.b_t), parts, self.B * self.G)
        wide = wide_channels(sum(self.heads), self.layout.rank, self.arch)
        constants = {"B_T": tile.b_t, "B_S": tile.b_s, "WIDE": wide}
        self._launch(kernel, grid, chunk, name, tile, n_keys=n_keys, **own | constants | arguments)

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
            resident = self._multiprocessors * resident_programs(name, tile, self.arch)
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
        dtypes = {Beyond.SCORES: self.map_dtype, Beyond.PRECISION: self.score_dtype, Beyond.GRADIENTS: self.grad_dtype}
        if dtypes[what] != torch.float16:
            return UNLIMITED
        return {"largest": largest, "MARK": True, "p_mark": mark_of(self.q.device, what)}

    def _limit_of_precision(self) -> dict[str, Any]:
        """`_limit` for scores that float16, or two parts of it, hold less exactly than softmax needs."""
        if self.splits_scores:
            return self._limit(Beyond.SCORES, LARGEST_SPLIT)
        return self._limit(Beyond.PRECISION, LARGEST_EXACT)

    def _fill_values(
        self, chunk: Chunk, tiles: torch.Tensor, v: States, out: torch.Tensor, scale: float,
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
        self, chunk: Chunk, tiles: torch.Tensor, q: States, out: torch.Tensor, scale: float,
        scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """out [B, Hkv, S, d] = scale · tiles, a map, times q [B, H, T, d], summed over the heads of a key; of
        several chunks the sum. `scales` is as for `_fill_values`.

        Few heads of keys are few programs: each has some of the heads that share a key, then, and torch adds them up.
        """
        tile, shared = self._tile("keys"), self.H // self.kv_heads
        programs, is_whole = ceil_div(chunk.n_s, tile.b_s) * self.B * self.kv_heads, chunk.n_t == self.T
        n_parts = self._parts_of_heads(programs, shared) if is_whole else 1
        sums = out if n_parts == 1 else self._new(self.B, self.kv_heads * n_parts, self.S, out.shape[3])
        self._launch(
            keys_kernel, (programs * n_parts,), chunk, "keys", tile, p_map=tiles, p_q=q.tensor, p_out=sums, scale=scale,
            rep=shared // n_parts, ADD=not is_whole, **self._undone(q, scales), **_strides("q", q.tensor, "bht"),
            **_strides("o", sums, "bhs"), **product_constants(out.shape[3], tile),
        )  # fmt: skip
        if n_parts > 1:
            rows = slice(chunk.s_0, min(chunk.s_0 + chunk.n_s, self.S))
            self._do(_add_heads, sums.unflatten(1, (self.kv_heads, n_parts))[..., rows, :], out[..., rows, :])

    def _parts_of_heads(self, programs: int, shared: int) -> int:
        """Into how many parts to cut the heads that share a key: a divisor, so that there are not few programs."""
        most = _FEW_INTERPRETED if INTERPRETED.value else _FEW_PROGRAMS * self._multiprocessors
        return next((n for n in range(1, shared) if shared % n == 0 and programs * n >= most), shared)

    def _undone(self, states: States, scales: torch.Tensor | None) -> dict[str, Any]:
        """Arguments of products that undo powers of two: of states, and of a map."""
        inverse, finite = (None, None) if scales is None else scales[1:]
        return {
            "SCALED": scales is not None, "p_inverse": inverse, "p_finite": finite,
            "COPIED": states.undo is not None, "p_undo": states.undo, "ROWS": ROWS,
            "n_undo": 0 if states.undo is None else states.undo.shape[2],
            **self._limit(Beyond.GRADIENTS),  # of W, too
        }  # fmt: skip

    def _fill_lse(self, chunk: Chunk, scores: torch.Tensor, pre: torch.Tensor | None, lse: torch.Tensor) -> None:
        """Writes a chunk's log-sum-exps, from those of parts of its keys."""
        n_parts, n_bh = self._parts("lse", chunk)[0], self.B * self.H
        tensors = {"p_scores": scores, "p_m0": pre} | self._limit_of_precision()
        if n_parts == 1:
            here = lse[:, :, chunk.t_0 :]
            self._compose("lse", chunk, p_lse=here, stride_l=self.T, unseen=torch.inf, **tensors)
            return
        parts = self._new(n_parts, n_bh, chunk.n_t)
        self._compose("lse", chunk, p_lse=parts, stride_l=chunk.n_t, unseen=-torch.inf, **tensors)
        grid = (n_bh, ceil_div(chunk.n_t, _JOINED))
        self._launch(join_kernel, grid, chunk, p_parts=parts, p_lse=lse, n_parts=n_parts, B_P=16, B_T=_JOINED)

    # --- states -------------------------------------------------------------------------------------------------------

    def _states(
        self, states: dict[str, torch.Tensor], is_copied: bool, norms: torch.Tensor, rows: torch.Tensor | None = None
    ) -> list[States]:
        """What a pass needs of some states, or of their copies in float16; see `states_kernel`.

        Args:
            states: letter -> tensor; some that follow each other in `_STATES`.
            is_copied: whether to copy them.
            norms: filled with the largest norms of each block of values, negative where one is not finite: [B, Hkv,
                blocks of `ROWS`].
            rows: filled with those of each row of gradients of the output, [B, H, T].
        """
        arguments: dict[str, Any] = {f"p_{letter}{what}": None for letter in _STATES for what in ("", "_half", "_undo")}
        arguments |= {f"stride_{letter}{axis}": 0 for letter in _STATES for axis in "bhn"}
        out = []
        for letter, x in states.items():
            half, undo = None, None
            if is_copied:
                half = self._new(*x.shape, dtype=torch.float16)
                undo = self._new(*x.shape[:2], blocks_of_rows(x.shape[2]))
            out.append(States(x if half is None else half, undo))
            arguments |= {f"p_{letter}": x, f"p_{letter}_half": half, f"p_{letter}_undo": undo}
            arguments |= _strides(letter, x, "bhn")
        tensors = states.values()
        blocks, heads = max(blocks_of_rows(x.shape[2]) for x in tensors), max(x.shape[1] for x in tensors)
        whole = self._remembered("whole", lambda: self._chunk(0, self.T))  # this kernel knows no chunks
        self._launch(
            states_kernel, (blocks, len(states), self.B * heads), whole, start=_STATES.index(next(iter(states))),
            before=max(self.visibility.low, -self.T), behind=min(self.visibility.high, self.S),
            p_largest=norms, p_rows=rows, D=self.D, DV=self.DV, B_D=padded(max(self.D, self.DV)), B_N=ROWS,
            COPIED=is_copied, **self._limit(Beyond.GRADIENTS), **arguments,
        )  # fmt: skip
        return out

    def _values(self, norms: torch.Tensor) -> States:
        """Values, for a product with W. Where they are copied, their norms are filled, see `_states`."""
        if not self._copies:
            return States(self.v)
        return self._states({"v": self.v}, True, norms)[0]

    def _sources(self, grad_out: torch.Tensor, norms: torch.Tensor) -> Sources:
        """What a backward pass starts from, given gradients of the output [B, H, T, DV] and the norms of `_values`."""
        rows = self._new(self.B, self.H, self.T)
        if self._copies:
            grad, key, query = self._states({"g": grad_out, "k": self.k, "q": self.q}, True, norms, rows)
        else:
            norms = self._new(self.B, self.kv_heads, blocks_of_rows(self.S))
            _, grad = self._states({"v": self.v, "g": grad_out}, False, norms, rows)
            key, query = (States(t.float() if self._is_widened else t) for t in (self.k, self.q))  # as dS is
        return Sources(query, key, grad, grad_out, rows, norms)

    def _matrices(self, chunk: Chunk, amplified: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """The key side of both stages as matrices [B·G, n_s, heads, heads]; None where there is none.

        Args:
            chunk: of which keys.
            amplified: [B·G, programs], filled with how much larger the matrices after the softmax may make gradients.
        """
        out: list[torch.Tensor | None] = []
        for stage in range(2):
            flags = self.layout.post if stage else self.layout.pre
            if not flags & (Part.KEY | Part.STATIC):
                out.append(None)
                continue
            dtype = self.map_dtype if stage else self.score_dtype
            matrices = self._new(self.B * self.G, chunk.n_s, *[matrix_side(self.M)] * 2, dtype=dtype)
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
            n_amplified=amplified.shape[1], B_H=power_of_2(self.M), B_KV=power_of_2(self.kv_heads),
            B_V=max(1, 1024 // power_of_2(self.kv_heads)), B_T=min(64, self.block), B_N=ROWS,
            EXTRA=extra is not None, FEW=self.q.dtype == torch.bfloat16, **self._limit(Beyond.GRADIENTS),
        )  # fmt: skip
        return scales

    def _project(self, stage: int, chunk: Chunk, parts: torch.Tensor, scales: torch.Tensor, grads: Gradients) -> None:
        """Adds a chunk's gradients of a stage's key side and static projection, from those of the matrices."""
        _, key, static = grads.weights[stage]
        # With 8192 there are registers for few warps only; but each program writes a gradient of the static projection,
        # where there is one, and with 8192 these are fewer.
        constants = matrix_constants(self.layout, self.M, stage, numbers=4096 if static is None else 8192)
        grid = (ceil_div(chunk.n_s, constants["B_S"]), self.B * self.G)
        parts_of_static = None if static is None else self._new(grid[0], self.B, self.G, self.M, self.M)
        tile = self._tile(f"back_{stage}")
        self._launch(
            project_kernel, grid, chunk, p_gm=parts, p_gwk=key, p_gstatic=parts_of_static, **self._key_side(stage),
            factor=1.0 if stage else LN_2 / MATRIX_GRAD_UNIT.value, B_T=tile.b_t, TRANSPOSED=bool(stage),
            ADD=chunk.n_t < self.T, p_inverse=scales[1], p_finite=scales[2],
            **(self._limit(Beyond.GRADIENTS) if parts.dtype == torch.float16 else UNLIMITED), **constants,
        )  # fmt: skip
        if static is not None and parts_of_static is not None:
            self._do(_add_parts, parts_of_static, static)

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._made(torch.empty(shape, dtype=dtype, device=self.q.device))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        zeros = self._new(*shape, dtype=dtype)
        self._do(torch.Tensor.zero_, zeros)
        return zeros

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in new memory: all such are made by `_new`, or pass here."""
        return tensor if self.recording is None else self.recording.new(tensor)

    def _do(self, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Has torch compute something in place. A pass that uses what torch computed elsewhere is not recorded."""
        function(*tensors)
        if self.recording is not None:
            self.recording.call(function, *tensors)

    def _new_map(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """One number for each key, query and head, in tiles of queries: [B, n_s, tiles, H, queries of a tile]."""
        return self._new(self.B, chunk.n_s, chunk.n_p // self.unit, self.H, self.unit, dtype=dtype)

    def _weights_in(self, chunk: Chunk, memory: torch.Tensor) -> torch.Tensor:
        """A map of composed weights: in the memory of another, where its numbers have that size, or in its own."""
        is_of_size = memory.itemsize == self.weight_dtype.itemsize
        return memory.view(self.weight_dtype) if is_of_size else self._new_map(chunk, self.weight_dtype)

    def _make_scores(self, chunk: Chunk, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The map of scores times log2(e), in memory that is given or in its own."""
        scores = self._new_map(chunk, self.score_dtype) if memory is None else memory
        # Composition may take away what makes them large, and leaves what they were rounded by.
        limit = self._limit_of_precision() if self.layout.pre else self._limit(Beyond.SCORES)
        self._fill_scores(chunk, scores, self.k, self.q, self.scale * _LOG2_E, limit)
        return scores


# --- constants of kernels ---------------------------------------------------------------------------------------------


def composition_constants(layout: Layout, heads: int) -> dict[str, Any]:
    """Constant arguments of the kernels of composition, by name; kernels take those that they have."""
    blocks = head_blocks(heads)
    return {
        "F_PRE": int(layout.pre), "F_POST": int(layout.post), "R": layout.rank, "C": layout.channels, "M": heads,
        "H0": blocks[0], "H1": blocks[1],
    }  # fmt: skip


def matrix_constants(layout: Layout, heads: int, stage: int, numbers: int = 8192) -> dict[str, Any]:
    """Constant arguments of the kernels of the key side; a program has as many keys as have that many numbers."""
    side = matrix_side(heads)
    block = power_of_2(side)
    return {
        "F": int(layout.post if stage else layout.pre), "R": layout.rank, "C": layout.channels, "M": heads,
        "HP": side, "B_H": block, "B_S": numbers // block**2,
    }  # fmt: skip


def blocks_of_rows(count: int) -> int:
    """In how many blocks a program each takes so many queries, keys or values of a head."""
    return max(1, ceil_div(count, ROWS))


def product_constants(dim: int, tile: Tile) -> dict[str, Any]:
    """Constant arguments of a product."""
    return {"D": dim, "B_D": padded(dim), "B_T": tile.b_t, "B_S": tile.b_s}


def add_up(parts: torch.Tensor, total: torch.Tensor) -> None:
    """total = the sum of parts [n, *total]."""
    torch.sum(parts, 0, out=total)


def _add_parts(parts: torch.Tensor, total: torch.Tensor) -> None:
    """total += the sum of parts [n, m, *total]."""
    total += parts.sum((0, 1))


def _add_heads(parts: torch.Tensor, total: torch.Tensor) -> None:
    """total [B, Hkv, n, d] = the sum of parts [B, Hkv, parts, n, d]."""
    total.copy_(parts.sum(2))


def _strides(letter: str, tensor: torch.Tensor, axes: str) -> dict[str, int]:
    return {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, tensor.stride(), strict=False)}


def padded(dim: int) -> int:
    """A head dim as a tile has it: a power of two, at least 16."""
    return max(16, power_of_2(dim))


__all__ = [
    "BESIDES", "LAUNCHES", "LN_2", "UNLIMITED", "Gradients", "Launcher", "Sources", "States", "add_up",
    "matrix_constants", "padded",
]  # fmt: skip
