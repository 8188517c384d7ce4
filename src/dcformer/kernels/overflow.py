"""What float16 cannot hold: the kernels leave a mark, this module sees it, says so once and has other maps kept.

Scores have two marks. Where the largest that a query has is large, or any that is to be composed, float16 holds them
less exactly than softmax needs; from then on their map is float32, of which products take two parts in float16. Where
it is some hundreds, gradients in float16 are not exact enough either, and beyond ±60000 scores are cut off, as entries
of the matrices are with which the key side composes; from then on all maps are float32. Gradients and composed weights
have another: where some were cut off, or where float16 would keep fewer bits of gradients than bfloat16 does. From then
on those are bfloat16; of float16 models, and where scores are in two parts, all maps are float32.

The marks are on their device. In the first calls of a process they are waited for, and a pass that left one is run
again. Later a GPU is not waited for: more calls may pass until a mark is seen. Imports no Triton.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from threading import Lock

import torch
from transformers.utils import logging

from ..masks_dcformer import is_captured

logger = logging.get_logger(__name__)

LARGEST = 60000.0  # of a score, times log2(e), and of an entry of a matrix: what is beyond is cut off
LARGEST_EXACT = 32.0  # of a query's largest score, and of scores to be composed, likewise: float16 is 0.03 apart there
LARGEST_SPLIT = 512.0  # of the same, where they are in two parts of float16
_LOG2_E = 1.4426950408889634
FIRST = 64  # calls of a process that wait for a GPU: all layers of a first prompt, or of a first training step
_EVERY = 64  # calls between two looks at it later


class Beyond(IntFlag):
    """What went beyond float16 on a device."""

    SCORES = 1
    PRECISION = 2
    GRADIENTS = 4


NOTHING = Beyond(0)

_WARNINGS = {
    Beyond.SCORES: (
        "attention scores on {device} went beyond ±{split:,.0f}, or composition weights beyond what float16 holds. "
        "From now on the kernels keep all maps in float32, which is much slower. Models with norms of queries and keys "
        "(qk_norm=True) have no such scores; attn_implementation='dcformer_chunked' takes them as they are."
    ),
    Beyond.PRECISION: (
        "attention scores on {device} went beyond ±{exact:,.0f}, where float16 is too coarse for them. From now on the "
        "kernels keep scores in float32, which is somewhat slower."
    ),
    Beyond.GRADIENTS: (
        "composed attention weights or gradients of attention maps on {device} went beyond what float16 holds, however "
        "they are scaled. From now on the kernels keep these in bfloat16, which is less exact; for float16 models all "
        "maps in float32, which is much slower."
    ),
}


@dataclass
class _Watch:
    """A device's marks, int32 [3, 4] of which the first column is used, and the copy of them that is under way."""

    marks: torch.Tensor
    copy: torch.Tensor | None = None
    event: torch.cuda.Event | None = None
    calls: int = 0


_watches: dict[torch.device, _Watch] = {}
_found: dict[torch.device, Beyond] = {}
_lock = Lock()  # of both, and of what is in watches: each thread may have a device, or a stream, of its own


def beyond(device: torch.device) -> Beyond:
    """What has been found to go beyond float16 on a device so far."""
    return _found.get(device, NOTHING)


@contextmanager
def assumed(device: torch.device, found: Beyond) -> Iterator[None]:
    """Adds marks to what `beyond` returns for a device meanwhile, to try the kernels that follow. Those that are there
    stay: other threads go by them. Calls meanwhile are not among the first ones of the process, which wait."""
    with _lock:
        before, calls = beyond(device), _calls(device)
        _found[device] = before | found
    try:
        yield
    finally:
        with _lock:
            _found[device] = beyond(device) & ~(found & ~before)
            if device in _watches:
                _watches[device].calls = calls


def _calls(device: torch.device) -> int:
    watch = _watches.get(device)
    return 0 if watch is None else watch.calls


def mark_of(device: torch.device, what: Beyond) -> torch.Tensor:
    """Where kernels leave a mark, int32 [1]: they store 1."""
    with _lock:
        watch = _watches.get(device)
        if watch is None:
            if is_captured(device):  # they are the graph's own
                watch = _Watch(_new_marks(device))
            else:
                # By another thread: while graphs of torch.compile(mode="reduce-overhead") are warmed up, all memory
                # that this one asks for is of a graph, and may not be kept.
                with ThreadPoolExecutor(max_workers=1) as other:
                    watch = _watches[device] = _Watch(other.submit(_new_marks, device, is_awaited=True).result())
    return watch.marks[list(Beyond).index(what), :1]


def _new_marks(device: torch.device, is_awaited: bool = False) -> torch.Tensor:
    marks = torch.zeros(len(Beyond), 4, dtype=torch.int32, device=device)  # addresses are aligned
    if is_awaited and device.type == "cuda":  # by kernels on any stream
        torch.cuda.current_stream(device).synchronize()
    return marks


def look(device: torch.device) -> bool:
    """Looks for marks; to be called after kernels were launched. If `beyond` is another one then, than when they were,
    they are to be run again: the mark may be theirs, whichever thread has seen it.

    Returns:
        whether there is a new one: `beyond` has it from now on.
    """
    with _lock:
        return _look(device)


def _look(device: torch.device) -> bool:
    watch = _watches.get(device)
    if watch is None or Beyond.SCORES in beyond(device):  # float32 holds all
        return False
    if device.type == "cuda":
        if is_captured(device):
            return False
        watch.calls += 1
    if device.type != "cuda" or watch.calls <= FIRST:
        marks = watch.marks
    elif watch.event is None or watch.copy is None:
        if watch.calls % _EVERY == 0:
            # on the CPU, whatever the default device
            memory = torch.empty(watch.marks.shape, dtype=torch.int32, device="cpu", pin_memory=True)
            watch.copy = memory.copy_(watch.marks, non_blocking=True)
            watch.event = torch.cuda.Event()
            watch.event.record(torch.cuda.current_stream(device))
        return False
    elif watch.event.query():
        marks, watch.event = watch.copy, None
    else:
        return False
    new = [what for what, mark in zip(Beyond, marks[:, 0].tolist(), strict=True) if mark and what not in beyond(device)]
    for what in new[:1]:  # float32, for scores, holds gradients, too
        _found[device] = beyond(device) | what
        sizes = {"exact": LARGEST_EXACT / _LOG2_E, "split": LARGEST_SPLIT / _LOG2_E}
        logger.warning(_WARNINGS[what].format(device=device, **sizes))
    return bool(new)


__all__ = [
    "FIRST",
    "LARGEST",
    "LARGEST_EXACT",
    "LARGEST_SPLIT",
    "NOTHING",
    "Beyond",
    "assumed",
    "beyond",
    "look",
    "mark_of",
]
