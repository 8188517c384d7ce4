"""Folders that load with `trust_remote_code=True` where this package is not installed."""

import json
import os
import re
from pathlib import Path

from . import modeling_dcformer
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig, DHAConfig
from .errors import is_of_package
from .files import write_whole
from .head_systems import HeadSystemsConfig, modeling_head_systems
from .head_systems.registry import system_class

_CONFIGS = (DCFormerConfig, DCPythiaConfig, DHAConfig)
_PREFIXES = {config.model_type: config.__name__.removesuffix("Config") for config in _CONFIGS}
_TASKS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
_HEAD_SYSTEMS_TASKS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
_IMPORT = re.compile(r"^from (\.{1,2})(\w+) import", re.MULTILINE)


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
        ValueError: when it is damaged, or not the native configuration of a DCFormer, DCPythia or DHA model; when its
            head system, or the class of the saved model, is not one of this package.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: save a model there with save_pretrained first.")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_file} is damaged ({error}): save the model again.") from error
    if not isinstance(config, dict):
        found = type(config).__name__
        raise ValueError(f"{config_file} holds a {found}, expected a configuration: save the model again.")
    model_type = config.get("model_type", "")
    prefix, modeling, tasks = _PREFIXES.get(model_type), modeling_dcformer.__file__, tuple(_TASKS)
    if model_type == HeadSystemsConfig.model_type:
        prefix, modeling, tasks = "HeadSystems", modeling_head_systems.__file__, _HEAD_SYSTEMS_TASKS
        system = system_class(config.get("head_system", "plain"))
        if not is_of_package(system):
            raise ValueError(
                f"{config_file} has head_system={config['head_system']!r}, which is {system.__module__}."
                f"{system.__name__} and no part of this package: its code would not be in the folder. Whoever loads "
                "the model has to import that module first."
            )
    if prefix is None or "hidden_size" not in config:
        known = sorted([*_PREFIXES, HeadSystemsConfig.model_type])
        raise ValueError(
            f"{config_file} has model_type={model_type!r} and is not a configuration of this package: "
            f"expected one of {known} with native keys, as save_pretrained writes them."
        )
    classes = {f"{prefix}{_TASKS[task]}" for task in tasks}
    if others := sorted({name.removeprefix("FSDP") for name in config.get("architectures") or ()} - classes):
        raise ValueError(
            f"{config_file} has architectures={others}, no class of model_type={model_type!r}, whose code goes along. "
            f"Where {prefix}ForCausalLM or another of {sorted(classes)} does the same, put its name there."
        )
    entry = Path(str(modeling))
    for source in _with_imports(entry):
        flat = _IMPORT.sub(r"from .\2 import", source.read_text(encoding="utf-8"))  # all files lie in one folder there
        write_whole(folder / source.name, flat)
    configuration = entry.stem.replace("modeling", "configuration")
    config["auto_map"] = {"AutoConfig": f"{configuration}.{prefix}Config"} | {
        auto_class: f"{entry.stem}.{prefix}{_TASKS[auto_class]}" for auto_class in tasks
    }
    write_whole(config_file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _with_imports(source: Path) -> list[Path]:
    """A file of the package and those that it imports by relative names, directly or not."""
    found = [source]
    for file in found:  # grows meanwhile
        for dots, name in _IMPORT.findall(file.read_text(encoding="utf-8")):
            other = file.parents[len(dots) - 1] / f"{name}.py"
            if other not in found:
                found.append(other)
    return found


__all__ = ["export_remote_code"]
