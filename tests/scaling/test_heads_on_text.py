"""The study of heads on text: what differs, the choice of rates, resuming, the committed table."""

import itertools
import json
import math
import sys

import pytest
from helpers import REPOSITORY, as_trained_here

from dcformer.analysis import num_parameters, training_flops

sys.path.insert(0, str(REPOSITORY / "examples"))
import heads_on_text
import small_law

FOLDER = REPOSITORY / "docs" / "scaling"
RATES = heads_on_text.RATES


def run_of(family, shape, seed, rate, choice, loss):
    settings = shape.settings(family, seed, rate, 1.0)
    sizes = {"parameters": 125, "flops": 150} if family == small_law.VARIANT else {"parameters": 100, "flops": 100}
    return settings | {"choice_loss": choice, "loss": loss, "cpu_seconds": 60.0} | sizes


def runs_at_all_rates(family: str, shape, best: float, lead: float) -> list[dict]:
    """Runs of a cell, at the best rate lower than 2 by `lead`, and worse at others."""
    runs = []
    for rate in RATES:
        off = abs(rate - best)
        if shape.of_grid == shape:
            runs.append(run_of(family, shape, heads_on_text.RATE_SEED, rate, off, 9.0))
        runs += [run_of(family, shape, s, rate, 0.0, 2 - lead + s / 100 + off) for s in heads_on_text.SEEDS]
    return runs


def runs_of(best: float) -> list[dict]:
    """All runs; at this rate composition leads by 0.1, talking heads by 0.2, both by 0.4 for each halving of heads."""
    plain, ours, static, both = heads_on_text.LABELS
    gains = {plain: 0.0, ours: 0.1, static: 0.2, both: 0.4}
    return [
        run
        for shape, (family, gain) in itertools.product(heads_on_text.SHAPES, gains.items())
        for run in runs_at_all_rates(family, shape, best, gain * math.log2(16 / shape.head_dim))
    ]


@pytest.mark.parametrize("width", {shape.width for shape in heads_on_text.SHAPES})
def test_only_heads_and_composition_differ(width):
    head_dims = [shape.head_dim for shape in heads_on_text.SHAPES if shape.width == width]
    plain, ours, static, both = (
        [small_law.make_config(family, width, dim).to_dict() for dim in head_dims] for family in heads_on_text.LABELS
    )
    of_heads = {"num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"}
    for configs in (plain, ours, static, both):
        for one, other in itertools.pairwise(configs):
            assert {name for name in one if one[name] != other[name]} <= of_heads
            assert one["num_attention_heads"] * one["head_dim"] == other["num_attention_heads"] * other["head_dim"]
    for one, *others in zip(plain, ours, static, both, strict=True):
        for other in others:
            differ = {name for name in one if one[name] != other[name]}
            assert {name for name in differ if not name.startswith("compose")} == set()
            assert "compose_pre" in differ
    for configs, parts in ((ours, (True, False)), (static, (False, True)), (both, (True, True))):
        for config in configs:
            assert (config["compose_query"] and config["compose_key"], config["compose_static"]) == parts


@pytest.mark.parametrize("best", RATES)
def test_the_table_has_each_family_at_its_best_rate(best):
    told = heads_on_text.report(runs_of(best), [], 1.0)
    dear, same, cheap = "25.0% | 50.0%", "0.0% | 0.0%", "-20.0% | -33.3%"  # of composed models beside all others
    expected = ((0.1, dear), (0.2, same), (0.1, cheap), (0.4, same), (0.3, cheap), (0.2, same))
    _, *tables = told.split("\n## ")[:7]
    for table, (gain, more) in zip(tables, expected, strict=True):
        rows = [line for line in table.splitlines() if line.startswith(("| 48 ", "| 64 "))]
        assert [row.split(" | ")[1] for row in rows] == ["3", "6", "12", "4", "8"]
        lower = [float(row.split(" | ")[5].split()[0]) for row in rows]
        assert lower == pytest.approx([0, gain, 2 * gain, 0, gain])
        assert all(f"| {best:g}; {best:g} |" in row and f"| {more} | 1.0 and 1.0 |" in row for row in rows)
        assert f"lower in 9 of 15: by +0.0000 to +{2 * gain:.4f}." in table, "with 3 and 4 heads they are even"
    assert ("at the edge of the grid: " in told) == (best in (min(RATES), max(RATES)))


def test_what_is_not_done_is_named():
    runs = [run for run in runs_of(1.6e-2) if not (run["head_dim"] == 4 and run["seed"] == 2)]
    _, told, *_ = heads_on_text.report(runs, [], 1.0).split("\n## ")
    assert "| 48 | 12 | not done |" in told and told.count("not done") == 9 and "| 48 | 6 | 0.016" in told


def test_larger_plain_models_have_as_many_parameters():
    for composed, shapes in heads_on_text.LARGER.items():
        ours = small_law.make_config(small_law.VARIANT, composed.width, composed.head_dim)
        sizes = []
        for shape in shapes:
            config = small_law.make_config(heads_on_text.PLAIN, shape.width, shape.head_dim, shape.intermediate_size)
            assert config.num_attention_heads == shape.heads and config.intermediate_size == shape.intermediate_size
            parameters = num_parameters(config) / num_parameters(ours)
            sizes.append((parameters, training_flops(config, 128) / training_flops(ours, 128)))
            run = shape.settings(heads_on_text.PLAIN, 0, 1e-2, 1.0)
            assert run["steps"] == composed.settings(small_law.VARIANT, 0, 1e-2, 1.0)["steps"]
        as_large = [parameters == pytest.approx(1, abs=0.025) for parameters, _ in sizes]
        as_dear = [operations == pytest.approx(1, abs=0.005) for _, operations in sizes]
        assert sum(as_large) == 3 and all(one or other for one, other in zip(as_large, as_dear, strict=True))


