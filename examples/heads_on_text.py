"""Text with 3 to 12 heads in the same width: what composition adds where heads are many and narrow.

    python examples/heads_on_text.py            # what is not in docs/scaling/heads*.json yet, then the tables
    python examples/heads_on_text.py --report   # tables and picture of what is done

The models, texts, steps and losses are those of `small_law.py` at widths 48 and 64: plain attention with norms of
queries and keys and windows in every other layer, and the same with composition. Only the number of heads differs, and
with it their width: 16, 8 and 4 channels. Each family has its rate for each width of heads, from one grid at width 48,
by one half of the held-out text with a seed of its own; the other half is reported. At width 64 it is that rate by the
law's rule. Runs with heads of 16 channels are those of the law.

Composition of many heads has many parameters at these widths. So plain models that are larger by as many, in their MLP
or all over, train on as many tokens, each at the best rate of a grid of its own. Talking heads, whose mixing is fixed,
have next to no parameters of their own: they are tried with each number of heads, alone and, as the paper's full DCMHA
has them, together with dynamic composition.

Writes heads.json (and heads_larger.json, the larger plain models), heads.md and heads.svg.
"""

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import small_law
import study
from small_law import RATE_SEED, SEEDS
from study import read_runs, save_figure, write_text

RATE_WIDTH = small_law.RATE_WIDTH
PLAIN, OURS = FAMILIES = ("transformer++-qknorm-windows", small_law.VARIANT)
STATIC, BOTH = small_law.OF_ABLATION
LABELS = {PLAIN: "plain", OURS: "composed", STATIC: "talking heads", BOTH: "both"}
BESIDE = ((OURS, PLAIN), (STATIC, PLAIN), (STATIC, OURS), (BOTH, PLAIN), (BOTH, OURS), (BOTH, STATIC))
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)  # the law's best at this width is the one in the middle, for both


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        width, head_dim: of the hidden states, and of a head.
        intermediate_size: of the MLP of a larger model, which trains on as many tokens as `RATE_WIDTH`; None for the
            law's MLP and tokens.
    """

    width: int
    head_dim: int
    intermediate_size: int | None = None

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def of_grid(self) -> "Shape":
        """The shape at which the learning rate is chosen: a larger model has a grid of its own."""
        return self if self.intermediate_size else replace(self, width=RATE_WIDTH)

    def settings(self, family: str, seed: int, rate: float, scale: float) -> dict:
        """The settings of a run, as the law's with the width of heads."""
        settings = small_law.settings_of(family, self.width, seed, rate, scale) | {"head_dim": self.head_dim}
        if self.intermediate_size:
            steps = small_law.settings_of(family, RATE_WIDTH, seed, rate, scale)["steps"]
            settings |= {"intermediate_size": self.intermediate_size, "steps": steps}
        return settings


SHAPES = (Shape(48, 16), Shape(48, 8), Shape(48, 4), Shape(64, 16), Shape(64, 8))
LARGER = {  # composed -> plain models of as many parameters, within 2 %; with 6 heads also one of as many operations
    Shape(48, 8): (Shape(48, 8, 184), Shape(48, 16, 184), Shape(54, 18, 144), Shape(64, 16, 168)),
    Shape(48, 4): (Shape(48, 4, 272), Shape(48, 16, 272), Shape(64, 16, 168)),
}


def larger_shapes() -> list[Shape]:
    """All of `LARGER`, each once."""
    return list(dict.fromkeys(shape for shapes in LARGER.values() for shape in shapes))


def of_the_law(path: Path) -> list[dict]:
    """The law's own runs at these widths."""
    widths = {shape.width for shape in SHAPES}
    runs = [run for run in read_runs(path) if run["width"] in widths and run["family"] in FAMILIES]
    return [run | {"head_dim": small_law.HEAD_DIM} for run in runs]


def chosen_rate(runs: list[dict], family: str, shape: Shape, scale: float) -> float | None:
    """The rate of the grid with the lowest loss on the half that is not reported; None before all are done."""
    wanted = {rate: shape.of_grid.settings(family, RATE_SEED, rate, scale) for rate in RATES}
    losses = {r: run["choice_loss"] for r, s in wanted.items() for run in runs if s.items() <= run.items()}
    return study.best_rate(losses, RATES)


