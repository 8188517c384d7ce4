"""Configuration of DCFormer and DCPythia models: fields and their validation.

Source of the defaults: "Improving Transformers with Dynamically Composable Multi-Head Attention" (arXiv 2405.08553) and
the training configurations published beside it.
"""

import copy
import math
import re
import sys
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .compose_dcformer import ComposeFields
from .heads_dcformer import MAP_FIELDS, check_head_embeddings, check_head_maps
from .legacy_dcformer import HUB_KEYS, is_hub_config, native_fields, undecided_fields
from .parallel_dcformer import tensor_parallel_plan
from .peft_dcformer import register_peft_targets
from .presets_dcformer import PRESETS

LAYER_TYPES = ("sliding_attention", "full_attention")
NORM_TYPES = ("rmsnorm", "layernorm")
MLP_TYPES = ("gated", "plain")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ORIGINAL = "original_max_position_embeddings"
_ROPE_NOT_NONE = {  # of the library's kinds, if they are given
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (_ORIGINAL,),
    "longrope": (_ORIGINAL,),
    "llama3": (*_ROPE_NEEDS["llama3"], _ORIGINAL),
    "proportional": ("factor",),
}
# Numbers of RoPE, and what they are to be above, or at least: with others frequencies fail, or are NaN.
_ROPE_ABOVE = {"factor": 0, "low_freq_factor": 0, "high_freq_factor": 0, _ORIGINAL: 1}
_ROPE_AT_LEAST_0 = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LAYER_LISTS = ("layer_types", *MAP_FIELDS)  # fields with an entry for each layer


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that floats can hold; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _expand_pattern(pattern: str | list[str]) -> list[str]:
    """Spells out a layer pattern: "LGL6" or ["L", "G", ...] -> one layer type per layer of a period."""
    letters = pattern
    if isinstance(pattern, str):
        if not re.fullmatch(r"([LG]([1-9]\d*)?)+", pattern):
            raise ValueError(
                f"layer_pattern={pattern!r} is not understood: expected letters L (local) and G (global), each "
                'optionally followed by a count of at least 1, such as "LG", "LGLL" or "LGL6".'
            )
        letters = [letter for letter, count in re.findall(r"([LG])(\d*)", pattern) for _ in range(int(count or 1))]
    names = {"L": "sliding_attention", "G": "full_attention"} | {name: name for name in LAYER_TYPES}
    if not isinstance(letters, (list, tuple)) or not letters or any(letter not in names for letter in letters):
        raise ValueError(
            f"layer_pattern={pattern!r} is not understood: a list may hold 'L', 'G' or {LAYER_TYPES}, at least one."
        )
    return [names[letter] for letter in letters]


def _repeat_pattern(pattern: str | list[str], layers: int) -> list[str]:
    """One layer type per layer: a layer pattern repeated over the depth."""
    period = _expand_pattern(pattern)
    return [period[i % len(period)] for i in range(layers)]


