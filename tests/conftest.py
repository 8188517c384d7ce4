"""Fixtures for the whole suite."""

import os
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY

SHARED = Path(os.environ.get("DCFORMER_SHARED", REPOSITORY.parent / "shared"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def authors_file() -> Path:
    """The data set of the paper's synthetic tasks, which is not part of this repository."""
    path = SHARED / "data" / "synthetic_dataset.jsonl"
    if not path.is_file():
        pytest.skip(f"the authors' data set is not at {path}: set DCFORMER_SHARED to the folder that holds data/")
    return path


# CPython keeps frames in chunks of 16 KiB, and gives a chunk back to the system as soon as its first frame returns. A
# loop that happens to run where a chunk ends maps and unmaps memory in every call: most of a test's time went there,
# by chance. A frame with very many variables gets a chunk that has room for all that a test calls.
_VARIABLES = " = ".join(f"v{i}" for i in range(40_000))
_scope: dict = {}
exec(f"def with_room(function, arguments):\n    {_VARIABLES} = 0\n    return function(**arguments)", _scope)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    function = pyfuncitem.obj
    pyfuncitem.obj = lambda **arguments: _scope["with_room"](function, arguments)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function
