"""Trains the head systems side by side, at equal parameters and at equal operations: is composition worth it?

    python examples/compare_head_systems.py --output runs/heads  # what is not there yet, then table and picture
    python examples/compare_head_systems.py --output runs/look --seeds 0 --steps 4 --tasks digits  # a look at it
    python examples/compare_head_systems.py --output runs/heads --report  # table and picture of what is done

Every column gets the same data, seeds, steps and grid of learning rates. The width of its MLP is set so that the model
has as many parameters as plain attention with QK-norm, or needs as many operations a token. The rate of a column is the
one of the grid with the lowest loss on one half of the held-out data, in a run of equal parameters with a seed of its
own; the other half gives the reported losses. A run that is done is written to `results.json` at once, and not run
again: stop and start as you like. Every run is on one core.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import digits
import study
from study import about_runs, as_trained, best_rate, read_runs, spread, write_text
from tqdm import tqdm

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS, RATE_SEED = (0, 1, 2, 3, 4), 100
STEPS = {"synthetic": 600, "text": 600, "digits": 300}
MATCHES = ("parameters", "flops")
BASELINES = ("plain", "qk_norm")
TOKENS = {"synthetic": 26, "text": study.LENGTH, "digits": 16}  # keys at which operations are counted: a row's mean


@dataclass(frozen=True)
class Column:
    """A way in which heads interact.

    Attributes:
        label: for the table.
        system, options: of the head system; no name for DCFormer itself.
        switches: fields of composition that are on.
        fields: other fields of the language models; a column that has some is not for images.
        qk_norm: whether queries and keys are normalized.
    """

    label: str
    system: str = "plain"
    options: dict = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    fields: dict = field(default_factory=dict)
    qk_norm: bool = True


HALF_OF_ALL = "half"  # of the H·D query and key channels, put into numbers for each model
COLUMNS = {
    "plain": Column("plain", qk_norm=False),
    "qk_norm": Column("plain + QK-norm"),
    "talking": Column("talking heads", "talking_heads", switches=("pre", "post", "static")),
    "collaborative": Column("collaborative, Dk = HD", "collaborative"),
    "collaborative_half": Column("collaborative, HD/2", "collaborative", {"shared_key_query_dim": HALF_OF_ALL}),
    "overlapped": Column("overlapped, by depth", "overlapped", {"overlap": "depth1"}),
    "mixture": Column("MoH, 3 of 4", "mixture_of_heads", {"num_shared_heads": 1, "num_routed_heads_per_tok": 2}),
    "mixture_unbalanced": Column(
        "MoH, no balance loss",
        "mixture_of_heads",
        {"num_shared_heads": 1, "num_routed_heads_per_tok": 2, "router_aux_loss_coef": 0.0},
    ),
    "gate": Column("gate, headwise", "output_gate"),
    "gate_elementwise": Column("gate, elementwise", "output_gate", {"output_gate": "elementwise"}),
    "mqa": Column("MQA", fields={"num_key_value_heads": 1}),
    "mhe": Column("MHE", "", fields={"head_embeddings": "mul"}),  # a field of DCFormer, not a head system
    "dcformer": Column("DCFormer, R = 2", switches=("pre", "post", "query", "key")),
    "dcformer_query": Column("DCFormer, query-wise", switches=("pre", "post", "query")),
}


def columns_of(task: str) -> tuple[str, ...]:
    """The columns that a task has: vision Transformers share no keys."""
    return tuple(name for name, column in COLUMNS.items() if task != "digits" or not column.fields)


def make_config(task: str, column: str, width: int | None = None):
    """The configuration of a column; `width` is that of the MLP, by default the plain model's."""
    from dcformer import DCFormerConfig
    from dcformer.head_systems import HeadSystemsConfig, HeadSystemsViTConfig

    what = COLUMNS[column]
    size = digits.SMALL if task == "digits" else study.SIZES["small"]
    options = dict(what.options)
    if options.get("shared_key_query_dim") == HALF_OF_ALL:
        options["shared_key_query_dim"] = size["hidden_size"] // 2
    names = ("pre", "post", "query", "key", "static")
    fields = {f"compose_{name}": name in what.switches for name in names} | what.fields
    if what.system:
        fields |= {"head_system": what.system, "head_system_options": options}
    if task == "digits":
        own = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        own["qk_norm"] = "layernorm" if what.qk_norm else None
        sizes = digits.SMALL | ({"intermediate_size": width} if width else {})
        return HeadSystemsViTConfig(**sizes, **own, **fields)
    hidden = size["hidden_size"]
    return (HeadSystemsConfig if what.system else DCFormerConfig)(
        **size,
        **fields,
        qk_norm=what.qk_norm,
        vocab_size=vocabulary(task),
        intermediate_size=width or 8 * round(hidden / 3),
        sliding_window=32,
        max_position_embeddings=study.LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.7 / math.sqrt(hidden),
        attn_implementation="dcformer_chunked",
    )


