"""What programs of a launch do to memory, to each other's and to their own, watched in Triton's interpreter.

A GPU ends a process that reads outside of its memory, even what is masked later; the interpreter reads what is there.
A GPU runs the programs of a launch in any order and at once, and the threads of a program in any order up to the next
barrier; the interpreter has one order, in which a result may be right that is not in another. So each read and write is
looked at. These are wrong:

- A program reads or writes what lies outside of all tensors that the launch was given.
- A program reads or writes what another program of the same launch writes; but all may write the same number.
- A program reads what it has written since its last barrier: other threads may have done so.
- A program writes what it has read since its last barrier, but for a block in place: then Triton has the same thread
  read and write, or passes on through shared memory, with a barrier, what others have read.

`compute-sanitizer` looks for races in shared memory only.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

_TRITON = Path(triton.__file__).parent
_PAGE = 1 << 16  # bytes that are looked at together


class Accesses:
    """Watches launches until `monkeypatch` is undone. Reads and writes outside of tensors are left out.

    Attributes:
        wrong: by line, a text of each kind of wrong access.
        kernels: names of those that have been launched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.wrong: set[str] = set()
        self.kernels: set[str] = set()
        # Reads and writes are numbered. Those from a number on are of this launch, of this program, since its barrier.
        self._number = self._launch = self._program = self._barrier = 0
        self._given = _extents([])
        self._pages: dict[int, np.ndarray] = {}  # of each byte the last write, the last read, and another program's
        self._blocks: dict[int, np.ndarray] = {}  # of reads since the barrier
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        program, barrier = InterpreterBuilder.set_grid_idx, InterpreterBuilder.create_barrier
        launch = GridExecutor.__call__

        def launched(executor: Any, *arguments: Any, **named: Any) -> Any:
            self.kernels.add(executor.fn.__name__)
            self._given = _extents(x for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor))
            self._pages.clear()
            self._launch = self._number + 1
            return launch(executor, *arguments, **named)

        def program_began(builder: Any, *place: int) -> None:
            self._blocks.clear()
            self._program = self._barrier = self._number + 1
            program(builder, *place)

        def met(builder: Any) -> Any:
            self._blocks.clear()
            self._barrier = self._number + 1
            return barrier(builder)

        def loaded(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            places = _bytes(pointers, mask)
            if self._is_stray(places):
                self._report("reads outside of all tensors")
                mask = SimpleNamespace(data=np.zeros_like(mask.data))
            else:
                self._read(places)
            return load(builder, pointers, mask, *rest)

        def stored(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            places = _bytes(pointers, mask)
            if self._is_stray(places):
                self._report("writes outside of all tensors")
                mask = SimpleNamespace(data=np.zeros_like(mask.data))
            else:
                present = load(builder, pointers, mask, value, None, None, False)
                self._write(places, np.array_equal(present.data, value.data, equal_nan=True))
            return store(builder, pointers, value, mask, *rest)

        monkeypatch.setattr(GridExecutor, "__call__", launched)
        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", program_began)
        monkeypatch.setattr(InterpreterBuilder, "create_barrier", met)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", stored)

    def _is_stray(self, places: np.ndarray) -> bool:
        """Whether a byte lies in none of the tensors."""
        starts, stops = self._given
        which = np.searchsorted(starts, places, side="right") - 1
        return bool(((which < 0) | (places >= stops[which])).any())

    def _of_pages(self, places: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pages [3, bytes] on which places lie, and where on them."""
        pages = places // _PAGE
        for page in np.unique(pages):
            if page not in self._pages:
                self._pages[page] = np.zeros((3, _PAGE), dtype=np.int32)
            yield self._pages[page], places[pages == page] % _PAGE

    def _is_of_another(self, numbers: np.ndarray) -> bool:
        """Whether reads or writes are of another program of this launch."""
        return bool(((numbers >= self._launch) & (numbers < self._program)).any())

    def _read(self, places: np.ndarray) -> None:
        self._number += 1
        self._blocks[self._number] = places
        for page, at in self._of_pages(places):
            write, read, before = page[:, at]
            if self._is_of_another(write):
                self._report("reads what another program writes")
            if (write >= self._barrier).any():
                self._report("reads what it has written, without a barrier in between")
            page[2, at] = np.where(read < self._program, read, before)
            page[1, at] = self._number

    def _write(self, places: np.ndarray, changes_nothing: bool) -> None:
        self._number += 1
        for page, at in self._of_pages(places):
            write, read, before = page[:, at]
            if self._is_of_another(write) and not changes_nothing:
                self._report("writes what another program writes")
            if self._is_of_another(read) or self._is_of_another(before):
                self._report("writes what another program reads")
            reads = np.unique(read[read >= self._barrier])
            if not all(np.array_equal(self._blocks[number], places) for number in reads):
                self._report("writes what it has read, without a barrier in between")
            page[0, at] = self._number

    def _report(self, what: str) -> None:
        """Adds what the kernel does in the line that runs."""
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__ or _TRITON in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
            assert frame is not None
        self.wrong.add(f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: {what}")


def _bytes(pointers: Any, mask: Any) -> np.ndarray:
    """Addresses of all bytes of a block, but for those that are masked off, in one order."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    starts = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
    return (starts[:, None] + np.arange(size)).ravel()


def _extents(tensors: Iterable[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Where pieces of memory that tensors lie in begin and end, in order and apart. Single numbers alone stand for
    addresses, as where a launch is repeated: then all memory."""
    given = [tensor for tensor in tensors if tensor.numel()]
    if all(tensor.numel() == 1 for tensor in given):
        return np.array([0], dtype=np.int64), np.array([np.iinfo(np.int64).max], dtype=np.int64)
    pieces: list[list[int]] = []
    for tensor in sorted(given, key=torch.Tensor.data_ptr):
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
        if pieces and start <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], stop)
        else:
            pieces.append([start, stop])
    starts, stops = np.array(pieces, dtype=np.int64).T
    return starts, stops
