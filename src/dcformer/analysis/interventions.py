"""Changes of a forward pass while a context is open: heads, terms of composition or whole stages, scaled or replaced.

They work through hooks, on the output of the weight generators and on what enters the output projection; so they hold
for every forward pass inside the context, `generate` and `trace` included, with "eager" and "dcformer_chunked".
Contexts may be nested; the inner one comes last.
Letters: B batch, T queries, H heads, D head dim, G groups, M heads of a group.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn

from ..compose_dcformer import DCFormerCompose, Generated, SideWeights
from ..errors import DCFormerError
from ..implementations_dcformer import TRITON
from .layers import Layer, chosen, layers_of, listed, named
from .terms import TERMS
from .tracing import STAGES, AnalysisTrace

Heads = Iterable[tuple[int, int]]


def _layers_with_hooks(model: nn.Module) -> list[Layer]:
    """The layers of a model whose forward pass calls the modules that are changed here."""
    found = layers_of(model)
    implementation = getattr(model.config, "_attn_implementation", None)  # type: ignore[union-attr]
    if implementation == TRITON:
        raise DCFormerError(
            f"attn_implementation={TRITON!r} makes composition weights past the modules that are changed here: "
            "call model.set_attn_implementation('eager') first."
        )
    return found


def _heads_by_layer(layers: list[Layer], heads: Heads | None) -> dict[int, list[int]]:
    if heads is None:
        return {number: list(range(layer.heads)) for number, layer in enumerate(layers)}
    result: dict[int, list[int]] = {}
    for pair in listed(heads):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DCFormerError(f"heads holds {pair!r}: expected pairs (layer, head).")
        (number,) = chosen([pair[0]], len(layers), "layer")
        result.setdefault(number, []).extend(chosen([pair[1]], layers[number].heads, "head"))
    if not result:
        raise DCFormerError("heads is empty: name pairs (layer, head).")
    return result


def scaled_side(side: SideWeights, projection: torch.Tensor, gate: torch.Tensor) -> SideWeights:
    """A side's weights with its two terms scaled, [H] each, per receiving head; differentiable in the scales."""
    packed, rank = side.by_head, side.rank  # [B, H, channels, N]
    factors = torch.ones(packed.shape[1:3], dtype=packed.dtype, device=packed.device)
    channel = torch.arange(packed.shape[2], device=packed.device)
    is_up, is_gate = (channel >= rank) & (channel < 2 * rank), channel >= 2 * rank
    projection, gate = (scale.to(packed)[:, None] for scale in (projection, gate))
    factors = torch.where(is_up, projection, torch.where(is_gate, gate, factors))  # [H, channels]
    return SideWeights(packed * factors[..., None])


def scaled_terms(
    generated: Generated, module: DCFormerCompose, scales: dict[str, dict[str, torch.Tensor]]
) -> Generated:
    """What the generators made, with terms scaled; differentiable in the scales.

    Args:
        generated: of `DCFormerCompose.forward`.
        module: which made it.
        scales: stage -> term -> [H], per head that receives the term. "input" is scaled by what the static projection
            adds to it.
    """
    dynamic, static = dict(generated[0]), dict(generated[1])
    for stage, of_term in scales.items():
        for side in ("query", "key"):
            if (weights := dynamic.get((stage, side))) is not None:
                dynamic[stage, side] = scaled_side(weights, of_term[f"{side[0]}_proj"], of_term[f"{side[0]}_gate"])
        by_group = {name: of_term[name].unflatten(0, (-1, module.heads_per_group)) for name in ("static", "input")}
        projection = static.get(stage)  # [G, M, M]
        if projection is not None:
            projection = projection * by_group["static"][:, None].to(projection)
        extra = torch.diag_embed(by_group["input"] - 1)  # [G, M, M]
        if extra.requires_grad or bool((extra != 0).any()):
            projection = extra if projection is None else projection + extra.to(projection)
        if projection is not None:
            static[stage] = projection
    return dynamic, static


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Removes hooks at the end."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def change_z(layer: Layer, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A hook that replaces z [B, T, H, D] of a layer by `change(z)`."""

    def before_output(module: nn.Module, arguments: Any) -> Any:
        return (change(arguments[0].unflatten(-1, (layer.heads, -1))).flatten(-2), *arguments[1:])

    return layer.attention.o_proj.register_forward_pre_hook(before_output)


def change_terms(layer: Layer, scales: dict[str, dict[str, torch.Tensor]]) -> Any:
    """A hook that scales the terms of a layer's composition; `scales` as of `scaled_terms`."""

    def after_generators(module: Any, arguments: Any, generated: Generated) -> Generated:
        return scaled_terms(generated, module, scales)

    return layer.attention.compose.register_forward_hook(after_generators)


