"""Converted models in files: whole folders, and the composition alone."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..errors import DCFormerError
from ..files import whole_file
from ..loading import refuse_mixtures
from ..shards import gathered, is_sharded, refuse_shards
from ..stored_dcformer import naming_damage
from .convert import all_settings, attach, convert_attention
from .dcmha import make_generators
from .finding import SUBMODULES, find_attention
from .interface import IMPLEMENTATIONS

_HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
_COMPILED = "_orig_mod."  # what torch.compile puts before the names of parameters
_PART = (
    "Load the model with from_pretrained, and then load_compose(model.PART, FILE), of a file that "
    "save_compose(model.PART, FILE) has written."
)
_NOT_OF_CONFIG = ("attn_implementation", "dtype", "torch_dtype")  # options that would change a configuration


def is_converted(config: Any) -> bool:
    """Whether a configuration is that of a model that `convert_attention` has changed, or a part of it."""
    return getattr(config, "dcmha", None) is not None or bool(_converted_parts(config))


def generates_without_cache(config: Any) -> bool:
    """Whether a model of this configuration has to generate with `use_cache=False`.

    So has one that was converted with `compose_key=True`: key-wise composition weights of self-attention are in no
    cache. With "uncached", or in cross-attention, they need none.
    """
    for part in (config, config.get_text_config(decoder=True)):
        if (settings := getattr(part, "dcmha", None)) is not None:
            return settings.get("compose_key", True) is True
    return False


def _converted_parts(config: Any) -> list[str]:
    """The names of a configuration's parts, and of theirs, that are of converted models."""
    names: list[str] = []
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if getattr(part, "dcmha", None) is not None:
            names.append(name)
        elif isinstance(part, PreTrainedConfig):
            names += [f"{name}.{inner}" for inner in _converted_parts(part)]
    return names


def from_pretrained_any(source: str | os.PathLike, auto_class: Any, **kwargs: Any) -> Any:
    """`auto_class.from_pretrained` for programs that take any model: a converted one comes with its composition.

    The library's own classes leave that out, with no more than a warning. Arguments and errors are theirs, or those of
    `from_pretrained_converted` and `refuse_mixtures`.
    """
    refuse_mixtures(source, kwargs)
    hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
    try:
        config = kwargs.get("config") or AutoConfig.from_pretrained(source, **hub)
    except (OSError, ValueError):  # a GGUF file, an adapter, or what the class itself has something to say of
        return auto_class.from_pretrained(source, **kwargs)
    if not is_converted(config):
        return auto_class.from_pretrained(source, **kwargs)
    return from_pretrained_converted(source, auto_class, **{k: v for k, v in kwargs.items() if v is not None})


