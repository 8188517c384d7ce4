"""How different the attention maps of a layer's heads are, on a text.

Letters: B batch, N queries that were kept, S keys, H heads.
"""

import torch

from ..errors import DCFormerError
from .tracing import MAPS, AnalysisTrace


def map_diversity(trace: AnalysisTrace, which: str, metric: str = "js") -> torch.Tensor:
    """The mean difference of two heads' attention, per layer.

    Args:
        trace: of `dcformer.analysis.trace`.
        which: the maps: "scores", "composed_scores", "weights" or "composed_weights".
        metric: "js", the Jensen-Shannon divergence in nats, from 0 to ln 2, of `weights` only; or "cosine", 1 - cosine
            of two heads' rows, of any map. Means are over pairs of heads, queries and sequences. Padding, queries that
            see one key only and, for "cosine", rows of zeros are left out; scores count where they are visible.

    Returns:
        [layers] in float64, in the order of `trace.layers`; NaN where no row is left.

    Raises:
        DCFormerError: on unknown names, and for the divergence of maps that are not probabilities.
    """
    if which not in MAPS:
        raise DCFormerError(f"which={which!r} is unknown: expected one of {MAPS}.")
    if metric not in ("js", "cosine"):
        raise DCFormerError(f"metric={metric!r} is unknown: expected 'js' or 'cosine'.")
    if metric == "js" and which != "weights":
        raise DCFormerError(
            f"metric='js' compares probabilities, and {which} are none (rows need not add up to 1, entries may be "
            "negative): take which='weights', or metric='cosine'."
        )
    results = []
    for number, layer in trace.layers.items():
        visible = trace.visible_rows(number)  # [B, N, S]
        maps = getattr(layer, which).double().cpu() * visible[:, None]  # [B, H, N, S]
        rows = maps.transpose(1, 2)[visible.sum(-1) > 1]  # [rows, H, S]
        results.append(_divergence(rows) if metric == "js" else _cosine_distance(rows))
    return torch.stack(results)


def _pairs(heads: int) -> torch.Tensor:
    return torch.triu_indices(heads, heads, 1)


def _divergence(rows: torch.Tensor) -> torch.Tensor:
    """Mean Jensen-Shannon divergence of the heads of [rows, H, S]."""
    entropy = torch.special.entr(rows).sum(-1)  # [rows, H]
    first, second = _pairs(rows.shape[1])
    parts = [
        torch.special.entr((rows[:, a] + rows[:, b]) / 2).sum(-1) - (entropy[:, a] + entropy[:, b]) / 2
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    ]
    return torch.stack(parts).mean() if parts else rows.new_tensor(float("nan"))


def _cosine_distance(rows: torch.Tensor) -> torch.Tensor:
    """1 - mean cosine of the heads of [rows, H, S]."""
    norms = rows.norm(dim=-1)  # [rows, H]
    first, second = _pairs(rows.shape[1])
    both = (norms[:, first] > 0) & (norms[:, second] > 0)  # [rows, pairs]
    units = rows / norms.clamp(min=torch.finfo(rows.dtype).tiny)[..., None]
    cosines = (units @ units.mT)[:, first, second]
    return 1 - cosines[both].mean()


__all__ = ["map_diversity"]
