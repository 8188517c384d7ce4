"""Marks the kernel tests `gpu` where they run compiled on one, so that `-m gpu` selects them.

KERNEL_TESTS_TILES=gpu takes the tiles of a GPU (sm_90) in the interpreter, too, instead of small ones: what a test
assumes about tiles shows before there is a GPU.
"""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent
# Yardsticks are exact products in float32, which this variable of some containers would make those of TF32.
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture(scope="session", autouse=os.environ.get("KERNEL_TESTS_TILES") == "gpu")
def gpu_tiles():
    from dcformer.kernels import launch, tuning

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
        patch.setattr(launch, "INTERPRETED", SimpleNamespace(value=False))  # into how many parts keys go
        yield


@pytest.fixture(scope="session", autouse=not COMPILED)
def language_patched_once():
    """Has Triton's interpreter replace its language once, not at each call of a function: half of a test's time."""
    from triton.runtime import interpreter

    patch_language, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        names = {value.__name__ for value in function.__globals__.values() if inspect.ismodule(value)}
        languages = frozenset(names & {"triton.language", "triton.language.core"})
        if languages not in scopes:
            scopes[languages] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    """No pass is repeated that another test has written down, as tests look at what passes call."""
    from dcformer.kernels import passes

    monkeypatch.setattr(passes, "_recorded", {})


def call_with_room(function, arguments):
    """Calls a function where Python need not map memory for the frames of what it calls.

    CPython keeps frames in pieces of 16 KiB, each mapped when calls get there and unmapped when they return. At some
    depths the interpreter crosses the end of one a million times in a test, half of its time. A frame that is too large
    for such a piece gets one of the next power of two, here 1 MiB, whose rest serves all the calls from it.
    """
    return function(**arguments)


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=80_000)  # of 8 bytes


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    function = pyfuncitem.obj
    pyfuncitem.obj = lambda **arguments: call_with_room(function, arguments)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    for item in items:
        if COMPILED and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
