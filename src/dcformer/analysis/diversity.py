"""How different the heads of a layer are (paper Figure 5; Cordonnier et al., arXiv 2006.16362).

The measure is the share of variance that the first k singular directions of a layer's circuits capture: if all heads
do the same, few directions are enough. Everything is computed in float64, from matrices of the size E×E at most.
Letters: L layers, E hidden size, H heads, D head dim.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..errors import DCFormerError
from .weights import CircuitWeights, StoredModel, layer_weights

FORMS = ("stack", "stack_right", "sum", "head")
BASES = {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O"}
_WHOLE = 1 - 1e-10  # a captured share that counts as all: what rounding leaves of 1


@dataclass
class Diversity:
    """Curves of captured variance.

    Attributes:
        circuit: "qk" or "ov".
        form: which matrix the singular values are of; see `head_diversity`.
        curves: [L, E], the share of variance that the first k = 1 … E directions capture, layer by layer.
        area: [L], mean of a layer's curve; the lower, the more diverse its heads.
        k90: [L], the least k that captures 90 %; the higher, the more diverse.
        effective_rank: [L], exp(-Σ p ln p) with p = σ / Σ σ.
        layers: numbers of the layers.
    """

    circuit: str
    form: str
    curves: torch.Tensor
    effective_rank: torch.Tensor
    layers: list[int]

    @property
    def mean(self) -> torch.Tensor:
        """[E]: the mean of the curves over layers, as in the paper's Figure 5."""
        return self.curves.mean(0)

    @property
    def area(self) -> torch.Tensor:
        return self.curves.mean(1)

    @property
    def k90(self) -> torch.Tensor:
        return self.least(0.9)

    def least(self, share: float) -> torch.Tensor:
        """[L]: the least k whose first k directions capture a share of the variance (1.0: all of it)."""
        return (self.curves < min(share, _WHOLE)).sum(1) + 1


def squared_singular_values(weights: CircuitWeights, circuit: str, form: str, include_static: bool) -> torch.Tensor:
    """[E] in descending order (form "head": [H, E]), of a layer's matrix of circuits.

    With factors A, B [E, H·D] and mixing Q, head m's matrix is M_m = Σ_j Q[j, m] A_j B_jᵀ. So Σ_m M_m M_mᵀ is
    A ((Q Qᵀ) ∘ BᵀB) Aᵀ, where each entry of Q Qᵀ stands for a D×D block: no E×HE matrix is needed.
    """
    a, b = weights.factors(circuit)  # [H, E, D]
    heads, size, dim = a.shape
    mixing = weights.mixing(circuit) if include_static else torch.eye(heads, dtype=a.dtype)
    if form == "head":
        if include_static:
            matrices = torch.einsum("jm,jed,jfd->mef", mixing, a, b)
            return torch.linalg.svdvals(matrices).square()
        small = torch.linalg.qr(a).R @ torch.linalg.qr(b).R.mT  # [H, D, D]: the same singular values
        values = torch.linalg.svdvals(small).square()
        return torch.nn.functional.pad(values, (0, size - values.shape[1]))
    flat_a, flat_b = (factor.transpose(0, 1).flatten(1) for factor in (a, b))  # [E, H·D]
    if form == "sum":
        weighted = (a * mixing.sum(1)[:, None, None]).transpose(0, 1).flatten(1)
        return torch.linalg.svdvals(weighted @ flat_b.T).square()
    outer, inner = (flat_a, flat_b) if form == "stack" else (flat_b, flat_a)
    blocks = (mixing @ mixing.T).repeat_interleave(dim, 0).repeat_interleave(dim, 1)  # [H·D, H·D]
    gram = outer @ (blocks * (inner.T @ inner)) @ outer.T  # [E, E]
    values = torch.linalg.eigvalsh(gram).flip(0)
    noise = size * torch.finfo(values.dtype).eps * values[0]  # whose roots would count as singular values
    return values.masked_fill(values < noise, 0)


