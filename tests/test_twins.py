"""The comparison of twins on the synthetic tasks: what is run next, what is measured, that it goes on."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))
import synthetic_twins as twins
import train_synthetic

from dcformer.synthetic import get_task


def a_run(variant, rate, seed, accuracies, steps=600):
    curve = [[200 * (i + 1), accuracy] for i, accuracy in enumerate(accuracies)]
    return {"variant": variant, "learning_rate": rate, "seed": seed, "steps": steps, "parameters": 10,
            "flops_per_step": 1e9, "minutes": 1.0, "curve": curve}  # fmt: skip


def all_rates(best=1e-3):
    """The first seed of every variant at every rate; `best` is above the others throughout, though not at the end."""
    return [
        a_run(name, rate, twins.SEEDS[0], [0.6, 0.7, 0.8] if rate == best else [0.1, 0.2, 0.9])
        for name in twins.LABELS
        for rate in twins.RATES
    ]


def test_every_variant_of_the_recipe_is_compared():
    assert set(twins.LABELS) == set(train_synthetic.VARIANTS)


def test_wide_twin_has_as_many_parameters():
    tokenizer = train_synthetic.build_tokenizer()
    sizes = {
        name: train_synthetic.make_model(tokenizer, **switches).num_parameters()
        for name, switches in train_synthetic.VARIANTS.items()
    }
    assert sizes["plain-wide"] == sizes["dcformer"] > sizes["plain-qk-norm"] > sizes["plain"]


def test_other_seeds_run_at_the_best_rate_of_the_first():
    runs = all_rates()
    first = twins.missing({})
    assert len(first) == len(twins.LABELS) * len(twins.RATES) and {run.seed for run in first} == {twins.SEEDS[0]}
    assert twins.missing(twins.finished(runs[1:]))[0] == next(iter(twins.finished(runs[:1])))
    after = twins.missing(twins.finished(runs))
    assert [(run.rate, run.seed) for run in after if run.variant == "plain"] == [
        (1e-3, seed) for seed in twins.SEEDS[1:]
    ]
    assert len(after) == len(twins.LABELS) * (len(twins.SEEDS) - 1)
    assert {run.variant for run in twins.missing({}, ["plain"]) + twins.missing(twins.finished(runs), ["plain"])} == {
        "plain"
    }


@pytest.mark.parametrize(
    ("accuracies", "steps"), [([0.1, 0.5, 0.6], 400), ([0.6, 0.4, 0.5], 600), ([0.6, 0.6, 0.4], None), ([0.5], 200)]
)
def test_steps_count_where_the_accuracy_stays(accuracies, steps):
    assert twins.steps_to(a_run("plain", 1e-3, 0, accuracies), 0.5) == steps


def test_table_says_what_was_not_reached():
    runs = [*all_rates(), a_run("plain", 1e-3, 1, [0.1, 0.2, 0.3])]
    told = twins.table(twins.finished(runs))
    row = next(line for line in told.splitlines() if line.startswith(f"| {twins.LABELS['plain']} | 10"))
    assert "| 0.001 | 0, 1 |" in row and "| 80.0, 30.0 % |  | 55.0 ± 35.4 % |" in row
    assert "200; over 600" in row and "600; over 600" in row


def test_table_keeps_the_order_of_seeds():
    """Of every column, whichever seed is first to reach something."""
    runs = [run for run in all_rates() if run["variant"] != "plain"]
    runs += [a_run("plain", rate, 0, [0.1, 0.2, 0.6]) for rate in twins.RATES]
    runs[-4]["losses"] = [[200, 0, 0.6], [400, 0, 0.3], [600, 1, 0.2]]
    runs += [a_run("plain", twins.RATES[0], 1, [0.6, 0.7, 0.8]) | {"losses": [[200, 1, 0.2]]}]
    told = twins.table(twins.finished(runs))
    row = next(line for line in told.splitlines() if line.startswith(f"| {twins.LABELS['plain']} | 10"))
    assert "| 600; 200 | 600; 200 | over 600; 600 | over 600; over 600 |" in row and "| 60.0, 80.0 %" in row


def test_table_has_the_losses_that_were_measured():
    runs = [run | {"held_out_losses": [[200, 3.0], [400, 0.5]]} for run in all_rates()]
    runs += [a_run("plain", 1e-3, 1, [0.1]) | {"held_out_losses": [[200, 1.5]]}, a_run("plain", 1e-3, 2, [0.1])]
    told = twins.table(twins.finished(runs))
    assert "| 0.50, 1.50 | 1.00 ± 0.71 |" in told and told.count("| 0.50 | 0.50 |") == len(twins.LABELS) - 1


def test_table_has_patterns_of_the_best_rate():
    patterns = {task.pattern: 0.25 for task in twins.TASKS}
    runs = [*all_rates(), a_run("plain", 1e-3, 1, [0.1]) | {"patterns": patterns | {"same-object": 0.5}}]
    runs += [a_run("plain", 1e-3, 2, [0.1]) | {"patterns": patterns}, a_run("plain", 2e-3, 1, [0.9])]
    told = twins.table(twins.finished(runs))
    assert f"{twins.LABELS['plain']}: seed 1, 2 |" in told and "| same-object | 50.0, 25.0 |" in told
    assert "| same-person | 25.0, 25.0 |" in told
    assert "attention pattern" not in twins.table(twins.finished(all_rates()))


def test_committed_table_is_that_of_the_results():
    done, again = (twins.finished(twins.read_runs(twins.OUTPUT / f"{name}.json")) for name in ("results", "again"))
    replaced = twins.read_runs(twins.OUTPUT / "replaced.json")
    assert (twins.OUTPUT / "table.md").read_text().partition("\n")[2] == twins.table(done, again, replaced)
    assert not twins.missing(done) and not twins.missing_again(done, again)


def test_runs_made_again_are_beside_the_first():
    measured = {"held_out_losses": [[200, 3.0], [400, 1.25]], "hops": {"1": 0.5, "2": 0.25}}
    again = twins.finished(
        [a_run("plain", 1e-3, seed, [0.1, accuracy]) | measured for seed, accuracy in ((0, 0.76), (1, 0.2))]
    )
    first = [*all_rates(), a_run("plain", 1e-3, 1, [0.1, 0.4])]
    told = twins.table(twins.finished(first), again)
    label = twins.LABELS["plain"]
    row = next(line for line in told.splitlines() if line.startswith(f"| {label} | 10"))
    assert "| 0, 1 | 80.0, 40.0 % | 76.0, 20.0 % | 54.0 ± 28.9 % | 1.25, 1.25 | 1.25 ± 0.00 |" in row
    assert "| 200; over 600 / 400; over 600 |" in row
    assert f"| | {label}: seed 0, 1 |" in told and told.endswith("| 1 | 50.0, 50.0 |\n| 2 | 25.0, 25.0 |\n")


def test_hops_are_what_an_answer_takes():
    names = ("same-person.copy-city", "same-object.city->country", "the-other-person.copy-city")
    names += ("the-other-class.object->superclass",)
    tasks = [get_task(f"{name}.plain") for name in names]
    tasks += [get_task(f"{name}.item") for name in ("different-in-set.copy-city", "other-in-set.city->country")]
    assert [twins.hops(task) for task in tasks] == [1, 2, 2, 3, 2, 3]


def test_a_family_has_the_mean_of_its_tasks(monkeypatch):
    asked = []
    monkeypatch.setattr(twins, "iterate_contexts", lambda *_, tasks, **__: asked.append(tasks[0]) or [])
    monkeypatch.setattr(twins, "score", lambda *_: {"accuracy": float(asked[-1].pattern == "same-person")})
    families = twins.by_family(None, None)
    assert len(asked) == len(twins.TASKS)
    assert families["patterns"] == {pattern: float(pattern == "same-person") for pattern in families["patterns"]}
    assert families["hops"] == {"1": 0.5, "2": round(10 / 34, 4), "3": 0.0}


def test_a_run_counts_its_own_processor_time(tmp_path, monkeypatch):
    """And not that of runs before it in the same process."""
    clock = iter([100.0, 103.2])
    monkeypatch.setattr(train_synthetic.time, "process_time", lambda: next(clock))
    curve = train_synthetic.Curve(tmp_path, train_synthetic.Curriculum(4, 0), {})
    curve.on_save(None, SimpleNamespace(log_history=[], global_step=200), None, model=torch.nn.Identity())
    assert json.loads((tmp_path / "curve.jsonl").read_text())["processor_seconds"] == 3


def test_what_can_be_made_again():
    """Each variant at its best rate and with each seed that has run, until the second run has its hops."""
    done = twins.finished([*all_rates(), a_run("plain", 1e-3, 1, [0.5])])
    first = twins.missing_again(done, {})
    assert len(first) == len(twins.LABELS) + 1 and {run.rate for run in first} == {1e-3}
    again = twins.finished([a_run("plain", 1e-3, 0, [0.5]), a_run("plain", 1e-3, 1, [0.5]) | {"hops": {"1": 0.5}}])
    assert twins.missing_again(done, again, ["plain"]) == [twins.Run("plain", 1e-3, 0)]


@pytest.mark.long
def test_runs_are_added_and_kept(tmp_path, monkeypatch, capsys, request):
    """The first run in a worker of its own, the others in a thread of this process, asked few questions."""
    workers, make_data = [], train_synthetic.make_data

    def pool(count, mp_context):
        workers.append(count)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(twins, "RATES", twins.RATES[:2])
    monkeypatch.setattr(twins, "SEEDS", twins.SEEDS[:2])
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))  # a run sets them, for its worker
    options = [f"--output={tmp_path / 'docs'}", f"--runs={tmp_path / 'runs'}", "--steps=2"]
    twins.main([*options, "--limit=1"])
    results = tmp_path / "docs" / "results.json"
    first = json.loads(results.read_text())["runs"]
    assert len(first) == 1 and first[0]["curve"][-1][0] == 2 and first[0]["losses"] == [[2, 0, None]]
    [[step, loss]] = first[0]["held_out_losses"]
    assert step == 2 and 1 < loss < 20
    assert first[0]["patterns"].keys() == {task.pattern for task in twins.TASKS} and len(first[0]["hops"]) == 3
    monkeypatch.setattr(twins, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(twins, "TEST_CONTEXTS", 1)
    monkeypatch.setattr(train_synthetic, "make_data", lambda *arguments: make_data(*arguments)[::20])
    twins.main([*options, "--limit=2", "--workers=2"])
    three = json.loads(results.read_text())["runs"]
    assert three[0] == first[0] and len({run["variant"] for run in three}) == len(three) == 3
    assert "7 runs can be added" in capsys.readouterr().out  # other seeds follow when all rates have run
    twins.main([*options, "--variants", "plain", "--workers=2"])  # the seeds, too, when the best rate is known
    plain = [run for run in json.loads(results.read_text())["runs"] if run["variant"] == "plain"]
    assert len(plain) == len(twins.RATES) + len(twins.SEEDS) - 1
    twins.main([*options, "--variants", "plain", "--again", "--limit=1"])
    second = json.loads((tmp_path / "docs" / "again.json").read_text())["runs"]
    assert [run["seed"] for run in second] == [twins.SEEDS[0]]
    assert "at the best rate, of the second runs" in capsys.readouterr().out
    assert workers == [2, 2, 1]
    with pytest.raises(SystemExit):
        twins.main([f"--output={tmp_path / 'docs'}", "--report", "--steps=3"])
    assert "has runs of 2 steps" in capsys.readouterr().err
