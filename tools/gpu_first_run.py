"""What to run when there is a GPU: checks, measures and settles what is known of the kernels from arithmetic alone.

    make gpu-first-run                                     # everything, in less than 8 minutes
    make gpu-first-run ARGS="--resume"                     # goes on where the last call stopped
    make gpu-first-run ARGS="--sections selfcheck kernels" # some sections
    python tools/gpu_first_run.py --smoke                  # tiny shapes on the CPU in Triton's interpreter: does it run
    python tools/gpu_first_run.py --markdown FILE.json > docs/gpu.md      # the page of an earlier run

Runs from the source tree with whatever Python has torch with CUDA, Triton and Transformers (PYTHON=... for make);
nothing is installed or fetched. `--wheels DIR` brings packages along. Every section is a process or a few, with its
share of `--time-limit`; what one leaves over goes to those after it. Sections that time nothing run first, beside each
other. DIR/first_run.json has the results, written anew after each section, and DIR/gpu.md the page; DIR is `--output`.

The exit status is 0 when all sections are done and well, 1 when one failed, 2 when there is nothing to run on, 3 when
some ran out of time (`--resume`). Rows "to settle" that fail do not decide it: the page says what to do about them.
"""

import argparse
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_test_log
import gpu_to_settle

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = [str(REPOSITORY / name) for name in ("src", "tools", "benchmarks")]
sys.path[:0] = [path for path in SOURCES if path not in sys.path]

from cpu_suite import read_json, write_json  # noqa: E402 - found there; it imports no torch

PRESETS = ("6.9b", "2.8b", "13b")
STARTUP_S = 12.0  # of a process: imports
RESERVED_S = 10.0  # at the end, for what is not in sections
LEAST_S = 5.0  # no section begins with less
REPORTED = {80, 86, 89, 90, 100, 103, 120, 121}  # what `kernel_report.py`, which imports Triton, compiles for
_LIBC = ctypes.CDLL(None)
# A few of the kernels' tests, for compute-sanitizer: composition, odd head dims, windows, 16 bits, decoding in splits.
SANITIZED = (
    *(f"test_attention.py::test_output_and_gradients[{name}]" for name in ("everything", "dim 80", "window 5")),
    "test_attention.py::test_output_and_gradients[all, bfloat16]",
    "test_decode.py::test_number_of_splits",
)
SMOKE_TESTS = (
    "test_attention.py::test_output_and_gradients[all, bfloat16]",
    "test_attention_bounds.py::test_visible_intervals",
)


@dataclass
class Run:
    """A call of this script.

    Attributes:
        folder: where everything goes.
        smoke: tiny shapes in the interpreter.
        content: of the JSON file.
        begin: of this call, on the clock of `time.perf_counter`.
    """

    folder: Path
    smoke: bool = False
    content: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        """Seconds since this call began."""
        return time.perf_counter() - self.begin

    @cached_property
    def environment(self) -> dict[str, str]:
        """Of all processes: the source tree is found, nothing is fetched, found tiles and verdicts are kept here."""
        paths = [str(self.folder / "site"), *SOURCES, os.environ.get("PYTHONPATH", "")]
        new = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DCFORMER_CACHE": str(self.folder / "cache"),
            "FIRST_RUN_LOG": str(self.folder / "tests.jsonl"),
        }  # fmt: skip
        new.pop("TRITON_INTERPRET", None)
        return new | ({"TRITON_INTERPRET": "1"} if self.smoke else {})

    def save(self) -> None:
        """Writes the JSON file whole or not at all."""
        self.content["to_settle"] = gpu_to_settle.settle(self.content)
        write_json(self.folder / "first_run.json", self.content)

    def clean(self, text: str) -> str:
        """A text without the names of this machine's folders."""
        for folder, name in (
            (f"{self.folder}/", ""),
            (f"{REPOSITORY}/", ""),
            (sys.prefix, "PREFIX"),
            (Path.home(), "~"),
        ):
            text = text.replace(str(folder), name)
        return text


def suite() -> Any:
    """benchmarks/gpu_suite.py as a module."""
    return importlib.import_module("gpu_suite")


