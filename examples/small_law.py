"""The scaling law of the paper's recipes in the small: four sizes with and without composition, on two CPU cores.

    python examples/small_law.py                # what is not in docs/scaling/small.json yet, then tables and picture
    python examples/small_law.py --output runs/law --seeds 0 --sizes 32 --scale 0.02  # a look at it
    python examples/small_law.py --report       # tables and picture of what is done

Models of four layers with heads of 16 channels and 17.5 characters a parameter outside embeddings, on the text in
examples/data, which the larger ones see several times. Three families, as the paper's published runs have them:
transformer++, the same with norms of queries and keys, and dcformer++, which has those norms, windows in every other
layer, and composition. A fourth has the norms and the windows: composition is all that tells it from dcformer++.
Rates follow the paper's own: they fall with the cube root of size, from a family's best of one
grid at width 48, found by the loss on one half of the held-out text with a seed of its own. The other half is reported.
A run that is done is written at once, and not run again: stop and start as you like.

Writes small.json, small.csv as `python -m dcformer.scaling` reads it, small.md with what that prints, and small.png.
With fewer than two sizes there is no law, and so no picture.
"""

import argparse
import csv
import io
import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path

import study
from study import LENGTH, REPOSITORY, about_runs, as_trained, best_rate, read_runs, write_text
from tqdm import tqdm

OUTPUT = REPOSITORY / "docs" / "scaling"
WIDTHS = (32, 48, 64, 96)
LAYERS, HEAD_DIM, BATCH, WINDOW = 4, 16, 16, LENGTH // 8  # of 2048 tokens the paper's windows have 256
TOKENS_A_PARAMETER = 17.5
RATES, RATE_WIDTH, RATE_SEED, SEEDS = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), 48, 100, (0, 1, 2)
PLAIN = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)
WHOLE = {"layer_pattern": "G", "sliding_window": None}
WINDOWS = {"layer_pattern": "LG", "sliding_window": WINDOW}
FAMILIES = {
    "transformer++": PLAIN | WHOLE | {"qk_norm": False},
    "transformer++-qknorm": PLAIN | WHOLE | {"qk_norm": True},
    "transformer++-qknorm-windows": PLAIN | WINDOWS | {"qk_norm": True},
    "dcformer++": WINDOWS | {"qk_norm": True},
}
# the static part of composition alone, and all of it: the ablation's, with the law's norms and windows
OF_ABLATION = {"talking-heads": "static", "dcmha": "full"}
FIELDS = FAMILIES | {
    family: WINDOWS | study.VARIANTS[variant].switches | {"qk_norm": True} for family, variant in OF_ABLATION.items()
}
VARIANT = "dcformer++"
BASELINES = tuple(family for family in FAMILIES if family != VARIANT)
FORMS = {"log": "The paper's form of the law", "power": "A power law"}
LAWS = {"log": "L = a + b ln C", "power": "ln L = a + b ln C"}
COSTS = (
    "operations as the paper counts: composition over all keys, no windows",
    "composition over the causal half of the keys, as attention",
    "and windows: only keys that are seen",
    "seconds of one core",
)


def make_config(family: str, width: int, head_dim: int = HEAD_DIM, intermediate_size: int | None = None):
    from dcformer import DCFormerConfig

    return DCFormerConfig(
        **FIELDS[family],
        vocab_size=study.make_data("text", 1)[2],
        hidden_size=width,
        intermediate_size=intermediate_size or 8 * round(width / 3),
        num_hidden_layers=LAYERS,
        num_attention_heads=width // head_dim,
        max_position_embeddings=LENGTH,
        initializer_range=0.7 / math.sqrt(width),  # the usual 0.02 is for wide models
        attn_implementation="sdpa" if FIELDS[family].items() >= PLAIN.items() else "dcformer_chunked",
    )


def law_parameters(width: int) -> int:
    """Parameters outside embeddings of the law: 12 E² a layer, for all families alike."""
    return 12 * LAYERS * width**2


def settings_of(family: str, width: int, seed: int, rate: float, scale: float) -> dict:
    """The settings of a run, `rate` being that at `RATE_WIDTH`."""
    steps = scale * TOKENS_A_PARAMETER * law_parameters(width) / (BATCH * LENGTH)
    lower = (law_parameters(RATE_WIDTH) / law_parameters(width)) ** (1 / 3)
    return {
        "family": family,
        "width": width,
        "seed": seed,
        "rate": rate,
        "learning_rate": round(rate * lower, 6),
        "steps": max(1, round(steps)),
        "batch_size": BATCH,
    }


