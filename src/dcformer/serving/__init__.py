"""``dcformer-serve``: ``transformers serve`` with DCFormer registered, bad requests refused. Extra ``[serve]``."""

from .server import main

__all__ = ["main"]
