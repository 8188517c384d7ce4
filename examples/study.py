"""Trains plain, talking-heads and dynamically composed attention side by side: the paper's ablation, in the small.

    python examples/study.py                      # what is not in docs/study/results.json yet, then tables and plot
    python examples/study.py --output runs/study  # all of it anew: hours, even on two cores
    python examples/study.py --output runs/look --seeds 0 --steps 20 --rates 6e-3  # a look at how it goes

Every variant of a task and size gets the same data, seeds and steps, and its own best learning rate of one grid. Two
seeds that are not reported find it: one tries the grid, the other the two best again. A run that is done is written to
`results.json` at once, and not run again: stop and start as you like. Every run is `transformers.Trainer` on one core.
"""

import argparse
import gzip
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUT = REPOSITORY / "docs" / "study"
CORPUS = REPOSITORY / "examples" / "data" / "corpus.txt.gz"


@dataclass(frozen=True)
class Variant:
    """A row of the paper's Table 9: switches of the configuration, and its perplexity on the Pile at 405M."""

    label: str
    paper: float
    switches: dict = field(default_factory=dict)


NO_DYNAMIC = {"compose_query": False, "compose_key": False}
VARIANTS = {
    "plain": Variant("plain attention", 11.68, NO_DYNAMIC | {"compose_pre": False, "compose_post": False}),
    "static": Variant("static only (talking heads)", 11.17, NO_DYNAMIC | {"compose_static": True}),
    "pre": Variant("pre only", 11.54, {"compose_post": False}),
    "post": Variant("post only", 11.05, {"compose_pre": False}),
    "query": Variant("query-wise only", 10.89, {"compose_key": False}),
    "key": Variant("key-wise only", 10.91, {"compose_query": False}),
    "r1": Variant("R = 1", 10.87, {"compose_rank": 1}),
    "r2": Variant("R = 2 (DCFormer++)", 10.83),
    "r4": Variant("R = 4", 10.89, {"compose_rank": 4}),
    "full": Variant("full DCMHA (R = 2 and static)", 10.79, {"compose_static": True}),
}
PAPER_SYNTHETIC = {"plain": (10.05, 31.9), "r2": (7.36, 39.0)}  # Table 5, 6.9B: perplexity, accuracy in percent
# (better, worse): what Table 9 shows at full size
CLAIMS = (
    ("static", "plain"),
    ("r2", "plain"),
    ("r2", "static"),
    ("r2", "query"),
    ("r2", "key"),
    ("query", "key"),
    ("post", "pre"),
    ("pre", "plain"),
    ("r2", "post"),
    ("r2", "r1"),
    ("r2", "r4"),
    ("full", "r2"),
)
SIZES = {
    "small": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    "medium": {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6},
}


@dataclass(frozen=True)
class Task:
    """What is trained on.

    Attributes:
        unit: what a scored token is.
        batch_size: rows a step.
        steps: by size.
        seeds: how many, from 0.
    """

    label: str
    unit: str
    batch_size: int
    steps: dict[str, int]
    seeds: int


TASKS = {
    "synthetic": Task("74 synthetic tasks", "answer", 32, {"small": 1200, "medium": 500}, seeds=5),
    "text": Task("characters of text", "character", 8, {"small": 800, "medium": 500}, seeds=5),
}
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
RATE_SEEDS = (100, 101)  # of the runs that choose rates, which are not reported: of the grid, and of its best
FINALISTS = 2  # rates that the second seed tries
LENGTH = 128  # characters of a row of text
HELD_OUT = 20  # every twentieth page of text
POWER = 1.960 + 0.842  # standard errors with which an interval is without 0 in 80 % of studies: quantiles of 97.5, 80 %
SMALL = 0.01  # nats, of differences that few seeds do not tell
PARTS = 8  # of a run, whose mean losses in training say whether its curve has flattened
PAGE = 32 * LENGTH


