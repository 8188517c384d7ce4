"""Composition of heads in other people's models: `DCMHA`, a module, and `convert_attention`, for whole models."""

from .convert import convert_attention
from .dcmha import DCMHA
from .interface import generate_without_cache
from .saving import from_pretrained_converted, load_compose, save_compose

__all__ = [
    "DCMHA",
    "convert_attention",
    "from_pretrained_converted",
    "generate_without_cache",
    "load_compose",
    "save_compose",
]