@cache
def vocabulary(task: str) -> int:
    return study.make_data(task, 1)[2]


def make_model(task: str, config):
    from dcformer import DCFormerForCausalLM
    from dcformer.head_systems import HeadSystemsForCausalLM, HeadSystemsViTForImageClassification

    if task == "digits":
        return HeadSystemsViTForImageClassification(config)
    return (HeadSystemsForCausalLM if hasattr(config, "head_system") else DCFormerForCausalLM)(config)


def count(task: str, config) -> tuple[int, int]:
    """Parameters of a model, and operations of all matrix products per token, counted on a model without memory.

    Operations are counted for the definition ("eager"), in which every query meets all keys.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config.use_cache = False  # as in training: with a cache MHE has keys of another width
    with torch.device("meta"):
        model = make_model(task, config).eval().requires_grad_(False)
        model.set_attn_implementation("eager")
        tokens = TOKENS[task]
        inputs = torch.empty(1, 1, 8, 8) if task == "digits" else torch.ones(1, tokens, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // tokens


@cache
def matched_width(task: str, column: str, match: str) -> int:
    """The width of the MLP at which a column costs what plain attention with QK-norm costs, as near as a width comes.

    Raises:
        ValueError: if the system alone costs more.
    """
    which = MATCHES.index(match)
    budget = count(task, make_config(task, "qk_norm"))[which]
    one, two = (count(task, make_config(task, column, width))[which] for width in (8, 16))  # linear in the width
    width = 8 + round((budget - one) * 8 / (two - one))
    if width < 1:
        raise ValueError(f"{column} on {task} costs more {match} without any MLP than plain attention with its own.")
    return width


def settings_of(task: str, column: str, match: str, seed: int, rate: float, steps: int | None = None) -> dict:
    """The settings of a run; a stored result is reused only if all of them are equal."""
    return {
        "task": task,
        "column": column,
        "match": match,
        "seed": seed,
        "learning_rate": rate,
        "steps": steps or STEPS[task],
        "batch_size": digits.BATCH_SIZE if task == "digits" else study.TASKS[task].batch_size,
    }


def head_load(model, inputs) -> list[list[float]] | None:
    """Share of tokens that take each head of each layer; None for systems without a choice."""
    import torch

    from dcformer.head_systems.mixture_of_heads import MixtureOfHeads

    systems = [module for module in model.modules() if isinstance(module, MixtureOfHeads)]
    found: list[list[float]] = []

    def keep(system, arguments, gates):
        found.append((gates != 0).double().mean((0, 1)).tolist())

    if not systems:
        return None
    for system in systems:
        route = system.route
        system.route = lambda *given, route=route: [gates := route(*given), keep(None, given, gates)][0]
    with torch.no_grad():
        model.eval()(inputs)
    for system in systems:
        del system.route
        system.losses()
    return found


def train(settings: dict, folder: str) -> dict:
    """One run: from nothing to its losses on both halves of the held-out data."""
    import torch
    from transformers import set_seed

    torch.set_num_threads(1)
    task, column = settings["task"], settings["column"]
    config = make_config(task, column, matched_width(task, column, settings["match"]))
    set_seed(settings["seed"])
    model = make_model(task, config)
    if task == "digits":
        (images, labels), (test_images, test_labels) = digits.load_digits()
        probe = test_images[:64]
        before = head_load(model, probe)
        _, seconds = digits.fit(model, settings, images, labels)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(test_images).logits, test_labels, reduction="none")
        choice, report = float(losses[::2].mean()), float(losses[1::2].mean())
    else:
        rows, test, _ = study.make_data(task, settings["steps"] * settings["batch_size"])
        length = min(len(row["input_ids"]) for row in test[:8])
        probe = torch.tensor([row["input_ids"][:length] for row in test[:8]])
        before = head_load(model, probe)
        trainer, _, seconds = study.fit(model, settings, rows, test[::2], folder)
        choice = trainer.evaluate(test[::2])["eval_loss"]
        report = trainer.evaluate(test[1::2])["eval_loss"]
    parameters, flops = count(task, config)
    load = head_load(model, probe)
    return settings | {
        "mlp_width": config.intermediate_size,
        "parameters": parameters,
        "flops": flops,
        "cache_bytes": 0 if task == "digits" else cache_bytes(config),
        "choice_loss": choice,
        "loss": report,
        "cpu_seconds": round(seconds, 1),
        **({} if load is None else {"head_load": load, "head_load_before": before}),
    }


def cache_bytes(config) -> int:
    """Bytes that a token takes in the cache, in float32."""
    from dcformer.head_systems import system_costs

    if not hasattr(config, "head_system"):
        parts = [(stage, layer) for stage in ("pre", "post") for layer in range(config.num_hidden_layers)]
        return 4 * sum(config.cached_heads(*part) * config.cache_width(*part) for part in parts)
    return 4 * system_costs(config).cache_channels


_CELL = ("task", "column", "match")
_SAME = (*_CELL, "seed", "learning_rate")


def write_runs(path: Path, runs: list[dict]) -> None:
    orders = {"task": list(STEPS), "match": list(MATCHES), "column": list(COLUMNS)}
    runs = sorted(runs, key=lambda run: [names.index(run[key]) for key, names in orders.items()] + [run["seed"]])
    write_text(path, json.dumps({"about": about_runs(), "runs": runs}, indent=1) + "\n")


def is_of(run: dict, settings: dict) -> bool:
    """Whether a run has these settings and the MLP that goes with them now."""
    return settings.items() <= run.items() and run["mlp_width"] == matched_width(*(settings[name] for name in _CELL))


def merged(done: list[dict], new: list[dict]) -> list[dict]:
    """All runs; new ones in the place of those that differ in settings only, as in steps."""
    places = [tuple(run[key] for key in _SAME) for run in new]
    return [run for run in done if tuple(run[key] for key in _SAME) not in places] + new


def same_model(settings: dict, done: list[dict]) -> dict | None:
    """The result of a run that differs in what is equal alone, if the MLP is as wide for both: it is the same run."""
    others = {key: value for key, value in settings.items() if key != "match"}
    for run in done:
        if others.items() <= run.items() and run["mlp_width"] == matched_width(*(settings[name] for name in _CELL)):
            return run | settings
    return None


def train_missing(wanted: list[dict], path: Path, workers: int, what: str) -> list[dict]:
    """Trains what is wanted and not done, `workers` runs at a time; returns all that is done."""
    done = read_runs(path)
    missing = [settings for settings in wanted if not any(is_of(run, settings) for run in done)]
    if known := [run for settings in missing if (run := same_model(settings, done))]:
        write_runs(path, merged(done, known))
        done, missing = merged(done, known), [s for s in missing if not any(is_of(run, s) for run in known)]
    print(f"{what}: {len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        for run in as_trained(train, missing, workers):
            done = merged(done, [run])
            write_runs(path, done)
            tqdm.write("{task} {match} {column} seed {seed}: loss {loss:.4f}, {cpu_seconds:.0f} s".format(**run))
    return done


def chosen_rate(runs: list[dict], task: str, column: str, steps: int | None = None) -> float | None:
    """The rate of the grid with the lowest loss on the half that is not reported; None before all are done.

    It is chosen at equal parameters, and used where operations are equal, too.
    """
    steps = steps or STEPS[task]
    found = {
        run["learning_rate"]: run["choice_loss"]
        for run in runs
        if (run["task"], run["match"], run["column"], run["seed"], run["steps"])
        == (task, MATCHES[0], column, RATE_SEED, steps)
    }
    return best_rate(found, RATES)


# --- what came out ----------------------------------------------------------------------------------------------------


def by_seed(runs: list[dict], task: str, match: str, column: str) -> dict[int, float]:
    """Seed -> loss, at the column's own rate."""
    steps = {run["steps"] for run in runs if (run["task"], run["match"], run["column"]) == (task, match, column)}
    rates = {n: chosen_rate(runs, task, column, n) for n in steps}
    return {
        run["seed"]: run["loss"]
        for run in runs
        if (run["task"], run["match"], run["column"]) == (task, match, column)
        and run["seed"] != RATE_SEED
        and run["learning_rate"] == rates[run["steps"]]
    }


