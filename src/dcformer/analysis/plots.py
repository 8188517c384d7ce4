"""Figures of what composed heads do. Each function returns a `matplotlib.figure.Figure` and touches no global state.

All take `theme`, "light" or "dark". Colors are of Okabe and Ito's palette, which color-blind people can tell apart,
and never alone: lines differ in their dashes, bars in their hatches, and negative cells of heat maps bear a minus sign
or their number. Composed maps are not probabilities, so signed quantities share one map of colors, centered at 0; its
scale is printed beside it, and nothing is normalized. A dollar sign of a token or a name stands for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import DCFormerError, require_extra
from .diversity import Diversity
from .layers import chosen
from .summary import StageSummary
from .terms import TERMS, Breakdown, component_over_keys
from .tracing import AnalysisTrace

Figure = Any  # matplotlib.figure.Figure, which is imported when one is made

FONT = 11  # points
MINUS = "\N{MINUS SIGN}"  # wider than a hyphen
LABELS = {
    "input": "input",
    "static": "static",
    "q_proj": "query proj.",
    "q_gate": "query gate",
    "k_proj": "key proj.",
    "k_gate": "key gate",
}
MAP_NAMES = {
    "pre": ("scores", "composed scores"),
    "post": ("attention weights", "composed weights"),
}
_HATCHES = {"input": "", "static": "xx", "q_proj": "", "q_gate": "//", "k_proj": "..", "k_gate": "\\\\"}
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Theme:
    """Colors of a figure: its ground, text, lines that only help, what is positive and negative, and series."""

    ground: str
    ink: str
    quiet: str
    positive: str
    negative: str
    series: tuple[str, ...]


THEMES = {
    "light": Theme(
        "#ffffff", "#1a1a1a", "#c9c9c9", "#00518f", "#b34700",
        ("#0072B2", "#D55E00", "#007a5a", "#9c4f80", "#8a6d00", "#3d3d3d"),
    ),
    "dark": Theme(
        "#16181d", "#f0f0f0", "#4a4e57", "#6cc0f5", "#ff9d4d",
        ("#56B4E9", "#E69F00", "#35c99b", "#e39ac4", "#F0E442", "#d5d5d5"),
    ),
}  # fmt: skip


def _theme(name: str) -> Theme:
    if name not in THEMES:
        raise DCFormerError(f"theme={name!r} is unknown: expected 'light' or 'dark'.")
    return THEMES[name]


def _figure(theme: Theme, width: float, height: float) -> Figure:
    require_extra("analysis", "a figure", "matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=theme.ground, layout="constrained")


def _dress(axes: Any, theme: Theme, title: str = "", x: str = "", y: str = "", loc: str = "center") -> None:
    """Colors, sizes and names of an axes; wide ones have their title on the left, where they are seen first."""
    axes.set_facecolor(theme.ground)
    axes.set_title(title, color=theme.ink, fontsize=FONT + 1, loc=loc, parse_math=False)
    axes.set_xlabel(x, color=theme.ink, fontsize=FONT)
    axes.set_ylabel(y, color=theme.ink, fontsize=FONT)
    axes.tick_params(colors=theme.ink, labelsize=FONT)
    for spine in axes.spines.values():
        spine.set_color(theme.quiet)


def _diverging(theme: Theme) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("sign", [theme.negative, theme.ground, theme.positive])


def _readable(image: Any, value: float, theme: Theme) -> str:
    """The theme's ink or ground, whichever stands out more from the color of a value."""

    def luminance(rgb: Any) -> float:
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb[:3]]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    from matplotlib.colors import to_rgb

    behind = luminance(image.cmap(image.norm(value))) + 0.05
    ratios = {ink: (luminance(to_rgb(ink)) + 0.05) / behind for ink in (theme.ink, theme.ground)}
    return max(ratios, key=lambda ink: max(ratios[ink], 1 / ratios[ink]))


