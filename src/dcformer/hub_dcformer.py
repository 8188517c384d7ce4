"""Direct loading of the hub format: the authors' PyTorch repositories (DCFormer-2.8B, DCPythia-6.9B).

Transformers converts the tensors while it loads, by the table in `layouts_dcformer`. This module adds what it cannot
know: before loading, the configuration fields that only the tensors determine; after loading, the tokenizer's ids
of beginning and end of text. Native folders do not pass through here.
"""

import copy
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import mode
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)
from transformers.utils.hub import get_checkpoint_shard_files

from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .heads_dcformer import MAP_FIELDS
from .layouts_dcformer import (
    HUB_IGNORED,
    HUB_STATIC,
    STORED_GENERATORS,
    TensorLayout,
    foreign_shape,
    from_native,
    hub_layouts,
    to_native,
)
from .legacy_dcformer import is_hub_config

logger = logging.get_logger(__name__)

# --- names and shapes: what Transformers does while it loads ----------------------------------------------------------


class HubToNative(ConversionOps):
    """Converts one tensor of the hub format to the corresponding native tensors."""

    def __init__(self, layout: TensorLayout):
        self.layout = layout

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        config: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Called by Transformers with one tensor of one layer.

        Args:
            input_dict: the tensor, by source pattern.
            source_patterns, target_patterns: of the converter; unused.
            full_layer_name: name in the model of the first native tensor.
            config: the model's.

        Returns:
            native names -> tensors, each contiguous and in its own memory.

        Raises:
            ValueError: when the tensor has another shape.
        """
        (tensor,) = (_single(stored) for stored in input_dict.values())
        generators = stored_generators(self.layout, tensor.shape, config)
        if generators is None:
            layer = re.search(r"layers\.(\d+)\.", full_layer_name)
            name = self.layout.foreign.replace("{i}", layer.group(1) if layer else "?")
            raise ValueError(
                f"{name} with shape {tuple(tensor.shape)}, the configuration asks for "
                f"{foreign_shape(self.layout, config)}"
            )
        own_tails = [name.partition("{i}.")[2] for name, _ in self.layout.natives]
        prefix = full_layer_name.removesuffix(own_tails[0])
        natives = to_native(self.layout, tensor, config, generators)
        if len(natives) > 1:  # as views they would keep the whole tensor in memory
            natives = [native.clone() for native in natives]
        return {prefix + tail: native.contiguous() for tail, native in zip(own_tails, natives, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The conversion of `save_pretrained(..., save_original_format=True)`."""
        return NativeToHub(self.layout)


