"""Fewer key and value heads from a trained model, eight ways, at equal steps: curves and a table, on a CPU.

    python examples/dha_study.py                     # what is not in docs/dha/results.json yet, then table and picture
    python examples/dha_study.py --output runs/dha   # all of it anew: about 30 minutes on one core
    python examples/dha_study.py --output runs/look --seeds 0 --steps 30 --base-steps 60  # a look at how it goes

A small language model with as many key and value heads as query heads is trained on the text in examples/data. From it
every arm takes the same number of steps, whatever it spends them on, searching included. A second base has copies of
heads in its first layers, so that unequal counts have something to find. A run that is done is written to
`results.json` at once, and not run again: stop and start as you like.
"""

import argparse
import copy
import gzip
import json
import statistics
import sys
import time
import warnings
from functools import cache
from pathlib import Path

from study import CORPUS, about_runs, read_runs, save_figure, spread, write_text
from tqdm import tqdm

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "dha"
SEEDS, RATIOS = (0, 1, 2), (0.5, 0.25)
STEPS, BASE_STEPS = 300, 1200
SEARCH, FUSION, CLOSING, MARGIN = 60, 120, 30, 40  # of 300 steps; other runs have them in proportion
LENGTH, BATCH, LR, BASE_LR = 64, 8, 1e-3, 3e-3
MEASURED, HELD_OUT, PAGE = 10, 20, 4096  # points of a curve; every twentieth page of so many characters is held out
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 8}
# arm -> (label, base)
ARMS = {
    "mha": ("MHA continued, no saving", "plain"),
    "dha": ("**DHA: groups by parameters, fusion**", "plain"),
    "consecutive": ("consecutive groups, fusion", "plain"),
    "function": ("trained search by functions, fusion", "plain"),
    "operator": ("trained search by operators (the paper's), fusion", "plain"),
    "open": ("groups by parameters, fusion without closing", "plain"),
    "plan_mean": ("groups by parameters, mean pooling", "plain"),
    "gqa_mean": ("GQA: consecutive groups, mean pooling", "plain"),
    "random": ("random keys and values", "plain"),
    "copies_mean": ("copies: equal counts, mean pooling", "copies"),
    "copies_root_mean": ("copies: counts by root, mean pooling", "copies"),
    "copies_dha": ("copies: equal counts, fusion", "copies"),
    "copies_root": ("copies: counts by root, fusion", "copies"),
}
SEARCHED = ("function", "operator")
FUSED = ("dha", "consecutive", *SEARCHED, "open", "copies_dha", "copies_root")


@cache
def load_text():
    """Rows of LENGTH + 1 characters as ids, to train on and held out; and the number of characters."""
    import torch

    text = gzip.decompress(CORPUS.read_bytes()).decode()
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    rows = {False: [], True: []}
    for page, first in enumerate(range(0, len(text), PAGE)):
        ids = [index[character] for character in text[first : first + PAGE]]
        for start in range(0, len(ids) - LENGTH, LENGTH):
            rows[page % HELD_OUT == HELD_OUT - 1].append(ids[start : start + LENGTH])
    return torch.tensor(rows[False]), torch.tensor(rows[True]), len(index)


def batches_of(seed: int, steps: int) -> list:
    """The batches [BATCH, LENGTH] of a run, the same for every arm."""
    import torch

    rows, _, _ = load_text()
    order = torch.Generator().manual_seed(seed)
    return [rows[torch.randint(0, len(rows), (BATCH,), generator=order)] for _ in range(steps)]


