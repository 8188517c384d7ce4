"""The JAX checkpoint formats, name by name, and how a format's tensors spread over a model's layers.

Every table holds the whole format: which of its tensors a checkpoint has follows from the model's configuration, by way
of the native tensors that such a model has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..configuration_dcformer import DCFormerConfig
from ..layouts_dcformer import (
    TensorLayout,
    compose_layouts,
    dimension_sizes,
    from_native,
    hub_layouts,
    layer_dims,
    shape_of,
    to_native,
)
from ..modeling_dcformer import DCFormerForCausalLM

FORMATS = ("native", "hub", "maxtext", "pax")

_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MAXTEXT_LAYERS = "decoder.layers."
_PAX_LAYERS = "transformer.repeat.sub.x_layers_"


def _layout(foreign: str, foreign_dims: str, native: str, native_dims: str, offset: float = 0.0) -> TensorLayout:
    return TensorLayout(foreign, foreign_dims, ((native, native_dims),), offset)


def maxtext_layouts() -> list[TensorLayout]:
    """MaxText: the layers of a block at one place of the pattern are stacked along the second dimension, l."""
    layer, attention = _MAXTEXT_LAYERS, _MAXTEXT_LAYERS + "self_attention_{s}."
    dynamic = attention + "AttentionOp_0.dyn_w_proj."
    dw1, qkw, dd = compose_layouts("", dynamic + "dw1.kernel", dynamic + "qkw", dynamic + "dd.kernel")
    layouts = [
        _layout("token_embedder.embedding", "v e", "model.embed_tokens.weight", "v e"),
        _layout("decoder.decoder_norm.scale", "e", "model.norm.weight", "e"),
        _layout("decoder.logits_dense.kernel", "e v", "lm_head.weight", "v e"),
        _layout(layer + "pre_self_attention_layer_norm_{s}.scale", "e l", _LAYER + "input_layernorm.weight", "e"),
        _layout(
            layer + "post_self_attention_layer_norm_{s}.scale", "e l", _LAYER + "post_attention_layernorm.weight", "e"
        ),
        _layout(layer + "mlp_{s}.wi_0.kernel", "e l f", _LAYER + "mlp.gate_proj.weight", "f e"),
        _layout(layer + "mlp_{s}.wi_1.kernel", "e l f", _LAYER + "mlp.up_proj.weight", "f e"),
        _layout(layer + "mlp_{s}.wo.kernel", "f l e", _LAYER + "mlp.down_proj.weight", "e f"),
        _layout(attention + "query.kernel", "e l h d", _ATTENTION + "q_proj.weight", "(h d) e"),
        _layout(attention + "key.kernel", "e l j d", _ATTENTION + "k_proj.weight", "(j d) e"),
        _layout(attention + "value.kernel", "e l j d", _ATTENTION + "v_proj.weight", "(j d) e"),
        _layout(attention + "out.kernel", "h l d e", _ATTENTION + "o_proj.weight", "e (h d)"),
        _layout(attention + "q_norm.scale", "d l", _ATTENTION + "q_norm.weight", "d"),
        _layout(attention + "k_norm.scale", "d l", _ATTENTION + "k_norm.weight", "d"),
        TensorLayout(dw1.foreign, "e l g c x", dw1.natives),
        TensorLayout(qkw.foreign, "g l c x r m", qkw.natives),
        TensorLayout(dd.foreign, "e l g (c m)", dd.natives),
    ]
    for stage in ("pre", "post"):
        name = f"{attention}AttentionOp_0.{stage}_proj.w"
        layouts.append(_layout(name, "g l m n", f"{_ATTENTION}compose.{stage}_static", "(g m) n"))
    return layouts


def pax_layouts(mlp_type: str, norm_type: str) -> list[TensorLayout]:
    """Pax: the layers of a block at one place of the pattern are stacked along the first dimension, l.

    Args:
        mlp_type: "gated" or "plain", as in the configuration.
        norm_type: "rmsnorm" or "layernorm": praxis stores the scale of a LayerNorm less one.
    """
    layer = _PAX_LAYERS + "{s}."
    attention, mlp, dynamic = layer + "self_attention.", layer + "ff_layer.", layer + "self_attention.dyn_w_proj."
    offset = 1.0 if norm_type == "layernorm" else 0.0
    layouts = [
        _layout("embedding_lookup.emb_var", "v e", "model.embed_tokens.weight", "v e"),
        _layout("softmax.logits_ffn.linear.w", "e v", "lm_head.weight", "v e"),
    ]
    for old, new, l_ in (
        ("final_ln", "model.norm", ""),
        (layer + "layer_norm", _LAYER + "input_layernorm", "l "),
        (mlp + "layer_norm", _LAYER + "post_attention_layernorm", "l "),
    ):
        layouts.append(_layout(f"{old}.scale", l_ + "e", f"{new}.weight", "e", offset))
        layouts.append(_layout(f"{old}.bias", l_ + "e", f"{new}.bias", "e"))
    gated = [("ffn_layer1_gate", "gate_proj", "l e f", "f e", "f")] if mlp_type == "gated" else []
    for old, new, dims, native_dims, bias in (
        *gated,
        ("ffn_layer1", "up_proj", "l e f", "f e", "f"),
        ("ffn_layer2", "down_proj", "l f e", "e f", "e"),
    ):
        layouts.append(_layout(f"{mlp}{old}.linear.w", dims, f"{_LAYER}mlp.{new}.weight", native_dims))
        layouts.append(_layout(f"{mlp}{old}.bias.b", "l " + bias, f"{_LAYER}mlp.{new}.bias", bias))
    layouts.append(_layout(mlp + "mgate_layer.linear.w", "l e t", _LAYER + "mlp.multi_gate_proj.weight", "t e"))
    for old, heads in (("query", "h"), ("key", "j"), ("value", "j")):
        new = f"{_ATTENTION}{old[0]}_proj."
        layouts.append(_layout(f"{attention}{old}.w", f"l e {heads} d", new + "weight", f"({heads} d) e"))
        layouts.append(_layout(f"{attention}{old}.b", f"l {heads} d", new + "bias", f"({heads} d)"))
    layouts.append(_layout(attention + "post.w", "l e h d", _ATTENTION + "o_proj.weight", "e (h d)"))
    layouts.append(_layout(attention + "post.b", "l e", _ATTENTION + "o_proj.bias", "e"))
    for side in ("q", "k"):
        layouts.append(_layout(f"{attention}{side}_norm.scale", "l d", f"{_ATTENTION}{side}_norm.weight", "d"))
    layouts += compose_layouts("l ", dynamic + "dw1", dynamic + "qkw", dynamic + "dd")
    for stage in ("pre", "post"):
        name = f"{attention}{stage}_proj.w"
        layouts.append(_layout(name, "l g m n", f"{_ATTENTION}compose.{stage}_static", "(g m) n"))
    return layouts


def format_layouts(name: str, mlp_type: str, norm_type: str) -> list[TensorLayout]:
    """The table of a foreign format, for one kind of model."""
    if name == "hub":
        return hub_layouts(mlp_type)
    if name == "pax":
        return pax_layouts(mlp_type, norm_type)
    # without a gate, what is called `wi_1` would be the only way in; MaxText has no such MLP
    return [layout for layout in maxtext_layouts() if mlp_type == "gated" or ".mlp_" not in layout.foreign]


@dataclass(frozen=True)
class Part:
    """One stored tensor of a checkpoint, and the native tensors that it holds.

    Attributes:
        name: of the stored tensor.
        layout: its kind.
        layers: the layers stacked in it, in order; just (0,) for a tensor outside the layers.
        stacked: whether there is a dimension "l" for them.
        generators: weight generators it holds, when it is of that kind.
        whole: of a native tensor, its shape: it is what it is.
    """

    name: str
    layout: TensorLayout
    layers: tuple[int, ...]
    stacked: bool
    generators: int = 4
    whole: tuple[int, ...] | None = None

    @property
    def dims(self) -> str:
        """Its dimensions as stored."""
        return self.layout.foreign_dims if self.stacked else layer_dims(self.layout.foreign_dims)

    def natives(self) -> list[str]:
        """Names of the native tensors it holds, layer by layer."""
        return [name.format(i=i) for i in self.layers for name, _ in self.layout.natives]

    def shape(self, config: DCFormerConfig) -> tuple[int, ...]:
        """Its shape as stored, without a padded vocabulary."""
        if self.whole is not None:
            return self.whole
        sizes = dimension_sizes(config, self.generators) | {"l": len(self.layers)}
        if len(self.layout.natives) > 1:
            shapes = [shape_of(dims, sizes) for _, dims in self.layout.natives]
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return shape_of(self.dims, sizes)

    def split(self, tensor: torch.Tensor, config: DCFormerConfig) -> list[torch.Tensor]:
        """The stored tensor -> the native ones, in the order of `natives`; views where that is possible."""
        if self.whole is not None:
            return [tensor]
        axis = self.dims.split().index("l") if self.stacked else None
        layers = [tensor] if axis is None else list(tensor.unbind(axis))
        return [native for layer in layers for native in to_native(self.layout, layer, config, self.generators)]

    def join(self, tensors: Sequence[torch.Tensor], config: DCFormerConfig, dtype: torch.dtype) -> torch.Tensor:
        """Native tensors, in the order of `natives` and taken one layer at a time -> the stored one."""
        width = len(self.layout.natives)
        if not self.stacked:
            return self._from_native([tensors[k] for k in range(width)], config, dtype)
        axis = self.dims.split().index("l")
        stored = torch.empty(self.shape(config), dtype=dtype)
        for place in range(len(self.layers)):
            layer = [tensors[place * width + k] for k in range(width)]
            stored.select(axis, place).copy_(self._from_native(layer, config, dtype))
        return stored

    def _from_native(self, tensors: Sequence[torch.Tensor], config: DCFormerConfig, dtype: torch.dtype) -> torch.Tensor:
        if self.layout.offset:
            tensors = [tensor.double() - self.layout.offset for tensor in tensors]
        stored = from_native(self.layout, tensors, config, self.generators)
        return stored.to(dtype, memory_format=torch.contiguous_format)  # cast and transposed in one copy


def native_shapes(config: DCFormerConfig) -> dict[str, torch.Size]:
    """Name -> shape of every tensor that a causal language model of this configuration is saved with."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def layer_period(config: DCFormerConfig) -> int:
    """The length P of the shortest pattern of layers that, repeated, makes up the whole depth."""
    kinds, count = list(config.layer_types or ()), config.num_hidden_layers
    return next(p for p in range(1, count + 1) if count % p == 0 and kinds[:p] * (count // p) == kinds)


def format_parts(
    name: str,
    config: DCFormerConfig,
    *,
    period: int = 1,
    stacked: bool = True,
    generators: int = 4,
    present: Sequence[str] | None = None,
) -> list[Part]:
    """The stored tensors that make up a model in a foreign format.

    Args:
        name: "native", "hub", "maxtext" or "pax".
        config: the model's.
        period: P, layers of a pattern block (JAX formats).
        stacked: whether blocks are stacked in one tensor (`scan_layers`), or each is stored by itself (JAX formats).
        generators: weight generators stored.
        present: names in the checkpoint: where a format stores the same in several ways (fused or separate q, k, v;
            tied embeddings), those that are there are taken.

    Returns:
        the parts. Native tensors that the format has no place for are in none of them.
    """
    natives, names = native_shapes(config), set(present or ())
    if name == "native":
        return [
            Part(native, TensorLayout(native, "", ((native, ""),)), (0,), False, whole=tuple(shape))
            for native, shape in natives.items()
        ]
    layouts = format_layouts(name, config.mlp_type, config.norm_type)
    if name == "pax" and config.tie_word_embeddings and "embedding_lookup.emb_var" not in names:
        # praxis keeps a shared embedding with the softmax
        layouts.append(_layout("softmax.logits_ffn.linear.w", "e v", "model.embed_tokens.weight", "v e"))
        layouts = [layout for layout in layouts if layout.foreign != "embedding_lookup.emb_var"]
    count = config.num_hidden_layers
    parts = []
    for layout in layouts:
        if layout.natives[0][0].format(i=0) not in natives:
            continue
        if "{i}" not in layout.natives[0][0]:
            parts.append(Part(layout.foreign, layout, (0,), False))
        elif name == "hub":
            parts += [Part(layout.foreign.format(i=i), layout, (i,), False, generators) for i in range(count)]
        elif stacked:
            parts += [
                Part(layout.foreign.format(s=s), layout, tuple(range(s, count, period)), True, generators)
                for s in range(period)
            ]
        else:
            parts += [
                Part(_unstacked(name, layout.foreign, i, period), layout, (i,), False, generators) for i in range(count)
            ]
    fused = [part for part in parts if len(part.layout.natives) > 1]
    there = {native for part in fused if part.name in names for native in part.natives()}
    return [part for part in parts if (part.name in names if part in fused else part.natives()[0] not in there)]


def _unstacked(name: str, foreign: str, layer: int, period: int) -> str:
    """The name of a layer's tensor where blocks are not stacked."""
    block, place = divmod(layer, period)
    if name == "maxtext":
        return foreign.format(s=place).replace(_MAXTEXT_LAYERS, f"{_MAXTEXT_LAYERS[:-1]}_{block}.", 1)
    return foreign.format(s=layer).replace(_PAX_LAYERS, "transformer.x_layers_", 1)
