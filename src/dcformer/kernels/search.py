"""The search for tiles that DCFORMER_AUTOTUNE=1 asks for: whole passes are run, the launches of one kernel are timed.

A kernel is not launched on its own: some change what they read, and sizes of buffers depend on tiles. So for each
kernel and each tile the whole forward or backward pass runs with that tile for that kernel.
"""

from collections.abc import Callable, Hashable, Iterator
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..masks_dcformer import is_captured
from .tuning import KERNELS, Tile, candidates

logger = logging.get_logger(__name__)

LEAST_QUERIES = 512  # B·T of a call worth a search: what is fastest for a short one is not for others
_TURNS = 5
_AHEAD = 50_000_000  # cycles that a GPU sleeps first, so that it launches at once what has been queued


class Trial:
    """A tile to try for a kernel, and a clock for its launches; without a kernel, a record of what is launched.

    Attributes:
        kernel: name in `tuning.KERNELS`, or "".
        tile: what to launch it with.
        launched: names of all kernels launched.
    """

    def __init__(self, kernel: str, tile: Tile):
        self.kernel, self.tile = kernel, tile
        self.launched: set[str] = set()
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def launch(self, name: str, launch: Callable[[], Any]) -> None:
        """Launches a kernel, between two events if it is the one on trial."""
        self.launched.add(name)
        if name != self.kernel:
            launch()
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        launch()
        events[1].record()
        self.events.append(events)

    def milliseconds(self) -> float:
        """Time of the launches, once they are done."""
        for _, stop in self.events[-1:]:
            stop.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in self.events)


searched: set[Hashable] = set()  # passes of this process that have nothing new to search
new_trial: Callable[[str, Tile], Trial] = Trial  # tests put a clock of their own here


def can_search(tensor: torch.Tensor) -> bool:
    """Whether launches on the tensor's device can be timed now: not while a graph is captured or traced."""
    if torch.compiler.is_compiling() or is_captured(tensor.device):
        return False
    return tensor.is_cuda or new_trial is not Trial


def find_tiles(
    attempt: Callable[[Trial], None], is_new: Callable[[str], bool], current: Callable[[str], Tile]
) -> Iterator[tuple[str, Tile]]:
    """The fastest tile of each kernel that a pass launches, as soon as it is found.

    Args:
        attempt: runs the pass with a trial.
        is_new: whether a kernel has no tile from a search yet.
        current: the tile that a kernel has without one.

    Yields:
        name of the kernel, and tile.

    Raises:
        RuntimeError: when a kernel runs with no tile.
    """
    record = Trial("", current(KERNELS[0]))
    attempt(record)
    names = [name for name in KERNELS if name in record.launched and is_new(name)]
    if not names:
        return
    logger.warning(f"DCFORMER_AUTOTUNE=1: looking for tiles of {', '.join(names)}; this takes minutes, once.")
    tried = {name: candidates(name, current(name)) for name in names}
    with tqdm(total=sum(map(len, tried.values())), desc="autotune", leave=False) as progress:
        for name in names:
            times: dict[Tile, float] = {}
            error: Exception | None = None
            for tile in dict.fromkeys((current(name), *tried[name])):
                progress.set_postfix_str(
                    f"{name} {tile.b_t}x{tile.b_s} w{tile.num_warps} s{tile.num_stages} r{tile.maxnreg}"
                )
                try:
                    times[tile] = _milliseconds(attempt, name, tile)
                except Exception as caught:  # too much shared memory, or the compiler gives up
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()  # what leaves the device unusable is not the tile's fault: raised here
                    error = caught
                    logger.debug(f"{name} with {tile}: {caught}")
                progress.update(tile in tried[name])
            if not times:
                raise RuntimeError(
                    f"DCFORMER_AUTOTUNE=1: {name} runs with none of {len(tried[name])} tiles, the last one failed "
                    f"with {error!r}. Unset the variable to use the table's."
                ) from error
            best = min(times, key=times.__getitem__)
            logger.info(f"{name}: {best}, {times[best]:.3f} ms against {times.get(current(name), float('nan')):.3f}")
            yield name, best


def _milliseconds(attempt: Callable[[Trial], None], name: str, tile: Tile) -> float:
    """Median time of a kernel's launches in a pass, with a tile."""
    attempt(new_trial(name, tile))  # compiles
    times = []
    for _ in range(_TURNS):
        trial = new_trial(name, tile)
        if isinstance(trial, Trial) and torch.cuda.is_available():
            torch.cuda._sleep(_AHEAD)
        attempt(trial)
        times.append(trial.milliseconds())
    return median(times)


__all__ = ["LEAST_QUERIES", "Trial", "can_search", "find_tiles", "new_trial", "searched"]
