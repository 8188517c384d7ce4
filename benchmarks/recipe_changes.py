"""What the recipe of the bundled checkpoint owes its parts: its first steps, with one thing changed at a time.

    python benchmarks/recipe_changes.py              # what is missing of the runs, then the table
    python benchmarks/recipe_changes.py --changes at-once --steps 4600            # as long as the recipe's twins
    python benchmarks/recipe_changes.py --changes muon --output runs/look.json    # a look
    python benchmarks/recipe_changes.py --report     # the table of what is done

Rows, stages, model, optimizer and rate are those of `examples/train_synthetic.py` for DCFormer. Two seeds; one core a
run. Accuracy is that of its validation questions, of all tasks, most of which later stages are for.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import composition_rates
import torch
import training_factors
from transformers import set_seed

import dcformer
from dcformer.synthetic import build_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_synthetic
from synthetic_rows import Stage, collate
from train_synthetic import CURRICULUM, LOG_STEPS, MAX_TOKENS, WINDOW

RESULTS = Path(__file__).resolve().parent / "results" / "recipe_changes.json"
STEPS, WARMUP, ROWS, RATE, DECAY, SEEDS = 1000, 100, 32, 1e-3, 0.1, (0, 1)


@dataclass(frozen=True)
class Change:
    """How a run is made.

    Attributes:
        label: what it is called in the table.
        stages: of rows.
        is_global: all layers, instead of every other one.
        is_mimetic: whether keys, outputs and the output layer start from queries, values and embeddings.
        embeddings: their standard deviation before training.
        is_quiet: whether attention and MLPs put out nothing before training.
        compose_rate: of composition, relative to the others'.
        muon: Muon for the matrices of layers, with updates as large as AdamW's; AdamW for the rest.
    """

    label: str
    stages: tuple[Stage, ...] = CURRICULUM
    is_global: bool = False
    is_mimetic: bool = True
    embeddings: float = 0.3
    is_quiet: bool = False
    compose_rate: float = 1.0
    muon: bool = False


CHANGES = {
    "nothing": Change("nothing"),
    "at-once": Change("all tasks from the start", stages=(Stage(),)),
    "three-facts": Change("three facts from the start", stages=tuple(replace(stage, facts=3) for stage in CURRICULUM)),
    "global": Change("all layers global", is_global=True),
    "usual-start": Change("no layer starts from another", is_mimetic=False),
    "quiet-start": Change("embeddings of 1, outputs of layers at 0", embeddings=1.0, is_quiet=True),
    "tenth": Change("a tenth of the rate for composition", compose_rate=0.1),
    "muon": Change("Muon for matrices", muon=True),
}


def make_model(change: Change, tokenizer) -> dcformer.DCFormerForCausalLM:
    """The recipe's model before training."""
    kinds = {"layer_types": ["full_attention"] * 4} if change.is_global else {}
    model = train_synthetic.make_model(tokenizer, attn_implementation="eager", **kinds)
    std = model.config.initializer_range
    with torch.no_grad():
        model.model.embed_tokens.weight *= change.embeddings / 0.3
        for layer in model.model.layers:
            attention = layer.self_attn
            if not change.is_mimetic:
                for projection in (attention.k_proj, attention.o_proj):
                    projection.weight.normal_(std=std)
            if change.is_quiet:
                attention.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        if not change.is_mimetic:
            model.lm_head.weight.normal_(std=std)
    return model


def make_optimizers(model: dcformer.DCFormerForCausalLM, change: Change) -> list[torch.optim.Optimizer]:
    """Those of a run, AdamW's groups as in the recipe."""
    if change.muon:
        return training_factors.make_optimizers(model, training_factors.Factor(change.label, muon=True), RATE)
    groups = dcformer.parameter_groups(model, RATE, DECAY, change.compose_rate)
    return [torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))]


def train(settings: dict, folder: str) -> dict:
    """One run: its settings, where stages began, mean losses of every 50 steps, and what it answers at the end."""
    torch.set_num_threads(1)
    set_seed(settings["seed"])
    change, steps = CHANGES[settings["change"]], settings["steps"]
    tokenizer = build_tokenizer(model_max_length=MAX_TOKENS)
    model = make_model(change, tokenizer)
    losses: list[float] = []
    history: list[dict] = []
    curriculum = train_synthetic.Curriculum(steps, 0, stages=change.stages)
    rows = train_synthetic.Rows(curriculum, ROWS, settings["seed"])
    batches = (collate([rows[step * ROWS + i] for i in range(ROWS)], WINDOW) for step in range(steps))
    for loss in composition_rates.steps_of(model, make_optimizers(model, change), WARMUP, batches):
        losses.append(loss)
        if len(losses) % LOG_STEPS == 0:
            history.append({"step": len(losses), "loss": round(statistics.mean(losses[-LOG_STEPS:]), 4)})
            curriculum.read(history)
    scores = train_synthetic.score(
        model.eval(), train_synthetic.make_data("validation", 4, 1, settings["seed"], tokenizer)
    )
    found = {"begins": curriculum.begins[1:], "losses": [entry["loss"] for entry in history]}
    return settings | found | {name: round(scores[name], 4) for name in ("accuracy", "loss")}


def settings_of(change: str, seed: int, steps: int) -> dict:
    """What a run is made of."""
    return {"change": change, "seed": seed, "steps": steps}


def table(runs: list[dict], steps: int) -> str:
    """What was changed, when stages began, and what is answered at the end, seed by seed, in Markdown."""
    heads = ("changed", "later stages began at", "accuracy after", "loss of validation", "of the last rows")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, change in CHANGES.items():
        wanted = [settings_of(name, seed, steps) for seed in SEEDS]
        found = [run for settings in wanted for run in runs if settings.items() <= run.items()]
        if len(found) < len(SEEDS):
            lines.append(f"| {change.label} |" + " not done |" * (len(heads) - 1))
            continue
        begins = [", ".join(f"{step:,}" for step in run["begins"]) or "-" for run in found]
        cells = ["; ".join(begins) if len(change.stages) > 1 else "one stage"]
        cells += ["; ".join(f"{100 * run['accuracy']:.1f} %" for run in found)]
        cells += ["; ".join(f"{value:.2f}" for value in values) for values in (
            [run["loss"] for run in found], [run["losses"][-1] for run in found],
        )]  # fmt: skip
        lines.append(f"| {change.label} | " + " | ".join(cells) + " |")
    lines += ["", f"After {steps:,} steps, seeds {' and '.join(map(str, SEEDS))}; the last rows are of the last stage."]
    for run in runs:
        if run["steps"] > steps:
            lines[-1] += (
                f" After {run['steps']:,}, seed {run['seed']}, {CHANGES[run['change']].label}: "
                f"{100 * run['accuracy']:.1f} %, {run['loss']:.2f} and {run['losses'][-1]:.2f}."
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    options = composition_rates.parse_options(parser, arguments, RESULTS, STEPS, LOG_STEPS, LOG_STEPS)
    runs = composition_rates.kept_runs(options)
    wanted = [settings_of(change, seed, options.steps) for seed in SEEDS for change in options.changes]
    composition_rates.make_missing(
        runs, wanted, train, options, lambda run: (list(CHANGES).index(run["change"]), run["seed"])
    )
    print(table(runs, options.steps))


if __name__ == "__main__":
    main()