@cache  # made once in a process
def make_data(task: str, rows: int) -> tuple[list[dict], list[dict], int]:
    """Rows with `input_ids` and `labels` (-100: not scored) to train on and to test with, and the vocabulary's size."""
    if task == "synthetic":
        from dcformer.synthetic import TASKS as KINDS
        from dcformer.synthetic import build_tokenizer, encode, iterate_contexts

        tokenizer = build_tokenizer()

        def contexts(split: str, per_kind: int) -> list[dict]:  # one question each: they say themselves what is asked
            return [encode(r, tokenizer) for r in iterate_contexts(split, per_kind, num_examples=1, first_scored=0)]

        return contexts("train", -(-rows // len(KINDS))), contexts("test", 20), len(tokenizer)

    text = gzip.decompress(CORPUS.read_bytes()).decode()
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    train, test = [], []
    for page in range(len(text) // PAGE):
        ids = [index[character] for character in text[page * PAGE : (page + 1) * PAGE]]
        blocks = [ids[start : start + LENGTH] for start in range(0, PAGE, LENGTH)]
        (train if page % HELD_OUT else test).extend({"input_ids": block, "labels": block} for block in blocks)
    return train * -(-rows // len(train)), test, len(index)


def settings_of(task: str, size: str, variant: str, seed: int, learning_rate: float, steps: int | None = None) -> dict:
    """The settings of a run; a stored result is reused only if all of them are equal."""
    what = TASKS[task]
    return {
        "task": task,
        "size": size,
        "variant": variant,
        "seed": seed,
        "steps": steps or what.steps[size],
        "batch_size": what.batch_size,
        "learning_rate": learning_rate,
    }


def token_scores(logits, labels):
    """[B, N, V] logits -> [B, N - 1, 2]: each next token's negative log-likelihood, and whether it came first."""
    import torch

    logits = logits[0] if isinstance(logits, tuple) else logits
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # [B, N - 1]
    return torch.stack([loss, (logits.argmax(-1) == labels).float()], dim=-1)


def mean_scores(prediction) -> dict[str, float]:
    """Means over all scored tokens of the test set."""
    scored = prediction.label_ids[:, 1:] != -100
    loss, accuracy = prediction.predictions[scored].astype(float).mean(axis=0)
    return {"loss": float(loss), "accuracy": float(accuracy), "tokens": int(scored.sum())}


def train(settings: dict, folder: str) -> dict:
    """One run: from nothing to its scores on the test set. `folder` is Trainer's, which puts nothing there."""
    import torch
    from transformers import set_seed

    import dcformer

    torch.set_num_threads(1)
    task, size = TASKS[settings["task"]], SIZES[settings["size"]]
    train_rows, test_rows, vocabulary = make_data(settings["task"], settings["steps"] * task.batch_size)
    set_seed(settings["seed"])
    width = size["hidden_size"]
    model = dcformer.DCFormerForCausalLM(
        dcformer.DCFormerConfig(
            **size,
            **VARIANTS[settings["variant"]].switches,
            vocab_size=vocabulary,
            intermediate_size=8 * round(width / 3),  # 8/3 of the width
            sliding_window=32,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.7 / math.sqrt(width),  # the usual 0.02 is for wide models
            attn_implementation="dcformer_chunked",
        )
    )
    trainer, trained, seconds = fit(model, settings, train_rows, test_rows, folder)
    scores = trainer.evaluate()
    return settings | {
        "parameters": model.num_parameters(),
        "train_loss": trained.training_loss,
        "train_losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "loss": scores["eval_loss"],
        "accuracy": scores["eval_accuracy"],
        "tokens": scores["eval_tokens"],
        "seconds": round(seconds, 1),
    }


def fit(model, settings: dict, train_rows: list[dict], test_rows: list[dict], folder: str):
    """Trains a model: the Trainer, what its `train` returned, and the processor's seconds that it took."""
    from transformers import DataCollatorForTokenClassification, PrinterCallback, Trainer, TrainingArguments

    from dcformer.synthetic import build_tokenizer

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch_size"],
            per_device_eval_batch_size=74,
            learning_rate=settings["learning_rate"],
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            warmup_steps=settings["steps"] // 20,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            logging_steps=max(settings["steps"] // PARTS, 1),
            save_strategy="no",
            report_to="none",
            seed=settings["seed"],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        data_collator=DataCollatorForTokenClassification(build_tokenizer()),  # pads ids and labels, where they differ
        train_dataset=train_rows,
        eval_dataset=test_rows,
        compute_metrics=mean_scores,
        preprocess_logits_for_metrics=token_scores,
    )
    trainer.remove_callback(PrinterCallback)  # one progress bar for the whole study
    start = time.process_time()
    trained = trainer.train()
    return trainer, trained, time.process_time() - start


def read_runs(path: Path) -> list[dict]:
    """The runs that are done.

    Raises:
        ValueError: if the file is not one that this script wrote.
    """
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text())["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a results.json of this script ({error!r}): move it, or choose another --output"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    neighbor = path.with_name(f".{path.name}.tmp")
    neighbor.write_text(text, encoding="utf-8")
    os.replace(neighbor, path)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib's, PNG or SVG, completely or not at all, and closes it. No date is in the file."""
    from matplotlib import pyplot

    neighbor = path.with_name(f".{path.name}")
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with pyplot.rc_context({"svg.hashsalt": path.parent.name}):  # the same file from the same runs
        figure.savefig(neighbor, dpi=110, format=path.suffix[1:], metadata=metadata)
    os.replace(neighbor, path)
    pyplot.close(figure)


def about_runs(*packages: str) -> dict[str, str]:
    """Where runs were made: machine, and versions of what matters and of more packages."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; one core a run",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", *packages, "dcformer")},
    }


def as_trained(train: Callable[[dict, str], dict], wanted: list[dict], workers: int) -> Iterator[dict]:
    """Runs as they are done, `workers` at a time in processes of their own, with a progress bar.

    Args:
        train: the settings of a run and a temporary folder -> the run.
        wanted: settings.

    Raises:
        what a run raised, when those that had started beside it are done and have been returned.
    """
    errors = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(wanted), unit="run") as progress,
    ):
        pending = {pool.submit(train, settings, folder) for settings in wanted}
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                if error := future.exception():
                    errors.append(error)
                else:
                    progress.update()
                    yield future.result()
            if errors:
                pending = {future for future in pending if not future.cancel()}  # what has begun goes on
    if errors:
        raise errors[0]


def write_runs(path: Path, runs: list[dict]) -> None:
    order = {"task": list(TASKS), "size": list(SIZES), "variant": list(VARIANTS)}

    def place(run: dict) -> tuple:
        return *(names.index(run[key]) for key, names in order.items()), run["seed"], run["learning_rate"]

    write_text(path, json.dumps({"about": about_runs(), "runs": sorted(runs, key=place)}, indent=1) + "\n")


def train_missing(wanted: list[dict], path: Path, workers: int, what: str) -> list[dict]:
    """Trains what is wanted and not done, `workers` runs at a time; returns what was wanted."""
    done = read_runs(path)
    missing = [settings for settings in wanted if not any(settings.items() <= run.items() for run in done)]
    print(f"{what}: {len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        for run in as_trained(train, missing, workers):
            same = ("task", "size", "variant", "seed", "learning_rate")  # of another number of steps: replaced
            done = [other for other in done if any(other[key] != run[key] for key in same)] + [run]
            write_runs(path, done)
            line = "{task} {size} {variant} seed {seed} at {learning_rate:g}: loss {loss:.4f}, {seconds:.0f} s"
            tqdm.write(line.format(**run))
    return [run for run in done if any(settings.items() <= run.items() for settings in wanted)]


def train_cell(
    task: str,
    size: str,
    variants: list[str],
    grid: Sequence[float],
    seeds: Sequence[int],
    steps: int | None,
    path: Path,
    workers: int,
) -> None:
    """One task and size: every rate of the grid for every variant, the best of them again, then the seeds at the best.

    Args:
        grid: learning rates; a single one is not tried first.
        steps: of every run; those of the task and size when None.
    """
    rates = dict.fromkeys(variants, grid[0])
    if len(grid) > 1:
        first, second = RATE_SEEDS
        tried = [settings_of(task, size, name, first, rate, steps) for rate in grid for name in variants]
        runs = train_missing(tried, path, workers, f"{task}, {size}, learning rates")
        best = {name: rates[:FINALISTS] for (*_, name), rates in ranked_rates(runs).items()}
        again = [settings_of(task, size, name, second, rate, steps) for name in variants for rate in best[name]]
        runs += train_missing(again, path, workers, f"{task}, {size}, the best learning rates again")
        rates = {name: ranked[0] for (*_, name), ranked in ranked_rates(runs).items()}
    wanted = [settings_of(task, size, name, seed, rate, steps) for seed in seeds for name, rate in rates.items()]
    train_missing(wanted, path, workers, f"{task}, {size}")  # seed by seed, so that a study cut short has whole ones


# --- what came out ----------------------------------------------------------------------------------------------------

Cell = tuple[str, str]  # task, size


def ranked_rates(runs: list[dict]) -> dict[tuple[str, str, str], list[float]]:
    """(task, size, variant) -> learning rates tried, the best first; missing where none were.

    Rates that more seeds have tried come before those of fewer, then the lower mean loss. One without a loss is last.
    """
    places = dict.fromkeys(place_of(run) for run in runs if run["seed"] in RATE_SEEDS)
    tried = {at: choosing_losses(runs, at) for at in places}

    def rank(losses: dict[int, float]) -> tuple[int, float]:
        mean = statistics.mean(losses.values())
        return -len(losses), mean if math.isfinite(mean) else math.inf

    return {at: sorted(by_rate, key=lambda rate: rank(by_rate[rate])) for at, by_rate in tried.items()}


def place_of(run: dict) -> tuple[str, str, str]:
    return run["task"], run["size"], run["variant"]


def choosing_losses(runs: list[dict], at: tuple[str, str, str]) -> dict[float, dict[int, float]]:
    """Of a variant: learning rate -> seed that chooses -> loss."""
    found: dict[float, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: (run["learning_rate"], run["seed"])):
        if place_of(run) == at and run["seed"] in RATE_SEEDS:
            found.setdefault(run["learning_rate"], {})[run["seed"]] = run["loss"]
    return found


def reported(runs: list[dict]) -> list[dict]:
    """The runs at their variant's own rate and as long as those that chose it, without these."""
    ranked = ranked_rates(runs)
    steps = {place_of(run): run["steps"] for run in runs if run["seed"] in RATE_SEEDS}

    def is_reported(run: dict) -> bool:
        at = place_of(run)
        own = (ranked.get(at, [run["learning_rate"]])[0], steps.get(at, run["steps"]))
        return run["seed"] not in RATE_SEEDS and (run["learning_rate"], run["steps"]) == own

    return [run for run in runs if is_reported(run)]


def collect(runs: list[dict], measure: str) -> dict[Cell, dict[str, dict[int, float]]]:
    """(task, size) -> variant -> seed -> the measure."""
    found: dict[Cell, dict[str, dict[int, float]]] = {}
    for task in TASKS:
        for size in SIZES:
            for run in runs:
                if (run["task"], run["size"]) == (task, size):
                    found.setdefault((task, size), {}).setdefault(run["variant"], {})[run["seed"]] = run[measure]
    return found


def best_rate(losses: dict[float, float], rates: tuple[float, ...]) -> float | None:
    """The learning rate of a grid with the lowest loss; None before all have been run. One without a loss is last."""
    if not losses.keys() >= set(rates):
        return None
    return min(rates, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def spread(values: list[float]) -> float:
    """Standard deviation over seeds; of one seed, not a number."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def compare(better: dict[int, float], worse: dict[int, float]) -> tuple[float, float, str]:
    """By how much a loss is lower, seed by seed.

    Returns:
        mean and standard error of the differences (of one seed: not a number), and the verdict on "lower": "agrees" or
        "disagrees" if every seed says so and the mean is more than two standard errors from 0; else "open".
    """
    differences = [worse[seed] - better[seed] for seed in sorted(better.keys() & worse.keys())]
    mean, error = statistics.mean(differences), spread(differences) / math.sqrt(len(differences))
    is_clear = abs(mean) > 2 * error and len({difference > 0 for difference in differences}) == 1  # nan is not
    return mean, error, ("agrees" if mean > 0 else "disagrees") if is_clear else "open"


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def interval(better: dict[int, float], worse: dict[int, float]) -> tuple[float, float, str]:
    """As `compare`, with half of the 95 % interval in place of the standard error."""
    from scipy.stats import t

    mean, error, verdict = compare(better, worse)
    return mean, float(t.ppf(0.975, len(better.keys() & worse.keys()) - 1)) * error, verdict


def paper_difference(better: str, worse: str) -> str:
    """What Table 9 says of it."""
    return f"{math.log(VARIANTS[worse].paper / VARIANTS[better].paper):+.4f}"


def seeds_needed(better: str, worse: str, losses: dict[str, dict[int, float]]) -> int:
    """Seeds with which the paper's difference of two variants could be told, with the spread that was found here.

    With so many its 95 % interval is without 0 in 80 % of studies (normal approximation); at least 2.
    """
    _, error, _ = compare(losses[better], losses[worse])
    found = len(losses[better].keys() & losses[worse].keys())
    return max(2, math.ceil((POWER * error / float(paper_difference(better, worse))) ** 2 * found))


def against_plain(losses: dict[Cell, dict[str, dict[int, float]]]) -> list[str]:
    """Every variant's difference from plain attention in Markdown."""
    lines = ["| | paper | " + " | ".join(map(", ".join, losses)) + " |", "|---|---" + "|---" * len(losses) + "|"]
    for name, variant in VARIANTS.items():
        row = [variant.label, paper_difference(name, "plain")]
        for by_variant in losses.values():
            ours, plain = by_variant.get(name, {}), by_variant.get("plain", {})
            if seeds := ours.keys() & plain.keys():
                mean, half, _ = interval(ours, plain)
                ahead = sum(ours[seed] < plain[seed] for seed in seeds)
                row.append(f"{mean:+.4f} ± {half:.4f}{'*' * (abs(mean) > half)}, {ahead} of {len(seeds)}")
            else:
                row.append("")
        if name != "plain":
            lines.append("| " + " | ".join(row) + " |")
    return lines


def limits(runs: list[dict], losses: dict[Cell, dict[str, dict[int, float]]]) -> list[str]:
    """What the runs cannot tell, in Markdown: the paper's small differences, wide intervals, curves that still fall.

    Args:
        runs: all of them.
        losses: of the reported ones, from `collect`.
    """
    small = sum(abs(float(paper_difference(*pair))) < SMALL for pair in CLAIMS)
    lines = [
        f"- Of the paper's {len(CLAIMS)} differences {small} are below {SMALL} nats. To tell so much with five seeds, "
        f"the seeds' differences must have a standard deviation of at most {SMALL * math.sqrt(5) / POWER:.3f}."
    ]
    for cell, by_variant in losses.items():
        halves, deviations = [], []
        for better, worse in (pair for pair in CLAIMS if by_variant.keys() >= set(pair)):
            seeds = len(by_variant[better].keys() & by_variant[worse].keys())
            if seeds > 1:
                halves.append(interval(by_variant[better], by_variant[worse])[1])
                deviations.append(compare(by_variant[better], by_variant[worse])[1] * math.sqrt(seeds))
        if halves:
            lines.append(
                f"- {', '.join(cell)}: it is {min(deviations):.3f} to {max(deviations):.3f}, in the median "
                f"{statistics.median(deviations):.3f}; half-widths of the intervals above are {min(halves):.3f} to "
                f"{max(halves):.3f}, over {SMALL} in {sum(half > SMALL for half in halves)} of {len(halves)}."
            )
    of_synthetic = [run for run in runs if run["task"] == "synthetic" and run["learning_rate"] == 3e-3]
    kept = [run["train_losses"] for run in of_synthetic if "train_losses" in run]
    if kept:
        last, before = (statistics.mean(parts[at - 1] - parts[at] for parts in kept) for at in (-1, -2))
        lines.append(
            f"- In the last eighth of the steps the loss in training still falls by {last:.2f}, after {before:.2f} in "
            f"the eighth before: means of the {len(kept)} runs at 0.003 with these losses noted, on synthetic tasks."
        )
    return lines


def tables(results: dict) -> str:
    """The study in Markdown: scores, the paper's claims one by one, all variants against plain, its Table 5."""
    tried, runs = results["runs"], reported(results["runs"])
    losses, accuracies = collect(runs, "loss"), collect(runs, "accuracy")
    parameters = {(run["size"], run["variant"], run["task"]): run["parameters"] for run in runs}
    versions = ", ".join(f"{name} {value}" for name, value in results["about"].items())
    hours = sum(run["seconds"] for run in tried) / 3600
    lines = [
        "<!-- written by examples/study.py -->",
        "# The ablation in the small: tables",
        "",
        f"{len(tried)} runs, {hours:.1f} hours of one core in all ({versions}). Losses are means over seeds in nats, "
        "with their standard deviation. Paper: perplexity on the Pile at 405M (Table 9).",
    ]
    for (task, size), by_variant in losses.items():
        what = TASKS[task]
        first = next(run for run in runs if (run["task"], run["size"]) == (task, size))
        shape = SIZES[size]
        rates = {run["variant"]: run["learning_rate"] for run in runs if (run["task"], run["size"]) == (task, size)}
        choice = {name: choosing_losses(tried, (task, size, name)) for name in by_variant}
        grid = sorted({rate for by_rate in choice.values() for rate in by_rate})
        how = f"the best of {', '.join(f'{rate:g}' for rate in grid)}" if grid else "the same for all"
        lines += [
            "",
            f"## {what.label}, {size}",
            "",
            f"{shape['num_hidden_layers']} layers, width {shape['hidden_size']}, {shape['num_attention_heads']} heads; "
            f"{first['steps']} steps of {first['batch_size']}, learning rate {how}; "
            f"{first['tokens']:,} scored tokens ({what.unit}s) of the test set.",
            "",
            "| | paper | loss | perplexity | accuracy | learning rate | parameters | seeds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, variant in VARIANTS.items():
            if name in by_variant:
                values, right = list(by_variant[name].values()), list(accuracies[task, size][name].values())
                mean = statistics.mean(values)
                lines.append(
                    f"| {variant.label} | {variant.paper:.2f} | {mean:.4f} ± {spread(values):.4f} | "
                    f"{math.exp(mean):.3f} | {statistics.mean(right):.1%} | {rates[name]:g} | "
                    f"{parameters[size, name, task]:,} | {len(values)} |"
                )
        if grid:
            heads = ["", *(f"{rate:g}" for rate in grid)]
            seeds = sorted({seed for by_rate in choice.values() for losses in by_rate.values() for seed in losses})
            those = ", ".join(map(str, seeds))
            lines += ["", f"Loss by learning rate, which decides and is not reported above; seeds: {those}.", ""]
            lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
            for name in by_variant:
                found = (", ".join(f"{loss:.4f}" for loss in choice[name].get(rate, {}).values()) for rate in grid)
                lines.append(f"| {VARIANTS[name].label} | {' | '.join(found)} |")
        means = {name: statistics.mean(values.values()) for name, values in by_variant.items()}
        if len(means) > 2:
            order = [name for name in VARIANTS if name in means and name != "r4"]  # R = 4 ties with query-wise only
            correlation = rank_correlation([VARIANTS[name].paper for name in order], [means[name] for name in order])
            lines += ["", f"Rank correlation with the paper's perplexities (without R = 4): {correlation:+.2f}."]
    cells = list(losses)
    lines += [
        "",
        "## The paper's order, claim by claim",
        "",
        "By how much the first is better: in the paper the logarithm of the ratio of perplexities, here the difference "
        "of losses, seed by seed, with half its 95 % interval (Student's t). It agrees or disagrees where every seed "
        "says so and the mean is over two standard errors from 0, and clearly where the interval is without 0, too; "
        "else it is open.",
        "",
        "| | paper | " + " | ".join(f"{task}, {size}" for task, size in cells) + " |",
        "|---|---" + "|---" * len(cells) + "|",
    ]
    verdicts: list[str] = []
    clear = 0
    needed: list[list[int]] = [[] for _ in cells]
    for better, worse in CLAIMS:
        row = [f"{VARIANTS[better].label} before {VARIANTS[worse].label}", paper_difference(better, worse)]
        for cell, counts_needed in zip(cells, needed, strict=True):
            if better in losses[cell] and worse in losses[cell]:
                mean, half, verdict = interval(losses[cell][better], losses[cell][worse])
                if len(losses[cell][better].keys() & losses[cell][worse].keys()) > 1:
                    counts_needed.append(seeds_needed(better, worse, losses[cell]))
                is_clear = verdict != "open" and abs(mean) > half
                row.append(f"{mean:+.4f} ± {half:.4f} {'clearly ' * is_clear}{verdict}")
                verdicts.append(verdict)
                clear += is_clear
            else:
                row.append("")
        lines.append("| " + " | ".join(row) + " |")
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("agrees", "disagrees", "open"))
    medians = [
        f"{statistics.median_high(found)} ({task}, {size})"
        for (task, size), found in zip(cells, needed, strict=True)
        if found
    ]
    all_needed = [count for found in needed for count in found]
    few = sum(count <= 20 for count in all_needed)
    told_needed = [
        "Seeds that it would take to tell the paper's differences with the spread of these runs (95 % intervals, power "
        f"80 %), medians: {', '.join(medians)}. {few} of the {len(all_needed)} could be told with 20 seeds or fewer.",
        "",
    ]
    lines += [
        "",
        f"Of {len(verdicts)} comparisons: {counts}. {clear} of them clearly.",
        "",
        *(told_needed if all_needed else []),
        "## What these runs cannot tell",
        "",
        *limits(tried, losses),
        "",
        "## Every variant against plain attention",
        "",
        "By how much it is better, as above, and in how many seeds. * The interval is without 0: of so many, one in "
        "twenty would have a * by chance alone.",
        "",
        *against_plain(losses),
        "",
        "## Synthetic tasks, beside the paper's Table 5",
        "",
        "Perplexity and accuracy of the answers. The paper: Pythia-6.9B and DCPythia-6.9B, trained on the Pile, asked "
        "with 2 to 7 examples. Here: trained on the tasks, asked without examples.",
        "",
        "| | paper, 6.9B | " + " | ".join(size for task, size in cells if task == "synthetic") + " |",
        "|---|---" + "|---" * sum(task == "synthetic" for task, _ in cells) + "|",
    ]
    for name, (perplexity, accuracy) in PAPER_SYNTHETIC.items():
        row = [VARIANTS[name].label, f"{perplexity:.2f}, {accuracy:.1f} %"]
        for cell in cells:
            if cell[0] == "synthetic" and name in losses[cell]:
                mean = statistics.mean(losses[cell][name].values())
                row.append(f"{math.exp(mean):.2f}, {statistics.mean(accuracies[cell][name].values()):.1%}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def plot(results: dict, path: Path) -> None:
    """Loss relative to plain attention with the same seed: the paper's, and each task and size of ours."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    losses = collect(reported(results["runs"]), "loss")
    names = sorted(VARIANTS, key=lambda name: VARIANTS[name].paper)
    figure, axes = pyplot.subplots(1, 1 + len(losses), figsize=(3.2 + 2.6 * len(losses), 3.6), sharey=True)
    for axis, cell in zip(axes, [None, *losses], strict=True):
        for row, name in enumerate(reversed(names)):
            if cell is None:
                differences = [math.log(VARIANTS[name].paper / VARIANTS["plain"].paper)]
            else:
                ours, plain = losses[cell].get(name, {}), losses[cell].get("plain", {})
                differences = [ours[seed] - plain[seed] for seed in sorted(ours.keys() & plain.keys())]
            if differences:
                color = "tab:gray" if name == "plain" else "tab:blue"
                axis.errorbar(statistics.mean(differences), row, xerr=spread(differences), fmt="o", color=color)
                axis.plot(differences, [row] * len(differences), "|", color="black", markersize=9)
        axis.axvline(0, color="lightgray", zorder=0)
        axis.set_title("paper: Pile, 405M" if cell is None else ", ".join(cell), fontsize=10)
        axis.set_xlabel("loss less plain attention's, nats", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(names)), [VARIANTS[name].label for name in reversed(names)])
    figure.tight_layout()
    save_figure(figure, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="else as in TASKS")
    parser.add_argument("--steps", type=int, default=None, help="of every run; else as in TASKS")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="the grid (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, tables.md and study.png")
    parser.add_argument(
        "--report", action="store_true", help="train nothing: tables and plot of the runs that are done"
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: expected at least 1")
    if not all(rate > 0 for rate in options.rates):
        parser.error(f"--rates {' '.join(map(str, options.rates))}: expected numbers above 0")
    if (options.steps or tuple(options.rates) != RATES) and options.output.resolve() == OUTPUT:
        parser.error("--steps and --rates would replace results of the study: choose another --output")

    path = options.output / "results.json"
    try:
        read_runs(path)
        if not options.report:
            options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not options.report:
        for task, size in itertools.product(options.tasks, options.sizes):
            seeds = range(TASKS[task].seeds) if options.seeds is None else options.seeds
            train_cell(task, size, options.variants, options.rates, seeds, options.steps, path, options.workers)
    elif not path.exists():
        parser.error(f"{path} does not exist: nothing to report. Train first, without --report.")
    results = json.loads(path.read_text())
    write_text(options.output / "tables.md", tables(results))
    plot(results, options.output / "study.png")
    print(f"wrote tables.md and study.png of {len(results['runs'])} runs to {options.output}")


if __name__ == "__main__":
    main()
