"""Fixtures of the synthetic-task tests."""

import pytest

from dcformer.synthetic import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()
