"""Composition of a whole text in a few figures per layer and stage.

Letters: N queries that were kept, S keys, H heads.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm

from .terms import TERMS, term_maps
from .tracing import STAGES, AnalysisTrace


@dataclass
class StageSummary:
    """Means over the visible keys of all real queries of a layer's stage.

    Attributes:
        layer, stage: which.
        deviation: mean ‖C - I‖_F / √H: how far composition is from leaving heads alone.
        shares: term -> its share of E|A' - A|: E[term · sign(A' - A)] / E|A' - A|. They add up to 1 (0 without
            composition); a term that works against the others has a negative share.
        magnitudes: term -> E|term|, without regard to what the others do.
        inflow: [H], mean Σ_{j≠m} |C[j, m]|: how much head m takes from others.
        outflow: [H], mean Σ_{m≠j} |C[j, m]|: how much head j gives to others.
        mean_map: [H, H], mean of C - I.
        flow: [H, H], Σ |A_j C[j, m]| over queries and keys, divided by its sum: head j's pattern used by head m's
            circuit. Of stage "post"; None for "pre", whose maps are scores.
        borrowed: the off-diagonal share of `flow`; None for "pre".
        row_sum: mean sum of a row of composed weights; None for "pre".
        most_negative: the least composed weight; None for "pre".
    """

    layer: int
    stage: str
    deviation: float
    shares: dict[str, float]
    magnitudes: dict[str, float]
    inflow: torch.Tensor
    outflow: torch.Tensor
    mean_map: torch.Tensor
    flow: torch.Tensor | None = None
    borrowed: float | None = None
    row_sum: float | None = None
    most_negative: float | None = None


def composition_summary(trace: AnalysisTrace) -> list[StageSummary]:
    """What composition did, per layer and stage.

    Args:
        trace: of `dcformer.analysis.trace`.

    Returns:
        `StageSummary`s: layer by layer, "pre" and then "post". Padding and keys that a query does not see are left out.
    """
    work = [(number, stage) for number in trace.layers for stage in STAGES]
    return [_summarize(trace, *at) for at in tqdm(work, desc="summary", leave=False, delay=2)]


def _summarize(trace: AnalysisTrace, number: int, stage: str) -> StageSummary:
    layer = trace.layers[number]
    before, after = layer.maps(stage)
    batch, heads = before.shape[:2]
    weights = layer.composition(stage)
    visible = trace.visible_rows(number)  # [B, N, S]
    count, deviation, change = 0, 0.0, 0.0
    signed, magnitude = dict.fromkeys(TERMS[1:], 0.0), dict.fromkeys(TERMS[1:], 0.0)
    total = torch.zeros(heads, heads, dtype=torch.float64)
    absolute, flow = torch.zeros_like(total), torch.zeros_like(total)
    for b in range(batch):
        for row in range(before.shape[2]):
            keys = visible[b, row].nonzero()[:, 0]
            if not len(keys):
                continue
            maps = {
                term: part.expand(1, len(keys), heads, heads)[0].cpu()
                for term, part in term_maps(weights, heads, b, torch.tensor([row]), keys).items()
            }  # [S, H, H]
            given = before[b, :, row, keys].double().cpu().T  # [S, H]
            added = torch.stack([maps[term] for term in TERMS[1:]]).sum(0)
            difference = torch.einsum("sj,sjm->sm", given, added)  # A' - A
            for term in TERMS[1:]:
                part = torch.einsum("sj,sjm->sm", given, maps[term])
                signed[term] += (part * difference.sign()).sum().item()
                magnitude[term] += part.abs().sum().item()
            change += difference.abs().sum().item()
            deviation += added.flatten(1).norm(dim=1).sum().item()
            whole = (added + maps["input"]).abs()
            total += added.sum(0)
            absolute += whole.sum(0)
            flow += (given.abs()[:, :, None] * whole).sum(0)
            count += len(keys)
    count = max(count, 1)
    others = (absolute / count).fill_diagonal_(0)
    summary = StageSummary(
        number,
        stage,
        deviation=deviation / count / heads**0.5,
        shares={term: value / change if change else 0.0 for term, value in signed.items()},
        magnitudes={term: value / (count * heads) for term, value in magnitude.items()},
        inflow=others.sum(0),
        outflow=others.sum(1),
        mean_map=total / count,
    )
    if stage == "post":
        summary.flow = flow / flow.sum().clamp(min=torch.finfo(flow.dtype).tiny)
        summary.borrowed = (summary.flow.sum() - summary.flow.diagonal().sum()).item()
        rows = visible.any(-1)[:, None].expand(batch, heads, -1)
        summary.row_sum = after.double().cpu().sum(-1)[rows].mean().item()
        seen = after.double().cpu().movedim(1, -1)[visible]  # [entries, H]
        summary.most_negative = seen.min().item() if len(seen) else float("nan")
    return summary


__all__ = ["StageSummary", "composition_summary"]
