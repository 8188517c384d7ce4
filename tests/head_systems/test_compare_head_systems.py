"""The comparison: equal costs, one grid of rates, halves of the held-out data, resuming, and its verdicts."""

import json
import re
import sys

import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))
import compare_head_systems as compare

SMALL = ["--tasks", "digits", "--matches", "parameters", "--columns", "qk_norm", "mixture", "--workers", "1"]


def run_of(column, seed, rate, choice, loss, task="text", match="parameters", steps=None):
    costs = {"mlp_width": 8, "parameters": 100, "flops": 10, "cache_bytes": 4, "cpu_seconds": 1.0}
    settings = compare.settings_of(task, column, match, seed, rate, steps)
    return settings | costs | {"choice_loss": choice, "loss": loss}


@pytest.mark.parametrize(
    ("task", "column", "match"),
    [
        ("text", "collaborative", "flops"),
        ("text", "dcformer", "parameters"),
        ("digits", "overlapped", "flops"),
        ("synthetic", "mhe", "flops"),
    ],
)
def test_costs_are_equal(task, column, match):
    """As near as a width of the MLP comes: within half of what one more costs."""
    which = compare.MATCHES.index(match)
    width = compare.matched_width(task, column, match)
    budget = compare.count(task, compare.make_config(task, "qk_norm"))[which]
    costs = [compare.count(task, compare.make_config(task, column, width + more))[which] for more in (-1, 0, 1)]
    assert abs(costs[1] - budget) < min(abs(costs[0] - budget), abs(costs[2] - budget))


def test_operations_are_those_of_training():
    """Not those of MHE with a cache, whose keys are wider; and as many keys as rows have tokens."""
    config = compare.make_config("text", "mhe")
    trained = compare.count("text", config)
    config.use_cache = True
    assert compare.count("text", config) == trained
    rows, _, _ = compare.study.make_data("synthetic", 2000)
    assert compare.TOKENS["synthetic"] == pytest.approx(sum(len(row["input_ids"]) for row in rows) / len(rows), abs=1)


def test_runs_of_another_width_are_trained_again(tmp_path):
    """Where what is equal is counted anew, runs of before do not count."""
    width = compare.matched_width("text", "gate", "flops")
    run = run_of("gate", 0, 1e-3, 2.0, 1.0, match="flops") | {"mlp_width": width}
    wanted = compare.settings_of("text", "gate", "flops", 0, 1e-3)
    assert compare.is_of(run, wanted) and not compare.is_of(run | {"mlp_width": width + 1}, wanted)
    old, other = run | {"steps": 7, "mlp_width": width + 1}, run | {"seed": 1}
    assert compare.merged([old, other], [run]) == [other, run]


def test_columns_fit_their_tasks():
    assert "mqa" in compare.columns_of("text") and "mqa" not in compare.columns_of("digits")
    for task in ("text", "digits"):
        for column in compare.columns_of(task):
            config = compare.make_config(task, column)
            assert getattr(config, "head_system", "") == compare.COLUMNS[column].system
    options = compare.make_config("text", "collaborative_half").head_system_options
    assert options == {"shared_key_query_dim": 32}


def test_rate_is_chosen_by_the_half_that_is_not_reported():
    runs = [
        run_of("gate", compare.RATE_SEED, rate, choice, -choice)
        for rate, choice in zip(compare.RATES, (3, 1, 2, 4), strict=True)
    ]
    assert compare.chosen_rate(runs[:2], "text", "gate") is None
    assert compare.chosen_rate(runs, "text", "gate") == compare.RATES[1]
    runs[1]["choice_loss"] = float("nan")
    assert compare.chosen_rate(runs, "text", "gate") == compare.RATES[2]


def test_reported_losses_are_those_of_the_chosen_rate_and_other_seeds():
    runs = [
        run_of("gate", compare.RATE_SEED, rate, choice, 9.0)
        for rate, choice in zip(compare.RATES, (3, 1, 2, 4), strict=True)
    ]
    for match in compare.MATCHES:
        runs += [run_of("gate", seed, rate, 0.0, seed + rate, match=match) for seed in (0, 1) for rate in compare.RATES]
    rate = compare.RATES[1]
    for match in compare.MATCHES:
        assert compare.by_seed(runs, "text", match, "gate") == {0: rate, 1: 1 + rate}


