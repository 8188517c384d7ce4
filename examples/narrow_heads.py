"""Where composition helps: one look-up with ever narrower heads, learned with and without it, on two CPU cores.

    python examples/narrow_heads.py                 # what is not in docs/narrow_heads/results.json yet, table, picture
    python examples/narrow_heads.py --output runs/look --heads 4 --variants plain dcformer --seeds 0   # a look at it
    python examples/narrow_heads.py --report        # table and picture of what is done

A text has eight things with four attributes each; the question names one attribute's value and asks for another
attribute of that thing. A model of one layer and width 64 splits its attention into 4, 8, 16 or 32 heads. A head of few
channels matches few attributes and carries few away: its scores are a matrix of low rank ("Low-Rank Bottleneck in
Multi-head Attention Models", arXiv 2002.07028). Where heads are mixed, what one finds is of use to all.

Counted are the steps until 95 % of new questions are answered, in two measurements in a row. Every variant and number
of heads gets the same data and its own learning rate of one grid, found with a seed that is not reported: the one with
the highest accuracy over the run. A run that is done is written at once, and not run again: stop and start as you like.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from study import VARIANTS as ABLATION
from study import about_runs, as_trained, best_rate, read_runs, save_figure, write_text
from torch import nn
from torch.nn import functional as F

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "narrow_heads"
ATTRIBUTES, VALUES, WIDTH, BATCH = 4, 8, 64, 64
HEADS = (4, 8, 16, 32)
RATES, RATE_SEED, SEEDS = (1e-3, 2e-3, 4e-3, 8e-3), 100, (0, 1, 2, 3, 4)
STEPS, MEASURED, TESTED = 4000, 100, 1000  # at most, steps between measurements, questions of each
REACHED = 0.95
PLAIN = ABLATION["plain"].switches


@dataclass(frozen=True)
class Variant:
    """A way to attend: fields of the configuration, and at which numbers of heads it is tried."""

    label: str
    fields: dict = field(default_factory=dict)
    heads: tuple[int, ...] = HEADS


VARIANTS = {
    "plain": Variant("plain attention", PLAIN | {"qk_norm": False}),
    "plain-qk-norm": Variant("plain, QK-norm", PLAIN),
    "talking-heads": Variant("talking heads", ABLATION["static"].switches),
    "query": Variant("query-wise composition", ABLATION["query"].switches),
    "dcformer": Variant("DCFormer++ (R = 2)"),
    "key": Variant("key-wise composition", ABLATION["key"].switches, (16,)),
    "plain-wide": Variant("plain, as many parameters", PLAIN | {"qk_norm": False, "intermediate_size": 320}, (16,)),
    "plain-deep": Variant("plain, two layers", PLAIN | {"qk_norm": False, "num_hidden_layers": 2}, (16,)),
}


class LookUp(nn.Module):
    """A decoder that reads things and a question, one position each: sums of its embeddings of their parts.

    Args:
        config: whose vocabulary is the values of an attribute.
    """

    def __init__(self, config):
        from dcformer import DCFormerForCausalLM

        super().__init__()
        self.parts = nn.Embedding(ATTRIBUTES * VALUES + ATTRIBUTES, WIDTH)  # values by attribute, what is asked for
        nn.init.normal_(self.parts.weight, std=0.35)
        self.decoder = DCFormerForCausalLM(config)

    def forward(self, things: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
        """[B, N, attributes] and [B, 2] indices of parts -> [B, values] logits of the answer."""
        given = torch.cat([self.parts(things).sum(2), self.parts(question).sum(1)[:, None]], dim=1)  # [B, N + 1, width]
        return self.decoder(inputs_embeds=given, use_cache=False, logits_to_keep=1).logits[:, 0]


def questions(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New texts: things [B, values, attributes], question [B, 2] and answer [B]. No two things share a value."""
    values = torch.rand(count, VALUES, ATTRIBUTES, generator=generator).argsort(1)  # [B, N, attributes]
    named, further = (torch.randint(n, (count,), generator=generator) for n in (ATTRIBUTES, ATTRIBUTES - 1))
    asked = (named + 1 + further) % ATTRIBUTES  # another attribute
    which, rows = torch.randint(VALUES, (count,), generator=generator), torch.arange(count)
    question = torch.stack([named * VALUES + values[rows, which, named], ATTRIBUTES * VALUES + asked], dim=1)
    return values + VALUES * torch.arange(ATTRIBUTES), question, values[rows, which, asked]


