"""Text with 3 to 12 heads in the same width: what composition adds where heads are many and narrow.

    python examples/heads_on_text.py            # what is not in docs/scaling/heads.json yet, then the table
    python examples/heads_on_text.py --report   # table and picture of what is done

The models, texts, steps and losses are those of `small_law.py` at widths 48 and 64: plain attention with norms of
queries and keys and windows in every other layer, and the same with composition. Only the number of heads differs, and
with it their width: 16, 8 and 4 channels. Each family has its rate for each width of heads, from one grid at width 48,
by one half of the held-out text with a seed of its own; the other half is reported. At width 64 it is that rate by the
law's rule. Runs with heads of 16 channels are those of the law.

Writes heads.json, heads.md and heads.svg.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import small_law
import study
from small_law import RATE_SEED, SEEDS
from study import read_runs, save_figure, write_text

RATE_WIDTH = small_law.RATE_WIDTH
FAMILIES = ("transformer++-qknorm-windows", small_law.VARIANT)
HEAD_DIMS = {48: (16, 8, 4), 64: (16, 8)}  # width -> widths of heads
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)  # the law's best at this width is the one in the middle, for both


def settings_of(family: str, width: int, head_dim: int, seed: int, rate: float, scale: float) -> dict:
    """The settings of a run, as the law's with the width of heads."""
    return small_law.settings_of(family, width, seed, rate, scale) | {"head_dim": head_dim}


def of_the_law(path: Path) -> list[dict]:
    """The law's own runs at these widths."""
    runs = [run for run in read_runs(path) if run["width"] in HEAD_DIMS and run["family"] in FAMILIES]
    return [run | {"head_dim": small_law.HEAD_DIM} for run in runs]


def chosen_rate(runs: list[dict], family: str, head_dim: int, scale: float) -> float | None:
    """The rate of the grid with the lowest loss on the half that is not reported; None before all are done."""
    wanted = {rate: settings_of(family, RATE_WIDTH, head_dim, RATE_SEED, rate, scale) for rate in RATES}
    losses = {r: run["choice_loss"] for r, s in wanted.items() for run in runs if s.items() <= run.items()}
    return study.best_rate(losses, RATES)


def reported(runs: list[dict], family: str, width: int, head_dim: int, scale: float) -> dict[int, dict]:
    """Runs at the chosen rate by seed, those that are done."""
    rate = chosen_rate(runs, family, head_dim, scale)
    wanted = {} if rate is None else {s: settings_of(family, width, head_dim, s, rate, scale) for s in SEEDS}
    return {seed: run for seed, settings in wanted.items() for run in runs if settings.items() <= run.items()}


def report(runs: list[dict], scale: float) -> str:
    """Losses by number of heads, and by how much they are lower with composition, seed by seed."""
    from scipy.stats import ttest_ind, ttest_rel

    plain, ours = FAMILIES
    heads = ("width", "heads", "rates", "plain", "composed", "lower by", "p", "Welch's p", "more parameters")
    heads += ("more operations", "minutes, plain and composed")
    lines = ["<!-- written by examples/heads_on_text.py -->", "# Heads on text", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    edge = []
    for width, head_dim in ((width, head_dim) for width, dims in HEAD_DIMS.items() for head_dim in dims):
        rates = {family: chosen_rate(runs, family, head_dim, scale) for family in FAMILIES}
        found = {family: reported(runs, family, width, head_dim, scale) for family in FAMILIES}
        if width == RATE_WIDTH:
            at_edge = (family for family, rate in rates.items() if rate in (min(RATES), max(RATES)))
            edge += [f"{family} with {width // head_dim} heads" for family in at_edge]
        cells = [str(width), str(width // head_dim)]
        if any(len(of) < len(SEEDS) for of in found.values()):
            lines.append("| " + " | ".join(cells + ["not done"] * (len(heads) - 2)) + " |")
            continue
        losses = {family: {seed: run["loss"] for seed, run in of.items()} for family, of in found.items()}
        mean, error, _ = study.compare(losses[ours], losses[plain])
        both = [list(losses[family].values()) for family in (ours, plain)]
        minutes = (statistics.mean(run["cpu_seconds"] for run in found[family].values()) / 60 for family in FAMILIES)
        cells += [f"{rates[plain]:g}; {rates[ours]:g}"]
        cells += [f"{statistics.mean(those):.4f} ± {study.spread(those):.4f}" for those in reversed(both)]
        cells += [f"{mean:+.4f} ± {error:.4f}", f"{ttest_rel(*both).pvalue:.3f}"]
        cells += [f"{ttest_ind(*both, equal_var=False).pvalue:.3f}"]
        one, other = (next(iter(found[family].values())) for family in (ours, plain))
        cells += [f"{one[cost] / other[cost] - 1:.0%}" for cost in ("parameters", "flops")]
        cells += [" and ".join(f"{m:.1f}" for m in minutes)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Nats a character, {len(SEEDS)} seeds: mean and standard deviation. Lower by: mean and standard error of the "
        "seeds' differences; p: of a paired t-test; Welch's: of one without pairs. More parameters and operations: of "
        "composed models, at equal width and tokens.",
        f"Rates are those at width {RATE_WIDTH}, of {', '.join(f'{rate:g}' for rate in RATES)}"
        + (f"; at the edge of the grid: {', '.join(edge)}." if edge else "; none is at the edge of the grid."),
    ]
    return "\n".join(lines) + "\n"


def plot(runs: list[dict], scale: float, path: Path) -> None:
    """Losses by number of heads: seeds as dots, their means as lines."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(HEAD_DIMS), figsize=(8, 3.2), layout="constrained", squeeze=False)
    for axes, (width, head_dims) in zip(panels[0], HEAD_DIMS.items(), strict=True):
        for family, label in zip(FAMILIES, ("plain, same norms and windows", "composed"), strict=True):
            losses = {
                width // head_dim: [run["loss"] for run in found.values()]
                for head_dim in head_dims
                if (found := reported(runs, family, width, head_dim, scale))
            }
            (line,) = axes.plot(losses.keys(), [statistics.mean(of) for of in losses.values()], label=label)
            for heads, of in losses.items():
                axes.plot([heads] * len(of), of, "o", color=line.get_color(), markersize=4)
        axes.set(xscale="log", xlabel=f"heads, {width} channels in all")
        axes.set_xticks([width // dim for dim in head_dims], [str(width // dim) for dim in head_dims])
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
    law = of_the_law(arguments.law)

    def run(wanted: list[dict], what: str) -> list[dict]:
        missing = [settings for settings in wanted if not any(settings.items() <= done.items() for done in law)]
        return law + small_law.train_missing(missing, path, arguments.workers, what)

    if not arguments.report:
        cells = [(family, width, dim) for width, dims in HEAD_DIMS.items() for dim in dims for family in FAMILIES]
        of_rates = [cell for cell in cells if cell[1] == RATE_WIDTH]
        runs = run([settings_of(*cell, RATE_SEED, rate, scale) for cell in of_rates for rate in RATES], "rates")
        best = {(f, dim): chosen_rate(runs, f, dim, scale) for f, _, dim in of_rates}
        run([settings_of(f, w, d, seed, best[f, d], scale) for f, w, d in cells for seed in SEEDS], "seeds")  # type: ignore
    runs = law + (read_runs(path) if path.exists() else [])
    text = report(runs, scale)
    write_text(arguments.output / "heads.md", text)
    plot(runs, scale, arguments.output / "heads.svg")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