class NativeToHub(ConversionOps):
    """Converts native tensors to the hub format's tensor that they make up."""

    def __init__(self, layout: TensorLayout):
        self.layout = layout

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        config: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Called by Transformers with all native tensors of one stored tensor; the inverse of `HubToNative`."""
        tensors = [_single(input_dict[pattern]) for pattern in source_patterns]
        return {full_layer_name: from_native(self.layout, tensors, config).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        """The conversion of loading."""
        return HubToNative(self.layout)


def _single(tensors: Any) -> torch.Tensor:
    """The tensor of a list of one, in which Transformers collects tensors."""
    return tensors[0] if isinstance(tensors, list) else tensors


def hub_conversions(mlp_type: str) -> list[WeightRenaming | WeightConverter]:
    """The hub format's names and the conversions of its tensors, in the form that Transformers expects.

    Args:
        mlp_type: "gated" or "plain", as in the configuration.
    """
    conversions: list[WeightRenaming | WeightConverter] = []
    for layout in hub_layouts(mlp_type):
        # The end of a name is matched by a look-ahead, which Transformers removes when it saves. Otherwise bitsandbytes
        # would take the target of a name that ends in ".weight" for a regular expression, where \1 fails.
        source = "^" + re.escape(layout.foreign).replace(r"\{i\}", r"(\d+)") + "(?!.)"
        targets = [name.replace("{i}", r"\1") for name, _ in layout.natives]
        if [dims for _, dims in layout.natives] == [layout.foreign_dims]:
            conversions.append(WeightRenaming(source, targets))
        else:
            conversions.append(WeightConverter(source, targets, [HubToNative(layout)]))
    return conversions


@cache
def register_hub_conversions() -> None:
    """Makes Transformers convert tensors of the hub format whenever it loads a model of these types.

    Called when the first model is created. Transformers then prepares the conversions of all its models, which takes as
    long as importing this package; it does so anyway when it loads a model.
    """
    for config_class in (DCFormerConfig, DCPythiaConfig):
        register_checkpoint_conversion_mapping(
            config_class.model_type, hub_conversions(config_class.mlp_type), overwrite=True
        )


# Identity matrices under the names of static projections are given names that Transformers ignores.
_IDENTITY_BUFFERS = {
    rf"^layers\.(\d+)\.attention\.dyn_w_proj\.{stage}_proj\.w": rf"layers.\1.attention.dyn_w_proj.{stage}_identity"
    for stage in ("pre", "post")
}
IGNORED_ON_LOAD = [
    rf"^{HUB_IGNORED.pattern}$",
    r"^layers\.\d+\.attention\.dyn_w_proj\.(pre|post)_identity$",
]


def stored_generators(layout: TensorLayout, shape: Iterable[int], config: DCFormerConfig) -> int | None:
    """How many weight generators a stored tensor holds: all four, or those in use.

    Args:
        layout: of the tensor; for one without generators the result only tells whether the shape fits.
        shape: of the stored tensor.
        config: the model's.

    Returns:
        the number, or None when the shape fits neither.
    """
    for generators in (len(STORED_GENERATORS), len(config.compose_generators)):
        if tuple(shape) == foreign_shape(layout, config, generators):
            return generators
    return None


# --- what the files hold, before they are loaded ----------------------------------------------------------------------

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_HUB_NAMED = re.compile(r"tok_embeddings\.weight|layers\.\d+\.(attention|feed_forward)\..*")


@dataclass
class StoredWeights:
    """What stored tensors reveal without being loaded.

    Attributes:
        shapes: the shape of every tensor, by name.
        has_static: whether any static projection differs from the identity.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_static: bool = False

    @classmethod
    def read(cls, tensors: Iterable[tuple[str, tuple[int, ...], Callable[[], torch.Tensor]]]) -> "StoredWeights":
        """From (name, shape, function that reads it); only static projections are read."""
        stored = cls()
        for name, shape, read in tensors:
            stored.shapes[name] = shape
            if not stored.has_static and HUB_STATIC.fullmatch(name):
                stored.has_static = not _is_identity(read())
        return stored

    @property
    def hub_named(self) -> bool:
        """Whether the names are those of the hub format."""
        return any(_HUB_NAMED.fullmatch(name) for name in self.shapes)


def _is_identity(tensor: torch.Tensor) -> bool:
    return (
        tensor.ndim > 1
        and tensor.shape[-1] == tensor.shape[-2]
        and torch.equal(tensor, torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
    )


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
        file = _find(path, name, arguments)
        if file is None:
            continue
        if not file.endswith(".json"):
            return [file]
        try:
            shards, _ = get_checkpoint_shard_files(path, file, **_hub_arguments(arguments))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"{file} is damaged ({error!r}): copy or download it again.") from error
        for shard in shards:
            if not os.path.isfile(shard):
                raise OSError(f"{shard} does not exist, but {file} names it: copy or download it.")
        return shards
    return []


def _hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _HUB_ARGUMENTS if arguments.get(name) is not None}


def _find(path: str | os.PathLike, name: str, arguments: Mapping[str, Any]) -> str | None:
    """A file of a folder or repository; None if it does not exist or cannot be downloaded."""
    try:
        return cached_file(path, name, **_hub_arguments(arguments))
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
    except (EOFError, IndexError, KeyError, OSError, RuntimeError, struct.error) as error:
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


