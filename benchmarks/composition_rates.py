"""Which learning rate composition wants: the search for a person's fact, learned by a model of two layers.

    python benchmarks/composition_rates.py             # what is missing of the runs, then the table
    python benchmarks/composition_rates.py --sizes wide --ways plain 1 --seeds 0 --output runs/look.json   # a look
    python benchmarks/composition_rates.py --report    # the table of what is done

"Anna visited Paris. Boris visited Rome. Boris saw" is to be answered; chance is a loss of 0.693. For every way to
choose the rates of composition's parameters (`WAYS`), every rate of the other parameters and every seed, the mean loss
of each 50 steps is written to the results as soon as the run is done; no run is made twice. One core a run.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import dcformer
from dcformer.optimization import composition_rate_ratios
from dcformer.synthetic.vocabulary import COUNTRY_TO_CITIES, NAMES, entities

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from study import VARIANTS, about_runs, as_trained, read_runs, spread, write_text
from synthetic_rows import collate, token_ids

RESULTS = Path(__file__).resolve().parent / "results" / "composition_rates.json"
TOKENS, WINDOW, WARMUP, STEPS, MEAN = 22, 8, 50, 250, 50
DECAY = 0.1
# What composition's parameters have, relative to the rate of the others: one ratio for all of them, or for some.
WAYS = {
    "plain": "no composition",
    "1": "1",
    "0.1": "0.1",
    "0.02": "0.02",
    "rule": "by initial values",
    "qkw": "`qkw` 0.1, others 1",
    "gate_proj.weight": "gates 0.1, others 1",
    "dw1_proj.weight": "`dw1` 0.1, others 1",
    "decay": f"1, with weight decay {DECAY} on composition",
}


@dataclass(frozen=True)
class Size:
    """A model, the rows of a step, the rates and the ways that are tried on it."""

    width: int
    heads: int
    std: float  # of ordinary matrices before training
    rows: int
    rates: tuple[float, ...]
    ways: tuple[str, ...] = tuple(WAYS)
    seeds: tuple[int, ...] = (0, 1, 2)


SIZES = {
    "narrow": Size(128, 8, 0.06, 48, (1e-3, 2e-3, 4e-3)),
    # the two that matter most, with a rate more at each end
    "rates": Size(128, 8, 0.06, 48, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), ("plain", "1")),
    # the paper's width, heads, initialization and peak rate; four minutes a run
    "wide": Size(1024, 16, 0.02, 16, (3e-4,), ("plain", "1", "0.1", "rule"), (0, 1, 2, 3)),
}


def make_row(rng: random.Random, questions: int = 2) -> dict[str, list[int]]:
    """Two people, two cities, and a question about each person, or one, as `synthetic_rows.make_row` lays them out."""
    facts = list(zip(rng.sample(NAMES, 2), rng.sample(entities(COUNTRY_TO_CITIES), 2), strict=True))
    ids = token_ids("\n< " + " ".join(f"{person} visited {city}." for person, city in facts) + " >.")
    shared = len(ids)
    positions, branches, labels = list(range(shared)), [0] * shared, {}
    rng.shuffle(facts)
    for number, (person, city) in enumerate(facts[:questions], 1):
        query = token_ids(f"{person} saw")
        ids, branches = ids + query, branches + [number] * len(query)
        positions += range(shared, shared + len(query))
        labels[len(ids)] = token_ids(city)[0]
    padding = TOKENS - len(ids)
    return {
        "input_ids": ids + [0] * padding,
        "labels": [labels.get(index, -100) for index in range(TOKENS)],
        "position_ids": positions + [0] * padding,
        "branch": branches + [-1] * padding,
    }


def make_model(size: Size, way: str, **fields) -> dcformer.DCFormerForCausalLM:
    """The model before training; `fields` are other ones of its configuration."""
    config = dcformer.DCFormerConfig(
        **{
            "vocab_size": 288,
            "hidden_size": size.width,
            "intermediate_size": 11 * size.width // 4,
            "num_hidden_layers": 2,
            "num_attention_heads": size.heads,
            "sliding_window": WINDOW,
            "max_position_embeddings": 512,
            "initializer_range": size.std,
            "pad_token_id": 0,
            "attn_implementation": "eager",
            **(VARIANTS["plain"].switches if way == "plain" else {}),
            **fields,
        }
    )
    model = dcformer.DCFormerForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    return model


def make_groups(model: dcformer.DCFormerForCausalLM, way: str, rate: float) -> list[dict]:
    """Parameter groups with the rates, and the weight decay, of a way."""
    own = composition_rate_ratios(model.config)
    if way == "rule":
        ratios = own
    elif way in own:
        ratios = {way: 0.1}
    else:
        ratios = dict.fromkeys(own, 1.0 if way in ("plain", "decay") else float(way))
    groups = dcformer.parameter_groups(model, rate, DECAY, ratios)
    if way == "decay":
        for group in groups:
            if group["name"].startswith("compose."):
                group["weight_decay"] = DECAY
    return groups


def steps_of(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], warmup: int, batches: Iterable[dict]
) -> Iterator[float]:
    """Trains a model, a step for each batch, with rates that are constant after a warm-up; yields the losses."""
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        for optimizer in optimizers
    ]
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        yield loss.item()


def fit(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    rows: int,
    warmup: int,
    settings: dict,
    questions: int = 2,
) -> dict:
    """Trains a model for the steps and with the seed of `settings`; adds the mean loss of every 50 steps to these."""
    rng = random.Random(settings["seed"])
    batches = (collate([make_row(rng, questions) for _ in range(rows)], WINDOW) for _ in range(settings["steps"]))
    losses = list(steps_of(model, optimizers, warmup, batches))
    return settings | {"losses": [round(statistics.mean(losses[i : i + MEAN]), 4) for i in range(0, len(losses), MEAN)]}


def train(settings: dict, folder: str) -> dict:
    """One run: its settings and the mean loss of every 50 steps."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    size = SIZES[settings["size"]]
    model = make_model(size, settings["way"])
    groups = make_groups(model, settings["way"], settings["rate"])
    optimizer = torch.optim.AdamW(groups, lr=settings["rate"], betas=(0.9, 0.98))
    return fit(model, [optimizer], size.rows, WARMUP, settings)


