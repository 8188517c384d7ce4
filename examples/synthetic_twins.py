"""Fair twins of the bundled checkpoint: composition, talking heads and plain attention on the synthetic tasks.

    python examples/synthetic_twins.py                 # what is missing of 30 runs; can be stopped and called again
    python examples/synthetic_twins.py --limit 2       # two of them
    python examples/synthetic_twins.py --workers 2 --variants dcformer plain-qk-norm   # two at a time, of these only
    python examples/synthetic_twins.py --again         # those at the best rates a second time, into again.json
    python examples/synthetic_twins.py --report        # table and picture of what there is

Every variant of `train_synthetic.py` gets the same rows, stages, steps and rates: each rate of `RATES` with seed 0, and
the other seeds at the variant's own best. The rate is constant, as in the recipe before its decay. Measured every 200
steps are accuracy and loss on validation questions, none of which is trained on; the mean accuracy over the run tells
the best rate.
At the end each attention pattern is asked for on its own, with questions of the test split.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import train_synthetic
from study import about_runs, read_runs, save_figure, spread, write_text
from train_synthetic import REPOSITORY, TOKENS, score

import dcformer
from dcformer.analysis.overhead import training_flops
from dcformer.synthetic import TASKS, Task, build_tokenizer, encode, iterate_contexts

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
STEPS = 4600  # as many as the recipe has before its decay
VALIDATE_STEPS = 200
MARKS = (0.5, 0.75, 0.9)
TEST_CONTEXTS = 20  # of each of the 74 tasks
LABELS = {
    "dcformer": "DCFormer",
    "talking-heads": "talking heads",
    "plain-qk-norm": "plain, QK-norm",
    "plain-wide": "plain, QK-norm, as many parameters",
    "plain": "plain, no QK-norm",
}
OUTPUT = REPOSITORY / "docs" / "twins"


@dataclass(frozen=True)
class Run:
    """One training run: which variant, at which learning rate, from which seed."""

    variant: str
    rate: float
    seed: int


def finished(runs: list[dict]) -> dict[Run, dict]:
    return {Run(run["variant"], run["learning_rate"], run["seed"]): run for run in runs}


def quality(run: dict) -> float:
    """Mean accuracy over the run's validations."""
    return statistics.mean(accuracy for _, accuracy in run["curve"])


def best_rate(variant: str, done: dict[Run, dict]) -> float | None:
    """The rate at which a variant is best with the first seed; None until all rates have run."""
    first = [Run(variant, rate, SEEDS[0]) for rate in RATES]
    if any(run not in done for run in first):
        return None
    return max(first, key=lambda run: quality(done[run])).rate


def missing(done: dict[Run, dict], variants: Collection[str] = tuple(LABELS)) -> list[Run]:
    """What can be run next: first every rate of every variant, then the other seeds at the best of each."""
    rates = [Run(variant, rate, SEEDS[0]) for rate in RATES[::-1] for variant in variants]
    best = {variant: best_rate(variant, done) for variant in variants}
    seeds = [Run(name, rate, seed) for seed in SEEDS[1:] for name, rate in best.items() if rate is not None]
    return [run for run in rates + seeds if run not in done]


def missing_again(
    done: dict[Run, dict], again: dict[Run, dict], variants: Collection[str] = tuple(LABELS)
) -> list[Run]:
    """What can be made again: each variant at its best rate with each seed, unless the second run has its `hops`."""
    best = {variant: best_rate(variant, done) for variant in variants}
    runs = [Run(name, rate, seed) for seed in SEEDS for name, rate in best.items() if rate is not None]
    return [run for run in runs if run in done and "hops" not in again.get(run, {})]


def hops(task: Task) -> int:
    """How many things a task's answer takes: find a fact, take the other one or ones, say something else of it."""
    return 1 + (not task.pattern.startswith("same-")) + (not task.transformation.name.startswith("copy-"))


def by_family(model: dcformer.DCFormerForCausalLM, tokenizer) -> dict[str, dict[str, float]]:
    """Accuracy on the test split, of questions without examples before them, by attention pattern and by `hops`.

    Args:
        model: in `eval` mode.
        tokenizer: of the tasks.

    Returns:
        "patterns" and "hops", each family -> accuracy.
    """
    families: dict[str, dict[str, list[float]]] = {"patterns": {}, "hops": {}}
    for task in TASKS:
        rows = iterate_contexts("test", TEST_CONTEXTS, num_examples=1, tasks=[task], first_scored=0)
        accuracy = score(model, [encode(row, tokenizer) for row in rows])["accuracy"]
        families["patterns"].setdefault(task.pattern, []).append(accuracy)
        families["hops"].setdefault(str(hops(task)), []).append(accuracy)
    return {
        name: {family: round(statistics.mean(values), 4) for family, values in members.items()}
        for name, members in families.items()
    }