def make_model(variant: str, heads: int) -> LookUp:
    """The model before training. Things have no order, and so no position: angles of RoPE are next to 0."""
    from dcformer import DCFormerConfig

    fields = {"num_hidden_layers": 1, "intermediate_size": 2 * WIDTH} | VARIANTS[variant].fields
    config = DCFormerConfig(
        **fields,
        vocab_size=VALUES,
        hidden_size=WIDTH,
        num_attention_heads=heads,
        sliding_window=None,
        max_position_embeddings=VALUES + 1,
        rope_parameters={"rope_type": "linear", "factor": 1e6, "rope_theta": 1e4},
        initializer_range=0.7 / math.sqrt(WIDTH),  # the usual 0.02 is for wide models
        attn_implementation="eager",
    )
    return LookUp(config)


def settings_of(variant: str, heads: int, seed: int, rate: float, steps: int) -> dict:
    return {"variant": variant, "heads": heads, "seed": seed, "rate": rate, "limit": steps}


def train(settings: dict, folder: str) -> dict:
    """One run, until it has answered as many as counted in two measurements, or to the limit of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    model = make_model(settings["variant"], settings["heads"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["rate"], betas=(0.9, 0.98), weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    drawn = torch.Generator().manual_seed(settings["seed"])
    curve: list[tuple[int, float, float]] = []
    step, seconds = 0, 0.0
    while step < settings["limit"] and steps_to(curve) is None:
        start = time.process_time()
        for _ in range(min(MEASURED, settings["limit"] - step)):
            *given, answer = questions(BATCH, drawn)
            F.cross_entropy(model(*given), answer).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm.step()
            optimizer.zero_grad()
            step += 1
        seconds += time.process_time() - start
        with torch.no_grad():
            *given, answer = questions(TESTED, torch.Generator().manual_seed(-1 - step))
            logits = model(*given)
        accuracy = (logits.argmax(-1) == answer).float().mean().item()
        curve.append((step, round(accuracy, 4), round(F.cross_entropy(logits, answer).item(), 4)))
    parameters = sum(p.numel() for p in model.parameters())
    return settings | {"parameters": parameters, "seconds": round(seconds, 1), "curve": curve}


# --- what came out ----------------------------------------------------------------------------------------------------


def steps_to(curve: list, mark: float = REACHED) -> int | None:
    """The first of two measurements after one another that reach the mark; None if there are none."""
    for (step, accuracy, _), (_, after, _) in itertools.pairwise(curve):
        if min(accuracy, after) >= mark:
            return step
    return None


def shortfall(run: dict) -> float:
    """Mean share of wrong answers over the limit of steps; none after the mark was reached."""
    return sum(1 - accuracy for _, accuracy, _ in run["curve"]) * MEASURED / run["limit"]


def chosen_rate(runs: list[dict], variant: str, heads: int) -> float | None:
    """The rate of the grid that learns soonest; None before all have been run."""
    at = variant, heads, RATE_SEED
    return best_rate({r["rate"]: shortfall(r) for r in runs if (r["variant"], r["heads"], r["seed"]) == at}, RATES)


def reported(runs: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """(variant, heads) -> its runs at its own rate, those that chose it left out."""
    found: dict[tuple[str, int], list[dict]] = {}
    for variant, what in VARIANTS.items():
        for heads in what.heads:
            rate = chosen_rate(runs, variant, heads)
            own = [r for r in runs if (r["variant"], r["heads"], r["rate"]) == (variant, heads, rate)]
            if kept := sorted((r for r in own if r["seed"] != RATE_SEED), key=lambda r: r["seed"]):
                found[variant, heads] = kept
    return found


def _range(values: list[float], limit: float) -> str:
    """Median and range of what may be infinite."""
    values = sorted(values)
    low, middle, high = (
        f"{value:,.0f}" if math.isfinite(value) else f"over {limit:,.0f}"
        for value in (values[0], statistics.median_low(values), values[-1])
    )
    return low if low == high else f"{middle} ({low} to {high})"


def table(runs: list[dict]) -> str:
    """Every variant at every number of heads, in Markdown."""
    lines = [
        f"Steps and seconds of one core until {100 * REACHED:.0f} % are answered in two measurements in a row, "
        f"{MEASURED} steps apart: the first of the two, median and range over seeds; accuracy after a run's last step. "
        f"Rates of {', '.join(f'{rate:g}' for rate in RATES)}; * at the edge of these. {len(runs)} runs, "
        f"{sum(run['seconds'] for run in runs) / 120:.0f} minutes of two cores.\n",
        "| heads | | parameters | rate | seeds | steps | seconds | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    uncounted = []
    for (variant, heads), found in sorted(reported(runs).items(), key=lambda item: item[0][1]):
        steps = [steps_to(run["curve"]) or math.inf for run in found]
        seconds = [
            run["seconds"] if math.isfinite(reached) else math.inf for run, reached in zip(found, steps, strict=True)
        ]
        ends = [100 * run["curve"][-1][1] for run in found]
        rate = f"{found[0]['rate']:g}" + "*" * (found[0]["rate"] in (min(RATES), max(RATES)))
        lines.append(
            f"| {heads} | {VARIANTS[variant].label} | {found[0]['parameters']:,} | {rate} | {len(found)} "
            f"| {_range(steps, found[0]['limit'])} | {_range(seconds, max(run['seconds'] for run in found))} "
            f"| {min(ends):.1f} to {max(ends):.1f} % |"
        )
        if late := sum(not math.isfinite(at) and end >= 100 * REACHED for at, end in zip(steps, ends, strict=True)):
            uncounted.append(f"{VARIANTS[variant].label} with {heads} heads, {late} of {len(found)} seeds")
    if uncounted:
        lines += ["", f"At 95 % only at the last step, and so not counted: {'; '.join(uncounted)}."]
    return "\n".join(lines) + "\n"


def picture(runs: list[dict], path: Path) -> None:
    """Steps against the number of heads, and the curves of 16 heads."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    found = reported(runs)
    limit = max(run["limit"] for run in runs)
    for (variant, what), color in zip(VARIANTS.items(), pyplot.cm.tab10.colors, strict=False):
        style = "--" if variant.startswith("plain") else "-"
        at = {heads: runs for (name, heads), runs in found.items() if name == variant}
        steps = {heads: [steps_to(run["curve"]) or limit for run in runs] for heads, runs in at.items()}
        if len(steps) > 1:
            middle = [statistics.median_low(those) for those in steps.values()]
            left.plot(list(steps), middle, style, color=color, label=what.label)
            for heads, those in steps.items():
                left.plot([heads] * len(those), those, "o", ms=3.5, color=color, alpha=0.6)
        for number, run in enumerate(at.get(16, [])):
            measured, accuracy, _ = zip(*run["curve"], strict=True)
            label = None if number else what.label
            right.plot(measured, [100 * a for a in accuracy], style, color=color, lw=1.0, alpha=0.8, label=label)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set(xlabel=f"heads, of {WIDTH} channels in all", xticks=HEADS, xticklabels=HEADS)
    ticks = [limit / 8, limit / 4, limit / 2, limit]
    left.set(yticks=ticks, yticklabels=[*(f"{tick:,.0f}" for tick in ticks[:3]), f"over {limit:,}"])
    left.set_ylabel(f"steps to {100 * REACHED:.0f} % of answers")
    right.set(xlabel="steps, 16 heads", ylabel="answers, %")
    for axis, place in ((left, (0.5, 0.5)), (right, "lower right")):
        axis.grid(color="0.9")
        if axis.lines:
            axis.legend(fontsize=8, frameon=False, loc=place)
    save_figure(figure, path)


