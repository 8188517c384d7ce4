"""A pytest plugin for `gpu_first_run.py`: a line of JSON for each test when it is done, as a run may be cut short.

FIRST_RUN_LOG names the file; tests that are in it already are not run again. Each line has `test`, `outcome`,
`seconds`, `detail` (of what failed or was skipped) and `scores`: how many scores the kernels had in 16 bits, how many
of them were beyond what float16 holds, and the largest. All pairs of a query and a key count, also those that are not
seen; tests of peak memory are left alone, and those that go beyond on purpose. The tests of test_gpu.py, which need
much memory, go to few processes.
"""

import json
import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60000.0  # of a score times log2(e): `dcformer.kernels.overflow.LARGEST`
_NOT_COUNTED = ("test_memory", "test_scores_", "test_matrices_beyond_float16")
PROCESSES = 3  # that run tests which need much memory, with pytest-xdist
_ELEMENTS = 1 << 22  # of scores held at once
_counts = {"counted": 0, "clamped": 0, "largest": 0.0}
_is_counting = False
_is_worker = False  # of pytest-xdist


def count_clamped(query: Any, key: Any, scale: float) -> dict[str, float]:
    """Scores that float16 cannot hold, as the kernels keep them: times log2(e).

    Args:
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        scale: factor of the scores.

    Returns:
        `counted`: scores; `clamped`: how many are beyond `LIMIT`; `largest`: the largest, without sign.
    """
    import math

    import torch

    found = {"counted": 0, "clamped": 0, "largest": 0.0}
    rows = max(1, _ELEMENTS // max(1, key.shape[2]))
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            keys = key[b, h * key.shape[1] // query.shape[1]].float()  # [S, D]
            for part in query[b, h].float().split(rows):
                scores = (part @ keys.T).abs() * (abs(scale) * math.log2(math.e))  # [rows, S]
                if scores.numel():
                    found["counted"] += scores.numel()
                    found["clamped"] += int((scores > LIMIT).sum())
                    finite = torch.nan_to_num(scores, nan=0.0)
                    found["largest"] = max(found["largest"], float(finite.max()))
    return found


def _watch(passes: Any) -> None:
    """Counts in every call of the kernels of attention in 16 bits."""
    import torch

    forward = passes.Passes.forward

    def counted(problem: Any) -> Any:
        is_low = problem.q.dtype != torch.float32
        is_captured = problem.q.is_cuda and torch.cuda.is_current_stream_capturing()
        if _is_counting and is_low and not is_captured:
            found = count_clamped(problem.q.detach(), problem.k.detach(), problem.scale)
            for name in ("counted", "clamped"):
                _counts[name] += found[name]
            _counts["largest"] = max(_counts["largest"], found["largest"])
        return forward(problem)

    passes.Passes.forward = counted


def pytest_configure(config: Any) -> None:
    """Watches the kernels, where there are any: without them tests skip by themselves."""
    global _is_worker
    _is_worker = hasattr(config, "workerinput")
    log = Path(os.environ["FIRST_RUN_LOG"])
    if log.exists() and not log.read_bytes().endswith(b"\n"):  # a line was cut off
        with log.open("a") as file:
            file.write("\n")
    try:
        from dcformer.kernels import passes
    except ImportError:
        return
    _watch(passes)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out what has been run, and puts tests that need much memory into few processes.

    Files take turns, as a run may be cut short, and tests of each shall have been run by then.
    """
    done = {line["test"] for line in read(Path(os.environ["FIRST_RUN_LOG"]))}
    known = [item for item in items if item.nodeid in done]
    left: dict[str, list[Any]] = {}
    for item in items:
        if item.nodeid not in done:
            left.setdefault(item.path.name, []).append(item)
    items[:] = [item for turn in zip_longest(*left.values()) for item in turn if item is not None]
    config.hook.pytest_deselected(items=known)
    if config.pluginmanager.hasplugin("xdist"):
        for i, item in enumerate(items):
            if item.path.name == "test_gpu.py":
                item.add_marker(pytest.mark.xdist_group(f"memory {i % PROCESSES}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Counts during the test, and puts what was counted into its report."""
    global _is_counting
    _counts.update(counted=0, clamped=0, largest=0.0)
    _is_counting = not item.name.startswith(_NOT_COUNTED)
    try:
        return (yield)
    finally:
        _is_counting = False
        item.user_properties.append(("scores", dict(_counts)))


def pytest_runtest_logreport(report: Any) -> None:
    """Adds a test's line to the file; with pytest-xdist only the process that has all reports does."""
    if _is_worker or (report.when != "call" and report.passed):
        return
    detail = ""
    if report.skipped:
        detail = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        detail = crash.message if crash else str(report.longrepr)
    line = {"test": report.nodeid.partition("@memory")[0], "outcome": report.outcome, "seconds": report.duration}
    line |= {"detail": detail.strip()[:500], "scores": dict(report.user_properties).get("scores")}
    with Path(os.environ["FIRST_RUN_LOG"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without those that were cut off; none where there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
