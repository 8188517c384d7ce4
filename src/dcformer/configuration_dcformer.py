"""Configuration of DCFormer and DCPythia models, their published sizes, and what composition costs.

Source of every default and size: "Improving Transformers with Dynamically Composable Multi-Head Attention"
(arXiv 2405.08553), sections 3 and 4, the training configurations published beside it, and the configurations of the
published checkpoints.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .peft_dcformer import register_peft_targets

LAYER_TYPES = ("sliding_attention", "full_attention")
NORM_TYPES = ("rmsnorm", "layernorm")
MLP_TYPES = ("gated", "plain")
COMPOSE_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh")

# Published sizes: (num_hidden_layers, hidden_size, num_attention_heads, head_dim, intermediate_size).
_SIZES = {
    "dcformer-405m": (24, 1024, 16, 64, 2816),
    "dcformer-834m": (24, 1536, 24, 64, 4096),
    "dcformer-1.4b": (24, 2048, 32, 64, 5632),
    "dcformer-2.8b": (32, 2560, 32, 80, 6912),
    "dcformer-6.9b": (32, 4096, 32, 128, 11008),
    "dcformer-13b": (40, 5120, 40, 128, 13824),
    "dcformer-33b": (60, 6656, 52, 128, 17920),
    "dcformer-8b-mgate": (48, 4096, 32, 128, 5632),
    "dcpythia-2.8b": (32, 2560, 32, 80, 10240),
    "dcpythia-6.9b": (32, 4096, 32, 128, 16384),
}

PRESETS = tuple(_SIZES)

# What else a preset sets. Sizes trained in JAX use the tanh GELU and norm_eps 1e-5; the repositories published as
# PyTorch checkpoints use the erf GELU and their own norm_eps.
_PRESET_EXTRAS: dict[str, dict[str, Any]] = {
    "dcformer-2.8b": {"norm_eps": 1e-6, "qk_norm_eps": 1e-6, "compose_act": "gelu"},
    "dcformer-8b-mgate": {
        "vocab_size": 152064,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "layer_pattern": "LGLL",
        "mlp_gates": 44,
        "norm_eps": 1e-6,
        "qk_norm_eps": 1e-6,
        "compose_act": "gelu",
    },
    "dcpythia-6.9b": {"qk_norm_eps": 1e-6, "compose_act": "gelu"},
}

# Keys of the authors' PyTorch configurations -> ours.
_LEGACY_RENAMED = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "block_size": "max_position_embeddings",
}
# Keys that only steer the authors' PyTorch code, or point to it.
_LEGACY_IGNORED = ("q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad", "auto_map")
# Keys that say whether the static projection is there.
_LEGACY_STATIC = ("use_sw", "static_proj")
# Their model classes -> ours.
_LEGACY_ARCHITECTURES = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}


def is_authors_config(config_dict: dict[str, Any]) -> bool:
    """Whether a configuration is written in the keys of the authors' PyTorch code (`dim`, `n_layer`, `n_head`, ...)."""
    return any(key in config_dict for key in ("dim", "n_layer", "n_head"))