def damaged_weights(path: str | os.PathLike, arguments: Mapping[str, Any]) -> str | None:
    """Looks for the weight file that explains why loading failed.

    Args:
        path: a folder, or the name of a repository on the Hub, of which only files that were downloaded are examined.
        arguments: those of `from_pretrained`.

    Returns:
        a sentence that names the file, or None when every one can be read.
    """
    try:
        for file in weight_files(path, {**arguments, "local_files_only": True, "force_download": None}):
            for _ in stored_tensors(file):
                pass
    except OSError as error:
        return str(error)
    return None


# --- loading ----------------------------------------------------------------------------------------------------------

# What the library raises on weight files that are damaged, and on other occasions.
_DAMAGE_ERRORS = (
    SafetensorError, pickle.UnpicklingError, EOFError, IndexError, KeyError, OSError, RuntimeError, struct.error,
)  # fmt: skip


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
    except _DAMAGE_ERRORS as error:
        if path is not None and (damaged := damaged_weights(path, arguments)) is not None:
            raise error_class(damaged) from error
        raise


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
        stored, _ = config_class.get_config_dict(path, **_hub_arguments(arguments))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def check_stored_heads(
    model_class: type[PreTrainedModel], path: str | os.PathLike | None, arguments: dict[str, Any]
) -> None:
    """Refuses to load a checkpoint with other `head_embeddings`, or with head maps of other heads, than it has.

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
                f"{name} for {here or 'the usual'} heads of the layers does not fit {path}, whose parameters are of "
                f"{there or 'the usual'} heads. Leave {' and '.join(MAP_FIELDS)} to the checkpoint's configuration."
            )


def _mapped_heads(rows: Any) -> list[int] | None:
    """How many heads each layer's row of a head map reads; None without a map, and where others refuse it."""
    try:
        return [max(row) + 1 for row in rows]
    except (TypeError, ValueError):
        return None


