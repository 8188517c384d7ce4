"""Checkpoints of the authors' fork of big_vision (`Lisennlp/big_vision`, `models/vit.py`) as DCViT.

The fork's names of attention layers and those of big_vision itself (`query_dense` and `query`) are both read, so plain
ViTs of big_vision convert, too. Letters of the table, beside those of `layouts_dcformer`: p and q rows and columns of a
patch, k channels, y representation, v labels.
"""

import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConversionError
from ..layouts_dcformer import TensorLayout, compose_layouts, rearrange, row, shape_of
from .configuration_dcvit import DCViTConfig
from .modeling_dcvit import DCViTForImageClassification

_BLOCK = "Transformer/encoderblock_{i}/"
_ATTENTION = _BLOCK + "MultiHeadDotProductAttention_0/"
# What stands in front of a parameter's name in the files of big_vision's trainers of several years.
_PREFIXES = ("params/", "opt/target/")
# What NumPy raises on a damaged file.
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError)
# big_vision's names -> the fork's
_RENAMED = {f"/MultiHeadDotProductAttention_0/{name}/": f"/MultiHeadDotProductAttention_0/{name}_dense/"
            for name in ("query", "key", "value")} | {"_0/out/": "_0/o_dense/"}  # fmt: skip


def _layouts() -> list[TensorLayout]:
    """Every tensor but the class token and learned positions."""
    layer = "dcvit.layers.{i}."
    rows = [
        row("embedding/kernel", "p q k e", "dcvit.embeddings.patch_embeddings.projection.weight", "e k p q"),
        row("embedding/bias", "e", "dcvit.embeddings.patch_embeddings.projection.bias", "e"),
        row("pre_logits/kernel", "e y", "dcvit.pooler.dense.weight", "y e"),
        row("pre_logits/bias", "y", "dcvit.pooler.dense.bias", "y"),
        row("head/kernel", "y v", "classifier.weight", "v y"),
        row("head/bias", "v", "classifier.bias", "v"),
    ]
    for theirs, ours in (
        (_BLOCK + "LayerNorm_0", layer + "layernorm_before"),
        (_BLOCK + "LayerNorm_1", layer + "layernorm_after"),
        ("Transformer/encoder_norm", "dcvit.layernorm"),
    ):
        rows += [row(f"{theirs}/scale", "e", f"{ours}.weight", "e"), row(f"{theirs}/bias", "e", f"{ours}.bias", "e")]
    for name in ("query", "key", "value"):
        ours = f"{layer}attention.{name[0]}_proj"
        rows.append(row(f"{_ATTENTION}{name}_dense/kernel", "e h d", f"{ours}.weight", "(h d) e"))
        rows.append(row(f"{_ATTENTION}{name}_dense/bias", "h d", f"{ours}.bias", "(h d)"))
    rows.append(row(_ATTENTION + "o_dense/kernel", "(h d) e", layer + "attention.o_proj.weight", "e (h d)"))
    rows.append(row(_ATTENTION + "o_dense/bias", "e", layer + "attention.o_proj.bias", "e"))
    for name in ("query", "key"):
        rows.append(row(f"{_ATTENTION}{name}_ln/scale", "d", f"{layer}attention.{name[0]}_norm.weight", "d"))
    for number, dims in ((0, "e f"), (1, "f e")):
        out = dims[-1]
        theirs, ours = f"{_BLOCK}MlpBlock_0/Dense_{number}", f"{layer}mlp.fc{number + 1}"
        rows.append(row(f"{theirs}/kernel", dims, f"{ours}.weight", dims[::-1]))
        rows.append(row(f"{theirs}/bias", out, f"{ours}.bias", out))
    generator = _ATTENTION + "dyn_w_proj/"
    for layout in compose_layouts("", generator + "dw1/kernel", generator + "qkw", generator + "dd/kernel"):
        ((native, dims),) = layout.natives
        native = native.replace("model.layers.{i}.self_attn.", layer + "attention.")
        rows.append(row(layout.foreign, layout.foreign_dims, native, dims))
    for stage in ("pre", "post"):
        rows.append(row(f"{_ATTENTION}{stage}_proj/w", "g m n", f"{layer}attention.compose.{stage}_static", "(g m) n"))
    return rows