def test_the_same_model_is_not_trained_twice(tmp_path, monkeypatch):
    """Plain attention with QK-norm is as wide whatever is equal; another column is not."""
    monkeypatch.setattr(compare, "train", None)  # would not be called
    run = run_of("qk_norm", 0, 1e-3, 2.0, 1.0) | {"mlp_width": compare.matched_width("text", "qk_norm", "flops")}
    compare.write_runs(tmp_path / "results.json", [run])
    wanted = compare.settings_of("text", "qk_norm", "flops", 0, 1e-3)
    assert compare.same_model(wanted | {"seed": 1}, [run]) is None
    assert compare.same_model(wanted, [run | {"mlp_width": 7}]) is None
    done = compare.train_missing([wanted], tmp_path / "results.json", 1, "seeds")
    assert done == [run, run | {"match": "flops"}] and compare.read_runs(tmp_path / "results.json") == done


@pytest.mark.parametrize(
    ("ours", "says"),
    [((1.0, 1.1, 1.05), "better"), ((3.0, 3.1, 3.05), "worse"), ((1.0, 3.1, 2.0), "cannot be told")],
)
def test_verdicts(ours, says):
    assert compare.verdict(dict(enumerate(ours)), dict.fromkeys(range(3), 2.0)) == says
    assert compare.verdict({0: 1.0}, {0: 2.0}) == "cannot be told"


@pytest.mark.long
def test_trains_resumes_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "RATES", (1e-3,))
    arguments = ["--output", str(tmp_path), *SMALL, "--seeds", "0", "--steps", "2"]
    compare.main(arguments)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["runs"]) == 4  # two columns: a rate, a seed
    mixture = [run for run in results["runs"] if run["column"] == "mixture"]
    for run in mixture:
        for key in ("head_load_before", "head_load"):
            assert all(load[0] == 1.0 and sum(load) == pytest.approx(3.0) for load in run[key])
    table = (tmp_path / "table.md").read_text()
    assert "| MoH, 3 of 4 | " in table and "cannot be told" in table and "## Heads of MoH" in table
    assert (tmp_path / "head_systems.svg").read_text().count("<circle") == 2
    capsys.readouterr()
    compare.main(arguments)
    printed = capsys.readouterr().out
    assert "learning rates: 2 of 2 runs" in printed and "seeds: 2 of 2 runs" in printed
    assert json.loads((tmp_path / "results.json").read_text()) == results
    compare.main(["--output", str(tmp_path), "--report"])
    assert (tmp_path / "table.md").read_text() == table


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seeds", "100"], ["--tasks", "speech"], ["--report"]])
def test_wrong_usage(arguments, tmp_path):
    with pytest.raises(SystemExit):
        compare.main(["--output", str(tmp_path), *arguments])
    assert not list(tmp_path.iterdir())


def test_results_of_another_script_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"runs": [{"column": "vit"}]}')
    with pytest.raises(SystemExit, match="another script"):
        compare.main(["--output", str(tmp_path), "--report"])


def test_the_committed_table_is_that_of_its_results():
    """And every difference on the page is one of the table's, rounded."""
    folder = REPOSITORY / "docs" / "head_systems"
    results = json.loads((folder / "results.json").read_text())
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert table == compare.table(results)
    for task in compare.STEPS:
        for match in compare.MATCHES:
            for column in compare.columns_of(task):
                assert compare.by_seed(results["runs"], task, match, column).keys() == set(compare.SEEDS)
    assert (folder / "head_systems.svg").read_text(encoding="utf-8") == compare.picture(results["runs"])
    for run in results["runs"]:
        budget = next(
            other[run["match"]]
            for other in results["runs"]
            if other["column"] == "qk_norm" and (other["task"], other["match"]) == (run["task"], run["match"])
        )
        assert abs(run[run["match"]] - budget) < 0.003 * budget
    cells = re.findall(r"([+-]\d+\.\d+) ± (\d+\.\d+)", table)
    page = (REPOSITORY / "docs" / "head_systems.md").read_text(encoding="utf-8")
    found = re.findall(r"([+-]\d+\.\d+) ± (\d+\.\d+)", page)
    assert len(found) > 15
    for difference, half in found:
        unit = 0.51 * 10.0 ** -len(half.partition(".")[2])
        pairs = ((float(mean) - float(difference), float(width) - float(half)) for mean, width in cells)
        assert any(max(abs(mean), abs(width)) <= unit for mean, width in pairs), (difference, half)
    apart = {  # columns with one width of the MLP are one comparison
        (task, column, tuple(compare.by_seed(results["runs"], task, match, column).items())): compare.verdict(
            *(compare.by_seed(results["runs"], task, match, name) for name in (column, "qk_norm"))
        )
        for task in compare.STEPS
        for match in compare.MATCHES
        for column in compare.columns_of(task)
        if column != "qk_norm"
    }
    told = [says for says in apart.values() if says != "cannot be told"]
    assert f"there are {len(apart)} intervals, of which {len(told)} leave 0 out" in " ".join(page.split())