def with_hub_config(
    model_class: type[PreTrainedModel], path: str | os.PathLike | None, arguments: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Arguments of `from_pretrained`, with the loaded configuration added if it is, or was, in the hub format; and
    whether that is so.

    Args:
        model_class: of the model to load.
        path: a folder, the name of a repository on the Hub, or None.
        arguments: those of `from_pretrained`; a configuration object among them stays unchanged.

    Raises:
        ValueError: on a checkpoint with a head system, for a class without one.
    """
    config_class: Any = model_class.config_class
    config = arguments.get("config")
    source = path if config is None else config
    if source is None or isinstance(config, PreTrainedConfig) or arguments.get("gguf_file") is not None:
        return arguments, getattr(config, "undecided_fields", None) is not None
    config_dict = stored_config(config_class, source, arguments)
    if "head_system" in config_dict and not hasattr(config_class, "head_system"):
        raise ValueError(
            f"{source} is a checkpoint with head_system={config_dict['head_system']!r}, which {model_class.__name__} "
            "does not have: load it with AutoModelForCausalLM, or a class of dcformer.head_systems."
        )
    if not is_hub_config(config_dict) and "undecided_fields" not in config_dict:
        return arguments, False
    # as in Transformers: arguments that name a configuration field go to the configuration, the rest stay
    kept = {"dtype", "torch_dtype", "quantization_config", "trust_remote_code", "config", *_HUB_ARGUMENTS}
    offered = {name: value for name, value in arguments.items() if name not in kept}
    loaded, unused = config_class.from_dict(config_dict, return_unused_kwargs=True, **offered)
    return {name: value for name, value in arguments.items() if name in kept} | unused | {"config": loaded}, True


def load_hub_folder(
    load: Callable[..., Any], path: str | os.PathLike | None, *args: Any, config: Any, **arguments: Any
) -> Any:
    """Loads a model whose configuration is in the hub format.

    Args:
        load: the library's `from_pretrained` of the model's class.
        path: a folder, the name of a repository on the Hub, or None when `arguments` hold a state dict.
        config: read from a hub configuration; a copy of it is completed from the tensors.
        args, arguments: the other arguments of `from_pretrained`.

    Returns:
        what `load` returns.

    Raises:
        OSError: when a weight file is damaged or holds code, naming it.
        RuntimeError: when shapes do not fit the configuration; the library's report names them.
        ValueError: when tensors of the decoder, or a causal model's `lm_head`, are not in the checkpoint, or layers
            have tensors in it of which its configuration knows nothing (with `output_loading_info=True` they are
            returned instead); when tensors with the hub format's names are to be split over devices.
    """
    state_dict = arguments.get("state_dict")
    if state_dict is not None:
        stored = StoredWeights.read(
            (name, tuple(t.shape), partial(torch.Tensor.detach, t)) for name, t in state_dict.items()
        )
    else:
        files = [] if path is None else weight_files(path, arguments)
        stored = StoredWeights.read(tensor for file in files for tensor in stored_tensors(file))
    config = complete_config(config, stored)
    if stored.hub_named:
        _refuse_tensor_parallelism(path, arguments)
        if not config.compose_static and not stored.has_static:
            arguments["key_mapping"] = (arguments.get("key_mapping") or {}) | _IDENTITY_BUFFERS
    wants_info = arguments.pop("output_loading_info", False)
    model, info = load(path, *args, config=config, output_loading_info=True, **arguments)
    follow_tokenizer(model, path, arguments)
    if wants_info:
        return model, info
    if path is not None:
        _check_complete(model, info["missing_keys"], path)
        _refuse_others(model, info["unexpected_keys"], path, arguments, stored)
    return model


def complete_config(config: DCFormerConfig, stored: StoredWeights) -> DCFormerConfig:
    """A copy of a configuration, with the fields that hub configurations leave undecided taken from the tensors.

    Args:
        config: read from a hub configuration.
        stored: the stored tensors. If their names are not those of the hub format, defaults are used.

    Raises:
        ValueError: when the completed configuration is invalid.
    """
    config = copy.deepcopy(config)
    fields: dict[str, Any] = {}
    shapes = [shape for name, shape in stored.shapes.items() if name.endswith(".dyn_w_proj.qkw") and len(shape) == 5]
    fitting = [shape for shape in shapes if shape[2] == shape[3] * shape[4]]  # K = 2R·M, or it is misshapen
    if shapes:
        groups, _, _, rows, _ = mode(fitting or shapes)  # [G, 4, K, 2R, M]
        if rows >= 2 and groups and config.num_attention_heads % groups == 0:
            fields = {"compose_groups": groups, "compose_rank": rows // 2}
    if stored.hub_named and (config.compose_pre or config.compose_post):
        fields["compose_static"] = stored.has_static
    for name in config.undecided_fields or ():
        if name in fields:
            setattr(config, name, fields[name])
    config.undecided_fields = None
    config.validate_architecture()
    return config


def _refuse_tensor_parallelism(path: Any, arguments: Mapping[str, Any]) -> None:
    split = [
        name for name in ("tp_plan", "tp_size", "device_mesh", "distributed_config") if arguments.get(name) is not None
    ]
    if split:
        raise ValueError(
            f"{path} holds tensors in the hub format, which cannot be split over devices while they are loaded "
            f"({', '.join(split)} given). Convert it first, `dcformer-convert hub-to-safetensors --checkpoint {path} "
            "--output DIR`, and load DIR."
        )


def _check_complete(model: PreTrainedModel, missing_keys: Iterable[str], path: Any) -> None:
    """Raises an error when tensors of the decoder, or a causal model's head, would keep random values."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    missing = sorted(key for key in missing_keys if key.startswith(prefix) or key == "lm_head.weight")
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of the tensors of {type(model).__name__}: {', '.join(missing[:8])}"
            f"{', ...' if len(missing) > 8 else ''}. The checkpoint is incomplete or belongs to another configuration: "
            "these tensors would be left at random values."
        )


