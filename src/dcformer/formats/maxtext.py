"""MaxText with Orbax: `<root>/<step>/state`. An array stacks the layers at one place of the pattern over all blocks."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..configuration_dcformer import DCFormerConfig
from ..errors import ConversionError
from ..layouts_dcformer import TensorLayout, compose_layouts, row
from .arrays import LazyArray, mark_step, write_orbax
from .base import ArrayFormat, Found, layer_windows
from .native import NATIVE_FIELDS, NativeFormat

# Keys of MaxText configurations -> ours. Sizes may have the prefix `base_`; the trainer logs them without it.
_KEYS = {
    "vocab_size": "vocab_size",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_decoder_layers": "num_hidden_layers",
    "num_query_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_target_length": "max_position_embeddings",
    "qk_norm": "qk_norm",
    "static_proj": "compose_static",
    "pre_compose": "compose_pre",
    "post_compose": "compose_post",
    "query_wise": "compose_query",
    "key_wise": "compose_key",
    "logits_via_embedding": "tie_word_embeddings",
}
_BASE_SIZES = ("emb_dim", "mlp_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads")
_SHARED_WORDS = {"query_wise", "window_size"}  # the hub format has them, too
_OWN_WORDS = {*_KEYS, "normalization_layer_epsilon", "num_layers_per_block", "decoder_block", "mlp_activations"}
_OWN_WORDS |= {"rope_max_timescale", "normalize_embedding_logits"}
_OWN_WORDS -= NATIVE_FIELDS | _SHARED_WORDS
# What may stand beside MaxText's keys: fields of ours alone, as it has others of the library's (dtype) for itself.
_NATIVE_BESIDE = {*DCFormerConfig.__annotations__, "layer_pattern", "partial_rotary_factor", "rope_theta"} - {*_KEYS}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}  # flax's GELU: tanh
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")  # Transformers' names of it
_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}


class MaxTextFormat(ArrayFormat):
    """MaxText's checkpoints: parameters only or a full train state, a zarr folder per array or an OCDBT store."""

    name, title = "maxtext", "MaxText"
    prefix, roots = r"(?:(?:state\.)?(?:params\.)+)?", ("decoder", "token_embedder")
    stacked_layers, single_layers = "decoder.layers.", "decoder.layers_{b}."
    options = frozenset({"ocdbt", "with_train_state"})
    certain_prefix, has_one_eps = r"(?:state\.)?(?:params\.)+", True
    limits = (
        "MaxText has one size for the embedding and the head, and no biases, LayerNorm, plain or multi-gate MLPs. Pax "
        "has them: --format pax."
    )

    def layouts(self, mlp_type: str, norm_type: str) -> list[TensorLayout]:
        """The format's table. Layers are stacked along the second dimension, l."""
        layers, native = "decoder.layers.", "model.layers.{i}."
        attention, theirs = native + "self_attn.", layers + "self_attention_{s}."
        dynamic = theirs + "AttentionOp_0.dyn_w_proj."
        dw1, qkw, dd = compose_layouts("", dynamic + "dw1.kernel", dynamic + "qkw", dynamic + "dd.kernel")
        table = [
            row("token_embedder.embedding", "v e", "model.embed_tokens.weight", "v e"),
            row("decoder.decoder_norm.scale", "e", "model.norm.weight", "e"),
            row("decoder.logits_dense.kernel", "e v", "lm_head.weight", "v e"),
            row(layers + "pre_self_attention_layer_norm_{s}.scale", "e l", native + "input_layernorm.weight", "e"),
            row(
                layers + "post_self_attention_layer_norm_{s}.scale",
                "e l",
                native + "post_attention_layernorm.weight",
                "e",
            ),
            row(theirs + "query.kernel", "e l h d", attention + "q_proj.weight", "(h d) e"),
            row(theirs + "key.kernel", "e l j d", attention + "k_proj.weight", "(j d) e"),
            row(theirs + "value.kernel", "e l j d", attention + "v_proj.weight", "(j d) e"),
            row(theirs + "out.kernel", "h l d e", attention + "o_proj.weight", "e (h d)"),
            row(theirs + "q_norm.scale", "d l", attention + "q_norm.weight", "d"),
            row(theirs + "k_norm.scale", "d l", attention + "k_norm.weight", "d"),
            TensorLayout(dw1.foreign, "e l g c x", dw1.natives),
            TensorLayout(qkw.foreign, "g l c x r m", qkw.natives),
            TensorLayout(dd.foreign, "e l g (c m)", dd.natives),
        ]
        if mlp_type == "gated":  # MaxText has no plain MLP: without a gate, `wi_1` would be the only input projection
            table += [
                row(layers + "mlp_{s}.wi_0.kernel", "e l f", native + "mlp.gate_proj.weight", "f e"),
                row(layers + "mlp_{s}.wi_1.kernel", "e l f", native + "mlp.up_proj.weight", "f e"),
                row(layers + "mlp_{s}.wo.kernel", "f l e", native + "mlp.down_proj.weight", "e f"),
            ]
        for stage in ("pre", "post"):
            static = f"{theirs}AttentionOp_0.{stage}_proj.w"
            table.append(row(static, "g l m n", f"{attention}compose.{stage}_static", "(g m) n"))
        return table

    def assumed(self, found: Found) -> dict[str, Any]:
        return {"norm_eps": 1e-5, "qk_norm_eps": 1e-5} | (
            {"normalize_embedding_logits": False} if found.fields["tie_word_embeddings"] else {}
        )

    # --- configuration ------------------------------------------------------------------------------------------------

    def config_words(self, content: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        words = set(_without_base(content))
        shared = _SHARED_WORDS if isinstance(content.get("window_size"), list) else {"query_wise"}
        return words & _OWN_WORDS, words & shared

    def fields_of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        plain = _without_base(content)
        result = {new: plain[old] for old, new in _KEYS.items() if plain.get(old) is not None}
        if plain.get("normalization_layer_epsilon") is not None:
            result["norm_eps"] = result["qk_norm_eps"] = float(plain["normalization_layer_epsilon"])
        if plain.get("rope_max_timescale") is not None:
            result["rope_theta"] = float(plain["rope_max_timescale"])
        activations = plain.get("mlp_activations")
        if activations is not None:
            gated = isinstance(activations, (list, tuple)) and len(activations) == 2 and activations[1] == "linear"
            if not gated or activations[0] not in _ACTIVATIONS:
                raise ConversionError(
                    f"mlp_activations={activations}: expected one of {', '.join(_ACTIVATIONS)} and then linear, as in "
                    "the gated MLPs of DCFormer."
                )
            result["hidden_act"] = _ACTIVATIONS[activations[0]]
        if plain.get("logits_via_embedding") and plain.get("normalize_embedding_logits"):
            raise ConversionError(
                "normalize_embedding_logits divides logits by the square root of the hidden size, which no model here "
                "does: scale decoder_norm by it and turn the setting off."
            )
        if "window_size" in plain:
            result |= _windows(plain["window_size"], plain.get("max_target_length"))
        if plain.get("num_layers_per_block") is not None:
            result["period"] = int(plain["num_layers_per_block"])
        native = NativeFormat().fields_of({name: plain[name] for name in plain if name in _NATIVE_BESIDE})
        if differ := [name for name in native if name in result and native[name] != result[name]]:
            name = differ[0]
            raise ConversionError(
                f"{name}={native[name]!r} beside MaxText's own keys, which say {result[name]!r}: leave one of them out."
            )
        return result | native

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(
        self,
        folder: Path,
        arrays: Mapping[str, LazyArray],
        *,
        config: DCFormerConfig,
        period: int,
        step: int,
        progress: Callable[[int], None],
        ocdbt: bool = False,
        with_train_state: bool = False,
        **options: Any,
    ) -> None:
        """Writes `<folder>/<step>/state`, and `maxtext.yml` with the fields of the trainer's configuration.

        Args:
            folder, arrays, config, period, step, progress: as for every format.
            ocdbt: write Orbax's OCDBT store; False writes a folder per array, as the original trainer does.
            with_train_state: write a full train state, with zero Adam moments, instead of parameters only.
            options: none.
        """
        tree: dict[str, Any] = {"params": _nested(arrays)}
        if with_train_state:
            zeros = {
                name: LazyArray(array.shape, array.dtype, partial(np.zeros, array.shape, array.dtype))
                for name, array in arrays.items()
            }
            moments = {"count": np.int32(0), "mu": _nested(zeros), "nu": _nested(zeros)}
            tree = {"step": np.int32(step)} | tree | {"opt_state": moments}
        write_orbax(folder / str(step) / "state", tree, ocdbt=ocdbt, progress=progress)
        mark_step(folder / str(step), "state")
        (folder / "maxtext.yml").write_text(yaml.safe_dump(trainer_config(config, period), sort_keys=True))

    def copies(self, with_train_state: bool = False, **_: Any) -> int:
        return 3 if with_train_state else 1

    def computes_otherwise(self, config: DCFormerConfig) -> list[str]:
        rope = config.rope_parameters or {}
        ours = _SAME.get(config.hidden_act, config.hidden_act)
        computed = {
            "activation of the MLP": (ours, _ACTIVATIONS.get(_activation(config), "one of its own")),
            "GELU of the weight generators": (config.compose_act, "gelu_pytorch_tanh"),
            "q/k norm epsilon": (config.qk_norm_eps if config.qk_norm else config.norm_eps, config.norm_eps),
            "rotated part of a head": (rope.get("partial_rotary_factor", 1.0), 1.0),
            "RoPE type": (rope["rope_type"], "default"),
            "parallel residual": (config.use_parallel_residual, False),
        }
        return [f"{name} {theirs!r}, not {ours!r}" for name, (ours, theirs) in computed.items() if ours != theirs]


def _without_base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes under one name: effective ones, which a trainer logs without the prefix, win over `base_` ones."""
    base = {key.removeprefix("base_"): value for key, value in content.items() if key.startswith("base_")}
    return base | dict(content)


def _windows(stored: Any, longest: Any) -> dict[str, Any]:
    """`window_size`, one or a list for the layers of a block, and `max_target_length` -> native fields."""
    windows = list(stored) if isinstance(stored, (list, tuple)) else [stored]
    windows = [None if window in ("None", "null", "none") else window for window in windows]
    if isinstance(longest, int):  # a window longer than every sequence hides nothing
        windows = [None if isinstance(window, int) and window >= longest else window for window in windows]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1 or any(not isinstance(size, int) for size in sizes):
        raise ConversionError(
            f"window_size={windows}: expected numbers of keys or null, one number for all local layers of a model."
        )
    result: dict[str, Any] = {"layer_pattern": ["G" if window is None else "L" for window in windows]}
    result["sliding_window"] = sizes.pop() if sizes else None
    return result | ({"period": len(windows)} if isinstance(stored, (list, tuple)) else {})


def _activation(config: DCFormerConfig) -> str:
    """The MLP's, by the name that a MaxText configuration is given for it."""
    return "gelu" if config.hidden_act in _TANH_GELU else config.hidden_act


def _nested(arrays: Mapping[str, LazyArray]) -> dict[str, Any]:
    """Dotted names -> the nested tree of a MaxText state."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, leaf = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = array
    return tree


def trainer_config(config: DCFormerConfig, period: int) -> dict[str, Any]:
    """The fields of a MaxText configuration that describe a model, for its trainer."""
    result = {f"base_{old}" if old in _BASE_SIZES else old: getattr(config, new) for old, new in _KEYS.items()}
    return result | {
        "decoder_block": "dcformer",
        "normalize_embedding_logits": False,
        "num_layers_per_block": period,
        "window_size": layer_windows(config)[:period],
        "normalization_layer_epsilon": config.norm_eps,
        "rope_max_timescale": (config.rope_parameters or {}).get("rope_theta"),
        "mlp_activations": [_activation(config), "linear"],
        "scan_layers": True,
        "param_scan_axis": 1,
    }


__all__ = ["MaxTextFormat", "trainer_config"]
