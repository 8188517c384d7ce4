"""Models whose heads can be searched, fused and folded: where their key and value heads are, and what they become.

A family is a `model_type` of Transformers. It knows the native fields of its configurations, the native tensors in each
of its stored tensors, and in which module's output its keys and values come out. Everything else in this room works
on any `HeadSource`. Letters: L layers, H query heads, n heads of one kind, D head dim, E hidden size.
"""

import copy
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from ..configuration_dcformer import DCFormerConfig, DHAConfig
from ..conversion.sources import SafetensorsSource, TorchSource, has_weights
from ..errors import CONFIG_ERRORS, DCFormerError, raise_bug, refused
from ..formats.base import TensorInfo
from ..loading import OPERATORS, damaged_file, unfolded
from ..modules.saving import is_converted
from ..shards import refuse_shards
from .plan import KINDS, HeadPlan, SourceSizes

_PLAIN = {f"compose_{name}": False for name in ("pre", "post", "query", "key", "static")}
_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def _window_of_layers(config: DCFormerConfig) -> int | None:
    """The window that some layer has; the field has a value in models of global layers, too."""
    return config.sliding_window if "sliding_attention" in (config.layer_types or ()) else None


class Family:
    """A kind of model. This one has the modules and names of Llama, which are the native ones."""

    def __init__(self, config_class: Any, **given: Any):
        self.config_class = config_class
        self.given = given  # native fields that this family's models always have
        self.model_type: str = config_class.model_type

    layers = "model.layers"
    attention = "self_attn"
    slots = 1  # parts side by side in the rows of a head of the projection
    ignored = re.compile(r"\.rotary_emb\.inv_freq$")  # buffers in old folders, which the library leaves out too

    def fields(self, config: Any) -> dict[str, Any]:
        """The native fields of a configuration, all that differ between models of the family."""
        fields = {name: copy.deepcopy(getattr(config, name)) for name in _COMMON}
        fields |= {name: getattr(config, name) for name in ("num_key_value_heads", "mlp_bias") if hasattr(config, name)}
        fields |= {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}
        fields |= {"norm_eps": config.rms_norm_eps, "attention_bias": getattr(config, "attention_bias", False)}
        if fields["rope_parameters"].get("rope_type") != "proportional":  # else the library's models do not read it
            fields["rope_parameters"].pop("partial_rotary_factor", None)
        if self.given["qk_norm"]:
            fields["qk_norm_eps"] = config.rms_norm_eps
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
        fields |= {"layer_types": list(kinds), "sliding_window": window if "sliding_attention" in kinds else None}
        return fields | _PLAIN | self.given

    def foreign(self, config: DCFormerConfig) -> PreTrainedConfig:
        """A configuration of the family with the native one's fields, as far as it has them; ignores head maps."""
        fields = {name: copy.deepcopy(getattr(config, name)) for name in _COMMON}
        own = ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "layer_types")
        window = _window_of_layers(config)
        others = {name: getattr(config, name) for name in own}
        others |= {"sliding_window": window, "use_sliding_window": window is not None}
        known = set(self.config_class.__dataclass_fields__)
        fields |= {name: value for name, value in others.items() if name in known}
        return self.config_class(**fields, rms_norm_eps=config.norm_eps)

    def differing(self, config: DCFormerConfig) -> list[str]:
        """What keeps a native model, its head maps aside, from being one of this family: fields, or "composition"."""
        try:
            fields = self.fields(self.foreign(config))
        except CONFIG_ERRORS as error:
            raise_bug(error)
            return [" ".join(str(error).split())]
        own = {name: getattr(config, name) for name in fields} | {"sliding_window": _window_of_layers(config)}
        if own["rope_parameters"].get("partial_rotary_factor") == 1.0:  # as where it is not named
            fields["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        names = [name for name, value in fields.items() if own[name] != value]
        return list(dict.fromkeys("composition" if name in _PLAIN else name for name in names))

    def holds(self, config: DCFormerConfig) -> bool:
        """Whether a native model, its head maps aside, is also one of this family."""
        return not self.differing(config)

    def in_memory(self, name: str) -> str:
        """What a tensor of a folder is called in memory."""
        return name

    def natives(self, name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        """The native tensors in a stored one, on the meta device as well."""
        return {name: tensor}

    def additional(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Native tensors that the family lacks, because they are zero: name -> shape."""
        return {}

    def projection(self, layer: int, kind: str) -> tuple[str, int]:
        """The module whose output holds the part's heads [.., n, slots, D], and the slot of the part in it."""
        return f"{self.layers}.{layer}.{self.attention}.{kind[0]}_proj", 0

    def stored(self, natives: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        """The inverse of `natives`: the family's tensors of a whole model, as they are called in memory."""
        return dict(natives)


class Qwen2Family(Family):
    """Biases of queries, keys and values, but not of the output."""

    def fields(self, config: Any) -> dict[str, Any]:
        return super().fields(config) | {"attention_bias": True}

    def additional(self, config: Any) -> dict[str, tuple[int, ...]]:
        names = (f"{self.layers}.{i}.{self.attention}.o_proj.bias" for i in range(config.num_hidden_layers))
        return dict.fromkeys(names, (config.hidden_size,))


class GPTNeoXFamily(Family):
    """Queries, keys and values of a head side by side in one projection; LayerNorm, a plain MLP, parallel residual."""

    layers = "gpt_neox.layers"
    attention = "attention"
    slots = 3
    _NAMES = (
        ("gpt_neox.embed_in.", "model.embed_tokens."),
        ("gpt_neox.final_layer_norm.", "model.norm."),
        ("gpt_neox.layers.", "model.layers."),
        (".attention.dense.", ".self_attn.o_proj."),
        (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
        (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
    )
    _FUSED = re.compile(r"gpt_neox\.layers\.(\d+)\.attention\.query_key_value\.(weight|bias)")
    ignored = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")

    def fields(self, config: Any) -> dict[str, Any]:
        fields = {name: copy.deepcopy(getattr(config, name)) for name in _COMMON}
        for name in ("hidden_dropout", "attention_bias", "use_parallel_residual"):
            fields[name] = getattr(config, name)
        fields |= {"num_key_value_heads": config.num_attention_heads, "norm_eps": config.layer_norm_eps}
        fields |= {"head_dim": config.hidden_size // config.num_attention_heads, "sliding_window": None}
        return fields | {"layer_types": ["full_attention"] * config.num_hidden_layers} | _PLAIN | self.given

    def foreign(self, config: DCFormerConfig) -> PreTrainedConfig:
        fields = {name: copy.deepcopy(getattr(config, name)) for name in _COMMON}
        for name in ("hidden_dropout", "attention_bias", "use_parallel_residual"):
            fields[name] = getattr(config, name)
        return self.config_class(**fields, layer_norm_eps=config.norm_eps)

    def in_memory(self, name: str) -> str:
        return name.replace("embed_out.", "lm_head.")

    def natives(self, name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        if match := self._FUSED.fullmatch(name):
            rows = tensor.unflatten(0, (config.num_attention_heads, 3, -1))  # [H, 3, D, E] or, of the bias, [H, 3, D]
            prefix = f"model.layers.{match[1]}.self_attn."
            return {f"{prefix}{c}_proj.{match[2]}": rows[:, i].flatten(0, 1) for i, c in enumerate("qkv")}
        name = self.in_memory(name)
        for own, native in self._NAMES:
            name = name.replace(own, native)
        return {name: tensor}

    def projection(self, layer: int, kind: str) -> tuple[str, int]:
        return f"{self.layers}.{layer}.{self.attention}.query_key_value", "qkv".index(kind[0])

    def stored(self, natives: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in natives.items():
            if match := re.fullmatch(r"(model\.layers\.\d+\.self_attn\.)([qkv])_proj\.(weight|bias)", name):
                if match[2] == "q":
                    rows = [natives[f"{match[1]}{c}_proj.{match[3]}"] for c in "qkv"]
                    rows = [part.unflatten(0, (config.num_attention_heads, -1)) for part in rows]
                    own = match[1].replace("model.layers", self.layers).replace("self_attn", self.attention)
                    stored[f"{own}query_key_value.{match[3]}"] = torch.stack(rows, 1).flatten(0, 2)
                continue
            for own, native in self._NAMES:
                name = name.replace(native, own)
            stored[name] = tensor
        return stored


class OwnFamily(Family):
    """This package's models, composed or not; a folded one as well, whose parts differ in their heads."""

    def fields(self, config: Any) -> dict[str, Any]:
        raise NotImplementedError  # a copy of the configuration itself is made; see `HeadSource.native_config`


_LLAMA = {
    "norm_type": "rmsnorm",
    "mlp_type": "gated",
    "mlp_gates": 0,
    "use_parallel_residual": False,
    "hidden_dropout": 0.0,
}
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(LlamaConfig, **_LLAMA, qk_norm=False),
        Family(MistralConfig, **_LLAMA, qk_norm=False, mlp_bias=False, attention_bias=False),
        Qwen2Family(Qwen2Config, **_LLAMA, qk_norm=False, mlp_bias=False),
        Family(Qwen3Config, **_LLAMA, qk_norm=True, mlp_bias=False),
        GPTNeoXFamily(
            GPTNeoXConfig, norm_type="layernorm", mlp_type="plain", mlp_bias=True, mlp_gates=0, qk_norm=False
        ),
    )
}
# What expanded and exported models become: the first that holds them.
TARGETS = ("llama", "mistral", "qwen3", "gpt_neox")
_OWN = OwnFamily(DCFormerConfig)

_LATENT = "its keys and values come from a latent vector (MLA), not from heads that could be pooled"
_REFUSED = (  # (attribute of the configuration, why a model that has it cannot be a source)
    ("kv_lora_rank", _LATENT),
    ("is_encoder_decoder", "it has cross-attention"),
    ("add_cross_attention", "it has cross-attention"),
    ("num_kv_shared_layers", "its layers share keys and values"),
    ("head_embeddings", "its heads share one seed already"),
    ("head_system", "the projections of its heads are a head system's"),
    ("attn_logit_softcapping", "its scores are capped, which this package's attention does not do"),
)
_REFUSED_TYPES = {
    "gpt_oss": "its attention has sinks",
    "olmo2": "its QK-norm is over all heads together, and a mix of heads before it does not fold",
    "olmo3": "its QK-norm is over all heads together, and a mix of heads before it does not fold",
}


def find_family(config: Any) -> Family:
    """The family of a configuration.

    Raises:
        DCFormerError: saying why a model cannot be a source, and which can.
    """
    name = config.model_type
    why = _REFUSED_TYPES.get(name)
    for attribute, reason in _REFUSED:
        if getattr(config, attribute, None):
            why = f"{attribute}={getattr(config, attribute)!r}: {reason}"
            break
    if is_converted(config):
        why = "its heads are composed by convert_attention, which folding would leave out"
    supported = f"supported are {', '.join(FAMILIES)} and this package's models"
    if why is not None:
        raise DCFormerError(f"a {name} model cannot be a source: {why}; {supported}.")
    if getattr(config, "quantization_config", None):
        raise DCFormerError(
            "the source is quantized (quantization_config), and its heads cannot be mixed or folded: load it in "
            "bfloat16 or float32, dequantize() and save it, and use that folder."
        )
    if isinstance(config, DCFormerConfig):
        return _OWN
    if name not in FAMILIES:
        raise DCFormerError(f"model_type={name!r} is not known as a source: {supported}.")
    return FAMILIES[name]


class HeadSource:
    """Key and value heads of a model in memory or of a model folder, of which it reads a tensor at a time.

    Args:
        model: a causal language model, or the path of its folder.
        fused: take one with trained mixtures of heads as well, which its parameters do not show.

    Attributes:
        config: its configuration.
        family: the kind of model.
        model: the model in memory, or None.
        infos: stored tensor -> (shape, dtype), without mixers and buffers.

    Raises:
        DCFormerError: when it cannot be a source, or a folder's tensors do not fit its configuration; the message says
            why.
    """

    def __init__(self, model: PreTrainedModel | str | os.PathLike, fused: bool = False):
        self.infos: dict[str, tuple[tuple[int, ...], Any]]
        self._read: Callable[[str], torch.Tensor]
        if isinstance(model, nn.Module):
            self.model: Any = model
            self.config: Any = getattr(model, "config", None)
            _check_model(model)
            whole = model.state_dict()
            state = {name: tensor for name, tensor in whole.items() if "_mixer." not in name}
            is_fused = len(state) < len(whole)
            infos = {name: TensorInfo(tuple(t.shape), t.dtype, str(t.dtype)) for name, t in state.items()}
            self._read = lambda name: state[name].detach()
            self.location = type(model).__name__
        elif isinstance(model, str | os.PathLike):
            self.model, self.location = None, os.fspath(model)
            self.config = load_config(model)
            is_fused = (Path(model) / OPERATORS).exists()
        else:
            raise DCFormerError(f"{type(model).__name__} is not a model: give a causal language model, or its folder.")
        self.family = find_family(self.config)
        if is_fused and not fused:
            raise unfolded(self.location)
        if self.model is None:
            stored = _open_folder(self.location)
            infos, self._read = stored.infos, stored.read
        infos = {name: info for name, info in infos.items() if not self.family.ignored.search(name)}
        for name, info in infos.items():
            if "lora_" in name or ".base_layer." in name:
                raise DCFormerError(f"{self.location} has adapters ({name}): merge them first (merge_and_unload).")
            if info.dtype is None or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
                raise DCFormerError(
                    f"{self.location}: {name} is stored as {info.stored_dtype}: quantized heads cannot be mixed or "
                    "folded; dequantize first."
                )
        self.infos = {name: (info.shape, info.dtype) for name, info in infos.items()}
        if self.model is None:
            check_tensors(
                self._empty_model(),
                {self.family.in_memory(name): shape for name, (shape, _) in self.infos.items()},
                self.location,
            )

    def read(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        return self._read(name)

    def _empty_model(self) -> Any:
        """A model of the configuration, without parameters."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = None
        with refused(*CONFIG_ERRORS, RuntimeError, what=self.location), torch.device("meta"), no_init_weights():
            return AutoModelForCausalLM.from_config(config)

    def native_config(self) -> DCFormerConfig:
        """The configuration of the same model in this package, with the source's heads."""
        is_own = self.family is _OWN
        config = copy.deepcopy(self.config) if is_own else DHAConfig(**self.family.fields(self.config))
        config._attn_implementation = None
        config.dtype = self.config.dtype
        return config

    def folded_config(self, plan: HeadPlan) -> DCFormerConfig:
        """The configuration of the folded model."""
        config = self.native_config()
        config.key_head_map, config.value_head_map = plan.head_map("key"), plan.head_map("value")
        config.validate_architecture()
        return config

    def natives(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The native tensors in a stored one; none of the output embedding where it is the input's."""
        natives = self.family.natives(name, tensor, self.config)
        if self.config.tie_word_embeddings:
            natives.pop("lm_head.weight", None)
        return natives

    @cached_property
    def head_dim(self) -> int:
        """Width D of a head."""
        return self.native_config().head_dim  # type: ignore[return-value]  # None only until __post_init__

    @property
    def sizes(self) -> SourceSizes:
        """What plans are made for and checked against."""
        return source_sizes(self.config, self._fingerprint())

    def heads(self, layer: int, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of a part's heads: weight [n, D, E], and bias [n, D] or None."""
        module, slot = self.family.projection(layer, kind)

        def rows(name: str) -> torch.Tensor:
            return self.read(name).unflatten(0, (-1, self.family.slots, self.head_dim))[:, slot]  # [n, D, E] or [n, D]

        return rows(f"{module}.weight"), rows(f"{module}.bias") if f"{module}.bias" in self.infos else None

    def _fingerprint(self) -> str:
        """Of the signs of the first layer's keys and the last layer's values, which every dtype keeps."""
        digest = hashlib.sha256()
        for layer, kind in ((0, "key"), (self.config.num_hidden_layers - 1, "value")):
            digest.update((self.heads(layer, kind)[0] > 0).cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def source_sizes(config: Any, fingerprint: str = "") -> SourceSizes:
    """The sizes of a configuration of any family, for plans.

    Raises:
        DCFormerError: when models of it cannot be sources.
    """
    family = find_family(config)
    native: Any = config if family is _OWN else DHAConfig(**family.fields(config))
    heads, n, layers = native.num_attention_heads, native.num_key_value_heads, native.num_hidden_layers
    if layers < 1:
        raise DCFormerError(f"num_hidden_layers={layers}: a source needs at least one layer.")
    if heads % n:
        raise DCFormerError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={n}.")
    grouped = [[head * n // heads for head in range(heads)]] * layers
    maps = [copy.deepcopy(getattr(native, f"{kind}_head_map", None) or grouped) for kind in KINDS]
    return SourceSizes(
        model_type=config.model_type,
        num_attention_heads=heads,
        head_dim=native.head_dim,
        key_heads=[max(row) + 1 for row in maps[0]],
        value_heads=[max(row) + 1 for row in maps[1]],
        key_head_map=maps[0],
        value_head_map=maps[1],
        fingerprint=fingerprint,
    )


def check_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]], location: str) -> None:
    """Compares tensors with those of a model; of tied embeddings the output's may be absent.

    Args:
        model: on any device, "meta" as well.
        shapes: of the tensors, by their names in the model.
        location: what has the tensors, for messages.

    Raises:
        DCFormerError: naming one that is missing, of another shape, or not the model's.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings and "lm_head.weight" not in shapes:
        expected.pop("lm_head.weight", None)
    if wrong := sorted(name for name in {*expected, *shapes} if shapes.get(name) != expected.get(name)):
        name = wrong[0]
        if name not in shapes:
            what = f"{name} is missing"
        elif name not in expected:
            what = f"{name} has no place in the model"
        else:
            what = f"{name} is {list(shapes[name])}, expected {list(expected[name])}"
        others = f", and {len(wrong) - 1} others do not fit" if wrong[1:] else ""
        todo = "Copy or download the model again."
        if not expected.keys() & {*wrong}:
            todo = f"Remove {', '.join(wrong[:6])}{f' and {len(wrong) - 6} more' if wrong[6:] else ''} from its files."
        if "tok_embeddings.weight" in shapes:
            todo = "It is a hub folder: convert it first, with dcformer-convert hub-to-safetensors."
        raise DCFormerError(f"{location}: the source's tensors do not fit its configuration: {what}{others}. {todo}")


def load_config(folder: str | os.PathLike) -> Any:
    """The configuration of a model folder.

    Raises:
        DCFormerError: when there is none, or it is damaged.
    """
    if not (Path(folder) / "config.json").is_file():
        raise DCFormerError(f"{os.fspath(folder)} is not a model folder: it has no config.json.")
    if (Path(folder) / "adapter_config.json").is_file():
        raise DCFormerError(f"{os.fspath(folder)} holds adapters (adapter_config.json): merge them first.")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, *CONFIG_ERRORS) as error:
        reason = damaged_file(folder, error) or f"{os.fspath(folder)}: its configuration cannot be read ({error})."
        raise DCFormerError(reason) from error


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise DCFormerError(f"{type(model).__name__} is not a model of Transformers: give one, or its folder.")
    if not type(model).__name__.endswith("ForCausalLM"):
        raise DCFormerError(f"{type(model).__name__} is not a language model: expected a ...ForCausalLM.")
    if getattr(model, "peft_config", None):
        raise DCFormerError(f"{type(model).__name__} has adapters: merge them first (merge_and_unload).")
    refuse_shards(model, "load it again, whole; search and fuse distribute it themselves")
    for module in model.modules():
        if getattr(module, "fused", None) is not None:
            raise DCFormerError("the model's projections are fused: call model.unfuse() first.")


def _open_folder(folder: str) -> SafetensorsSource | TorchSource:
    if has_weights(Path(folder), "model.safetensors"):
        return SafetensorsSource(folder)
    return TorchSource(folder)


__all__ = [
    "FAMILIES",
    "TARGETS",
    "HeadSource",
    "check_tensors",
    "find_family",
    "load_config",
    "source_sizes",
]