def from_pretrained_converted(folder: str | os.PathLike, auto_class: Any, **kwargs: Any) -> Any:
    """Loads what `save_pretrained` of a converted model has written.

    Args:
        folder: the folder, or a repository on the Hub.
        auto_class: such as `AutoModelForSequenceClassification`, or a model's class.
        kwargs: as for `from_pretrained`, fields of the configuration among them. `attn_implementation` is "dcmha" or
            "dcmha_chunked".

    Returns:
        the model, converted.

    Raises:
        DCFormerError: when `auto_class` is not a class of models, the folder's model not a converted one, or of another
            class, its weights are damaged, or tensors of its composition are missing.
    """
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    own = {name: kwargs.pop(name) for name in _NOT_OF_CONFIG if name in kwargs}
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **hub, **kwargs)
    kwargs |= hub | own
    stored = getattr(config, "dcmha", None)
    if stored is None:
        if parts := _converted_parts(config):
            raise DCFormerError(f"{folder}: only a part of the model was converted ({', '.join(parts)}). {_PART}")
        raise DCFormerError(
            f"{folder} is not a converted model: its configuration has no 'dcmha'. Use from_pretrained."
        )
    compose = _checked_settings(stored, folder)
    if (name := kwargs.setdefault("attn_implementation", "dcmha")) not in IMPLEMENTATIONS:
        raise DCFormerError(f"attn_implementation={name!r} cannot compose heads: use one of {tuple(IMPLEMENTATIONS)}.")
    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        model_class = auto_class
        if not isinstance(config, takes := model_class.config_class or object):
            raise DCFormerError(
                f"{folder} is of a {config.model_type} model ({type(config).__name__}), but {model_class.__name__} "
                f"takes a {takes.__name__}: give the class of the model that was saved, or an Auto class."
            )
    elif not hasattr(auto_class, "from_config"):
        raise DCFormerError(
            f"auto_class={auto_class!r} is not a class of models: expected an Auto class, such as "
            "transformers.AutoModelForCausalLM, or the class of the model that was saved."
        )
    else:
        with torch.device("meta"):
            model_class = type(auto_class.from_config(config, trust_remote_code=hub.get("trust_remote_code")))

    def make(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        model_class.__init__(self, *args, **options)
        attach(self, find_attention(self, compose), compose, False, [], implementation=name)

    converted: Any = type(
        model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__}
    )
    wants_info = kwargs.pop("output_loading_info", False)
    with naming_damage(folder, kwargs, DCFormerError):
        model, info = converted.from_pretrained(folder, config=config, output_loading_info=True, **kwargs)
    model.__class__ = model_class
    names = set(_names(model))
    if others := sorted(key for key in info["mismatched_keys"] if key[0] in names):  # with ignore_mismatched_sizes
        name, stored, wanted = others[0]
        raise DCFormerError(
            f"{folder} has {name} {list(stored)}, and the model {list(wanted)}: composition cannot be loaded for other "
            "sizes. Load the model as it was saved, or convert one of these sizes anew."
        )
    if missing := sorted(set(info["missing_keys"]) & names):
        raise DCFormerError(
            f"{folder} lacks {len(missing)} tensors of the composition, such as {missing[0]}. If a part of the model "
            f"was converted: {_PART[0].lower()}{_PART[1:]}"
        )
    return (model, info) if wants_info else model


def _checked_settings(stored: Any, source: str | os.PathLike) -> dict[str, Any]:
    """All settings of composition, from those that a file or folder, `source`, has as "dcmha"."""
    if not isinstance(stored, dict):
        raise DCFormerError(
            f"{source} has dcmha={stored!r}: expected settings of composition by name, as save_compose and "
            "save_pretrained of a converted model write them."
        )
    try:
        return all_settings(stored)
    except DCFormerError as error:
        raise DCFormerError(f"{source}: {error}") from error


def _names(model: nn.Module) -> list[str]:
    """The tensors of a converted model's composition, by their names in it, compiled or not."""
    if not isinstance(model, nn.Module):
        raise DCFormerError(f"model is of type {type(model).__name__}: expected a model of Transformers.")
    return [
        f"{path}.{name}.{tensor}".replace(_COMPILED, "")
        for path, module in model.named_modules()
        if hasattr(module, "compose_call")
        for name in SUBMODULES
        if hasattr(module, name)
        for tensor in module.get_submodule(name).state_dict()
    ]


def _settings_of(model: nn.Module) -> dict[str, Any] | None:
    """What `convert_attention` left in a model's configuration; None where it was not called with this model."""
    return getattr(getattr(model, "config", None), "dcmha", None)


