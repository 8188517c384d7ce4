"""The small curves: the law of sizes, tokens and rates, the choice of rates, resuming, the committed table."""

import csv
import json
import re
import sys

import pytest
from helpers import REPOSITORY, as_trained_here

sys.path.insert(0, str(REPOSITORY / "examples"))
import small_law

from dcformer.analysis import num_compose_parameters, num_parameters


def run_of(family, width, seed, rate, choice, loss):
    costs = {"parameters": width**2, "embedding_parameters": width, "tokens": 17 * width**2, "flops": float(width**4)}
    if family == small_law.VARIANT:
        costs |= {"parameters": 1.1 * width**2, "flops": 1.3 * width**4}
    settings = small_law.settings_of(family, width, seed, rate, 1.0)
    return settings | costs | {"choice_loss": choice, "loss": loss, "cpu_seconds": 36.0}


def study_of(best: float) -> list[dict]:
    """All runs of all families; each is best at one rate, and its loss falls with size."""
    rates = [
        run_of(family, small_law.RATE_WIDTH, small_law.RATE_SEED, rate, abs(rate - best), 9.0)
        for family in small_law.FAMILIES
        for rate in small_law.RATES
    ]
    return rates + [
        run_of(family, width, seed, rate, 9.0, 5 - 0.1 * i - width / 100 + seed / 1000)
        for i, family in enumerate(small_law.FAMILIES)
        for width in small_law.WIDTHS
        for seed in small_law.SEEDS
        for rate in (best, small_law.RATES[0])
    ]


def test_sizes_are_of_one_law():
    """12 E² a layer as near as a width of the MLP in steps of 8 comes; 17 to 18 characters for each."""
    for width in small_law.WIDTHS:
        config = small_law.make_config("transformer++", width)
        outside = num_parameters(config, exclude_embeddings=True)
        assert outside == pytest.approx(small_law.law_parameters(width), rel=0.03)
        steps = small_law.settings_of("transformer++", width, 0, 1e-3, 1.0)["steps"]
        assert 17 < steps * small_law.BATCH * small_law.LENGTH / small_law.law_parameters(width) < 18
        composed = small_law.make_config("dcformer++", width)
        assert (
            num_parameters(composed, exclude_embeddings=True) - num_compose_parameters(composed) - outside < 10 * width
        )


def test_families_differ_as_the_recipes_do():
    from dcformer.recipes import recipe

    for family in small_law.FAMILIES:
        if family.endswith("-windows"):  # not the paper's
            continue
        name = family.replace("++-qknorm", "++-405m-qknorm").replace("dcformer++", "dcformer-405m")
        published = recipe(name if "405m" in name else f"{name}-405m").config
        ours = small_law.make_config(family, 64)
        for field in ("qk_norm", "compose_pre", "compose_query", "compose_key", "compose_static", "compose_rank"):
            assert getattr(ours, field) == getattr(published, field), (family, field)
        assert ours.layer_types[:2] == published.layer_types[:2]
        assert (ours.sliding_window is None) == (published.sliding_window is None)


def test_one_baseline_differs_by_composition_alone():
    ours, theirs = (small_law.make_config(name, 64).to_dict() for name in ("dcformer++", small_law.BASELINES[-1]))
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different == {"compose_pre", "compose_post", "compose_query", "compose_key"}


def test_rates_fall_with_the_cube_root_of_size():
    at = {width: small_law.settings_of("dcformer++", width, 0, 4e-3, 1.0)["learning_rate"] for width in (32, 48, 96)}
    assert at[48] == 4e-3
    assert at[96] == pytest.approx(4e-3 / 4 ** (1 / 3), rel=1e-3) and at[32] > 4e-3


def test_only_runs_at_the_chosen_rate_are_reported():
    runs = study_of(best=small_law.RATES[1])
    assert small_law.chosen_rate(runs[:3], "transformer++", 1.0) is None
    found = small_law.reported(runs, 1.0)
    assert len(found) == len(small_law.FAMILIES) * len(small_law.WIDTHS) * len(small_law.SEEDS)
    assert {run["rate"] for run in found} == {small_law.RATES[1]}
    assert small_law.reported(runs, 0.5) == []  # runs of other lengths


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # the made-up differences are all the same
def test_the_report_reads_the_runs(tmp_path):
    pytest.importorskip("matplotlib")
    text = small_law.report(study_of(best=small_law.RATES[-1]), tmp_path, 1.0)
    assert text == (tmp_path / "small.md").read_text() and text.count("One slope for both families") == 6
    assert f"{len(study_of(1.0))} runs, " in text and text.count("(+10.0%)") == text.count("(+30.0%)") == 12
    for lower in ("+0.3000", "+0.2000", "+0.1000"):
        assert text.count(f"| {lower} ± 0.0000 | 0.000 | 0.000 |") == 4
    assert text.count("### By how compute is counted") == 3
    assert f"at the edge of the grid: {', '.join(small_law.FAMILIES)}." in text
    also = ("norms and windows differ, too.", "; windows differ, too.", "nothing but composition differs.")
    assert [text.count(told) for told in also] == [1, 1, 1]
    rows = list(csv.DictReader((tmp_path / "small.csv").open()))
    assert len(rows) == 48 and {row["seed"] for row in rows} == {"0", "1", "2"}
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_all_sizes_are_compared_at_once():
    """Means of the sizes 1 and 3, of the seeds 1, 2 and 3; half of the interval is 12.706 and 4.303 standard errors."""
    differences = {32: {0: 0.0, 1: 1.0, 2: 2.0}, 48: {0: 2.0, 1: 3.0, 2: 4.0, 3: 9.0}}
    _, first, sizes, seeds, last = small_law._over_sizes(differences, "transformer++-qknorm")
    assert first.endswith("lower in 5 of 6 pairs, by +2.0000 in the mean.")
    assert "the 2 sizes as units, a mean of each: ± 12.7062" in sizes and sizes.endswith("p = 0.295.")
    assert "the 3 seeds as units, a mean of each: ± 2.4841" in seeds and seeds.endswith("p = 0.074.")
    assert last.endswith("; windows differ, too.")
    assert (
        small_law._over_sizes({32: differences[32]}, "transformer++")
        == []
        == small_law._over_sizes({}, "transformer++")
    )
    assert small_law._over_sizes({32: {0: 1.0}, 48: {0: 2.0}}, "transformer++") == []


