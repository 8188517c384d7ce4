"""tools/gpu_first_run.py without a GPU: its orchestration, every verdict both ways, the page, and a rehearsal."""

import copy
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(REPOSITORY / "tools"))
    patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    first_run = importlib.import_module("gpu_first_run")
    settle = importlib.import_module("gpu_to_settle")
    test_log = importlib.import_module("gpu_test_log")
    report = importlib.import_module("kernel_report")
    roofline = importlib.import_module("kernel_roofline")
    importlib.import_module("gpu_suite")

PYTHON = [sys.executable, "-c"]


def at_bounds(tokens, ratio=1.1):
    """A profile in which each of our kernels takes so many times its bound, with one of torch's."""
    needed = roofline.function_times(roofline.SHAPES["6.9B"], tokens, None, roofline.DEVICES["H200"])
    rows = [{"kernel": name, "count": 1, "us": ratio * 1e6 * times["bound"]} for name, times in needed.items()]
    return [*rows, {"kernel": "void at::native::reduce_kernel<512>(...)", "count": 1, "us": 9.0}]


def timing(median):
    return {"median_s": median, "q25_s": 0.9 * median, "q75_s": 1.1 * median, "min_s": 0.8 * median, "n": 7}


def results():
    """What a run on an H200 might have found, all rows met."""
    lines = {"lse": (0.5, 0), "compose": (0.7, 0), "back_1": (1.7, 600), "back_0": (1.4, 300)}
    kernels = [
        {"kernel": name, "arch": 90, "shape": "6.9b", "odd": False, "instructions": n, "stack": stack}
        for name, (n, stack) in lines.items()
    ]
    cells = [
        {"name": "kernels 6.9b attention, global", "kernels": at_bounds(2048)},
        {"name": "kernels 6.9b attention, global, T = 1024", "kernels": at_bounds(1024)},
        {"name": "kernels rates", "memory_bytes_per_s": 4.3e12, "cache_bytes_per_s": 6e12, "flops_per_s": 7e14},
        {"name": "kernels 6.9b chunks", "faster": 0.9, "timings": {}},
    ]
    op = {"name": "op 6.9b global 4096 ours", "forward": timing(0.001) | {"tflops": 3.0, "peak_bytes": 1 << 30}}
    tune = {"name": "tune 6.9b global", "faster": 1.1, "tiles": {"NVIDIA H200": {"kernel=lse": [128, 2, 8, 4]}}}
    train = {"name": "train 2.8b LG full full", "timings": {"32": timing(0.5)}, "tokens_per_s": 12345.0}
    sections = {
        "tests": {"scores": {"counted": 10, "clamped": 0, "largest": 9.0, "limit": 6e4}, "failures": [], "skipped": []},
        "report": {"kernels": kernels},
        "kernels": {"cells": cells},
        "op": {"cells": [op]},
        "train": {"cells": [train]},
        "tune": {"cells": [tune]},
        "selfcheck": {
            "kinds": [{"kind": "heads=32", "passed": True, "share_of_allowed": 0.5, "worst": "output", "detail": ""}]
        },
    }
    for name, part in sections.items():
        part |= {"status": "ok", "detail": "", "seconds": 1.0, "is_complete": True}
        for cell in part.get("cells", ()):
            cell |= {"section": name, "status": "ok"}
    about = {"device": "NVIDIA H200", "driver_version": "580.1", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}
    content = {"date": "2026-11-22T00:00:00+00:00", "options": {"smoke": False}, "calls": 1}
    return content | {"about": about, "sections": sections, "to_settle": []}


def slower(name, function, factor):
    """Results in which a kernel takes longer."""
    content = results()
    (cell,) = (cell for cell in content["sections"]["kernels"]["cells"] if cell["name"] == name)
    for kernel in cell["kernels"]:
        kernel["us"] *= factor if function in (kernel["kernel"], None) else 1
    return content


def changed(section, where, **values):
    content = results()
    where(content["sections"][section]).update(values)
    return content


