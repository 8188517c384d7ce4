"""Why a model folder does not load. Libraries often say what is wrong without naming the damaged file."""

import json
import os
import pickle
from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer

from .errors import CONFIG_ERRORS, raise_bug
from .hub_dcformer import stored_tensors, weight_files

# What `from_pretrained` of a configuration, a tokenizer or a model raises on folders that it cannot read.
LOADING_ERRORS = (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError, *CONFIG_ERRORS)


def damaged_file(folder: str | os.PathLike, error: Exception) -> str | None:
    """Looks for the file that explains why loading failed.

    Args:
        folder: the model's folder. Of a repository on the Hub, only weight files that were downloaded are examined.
        error: one of `LOADING_ERRORS`, raised while the folder was loaded. A bug is raised again (`errors.raise_bug`).

    Returns:
        a sentence that names the file, or None when every file can be read.
    """
    raise_bug(error)
    for file in sorted(Path(folder).glob("*.json")):
        try:
            if file.name == "tokenizer.json":
                Tokenizer.from_file(str(file))
            elif not isinstance(content := json.loads(file.read_text(encoding="utf-8")), dict):
                raise ValueError(f"it holds a {type(content).__name__}, expected an object")
        except Exception as reason:  # tokenizers raises nothing narrower
            return f"{file} is damaged ({reason}): copy or download it again."
    try:
        for weights in weight_files(folder, {"local_files_only": True}):
            for _ in stored_tensors(weights):
                pass
    except OSError as reason:
        return str(reason)
    return None


__all__ = ["LOADING_ERRORS", "damaged_file"]
