"""How tensors of other checkpoint formats correspond to native ones, with the table of the hub format.

A format is a table of `TensorLayout`s: foreign and native names with their dimensions. Dimensions are written as in
einops, one letter per axis, with parentheses where several axes are stored as one:

    v vocabulary    e hidden size      f MLP width      t gates of a multi-gate MLP
    h query heads   j key/value heads  d head dim       l layers stacked in one tensor
    g groups of heads                  m, n heads of a group, M
    c weight generators                x hidden width K of a generator       r rows 2R of its output

Both directions, the expected shapes, and the check that a checkpoint fits its configuration all come from the tables.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .configuration_dcformer import DCFormerConfig

# The order in which weight generators are stored; checkpoints hold all four, even those not in use.
STORED_GENERATORS = (("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"))


@dataclass(frozen=True)
class TensorLayout:
    """One kind of tensor: its name and dimensions in a foreign format, and here.

    Attributes:
        foreign: its foreign name. "{i}" is the number of a layer, "{s}" a layer's place in the pattern.
        foreign_dims: its foreign dimensions, such as "e l h d".
        natives: native (name, dimensions). Several native tensors are concatenated along the first dimension of the
            foreign one.
        offset: native values minus foreign values.
    """

    foreign: str
    foreign_dims: str
    natives: tuple[tuple[str, str], ...]
    offset: float = 0.0


def row(foreign: str, foreign_dims: str, native: str, native_dims: str, offset: float = 0.0) -> TensorLayout:
    """The `TensorLayout` of a foreign tensor that corresponds to a single native one."""
    return TensorLayout(foreign, foreign_dims, ((native, native_dims),), offset)


def _axes(dims: str) -> list[tuple[str, ...]]:
    """ "e (h d)" -> [("e",), ("h", "d")]."""
    return [tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", dims)]


def layer_dims(dims: str) -> str:
    """The dimensions of one layer of a stacked tensor: "e l h d" -> "e h d"."""
    return re.sub(r"\bl\b ?", "", dims).strip()


def dimension_sizes(config: DCFormerConfig, generators: int | None = None) -> dict[str, int]:
    """The size of every letter but "l".

    Args:
        config: the model's.
        generators: size of "c"; by default the number of generators in use.
    """
    heads_per_group = config.num_attention_heads // config.compose_groups
    return {
        "v": config.vocab_size,
        "e": config.hidden_size,
        "f": config.intermediate_size,
        "t": config.mlp_gates,
        "h": config.num_attention_heads,
        "j": config.num_key_value_heads,
        "d": config.head_dim,
        "g": config.compose_groups,
        "m": heads_per_group,
        "n": heads_per_group,
        "c": len(config.compose_generators) if generators is None else generators,
        "x": 2 * config.compose_rank * heads_per_group,
        "r": 2 * config.compose_rank,
    }


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor with dimensions `dims`: "e (h d)" -> (E, H·D)."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in _axes(dims))


def foreign_shape(
    layout: TensorLayout, config: DCFormerConfig, generators: int = 4, layers: int | None = None
) -> tuple[int, ...]:
    """The shape of a foreign tensor.

    Args:
        layout: of the tensor.
        config: the model's.
        generators: how many weight generators the tensor holds.
        layers: how many layers are stacked in it; None for a single layer.
    """
    sizes = dimension_sizes(config, generators)
    if len(layout.natives) > 1:
        parts = [shape_of(dims, sizes) for _, dims in layout.natives]
        return (sum(part[0] for part in parts), *parts[0][1:])
    if layers is None:
        return shape_of(layer_dims(layout.foreign_dims), sizes)
    return shape_of(layout.foreign_dims, sizes | {"l": layers})


def rearrange(tensor: torch.Tensor, source: str, target: str, sizes: Mapping[str, int]) -> torch.Tensor:
    """Reorders dimensions: "e g c x" -> "(g c x) e".

    Args:
        tensor: of shape `shape_of(source, sizes)`.
        source, target: current and wanted dimensions, with the same letters.
        sizes: the size of each letter.

    Returns:
        of shape `shape_of(target, sizes)`; a view where possible.
    """
    letters = [letter for axis in _axes(source) for letter in axis]
    order = [letters.index(letter) for axis in _axes(target) for letter in axis]
    unfolded = tensor.reshape([sizes[letter] for letter in letters]).permute(order)
    return unfolded.reshape(shape_of(target, sizes))


def generator_indices(config: DCFormerConfig) -> list[int]:
    """Which of the four stored weight generators a model uses."""
    return [STORED_GENERATORS.index(generator) for generator in config.compose_generators]


def to_native(
    layout: TensorLayout, tensor: torch.Tensor, config: DCFormerConfig, generators: int = 4
) -> list[torch.Tensor]:
    """Converts one layer's foreign tensor to the corresponding native ones.

    Args:
        layout: of the tensor; its foreign dimensions without "l" are those of `tensor`.
        tensor: any dtype.
        config: the model's.
        generators: how many weight generators the tensor holds; those that the model does not use are left out.

    Returns:
        one tensor per entry of `layout.natives`, in the dtype of `tensor`; views where possible.
    """
    foreign_dims = layer_dims(layout.foreign_dims)
    if len(layout.natives) > 1:
        rows = [shape_of(dims, dimension_sizes(config))[0] for _, dims in layout.natives]
        return list(tensor.split(rows))
    ((_, native_dims),) = layout.natives
    used = generator_indices(config)
    if "c" in foreign_dims and generators != len(used):
        by_generator = _generators_first(foreign_dims)
        tensor = rearrange(tensor, foreign_dims, by_generator, dimension_sizes(config, generators))[used]
        foreign_dims = by_generator
    return [rearrange(tensor, foreign_dims, native_dims, dimension_sizes(config))]


def from_native(
    layout: TensorLayout, tensors: Sequence[torch.Tensor], config: DCFormerConfig, generators: int = 4
) -> torch.Tensor:
    """Converts one layer's native tensors to the foreign one: the inverse of `to_native`.

    Weight generators that the model does not have are stored as zeros, which contribute nothing to composition.
    """
    foreign_dims = layer_dims(layout.foreign_dims)
    if len(layout.natives) > 1:
        return torch.cat(list(tensors))
    ((_, native_dims),), (tensor,) = layout.natives, tensors
    used, sizes = generator_indices(config), dimension_sizes(config)
    if "c" in foreign_dims and generators != len(used):
        by_generator = _generators_first(foreign_dims)
        tensor = rearrange(tensor, native_dims, by_generator, sizes)
        sizes = dimension_sizes(config, generators)
        padded = tensor.new_zeros(shape_of(by_generator, sizes))
        padded[used] = tensor
        tensor, native_dims = padded, by_generator
    return rearrange(tensor, native_dims, foreign_dims, sizes)


def _generators_first(dims: str) -> str:
    """`dims` unfolded, weight generators leading: "e g (c m)" -> "c e g m"."""
    return " ".join(["c", *(letter for axis in _axes(dims) for letter in axis if letter != "c")])


def compose_layouts(prefix: str, dw1: str, qkw: str, dd: str) -> list[TensorLayout]:
    """The layouts of a layer's weight generators, whose dimensions are the same in hub, MaxText and Pax checkpoints.

    Args:
        prefix: "l " where several layers are stacked along the first dimension, otherwise "".
        dw1, qkw, dd: their names.
    """
    compose = "model.layers.{i}.self_attn.compose."
    return [
        row(dw1, f"{prefix}e g c x", compose + "dw1_proj.weight", "(g c x) e"),
        row(qkw, f"{prefix}g c x r m", compose + "qkw", "(g c x) (r m)"),
        row(dd, f"{prefix}e g (c m)", compose + "gate_proj.weight", "(g c m) e"),
    ]


def hub_layouts(mlp_type: str) -> list[TensorLayout]:
    """The table of the hub format (DCFormer-2.8B, DCPythia-6.9B).

    Args:
        mlp_type: "gated" or "plain", as in the configuration; decides what `feed_forward.w1` is.
    """
    layer, native = "layers.{i}.", "model.layers.{i}."
    attention, dynamic = layer + "attention.", layer + "attention.dyn_w_proj."
    layouts = [
        row("tok_embeddings.weight", "v e", "model.embed_tokens.weight", "v e"),
        row("output.weight", "v e", "lm_head.weight", "v e"),
    ]
    for kind in ("weight", "bias"):
        for old, new in (
            ("norm", "model.norm"),
            (layer + "attention_norm", native + "input_layernorm"),
            (layer + "ffn_norm", native + "post_attention_layernorm"),
        ):
            layouts.append(row(f"{old}.{kind}", "e", f"{new}.{kind}", "e"))
        tail = " e" if kind == "weight" else ""
        projections = tuple(
            (f"{native}self_attn.{name}_proj.{kind}", f"({heads} d){tail}")
            for name, heads in (("q", "h"), ("k", "j"), ("v", "j"))
        )
        for name, projection in zip("qkv", projections, strict=True):
            layouts.append(TensorLayout(f"{attention}w{name}.{kind}", projection[1], (projection,)))
        # "(h d)" stands for all rows here; a fused tensor has as many rows as its parts together
        layouts.append(TensorLayout(f"{attention}wqkv.{kind}", projections[0][1], projections))
        out = "e (h d)" if kind == "weight" else "e"
        layouts.append(row(f"{attention}wo.{kind}", out, f"{native}self_attn.o_proj.{kind}", out))
        into, outof = ("f e", "e f") if kind == "weight" else ("f", "e")
        mlp = layer + "feed_forward.", native + "mlp."
        first = {"gated": (("w1", "gate_proj"), ("w3", "up_proj")), "plain": (("w1", "up_proj"),)}[mlp_type]
        for old, new in first:
            layouts.append(row(f"{mlp[0]}{old}.{kind}", into, f"{mlp[1]}{new}.{kind}", into))
        layouts.append(row(f"{mlp[0]}w2.{kind}", outof, f"{mlp[1]}down_proj.{kind}", outof))
    layouts.append(row(layer + "feed_forward.mg.weight", "t e", native + "mlp.multi_gate_proj.weight", "t e"))
    for side in ("q", "k"):
        layouts.append(row(f"{attention}{side}_norm.scale", "d", f"{native}self_attn.{side}_norm.weight", "d"))
    layouts += compose_layouts("", dynamic + "dw1", dynamic + "qkw", dynamic + "dd")
    for stage in ("pre", "post"):
        name = f"{native}self_attn.compose.{stage}_static"
        layouts.append(row(f"{dynamic}{stage}_proj.w", "g m n", name, "(g m) n"))
    return layouts


# Stored but unused: merged duplicates of the weight generators, which may be stale.
HUB_IGNORED = re.compile(r"layers\.\d+\.attention\.dyn_w_proj\.(dw_m|qkw_m|sw)")
# Static projections; a model without them stores identity matrices under these names.
HUB_STATIC = re.compile(r"layers\.\d+\.attention\.dyn_w_proj\.(pre|post)_proj\.w")

__all__ = [
    "HUB_IGNORED",
    "HUB_STATIC",
    "STORED_GENERATORS",
    "TensorLayout",
    "compose_layouts",
    "dimension_sizes",
    "foreign_shape",
    "from_native",
    "generator_indices",
    "hub_layouts",
    "layer_dims",
    "rearrange",
    "row",
    "shape_of",
    "to_native",
]
