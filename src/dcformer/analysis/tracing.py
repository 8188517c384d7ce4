"""One forward pass with everything that composition did in it: what `trace` records.

Letters: B batch, T queries, N queries that are kept, S keys, H heads, D head dim, E hidden size, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..attention_dcformer import ComposeTrace, LayerTrace
from ..cache_dcformer import CACHE_NAMES
from ..compose_dcformer import ComposeWeights, SideWeights, stages
from ..errors import DCFormerError
from ..masks_dcformer import causal_rows, visible_and_bias
from ..shards import gathered
from .layers import Layer, chosen, layers_of, refuse_nonfinite, whole

MAPS = ("scores", "composed_scores", "weights", "composed_weights")
STAGES = ("pre", "post")
LIMIT = 2e9  # bytes of maps
WORKING_MAPS = 8  # eager attention's maps and intermediate results of one layer, beside what is kept


@dataclass
class LayerAnalysis:
    """What one layer did. N is the number of positions that were kept, all T by default.

    Attributes:
        scores, composed_scores, weights, composed_weights: [B, H, N, S] in float32 (float64 for float64 models). The
            last are not probabilities: rows need not add up to 1, and entries may be negative.
        pre, post: what scores and weights were composed with, query-wise weights of the N positions; None where the
            stage does not compose.
        visible: [B or 1, 1 or H, N, S], which keys a query sees.
        z: [B, N, H, D], what each head gathered, before the output projection.
        resid_pre, resid_post: [B, N, E], the residual stream before and after the layer; `resid_mid` is that between
            attention and MLP.
        attention_output: [B, N, E], what attention adds to it.
        W_O: [H, D, E], the heads' parts of the output projection.
        b_O: [E], its bias, or None.
        gates: [B, N, H], factors of the heads' outputs, where a head system has them; z has them in it.
        router_logits: [B, N, routed heads], where a head system chooses heads.
        key_head_map, value_head_map: the key and value head that each query head reads, where the model has maps.
        is_parallel: attention and MLP read the same states, so that there is nothing between them.
    """

    scores: torch.Tensor
    composed_scores: torch.Tensor
    weights: torch.Tensor
    composed_weights: torch.Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    visible: torch.Tensor
    z: torch.Tensor
    resid_pre: torch.Tensor
    resid_post: torch.Tensor
    attention_output: torch.Tensor
    W_O: torch.Tensor
    b_O: torch.Tensor | None  # noqa: N815  # the field's name for it
    gates: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None
    key_head_map: list[int] | None = None
    value_head_map: list[int] | None = None
    is_parallel: bool = False

    @property
    def resid_mid(self) -> torch.Tensor:
        """[B, N, E]: the residual stream between attention and MLP.

        Raises:
            DCFormerError: where they are parallel.
        """
        if self.is_parallel:
            raise DCFormerError(
                "resid_mid: attention and MLP are parallel (use_parallel_residual), nothing is between."
            )
        return self.resid_pre + self.attention_output

    @property
    def head_outputs(self) -> torch.Tensor:
        """[B, N, H, E]: z_h W_O^h. With `b_O` they add up to `attention_output`. Computed when asked for."""
        return torch.einsum("bnhd,hde->bnhe", self.z, self.W_O)

    def maps(self, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The maps before and after composition of a stage, [B, H, N, S] each.

        Raises:
            DCFormerError: on another stage than "pre" or "post".
        """
        if stage not in STAGES:
            raise DCFormerError(f"stage={stage!r} is unknown: expected 'pre' (scores) or 'post' (attention weights).")
        return (self.scores, self.composed_scores) if stage == "pre" else (self.weights, self.composed_weights)

    def composition(self, stage: str) -> ComposeWeights | None:
        """What a stage was composed with; None without composition."""
        self.maps(stage)
        return self.pre if stage == "pre" else self.post


