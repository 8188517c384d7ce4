"""Conversions between checkpoint formats: this package's folders, the authors' PyTorch repositories, MaxText, Pax.

Needs the extra `[jax]` to write JAX checkpoints, of which reading them needs `tensorstore` only.
"""

from .checkpoint import Checkpoint, open_checkpoint
from .convert import (
    ConversionReport,
    convert_hub_to_safetensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    write_safetensors,
)
from .errors import ConversionError
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
