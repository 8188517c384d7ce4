"""Folders that load with `trust_remote_code=True` where this package is not installed."""

import json
import os
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from . import modeling_dcformer
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig, DHAConfig

_CONFIGS = (DCFormerConfig, DCPythiaConfig, DHAConfig)
_PREFIXES = {config.model_type: config.__name__.removesuffix("Config") for config in _CONFIGS}
_TASKS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}


def export_remote_code(path: str | os.PathLike) -> None:
    """Makes a saved model folder self-contained by adding the modeling code and `auto_map`.

    The folder then loads with `AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`, and with every
    other Auto class, on any machine with Transformers; with the torch attention implementations only. Where this
    package is installed, its own classes are used. (`register_for_auto_class()` followed by `save_pretrained`, the
    library's way, does the same for one class.)

    Args:
        path: a folder written by `save_pretrained`, of any of these model types.

    Raises:
        FileNotFoundError: when there is no `config.json`.
        ValueError: when it is not the native configuration of a DCFormer, DCPythia or DHA model.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: save a model there with save_pretrained first.")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    prefix = _PREFIXES.get(config.get("model_type"))
    if prefix is None or "hidden_size" not in config:
        raise ValueError(
            f"{config_file} has model_type={config.get('model_type')!r} and is not a configuration of this package: "
            f"expected one of {sorted(_PREFIXES)} with native keys, as save_pretrained writes them."
        )
    modeling = str(modeling_dcformer.__file__)
    for source in map(Path, [modeling, *get_relative_import_files(modeling)]):
        _replace(folder / source.name, source.read_bytes())
    config["auto_map"] = {"AutoConfig": f"configuration_dcformer.{prefix}Config"} | {
        auto_class: f"modeling_dcformer.{prefix}{task}" for auto_class, task in _TASKS.items()
    }
    _replace(config_file, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _replace(target: Path, content: bytes) -> None:
    """Writes a file completely or not at all."""
    neighbour = target.with_name(f".{target.name}.tmp")
    try:
        neighbour.write_bytes(content)
        if target.exists():
            shutil.copymode(target, neighbour)
        os.replace(neighbour, target)
    finally:
        neighbour.unlink(missing_ok=True)


__all__ = ["export_remote_code"]