def verdict(ours: dict[int, float], base: dict[int, float]) -> str:
    """Whether a difference can be told: its 95 % interval leaves 0 out."""
    mean, half = digits.difference(ours, base)
    if math.isnan(half) or abs(mean) <= half:
        return "cannot be told"
    return "better" if mean < 0 else "worse"


def table(results: dict) -> str:
    """All cells in Markdown: costs, losses with their spread over seeds, differences to both baselines."""
    runs = results["runs"]
    versions = ", ".join(f"{name} {value}" for name, value in results["about"].items())
    lines = [
        "<!-- written by examples/compare_head_systems.py -->",
        "# Head systems: tables",
        "",
        f"{len(runs)} runs, each on one core ({versions}); a model whose MLP is as wide in both comparisons is trained "
        "once. Losses in nats, mean over seeds and standard deviation; differences seed by seed, with 95 % intervals "
        "of Student's distribution, bold where they leave 0 out, without a correction for the number of comparisons. "
        "Cache: bytes a token takes in all layers, in float32, key-wise weights padded to multiples of 8. Seconds: the "
        "processor's, of training alone, medians.",
    ]
    lines += summary(runs)
    for task in STEPS:
        for match in MATCHES:
            names = [name for name in COLUMNS if by_seed(runs, task, match, name)]
            if not names:
                continue
            bases = [name for name in BASELINES if name in names]
            heads = [f"less {COLUMNS[name].label}" for name in bases]
            lines += ["", f"## {task}, equal {match}", ""]
            costs = ["rate", "MLP", "parameters", "FLOPs a token", "cache bytes", "CPU s"]
            cells = ["", "loss", *heads, "verdict", *costs]
            lines += ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]
            for name in names:
                loss = by_seed(runs, task, match, name)
                cells = [COLUMNS[name].label, spread_of(loss)]
                for base in bases:
                    others = by_seed(runs, task, match, base)
                    is_spread = base != name and len(loss.keys() & others.keys()) > 1
                    cells.append(digits.shown(loss, others, 4) if is_spread else "")
                base = bases[-1] if bases else name
                cells.append("" if base == name else verdict(loss, by_seed(runs, task, match, base)))
                cells += costs_of(runs, task, match, name)
                lines.append("| " + " | ".join(cells) + " |")
    lines += loads(runs)
    return "\n".join(lines) + "\n"