def held_out_batches() -> tuple:
    """128 rows of the held-out pages, the same always."""
    rows = load_text()[1]
    return rows[:: max(1, len(rows) // 128)][:128].split(32)


def held_out_loss(model) -> float:
    from dcformer.dha import evaluate_loss

    return evaluate_loss(model, held_out_batches())


def train(model, batches, lr: float, on_step=None, parameters=None) -> None:
    """Plain training: AdamW, warm-up and cosine as in fusion. Weight decay is 0.1, or what groups of parameters say."""
    import torch

    from dcformer.dha.fusion import theta_lr

    parameters = model.parameters() if parameters is None else parameters
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = theta_lr(step, len(batches), lr)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step + 1, model)


def make_base(kind: str, seed: int, steps: int):
    """A trained Llama with 8 key and 8 value heads a layer; of the base "copies" the first two layers have copies.

    That one is trained with 2 key and 2 value heads in these layers, and expanded.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    from dcformer import DHAConfig, DHAForCausalLM
    from dcformer.dha import expand

    set_seed(seed)
    fields = SIZES | {"vocab_size": load_text()[2], "max_position_embeddings": 2 * LENGTH}
    if kind == "plain":
        model = LlamaForCausalLM(LlamaConfig(**fields))
    else:
        maps = [[head // 4 for head in range(8)]] * 2 + [list(range(8))] * 2
        model = DHAForCausalLM(DHAConfig(**fields, key_head_map=maps, value_head_map=maps))
    train(model, tqdm(batches_of(1000 + seed, steps), desc=f"base {kind}, seed {seed}"), BASE_LR)
    return model if kind == "plain" else expand(model)


def run(settings: dict, base) -> dict:
    """One arm: from the base to its curve."""
    import torch
    from transformers import set_seed

    from dcformer import dha

    warnings.simplefilter("ignore")
    arm, ratio, seed, steps = (settings[name] for name in ("arm", "ratio", "seed", "steps"))
    set_seed(seed)
    batches, curve, facts = batches_of(seed, steps), [], {}
    every = max(1, steps // MEASURED)
    scaled = {name: max(1, value * steps // STEPS) for name, value in
              {"search": SEARCH, "fusion": FUSION, "closing": CLOSING, "margin": MARGIN}.items()}  # fmt: skip
    model, start = copy.deepcopy(base), time.process_time()
    used = 0

    def measure(step, model):
        if (used + step) % every == 0 or used + step == steps:
            curve.append([used + step, held_out_loss(model)])

    facts["source_loss"] = held_out_loss(base)
    if arm != "mha":
        options = {"kv_ratio": ratio, "seed": seed, "progress": False}
        if "root" in arm:
            options["allocation"] = "root"
        if arm in ("consecutive", "gqa_mean", "random"):
            plan = dha.uniform_plan(base, ratio)
        elif arm in SEARCHED:
            used = scaled["search"]
            plan = dha.search(base, **options, score=arm, batches=batches[:used], steps=used)
        else:
            plan = dha.search(base, **options)
        facts |= {"key_heads": plan.num_key_heads, "value_heads": plan.num_value_heads}
        facts["displacement"] = sum(plan.displacements)
        if arm == "dha":  # what unequal counts would be
            unequal = dha.search(base, **options, allocation="root")
            facts |= {"root_key_heads": unequal.num_key_heads, "root_value_heads": unequal.num_value_heads}
        if arm in FUSED:
            closing = 0 if arm == "open" else scaled["closing"]
            fused = dha.fuse(
                base, plan, batches[used : used + scaled["fusion"]], scaled["fusion"], lr=LR, closing_steps=closing,
                margin_steps=scaled["margin"], held_out=held_out_batches(), seed=seed, progress=False,
                on_step=measure,
            )  # fmt: skip
            model = fused.fold(accept_gap=True)
            row = load_text()[1][:4]
            with torch.no_grad():
                soft, folded = fused.model.eval()(row).logits, model.eval()(row).logits
            facts |= {"folded_difference": (soft - folded).abs().max().item(), "gap": fused.gap}
            facts |= {name: fused.summary[name] for name in ("soft_loss", "folded_loss", "small_at")}
            facts |= {"fusion": fused.losses[-1]["fusion"], "worst": fused.losses[-1]["worst"]}
            facts["soft_at_start"] = soft_at_start(base, plan)
            used += scaled["fusion"]
        else:
            model = dha.from_plan(base, plan)
            if arm == "random":
                for name, parameter in model.named_parameters():
                    if "k_proj" in name or "v_proj" in name:
                        torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    facts["start"] = held_out_loss(model)
    curve.append([used, facts["start"]])
    if arm != "open":  # which is there for the cost of folding
        train(model, batches[used:], LR, measure)
    end = held_out_loss(model)
    seconds = round(time.process_time() - start, 1)
    return settings | facts | {"loss": end, "curve": curve, "seconds": seconds}


def soft_at_start(base, plan) -> float:
    """The held-out loss with mixers that have not been trained: the source's."""
    from dcformer.dha.mixing import attach_mixers
    from dcformer.dha.sources import HeadSource

    model = copy.deepcopy(base)
    attach_mixers(HeadSource(model), {(layer, kind): groups for layer, kind, groups in plan.parts})
    return held_out_loss(model)


def write_runs(path: Path, runs: list[dict]) -> None:
    runs = sorted(runs, key=lambda run: (list(ARMS).index(run["arm"]), -run["ratio"], run["seed"]))
    write_text(path, json.dumps({"about": about_runs(), "runs": runs}, indent=1) + "\n")


def wanted_runs(seeds, steps: int, base_steps: int) -> list[dict]:
    """Settings of all runs; those of a seed and a base together. The MHA saves nothing at any ratio: ratio 1."""
    found = []
    for seed in seeds:
        for base in ("plain", "copies"):
            arms = [arm for arm, (_, of) in ARMS.items() if of == base]
            for arm in arms:
                for ratio in (1.0,) if arm == "mha" else (0.5,) if base == "copies" else RATIOS:
                    found.append({"arm": arm, "base": base, "ratio": ratio, "seed": seed, "steps": steps,
                                  "base_steps": base_steps, "lr": LR})  # fmt: skip
    return found


# --- what came out ----------------------------------------------------------------------------------------------------


def cell(runs: list[dict], name: str) -> str:
    values = [run[name] for run in runs if run.get(name) is not None]
    return f"{statistics.mean(values):.3f} ± {spread(values):.3f}" if values else ""


def table(runs: list[dict]) -> str:
    """Means over seeds with standard deviations, by ratio; arms by their loss at the end."""
    lines = []
    for base, ratio in (("plain", 0.5), ("plain", 0.25), ("copies", 0.5)):
        chosen = {arm: [r for r in runs if r["arm"] == arm and r["ratio"] in (ratio, 1.0)]
                  for arm, (_, of) in ARMS.items() if of == base and arm != "open"}  # fmt: skip
        chosen = {arm: found for arm, found in chosen.items() if found}
        if not chosen:
            continue
        what = "" if base == "plain" else ", half of the layers with copies of heads"
        lines += [f"\n{100 * ratio:.0f} % of the heads{what}; {len(chosen[next(iter(chosen))])} seeds\n"]
        baseline = "gqa_mean" if base == "plain" else "copies_mean"
        ends = {run["seed"]: run["loss"] for run in chosen.get(baseline, [])}
        against = f'difference from "{ARMS[baseline][0]}", seed by seed'
        lines += [
            f"| | before further training | at the end | difference from the source | {against} | heads | CPU seconds |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for arm, found in sorted(chosen.items(), key=lambda item: statistics.mean(run["loss"] for run in item[1])):
            less = [{"x": run["loss"] - run["source_loss"]} for run in found]
            paired = [{"x": run["loss"] - ends[run["seed"]]} for run in found if run["seed"] in ends]
            heads = "; ".join(sorted({f"{r['key_heads']}, {r['value_heads']}" for r in found if "key_heads" in r}))
            seconds = statistics.median(run["seconds"] for run in found)
            lines.append(
                f"| {ARMS[arm][0]} | {cell(found, 'start')} | {cell(found, 'loss')} | {cell(less, 'x')} | "
                f"{cell(paired, 'x') if arm != baseline else ''} | {heads.replace(' ', '')} | {seconds:.0f} |"
            )
    fused = [run for run in runs if "soft_loss" in run]
    if fused:
        lines += ["\nFolding after fusion\n", "| | ratio | soft | folded | largest logits' difference | L_fusion |"]
        lines += ["|---|---|---|---|---|---|"]
        for arm in FUSED:
            for ratio in RATIOS:
                found = [run for run in fused if run["arm"] == arm and run["ratio"] == ratio]
                if found:
                    worst = max(run["folded_difference"] for run in found)
                    lines.append(
                        f"| {ARMS[arm][0]} | {ratio} | {cell(found, 'soft_loss')} | {cell(found, 'folded_loss')} "
                        f"| {worst:.1e} | {statistics.mean(run['fusion'] for run in found):.1e} |"
                    )
    return "\n".join(lines).strip() + "\n"


def picture(runs: list[dict], path: Path) -> None:
    """Held-out loss against steps of the whole, a line per arm: means over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(RATIOS), figsize=(10, 4.4), sharey=True)
    for axis, ratio in zip(axes, RATIOS, strict=True):
        for arm, (label, base) in ARMS.items():
            found = [run for run in runs if run["arm"] == arm and run["ratio"] in (ratio, 1.0)]
            if base != "plain" or arm == "open" or not found:
                continue
            points = zip(*(run["curve"] for run in found), strict=True)
            line = [(p[0][0], statistics.mean(value for _, value in p)) for p in points]
            axis.plot(*zip(*line, strict=True), label=label.strip("*"), linewidth=2.4 if arm == "dha" else 1.2)
        axis.set_title(f"{100 * ratio:.0f} % of key and value heads", fontsize=10)
        axis.set_xlabel("steps, fusion counted", fontsize=9)
        source = [run["source_loss"] for run in runs if run["arm"] == "mha"]
        if source:
            axis.set_ylim(statistics.mean(source) - 0.1, statistics.mean(source) + 0.6)
    axes[0].set_ylabel("held-out loss, nats per character", fontsize=9)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    save_figure(figure, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results.json, table.md and study.png")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of every arm, fusion counted")
    parser.add_argument("--base-steps", type=int, default=BASE_STEPS)
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if options.steps < 10 or options.base_steps < 1:
        parser.error(f"--steps {options.steps}, --base-steps {options.base_steps}: expected at least 10 and 1")
    path = options.output / "results.json"
    try:
        done = read_runs(path)
        wanted = wanted_runs(options.seeds, options.steps, options.base_steps)
        missing = [one for one in wanted if not any(one.items() <= run.items() for run in done)]
        print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path}", flush=True)
        if missing and not options.report:
            import torch

            torch.set_num_threads(1)
            options.output.mkdir(parents=True, exist_ok=True)
            bases: dict = {}
            with tqdm(missing, unit="run") as progress:
                for one in progress:
                    key = (one["base"], one["seed"])
                    if key not in bases:
                        bases = {key: make_base(*key, options.base_steps)}
                    result = run(one, bases[key])
                    same = ("arm", "ratio", "seed")
                    done = [other for other in done if any(other[name] != result[name] for name in same)] + [result]
                    write_runs(path, done)
                    progress.write(
                        f"{one['arm']} {one['ratio']} seed {one['seed']}: source {result['source_loss']:.4f}, start "
                        f"{result['start']:.4f}, end {result['loss']:.4f}, {result['seconds']:.0f} s"
                    )
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not done:
        sys.exit(f"error: {path} has no runs; train some first, without --report")
    write_text(options.output / "table.md", "<!-- written by examples/dha_study.py -->\n" + table(done))
    picture(done, options.output / "study.png")
    print(table(done) + f"wrote table.md and study.png to {options.output}")


if __name__ == "__main__":
    main()
