"""Prints what is kept of the kernels' first runs on a GPU (`results/gpu_h200.json`): measures nothing.

    python benchmarks/gpu_times.py

Times of kernels come from `make gpu-first-run` and, for tiles, from torch's profiler; those of attention are medians of
a CUDA graph's replays, as section "op" of `gpu_suite.py` has them; training and decoding are its sections of that name.
`make gpu-first-run` measures all of it anew, for the code as it is.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_h200.json"
Runs = dict[str, Any]


def table(header: str, rows: list[str]) -> str:
    """A Markdown table of lines whose cells are separated by bars."""
    return "\n".join([f"| {header} |", "|---" * (header.count("|") + 1) + "|", *(f"| {row} |" for row in rows)])


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def attention(runs: Runs) -> str:
    """Forward, and forward and backward, of attention alone, beside flash attention of the same shape."""
    flash = {(r["size"], r["tokens"]): r for r in runs["attention"] if r["state"] == "flash attention"}
    rows = []
    for run in runs["attention"]:
        other = flash.get((run["size"], run["tokens"]))
        over = f"{run['both_ms'] / other['both_ms']:.1f}" if other and not run["window"] else "-"
        shape = f"{run['size']}, {run['tokens']}, {run['window'] or 'global'}"
        times = " | ".join(milliseconds(run[name]) for name in ("forward_ms", "both_ms", "launched_ms"))
        rows.append(f"{run['state']} | {run['commit'] or '-'} | {shape} | {times} | {over}")
    return table(
        "what | commit | shape | forward, ms | forward and backward | launched from Python | times flash", rows
    )


def first(runs: Runs) -> str:
    """Kernels of the first run."""
    rows = [f"{k['kernel']} | {k['launches']} | {k['us']:.0f}" for k in runs["first"]["kernels"]]
    return table("kernel | launches | us", rows)


def tiles(run: Runs) -> str:
    """Times of kernels with each tile that was tried, the fastest first; several launches apart."""
    rows = []
    for name, tried in run["us"].items():
        best = {str(tile): us for tile, us in sorted(tried, key=lambda pair: -sum(pair[1]))}  # of equals the fastest
        order = sorted(best.items(), key=lambda pair: sum(pair[1]))
        cells = [f"{tile.strip('[]').replace(', ', ' ')}: {' + '.join(f'{x:.0f}' for x in us)}" for tile, us in order]
        rows.append(f"{name} | {'; '.join(cells)}")
    rows += [f"{name} | {' + '.join(f'{x:.0f}' for x in us)}" for name, us in run["others"].items()]
    return table("kernel | queries, keys, warps, stages: us", rows)


def models(runs: Runs, what: str) -> str:
    """Tokens per second of a plain Transformer and of DCFormer with windows in every other layer."""
    rows = []
    for model in runs[what]["models"]:
        plain, ours = model["plain"], model["LG"]
        speeds = f"{plain['tokens_per_s']:.5g} | {ours['tokens_per_s']:.5g}"
        ratio = f"{ours['tokens_per_s'] / plain['tokens_per_s']:.1%} | {model['paper']:.1%}".replace("%", " %")
        rows.append(f"{model['size']} | {speeds} | {plain['layer_ms']:.4g} | {ours['layer_ms']:.4g} | {ratio}")
    return table(f"{what} | plain, tokens/s | DCFormer | plain, ms a layer | DCFormer | ratio | the paper's", rows)


def main() -> None:
    """Prints the tables of docs/gpu_history.md."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = [attention(runs), models(runs, "training"), models(runs, "decoding"), first(runs)]
    print("\n\n".join(parts + [tiles(run) for run in runs["tiles"]]))


if __name__ == "__main__":
    main()
