"""What composition a call of the kernels has: flags, layout, and the weights as operators take them.

Shared by prefill and decoding, kernels included. Imports no Triton.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch

from ..attention_dcformer import check_shapes
from ..compose_dcformer import ComposeWeights, SideWeights
from .limits import MAX_HEADS, require_supported
from .sizes import ceil_div

_LARGEST_SCALE = torch.finfo(torch.float32).max * math.log(2)  # kernels take it times log2(e)
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what kernels read


class Part(IntFlag):
    """What a stage composes with, as flags of all kernels. The low-rank part has no flag: R is 0 without it."""

    QUERY = 1
    KEY = 2
    STATIC = 4
    GATE = 8  # of each side in use


class Stage(NamedTuple):
    """What a stage composes with, or the gradients of that: tensors as `schemas` has them, None where there is none."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    static: torch.Tensor | None = None

    def at(self, rows: slice) -> "Stage":
        """Those of some rows of a batch, as views; the static projection belongs to all."""
        query, key = (None if side is None else side[rows] for side in (self.query, self.key))
        return Stage(query, key, self.static)


StagePair = tuple[Stage, Stage]  # before and after the softmax


def stages_of(tensors: Sequence[torch.Tensor | None]) -> StagePair:
    """The stages, of six tensors in the order of `schemas`."""
    return Stage(*tensors[:3]), Stage(*tensors[3:])


