"""Composition's learning rates once more, on all 74 synthetic tasks with one question a text.

    python benchmarks/one_question_rates.py             # what is missing of the runs, then the table
    python benchmarks/one_question_rates.py --ways plain 1 --seeds 0 --steps 500 --output runs/look.json   # a look
    python benchmarks/one_question_rates.py --report    # the table of what is done

Four global layers of width 128 with 8 heads, 128 texts a step, AdamW with a warm-up and then a constant rate. For plain
attention and for DCFormer, whose composition has 1 or 0.1 times the rate of the other parameters, every rate and seed:
the mean loss of each 250 steps, and loss and accuracy on questions that are held out. No run is made twice. One core a
run, 15 to 25 minutes.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import composition_rates
import torch
from composition_rates import WAYS
from transformers import DataCollatorForTokenClassification

from dcformer.synthetic import build_tokenizer, encode, iterate_contexts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from study import spread
from train_synthetic import score

RESULTS = Path(__file__).resolve().parent / "results" / "one_question_rates.json"
SIZE = composition_rates.Size(128, 8, 0.06, 128, (1e-3, 2e-3), ("plain", "1", "0.1"), (0, 1, 2))
LAYERS, WARMUP, STEPS, PART = 4, 200, 2000, 250
HELD_OUT = 20  # questions of each task


def make_texts(split: str, number: int | None, seed: int, tokenizer) -> Iterator[dict]:
    """Tokenized questions of all tasks in turn, `number` of each; without end when None."""
    records = iterate_contexts(split, number, num_examples=1, seed=seed, first_scored=0)
    return (encode(record, tokenizer) for record in records)


def make_batches(steps: int, seed: int, tokenizer) -> Iterator[dict]:
    """Rows of each step, `input_ids` and `labels` [B, T], padded on the right."""
    texts, collate = make_texts("train", None, seed, tokenizer), DataCollatorForTokenClassification(tokenizer)
    for _ in range(steps):
        batch = collate(list(itertools.islice(texts, SIZE.rows)))
        del batch["attention_mask"]  # such padding is seen by no other token, and has no loss
        yield batch


def train(settings: dict, folder: str) -> dict:
    """One run: its settings, and of each part the loss in training and the scores on questions that are held out."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    tokenizer = build_tokenizer()
    tokenizer.padding_side = "right"
    model = composition_rates.make_model(
        SIZE,
        settings["way"],
        vocab_size=len(tokenizer),
        num_hidden_layers=LAYERS,
        sliding_window=None,
        attn_implementation="dcformer_chunked",
    )
    groups = composition_rates.make_groups(model, settings["way"], settings["rate"])
    optimizer = torch.optim.AdamW(groups, lr=settings["rate"], betas=(0.9, 0.98))
    asked = list(make_texts("test", HELD_OUT, 0, tokenizer))
    losses, parts, start = [], [], time.process_time()
    batches = make_batches(settings["steps"], settings["seed"], tokenizer)
    for loss in composition_rates.steps_of(model, [optimizer], WARMUP, batches):
        losses.append(loss)
        if len(losses) % PART == 0:
            scores = score(model.eval(), asked)
            model.train()
            part = {
                "train_loss": statistics.mean(losses[-PART:]),
                "loss": scores["loss"],
                "accuracy": scores["accuracy"],
            }
            parts.append({name: round(value, 4) for name, value in part.items()})
    return settings | {"parts": parts, "seconds": round(time.process_time() - start)}


def _cell(runs: list[dict], at: int) -> str:
    """Means over seeds of a part's loss in training and of the accuracy behind it, with their spreads."""
    losses = [run["parts"][at]["train_loss"] for run in runs]
    shares = [100 * run["parts"][at]["accuracy"] for run in runs]
    if len(runs) == 1:
        return f"{losses[0]:.3f}, {shares[0]:.1f} %"
    return (
        f"{statistics.mean(losses):.3f} ± {spread(losses):.3f}, {statistics.mean(shares):.1f} ± {spread(shares):.1f} %"
    )


def table(runs: list[dict]) -> str:
    """For every way and rate the loss and the accuracy at the half and at the end, in Markdown."""
    if not runs:
        return "no runs"
    steps = runs[0]["steps"]
    parts = (steps // PART // 2 - 1, -1)
    heads = [f"{steps // PART // 2 * PART:,} steps", f"{steps:,} steps"]
    lines = [
        "| rate of composition, relative to the others' | rate | seeds | " + " | ".join(heads) + " |",
        "|---|---|---|---|---|",
    ]
    for way, rate in itertools.product(SIZE.ways, sorted({run["rate"] for run in runs})):
        found = [run for run in runs if (run["way"], run["rate"]) == (way, rate)]
        if found:
            seeds = ", ".join(str(run["seed"]) for run in found)
            cells = " | ".join(_cell(found, at) for at in parts)
            lines.append(f"| {WAYS[way]} | {rate:g} | {seeds} | {cells} |")
    lines += [
        "",
        f"Mean loss of {PART} steps in training, and accuracy on {74 * HELD_OUT:,} questions that are held out; "
        f"{SIZE.rows * steps:,} questions are seen in all. Means and standard deviations over seeds.",
    ]
    return "\n".join(lines)


def beside_plain(runs: list[dict]) -> str:
    """By how much the loss is lower than plain attention's, run by run: after equal steps and after equal seconds.

    And, where composition has a rate of its own, than with one rate for all, after equal steps.
    """
    plain, one_rate = ({(r["rate"], r["seed"]): r for r in runs if r["way"] == way} for way in ("plain", "1"))
    lines = [
        "| rate of composition | rate | seed | times plain's seconds | lower after all steps | after plain's seconds "
        "| lower than with one rate |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for run in runs:
        other = plain.get((run["rate"], run["seed"]))
        if run["way"] == "plain" or other is None:
            continue
        times, losses = run["seconds"] / other["seconds"], [part["train_loss"] for part in run["parts"]]
        reached = losses[min(int(len(losses) / times), len(losses) - 1)]  # of the steps that were being made then
        lower = [f"{other['parts'][-1]['train_loss'] - loss:+.3f}" for loss in (losses[-1], reached)]
        same = one_rate.get((run["rate"], run["seed"])) if run["way"] != "1" else None
        lower.append("-" if same is None else f"{same['parts'][-1]['train_loss'] - losses[-1]:+.3f}")
        lines.append(f"| {run['way']} | {run['rate']:g} | {run['seed']} | {times:.2f} | {' | '.join(lower)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=SIZE.ways, default=list(SIZE.ways))
    parser.add_argument("--rates", nargs="+", type=float, default=list(SIZE.rates))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SIZE.seeds))
    options = composition_rates.parse_options(parser, arguments, RESULTS, STEPS, PART, 2 * PART)
    if not all(rate > 0 for rate in options.rates):
        parser.error(f"--rates {' '.join(map(str, options.rates))}: expected numbers above 0")
    runs = [run for run in composition_rates.kept_runs(options) if run["steps"] == options.steps]
    wanted = [
        {"way": way, "rate": rate, "seed": seed, "steps": options.steps}
        for seed in options.seeds
        for rate in options.rates
        for way in options.ways
    ]

    def place(run: dict) -> tuple:
        return SIZE.ways.index(run["way"]), run["rate"], run["seed"]

    composition_rates.make_missing(runs, wanted, train, options, place)
    print(table(runs), beside_plain(runs), sep="\n\n")


if __name__ == "__main__":
    main()
