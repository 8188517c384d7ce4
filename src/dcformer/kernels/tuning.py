"""Tile sizes and launch options of the kernels of attention: a choice, and what a search on this GPU has found.

With DCFORMER_AUTOTUNE=1 the launcher looks for the fastest tile of each kernel when it first meets a `Key`. What it
finds is kept in `tiles.json` in the folder DCFORMER_CACHE, or `dcformer` in the user's cache folder, and used from then
on wherever the variable is set.
"""

import json
import os
import warnings
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton

from ..files import write_whole
from .overflow import NOTHING, Beyond
from .schemas import ROWS
from .triton.precision import INTERPRETED
from .verdicts import cache_folder


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched: tile of b_t queries by b_s keys, warps, pipeline stages, registers of a thread at most.

    Kernels of composition loop over keys: b_s of them a turn, 1 but for `lse`. With 255 registers, all that there are,
    a multiprocessor has room for 8 warps, with 168 for 12, with 128 for 16. `maxnreg` 0: as many as the compiler takes.
    """

    b_t: int
    b_s: int
    num_warps: int
    num_stages: int
    maxnreg: int = 0


# `launch.LAUNCHES` says what they are
KERNELS = ("scores", "lse", "compose", "values", "weights", "back_1", "back_0", "keys")
_PRODUCTS = ("scores", "values", "keys")
_STAGES = (3, 2, 4)
# Kernel of composition -> (heads up to, ranks up to, registers): with no more than these it spills nothing, and more of
# its programs run at once. On sm_90, and on others.
_FEW_REGISTERS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "lse": ((16, 4, 128), (32, 2, 168)),
    "compose": ((16, 2, 128), (16, 4, 168), (32, 1, 128), (32, 2, 168)),
    "weights": ((16, 2, 128), (16, 4, 168), (32, 1, 128), (32, 2, 168)),
    "back_1": ((16, 2, 168),),
    "back_0": ((16, 2, 168),),
}
_FEW_ELSEWHERE = {"lse": ((16, 2, 168),), "compose": ((16, 2, 128),), "weights": ((16, 2, 128),)}
_REGISTERS = 65536  # of a multiprocessor
_PRODUCT_TILES = ((128, 64, 4), (64, 64, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8))
_SMALL_WINDOW = 1024  # keys


def candidates(kernel: str, usual: Tile) -> tuple[Tile, ...]:
    """Tiles of a kernel that a search tries. Those of composition have as many queries as the usual one: maps are laid
    out by it."""
    if kernel in _PRODUCTS:
        tiles = [_product_tile(kernel, *numbers, stages) for numbers in _PRODUCT_TILES for stages in _STAGES]
        tiles = [tile for tile in tiles if is_allowed(kernel, tile, usual)]
        if kernel == "keys":  # which spills a little for room for three programs
            tiles += [replace(tile, maxnreg=168) for tile in tiles if (tile.b_t, tile.num_warps) == (64, 4)]
        return tuple(tiles)
    keys = (4, 2, 1) if kernel == "lse" else (1,)
    limits = [usual.maxnreg]
    if kernel == "lse":
        limits += [0] if usual.maxnreg else []
    elif usual.maxnreg in (0, 255) and usual.num_warps <= 4:
        limits += [168]  # more programs, and numbers in slower memory
    return tuple(
        replace(usual, b_s=b_s, num_stages=stages, maxnreg=limit)
        for b_s in keys
        for stages in (*_STAGES, 5)
        for limit in limits
    )


def is_allowed(kernel: str, tile: Tile, usual: Tile) -> bool:
    """Whether a kernel may have a tile instead of the usual one: those of composition have as many queries, by which
    maps are laid out; a turn of a product with copies undoes one power of two."""
    if kernel not in _PRODUCTS:
        return tile.b_t == usual.b_t
    return ROWS % {"values": tile.b_s, "keys": tile.b_t}.get(kernel, 1) == 0


def choose(
    kernel: str, heads: int, dim: int, dtype: torch.dtype, arch: int, rank: int = 2, window: int | None = None,
    beyond: Beyond = NOTHING,
) -> Tile:  # fmt: skip
    """The tile of a kernel: on sm_90, up to 32 heads, by times on an H200 (docs/gpu_history.md); otherwise by what
    compiled code takes.

    Args:
        kernel: one of `KERNELS`.
        heads: M, heads per group.
        dim: the larger of the head dims of keys and values.
        dtype: of queries, keys and values.
        arch: compute capability, such as 90.
        rank: R.
        window: the most keys that a query sees, where it is fewer than there may be.
        beyond: what has exceeded float16, where maps are of 16 bits or scores alone are float32, see `overflow`.

    Returns:
        the tile; a small one in Triton's interpreter.
    """
    small = _interpreter_tile(kernel)
    if small is not None:
        return small
    of_registers = _multiplies_registers(arch)
    if kernel in _PRODUCTS:
        if dtype == torch.float32:  # on CUDA cores
            return Tile(64, 64, 8, 2) if dim <= 128 else Tile(32, 32, 4, 2)
        if dim > 128:  # with two stages ptxas makes the products of `values` wait for each other on sm_90
            return Tile(64, 32, 4, 2) if kernel == "scores" else Tile(64, 32, 8, 2 if of_registers else 3)
        if kernel == "scores":  # 64 queries take 5% longer for a pair, and with small windows meet fewer that none sees
            return Tile(64 if window and window <= _SMALL_WINDOW else 128, 64, 4, 3)
        has_little = _has_little(arch)
        if of_registers:  # half as many warps spill
            return Tile(64, 128, 8, 2) if kernel == "keys" else Tile(128, 64, 8, 2 if has_little else 3)
        return _product_tile(kernel, 64, 64, 4, 4 if kernel == "keys" and not has_little else 3)
    if dtype == torch.float32:  # where ptxas may choose, it may choose 32, and spill all else
        return Tile(32, 1, 8, 2, 255) if heads <= 32 else Tile(32, 1, 4, 1, 255)
    most = 255 if kernel in ("back_1", "back_0") else 0  # for the same reason, on sm_80
    # scores in float32, and weights that are not composed in float16, take more registers
    if Beyond.PRECISION not in beyond and not (Beyond.GRADIENTS in beyond and kernel in ("compose", "weights")):
        of_arch = _FEW_REGISTERS if arch == 90 else _FEW_ELSEWHERE
        known = (count for up_to, ranks, count in of_arch.get(kernel, ()) if heads <= up_to and rank <= ranks)
        most = next(known, most)
    # Tensor cores of sm_100 take products of 64 rows from a memory of their own: for those as small as these, that is
    # up to twice the instructions, and a wait for each. With 32 they take them from registers.
    has_memory = 100 <= arch < 120
    b_t, num_warps = (32, 2) if has_memory else (64, 4)
    if kernel == "lse":  # as many keys share one rescaling as registers suffice for
        is_full = (arch == 90 and most == 168) or (has_memory and heads > 16)
        keys = 1 if heads > 32 or rank > 3 else 2 if rank == 3 or Beyond.PRECISION in beyond or is_full else 4
        return Tile(b_t, keys, num_warps, 2 if of_registers else 3, most)
    if of_registers:  # a third stage costs a tenth more instructions
        return Tile(b_t, 1, num_warps, 2, most)
    return Tile(b_t, 1, num_warps, 3 if kernel in ("back_1", "back_0") else 4, most)


def wide_channels(heads: int, rank: int, arch: int) -> int:
    """From which channel on `compose_kernel` holds the query side of scores in 16 bits: 2R + 1 for none, R for all but
    down, 1 for all but its first, 0 for all. That takes fewer registers and more instructions; it is done where it lets
    more programs run at once, or avoids spilling.

    Args:
        heads: those of its blocks.
        rank, arch: R, and the compute capability.
    """
    numbers = heads * rank  # of down, and of up
    if (heads <= 16 and rank <= 3) or (arch != 90 and numbers <= 64):
        return 2 * rank + 1
    if numbers > 96:
        return 0
    return rank if heads <= 32 else 1


def _product_tile(kernel: str, b_t: int, b_s: int, num_warps: int, num_stages: int) -> Tile:
    """A tile of a product; of `values` with room for three programs: its rarest loop asks for more registers."""
    return Tile(b_t, b_s, num_warps, num_stages, 168 if kernel == "values" and (b_t, num_warps) == (64, 4) else 0)


def launch_options(tile: Tile) -> dict[str, int]:
    """What Triton is told of a launch."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options | ({"maxnreg": tile.maxnreg} if tile.maxnreg else {})


