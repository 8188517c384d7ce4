"""The page of the first runs on a GPU tells what is kept of them."""

import json
import sys

from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu_times

RUNS = json.loads(gpu_times.RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_tables_that_are_printed(capsys):
    gpu_times.main()
    page = (REPOSITORY / "docs" / "gpu_history.md").read_text(encoding="utf-8")
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 6 and all(table in page for table in tables)


def test_what_the_page_says_of_them():
    page = " ".join((REPOSITORY / "docs" / "gpu_history.md").read_text(encoding="utf-8").split())
    states = [run for run in RUNS["attention"] if (run["size"], run["tokens"], run["window"]) == ("6.9b", 2048, None)]
    first, last, flash = (
        next(run["both_ms"] for run in states if run["state"] == state)
        for state in ("first run", "the same, maps in tiles of queries", "flash attention")
    )
    assert f"from {first:.3f} to {last:.3f} ms" in page and f"{last / flash:.1f} times flash attention" in page
    ratios = [m["LG"]["tokens_per_s"] / m["plain"]["tokens_per_s"] for m in RUNS["training"]["models"]]
    assert f"{ratios[0]:.1%} of a plain".replace("%", " %") in page
    assert f"per second at 6.9B and {ratios[1]:.1%} at 2.8B".replace("%", " %") in page
    kernels = {k["kernel"]: k["us"] for k in RUNS["first"]["kernels"]}
    best = {name: min(sum(us) for _, us in tried) for name, tried in RUNS["tiles"][0]["us"].items()}
    backward = kernels["back_1_kernel"] + kernels["back_0_kernel"]
    assert f"{backward:,.0f} -> {best['weights'] + best['back_1'] + best['back_0']:.0f}, `weights` included" in page
    for name in ("keys", "scores"):
        assert f"{kernels[f'{name}_kernel']:.0f} -> {best[name]:.0f} |" in page
    assert f"values {kernels['values_kernel']:.0f} -> {best['values']:.0f}" in page
    shares = [check["share_of_allowed"] for check in RUNS["first"]["check"]]
    assert f"at {min(shares):.2f} to {max(shares):.2f} of the errors allowed" in page
    shares = [kind["share_of_allowed"] for kind in RUNS["first"]["selfcheck"]]
    assert f"at {min(shares):.2f} to {max(shares):.2f} of the errors allowed" in page