@dataclass
class AnalysisTrace:
    """What `trace` recorded.

    Attributes:
        layers: number of the layer -> `LayerAnalysis`, in order.
        positions: the query positions that were kept, in the order of dimension N.
        length: S, all tokens.
        real: [B, S], False for padding.
        logits: [B, N, V] of a language model, [B, labels] of a classifier of images; None without a head.
        texts: [B][S], the text of each token, or None.
        grid: (rows, columns) of patches for images, else None.
    """

    layers: dict[int, LayerAnalysis] = field(repr=False)
    positions: list[int]
    length: int
    real: torch.Tensor = field(repr=False)
    logits: torch.Tensor | None = field(default=None, repr=False)
    texts: list[list[str]] | None = field(default=None, repr=False)
    grid: tuple[int, int] | None = None

    @property
    def tokens(self) -> list[str] | None:
        """The text of each token of the first sequence, or None."""
        return None if self.texts is None else self.texts[0]

    def labels(self, batch: int = 0, given: Sequence[str] | None = None) -> list[str]:
        """A label for each token of a sequence: those given, else the tokens' texts, else positions.

        Raises:
            DCFormerError: on an index out of range, and another number of labels than of tokens.
        """
        (batch,) = chosen([batch], len(self.real), "batch index")
        if given is None:
            given = [str(position) for position in range(self.length)] if self.texts is None else self.texts[batch]
        if len(given) != self.length:
            raise DCFormerError(f"{len(given)} tokens for a trace of {self.length}: expected a label for each.")
        return list(given)

    def visible(self, layer: int, batch: int = 0) -> torch.Tensor:
        """[N, S], on the CPU: which keys the queries of a sequence see in a layer, a row of `visible_rows`."""
        (batch,) = chosen([batch], len(self.real), "batch index")
        return self.visible_rows(layer)[batch]

    def visible_rows(self, layer: int) -> torch.Tensor:
        """[B, N, S], on the CPU: which keys each query sees in a layer; padding sees and shows nothing."""
        mask = self.layer(layer).visible.any(dim=1).cpu()  # [B or 1, N, S]
        return mask & self.real[:, None] & self.real[:, self.positions, None]

    def number(self, layer: int) -> int:
        """The number of a layer; negative ones count the traced layers from the end.

        Raises:
            DCFormerError: when it was not traced, and on anything that is not a whole number.
        """
        layer = whole(layer, "layer")
        if layer < 0 and -layer <= len(self.layers):
            return list(self.layers)[layer]
        if layer not in self.layers:
            raise DCFormerError(f"layer {layer} was not traced: expected one of {list(self.layers)}.")
        return layer

    def layer(self, number: int) -> LayerAnalysis:
        """A layer by its number, as of `number`."""
        return self.layers[self.number(number)]

    def row(self, position: int) -> int:
        """Where a query position is in dimension N.

        Raises:
            DCFormerError: when it is out of range, or was not kept.
        """
        (position,) = chosen([position], self.length, "position")
        if position not in self.positions:
            raise DCFormerError(f"query position {position} was not kept: expected one of {self.positions}.")
        return self.positions.index(position)


