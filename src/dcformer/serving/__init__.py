"""``dcformer-serve``: ``transformers serve`` with DCFormer known to it, and bad requests refused. Extra ``[serve]``."""

from .server import main

__all__ = ["main"]