def run_missing(wanted: list[dict], done: list[dict], options: argparse.Namespace) -> list[dict]:
    """Trains what is wanted and not done, unless only a report is asked for; returns all that is done."""
    path = options.output / "results.json"
    missing = [settings for settings in wanted if not any(settings.items() <= run.items() for run in done)]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing and not options.report:
        path.parent.mkdir(parents=True, exist_ok=True)
        for run in as_trained(train, missing, options.workers):
            done = [*done, run]
            order = sorted(done, key=lambda r: (list(VARIANTS).index(r["variant"]), r["heads"], r["seed"], r["rate"]))
            write_text(path, json.dumps({"about": about_runs(), "runs": order}) + "\n")
    return done


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, table.md and picture")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which to train")
    parser.add_argument("--heads", nargs="+", type=int, choices=HEADS, default=list(HEADS), help="how many")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="at most, of a run (default: %(default)s); runs of others go"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    for name in ("steps", "workers"):
        if (count := getattr(options, name)) < 1:
            parser.error(f"--{name} {count}: expected more than 0")
    if RATE_SEED in options.seeds:
        parser.error(f"--seeds {RATE_SEED}: this one chooses learning rates; give another")
    try:
        done = [run for run in read_runs(options.output / "results.json") if run["limit"] == options.steps]
    except ValueError as error:
        sys.exit(f"error: {error}")
    cells = [(name, heads) for heads in options.heads for name in options.variants if heads in VARIANTS[name].heads]
    tried = [settings_of(*cell, RATE_SEED, rate, options.steps) for cell in cells for rate in RATES]
    done = run_missing(tried, done, options)
    own = [(cell, rate) for cell in cells if (rate := chosen_rate(done, *cell)) is not None]
    wanted = [settings_of(*cell, seed, rate, options.steps) for seed in options.seeds for cell, rate in own]
    done = run_missing(wanted, done, options)
    if not reported(done):
        sys.exit(f"error: {options.output} has no runs to report; train some, without --report")
    write_text(options.output / "table.md", "<!-- written by examples/narrow_heads.py -->\n" + table(done))
    picture(done, options.output / "curves.svg")
    print(table(done))


if __name__ == "__main__":
    main()