def resident_programs(kernel: str, tile: Tile, arch: int) -> int:
    """How many programs of `scores` or of composition a multiprocessor runs at once. Registers decide, of which those
    of composition may take all where they are not limited; for `scores` shared memory, of which some have little.

    Args:
        kernel, arch: as for `choose`.
        tile: what `choose` returned.
    """
    warps = 8
    if kernel == "scores":
        warps = 4 if _has_little(arch) else 8
    elif tile.maxnreg:
        warps = _REGISTERS // (32 * -(-tile.maxnreg // 8) * 8)
    return max(1, warps // tile.num_warps)


def _multiplies_registers(arch: int) -> bool:
    """Whether tensor cores take both matrices of large products from registers, and not from shared memory."""
    return arch < 90 or arch >= 120


def _has_little(arch: int) -> bool:
    """Whether a multiprocessor has some 100 KiB of shared memory rather than 160 or more."""
    return arch in (86, 89) or arch >= 120


def _interpreter_tile(kernel: str) -> Tile | None:
    """In the interpreter, small tiles, so that short sequences have several."""
    if not INTERPRETED.value:
        return None
    return Tile(16, 16 if kernel in _PRODUCTS else 4 if kernel == "lse" else 1, 1, 1)


# --- what a search has found ------------------------------------------------------------------------------------------

_searches = 0


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
        pre, post, rank: the composition, see `layout.Layout`.
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


def searches() -> int:
    """How often this process has kept what a search has found. What was chosen before has other tiles."""
    return _searches


def cache_file() -> Path:
    """Where found tiles are kept."""
    return cache_folder() / "tiles.json"


def found_tile(gpu: str, key: Key) -> Tile | None:
    """The tile that a search has found on GPUs of this name; None if there was none."""
    return _found(cache_file(), _machine(gpu)).get(str(key))


def keep_tiles(gpu: str, tiles: dict[Key, Tile]) -> None:
    """Adds found tiles to the file, and to those in use. A file that cannot be written is warned of."""
    global _searches
    _searches += 1
    path, machine = cache_file(), _machine(gpu)
    added = {str(key): tile for key, tile in tiles.items()}
    _found(path, machine).update(added)
    content = _read(path)  # another process may have written meanwhile
    content.setdefault(machine, {}).update({key: list(astuple(tile)) for key, tile in added.items()})
    try:
        write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
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
                if len(numbers) != 5 or any(type(n) is not int or n < (i < 4) for i, n in enumerate(numbers)):
                    raise ValueError(f"{numbers} is not a tile (queries, keys, warps, pipeline stages, registers)")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        warnings.warn(f"{path} is ignored, it cannot be read as found tiles: {error}. Delete it.", stacklevel=3)
        return {}
    return content


__all__ = [
    "KERNELS", "Key", "Tile", "autotune_is_on", "candidates", "choose", "found_tile", "is_allowed", "keep_tiles",
    "launch_options", "resident_programs", "searches",
]  # fmt: skip
