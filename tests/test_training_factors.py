"""The study of what else decides how soon a fact is found: factors, rates, runs that are kept, the page."""

import dataclasses
import json
import sys

import pytest
import torch
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import training_factors as study


def a_run(factor, family, rate, seed, last):
    return study.settings_of(factor, family, rate, seed, 100) | {"losses": [0.7, last]}


def test_each_factor_changes_one_thing():
    base = study.FACTORS["base"]
    for name, factor in study.FACTORS.items():
        changed = [f.name for f in dataclasses.fields(factor) if getattr(factor, f.name) != getattr(base, f.name)]
        assert changed == ([] if name == "base" else ["label", changed[-1]]), name


@pytest.mark.parametrize("family", study.FAMILIES)
@pytest.mark.parametrize("name", study.FACTORS)
def test_the_model_and_its_optimizers(name, family):
    factor = study.FACTORS[name]
    model = study.make_model(factor, family)
    config = model.config
    assert config.composes == (family == "dcformer") and config.qk_norm == factor.qk_norm
    assert config.num_hidden_layers == len(config.layer_types) == factor.layers
    assert config.layer_types[1] == "full_attention"
    assert (config.layer_types[0] == "full_attention") == factor.is_global
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(factor.embeddings, rel=0.02)
    optimizers = study.make_optimizers(model, factor, 1e-3)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert all(group["lr"] == 1e-3 for group in groups)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.AdamW] + [torch.optim.Muon] * factor.muon
    if factor.muon:
        theirs = {p for group in optimizers[1].param_groups for p in group["params"]}
        assert model.model.layers[0].mlp.up_proj.weight in theirs and model.lm_head.weight not in theirs
    else:
        assert groups[0]["betas"] == factor.betas


def test_rates_are_chosen_by_a_seed_that_is_not_reported():
    losses = (0.5, 0.2, 0.3, 0.4, 0.5)
    runs = [a_run("base", "plain", rate, 100, last) for rate, last in zip(study.RATES, losses, strict=True)]
    assert study.chosen_rate(runs[:4], "base", "plain", 100) is None
    assert study.chosen_rate(runs, "base", "plain", 100) == study.RATES[1]
    runs += [a_run("base", "dcformer", rate, 100, last) for rate, last in zip(study.RATES, sorted(losses), strict=True)]
    assert "| nothing | not done | not done | not done | not done |" in study.table(runs, 100)
    for seed in study.SEEDS:
        runs += [a_run("base", "plain", study.RATES[1], seed, 0.3 + 0.1 * (seed % 2))]
        runs += [a_run("base", "dcformer", study.RATES[0], seed, 0.2)]
    table = study.table(runs, 100)
    assert "| nothing | 0.350 ± 0.058 | 0.200 ± 0.000 | +0.150 ± 0.029 | 0.001; 0.0005 |" in table
    assert f"; 1 of {2 * len(study.FACTORS)} are the lowest or the highest of these." in table


def test_the_page_has_the_table_of_the_results():
    runs = study.composition_rates.read_runs(study.RESULTS)
    assert study.table(runs, study.STEPS) in (REPOSITORY / "docs" / "training_results.md").read_text()


@pytest.mark.slow
def test_runs_are_added_and_kept(tmp_path, monkeypatch, capsys):
    few = {"base": study.Factor("base", rows=2), "muon": study.Factor("muon", rows=2, muon=True)}
    monkeypatch.setattr(study, "FACTORS", few)
    monkeypatch.setattr(study, "RATES", (1e-3,))
    monkeypatch.setattr(study, "SEEDS", (0,))
    monkeypatch.setattr(
        study.composition_rates, "as_trained", lambda train, wanted, workers: (train(one, "") for one in wanted)
    )
    torch_threads = torch.get_num_threads()
    out = tmp_path / "new" / "factors.json"
    options = ["--output", str(out), "--steps", "50"]
    study.main([*options, "--factors", "muon"])
    first = json.loads(out.read_text())["runs"]
    assert [(run["family"], run["seed"]) for run in first] == [(f, s) for f in study.FAMILIES for s in (0, 100)]
    assert all(len(run["losses"]) == 1 and 0 < run["losses"][0] < 10 for run in first)
    study.main(options)
    both = json.loads(out.read_text())["runs"]
    assert both[4:] == first and len(both) == 8
    printed = capsys.readouterr().out
    assert "rates: 2 of 4 runs are in" in printed and "seeds: 2 of 4 runs are in" in printed
    study.main([*options, "--report"])
    assert json.loads(out.read_text())["runs"] == both
    with pytest.raises(SystemExit):
        study.main([*options[:2], "--steps", "120"])
    assert "--steps 120: expected a multiple of 50" in capsys.readouterr().err
    torch.set_num_threads(torch_threads)