def reported(runs: list[dict], family: str, shape: Shape, scale: float) -> dict[int, dict]:
    """Runs at the chosen rate by seed, those that are done."""
    rate = chosen_rate(runs, family, shape, scale)
    wanted = {} if rate is None else {s: shape.settings(family, s, rate, scale) for s in SEEDS}
    return {seed: run for seed, settings in wanted.items() for run in runs if settings.items() <= run.items()}


def _compared(ours: dict[int, dict], plain: dict[int, dict]) -> list[str]:
    """Cells of a row, from two models' runs by seed: losses, by how much ours are lower, p, and what ours cost more."""
    from scipy.stats import ttest_ind, ttest_rel

    losses = [{seed: run["loss"] for seed, run in of.items()} for of in (ours, plain)]
    mean, error, _ = study.compare(*losses)
    both = [list(of.values()) for of in losses]
    minutes = (statistics.mean(run["cpu_seconds"] for run in of.values()) / 60 for of in (plain, ours))
    one, other = (next(iter(of.values())) for of in (ours, plain))
    return [
        *(f"{statistics.mean(those):.4f} ± {study.spread(those):.4f}" for those in reversed(both)),
        f"{mean:+.4f} ± {error:.4f}",
        f"{ttest_rel(*both).pvalue:.3f}",
        f"{ttest_ind(*both, equal_var=False).pvalue:.3f}",
        *(f"{round(one[cost] / other[cost] - 1, 3) + 0.0:.1%}" for cost in ("parameters", "flops")),
        " and ".join(f"{m:.1f}" for m in minutes),
    ]


COMPARED = ("rates", "{0}", "{1}", "lower by", "p", "Welch's p", "more parameters", "more operations")
COMPARED += ("minutes, {0} and {1}",)


def _row(named: tuple[int, ...], own: dict[int, dict], theirs: dict[int, dict]) -> str:
    """A row of a table: what names it, and runs of one kind beside those of another by seed, where all are done."""
    cells = ["not done"] * len(COMPARED)
    if len(theirs) == len(own) == len(SEEDS):
        cells = ["; ".join(f"{of[SEEDS[0]]['rate']:g}" for of in (theirs, own)), *_compared(own, theirs)]
    return "| " + " | ".join([*map(str, named), *cells]) + " |"


def _table(named: tuple[str, ...], theirs: str, ours: str, rows: list[str]) -> list[str]:
    heads = (*named, *(name.format(theirs, ours) for name in COMPARED))
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows]


def report(runs: list[dict], larger: list[dict], scale: float) -> str:
    """Losses by number of heads, and by how much they are lower with composition, seed by seed.

    Args:
        runs, larger: of `SHAPES`, and of larger plain models.
        scale: of the number of steps.
    """
    grids = [(family, shape, runs) for shape in SHAPES if shape.of_grid == shape for family in LABELS]
    grids += [(PLAIN, shape, larger) for shape in larger_shapes()]
    rates = [chosen_rate(of, family, shape, scale) for family, shape, of in grids]
    edge = [
        f"{family} with {shape.heads} heads"
        + (f" and an MLP of {shape.intermediate_size}" * bool(shape.intermediate_size))
        for (family, shape, _), rate in zip(grids, rates, strict=True)
        if rate in (min(RATES), max(RATES))
    ]
    found = {(family, s): reported(runs, family, s, scale) for family in LABELS for s in SHAPES}

    def beside(family: str, other: str) -> list[str]:
        pairs = [(found[other, s], found[family, s]) for s in SHAPES]
        lower = [one[seed]["loss"] - own[seed]["loss"] for one, own in pairs for seed in one.keys() & own.keys()]
        names = LABELS[other], LABELS[family]
        rows = [_row((s.width, s.heads), own, one) for s, (one, own) in zip(SHAPES, pairs, strict=True)]
        return [
            "",
            f"## {names[1].capitalize()} beside {names[0]}",
            "",
            *_table(("width", "heads"), *names, rows),
            "",
            f"Of pairs with the same seed, the loss is lower in {sum(value > 0 for value in lower)} of {len(lower)}"
            + (f": by {min(lower):+.4f} to {max(lower):+.4f}." if lower else "."),
        ]

    def beside_larger(family: str) -> list[str]:
        rows = [
            _row(
                (composed.heads, shape.width, shape.heads, shape.intermediate_size or 0),
                found[family, composed],
                reported(larger, PLAIN, shape, scale),
            )
            for composed, shapes in LARGER.items()
            for shape in shapes
        ]
        named = (f"heads, {LABELS[family]}", "plain: width", "heads", "MLP")
        heading = f"## {LABELS[family].capitalize()} beside larger plain models"
        return ["", heading, "", *_table(named, "plain", LABELS[family], rows)]

    lines = [
        "<!-- written by examples/heads_on_text.py -->",
        "# Heads on text",
        "",
        "Composed: dynamic composition; talking heads: the static part alone; both: the paper's full DCMHA. "
        f"Nats a character, {len(SEEDS)} seeds: mean and standard deviation. Lower by: mean and standard error of the "
        "seeds' differences; p: of a paired t-test; Welch's: of one without pairs. More parameters and operations: of "
        "the second, at equal tokens.",
        f"Rates are those at width {RATE_WIDTH}, of {', '.join(f'{rate:g}' for rate in RATES)}"
        + (f"; at the edge of the grid: {', '.join(edge)}" if edge else "; none is at the edge of the grid")
        + (f"; {rates.count(None)} are not chosen yet." if None in rates else "."),
        *(line for family, other in BESIDE for line in beside(family, other)),
        *(line for family in (OURS, BOTH) for line in beside_larger(family)),
        "",
        f"There, models that mix heads have width {RATE_WIDTH} and an MLP of "
        f"{small_law.make_config(OURS, RATE_WIDTH).intermediate_size}; rates are each model's own.",
    ]
    return "\n".join(lines) + "\n"


