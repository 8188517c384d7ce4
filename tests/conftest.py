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
def shared() -> Path:
    """The folder of reference checkpoints and data; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no reference fixtures here: set DCFORMER_SHARED to the folder that holds fixtures/ and data/")
    return SHARED
