"""What else decides how soon a person's fact is found: depth, rows, questions, warm-up, betas, embeddings, norms, Muon.

    python benchmarks/training_factors.py              # what is missing of the runs, then the table
    python benchmarks/training_factors.py --factors base muon --output runs/look.json    # a look
    python benchmarks/training_factors.py --report     # the table of what is done

The task, the model of two layers and the loss are those of `composition_rates.py`. One thing at a time is changed, for
DCFormer and for plain attention alike. Each cell has its own learning rate: of one grid the one with the lowest loss
with a seed that is not reported. No run is made twice. One core a run.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import composition_rates
import torch
from composition_rates import DECAY, MEAN, STEPS

import dcformer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from study import best_rate, compare, spread

RESULTS = Path(__file__).resolve().parent / "results" / "training_factors.json"
FAMILIES = {"plain": "plain attention, QK-norm", "dcformer": "DCFormer"}
RATES, RATE_SEED, SEEDS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), 100, (0, 1, 2, 3)


@dataclass(frozen=True)
class Factor:
    """How a run is made.

    Attributes:
        label: what it is called in the table.
        layers: of the model, local and global in turn, or with `is_global` all global.
        rows: of a step.
        questions: of a row.
        warmup: steps of it.
        betas: of AdamW.
        embeddings: their standard deviation before training.
        qk_norm: whether queries and keys have norms.
        muon: Muon for the matrices of layers, with updates as large as AdamW's; AdamW for the rest.
    """

    label: str
    layers: int = 2
    is_global: bool = False
    rows: int = 48
    questions: int = 2
    warmup: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    embeddings: float = 0.3
    qk_norm: bool = True
    muon: bool = False


FACTORS = {
    "base": Factor("nothing"),
    "four-layers": Factor("4 layers", layers=4),
    "global": Factor("both layers global", is_global=True),
    "few-rows": Factor("24 rows a step", rows=24),
    "many-rows": Factor("96 rows a step", rows=96),
    "one-question": Factor("one question a row", questions=1),
    "no-warmup": Factor("no warm-up", warmup=1),
    "long-warmup": Factor("150 steps of warm-up", warmup=150),
    "beta-95": Factor("betas 0.9, 0.95", betas=(0.9, 0.95)),
    "beta-999": Factor("betas 0.9, 0.999", betas=(0.9, 0.999)),
    "small-embeddings": Factor("embeddings of 0.06, as other matrices", embeddings=0.06),
    "large-embeddings": Factor("embeddings of 1", embeddings=1.0),
    "no-norm": Factor("no norms of queries and keys", qk_norm=False),
    "muon": Factor("Muon for matrices", muon=True),
}


def make_model(factor: Factor, family: str) -> dcformer.DCFormerForCausalLM:
    """The model before training."""
    kinds = ("full_attention", "full_attention") if factor.is_global else ("sliding_attention", "full_attention")
    size = composition_rates.SIZES["rates"]
    model = composition_rates.make_model(
        size,
        family,
        num_hidden_layers=factor.layers,
        layer_types=[kinds[i % 2] for i in range(factor.layers)],
        qk_norm=factor.qk_norm,
    )
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=factor.embeddings)
    return model


def make_optimizers(model: dcformer.DCFormerForCausalLM, factor: Factor, rate: float) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices of layers and AdamW for what is left."""
    groups = dcformer.parameter_groups(model, rate, DECAY)
    if not factor.muon:
        return [torch.optim.AdamW(groups, lr=rate, betas=factor.betas)]
    matrices = {p for p in model.model.layers.parameters() if p.dim() == 2}
    rest = [group | {"params": [p for p in group["params"] if p not in matrices]} for group in groups]
    theirs = [group | {"params": [p for p in group["params"] if p in matrices]} for group in groups]
    return [
        torch.optim.AdamW([group for group in rest if group["params"]], lr=rate, betas=factor.betas),
        torch.optim.Muon([group for group in theirs if group["params"]], lr=rate, adjust_lr_fn="match_rms_adamw"),
    ]


