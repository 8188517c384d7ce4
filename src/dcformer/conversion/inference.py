"""The configuration of a checkpoint of arrays: from their shapes, from a file, and by assumption."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..errors import CONFIG_ERRORS, ConversionError, first_line, raise_bug
from ..formats import FORMATS, NATIVE, ArrayFormat
from ..formats.base import Found
from ..formats.native import NATIVE_FIELDS
from ..layouts_dcformer import STORED_GENERATORS, TensorLayout, layer_dims
from .sources import ArraySource

_PATTERN = {"layer_types", "layer_pattern"}
SWITCHES = ("compose_pre", "compose_post", "compose_query", "compose_key")
# Letter of a dimension -> its name in messages, and the field that it determines.
_MEANINGS = {
    "v": ("vocabulary", "vocab_size"),
    "e": ("hidden size", "hidden_size"),
    "f": ("MLP width", "intermediate_size"),
    "t": ("MLP gates", "mlp_gates"),
    "l": ("layers per stack", "num_hidden_layers"),
    "h": ("heads", "num_attention_heads"),
    "j": ("key/value heads", "num_key_value_heads"),
    "d": ("head dim", "head_dim"),
    "g": ("groups", "compose_groups"),
    "r": ("rank rows", "compose_rank"),
    "m": ("heads per group", ""),
    "n": ("heads per group", ""),
}
_COUNTS = {"num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
_COUNTS |= {"num_key_value_heads": "key/value heads", "head_dim": "head dim", "intermediate_size": "MLP width"}
_COUNTS |= {"compose_rank": "rank", "compose_groups": "groups", "vocab_size": "vocabulary", "mlp_gates": "MLP gates"}
_FLAGS = ("qk_norm", "compose_projection", "compose_gate", "compose_static", "attention_bias", "mlp_bias")


def summary(found: Found) -> str:
    """What was found, in one line."""
    parts = [f"{found.fields[key]} {name}" for key, name in _COUNTS.items() if found.fields.get(key)]
    parts += [f"blocks of {found.period}{'' if found.stacked else ', not stacked'}"]
    parts += [name for name in (*_FLAGS, "tie_word_embeddings") if found.fields.get(name)]
    return ", ".join([*parts, found.fields["norm_type"], f"{found.fields['mlp_type']} MLP"])


def infer(source: ArraySource) -> Found:
    """Infers from a checkpoint's names and shapes what they determine of the model.

    Args:
        source: the checkpoint.

    Returns:
        the findings. Values are not read.

    Raises:
        ConversionError: when shapes contradict each other or the format's dimensions.
    """
    mlp_type, norm_type = source.format.kind(source.infos)
    layouts = source.format.layouts(mlp_type, norm_type)
    patterns = [pattern for layout in layouts for pattern in _patterns(layout, source.format)]
    found, numbers = Found(), {"s": 0, "b": 0, "i": -1}
    sizes: dict[str, int] = {}
    kinds, in_layers = set(), False
    for name, info in source.infos.items():
        match, layout, stacked = next(
            ((match, layout, stacked) for pattern, layout, stacked in patterns if (match := pattern.fullmatch(name))),
            (None, None, False),
        )
        if match is None or layout is None:
            continue  # reported later, among the unexpected
        found.matches[name] = layout, stacked
        kinds.add(layout.natives[0][0].removeprefix("model.layers.{i}."))
        for letter, number in match.groupdict().items():
            numbers[letter], in_layers = max(numbers[letter], int(number)), True
        found.stacked = found.stacked and (stacked or not match.groupdict())
        _measure(sizes, found, name, info.shape)
    if not {"v", "e", "h", "d"} <= set(sizes) or not in_layers:
        raise ConversionError(f"{source.location} lacks embeddings or query projections: the checkpoint is incomplete.")

    found.period = numbers["s"] + 1
    layers = found.period * (sizes.get("l", 1) if found.stacked else numbers["b"] + 1)
    if numbers["i"] >= 0:  # every layer is its own
        layers = found.period = numbers["i"] + 1
    found.fields = {
        "vocab_size": sizes["v"],
        "hidden_size": sizes["e"],
        "intermediate_size": sizes.get("f", 1),
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["h"],
        "num_key_value_heads": sizes.get("j", sizes["h"]),
        "head_dim": sizes["d"],
        "mlp_type": mlp_type,
        "mlp_gates": sizes.get("t", 0),
        "mlp_bias": "mlp.up_proj.bias" in kinds,
        "norm_type": norm_type,
        "attention_bias": "self_attn.q_proj.bias" in kinds,
        "qk_norm": "self_attn.q_norm.weight" in kinds,
        "tie_word_embeddings": not {"lm_head.weight", "model.embed_tokens.weight"} <= kinds,
    }
    embeddings = [layout for layout in layouts if "v" in layout.foreign_dims.split()]
    found.lacking = ", ".join(layout.foreign for layout in embeddings if layout.natives[0][0] not in kinds)
    _infer_composition(found, sizes, kinds)
    return found


def _patterns(layout: TensorLayout, format: ArrayFormat) -> list[tuple[re.Pattern, TensorLayout, bool]]:
    """Patterns for the names of a kind of tensor, stacked or not; groups are the numbers of block, place and layer."""

    def pattern(foreign: str) -> re.Pattern:
        return re.compile(re.sub(r"\\{([sbi])\\}", r"(?P<\1>\\d+)", re.escape(foreign)))

    single = format.unstacked(layout.foreign)
    found = [(pattern(single), layout, False)] if single != layout.foreign else []
    return [*found, (pattern(layout.foreign), layout, "l" in layout.foreign_dims.split())]


def _stored_axes(layout: TensorLayout, stacked: bool) -> list[str]:
    """The letters of each dimension of a stored array: "e l g (c m)" -> ["e", "l", "g", "(c m)"]."""
    return re.findall(r"\([^)]*\)|\S+", layout.foreign_dims if stacked else layer_dims(layout.foreign_dims))


def _measure(sizes: dict[str, int], found: Found, name: str, shape: tuple[int, ...]) -> None:
    """Records the size of each letter in an array's dimensions; "(c m)" counts as a letter of its own."""
    layout, axes = found.matches[name][0], _stored_axes(*found.matches[name])
    if len(axes) != len(shape):
        raise ConversionError(
            f"{name} has shape {list(shape)}, expected {len(axes)} dimensions: {' '.join(axes)} (letters as in the "
            "documentation of checkpoint formats)."
        )
    for axis, size in zip(axes, shape, strict=True):
        meaning, field = _MEANINGS.get(axis, (f"dimension {axis}", ""))
        if axis == "v" and layout.natives[0][0] != "model.embed_tokens.weight":
            sizes["v"], found.reasons[field] = size, name  # the embedding may be padded, the head is not
        known = sizes.setdefault(axis, size)
        reason = found.reasons.setdefault(field or axis, name)
        if known != size and axis != "v":
            raise ConversionError(
                f"{name} does not fit the other tensors: its {meaning} is {size}, but {known} in {reason}."
            )


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
    """The composition switches as far as values determine them: off where all weight generators are zero.

    A generator of zeros adds nothing, so leaving it out changes no result. Our converter stores zeros for generators
    that a model does not have; trained checkpoints hold none.

    Args:
        source: the checkpoint; the output layers of its weight generators are read.
        found: from `infer`; there must be four generators.

    Returns:
        the four switches; empty when all are in use, or none is.
    """
    active = [False] * 4
    for name, (layout, stacked) in found.matches.items():
        if layout.natives[0][0].endswith(("compose.qkw", "compose.gate_proj.weight")):
            axis = next(k for k, letters in enumerate(_stored_axes(layout, stacked)) if "c" in letters)
            values = source.read(name).unflatten(axis, (4, -1))
            for c in range(4):
                active[c] |= bool(values.select(axis, c).any())
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
        path: JSON or YAML, with native fields or the keys of a format that has configurations.

    Returns:
        the native fields that the file determines, "model_type" if the file names it, and "period" if it gives the
        layers per block.

    Raises:
        ConversionError: when the file cannot be read, or has unknown keys.
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
    values = {"true": True, "false": False, "none": None, "null": None}  # as command lines spell them
    content = {
        key: values.get(value.lower(), value) if isinstance(value, str) else value for key, value in content.items()
    }
    words = {format: format.config_words(content) for format in FORMATS.values()}
    sure = [format for format, (own, _) in words.items() if own]
    possible = [format for format, (_, shared) in words.items() if shared]
    if not sure and len(possible) > 1:
        shared = sorted(set.intersection(*(words[format][1] for format in possible)))
        raise ConversionError(
            f"{path}: {', '.join(shared)} means one thing in {' and another in '.join(f.title for f in possible)}: "
            "use the fields of DCFormerConfig instead, such as compose_query and compose_key."
        )
    try:
        return (sure or possible or [NATIVE])[0].fields_of(content)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from error
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise ConversionError(f"{path} does not describe a model: {error}") from error


