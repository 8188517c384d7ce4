"""Fixtures and small helpers for the whole suite."""

import os
from pathlib import Path

import pytest
import torch

from dcformer import DCFormerConfig

REPOSITORY = Path(__file__).resolve().parent.parent
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


def tiny_config(**overrides) -> DCFormerConfig:
    """A model small enough for float64 on a CPU, with both kinds of layers and grouped-query attention."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "max_position_embeddings": 128,
    }
    return DCFormerConfig(**(fields | overrides))


def randomise(model: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """Moves every parameter well away from its initialisation, where composition hardly does anything."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(noise.to(parameter.dtype) * (scale / max(1, parameter.shape[-1]) ** 0.5))
    return model.eval()
