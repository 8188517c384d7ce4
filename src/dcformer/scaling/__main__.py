"""How much compute a variant is worth: fits the baseline's loss against compute and reads the variant's runs off it.

    python -m dcformer.scaling runs.csv --baseline transformer++ --variant dcformer++

Prints the runs, the law, and for each size of the variant its factor with intervals; then one factor for all sizes.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import DCFormerError, require_extra
from ..files import strict_json
from .fit import FORMS, Factor, Interval, JointFactor, Law, compute_factors, fit_law, joint_factor
from .points import MEASURES, Point, of_family, read_points

_UNUSUAL_LOSS = 5.0  # nats a token: a perplexity of 148
_SIGNIFICANT = 0.05  # probability below which slopes are two
_FEW_SIZES = 4  # below it the command warns


def analyze(baseline: Sequence[Point], variant: Sequence[Point], options: argparse.Namespace) -> dict[str, Any]:
    """Law, factors and joint factor under every measure of compute that all runs have.

    Args:
        baseline, variant: runs.
        options: of the command: form, compute, level.

    Returns:
        measure -> {"law", "factors", "joint"}; the measure that was asked for comes first. Others that cannot be had,
        or under which there is no law, are left out.

    Raises:
        DCFormerError: when the measure that was asked for cannot be had, there is no law, or the variant's losses do
            not fall with compute.
    """
    if options.compute is None:
        has_flops = all(point.flops is not None for point in (*baseline, *variant))
        options.compute = "flops" if has_flops else "6nd"
    found: dict[str, Any] = {}
    for measure in (options.compute, *(m for m in MEASURES if m != options.compute)):
        try:
            fit_law(variant, measure=measure)  # only to see that its losses fall
            found[measure] = {
                "law": fit_law(baseline, options.form, measure),
                "factors": compute_factors(baseline, variant, options.form, measure, options.level),
                "joint": joint_factor(baseline, variant, options.form, measure, options.level),
            }
        except DCFormerError:
            if measure == options.compute:
                raise
    return found


def report(baseline: Sequence[Point], variant: Sequence[Point], found: dict[str, Any], level: float) -> str:
    """What the command prints, in Markdown."""
    measure, first = next(iter(found.items()))
    law: Law = first["law"]
    lines = [f"| family | parameters | tokens | C ({measure}) | loss | seed |", "|---|---|---|---|---|---|"]
    for point in sorted((*baseline, *variant), key=lambda p: (p.family, p.parameters, p.tokens, p.seed)):
        lines.append(
            f"| {point.family} | {point.parameters:.4g} | {point.tokens:.4g} | {point.compute(measure):.4g} "
            f"| {point.loss:.4f} | {point.seed} |"
        )
    names = {
        "log": "L = a + b ln C", "power": "ln L = a + b ln C", "power+floor": "L = floor + exp(a + b ln C)"
    }  # fmt: skip
    lines += ["", f"{baseline[0].family}: {names[law.form]}, b = {law.slope:.4f}, a = {law.intercept:.4f}"]
    lines[-1] += f", floor = {law.floor:.4f}" if law.form == "power+floor" else ""
    lines[-1] += f"; {law.sizes} sizes, {law.runs} runs"
    lines[-1] += f", s = {law.deviation:.4f}" if law.freedom > 0 else ""
    others = [name for name in found if name != measure]
    header = ["parameters", "seeds", "loss", f"factor ({measure})", f"{level:.0%} interval", "one standard error", "C*"]
    header += [*(f"factor ({name})" for name in others), "point to point"]
    lines += ["", _row(header), "|---" * len(header) + "|"]
    for i, factor in enumerate(first["factors"]):
        rest = [_number(found[name]["factors"][i].factor, law.form) for name in others]
        between = "" if factor.interpolated is None else _number(factor.interpolated)
        lines.append(_row([*_cells(factor, law.form), *rest, between]))
    joint: JointFactor | None = first["joint"]
    if joint is not None:
        lines += [
            "",
            f"One slope for both families (b = {joint.slope:.4f}): factor {_number(joint.factor)}, {level:.0%} "
            f"interval {_between(joint.interval)}, one standard error {_between(joint.standard)}.",
        ]
        if joint.slopes is not None and joint.p is not None:
            alone = " and ".join(f"{slope:.4f}" for slope in joint.slopes)
            lines[-1] += f" Each family's own: {alone} (t-test that they differ: p = {joint.p:.2g})."
            if joint.p < _SIGNIFICANT:
                lines.append(
                    "Warning: the slopes differ: the factor depends on size, and this one describes none of them; "
                    "quote those of the sizes."
                )
    return "\n".join(lines + _caveats(law, first["factors"], measure, found))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float, form: str = "") -> str:
    if not math.isfinite(value):
        return "none: below the floor" if form == "power+floor" else "beyond 1e300"
    return f"{value:.2f}" if 0.005 <= value < 10 else f"{value:.3g}"


def _between(interval: Interval | None) -> str:
    if interval is None:
        return "not known"
    low, high = interval
    return f"{_number(low)}-{_number(high)}" if math.isfinite(high) else f"above {_number(low)}"


def _cells(factor: Factor, form: str) -> list[str]:
    where = "extrapolated" if factor.extrapolated else "within the baseline's range"
    return [
        f"{factor.parameters:.4g}", str(factor.seeds), f"{factor.loss:.4f}", _number(factor.factor, form),
        _between(factor.interval), _between(factor.standard), where,
    ]  # fmt: skip


def _caveats(law: Law, factors: Sequence[Factor], measure: str, found: dict[str, Any]) -> list[str]:
    lines = ["", "Point to point: by straight lines from one size of the baseline to the next, without a law."]
    if measure == "flops":
        lines.append(
            "C counts the variant's own operations as the runs give them: its factors are what is left after paying "
            "for them."
        )
    elif "flops" in found:
        lines.append(f"C ({measure}) leaves out what composition computes; the factors under flops charge it.")
    else:
        lines.append(f"C ({measure}) leaves out what composition computes; without flops it cannot be charged.")
    if any(factor.extrapolated for factor in factors):
        lines.append("Extrapolated: C* lies outside the compute of the baseline's runs.")
    if law.sizes == 2:
        lines.append("Warning: two sizes of the baseline are interpolated, nothing says how far they are off.")
    elif law.sizes < _FEW_SIZES:
        lines.append(f"Warning: the law rests on {law.sizes} sizes; four or more show whether it is a line at all.")
    if law.runs > law.sizes:
        lines.append("The unit is the size: seeds make its mean better, and add no degrees of freedom.")
    if law.sizes == 3:
        lines.append(
            "With one degree of freedom a 95 % interval reaches up to 12.7 standard errors to either side: three "
            "points cannot say more."
        )
    return lines


def plot(baseline: Sequence[Point], variant: Sequence[Point], law: Law, measure: str, file: Path) -> None:
    """Draws runs of both families and the baseline's law."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for points, color in ((baseline, "C0"), (variant, "C1")):
        x, y = zip(*((point.compute(measure), point.loss) for point in points), strict=True)
        axes.scatter(x, y, s=14, color=color, label=points[0].family)
    computes = [point.compute(measure) for point in (*baseline, *variant)]
    low, high = min(computes), max(computes)
    line = [low * (high / low) ** (i / 100) for i in range(101)]
    axes.plot(line, [law.loss(c) for c in line], color="C0", linewidth=1)
    axes.set(xscale="log", xlabel=f"C ({measure})", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(file, dpi=150)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _check_plot(file: Path) -> None:
    require_extra("analysis", "--plot", "matplotlib")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise DCFormerError(f"--plot {file}: expected a name that ends in one of .{', .'.join(sorted(known))}")


def run(arguments: Sequence[str] | None = None) -> str:
    """What the command prints; writes --plot and --json.

    Args:
        arguments: of the command line, `sys.argv[1:]` when None.

    Raises:
        DCFormerError, OSError: for what is refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dcformer.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="CSV file of runs, or folder FAMILY/RUN of trainers' outputs")
    parser.add_argument("--baseline", required=True, help="family whose law is fitted")
    parser.add_argument("--variant", required=True, help="family that is measured against it")
    parser.add_argument("--form", choices=FORMS, default="log", help="of the law (default: %(default)s, the paper's)")
    parser.add_argument("--compute", choices=MEASURES, help="measure of C (default: flops; 6nd where a run has none)")
    parser.add_argument("--level", type=_share, default=0.95, help="of intervals (default: %(default)s)")
    parser.add_argument(
        "--bootstrap", type=_count, metavar="DRAWS", help="not needed, and of no effect: intervals take no draws"
    )
    parser.add_argument("--perplexity", action="store_true", help="losses are perplexities")
    parser.add_argument("--mixed-tokens", action="store_true", help="each number of tokens of a size is a size")
    parser.add_argument("--plot", type=Path, help="draw runs and law into this file")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        _check_plot(options.plot)
    if options.baseline == options.variant:
        raise DCFormerError(f"--baseline and --variant are both {options.variant!r}: name two families")
    for option, path in (("--plot", options.plot), ("--json", options.json)):
        if path is not None and path.is_dir():
            raise DCFormerError(f"{option} {path} is a folder: name a file in it")
        if path is not None and not path.parent.is_dir():
            raise DCFormerError(f"{option} {path}: there is no folder {path.parent}; make it, or name another")
    points = read_points(options.runs, options.perplexity, options.mixed_tokens)
    try:
        baseline, variant = (of_family(points, name) for name in (options.baseline, options.variant))
    except DCFormerError as error:  # others name a run's place
        raise DCFormerError(f"{options.runs}, {error}") from error
    found = analyze(baseline, variant, options)
    if options.plot is not None:
        plot(baseline, variant, found[options.compute]["law"], options.compute, options.plot)
    if options.json is not None:
        options.json.write_text(strict_json(_as_json(points, found)), encoding="utf-8")
    text = report(baseline, variant, found, options.level)
    largest = max(point.loss for point in (*baseline, *variant))
    if not options.perplexity and largest > _UNUSUAL_LOSS:
        text += f"\nWarning: losses of up to {largest:.3g} nats a token: if they are perplexities, give --perplexity."
    if options.bootstrap is not None:
        text += f"\n--bootstrap {options.bootstrap} has no effect: intervals are computed without draws."
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report. `arguments` are those of the command line when not given."""
    try:
        print(run(arguments))
    except (DCFormerError, OSError) as error:
        sys.exit(f"error: {error}")


def _as_json(points: Sequence[Point], found: dict[str, Any]) -> dict[str, Any]:
    return {
        "points": [asdict(point) for point in points],
        "measures": {
            measure: {
                "law": asdict(parts["law"]),
                "factors": [asdict(factor) for factor in parts["factors"]],
                "joint": None if parts["joint"] is None else asdict(parts["joint"]),
            }
            for measure, parts in found.items()
        },
    }


if __name__ == "__main__":
    main()