def parse_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None, results: Path, steps: int, part: int, least: int
) -> argparse.Namespace:
    """The command line, with the options of every study of this kind; ends the program where they are out of range.

    Args:
        parser: with the study's own options.
        arguments: the command line, `sys.argv[1:]` when None.
        results: the file of all runs, when no other is named.
        steps: of a run, when not given.
        part: a divisor of the steps.
        least: the fewest steps.
    """
    parser.add_argument("--output", type=Path, default=results, help="the file of all runs")
    parser.add_argument("--steps", type=int, default=steps, help=f"a multiple of {part} (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: expected more than 0")
    if options.steps < least or options.steps % part:
        parser.error(f"--steps {options.steps}: expected a multiple of {part}, at least {least}")
    return options


def kept_runs(options: argparse.Namespace) -> list[dict]:
    """The runs in the file; ends the program where that is none of a study."""
    try:
        return read_runs(options.output)
    except ValueError as error:
        sys.exit(f"error: {error}")


def make_missing(
    runs: list[dict],
    wanted: list[dict],
    train: Callable[[dict, str], dict],
    options: argparse.Namespace,
    place: Callable[[dict], tuple],
    what: str = "",
) -> None:
    """Makes what is wanted and not there, but for a report; says how much is there.

    Args:
        runs: of the file; new ones are added in the order of `place`, and all of them written after each.
        wanted: settings.
        train: as for `study.as_trained`.
        options: of `parse_options`.
        place: of a run among the others.
        what: is wanted, for the line that is printed.
    """
    missing = [settings for settings in wanted if not any(settings.items() <= run.items() for run in runs)]
    print(f"{what}{len(wanted) - len(missing)} of {len(wanted)} runs are in {options.output}", flush=True)
    if not missing or options.report:
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for run in as_trained(train, missing, options.workers):
        runs.append(run)
        runs.sort(key=place)
        lines = ",\n".join(json.dumps(run) for run in runs)
        write_text(options.output, f'{{"about": {json.dumps(about_runs())},\n"runs": [\n{lines}\n]}}\n')


def _cell(runs: list[dict], at: int) -> str:
    """Mean over seeds of the loss of 50 steps, with its spread."""
    losses = [run["losses"][at] for run in runs]
    return f"{statistics.mean(losses):.3f}" + (f" ± {spread(losses):.3f}" if len(losses) > 1 else "")


def table(runs: list[dict]) -> str:
    """For every size, way and rate the losses of the last 50 steps and of those before, in Markdown."""
    lines = []
    for name, size in SIZES.items():
        of_size = [run for run in runs if run["size"] == name]
        if not of_size:
            continue
        seeds = sorted({run["seed"] for run in of_size})
        lines += [
            f"Width {size.width}, {size.heads} heads, {size.rows} rows a step; seeds {', '.join(map(str, seeds))}: "
            f"mean loss of the last {MEAN} of {of_size[0]['steps']} steps, and of the {MEAN} before, with the "
            "standard deviation over seeds.",
            "",
            "| rate of composition, relative to the others' | " + " | ".join(f"{rate:g}" for rate in size.rates) + " |",
            "|---|" + "---|" * len(size.rates),
        ]
        for way in size.ways:
            cells = []
            for rate in size.rates:
                found = [run for run in of_size if (run["way"], run["rate"]) == (way, rate)]
                cells.append(f"{_cell(found, -1)}; {_cell(found, -2)}" if found else "")
            lines.append(f"| {WAYS[way]} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, help="those of the size when not given")
    options = parse_options(parser, arguments, RESULTS, STEPS, MEAN, 2 * MEAN)
    runs = [run for run in kept_runs(options) if run["steps"] == options.steps]
    wanted = [
        {"size": name, "way": way, "rate": rate, "seed": seed, "steps": options.steps}
        for name in options.sizes
        for seed in options.seeds or SIZES[name].seeds
        for way in SIZES[name].ways
        if way in options.ways
        for rate in SIZES[name].rates
    ]

    def place(run: dict) -> tuple:
        return list(SIZES).index(run["size"]), list(WAYS).index(run["way"]), run["rate"], run["seed"]

    make_missing(runs, wanted, train, options, place)
    print(table(runs))


if __name__ == "__main__":
    main()
