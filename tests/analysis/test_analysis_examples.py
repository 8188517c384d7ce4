"""The notebook as a script, examples with other tools where these are installed, and the case study."""

import json
import runpy
import sys

import pytest
import torch
from analysis_models import CHECKPOINT
from helpers import REPOSITORY

from dcformer.analysis import trace

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(REPOSITORY)
    notebook = json.loads((EXAMPLES / "analysis.ipynb").read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__notebook__"}
    for number, cell in enumerate(code):
        exec(compile(cell, f"cell {number}", "exec"), names)
    out = capsys.readouterr().out
    assert "the answer: fish" in out and "afterwards: 'fish'" in out
    assert names["gap"] < 0.01 and names["page"].startswith("<!DOCTYPE html>")


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_nnsight(bundled, prompt):
    pytest.importorskip("nnsight")
    found = example("with_nnsight")["run"](str(CHECKPOINT), 3, 6)
    run = trace(bundled[0], prompt)
    assert torch.equal(found["weights"], run.layers[3].composed_weights)
    assert torch.equal(found["z"], run.layers[3].z.flatten(2)) and torch.equal(found["logits"], run.logits)
    assert not torch.equal(found["ablated"], found["logits"])


@pytest.mark.slow
def test_captum():
    pytest.importorskip("captum")
    run = example("with_captum")["run"]
    few, many = (run(str(CHECKPOINT), " fish", steps)["embed_tokens"][1] for steps in (16, 256))
    assert few > 1 > many  # logits: what the page says of 16 steps


def test_circuitsvis(bundled, prompt):
    pytest.importorskip("circuitsvis")
    run = trace(bundled[0], prompt, tokenizer=bundled[1])
    page = str(example("with_circuitsvis")["signed_heads"](run, 3))
    limit = run.layers[3].composed_weights.abs().max().item()
    assert f'"minValue": {-limit}' in page and f'"maxValue": {limit}' in page


@pytest.mark.slow
def test_case_study(tmp_path, monkeypatch, capsys):
    """A small run: what is written is what was measured, and the model is right without changes."""
    pytest.importorskip("matplotlib")
    arguments = ["case_study.py", "--questions", "8", "--chosen-on", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    accuracies = example("case_study")["main"]()
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", "table.md", "heads.png", "accuracy.png"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["accuracy"] == accuracies and results["completeness_gap"] < 0.05
    assert len(results["one_head_off"]) == 32
    assert accuracies["nothing"] > 0.8 and accuracies["q_proj off, both stages, all layers"] < 0.5
    patched = [name for name in accuracies if name.endswith("the layer's heads patched back")]
    assert accuracies[patched[0]] == accuracies["nothing"]
    with pytest.raises(SystemExit):
        example("case_study")["main"](["--questions", "0"])
    assert "--questions 0: expected at least 1" in capsys.readouterr().err


def test_image_heads(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    right = example("image_heads")["main"](["--steps", "3", "--output", str(tmp_path / "digit.png")])
    assert (tmp_path / "digit.png").stat().st_size > 10_000
    assert f"{right:.1%} of 797 test images right" in capsys.readouterr().out


def test_the_documented_study_is_the_one_of_its_results():
    """The table in docs/analysis.md is that of the last run's results."""
    folder = REPOSITORY / "docs" / "analysis"
    results = json.loads((folder / "results.json").read_text())
    assert results["questions"] == 200
    table = example("case_study")["table"](results["accuracy"], 200)
    assert table in (folder / "table.md").read_text(encoding="utf-8")
    assert table in (REPOSITORY / "docs" / "analysis.md").read_text(encoding="utf-8")
