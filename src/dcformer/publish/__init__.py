"""Folders for the Hub with a model card: ``python -m dcformer.publish MODEL OUT``."""

from .card import Score, model_card, read_results
from .folder import HubFolderError, main, write_hub_folder

__all__ = ["HubFolderError", "Score", "main", "model_card", "read_results", "write_hub_folder"]
