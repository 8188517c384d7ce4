"""The study of heads on text: what differs, the choice of rates, resuming, the committed table."""

import itertools
import json
import sys

import pytest
from helpers import REPOSITORY, as_trained_here

sys.path.insert(0, str(REPOSITORY / "examples"))
import heads_on_text
import small_law

FOLDER = REPOSITORY / "docs" / "scaling"
RATES = heads_on_text.RATES


def run_of(family, width, head_dim, seed, rate, choice, loss):
    settings = heads_on_text.settings_of(family, width, head_dim, seed, rate, 1.0)
    sizes = {"parameters": 125, "flops": 150} if family == small_law.VARIANT else {"parameters": 100, "flops": 100}
    return settings | {"choice_loss": choice, "loss": loss, "cpu_seconds": 60.0} | sizes


def runs_of(best: float) -> list[dict]:
    """All runs; composition leads by a tenth for each doubling of the heads, at the best rate only."""
    runs = []
    for width, head_dims in heads_on_text.HEAD_DIMS.items():
        for (i, dim), family, rate in itertools.product(enumerate(head_dims), heads_on_text.FAMILIES, RATES):
            lead, off = 0.1 * i if family == small_law.VARIANT else 0.0, abs(rate - best)
            if width == heads_on_text.RATE_WIDTH:
                runs.append(run_of(family, width, dim, heads_on_text.RATE_SEED, rate, off, 9.0))
            runs += [run_of(family, width, dim, s, rate, 0.0, 2 - lead + s / 100 + off) for s in heads_on_text.SEEDS]
    return runs


@pytest.mark.parametrize("width", heads_on_text.HEAD_DIMS)
def test_only_heads_and_composition_differ(width):
    plain, ours = (
        [small_law.make_config(family, width, dim).to_dict() for dim in heads_on_text.HEAD_DIMS[width]]
        for family in heads_on_text.FAMILIES
    )
    of_heads = {"num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"}
    for configs in (plain, ours):
        for one, other in itertools.pairwise(configs):
            assert {name for name in one if one[name] != other[name]} <= of_heads
            assert one["num_attention_heads"] * one["head_dim"] == other["num_attention_heads"] * other["head_dim"]
    for one, other in zip(plain, ours, strict=True):
        differ = {name for name in one if one[name] != other[name]}
        assert {name for name in differ if not name.startswith("compose")} == set()
        assert "compose_pre" in differ


@pytest.mark.parametrize("best", RATES)
def test_the_table_has_each_family_at_its_best_rate(best):
    told = heads_on_text.report(runs_of(best), 1.0)
    rows = [line for line in told.splitlines() if line.startswith(("| 48 ", "| 64 "))]
    assert [row.split(" | ")[1] for row in rows] == ["3", "6", "12", "4", "8"]
    assert [row.split(" | ")[5].split()[0] for row in rows] == ["+0.0000", "+0.1000", "+0.2000", "+0.0000", "+0.1000"]
    assert all(f"| {best:g}; {best:g} |" in row and "| 25% | 50% | 1.0 and 1.0 |" in row for row in rows)
    assert ("at the edge of the grid: " in told) == (best in (min(RATES), max(RATES)))


def test_what_is_not_done_is_named():
    runs = [run for run in runs_of(1.6e-2) if not (run["head_dim"] == 4 and run["seed"] == 2)]
    told = heads_on_text.report(runs, 1.0)
    assert "| 48 | 12 | not done |" in told and told.count("not done") == 9 and "| 48 | 6 | 0.016" in told


@pytest.mark.long
def test_a_run_trains_and_is_not_run_again(tmp_path, monkeypatch, capsys):
    """Two rates, one seed, some steps: with runs of the law taken over, and nothing left to do afterwards."""
    monkeypatch.setattr(heads_on_text, "RATES", (8e-3, 1.6e-2))
    monkeypatch.setattr(heads_on_text, "SEEDS", (0,))
    monkeypatch.setattr(heads_on_text, "HEAD_DIMS", {48: (16, 8)})
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
    assert sorted({(run["family"], run["head_dim"], run["seed"]) for run in runs}) == sorted(
        (family, 8, seed) for family in heads_on_text.FAMILIES for seed in (0, heads_on_text.RATE_SEED)
    )
    assert (tmp_path / "heads.svg").read_text().rstrip().endswith("</svg>")
    assert len(runs) == 6 and all(0 < run["loss"] < 6 for run in runs)
    capsys.readouterr()
    monkeypatch.setattr(small_law, "train", lambda *_: pytest.fail("trained again"))
    assert heads_on_text.main() == 0
    assert "4 of 4 runs" in capsys.readouterr().out


def test_the_committed_table_is_that_of_the_committed_runs():
    runs = heads_on_text.of_the_law(FOLDER / "small.json") + heads_on_text.read_runs(FOLDER / "heads.json")
    told = heads_on_text.report(runs, 1.0)
    assert told == (FOLDER / "heads.md").read_text(encoding="utf-8")
    assert told.count("| 48 | 3 | 0.016; 0.016 |") == told.count("| 48 | 6 | 0.016; 0.008 |") == 1
    assert told.count("| 48 | 12 | 0.032; 0.016 |") == 1 and "none is at the edge of the grid" in told
