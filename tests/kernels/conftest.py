"""Marks the kernel tests `gpu` where they run compiled on one, so that `-m gpu` selects them."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    for item in items:
        if COMPILED and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
