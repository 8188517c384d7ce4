"""What the bundled checkpoint's recipe owes its parts: the changes, what is measured, and the table."""

import json
import sys

import pytest
import torch
from helpers import REPOSITORY, as_trained_here

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import recipe_changes as study

from dcformer.synthetic import build_tokenizer


def models(*names):
    tokenizer = build_tokenizer(model_max_length=512)
    out = []
    for name in names:
        torch.manual_seed(0)
        out.append(study.make_model(study.CHANGES[name], tokenizer))
    return out


def test_each_change_is_made():
    usual, start, quiet, everywhere = models("nothing", "usual-start", "quiet-start", "global")
    first, other, silent = (model.model.layers[0].self_attn for model in (usual, start, quiet))
    assert torch.equal(first.k_proj.weight, first.q_proj.weight)
    assert not torch.equal(other.k_proj.weight, other.q_proj.weight) and other.k_proj.weight.std() < 0.1
    assert not silent.o_proj.weight.any() and not quiet.model.layers[3].mlp.down_proj.weight.any()
    assert quiet.model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.02)
    assert set(everywhere.config.layer_types) == {"full_attention"} != set(usual.config.layer_types)
    rates = {group["lr"] for group in study.make_optimizers(usual, study.CHANGES["tenth"])[0].param_groups}
    assert sorted(rates) == pytest.approx([0.1 * study.RATE, study.RATE])
    kinds = [type(optimizer).__name__ for optimizer in study.make_optimizers(usual, study.CHANGES["muon"])]
    assert kinds == ["AdamW", "Muon"]
    assert {stage.facts for stage in study.CHANGES["three-facts"].stages} == {3}


def test_the_committed_table_is_that_of_the_runs():
    runs = json.loads(study.RESULTS.read_text())["runs"]
    table = study.table(runs, study.STEPS)
    assert "not done" not in table
    assert table in (REPOSITORY / "docs" / "training_results.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_runs_are_made_once(tmp_path, monkeypatch, capsys):
    """A look at one change, with both seeds, of few rows a step."""
    monkeypatch.setattr(study, "ROWS", 4)
    monkeypatch.setattr(study.composition_rates, "as_trained", as_trained_here)
    arguments = ["--changes", "at-once", "--steps", "50", "--output", str(tmp_path / "runs.json")]
    study.main([*arguments, "--workers", "1"])
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [(run["change"], run["seed"]) for run in runs] == [("at-once", s) for s in study.SEEDS]
    for run in runs:
        assert len(run["losses"]) == 1 and run["begins"] == [] and 0 < run["accuracy"] < 0.5 and run["loss"] > 1
    out = capsys.readouterr().out
    assert "| all tasks from the start | one stage |" in out and out.count("not done") == 4 * (len(study.CHANGES) - 1)
    study.main([*arguments, "--report"])
    assert "2 of 2 runs are in" in capsys.readouterr().out
