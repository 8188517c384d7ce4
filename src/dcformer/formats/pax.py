"""Pax / praxis: `<root>/checkpoint_<step>/state`, a zarr array per parameter, layers stacked along the first axis."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from ..errors import ConversionError
from ..layouts_dcformer import TensorLayout, compose_layouts, row
from .arrays import LazyArray, write_zarr
from .base import ArrayFormat, Found, Part

_EMBEDDING, _HEAD = "embedding_lookup.emb_var", "softmax.logits_ffn.linear.w"
_NORM_BIASES = ("final_ln.bias", ".layer_norm.bias")


class PaxFormat(ArrayFormat):
    """Pax checkpoints, parameters only; the trainer creates new optimizer states."""

    name, title = "pax", "Pax"
    prefix = r"(?:state\.)?(?:mdl_vars\.)?(?:params\.)?(?:lm\.)?"
    roots = ("transformer", "embedding_lookup", "softmax", "final_ln")
    stacked_layers, single_layers = "transformer.repeat.sub.x_layers_{s}.", "transformer.x_layers_{i}."
    options = frozenset({"padded_vocab_size"})
    certain_prefix = r"(?:state\.)?(?:mdl_vars\.params\.(?:lm\.)?|params\.lm\.)"
    limits = "A Pax checkpoint is one zarr array per parameter, and its trainer creates new optimizer states."

    def layouts(self, mlp_type: str, norm_type: str) -> list[TensorLayout]:
        """The format's table. praxis stores a LayerNorm's scale minus one, and an RMSNorm's scale unchanged."""
        native, theirs = "model.layers.{i}.", self.stacked_layers
        attention, mlp, dynamic = theirs + "self_attention.", theirs + "ff_layer.", "self_attention.dyn_w_proj."
        offset = 1.0 if norm_type == "layernorm" else 0.0
        table = [row(_EMBEDDING, "v e", "model.embed_tokens.weight", "v e")]
        table.append(row(_HEAD, "e v", "lm_head.weight", "v e"))
        for old, new, l_ in (
            ("final_ln", "model.norm", ""),
            (theirs + "layer_norm", native + "input_layernorm", "l "),
            (mlp + "layer_norm", native + "post_attention_layernorm", "l "),
        ):
            table.append(row(f"{old}.scale", l_ + "e", f"{new}.weight", "e", offset))
            table.append(row(f"{old}.bias", l_ + "e", f"{new}.bias", "e"))
        gated = [("ffn_layer1_gate", "gate_proj", "l e f", "f e", "f")] if mlp_type == "gated" else []
        for old, new, dims, native_dims, bias in (
            *gated,
            ("ffn_layer1", "up_proj", "l e f", "f e", "f"),
            ("ffn_layer2", "down_proj", "l f e", "e f", "e"),
        ):
            table.append(row(f"{mlp}{old}.linear.w", dims, f"{native}mlp.{new}.weight", native_dims))
            table.append(row(f"{mlp}{old}.bias.b", "l " + bias, f"{native}mlp.{new}.bias", bias))
        table.append(row(mlp + "mgate_layer.linear.w", "l e t", native + "mlp.multi_gate_proj.weight", "t e"))
        for old, heads in (("query", "h"), ("key", "j"), ("value", "j")):
            new = f"{native}self_attn.{old[0]}_proj."
            table.append(row(f"{attention}{old}.w", f"l e {heads} d", new + "weight", f"({heads} d) e"))
            table.append(row(f"{attention}{old}.b", f"l {heads} d", new + "bias", f"({heads} d)"))
        table.append(row(attention + "post.w", "l e h d", native + "self_attn.o_proj.weight", "e (h d)"))
        table.append(row(attention + "post.b", "l e", native + "self_attn.o_proj.bias", "e"))
        for side in ("q", "k"):
            table.append(row(f"{attention}{side}_norm.scale", "l d", f"{native}self_attn.{side}_norm.weight", "d"))
        table += compose_layouts("l ", theirs + dynamic + "dw1", theirs + dynamic + "qkw", theirs + dynamic + "dd")
        for stage in ("pre", "post"):
            static = f"{native}self_attn.compose.{stage}_static"
            table.append(row(f"{attention}{stage}_proj.w", "l g m n", static, "(g m) n"))
        return table

    def _layouts_for(self, config: DCFormerConfig, present: set[str]) -> list[TensorLayout]:
        """praxis stores a tied embedding with the softmax."""
        table = super()._layouts_for(config, present)
        if config.tie_word_embeddings and _EMBEDDING not in present:
            table = [old for old in table if old.foreign != _EMBEDDING]
            table.append(row(_HEAD, "e v", "model.embed_tokens.weight", "v e"))
        return table

    def kind(self, names: Collection[str]) -> tuple[str, str]:
        gated = any(".ffn_layer1_gate." in name for name in names)
        has_biases = any(name.endswith(_NORM_BIASES) for name in names)
        return "gated" if gated else "plain", "layernorm" if has_biases else "rmsnorm"

    def assumed(self, found: Found) -> dict[str, Any]:
        return {"norm_eps": 1e-5 if found.fields["norm_type"] == "layernorm" else 1e-6, "qk_norm_eps": 1e-6}

    def array_shape(
        self, part: Part, config: DCFormerConfig, *, padded_vocab_size: int | None = None, **options: Any
    ) -> tuple[int, ...]:
        """As for every format, with `padded_vocab_size` rows of the embedding."""
        shape = part.shape(config)
        if padded_vocab_size is None:
            return shape
        if config.tie_word_embeddings:
            raise ConversionError("--padded-vocab-size pads the embedding, which this model shares with its head.")
        if part.name != _EMBEDDING:
            return shape
        if padded_vocab_size < shape[0]:
            raise ConversionError(
                f"padded_vocab_size={padded_vocab_size} is less than the model's vocab_size={shape[0]}."
            )
        return (padded_vocab_size, *shape[1:])

    def write(
        self,
        folder: Path,
        arrays: Mapping[str, LazyArray],
        *,
        config: DCFormerConfig,
        period: int,
        step: int,
        progress: Callable[[int], None],
        **options: Any,
    ) -> None:
        """Writes `<folder>/checkpoint_<step>/state/mdl_vars.params.lm...`.

        Args:
            folder, arrays, config, period, step, progress: as for every format.
            options: `padded_vocab_size`, which is in the arrays' shapes: rows of the embedding, zeros beyond the
                vocabulary.
        """
        named = {f"mdl_vars.params.lm.{name}": array for name, array in arrays.items()}
        write_zarr(folder / f"checkpoint_{step:08d}" / "state", named, progress=progress)


__all__ = ["PaxFormat"]