def spread_of(loss: dict[int, float]) -> str:
    """Mean, standard deviation and number of seeds."""
    around = f" ± {spread(list(loss.values())):.4f}" if len(loss) > 1 else ""
    return f"{statistics.mean(loss.values()):.4f}{around} ({len(loss)})"


def loads(runs: list[dict]) -> list[str]:
    """How evenly heads of MoH are used, before and after training, with and without the balance loss."""
    found: dict[tuple[str, str], list[dict]] = {}
    for run in runs:
        rate = chosen_rate(runs, run["task"], run["column"], run["steps"])
        if (
            "head_load" in run
            and run["match"] == MATCHES[0]
            and run["seed"] != RATE_SEED
            and run["learning_rate"] == rate
        ):
            found.setdefault((run["task"], run["column"]), []).append(run)
    if not found:
        return []
    lines = [
        "",
        "## Heads of MoH",
        "",
        "Share of a few held-out rows' tokens that take the least used routed head of a layer, mean over layers and "
        "seeds (even: 0.67); and the shares of seed 0 after training, shared heads first, layer by layer.",
        "",
        "| | before | after | seed 0 |",
        "|---|---|---|---|",
    ]
    for (task, column), some in found.items():
        shared = COLUMNS[column].options["num_shared_heads"]
        means = [
            statistics.mean(min(layer[shared:]) for run in some for layer in run[key])
            for key in ("head_load_before", "head_load")
        ]
        first = min(some, key=lambda run: run["seed"])["head_load"]
        shares = "; ".join(" ".join(f"{share:.2f}" for share in layer) for layer in first)
        lines.append(f"| {COLUMNS[column].label}, {task} | {means[0]:.2f} | {means[1]:.2f} | {shares} |")
    return lines


