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

from kernel_roofline import MULTIPROCESSORS, spans

from dcformer.kernels.balance import keys_of_a_program
from dcformer.kernels.launch import BESIDES
from dcformer.kernels.sizes import ceil_div
from dcformer.kernels.tuning import Tile, resident_programs

HEADS = 32  # of 6.9B
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


def over_share(programs: Sequence[int], resident: int, besides: int) -> float:
    """The same over that of their keys shared evenly."""
    return time(programs, resident, besides) * resident / sum(programs)


def programs_of_composition(tiles: Sequence[int], copies: int, n_keys: int) -> list[int]:
    """Keys of the programs of a kernel of composition, in their order: tiles within parts within sequences."""
    parts = range(ceil_div(max(tiles), n_keys))
    return [min(n_keys, max(0, n - i * n_keys)) for _ in range(copies) for i in parts for n in tiles]


def composition(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """`over_share` of `compose`: before, with the largest of a few powers of two with which there were three programs
    to a multiprocessor; and as it is."""
    tile, besides = Tile(64, 1, 4, 4), BESIDES["compose"]
    resident = MULTIPROCESSORS * resident_programs("compose", tile, 90)
    tiles = spans(tokens, window, tile.b_t, 16)
    few = (n for n in (512, 256, 128) if len(tiles) * batch * ceil_div(max(tiles), n) >= 3 * MULTIPROCESSORS)
    before, now = (
        over_share(programs_of_composition(tiles, batch, n), resident, besides)
        for n in (next(few, 64), keys_of_a_program(tiles, batch, resident, besides, 16))
    )
    return before, now


def products(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """`over_share` of `values`: before, head by head, and as it is, tile by tile of all heads of a sequence. Three of
    its programs run at once on a multiprocessor; each takes a tile of keys' time besides."""
    tiles, resident = spans(tokens, window, 64, 64)[::-1], 3 * MULTIPROCESSORS
    by_head, by_tile = list(tiles) * (HEADS * batch), [n for n in tiles for _ in range(HEADS)] * batch
    return over_share(by_head, resident, 64), over_share(by_tile, resident, 64)


def scores(tokens: int, batch: int, window: int | None) -> tuple[float, float]:
    """The same of `scores`, which had 512 keys to a program at most, and as many as there are."""
    tile, besides = Tile(128, 64, 4, 3), BESIDES["scores"]
    resident = MULTIPROCESSORS * resident_programs("scores", tile, 90)
    tiles = spans(tokens, window, tile.b_t, tile.b_s)[::-1]
    n_keys = keys_of_a_program(tiles, HEADS * batch, resident, besides, tile.b_s, True)
    by_head = [min(512, max(0, n - s)) for s in range(0, max(tiles), 512) for n in tiles] * (HEADS * batch)
    by_tile = [
        min(n_keys, max(0, n - s))
        for s in range(0, max(tiles), n_keys) for _ in range(batch) for n in tiles for _ in range(HEADS)
    ]  # fmt: skip
    return over_share(by_head, resident, besides), over_share(by_tile, resident, besides)


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