def _parameters(source: str | Path | Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint under the fork's names."""
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(array) for name, array in source.items()}
    else:
        path = Path(source)
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ConversionError(
                f"{path} cannot be read as a .npz file: it is not a zip archive, or its end is missing. Give what "
                "numpy.savez writes, whole."
            )
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: np.asarray(array) for name, array in file.items()}
        except _UNREADABLE as error:
            raise ConversionError(f"{path} cannot be read as a .npz file: {error}") from error
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in arrays):  # others are the optimizer's
            arrays = {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
            break
    renamed = {}
    for name, array in arrays.items():
        for old, new in _RENAMED.items():
            if old in name:
                name = name.replace(old, new)
                # big_vision's output projection has an axis for heads
                array = array.reshape(-1, array.shape[-1]) if old == "_0/out/" and array.ndim == 3 else array
        renamed[name] = array
    return renamed


def _tensor(name: str, array: np.ndarray, expected: tuple[int, ...]) -> torch.Tensor:
    """An array in float32, with its own memory.

    Raises:
        ConversionError: naming it, when it is of another shape, no floats, or not finite.
    """
    if array.shape != expected or array.dtype.kind != "f":
        raise ConversionError(f"{name} is {array.dtype} {array.shape}: expected floats of shape {expected}.")
    with np.errstate(over="ignore"):  # refused below
        tensor = torch.from_numpy(np.array(array, dtype=np.float32))
    if bad := int((~tensor.isfinite()).sum()):
        raise ConversionError(
            f"{name} holds {bad} values that are NaN or infinite as float32, of {tensor.numel()}: the checkpoint is "
            "damaged. Take another copy, or an earlier one."
        )
    return tensor


def _infer_config(arrays: dict[str, np.ndarray], image_size: int | tuple[int, int] | None) -> DCViTConfig:
    """The configuration that a checkpoint's shapes say; of what they do not, the fork's.

    Raises:
        ConversionError: naming what is missing or not supported.
    """
    unsupported = [name for name in arrays if name.startswith(("Transformer/encoderblock/", "MAPHead_0/"))]
    if unsupported:
        raise ConversionError(
            f"{unsupported[0]} is of a model with stacked layers or attention pooling, which DCViT has not: expected "
            "layers under Transformer/encoderblock_<number>/ and mean or class-token pooling."
        )

    def shape(name: str, ndim: int) -> tuple[int, ...]:
        if name not in arrays or arrays[name].ndim != ndim:
            found = f"has shape {arrays[name].shape}" if name in arrays else "is missing"
            raise ConversionError(f"{name} {found}; expected {ndim} dimensions, as in a ViT of big_vision.")
        return arrays[name].shape

    first = _ATTENTION.format(i=0)
    patch_height, patch_width, channels, width = shape("embedding/kernel", 4)
    _, heads, _ = shape(first + "query_dense/kernel", 3)
    has_low_rank, has_gate = (first + f"dyn_w_proj/{name}" in arrays for name in ("qkw", "dd/kernel"))
    stages = [f"{first}{stage}_proj/w" in arrays for stage in ("pre", "post")]
    is_dynamic = has_low_rank or has_gate
    fields: dict[str, Any] = {
        "compose_pre": is_dynamic or stages[0],
        "compose_post": is_dynamic or stages[1],
        "compose_query": is_dynamic,
        "compose_key": is_dynamic,
        "compose_static": any(stages),
        "qk_norm": "layernorm" if first + "query_ln/scale" in arrays else None,
        "compose_gate_init": 0.005,
    }
    # each array of composition has an axis of groups
    axes = {"dyn_w_proj/qkw": (5, 0), "dyn_w_proj/dd/kernel": (3, 1), "pre_proj/w": (3, 0), "post_proj/w": (3, 0)}
    for name, (ndim, axis) in axes.items():
        if first + name in arrays:
            fields["compose_groups"] = shape(first + name, ndim)[axis]
            break
    if has_low_rank:
        fields["compose_rank"] = shape(first + "dyn_w_proj/qkw", 5)[3] // 2
    if is_dynamic:
        fields |= {"compose_projection": has_low_rank, "compose_gate": has_gate}
    if "pos_embedding" in arrays:
        patches = shape("pos_embedding", 3)[1]
        if image_size is None:
            side = math.isqrt(patches)
            if side * side != patches:
                raise ConversionError(f"pos_embedding has {patches} positions, not a square number: give image_size.")
            image_size = (side * patch_height, side * patch_width)
    elif image_size is None:
        divides = 224 % patch_height == 224 % patch_width == 0
        image_size = 224 if divides else (14 * patch_height, 14 * patch_width)
    layers = {int(found[1]) for name in arrays if (found := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    return DCViTConfig(
        image_size=image_size,
        patch_size=patch_height if patch_height == patch_width else (patch_height, patch_width),
        num_channels=channels,
        hidden_size=width,
        intermediate_size=shape(_BLOCK.format(i=0) + "MlpBlock_0/Dense_0/kernel", 2)[1],
        num_hidden_layers=max(layers) + 1,
        num_attention_heads=heads,
        position_embedding_type="learned" if "pos_embedding" in arrays else "sincos2d",
        pooling="cls" if "cls" in arrays else "mean",
        representation_size=shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in arrays else None,
        **fields | {"num_labels": shape("head/kernel", 2)[1] if "head/kernel" in arrays else 0},
    )


def convert_big_vision(
    npz: str | Path | Mapping[str, Any], image_size: int | tuple[int, int] | None = None
) -> DCViTForImageClassification:
    """Loads a checkpoint of the authors' fork of big_vision, or of a plain ViT of big_vision.

    The configuration comes from shapes. What shapes do not say is as in the fork: tanh-GELU, epsilon 1e-6.

    Args:
        npz: path of the file, or its arrays by name: "embedding/kernel", "Transformer/encoderblock_0/...", also with
            "params/" or "opt/target/" in front.
        image_size: pixels of the images that it was trained on. Sine and cosine positions do not tell: 224 when not
            given, or 14 patches where these do not divide 224. Learned ones do, if images are square.

    Returns:
        the model, in float32 and in evaluation mode; without a head `num_labels` is 0, and logits are what is pooled.

    Raises:
        ConversionError: on a file that cannot be read; arrays that are missing, left over, of another shape, or
            not finite.
        ValueError: on an `image_size` that patches do not divide.
    """
    arrays = _parameters(npz)
    config = _infer_config(arrays, image_size)
    heads_per_group = config.num_attention_heads // config.compose_groups
    patch = config.patch_size if not isinstance(config.patch_size, int) else (config.patch_size,) * 2
    sizes = {
        "p": patch[0], "q": patch[1], "k": config.num_channels, "e": config.hidden_size, "f": config.intermediate_size,
        "y": config.representation_size or config.hidden_size, "v": config.num_labels,
        "h": config.num_attention_heads, "d": config.head_dim,
        "g": config.compose_groups, "c": 4, "m": heads_per_group, "n": heads_per_group,
        "x": 2 * config.compose_rank * heads_per_group, "r": 2 * config.compose_rank,
    }  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    for layout in _layouts():
        ((native, native_dims),) = layout.natives
        for i in range(config.num_hidden_layers if "{i}" in native else 1):
            name = layout.foreign.format(i=i)
            if name not in arrays:
                continue  # absent parts are missed below, unless the configuration has none
            tensor = _tensor(name, arrays.pop(name), shape_of(layout.foreign_dims, sizes))
            state[native.format(i=i)] = rearrange(tensor, layout.foreign_dims, native_dims, sizes).contiguous()
    _add_positions(state, arrays, config)
    model = DCViTForImageClassification(config).eval()
    wanted = model.state_dict().keys()
    if arrays or wanted - state.keys():
        left, missing = sorted(arrays)[:3], sorted(wanted - state.keys())[:3]
        raise ConversionError(
            f"the checkpoint does not make a DCViT: of its arrays {len(arrays)} are not known ({', '.join(left)}), and "
            f"{len(wanted - state.keys())} tensors of the model are not in it ({', '.join(missing)})."
        )
    model.load_state_dict(state)
    return model


def _add_positions(state: dict[str, torch.Tensor], arrays: dict[str, np.ndarray], config: DCViTConfig) -> None:
    """Moves the class token and learned positions from the arrays to the state. The class token has no position."""
    shapes = {"cls": (1, 1, config.hidden_size), "pos_embedding": (1, math.prod(config.grid), config.hidden_size)}
    found = {name: _tensor(name, arrays.pop(name), shapes[name]) for name in shapes if name in arrays}
    if "cls" in found:
        state["dcvit.embeddings.cls_token"] = found["cls"]
    if "pos_embedding" in found:
        nowhere = torch.zeros_like(found["cls"]) if "cls" in found else torch.zeros(1, 0, config.hidden_size)
        state["dcvit.embeddings.position_embeddings"] = torch.cat([nowhere, found["pos_embedding"]], dim=1)


__all__ = ["convert_big_vision"]
