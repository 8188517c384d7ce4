"""A head view in one HTML file: tokens left and right, lines of weights between them, and what each entry is made of.

The file holds plain scores and attention weights, and what they are composed with; the page composes them itself, as
`compose` does. It needs no network and no framework.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DCFormerError
from .layers import chosen
from .tracing import STAGES, AnalysisTrace, LayerAnalysis

MAX_TOKENS = 256
_TEMPLATE = Path(__file__).with_name("head_view.html")


def _floats(tensor: torch.Tensor) -> str:
    """Base64 of a tensor's numbers: float32, little-endian, row by row."""
    return base64.b64encode(tensor.detach().cpu().float().contiguous().numpy().astype("<f4").tobytes()).decode()


def _bits(tensor: torch.Tensor) -> str:
    return base64.b64encode(np.packbits(tensor.cpu().numpy().flatten(), bitorder="little").tobytes()).decode()


def _stage(layer: LayerAnalysis, stage: str, batch: int, rows: list[int], visible: torch.Tensor) -> dict[str, Any]:
    before = layer.maps(stage)[0][batch, :, rows].cpu()  # [H, N, S]
    weights = layer.composition(stage)
    found: dict[str, Any] = {"before": _floats(before[:, visible])}
    if weights is None:
        return found
    found["groups"] = weights.groups
    if weights.static is not None:
        found["static"] = _floats(weights.static)
    for name, side in (("query", weights.query), ("key", weights.key)):
        if side is not None:
            packed = side.by_head[batch]  # [H, channels, tokens]
            packed = packed[:, :, rows] if name == "query" else packed
            found[name] = {"rank": side.rank, "channels": packed.shape[1], "packed": _floats(packed)}
    return found


def head_view(
    trace: AnalysisTrace,
    tokens: Sequence[str] | None = None,
    positions: Iterable[int] | None = None,
    batch: int = 0,
    title: str = "Heads, composed",
) -> str:
    """A page to look at composed heads with.

    Args:
        trace: of `dcformer.analysis.trace`.
        tokens: a label for each token; those of the trace by default.
        positions: query positions to show; all that were kept by default.
        batch: index of the sequence.
        title: of the page.

    Returns:
        HTML. Numbers of entries that a query sees are in it, in float32: `before`, the scores or attention weights
        [H, entries]; composition weights as `SideWeights.packed` has them.

    Raises:
        DCFormerError: on more than 256 queries, and labels that do not fit.
    """
    labels = trace.labels(batch, tokens)
    shown = list(trace.positions) if positions is None else chosen(positions, trace.length, "position")
    if len(shown) > MAX_TOKENS:
        raise DCFormerError(
            f"{len(shown)} queries: the page shows at most {MAX_TOKENS}. Name some with positions=, here or for trace."
        )
    rows = [trace.row(position) for position in shown]
    layers = []
    for number, layer in trace.layers.items():
        visible = trace.visible(number, batch)[rows]  # [N, S]
        stages = {stage: _stage(layer, stage, batch, rows, visible) for stage in STAGES}
        layers.append({"number": number, "heads": layer.z.shape[2], "visible": _bits(visible), **stages})
    data = {"title": title, "tokens": labels, "positions": shown, "layers": layers}
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("</", "<\\/").replace("<!", "<\\u0021")
    page = _TEMPLATE.read_text(encoding="utf-8")
    safe = title.replace("&", "&amp;").replace("<", "&lt;")
    return page.replace("__TITLE__", safe).replace("__DATA__", text)


__all__ = ["MAX_TOKENS", "head_view"]
