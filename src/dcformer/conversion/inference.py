"""The configuration of a JAX checkpoint: from the shapes of its tensors, from a file, and what has to be assumed."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..errors import raise_bug
from ..layouts_dcformer import STORED_GENERATORS, TensorLayout
from .errors import CONFIG_ERRORS, ConversionError, first_line
from .formats import format_layouts
from .sources import ArraySource

_SWITCHES = ("compose_pre", "compose_post", "compose_query", "compose_key")
# Not part of the architecture: they neither contradict a checkpoint nor follow from it.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NATIVE_FIELDS = {f.name for f in fields(DCFormerConfig)} | {"layer_pattern", "partial_rotary_factor", "rope_theta"}
_NOT_NATIVE = {"architectures", "dtype", "transformers_version", "model_type", "auto_map", "torch_dtype"}

# Keys of MaxText configurations -> ours. `base_` sizes are MaxText's; without it they are as a trainer logs them.
_MAXTEXT_KEYS = {
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
_MAXTEXT_WORDS = {*_MAXTEXT_KEYS, "window_size", "normalization_layer_epsilon", "num_layers_per_block", "decoder_block"}
_MAXTEXT_WORDS |= {"mlp_activations", "rope_max_timescale", "normalize_embedding_logits"}
# Keys of the authors' PyTorch configurations -> ours; the others take more than a new name.
_LEGACY_KEYS = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "block_size": "max_position_embeddings",
    "rope_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "use_qk_norm": "qk_norm",
}
_LEGACY_MARKS = {*_LEGACY_KEYS, "n_local_heads", "use_linear_bias", "window_type", "use_dcmha", "mgate", "q_chunk_size"}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}  # flax's GELU: tanh


@dataclass
class Found:
    """What the names and shapes of a checkpoint say.

    Attributes:
        fields: configuration fields.
        reasons: field -> the tensor that says so.
        period: P, layers of a pattern block.
        stacked: whether blocks are stacked in one tensor (`scan_layers`).
        generators: weight generators stored; 0 when there are none.
        lacking: the array without which embeddings are tied.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    period: int = 1
    stacked: bool = True
    generators: int = 0
    lacking: str = ""

    def summary(self) -> str:
        """What was found, in one line."""
        names = {"num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
        names |= {"num_key_value_heads": "key/value heads", "head_dim": "head dim", "intermediate_size": "MLP width"}
        names |= {
            "compose_rank": "rank",
            "compose_groups": "groups",
            "vocab_size": "vocabulary",
            "mlp_gates": "MLP gates",
        }
        parts = [f"{self.fields[key]} {name}" for key, name in names.items() if self.fields.get(key)]
        parts += [f"blocks of {self.period}{'' if self.stacked else ', not stacked'}"]
        flags = ("qk_norm", "compose_projection", "compose_gate", "compose_static", "attention_bias", "mlp_bias")
        parts += [name for name in (*flags, "tie_word_embeddings") if self.fields.get(name)]
        return ", ".join([*parts, self.fields["norm_type"], f"{self.fields['mlp_type']} MLP"])


def _split_axes(dims: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", dims)


class _Letters:
    """Sizes of the letters of dimensions, collected from the shapes of tensors."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def note(self, letter: str, size: int, name: str) -> None:
        known = self.sizes.setdefault(letter, size)
        self.reasons.setdefault(letter, name)
        if known != size and letter != "v":
            meaning = {"e": "hidden size", "f": "MLP width", "h": "heads", "j": "key/value heads", "d": "head dim"}
            meaning |= {"l": "layers per stack", "g": "groups", "m": "heads per group", "n": "heads per group"}
            raise ConversionError(
                f"{name} does not fit the other tensors: its {meaning.get(letter, 'dimension ' + letter)} is {size}, "
                f"that of {self.reasons[letter]} is {known}."
            )


def infer(source: ArraySource) -> Found:
    """Reads off a checkpoint's names and shapes what they say about the model.

    Args:
        source: the checkpoint.

    Returns:
        what was found. Values are not read.

    Raises:
        ConversionError: when shapes contradict each other, or do not have the dimensions that the format gives them.
    """
    names = set(source.infos)
    layernorm = "final_ln.bias" in names
    gated = source.format == "maxtext" or any(".ffn_layer1_gate." in name for name in names)
    layouts = format_layouts(source.format, "gated" if gated else "plain", "layernorm" if layernorm else "rmsnorm")
    found, letters, kinds, places, depth = Found(), _Letters(), set(), set(), set()
    patterns = [(_pattern(layout.foreign, source.format), layout) for layout in layouts]
    for name, info in source.infos.items():
        matches = [(match, layout) for pattern, layout in patterns if (match := pattern.fullmatch(name))]
        if not matches:
            continue  # said later, among the unexpected
        match, layout = matches[0]
        kinds.add(layout.natives[0][0].removeprefix("model.layers.{i}."))
        number = match.groupdict()
        stacked = number.get("place") is not None
        if stacked:
            places.add(int(number["place"]))
            depth.add(int(number.get("block") or 0))
            stacked = number.get("block") is None if source.format == "maxtext" else number["repeat"] is not None
            found.stacked = found.stacked and stacked
        _measure(letters, layout, name, info.shape, stacked)
    sizes = letters.sizes
    if not {"v", "e", "h", "d"} <= set(sizes) or not places:
        raise ConversionError(f"{source.location} lacks embeddings or query projections: it is no whole model.")

    if source.format == "pax" and not found.stacked:
        found.period = len(places)  # every layer is its own
        layers = found.period
    else:
        found.period = max(places) + 1
        layers = found.period * (sizes.get("l", 1) if found.stacked else max(depth) + 1)
    found.fields = {
        "vocab_size": sizes["v"],
        "hidden_size": sizes["e"],
        "intermediate_size": sizes.get("f", 1),
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["h"],
        "num_key_value_heads": sizes.get("j", sizes["h"]),
        "head_dim": sizes["d"],
        "mlp_type": "gated" if gated else "plain",
        "mlp_gates": sizes.get("t", 0),
        "mlp_bias": "mlp.up_proj.bias" in kinds,
        "norm_type": "layernorm" if layernorm else "rmsnorm",
        "attention_bias": "self_attn.q_proj.bias" in kinds,
        "qk_norm": "self_attn.q_norm.weight" in kinds,
        "tie_word_embeddings": not {"lm_head.weight", "model.embed_tokens.weight"} <= kinds,
    }
    heads = {layout.natives[0][0]: layout.foreign for layout in layouts if "v" in layout.foreign_dims.split()}
    found.lacking = ", ".join(name for native, name in heads.items() if native not in kinds)
    by_letter = {"vocab_size": "v", "hidden_size": "e", "intermediate_size": "f", "num_hidden_layers": "l"}
    by_letter |= {"num_attention_heads": "h", "num_key_value_heads": "j", "head_dim": "d", "compose_groups": "g"}
    by_letter |= {"compose_rank": "r", "mlp_gates": "t"}
    found.reasons = {name: letters.reasons[letter] for name, letter in by_letter.items() if letter in letters.reasons}
    _infer_composition(found, sizes, kinds)
    return found


def _pattern(foreign: str, format: str) -> re.Pattern:
    """Matches names of a kind of tensor, stacked or not."""
    pattern = re.escape(foreign).replace(re.escape("{s}"), r"(?P<place>\d+)")
    if format == "maxtext":
        pattern = pattern.replace(r"decoder\.layers\.", r"decoder\.layers(?:_(?P<block>\d+))?\.")
    return re.compile(pattern.replace(r"\.repeat\.sub\.", r"(?P<repeat>\.repeat\.sub)?\."))


def _measure(letters: _Letters, layout: TensorLayout, name: str, shape: tuple[int, ...], stacked: bool) -> None:
    axes = [axis for axis in _split_axes(layout.foreign_dims) if stacked or axis != "l"]
    if len(axes) != len(shape):
        raise ConversionError(
            f"{name} has shape {list(shape)}, expected {len(axes)} dimensions: {' '.join(axes)} (letters as in the "
            "documentation of checkpoint formats)."
        )
    for axis, size in zip(axes, shape, strict=True):
        if axis == "v" and layout.natives[0][0] == "model.embed_tokens.weight":
            # the embedding may be padded; the head is not
            letters.sizes.setdefault("v", size)
            letters.reasons.setdefault("v", name)
        elif axis == "v":
            letters.sizes["v"], letters.reasons["v"] = size, name
        else:
            letters.note(axis, size, name)  # "(c m)" counts as a letter of its own


def _infer_composition(found: Found, sizes: Mapping[str, int], kinds: set[str]) -> None:
    heads = found.fields["num_attention_heads"]
    low_rank, gate = "self_attn.compose.qkw" in kinds, "self_attn.compose.gate_proj.weight" in kinds
    statics = [stage for stage in ("pre", "post") if f"self_attn.compose.{stage}_static" in kinds]
    composed = found.fields
    if low_rank != ("self_attn.compose.dw1_proj.weight" in kinds):
        raise ConversionError("Of dyn_w_proj's dw1 and qkw only one is stored: the checkpoint is incomplete.")
    composed["compose_static"] = bool(statics)
    if not (low_rank or gate):
        composed |= {"compose_query": False, "compose_key": False}
        composed |= {f"compose_{stage}": stage in statics for stage in ("pre", "post")}
        composed |= {"compose_groups": sizes["g"]} if "g" in sizes else {}
        return
    groups = sizes["g"]
    per_group, remainder = divmod(heads, groups)
    rank, odd = divmod(sizes.get("r", 4), 2)
    found.generators = sizes["c"] if low_rank else sizes["(c m)"] // per_group
    expected = {"m": per_group, "n": per_group, "x": 2 * rank * per_group, "(c m)": found.generators * per_group}
    wrong = [letter for letter, size in expected.items() if sizes.get(letter, size) != size]
    if remainder or odd or not found.generators or wrong:
        seen = {letter: sizes[letter] for letter in ("g", "c", "x", "r", "m", "(c m)") if letter in sizes}
        raise ConversionError(
            f"The shapes of dyn_w_proj ({seen}) fit no composition of {heads} heads: expected g groups of m = heads/g "
            "heads, x = r·m hidden channels and r = 2·rank rows."
        )
    composed |= {"compose_groups": groups, "compose_projection": low_rank, "compose_gate": gate}
    if low_rank:
        composed["compose_rank"] = rank
    if len(statics) == 1:  # a stage that is composed has its static projection too
        composed |= {f"compose_{stage}": stage in statics for stage in ("pre", "post")}


def used_generators(source: ArraySource, found: Found) -> dict[str, bool]:
    """Which composition switches the values say are off: those all of whose weight generators hold zeros only.

    A generator of zeros adds nothing, so leaving it out changes no result. This is how our own converter stores
    generators that a model does not have; trained checkpoints have none.

    Args:
        source: the checkpoint; its small `qkw` and `dd` tensors are read.
        found: what its shapes say; it must hold four generators.

    Returns:
        the four switches; empty when all are in use, or none is.
    """
    active = [False] * 4
    for name in source.infos:
        if name.endswith(".qkw"):
            values = source.read(name)
            for c in range(4):
                active[c] |= bool(values.select(2 if found.stacked else 1, c).any())
        elif re.search(r"dyn_w_proj\.dd(\.kernel)?$", name):
            values = source.read(name).unflatten(-1, (4, -1))
            for c in range(4):
                active[c] |= bool(values.select(-2, c).any())
    if all(active) or not any(active):
        return {}
    used = [generator for generator, is_active in zip(STORED_GENERATORS, active, strict=True) if is_active]
    stages, sides = {stage for stage, _ in used}, {side for _, side in used}
    if found.fields["compose_static"]:
        stages |= {stage for stage in ("pre", "post") if found.fields.get(f"compose_{stage}", True)}
    return {f"compose_{stage}": stage in stages for stage in ("pre", "post")} | {
        f"compose_{side}": side in sides for side in ("query", "key")
    }


def read_config_file(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a file with configuration fields, complete or not.

    Args:
        path: JSON or YAML, in the words of this package, of the authors' PyTorch configurations, or of MaxText.

    Returns:
        native fields, just those that the file decides; besides, "model_type" when the file names it and "period" when
        it gives MaxText's `num_layers_per_block`.

    Raises:
        ConversionError: when it cannot be read, or is in none of these words.
    """
    path = Path(path)
    try:
        text = path.read_text()
        try:
            content = json.loads(text)  # first, because YAML takes 1e-05 for a string
        except json.JSONDecodeError:
            content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConversionError(f"{path} cannot be read as JSON or YAML ({first_line(error)}).") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a {type(content).__name__}, expected a table of configuration fields.")
    words = {"true": True, "false": False, "none": None, "null": None}  # as command lines spell them
    content = {
        key: words.get(value.lower(), value) if isinstance(value, str) else value for key, value in content.items()
    }
    # base sizes first, so that effective ones, which a trainer logs without the prefix, win
    plain = {key.removeprefix("base_"): value for key, value in content.items() if key.startswith("base_")} | content
    maxtext = set(plain) & (_MAXTEXT_WORDS - _NATIVE_FIELDS - {"query_wise", "window_size"})
    try:
        if not maxtext and set(content) & {"query_wise"} and not set(content) & _LEGACY_MARKS:
            raise ConversionError(
                f"{path}: query_wise means one thing in the authors' config.json and another in MaxText: say "
                "compose_query and compose_key instead."
            )
        one_window = "window_size" in content and not isinstance(content["window_size"], list)
        if set(content) & _LEGACY_MARKS or (one_window and not maxtext):
            return _from_legacy(content)
        if maxtext or "window_size" in content:
            return _from_maxtext(plain)
        unknown = sorted(set(content) - _NATIVE_FIELDS - _NOT_NATIVE - _inherited_fields())
        if unknown:
            raise ConversionError(
                f"{path} holds unknown fields {', '.join(map(repr, unknown[:6]))}: expected those of DCFormerConfig, "
                "of the authors' config.json, or of a MaxText configuration."
            )
    except ConversionError:
        raise
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise ConversionError(f"{path} does not describe a model: {error}") from error
    keep = _NATIVE_FIELDS | {"model_type", *_TOKENS}
    # null is a value of sliding_window; elsewhere it stands for what the class makes of it
    told = {key for key, value in content.items() if value is not None or key == "sliding_window"}
    result = {key: content[key] for key in content if key in keep & told}
    for name in ("norm_eps", "qk_norm_eps", "rope_theta", "partial_rotary_factor"):
        try:
            result |= {name: float(result[name])} if name in result else {}
        except (TypeError, ValueError) as error:
            raise ConversionError(f"{path}: {name}={result[name]!r} is no number.") from error
    return result


def _inherited_fields() -> set[str]:
    return set(DCFormerConfig().to_dict())


def _from_legacy(content: Mapping[str, Any]) -> dict[str, Any]:
    """The authors' config.json -> the native fields that its keys decide, without what holds for PyTorch only."""
    result = {new: content[old] for old, new in _LEGACY_KEYS.items() if content.get(old) is not None}
    result |= {k: v for k, v in content.items() if k in _NATIVE_FIELDS | {*_TOKENS, "model_type"} and v is not None}
    if content.get("n_local_heads") not in (None, -1):
        result["num_key_value_heads"] = content["n_local_heads"]
    if content.get("use_linear_bias") is not None:
        result["attention_bias"] = result["mlp_bias"] = content["use_linear_bias"]
    if content.get("query_wise") is not None:
        result["compose_query"], result["compose_key"] = True, not content["query_wise"]
    if content.get("use_dcmha") is False:
        result |= {name: False for name in _SWITCHES}
    if content.get("mgate") is not None:
        result["mlp_gates"] = content.get("mgate_dim") or 44 if content["mgate"] else 0
    if content.get("window_type") is not None:
        result["layer_pattern"], result["sliding_window"] = content["window_type"], 256
    elif "window_size" in content:
        result["layer_pattern"] = "G" if content["window_size"] is None else "LG"
        result["sliding_window"] = content["window_size"]
    return result


def _from_maxtext(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A MaxText configuration -> the native fields that its keys decide."""
    result = {new: plain[old] for old, new in _MAXTEXT_KEYS.items() if plain.get(old) is not None}
    if plain.get("normalization_layer_epsilon") is not None:
        result["norm_eps"] = result["qk_norm_eps"] = float(plain["normalization_layer_epsilon"])
    if plain.get("rope_max_timescale") is not None:
        result["rope_theta"] = float(plain["rope_max_timescale"])
    activations = plain.get("mlp_activations")
    if activations is not None:
        gated = isinstance(activations, (list, tuple)) and len(activations) == 2 and activations[1] == "linear"
        if not gated or activations[0] not in _ACTIVATIONS:
            raise ConversionError(
                f"mlp_activations={activations}: expected one of {', '.join(_ACTIVATIONS)} and then linear, as in the "
                "gated MLPs of DCFormer."
            )
        result["hidden_act"] = _ACTIVATIONS[activations[0]]
    if plain.get("logits_via_embedding") and plain.get("normalize_embedding_logits"):
        raise ConversionError(
            "normalize_embedding_logits divides logits by the square root of the hidden size, which no model here "
            "does: scale decoder_norm by it and turn the setting off."
        )
    if "window_size" in plain:
        windows = plain["window_size"]
        windows = list(windows) if isinstance(windows, (list, tuple)) else [windows]
        windows = [None if window in ("None", "null", "none") else window for window in windows]
        longest = plain.get("max_target_length")
        if isinstance(longest, int):  # a window that holds every sequence is none
            windows = [None if isinstance(window, int) and window >= longest else window for window in windows]
        sizes = {window for window in windows if window is not None}
        if len(sizes) > 1 or any(not isinstance(size, int) for size in sizes):
            raise ConversionError(
                f"window_size={windows}: expected numbers of keys or null, one number for all local layers of a model."
            )
        result["layer_pattern"] = ["G" if window is None else "L" for window in windows]
        result["sliding_window"] = sizes.pop() if sizes else None
        if isinstance(plain["window_size"], (list, tuple)):
            result["period"] = len(windows)
    if plain.get("num_layers_per_block") is not None:
        result["period"] = int(plain["num_layers_per_block"])
    return result


def assumed_fields(format: str, found: Found) -> dict[str, Any]:
    """What a JAX checkpoint does not tell, as its trainer set it by default."""
    layernorm = found.fields["norm_type"] == "layernorm"
    patterns = {1: "G", 2: "LG", 4: "LGLL", 8: "LGL6"}
    pattern = patterns.get(found.period, "LG" if found.period % 2 == 0 else "G")
    return {
        "layer_pattern": pattern if found.stacked or found.period in (2, 4, 8) else "LG",
        "sliding_window": 256,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25 if layernorm else 1.0,
        "norm_eps": 1e-5 if format == "maxtext" or layernorm else 1e-6,
        "qk_norm_eps": 1e-5 if format == "maxtext" else 1e-6,
        "hidden_act": "silu" if found.fields["mlp_type"] == "gated" else "gelu",
        "compose_act": "gelu_pytorch_tanh",
        "use_parallel_residual": layernorm,
        "max_position_embeddings": 2048,
    }


def build_config(
    source: ArraySource, found: Found, given: Mapping[str, Any] | None = None
) -> tuple[DCFormerConfig, list[str]]:
    """Puts together a checkpoint's configuration.

    Args:
        source: the checkpoint.
        found: what `infer` found in it.
        given: fields that the user gives, from `read_config_file`. They win over assumptions, and must not contradict
            what was found; but composition switches may turn off stored generators, and a smaller vocab_size keeps
            just the first rows.

    Returns:
        the configuration, and lines that say what was assumed.

    Raises:
        ConversionError: when `given` contradicts the checkpoint, naming the field, both values and the tensor.
    """
    given = dict(given or {})
    period = given.pop("period", None)
    if period is not None and period != found.period and (found.stacked or found.period > 1):
        raise ConversionError(
            f"The configuration has {period} layers per block, the checkpoint {found.period} (names end in _0 to "
            f"_{found.period - 1})."
        )
    model_type = given.pop("model_type", "dcpythia" if found.fields["norm_type"] == "layernorm" else "dcformer")
    facts = dict(found.fields)
    if facts["tie_word_embeddings"] and not given.get("tie_word_embeddings"):
        raise ConversionError(
            f"{source.location} lacks an embedding or an output projection ({found.lacking}): it is incomplete, or the "
            "two are one; then say so, with tie_word_embeddings: true in --config."
        )
    vocab = given.get("vocab_size")
    if vocab is not None and vocab < facts["vocab_size"]:
        facts["vocab_size"] = vocab
    for name, value in given.items():
        if name in facts and facts[name] != value and not (name in _SWITCHES and facts[name] and not value):
            reason = f" ({found.reasons[name]})" if name in found.reasons else ""
            raise ConversionError(
                f"The configuration gives {name}={value!r}, the checkpoint shows {facts[name]!r}{reason}: they belong "
                "to different models."
            )
    assumed = assumed_fields(source.format, found)
    if given.get("sliding_window", ...) is None:
        assumed["layer_pattern"] = "G"
    pattern = given.get("layer_types", given.get("layer_pattern", assumed["layer_pattern"]))
    if "layer_types" in given:
        del assumed["layer_pattern"]
    if not any(kind in ("L", "sliding_attention") for kind in pattern):
        del assumed["sliding_window"]
    given_rope = given.pop("rope_parameters", {})
    whole = "compose_rank" in given and "rope_theta" in given_rope  # a native configuration: what it omits is not there
    known = {"partial_rotary_factor": 1.0} | given_rope if whole else given_rope
    given |= {key: known[key] for key in ("rope_theta", "partial_rotary_factor") if key in known}
    assumed = {name: value for name, value in assumed.items() if name not in given}
    if found.generators == 4 and not any(name in given for name in _SWITCHES):
        facts |= used_generators(source, found)
    elif found.generators not in (0, 4) and not any(name in given for name in _SWITCHES):
        raise ConversionError(
            f"The checkpoint holds {found.generators} weight generators, which may be the query-wise or the key-wise "
            "ones, or those before or after the softmax: say which with compose_pre, compose_post, compose_query and "
            "compose_key in --config."
        )
    merged = assumed | facts | given
    rope = {name: merged.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    merged["rope_parameters"] = given_rope if whole else {"rope_type": "default"} | rope | given_rope
    on = {name for name in _SWITCHES if merged.get(name, True)}
    sides = on & {"compose_query", "compose_key"} if found.generators else set()
    if not on & {"compose_pre", "compose_post"} or not (sides or facts["compose_static"]):
        merged |= {name: False for name in _SWITCHES}  # a plain Transformer
    config_class = DCPythiaConfig if model_type == "dcpythia" else DCFormerConfig
    try:
        config = config_class(**merged)
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise ConversionError(f"The configuration is not valid: {error}") from error
    if found.generators not in (0, 4, len(config.compose_generators)):
        raise ConversionError(
            f"The configuration has {len(config.compose_generators)} weight generators {config.compose_generators}, "
            f"the checkpoint holds {found.generators}."
        )
    kinds, period = list(config.layer_types or ()), found.period
    if found.stacked and kinds[period:] != kinds[:-period]:
        raise ConversionError(
            f"The configuration's layers ({_letters(kinds)}) do not repeat after {period}, as the blocks of {period} "
            "layers of the checkpoint do."
        )
    if source.format == "maxtext" and config.tie_word_embeddings:
        assumed["normalize_embedding_logits"] = False
    return config, [f"{name} = {value!r}" for name, value in sorted(assumed.items())]


def _letters(kinds: list[str]) -> str:
    return "".join("L" if kind == "sliding_attention" else "G" for kind in kinds)


def layer_windows(config: DCFormerConfig) -> list[int | None]:
    """The keys that each layer's queries see; None for all."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types or ()]


def maxtext_config(config: DCFormerConfig, period: int) -> dict[str, Any]:
    """The fields of a MaxText configuration that describe a model, for its trainer."""
    switches = {old: getattr(config, new) for old, new in _MAXTEXT_KEYS.items()}
    base = ("emb_dim", "mlp_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads")
    result = {f"base_{name}" if name in base else name: value for name, value in switches.items()}
    return result | {
        "decoder_block": "dcformer",
        "normalize_embedding_logits": False,
        "num_layers_per_block": period,
        "window_size": layer_windows(config)[:period],
        "normalization_layer_epsilon": config.norm_eps,
        "rope_max_timescale": (config.rope_parameters or {}).get("rope_theta"),
        # flax's GELU is the tanh one
        "mlp_activations": ["gelu" if config.hidden_act == "gelu_pytorch_tanh" else config.hidden_act, "linear"],
        "scan_layers": True,
        "param_scan_axis": 1,
    }
