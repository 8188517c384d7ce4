"""How many keys a program takes, so that multiprocessors end together.

A GPU starts programs in their order, each as soon as one before it has ended. What matters is therefore not only what
a program does, but what runs while the last ones end: one sequence of 2,048 tokens has 32 tiles of 64 queries, in
parts of 128 keys these are 272 programs, and where 264 run at once, as on an H200, the second round is eight of them.
`tools/kernel_rounds.py` simulates it.
"""

from collections.abc import Iterator
from functools import lru_cache

from .sizes import ceil_div

_MOST_PARTS = 64  # of a tile's keys, unless programs would be few: each has sums over keys of its own, in memory
_ENOUGH = 4  # times as many programs as run at once


@lru_cache(maxsize=4096)
def lengths(n_t: int, n_s: int, low: int, high: int, tile: int, block: int, step: int) -> tuple[int, ...]:
    """How many keys each tile of queries of a chunk may see.

    Args:
        n_t, n_s: queries and keys of the chunk.
        low, high: query t of the chunk may see its keys t + low to t + high.
        tile: queries of a tile.
        block: queries whose keys each of their tiles has: a multiple of `tile`.
        step: keys are counted from a multiple of it.
    """
    out = []
    for i in range(0, n_t, tile):
        first = i // block * block
        start = max(0, first + low) // step * step
        out.append(max(0, min(n_s, min(n_t, first + block) + high) - start))
    return tuple(out)


@lru_cache(maxsize=4096)
def keys_of_a_program(
    lengths: tuple[int, ...], copies: int, resident: int, besides: int, step: int, longest_first: bool = False
) -> int:
    """Into parts of how many keys those of each tile are split, so that the last part ends as early as it can.

    The time is taken to be that of whole rounds of mean programs, and what the longest one takes more, as it may be the
    last; where those that take longest start first, it is no less than the longest one takes.

    Args:
        lengths: of each tile.
        copies: how often there are these tiles.
        resident: how many programs run at once.
        besides: what a program does before and after its keys takes as long as so many keys.
        step: what the number is a multiple of.
        longest_first: whether programs start in the order of their lengths (within parts).

    Returns:
        the largest of the best, as parts are added up in the end.
    """
    longest, work = max(lengths, default=0), copies * sum(lengths)

    def time(n: int) -> float:
        programs = copies * sum(ceil_div(length, n) for length in lengths)
        mean, most = work / programs, min(n, longest)
        rounds = ceil_div(programs, resident) * (mean + besides)
        return max(rounds, most + besides) if longest_first else rounds + most - mean

    if not work:
        return step
    parts = max(_MOST_PARTS, _ENOUGH * resident // (len(lengths) * copies))
    return min(_sizes(longest, step, parts), key=time)


def _sizes(longest: int, step: int, parts: int) -> Iterator[int]:
    """Multiples of a step, from the least that holds all on down to that with so many parts: numbers of four binary
    digits and zeros."""
    count = ceil_div(longest, step)
    n = 1 << count.bit_length()
    while n > 0 and ceil_div(count, n) <= parts:
        if n < 2 * count:
            yield n * step
        n -= max(1, 1 << max(0, (n - 1).bit_length() - 4))


__all__ = ["keys_of_a_program", "lengths"]
