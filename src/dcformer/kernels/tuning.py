"""Tile sizes and launch options of the kernels of `attention`: a table, and what a search on this GPU has found.

With DCFORMER_AUTOTUNE=1 the launcher looks for the fastest tile of each kernel when it first meets a `Key`. What it
finds is kept in `tiles.json` in the folder DCFORMER_CACHE, or `dcformer` in the user's cache folder, and used from then
on wherever the variable is set.
"""

import json
import os
import tempfile
import warnings
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path

import torch
import triton

from .tiles import INTERPRETED
from .verdicts import cache_folder


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched: tile of b_t queries by b_s keys, warps, pipeline stages."""

    b_t: int
    b_s: int
    num_warps: int
    num_stages: int


# tiles that are worth a try
CANDIDATES = tuple(
    Tile(b_t, b_s, warps, stages)
    for b_t, b_s, warps in (
        (128, 64, 8), (64, 128, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4), (64, 32, 8), (32, 32, 4),
        (32, 32, 8), (16, 32, 4), (16, 32, 8), (16, 16, 4),
    )
    for stages in (3, 2, 1)
)  # fmt: skip


# kernel -> head dim up to -> tile. Chosen by compiling, for full composition of rank 2: those that spill nothing, fit,
# and issue the fewest instructions (`report.best_tile`); but on sm_90 larger ones for `lse`, which then reads less from
# L2, and smaller ones where Triton 3.6 spills. Up to 127: head dims padded to 128. No GPU has timed them yet.
_SM_90 = {  # bfloat16
    "maps_0": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 3)},
    "lse": {128: Tile(64, 64, 8, 3)},
    "maps_1": {128: Tile(64, 64, 8, 3)},
    "composed": {64: Tile(64, 64, 8, 3), 128: Tile(64, 64, 8, 2)},
    "tiles_0": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 3)},
    "tiles_1": {64: Tile(64, 64, 8, 2), 128: Tile(64, 64, 8, 3)},
    "grads_1": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 3)},
    "back_1": {128: Tile(64, 64, 8, 3)},
    "grads_0": {128: Tile(128, 64, 8, 3)},
    "back_0": {128: Tile(64, 64, 8, 3)},
}
_SM_80 = _SM_90 | {
    "maps_0": {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 8, 2)},
    "lse": {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 4, 3)},
    "maps_1": {128: Tile(32, 64, 4, 2)},
    "composed": {64: Tile(32, 64, 4, 2), 127: Tile(32, 64, 8, 2), 128: Tile(32, 64, 4, 2)},
    "tiles_0": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2)},
    "tiles_1": {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 8, 2)},
    "grads_1": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2)},
}
_SM_89 = _SM_80 | {
    "maps_0": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2)},
    "lse": {128: Tile(32, 64, 4, 2)},
    "maps_1": {64: Tile(32, 64, 4, 1), 127: Tile(64, 32, 4, 3), 128: Tile(32, 64, 4, 3)},
    "composed": {64: Tile(32, 64, 4, 1), 127: Tile(32, 64, 8, 2), 128: Tile(32, 64, 4, 2)},
}
_TABLE = {90: _SM_90, 89: _SM_89, 86: _SM_89, 80: _SM_80, 75: _SM_89}
# what is rarer, for all architectures: the first of some tiles that spills nothing and fits on each
_BFLOAT16_WIDE = {
    "maps_0": {256: Tile(64, 32, 8, 2)},
    "lse": {256: Tile(64, 32, 8, 2)},
    "maps_1": {256: Tile(32, 32, 8, 2)},
    "composed": {256: Tile(16, 32, 8, 1)},
    "tiles_0": {256: Tile(32, 64, 4, 2)},
    "tiles_1": {256: Tile(64, 32, 8, 1)},
    "grads_1": {256: Tile(32, 64, 4, 2)},
    "grads_0": {256: Tile(64, 32, 8, 2)},
}
_FLOAT16 = {
    "maps_0": {128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "lse": {128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "maps_1": {128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "composed": {128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "tiles_0": {128: Tile(64, 64, 8, 2), 256: Tile(32, 64, 4, 2)},
    "tiles_1": {128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "grads_1": {128: Tile(64, 64, 8, 2), 256: Tile(32, 64, 4, 2)},
    "back_1": {128: Tile(64, 32, 8, 2)},
    "grads_0": {128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "back_0": {128: Tile(64, 64, 8, 2)},
}
_FLOAT32 = {
    "maps_0": {128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    "lse": {128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "maps_1": {127: Tile(16, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(32, 32, 8, 1)},
    "composed": {128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "tiles_0": {128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 4, 2)},
    "tiles_1": {128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "grads_1": {128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 4, 2)},
    "back_1": {128: Tile(64, 32, 8, 2)},
    "grads_0": {128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 4, 2)},
    "back_0": {128: Tile(64, 64, 8, 2)},
}

# `launch.LAUNCHES` says what they are; `tiles_*` and those after it are the backward pass
KERNELS = tuple(_SM_90)


def choose(kernel: str, dim: int, dtype: torch.dtype, arch: int, rank: int = 2) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: one of `KERNELS`.
        dim: the larger of the head dims of keys and values.
        dtype: of queries, keys and values.
        arch: compute capability, such as 90.
        rank: R; above 2 there are more maps to hold, and tiles are half as large.

    Returns:
        for bfloat16 the tile from the table of the nearest architecture below; a small one in Triton's interpreter.
    """
    small = _interpreter_tile()
    if small is not None:
        return small
    if dtype != torch.bfloat16:
        tiles = (_FLOAT32 if dtype == torch.float32 else _FLOAT16)[kernel]
    else:
        table = _TABLE[max((known for known in _TABLE if known <= arch), default=75)]
        if arch >= 120:  # the shared memory of 8.9
            table = _SM_89
        tiles = table[kernel] if dim <= 128 else _BFLOAT16_WIDE.get(kernel, table[kernel])
    tile = tiles[min((bound for bound in tiles if dim <= bound), default=max(tiles))]  # some kernels know no head dim
    if rank <= 2:
        return tile
    b_t, b_s = (tile.b_t // 2, tile.b_s) if tile.b_t > tile.b_s else (tile.b_t, tile.b_s // 2)
    return Tile(max(16, b_t), max(16, b_s), tile.num_warps, min(2, tile.num_stages))


def _interpreter_tile() -> Tile | None:
    """In the interpreter, small tiles, so that short sequences have several."""
    return Tile(16, 16, 1, 1) if INTERPRETED.value else None


# --- what a search has found ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """What decides which tile is fastest. Lengths are not part of it: those of the first call stand for all.

    Attributes:
        kernel: one of `KERNELS`.
        arch: compute capability.
        heads: M, heads per group.
        dim: the larger of the head dims of keys and values.
        dtype: of queries, keys and values, as "bfloat16".
        windowed: whether queries see a window of keys only.
        pre, post, rank: the composition, see `launch.Layout`.
    """

    kernel: str
    arch: int
    heads: int
    dim: int
    dtype: str
    windowed: bool
    pre: int
    post: int
    rank: int

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def autotune_is_on() -> bool:
    """Whether DCFORMER_AUTOTUNE asks for searched tiles.

    Raises:
        ValueError: on values other than 0, 1 and nothing.
    """
    value = os.environ.get("DCFORMER_AUTOTUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"DCFORMER_AUTOTUNE={value!r}: expected 1 (search for the fastest tiles, use them) or 0 (tiles from the "
            "table). Set it to one of these or unset it."
        )
    return value == "1"


def cache_file() -> Path:
    """Where found tiles are kept."""
    return cache_folder() / "tiles.json"


def found_tile(gpu: str, key: Key) -> Tile | None:
    """The tile that a search has found on GPUs of this name; None if there was none."""
    return _found(cache_file(), _machine(gpu)).get(str(key))


def keep_tiles(gpu: str, tiles: dict[Key, Tile]) -> None:
    """Adds found tiles to the file, and to those in use. A file that cannot be written is warned of."""
    path, machine = cache_file(), _machine(gpu)
    added = {str(key): tile for key, tile in tiles.items()}
    _found(path, machine).update(added)
    content = _read(path)  # another process may have written meanwhile
    content.setdefault(machine, {}).update({key: list(astuple(tile)) for key, tile in added.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".tiles-", delete=False) as file:
            file.write(json.dumps(content, indent=1, sort_keys=True) + "\n")
        os.replace(file.name, path)  # whole or not at all
    except OSError as error:
        warnings.warn(f"found tiles are not kept, {path} cannot be written: {error}", stacklevel=2)


def _machine(gpu: str) -> str:
    return f"{gpu}, triton {triton.__version__}"


@cache
def _found(path: Path, machine: str) -> dict[str, Tile]:
    """Found tiles by key, read once from the file."""
    return {key: Tile(*numbers) for key, numbers in _read(path).get(machine, {}).items()}


def _read(path: Path) -> dict[str, dict[str, list[int]]]:
    """The file's content, machine -> key -> tile; empty, with a warning, if it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for tiles in content.values():
            for numbers in tiles.values():
                if len(numbers) != 4 or any(type(n) is not int or n < 1 for n in numbers):
                    raise ValueError(f"{numbers} is no tile (queries, keys, warps, pipeline stages)")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        warnings.warn(f"{path} is ignored, it cannot be read as found tiles: {error}. Delete it.", stacklevel=3)
        return {}
    return content


__all__ = ["CANDIDATES", "KERNELS", "Key", "Tile", "autotune_is_on", "choose", "found_tile", "keep_tiles"]