GLOBAL, SHORT = "kernels 6.9b attention, global", "kernels 6.9b attention, global, T = 1024"
# row of the table -> results with which it fails, and what is chosen then
FAILING = {
    "8 warps": (slower(GLOBAL, "lse_kernel", 1.3), "tiles that a search on this device finds"),
    "spills": (slower(GLOBAL, "back_1_kernel", 1.4), "1.10 times as fast here; apply with DCFORMER_AUTOTUNE=1"),
    "cache or memory": (slower(GLOBAL, None, 1.2), "takes a change of code; chunks of queries"),
    "matrices": (slower(GLOBAL, "compose_kernel", 1.3), "tiles that a search"),
    "products": (slower(GLOBAL, "values_kernel", 1.2), "tiles that a search"),
    "few programs": (slower(SHORT, None, 1.5), "fewer keys per program"),
    "scores in float16": (changed("tests", lambda part: part["scores"], clamped=3), '"dcformer_chunked"'),
    "another Triton": (changed("report", lambda part: part["kernels"][0], instructions=0.6), "triton==3.7.1"),
}


@pytest.mark.parametrize("name", FAILING)
def test_every_row_is_met_or_fails_by_its_figures(name):
    content, chosen = FAILING[name]
    (i,) = (i for i, row in enumerate(settle.TO_SETTLE) if row.risk.startswith(name))
    good, bad = settle.settle(results())[i], settle.settle(content)[i]
    assert (good["verdict"], bad["verdict"]) == ("met", "failed"), (good, bad)
    assert good["fallback"] is None and chosen in bad["fallback"], bad
    assert good["value"] <= good["limit"] < bad["value"]


def test_every_row_is_tried():
    assert len(FAILING) == len(settle.TO_SETTLE) == 8  # those of the design
    assert all(row.fallbacks for row in settle.TO_SETTLE)


def test_what_is_not_measured_says_why():
    content = results() | {"sections": {}}
    for line in settle.settle(content):
        assert (line["verdict"], line["value"]) == ("not measured", None) and "has not been run" in line["evidence"]
    content = results()
    content["sections"]["kernels"]["cells"][0] |= {"status": "error", "detail": "no CUPTI"}
    assert "error: no CUPTI" in settle.settle(content)[0]["evidence"]
    content = results()
    content["sections"]["kernels"]["cells"][0]["kernels"] = content["sections"]["kernels"]["cells"][0]["kernels"][:1]
    assert "not among the kernels that the profiler saw" in settle.settle(content)[0]["evidence"]
    content = results()
    content["sections"]["report"]["kernels"].pop()
    assert "has no back_0" in settle.settle(content)[-1]["evidence"]


def test_stack_where_there_must_be_none_fails_whatever_the_instructions():
    content = changed("report", lambda part: part["kernels"][1], stack=8)
    assert settle.settle(content)[-1]["verdict"] == "failed"


def test_bounds_of_a_device_that_nobody_knows_are_those_measured():
    content = results()
    content["about"]["device"] = "Some GPU"
    content["about"]["capability"] = "8.0"
    assert settle.device_figures(content)[1].endswith("counted for sm_90")
    needed = settle.bounds(content)["scores_kernel"]
    assert needed["HBM"] == pytest.approx(settle.bounds(results())["scores_kernel"]["HBM"] * 4.8 / 4.3)
    content["sections"]["kernels"]["cells"][2].pop("cache_bytes_per_s")
    with pytest.raises(settle.NotMeasured, match="cache_bytes_per_s could not be measured"):
        settle.bounds(content)


@pytest.mark.parametrize("function", ["back_1_kernel", "back_0_kernel"])
def test_spills_of_both_kernels_are_judged(function):
    line = settle.settle(slower(GLOBAL, function, 1.4))[1]
    assert (line["verdict"], line["value"]) == ("failed", pytest.approx(1.54))


def test_bounds_of_compose_are_those_of_both_its_launches():
    passes = roofline.attention_work(roofline.SHAPES["6.9B"], 2048, None, roofline.stored)
    launches = [w for one in passes for w in one if w.name in ("compose", "weights")]
    assert len(launches) == 2
    needed = settle.bounds(results())["compose_kernel"]["bound"]
    assert needed == pytest.approx(1e6 * roofline.seconds(launches, roofline.DEVICES["H200"]))


def test_launches_of_a_kernel_are_added_up():
    content = results()
    before = settle.kernel_times(content)["lse_kernel"]
    content["sections"]["kernels"]["cells"][0]["kernels"].append({"kernel": "lse_kernel_0d1d", "count": 1, "us": 5.0})
    assert settle.kernel_times(content)["lse_kernel"] == pytest.approx(before + 5.0)


