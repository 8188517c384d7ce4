"""What folders and repositories on the Hub hold, read before a model is loaded, and which of their files is damaged."""

import os
import pickle
import re
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from .heads_dcformer import MAP_FIELDS

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def weight_files(path: str | os.PathLike, arguments: Mapping[str, Any]) -> list[str]:
    """The weight files that Transformers would load; those of a repository on the Hub are downloaded.

    Args:
        path: a folder, or the name of a repository on the Hub.
        arguments: those of `from_pretrained`.

    Returns:
        paths; empty when there are none, which Transformers reports.

    Raises:
        OSError: when the index of a sharded checkpoint is damaged, or names a missing file.
    """
    safe, variant = arguments.get("use_safetensors"), arguments.get("variant")
    names = [] if safe is False else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    names += [] if safe else [WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    for name in names:
        if variant is not None:
            stem, _, suffix = name.rpartition(".")
            name = f"{stem}.{variant}.{suffix}"
        file = find_file(path, name, arguments)
        if file is None:
            continue
        if not file.endswith(".json"):
            return [file]
        try:
            shards, _ = get_checkpoint_shard_files(path, file, **hub_arguments(arguments))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"{file} is damaged ({error!r}): copy or download it again.") from error
        for shard in shards:
            if not os.path.isfile(shard):
                raise OSError(f"{shard} does not exist, but {file} names it: copy or download it.")
        return shards
    return []


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say how files are fetched (`HUB_ARGUMENTS`), without None."""
    return {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}


def find_file(path: str | os.PathLike, name: str, arguments: Mapping[str, Any]) -> str | None:
    """A file of a folder or repository; None if it does not exist or cannot be downloaded."""
    try:
        return cached_file(path, name, **hub_arguments(arguments))
    except OSError:
        return None


def stored_tensors(file: str) -> Iterator[tuple[str, tuple[int, ...], Callable[[], torch.Tensor]]]:
    """The tensors of a weight file: name, shape, and a function that reads it.

    Args:
        file: `.safetensors`, or a file of `torch.save`. Code in it is never run.

    Raises:
        OSError: when the file is damaged or holds anything but dense tensors, naming it.
    """
    if file.endswith(".safetensors"):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dict
                    yield name, tuple(opened.get_slice(name).get_shape()), partial(opened.get_tensor, name)
        except SafetensorError as error:
            raise OSError(f"{file} is damaged or truncated ({error}): copy or download it again.") from error
        return
    try:
        # files of PyTorch before 1.6 are not zip archives and cannot be mapped into memory
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)|function (\S+)", str(error))
        if code:
            raise OSError(
                f"{file} holds more than tensors: it would run {code.group(1) or code.group(2)} when unpickled, so it "
                "is not loaded. Get the weight file from a source that you trust, best as safetensors."
            ) from error
        raise OSError(
            f"{file} is damaged, or no file of torch.save (a Git LFS pointer, for example): copy or download it again."
        ) from error
    except Exception as error:  # a damaged pickle fails in any way
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise OSError(f"{file} is damaged or truncated ({reason}): copy or download it again.") from error
    if not isinstance(tensors, dict):
        raise OSError(
            f"{file} holds a {type(tensors).__name__} where names and tensors were expected: is it a checkpoint?"
        )
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            if tensor.layout != torch.strided:
                raise OSError(f"{file} holds {name} as a sparse tensor: store it with to_dense() first.")
            yield name, tuple(tensor.shape), partial(torch.Tensor.detach, tensor)


def damaged_weights(path: str | os.PathLike, arguments: Mapping[str, Any]) -> OSError | None:
    """Looks for the weight file that explains why loading failed.

    Args:
        path: a folder, or the name of a repository on the Hub, of which only files that were downloaded are examined.
        arguments: those of `from_pretrained`.

    Returns:
        an error that names the file, or None when every one can be read.
    """
    try:
        for file in weight_files(path, {**arguments, "local_files_only": True, "force_download": None}):
            for _ in stored_tensors(file):
                pass
    except OSError as error:
        return error
    return None


@contextmanager
def naming_damage(
    path: str | os.PathLike | None, arguments: Mapping[str, Any], error_class: type[Exception] = OSError
) -> Iterator[None]:
    """Surrounds the library's `from_pretrained`, which does not say in which of the weight files there is damage.

    Args:
        path, arguments: those of the call.
        error_class: of the error that does.

    Raises:
        Exception: of that class, when a weight file is damaged, naming it.
    """
    try:
        yield
    except ImportError:  # a library is missing, such as one whose quantized tensors a file holds
        raise
    except Exception as error:  # what the library raises on damaged files, and on other occasions, is of many classes
        if type(error) is ValueError and not _raised_by_torch(error):  # arguments are wrong
            raise
        if path is not None and (damaged := damaged_weights(path, arguments)) is not None:
            raise (damaged if isinstance(damaged, error_class) else error_class(str(damaged))) from error
        raise


def _raised_by_torch(error: BaseException) -> bool:
    """Whether an error comes from within torch, as of a file that it cannot read, and not from who calls it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("torch.")


