"""Which key and value heads the query heads of a layer read: `key_head_map` and `value_head_map`.

Grouped-query attention lets consecutive query heads share a key head and the value head of the same number. A model
made by DHA (arXiv 2406.06567, section 3) has its own number of key heads and of value heads in every layer, and says
which query head reads which. Letters: B batch, T queries, S keys, H query heads, D head dim, G heads of one kind, g
query heads that share one of them, L layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

MAP_FIELDS = ("key_head_map", "value_head_map")


class HeadMap(nn.Module):
    """The key heads, or the value heads, that the query heads of one layer read.

    Args:
        heads: for each of the H query heads, the number of the head that it reads; every one of 0 to G - 1 is read by
            equally many.

    Attributes:
        heads: as given.
        count: G.
    """

    def __init__(self, heads: Sequence[int]):
        super().__init__()
        self.read: torch.Tensor  # [H]: `heads`
        self.order: torch.Tensor  # [H]: query heads, those that read head 0 first, ascending among these
        self.places: torch.Tensor  # [H]: of each query head in `order`
        for name in ("read", "order", "places"):
            self.register_buffer(name, torch.empty(len(heads), dtype=torch.long), persistent=False)
        self.take(heads)

    def take(self, heads: Sequence[int]) -> None:
        """Makes this the map `heads`. A rank of a tensor-parallel group takes its block of the model's."""
        self.heads = tuple(heads)
        self.count = max(self.heads) + 1
        self.is_consecutive = list(self.heads) == sorted(self.heads)
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Writes the indices, which no checkpoint has. Transformers asks for it when it has made memory for them."""
        order = sorted(range(len(self.heads)), key=self.heads.__getitem__)
        places = sorted(range(len(order)), key=order.__getitem__)
        for name, numbers in (("read", self.heads), ("order", order), ("places", places)):
            held = getattr(self, name)
            setattr(self, name, torch.tensor(numbers, dtype=torch.long, device=held.device))

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Keys or values [B, G, S, D] -> [B, H, S, D], one for each query head."""
        return states.index_select(1, self.read)

    def by_shared_head(self, states: torch.Tensor) -> torch.Tensor:
        """[B, H, ...] -> [B, G, g, ...], the query heads of a head together."""
        states = states if self.is_consecutive else states.index_select(1, self.order)
        return states.unflatten(1, (self.count, -1))

    def by_query_head(self, states: torch.Tensor) -> torch.Tensor:
        """[B, G, g, ...] -> [B, H, ...]: undoes `by_shared_head`."""
        states = states.flatten(1, 2)
        return states if self.is_consecutive else states.index_select(1, self.places)

    def extra_repr(self) -> str:
        return f"{len(self.heads)} query heads read {self.count}"


def matmul_shared(rows: torch.Tensor, shared: torch.Tensor, heads: HeadMap | None = None) -> torch.Tensor:
    """Multiplies with keys or values that query heads share, each of which is read once and never copied.

    Args:
        rows: [B, H, T, X].
        shared: [B, G, X, Y].
        heads: which head each query head reads; None: consecutive query heads share one.

    Returns:
        [B, H, T, Y].
    """
    count = shared.shape[1]
    if count == rows.shape[1] and (heads is None or heads.is_consecutive):
        return torch.matmul(rows, shared)
    length = rows.shape[2]
    grouped = rows.unflatten(1, (count, -1)) if heads is None else heads.by_shared_head(rows)  # [B, G, g, T, X]
    product = torch.matmul(grouped.flatten(2, 3), shared).unflatten(2, (-1, length))  # [B, G, g, T, Y]
    return product.flatten(1, 2) if heads is None else heads.by_query_head(product)


def head_maps(config: Any, layer_idx: int) -> tuple[HeadMap | None, HeadMap | None]:
    """The maps of a layer's keys and values, both None where it is grouped-query attention.

    Args:
        config: a `DCFormerConfig`.
        layer_idx: the layer's number.
    """
    if config.key_head_map is None and config.value_head_map is None:
        return None, None
    key, value = (HeadMap(config.head_map(field, layer_idx)) for field in MAP_FIELDS)
    return (None, None) if key.is_consecutive and key.heads == value.heads else (key, value)


def check_head_maps(config: Any) -> None:
    """Checks `key_head_map` and `value_head_map`.

    Args:
        config: a `DCFormerConfig`.

    Raises:
        ValueError: naming the field, the layer and what is wrong.
    """
    queries, n = config.num_attention_heads, config.num_key_value_heads
    for field in MAP_FIELDS:
        rows = getattr(config, field)
        if rows is None:
            continue
        if len(rows) != config.num_hidden_layers:
            raise ValueError(
                f"len({field})={len(rows)} must equal num_hidden_layers={config.num_hidden_layers}: give a row for "
                "each layer."
            )
        for layer, row in enumerate(rows):
            problem = _problem(row, queries, n)
            if problem:
                raise ValueError(
                    f"{field}[{layer}]={list(row)} {problem}. A row says for each query head which head it reads."
                )


def _problem(row: Sequence[int], queries: int, n: int) -> str:
    """What is wrong with a row of a map; "" where nothing is."""
    if len(row) != queries:
        return f"has {len(row)} entries, num_attention_heads is {queries}"
    if any(isinstance(head, bool) or not isinstance(head, int) for head in row):
        return "must hold integers"
    if outside := sorted({head for head in row if not 0 <= head < n}):
        return f"names head {outside[0]}: expected 0 to num_key_value_heads - 1 = {n - 1}"
    count = max(row) + 1
    if missing := sorted(set(range(count)) - set(row)):
        return f"leaves out head {missing[0]}: heads are numbered from 0 to {count - 1} without a gap"
    reads = [row.count(head) for head in range(count)]
    if len(set(reads)) > 1:
        return f"has heads that {min(reads)} and heads that {max(reads)} query heads read: expected equally many each"
    return ""


__all__ = ["MAP_FIELDS", "HeadMap", "check_head_maps", "head_maps", "matmul_shared"]