# --- sections ---------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A process of a section.

    Attributes:
        command: what is run.
        extra: of the environment, besides that of the run; None takes a variable away.
        code: exit status; None while it runs, and of one that was stopped.
    """

    name: str
    command: list[str]
    extra: dict[str, str | None] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    code: int | None = None


class NotRun(Exception):  # noqa: N818 - not an error
    """Why a section has nothing to run on this machine."""


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        what: it does, for the page.
        share: of the time limit; of those that run beside each other, the largest counts.
        jobs: its processes, with the seconds that they have; raises NotRun.
        collect: what they found, from what they have written: status and figures.
        beside: others may run at the same time.
    """

    name: str
    what: str
    share: float
    jobs: Callable[[Run, float], list[Job]]
    collect: Callable[[Run, list[Job]], dict[str, Any]]
    beside: bool = False


def tool(*arguments: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *arguments]


def log_of(run: Run, job: Job, suffix: str = "log") -> Path:
    """What a process has printed: its errors, or with "out" its results."""
    return run.folder / "logs" / f"{job.name}.{suffix}"


def last_line(run: Run, job: Job) -> str:
    """Of what a process printed that did not end well."""
    lines = [
        line.strip()
        for suffix in ("out", "log")
        if (path := log_of(run, job, suffix)).exists()
        for line in path.read_text(errors="replace").splitlines()
        if line.strip() and "it/s" not in line and "s/it" not in line
    ]
    return run.clean(lines[-1])[:300] if lines else "it printed nothing"


def selfcheck_jobs(run: Run, seconds: float) -> list[Job]:
    sizes = ("smoke",) if run.smoke else PRESETS
    return [
        Job(f"selfcheck-{size}", tool(__file__, "--selfcheck", size, "--output", str(run.folder))) for size in sizes
    ]


def selfcheck(run: Run, size: str) -> int:
    """The self-check of every kind of layer of a model, of one also for large scores; a JSON file, written after each
    kind."""
    import torch

    from dcformer.kernels.overflow import Beyond
    from dcformer.kernels.selfcheck import check_and_keep, kinds

    bench = suite().Bench(smoke=size == "smoke")
    device = torch.device("cpu") if bench.smoke else torch.device("cuda", torch.cuda.current_device())
    path = run.folder / f"selfcheck-{size}.json"
    lines: list[dict[str, Any]] = json.loads(path.read_text())["kinds"] if path.exists() else []
    config, dtype = bench.config(size), str(bench.dtype).removeprefix("torch.")
    to_check = kinds(config, dtype)
    if size in ("6.9b", "smoke"):
        to_check += kinds(config, dtype, found=Beyond.PRECISION)
    for kind in to_check:
        if str(kind) in [line["kind"] for line in lines if line["size"] == size]:
            continue
        begin = time.perf_counter()
        line: dict[str, Any] = {"size": size, "kind": str(kind)}
        try:
            results, passed, summary = check_and_keep(device, kind)
            shares = {c.name: c.error / c.allowed if c.allowed else float(c.error > 0) for c in results}
            worst = max(shares, key=lambda name: shares[name])
            line |= {"passed": passed, "results": len(results), "worst": worst, "share_of_allowed": shares[worst]}
            line |= {"detail": summary}
        except Exception as error:  # whatever a compiler or a driver may raise: it is what was asked
            line |= {"passed": False, "detail": suite().short(error)}
        lines.append(line | {"seconds": time.perf_counter() - begin})
        write_json(path, {"kinds": lines})
    return 0


def collect_selfcheck(run: Run, jobs: list[Job]) -> dict[str, Any]:
    kinds = []
    for path in sorted(run.folder.glob("selfcheck-*.json")):
        kinds += json.loads(path.read_text())["kinds"]
    failed = [f"{k['kind']}: {k['detail']}" for k in kinds if not k["passed"]]
    failed += [f"{job.name}: {last_line(run, job)}" for job in jobs if job.code]
    detail = f"{len(kinds)} kinds of layers; " + ("; ".join(failed)[:500] if failed else "all within their bounds")
    return {"status": "failed" if failed else "ok", "detail": run.clean(detail), "kinds": kinds}


def pytest_command(run: Run, *arguments: str) -> list[str]:
    """A run of tests that needs no plugin."""
    if find_spec("pytest") is None:
        raise NotRun("pytest is not installed in this Python; bring it with --wheels")
    ini = REPOSITORY / "tests" / "gpu.ini"
    options = ["-q", "-c", str(ini), "--rootdir", str(REPOSITORY), "-p", "no:cacheprovider"]
    return tool("-m", "pytest", *options, *arguments)


