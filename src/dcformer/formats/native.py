"""This package's own folders, as `save_pretrained` writes them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from ..errors import ConversionError
from ..layouts_dcformer import TensorLayout
from .base import FolderFormat, Part, native_shapes

# Not part of the architecture: a checkpoint neither determines nor contradicts them.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NATIVE_FIELDS = {f.name for f in fields(DCFormerConfig)} | {"layer_pattern", "partial_rotary_factor", "rope_theta"}
_OTHER_KEYS = {"architectures", "dtype", "transformers_version", "model_type", "auto_map", "torch_dtype"}


class NativeFormat(FolderFormat):
    """Every tensor is stored under its own name, unchanged."""

    name, title = "native", "this package"
    marker, head = "model.embed_tokens.weight", "lm_head.weight"

    def parts(self, config: DCFormerConfig, **_: Any) -> list[Part]:
        return [
            Part(name, TensorLayout(name, "", ((name, ""),)), whole=tuple(shape))
            for name, shape in native_shapes(config).items()
        ]

    def fields_of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(content) - NATIVE_FIELDS - _OTHER_KEYS - set(DCFormerConfig().to_dict()))
        if unknown:
            raise ConversionError(
                f"unknown fields {', '.join(map(repr, unknown[:6]))}: expected those of DCFormerConfig, of the "
                "hub format, or of a MaxText configuration."
            )
        # null is a value of sliding_window; elsewhere it stands for the class's default
        given = {key for key, value in content.items() if value is not None or key == "sliding_window"}
        result = {key: content[key] for key in content if key in given & (NATIVE_FIELDS | {"model_type", *TOKENS})}
        for name in {"norm_eps", "qk_norm_eps", "rope_theta", "partial_rotary_factor"} & set(result):
            try:
                result[name] = float(result[name])
            except (TypeError, ValueError) as error:
                raise ConversionError(f"{name}={result[name]!r} is not a number.") from error
        return result


__all__ = ["NATIVE_FIELDS", "TOKENS", "NativeFormat"]