def train(settings: dict, folder: str) -> dict:
    """One run: its settings and the mean loss of every 50 steps."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    factor = FACTORS[settings["factor"]]
    model = make_model(factor, settings["family"])
    optimizers = make_optimizers(model, factor, settings["rate"])
    return composition_rates.fit(model, optimizers, factor.rows, factor.warmup, settings, factor.questions)


def settings_of(factor: str, family: str, rate: float, seed: int, steps: int) -> dict:
    """What a run is made of."""
    return {"factor": factor, "family": family, "rate": rate, "seed": seed, "steps": steps}


def loss_of(runs: list[dict], settings: dict) -> float | None:
    """The mean loss of a run's last steps; None where it has not been made."""
    return next((run["losses"][-1] for run in runs if settings.items() <= run.items()), None)


def chosen_rate(runs: list[dict], factor: str, family: str, steps: int) -> float | None:
    """The rate of the grid with the lowest loss with the seed that chooses; None before all have been run."""
    losses = {rate: loss_of(runs, settings_of(factor, family, rate, RATE_SEED, steps)) for rate in RATES}
    return best_rate({rate: loss for rate, loss in losses.items() if loss is not None}, RATES)


def table(runs: list[dict], steps: int) -> str:
    """Losses of each factor and family at its own rate, and by how much DCFormer's is lower, in Markdown."""
    heads = ("changed", *FAMILIES.values(), "lower by", "rates, plain and DCFormer")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    chosen: list[float | None] = []
    for name, factor in FACTORS.items():
        rates = {family: chosen_rate(runs, name, family, steps) for family in FAMILIES}
        chosen += rates.values()
        found: dict[str, dict[int, float]] = {}
        for family, rate in rates.items():
            losses = {s: loss_of(runs, settings_of(name, family, rate, s, steps)) for s in SEEDS} if rate else {}
            found[family] = {seed: loss for seed, loss in losses.items() if loss is not None}
        if any(len(losses) < len(SEEDS) for losses in found.values()):
            lines.append(f"| {factor.label} |" + " not done |" * (len(heads) - 1))
            continue
        mean, error, _ = compare(found["dcformer"], found["plain"])
        cells = [f"{statistics.mean(of.values()):.3f} ± {spread(list(of.values())):.3f}" for of in found.values()]
        cells += [f"{mean:+.3f} ± {error:.3f}", "; ".join(f"{rate:g}" for rate in rates.values())]
        lines.append(f"| {factor.label} | " + " | ".join(cells) + " |")
    at_edge = sum(rate in (min(RATES), max(RATES)) for rate in chosen)
    lines += [
        "",
        f"Mean loss of the last {MEAN} of {steps} steps, and standard deviation over {len(SEEDS)} seeds; chance is "
        "0.693. Lower by: mean of the seeds' differences and its standard error. Rates of "
        f"{', '.join(f'{rate:g}' for rate in RATES)}, by the loss with one more seed; {at_edge} of {len(chosen)} are "
        "the lowest or the highest of these.",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", nargs="+", choices=FACTORS, default=list(FACTORS))
    options = composition_rates.parse_options(parser, arguments, RESULTS, STEPS, MEAN, MEAN)
    runs = composition_rates.kept_runs(options)
    cells = [(factor, family) for factor in options.factors for family in FAMILIES]

    def place(run: dict) -> tuple:
        return list(FACTORS).index(run["factor"]), list(FAMILIES).index(run["family"]), run["rate"], run["seed"]

    tried = [settings_of(*cell, rate, RATE_SEED, options.steps) for cell in cells for rate in RATES]
    composition_rates.make_missing(runs, tried, train, options, place, "rates: ")
    best = {cell: chosen_rate(runs, *cell, options.steps) for cell in cells}
    wanted = [settings_of(*cell, rate, s, options.steps) for cell, rate in best.items() if rate for s in SEEDS]
    composition_rates.make_missing(runs, wanted, train, options, place, "seeds: ")
    print(table(runs, options.steps))


if __name__ == "__main__":
    main()