def tests_jobs(run: Run, seconds: float) -> list[Job]:
    folder = REPOSITORY / "tests" / "kernels"
    arguments = ["-p", "gpu_test_log"]
    if run.smoke:
        arguments += [str(folder / name) for name in SMOKE_TESTS]
    else:
        arguments += ["-m", "gpu", "-k", "not sanitizer", str(folder)]
        if find_spec("pytest_timeout") is not None:
            arguments += ["--timeout", "150"]
        if find_spec("xdist") is not None:  # compiling takes most of the time
            arguments += ["-n", str(max(1, (os.cpu_count() or 1) - 4)), "--dist", "loadgroup"]
    return [Job("tests", pytest_command(run, *arguments))]


def collect_tests(run: Run, jobs: list[Job]) -> dict[str, Any]:
    lines = {line["test"]: line for line in gpu_test_log.read(run.folder / "tests.jsonl")}
    outcomes: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "skipped": []}
    for line in lines.values():
        outcomes[line["outcome"]].append(line)
    counted = [line["scores"] for line in lines.values() if line["scores"]]
    scores = {name: sum(found[name] for found in counted) for name in ("counted", "clamped")}
    scores |= {"largest": max((found["largest"] for found in counted), default=0.0), "limit": gpu_test_log.LIMIT}
    failures = [{"test": line["test"], "detail": run.clean(line["detail"])} for line in outcomes["failed"]]
    skipped = sorted({run.clean(line["detail"]).removeprefix("Skipped: ") for line in outcomes["skipped"]})
    detail = ", ".join(f"{len(found)} {name}" for name, found in outcomes.items())
    is_odd = any(job.code not in (None, 0, 1, 5) for job in jobs)  # 5: nothing was left to be run
    if is_odd or not lines:
        printed = log_of(run, jobs[0], "out").read_text(errors="replace")
        errors = re.findall(r"^(?:ERROR|INTERNALERROR>) .*", printed, re.MULTILINE)
        detail += f"; pytest: {run.clean(errors[-1])[:300] if errors else last_line(run, jobs[0])}"
    status = "failed" if failures or is_odd or not lines else "ok"
    return {"status": status, "detail": detail, "scores": scores, "failures": failures, "skipped": skipped}


def sanitizer_jobs(run: Run, seconds: float) -> list[Job]:
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if binary is None:
        raise NotRun("compute-sanitizer is not installed here: it comes with the CUDA toolkit")
    tests = [str(REPOSITORY / "tests" / "kernels" / name) for name in (SMOKE_TESTS[1:] if run.smoke else SANITIZED)]
    return [
        Job(
            f"sanitizer-{check}",
            [binary, "--tool", check, "--error-exitcode", "9", *pytest_command(run, *tests)],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for check in ("memcheck", "racecheck")
    ]


def collect_sanitizer(run: Run, jobs: list[Job]) -> dict[str, Any]:
    found, is_refused = {}, False
    for job in jobs:
        text = log_of(run, job, "out").read_text(errors="replace") if log_of(run, job, "out").exists() else ""
        is_refused |= "Device not supported" in text  # by the tool, on some virtual machines
        summaries = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
        name = job.name.removeprefix("sanitizer-")
        found[name] = summaries[-1] if summaries else "stopped" if job.code is None else last_line(run, job)
    failed = any(job.code not in (None, 0) for job in jobs)
    status = "not run" if is_refused else "failed" if failed else "ok"
    return {"status": status, "detail": "; ".join(f"{k}: {v}" for k, v in found.items())}


def report_jobs(run: Run, seconds: float) -> list[Job]:
    archs = {90}  # that of the limits
    if not run.smoke:
        archs |= {int(run.content["about"]["capability"].replace(".", ""))} & REPORTED
    arguments = ["--arch", *map(str, sorted(archs)), "--shapes", gpu_to_settle.SIZE, "--json"]
    arguments += ["--only", "^lse$"] if run.smoke else []
    return [Job("report", tool(str(REPOSITORY / "tools" / "kernel_report.py"), *arguments), {"TRITON_INTERPRET": None})]


def collect_report(run: Run, jobs: list[Job]) -> dict[str, Any]:
    path = log_of(run, jobs[0], "out")
    try:
        kernels = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"status": "failed", "detail": last_line(run, jobs[0]), "kernels": []}
    spills = [f"{k['kernel']} ({k['arch']})" for k in kernels if k["stack"] and not k["kernel"].startswith("back_")]
    detail = f"{len(kernels)} kernels compiled; spilling besides back_*: {', '.join(spills) or 'none'}"
    return {"status": "failed" if jobs[0].code else "ok", "detail": detail, "kernels": kernels}


