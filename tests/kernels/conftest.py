"""Marks the kernel tests `gpu` where they run compiled on one, so that `-m gpu` selects them.

KERNEL_TESTS_TILES=gpu takes the tiles of a GPU (sm_90) in the interpreter, too, instead of small ones: what a test
assumes about tiles shows before there is a GPU. KERNEL_TESTS_ACCESSES=1 looks at all that kernels read and write in
the interpreter: a test fails where one is wrong (`accesses`).
"""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
pytest.register_assert_rewrite("attention_cases")
# Yardsticks are exact products in float32, which this variable of some containers would make those of TF32.
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = torch.cuda.is_available() and not INTERPRETED


@pytest.fixture(scope="session", autouse=os.environ.get("KERNEL_TESTS_TILES") == "gpu")
def gpu_tiles():
    from dcformer.kernels import launch, tuning

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
        patch.setattr(launch, "INTERPRETED", SimpleNamespace(value=False))  # into how many parts keys go
        yield


@pytest.fixture(scope="session", autouse=INTERPRETED)
def quick_interpreter():
    """Triton's interpreter without what it does again and again: three quarters of a test's time."""
    from triton.runtime import interpreter

    patch_language, scopes, by_function = interpreter._patch_lang, {}, {}

    def patch_once(function):
        """The language is replaced once for each set of modules that a function knows, not at each of its calls."""
        if function not in by_function:
            names = {value.__name__ for value in function.__globals__.values() if inspect.ismodule(value)}
            by_function[function] = languages = frozenset(names & {"triton.language", "triton.language.core"})
            if languages not in scopes:
                scopes[languages] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", _NumpyTypes(interpreter._get_np_dtype))
        patch.setattr(interpreter.TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


class _NumpyTypes(dict):
    """NumPy's dtype of one of Triton's, by name; of a block, that of its elements."""

    def __init__(self, function):
        self.function = function

    def __call__(self, dtype):
        one = dtype.element_ty if dtype.is_block() else dtype
        found = self.get(one.name)
        if found is None:
            found = self[one.name] = self.function(one)
        return found


def _check_overflow(semantic, left, right, operation):
    """Whole numbers that wrap around are an error, in lanes that are masked off later, too.

    Triton's interpreter computes whether they do, and never looks.
    """
    numbers = [operand.handle.data for operand in (left, right)]
    if numbers[0].dtype.itemsize >= 8 or numbers[0].dtype == bool or not all(x.size for x in numbers):
        return
    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
    found, limits = compute(*numbers, dtype=np.int64), np.iinfo(numbers[0].dtype)
    assert limits.min <= found.min() and found.max() <= limits.max, f"{operation.__name__} of whole numbers overflows"


@pytest.fixture(autouse=os.environ.get("KERNEL_TESTS_ACCESSES") == "1")
def accesses(monkeypatch):
    """Nothing is read or written outside of tensors, nor in a race: what only Triton's interpreter forgives."""
    if not INTERPRETED:
        yield None
        return
    from accesses import Accesses

    watched = Accesses(monkeypatch)
    yield watched
    assert not watched.wrong, "\n".join(sorted(watched.wrong))


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    """No pass is repeated that another test has written down, as tests look at what passes call."""
    from dcformer.kernels import passes

    monkeypatch.setattr(passes, "_recorded", {})


@pytest.fixture
def unmarked(monkeypatch):
    """As in a process that has met nothing too large for float16, and waits for every mark."""
    from dcformer.kernels import overflow

    monkeypatch.setattr(overflow, "_found", {})
    monkeypatch.setattr(overflow, "_watches", {})
    monkeypatch.setattr(overflow, "FIRST", 1000)


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
