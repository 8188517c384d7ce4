"""Composition of heads in other people's models: `DCMHA`, a module, and `convert_attention`, for whole models."""

from .dcmha import DCMHA

__all__ = ["DCMHA"]
