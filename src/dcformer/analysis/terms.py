"""A composed entry as a sum of named terms (paper section 3.1 and Figure 7).

Per query t and key s, composition is one H×H map, from head j (row) to head m (column):

    C = I + static + Σ_r q1 q2ᵀ + diag(q gate) + Σ_r k1 k2ᵀ + diag(k gate)        A'[m] = Σ_j A[j] C[j, m]

Everything here is computed in float64, on the CPU.
Letters: B batch, N queries that were kept, S keys, H heads, R rank, G groups, M heads of a group.
"""

from dataclasses import dataclass

import torch

from ..compose_dcformer import ComposeWeights, SideWeights
from ..errors import DCFormerError
from .layers import chosen
from .tracing import AnalysisTrace

TERMS = ("input", "static", "q_proj", "q_gate", "k_proj", "k_gate")


def term_maps(
    weights: ComposeWeights | None, heads: int, batch: int, queries: torch.Tensor, keys: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The maps of all terms, each [queries or 1, keys or 1, H, H] in float64; their sum over terms is C.

    Args:
        weights: of a stage; None for no composition.
        heads: H.
        batch: index of the sequence.
        queries, keys: indices into the tokens of the query-wise and of the key-wise weights.
    """
    maps = {term: torch.zeros(1, 1, heads, heads, dtype=torch.float64) for term in TERMS}
    maps["input"] = torch.eye(heads, dtype=torch.float64)[None, None]
    if weights is None:
        return maps
    same_group = torch.block_diag(*[torch.ones(heads // weights.groups, heads // weights.groups)] * weights.groups)
    if weights.static is not None:
        maps["static"] = torch.block_diag(*weights.static.double().cpu())[None, None]
    for letter, side, tokens, dim in (("q", weights.query, queries, 1), ("k", weights.key, keys, 0)):
        if side is None:
            continue
        packed = side.by_head[batch, :, :, tokens].double().cpu()  # [H, channels, tokens]
        chosen_side = SideWeights(packed[None])
        if chosen_side.down is not None and chosen_side.up is not None:
            low_rank = torch.einsum("jnr,mnr->njm", chosen_side.down[0], chosen_side.up[0])  # [tokens, H, H]
            maps[f"{letter}_proj"] = (low_rank * same_group).unsqueeze(dim)
        if chosen_side.gate is not None:
            maps[f"{letter}_gate"] = torch.diag_embed(chosen_side.gate[0].T).unsqueeze(dim)
    return maps


@dataclass
class Projection:
    """A low-rank projection at one query and key.

    Attributes:
        down: [H, R], from heads to hidden components.
        hidden: [R], the components: Σ_j A[j] down[j]. With several groups [G, R], each of its own heads.
        up: [H, R], back to heads.
    """

    down: torch.Tensor
    hidden: torch.Tensor
    up: torch.Tensor


@dataclass
class Breakdown:
    """One entry of a composed map, per head, as the sum of six terms.

    Attributes:
        layer, stage, t, s: which entry.
        before, after: [H], as traced: scores of stage "pre", attention weights of stage "post".
        terms: "input", "static", "q_proj", "q_gate", "k_proj", "k_gate" -> [H]; they add up to `after`.
        sources: the same names -> [H, H]: what head j (row) gives head m (column); columns add up to the terms.
        projections: "q_proj", "k_proj" -> `Projection`; only the sides in use.
    """

    layer: int
    stage: str
    t: int
    s: int
    before: torch.Tensor
    after: torch.Tensor
    terms: dict[str, torch.Tensor]
    sources: dict[str, torch.Tensor]
    projections: dict[str, Projection]

    def largest(self, head: int) -> tuple[str, int]:
        """The term, and the source head within it, that changes a head's entry most."""
        changes = {term: sources[:, head].abs() for term, sources in self.sources.items() if term != "input"}
        term = max(changes, key=lambda name: changes[name].max().item())
        return term, int(changes[term].argmax())


def _at(trace: AnalysisTrace, t: int, s: int, batch: int) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    (key,) = chosen([s], trace.length, "key position")
    chosen([batch], len(trace.real), "batch index")
    row = trace.row(t)
    return row, key, torch.tensor([row]), torch.tensor([key])


def compose_map(trace: AnalysisTrace, layer: int, stage: str, t: int, s: int, batch: int = 0) -> torch.Tensor:
    """The map C from heads to heads at one query and key.

    Args:
        trace: of `dcformer.analysis.trace`.
        layer: its number.
        stage: "pre" or "post".
        t, s: positions of query and key; negative ones count from the end. A key that the query does not see
            (`trace.visible`) has a map and scores as well, which no softmax uses; its weights are 0.
        batch: index of the sequence.

    Returns:
        [H, H] in the maps' dtype, from head (row) to head (column).

    Raises:
        DCFormerError: on numbers out of range, or that were not traced.
    """
    analysis = trace.layer(layer)
    _, _, query, key = _at(trace, t, s, batch)
    before, _ = analysis.maps(stage)
    maps = term_maps(analysis.composition(stage), before.shape[1], batch, query, key)
    return torch.stack([part[0, 0] for part in maps.values()]).sum(0).to(before.dtype)


def breakdown(trace: AnalysisTrace, layer: int, stage: str, t: int, s: int, batch: int = 0) -> Breakdown:
    """Names what composition added to one entry of a map, per head.

    Args, errors: as of `compose_map`. A model without composition has zeros in all terms but "input".

    Returns:
        `Breakdown`, in the maps' dtype.
    """
    analysis = trace.layer(layer)
    row, s, query, key = _at(trace, t, s, batch)
    before, after = (maps[batch, :, row, s].cpu() for maps in analysis.maps(stage))  # [H]
    weights, dtype = analysis.composition(stage), before.dtype
    maps = term_maps(weights, len(before), batch, query, key)
    sources = {term: before.double()[:, None] * matrix[0, 0] for term, matrix in maps.items()}  # [H, H]
    projections = {}
    if weights is not None:
        for name, side, token in (("q_proj", weights.query, row), ("k_proj", weights.key, s)):
            if side is None or side.down is None or side.up is None:
                continue
            down, up = (part[batch, :, token].double().cpu() for part in (side.down, side.up))  # [H, R]
            hidden = (before.double()[:, None] * down).unflatten(0, (weights.groups, -1)).sum(1)  # [G, R]
            hidden = hidden[0] if weights.groups == 1 else hidden
            projections[name] = Projection(down.to(dtype), hidden.to(dtype), up.to(dtype))
    return Breakdown(
        layer=trace.number(layer),
        stage=stage,
        t=trace.positions[row],
        s=s,
        before=before,
        after=after,
        terms={term: part.sum(0).to(dtype) for term, part in sources.items()},
        sources={term: part.to(dtype) for term, part in sources.items()},
        projections=projections,
    )


def component_over_keys(
    trace: AnalysisTrace,
    layer: int,
    stage: str,
    side: str,
    rank: int,
    heads: int | list[int] | None = None,
    part: str = "down",
    batch: int = 0,
) -> torch.Tensor:
    """One component of a low-rank projection along the sequence (paper Figure 8).

    Args:
        trace, layer, stage, batch: as of `compose_map`.
        side: "key", over the S keys, or "query", over the positions that were kept.
        rank: which component, from 0.
        heads: which heads; all by default.
        part: "down" or "up".

    Returns:
        [heads, S] (or [heads, N] for queries).

    Raises:
        DCFormerError: where there is no such projection.
    """
    if side not in ("query", "key") or part not in ("down", "up"):
        raise DCFormerError(f"side={side!r}, part={part!r}: expected 'query' or 'key', and 'down' or 'up'.")
    weights = trace.layer(layer).composition(stage)
    of_side = None if weights is None else getattr(weights, side)
    values = None if of_side is None else getattr(of_side, part)
    if values is None:
        raise DCFormerError(f"layer {layer} has no {side}-wise low-rank projection in stage {stage!r}.")
    (rank,), (batch,) = chosen([rank], values.shape[-1], "rank"), chosen([batch], len(values), "batch index")
    return values[batch, chosen(heads, values.shape[1], "head"), :, rank]


__all__ = ["TERMS", "Breakdown", "Projection", "breakdown", "component_over_keys", "compose_map", "term_maps"]