def summary(runs: list[dict]) -> list[str]:
    """One table at equal parameters: what each column costs, and its loss on every task."""
    cells = {task: [name for name in columns_of(task) if by_seed(runs, task, MATCHES[0], name)] for task in STEPS}
    tasks = [task for task, names in cells.items() if names]
    costly = "text" if "text" in tasks else tasks[0] if tasks else ""
    names = [name for name in COLUMNS if any(name in cells[task] for task in tasks)]
    costs = [f"{what} ({costly})" for what in ("parameters", "FLOPs a token", "cache bytes", "CPU s")]
    lines = ["", "## Summary, equal parameters", "", "| | " + " | ".join([*tasks, *costs]) + " |"]
    lines.append("|---" * (1 + len(tasks) + len(costs)) + "|")
    for name in names:
        losses = [by_seed(runs, task, MATCHES[0], name) if name in cells[task] else {} for task in tasks]
        row = [COLUMNS[name].label, *(spread_of(loss) if loss else "-" for loss in losses)]
        lines.append("| " + " | ".join(row + (costs_of(runs, costly, MATCHES[0], name)[2:])) + " |")
    return lines


def costs_of(runs: list[dict], task: str, match: str, name: str) -> list[str]:
    """Cells: rate, width of the MLP, parameters, operations a token, bytes of the cache, seconds of training."""
    mine = [run for run in runs if (run["task"], run["match"], run["column"]) == (task, match, name)]
    if not mine:
        return ["-"] * 6
    first, timed = mine[0], [run["cpu_seconds"] for run in mine if "cpu_seconds" in run]
    return [
        f"{chosen_rate(runs, task, name, first['steps']):g}",
        str(first["mlp_width"]),
        f"{first['parameters']:,}",
        f"{first['flops']:,}",
        str(first["cache_bytes"] or "-"),
        f"{statistics.median(timed):.0f}" if timed else "-",
    ]


