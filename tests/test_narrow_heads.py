"""The study of narrow heads: questions with one answer, runs that end and go on, and what is told of them."""

import json
import math
import shlex
import shutil
import sys

import pytest
import torch
from helpers import REPOSITORY, documented_commands

sys.path.insert(0, str(REPOSITORY / "examples"))
import narrow_heads as study


def a_run(variant, heads, seed, rate, accuracies, limit=400):
    curve = [[study.MEASURED * (i + 1), accuracy, 0.5] for i, accuracy in enumerate(accuracies)]
    return study.settings_of(variant, heads, seed, rate, limit) | {"parameters": 10, "seconds": 2.0, "curve": curve}


def all_rates(variant="plain", heads=4, best=2e-3):
    """The seed that chooses at every rate; `best` learns soonest, though it does not end highest."""
    return [
        a_run(variant, heads, study.RATE_SEED, rate, [0.9, 0.96, 0.96] if rate == best else [0.1, 0.1, 0.97, 0.99])
        for rate in study.RATES
    ]


def test_every_question_has_one_answer():
    things, question, answer = study.questions(300, torch.Generator().manual_seed(0))
    attribute, value = things // study.VALUES, things % study.VALUES  # [B, N, attributes]
    assert (attribute == torch.arange(study.ATTRIBUTES)).all()
    assert (value.sort(1).values == torch.arange(study.VALUES)[:, None]).all(), "two things share a value"
    for row in range(300):
        named, asked = question[row, 0], question[row, 1] - study.ATTRIBUTES * study.VALUES
        (which,) = (things[row] == named).any(-1).nonzero().flatten()
        assert asked != named // study.VALUES and value[row, which, asked] == answer[row]
    asked = question[:, 1] - study.ATTRIBUTES * study.VALUES
    assert set(zip((question[:, 0] // study.VALUES).tolist(), asked.tolist(), strict=True)) == {
        (i, j) for i in range(study.ATTRIBUTES) for j in range(study.ATTRIBUTES) if i != j
    }


@pytest.mark.parametrize("variant", study.VARIANTS)
@torch.no_grad()
def test_a_layer_knows_no_order(variant):
    what = study.VARIANTS[variant]
    model = study.make_model(variant, what.heads[0]).eval()
    config = model.decoder.config
    assert config.head_dim * what.heads[0] == study.WIDTH and config.vocab_size == study.VALUES
    assert config.composes == (not variant.startswith("plain"))
    things, question, _ = study.questions(5, torch.Generator().manual_seed(1))
    logits = model(things, question)
    assert logits.shape == (5, study.VALUES)
    if config.num_hidden_layers == 1:  # a second sees what the first made of those before
        torch.testing.assert_close(model(things.flip(1), question), logits, rtol=1e-4, atol=1e-4)


def test_the_wide_model_has_as_many_parameters():
    sizes = {name: sum(p.numel() for p in study.make_model(name, 16).parameters()) for name in study.VARIANTS}
    assert abs(sizes["plain-wide"] / sizes["dcformer"] - 1) < 0.01 and sizes["plain-deep"] > sizes["dcformer"]


@pytest.mark.parametrize(
    ("accuracies", "steps"),
    [([0.1, 0.95, 0.96], 200), ([0.95, 0.9, 0.99], None), ([0.2, 0.3], None), ([0.95, 0.95], 100), ([1.0], None)],
)
def test_the_mark_is_reached_by_two_measurements(accuracies, steps):
    assert study.steps_to(a_run("plain", 4, 0, 1e-3, accuracies)["curve"]) == steps


def test_the_rate_that_learns_soonest_is_reported():
    runs = [*all_rates(), *(a_run("plain", 4, seed, rate, [0.5] * 4) for seed in (0, 1) for rate in study.RATES)]
    assert study.chosen_rate(runs, "plain", 4) == 2e-3 and study.chosen_rate(runs[1:], "plain", 4) is None
    assert [(run["seed"], run["rate"]) for run in study.reported(runs)["plain", 4]] == [(0, 2e-3), (1, 2e-3)]
    assert study.reported(runs[:3] + runs[4:]) == {}, "a rate is missing"


def test_the_table_says_what_was_not_reached():
    seeds = ([0.95, 0.96], [0.1, 0.2, 0.95, 0.99], [0.5, 0.5, 0.5, 0.96])
    runs = all_rates() + [a_run("plain", 4, seed, 2e-3, accuracies) for seed, accuracies in enumerate(seeds)]
    (row,) = (line for line in study.table(runs).splitlines() if line.startswith("| 4 |"))
    assert row == "| 4 | plain attention | 10 | 0.002 | 3 | 300 (100 to over 400) | 2 (2 to over 2) | 96.0 to 99.0 % |"
    assert study.table(runs).endswith(
        "\nAt 95 % only at the last step, and so not counted: plain attention with 4 heads, 1 of 3 seeds.\n"
    )


def test_the_table_marks_rates_at_the_edge_and_says_what_counts():
    for best, cell in ((1e-3, "| 0.001* |"), (2e-3, "| 0.002 |"), (8e-3, "| 0.008* |")):
        runs = [*all_rates(best=best), a_run("plain", 4, 0, best, [0.5] * 4)]
        assert cell in study.table(runs)
    assert "two measurements in a row" in study.table(runs) and "* at the edge" in study.table(runs)


def test_committed_table_is_that_of_the_results():
    done = study.read_runs(study.OUTPUT / "results.json")
    table = (study.OUTPUT / "table.md").read_text()
    assert table.partition("\n")[2] == study.table(done)
    page = (REPOSITORY / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert table.count("* |") == 4 and "Four of the 23 cells have their rate at the lowest of the grid" in page
    assert "plain, QK-norm with 16 heads, 1 of 5 seeds." in table
    assert (study.OUTPUT / "curves.svg").is_file()
    cells = {(name, heads) for name, what in study.VARIANTS.items() for heads in what.heads}
    reported = study.reported(done)
    assert reported.keys() == cells and {len(runs) for runs in reported.values()} == {len(study.SEEDS)}


@pytest.mark.slow
def test_runs_are_made_once(tmp_path, monkeypatch, capsys):
    """In this process, at two rates."""
    monkeypatch.setattr(study, "RATES", study.RATES[:2])
    monkeypatch.setattr(study, "MEASURED", 2)
    monkeypatch.setattr(study, "as_trained", lambda train, wanted, workers: [train(one, "") for one in wanted])
    options = [f"--output={tmp_path}", "--variants", "plain", "--heads", "4", "--steps=3"]
    study.main([*options, "--seeds", "0"])
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert len(runs) == 3 and all([step for step, *_ in run["curve"]] == [2, 3] for run in runs)
    assert all(math.isfinite(loss) for run in runs for *_, loss in run["curve"])
    assert "over 3" in (tmp_path / "table.md").read_text() and (tmp_path / "curves.svg").is_file()
    monkeypatch.setattr(study, "as_trained", lambda *_: pytest.fail("trained again"))
    study.main([*options, "--seeds", "0"])
    study.main([*options, "--seeds", "0", "1", "--report"])
    assert "1 of 2 runs are in" in capsys.readouterr().out


def commands() -> list[str]:
    found = documented_commands(REPOSITORY / "docs" / "reproduction.md")
    found += [shlex.split(line, comments=True) for line in study.__doc__.splitlines() if "python " in line]
    return list(dict.fromkeys(shlex.join(command) for command in found if command[1] == "examples/narrow_heads.py"))


@pytest.mark.parametrize("command", commands())
def test_documented_commands_run(command, tmp_path, monkeypatch):
    """In this process, for one step, at one rate."""
    monkeypatch.setattr(study, "RATES", study.RATES[:1])
    monkeypatch.setattr(study, "as_trained", lambda train, wanted, workers: [train(one, "") for one in wanted])
    small = [f"--output={tmp_path}", "--variants", "plain", "--heads", "4", "--seeds", "0"]
    if "--report" in command:
        shutil.copy(study.OUTPUT / "results.json", tmp_path)
    study.main([*shlex.split(command)[2:], *small, *([] if "--report" in command else ["--steps=1"])])
    assert (tmp_path / "table.md").is_file() and (tmp_path / "curves.svg").is_file()


def test_a_run_is_that_of_its_seed(monkeypatch):
    monkeypatch.setattr(study, "MEASURED", 2)
    first, again, other = (study.train(study.settings_of("plain", 4, seed, 1e-3, 2), "")["curve"] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "expected more than 0"),
        (["--workers", "0"], "expected more than 0"),
        (["--seeds", "100"], "chooses learning rates"),
        (["--heads", "5"], "invalid choice"),
        (["--report"], "no runs to report"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main([f"--output={tmp_path}", *options])
    assert message in capsys.readouterr().err + str(error.value) and not list(tmp_path.iterdir())
