"""Head embeddings beside ordinary heads at one shape: attention's parameters, curves and a table, on a CPU.

    python examples/mhe_study.py                         # what is not in docs/mhe/results.json yet, table and picture
    python examples/mhe_study.py --steps 5000            # longer; replaces the runs so far
    python examples/mhe_study.py --output runs/look --seeds 0 --steps 20  # a look at how it goes

Small language models on the text in examples/data, by characters, with the same batches for every arm of a seed. Arms:
heads of their own (MHA), shared keys and values (MQA), head embeddings that are added or multiplied, with the default
standard deviation at initialization, 0.02 and 0, and a single head. The learning rate of an arm is the one of the grid
with the lowest loss in a run with a seed of its own. A run that is done is written to `results.json` at once, and not
run again: stop and start as you like.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from dha_study import LENGTH, batches_of, held_out_loss, load_text, train
from study import about_runs, best_rate, read_runs, save_figure, spread, write_text
from tqdm import tqdm

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "mhe"
SEEDS, RATE_SEED, STEPS, MEASURED = (0, 1, 2), 100, 2000, 10
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
PLAIN = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
# arm -> fields of the configuration
ARMS: dict[str, dict] = {
    "MHA": {},
    "multi-query": {"num_key_value_heads": 1},
    "MHE-Add": {"head_embeddings": "add"},
    "MHE-Mul": {"head_embeddings": "mul"},
    "MHE-Add, 0.02": {"head_embeddings": "add", "head_embedding_init_std": 0.02},
    "MHE-Mul, 0.02": {"head_embeddings": "mul", "head_embedding_init_std": 0.02},
    "MHE-Add, zeros": {"head_embeddings": "add", "head_embedding_init_std": 0.0},
    "MHE-Mul, zeros": {"head_embeddings": "mul", "head_embedding_init_std": 0.0},
    "single head": {"num_attention_heads": 1, "head_dim": 8},
}
BASELINE = "single head"


def run(settings: dict) -> dict:
    """One model from its start to its curve."""
    from transformers import set_seed

    from dcformer import DCFormerConfig, DCFormerForCausalLM, parameter_groups

    seed, steps = settings["seed"], settings["steps"]
    set_seed(seed)
    fields = SIZES | PLAIN | {"num_attention_heads": 8} | ARMS[settings["arm"]]
    text = {"vocab_size": load_text()[2], "max_position_embeddings": 2 * LENGTH}
    model = DCFormerForCausalLM(DCFormerConfig(**fields, **text, sliding_window=None, qk_norm=False))
    model.set_attn_implementation("sdpa")
    curve, every, start = [[0, held_out_loss(model)]], max(1, steps // MEASURED), time.process_time()

    def measure(step, model):
        if step % every == 0 or step == steps:
            curve.append([step, held_out_loss(model)])

    groups = parameter_groups(model, lr=settings["lr"])  # head embeddings do not decay
    train(model, batches_of(seed, steps), settings["lr"], measure, groups)
    attention = sum(p.numel() for name, p in model.named_parameters() if ".self_attn." in name)
    seconds = round(time.process_time() - start, 1)
    return settings | {"parameters": attention, "loss": curve[-1][1], "curve": curve, "seconds": seconds}


def chosen_rate(runs: list[dict], arm: str) -> float | None:
    """The rate of the grid with the lowest loss; None before all have been run."""
    losses = {run["lr"]: run["loss"] for run in runs if (run["arm"], run["seed"]) == (arm, RATE_SEED)}
    return best_rate(losses, RATES)


def reported(runs: list[dict]) -> list[dict]:
    """The runs at their arm's own rate, those that chose it left out."""
    rates = {arm: chosen_rate(runs, arm) for arm in ARMS}
    return [run for run in runs if run["seed"] != RATE_SEED and run["lr"] == rates[run["arm"]]]


def table(runs: list[dict]) -> str:
    """Means over seeds with standard deviations."""
    runs = reported(runs)
    steps, seeds = sorted({run["steps"] for run in runs}), {run["seed"] for run in runs}
    base = {run["seed"]: run["loss"] for run in runs if run["arm"] == BASELINE}
    lines = [f"{steps[-1]} steps, {len(seeds)} seeds; differences seed by seed\n"]
    lines += [
        f"| | attention's parameters | rate | held-out loss | difference from {BASELINE} | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        found = [run for run in runs if run["arm"] == arm]
        if not found:
            continue
        losses = [run["loss"] for run in found]
        less = [run["loss"] - base[run["seed"]] for run in found if run["seed"] in base]
        paired = f"{statistics.mean(less):+.3f} ± {spread(less):.3f}" if less and arm != BASELINE else ""
        lines.append(
            f"| {arm} | {found[0]['parameters']:,} | {found[0]['lr']:g} "
            f"| {statistics.mean(losses):.3f} ± {spread(losses):.3f} | {paired} "
            f"| {statistics.median(run['seconds'] for run in found):.0f} |"
        )
    return "\n".join(lines) + "\n"


def picture(runs: list[dict], path: Path) -> None:
    """Held-out loss against steps, a line per arm: means over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.4))
    for arm in ARMS:
        found = [run["curve"][1:] for run in reported(runs) if run["arm"] == arm]
        if found:
            line = [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*found, strict=True)]
            axis.plot(*zip(*line, strict=True), label=arm, linewidth=1.2)
    axis.set_xlabel("steps", fontsize=9)
    axis.set_ylabel("held-out loss, nats per character", fontsize=9)
    axis.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)


def run_missing(cells: list[tuple], options: argparse.Namespace, done: list[dict]) -> list[dict]:
    """Runs what is not done of (arm, seed, rate), unless only a report is wanted; returns all that is done."""
    import torch

    path = options.output / "results.json"
    wanted = [dict(zip(("arm", "seed", "lr"), cell, strict=True)) | {"steps": options.steps} for cell in cells]
    missing = [one for one in wanted if not any(one.items() <= run.items() for run in done)]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
    if missing and not options.report:
        torch.set_num_threads(1)
        options.output.mkdir(parents=True, exist_ok=True)
        for one in tqdm(missing, unit="run"):
            done = [*done, run(one)]
            write_text(path, json.dumps({"about": about_runs(), "runs": done}, indent=1) + "\n")
    return done


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, table.md and curves.png")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if options.steps < MEASURED:
        parser.error(f"--steps {options.steps}: expected at least {MEASURED}")
    path = options.output / "results.json"
    try:
        done = [run for run in read_runs(path) if run["steps"] == options.steps or options.report]
    except ValueError as error:
        sys.exit(f"error: {error}")
    cells = [(arm, RATE_SEED, rate) for arm in ARMS for rate in RATES]
    done = run_missing(cells, options, done)
    done = run_missing([(arm, s, chosen_rate(done, arm)) for s in options.seeds for arm in ARMS], options, done)
    if reported(done):
        write_text(options.output / "table.md", "<!-- written by examples/mhe_study.py -->\n" + table(done))
        picture(done, options.output / "curves.png")
        print(table(done))


if __name__ == "__main__":
    main()