def plot(runs: list[dict], scale: float, path: Path) -> None:
    """Losses by number of heads: seeds as dots, their means as lines."""
    from matplotlib import pyplot

    widths = sorted({shape.width for shape in SHAPES})
    figure, panels = pyplot.subplots(1, len(widths), figsize=(8, 3.2), layout="constrained", squeeze=False)
    for axes, width in zip(panels[0], widths, strict=True):
        shapes = [shape for shape in SHAPES if shape.width == width]
        for family, label in LABELS.items():
            losses = {
                shape.heads: [run["loss"] for run in found.values()]
                for shape in shapes
                if (found := reported(runs, family, shape, scale))
            }
            (line,) = axes.plot(losses.keys(), [statistics.mean(of) for of in losses.values()], label=label)
            for heads, of in losses.items():
                axes.plot([heads] * len(of), of, "o", color=line.get_color(), markersize=4)
        axes.set(xscale="log", xlabel=f"heads, {width} channels in all")
        axes.set_xticks([shape.heads for shape in shapes], [str(shape.heads) for shape in shapes])
        axes.minorticks_off()
    panels[0][0].set_ylabel("held-out loss, nats a character")
    panels[0][0].legend(frameon=False)
    save_figure(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=small_law.OUTPUT, help="folder of what is written")
    parser.add_argument("--law", type=Path, default=small_law.OUTPUT / "small.json", help="runs of the law")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps, for a look")
    workers = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=workers, help="runs at a time (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="no training")
    arguments = parser.parse_args()
    path, scale = arguments.output / "heads.json", arguments.scale
    larger_path = arguments.output / "heads_larger.json"
    law = of_the_law(arguments.law)

    def run(wanted: list[dict], what: str) -> list[dict]:
        missing = [settings for settings in wanted if not any(settings.items() <= done.items() for done in law)]
        return law + small_law.train_missing(missing, path, arguments.workers, what)

    def run_larger(wanted: list[dict], what: str) -> list[dict]:
        return small_law.train_missing(wanted, larger_path, arguments.workers, f"larger plain models, {what}")

    def train_all(run, cells: list[tuple[str, Shape]]) -> None:
        grids = [(family, shape) for family, shape in cells if shape.of_grid == shape]
        runs = run([s.settings(f, RATE_SEED, rate, scale) for f, s in grids for rate in RATES], "rates")
        best = {(f, s): chosen_rate(runs, f, s, scale) or 0.0 for f, s in cells}
        run([s.settings(f, seed, best[f, s], scale) for f, s in cells for seed in SEEDS], "seeds")

    if not arguments.report:
        train_all(run, [(family, shape) for shape in SHAPES for family in LABELS])
        train_all(run_larger, [(PLAIN, shape) for shape in larger_shapes()])
    runs = law + read_runs(path)
    text = report(runs, read_runs(larger_path), scale)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output / "heads.md", text)
    plot(runs, scale, arguments.output / "heads.svg")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