def suite_jobs(run: Run, seconds: float, *, name: str) -> list[Job]:
    put_back(run, name)  # of a call that was killed
    budget = max(seconds - STARTUP_S, seconds / 2)
    arguments = ["--sections", name, "--budget-s", f"{budget:.0f}", "--out", str(run.folder / "suite"), "--resume"]
    script = str(REPOSITORY / "benchmarks" / "gpu_suite.py")
    return [Job(f"suite-{name}", tool(script, *arguments, *(["--smoke"] if run.smoke else [])))]


def suite_cells(run: Run) -> dict[str, dict[str, Any]]:
    """What gpu_suite.py has measured, by name."""
    path = run.folder / "suite" / "gpu_suite.json"
    return {cell["name"]: cell for cell in json.loads(path.read_text())["cells"]} if path.exists() else {}


def collect_suite(run: Run, jobs: list[Job], *, name: str) -> dict[str, Any]:
    if jobs[0].code is None:
        put_back(run, name)
    cells = [cell for cell in suite_cells(run).values() if cell["section"] == name]
    odd = [c for c in cells if c["status"] in ("failed", "error", "invalid", "unfinished")]
    bad = [c["name"] for c in odd if is_ours(c)]
    others = [f"{c['name']} ({c['status']})" for c in odd if not is_ours(c)]
    late = [c["name"] for c in cells if c.get("out_of_time")]
    done = [c for c in cells if c["status"] in ("ok", "out of memory")]
    detail = f"{len(done)} of {len(cells)} measured"
    detail += f"; not as they should be: {', '.join(bad)}" if bad else ""
    detail += f"; of what stands beside ours: {', '.join(others)}" if others else ""
    detail += f"; no time for {len(late)}: --resume goes on" if late else ""
    if not cells:
        detail = last_line(run, jobs[0])
    return {"status": "failed" if bad or not cells else "ok", "detail": detail, "cells": cells, "late": bool(late)}


def is_ours(cell: dict[str, Any]) -> bool:
    """Whether it is about our kernels, or a model with them; not about what stands beside them."""
    if cell["section"] == "check":
        return not cell["name"].endswith(" flex")
    return cell.get("implementation", "ours").split()[0] in ("ours", "dcformer_triton")


def put_back(run: Run, section: str) -> None:
    """Has a cell that was running when its process was ended tried again: once, a search as often as it takes, as the
    tiles that it has found are kept."""
    stopped = run.content["sections"][section].setdefault("stopped", [])
    path = run.folder / "suite" / "gpu_suite.json"
    content = json.loads(path.read_text()) if path.exists() else {"cells": []}
    for cell in content["cells"]:
        is_again = cell["name"] in stopped and section != "tune"
        if (cell["section"], cell["status"]) == (section, "unfinished") and not is_again:
            stopped.append(cell["name"])
            cell |= {"status": "skipped", "detail": "stopped: --resume tries it again", "out_of_time": True}
            write_json(path, content)


def _of_suite(name: str, what: str, share: float, beside: bool = False) -> Section:
    return Section(name, what, share, partial(suite_jobs, name=name), partial(collect_suite, name=name), beside)


# In the order in which they run.
SECTIONS = (
    Section("selfcheck", "The check that models run themselves, for every kind of layer", 0.24, selfcheck_jobs,
            collect_selfcheck, beside=True),
    Section("tests", "The kernels' tests on the device", 0.24, tests_jobs, collect_tests, beside=True),
    Section("sanitizer", "compute-sanitizer over a few of them", 0.24, sanitizer_jobs, collect_sanitizer, beside=True),
    Section("report", "What compiled kernels take, with the Triton that is installed", 0.24, report_jobs,
            collect_report, beside=True),
    _of_suite("check", "Attention, decoding, weight generators and models against float64", 0.24, beside=True),
    _of_suite("kernels", "Device time of each kernel; the device at its best; smaller chunks", 0.12),
    _of_suite("op", "Attention alone, beside flash attention, FlexAttention and compiled eager", 0.18),
    _of_suite("train", "Training steps: a layer, and 2.8B whole", 0.20),
    _of_suite("decode", "Greedy decoding, each step one CUDA graph", 0.14),
    _of_suite("memory", "Peak memory from 2k to 32k tokens", 0.06),
    _of_suite("tune", "Tiles that a search finds", 0.06),
)  # fmt: skip
NAMES = tuple(section.name for section in SECTIONS)