def _heat(axes: Any, values: Any, theme: Theme, limit: float | None = None, numbers: bool | None = None) -> Any:
    """A heat map of signed values, centered at 0; negative cells bear a minus or, where there is room, the number."""
    values = np.asarray(values, dtype=float)
    limit = float(np.abs(values).max() if limit is None else limit) or 1.0
    image = axes.imshow(values, cmap=_diverging(theme), vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    numbers = values.size <= 80 if numbers is None else numbers
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if numbers:
            text = f"{value:.2g}" if abs(value) >= 0.005 * limit else "0"
        elif value < -0.04 * limit:
            text = MINUS
        else:
            continue
        color = _readable(image, value, theme)
        weight = "normal" if numbers else "bold"
        size = FONT - 1 if numbers else FONT + 3
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=size, weight=weight)
    return image


def _scale(figure: Figure, image: Any, axes: Any, theme: Theme, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label(label, color=theme.ink, fontsize=FONT)
    bar.ax.tick_params(colors=theme.ink, labelsize=FONT - 1)
    bar.outline.set_edgecolor(theme.quiet)


def _legend(place: Any, theme: Theme, **options: Any) -> None:
    """Of an axes, or of a figure."""
    legend = place.legend(fontsize=FONT, labelcolor=theme.ink, facecolor=theme.ground, edgecolor=theme.quiet, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _heads(axes: Any, numbers: Sequence[int]) -> None:
    axes.set_yticks(range(len(numbers)), [str(number) for number in numbers])


def diversity_curves(models: Mapping[str, tuple[Diversity, Diversity]], theme: str = "light") -> Figure:
    """Captured variance over the number of directions, of QK and OV circuits (paper Figure 5).

    Args:
        models: name -> its diversities (QK, OV), all of one form. A thin line is a layer, a thick one their mean.

    Raises:
        DCFormerError: on no model, on several forms, and on circuits in another order.
    """
    colors = _theme(theme)
    forms = {found.form for pair in models.values() for found in pair}
    if len(forms) != 1 or any((qk.circuit, ov.circuit) != ("qk", "ov") for qk, ov in models.values()):
        raise DCFormerError(
            f"{len(models)} models with diversities of the forms {sorted(forms)}: expected one at least, each with its "
            "circuits (QK, OV), and one form."
        )
    figure = _figure(colors, 10, 4.2)
    for place, circuit in enumerate(("QK", "OV")):
        axes = figure.add_subplot(1, 2, place + 1)
        for number, (name, pair) in enumerate(models.items()):
            found, color = pair[place], colors.series[number % len(colors.series)]
            k = np.arange(1, found.curves.shape[1] + 1)
            axes.plot(k, found.curves.T.numpy(), color=color, linewidth=0.7, alpha=0.45)
            label = f"{name}: area {found.area.mean():.3f}, k90 {found.k90.double().mean():.0f}"
            axes.plot(k, found.mean.numpy(), color=color, linewidth=2.6, linestyle=_DASHES[number % 4], label=label)
        axes.set_ylim(0, 1.02)
        axes.grid(color=colors.quiet, linewidth=0.5)
        _dress(axes, colors, f"{circuit} circuits, form “{next(iter(forms))}”", "directions k", "captured variance")
        _legend(axes, colors)
    return figure


def breakdown_strip(found: Breakdown, tokens: Sequence[str] | None = None, theme: str = "light") -> Figure:
    """One entry, per head: before, hidden components and `up` of both projections, six terms, after (paper Figure 7).

    Args:
        found: of `breakdown`.
        tokens: labels of all tokens, to name the pair in the title.

    Raises:
        DCFormerError: on fewer tokens than the entry's positions.
    """
    colors = _theme(theme)
    columns: list[tuple[str, torch.Tensor]] = [("before", found.before)]
    for name, projection in found.projections.items():
        rank = projection.down.shape[1]
        columns += [(f"{name[0]} down {r}", projection.down[:, r]) for r in range(rank)]
        columns += [(f"{name[0]} up {r}", projection.up[:, r]) for r in range(rank)]
    first_term = len(columns)
    columns += [(LABELS[term], found.terms[term]) for term in TERMS] + [("after", found.after)]
    heads = len(found.before)
    figure = _figure(colors, 1.6 + 0.78 * len(columns), 2.6 + 0.36 * heads)
    values = torch.stack([column for _, column in columns], dim=1).float()  # [H, columns]
    groups = ([0], list(range(1, first_term)), list(range(first_term, len(columns))))
    maps_limit = float(values[:, groups[0] + groups[2]].abs().max()) or 1.0
    parts_limit = float(values[:, groups[1]].abs().max()) if groups[1] else 1.0
    axes = figure.add_subplot()
    scaled = values.clone()  # colored on two scales, each printed with its numbers
    scaled[:, groups[1]] *= maps_limit / (parts_limit or 1.0)
    image = axes.imshow(scaled.numpy(), cmap=_diverging(colors), vmin=-maps_limit, vmax=maps_limit, aspect="auto")
    for head in range(heads):
        for column in range(len(columns)):
            ink = _readable(image, float(scaled[head, column]), colors)
            number = float(values[head, column])
            text = "0" if abs(number) < 0.005 else f"{number:.2f}" if abs(number) < 99.5 else f"{number:.0f}"
            axes.text(column, head, text, ha="center", va="center", color=ink, fontsize=FONT - 1)
    for edge in (0.5, first_term - 0.5, len(columns) - 1.5):
        axes.axvline(edge, color=colors.ink, linewidth=1.5)
    axes.set_xticks(range(len(columns)), [name for name, _ in columns], rotation=40, ha="right")
    _heads(axes, range(heads))
    pair = f"query {found.t}, key {found.s}"
    if tokens is not None:
        chosen([found.t, found.s], len(tokens), "position")
        pair = f"query {tokens[found.t]!r} ({found.t}), key {tokens[found.s]!r} ({found.s})"
    hidden = "; ".join(
        f"{name[0]} hidden " + ", ".join(f"{x:.2f}" for x in projection.hidden.flatten().tolist())
        for name, projection in found.projections.items()
    )
    title = f"Layer {found.layer}, {MAP_NAMES[found.stage][0]}: {pair}"
    note = "colors: one scale for down and up, one for the rest" if hidden else ""
    _dress(axes, colors, f"{title}\n{hidden}" if hidden else title, note, "head")
    return figure


def attention_rows(
    trace: AnalysisTrace,
    layer: int,
    stage: str,
    t: int,
    heads: Sequence[int] | None = None,
    component: tuple[str, int, str] | None = None,
    tokens: Sequence[str] | None = None,
    batch: int = 0,
    theme: str = "light",
) -> Figure:
    """One query's rows of a map before and after composition, and a component of `down` or `up` (paper Figure 8).

    Args:
        trace, layer, stage, t, batch: as of `compose_map`.
        heads: which; all by default.
        component: (side, rank, "down" or "up") drawn below, along the sequence; None for nothing.
        tokens: labels; those of the trace by default.

    Keys before the first and after the last one that the query sees are left out.
    """
    colors, layer = _theme(theme), trace.number(layer)
    labels = ["\\n" if token == "\n" else token for token in trace.labels(batch, tokens)]
    row = trace.row(t)
    before, after = (maps[batch, :, row].float().cpu() for maps in trace.layer(layer).maps(stage))  # [H, S]
    numbers = chosen(heads, before.shape[0], "head")
    visible = trace.visible(layer, batch)[row]  # [S]
    seen = [trace.positions[row], *visible.nonzero()[:, 0].tolist()]
    keys = range(min(seen), max(seen) + 1)
    count = 2 + (component is not None)
    figure = _figure(colors, min(60.0, max(7.0, 1.8 + 0.36 * len(keys))), 1.0 + count * (1.1 + 0.3 * len(numbers)))
    for place, (name, values) in enumerate(zip(MAP_NAMES[stage], (before, after), strict=True)):
        axes = figure.add_subplot(count, 1, place + 1)
        image = _heat(axes, (values[numbers] * visible)[:, keys], colors, numbers=False)
        _heads(axes, numbers)
        _ticks(axes, [labels[key] for key in keys])
        _dress(axes, colors, f"Layer {layer}, query {labels[trace.positions[row]]!r}: {name}", "", "head", loc="left")
        _scale(figure, image, axes, colors, name)
    if component is not None:
        side, rank, part = component
        values = component_over_keys(trace, layer, stage, side, rank, numbers, part, batch).float().cpu()
        at = list(range(trace.length)) if side == "key" else trace.positions
        shown = [place for place, position in enumerate(at) if position in keys]
        axes = figure.add_subplot(count, 1, 3)
        image = _heat(axes, values[:, shown], colors, numbers=False)
        _heads(axes, numbers)
        _ticks(axes, [labels[at[place]] for place in shown])
        _dress(axes, colors, f"{side}-wise {part}, component {rank}, along the sequence", "", "head", loc="left")
        _scale(figure, image, axes, colors, part)
    return figure


def _ticks(axes: Any, labels: Sequence[str]) -> None:
    step = max(1, len(labels) // 80)
    shown = range(0, len(labels), step)
    axes.set_xticks(shown, [labels[i] for i in shown], rotation=60, ha="right", parse_math=False)


def _some(summary: Sequence[StageSummary]) -> Sequence[StageSummary]:
    if not summary:
        raise DCFormerError("the summary is empty: expected what composition_summary returns.")
    return summary


def mean_maps(summary: Sequence[StageSummary], theme: str = "light") -> Figure:
    """The mean map from heads to heads, identity subtracted, per layer (columns) and stage (rows)."""
    colors, summary = _theme(theme), _some(summary)
    stages = [stage for stage in MAP_NAMES if any(one.stage == stage for one in summary)]
    layers = sorted({one.layer for one in summary})
    size = max(2.7, 0.34 * summary[0].mean_map.shape[0])
    figure = _figure(colors, 1.0 + (size + 0.9) * len(layers), 0.4 + (size + 0.7) * len(stages))
    for one in summary:
        axes = figure.add_subplot(
            len(stages), len(layers), stages.index(one.stage) * len(layers) + layers.index(one.layer) + 1
        )
        image = _heat(axes, one.mean_map.numpy(), colors, numbers=False)
        heads = range(one.mean_map.shape[0])
        axes.set_xticks(heads, [str(head) for head in heads])
        _heads(axes, heads)
        is_first, is_last = one.layer == layers[0], one.layer == layers[-1]
        _dress(axes, colors, f"layer {one.layer}, {one.stage}", "to head", "from head" if is_first else "")
        _scale(figure, image, axes, colors, "mean of C - I" if is_last else "")
    return figure


def term_shares(summary: Sequence[StageSummary], theme: str = "light") -> Figure:
    """The share of each term in what composition changes, per layer and stage; shares add up to 1."""
    colors, summary = _theme(theme), _some(summary)
    terms = [term for term in TERMS[1:] if any(one.shares[term] for one in summary)] or list(TERMS[1:])
    figure = _figure(colors, max(7.5, 2.0 + 1.25 * len(summary)), 4.8)
    axes = figure.add_subplot()
    width = 0.8 / len(terms)
    for number, term in enumerate(terms):
        at = np.arange(len(summary)) + (number - (len(terms) - 1) / 2) * width
        heights = [one.shares[term] for one in summary]
        bars = axes.bar(
            at, heights, width, label=LABELS[term], hatch=_HATCHES[term], edgecolor=colors.ground,
            color=colors.series[TERMS.index(term) - 1],
        )  # fmt: skip
        labels = [f"{height:.0%}" for height in heights]
        axes.bar_label(bars, labels, color=colors.ink, fontsize=FONT - 1, padding=2, rotation=90)
    axes.axhline(0, color=colors.ink, linewidth=1)
    axes.margins(y=0.2)  # room for the numbers
    axes.set_xticks(range(len(summary)), [f"layer {one.layer}\n{one.stage}" for one in summary])
    _dress(axes, colors, "Share of each term in E|A' - A|", "", "share")
    _legend(figure, colors, ncols=len(terms), loc="outside lower center")
    return figure


def attribution_heatmap(scores: torch.Tensor, target: str = "the target", theme: str = "light") -> Figure:
    """What each head contributed to an output.

    Args:
        scores: [L, H], of `attribute_heads`.
        target: what they were attributed for, for the title.
    """
    if scores.ndim != 2:
        raise DCFormerError(f"scores of shape {tuple(scores.shape)}: expected [L, H]; add up the positions.")
    colors = _theme(theme)
    figure = _figure(colors, 2.4 + 0.75 * scores.shape[1], 1.7 + 0.5 * scores.shape[0])
    axes = figure.add_subplot()
    image = _heat(axes, scores.numpy(), colors, numbers=scores.numel() <= 512)
    axes.set_xticks(range(scores.shape[1]))
    axes.set_yticks(range(scores.shape[0]))
    _dress(axes, colors, f"Contribution to the logit of {target!r}: {scores.sum():.2f} in all", "head", "layer")
    _scale(figure, image, axes, colors, "logits")
    return figure


def accuracy_bars(accuracies: Mapping[str, float], theme: str = "light", title: str = "") -> Figure:
    """Accuracies of a case study: one bar per intervention.

    Args:
        accuracies: what was done -> share of right answers, in the order to show.
        title: of the figure.
    """
    colors = _theme(theme)
    figure = _figure(colors, 9, 0.9 + 0.42 * len(accuracies))
    axes = figure.add_subplot()
    names = list(accuracies)
    bars = axes.barh(range(len(names)), [100 * accuracies[name] for name in names], color=colors.series[0], height=0.65)
    axes.bar_label(bars, [f"{accuracies[name]:.1%}" for name in names], padding=4, color=colors.ink, fontsize=FONT)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 128)  # room for the numbers
    axes.set_xticks(range(0, 101, 20))
    _dress(axes, colors, title, "right answers, %", "")
    return figure


def attention_over_image(
    trace: AnalysisTrace,
    image: Any,
    layer: int,
    t: int,
    heads: Sequence[int] | None = None,
    stage: str = "post",
    batch: int = 0,
    theme: str = "light",
) -> Figure:
    """Where a patch of an image looks, per head: a map before composition and after (DCViT). A frame marks the patch.

    Args:
        trace: of a model of images.
        image: [rows, columns] or [rows, columns, 3], what the model saw.
        layer, stage, batch: as of `compose_map`.
        t: position of the query among the tokens; with a class token, 0 is the class token.
        heads: which; all by default.

    Raises:
        DCFormerError: on a trace of a text, and an image of another shape.
    """
    if trace.grid is None:
        raise DCFormerError("attention_over_image needs a trace of a model of images.")
    image = np.asarray(image)
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise DCFormerError(
            f"image of shape {image.shape}: expected [rows, columns] or [rows, columns, 3], channels last."
        )
    (batch,) = chosen([batch], len(trace.real), "batch index")
    colors = _theme(theme)
    row, patches = trace.row(t), trace.grid[0] * trace.grid[1]
    offset = trace.length - patches  # 1 with a class token
    maps = [m[batch, :, row, offset:].float().cpu().unflatten(-1, trace.grid) for m in trace.layer(layer).maps(stage)]
    numbers = chosen(heads, maps[0].shape[0], "head")
    figure = _figure(colors, 2.6 + 1.75 * len(numbers), 4.4)
    from matplotlib.patches import Rectangle

    grid = figure.add_gridspec(2, len(numbers) + 1)
    picture = figure.add_subplot(grid[:, 0])
    picture.imshow(image, cmap="gray", extent=(-0.5, trace.grid[1] - 0.5, trace.grid[0] - 0.5, -0.5))
    picture.set_xticks([])
    picture.set_yticks([])
    _dress(picture, colors, "image")
    for place, (name, values) in enumerate(zip(MAP_NAMES[stage], maps, strict=True)):
        limit = float(values[numbers].abs().max()) or 1.0
        row_axes = []
        for column, head in enumerate(numbers):
            axes = figure.add_subplot(grid[place, column + 1])
            drawn = _heat(axes, values[head], colors, limit, numbers=False)
            axes.set_aspect("equal")
            axes.set_xticks([])
            axes.set_yticks([])
            _dress(axes, colors, f"head {head}" if not place else "", "", name if not column else "")
            row_axes.append(axes)
        _scale(figure, drawn, row_axes, colors, "")
    for axes in figure.axes:
        if trace.positions[row] >= offset and axes.get_images() and axes.get_label() != "<colorbar>":
            y, x = divmod(trace.positions[row] - offset, trace.grid[1])
            frame = Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=colors.series[2], linewidth=2.5)
            axes.add_patch(frame)
    return figure


__all__ = [
    "accuracy_bars",
    "attention_over_image",
    "attention_rows",
    "attribution_heatmap",
    "breakdown_strip",
    "diversity_curves",
    "mean_maps",
    "term_shares",
]
