"""The authors' configurations (DCFormer-2.8B, DCPythia-6.9B and others in their keys) in the words of this package.

Everything here is a pure function of what `config.json` holds.
"""

from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_local_heads": "num_key_value_heads",
    "block_size": "max_position_embeddings",
    "use_qk_norm": "qk_norm",
    "rope_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
# Keys that only steer the authors' PyTorch code, or point to it.
_IGNORED = ("q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad", "auto_map")
# Keys that say whether the static projection is there.
_STATIC = ("use_sw", "static_proj")
_ARCHITECTURES = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}
_WINDOW = 256  # of the named layer patterns in the authors' PyTorch code


def is_authors_config(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is written in the keys of the authors' PyTorch code (`dim`, `n_layer`, `n_head`, ...)."""
    return any(key in config for key in ("dim", "n_layer", "n_head"))


def native_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `DCFormerConfig` or `DCPythiaConfig` from a configuration in the authors' keys.

    Args:
        config: what the authors' `config.json` holds. Keys that are not theirs are kept as they are.

    Returns:
        a new dictionary in this package's keys. What the authors' code fixes (`qk_norm_eps`, `compose_act`) is in it;
        what their keys do not decide (`undecided_fields`) is not.

    Raises:
        ValueError: when keys contradict each other.
    """
    authors = {key: value for key, value in config.items() if key not in _IGNORED}
    take = authors.pop
    if authors.get("n_local_heads") == -1:  # as many as query heads
        authors["n_local_heads"] = None
    fields: dict[str, Any] = {"qk_norm": False, "qk_norm_eps": 1e-6, "compose_act": "gelu"}
    fields |= {new: take(old) for old, new in _RENAMED.items() if old in authors}
    fields["rope_theta"] = float(fields.get("rope_theta", 10000))
    if authors.get("architectures"):
        fields["architectures"] = [_ARCHITECTURES.get(name, name) for name in take("architectures")]
    if "use_linear_bias" in authors:
        fields["attention_bias"] = fields["mlp_bias"] = take("use_linear_bias")
    if take("query_wise", False):
        fields["compose_key"] = False
    if not take("use_dcmha", True):
        fields |= dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)
    gates = take("mgate_dim", 44)
    if take("mgate", False):
        fields["mlp_gates"] = gates
    pattern, window = take("window_type", None), take("window_size", _WINDOW)
    fields["sliding_window"] = window if pattern is None else _WINDOW
    if "layer_pattern" not in authors:
        fields["layer_pattern"] = "G" if fields["sliding_window"] is None else pattern or "LG"
    static = {key: bool(value) for key in _STATIC if (value := take(key, None)) is not None}
    if len(set(static.values())) > 1:
        raise ValueError(f"{static} contradict each other: both say whether the static projection is there.")
    if static:
        fields["compose_static"] = any(static.values())
    return authors | fields


def undecided_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a configuration in the authors' keys leaves to the stored tensors; never none.

    Args:
        config: as for `native_fields`, with what overrides it.
    """
    is_stated = any(config.get(key) is not None for key in (*_STATIC, "compose_static"))
    return ("compose_groups", "compose_rank") if is_stated else ("compose_groups", "compose_rank", "compose_static")


__all__ = ["is_authors_config", "native_fields", "undecided_fields"]
