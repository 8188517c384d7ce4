"""The study of composition's learning rates: which parameters have which, runs that are added and kept, the page."""

import json
import random
import sys

import pytest
import torch
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import composition_rates as study

from dcformer.optimization import composition_rate_ratios

SMALL = study.Size(32, 4, 0.06, 4, (1e-3, 2e-3), seeds=(0,))


def a_run(way, rate, seed, last, before, size="narrow"):
    return {"size": size, "way": way, "rate": rate, "seed": seed, "steps": 100, "losses": [before, last]}


@pytest.mark.parametrize("way", study.WAYS)
def test_rates_and_decay_of_each_way(way):
    model = study.make_model(SMALL, way)
    assert model.config.composes == (way != "plain")
    groups = {group["name"]: group for group in study.make_groups(model, way, 1e-3)}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    initial = composition_rate_ratios(model.config)
    expected = {
        "rule": initial,
        "0.1": dict.fromkeys(initial, 0.1),
        "0.02": dict.fromkeys(initial, 0.02),
        "qkw": {"qkw": 0.1},
        "gate_proj.weight": {"gate_proj.weight": 0.1},
        "dw1_proj.weight": {"dw1_proj.weight": 0.1},
    }.get(way, {})
    of_composition = {name for name in groups if name.startswith("compose.")}
    assert len(of_composition) == (0 if way == "plain" else 3)
    for name, group in groups.items():
        ratio = next((value for key, value in expected.items() if f"compose.{key.removesuffix('.weight')}" == name), 1)
        assert group["lr"] == pytest.approx(1e-3 * ratio)
        decays = name == "matrices" or (way == "decay" and name in of_composition)
        assert group["weight_decay"] == (study.DECAY if decays else 0)


@pytest.mark.parametrize("questions", [1, 2])
def test_rows_ask_so_many_questions(questions):
    row, whole = study.make_row(random.Random(1), questions), study.make_row(random.Random(1))
    asked = [label for label in row["labels"] if label != -100]
    assert len(asked) == questions and asked == [label for label in whole["labels"] if label != -100][:questions]
    assert set(row["branch"]) <= {-1, 0, *range(1, questions + 1)}
    assert {len(values) for values in row.values()} == {study.TOKENS}


def test_table_has_means_and_spreads():
    runs = [a_run("1", 1e-3, seed, last, 0.5) for seed, last in enumerate((0.1, 0.3))] + [
        a_run("rule", 2e-3, 0, 0.4, 0.6)
    ]
    lines = study.table(runs).splitlines()
    assert "seeds 0, 1: mean loss of the last 50 of 100 steps" in lines[0]
    assert "| 1 | 0.200 ± 0.141; 0.500 ± 0.000 |  |  |" in lines
    assert "| by initial values |  | 0.400; 0.600 |  |" in lines


def test_the_page_has_the_table_of_the_results():
    runs = study.read_runs(study.RESULTS)
    assert study.table(runs).strip() in (REPOSITORY / "docs" / "training_results.md").read_text()


@pytest.mark.slow
def test_runs_are_added_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "SIZES", {"narrow": SMALL})
    monkeypatch.setattr(study, "as_trained", lambda train, wanted, workers: (train(one, "") for one in wanted))
    torch_threads = torch.get_num_threads()
    out = tmp_path / "new" / "rates.json"
    options = ["--output", str(out), "--steps", "100"]
    study.main([*options, "--ways", "plain"])
    first = json.loads(out.read_text())["runs"]
    assert [(run["way"], run["rate"]) for run in first] == [("plain", 1e-3), ("plain", 2e-3)]
    assert all(len(run["losses"]) == 2 and 0 < run["losses"][-1] < run["losses"][0] < 10 for run in first)
    study.main([*options, "--ways", "plain", "1"])
    both = json.loads(out.read_text())["runs"]
    assert both[:2] == first and len(both) == 4
    assert "2 of 4 runs are in" in capsys.readouterr().out
    study.main([*options, "--report"])
    assert json.loads(out.read_text())["runs"] == both
    with pytest.raises(SystemExit):
        study.main([*options[:2], "--steps", "120"])
    assert "--steps 120: expected a multiple of 50" in capsys.readouterr().err
    torch.set_num_threads(torch_threads)