def test_the_way_out_is_what_helps_most_else_what_is_not_measured():
    gains = {"a": 1.05, "b": 1.3, "c": 0.8}

    def chosen(*names):
        fallbacks = tuple(
            settle.Fallback(name, f"set {name}", (lambda _, name=name: gains[name]) if name in gains else None)
            for name in names
        )
        return settle.choose(settle.Row("", "", 1.0, lambda _: None, fallbacks), {})

    assert chosen("a", "b", "c", "x").startswith("b: 1.30 times as fast here; apply with set b; c did not help (0.80")
    assert chosen("c", "x", "y").startswith("x (not measured); apply with set x; c did not help")
    assert chosen("c") == "none is left: c did not help (0.80 times as fast)"


# --- scores in float16 ------------------------------------------------------------------------------------------------


def test_clamped_scores_are_counted(monkeypatch):
    from dcformer.kernels import overflow

    assert test_log.LIMIT == overflow.LARGEST
    monkeypatch.setattr(test_log, "_ELEMENTS", 20)  # several parts
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 7, 8).bfloat16() * 300, torch.randn(2, 2, 9, 8).bfloat16() * 300
    scores = query.double() @ key.double().repeat_interleave(2, dim=1).mT * 0.3 * math.log2(math.e)
    expected = int((scores.abs() > 60000).sum())
    found = test_log.count_clamped(query, key, 0.3)
    assert 0 < expected < scores.numel()
    assert (found["counted"], found["clamped"]) == (scores.numel(), expected)
    assert found["largest"] == pytest.approx(float(scores.abs().max()), rel=1e-5)
    assert test_log.count_clamped(query, key, 1e-6)["clamped"] == 0


PASSES = """
class Passes:
    def __init__(self, *tensors): self.q, self.k, self.scale = *tensors, 1.0
    def forward(self): pass
"""
TESTS = """
import pytest, torch
from dcformer.kernels.passes import Passes

def score(size, dtype=torch.bfloat16):
    Passes(*(torch.full((1, 1, n, 4), size, dtype=dtype) for n in (2, 3))).forward()

def test_small(): score(1.0)
def test_large(): score(1000.0); score(1000.0, torch.float32)
def test_memory(): score(1000.0)
def test_wrong(): assert 1 == 2, "no such luck"
def test_not_here(): pytest.skip("no GPU")
"""