@pytest.mark.parametrize("best", RATES)
def test_larger_plain_models_have_rates_of_their_own(best):
    larger = [
        run
        for i, shape in enumerate(heads_on_text.larger_shapes())
        for run in runs_at_all_rates(heads_on_text.PLAIN, shape, best, 0.01 * i)
    ]
    *_, ours, both = heads_on_text.report(runs_of(1.6e-2), larger, 1.0).split("\n## ")
    for told, of_six in ((ours, 0.1), (both, 0.4)):
        rows = [line.split(" | ") for line in told.splitlines() if line.startswith(("| 6 ", "| 12 "))]
        assert [row[4] for row in rows] == [f"{best:g}; 0.016"] * 7
        lower = [float(row[7].split()[0]) for row in rows]
        expected = [of_six - 0.01 * i for i in range(4)] + [2 * of_six - 0.01 * i for i in (4, 5, 3)]
        assert lower == pytest.approx(expected), "for 6 heads, then for 12"


@pytest.mark.long
def test_a_run_trains_and_is_not_run_again(tmp_path, monkeypatch, capsys):
    """Two rates, one seed, some steps: with runs of the law taken over, and nothing left to do afterwards."""
    monkeypatch.setattr(heads_on_text, "RATES", (8e-3, 1.6e-2))
    monkeypatch.setattr(heads_on_text, "SEEDS", (0,))
    shapes = [heads_on_text.Shape(48, 16), heads_on_text.Shape(48, 8)]
    monkeypatch.setattr(heads_on_text, "SHAPES", shapes)
    larger = heads_on_text.Shape(54, 18, 144)
    monkeypatch.setattr(heads_on_text, "LARGER", {shapes[1]: (larger,)})
    monkeypatch.setattr(small_law, "as_trained", as_trained_here)
    monkeypatch.setattr(small_law.study, "HELD_OUT", 10**6)  # one page is held out
    scale, law = 0.002, tmp_path / "small.json"
    of_law = [
        small_law.settings_of(family, heads_on_text.RATE_WIDTH, seed, rate, scale)
        | {"choice_loss": rate, "loss": 3.0, "cpu_seconds": 1.0, "parameters": 100, "flops": 100.0}
        for family in heads_on_text.FAMILIES
        for seed, rate in ((heads_on_text.RATE_SEED, 8e-3), (heads_on_text.RATE_SEED, 1.6e-2), (0, 8e-3))
    ]
    law.write_text(json.dumps({"runs": of_law}))
    command = ["heads_on_text.py", "--output", tmp_path, "--law", law, "--scale", scale, "--workers", 1]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    assert heads_on_text.main() == 0
    runs = json.loads((tmp_path / "heads.json").read_text())["runs"]
    seeds = (0, heads_on_text.RATE_SEED)
    wanted = [(family, 8, seed) for family in heads_on_text.FAMILIES for seed in seeds]
    wanted += [(family, dim, seed) for family in small_law.OF_ABLATION for dim in (16, 8) for seed in seeds]
    assert sorted({(run["family"], run["head_dim"], run["seed"]) for run in runs}) == sorted(wanted)
    assert (tmp_path / "heads.svg").read_text().rstrip().endswith("</svg>")
    assert len(runs) == 18 and all(0 < run["loss"] < 6 for run in runs)
    of_larger = json.loads((tmp_path / "heads_larger.json").read_text())["runs"]
    assert len(of_larger) == 3 and {run["intermediate_size"] for run in of_larger} == {144}
    assert len({run["parameters"] for run in of_larger} & {run["parameters"] for run in runs}) == 0
    assert "not done" not in (tmp_path / "heads.md").read_text()
    capsys.readouterr()
    monkeypatch.setattr(small_law, "train", lambda *_: pytest.fail("trained again"))
    assert heads_on_text.main() == 0
    told = capsys.readouterr().out
    assert "rates: 12 of 12 runs" in told and "larger plain models, rates: 2 of 2 runs" in told


def test_the_committed_table_is_that_of_the_committed_runs():
    runs = heads_on_text.of_the_law(FOLDER / "small.json") + heads_on_text.read_runs(FOLDER / "heads.json")
    told = heads_on_text.report(runs, heads_on_text.read_runs(FOLDER / "heads_larger.json"), 1.0)
    assert told == (FOLDER / "heads.md").read_text(encoding="utf-8")
    _, composed, static, *_ = told.split("\n## ")
    assert composed.count("| 48 | 3 | 0.016; 0.016 |") == composed.count("| 48 | 6 | 0.016; 0.008 |") == 1
    assert composed.count("| 48 | 12 | 0.032; 0.016 |") == static.count("| 48 | 3 | 0.016; 0.008 |") == 1
    assert "none is at the edge of the grid" in told and "not done" not in told