@dataclass(frozen=True)
class ComposeOverhead:
    """What composition adds to a model (paper section 3.3 and Table 2).

    Attributes:
        parameters: parameters added, exact: equal to what counting the built model's composition tensors gives.
        parameter_ratio: `parameters` over all other parameters outside the embeddings.
        flops_per_token: floating point operations added to the forward pass of one token at the given sequence
            length, exact for the formula of composition: 2 per multiply-add, every one of the sequence's keys.
        flops_ratio: `flops_per_token` over the forward operations of the plain model's layers.
        paper_parameter_ratio: the paper's leading-order estimate, (2R+1)/(3D) for full composition: generator
            projections from the hidden state only, over the 12·E² parameters of a Transformer layer.
        paper_flops_ratio: the paper's leading-order estimate, 4(2R+1)(1+r)/((12+r)D) with r = S/E.
    """

    parameters: int
    parameter_ratio: float
    flops_per_token: int
    flops_ratio: float
    paper_parameter_ratio: float
    paper_flops_ratio: float


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
class DCFormerConfig(PreTrainedConfig):
    """Configuration of a DCFormer model: a Transformer whose attention heads are composed dynamically (DCMHA).

    The defaults give DCFormer-405M. DCPythia is the same class of models with other settings (`DCPythiaConfig`). Keys
    of the authors' published configurations (`dim`, `n_layer`, `window_type`, ...) are read and never written.

    Args:
        vocab_size (`int`): number of token ids.
        hidden_size (`int`): width E of the residual stream.
        intermediate_size (`int`): width F of the MLP.
        num_hidden_layers (`int`): number of decoder layers.
        num_attention_heads (`int`): number of query heads H.
        num_key_value_heads (`int`, *optional*): number of key/value heads; `num_attention_heads` when not given.
        head_dim (`int`, *optional*): width D of a head; `hidden_size // num_attention_heads` when not given.
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
        sliding_window (`int`, *optional*): keys a local layer's query sees, its own included; None for no local layers.
        layer_types (`list[str]`, *optional*): "sliding_attention" or "full_attention", one per layer. Made from
            `layer_pattern` when not given.
        layer_pattern (`str` or `list[str]`, *optional*, defaults to "LG"): pattern of local and global layers repeated
            over the depth, such as "LG", "LGLL", "LGL6" or a list. Read only; `layer_types` is what is stored.
        compose_rank (`int`): rank R of the dynamic low-rank projections.
        compose_groups (`int`): groups G of heads; only heads of a group are mixed.
        compose_pre (`bool`): compose scores before the softmax.
        compose_post (`bool`): compose weights after the softmax.
        compose_query (`bool`): query-wise branches (weights made from the query's hidden state).
        compose_key (`bool`): key-wise branches (weights made from the key's hidden state).
        compose_projection (`bool`): the dynamic low-rank projections.
        compose_gate (`bool`): the dynamic gates.
        compose_static (`bool`): the static projection; with neither query- nor key-wise branches: talking heads.
        compose_act (`str`): "gelu" (erf, the authors' PyTorch code) or "gelu_pytorch_tanh" (their JAX code).
        attention_dropout (`float`): dropout of the composed attention weights.
        hidden_dropout (`float`): dropout of what attention and MLP add to the residual stream.
        initializer_range (`float`): standard deviation of weights outside composition.
        use_cache (`bool`): return a cache for decoding.
        tie_word_embeddings (`bool`): share input and output embeddings.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): special tokens.

    A model with all of `compose_pre`, `compose_post`, `compose_query`, `compose_key` and `compose_static` off is a
    plain Transformer.

    Raises:
        ValueError: on a combination that describes no model; the message names the fields.
    """

    model_type = "dcformer"
    keys_to_ignore_at_inference = ["past_key_values"]

    # Fields about which the authors' keys say nothing, so that `from_pretrained` takes them from the stored tensors.
    # Empty unless the configuration was read from the authors' keys; never stored.
    _open_fields: ClassVar[tuple[str, ...]] = ()

    # Composition is sharded by groups of heads, like the heads themselves, and so needs no collective of its own. Kept
    # as a superset here; a configuration drops the entries of modules that it does not have.
    base_model_tp_plan = {
        "layers.*.input_layernorm": "dcformer_replicated_for_columns",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.compose": "local_params",
        "layers.*.self_attn.compose.dw1_proj": "colwise",
        "layers.*.self_attn.compose.gate_proj": "colwise",
        "layers.*.self_attn.compose.qkw": "colwise",
        "layers.*.self_attn.compose.pre_static": "colwise",
        "layers.*.self_attn.compose.post_static": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.post_attention_layernorm": "dcformer_replicated_for_columns",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
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
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if is_authors_config(kwargs):
            kwargs = self._read_legacy(kwargs)
        layer_pattern = kwargs.pop("layer_pattern", None)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
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
        self._check_changes()  # here too, so that the error is a plain ValueError

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Fewer layers keep the types of the first ones; those of the others come back with them."""
        super().__setattr__(name, value)
        if name == "layer_types":
            self.__dict__.pop("_all_layer_types", None)
        elif name == "num_hidden_layers" and (types := self.__dict__.get("layer_types")) is not None:
            types = self.__dict__.pop("_all_layer_types", types)
            if 0 <= value < len(types):
                self.__dict__["_all_layer_types"] = types
            self.__dict__["layer_types"] = types[:value] if value >= 0 else types

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """The class's plan without the modules that this configuration does not have."""
        dynamic = bool(self.compose_generators)
        present = {
            "self_attn.q_norm": self.qk_norm,
            "self_attn.k_norm": self.qk_norm,
            "compose": dynamic or self.compose_static,
            "compose.dw1_proj": dynamic and self.compose_projection,
            "compose.qkw": dynamic and self.compose_projection,
            "compose.gate_proj": dynamic and self.compose_gate,
            "compose.pre_static": self.compose_static and self.compose_pre,
            "compose.post_static": self.compose_static and self.compose_post,
            # multi-gate MLPs stay whole: their softmax runs over gates that sit with all slices of the activation
            "post_attention_layernorm": not self.mlp_gates,
            "mlp.gate_proj": self.mlp_type == "gated" and not self.mlp_gates,
            "mlp.up_proj": not self.mlp_gates,
            "mlp.down_proj": not self.mlp_gates,
        }
        absent = tuple("." + name for name, is_present in present.items() if not is_present)
        return {name: style for name, style in type(self).base_model_tp_plan.items() if not name.endswith(absent)}

    def _read_legacy(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Takes the keys of an authors' configuration out of `kwargs` and sets the fields they stand for."""
        kwargs = {key: value for key, value in kwargs.items() if key not in _LEGACY_IGNORED}
        for old, new in _LEGACY_RENAMED.items():
            if old in kwargs:
                setattr(self, new, kwargs.pop(old))
        if self.architectures:
            self.architectures = [_LEGACY_ARCHITECTURES.get(name, name) for name in self.architectures]
        self.qk_norm = kwargs.pop("use_qk_norm", False)
        self.attention_bias = self.mlp_bias = kwargs.pop("use_linear_bias", self.attention_bias)
        kv_heads = kwargs.pop("n_local_heads", -1)
        self.num_key_value_heads = self.num_attention_heads if kv_heads in (-1, None) else kv_heads
        self.qk_norm_eps = 1e-6  # fixed in the authors' PyTorch code, whatever norm_eps says
        self.compose_act = "gelu"
        rope = {"rope_type": "default", "rope_theta": float(kwargs.pop("rope_base", 10000))}
        if "rotary_pct" in kwargs:
            rope["partial_rotary_factor"] = kwargs.pop("rotary_pct")
        if self.rope_parameters is None:
            self.rope_parameters = rope
        if kwargs.pop("query_wise", False):
            self.compose_key = False
        if not kwargs.pop("use_dcmha", True):
            self.compose_pre = self.compose_post = self.compose_query = self.compose_key = False
        stated = {key: kwargs.pop(key) for key in _LEGACY_STATIC if key in kwargs}
        stated = {key: bool(value) for key, value in stated.items() if value is not None}
        if len(set(stated.values())) > 1:
            raise ValueError(f"{stated} contradict each other: both say whether the static projection is there.")
        if stated:
            self.compose_static = any(stated.values())
        open_fields = ("compose_groups", "compose_rank") + (() if stated else ("compose_static",))
        self.__dict__["_open_fields"] = open_fields
        if kwargs.pop("mgate", False):
            self.mlp_gates = kwargs.get("mgate_dim", 44)
        kwargs.pop("mgate_dim", None)
        window_type, window = kwargs.pop("window_type", None), kwargs.pop("window_size", 256)
        self.sliding_window = window if window_type is None else 256
        if self.layer_types is None and "layer_pattern" not in kwargs:
            kwargs["layer_pattern"] = (window_type or "LG") if self.sliding_window is not None else "G"
        return kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`, for configurations in this package's keys and in the authors'.

        What is overridden has to fit the rest: `num_hidden_layers` below the stored number keeps the types of the first
        layers, above it needs `layer_types` or `layer_pattern` too.

        Raises:
            ValueError: when the configuration with its overrides describes no model.
        """
        said = config_dict | kwargs
        if is_authors_config(config_dict) and said.get("compose_static") is not None:
            # in their spelling, as a field's own default cannot be told from a value that was given
            config_dict = config_dict | {_LEGACY_STATIC[1]: said["compose_static"]}
        layer_pattern = kwargs.pop("layer_pattern", None)
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if layer_pattern is not None:
            config.layer_types = _repeat_pattern(layer_pattern, config.num_hidden_layers)
        config._check_changes()
        return loaded

    def to_dict(self) -> dict[str, Any]:
        """All fields, in this package's keys."""
        register_peft_targets(self.model_type)  # PEFT asks for this dictionary just before it looks into its tables
        fields = super().to_dict()
        fields.pop("_open_fields", None)
        fields.pop("_all_layer_types", None)
        return fields

    def settle(self, **fields: Any) -> None:
        """Sets fields that the authors' keys left open, as the stored tensors tell them.

        Args:
            fields: names and values. Those that were not open are left as they are.

        Raises:
            ValueError: when the configuration then describes no model.
        """
        for name, value in fields.items():
            if name in self._open_fields:
                setattr(self, name, value)
        self.__dict__.pop("_open_fields", None)
        self._check_changes()

    def _check_changes(self) -> None:
        """After fields were set: do they still describe a model, and which of its modules can be split?"""
        self.validate_architecture()
        self.base_model_tp_plan = self._tensor_parallel_plan()  # type: ignore[misc]  # a class's default, said otherwise

    def validate_architecture(self):
        """Checks that the fields describe a model. Called by Transformers after construction and before saving.

        Raises:
            ValueError: naming the fields, their values and what was expected.
        """
        self._validate_sizes()
        self._validate_layers()
        self._validate_composition()

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
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must not be negative.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}."
            )
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
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown: expected one of {', '.join(sorted(ACT2FN))}.")
        rope = self.rope_parameters or {}
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if (rope_type := rope.get("rope_type", "default")) not in known:
            raise ValueError(f"rope_type={rope_type!r} is unknown: expected one of {', '.join(known)}.")
        factor = rope.get("partial_rotary_factor", 1.0)
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor={factor} must be in (0, 1].")
        rotary_dim = int(self.head_dim * factor)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"The rotary dimension head_dim * partial_rotary_factor = {self.head_dim} * {factor} = {rotary_dim} "
                "must be even and at least 2."
            )

    def _validate_layers(self) -> None:
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types holds unknown {unknown}: expected entries of {LAYER_TYPES}.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"len(layer_types)={len(self.layer_types)} must equal num_hidden_layers={self.num_hidden_layers}: give "
                "one layer type per layer, or a layer_pattern."
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 2):
            raise ValueError(
                f"layer_types holds 'sliding_attention' but sliding_window={self.sliding_window}: give the number of "
                "keys a local query sees (at least 2: the library's sliding caches hold no fewer), or make every layer "
                "'full_attention'."
            )

    def _validate_composition(self) -> None:
        if self.compose_rank < 1:
            raise ValueError(
                f"compose_rank={self.compose_rank} must be at least 1; to have no low-rank projections set "
                "compose_projection=False."
            )
        if self.compose_groups < 1 or self.num_attention_heads % self.compose_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of compose_groups="
                f"{self.compose_groups}."
            )
        if self.compose_act not in COMPOSE_ACTIVATIONS:
            raise ValueError(f"compose_act={self.compose_act!r} is unknown: expected one of {COMPOSE_ACTIVATIONS}.")
        stages = [name for name in ("compose_pre", "compose_post") if getattr(self, name)]
        sides = [name for name in ("compose_query", "compose_key") if getattr(self, name)]
        branches = sides + ["compose_static"] * self.compose_static
        if branches and not stages:
            raise ValueError(
                f"{' and '.join(branches)} on, but compose_pre and compose_post are both off: turn one of them on, or "
                "all of these off for a plain Transformer."
            )
        if stages and not branches:
            raise ValueError(
                f"{' and '.join(stages)} on, but compose_query, compose_key and compose_static are all off, so there "
                "is nothing to compose with: turn one of them on, or all of these off for a plain Transformer."
            )
        if sides and not (self.compose_projection or self.compose_gate):
            raise ValueError(
                f"{' and '.join(sides)} on, but compose_projection and compose_gate are both off: turn one of them on."
            )

    def check_tensor_parallel(self, size: int) -> None:
        """Whether the model can be split over devices by heads, with composition staying on each.

        Args:
            size: devices that share a layer.

        Raises:
            ValueError: when a group of heads, or the query heads of a key/value head, would be cut.
        """
        composed = bool(self.compose_generators) or self.compose_static
        if composed and self.compose_groups % size:
            raise ValueError(
                f"compose_groups={self.compose_groups} is no multiple of the tensor-parallel size {size}: heads of a "
                "group are mixed with each other, so a group must stay on one device. Use a size that divides "
                "compose_groups, or FSDP, which splits parameters and not heads. (A model trained with "
                "compose_groups=1 mixes all heads and cannot be split this way.)"
            )
        if self.num_key_value_heads % size:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} is no multiple of the tensor-parallel size {size}: "
                "a head must stay on one device. Use a size that divides it, or FSDP."
            )

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "DCFormerConfig":
        """A configuration of a published size.

        Args:
            name: one of "dcformer-405m", "dcformer-834m", "dcformer-1.4b", "dcformer-2.8b", "dcformer-6.9b",
                "dcformer-13b", "dcformer-33b", "dcformer-8b-mgate", "dcpythia-2.8b" and "dcpythia-6.9b".
            overrides: fields to set otherwise, as for the constructor.

        Returns:
            `DCFormerConfig`, or `DCPythiaConfig` for the DCPythia sizes.

        Raises:
            ValueError: on an unknown name.
        """
        if name not in _SIZES:
            raise ValueError(f"Unknown preset {name!r}: expected one of {sorted(_SIZES)}.")
        layers, hidden_size, heads, head_dim, intermediate_size = _SIZES[name]
        fields = {
            "num_hidden_layers": layers,
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate_size,
        }
        config_class = DCPythiaConfig if name.startswith("dcpythia") else DCFormerConfig
        return config_class(**(fields | _PRESET_EXTRAS.get(name, {}) | overrides))

    @property
    def compose_generators(self) -> tuple[tuple[str, str], ...]:
        """The dynamic weight generators that exist, as (stage, side), in the order of stored tensors.

        Of ("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"); their number is C' <= 4.
        """
        stages = [stage for stage in ("pre", "post") if getattr(self, f"compose_{stage}")]
        sides = [side for side in ("query", "key") if getattr(self, f"compose_{side}")]
        return tuple((stage, side) for stage in stages for side in sides)

    def compose_cache_channels(self, stage: str) -> int:
        """Channels that composition adds behind each cached key (stage "pre") or value (stage "post").

        The key-wise outputs of all query heads of a key/value head, 2R + 1 numbers each (low-rank pair and gate),
        padded to a multiple of 8 channels so that rows stay 16-byte aligned in 16-bit dtypes.
        """
        if (stage, "key") not in self.compose_generators:
            return 0
        per_head = 2 * self.compose_rank * self.compose_projection + self.compose_gate
        used = per_head * (self.num_attention_heads // self.num_key_value_heads)
        return -(-used // 8) * 8

    def num_parameters(self, exclude_embeddings: bool = False) -> int:
        """Number of parameters of the causal language model, from the sizes alone.

        Args:
            exclude_embeddings: leave out the input embedding and the output projection.
        """
        e, d, f = self.hidden_size, self.head_dim, self.intermediate_size
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = e * (q + 2 * kv) + q * e + (q + 2 * kv + e) * self.attention_bias + 2 * d * self.qk_norm
        matrices = 3 if self.mlp_type == "gated" else 2
        mlp = matrices * e * f + ((matrices - 1) * f + e) * self.mlp_bias + self.mlp_gates * e
        norm = e * (2 if self.norm_type == "layernorm" else 1)
        total = self.num_hidden_layers * (attention + mlp + 2 * norm) + norm + self.num_compose_parameters()
        if not exclude_embeddings:
            total += self.vocab_size * e * (1 if self.tie_word_embeddings else 2)
        return total

    def num_compose_parameters(self) -> int:
        """Number of parameters that composition adds to the model, all layers together (paper section 3.3)."""
        e, h, r = self.hidden_size, self.num_attention_heads, self.compose_rank
        m, generators = h // self.compose_groups, len(self.compose_generators)
        low_rank = e * 2 * r * h + (2 * r * h) * (2 * r * m) if self.compose_projection else 0
        gate = e * h if self.compose_gate else 0
        static = (self.compose_pre + self.compose_post) * h * m if self.compose_static else 0
        return self.num_hidden_layers * (generators * (low_rank + gate) + static)

    def compose_overhead(self, sequence_length: int | None = None) -> ComposeOverhead:
        """What composition adds in parameters and in forward operations per token (paper section 3.3, Table 2).

        Args:
            sequence_length: S, in tokens; `max_position_embeddings` when not given. Every layer is counted as global,
                as the paper does.

        Returns:
            `ComposeOverhead`, exact counts and the paper's leading-order ratios.
        """
        s = self.max_position_embeddings if sequence_length is None else sequence_length
        e, h, d, r = self.hidden_size, self.num_attention_heads, self.head_dim, self.compose_rank
        m, generators = h // self.compose_groups, len(self.compose_generators)
        parameters = self.num_compose_parameters()
        plain = self.num_parameters(exclude_embeddings=True) - parameters

        per_head = 2 * r * self.compose_projection + self.compose_gate  # multiply-adds per (query, key, head)
        static = (self.compose_pre + self.compose_post) * self.compose_static
        generate = 2 * parameters - 2 * self.num_hidden_layers * static * h * m
        mix = self.num_hidden_layers * 2 * s * h * (generators * per_head + static * m)
        matmuls = self.num_hidden_layers * (2 * (h * d) * s)  # QK and PV over the causal half of S keys
        rho = s / e
        return ComposeOverhead(
            parameters=parameters,
            parameter_ratio=parameters / plain if plain else 0.0,
            flops_per_token=generate + mix,
            flops_ratio=(generate + mix) / (2 * plain + matmuls) if plain else 0.0,
            paper_parameter_ratio=generators * per_head / (12 * d),
            paper_flops_ratio=generators * per_head * (1 + rho) / ((12 + rho) * d),
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
        # Where nothing is said about RoPE, Pythia's quarter; a stored configuration always says it.
        if self.rope_parameters is None and "rotary_pct" not in kwargs:
            kwargs.setdefault("partial_rotary_factor", 0.25)
        super().__post_init__(**kwargs)


__all__ = ["ComposeOverhead", "DCFormerConfig", "DCPythiaConfig", "is_authors_config"]
