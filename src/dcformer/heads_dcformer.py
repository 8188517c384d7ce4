"""Fewer key and value heads than query heads: head maps and head embeddings.

Grouped-query attention lets consecutive query heads share a key head and the value head of the same number. A model
made by DHA (arXiv 2406.06567, section 3) has its own number of key heads and of value heads in every layer, and says
which query head reads which: `key_head_map` and `value_head_map`. With head embeddings (MHE, arXiv 2310.07911) there is
one projection, the seed, of queries, of keys and of values, and every head makes its own of it: `head_embeddings`.
Letters: B batch, T queries, S keys, H query heads, D head dim, r rotary dim, Hkv heads of one kind, g query heads that
share one of them, L layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

MAP_FIELDS = ("key_head_map", "value_head_map")
HEAD_FIELDS = (*MAP_FIELDS, "head_embeddings")  # of a configuration: what makes its attention another one


class HeadMap(nn.Module):
    """The key heads, or the value heads, that the query heads of one layer read.

    Args:
        heads: for each of the H query heads, the number of the head that it reads; every one of 0 to Hkv - 1 is read by
            equally many.

    Attributes:
        given: as given, the model's.
        heads: those of this process: a block of `given` on a rank of a tensor-parallel group.
        count: Hkv.
    """

    def __init__(self, heads: Sequence[int]):
        super().__init__()
        self.read: torch.Tensor  # [H]: `heads`
        self.order: torch.Tensor  # [H]: query heads, those that read head 0 first, ascending among these
        self.places: torch.Tensor  # [H]: of each query head in `order`
        for name in ("read", "order", "places"):
            self.register_buffer(name, torch.empty(len(heads), dtype=torch.long), persistent=False)
        self.given = tuple(heads)
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
        """Keys or values [B, Hkv, S, D] -> [B, H, S, D], one for each query head."""
        return states.index_select(1, self.read)

    def by_shared_head(self, states: torch.Tensor) -> torch.Tensor:
        """[B, H, ...] -> [B, Hkv, g, ...], the query heads of a head together."""
        states = states if self.is_consecutive else states.index_select(1, self.order)
        return states.unflatten(1, (self.count, -1))

    def by_query_head(self, states: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, g, ...] -> [B, H, ...]: undoes `by_shared_head`."""
        states = states.flatten(1, 2)
        return states if self.is_consecutive else states.index_select(1, self.places)

    def extra_repr(self) -> str:
        return f"{len(self.heads)} query heads read {self.count}"


def matmul_shared(rows: torch.Tensor, shared: torch.Tensor, heads: HeadMap | None = None) -> torch.Tensor:
    """Multiplies with keys or values that query heads share, each of which is read once and never copied.

    Args:
        rows: [B, H, T, X].
        shared: [B, Hkv, X, Y].
        heads: which head each query head reads; None: consecutive query heads share one.

    Returns:
        [B, H, T, Y].
    """
    count = shared.shape[1]
    if count == rows.shape[1] and (heads is None or heads.is_consecutive):
        return torch.matmul(rows, shared)
    grouped = rows.unflatten(1, (count, -1)) if heads is None else heads.by_shared_head(rows)  # [B, Hkv, g, T, X]
    product = torch.einsum("bghtx,bgxy->bghty", grouped, shared)  # [B, Hkv, g, T, Y]
    return product.flatten(1, 2) if heads is None else heads.by_query_head(product)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first r channels of queries or keys [B, H, T, D], half-split, by angles [B or 1, T, r]."""
    rotary_dim = cos.shape[-1]
    rotated, passed = states[..., :rotary_dim], states[..., rotary_dim:]
    first, second = rotated[..., : rotary_dim // 2], rotated[..., rotary_dim // 2 :]
    rotated = rotated * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([rotated, passed], dim=-1) if passed.shape[-1] else rotated


def head_maps(config: Any, layer_idx: int) -> tuple[HeadMap | None, HeadMap | None]:
    """The maps of a layer's keys and values; both None in a model without maps.

    Args:
        config: a `DCFormerConfig`.
        layer_idx: the layer's number.
    """
    if config.key_head_map is None and config.value_head_map is None:
        return None, None
    key, value = (HeadMap(config.head_map(field, layer_idx)) for field in MAP_FIELDS)
    return key, value


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


# --- head embeddings --------------------------------------------------------------------------------------------------

EMBEDDINGS = ("add", "mul")
EMBEDDING_NAMES = ("q_embedding", "k_embedding", "v_embedding")  # parameters of the attention


def embed(seeds: torch.Tensor, embeddings: torch.Tensor, mode: str) -> torch.Tensor:
    """Every head's own queries, keys or values: seed + e ("add") or seed * (e + 1) ("mul"), the function psi of MHE.

    Args:
        seeds: [B, 1, T, D], before RoPE.
        embeddings: e, [H, D].
        mode: "add" or "mul".

    Returns:
        [B, H, T, D].
    """
    own = embeddings[:, None]  # [H, 1, D]
    return seeds + own if mode == "add" else seeds * (own + 1)


def shared_scores(
    query: torch.Tensor, key: torch.Tensor, embeddings: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose products are those of every head's own, with one key for all heads.

    A key head is R_s psi(k, e), where R_s rotates by the key's position s; psi does not commute with it. "mul": of a
    rotated pair of channels, diag(u1, u2) = m + d·diag(1, -1) with m and d half the sum and half the difference, and
    R_s diag(1, -1) = diag(1, -1) R_(-s): the key also holds R_(-s) k. "add": R_s e is linear in the cosines and sines
    of the key's angles: the key also holds these. A channel that is not rotated has its factor in the query, or adds
    the same to the scores of all keys, which is left out (`unrotated_scores`).

    Args:
        query: rotated, [B, H, T, D].
        key: seeds, not rotated, [B, 1, T, D].
        embeddings: of the keys, [H, D].
        rope: cosines and sines of RoPE, each [B or 1, T, r].
        mode: "add" or "mul".

    Returns:
        queries [B, H, T, D + r] and keys [B, 1, T, D + r].
    """
    cos, sin = rope
    rotated = cos.shape[-1]
    half, e = rotated // 2, embeddings[:, None]  # [H, 1, D]
    if mode == "add":
        first, second = query[..., :half], query[..., half:rotated]
        e1, e2 = e[..., :half], e[..., half:rotated]
        more = torch.cat([first * e1 + second * e2, second * e1 - first * e2], dim=-1)  # [B, H, T, r]
        angles = torch.cat([cos[..., :half], sin[..., :half]], dim=-1)[:, None]  # [B or 1, 1, T, r]
        angles = angles.expand(key.shape[0], -1, -1, -1)
        return torch.cat([query, more], dim=-1), torch.cat([apply_rotary(key, cos, sin), angles], dim=-1)
    u1, u2 = e[..., :half] + 1, e[..., half:rotated] + 1
    mean, difference = (u1 + u2) / 2, (u1 - u2) / 2
    factors = torch.cat([mean, mean, e[..., rotated:] + 1], dim=-1)  # [H, 1, D]
    mirrored = query[..., :rotated] * torch.cat([difference, -difference], dim=-1)
    back = apply_rotary(key[..., :rotated], cos, -sin)
    return torch.cat([query * factors, mirrored], dim=-1), torch.cat([apply_rotary(key, cos, sin), back], dim=-1)


