"""Tile sizes and launch options of the kernels of `attention`."""

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched: tile of b_t queries by b_s keys, warps, pipeline stages."""

    b_t: int
    b_s: int
    num_warps: int
    num_stages: int


# kernel -> head dim up to -> tile, for 16-bit dtypes. Chosen by compiling: the largest that spill nothing and whose
# shared memory fits, full composition of rank 2 (`python -m dcformer.kernels.report`). No GPU has timed them yet.
_SM_90 = {
    "maps_0": {128: Tile(64, 64, 8, 3)},
    "maps_1": {128: Tile(64, 32, 8, 3)},
    "lse": {128: Tile(128, 64, 8, 3)},
    "output": {64: Tile(128, 64, 8, 2), 80: Tile(128, 32, 8, 3), 128: Tile(64, 64, 8, 2)},
    "tiles_0": {128: Tile(64, 64, 8, 3)},
    "tiles_1": {128: Tile(64, 64, 8, 3)},
    "tiles_2": {128: Tile(64, 64, 8, 3)},
    "key_sums_1": {128: Tile(128, 64, 8, 2)},
    "back_1": {128: Tile(64, 64, 8, 2)},
    "grad_maps": {128: Tile(128, 64, 8, 2)},
    "key_sums_0": {128: Tile(128, 64, 8, 2)},
    "back_0": {128: Tile(128, 64, 8, 2)},
}
_SM_80 = _SM_90 | {
    "maps_0": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 3)},
    "maps_1": {64: Tile(64, 64, 8, 3), 128: Tile(64, 32, 8, 3)},
    "output": {128: Tile(64, 64, 8, 2)},
    "tiles_0": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 3)},
    "tiles_2": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 3)},
}
# less shared memory: 99 KiB
_SM_89 = _SM_80 | {
    "lse": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 3)},
    "output": {64: Tile(64, 64, 8, 2), 128: Tile(64, 32, 8, 2)},
    "tiles_1": {128: Tile(64, 32, 8, 3)},
}
_TABLE = {90: _SM_90, 89: _SM_89, 86: _SM_89, 80: _SM_80, 75: _SM_89}

# `launch.LAUNCHES` says what they are; `tiles_*` and those after it are the backward pass
KERNELS = tuple(_SM_90)


def choose(kernel: str, dim: int, dtype: torch.dtype, arch: int) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: one of `KERNELS`.
        dim: the larger of the head dims of keys and values.
        dtype: of queries, keys and values.
        arch: compute capability, such as 90.

    Returns:
        the tile from the table of the nearest architecture below; small ones for float32, for head dims above 128, and
        in Triton's interpreter.
    """
    small = _interpreter_tile()
    if small is not None:
        return small
    if dim > 128:
        return Tile(16, 32, 8, 1)
    if dtype == torch.float32:
        return Tile(32, 32, 8, 1)
    table = _TABLE[max((known for known in _TABLE if known <= arch), default=75)]
    if arch >= 120:  # the shared memory of 8.9
        table = _SM_89
    tiles = table[kernel]
    return tiles[min(bound for bound in tiles if dim <= bound)]


@cache
def _interpreter_tile() -> Tile | None:
    """In the interpreter, small tiles, so that short sequences have several."""
    return Tile(16, 16, 1, 1) if os.environ.get("TRITON_INTERPRET") == "1" else None


__all__ = ["KERNELS", "Tile", "choose"]
