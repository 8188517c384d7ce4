"""The reproduction study: what it compares, that it resumes, and that the committed tables are those of its results."""

import errno
import json
import math
import os
import re
import shlex
import sys

import pytest
import torch
from helpers import REPOSITORY, as_trained_here, documented_commands
from study_worker import train_or_fail

from dcformer import DCFormerConfig, DCFormerForCausalLM

sys.path.insert(0, str(REPOSITORY / "examples"))
import study

PAGE = (REPOSITORY / "docs" / "reproduction.md").read_text(encoding="utf-8")
RESULTS = json.loads((study.OUTPUT / "results.json").read_text())
SMALL = shlex.split("--steps 2 --rates 1e-3 --seeds 0 --tasks text --sizes small --variants plain --workers 1")


def test_variants_differ_in_composition_alone():
    """The same seed gives every variant the same weights outside of composition, and each its own composition."""
    composition = {}
    for name, variant in study.VARIANTS.items():
        config = DCFormerConfig(vocab_size=32, intermediate_size=64, **study.SIZES["small"], **variant.switches)
        model = DCFormerForCausalLM(config)
        shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
        composed = {key: shape for key, shape in shapes.items() if ".compose." in key}
        rest = {key: shape for key, shape in shapes.items() if key not in composed}
        composition[name] = (composed, config.compose_generators)
        assert rest == composition.setdefault("rest", rest)
    del composition["rest"]
    assert composition["plain"] == ({}, ())
    assert set(composition["static"][0]) == {
        f"model.layers.{i}.self_attn.compose.{stage}_static" for i in range(2) for stage in ("pre", "post")
    }
    four = {(stage, side) for stage in ("pre", "post") for side in ("query", "key")}
    sides = {name: set(generators) for name, (_, generators) in composition.items()}
    assert sides["r1"] == sides["r2"] == sides["r4"] == sides["full"] == four
    assert sides["pre"] | sides["post"] == sides["query"] | sides["key"] == four
    assert sides["pre"] == {g for g in four if g[0] == "pre"} and sides["query"] == {g for g in four if g[1] == "query"}
    assert len({str(made) for made in composition.values()}) == len(study.VARIANTS)


