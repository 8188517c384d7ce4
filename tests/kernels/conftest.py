"""Marks the kernel tests `gpu` where they run compiled on one, so that `-m gpu` selects them.

KERNEL_TESTS_TILES=gpu takes the tiles of a GPU (sm_90) in the interpreter, too, instead of small ones: what a test
assumes about tiles shows before there is a GPU.
"""

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


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    for item in items:
        if COMPILED and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
