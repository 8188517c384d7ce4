"""Fixtures for the whole suite."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY
from hypothesis import settings

SHARED = Path(os.environ.get("DCFORMER_SHARED", REPOSITORY.parent / "shared"))

# The same cases in every run, so that a change fails for what it changes; `--hypothesis-profile=search` tries others.
settings.register_profile("search", settings.get_profile("default"))
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


# Most of what Python's garbage collector looks through here are modules and compiled functions: millions of objects
# that stay. It does not look while they are imported, and never again at what is alive after that, or after a file's
# tests: the library's `Trainer` asks for several collections, which took most of the time of its tests.


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


@pytest.hookimpl(trylast=True)  # when the file's fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """New memory holds NaN until something is written to it, so that a result that should not depend on it does not."""

    def poisoned(make):
        def call(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    # PyTorch keeps the list of functions that `with torch.device(...)` redirects, as they are when it is first entered.
    with torch.device("meta"):
        torch.empty(0)
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)), raising=False)


@pytest.fixture
def few_tasks(monkeypatch):
    """lm-eval reads the 14,000 files of its own tasks for every command line: here those of piqa alone."""
    index = pytest.importorskip("lm_eval.tasks._index", reason="needs the extra [eval]").TaskIndex
    build = index.build

    def build_few(paths):
        return build([path / "piqa" if path.parts[-2:] == ("lm_eval", "tasks") else path for path in paths])

    monkeypatch.setattr(index, "build", staticmethod(build_few))


@pytest.fixture(scope="session")
def authors_file() -> Path:
    """The data set of the paper's synthetic tasks, which is not part of this repository."""
    path = SHARED / "data" / "synthetic_dataset.jsonl"
    if not path.is_file():
        pytest.skip(f"the authors' data set is not at {path}: set DCFORMER_SHARED to the folder that holds data/")
    return path
