"""Direct loading of the hub format: the authors' PyTorch repositories (DCFormer-2.8B, DCPythia-6.9B).

Transformers converts the tensors while it loads, by the table in `layouts_dcformer`. This module adds what it cannot
know: before loading, the configuration fields that only the tensors determine; after loading, the tokenizer's ids
of beginning and end of text. Native folders do not pass through here.
"""

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import mode
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.utils import logging

from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
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
from .stored_dcformer import HUB_ARGUMENTS, refuse_head_system, stored_config, stored_tensors, weight_files
from .tokens_dcformer import tokenizer_special_ids

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


# --- loading ----------------------------------------------------------------------------------------------------------


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
    refuse_head_system(model_class, source, config_dict)
    if not is_hub_config(config_dict) and "undecided_fields" not in config_dict:
        return arguments, False
    # as in Transformers: arguments that name a configuration field go to the configuration, the rest stay
    kept = {"dtype", "torch_dtype", "quantization_config", "trust_remote_code", "config", *HUB_ARGUMENTS}
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


__all__ = [
    "IGNORED_ON_LOAD",
    "HubToNative",
    "NativeToHub",
    "StoredWeights",
    "complete_config",
    "follow_tokenizer",
    "hub_conversions",
    "load_hub_folder",
    "register_hub_conversions",
    "stored_generators",
    "with_hub_config",
]
