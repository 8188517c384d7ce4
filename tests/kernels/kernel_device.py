"""The device of the kernel tests; importing this skips a test module where the kernels cannot run at all.

Compiled, on "cuda", where there is a GPU; on "cpu" in Triton's interpreter, if TRITON_INTERPRET=1 asks for it.
"""

import importlib
import os
import sys
from types import ModuleType

import pytest
import torch
from helpers import REPOSITORY

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")
INTERPRETED: bool = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
HERE = torch.device(DEVICE, None if INTERPRETED else 0)  # as tensors have it
GPU_TILES = os.environ.get("KERNEL_TESTS_TILES") == "gpu"  # see `conftest`
SMALL_TILES = INTERPRETED and not GPU_TILES


def load_gpu_suite() -> ModuleType:
    """benchmarks/gpu_suite.py as a module: its checks are tests too."""
    folder = str(REPOSITORY / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("gpu_suite")
