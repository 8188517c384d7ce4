"""The forward and the backward pass of composed attention, over chunks of queries where maps would be too large.

One pass over a map of all heads is what costs most; the passes of a chunk:

    forward      scores  q, k -> S        lse  S            compose  S -> W       values  W, v -> out
    backward     scores  q, k -> S        weights  S -> P, W                      keys  W, dO -> dV
                 scores  v, dO -> dW      back_1  P, dW -> dP
                 back_0  S, P, dP -> dS   values  dS, k -> dQ                     keys  dS, q -> dK

W of the forward pass takes the place of S where it is as wide, dP and dS that of dW. `expand` makes each key's matrix
of the key side before, `project` takes their gradients back. In 16 bits all maps and the matrices are float16 (large
scores and their matrices float32), gradients times powers of two that `scale` finds, and what is bfloat16 is copied in
float16 for products with them (`states`); where that is not sufficient, see `overflow`. Maps lie in tiles of as many
queries as the kernels of composition have: [B, S, tiles, H, queries of a tile].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..masks_dcformer import is_captured
from .launch import LN_2, UNLIMITED, Gradients, Launcher, Sources, States, add_up, matrix_constants
from .layout import Part, Stage, stages_of
from .overflow import Beyond, beyond, look, mark_of
from .problem import Chunk
from .recording import Recorded, Recording
from .repeated import geometry, keep
from .schemas import new_kept, new_norms
from .sizes import ceil_div
from .triton.heads import matrix_side
from .tuning import autotune_is_on, cache_file, searches

_Results = list[torch.Tensor | None]  # of a pass, as one list: so they can be written down and handed out again

_MOST_RECORDED = 256  # passes; the oldest is dropped
_MOST_STEPS = 256  # of a recorded pass: longer ones keep the GPU busy anyway
# What a pass is chosen by -> the pass as it was written down; True: seen once; False: not to be repeated.
_recorded: dict[tuple, Recorded | bool] = {}


class Passes(Launcher):
    """A problem with its two passes. Arguments are those of `Problem`."""

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [B, T, H, DV], log-sum-exp [B, H, T] in float32, base 2, and what is kept for the backward pass, see
        `new_kept` and `new_norms`."""
        out, lse, kept, norms = self._run_pass("forward", self._forward)
        assert out is not None and lse is not None and kept is not None and norms is not None
        return out, lse, kept, norms

    def _run_pass(self, name: str, run: Callable[..., _Results], *given: torch.Tensor | None) -> _Results:
        """Results of a pass over given tensors; it runs again, with wider maps, if something was beyond float16."""
        again = partial(self._repeated, name, run, given)
        found = self._searched(name, again)
        while self.q.dtype != torch.float32:
            look(self.q.device)
            if self.beyond == beyond(self.q.device):  # else this pass has left a mark that was seen, perhaps elsewhere
                break
            self.beyond = beyond(self.q.device)
            del found  # its memory
            found = again()
        return found

    def _repeated(self, name: str, run: Callable[..., _Results], given: Sequence[torch.Tensor | None]) -> _Results:
        """Results of a pass, which is written down the second time and then repeated, with tensors of one geometry."""
        seen, (pre, post), device = self.visibility, self.weights, self.q.device
        if self.trial is not None or is_captured(device):
            return run(*given)
        marks = [] if self.map_dtype == torch.float32 else [mark_of(device, what) for what in Beyond]
        tensors = [self.q, self.k, self.v, *pre, *post, seen.first, seen.last, *given, *marks]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        tiles = (searches(), cache_file()) if autotune_is_on() else None
        key = (
            type(self), name, device, self.layout, self.scale, self.chunk_bytes, self.beyond, self.keeps, seen.low,
            seen.high, tiles, geometry(tensors), *map(addresses.index, addresses),
        )  # fmt: skip
        known = _recorded.get(key)
        if isinstance(known, Recorded):
            with self._surroundings():
                return known(tensors, device)
        if not known:
            keep(_recorded, key, known is None, _MOST_RECORDED)
            return run(*given)
        self.recording = Recording(tensors)
        try:
            found = run(*given)
            made = self.recording.finish(found)
        finally:
            self.recording = None
        if made is None or len(made.steps) > _MOST_STEPS:
            keep(_recorded, key, False, _MOST_RECORDED)
        else:
            keep(_recorded, key, made, _MOST_RECORDED)
        return found

    def _forward(self) -> _Results:
        """The pass itself, over rows of the batch and chunks; returns what `forward` does."""
        found = self._new(self.B, self.T, self.H, self.DV, dtype=self.q.dtype)
        out = found.transpose(1, 2)  # [B, H, T, DV]
        lse = self._new(self.B, self.H, self.T)
        seen = self.visibility
        kept = self._made(new_kept(self.q, self.k, seen.low, seen.high)) if self.keeps else self._new(0, 0)
        norms = self._made(new_norms(self.q, self.k))
        if lse.numel():
            with self._surroundings():
                chunks = self.chunks(maps=1)
                maps = self.kept_maps(kept, chunks)
                for rows, part in self._rows(chunks, maps=1):
                    values = part._values(norms[rows])
                    for chunk, here in zip(chunks, maps, strict=True):
                        part._forward_chunk(chunk, values, out[rows], lse[rows], [x[rows] for x in here])
        return [found, lse, kept, norms]

    def _forward_chunk(
        self, chunk: Chunk, values: States, out: torch.Tensor, lse: torch.Tensor, kept: Sequence[torch.Tensor] = ()
    ) -> None:
        pre, post = self._matrices(chunk)
        memory, weights, composed = kept or (None, None, None)
        scores = self._make_scores(chunk, memory)
        self._fill_lse(chunk, scores, pre, lse)
        if composed is None:
            composed = self._weights_in(chunk, scores)
        self._make_weights(chunk, scores, pre, post, lse, composed, weights)
        self._fill_values(chunk, composed, values, out, 2.0**-self.shift)

    def _make_weights(
        self, chunk: Chunk, scores: torch.Tensor, pre: torch.Tensor | None, post: torch.Tensor | None,
        lse: torch.Tensor, composed: torch.Tensor, weights: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Fills W, which may be in the memory of S, and P, if it is given."""
        name = "compose" if weights is None else "weights"
        tensors = {"p_scores": scores, "p_m0": pre, "p_m1": post, "p_lse": lse, "p_out": composed}
        self._compose(name, chunk, **tensors, p_weights=weights, p_mark=self._limit(Beyond.GRADIENTS)["p_mark"])

    def backward(
        self, grad_out: torch.Tensor, lse: torch.Tensor, kept: torch.Tensor, norms: torch.Tensor,
        grad_lse: torch.Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        """Gradients from those of the output [B, H, T, DV], what `forward` returned besides, and gradients of the
        log-sum-exp [B, H, T].

        Every sum has one owner and one order: the result does not change from run to run.
        """
        query, key, value, *weights = self._run_pass("backward", self._backward, grad_out, lse, kept, norms, grad_lse)
        assert query is not None and key is not None and value is not None
        return Gradients(query, key, value, stages_of(weights))

    def _backward(
        self, grad_out: torch.Tensor, lse: torch.Tensor, kept: torch.Tensor, norms: torch.Tensor,
        grad_lse: torch.Tensor | None,
    ) -> _Results:  # fmt: skip
        """The pass itself, over rows of the batch and chunks: gradients of q, k, v, and of the weights."""
        chunks = self.chunks(maps=3) if lse.numel() else []
        maps = self.kept_maps(kept, chunks)
        grads = self._new_grads(chunks)
        with self._surroundings():
            for rows, part in self._rows(chunks, maps=3) if chunks else ():
                sources = part._sources(grad_out[rows], norms[rows])
                grad_rows = None if grad_lse is None else grad_lse[rows]
                for chunk, here in zip(chunks, maps, strict=True):
                    these = [x[rows] for x in here]
                    part._backward_chunk(chunk, sources, lse[rows], grad_rows, grads.at(rows), these)
        return [grads.query, grads.key, grads.value, *grads.weights[0], *grads.weights[1]]

    def _new_grads(self, chunks: list[Chunk]) -> Gradients:
        """Memory for the gradients: zeros where chunks add to them, or where no chunk writes them."""

        def zeros(like: torch.Tensor) -> torch.Tensor:
            return self._zeros(*like.shape)

        is_covered = len(chunks) == 1 and chunks[0].s_0 == 0 and chunks[0].n_s >= self.S

        def of_keys(like: torch.Tensor) -> torch.Tensor:
            """One chunk that sees all keys writes them, several are added up."""
            if is_covered:
                return self._new(*like.shape, dtype=like.dtype)
            return self._zeros(*like.shape, dtype=torch.float32 if len(chunks) > 1 else like.dtype)

        def of_queries(like: torch.Tensor) -> torch.Tensor:
            """Each chunk writes its own."""
            return self._new(*like.shape) if chunks else zeros(like)

        def of_stage(stage: Stage) -> Stage:
            made = zip((of_queries, of_keys, zeros), stage, strict=True)
            return Stage(*(None if like is None else new(like) for new, like in made))

        pre, post = self.weights
        query = self._new(*self.q.shape, dtype=self.q.dtype)
        return Gradients(query, of_keys(self.k), of_keys(self.v), (of_stage(pre), of_stage(post)))

    def _backward_chunk(
        self, chunk: Chunk, sources: Sources, lse: torch.Tensor, grad_lse: torch.Tensor | None, grads: Gradients,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """Adds a chunk to the gradients; writes those of its queries."""
        programs = ceil_div(chunk.n_s, matrix_constants(self.layout, self.M, 1)["B_S"])
        amplified = self._new(self.B * self.G, programs)
        pre, post = self._matrices(chunk, amplified)
        # Derivative of a base 2 log-sum-exp by a composed score: a weight over ln 2. A pass with it is not recorded, as
        # a kernel takes what torch has made.
        extra = None
        if grad_lse is not None:
            these = slice(chunk.t_0, chunk.t_0 + chunk.n_t)
            is_blind = (self.visibility.first >= self.visibility.last)[:, None, these]
            extra = (grad_lse[:, :, these] / LN_2).masked_fill(is_blind, 0.0).contiguous()  # [B, H, n_t]
        scales = self._scales(chunk, sources, extra, amplified)
        if kept:
            scores, weights, composed = kept
        else:
            scores = self._make_scores(chunk)
            if self.score_dtype == torch.float32 != self.q.dtype:  # in the forward pass perhaps float16, and rounded
                lse = self._new(*lse.shape)
                self._fill_lse(chunk, scores, pre, lse)
            weights, composed = self._new_map(chunk, self.map_dtype), self._new_map(chunk, self.weight_dtype)
            self._make_weights(chunk, scores, pre, post, lse, composed, weights)
        self._add_keys(chunk, composed, sources.grad, grads.value, 2.0**-self.shift)
        del composed  # unless it is kept
        maps = self._new_map(chunk, self.grad_dtype)  # of dW, then dP, both times `scales`, then dS
        self._fill_scores(chunk, maps, self.v, sources.grad_out, 1.0, UNLIMITED, scales[0])
        grad_scores = maps.view(self.q.dtype) if self.grad_dtype == torch.bfloat16 else maps
        tensors = {"p_weights": weights, "p_grads": maps, "p_m0": pre, "p_m1": post, "p_inverse": scales[1]}
        n_parts = self._parts("back_1", chunk)[0]
        sum_parts = self._new(n_parts, 2, self.B, self.H, chunk.n_t)
        self._back(1, chunk, grads, scales, n_parts, p_sums=sum_parts, p_out=maps, **tensors)
        sums = self._new(*sum_parts.shape[1:])  # of P dP and of P
        self._do(add_up, sum_parts, sums)
        del sum_parts
        if extra is not None:
            of_heads = scales[0].view(self.B, self.G, -1).repeat_interleave(self.M, 1)  # [B, H, blocks]
            sums[0] -= extra * of_heads.repeat_interleave(self.block, 2)[:, :, : chunk.n_t] * sums[1]
        n_parts = self._parts("back_0", chunk)[0]
        is_scaled = self.grad_dtype == torch.float16
        outputs = {"p_out": grad_scores, "p_sums": sums}
        constants: dict[str, Any] = {"factor": LN_2, "SCALED": is_scaled}
        self._back(0, chunk, grads, scales, n_parts, p_scores=scores, **constants, **outputs, **tensors)
        grad_scales = scales if is_scaled else None
        self._fill_values(chunk, grad_scores, sources.key, grads.query, self.scale, grad_scales)
        self._add_keys(chunk, grad_scores, sources.query, grads.key, self.scale, grad_scales)

    def _back(
        self, stage: int, chunk: Chunk, grads: Gradients, scales: torch.Tensor, n_parts: int, **tensors: Any
    ) -> None:
        """Takes a chunk's gradients back through a stage, and adds to those of its weights."""
        name, flags = f"back_{stage}", self.layout.post if stage else self.layout.pre
        side_parts, matrix_parts = None, None
        if flags & Part.QUERY:
            side_parts = self._new(n_parts, self.B, self.H, self.layout.channels, chunk.n_t)
        if flags & (Part.KEY | Part.STATIC):
            side, tiles = matrix_side(self.M), ceil_div(chunk.n_t, self._tile(name).b_t)
            dtype = torch.float32 if self.sums_exactly and stage == 0 else self.grad_dtype
            matrix_parts = self._new(tiles, self.B * self.G, chunk.n_s, side, side, dtype=dtype)
        self._compose(name, chunk, p_gwq=side_parts, p_gm=matrix_parts, **tensors)
        if side_parts is not None and (side := grads.weights[stage].query) is not None:
            self._do(add_up, side_parts, side[..., chunk.t_0 : chunk.t_0 + chunk.n_t])
        if matrix_parts is not None:
            self._project(stage, chunk, matrix_parts, scales, grads)


__all__ = ["Passes"]