def train(run: Run, folder: Path, steps: int) -> dict:
    """One run on one core, resumed if it was interrupted; returns what the report needs."""
    torch.set_num_threads(1)
    options = train_synthetic.parse_options([
        f"--learning-rate={run.rate}", f"--seed={run.seed}", f"--steps={steps}", "--decay-steps=0",
        f"--save-steps={min(VALIDATE_STEPS, steps)}", "--test-contexts=1", "--resume", "--quiet", "--cpu",
        f"--output={folder / f'{run.variant}-{run.rate}-{run.seed}'}",
    ])  # fmt: skip
    tokenizer = build_tokenizer(model_max_length=train_synthetic.MAX_TOKENS)
    report = train_synthetic.train(run.variant, options, tokenizer)
    model = dcformer.DCFormerForCausalLM.from_pretrained(options.output / run.variant).eval()
    return {
        "variant": run.variant,
        "learning_rate": run.rate,
        "seed": run.seed,
        "steps": steps,
        "parameters": report["parameters"],
        "flops_per_step": training_flops(model.config, TOKENS) * TOKENS * options.batch_size,
        "minutes": report["minutes"],
        "curve": [[line["step"], line["alone"]] for line in report["curve"]],
        "losses": [[line["step"], line["stage"], line["loss"]] for line in report["curve"]],
        "held_out_losses": [[line["step"], line["alone_loss"]] for line in report["curve"]],
        **by_family(model, tokenizer),
    }


def train_missing(
    runs: list[dict],
    left: Callable[[dict[Run, dict]], list[Run]],
    results: Path,
    folder: Path,
    steps: int,
    workers: int,
    limit: int,
) -> None:
    """Trains at most `limit` runs, `workers` at a time; each is written when it is done.

    Args:
        runs: those that are done; new ones are added, and take the place of one that is there already.
        left: those that are done -> what to run next.
        results: the file of all runs.
        folder: of the checkpoints.
        steps: of a run.
        workers: processes, one core each.
        limit: how many runs at most.
    """
    running: dict[Future, Run] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            todo = [run for run in left(finished(runs)) if run not in running.values()]
            for run in todo[: min(workers - len(running), limit)]:
                print(f"{run}, {len(todo)} known to be missing", flush=True)
                running[pool.submit(train, run, folder, steps)] = run
                limit -= 1
            if not running:
                return
            done = sorted(wait(running, return_when=FIRST_COMPLETED).done, key=lambda future: bool(future.exception()))
            for future in done:  # a failed one ends the program when the others are written
                del running[future]
                runs[:] = (finished(runs) | finished([future.result()])).values()
                results.parent.mkdir(parents=True, exist_ok=True)
                write_text(results, json.dumps({"about": about_runs(), "runs": runs}) + "\n")


def steps_to(run: dict, mark: float) -> int | None:
    """The first validation from which the accuracy stays at a mark or above; None if there is none."""
    reached = None
    for step, accuracy in run["curve"]:
        if accuracy < mark:
            reached = None
        elif reached is None:
            reached = step
    return reached


def first_stage(run: dict) -> int | None:
    """The first validation at which the easiest rows had been learned; None if there is none, or it was not noted."""
    return next((step for step, stage, _ in run.get("losses", []) if stage), None)


def _steps_cell(runs: list[dict], reached: Callable[[dict], int | None]) -> str:
    """Steps until something is reached, seed by seed."""
    return "; ".join(f"over {run['steps']:,}" if (step := reached(run)) is None else f"{step:,}" for run in runs)


def _final_cell(values: Sequence[float], form: str, unit: str = "") -> str:
    """What the runs of some seeds end with."""
    return ", ".join(f"{value:{form}}" for value in values) + unit


def _mean_cell(values: Sequence[float], form: str, unit: str = "") -> str:
    """The mean with its spread, if there are two values or more."""
    if not values:
        return ""
    return f"{statistics.mean(values):{form}}" + (f" ± {spread(values):{form}}" if len(values) > 1 else "") + unit


def final_accuracy(run: dict) -> float:
    """In percent."""
    return 100 * run["curve"][-1][1]