@pytest.mark.parametrize("task", study.TASKS)
def test_data(task):
    train, test, vocabulary = study.make_data(task, 148)
    assert len(train) >= 148 and test
    ids = {split: {tuple(row["input_ids"]) for row in rows} for split, rows in (("train", train), ("test", test))}
    assert not ids["train"] & ids["test"]
    for row in train + test:
        scored = [(i, label) for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert scored and all(i == label for i, label in scored)
        assert max(row["input_ids"]) < vocabulary and len(row["input_ids"]) <= study.LENGTH
    if task == "synthetic":
        assert max(sum(label != -100 for label in row["labels"]) for row in test) == 1


def test_scores_are_means_over_scored_tokens():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    labels[:, :4], labels[1] = -100, -100
    prediction = type("Prediction", (), {})()
    prediction.predictions = study.token_scores(logits, labels).numpy()
    prediction.label_ids = labels.numpy()
    scores = study.mean_scores(prediction)
    pairs = [(logits[b, n - 1], labels[b, n]) for b in (0, 2) for n in range(4, 7)]
    losses = [torch.logsumexp(at, -1).item() - at[label].item() for at, label in pairs]
    assert scores["tokens"] == len(pairs)
    assert scores["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert scores["accuracy"] == sum(at.argmax().item() == label for at, label in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("better", "worse", "mean", "error", "verdict"),
    [
        ({0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.1, 2: 1.9}, 1.0, 0.0, "agrees"),
        ({0: 2.0, 1: 2.1, 2: 1.9}, {0: 1.0, 1: 1.1, 2: 0.9}, -1.0, 0.0, "disagrees"),
        ({0: 1.0, 1: 1.0}, {0: 1.1, 1: 1.5}, 0.3, 0.2, "open"),  # both say so, but not clearly
        ({0: 1.0, 1: 1.0}, {0: 0.9, 1: 1.5}, 0.2, 0.3, "open"),
        ({0: 1.0}, {0: 2.0}, 1.0, math.nan, "open"),
        ({0: 1.0, 7: 5.0}, {0: 2.0, 1: 5.0}, 1.0, math.nan, "open"),  # only seeds that both have
    ],
)
def test_compare(better, worse, mean, error, verdict):
    found = study.compare(better, worse)
    assert found[:2] == pytest.approx((mean, error), nan_ok=True) and found[2] == verdict


def test_rank_correlation():
    assert study.rank_correlation([1.0, 5.0, 3.0], [10.0, 12.0, 11.0]) == pytest.approx(1)
    assert study.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert study.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(0.8)


def test_seeds_that_a_difference_of_the_paper_would_take():
    """A standard deviation of 0.1, and ln(11.68 / 10.87) = 0.0719: (2.802 * 0.1 / 0.0719)² = 15.2."""
    losses = {"plain": dict.fromkeys(range(3), 1.0), "r1": {0: 0.9, 1: 0.8, 2: 0.7, 3: 9.0}}
    assert study.seeds_needed("r1", "plain", losses) == 16
    assert study.seeds_needed("r1", "plain", losses | {"r1": {0: 0.9, 1: 0.9, 2: 0.9001}}) == 2


def test_every_variant_is_told_against_plain_attention():
    """Half of the interval of 0.1, 0.2, 0.3 is 4.303 standard errors, 0.1 / sqrt(3)."""
    plain = dict.fromkeys(range(3), 1.0)
    losses = {("text", "small"): {"plain": plain, "r1": {0: 0.9, 1: 0.8, 2: 0.7}, "r2": {0: 0.5, 1: 1.5}}}
    rows = dict(line.strip("| ").split(" | ", 1) for line in study.against_plain(losses)[2:])
    assert rows["R = 1"] == "+0.0719 | +0.2000 ± 0.2484, 3 of 3"
    assert rows["R = 2 (DCFormer++)"] == "+0.0756 | +0.0000 ± 6.3531, 1 of 2" and rows["pre only"] == "+0.0121"
    losses["text", "small"]["r1"] = {0: 1.1, 1: 1.2, 2: 1.11}
    assert "-0.1367 ± 0.1368, 0 of 3 |" in "".join(study.against_plain(losses))
    losses["text", "small"]["r1"] = {0: 1.1, 1: 1.1, 2: 1.11}
    assert "-0.1033 ± 0.0143*, 0 of 3 |" in "".join(study.against_plain(losses))


@pytest.mark.long
def test_a_study_resumes(tmp_path, capsys, monkeypatch):
    """Finished runs are not trained again; missing ones are, and come out the same."""
    monkeypatch.setattr(study, "as_trained", as_trained_here)
    monkeypatch.setattr(study, "HELD_OUT", 10**6)  # one page is held out
    arguments = [*SMALL, "--variants", "plain", "r1", "--output", str(tmp_path)]
    study.main(arguments)
    path = tmp_path / "results.json"
    whole = json.loads(path.read_text())
    assert [(run["variant"], run["steps"]) for run in whole["runs"]] == [("plain", 2), ("r1", 2)]
    assert (tmp_path / "study.png").stat().st_size > 10_000
    assert study.tables(whole) == (tmp_path / "tables.md").read_text(encoding="utf-8")

    path.write_text(json.dumps(whole | {"runs": whole["runs"][:1]}))
    capsys.readouterr()
    study.main(arguments)
    assert "1 of 2 runs are in" in capsys.readouterr().out
    again = json.loads(path.read_text())
    for run in (*whole["runs"], *again["runs"]):
        del run["seconds"]
    assert again["runs"] == whole["runs"]
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", "tables.md", "study.png"}


def run_of(variant: str, seed: int, rate: float, loss: float) -> dict:
    """A run as results.json has it, of small models of text."""
    return study.settings_of("text", "small", variant, seed, rate) | {"loss": loss, "parameters": 1, "tokens": 1}


def test_each_variant_is_reported_at_its_best_rate():
    """Found with seeds that are not reported; a loss of NaN is the worst. Without a grid all are reported."""
    first, second = study.RATE_SEEDS
    runs = [run_of("plain", first, rate, loss) for rate, loss in ((1e-3, 3.0), (2e-3, 1.0), (4e-3, 2.0))]
    runs += [run_of("r2", first, rate, loss) for rate, loss in ((1e-3, 1.5), (2e-3, math.nan))]
    assert study.reported(runs) == []
    assert study.ranked_rates(runs) == {
        ("text", "small", "plain"): [2e-3, 4e-3, 1e-3],
        ("text", "small", "r2"): [1e-3, 2e-3],
    }
    for name in ("plain", "r2", "pre"):
        runs += [run_of(name, seed, rate, seed + rate) for seed in (0, 1) for rate in (1e-3, 2e-3)]
    found = study.collect(study.reported(runs), "loss")["text", "small"]
    assert found["plain"] == {0: 2e-3, 1: 1 + 2e-3} and found["r2"] == {0: 1e-3, 1: 1 + 1e-3}
    assert {run["learning_rate"] for run in study.reported(runs) if run["variant"] == "pre"} == {1e-3, 2e-3}
    longer = [run | {"seed": 7, "steps": run["steps"] + 1} for run in study.reported(runs)]  # of another version
    assert study.collect(study.reported(runs + longer), "loss")["text", "small"]["plain"] == found["plain"]

    # the mean of both seeds decides, among rates that both have tried
    runs += [run_of("plain", second, rate, loss) for rate, loss in ((2e-3, 2.5), (4e-3, 1.2))]
    assert study.ranked_rates(runs)["text", "small", "plain"] == [4e-3, 2e-3, 1e-3]
    runs += [run_of("r2", second, 1e-3, 9.0), run_of("r2", second, 2e-3, 0.0)]  # NaN with one is NaN
    assert study.ranked_rates(runs)["text", "small", "r2"] == [1e-3, 2e-3]


def test_every_rate_is_tried_before_the_seeds(tmp_path, monkeypatch):
    """The grid, its two best again, the seeds at the better. Twice: nothing is trained again."""
    asked = []
    losses = {"plain": {1e-3: (3, 3), 2e-3: (1, 3), 4e-3: (2, 1)}, "r2": {1e-3: (1, 1), 2e-3: (2, 1), 4e-3: (3, 0)}}

    def as_trained(train, wanted, workers):
        for settings in wanted:
            name, seed, rate = settings["variant"], settings["seed"], settings["learning_rate"]
            asked.append((name, seed, rate))
            yield settings | {"loss": losses[name][rate][seed == study.RATE_SEEDS[1]], "seconds": 0.0}

    monkeypatch.setattr(study, "as_trained", as_trained)
    for _ in range(2):
        path = tmp_path / "results.json"
        study.train_cell("text", "small", ["plain", "r2"], (1e-3, 2e-3, 4e-3), (0, 1), None, path, 1)
    first, second = study.RATE_SEEDS
    grid = [(name, first, rate) for rate in (1e-3, 2e-3, 4e-3) for name in ("plain", "r2")]
    again = [("plain", second, 2e-3), ("plain", second, 4e-3), ("r2", second, 1e-3), ("r2", second, 2e-3)]
    assert asked == grid + again + [(name, seed, r) for seed in (0, 1) for name, r in (("plain", 4e-3), ("r2", 1e-3))]


def test_a_run_that_fails_does_not_take_others_with_it():
    """What runs beside it is returned, what waits is not begun, and the error is raised."""
    done = []
    with pytest.raises(RuntimeError, match="the first"):
        for run in study.as_trained(train_or_fail, [{"number": number} for number in range(40)], 2):
            done.append(run["number"])
    assert 1 in done and len(done) < 10


@pytest.mark.parametrize("content", ["", "[]", '{"about": {}}', "no JSON"])
def test_foreign_results_are_refused(content, tmp_path, capsys):
    (tmp_path / "results.json").write_text(content)
    for options in (SMALL, ["--report"]):
        with pytest.raises(SystemExit, match="2"):
            study.main([*options, "--output", str(tmp_path)])
        assert "results.json is not a results.json of this script" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == content


@pytest.mark.parametrize(
    "words",
    [
        "--steps 20",
        "--steps 0 --output runs/look",
        "--workers 0",
        "--variants plane",
        "--rates 0.01",
        "--rates 0.01 0 --output runs/look",
    ],
)
def test_bad_options(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        study.main(words.split())
    assert words.split()[0] in capsys.readouterr().err
    assert json.loads((study.OUTPUT / "results.json").read_text()) == RESULTS


def test_report_without_results(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        study.main(["--report", "--output", str(tmp_path / "nowhere")])
    assert "nowhere/results.json does not exist: nothing to report" in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        study.main([*SMALL, "--output", str(tmp_path / "file" / "out")])
    assert os.strerror(errno.ENOTDIR) in capsys.readouterr().err


def test_committed_tables_are_those_of_the_results():
    tables = (study.OUTPUT / "tables.md").read_text(encoding="utf-8")
    assert study.tables(RESULTS) == tables
    assert (study.OUTPUT / "study.png").is_file() and "study/study.png" in PAGE
    # the page speaks in the tables' numbers
    numbers = re.findall(r"[+-]\d+\.\d{4} ± \d+\.\d{4}", PAGE)
    assert numbers and all(number in tables for number in numbers)


def commands() -> list[str]:
    found = documented_commands(REPOSITORY / "docs" / "reproduction.md")
    found += [shlex.split(line, comments=True) for line in study.__doc__.splitlines() if "python " in line]
    return list(dict.fromkeys(shlex.join(command) for command in found if command[1] == "examples/study.py"))


@pytest.mark.parametrize("command", [pytest.param(commands()[0], marks=pytest.mark.long), *commands()[1:]])
def test_commands_of_the_page_run(command, tmp_path, monkeypatch):
    """The first in a worker, as the study is."""
    arguments = shlex.split(command)[2:]
    if command != commands()[0]:
        monkeypatch.setattr(study, "as_trained", as_trained_here)
    if "--report" in arguments:
        (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    study.main([*arguments, *SMALL, "--output", str(tmp_path)])
    assert (tmp_path / "tables.md").is_file() and (tmp_path / "study.png").is_file()