def stored_config(config_class: Any, path: str | os.PathLike, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a stored configuration.

    Args:
        config_class: the class of configurations that asks.
        path: a folder or file, or the name of a repository on the Hub.
        arguments: those of `from_pretrained`.

    Returns:
        fields and values; nothing where there is no configuration or none that can be read. Transformers reports it
        then, or finds it elsewhere (an adapter's base model).
    """
    try:
        stored, _ = config_class.get_config_dict(path, **hub_arguments(arguments))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def refuse_head_system(model_class: type[PreTrainedModel], source: Any, stored: Mapping[str, Any]) -> None:
    """Refuses a checkpoint with a head system, for a class without one.

    Args:
        model_class: of the model to load.
        source: of its configuration, for the message.
        stored: the content of that.

    Raises:
        ValueError: naming the system.
    """
    if "head_system" in stored and not hasattr(model_class.config_class, "head_system"):
        raise ValueError(
            f"{source} is a checkpoint with head_system={stored['head_system']!r}, which {model_class.__name__} does "
            "not have: load it with an Auto class of Transformers, or a class of dcformer.head_systems."
        )


def check_stored_heads(
    model_class: type[PreTrainedModel], path: str | os.PathLike | None, arguments: dict[str, Any]
) -> None:
    """Refuses a call that asks for other `head_embeddings` or numbers of heads than a checkpoint has, or gives a
    configuration without its head system.

    Args:
        model_class: of the model to load.
        path: a folder, the name of a repository on the Hub, or None.
        arguments: those of `from_pretrained`.

    Raises:
        ValueError: naming both values.
    """
    if path is None or arguments.get("ignore_mismatched_sizes"):
        return
    config, fields = arguments.get("config"), ("head_embeddings", *MAP_FIELDS)
    wanted = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    is_folder = bool(wanted) and os.path.isdir(path)  # read without asking the Hub
    wanted |= {name: arguments[name] for name in fields if name in arguments}
    is_asked = any(wanted.values()) or any(name in arguments for name in fields)
    if not (is_asked or is_folder or getattr(config, "num_attention_heads", 0) == 1):
        return  # where heads differ, shapes do, and Transformers says so
    stored = stored_config(model_class.config_class, path, arguments)
    refuse_head_system(model_class, path, stored)
    for name in wanted if stored else ():
        own = stored.get(name)
        if name == "head_embeddings" and own != wanted[name]:
            raise ValueError(
                f"head_embeddings={wanted[name]!r} does not fit {path}, which was trained with {own!r}: such a model "
                "is trained from scratch, and no other becomes one by loading. Leave head_embeddings to the "
                "checkpoint's configuration."
            )
        here, there = _mapped_heads(wanted[name]), _mapped_heads(own)
        if here and there:  # a model may have fewer layers
            number = min(len(here), len(there))
            here, there = here[:number], there[:number]
        if name in MAP_FIELDS and here != there:
            raise ValueError(
                f"{name} gives the layers {here or 'the usual'} heads, but the parameters in {path} are of "
                f"{there or 'the usual'} heads. Leave {' and '.join(MAP_FIELDS)} to the checkpoint's configuration."
            )


def _mapped_heads(rows: Any) -> list[int] | None:
    """How many heads each layer's row of a head map reads; None without a map, and where others refuse it."""
    try:
        return [max(row) + 1 for row in rows]
    except (TypeError, ValueError):
        return None


__all__ = [
    "HUB_ARGUMENTS",
    "check_stored_heads",
    "damaged_weights",
    "find_file",
    "hub_arguments",
    "naming_damage",
    "refuse_head_system",
    "stored_config",
    "stored_tensors",
    "weight_files",
]
