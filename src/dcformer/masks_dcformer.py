"""Which keys a query sees: masks by blocks of queries, for attention whose memory is linear in the length.

Letters: B batch, T queries, S keys, H heads, t queries of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .implementations_dcformer import CHUNKED, DEFAULT_ATTENTION

# Up to this many queries (decoding, assisted decoding) the whole mask is computed.
FEW_QUERIES = 16
_ROWS_AT_ONCE = 256  # queries of a mask examined at once


def is_few(length: int) -> bool:
    """Whether queries are so few that attention maps [B, H, few, S] are linear in S. False for a symbolic length."""
    if isinstance(length, torch.Tensor):  # a size, as `torch.jit.trace` has them
        length = int(length)
    return statically_known_true(length <= FEW_QUERIES)  # no guard: a graph of any length stays one


def has_values(device: torch.device | str) -> bool:
    """Whether values on a device can be read: not in a graph that is traced or captured, under `torch.func`, or on the
    meta device."""
    device = torch.device(device)
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if is_traced or device.type == "meta" or torch._C._are_functorch_transforms_active():
        return False
    return not is_captured(device)


def is_captured(device: torch.device) -> bool:
    """Whether what is launched on a device goes into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@dataclass
class QueryBlockMask:
    """A mask computed for blocks of queries instead of being held whole, which would take [T, S] memory.

    The arguments are those of Transformers' mask functions (`AttentionMaskInterface`), and:

    Attributes:
        is_causal: a query sees no later key, and only the last `window` keys up to its own.
        window: None for all past keys.
        is_plain: the mask hides nothing else, and the last query is at the last key.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: Any
    mask_function: Any
    attention_mask: torch.Tensor | None
    use_vmap: bool
    device: Any
    is_causal: bool = False
    window: int | None = None
    is_plain: bool = False
    _tensors: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        # What the fused kernels made of it. No field: FSDP replaces masks by copies, field by field.
        self.seen: dict | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the whole mask: [B, 1, T, S]."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def causal_offset(self) -> int | None:
        """Position of the first query minus that of the first key; None if not causal, or known only on the device."""
        return self.q_offset - self.kv_offset if self.is_causal and isinstance(self.q_offset, int) else None

    def contiguous(self) -> "QueryBlockMask":
        """Returns itself; `generate` calls this on every mask that it prepares."""
        return self

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The mask of queries `start` to `stop`: [B, 1, stop - start, S], True where a query sees a key."""
        return sdpa_mask(  # type: ignore[return-value]  # never None without a skip
            batch_size=self.batch_size,
            q_length=stop - start,
            kv_length=self.kv_length,
            q_offset=self.q_offset + start,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )

    def tensors(self) -> list[torch.Tensor]:
        """The mask as tensors, computed once for all layers that share it.

        Returns:
            [first, last], int32 [B, T]: each query sees the keys first <= s < last. Or [mask], bool [B, 1, T, S], when
            the keys that a query sees have gaps, or when values cannot be read (see `has_values`).
        """
        if self._tensors is None:
            self._tensors = self._intervals() or [self.rows(0, self.q_length)]
        return self._tensors

    def _intervals(self) -> list[torch.Tensor]:
        """[first, last]; empty if that does not describe the mask, or values cannot be read."""
        if not has_values(self.device):  # asked first: what follows makes a graph for each length
            return []
        found: list[tuple[torch.Tensor, ...]] = []
        for start in range(0, self.q_length, _ROWS_AT_ONCE):
            rows = self.rows(start, min(self.q_length, start + _ROWS_AT_ONCE))
            found.append(intervals(rows[:, 0]))
        firsts, lasts, complete = zip(*found, strict=True)
        if not bool(torch.stack(complete).all()):
            return []
        return [torch.cat(firsts, dim=1), torch.cat(lasts, dim=1)]


def chunked_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | QueryBlockMask:
    """Mask function of "dcformer_chunked", with the arguments of Transformers' own (`AttentionMaskInterface`).

    A layer's attention learns of causality and windows only from this mask, that is, from the arguments with which the
    model requested it.

    Returns:
        a `QueryBlockMask`; for few queries a boolean [B, 1, T, S], unless causality and the window describe it.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    is_plain = allow_is_causal_skip and aligned and _nothing_padded(attention_mask, kv_offset + kv_length)
    is_causal = is_plain or (
        getattr(config, "is_causal", True) and not use_vmap
    )  # vmap: mask functions that may add keys
    if isinstance(q_offset, torch.Tensor):  # a static cache's own length, which its layers advance before rows are made
        q_offset = q_offset.clone()
    mask = QueryBlockMask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device,
        is_causal, local_size, is_plain,
    )  # fmt: skip
    if is_plain:
        return mask
    if is_few(q_length):
        return mask.rows(0, q_length)
    if torch.compiler.is_compiling():
        mask.tensors()  # in a graph a layer that is checkpointed may not leave them here
    return mask


def _nothing_padded(attention_mask: torch.Tensor | None, length: int) -> bool:
    """Whether a mask [B, S] shows all of so many keys; those that it does not reach are hidden."""
    if attention_mask is None:
        return True
    reaches = attention_mask.shape[-1] >= length
    return reaches and has_values(attention_mask.device) and bool(attention_mask.all())


def causal_intervals(
    query_length: int, key_length: int, window: int | None, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causality (and a window), the last query at the last key: query t sees first <= s < last, int32 [1, T]."""
    last = torch.arange(query_length, device=device, dtype=torch.int32)[None] + (key_length - query_length + 1)
    first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
    return first, last.clamp(min=0)


def intervals(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a boolean mask as intervals of keys.

    Args:
        rows: bool [B, t, S], True where a query sees a key.

    Returns:
        first and last, int32 [B, t], both 0 for a query that sees nothing; and a boolean: no row has gaps.
    """
    count, keys = rows.sum(-1), rows.shape[-1]
    ones = rows.to(torch.uint8)
    first = torch.where(count > 0, ones.argmax(-1), 0)
    last = torch.where(count > 0, keys - ones.flip(-1).argmax(-1), 0)
    return first.int(), last.int(), (last - first == count).all()


def interval_rows(first: torch.Tensor, last: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Which of the keys `start` to `stop` queries see: intervals [B, t] -> bool [B, t, stop - start]."""
    keys = torch.arange(start, stop, device=first.device, dtype=first.dtype)
    return (keys >= first[..., None]) & (keys < last[..., None])


def causal_rows(query_length: int, key_length: int, window: int | None, device: torch.device | str) -> torch.Tensor:
    """Causal (and windowed) mask when the last query is the last key: bool [1, T, S]."""
    return interval_rows(*causal_intervals(query_length, key_length, window, device), 0, key_length)


def visible_and_bias(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Splits a mask into visible keys (bool) and a bias on scores; additive masks hide by large negative values."""
    if not mask.is_floating_point():
        return mask.bool(), None
    return mask > torch.finfo(mask.dtype).min / 2, mask


for _name in (CHUNKED, DEFAULT_ATTENTION):
    AttentionMaskInterface.register(_name, chunked_mask)

__all__ = ["FEW_QUERIES", "QueryBlockMask", "causal_intervals", "causal_rows", "chunked_mask", "intervals", "is_few"]
