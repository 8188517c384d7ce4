"""The study of composition's rates on all synthetic tasks: texts, runs that are added and kept, the page."""

import itertools
import json
import sys

import pytest
import torch
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import one_question_rates as study

from dcformer.synthetic import build_tokenizer


def a_run(way, rate, seed, *losses):
    parts = [{"train_loss": loss, "loss": loss, "accuracy": 1 - loss / 2} for loss in losses]
    return {"way": way, "rate": rate, "seed": seed, "steps": study.PART * len(losses), "parts": parts, "seconds": 1}


def test_every_text_asks_one_question():
    tokenizer = build_tokenizer()
    texts = list(itertools.islice(study.make_texts("train", None, 0, tokenizer), 150))
    other = list(itertools.islice(study.make_texts("train", None, 1, tokenizer), 150))
    assert texts != other and len({tuple(text["input_ids"]) for text in texts}) > 140
    for text in texts:
        answer = tokenizer.decode([label for label in text["labels"] if label != -100])
        assert " " not in answer and answer  # one word
    assert len(list(study.make_texts("test", 2, 0, tokenizer))) == 2 * 74


def test_table_has_means_and_spreads():
    runs = [a_run("plain", 2e-3, 0, 1.0, 0.5), a_run("1", 2e-3, 0, 0.8, 0.4), a_run("1", 2e-3, 1, 0.6, 0.2)]
    lines = study.table(runs).splitlines()
    assert lines[0].endswith("| 250 steps | 500 steps |")
    assert "| no composition | 0.002 | 0 | 1.000, 50.0 % | 0.500, 75.0 % |" in lines
    assert "| 1 | 0.002 | 0, 1 | 0.700 ± 0.141, 65.0 ± 7.1 % | 0.300 ± 0.141, 85.0 ± 7.1 % |" in lines
    assert "64,000 questions are seen in all" in lines[-1]
    assert study.table([]) == "no runs"


def test_the_page_has_the_table_of_the_results():
    runs = study.composition_rates.read_runs(study.RESULTS)
    page = (REPOSITORY / "docs" / "training_results.md").read_text()
    assert study.table(runs) in page and study.beside_plain(runs) in page


def test_losses_beside_those_of_plain_attention():
    """A run that takes twice the seconds is at its half when the plain one ends."""
    runs = [a_run("plain", 2e-3, 0, 1.0, 0.8, 0.6, 0.5), a_run("0.1", 2e-3, 0, 0.9, 0.7, 0.55, 0.4) | {"seconds": 2}]
    lines = study.beside_plain([*runs, a_run("1", 2e-3, 1, 0.5, 0.4)]).splitlines()
    assert lines[2:] == ["| 0.1 | 0.002 | 0 | 2.00 | +0.100 | -0.050 | - |"]
    lines = study.beside_plain([*runs, a_run("1", 2e-3, 0, 0.9, 0.8, 0.7, 0.6)]).splitlines()
    assert lines[2].endswith(" | +0.200 |") and lines[3] == "| 1 | 0.002 | 0 | 1.00 | -0.100 | -0.100 | - |"


@pytest.mark.slow
def test_runs_are_added_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "SIZE", study.composition_rates.Size(32, 4, 0.06, 16, (4e-3,), ("plain", "0.1"), (0,)))
    monkeypatch.setattr(study, "WARMUP", 1)
    monkeypatch.setattr(study, "PART", 20)
    monkeypatch.setattr(study, "HELD_OUT", 1)
    monkeypatch.setattr(
        study.composition_rates, "as_trained", lambda train, wanted, workers: (train(one, "") for one in wanted)
    )
    torch_threads = torch.get_num_threads()
    out = tmp_path / "new" / "rates.json"
    options = ["--output", str(out), "--steps", "40"]
    study.main([*options, "--ways", "0.1"])
    first = json.loads(out.read_text())["runs"]
    assert [(run["way"], len(run["parts"])) for run in first] == [("0.1", 2)]
    assert 0 < first[0]["parts"][1]["train_loss"] < first[0]["parts"][0]["train_loss"] < 10
    study.main(options)
    both = json.loads(out.read_text())["runs"]
    assert both[1:] == first and both[0]["way"] == "plain"
    assert "1 of 2 runs are in" in capsys.readouterr().out
    study.main([*options, "--report"])
    assert json.loads(out.read_text())["runs"] == both
    for wrong, told in ((["--steps", "50"], "--steps 50: expected a multiple of 20"), (["--rates", "0"], "above 0")):
        with pytest.raises(SystemExit):
            study.main([*options[:2], *wrong])
        assert told in capsys.readouterr().err
    torch.set_num_threads(torch_threads)
