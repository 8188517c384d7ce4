"""Why a model does not load: libraries often name neither the damaged file nor the device that is not there."""

import copy
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from .configuration_dcformer import DCFormerConfig
from .errors import CONFIG_ERRORS, DCFormerError, first_line, raise_bug
from .stored_dcformer import damaged_weights, stored_tensors, weight_files

# What `from_pretrained` of a configuration, a tokenizer or a model raises on folders that it cannot read.
LOADING_ERRORS = (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError, *CONFIG_ERRORS)
OPERATORS = "operators.safetensors"  # of a folder that `dcformer-dha fuse` wrote: the trained mixtures of heads


def damaged_file(folder: str | os.PathLike, error: Exception) -> str | None:
    """Looks for the file that explains why loading failed.

    Args:
        folder: the model's folder. Of a repository on the Hub, only weight files that were downloaded are examined.
        error: one of `LOADING_ERRORS`, raised while the folder was loaded. A bug is raised again (`errors.raise_bug`).

    Returns:
        a sentence that names the file, or None when every file can be read.
    """
    raise_bug(error)
    if os.path.isfile(Path(folder, "adapter_config.json")) and not os.path.isfile(Path(folder, "config.json")):
        return (
            f"{folder} holds a PEFT adapter and no model: load it, merge it by merge_and_unload(), and save that model "
            "with its tokenizer."
        )
    for file in sorted(Path(folder).glob("*.json")):
        try:
            if file.name == "tokenizer.json":
                Tokenizer.from_file(str(file))
            elif not isinstance(content := json.loads(file.read_text(encoding="utf-8")), dict):
                raise ValueError(f"it holds a {type(content).__name__}, expected an object")
        except Exception as reason:  # tokenizers raises nothing narrower
            return f"{file} is damaged ({reason}): copy or download it again."
    damaged = damaged_weights(folder, {})
    return None if damaged is None else str(damaged)


def check_parameters(source: str | os.PathLike, config: Any, arguments: Mapping[str, Any] | None = None) -> None:
    """Refuses a causal language model of this package whose files lack parameters: loaded, they would be random.

    Args:
        source: its folder, or its name on the Hub. Those of a hub folder are checked when they are loaded.
        config: its configuration. Other models are not looked at.
        arguments: those of `from_pretrained` that say where its files are, such as `revision`.

    Raises:
        DCFormerError: naming the first ones that are missing.
        OSError: when a file is damaged.
    """
    if not isinstance(config, DCFormerConfig) or config.undecided_fields is not None:
        return
    files = weight_files(source, arguments or {})
    stored = {name for file in files for name, *_ in stored_tensors(file)}
    if not files or "tok_embeddings.weight" in stored:
        return
    stored |= {f"model.{name}" for name in stored}  # of a decoder without its head
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(parameter_names(config) - stored - tied):
        more = f" and {len(missing) - 3} more parameters" if missing[3:] else ""
        raise DCFormerError(
            f"{os.fspath(source)} lacks {', '.join(missing[:3])}{more}: expected those of a causal language model."
        )


def refuse_mixtures(source: str | os.PathLike, arguments: Mapping[str, Any] | None = None) -> None:
    """Refuses a folder that `dcformer-dha fuse` wrote: loaded as a model, it would lack its mixtures of heads.

    Args:
        source: the folder. A name on the Hub is not looked at.
        arguments: those of `from_pretrained`, of which `subfolder` counts.

    Raises:
        DCFormerError: when there are such mixtures.
    """
    if Path(source, (arguments or {}).get("subfolder") or "", OPERATORS).exists():
        raise unfolded(os.fspath(source))


def unfolded(where: str) -> DCFormerError:
    """The error for a model that has been fused and not folded, `where` it is."""
    return DCFormerError(
        f"{where} has trained mixtures of heads, which would be left out here: fold it first, by FusedModel.fold() or "
        "dcformer-dha fold without --plan."
    )


def parameter_names(config: Any) -> set[str]:
    """The names of a causal language model's parameters, by its configuration."""
    with torch.device("meta"):
        return {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}


def refuse_other_parameters(model: Any, model_class: Any) -> None:
    """Refuses a model that is not just what a class makes of its configuration: who reads its parameters by their names
    would lose the rest.

    Args:
        model: a model.
        model_class: whose parameters are read.

    Raises:
        ValueError: naming the first parameters or buffers that differ, as those of adapters or parametrizations, or a
            module of another class, or the model's class where that has a `forward` of its own. Hooks are not looked
            at: those that change something are not told from those of FSDP, offloading or profilers.
    """
    with torch.device("meta"):
        expected = model_class(copy.deepcopy(model.config))
    wanted, found = set(expected.state_dict()), set(model.state_dict())
    if other := sorted(found - wanted) or sorted(wanted - found):
        more = f" and {len(other) - 3} more" if other[3:] else ""
        verb = "has" if found - wanted else "lacks"
        raise ValueError(
            f"the model ({type(model).__name__}) {verb} {', '.join(other[:3])}{more}, unlike a {model_class.__name__} "
            "of its configuration. Merge adapters (merge_and_unload of a PeftModel), remove parametrizations, and "
            "compile layers afterwards; what a subclass has of its own cannot be kept."
        )
    if type(model).forward is not model_class.forward:
        raise ValueError(
            f"{type(model).__name__} has a forward of its own, and not that of {model_class.__name__}: what it does "
            "cannot be kept."
        )
    modules = dict(model.named_modules(remove_duplicate=False))  # modules may share one, as of an activation
    for path, module in expected.named_modules():
        own = type(modules.get(path))
        if own.__name__.startswith("FSDP"):  # fully_shard makes a class of FSDPModule and the module's own
            own = own.__bases__[-1]
        if path and own is not type(module):
            what = f"a {own.__module__}.{own.__name__}" if path in modules else "not a module"
            raise ValueError(
                f"{path!r} of the model is {what}, and not the {type(module).__name__} that its configuration makes: "
                "what something else does cannot be kept. A configuration that was changed since has to be set back."
            )


def named_device(name: str, otherwise: str = "--device cpu") -> torch.device:
    """The device that a command line's `--device` names, with its index where it is a CUDA device.

    Args:
        name: as given.
        otherwise: what to use where there is no CUDA device, for the message.

    Raises:
        DCFormerError: when PyTorch knows no such device, or this machine lacks it.
    """
    try:
        device = torch.device(int(name) if name.isdigit() else name)  # a number is one of the accelerators
    except RuntimeError as error:
        raise DCFormerError(f"--device {name!r}: {first_line(error)}") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise DCFormerError(f"--device {name!r}: this PyTorch finds no CUDA device. Use {otherwise}.")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DCFormerError(f"--device {name!r}: this machine has {count} CUDA devices. Use an index below {count}.")
    return torch.device("cuda", index)


__all__ = [
    "LOADING_ERRORS",
    "OPERATORS",
    "check_parameters",
    "damaged_file",
    "named_device",
    "parameter_names",
    "refuse_mixtures",
    "refuse_other_parameters",
    "unfolded",
]
