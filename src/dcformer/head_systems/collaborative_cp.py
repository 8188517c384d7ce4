"""Re-parametrization of plain attention as collaborative heads: CP decomposition of the stack of W_Q^h W_K^hᵀ.

The stack is a tensor [H, E, E] whose matrices have rank D, and is never made: everything is computed from its factors.
Letters: H heads, D head dim, E hidden size, C components (Dk), r = min(E, H·D).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_STEPS, _PATIENCE = 500, 1e-6
_RANK = 1e-10  # singular values below so much of the largest are none


@dataclass(frozen=True)
class Decomposition:
    """What `decompose` found.

    Attributes:
        query, key: [E, C], of unit columns.
        mixing: [H, C].
        error: of the stack, relative to its norm.
        hosvd_error: of the truncated HOSVD of the same dims. No collaborative layer of C dims is better than this by
            more than the factor √2.
    """

    query: torch.Tensor
    key: torch.Tensor
    mixing: torch.Tensor
    error: float
    hosvd_error: float


def decompose(query: torch.Tensor, key: torch.Tensor, components: int) -> Decomposition:
    """CP of the stack W_Q^h W_K^hᵀ by alternating least squares, in float64 (arXiv 2006.16362, section 4).

    It begins with the truncated HOSVD of the modes E, and, where heads allow it, with a joint diagonalization of two
    combinations of them, which is exact at the true rank; the better one stays.

    Args:
        query, key: W_Q and W_K, [H, E, D].
        components: C.

    Returns:
        the decomposition, in float64.
    """
    query, key = query.detach().double(), key.detach().double()
    bases, factors = [], []
    for matrices in (query, key):  # an orthonormal basis [E, r] of all heads, and the heads in it [H, r, D]
        basis = torch.linalg.qr(matrices.permute(1, 0, 2).flatten(1))[0]
        bases.append(basis)
        factors.append(basis.T @ matrices)
    core = factors[0] @ factors[1].mT  # [H, r, r]
    norm = core.norm().clamp(min=torch.finfo(core.dtype).tiny)
    left = torch.linalg.svd(core.permute(1, 0, 2).flatten(1), full_matrices=False)[0][:, :components]
    right = torch.linalg.svd(core.permute(2, 0, 1).flatten(1), full_matrices=False)[0][:, :components]
    small = left.T @ core @ right  # [H, C, C]
    bound = float((core - left @ small @ right.T).norm() / norm)

    best, least = None, float("inf")
    for start in _starts(core, left, right, small, components):
        found = _alternate(core, *start)
        error = float((core - _product(*found)).norm() / norm)
        if error < least:
            best, least = found, error
    assert best is not None  # there is always a start
    a, b, m = best
    lengths = a.norm(dim=0) * b.norm(dim=0)
    a, b = (F.normalize(matrix, dim=0) for matrix in (a, b))
    return Decomposition(bases[0] @ a, bases[1] @ b, m * lengths, least, bound)


def _product(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """[r, C], [r, C], [H, C] -> [H, r, r]."""
    return (a * m[:, None]) @ b.T


def _starts(
    core: torch.Tensor, left: torch.Tensor, right: torch.Tensor, small: torch.Tensor, components: int
) -> Iterator:
    """(a, b) to begin with, [r, C] each."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for basis in (left, right):
        missing = components - basis.shape[1]  # more components than dims
        extra = torch.randn(len(basis), missing, generator=generator, dtype=basis.dtype).to(basis.device)
        made.append(torch.cat([basis, F.normalize(extra, dim=0)], dim=1))
    yield tuple(made)
    if len(core) < 2 or min(small.shape[1:]) < components:
        return
    ranks = [int(torch.linalg.matrix_rank(small.movedim(mode, 0).flatten(1), rtol=_RANK)) for mode in (1, 2)]
    rank = max(*ranks, 1)  # below C where heads have channels in common: the other components are not needed
    small = small[:, :rank, :rank]
    one, two = torch.randn(2, len(core), generator=generator, dtype=core.dtype).to(core.device)
    first, second = torch.einsum("h,hab->ab", one, small), torch.einsum("h,hab->ab", two, small)
    # first = X diag Yᵀ, second likewise: the eigenvectors of first · second⁻¹ are X
    _, vectors = torch.linalg.eig(torch.linalg.lstsq(second.T, first.T).solution.T)
    x = vectors.real + vectors.imag  # of a complex pair both parts, which span the same plane
    y = torch.linalg.lstsq(x, first).solution.T
    if torch.isfinite(x).all() and torch.isfinite(y).all():
        both = ((left, x), (right, F.normalize(y, dim=0)))
        yield tuple(torch.cat([basis[:, :rank] @ found, basis[:, rank:]], dim=1) for basis, found in both)


def _alternate(core: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Least squares for mixing, queries and keys in turn, until the error no longer falls."""
    norm, last = core.norm().clamp(min=torch.finfo(core.dtype).tiny), float("inf")
    m = _solve(torch.einsum("hxy,xc,yc->hc", core, a, b), (a.T @ a) * (b.T @ b))
    for _ in range(_STEPS):
        a = F.normalize(_solve(torch.einsum("hxy,hc,yc->xc", core, m, b), (m.T @ m) * (b.T @ b)), dim=0)
        b = F.normalize(_solve(torch.einsum("hxy,hc,xc->yc", core, m, a), (m.T @ m) * (a.T @ a)), dim=0)
        m = _solve(torch.einsum("hxy,xc,yc->hc", core, a, b), (a.T @ a) * (b.T @ b))
        error = float((core - _product(a, b, m)).norm() / norm)
        if last - error < _PATIENCE * max(error, 1e-12) or error < 1e-12:
            break
        last = error
    return a, b, m


def _solve(right: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """X of X · gram = right, [n, C]; a ridge of a few roundings helps where gram is singular."""
    ridge = (1e-14 * gram.diagonal().mean()).clamp(min=torch.finfo(gram.dtype).tiny)
    ridge = ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge, right.T).T


__all__ = ["Decomposition", "decompose"]