# A parameter of a layer that this package knows, under whatever name it was stored: the layer's number, and all of it.
_OF_LAYER = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..*")


def _refuse_others(
    model: PreTrainedModel, unexpected_keys: Iterable[str], path: Any, arguments: dict[str, Any], stored: StoredWeights
) -> None:
    """Raises an error when layers have parameters in the checkpoint of which its stored configuration knows nothing.

    What the caller has asked to leave out, with a configuration other than the stored one, is known.
    """
    found = {match[0]: int(match[1]) for key in unexpected_keys if (match := _OF_LAYER.search(key))}
    if not found:
        return
    config: Any = model.config
    own = complete_config(type(config).from_dict(stored_config(type(config), path, arguments)), stored)
    count = own.num_hidden_layers
    if config.num_hidden_layers != count:
        found = {name: layer for name, layer in found.items() if layer < config.num_hidden_layers}
    elif (last := max(found.values())) >= count:
        raise ValueError(
            f"{path} has tensors of layer {last}, and its configuration has n_layer={count}: it belongs to another "
            "checkpoint. To load the first layers alone, pass num_hidden_layers."
        )
    with torch.device("meta"):
        known = {match[0] for name in type(model)(own).state_dict() if (match := _OF_LAYER.search(name))}
    if others := sorted(found.keys() - known):
        raise ValueError(
            f"{path} has {len(others)} tensors that its configuration has no place for: {', '.join(others[:4])}"
            f"{', ...' if len(others) > 4 else ''}. The model would compute something else without them: correct "
            "config.json, or pass output_loading_info=True to load it all the same."
        )


# --- the tokenizer's end of text --------------------------------------------------------------------------------------

END_OF_TEXT = "<|endoftext|>"
_SPECIAL = ("bos_token", "eos_token", "pad_token")


def follow_tokenizer(model: PreTrainedModel, path: str | os.PathLike | None, arguments: Mapping[str, Any]) -> None:
    """Takes the ids of beginning and end of text from the tokenizer, as those of hub configurations are wrong.

    Sets them in `model.config` and, unless the caller passed one, in `model.generation_config`. One warning reports the
    ids that contradicted the tokenizer. Does nothing without a tokenizer.

    Args:
        model: just loaded.
        path: the folder, or the name of the repository on the Hub.
        arguments: those of `from_pretrained`.
    """
    if path is None:
        return
    holders: list[Any] = [model.config]
    if arguments.get("generation_config") is None and getattr(model, "generation_config", None) is not None:
        holders.append(model.generation_config)
    wrong: dict[str, None] = {}  # an ordered set: both holders may have the same id
    for name, (token, own) in tokenizer_special_ids(path, arguments).items():
        if name == "pad_token_id":
            continue
        for holder in holders if own < model.config.vocab_size else ():
            current = getattr(holder, name)
            if current == own or (isinstance(current, list) and own in current):
                continue
            setattr(holder, name, own)
            if current is not None:
                wrong[f"{name}={current}, the tokenizer's is {own} ({token!r})"] = None
    if wrong:
        logger.warning(
            f"The configuration of {path} contradicts its tokenizer: it has {'; '.join(wrong)}. The tokenizer's are "
            "used, and stored by save_pretrained."
        )