def head_diversity(
    model: nn.Module | StoredModel | str | Path, circuit: str, form: str = "stack", include_static: bool = False
) -> Diversity:
    """How much of the variance of a layer's circuits few directions capture.

    Args:
        model: a model of this package, or a folder with its safetensors, which is read one layer at a time.
        circuit: "qk" (W_Q W_Kᵀ) or "ov" (W_V W_O).
        form: the matrix of a layer: "stack", [M_1 … M_H], heads side by side (the paper's "layer-wise" concatenation);
            "stack_right", one above the other; "sum", Σ M_h, which is the product of the concatenated projections
            (Cordonnier et al.); "head", each head's own, and the mean of their curves.
        include_static: fold the static projection in.

    Returns:
        `Diversity`.

    Raises:
        DCFormerError: on an unknown circuit or form, and on NaN, naming the layer.
    """
    if form not in FORMS:
        raise DCFormerError(f"form={form!r} is unknown: expected one of {FORMS}.")
    model = StoredModel(model) if isinstance(model, (str, Path)) else model
    if include_static and isinstance(model, StoredModel) and model.is_hub:
        raise DCFormerError(
            "include_static=True needs this package's names: dcformer-convert hub-to-safetensors first."
        )
    count, weights_of = layer_weights(model)
    curves, ranks = [], []
    for layer in tqdm(range(count), desc=f"diversity of {circuit}", leave=False, delay=2):
        values = squared_singular_values(weights_of(layer), circuit, form, include_static)
        values = values[None] if values.ndim == 1 else values  # [1 or H, E]
        total = values.sum(1, keepdim=True)
        if not (total > 0).all():
            raise DCFormerError(f"layer {layer}: all weights of a {circuit} circuit are zero, which has no variance.")
        curves.append((values.cumsum(1) / total).mean(0))
        share = values.sqrt() / values.sqrt().sum(1, keepdim=True)
        ranks.append(torch.special.entr(share).sum(1).exp().mean())
    return Diversity(circuit, form, torch.stack(curves), torch.stack(ranks), list(range(count)))


def head_similarity(
    model: nn.Module | StoredModel | str | Path, layer: int, circuit: str, metric: str = "cosine"
) -> torch.Tensor:
    """How alike the circuits of each two heads of a layer are.

    Args:
        model: a model of this package, or a folder, as for `head_diversity`.
        layer: its number.
        circuit: for "cosine" "qk" or "ov"; for "subspace" the matrix whose column space is compared, "q", "k", "v" or
            "o" ("qk" stands for "q", "ov" for "v").
        metric: "cosine" of the circuits as vectors, in [-1, 1]; "subspace", ‖U_aᵀ U_b‖_F² / D with orthonormal bases,
            in [0, 1].

    Returns:
        [H, H] in float64.

    Raises:
        DCFormerError: on an unknown circuit or metric, and on a layer out of range.
    """
    weights = layer_weights(StoredModel(model) if isinstance(model, (str, Path)) else model)[1](layer)
    if metric == "cosine":
        a, b = weights.factors(circuit)
        products = torch.einsum("aed,bef->abdf", a, a) * torch.einsum("aed,bef->abdf", b, b)
        gram = products.sum((-1, -2))  # ⟨M_a, M_b⟩
        norms = gram.diagonal().sqrt()
        return gram / (norms[:, None] * norms).clamp(min=torch.finfo(gram.dtype).tiny)
    if metric != "subspace":
        raise DCFormerError(f"metric={metric!r} is unknown: expected 'cosine' or 'subspace'.")
    name = {"qk": "q", "ov": "v"}.get(circuit, circuit)
    if name not in BASES:
        raise DCFormerError(f"circuit={circuit!r} is unknown: expected one of {tuple(BASES)} for subspaces.")
    matrix = getattr(weights, BASES[name])
    bases = torch.linalg.qr(matrix.mT if name == "o" else matrix).Q  # [H, E, D]
    return torch.einsum("aed,bef->abdf", bases, bases).square().sum((-1, -2)) / bases.shape[-1]


__all__ = ["FORMS", "Diversity", "head_diversity", "head_similarity", "squared_singular_values"]
