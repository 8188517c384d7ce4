"""Conversions between the checkpoint formats of `dcformer.formats`, streaming and atomic.

JAX checkpoints need the extra `[jax]`; reading them takes `tensorstore` alone.
"""

from ..errors import ConversionError
from .checkpoint import Checkpoint, open_checkpoint
from .convert import (
    ConversionReport,
    convert_hub_to_safetensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    write_safetensors,
)
from .verification import Comparison, compare_logits, compare_tensors

__all__ = [
    "Checkpoint",
    "Comparison",
    "ConversionError",
    "ConversionReport",
    "compare_logits",
    "compare_tensors",
    "convert_hub_to_safetensors",
    "convert_jax_to_safetensors",
    "convert_safetensors_to_jax",
    "open_checkpoint",
    "write_safetensors",
]
