"""Which heads, or which terms of composition, make an output: integrated gradients (Sundararajan et al., 1703.01365).

All layers' heads go together from the baseline (α = 0) to what they are (α = 1): with every z_l set to
b_l + α (z_l - b_l), the target's logit f is a function of α alone, and

    f(1) - f(0) = Σ_l ⟨z_l - b_l, ∫ ∂f/∂z_l dα⟩,

whose parts are what each head contributed. The integral is a Gauss-Legendre sum.
Letters: L layers, B batch, T tokens, H heads, D head dim.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..errors import DCFormerError
from .interventions import change_terms, change_z, hooked
from .layers import chosen, listed, named, whole
from .terms import TERMS
from .tracing import STAGES, AnalysisTrace, as_arguments, layers_with_maps, real_tokens, trace

TOLERATED_GAP = 0.05


def target_logits(
    model: nn.Module, arguments: dict[str, Any], target: int | torch.Tensor, versus: int | torch.Tensor | None
) -> torch.Tensor:
    """[B]: the target's logit at each sequence's last token (of a classifier: its logit), minus that of `versus`."""
    logits = getattr(model(**arguments), "logits", None)
    if logits is None:
        raise DCFormerError(f"{type(model).__name__} has no logits: expected a language model or a classifier.")
    if logits.ndim == 3:
        real = real_tokens(arguments, *logits.shape[:2])
        last = logits.shape[1] - 1 - real.flip(1).long().argmax(1)  # the last token that is not padding
        logits = logits[torch.arange(len(logits)), last]  # [B, V]

    def of(ids: int | torch.Tensor) -> torch.Tensor:
        numbers = listed(ids)
        if texts := [number for number in numbers if isinstance(number, str)]:
            raise DCFormerError(f"target {texts[0]!r} is a text: give its id, single_token(tokenizer, {texts[0]!r}).")
        if len(numbers) not in (1, len(logits)):
            raise DCFormerError(f"{len(numbers)} targets: expected one id, or one a sequence, {len(logits)}.")
        found = chosen(numbers, logits.shape[1], "target", from_end=False)
        return logits.gather(1, torch.tensor(found, device=logits.device).expand(len(logits))[:, None])[:, 0]

    return of(target) if versus is None else of(target) - of(versus)


def _nodes(steps: int) -> list[tuple[float, float]]:
    """Points α in (0, 1) and their weights."""
    if whole(steps, "steps") < 1:
        raise DCFormerError(f"steps={steps} must be at least 1.")
    points, weights = np.polynomial.legendre.leggauss(steps)
    return list(zip(((points + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))


def _integrate(
    at: Callable[[float, bool], tuple[torch.Tensor, list[torch.Tensor]]], steps: int, what: str
) -> tuple[list[torch.Tensor], float]:
    """Integrals over α of the gradients with respect to the leaves, and f(1) - f(0), summed over sequences.

    Args:
        at: (α, whether gradients are wanted) -> f of each sequence [B], and the leaves.
        steps: points.
        what: is attributed, for the progress bar.
    """
    totals: list[torch.Tensor] = []
    for alpha, weight in tqdm(_nodes(steps), desc=f"attribution of {what}", leave=False, delay=2):
        with torch.enable_grad():
            outputs, leaves = at(alpha, True)
            gradients = torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)
        parts = [torch.zeros_like(x) if g is None else g * weight for g, x in zip(gradients, leaves, strict=True)]
        totals = parts if not totals else [total.add_(part) for total, part in zip(totals, parts, strict=True)]
    with torch.no_grad():
        change = float((at(1.0, False)[0] - at(0.0, False)[0]).double().sum())
    return totals, change


def _gap(explained: float, change: float, tolerance: float | None, steps: int) -> float:
    """|explained - change| / |change|.

    Raises:
        DCFormerError: when it exceeds the tolerance.
    """
    difference = abs(explained - change)
    gap = difference / abs(change) if change else (0.0 if difference < 1e-6 else float("inf"))
    if tolerance is not None and not gap <= tolerance:
        raise DCFormerError(
            f"the attributions add up to {explained:.4f}, but the output changes by {change:.4f}: a completeness "
            f"gap of {gap:.1%}, more than {tolerance:.0%}. Give more steps than {steps}, a model in float32 if it is "
            "in less, or tolerance=None to take it as it is."
        )
    return gap


def _arguments(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """`as_arguments`, copied where they were made in inference mode: what has a gradient may not be made from such."""
    arguments = as_arguments(model, inputs)
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
        for name, value in arguments.items()
    }


@torch.inference_mode(False)  # which has no gradients
def attribute_heads(
    model: nn.Module,
    inputs: Any,
    target: int | torch.Tensor,
    steps: int = 64,
    baseline: str | AnalysisTrace | Any = "zero",
    *,
    versus: int | torch.Tensor | None = None,
    layers: Iterable[int] | None = None,
    per_position: bool = False,
    tolerance: float | None = TOLERATED_GAP,
    return_gap: bool = False,
) -> Any:
    """What each head contributed to the target's logit.

    Args:
        model: of this package, with `attn_implementation="eager"`.
        inputs: as for `trace`. The logit is the one at each sequence's last token.
        target: token id (class of an image), one for all sequences or [B]; `single_token` finds that of a text.
        steps: points of the integral.
        baseline: "zero", or where the path begins: inputs of the same shape (another prompt), or a trace of them with
            all positions.
        versus: another token: the difference of the two logits is attributed.
        layers: whose heads go from the baseline to the run; all by default. Those of others compute as they do.
        per_position: keep positions.
        tolerance: of the completeness gap |Σ - (f(1) - f(0))| / |f(1) - f(0)|; None for any.
        return_gap: return the gap as well.

    Returns:
        [L, H] (or [L, H, T]) in float32 (float64 for float64 models), the mean over sequences, for the layers asked
        for; with `return_gap` a pair of it and the gap.

    Raises:
        DCFormerError: when the gap exceeds the tolerance, on a target out of range, and as `trace`.
    """
    found = layers_with_maps(model)
    arguments = _arguments(model, inputs)
    numbers = chosen(layers, len(found), "layer")
    run = trace(model, arguments, layers=numbers)
    ends = [run.layers[number].z for number in numbers]  # [B, T, H, D] each
    if isinstance(baseline, str):
        if baseline != "zero":
            raise DCFormerError(f"baseline={baseline!r} is unknown: expected 'zero', or inputs of another prompt.")
        starts = [torch.zeros_like(end) for end in ends]
    else:
        other = baseline if isinstance(baseline, AnalysisTrace) else trace(model, baseline, layers=numbers)
        starts = [other.layer(number).z.to(end) for number, end in zip(numbers, ends, strict=True)]
        if starts[0].shape != ends[0].shape:
            raise DCFormerError(
                f"the baseline has {starts[0].shape[0]} sequences of {starts[0].shape[1]} tokens, the inputs "
                f"{ends[0].shape[0]} of {ends[0].shape[1]}: expected the same."
            )

    def at(alpha: float, wants_grad: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [(b + alpha * (z - b)).requires_grad_(wants_grad) for z, b in zip(ends, starts, strict=True)]
        with hooked(change_z(found[n], _constant(leaf)) for n, leaf in zip(numbers, leaves, strict=True)):
            return target_logits(model, arguments, target, versus), leaves

    gradients, change = _integrate(at, steps, "heads")
    compute = torch.promote_types(ends[0].dtype, torch.float32)
    parts = torch.stack(
        [((z - b) * g).to(compute).sum(-1) for z, b, g in zip(ends, starts, gradients, strict=True)]
    )  # [L, B, T, H]
    gap = _gap(float(parts.double().sum()), change, tolerance, steps)
    result = parts.mean(1).transpose(1, 2).cpu()  # [L, H, T]
    result = result if per_position else result.sum(-1)
    return (result, gap) if return_gap else result


def _constant(leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda z: leaf


@torch.inference_mode(False)
def attribute_terms(
    model: nn.Module,
    inputs: Any,
    target: int | torch.Tensor,
    steps: int = 64,
    *,
    versus: int | torch.Tensor | None = None,
    layers: Iterable[int] | None = None,
    terms: Iterable[str] | str = TERMS,
    tolerance: float | None = TOLERATED_GAP,
    return_gap: bool = False,
) -> Any:
    """What each term of composition contributed to the target's logit, per head that receives it.

    All terms of both stages are scaled by one α, from 0 to 1. With `terms=TERMS[1:]` the path begins at attention
    without composition, otherwise at equal scores and weights of zero.

    Args:
        model, inputs, target, steps, versus, layers, tolerance, return_gap: as for `attribute_heads`.
        terms: those that are scaled; the others stay.

    Returns:
        [L, 2, terms, H] in float32, the mean over sequences: stages "pre" and "post", terms in the order given.

    Raises:
        DCFormerError: as `attribute_heads`; on unknown terms, and on none.
    """
    found, terms = layers_with_maps(model), named(terms, TERMS, "term")
    arguments = _arguments(model, inputs)
    numbers = chosen(layers, len(found), "layer")
    like = next(model.parameters())
    shape = (len(STAGES), len(terms), found[0].heads)

    def at(alpha: float, wants_grad: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        scale = torch.full(shape, alpha, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
        leaves = [scale.clone().requires_grad_(wants_grad) for _ in numbers]
        handles = (change_terms(found[n], _scales(leaf, terms)) for n, leaf in zip(numbers, leaves, strict=True))
        with hooked(handles):
            return target_logits(model, arguments, target, versus), leaves

    gradients, change = _integrate(at, steps, "terms")
    parts = torch.stack(gradients).float()  # [L, 2, terms, H]; scales go from 0 to 1
    gap = _gap(float(parts.double().sum()), change, tolerance, steps)
    first = next(iter(arguments[n] for n in ("input_ids", "inputs_embeds", "pixel_values") if n in arguments))
    parts = parts.cpu() / len(first)
    return (parts, gap) if return_gap else parts


def _scales(leaf: torch.Tensor, terms: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    ones = torch.ones_like(leaf[0, 0])
    of_term = [
        {term: leaf[i, terms.index(term)] if term in terms else ones for term in TERMS} for i in range(len(STAGES))
    ]
    return dict(zip(STAGES, of_term, strict=True))


__all__ = ["TOLERATED_GAP", "attribute_heads", "attribute_terms", "target_logits"]