def save_compose(model: PreTrainedModel, path: str | os.PathLike) -> None:
    """Writes only the composition of a converted model, 1-3 % of its parameters, with its settings.

    Args:
        model: a converted model. One that FSDP2 has sharded is saved by the first process; all must call this.
        path: the file, in safetensors format and in a folder that exists.

    Raises:
        DCFormerError: when the model is not converted, its composition is offloaded or in the hands of PEFT, or `path`
            is not a place for a file.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT's
    names, settings = _names(model), _settings_of(model)
    if not names or settings is None:
        raise DCFormerError(
            f"{type(model).__name__} is not converted: call convert_attention first. If a part of it is, give that one."
        )
    if any(part in name for name in names for part in (".modules_to_save.", ".base_layer.", ".lora_")):
        raise DCFormerError("the composition is PEFT's to save, which trains a copy of it: call its save_pretrained.")
    if changed := [name for name in names if name.endswith(("_orig", "_g", "_v")) or ".parametrizations." in name]:
        raise DCFormerError(
            f"{changed[0]}: the composition is pruned or parametrized. Make that permanent first, with "
            "torch.nn.utils.prune.remove or torch.nn.utils.parametrize.remove_parametrizations."
        )
    state = {name.replace(_COMPILED, ""): tensor for name, tensor in model.state_dict().items()}
    if offloaded := [name for name in names if state[name].is_meta]:
        raise DCFormerError(f"{offloaded[0]} is offloaded: load the model without offloading to save its composition.")
    tensors = {name: gathered(state[name]) for name in names}
    if is_sharded(model) and torch.distributed.get_rank():
        return
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        what = "is a folder" if Path(path).is_dir() else "is in a folder that does not exist"
        raise DCFormerError(f"{path} {what}: give the path of a file, in a folder that exists.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as unfinished:
        save_file(tensors, unfinished, {"format": "pt", "dcmha": json.dumps(settings)})


def load_compose(model: PreTrainedModel, path: str | os.PathLike) -> PreTrainedModel:
    """Puts a composition that `save_compose` wrote into a model, which is converted if it is not yet.

    Args:
        model: of the architecture and sizes of the one that was saved. One with offloaded or quantized projections is
            converted before, with `device` and `dtype`. One for FSDP2 is sharded afterwards.
        path: the file.

    Returns:
        `model`.

    Raises:
        DCFormerError: when the file is none, or does not fit, or the model is in shards. It is then unchanged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            settings = (file.metadata() or {}).get("dcmha")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a mapping
    except (OSError, SafetensorError) as error:
        raise DCFormerError(f"{path} cannot be read: {error}") from error
    if settings is None:
        raise DCFormerError(f"{path} is not a composition: save_compose writes one.")
    try:
        compose = _checked_settings(json.loads(settings), path)
    except json.JSONDecodeError as error:
        raise DCFormerError(f"{path} has settings of composition ('dcmha') that are not JSON: {error}") from error
    names = _names(model)
    if names:
        of_model = _settings_of(model) or {}
        if differ := sorted(n for n in compose | of_model if compose.get(n) != of_model.get(n)):
            raise DCFormerError(f"{path} was saved with other settings than the model's: {', '.join(differ)} differ.")
        own = {name: model.get_parameter(name).shape for name in names}
        if offloaded := [name for name in names if model.get_parameter(name).is_meta]:
            raise DCFormerError(f"{offloaded[0]} is offloaded: load the model without offloading.")
        for name in names:
            refuse_shards(model.get_submodule(name.rpartition(".")[0]), "load the composition before fully_shard")
    else:
        with torch.device("meta"):
            own = {
                f"{one.call.path}.{name}.{tensor}": parameter.shape
                for one in find_attention(model, all_settings(compose))
                for name, of_one in one.settings.items()
                for tensor, parameter in make_generators(of_one, zero_init=True).named_parameters()
            }
    if odd := sorted(set(own) ^ set(tensors)):
        raise DCFormerError(f"{path} is of another model: {odd[0]} is in only one of them.")
    for name, shape in own.items():
        if shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)} in it and {tuple(shape)} in the model"
            raise DCFormerError(f"{path} is of a model of another size: {name} is {shapes}.")
        if not tensors[name].is_floating_point():
            raise DCFormerError(f"{path} is damaged: {name} is {tensors[name].dtype} in it, expected floating point.")
    if not names:
        convert_attention(model, allow_partial=True, **compose)  # as it was when it was saved
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(name).copy_(tensor)
    return model


__all__ = ["from_pretrained_converted", "load_compose", "save_compose"]
