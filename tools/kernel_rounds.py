"""How long multiprocessors wait for the last programs of a kernel, by a simulation: AN ESTIMATE, not a measurement.

    python tools/kernel_rounds.py

A GPU starts programs in their order, each as soon as one before it has ended. Assumed are an H200's 132
multiprocessors, as many programs on each as `tuning.resident_programs` says, and that a key takes the same time
everywhere. Printed is the time from the first program's start to the last one's end, beside that of the same work
shared out evenly: as it is, and as it was on the first GPU (docs/gpu_history.md).
"""

import argparse
import heapq
from collections.abc import Iterable, Sequence

from dcformer.kernels.balance import keys_of_a_program, lengths
from dcformer.kernels.launch import BESIDES
from dcformer.kernels.sizes import ceil_div, round_up
from dcformer.kernels.tuning import Tile, resident_programs

MULTIPROCESSORS = 132
HEADS, TILE = 32, 64  # of 6.9B; queries of a tile of composition
CASES = ((2048, 1, None), (2048, 1, 256), (2048, 8, None), (2048, 8, 256), (4096, 1, None), (1024, 8, None))


def time(programs: Iterable[int], resident: int, besides: int) -> int:
    """When the last of some programs ends.

    Args:
        programs: keys of each, in their order; those with none end at once.
        resident: how many run at once.
        besides: what each does apart from its keys, in keys.
    """
    ends = [0] * resident
    for keys in programs:
        if keys:
            heapq.heapreplace(ends, ends[0] + keys + besides)
    return max(ends)


def spans(tokens: int, window: int | None, tile: int, step: int) -> tuple[int, ...]:
    """Keys of each tile of queries under a causal mask."""
    return lengths(tokens, round_up(tokens, 16), -tokens if window is None else 1 - window, 0, tile, tile, step)


def programs_of_composition(tiles: Sequence[int], copies: int, n_keys: int) -> list[int]:
    """Keys of the programs of a kernel of composition, in their order: tiles within parts within sequences."""
    parts = range(ceil_div(max(tiles), n_keys))
    return [min(n_keys, max(0, n - i * n_keys)) for _ in range(copies) for i in parts for n in tiles]


def composition(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """Time of `compose` over that of its work shared evenly: before, with the largest of a few powers of two with which
    there were three programs to a multiprocessor; and as it is."""
    tiles, resident = (
        spans(tokens, window, TILE, 16),
        MULTIPROCESSORS * resident_programs("compose", Tile(TILE, 1, 4, 4), HEADS, 90),
    )
    few = (n for n in (512, 256, 128) if len(tiles) * batch * ceil_div(max(tiles), n) >= 3 * MULTIPROCESSORS)
    before, now = next(few, 64), keys_of_a_program(tiles, batch, resident, BESIDES["compose"], 16)
    times = (
        time(programs_of_composition(tiles, batch, n), resident, BESIDES["compose"]) * resident / (sum(tiles) * batch)
        for n in (before, now)
    )
    return next(times), next(times)


def products(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """Time of `values` over that of its work shared evenly: before, head by head, and as it is, tile by tile of all
    heads of a sequence. Three of its programs run at once on a multiprocessor."""
    tiles, resident = spans(tokens, window, 64, 64)[::-1], 3 * MULTIPROCESSORS
    by_head, by_tile = list(tiles) * (HEADS * batch), [n for n in tiles for _ in range(HEADS)] * batch
    share = sum(tiles) * HEADS * batch / resident
    return time(by_head, resident, 64) / share, time(by_tile, resident, 64) / share


def scores(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """The same of `scores`, which had 512 keys to a program at most, and as many as there are."""
    tile = Tile(128, 64, 4, 3)
    tiles, resident = (
        spans(tokens, window, tile.b_t, tile.b_s),
        MULTIPROCESSORS * resident_programs("scores", tile, HEADS, 90),
    )
    share = sum(tiles) * HEADS * batch / resident
    n_keys = keys_of_a_program(tiles, HEADS * batch, resident, BESIDES["scores"], tile.b_s, True)
    by_head = [
        min(512, max(0, n - s)) for _ in range(HEADS * batch) for s in range(0, max(tiles), 512) for n in tiles[::-1]
    ]
    by_tile = [
        min(n_keys, max(0, n - s))
        for s in range(0, max(tiles), n_keys) for _ in range(batch) for n in tiles[::-1] for _ in range(HEADS)
    ]  # fmt: skip
    return time(by_head, resident, BESIDES["scores"]) / share, time(by_tile, resident, BESIDES["scores"]) / share


def table() -> str:
    """All of that, in Markdown."""
    lines = [
        "| tokens | sequences | window | composition, before | now | values, before | now | scores, before | now |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        found = [f"{x:.2f}" for kind in (composition, products, scores) for x in kind(*case)]
        tokens, batch, window = case
        lines.append(f"| {tokens} | {batch} | {window or '-'} | {' | '.join(found)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(table())


if __name__ == "__main__":
    main()