def train(settings: dict, folder: str) -> dict:
    """One run: from nothing to its losses on both halves of the held-out text."""
    import torch
    from transformers import set_seed

    from dcformer import DCFormerForCausalLM
    from dcformer.analysis import num_parameters, training_flops

    torch.set_num_threads(1)
    rows, test, _ = study.make_data("text", settings["steps"] * BATCH)
    shape = {name: settings[name] for name in ("head_dim", "intermediate_size") if name in settings}
    config = make_config(settings["family"], settings["width"], **shape)
    set_seed(settings["seed"])
    model = DCFormerForCausalLM(config)
    trainer, _, seconds = study.fit(model, settings, rows, test[::2], folder)
    tokens, parameters = settings["steps"] * BATCH * LENGTH, num_parameters(config)
    return settings | {
        "parameters": parameters,
        "embedding_parameters": parameters - num_parameters(config, exclude_embeddings=True),
        "tokens": tokens,
        "flops": training_flops(config, LENGTH) * tokens,
        "choice_loss": trainer.evaluate(test[::2])["eval_loss"],
        "loss": trainer.evaluate(test[1::2])["eval_loss"],
        "cpu_seconds": round(seconds, 1),
    }


def train_missing(wanted: list[dict], path: Path, workers: int, what: str) -> list[dict]:
    """Trains what is wanted and not done, `workers` runs at a time; returns all that is done."""
    done = read_runs(path)
    missing = [settings for settings in wanted if not any(settings.items() <= run.items() for run in done)]
    print(f"{what}: {len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        for run in as_trained(train, missing, workers):
            done = sorted([*done, run], key=lambda r: (list(FIELDS).index(r["family"]), r["width"], r["seed"]))
            write_text(path, json.dumps({"about": about_runs(), "runs": done}, indent=1) + "\n")
            tqdm.write("{family} {width} seed {seed}: loss {loss:.4f}, {cpu_seconds:.0f} s".format(**run))
    return done


def chosen_rate(runs: list[dict], family: str, scale: float) -> float | None:
    """The rate of the grid with the lowest loss on the half that is not reported; None before all are done."""
    steps = settings_of(family, RATE_WIDTH, RATE_SEED, 1.0, scale)["steps"]
    found = {
        run["rate"]: run["choice_loss"]
        for run in runs
        if (run["family"], run["width"], run["seed"], run["steps"]) == (family, RATE_WIDTH, RATE_SEED, steps)
    }
    return best_rate(found, RATES)


# --- what came out ----------------------------------------------------------------------------------------------------


def reported(runs: list[dict], scale: float) -> list[dict]:
    """The runs at their family's own rate, those that chose it left out."""
    rates = {family: chosen_rate(runs, family, scale) for family in FAMILIES}
    wanted = [(r, settings_of(r["family"], r["width"], r["seed"], r["rate"], scale)["steps"]) for r in runs]
    return [
        run
        for run, steps in wanted
        if run["seed"] != RATE_SEED and run["rate"] == rates[run["family"]] and run["steps"] == steps
    ]


def _at_equal_size(runs: list[dict], baseline: str) -> list[str]:
    """By how much the loss is lower at equal width and tokens, seed by seed, and what composition costs there."""
    from scipy.stats import ttest_ind, ttest_rel

    heads = ("width", "parameters", "operations", "loss", "loss of the baseline", "lower by", "p", "Welch's p")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    widths = sorted({run["width"] for run in runs})
    found = {
        (family, width): {run["seed"]: run for run in runs if (run["family"], run["width"]) == (family, width)}
        for family in (VARIANT, baseline)
        for width in widths
    }
    differences: dict[int, dict[int, float]] = {}
    for width in widths:
        ours, theirs = found[VARIANT, width], found[baseline, width]
        if not (seeds := sorted(ours.keys() & theirs.keys())):
            continue
        losses = [{seed: by_seed[seed]["loss"] for seed in seeds} for by_seed in (ours, theirs)]
        mean, error, _ = study.compare(*losses)
        p = welch = math.nan
        if len(seeds) > 1:
            p = ttest_rel(*(list(by_seed.values()) for by_seed in losses)).pvalue
            welch = ttest_ind(*(list(by_seed.values()) for by_seed in losses), equal_var=False).pvalue
        one, other = ours[seeds[0]], theirs[seeds[0]]
        sizes = [f"{one[cost]:.4g} ({one[cost] / other[cost] - 1:+.1%})" for cost in ("parameters", "flops")]
        both = [[run["loss"] for run in by_seed.values()] for by_seed in (ours, theirs)]
        cells = [str(width), *sizes, *(f"{statistics.mean(those):.4f} ± {study.spread(those):.4f}" for those in both)]
        cells += [f"{mean:+.4f} ± {error:.4f}", f"{p:.3f}", f"{welch:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
        differences[width] = {seed: losses[1][seed] - losses[0][seed] for seed in seeds}
    told = (
        "Losses: mean and standard deviation of seeds. Lower by: mean and standard error of the seeds' differences; "
        "p: of a paired t-test; Welch's: of one without pairs, as two families share a seed's order of texts alone."
    )
    return [*lines, "", told, *_over_sizes(differences, baseline)]


def _also_different(baseline: str) -> str:
    """What tells a baseline from the variant beside composition: "norms and windows", or nothing."""
    ours, theirs = FAMILIES[VARIANT], FAMILIES[baseline]
    fields = {"qk_norm": "norms", "layer_pattern": "windows"}
    return " and ".join(name for field, name in fields.items() if ours[field] != theirs[field])


def _over_sizes(differences: dict[int, dict[int, float]], baseline: str) -> list[str]:
    """One comparison of all sizes: width -> seed -> by how much the loss is lower than the baseline's."""
    from scipy.stats import ttest_1samp

    seeds = sorted(set.intersection(*map(set, differences.values()))) if len(differences) > 1 else []
    if len(seeds) < 2:
        return []
    rows = [[by_seed[seed] for seed in seeds] for by_seed in differences.values()]
    lower, pairs = sum(value > 0 for row in rows for value in row), len(rows) * len(seeds)
    mean = statistics.mean(map(statistics.mean, rows))
    lines = [
        "",
        f"Over all sizes, paired by size and seed: lower in {lower} of {pairs} pairs, by {mean:+.4f} in the mean.",
    ]
    for unit, units in (("sizes", rows), ("seeds", list(zip(*rows, strict=True)))):
        test = ttest_1samp([statistics.mean(those) for those in units], 0.0)
        lines.append(
            f"With the {len(units)} {unit} as units, a mean of each: ± {mean - test.confidence_interval().low:.4f} "
            f"(95 % interval, Student's t), p = {test.pvalue:.3f}."
        )
    also = _also_different(baseline)
    told = f"{also} differ, too" if also else "nothing but composition differs"
    lines.append(f"At equal width and tokens, not at equal parameters or compute; {told}.")
    return lines


def _costs(run: dict) -> dict[str, float]:
    """What a run cost, by each way of counting it."""
    from dcformer.analysis.overhead import COUNTINGS, training_flops

    config = make_config(run["family"], run["width"])
    flops = [training_flops(config, LENGTH, counting) * run["tokens"] for counting in COUNTINGS]
    return dict(zip(COSTS, [*flops, run["cpu_seconds"]], strict=True))


def _by_cost(runs: list[dict], baseline: str) -> list[str]:
    """The compute factor by each way of counting compute: from point to point of the baseline, and by laws."""
    from dcformer.errors import DCFormerError
    from dcformer.scaling import Point, joint_factor
    from dcformer.scaling.fit import factor_between

    both = [run for run in runs if run["family"] in (VARIANT, baseline)]
    widths = sorted({run["width"] for run in both if run["family"] == VARIANT})
    heads = ("compute", "DCFormer's more", *(f"width {width}" for width in widths), *LAWS.values())
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for cost in COSTS:
        families: dict[str, list[Point]] = {VARIANT: [], baseline: []}
        sizes: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for run in both:
            compute = _costs(run)[cost]
            sizes.setdefault((run["family"], run["width"]), []).append((compute, run["loss"]))
            fields = {name: run[name] for name in ("family", "parameters", "tokens", "loss", "seed")}
            families[run["family"]].append(Point(**fields, flops=compute))
        means = {at: tuple(map(statistics.mean, zip(*found, strict=True))) for at, found in sizes.items()}
        points = [at for (family, _), at in sorted(means.items()) if family == baseline]
        more = [means[VARIANT, w][0] / means[baseline, w][0] - 1 for w in widths if (baseline, w) in means]
        cells = [cost, " to ".join(dict.fromkeys(f"{share:+.0%}" for share in (more[0], more[-1]))) if more else ""]
        falls = all(before[1] > after[1] for before, after in itertools.pairwise(points))
        for width in widths:
            if len(points) > 1 and falls:
                factor, is_between = factor_between(points, *means[VARIANT, width])
                cells.append(f"{factor:.2f}" + ("" if is_between else ", extrapolated"))
            else:
                cells.append("not known")
        for form in LAWS:
            try:
                joint = joint_factor(families[baseline], families[VARIANT], form) if len(points) > 1 else None
            except DCFormerError:  # losses that do not fall
                joint = None
            cells.append(
                "not known" if joint is None else "{:.2f} ({:.2f}-{:.2f})".format(joint.factor, *joint.interval)
            )
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "At a width: by lines from one of the baseline's points to the next. By a law: one factor for all sizes, its "
        "95 % interval.",
    ]


def report(runs: list[dict], folder: Path, scale: float) -> str:
    """Writes the table for `dcformer.scaling` and what it says of composition against each baseline."""
    from dcformer.errors import DCFormerError
    from dcformer.scaling.__main__ import run as analyze

    rates = {family: chosen_rate(runs, family, scale) for family in FAMILIES}
    if lacking := [family for family, rate in rates.items() if rate is None]:
        raise DCFormerError(
            f"no rate is chosen yet for {', '.join(lacking)} at scale {scale:g}: run without --report, with the same "
            "--output and --scale"
        )
    shown = reported(runs, scale)
    columns = ["family", "parameters", "embedding_parameters", "tokens", "flops", "loss", "seed"]
    rows = io.StringIO()
    writer = csv.DictWriter(rows, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(shown)
    write_text(folder / "small.csv", rows.getvalue())
    edge = [name for name, rate in rates.items() if rate in (min(RATES), max(RATES))]
    lines = [
        "<!-- written by examples/small_law.py -->",
        "# The law in the small",
        "",
        f"{len(runs)} runs, {sum(run['cpu_seconds'] for run in runs) / 3600:.1f} hours of one core in all.",
        f"Rates at width {RATE_WIDTH}, of {', '.join(f'{rate:g}' for rate in RATES)}: "
        + ", ".join(f"{family} {rate:g}" for family, rate in rates.items())
        + (f"; at the edge of the grid: {', '.join(edge)}." if edge else "."),
    ]
    for baseline in BASELINES:
        lines += ["", f"## {VARIANT} against {baseline}", "", *_at_equal_size(shown, baseline)]
        lines += ["", "### By how compute is counted", "", *_by_cost(shown, baseline)]
        for form, label in FORMS.items():
            options = ["--baseline", baseline, "--variant", VARIANT, "--form", form]
            if (baseline, form) == (BASELINES[-1], "log"):  # the picture is of the closest comparison
                options += ["--plot", str(folder / "small.png")]
            try:
                _, _, found = analyze([str(folder / "small.csv"), *options]).partition("\n\n")  # behind the runs
            except DCFormerError as error:  # too few sizes, or losses that do not fall: a look, not a study
                found = f"No law: {error}."
            lines += ["", f"### {label}", "", found]
    text = "\n".join(lines) + "\n"
    write_text(folder / "small.md", text)
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--sizes", nargs="+", type=int, choices=WIDTHS, default=list(WIDTHS), help="widths")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the law's steps")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if not 0 < options.scale <= 1 or options.workers < 1:
        parser.error(f"--scale {options.scale}, --workers {options.workers}: expected (0, 1] and at least 1")
    if RATE_SEED in options.seeds:
        parser.error(f"--seeds {RATE_SEED}: this seed chooses the learning rates; take others")
    from dcformer.errors import DCFormerError

    path = options.output / "small.json"
    try:
        runs = read_runs(path)
        if not options.report:
            wanted = [settings_of(name, RATE_WIDTH, RATE_SEED, r, options.scale) for name in FAMILIES for r in RATES]
            runs = train_missing(wanted, path, options.workers, "learning rates")
            rates = {name: chosen_rate(runs, name, options.scale) for name in FAMILIES}
            wanted = [  # smallest first: whatever is done compares all families
                settings_of(name, width, seed, rates[name] or 0.0, options.scale)
                for width in options.sizes
                for seed in options.seeds
                for name in FAMILIES
            ]
            runs = train_missing(wanted, path, options.workers, "seeds")
        print(report(runs, options.output, options.scale))
    except (OSError, ValueError, DCFormerError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
