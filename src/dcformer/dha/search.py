"""Search: which heads become one, and how many are left in every part.

Distances between the heads of a part, the best grouping for each number of groups, and the exact division of a budget
over all parts. From parameters alone: no data, no training. Source: arXiv 2406.06567, section 4.1 and Algorithm 4, with
the corrections that docs/dha.md lists. Letters: n heads of a part, G groups, g = n / G, D head dim, E hidden size.
"""

import math
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import DCFormerError
from .fusion import train_search
from .plan import (
    KINDS,
    Groups,
    HeadPlan,
    canonical,
    check_blocks,
    check_ratio,
    check_seed,
    consecutive_groups,
    possible_counts,
    uniform_count,
)
from .sources import HeadSource, source_sizes

SCORES = ("weights", "function", "operator", "cka", "uniform")
TRAINED_SCORES = ("function", "operator")
ALLOCATIONS = ("uniform", "root", "score", "displacement")
_PROPOSALS = 100  # swaps at a temperature
_COOLING, _COLDEST = 0.9, 1e-5  # 110 temperatures
_UNEQUAL = 1e-9  # of the largest cost: the most that all differences of counts are worth in the budget


# --- distances between heads ------------------------------------------------------------------------------------------


def weight_distances(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """|W_i - W_j|² over the mean |W_i|²: 0 for equal heads, about 2 for unrelated ones.

    Args:
        weight: [n, D, E], rows of each head.
        bias: [n, D], one more column; or None.

    Returns:
        [n, n] in float64.
    """
    rows = weight if bias is None else torch.cat([weight, bias[..., None].to(weight.dtype)], -1)
    rows = rows.flatten(1).to(torch.promote_types(rows.dtype, torch.float32))  # [n, D·E]
    # differences themselves rather than a Gram matrix, so that equal heads are at exactly 0
    distances = torch.stack([(rows - row).square().sum(-1, dtype=torch.float64) for row in rows])
    scale = rows.square().sum(-1, dtype=torch.float64).mean()
    return distances / scale if scale > 0 else distances


def operator_distances(operator: torch.Tensor) -> torch.Tensor:
    """Mean square difference of two heads' rows of the operator, the paper's distance: 2/n everywhere at the start.

    Args:
        operator: [n, n, D].

    Returns:
        [n, n] in float64.
    """
    rows = operator.flatten(1).double()
    return torch.stack([(rows - row).square().mean(-1) for row in rows])


def cka_distances(weight: torch.Tensor) -> torch.Tensor:
    """1 - linear CKA of the heads' parameters, uncentered as in the paper.

    It does not see the order of channels, nor a rotation of them, so heads that are alike to it may not be poolable.

    Args:
        weight: [n, D, E], rows of each head. A head of zeros is at 1 from all others.

    Returns:
        [n, n] in float64.
    """
    rows = weight.double()
    products = torch.einsum("ide,jfe->ijdf", rows, rows).square().sum((-1, -2))  # [n, n]: |W_i W_jᵀ|²
    norms = products.diagonal().sqrt()
    similarity = products / (norms[:, None] * norms).clamp_min(torch.finfo(torch.float64).tiny)
    return (1 - similarity).clamp_min(0).fill_diagonal_(0)


def mixed_weights(weight: torch.Tensor, bias: torch.Tensor | None, operator: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """What the mixed heads' projections are: Σ_j diag(ω[i, j]) W_j.

    Args:
        weight, bias: [n, D, E], and [n, D] or None.
        operator: [n, n, D].
    """
    compute = torch.promote_types(weight.dtype, torch.float32)
    operator = operator.to(device=weight.device, dtype=compute)
    mixed = torch.einsum("ijd,jde->ide", operator, weight.to(compute))
    return mixed, None if bias is None else torch.einsum("ijd,jd->id", operator, bias.to(compute))


# --- groups of a part -------------------------------------------------------------------------------------------------


def group_score(distances: Sequence[Sequence[float]], groups: Groups) -> float:
    """The sum of distances over all pairs of heads inside groups."""
    return math.fsum(distances[i][j] for group in groups for a, i in enumerate(group) for j in group[a + 1 :])


def best_groups(distances: Sequence[Sequence[float]], count: int, seed: int = 0, blocks: int = 1) -> Groups:
    """Splits heads into groups of equal size so that heads of a group are close, by simulated annealing.

    Args:
        distances: [n, n], symmetric.
        count: number of groups G.
        seed: of the proposals.
        blocks: groups stay inside one of so many equal blocks of heads.

    Returns:
        the best grouping seen, the same for the same seed.

    Raises:
        DCFormerError: when heads cannot be split so.
    """
    heads = len(distances)
    if count < 1 or heads % count or blocks < 1 or count % blocks:
        raise DCFormerError(f"{heads} heads cannot be split into {count} equal groups within {blocks} blocks.")
    if blocks > 1:
        size, groups = heads // blocks, []
        for first in range(0, heads, size):
            inside = [list(row[first : first + size]) for row in distances[first : first + size]]
            groups += [[first + head for head in group] for group in best_groups(inside, count // blocks, seed)]
        return canonical(groups)
    groups = consecutive_groups(heads, count)
    mean = sum(map(sum, distances)) / max(1, heads * (heads - 1))  # the diagonal is 0
    if count in (1, heads) or mean == 0:
        return groups
    rng = random.Random(f"{seed} {count}")
    # sums[h][i]: distances from head h to the heads of group i
    sums = [[sum(distances[head][other] for other in group) for group in groups] for head in range(heads)]
    start = temperature = heads // count * mean
    change = lowest = 0.0
    best = [group[:] for group in groups]
    while temperature > _COLDEST * start:
        for _ in range(_PROPOSALS):
            one, two = rng.sample(range(count), 2)
            a, b = rng.randrange(heads // count), rng.randrange(heads // count)
            i, j = groups[one][a], groups[two][b]
            delta = sums[i][two] + sums[j][one] - 2 * distances[i][j] - sums[i][one] - sums[j][two]
            if delta > 0 and rng.random() >= math.exp(-delta / temperature):
                continue
            groups[one][a], groups[two][b] = j, i
            for head in range(heads):
                moved = distances[head][j] - distances[head][i]
                sums[head][one] += moved
                sums[head][two] -= moved
            change += delta
            if change < lowest - 1e-12 * start:
                lowest, best = change, [group[:] for group in groups]
        temperature *= _COOLING
    return canonical(best)


def part_cost(score: float, size: int, allocation: str) -> float:
    """The cost of a part in the budget.

    Args:
        score: of its best grouping, `group_score`.
        size: heads per group g.
        allocation: "score"; "root", score / √g; "displacement", score / g, which is what mean pooling moves.
    """
    return score / {"score": 1.0, "root": math.sqrt(size), "displacement": size}[allocation]


# --- the budget -------------------------------------------------------------------------------------------------------


def candidates(heads: int, kv_ratio: float, blocks: int = 1) -> list[int]:
    """Head counts that a part may get: divisors between half and twice its share, and the largest below its share.

    Args:
        heads: of the part, n.
        kv_ratio: share of the heads to keep.
        blocks: every candidate is a multiple of it.
    """
    share = kv_ratio * heads
    divisors = possible_counts(heads, blocks)
    near = [count for count in divisors if share / 2 - 1e-9 <= count <= 2 * share + 1e-9]
    below = [count for count in divisors if count <= share + 1e-9][-1:]  # a prime n has only 1 and n
    return sorted({*near, *below})


def divide_budget(costs: Sequence[Mapping[int, float]], budget: int) -> list[int]:
    """Chooses one head count per part, with the least total cost within a budget. Exact, by dynamic programming.

    Args:
        costs: of every part, by head count.
        budget: most heads in all.

    Returns:
        head counts, whose cost is the least to a billionth. Of choices with equal cost those that are most alike, and
        of these the ones with most heads; of parts that are equal in all this, the same at every call.

    Raises:
        DCFormerError: when the budget is below the smallest counts.
    """
    least = sum(map(min, costs))
    if budget < least:
        raise DCFormerError(f"the budget of {budget} heads is below the fewest heads, {least}: give a larger kv_ratio.")
    # Equal sums of costs differ in their last digits by the order of adding, so unequal counts cost a little.
    parts = len(costs)
    scale = max((abs(cost) for part in costs for cost in part.values()), default=0.0) or 1.0
    spread = sum(max((count - budget / parts) ** 2 for count in part) for part in costs) or 1.0
    table: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in costs:
        new: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (total, picks) in table.items():
            for count, cost in sorted(part.items()):
                if (now := used + count) <= budget:
                    extra = cost / scale + _UNEQUAL * (count - budget / parts) ** 2 / spread
                    if now not in new or total + extra < new[now][0]:
                        new[now] = (total + extra, (*picks, count))
        table = new
    return list(min(table.items(), key=lambda item: (item[1][0], -item[0]))[1][1])


# --- search -----------------------------------------------------------------------------------------------------------


def search(
    model: PreTrainedModel | str | os.PathLike,
    kv_ratio: float = 0.25,
    score: str = "weights",
    *,
    allocation: str = "uniform",
    tie: bool = False,
    head_blocks: int = 1,
    seed: int = 0,
    batches: Any = None,
    steps: int = 240,
    lr: float = 1e-2,
    batch_size: int = 8,
    accumulation: int = 1,
    checkpoint: str | os.PathLike | None = None,
    save_steps: int = 100,
    progress: bool = True,
) -> HeadPlan:
    """Finds which heads of a model become one.

    Args:
        model: a causal language model (Llama, Mistral, Qwen2, Qwen3, GPT-NeoX, or this package's), or its folder, of
            which only the key and value projections are then read.
        kv_ratio: the largest share of the key and value heads to keep, in (0, 1]. Of a grouped-query model its
            key/value heads count. Counts divide the heads of a part, so that fewer may be kept, with a warning.
        score: distance of heads. "weights": of their projections, without data. "function": the same after training
            mixtures of heads for `steps` on `batches`. "operator": of the mixtures' own factors, the paper's, for
            comparison only: it does not see that two heads are equal. "cka": 1 - similarity of their parameters.
            "uniform": none, groups of neighbors.
        allocation: "uniform", equal counts; or how costs are made for counts that differ: "root", "score",
            "displacement" (`part_cost`).
        tie: keys and values of a layer share groups, for export to grouped-query models.
        head_blocks: keep every group inside one of so many equal blocks of heads, for tensor parallelism on so many
            ranks.
        seed: of the annealing, and of the training.
        batches: data, where the score trains; as for `fuse`.
        steps, lr: of that training. The model's parameters stay as they are.
        batch_size, accumulation, checkpoint, save_steps: of that training; as for `fuse`.
        progress: show progress bars.

    Returns:
        the plan.

    Raises:
        DCFormerError: on invalid arguments, a model that cannot be a source, or a loss that is not finite.
    """
    check_ratio(kv_ratio)
    check_blocks(head_blocks)
    check_seed(seed)
    if not isinstance(tie, bool):
        raise DCFormerError(f"tie={tie!r} must be True or False.")
    for name, value, known in (("score", score, SCORES), ("allocation", allocation, ALLOCATIONS)):
        if value not in known:
            raise DCFormerError(f"{name}={value!r} is unknown: expected one of {', '.join(known)}.")
    if score in TRAINED_SCORES and batches is None:
        raise DCFormerError(f"score={score!r} trains: give batches, or use score='weights', which needs no data.")
    source = HeadSource(model)
    sizes = source.sizes
    layers = sizes.num_layers
    if tie and (sizes.key_heads != sizes.value_heads or sizes.key_head_map != sizes.value_head_map):
        raise DCFormerError("tie=True needs a source whose keys and values have the same heads in every layer.")
    operators: dict[tuple[int, str], torch.Tensor] = {}
    if score in TRAINED_SCORES:
        operators = train_search(
            model, batches, steps=steps, lr=lr, seed=seed, batch_size=batch_size, accumulation=accumulation,
            checkpoint=checkpoint, save_steps=save_steps, progress=progress,
        )  # fmt: skip

    # a part of the budget is a part of the model or, tied, both parts of a layer
    parts: list[tuple[int, tuple[str, ...]]] = [(layer, (kind,)) for layer in range(layers) for kind in KINDS]
    if tie:
        parts = [(layer, KINDS) for layer in range(layers)]
    choices: list[dict[int, tuple[Groups, float, list[float]]]] = []  # count -> groups, cost, displacement of each kind
    for layer, kinds in tqdm(parts, desc="searching", unit="part", disable=not progress):
        heads = sizes.heads(layer, kinds[0])
        counts = candidates(heads, kv_ratio, head_blocks)
        if allocation == "uniform" or not counts:
            counts = [uniform_count(heads, kv_ratio, head_blocks)]  # refuses where there is none
        scored, moved = zip(*(_distances(source, layer, kind, score, operators) for kind in kinds), strict=True)
        table, tables = torch.stack(scored).sum(0).tolist(), [distances.tolist() for distances in moved]
        choices.append({})
        for count in counts:
            groups = best_groups(table, count, seed, head_blocks)
            total, size = group_score(table, groups), heads // count
            cost = 0.0 if allocation == "uniform" else part_cost(total, size, allocation)
            displacements = [part_cost(group_score(of_kind, groups), size, "displacement") for of_kind in tables]
            choices[-1][count] = (groups, cost, displacements)

    weight = len(KINDS) if tie else 1
    budget = math.floor(kv_ratio * sizes.total / weight + 1e-9)
    picked = divide_budget([{count: entry[1] for count, entry in part.items()} for part in choices], budget)
    chosen = [part[count] for part, count in zip(choices, picked, strict=True)]
    displacements = [displacement for entry in chosen for displacement in entry[2]]
    if tie:
        chosen = [entry for entry in chosen for _ in KINDS]
    plan = HeadPlan(
        source=sizes,
        key_groups=[entry[0] for entry in chosen[::2]],
        value_groups=[entry[0] for entry in chosen[1::2]],
        kv_ratio=kv_ratio,
        score=score,
        allocation=allocation,
        seed=seed,
        steps=steps if score in TRAINED_SCORES else 0,
        tie=tie,
        head_blocks=head_blocks,
        costs=[entry[1] for entry in chosen],
        displacements=displacements,
    )
    _warn_of_fewer(plan)
    return plan


def _warn_of_fewer(plan: HeadPlan) -> None:
    """Says so where counts that divide the heads of a part keep fewer than the ratio asks for."""
    asked = math.floor(plan.kv_ratio * plan.source.total + 1e-9)
    kept = sum(plan.num_key_heads + plan.num_value_heads)
    if kept < asked:
        sizes = sorted({*plan.source.key_heads, *plan.source.value_heads})
        possible = [f"{possible_counts(n, plan.head_blocks)} of {n}".replace("[", "").replace("]", "") for n in sizes]
        warnings.warn(
            f"kv_ratio={plan.kv_ratio} is {asked} of {plan.source.total} heads, and {kept} are kept "
            f"({kept / plan.source.total:.4g}): a layer's key heads, and value heads, can be {' or '.join(possible)}.",
            stacklevel=3,
        )


def _distances(
    source: HeadSource, layer: int, kind: str, score: str, operators: Mapping[tuple[int, str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of a part's heads that groups are chosen by, and those whose displacement is reported, [n, n]."""
    if score == "operator":
        distances = operator_distances(operators[layer, kind]).cpu()
        return distances, distances * len(distances)
    weight, bias = source.heads(layer, kind)
    if score == "function":
        weight, bias = mixed_weights(weight, bias, operators[layer, kind])
    moved = weight_distances(weight, bias).cpu()
    if not moved.isfinite().all():
        raise DCFormerError(f"layer {layer}: the {kind} projection holds NaN or infinity: the model is damaged.")
    if score == "uniform":
        return torch.zeros_like(moved), moved
    return (cka_distances(weight).cpu() if score == "cka" else moved), moved


def uniform_plan(config: Any, kv_ratio: float = 0.25, *, head_blocks: int = 1) -> HeadPlan:
    """Groups of neighbors, equal counts: what grouped-query attention is made by, the baseline.

    Args:
        config: of the source; or the source itself, or its folder, to whose parameters the plan is then bound.
        kv_ratio: the largest share of the heads to keep, in (0, 1]; the largest divisor below is taken, with a warning
            where it keeps fewer.
        head_blocks: as for `search`.

    Returns:
        the plan.

    Raises:
        DCFormerError: on a ratio that leaves no head, or a configuration that no source has.
    """
    is_source = isinstance(config, PreTrainedModel | str | os.PathLike)
    sizes = HeadSource(config).sizes if is_source else source_sizes(config)
    groups = {
        kind: [
            consecutive_groups(n, uniform_count(n, kv_ratio, head_blocks))
            for n in (sizes.heads(layer, kind) for layer in range(sizes.num_layers))
        ]
        for kind in KINDS
    }
    plan = HeadPlan(sizes, groups["key"], groups["value"], kv_ratio, head_blocks=head_blocks)
    _warn_of_fewer(plan)
    return replace(plan, tie=plan.key_groups == plan.value_groups)


__all__ = [
    "ALLOCATIONS",
    "SCORES",
    "TRAINED_SCORES",
    "best_groups",
    "candidates",
    "cka_distances",
    "divide_budget",
    "group_score",
    "operator_distances",
    "part_cost",
    "search",
    "uniform_plan",
    "weight_distances",
]
