"""Options of pruned heads."""

from dataclasses import dataclass
from typing import Any

from .options import HeadSizes, HeadSystemOptions, check_range


@dataclass(frozen=True)
class HeadPruningOptions(HeadSystemOptions):
    """Options of pruned heads.

    Attributes:
        l0_penalty: λ.
        kept_heads: the heads of each layer that are left, as `prune_heads` writes them; all when not given.
    """

    l0_penalty: float = 0.01
    kept_heads: list[list[int]] | None = None

    def check(self, sizes: HeadSizes) -> None:
        """Refuses negative penalties and heads that do not exist."""
        check_range("l0_penalty", self.l0_penalty, 0.0, 1e6, "a factor of the loss")
        if self.kept_heads is None:
            return
        rows: Any = self.kept_heads
        if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
            raise ValueError(f"kept_heads={rows!r}: expected a list of heads for each of {sizes.num_layers} layers.")
        if len(rows) != sizes.num_layers:
            raise ValueError(f"kept_heads has {len(rows)} lists: expected {sizes.num_layers}, one a layer.")
        kept = rows[sizes.layer]
        whole = all(type(head) is int for head in kept)
        if not kept or not whole or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= sizes.num_heads:
            raise ValueError(
                f"kept_heads[{sizes.layer}]={kept}: expected one or more of 0 to {sizes.num_heads - 1}, "
                "integers in order."
            )


__all__ = ["HeadPruningOptions"]
