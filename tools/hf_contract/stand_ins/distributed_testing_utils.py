"""Stands in for a helper module of Transformers' tests: starts the ranks of a distributed test as processes on the CPU.

The source distribution has the tests that use it and not the module itself. The names and signatures are theirs.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """A CPU has none to set."""


def _run_rank(rank: int, fn: Callable, args: tuple) -> None:
    fn(rank, *args)
    # All that is tested has passed. Python does not shut down: a thread of gloo that holds a tensor then can abort the
    # process (SIGABRT; pytorch/pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _start_rank_processes(fn: Callable, args: tuple, nprocs: int) -> None:
    """Calls ``fn(rank, *args)`` in `nprocs` processes and raises what one of them raises."""
    mp.start_processes(_run_rank, args=(fn, args), nprocs=nprocs, start_method="spawn")


def _with_process_group(rank: int, fn: Callable, world_size: int, store: str, args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        fn(rank, *args)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int) -> Callable[[Callable], Callable]:
    """A decorator: the call runs in `world_size` processes, with the rank as a first argument, in one process group."""

    def decorate(fn: Callable) -> Callable:
        @wraps(fn)
        def run(*args) -> None:
            with tempfile.TemporaryDirectory() as folder:
                _start_rank_processes(_with_process_group, (fn, world_size, f"{folder}/store", args), world_size)

        return run

    return decorate