def test_compute_is_counted_in_four_ways(tmp_path):
    """Losses that fall by 1 nat each time compute doubles; the variant is one nat below at the same size."""
    runs = []
    for i, width in enumerate(small_law.WIDTHS):
        for family, seconds in ((small_law.BASELINES[0], 10.0 * 2**i), (small_law.VARIANT, 30.0 * 2**i)):
            run = run_of(family, width, 0, 1e-3, 9.0, 9.0 - i - (family == small_law.VARIANT))
            runs.append(run | {"cpu_seconds": seconds, "tokens": 1})
    rows = [line.split(" | ") for line in small_law._by_cost(runs, small_law.BASELINES[0]) if line.startswith("| ")][1:]
    assert [row[0][2:] for row in rows] == list(small_law.COSTS)
    assert rows[-1][1] == "+200%" and rows[-1][2:5] == ["0.67"] * 3  # thrice the seconds, worth twice
    first = [float(row[2]) for row in rows[:3]]
    assert first[0] < first[1] < first[2]  # the fewer keys are counted, the less composition costs


def test_a_look_at_one_size_is_reported(tmp_path):
    runs = [run for run in study_of(best=small_law.RATES[1]) if run["width"] in (32, small_law.RATE_WIDTH)]
    look = [run for run in runs if run["seed"] == small_law.RATE_SEED or (run["width"], run["seed"]) == (32, 0)]
    text = small_law.report(look, tmp_path, 1.0)
    assert (
        re.search(r"No law: column parameters: family 'dcformer\+\+' .*has 1 size:", text)
        and text.count("not known") > 8
    )
    assert "+0.2000" in text and (tmp_path / "small.csv").exists()
    with pytest.raises(ValueError, match=r"no rate is chosen yet for transformer\+\+, .*: run without --report"):
        small_law.report(look[:3], tmp_path, 1.0)


@pytest.mark.long
def test_it_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small_law, "RATES", small_law.RATES[:2])
    monkeypatch.setattr(small_law, "FAMILIES", {"dcformer++": small_law.FAMILIES["dcformer++"]})
    monkeypatch.setattr(small_law, "report", lambda *_: "reported")
    monkeypatch.setattr(small_law, "as_trained", as_trained_here)
    monkeypatch.setattr(small_law.study, "HELD_OUT", 10**6)  # one page is held out
    arguments = ["--output", str(tmp_path), "--sizes", "32", "--seeds", "0", "--scale", "0.005", "--workers", "1"]
    small_law.main(arguments)
    stored = (tmp_path / "small.json").read_bytes()
    runs = json.loads(stored)["runs"]
    assert [(run["width"], run["seed"]) for run in runs] == [(32, 0), (48, 100), (48, 100)]
    best = min(runs[1:], key=lambda run: run["choice_loss"])
    assert runs[0]["rate"] == best["rate"] and runs[0]["steps"] == 2
    capsys.readouterr()
    small_law.main(arguments)
    printed = capsys.readouterr().out
    assert "2 of 2 runs are in" in printed and "1 of 1 runs are in" in printed and "reported" in printed
    assert (tmp_path / "small.json").read_bytes() == stored


def test_bad_arguments():
    for arguments in (["--scale", "0"], ["--scale", "1.5"], ["--workers", "0"], ["--seeds", "100"], ["--sizes", "40"]):
        with pytest.raises(SystemExit) as refused:
            small_law.main(arguments)
        assert refused.value.code == 2


@pytest.mark.skipif(not (small_law.OUTPUT / "small.md").exists(), reason="the curves have not been made")
def test_the_committed_report_is_that_of_its_runs(tmp_path):
    pytest.importorskip("matplotlib")
    runs = json.loads((small_law.OUTPUT / "small.json").read_text())["runs"]
    text = (small_law.OUTPUT / "small.md").read_text(encoding="utf-8")
    assert small_law.report(runs, tmp_path, 1.0) == text
    # the page speaks in the report's numbers
    page = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    told = re.findall(r"as units, a mean of each: (± [\d.]+) .*?, (p = [\d.]+)\.$", text, re.MULTILINE)
    assert len(told) == 6 and re.findall(r"(± 0\.\d{4}), (p = [\d.]+)", page) == told
    assert (tmp_path / "small.csv").read_text() == (small_law.OUTPUT / "small.csv").read_text()
    assert len(small_law.reported(runs, 1.0)) == 48
