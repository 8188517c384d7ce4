"""Configuration of DCViT: a vision Transformer with dynamically composable multi-head attention.

Sources: the paper (arXiv 2405.08553, section 4.4 and Table 7) and the authors' fork of big_vision
(`Lisennlp/big_vision`, `models/vit.py`). Letters: E hidden size, F MLP width, H heads, M heads of a group.
"""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from ..compose_dcformer import ComposeFields

POSITION_EMBEDDING_TYPES = ("sincos2d", "learned")
POOLING_TYPES = ("mean", "cls")
QK_NORM_TYPES = (None, "layernorm")

_SMALL = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
_MEDIUM = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
_PLAIN = {
    "compose_pre": False,
    "compose_post": False,
    "compose_query": False,
    "compose_key": False,
    "compose_static": False,
    "qk_norm": None,
}
# The models of Table 7: 224 pixels, patches of 16, 1000 classes. Where paper and fork disagree, as in the fork.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "vit-s/16": _SMALL | _PLAIN | {"num_labels": 1000},
    "dcvit-s/16": _SMALL | {"num_labels": 1000, "compose_gate_init": 0.005},
    "vit-m/16": _MEDIUM | _PLAIN | {"num_labels": 1000},
}

_DERIVED = {  # properties, which fields of other configurations are called like
    "head_dim": "it is hidden_size / num_attention_heads",
    "num_key_value_heads": "every head has keys and values of its own",
    "initializer_range": "matrices start Xavier-uniform",
    "grid": "it is image_size / patch_size",
}


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """A size as (height, width)."""
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise ValueError(f"image_size and patch_size are a number or [height, width], got {size}.")
    return size[0], size[1]


@strict
class DCViTConfig(ComposeFields, PreTrainedConfig):
    """Configuration of a DCViT model: a vision Transformer whose attention heads are composed dynamically (DCMHA).

    The defaults give the paper's DCViT-S/16, with the fields of Transformers' `ViTConfig` where they exist there.

    Args:
        image_size (`int` or `[height, width]`): pixels of an image.
        patch_size (`int` or `[height, width]`): pixels of a patch; divides `image_size`.
        num_channels (`int`): channels of an image.
        hidden_size (`int`): width E of the residual stream.
        intermediate_size (`int`): width F of the MLP.
        num_hidden_layers (`int`): number of layers.
        num_attention_heads (`int`): number of heads H; divides `hidden_size`.
        hidden_act (`str`): activation of the MLP, a name known to Transformers.
        layer_norm_eps (`float`): epsilon of all norms.
        qkv_bias (`bool`): biases in q, k and v projections; the output projection and the MLP always have them.
        hidden_dropout_prob (`float`): dropout of embeddings and of the outputs of attention and MLP.
        attention_probs_dropout_prob (`float`): dropout of the composed attention weights.
        position_embedding_type (`str`): "sincos2d" (fixed, for any grid of patches) or "learned" (of std 1/√E at the
            start).
        pooling (`str`): what is classified: "mean" (the mean over the patches; no class token) or "cls" (the class
            token).
        representation_size (`int` or `True`, *optional*): width of a dense layer with tanh after pooling; True for
            `hidden_size`, None for no such layer.
        qk_norm (`str`, *optional*): "layernorm" (over the head dim of queries and keys, with a scale and no bias) or
            None.
        compose_rank, compose_groups, compose_pre, compose_post, compose_query, compose_key, compose_projection,
            compose_gate, compose_static, compose_act: as in `DCFormerConfig`. With pre, post, query, key and static
            off, the model is a plain vision Transformer.
        save_maps (`bool`): as in `DCFormerConfig`.
        compose_gate_init (`float`): the gates' kernels start with this times sqrt(2 / (E + M)) as their standard
            deviation: 0.05 in the paper, 0.005 in the fork.

    Raises:
        ValueError: on an invalid combination; the message names the fields.
    """

    model_type = "dcvit"
    # Read by the mask functions: no query is bound to earlier keys.
    is_causal = False
    # Standard deviation of ordinary matrices at the start, with which `parameter_groups` compares composition's. Not a
    # field: projections start Xavier-uniform, and for a square one that is 1/√E.
    initializer_range = property(lambda self: self.hidden_size**-0.5)

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 384
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    position_embedding_type: str = "sincos2d"
    pooling: str = "mean"
    representation_size: int | bool | None = True
    qk_norm: str | None = "layernorm"
    compose_rank: int = 2
    compose_groups: int = 1
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_projection: bool = True
    compose_gate: bool = True
    compose_static: bool = True
    compose_act: str = "gelu_pytorch_tanh"
    compose_gate_init: float = 0.05
    save_maps: bool = False

    def __post_init__(self, **kwargs):
        self.check_names(kwargs)
        if isinstance(self.representation_size, bool):
            self.representation_size = self.hidden_size if self.representation_size else None
        super().__post_init__(**kwargs)
        self.validate_architecture()  # here too, so that the error is a plain ValueError

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _DERIVED:
            raise ValueError(f"{name}={value!r} cannot be given: {_DERIVED[name]}. Leave it out.")
        super().__setattr__(name, value)

    @property
    def num_key_value_heads(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Every head has keys and values of its own."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width D of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size`."""
        (height, width), (patch_height, patch_width) = pair(self.image_size), pair(self.patch_size)
        return height // patch_height, width // patch_width

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "DCViTConfig":
        """A configuration of a size in the paper's Table 7.

        Args:
            name: a key of `VISION_PRESETS`: "vit-s/16", "dcvit-s/16" or "vit-m/16".
            overrides: fields to set otherwise, as for the constructor.

        Raises:
            ValueError: on an unknown name.
        """
        if name not in VISION_PRESETS:
            raise ValueError(f"Unknown preset {name!r}: expected one of {sorted(VISION_PRESETS)}.")
        return cls(**(VISION_PRESETS[name] | overrides))

    def validate_architecture(self):
        """Checks that the fields fit together. Called by Transformers after construction and before saving.

        Raises:
            ValueError: naming the fields, their values and what was expected.
        """
        for name in ("num_channels", "hidden_size", "intermediate_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps={self.layer_norm_eps} must be above 0 and finite.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must not be negative.")
        for size, patch in zip(pair(self.image_size), pair(self.patch_size), strict=True):
            if patch < 1 or size < 1 or size % patch:
                raise ValueError(
                    f"image_size={self.image_size} must be a positive multiple of patch_size={self.patch_size}."
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}."
            )
        for name, known in (
            ("position_embedding_type", POSITION_EMBEDDING_TYPES),
            ("pooling", POOLING_TYPES),
            ("qk_norm", QK_NORM_TYPES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: expected one of {known}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown: expected one of {', '.join(sorted(ACT2FN))}.")
        if self.position_embedding_type == "sincos2d" and (self.hidden_size % 4 or self.hidden_size < 8):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 4, and at least 8, for position_embedding_type="
                "'sincos2d': a quarter each for the sine and cosine of columns and rows."
            )
        if self.representation_size is not None and self.representation_size < 1:
            raise ValueError(f"representation_size={self.representation_size} must be at least 1, or None for none.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1).")
        if not 0 <= self.compose_gate_init < math.inf:
            raise ValueError(f"compose_gate_init={self.compose_gate_init} must not be negative, infinite or NaN.")
        self.check_composition()


__all__ = ["VISION_PRESETS", "DCViTConfig"]
