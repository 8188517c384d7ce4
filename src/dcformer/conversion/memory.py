"""Memory that was freed and still counts as the process's."""

import ctypes
import sys


def return_freed_memory() -> None:
    """Lets glibc give freed memory back to the system, but for blocks of up to 64 MB.

    It keeps what a thread freed for that thread, and TensorStore compresses and expands on several: without this, the
    chunks of several arrays count at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


__all__ = ["return_freed_memory"]