class _Rows(list):
    """Takes the place of `ComposeTrace.layers`: keeps some rows of some layers' maps."""

    def __init__(self, layers: list[int], positions: list[int] | None):
        super().__init__()
        self.wanted, self.positions, self.current = layers, positions, -1
        self.maps: dict[int, LayerTrace] = {}

    def append(self, maps: LayerTrace) -> None:
        if self.current in self.wanted:
            kept = {name: self.rows(getattr(maps, name)) for name in MAPS}
            self.maps[self.current] = LayerTrace(**kept)

    def rows(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """The kept positions of dimension T, in memory of their own where they are not all."""
        if self.positions is None:
            return tensor.detach()
        return tensor.detach().index_select(dim, torch.tensor(self.positions, device=tensor.device))


def as_arguments(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Keyword arguments of the model's forward pass.

    Args:
        model: of this package.
        inputs: what a tokenizer or an image processor returns, or a tensor of token ids [B, T] or pixels.

    Raises:
        DCFormerError: on inputs that go on from a cache or leave logits out, on lists and arrays in the place of
            tensors, and on something else.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = {getattr(model, "main_input_name", "input_ids"): inputs}
    if not isinstance(inputs, Mapping):
        raise DCFormerError(
            f"inputs of type {type(inputs).__name__}: expected what a tokenizer returns (return_tensors='pt'), or a "
            "tensor of token ids [B, T]."
        )
    arguments = {name: value for name, value in inputs.items() if value is not None}
    for name in CACHE_NAMES:
        if name in arguments:
            raise DCFormerError(f"inputs with {name}: analysis takes whole texts, without a cache.")
    if "logits_to_keep" in arguments:
        raise DCFormerError(
            "inputs with logits_to_keep: analysis needs the logits of all positions. Leave it out; positions= of trace "
            "says which are kept."
        )
    for name, value in arguments.items():
        if isinstance(value, Sequence | np.ndarray):
            raise DCFormerError(
                f"{name} of type {type(value).__name__}: expected a tensor, which a tokenizer returns with "
                "return_tensors='pt'."
            )
    ids = arguments.get("input_ids")
    if ids is not None and ids.dtype not in (torch.long, torch.int):
        raise DCFormerError(f"input_ids of {ids.dtype}: expected token ids, of torch.long.")
    if getattr(model, "main_input_name", "input_ids") != "pixel_values":
        arguments["use_cache"] = False
    return arguments


def shape_of(model: Any, arguments: Mapping[str, Any]) -> tuple[int, int, tuple[int, int] | None]:
    """B, the number of tokens, and the grid of patches for images."""
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        pixels = arguments.get("pixel_values")
        if pixels is None or pixels.ndim != 4:
            shape = None if pixels is None else tuple(pixels.shape)
            raise DCFormerError(f"pixel_values are {shape}: expected images, [B, channels, rows, columns].")
        patch = model.config.patch_size
        sizes = zip(pixels.shape[2:], (patch, patch) if isinstance(patch, int) else patch, strict=True)
        rows, columns = (size // of_patch for size, of_patch in sizes)
        return len(pixels), rows * columns + (model.config.pooling == "cls"), (rows, columns)
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if name in arguments), None)
    if tokens is None or tokens.ndim < 2:
        raise DCFormerError("inputs without tokens: expected input_ids [B, T] or inputs_embeds.")
    if not tokens.shape[0] or not tokens.shape[1]:
        raise DCFormerError(
            f"inputs of {tokens.shape[0]} sequences of {tokens.shape[1]} tokens: expected one at least."
        )
    return tokens.shape[0], tokens.shape[1], None


def layers_with_maps(model: Any) -> list[Layer]:
    """The layers of a model whose forward pass holds attention maps, the same ones each time.

    Raises:
        DCFormerError: as `layers_of`; on another implementation than "eager"; in training mode, in which dropout and
            the gates of heads are drawn at random.
    """
    found = layers_of(model)
    implementation = model.config._attn_implementation
    if implementation != "eager":
        raise DCFormerError(
            f"attn_implementation={implementation!r} never holds attention maps: load the model with "
            "attn_implementation='eager', or call model.set_attn_implementation('eager') first."
        )
    if any(module.training for module in model.modules()):
        raise DCFormerError("the model is in training mode, and may compute at random: call model.eval() first.")
    return found


def map_bytes(batch: int, heads: int, rows: int, length: int, layers: int, itemsize: int = 4) -> tuple[int, int]:
    """Bytes of the maps that `trace` keeps, and of those that eager attention works with in one layer."""
    return 4 * layers * batch * heads * rows * length * itemsize, WORKING_MAPS * batch * heads * length**2 * itemsize


def trace(
    model: nn.Module,
    inputs: Any,
    layers: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
    tokenizer: Any = None,
) -> AnalysisTrace:
    """Runs a model once, with eager attention, and records what composition does.

    The maps that are kept take 4·layers·B·H·N·S numbers; beside them there is one layer's worth of intermediate results
    at a time, at most `WORKING_MAPS` maps [B, H, T, S].

    Args:
        model: a model of this package, loaded with `attn_implementation="eager"`.
        inputs: what a tokenizer or an image processor returns, or token ids [B, T].
        layers: numbers of the layers to keep; all by default.
        positions: query positions to keep, of all sequences; all by default. Keys are always all.
        tokenizer: gives the trace the tokens' texts, for labels.

    Returns:
        `AnalysisTrace`. The forward pass computes exactly what it does without a trace.

    Raises:
        DCFormerError: for models that hold no maps or are in training mode, inputs that are not whole texts or images,
            numbers out of range, maps of more than 2 GB, and NaN.
    """
    found = layers_with_maps(model)
    arguments = as_arguments(model, inputs)
    batch, length, grid = shape_of(model, arguments)
    wanted = chosen(layers, len(found), "layer")
    kept = None if positions is None else chosen(positions, length, "position")
    _check_size(batch, found[0].heads, length, len(wanted), kept, model)

    rows = _Rows(wanted, kept)
    seen: dict[int, dict[str, Any]] = {number: {} for number in wanted}
    with torch.no_grad(), _recorded(found, rows, seen):
        outputs = model(**arguments, compose_trace=ComposeTrace(rows))
    if skipped := [number for number in wanted if number not in rows.maps]:
        raise DCFormerError(
            f"layer {skipped[0]} was not run: the model has {len(found)} layers, and its configuration says "
            f"num_hidden_layers={found[0].attention.config.num_hidden_layers}. Name layers that are run."
        )
    analyses = {}
    for number in wanted:
        record, maps = seen[number], rows.maps[number]
        if not all(tensor.isfinite().all() for tensor in (*vars(maps).values(), record["resid_post"])):
            refuse_nonfinite(model, f"layer {number}: attention maps or hidden states")
        layer = found[number]
        analyses[number] = LayerAnalysis(
            **vars(maps),
            **record,
            W_O=layer.output_weights().detach(),
            b_O=None if layer.attention.o_proj.bias is None else gathered(layer.attention.o_proj.bias).detach(),
            is_parallel=getattr(model.config, "use_parallel_residual", False),
        )
    logits = getattr(outputs, "logits", None)
    if logits is not None and logits.ndim == 3:
        logits = rows.rows(logits, dim=1)
    if logits is not None and not logits.isfinite().all():
        refuse_nonfinite(model, "logits")
    texts = None
    if tokenizer is not None and "input_ids" in arguments:
        texts = [token_texts(tokenizer, row) for row in arguments["input_ids"].tolist()]
    real = real_tokens(arguments, batch, length)
    return AnalysisTrace(analyses, kept or list(range(length)), length, real, logits, texts, grid)


def real_tokens(arguments: Mapping[str, Any], batch: int, length: int) -> torch.Tensor:
    """[B, S], on the CPU: False for padding. Masks of other shapes than [B, S] have none."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.bool().cpu()
    return torch.ones(batch, length, dtype=torch.bool)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; of tokens that are not text by themselves (part of a character), their name."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = [tokenizer.decode([number]) for number in ids]
    return [
        name if not text or "\N{REPLACEMENT CHARACTER}" in text else text
        for name, text in zip(names, texts, strict=True)
    ]


def _check_size(batch: int, heads: int, length: int, layers: int, kept: list[int] | None, model: nn.Module) -> None:
    rows = length if kept is None else len(kept)
    size = 8 if model.dtype == torch.float64 else 4
    keeps, works = map_bytes(batch, heads, rows, length, layers, size)
    if keeps + works > LIMIT:
        restrict = "Restrict layers=, positions= or the batch" if works < LIMIT else "Take a smaller batch"
        raise DCFormerError(
            f"the maps of {layers} layers, {batch} x {heads} heads, {rows} queries and {length} keys take "
            f"{keeps / 1e9:.1f} GB, and attention works with {works / 1e9:.1f} GB in a layer; the limit is "
            f"{LIMIT / 1e9:.0f} GB. {restrict}, or take a shorter text."
        )


@contextmanager
def _recorded(found: list[Layer], rows: _Rows, seen: dict[int, dict[str, Any]]) -> Iterator[None]:
    """Hooks that fill `seen`, while the context is open."""
    handles = []
    for number, layer in enumerate(found):
        if number not in seen:
            handles.append(layer.attention.register_forward_pre_hook(_enter(number, rows)))
        else:
            handles += _record_layer(number, layer, rows, seen[number])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(number: int, rows: _Rows) -> Any:
    def enter(module: nn.Module, arguments: Any) -> None:
        rows.current = number

    return enter


def _record_layer(number: int, layer: Layer, rows: _Rows, record: dict[str, Any]) -> list[Any]:
    attention, heads = layer.attention, layer.heads

    def before_layer(module: nn.Module, arguments: Any, options: Any) -> None:
        states = arguments[0] if arguments else options["hidden_states"]
        record["resid_pre"] = rows.rows(states, dim=1)

    def before_attention(module: nn.Module, arguments: Any, options: Any) -> None:
        rows.current = number
        states = arguments[0] if arguments else options["hidden_states"]
        mask = options.get("attention_mask", arguments[1] if len(arguments) > 1 else None)
        is_causal = options.get("is_causal")
        is_causal = getattr(attention, "is_causal", True) if is_causal is None else is_causal
        record["visible"] = rows.rows(_visible(mask, is_causal, states.shape[1], states.device))

    def composition(module: Any, arguments: Any, generated: Any) -> None:
        record["pre"], record["post"] = (_query_rows(weights, rows) for weights in stages(module, generated))

    def before_output(module: nn.Module, arguments: Any) -> None:
        record["z"] = rows.rows(arguments[0].unflatten(-1, (heads, -1)), dim=1)

    def after_attention(module: nn.Module, arguments: Any, output: Any) -> None:
        record["attention_output"] = rows.rows(output[0], dim=1)
        for name in ("gates", "router_logits"):
            tensor = getattr(getattr(module, "system", None), name, None)
            record[name] = None if tensor is None else rows.rows(tensor, dim=1)
        for kind in ("key", "value"):
            heads_read = getattr(module, f"{kind}_heads", None)
            record[f"{kind}_head_map"] = None if heads_read is None else list(heads_read.heads)

    def after_layer(module: nn.Module, arguments: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        record["resid_post"] = rows.rows(states, dim=1)

    return [
        layer.module.register_forward_pre_hook(before_layer, with_kwargs=True),
        attention.register_forward_pre_hook(before_attention, with_kwargs=True),
        attention.compose.register_forward_hook(composition),
        attention.o_proj.register_forward_pre_hook(before_output),
        attention.register_forward_hook(after_attention),
        layer.module.register_forward_hook(after_layer),
    ]


def _visible(mask: Any, is_causal: bool, length: int, device: torch.device) -> torch.Tensor:
    """[B or 1, 1 or H, T, S], as `eager_attention` reads its arguments."""
    if isinstance(mask, torch.Tensor):
        return visible_and_bias(mask)[0]
    if is_causal:
        return causal_rows(length, length, None, device)[:, None]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device)


def _query_rows(weights: ComposeWeights | None, rows: _Rows) -> ComposeWeights | None:
    """Composition weights in memory of their own, the query-wise ones of the kept positions."""
    if weights is None:
        return None
    query, key = weights.query, weights.key
    return ComposeWeights(
        query=None if query is None else SideWeights(rows.rows(query.by_head, dim=3)),
        key=None if key is None else SideWeights(key.by_head.detach()),
        static=None if weights.static is None else weights.static.detach(),
        groups=weights.groups,
    )


__all__ = [
    "MAPS",
    "STAGES",
    "AnalysisTrace",
    "LayerAnalysis",
    "as_arguments",
    "layers_with_maps",
    "map_bytes",
    "real_tokens",
    "shape_of",
    "token_texts",
    "trace",
]