def table(done: dict[Run, dict], again: dict[Run, dict] | None = None, replaced: Sequence[dict] = ()) -> str:
    """Every variant at its best rate, all rates with the first seed, and families of questions, in Markdown.

    Args:
        done: the runs.
        again: those that were made a second time, at the best rates. Where there are any, losses and families are
            theirs.
        replaced: second runs that were made once more, as they had not been asked by hops.
    """
    again = again or {}
    marks = " | ".join(f"steps to {100 * mark:.0f} %" for mark in MARKS)
    told = (
        "Every variant at its best rate (by mean accuracy over the run with seed 0), seed by seed. Steps are those of "
        f"the first validation, one in {VALIDATE_STEPS}, from which on accuracy is as high."
    )
    if again:
        told += (
            " Each was run again with the same seeds, with later code and on another day: steps of these runs are "
            "behind a slash, and losses are theirs."
        )
    if replaced:
        ends = (f"{LABELS[run['variant']]}, seed {run['seed']}, at {final_accuracy(run):.1f} %" for run in replaced)
        told += f" Left out are second runs that were replaced, as families were not noted: {'; '.join(ends)}."
    lines = [
        told,
        "",
        "| | parameters | rate | seeds | accuracy at the end | again | mean | loss at the end | mean "
        f"| steps to the second stage | {marks} | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|---|" + "---|" * len(MARKS) + "---|",
    ]
    rates = {variant: best_rate(variant, done) for variant in LABELS}
    for variant, rate in rates.items():
        if rate is None:
            continue
        first, second = (_at_rate(variant, rate, runs) for runs in (done, again))
        both = [*first, *second]
        losses = [run["held_out_losses"][-1][1] for run in second or first if "held_out_losses" in run]
        cells = [
            LABELS[variant],
            f"{first[0]['parameters']:,}",
            f"{rate:g}",
            ", ".join(f"{run['seed']}" for run in first),
        ]
        cells += [
            _final_cell([final_accuracy(run) for run in runs], ".1f", " %") if runs else "" for runs in (first, second)
        ]
        cells += [_mean_cell([final_accuracy(run) for run in both], ".1f", " %")]
        cells += [_final_cell(losses, ".2f"), _mean_cell(losses, ".2f")]
        reached = [first_stage, *(partial(steps_to, mark=mark) for mark in MARKS)]
        cells += [" / ".join(_steps_cell(runs, step) for runs in (first, second) if runs) for step in reached]
        cells += [f"{statistics.mean(run['minutes'] for run in both):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Seed 0 at each rate: accuracy at the end, its mean over the run, and steps to the second stage.", ""]
    lines += ["| | " + " | ".join(f"{rate:g}" for rate in RATES) + " |", "|---|" + "---|" * len(RATES)]
    for variant, label in LABELS.items():
        found = [done.get(Run(variant, rate, SEEDS[0])) for rate in RATES]
        cells = [
            f"{run['curve'][-1][1]:.1%}, {quality(run):.1%}; {_steps_cell([run], first_stage)}" if run else ""
            for run in found
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    at_end = "at the end, %, at the best rate" + (", of the second runs" if again else "")
    lines += _family_lines("patterns", f"Each attention pattern {at_end}.", again or done, rates)
    hop = "one to find a fact, one more to take what it is not about, one more to say something else of it"
    lines += _family_lines("hops", f"Each number of hops ({hop}) {at_end}.", again or done, rates)
    return "\n".join(lines) + "\n"


def _at_rate(variant: str, rate: float | None, done: dict[Run, dict]) -> list[dict]:
    """The runs of a variant at a rate, by seed."""
    return [done[run] for seed in SEEDS if (run := Run(variant, rate, seed)) in done]


def _family_lines(kind: str, told: str, done: dict[Run, dict], rates: dict[str, float | None]) -> list[str]:
    """What runs at the best rates answer of each family at the end, seed by seed.

    Args:
        kind: "patterns" or "hops", as `by_family` names them.
        told: the sentence before the table.
        done: runs; those in which the families were not measured are left out.
        rates: the best rate of each variant.
    """
    found = {}
    for variant in LABELS:
        runs = _at_rate(variant, rates[variant], done)
        if measured := {run["seed"]: run[kind] for run in runs if kind in run}:
            found[variant] = measured
    if not found:
        return []
    heads = [f"{LABELS[variant]}: seed {', '.join(map(str, measured))}" for variant, measured in found.items()]
    lines = ["", told, "", "| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(found)]
    for family in sorted({family for by_seed in found.values() for run in by_seed.values() for family in run}):
        cells = [", ".join(f"{100 * run[family]:.1f}" for run in by_seed.values()) for by_seed in found.values()]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return lines


def picture(done: dict[Run, dict], again: dict[Run, dict], file: Path) -> None:
    """Accuracy and loss against steps and operations in SVG: a thin line for each run, first and made `again`, at its
    variant's best rate so far, and a thick one for their mean. The loss is that of the runs in which it was noted.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex="col", sharey="row", layout="constrained")
    styles = ("-", "-.", "--", ":", (0, (5, 1, 1, 1, 1, 1)))
    for (variant, label), color, style in zip(LABELS.items(), pyplot.cm.tab10.colors, styles, strict=False):
        first = [run for rate in RATES if (run := Run(variant, rate, SEEDS[0])) in done]
        if not first:
            continue
        rate = max(first, key=lambda run: quality(done[run])).rate  # the best so far
        runs = [*_at_rate(variant, rate, done), *_at_rate(variant, rate, again)]
        for row, kind, unit in zip(axes, ("curve", "held_out_losses"), (100, 1), strict=True):
            if not (noted := [run[kind] for run in runs if kind in run]):
                continue
            values = [[unit * value for _, value in curve] for curve in noted]
            mean = [statistics.mean(at) for at in zip(*values, strict=True)]
            for axis, scale in zip(row, (1, runs[0]["flops_per_step"]), strict=True):
                steps = [scale * step for step, _ in noted[0]]
                for curve in values:
                    axis.plot(steps, curve, color=color, lw=0.5)
                axis.plot(steps, mean, color=color, ls=style, lw=2.2, label=f"{label}, {rate:g}")
    axes[0, 0].set(ylabel="validation accuracy, %")
    axes[1, 0].set(xlabel="steps", ylabel="validation loss, nats an answer", yscale="log")
    axes[1, 1].set(xlabel="operations of training")
    if axes[0, 0].lines:
        axes[0, 0].legend(fontsize=8, frameon=False)
    for axis in axes.flat:
        axis.grid(color="0.9")
    save_figure(figure, file)


def report(output: Path) -> None:
    """Writes table.md and curves.svg beside results.json; again.json has runs of it that were made a second time, and
    replaced.json what was there before of these.

    The card of the bundled checkpoint has part of the repository's own table, and is written, too.
    """
    done = finished(read_runs(output / "results.json"))
    if not done:
        raise SystemExit(f"error: {output / 'results.json'} has no runs; train some first, without --report")
    again = finished(read_runs(output / "again.json"))
    told = table(done, again, read_runs(output / "replaced.json"))
    write_text(output / "table.md", "<!-- written by examples/synthetic_twins.py -->\n" + told)
    picture(done, again, output / "curves.svg")
    if output == OUTPUT:
        write_text(train_synthetic.CHECKPOINT / "README.md", train_synthetic.card(train_synthetic.CHECKPOINT))
    print(told + f"{len(missing(done))} runs can be added. Wrote table.md and curves.svg to {output}")


def main(options: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, table and picture")
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "twins", help="folder of the checkpoints")
    parser.add_argument("--limit", type=int, help="how many runs at most; all that are missing when not given")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=LABELS, default=list(LABELS), help="which to train")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="train the runs at the best rates a second time")
    parser.add_argument("--report", action="store_true", help="no training")
    arguments = parser.parse_args(options)
    for name in ("limit", "workers"):
        if (count := getattr(arguments, name)) is not None and count < 1:
            parser.error(f"--{name} {count}: expected more than 0")
    results = arguments.output / "results.json"
    runs = [] if arguments.report and not results.is_file() else read_runs(results)
    if other := sorted({run["steps"] for run in runs} - {arguments.steps}):
        parser.error(f"{results} has runs of {other[0]} steps, not {arguments.steps}: give --steps or another --output")
    if not arguments.report:
        left, folder = partial(missing, variants=arguments.variants), arguments.runs
        if arguments.again:
            left, folder = partial(missing_again, finished(runs), variants=arguments.variants), folder / "again"
            results = arguments.output / "again.json"
            runs = read_runs(results)
        limit = sys.maxsize if arguments.limit is None else arguments.limit
        train_missing(runs, left, results, folder, arguments.steps, arguments.workers, limit)
    report(arguments.output)


if __name__ == "__main__":
    main()