# --- running ----------------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """In a new process: to be ended when this one is, however that ends (Linux)."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(run: Run, job: Job) -> None:
    """Starts a process in a group of its own; what it prints goes to files."""
    environment = {k: v for k, v in (run.environment | job.extra).items() if v is not None}
    log_of(run, job).parent.mkdir(parents=True, exist_ok=True)
    with log_of(run, job).open("w") as log, log_of(run, job, "out").open("w") as out:
        job.process = subprocess.Popen(
            job.command, cwd=REPOSITORY, env=environment, stdout=out, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip


def stop(job: Job) -> None:
    """Ends a process that still runs, and what it has started."""
    if job.process is not None and job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def run_beside(run: Run, sections: list[Section], limit: float, progress: Any) -> None:
    """Runs sections at the same time, at most `limit` seconds; each one's results are written when it is done."""
    begin = time.perf_counter()
    started: list[tuple[Section, list[Job]]] = []

    def record(section: Section, jobs: list[Job], was_stopped: bool) -> None:
        kept = run.content["sections"][section.name]
        try:
            found = section.collect(run, jobs)
        except Exception as error:  # what one section has left behind must not cost the others their turn
            found = {"status": "failed", "detail": f"its results cannot be read: {type(error).__name__}: {error}"}
        if was_stopped:
            found["detail"] += f"; stopped after {limit:.0f} s: --resume goes on"
        is_late = found.pop("late", False) or was_stopped
        found["status"] = "out of time" if is_late and found["status"] == "ok" else found["status"]
        spent = kept.get("seconds", 0.0) + time.perf_counter() - begin
        run.content["sections"][section.name] = kept | found | {"seconds": spent, "is_complete": not is_late}
        run.save()
        progress.write(f"{section.name}: {found['status']}; {found['detail']}", sys.stderr)

    try:
        for section in sections:
            kept = run.content["sections"].setdefault(section.name, {})
            kept |= {"status": "unfinished", "detail": "stopped in the middle: --resume goes on", "limit_s": limit}
            try:
                jobs = section.jobs(run, limit)
            except NotRun as reason:
                kept |= {"status": "not run", "detail": str(reason)}
                progress.write(f"{section.name}: not run; {reason}", sys.stderr)
                continue
            started.append((section, jobs))
            for job in jobs:
                start(run, job)
        run.save()
        waiting = list(started)
        while waiting:
            time.sleep(0.05 if run.smoke else 0.25)
            progress.set_postfix_str(" ".join(section.name for section, _ in waiting))
            progress.update(run.spent - progress.n)
            is_late = time.perf_counter() - begin > limit
            for section, jobs in list(waiting):
                for job in jobs:
                    job.code = job.process.poll() if job.process else None
                if is_late or all(job.code is not None for job in jobs):
                    unfinished = any(job.code is None for job in jobs)
                    for job in jobs:
                        stop(job)
                    waiting.remove((section, jobs))
                    record(section, jobs, unfinished)
    finally:
        for _, jobs in started:
            for job in jobs:
                stop(job)
    run.save()


def run_all(run: Run, sections: list[Section], time_limit: float) -> None:
    """Runs sections in their order, with their shares of what time is left."""
    from tqdm import tqdm

    todo = [s for s in sections if not run.content["sections"].get(s.name, {}).get("is_complete")]
    groups: list[list[Section]] = [[s for s in todo if s.beside], *([s] for s in todo if not s.beside)]
    groups = [group for group in groups if group]
    shares = [max(section.share for section in group) for group in groups]
    layout = "{l_bar}{bar}| {n:.0f}/{total:.0f} s {postfix}"
    with tqdm(total=time_limit, desc="first run", bar_format=layout, disable=None) as progress:
        for i, group in enumerate(groups):
            left = time_limit - RESERVED_S - run.spent
            limit = left * shares[i] / sum(shares[i:])
            if limit >= LEAST_S:
                run_beside(run, group, limit, progress)
                continue
            for section in group:
                kept = run.content["sections"].setdefault(section.name, {})
                kept |= {"status": "out of time", "detail": "not begun: --resume goes on", "limit_s": 0.0}
            run.save()


# --- the page ---------------------------------------------------------------------------------------------------------


def _timing_row(name: str, timing: dict[str, Any], *more: str) -> list[str]:
    """A measurement with its spread, in milliseconds."""
    ms = {key: f"{1e3 * timing[key]:.4g}" for key in ("median_s", "q25_s", "q75_s", "min_s")}
    return [name, ms["median_s"], f"{ms['q25_s']} - {ms['q75_s']}", ms["min_s"], str(timing["n"]), *more]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, whatever is in its cells."""
    return suite().table(header, [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in rows])


_SPREAD = ["median, ms", "25 - 75%", "least", "n"]


def _gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / (1 << 30):.2f}"


def _op_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for cell in cells:
        name = f"{cell['name'].removeprefix('op ')}{'' if cell['status'] == 'ok' else ' (' + cell['status'] + ')'}"
        for passes in ("forward", "forward_backward"):
            timing = cell.get(passes, {})
            if "median_s" not in timing:
                if "status" in timing or passes == "forward":
                    rows.append([f"{name}, {passes.replace('_', ' and ')}", timing.get("status", "-"), *[""] * 6])
                continue
            graph = timing.get("graph", {}).get("median_s")
            more = [
                f"{timing['tflops']:.4g}",
                "-" if graph is None else f"{1e3 * graph:.4g}",
                _gib(timing["peak_bytes"]),
            ]
            rows.append(_timing_row(f"{name}, {passes.replace('_', ' and ')}", timing, *more))
    return rows


def _model_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for cell in cells:
        name = cell["name"].partition(" ")[2] + ("" if cell["status"] == "ok" else f" ({cell['status']})")
        layer = f"{1e3 * cell['layer_s']:.4g}" if "layer_s" in cell else ""
        speed = f"{cell['tokens_per_s']:.5g}" if "tokens_per_s" in cell else ""
        timings = cell.get("timings", {})
        rows += [_timing_row(f"{name}, {n} layers", t, layer, speed, cell.get("mode", "")) for n, t in timings.items()]
        rows += [] if timings else [[name, cell.get("detail", "-")[:80], *[""] * 6]]
    return rows


def _bound_rows(content: dict[str, Any]) -> list[list[str]]:
    """Every kernel of ours beside its bound."""
    try:
        times, bounds = gpu_to_settle.kernel_times(content), gpu_to_settle.bounds(content)
    except (gpu_to_settle.NotMeasured, ImportError):
        return []
    return [
        [name, f"{times[name]:.1f}", f"{needed['bound']:.1f}", f"{times[name] / needed['bound']:.2f}"]
        for name, needed in bounds.items()
        if name in times
    ]


def page(content: dict[str, Any]) -> str:
    """The page of a run, in Markdown."""
    about = content["about"]
    lines = ["# On a GPU", ""]
    if content["options"]["smoke"]:
        lines += ["**A rehearsal with tiny shapes on a CPU: none of these figures says anything about a GPU.**", ""]
    lines += [
        f"Measured on {content['date'][:10]} by `make gpu-first-run`"
        + (f" ({content['calls']} calls)" if content["calls"] > 1 else "")
        + ", printed by `python tools/gpu_first_run.py --markdown FILE`. What is measured and how: "
        "[benchmarks](benchmarks.md#gpu); the kernels and their bounds: [kernels](kernels.md).",
        "",
        *table(["", ""], [[name, str(value)] for name, value in about.items() if value is not None]),
        "",
        "## Sections",
        "",
    ]
    rows = []
    for section in SECTIONS:
        part = content["sections"].get(section.name, {"status": "not asked for", "detail": ""})
        rows.append([section.name, section.what, part["status"], f"{part.get('seconds', 0):.0f}", part["detail"]])
    lines += [*table(["section", "what", "status", "s", ""], rows), "", "## To settle", ""]
    rows = [
        [line["risk"], line["how"], f"<= {line['limit']:g}", "-" if line["value"] is None else f"{line['value']:.3g}",
         f"**{line['verdict']}**" if line["verdict"] == "failed" else line["verdict"], line["evidence"]]
        for line in content["to_settle"]
    ]  # fmt: skip
    lines += [*table(["risk", "measured", "limit", "value", "verdict", "evidence"], rows), ""]
    failed = [line for line in content["to_settle"] if line["fallback"]]
    lines += ["Chosen where a row failed:" if failed else "No row that was measured failed.", ""]
    lines += [f"- {line['risk']}: {line['fallback']}." for line in failed] + [""] * bool(failed)
    cells = {name: part.get("cells", []) for name, part in content["sections"].items()}
    if rows := _bound_rows(content):
        try:
            where = gpu_to_settle.device_figures(content)[1]
        except gpu_to_settle.NotMeasured:
            where = ""
        what = f"Attention of {gpu_to_settle.SIZE}, one sequence of {gpu_to_settle.TOKENS} tokens, global, both passes"
        lines += ["## Kernels beside their bounds", "", f"{what}; {where}.", ""]
        lines += [*table(["kernel", "us", "bound, us", "ratio"], rows), ""]
    if rows := _op_rows(cells.get("op", [])):
        what = 'Those that end in "gates" have gates before the softmax alone, which FlexAttention can express.'
        header = ["", *_SPREAD, "TFLOP/s", "as a graph, ms", "peak, GiB"]
        lines += ["## Attention alone", "", what, "", *table(header, rows), ""]
    for name, title in (("train", "Training"), ("decode", "Decoding")):
        if rows := _model_rows(cells.get(name, [])):
            header = ["", *_SPREAD, "a layer, ms", "tokens/s", ""]
            lines += [f"## {title}", "", *table(header, rows), ""]
    if memory := cells.get("memory", []):
        rows = [
            [c["name"].removeprefix("memory "), c["status"], _gib(c.get("peak_bytes")), _gib(c.get("workspace_bytes"))]
            for c in memory
        ]
        lines += ["## Peak memory", "", *table(["", "", "peak, GiB", "besides inputs and gradients"], rows), ""]
    for cell in cells.get("tune", []):
        if "tiles" in cell:
            lines += [f"## Tiles found, {cell['name']}", "", f"{cell['faster']:.2f} times as fast.", "", "```json"]
            lines += [json.dumps(cell["tiles"], indent=1), "```", ""]
    goals = [
        [g["what"], g["goal"], "-" if g["value"] is None else f"{g['value']:.3g}", g["reached"], str(g["paper"] or "-")]
        for g in suite().judge({cell["name"]: cell for found in cells.values() for cell in found})
    ]
    lines += ["## Goals", "", *table(["", "goal", "measured", "reached", "paper"], goals), ""]
    if kinds := content["sections"].get("selfcheck", {}).get("kinds"):
        rows = [
            [
                k["kind"],
                "passed" if k["passed"] else "**off**",
                f"{k['share_of_allowed']:.2f}" if "worst" in k else "-",
                k.get("worst", k["detail"][:200]),
            ]
            for k in kinds
        ]
        lines += ["## Self-check", "", *table(["", "", "of what is allowed", "worst"], rows), ""]
    tests = content["sections"].get("tests", {})
    if tests.get("failures"):
        rows = [[f["test"], f["detail"].splitlines()[0][:200] if f["detail"] else ""] for f in tests["failures"]]
        lines += ["## Tests that failed", "", *table(["", ""], rows), ""]
    if skipped := tests.get("skipped"):
        lines += ["## Why tests were skipped", "", *(f"- {reason}" for reason in skipped), ""]
    return "\n".join(lines).rstrip() + "\n"


# --- the command line -------------------------------------------------------------------------------------------------


class Unusable(Exception):  # noqa: N818 - a sentence for the user
    """Why this script cannot run here, in one line."""


def install_wheels(wheels: Path, site: Path) -> None:
    """Puts wheels into a folder of the path, whole or not at all, before what is installed; no network is used.

    Raises:
        Unusable: when there are none, or pip refuses them.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Unusable(f"--wheels {wheels}: no *.whl there")
    site.parent.mkdir(parents=True, exist_ok=True)
    new = site.with_name(f"site.{os.getpid()}.tmp")
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
        "--target",
        str(new),
    ]
    done = subprocess.run(tool("-m", "pip", "install", *options, *map(str, found)), capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(new, ignore_errors=True)
        raise Unusable(f"--wheels {wheels}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    shutil.rmtree(site, ignore_errors=True)
    os.replace(new, site)


def lower_bound(package: str) -> str:
    """The lowest version of a package that pyproject.toml allows."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return next(found[1] for text in texts if (found := re.match(rf"{package}>=([\w.]+)", text)))


def versions_below() -> list[str]:
    """Packages older than their lower bounds, in words.

    Raises:
        Unusable: when one is missing.
    """
    below = []
    for package in ("torch", "triton", "transformers"):
        try:
            found = version(package)
        except PackageNotFoundError:
            how = "choose another with PYTHON=, or bring it with --wheels"
            raise Unusable(f"{package} is not installed in {sys.executable}: {how}") from None
        bound = lower_bound(package)
        if _numbers(found) < _numbers(bound):
            below.append(f"{package} {found} is older than {bound}, the lowest version that the package is tested with")
    return below


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", text)[0].split(".")))  # type: ignore[index]


def describe(run: Run) -> dict[str, Any]:
    """Device, driver, versions and commit.

    Raises:
        Unusable: when something is missing that every section needs.
    """
    below = versions_below()
    import torch

    if not run.smoke and not torch.cuda.is_available():
        raise Unusable(f"no CUDA device here (torch {torch.__version__}): run this on a GPU, or with --smoke")
    try:
        about = suite().describe(suite().Bench(smoke=run.smoke))
    except (ImportError, AttributeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        why = "; ".join([first, *below])
        raise Unusable(f"the source tree does not import here: {why}; bring other versions with --wheels") from None
    return about | {"below_the_lowest_versions": "; ".join(below) or None}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=" ".join(NAMES)
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "gpu_first_run", metavar="DIR")
    parser.add_argument("--time-limit", type=float, default=480.0, metavar="S", help="seconds of the whole run")
    parser.add_argument("--resume", action="store_true", help="keep the sections of DIR that are done")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels that go before what is installed")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU in Triton's interpreter")
    parser.add_argument(
        "--markdown", type=Path, metavar="JSON", help="print the page of an earlier run, measure nothing"
    )
    parser.add_argument("--selfcheck", metavar="SIZE", help=argparse.SUPPRESS)  # a process of that section
    args = parser.parse_args(arguments)
    if not args.time_limit > 0:
        parser.error(f"--time-limit {args.time_limit}: expected seconds, above 0")
    return args


def read_run(path: Path, option: str) -> dict[str, Any]:
    """What an earlier run has written."""
    try:
        return read_json(path, {"about", "sections"})
    except ValueError as error:
        raise Unusable(f"{option} {path}: {error}") from error


def first_run(args: argparse.Namespace) -> int:
    """Runs what is asked for, and returns the exit status."""
    run = Run(args.output.resolve(), args.smoke)
    path = run.folder / "first_run.json"
    if run.folder.exists() and not run.folder.is_dir():
        raise Unusable(f"--output {args.output} is a file: name a new or an empty folder")
    if path.exists() and not args.resume:
        raise Unusable(f"--output {args.output} holds a run already: go on with --resume, or name another folder")
    if run.folder.exists() and not path.exists() and any(p.name != "site" for p in run.folder.iterdir()):
        raise Unusable(f"--output {args.output} holds other things: name a new or an empty folder")
    if args.wheels:
        install_wheels(args.wheels, run.folder / "site")
    sys.path[:0] = [str(run.folder / "site")]
    about = describe(run)
    if path.exists():
        run.content = read_run(path, "--resume")
        if changed := suite().changed_setup(run.content["about"], about):
            raise Unusable(f"--resume: {args.output} was measured with another setup: {'; '.join(changed)}")
        run.content["calls"] += 1
    else:
        options = {"time_limit": args.time_limit, "smoke": args.smoke}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        run.content = {"date": date, "options": options, "about": about, "calls": 1, "sections": {}}
    if about["below_the_lowest_versions"]:
        print(f"note: {about['below_the_lowest_versions']}", file=sys.stderr)
    run_all(run, [section for section in SECTIONS if section.name in args.sections], args.time_limit)
    run.save()
    text = page(run.content)
    (run.folder / "gpu.md").write_text(text)
    print(text)
    where = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    print(f"Written: {where} and gpu.md beside it, in {run.spent:.0f} s", file=sys.stderr)
    states = {run.content["sections"][name]["status"] for name in args.sections}
    if "failed" in states:
        return 1
    return 3 if states & {"out of time", "unfinished"} else 0


def _terminated(*_: Any) -> None:
    sys.exit(143)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; see the top for its exit status."""
    args = parse_arguments(arguments)
    if args.selfcheck:
        return selfcheck(Run(args.output), args.selfcheck)
    try:
        if args.markdown:
            print(page(read_run(args.markdown, "--markdown")), end="")
            return 0
        signal.signal(signal.SIGTERM, _terminated)  # what was started ends, too
        return first_run(args)
    except Unusable as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
