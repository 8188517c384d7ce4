"""Scores that float16 cannot hold: the kernels cut them off, this module notices, says so once and has bfloat16 used.

So are entries of the matrices with which the key side composes, gradients of these, and gradients of scores. Gradients
of which float16 would keep fewer bits than bfloat16 does are noticed, too. The kernels leave a mark on their device. In
the first calls of a process it is waited for, and a pass that left it is run again. Later a GPU is not waited for: more
calls may pass until the mark is seen. Imports no Triton.
"""

from dataclasses import dataclass

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

LARGEST = 60000.0  # of a score in float16, times log2(e)
_EVERY = 64  # calls between two looks at a GPU, after the first few, which wait for it
_FIRST = 8


@dataclass
class _Watch:
    """A device's mark, int32 [1], and the copy of it that is under way."""

    mark: torch.Tensor
    copy: torch.Tensor | None = None
    event: torch.cuda.Event | None = None
    calls: int = 0


_watches: dict[torch.device, _Watch] = {}
_wide: set[torch.device] = set()


def needs_bfloat16(device: torch.device) -> bool:
    """Whether scores and other maps on a device are to be kept in bfloat16: some were too large for float16."""
    return device in _wide


def mark_of(device: torch.device) -> torch.Tensor:
    """Where kernels leave their mark: they store 1 when they cut something off."""
    watch = _watches.get(device)
    if watch is None:
        watch = _watches[device] = _Watch(torch.zeros(1, dtype=torch.int32, device=device))
    return watch.mark


def look(device: torch.device) -> bool:
    """Looks whether something was cut off; to be called after kernels were launched.

    Returns:
        whether that is new: `needs_bfloat16` holds from now on, and what was launched is to be run again.
    """
    watch = _watches.get(device)
    if watch is None or needs_bfloat16(device):
        return False
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return False
        watch.calls += 1
    if device.type != "cuda" or watch.calls <= _FIRST:
        seen = bool(watch.mark)
    elif watch.event is None or watch.copy is None:
        if watch.calls % _EVERY == 0:
            memory = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=True)  # whatever the default device
            watch.copy = memory.copy_(watch.mark, non_blocking=True)
            watch.event = torch.cuda.Event()
            watch.event.record(torch.cuda.current_stream(device))
        return False
    elif watch.event.query():
        seen, watch.event = bool(watch.copy), None
    else:
        return False
    if seen:
        _wide.add(device)
        logger.warning(
            f"attention scores on {device}, composition weights, or gradients of these went beyond what float16 holds "
            f"(of scores ±{LARGEST / 1.4426950408889634:,.0f}), where they are cut off. From now on the kernels keep "
            "scores in bfloat16, and what else heads mix, which is less exact. Models with norms of queries and keys "
            "(qk_norm=True) have no such scores."
        )
    return seen


__all__ = ["LARGEST", "look", "mark_of", "needs_bfloat16"]
