"""Fixtures of the synthetic-task tests."""

import os
from pathlib import Path

import pytest

from dcformer.synthetic import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def authors_file() -> Path:
    """The authors' data set, where it lies: ``$DCFORMER_SHARED`` or ``../shared`` beside the repository."""
    shared = Path(os.environ.get("DCFORMER_SHARED") or Path(__file__).resolve().parents[2].parent / "shared")
    path = shared / "data" / "synthetic_dataset.jsonl"
    if not path.is_file():
        pytest.skip(f"the authors' data set is not at {path}: set DCFORMER_SHARED to the folder that has data/")
    return path