def tokenizer_special_ids(
    path: str | os.PathLike, arguments: Mapping[str, Any], tokenizer: Any = None
) -> dict[str, tuple[str, int]]:
    """A tokenizer's ids of beginning and end of text, and of padding.

    Args:
        path: a folder, or the name of a repository on the Hub.
        arguments: those of `from_pretrained`.
        tokenizer: what `load_tokenizer` makes of it, if that is known.

    Returns:
        "bos_token_id", "eos_token_id" and "pad_token_id" -> token and id. The tokens are those that the tokenizer's
        configuration names, or else its class where it has been loaded, if the files have them; otherwise, but for
        padding, "<|endoftext|>", if they have it: every tokenizer that does separates documents with it. Empty when
        there is no tokenizer.
    """
    settings = _tokenizer_file(path, "tokenizer_config.json", arguments)
    mapped = _tokenizer_file(path, "special_tokens_map.json", arguments)
    # As in the library, the map takes precedence unless the configuration lists added tokens.
    settings = mapped | settings if "added_tokens_decoder" in settings else settings | mapped
    named: dict[str, Any] = {kind: token for kind in _SPECIAL if isinstance(token := _content(settings.get(kind)), str)}
    try:
        file = _find(path, "tokenizer.json", arguments)
        vocabulary = {} if file is None else Tokenizer.from_file(file).get_vocab()
        if tokenizer is None and file is None and _find(path, "tokenizer_config.json", arguments) is not None:
            tokenizer = load_tokenizer(path, arguments)
    except Exception:  # the libraries raise nothing narrower; who asks for the tokenizer is told
        return {}
    if tokenizer is not None:
        # What only its class names, the library has added behind the vocabulary: no text has it.
        stored = {*vocabulary, *named.values(), *_tokenizer_file(path, "added_tokens.json", arguments)}
        for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
            tokens = settings.get(name, ())
            stored |= {_content(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)}
        size = tokenizer.vocab_size if file is None else 0
        vocabulary = {t: number for t, number in tokenizer.get_vocab().items() if number < size or t in stored}
        named = {kind: getattr(tokenizer, kind, None) for kind in _SPECIAL}
    ids: dict[str, tuple[str, int]] = {}
    for kind in _SPECIAL:
        for token in (named.get(kind), None if kind == "pad_token" else END_OF_TEXT):
            if token in vocabulary:
                ids[f"{kind}_id"] = (token, vocabulary[token])
                break
    return ids


def _tokenizer_file(path: str | os.PathLike, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON file of a tokenizer, without what is null; empty where there is none, or it is damaged."""
    if (file := _find(path, name, arguments)) is None:
        return {}
    try:
        with open(file, encoding="utf-8") as opened:
            read = json.load(opened)
    except ValueError:
        return {}
    return {key: value for key, value in read.items() if value is not None} if isinstance(read, dict) else {}


def _content(token: Any) -> Any:
    """A token in a JSON file, which may be an object with settings of its own."""
    return token.get("content") if isinstance(token, dict) else token


def load_tokenizer(path: str | os.PathLike, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer that Transformers makes of a folder.

    Args:
        path, arguments: as for `tokenizer_special_ids`.

    Raises:
        OSError: when it has no vocabulary: the library would make an empty tokenizer.
        Exception: what the library raises, which is anything.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **_hub_arguments(arguments))
    own = sorted(set(type(tokenizer).vocab_files_names.values()))
    if own and all(_find(path, file, arguments) is None for file in ("tokenizer.json", "tokenizer.model", *own)):
        raise OSError(
            f"{os.fspath(path)} has no vocabulary of a {type(tokenizer).__name__}: expected {' or '.join(own)}"
        )
    return tokenizer


__all__ = [
    "IGNORED_ON_LOAD",
    "HubToNative",
    "NativeToHub",
    "StoredWeights",
    "check_stored_heads",
    "complete_config",
    "damaged_weights",
    "follow_tokenizer",
    "hub_conversions",
    "load_hub_folder",
    "load_tokenizer",
    "naming_damage",
    "register_hub_conversions",
    "stored_config",
    "stored_generators",
    "stored_tensors",
    "tokenizer_special_ids",
    "weight_files",
    "with_hub_config",
]