@dataclass(frozen=True)
class Layout:
    """Which parts of composition are in use.

    Attributes:
        pre, post: flags of the stages, of `Part`.
        groups: G.
        rank: R; 0 for no low rank.
    """

    pre: int
    post: int
    groups: int = 1
    rank: int = 0

    @classmethod
    def of(cls, stages: StagePair, groups: int) -> "Layout":
        """The layout of both stages' tensors."""
        sides = [side for stage in stages for side in (stage.query, stage.key) if side is not None]
        channels = sides[0].shape[-2] if sides else 0  # of all sides: `check_weights`
        flags = []
        for stage in stages:
            present = {Part.QUERY: stage.query, Part.KEY: stage.key, Part.STATIC: stage.static}
            found = sum(int(part) for part, tensor in present.items() if tensor is not None)
            has_gate = channels % 2 and found & (Part.QUERY | Part.KEY)
            flags.append(found | (int(Part.GATE) if has_gate else 0))
        pre, post = flags
        return cls(pre, post, groups, channels // 2)

    @property
    def channels(self) -> int:
        """Channels of a stage, side and head."""
        return 2 * self.rank + bool((self.pre | self.post) & Part.GATE)


def packed_weights(
    pre: ComposeWeights | None, post: ComposeWeights | None, key_heads: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Weights as operators take them, without those that are None, and their places; see `schemas`.

    Copies nothing that comes from a generator or a cache.
    """
    found: list[torch.Tensor | None] = []
    for weights in (pre or ComposeWeights(), post or ComposeWeights()):
        query = None if weights.query is None else weights.query.by_head.contiguous()
        key = None if weights.key is None else weights.key.packed
        if key is not None and key.dim() == 4:
            key = key.unflatten(1, (key_heads, -1))  # [B, Hkv, H / Hkv, channels, S]
        found += [query, key, None if weights.static is None else weights.static.contiguous()]
    return [w for w in found if w is not None], [i for i, w in enumerate(found) if w is not None]


def check_types(
    pre: ComposeWeights | None, post: ComposeWeights | None, scale: float | None, tensors: dict[str, torch.Tensor]
) -> None:
    """Refuses arguments that are something else than they should be, by name.

    Raises:
        ValueError: naming the argument and what was expected.
    """
    tensors = dict(tensors)
    for name, weights in (("pre", pre), ("post", post)):
        if weights is None:
            continue
        if not isinstance(weights, ComposeWeights):
            raise ValueError(f"{name} is of type {type(weights).__name__}: expected ComposeWeights or None.")
        for side in ("query", "key"):
            of_side = getattr(weights, side)
            if isinstance(of_side, SideWeights):
                tensors[f"{name}.{side}.packed"] = of_side.packed
            elif of_side is not None:
                raise ValueError(f"{name}.{side} is of type {type(of_side).__name__}: expected SideWeights or None.")
        if weights.static is not None:
            tensors[f"{name}.static"] = weights.static
    if scale is not None:
        is_number = isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(scale, bool)
        # in a graph it may be a symbol, of whose value there would be a guard
        if not is_number or not (torch.compiler.is_compiling() or abs(scale) <= _LARGEST_SCALE):
            raise ValueError(f"scale={scale!r}: expected a finite number within 2.3e38, usually D ** -0.5.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is of type {type(tensor).__name__}: expected a tensor.")
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "of nested tensors" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name} has the layout {layout}: expected a dense tensor, as of `to_dense()`.")


def plain_groups(heads: int, least: int) -> int:
    """Groups of heads that do not mix: `least`, or as many as the kernels need."""
    return next(n for n in range(max(1, least, ceil_div(heads, MAX_HEADS)), max(1, heads) + 1) if heads % n == 0)


def check_states(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    visible: torch.Tensor | None = None,
) -> None:
    """Refuses queries [B, H, T, D], keys [B, Hkv, S, D] and values [B, Hkv, S, DV] that do not fit together.

    Args:
        query, key, value: of one dtype.
        pre, post: composition weights, looked at for their device only.
        visible: a mask, looked at for its device only.

    Raises:
        ValueError: naming what does not fit, and beyond `unsupported_reason`.
    """
    check_shapes(query, key, value, None)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: expected one dtype. Convert them "
            "with .to(dtype)."
        )
    given = {"key": [key], "value": [value], "visible": [] if visible is None else [visible]}
    given |= {name: weights.tensors() for name, weights in (("pre", pre), ("post", post)) if weights is not None}
    for name, tensors in given.items():
        device = next((tensor.device for tensor in tensors if tensor.device != query.device), None)
        if device is not None:
            raise ValueError(
                f"query is on {query.device} and {name} on {device}: expected all tensors on one device. Move them "
                "with .to(device)."
            )
    for dim in {query.shape[3], value.shape[3]}:
        require_supported(device=query.device, dtype=query.dtype, head_dim=dim)


def check_weights(
    pre: ComposeWeights | None, post: ComposeWeights | None, query: torch.Tensor, key: torch.Tensor
) -> int | None:
    """Refuses composition weights that do not fit queries [B, H, T, D] and keys [B, Hkv, S, D].

    Returns:
        G; None without composition.

    Raises:
        ValueError: naming what does not fit, and beyond `unsupported_reason`.
    """
    (batch, heads, queries, _), (_, key_heads, keys, _) = query.shape, key.shape
    stages = {name: weights for name, weights in (("pre", pre), ("post", post)) if weights is not None}
    groups = {weights.groups for weights in stages.values()}
    for name, weights in stages.items():
        if not isinstance(weights.groups, int) or weights.groups < 1 or heads % weights.groups:
            raise ValueError(f"{name}.groups={weights.groups!r} must be an integer that divides {heads}, the heads.")
    if len(groups) > 1:
        numbers = " and ".join(str(weights.groups) for weights in stages.values())
        raise ValueError(f"pre and post have {numbers} groups of heads: expected the same number.")
    channels: dict[str, int] = {}
    for name, weights in stages.items():
        for kind, side, count in (("query", weights.query, queries), ("key", weights.key, keys)):
            if side is None:
                continue
            packed = side.packed
            front, split = packed.shape[:-2], (batch, key_heads, heads // key_heads)
            fits = (front == (batch, heads) or front == split) and packed.shape[-1] == count
            if not fits or packed.dtype not in _WEIGHTS:
                raise ValueError(
                    f"{name}.{kind} holds {packed.dtype} {tuple(packed.shape)}: expected floating point "
                    f"of 16 to 64 bits, [B, H, channels, N] = ({batch}, {heads}, channels, {count}). Make the "
                    f"weights from the same tokens as the {'queries' if kind == 'query' else 'keys'}."
                )
            channels[f"{name}.{kind}"] = packed.shape[-2]
        size = heads // weights.groups
        static, expected = weights.static, (weights.groups, size, size)
        if static is not None and not (tuple(static.shape) == expected and static.dtype in _WEIGHTS):
            raise ValueError(
                f"{name}.static is {static.dtype} {tuple(static.shape)}: expected floating point of 16 "
                f"to 64 bits, [G, M, M] = {expected}."
            )
    if len(set(channels.values())) > 1:
        raise ValueError(
            f"{', '.join(channels)} have {', '.join(str(n) for n in channels.values())} channels: expected the same "
            "parts (down and up, a gate, or all three) and one rank."
        )
    require_supported(rank=max([0, *channels.values()]) // 2)
    return groups.pop() if groups else None


__all__ = [
    "Layout",
    "Part",
    "Stage",
    "StagePair",
    "check_states",
    "check_types",
    "check_weights",
    "packed_weights",
    "stages_of",
]
