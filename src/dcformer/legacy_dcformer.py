"""Configurations in the hub format (the authors' DCFormer-2.8B, DCPythia-6.9B, ...) as fields of this package.

Everything here is a pure function of the content of `config.json`.
"""

from collections.abc import Mapping
from typing import Any

# Keys of the hub format that only have another name here.
RENAMED = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_local_heads": "num_key_value_heads",
    "block_size": "max_position_embeddings",
    "use_qk_norm": "qk_norm",
    "rope_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
# Keys that only configure the authors' PyTorch code, or point to it.
_IGNORED = ("q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad", "auto_map")
# Keys that say whether there is a static projection.
_STATIC = ("use_sw", "static_proj")
# Fields that no key says.
_UNDECIDED = ("compose_groups", "compose_rank", "compose_static")
# All keys that only this format has.
HUB_KEYS = frozenset({*RENAMED, *_STATIC, "use_linear_bias", "query_wise", "use_dcmha", "mgate", "mgate_dim"})
HUB_KEYS |= {"window_type", "window_size"}
_ARCHITECTURES = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}
# What the authors' PyTorch code fixes: the window of named layer patterns, and the number of gates without `mgate_dim`.
PATTERN_WINDOW, DEFAULT_GATES = 256, 44


def is_hub_config(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has the keys of the hub format (`dim`, `n_layer`, `n_head`, ...)."""
    return any(key in config for key in ("dim", "n_layer", "n_head"))


def native_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `DCFormerConfig` or `DCPythiaConfig` from a configuration in the hub format.

    Args:
        config: the content of a hub folder's `config.json`. Other keys than the format's are kept.

    Returns:
        a new dictionary of this package's fields. It includes what the authors' code fixes (`qk_norm_eps`,
        `compose_act`), and leaves out what the format does not decide (`undecided_fields`).

    Raises:
        ValueError: when keys contradict each other, and on a base of RoPE that is not a number.
    """
    given = {key: value for key, value in config.items() if key not in _IGNORED}
    take = given.pop
    if given.get("n_local_heads") == -1:  # as many as query heads
        given["n_local_heads"] = None
    fields: dict[str, Any] = {"qk_norm": False, "qk_norm_eps": 1e-6, "compose_act": "gelu"}
    fields |= {new: take(old) for old, new in RENAMED.items() if old in given}
    theta = fields.get("rope_theta", 10000)
    try:
        fields["rope_theta"] = float(theta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rope_base={theta!r} is not a number: expected the base of RoPE, such as 10000.") from error
    if given.get("architectures"):
        fields["architectures"] = [_ARCHITECTURES.get(name, name) for name in take("architectures")]
    if "use_linear_bias" in given:
        fields["attention_bias"] = fields["mlp_bias"] = take("use_linear_bias")
    if take("query_wise", False):
        fields["compose_key"] = False
    if not take("use_dcmha", True):
        fields |= dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)
    gates = take("mgate_dim", DEFAULT_GATES)
    if take("mgate", False):
        fields["mlp_gates"] = gates
    pattern, window = take("window_type", None), take("window_size", PATTERN_WINDOW)
    fields["sliding_window"] = window if pattern is None else PATTERN_WINDOW
    if "layer_pattern" not in given:
        fields["layer_pattern"] = "G" if fields["sliding_window"] is None else pattern or "LG"
    static = {key: bool(value) for key in _STATIC if (value := take(key, None)) is not None}
    if len(set(static.values())) > 1:
        raise ValueError(f"{static} contradict each other: each says whether there is a static projection.")
    if static:
        fields["compose_static"] = any(static.values())
    return given | fields


def undecided_fields(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The fields that a hub configuration leaves to the stored tensors to decide; None for this package's.

    Args:
        config: as for `native_fields`; or this package's, which was a hub configuration if it has their names in
            "undecided_fields".

    Raises:
        ValueError: when these are other names.
    """
    if not is_hub_config(config) and "undecided_fields" not in config:
        return None
    stored = config.get("undecided_fields", ())
    if not isinstance(stored, (list, tuple)) or set(stored) - set(_UNDECIDED):
        raise ValueError(f"undecided_fields={stored!r} in the configuration: expected a list of some of {_UNDECIDED}.")
    if not is_hub_config(config):
        return tuple(stored)
    is_stated = any(config.get(key) is not None for key in (*_STATIC, "compose_static"))
    return tuple(name for name in _UNDECIDED if not (is_stated and name == "compose_static"))


__all__ = [
    "DEFAULT_GATES",
    "HUB_KEYS",
    "PATTERN_WINDOW",
    "RENAMED",
    "is_hub_config",
    "native_fields",
    "undecided_fields",
]