OPTIONS = [
    ["-p", "no:xdist", "-p", "no:timeout"],
    pytest.param(["-n", "1", "--dist", "loadgroup"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_tests_are_logged_one_by_one_and_not_run_again(tmp_path, options):
    if "-n" in options:
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    run = first_run.Run(tmp_path / "out")
    package = tmp_path / "out" / "site" / "dcformer" / "kernels"  # before the real one, which takes seconds to import
    package.mkdir(parents=True)
    for name, text in {"../__init__": "", "__init__": "", "passes": PASSES}.items():
        (package / f"{name}.py").write_text(text)
    (tmp_path / "test_gpu.py").write_text(TESTS)
    command = [*first_run.pytest_command(run, "-p", "gpu_test_log", *options), str(tmp_path / "test_gpu.py")]
    job = first_run.Job("tests", command)
    log = tmp_path / "out" / "tests.jsonl"

    def once():
        first_run.start(run, job)
        job.code = job.process.wait()
        return first_run.collect_tests(run, [job])

    found = once()
    assert (found["status"], found["detail"]) == ("failed", "3 passed, 1 failed, 1 skipped")
    assert found["scores"] == {
        "counted": 12,
        "clamped": 6,
        "largest": pytest.approx(4e6 * math.log2(math.e)),
        "limit": 6e4,
    }
    assert found["failures"][0]["test"].endswith("test_wrong") and "no such luck" in found["failures"][0]["detail"]
    assert found["skipped"] == ["no GPU"]
    kept = [line for line in log.read_text().splitlines() if "test_wrong" not in line]
    log.write_text("\n".join(kept) + '\n{"cut off')
    job.command += ["-v"]
    assert once()["detail"] == "3 passed, 1 failed, 1 skipped"
    printed = first_run.log_of(run, job, "out").read_text()
    assert "test_wrong" in printed and "test_small" not in printed
    assert len(log.read_text().splitlines()) == 6  # with the one that was cut off


def test_files_of_tests_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRST_RUN_LOG", str(tmp_path / "tests.jsonl"))
    plugins = SimpleNamespace(hasplugin=lambda name: False)
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None), pluginmanager=plugins)
    items = [SimpleNamespace(nodeid=name, path=Path(name[0])) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    test_log.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_scores_that_exceed_float16_on_purpose_are_not_counted():
    """Tests of marks of scores, one of which runs on a GPU only."""
    source = (REPOSITORY / "tests" / "kernels" / "test_attention_marks.py").read_text(encoding="utf-8")
    names = re.findall(r"^def (test_scores_\w+)\(unmarked", source, re.MULTILINE)
    assert "test_scores_of_a_later_call_on_a_gpu_are_not_waited_for" in names
    assert all(name.startswith(test_log._NOT_COUNTED) for name in names)


# --- running ----------------------------------------------------------------------------------------------------------


def section(name, code="pass", beside=False, share=1.0, status=None):
    """A section of one process that runs Python code, and is as well as its exit status."""

    def jobs(run, seconds):
        if code is None:
            raise first_run.NotRun("there is no such thing here")
        return [first_run.Job(name, [*PYTHON, code])]

    def collect(run, jobs):
        return {"status": status or ("failed" if jobs[0].code else "ok"), "detail": first_run.last_line(run, jobs[0])}

    return first_run.Section(name, f"what {name} does", share, jobs, collect, beside)


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Calls the script with other sections; returns its status and what it has written."""
    about = {"device": "toy", "below_the_lowest_versions": None}
    monkeypatch.setattr(first_run, "describe", lambda run: about)
    monkeypatch.setattr(first_run, "RESERVED_S", 0.0)
    monkeypatch.setattr(first_run, "LEAST_S", 0.2)
    monkeypatch.setattr(first_run, "page", lambda content: "page")
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(sections, *arguments):
        names = [one.name for one in sections]
        monkeypatch.setattr(first_run, "SECTIONS", tuple(sections))
        monkeypatch.setattr(first_run, "NAMES", tuple(names))
        status = first_run.main(["--output", str(tmp_path / "out"), *arguments])
        return status, json.loads((tmp_path / "out" / "first_run.json").read_text())["sections"]

    return call


def test_a_section_that_fails_leaves_the_others_alone(called, tmp_path):
    sections = [
        section("a", "print('fine')", beside=True), section("b", "raise ValueError('no such luck')", beside=True),
        section("c", None, beside=True), section("d", "print('after them')"),
    ]  # fmt: skip
    status, parts = called(sections)
    assert status == 1
    assert {name: part["status"] for name, part in parts.items()} == {
        "a": "ok",
        "b": "failed",
        "c": "not run",
        "d": "ok",
    }
    assert parts["b"]["detail"] == "ValueError: no such luck" and parts["d"]["detail"] == "after them"
    assert parts["c"]["detail"] == "there is no such thing here"
    assert not list(tmp_path.rglob("*.tmp"))


def test_results_that_cannot_be_read_leave_the_others_alone(called):
    broken = section("a")
    broken = first_run.Section(**{**vars(broken), "collect": lambda run, jobs: {}["missing"]})
    status, parts = called([broken, section("b")])
    assert status == 1 and "KeyError: 'missing'" in parts["a"]["detail"] and parts["b"]["status"] == "ok"


def test_time_is_shared_out_and_what_runs_out_says_so(called, tmp_path):
    flag = tmp_path / "go"
    slow = f"import os, time; time.sleep(0 if os.path.exists({str(flag)!r}) else 600)"
    sections = [section("a", slow, share=0.1), section("b", "print(1)", share=0.45), section("c", share=0.45)]
    status, parts = called(sections, "--time-limit", "20")
    assert status == 3 and [parts[name]["status"] for name in "abc"] == ["out of time", "ok", "ok"]
    assert parts["a"]["detail"] == "it printed nothing; stopped after 2 s: --resume goes on"
    assert parts["a"]["limit_s"] == pytest.approx(2, rel=0.2)
    assert parts["b"]["limit_s"] < 10 < parts["c"]["limit_s"]  # with what b has left over
    flag.touch()
    sections[1] = section("b", "raise ValueError('done before')")
    status, parts = called(sections, "--resume", "--time-limit", "60")
    assert status == 0 and {part["status"] for part in parts.values()} == {"ok"}


def test_no_section_begins_without_time(called):
    status, parts = called([section("a")], "--time-limit", "0.1")
    assert status == 3 and parts["a"]["detail"] == "not begun: --resume goes on"


def test_a_run_is_neither_overwritten_nor_mixed_with_another(called, monkeypatch, tmp_path, capsys):
    called([section("a")])
    assert first_run.main(["--output", str(tmp_path / "out")]) == 2
    assert "holds a run already: go on with --resume" in capsys.readouterr().err
    monkeypatch.setattr(first_run, "describe", lambda run: {"device": "another"})
    assert first_run.main(["--output", str(tmp_path / "out"), "--resume"]) == 2
    assert "device toy, now another" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert first_run.main(["--output", str(tmp_path / "other")]) == 2
    assert "holds other things" in capsys.readouterr().err


KILLED = """
import sys
sys.path.insert(0, {tools!r})
import gpu_first_run as first_run

def section(name, code):
    def jobs(run, seconds): return [first_run.Job(name, [sys.executable, "-c", code])]
    def collect(run, jobs): return {{"status": "ok", "detail": ""}}
    return first_run.Section(name, name, 1.0, jobs, collect)

first_run.describe = lambda run: {{"device": "toy", "below_the_lowest_versions": None}}
first_run.SECTIONS = (section("a", "pass"), section("b", {code!r}), section("c", "pass"))
first_run.NAMES = tuple("abc")
first_run.main(["--output", {out!r}])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_goes_on_and_leaves_no_process(called, tmp_path, how):
    alive, out = tmp_path / "alive", tmp_path / "out"
    code = f"import os, time; open({str(alive)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = KILLED.format(tools=str(REPOSITORY / "tools"), code=code, out=str(out))
    run = subprocess.Popen([*PYTHON, script], stderr=subprocess.PIPE)
    for _ in range(1200):
        if (alive.exists() and alive.read_text()) or run.poll() is not None:
            break
        time.sleep(0.1)
    assert run.poll() is None, run.stderr.read()
    run.send_signal(how)
    run.communicate(timeout=60)
    for _ in range(100):  # what it had started has ended, too
        try:
            os.kill(int(alive.read_text()), 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the section's process still runs")
    parts = json.loads((out / "first_run.json").read_text())["sections"]
    assert {name: part["status"] for name, part in parts.items()} == {"a": "ok", "b": "unfinished"}
    status, parts = called([section("a", "raise ValueError"), section("b"), section("c")], "--resume")
    assert status == 0 and [part["status"] for part in parts.values()] == ["ok"] * 3


def test_a_cell_that_was_running_is_tried_once_more(tmp_path):
    run = first_run.Run(tmp_path, content={"sections": {"op": {}}})
    path = tmp_path / "suite" / "gpu_suite.json"
    cells = [
        {"section": "op", "name": "op a", "status": "unfinished"},
        {"section": "op", "name": "op b", "status": "ok"},
    ]
    job = first_run.Job("suite-op", [])
    for status, detail in (("ok", "no time for 1"), ("failed", "not as they should be: op a")):
        first_run.write_json(path, {"cells": copy.deepcopy(cells)})
        found = first_run.collect_suite(run, [job], name="op")
        assert found["status"] == status and detail in found["detail"]
        assert found["late"] == (status == "ok")


def test_what_stands_beside_ours_does_not_fail_a_section(tmp_path):
    def found(name, **coordinates):
        run = first_run.Run(tmp_path, content={"sections": {"op": {}}})
        cells = [{"section": "op", "name": "op x ours", "status": "ok", "implementation": "ours"}]
        cells.append({"section": "op", "name": name, "status": "error"} | coordinates)
        first_run.write_json(tmp_path / "suite" / "gpu_suite.json", {"cells": cells})
        return first_run.collect_suite(run, [first_run.Job("suite-op", [], code=1)], name="op")

    other = found("op x flex gates", implementation="flex gates")
    assert other["status"] == "ok" and "beside ours: op x flex gates (error)" in other["detail"]
    for implementation in ("ours", "ours gates", "dcformer_triton"):
        assert found("op y", implementation=implementation)["status"] == "failed"
    assert found("train 2.8b")["status"] == "failed"
    checks = [{"section": "check", "name": name} for name in ("check attention gates flex", "check attention gates")]
    assert [first_run.is_ours(check) for check in checks] == [False, True]


# --- what there is to run on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "[]", '{"sections": {}}'])
def test_what_is_no_earlier_run_is_refused(content, tmp_path, capsys):
    path = tmp_path / "first_run.json"
    path.write_text(content)
    for option in (["--markdown", str(path)], ["--output", str(path)]):
        assert first_run.main([*option]) == 2
        assert f"{option[0]} {path}" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert first_run.main(["--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: no CUDA device here") and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not printed.out


def test_versions_that_are_missing_or_old_are_named(monkeypatch):
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"}
    monkeypatch.setattr(first_run, "version", versions.__getitem__)
    (line,) = first_run.versions_below()
    assert line.startswith("transformers 5.17.0 is older than 5.")
    versions["transformers"] = "99.0"
    assert first_run.versions_below() == []

    def missing(package):
        raise first_run.PackageNotFoundError(package)

    monkeypatch.setattr(first_run, "version", missing)
    with pytest.raises(first_run.Unusable, match=r"torch is not installed in .*PYTHON="):
        first_run.versions_below()


def test_why_the_source_tree_does_not_import_is_said(monkeypatch, tmp_path):
    def suite():
        raise ImportError("\nAutoImageProcessor requires the Torchvision library\nInstall it")

    monkeypatch.setattr(first_run, "suite", suite)
    monkeypatch.setattr(first_run, "versions_below", lambda: ["transformers 5.17.0 is older"])
    expected = "here: AutoImageProcessor requires the Torchvision library; transformers 5.17.0 is older; bring"
    with pytest.raises(first_run.Unusable, match=expected):
        first_run.describe(SimpleNamespace(smoke=True))


def make_wheel(folder, name="color_of_gpus", version="1.0"):
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "COLOUR = 'green'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


def test_wheels_go_before_what_is_installed(tmp_path, called):
    make_wheel(tmp_path / "wheels")
    code = "import color_of_gpus; print(color_of_gpus.COLOUR)"
    status, parts = called([section("a", code)], "--wheels", str(tmp_path / "wheels"))
    assert status == 0 and parts["a"]["detail"] == "green"
    run = first_run.Run(tmp_path / "out")
    assert run.environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "out" / "site")


def test_wheels_that_are_none_are_refused(tmp_path, capsys):
    (tmp_path / "wheels").mkdir()
    assert first_run.main(["--output", str(tmp_path / "out"), "--wheels", str(tmp_path / "wheels")]) == 2
    assert "no *.whl there" in capsys.readouterr().err
    (tmp_path / "wheels" / "broken-1.0-py3-none-any.whl").write_text("no zip")
    assert first_run.main(["--output", str(tmp_path / "out"), "--wheels", str(tmp_path / "wheels")]) == 2
    assert "error: --wheels" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


SANITIZER = """#!{python}
import sys
assert sys.argv[1:6:2] == ["--tool", "--error-exitcode", "{python}"], sys.argv
if "{bad}" == "all":
    print("========= Device not supported")
    sys.exit(1)
print("========= {summary}: 2 errors" if sys.argv[2] == "{bad}" else "========= ERROR SUMMARY: 0 errors")
sys.exit(9 if sys.argv[2] == "{bad}" else 0)
"""


@pytest.mark.parametrize("bad", ["racecheck", "none", "all"])
def test_what_the_sanitizer_says(tmp_path, monkeypatch, called, bad):
    binary = tmp_path / "compute-sanitizer"
    binary.write_text(SANITIZER.format(python=sys.executable, summary="RACECHECK SUMMARY", bad=bad))
    binary.chmod(0o755)
    (sanitizer,) = (one for one in first_run.SECTIONS if one.name == "sanitizer")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    status, parts = called([sanitizer])
    if bad == "all":
        assert (status, parts["sanitizer"]["status"]) == (0, "not run")
        assert "Device not supported" in parts["sanitizer"]["detail"]
        return
    found = "RACECHECK SUMMARY: 2 errors" if bad == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert parts["sanitizer"]["detail"] == f"memcheck: ERROR SUMMARY: 0 errors; racecheck: {found}"
    assert (status, parts["sanitizer"]["status"]) == ((1, "failed") if bad == "racecheck" else (0, "ok"))


def test_without_a_sanitizer_or_pytest_sections_say_so(monkeypatch, called):
    monkeypatch.setattr(first_run.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(first_run, "find_spec", lambda name: None)
    _, parts = called([one for one in first_run.SECTIONS if one.name in ("sanitizer", "tests")])
    assert "compute-sanitizer is not installed here" in parts["sanitizer"]["detail"]
    assert parts["tests"]["detail"].startswith("pytest is not installed in this Python")


def test_the_report_is_of_the_device_too(tmp_path):
    assert set(report.SHARED_LIMIT) == first_run.REPORTED

    def archs(capability):
        run = first_run.Run(tmp_path, content={"about": {"capability": capability}})
        command = first_run.report_jobs(run, 100.0)[0].command
        return command[command.index("--arch") + 1 : command.index("--shapes")]

    assert archs("8.6") == ["86", "90"] and archs("12.1") == ["90", "121"] and archs("10.3") == ["90", "103"]
    assert archs("9.0") == archs("7.0") == ["90"]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_device_versions_spread_verdicts_and_ways_out(tmp_path, capsys):
    content, _ = FAILING["spills"]
    content = copy.deepcopy(content)
    content["sections"]["op"] |= {"status": "failed", "detail": "no | such\nluck"}
    content["sections"]["tests"]["skipped"] = ["needs two GPUs"]
    content["to_settle"] = settle.settle(content)
    path = tmp_path / "first_run.json"
    path.write_text(json.dumps(content))
    assert first_run.main(["--markdown", str(path)]) == 0
    page = capsys.readouterr().out
    for words in ("NVIDIA H200", "580.1", "2.11.0", "3.6.0", "abc"):
        assert words in page, words
    assert "| op 6.9b" not in page and "6.9b global 4096 ours, forward" in page
    row = next(line for line in page.splitlines() if line.startswith("| 6.9b global 4096 ours, forward"))
    assert [word.strip() for word in row.split("|")][2:6] == ["1", "0.9 - 1.1", "0.8", "7"]
    assert "| **failed**" in page and "Chosen where a row failed:" in page
    assert "- spills of `back_1` and `back_0` cost more than counted: tiles that a search" in page
    assert next(line for line in page.splitlines() if line.startswith("| op ")).split("|")[3].strip() == "failed"
    assert "no \\| such luck" in page and "- needs two GPUs" in page
    assert "| back_1_kernel " in page and "12345" in page and "heads=32" in page
    assert "on a CPU" not in page
    assert "**A rehearsal" in first_run.page(content | {"options": {"smoke": True}})


def test_no_folder_of_this_machine_is_in_a_text(tmp_path):
    run = first_run.Run(tmp_path / "out")
    text = f"{tmp_path}/out/logs/a.log and {REPOSITORY}/src/dcformer"
    assert run.clean(text) == "logs/a.log and src/dcformer"


# --- a rehearsal ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tests_that_are_named_exist():
    names = [str(REPOSITORY / "tests" / "kernels" / name) for name in (*first_run.SANITIZED, *first_run.SMOKE_TESTS)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """Sections of all kinds in the interpreter, from the source tree and another folder: nothing is installed."""
    sections = ("selfcheck", "tests", "report", "kernels", "memory")
    script, out = str(REPOSITORY / "tools" / "gpu_first_run.py"), tmp_path / "out"
    command = [sys.executable, script, "--smoke", "--output", str(out), "--time-limit", "540", "--sections", *sections]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads((out / "first_run.json").read_text())
    assert {name: content["sections"][name]["status"] for name in sections} == dict.fromkeys(sections, "ok")
    assert (out / "gpu.md").read_text() in done.stdout
    verdicts = {line["risk"]: line["verdict"] for line in content["to_settle"]}
    assert verdicts["scores in float16 overflow"] == "met"
    assert set(verdicts.values()) == {"met", "not measured"}
    names = {cell["name"] for cell in content["sections"]["kernels"]["cells"]}
    assert {"kernels smoke attention, global", "kernels rates", "kernels smoke chunks"} <= names