def assumed_fields(format: ArrayFormat, found: Found) -> dict[str, Any]:
    """Fields that an array checkpoint does not determine, with its trainer's defaults."""
    layernorm = found.fields["norm_type"] == "layernorm"
    patterns = {1: "G", 2: "LG", 4: "LGLL", 8: "LGL6"}
    pattern = patterns.get(found.period, "LG" if found.period % 2 == 0 else "G")
    return {
        "layer_pattern": pattern if found.stacked or found.period in (2, 4, 8) else "LG",
        "sliding_window": 256,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25 if layernorm else 1.0,
        "norm_eps": 1e-5,
        "qk_norm_eps": 1e-5,
        "hidden_act": "silu" if found.fields["mlp_type"] == "gated" else "gelu",
        "compose_act": "gelu_pytorch_tanh",
        "use_parallel_residual": layernorm,
        "max_position_embeddings": 2048,
    } | format.assumed(found)


def build_config(
    source: ArraySource, found: Found, given: Mapping[str, Any] | None = None
) -> tuple[DCFormerConfig, list[str]]:
    """Assembles a checkpoint's configuration.

    Args:
        source: the checkpoint.
        found: what `infer` found in it.
        given: the user's fields, from `read_config_file`. They replace assumptions and must not contradict `found`,
            except that composition switches may turn off stored generators, and a smaller vocab_size keeps only the
            first rows.

    Returns:
        the configuration, and the assumptions as lines of text.

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
    if model_type not in (DCFormerConfig.model_type, DCPythiaConfig.model_type):
        raise ConversionError(f"The configuration has model_type={model_type!r}: expected dcformer or dcpythia.")
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
        if name in facts and facts[name] != value and not (name in SWITCHES and facts[name] and not value):
            reason = f" ({found.reasons[name]})" if name in found.reasons else ""
            raise ConversionError(
                f"The configuration gives {name}={value!r}, the checkpoint shows {facts[name]!r}{reason}: they belong "
                "to different models."
            )
    assumed = assumed_fields(source.format, found)
    if source.format.has_one_eps and "norm_eps" in given:
        assumed["qk_norm_eps"] = given["norm_eps"]
    is_odd = found.stacked and found.period > 1 and found.period % 2  # nothing is known of such blocks
    if given.get("sliding_window", ...) is None:
        assumed["layer_pattern"] = "G"
    elif is_odd and "sliding_window" in given and not given.keys() & _PATTERN:
        raise ConversionError(
            f"The configuration gives sliding_window={given['sliding_window']}, and blocks of {found.period} layers do "
            "not say which of them have it: give layer_pattern, too."
        )
    pattern = given.get("layer_types", given.get("layer_pattern", assumed["layer_pattern"]))
    if "layer_types" in given:
        del assumed["layer_pattern"]
    if not any(kind in ("L", "sliding_attention") for kind in pattern):
        del assumed["sliding_window"]
    given_rope = given.pop("rope_parameters", {})
    whole = (
        "compose_rank" in given and "rope_theta" in given_rope
    )  # a complete native configuration: what it omits is absent
    known = {"partial_rotary_factor": 1.0} | given_rope if whole else given_rope
    given |= {key: known[key] for key in ("rope_theta", "partial_rotary_factor") if key in known}
    assumed = {name: value for name, value in assumed.items() if name not in given}
    if found.generators == 4 and not any(name in given for name in SWITCHES):
        facts |= used_generators(source, found)
    elif found.generators not in (0, 4) and not any(name in given for name in SWITCHES):
        raise ConversionError(
            f"The checkpoint holds {found.generators} weight generators, which may be the query-wise or the key-wise "
            "ones, or those before or after the softmax: say which with compose_pre, compose_post, compose_query and "
            "compose_key in --config."
        )
    merged = {name: value for name, value in assumed.items() if name in NATIVE_FIELDS} | facts | given
    rope = {name: merged.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    merged["rope_parameters"] = given_rope if whole else {"rope_type": "default"} | rope | given_rope
    on = {name for name in SWITCHES if merged.get(name, True)}
    sides = on & {"compose_query", "compose_key"} if found.generators else set()
    if not on & {"compose_pre", "compose_post"} or not (sides or facts["compose_static"]):
        merged |= {name: False for name in SWITCHES}  # a plain Transformer
    config_class = DCPythiaConfig if model_type == "dcpythia" else DCFormerConfig
    try:
        config = config_class(**merged)
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise ConversionError(f"The configuration is invalid: {error}") from error
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
    return config, [f"{name} = {value!r}" for name, value in sorted(assumed.items())]


def _letters(kinds: list[str]) -> str:
    return "".join("L" if kind == "sliding_attention" else "G" for kind in kinds)


__all__ = ["SWITCHES", "assumed_fields", "build_config", "infer", "read_config_file", "summary", "used_generators"]