def picture(runs: list[dict]) -> str:
    """Differences in loss from plain attention with QK-norm, and what columns cost, in SVG.

    A dot is a seed, hollow at the edge where it lies outside; the lines are the mean and its 95 % interval.
    """
    cells = [(task, match) for task in STEPS for match in MATCHES if by_seed(runs, task, match, BASELINES[-1])]
    names = [name for name in COLUMNS if any(by_seed(runs, *cell, name) for cell in cells)]
    width, row, left = 190, 24, 170
    costs = ("FLOPs a token", "cache bytes", "CPU s")
    full, height = left + (width + 20) * len(cells) + 100 * len(costs) + 20, 60 + row * len(names) + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{full}" height="{height}" fill="white"/>'
    ]
    for i, name in enumerate(names):
        parts.append(f'<text x="{left - 10}" y="{64 + row * i}" text-anchor="end">{COLUMNS[name].label}</text>')
    for panel, cell in enumerate(cells):
        base, start = by_seed(runs, *cell, BASELINES[-1]), left + panel * (width + 20)
        points = {
            name: [loss[seed] - base[seed] for seed in sorted(loss.keys() & base.keys())]
            for name in names
            if (loss := by_seed(runs, *cell, name))
        }
        sizes = sorted(abs(v) for values in points.values() for v in values)
        reach = 1.3 * sizes[int(0.9 * len(sizes))] if any(sizes) else 1e-6  # few lie outside, and are put at the edge
        middle = start + width / 2
        parts.append(f'<text x="{middle}" y="20" text-anchor="middle" font-weight="bold">{cell[0]}</text>')
        parts.append(f'<text x="{middle}" y="36" text-anchor="middle">equal {cell[1]}</text>')
        parts.append(f'<path d="M{middle} 44V{height - 36}" stroke="#999"/>')
        for y, text in ((height - 20, "← better | worse →"), (height - 5, f"±{reach:.2g} nats")):
            parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle" fill="#555">{text}</text>')
        for i, name in enumerate(names):
            y = 60 + row * i
            if not points.get(name):
                parts.append(f'<text x="{middle + 6}" y="{y + 4}" fill="#999">not on {cell[0]}</text>')
                continue

            def at(value: float, middle: float = middle, reach: float = reach) -> float:
                return round(middle + width / 2 * max(-1.0, min(1.0, value / reach)), 1)

            for value in points[name]:
                style = 'fill="#1d4ed8" fill-opacity="0.5"' if abs(value) <= reach else 'fill="none" stroke="#1d4ed8"'
                parts.append(f'<circle cx="{at(value)}" cy="{y}" r="3.5" {style}/>')
            mean, half = digits.difference(by_seed(runs, *cell, name), base)
            if half == half and name != BASELINES[-1]:
                parts.append(f'<path d="M{at(mean - half)} {y}H{at(mean + half)}" stroke="#c2410c"/>')
            parts.append(
                f'<path d="M{at(statistics.mean(points[name]))} {y - 8}v16" stroke="#c2410c" stroke-width="2"/>'
            )
    costly = ("text", MATCHES[0]) if ("text", MATCHES[0]) in cells else cells[0] if cells else ("", "")
    for place, text in enumerate(costs):
        x = full - 100 * (len(costs) - place) + 70
        parts.append(f'<text x="{x}" y="20" text-anchor="end" font-weight="bold">{text}</text>')
        parts.append(f'<text x="{x}" y="36" text-anchor="end">{costly[0]}</text>')
        for i, name in enumerate(names):
            found = costs_of(runs, *costly, name)[3 + place]
            parts.append(f'<text x="{x}" y="{64 + row * i}" text-anchor="end">{found}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of results.json, table and picture")
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--matches", nargs="+", choices=MATCHES, default=list(MATCHES), help="what is equal")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="COLUMN",
                        help=f"of {', '.join(COLUMNS)} (default: all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="of every run; else those of STEPS")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    for name in ("steps", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: expected at least 1")
    if RATE_SEED in options.seeds:
        parser.error(f"--seeds {RATE_SEED}: this seed chooses the learning rates; take others")
    path, start = options.output / "results.json", time.perf_counter()
    try:
        runs = read_runs(path)
        if any("match" not in run for run in runs):
            raise ValueError(f"{path} is of another script: choose another --output")
        if not options.report:
            cells = [
                (task, column) for task in options.tasks for column in options.columns if column in columns_of(task)
            ]
            wanted = [
                settings_of(task, column, MATCHES[0], RATE_SEED, rate, options.steps)
                for task, column in cells
                for rate in RATES
            ]
            runs = train_missing(wanted, path, options.workers, "learning rates")
            rates = {cell: chosen_rate(runs, *cell, options.steps) or min(RATES) for cell in cells}
            # seed by seed, so that whatever is done compares all columns
            wanted = [
                settings_of(task, column, match, seed, rate, options.steps)
                for match in options.matches
                for seed in options.seeds
                for (task, column), rate in rates.items()
            ]
            runs = train_missing(wanted, path, options.workers, "seeds")
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    if not runs:
        sys.exit(f"error: {path} has no runs; train some first, without --report")
    text = table(json.loads(path.read_text()))
    write_text(options.output / "table.md", text)
    write_text(options.output / "head_systems.svg", picture(runs))
    print(text + f"wrote table.md and head_systems.svg to {options.output} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