@strict
class DCFormerConfig(ComposeFields, PreTrainedConfig):
    """Configuration of a DCFormer model: a Transformer whose attention heads are composed dynamically (DCMHA).

    The defaults give DCFormer-405M. DCPythia is the same architecture with other settings (`DCPythiaConfig`). Keys of
    the authors' repositories (the hub format: `dim`, `n_layer`, `window_type`, ...) are read, never written.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): width E of the residual stream.
        intermediate_size (`int`): width F of the MLP.
        num_hidden_layers (`int`): number of decoder layers.
        num_attention_heads (`int`): number of query heads H.
        num_key_value_heads (`int`, *optional*): number of key/value heads; `num_attention_heads` when not given.
        head_dim (`int`, *optional*): width D of a head; `hidden_size // num_attention_heads` when not given.
        key_head_map, value_head_map (`list[list[int]]`, *optional*): for each layer and query head, which of the
            layer's key (value) heads it reads, as DHA makes them; by default consecutive query heads share one.
            `num_key_value_heads` then stays what it was in the model that the heads come from.
        head_embeddings (`str`, *optional*): "add" or "mul" for MHE: one projection of queries, one of keys and one of
            values, from which each head makes its own with embeddings of D numbers. `num_key_value_heads` is 1.
        head_embedding_init_std (`float`, *optional*): standard deviation of these embeddings at initialization; by
            default `initializer_range * sqrt(hidden_size)` for "add" and 0.6 for "mul".
        hidden_act (`str`): activation of the MLP, a name known to Transformers.
        mlp_type (`str`): "gated" (down(act(gate(x)) * up(x))) or "plain" (down(act(up(x)))).
        mlp_gates (`int`): number of softmax gates over equal slices of a gated MLP's activation; 0 for none.
        mlp_bias (`bool`): biases in the MLP.
        norm_type (`str`): "rmsnorm" or "layernorm" (with bias).
        norm_eps (`float`): epsilon of the layer norms.
        use_parallel_residual (`bool`): x + attn(norm1(x)) + mlp(norm2(x)) instead of the two in sequence.
        attention_bias (`bool`): biases in q, k, v and o projections.
        qk_norm (`bool`): RMS norm with scale over the head dim of queries and keys, before RoPE.
        qk_norm_eps (`float`, *optional*): its epsilon; `norm_eps` when not given.
        max_position_embeddings (`int`): longest sequence the model was trained for, in tokens.
        rope_parameters (`dict`, *optional*): RoPE type, `rope_theta` and `partial_rotary_factor`, as in Transformers.
        sliding_window (`int`, *optional*): keys that a local layer's query sees, its own included; None without local
            layers.
        layer_types (`list[str]`, *optional*): "sliding_attention" or "full_attention", one per layer;
            by default from `layer_pattern`.
        layer_pattern (`str` or `list[str]`, *optional*, defaults to "LG"): pattern of local and global layers repeated
            over the depth, such as "LG", "LGLL", "LGL6" or a list. An argument only: `layer_types` is stored.
        compose_rank (`int`): rank R of the dynamic low-rank projections.
        compose_groups (`int`): groups G of heads; only heads of a group are mixed.
        compose_pre (`bool`): compose scores before the softmax.
        compose_post (`bool`): compose attention weights after the softmax.
        compose_query (`bool`): query-wise branches (composition weights computed from the query's hidden state).
        compose_key (`bool`): key-wise branches (composition weights computed from the key's hidden state).
        compose_projection (`bool`): the dynamic low-rank projections.
        compose_gate (`bool`): the dynamic gates.
        compose_static (`bool`): the static projection; with neither query- nor key-wise branches: talking heads.
        compose_act (`str`): "gelu" (erf, the authors' PyTorch code) or "gelu_pytorch_tanh" (their JAX code).
        attention_dropout (`float`): dropout of the composed attention weights.
        hidden_dropout (`float`): dropout of the outputs of attention and MLP.
        initializer_range (`float`): standard deviation of initial parameters outside composition.
        use_cache (`bool`): return a cache for decoding.
        save_maps (`bool`): where the fused kernels train, keep attention's maps from the forward pass for the backward
            pass, which then need not make them anew: faster, for memory that is quadratic in the length
            (docs/kernels.md).
        tie_word_embeddings (`bool`): share input and output embeddings.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): special tokens.

    A model with all of `compose_pre`, `compose_post`, `compose_query`, `compose_key` and `compose_static` off is a
    plain Transformer.

    Raises:
        ValueError: on an invalid combination; the message names the fields.
    """

    model_type = "dcformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50257
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    key_head_map: list[list[int]] | None = None
    value_head_map: list[list[int]] | None = None
    head_embeddings: str | None = None
    head_embedding_init_std: float | int | None = None
    hidden_act: str = "silu"
    mlp_type: str = "gated"
    mlp_gates: int = 0
    mlp_bias: bool = False
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    use_parallel_residual: bool = False
    attention_bias: bool = False
    qk_norm: bool = True
    qk_norm_eps: float | None = None
    max_position_embeddings: int = 2048
    rope_parameters: RopeParameters | dict | None = None
    sliding_window: int | None = 256
    layer_types: list[str] | None = None
    compose_rank: int = 2
    compose_groups: int = 1
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_projection: bool = True
    compose_gate: bool = True
    compose_static: bool = False
    compose_act: str = "gelu_pytorch_tanh"
    attention_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    save_maps: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if of_hub := sorted(HUB_KEYS & kwargs.keys()):
            raise ValueError(
                f"{', '.join(of_hub)}: of the hub format, which {type(self).__name__}.from_dict and from_pretrained "
                "read; here use this class's own fields."
            )
        self.check_names(kwargs)
        # Fields that a hub configuration leaves to the stored tensors, None of others; see `from_dict`. Stored, so that
        # a folder whose config.json is written anew still loads as one; never with a model.
        self.undecided_fields: tuple[str, ...] | None = None
        layer_pattern = kwargs.pop("layer_pattern", None)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = 1 if self.head_embeddings else self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}: give head_dim, or sizes that divide."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.qk_norm_eps is None:
            self.qk_norm_eps = self.norm_eps
        if self.layer_types is None:
            if layer_pattern is None:
                layer_pattern = "G" if self.sliding_window is None else "LG"
            self.layer_types = _repeat_pattern(layer_pattern, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        self.validate_architecture()  # here too, so that the error is a plain ValueError

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Fewer layers keep the entries of the first; raising the number again restores the others.

        `layer_pattern`, which is not a field, sets `layer_types`.
        """
        if name == "layer_pattern" and value is not None:
            name, value = "layer_types", _repeat_pattern(value, self.num_hidden_layers)
        super().__setattr__(name, value)
        if name in _LAYER_LISTS:
            self.__dict__.pop(f"_all_{name}", None)
        elif name == "num_hidden_layers":
            for of_layers in _LAYER_LISTS:
                if (kept := self.__dict__.get(of_layers)) is not None:  # which may have been changed in place
                    kept = kept + self.__dict__.pop(f"_all_{of_layers}", kept)[len(kept) :]
                    if 0 <= value < len(kept):
                        self.__dict__[f"_all_{of_layers}"] = kept
                    self.__dict__[of_layers] = kept[:value] if value >= 0 else kept

    def head_map(self, field: str, layer_idx: int) -> list[int]:
        """For each query head of a layer the head that it reads.

        Args:
            field: "key_head_map" or "value_head_map".
            layer_idx: the layer's number.
        """
        rows = getattr(self, field)
        if rows is not None:
            return rows[layer_idx]
        sharing = self.num_attention_heads // self.num_key_value_heads
        return [head // sharing for head in range(self.num_attention_heads)]

    @property
    def num_key_heads(self) -> list[int]:
        """Key heads of each layer, [L]."""
        return [self.cached_heads("pre", layer) for layer in range(self.num_hidden_layers)]

    @property
    def num_value_heads(self) -> list[int]:
        """Value heads of each layer, [L]."""
        return [self.cached_heads("post", layer) for layer in range(self.num_hidden_layers)]

    @property
    def kv_saving(self) -> float:
        """The share of keys and values that the maps save, against `num_key_value_heads` of each in every layer."""
        cached = sum(self.num_key_heads) + sum(self.num_value_heads)
        return 1 - cached / max(1, 2 * self.num_hidden_layers * self.num_key_value_heads)

    def cached_heads(self, stage: str, layer_idx: int = 0) -> int:
        """Key heads (stage "pre") or value heads ("post") that a layer caches."""
        field = "key_head_map" if stage == "pre" else "value_head_map"
        return self.num_key_value_heads if getattr(self, field) is None else max(self.head_map(field, layer_idx)) + 1

    def cache_width(self, stage: str, layer_idx: int = 0) -> int:
        """Numbers that a layer caches for a token and a key head (stage "pre") or a value head ("post")."""
        return self.cached_head_dim(stage) + self.compose_cache_channels(stage, layer_idx)

    def cached_head_dim(self, stage: str) -> int:
        """The part of `cache_width` that is the key (stage "pre") or the value ("post"), without composition weights.

        D; head embeddings make a key wider by the rotary dim r, so that one serves all heads.
        """
        return self.head_dim + (self.rotary_dim if self.head_embeddings and stage == "pre" else 0)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE turns, r.

        "proportional" pairs channels across the whole head, and turns some of the pairs by angles of zero.
        """
        rope = self.rope_parameters
        is_whole = rope.get("rope_type") == "proportional"
        return self.head_dim if is_whole else int(self.head_dim * rope.get("partial_rotary_factor", 1.0))

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # one for all models of a class upstream
        """Module or parameter of the decoder -> style of tensor parallelism; read by Transformers."""
        return tensor_parallel_plan(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """A configuration of a published size, of the class that is asked.

        Args:
            name: a key of `presets_dcformer.PRESETS`, such as "dcformer-6.9b" or "dcpythia-2.8b".
            overrides: fields to set otherwise, as for the constructor.

        Returns:
            one of this class; of `DCFormerConfig` itself, `DCPythiaConfig` for the DCPythia sizes.

        Raises:
            ValueError: on an unknown name, and on a size of DCPythia for a class that is none, or the other way round.
        """
        if name not in PRESETS:
            raise ValueError(f"Unknown preset {name!r}: expected one of {sorted(PRESETS)}.")
        of_pythia = name.startswith("dcpythia")
        config_class: Any = DCPythiaConfig if of_pythia and cls is DCFormerConfig else cls
        if of_pythia != issubclass(config_class, DCPythiaConfig):
            family = "DCPythiaConfig" if of_pythia else "DCFormerConfig"
            raise ValueError(f"Preset {name!r} is not of {cls.__name__}: use {family}.from_preset.")
        return config_class(**(copy.deepcopy(PRESETS[name]) | overrides))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`, for native configurations and those in the hub format.

        Overrides must fit the stored fields: a smaller `num_hidden_layers` keeps the types of the first layers, a
        larger one also needs `layer_types` or `layer_pattern`.

        Raises:
            ValueError: when the configuration with its overrides is invalid.
        """
        if not isinstance(config_dict, dict):
            return super().from_dict(config_dict, **kwargs)  # which refuses it
        if is_hub_config(config_dict):  # whose own keys may override, too
            config_dict = config_dict | {name: kwargs.pop(name) for name in HUB_KEYS & kwargs.keys()}
        undecided = undecided_fields(config_dict)
        if undecided is not None:
            undecided = tuple(name for name in undecided if name not in kwargs)
        if is_hub_config(config_dict):
            config_dict = native_fields(config_dict)
        if "undecided_fields" in config_dict:
            config_dict = {name: value for name, value in config_dict.items() if name != "undecided_fields"}
        layer_pattern = kwargs.pop("layer_pattern", None)
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if layer_pattern is not None:
            config.layer_types = _repeat_pattern(layer_pattern, config.num_hidden_layers)
        config.undecided_fields = undecided
        config.validate_architecture()
        return loaded

    def to_dict(self) -> dict[str, Any]:
        """All native fields."""
        register_peft_targets(self.model_type)  # PEFT calls this just before it reads its tables
        fields = super().to_dict()
        fields.pop("undecided_fields", None)
        for name in _LAYER_LISTS:
            fields.pop(f"_all_{name}", None)
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """What is stored: fields that differ from defaults, and names of those that a hub configuration leaves open."""
        fields = super().to_diff_dict()
        return fields if self.undecided_fields is None else fields | {"undecided_fields": list(self.undecided_fields)}

    def validate_architecture(self):
        """Checks that the fields fit together. Called by Transformers after construction and before saving.

        Raises:
            ValueError: naming the fields, their values and what was expected.
        """
        self._validate_sizes()
        self._validate_layers()
        self.check_composition()
        check_head_maps(self)
        check_head_embeddings(self)

    def _validate_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if (size := getattr(self, name)) is None or size < 1:  # None comes by the keywords of from_pretrained
                raise ValueError(f"{name}={size} must be at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must not be negative.")
        if self.norm_type not in NORM_TYPES:
            raise ValueError(f"norm_type={self.norm_type!r} is unknown: expected one of {NORM_TYPES}.")
        if self.mlp_type not in MLP_TYPES:
            raise ValueError(f"mlp_type={self.mlp_type!r} is unknown: expected one of {MLP_TYPES}.")
        if self.mlp_gates < 0:
            raise ValueError(f"mlp_gates={self.mlp_gates} must be 0 (none) or the number of gates.")
        if self.mlp_gates and self.mlp_type != "gated":
            raise ValueError(f"mlp_gates={self.mlp_gates} needs mlp_type='gated', got {self.mlp_type!r}.")
        if self.mlp_gates and self.intermediate_size % self.mlp_gates:
            raise ValueError(
                f"intermediate_size={self.intermediate_size} must be a multiple of mlp_gates={self.mlp_gates}."
            )
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1).")
        for name in ("norm_eps", "qk_norm_eps", "initializer_range"):
            if (value := getattr(self, name)) is None or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must not be negative, infinite or NaN.")
        pad, vocabulary = self.pad_token_id, self.vocab_size
        if pad not in (None, -1) and not 0 <= pad < vocabulary:  # older configurations have -1 for none
            raise ValueError(
                f"pad_token_id={pad} is not in the vocabulary: expected 0 to {vocabulary - 1}, or None where there is "
                "no token for padding."
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown: expected one of {', '.join(sorted(ACT2FN))}.")
        self._validate_rope()

    def _validate_rope(self) -> None:
        rope: dict[str, Any] = self.rope_parameters or {}  # type: ignore[assignment]  # the library's has no such keys
        if of_kinds := sorted(name for name, value in rope.items() if isinstance(value, dict)):
            raise ValueError(f"rope_parameters of {', '.join(of_kinds)}: expected one RoPE for all layers.")
        theta = rope.get("rope_theta")
        if not _is_finite(theta) or theta <= 0:
            raise ValueError(f"rope_theta={theta!r} must be a finite number above 0: give it in rope_parameters.")
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if (rope_type := rope.get("rope_type", "default")) not in known:
            raise ValueError(f"rope_type={rope_type!r} is unknown: expected one of {', '.join(known)}.")
        if absent := [name for name in _ROPE_NEEDS.get(rope_type, ()) if name not in rope]:
            raise ValueError(f"rope_type={rope_type!r} needs {', '.join(absent)} in rope_parameters.")
        factor = rope.get("partial_rotary_factor", 1.0)
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor={factor} must be in (0, 1].")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            product = f"head_dim * partial_rotary_factor = {self.head_dim} * {factor}"
            product = "head_dim" if rope_type == "proportional" else product
            raise ValueError(f"The rotary dimension {product} = {self.rotary_dim} must be even and at least 2.")
        if rope_type in _ROPE_NOT_NONE:
            self._validate_rope_numbers(rope, rope_type)

    def _validate_rope_numbers(self, rope: dict[str, Any], rope_type: str) -> None:
        for name in (*_ROPE_ABOVE, *_ROPE_AT_LEAST_0):
            value, bound = rope.get(name), _ROPE_ABOVE.get(name)
            if value is None and (name not in rope or name not in _ROPE_NOT_NONE[rope_type]):
                continue
            if not _is_finite(value) or not (value >= 0 if bound is None else value > bound):
                expected = "of at least 0" if bound is None else f"above {bound}"
                raise ValueError(f"{name}={value!r} of rope_type={rope_type!r} must be a finite number {expected}.")
        count = self.rotary_dim // 2
        for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
            factors = rope[name] if isinstance(rope[name], list | tuple) else ()
            if len(factors) != count or not all(_is_finite(number) and number > 0 for number in factors):
                raise ValueError(
                    f"{name}={rope[name]!r} of rope_type='longrope' must be a list of {count} finite numbers above 0, "
                    "one for each pair of channels of the rotary dimension."
                )
        divisors = {
            "dynamic": (self.rotary_dim > 2, "a rotary dimension above 2"),
            "yarn": (rope["rope_theta"] != 1, "a rope_theta other than 1"),
            "llama3": (rope.get("low_freq_factor") != rope.get("high_freq_factor"), "two freq_factors that differ"),
        }
        is_right, what = divisors.get(rope_type, (True, ""))
        if not is_right:
            raise ValueError(f"rope_type={rope_type!r} needs {what}: it would divide by zero.")

    def _validate_layers(self) -> None:
        self.check_kinds(self.layer_types)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"len(layer_types)={len(self.layer_types)} must equal num_hidden_layers={self.num_hidden_layers}: give "
                "one layer type per layer, or a layer_pattern."
            )

    def check_kinds(self, kinds: list[str] | None) -> None:
        """Checks the kinds of layers, and the window if they need one.

        Args:
            kinds: `layer_types`, or those of some layers.

        Raises:
            ValueError: naming the fields.
        """
        if kinds is None:
            raise ValueError(f"layer_types=None: expected an entry of {LAYER_TYPES} for each layer.")
        unknown = sorted(set(kinds) - set(LAYER_TYPES), key=str)
        if unknown:
            raise ValueError(f"layer_types holds unknown {unknown}: expected entries of {LAYER_TYPES}.")
        if "sliding_attention" in kinds and (self.sliding_window is None or self.sliding_window < 2):
            raise ValueError(
                f"layer_types holds 'sliding_attention' but sliding_window={self.sliding_window}: give the number of "
                "keys a local query sees (at least 2: the library's sliding caches hold no fewer), or make every layer "
                "'full_attention'."
            )


@strict
class DCPythiaConfig(DCFormerConfig):
    """Configuration of a DCPythia model: DCFormer's attention in Pythia's architecture. Same fields, other defaults.

    LayerNorm with bias, parallel residual, plain erf-GELU MLP, biases everywhere, RoPE on a quarter of the head dim.
    The defaults give DCPythia-2.8B.
    """

    model_type = "dcpythia"

    hidden_size: int = 2560
    intermediate_size: int = 10240
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "gelu"
    mlp_type: str = "plain"
    mlp_bias: bool = True
    norm_type: str = "layernorm"
    use_parallel_residual: bool = True
    attention_bias: bool = True

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:  # a stored configuration has them
            kwargs.setdefault("partial_rotary_factor", 0.25)
        super().__post_init__(**kwargs)


@strict
class DHAConfig(DCFormerConfig):
    """Configuration of a DHA model: Llama's architecture with head maps of its own in every layer. Same fields.

    Source: "DHA: Learning Decoupled-Head Attention from Transformer Checkpoints via Adaptive Heads Fusion" (arXiv
    2406.06567). The defaults are those of Llama-2-7B, without maps: no composition, no QK-norm, global layers.
    """

    model_type = "dha"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    norm_eps: float = 1e-6
    qk_norm: bool = False
    sliding_window: int | None = None
    compose_pre: bool = False
    compose_post: bool = False
    compose_query: bool = False
    compose_key: bool = False


__all__ = ["DCFormerConfig", "DCPythiaConfig", "DHAConfig"]