def unrotated_scores(query: torch.Tensor, embeddings: torch.Tensor, rotated: int) -> torch.Tensor:
    """What `shared_scores` leaves out of "add", the same for all keys: rotated queries [B, H, T, D] -> [B, H, T, 1].

    The softmax does not see it, unless key-wise composition weights multiply it before.
    """
    return (query[..., rotated:] * embeddings[:, None, rotated:]).sum(-1, keepdim=True)


def with_ones(states: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, S, D] -> [B, Hkv, S, D + 1]: a channel of ones, which sums the weights where values are multiplied."""
    return torch.cat([states, torch.ones_like(states[..., :1])], dim=-1)


def add_value_bias(output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What attention makes of values `with_ones`, [B, T, H, D + 1 or more] -> with a bias [H, D] of the values."""
    width = bias.shape[-1]
    return output[..., :width] + output[..., width : width + 1] * bias.to(output.dtype)


def embedding_init_std(config: Any, name: str) -> float:
    """Standard deviation of head embeddings at initialization: heads then differ as much as ordinary ones do.

    MHE's poster gives none. With the usual 0.02 heads are thirty times more alike than those of separate projections.
    Embeddings that are added have the seeds' own, which norms of queries and keys make 1.

    Args:
        config: a `DCFormerConfig`.
        name: of `EMBEDDING_NAMES`.
    """
    if config.head_embedding_init_std is not None:
        return config.head_embedding_init_std
    if config.head_embeddings == "mul":
        return 0.6
    is_normalized = config.qk_norm and name != "v_embedding"
    return 1.0 if is_normalized else config.initializer_range * math.sqrt(config.hidden_size)


def check_head_embeddings(config: Any) -> None:
    """Checks `head_embeddings` and `head_embedding_init_std`.

    Args:
        config: a `DCFormerConfig`.

    Raises:
        ValueError: naming the field and what fits.
    """
    if config.head_embeddings is not None and config.head_embeddings not in EMBEDDINGS:
        raise ValueError(
            f"head_embeddings={config.head_embeddings!r} is unknown: expected one of {EMBEDDINGS} or None."
        )
    std = config.head_embedding_init_std
    if std is not None and not 0 <= std < math.inf:
        raise ValueError(f"head_embedding_init_std={std} must be at least 0, or None for the default.")
    if config.head_embeddings is None:
        return
    if config.num_key_value_heads != 1:
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads} does not go with head_embeddings="
            f"{config.head_embeddings!r}, where all heads share one key and one value: leave it out. Such a model is "
            "trained from scratch: no checkpoint of other heads becomes one by loading."
        )
    for field in MAP_FIELDS:
        if getattr(config, field) is not None:
            raise ValueError(f"{field} does not go with head_embeddings: there is one key and one value head already.")


__all__ = [
    "EMBEDDINGS",
    "EMBEDDING_NAMES",
    "HEAD_FIELDS",
    "MAP_FIELDS",
    "HeadMap",
    "add_value_bias",
    "apply_rotary",
    "check_head_embeddings",
    "check_head_maps",
    "embed",
    "embedding_init_std",
    "head_maps",
    "matmul_shared",
    "shared_scores",
    "unrotated_scores",
    "with_ones",
]