@contextmanager
def ablate(
    model: nn.Module,
    heads: Heads | None = None,
    *,
    terms: Iterable[str] | str | None = None,
    stages: Iterable[str] | str | None = None,
    layers: Iterable[int] | None = None,
    scale: float = 0.0,
) -> Iterator[None]:
    """Removes heads, terms of composition or stages from forward passes inside the context, or scales them.

    Example: `with ablate(model, heads=[(2, 1)]): model(**inputs)`; `ablate(model, terms="q_proj", stages="post",
    heads=[(1, 1)])` takes from head 1 of layer 1 what query-wise projections give it.

    Args:
        model: of this package.
        heads: pairs (layer, head), one at least. Alone: their outputs z are scaled. With `terms` or `stages`: the heads
            that receive the terms.
        terms: of "input", "static", "q_proj", "q_gate", "k_proj", "k_gate"; without them, a stage stands for all but
            "input", so that ablating it leaves attention without this composition.
        stages: "pre", "post" or both (the default with `terms`).
        layers: whose terms; all by default, or those of `heads`.
        scale: what remains; 0 for nothing.

    Raises:
        DCFormerError: on unknown names and numbers out of range, when there is nothing to ablate, and for kernels that
            no hook reaches.
    """
    found = _layers_with_hooks(model)
    scale = scale.item() if isinstance(scale, torch.Tensor) and scale.numel() == 1 else scale
    if not isinstance(scale, Real):
        raise DCFormerError(f"scale={scale!r} is not a number: expected what remains, 0 for nothing.")
    if terms is None and stages is None:
        if heads is None or layers is not None:
            raise DCFormerError("ablate needs heads (pairs of layer and head), or terms or stages of layers.")
        by_layer = _heads_by_layer(found, heads)
        handles = [
            change_z(found[number], _scaling(found[number].heads, which, scale)) for number, which in by_layer.items()
        ]
    else:
        names = named(terms, TERMS, "term") if terms is not None else list(TERMS[1:])
        at_stages, by_layer = named(stages, STAGES, "stage"), _heads_by_layer(found, heads)
        handles = []
        numbers = chosen(layers, len(found), "layer")
        if layers is not None and heads is not None and (missed := sorted(set(by_layer) - set(numbers))):
            raise DCFormerError(f"heads of layer {missed[0]} are named, but layers={numbers}: leave layers out.")
        for number in (number for number in numbers if number in by_layer):
            values = torch.ones(found[number].heads, device=found[number].attention.o_proj.weight.device)
            values[by_layer[number]] = scale
            ones = torch.ones_like(values)
            scales = {stage: {term: values if term in names else ones for term in TERMS} for stage in at_stages}
            handles.append(change_terms(found[number], scales))
    with hooked(handles):
        yield


def _scaling(heads: int, which: list[int], scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    factors = torch.ones(heads)
    factors[which] = scale
    return lambda z: z * factors.to(z)[:, None]


@contextmanager
def patch_heads(
    model: nn.Module,
    source: AnalysisTrace,
    heads: Heads | None = None,
    *,
    stages: Iterable[str] | str | None = None,
    layers: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
) -> Iterator[None]:
    """Puts what another run computed into forward passes inside the context.

    Example: `with ablate(model, terms="q_proj"), patch_heads(model, clean, [(1, 1)]): model(**inputs)` computes without
    the term, but for what head 1 of layer 1 gathered with it.

    Args:
        model: of this package.
        source: `trace` of the other run. Both have the same number of sequences and tokens.
        heads: pairs (layer, head) whose outputs z are replaced.
        stages: instead of heads: replace all composition weights of "pre", "post" or both.
        layers: whose stages; all traced ones by default. Heads name theirs.
        positions: where z is replaced; all positions of the trace by default.

    Raises:
        DCFormerError: on layers, heads or positions that were not traced, runs of another shape, and kernels that no
            hook reaches.
    """
    found = _layers_with_hooks(model)
    if (heads is None) == (stages is None):
        raise DCFormerError("patch_heads needs either heads (pairs of layer and head) or stages.")
    if heads is not None and layers is not None:
        raise DCFormerError(f"layers={layers!r} says whose stages are patched, and heads name theirs: leave it out.")
    if stages is not None and (positions is not None or len(source.positions) != source.length):
        raise DCFormerError("stages are patched at all positions: give no positions=, here and for trace.")
    if heads is not None:
        at = source.positions if positions is None else chosen(positions, source.length, "position")
        rows = [source.row(position) for position in at]
        by_layer = _heads_by_layer(found, heads)
        handles = [
            change_z(found[number], _replacing(source.layer(number).z[:, rows], at, which, source.length))
            for number, which in by_layer.items()
        ]
    else:
        names = named(stages, STAGES, "stage")
        numbers = list(source.layers) if layers is None else chosen(layers, len(found), "layer")
        handles = [
            found[number].attention.compose.register_forward_hook(_replacing_stages(source, number, names))
            for number in numbers
        ]
    with hooked(handles):
        yield


def _replacing(
    values: torch.Tensor, positions: list[int], heads: list[int], length: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(z: torch.Tensor) -> torch.Tensor:
        if z.shape[0] != values.shape[0] or z.shape[1] != length or z.shape[3] != values.shape[3]:
            raise DCFormerError(
                f"the forward pass has {z.shape[0]} sequences of {z.shape[1]} tokens, the trace {values.shape[0]} of "
                f"{length}: patch runs of the same shape, without a cache."
            )
        z = z.clone()
        at = torch.tensor(positions, device=z.device)[:, None], torch.tensor(heads, device=z.device)
        z[:, at[0], at[1]] = values[:, :, heads].to(z)
        return z

    return change


def _replacing_stages(source: AnalysisTrace, number: int, names: list[str]) -> Callable[..., Generated]:
    analysis = source.layer(number)

    def after_generators(module: DCFormerCompose, arguments: Any, generated: Generated) -> Generated:
        dynamic, static = dict(generated[0]), dict(generated[1])
        for stage in names:
            weights = analysis.composition(stage)
            for side in ("query", "key"):
                new = None if weights is None else getattr(weights, side)
                old = dynamic.pop((stage, side), None)
                if new is not None:
                    if old is not None and old.by_head.shape != new.by_head.shape:
                        raise DCFormerError("the trace is of a run of another shape: patch runs of the same shape.")
                    dynamic[stage, side] = new
            static.pop(stage, None)
            if weights is not None and weights.static is not None:
                static[stage] = weights.static
        return dynamic, static

    return after_generators


__all__ = ["ablate", "change_terms", "change_z", "hooked", "patch_heads", "scaled_side", "scaled_terms"]
