"""The hub format, of the authors' PyTorch repositories on the Hub (DCFormer-2.8B, DCPythia-6.9B): read only.

Its table of tensors and its configuration keys are in the modules with which `from_pretrained` loads such repositories:
`layouts_dcformer`, `legacy_dcformer` and `hub_dcformer`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from ..errors import CONFIG_ERRORS, ConversionError, raise_bug
from ..hub_dcformer import StoredWeights, complete_config
from ..layouts_dcformer import HUB_IGNORED, HUB_STATIC, TensorLayout, hub_layouts
from ..legacy_dcformer import DEFAULT_GATES, PATTERN_WINDOW, RENAMED
from .base import FolderFormat, TensorSource
from .native import NATIVE_FIELDS, TOKENS

_OWN_WORDS = {*RENAMED, "use_linear_bias", "window_type", "use_dcmha", "mgate", "q_chunk_size"}


class HubFormat(FolderFormat):
    """`config.json` with the authors' keys beside `pytorch_model.bin` or safetensors with the authors' names."""

    name, title = "hub", "the authors' config.json"
    marker, head = "tok_embeddings.weight", "output.weight"

    def layouts(self, mlp_type: str, norm_type: str) -> list[TensorLayout]:
        return hub_layouts(mlp_type)

    def read_config(self, folder: Path, source: TensorSource) -> DCFormerConfig:
        """The folder's configuration, completed from the tensors where it is silent."""
        config = super().read_config(folder, source)
        try:
            return complete_config(config, _stored_weights(source))
        except CONFIG_ERRORS as error:
            raise_bug(error)
            raise ConversionError(f"{folder} describes no model ({error}).") from error

    def stored_generators(self, source: TensorSource) -> int:
        place = {5: 1, 4: 2}  # of C in qkw [G, C, K, 2R, M] and dw1 [E, G, C, K]
        shapes = [
            info.shape for name, info in source.infos.items() if name.endswith((".dyn_w_proj.qkw", ".dyn_w_proj.dw1"))
        ]
        return mode([shape[place[len(shape)]] for shape in shapes if len(shape) in place] or [4])

    def unused(self, config: DCFormerConfig, source: TensorSource) -> list[str]:
        """Besides a tied head: merged duplicates, and identity matrices under the names of static projections."""
        tied = super().unused(config, source)
        names = [name for name in source.infos if name in tied or HUB_IGNORED.fullmatch(name)]
        if not config.compose_static and not _stored_weights(source).has_static:
            names += [name for name in source.infos if HUB_STATIC.fullmatch(name)]
        return names

    def config_words(self, content: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        shared = {"query_wise"} if isinstance(content.get("window_size"), list) else {"query_wise", "window_size"}
        return _OWN_WORDS & set(content), shared & set(content)

    def fields_of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Only what the keys decide; what the authors' PyTorch code fixes is left out."""
        result = {new: content[old] for old, new in RENAMED.items() if content.get(old) is not None}
        result |= {k: v for k, v in content.items() if k in NATIVE_FIELDS | {*TOKENS, "model_type"} and v is not None}
        if content.get("n_local_heads") == -1:  # as many as query heads, which need not be stated
            del result["num_key_value_heads"]
        if content.get("use_linear_bias") is not None:
            result["attention_bias"] = result["mlp_bias"] = content["use_linear_bias"]
        if content.get("query_wise") is not None:
            result["compose_query"], result["compose_key"] = True, not content["query_wise"]
        if content.get("use_dcmha") is False:
            result |= {f"compose_{part}": False for part in ("pre", "post", "query", "key")}
        if content.get("mgate") is not None:
            result["mlp_gates"] = content.get("mgate_dim") or DEFAULT_GATES if content["mgate"] else 0
        if content.get("window_type") is not None:
            result["layer_pattern"], result["sliding_window"] = content["window_type"], PATTERN_WINDOW
        elif "window_size" in content:
            result["layer_pattern"] = "G" if content["window_size"] is None else "LG"
            result["sliding_window"] = content["window_size"]
        return result


def _stored_weights(source: TensorSource) -> StoredWeights:
    return StoredWeights.read((name, info.shape, partial(source.read, name)) for name, info in source.infos.items())


__all__ = ["HubFormat"]
