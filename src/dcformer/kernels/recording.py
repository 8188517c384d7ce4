"""A pass that is written down while it runs, and repeated step by step for other tensors of the same geometry.

To choose the launches of a pass takes the host longer than short sequences take the device. What is chosen follows from
the geometry of tensors and a few numbers, which layers and steps of training share. Unlike `repeated.Repeated`, which
has all its memory from start to end, a recording has memory for as long as the pass did, and what torch does in
between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_How = tuple[torch.Size, tuple[int, ...], int]  # a view's size, strides and offset in its storage


class _Make(NamedTuple):
    """New memory: a contiguous tensor."""

    shape: torch.Size
    dtype: torch.dtype


class _Launch(NamedTuple):
    """A kernel's launch.

    Attributes:
        run: launches it, given all arguments in order.
        values: these, without addresses.
        places: which of them are addresses: of a tensor by its number, so many bytes behind its start.
    """

    run: Callable[..., Any]
    values: list[Any]
    places: list[tuple[int, int, int]]


class _View(NamedTuple):
    """A tensor in new memory: the number of that, and how it lies in it; None where it is all of it."""

    number: int
    how: _How | None

    def of(self, tensors: list[Any]) -> torch.Tensor:
        """The tensor."""
        tensor = tensors[self.number]
        return tensor if self.how is None else tensor.as_strided(*self.how)


class _Call(NamedTuple):
    """A call of a function that has torch compute something."""

    function: Callable[..., Any]
    views: list[_View]


@dataclass(frozen=True)
class Recorded:
    """A pass as it was written down.

    Attributes:
        steps: in their order, each with the numbers of new tensors that no later one needs.
        results: what the pass returns.
    """

    steps: list[tuple[_Make | _Launch | _Call, list[int]]]
    results: list[_View | None]

    def __call__(self, given: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
        """Does the same with other tensors, on their device, which is the current one."""
        tensors = list(given)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        for step, done in self.steps:
            if isinstance(step, _Launch):
                arguments = step.values.copy()
                for i, number, offset in step.places:
                    arguments[i] = addresses[number] + offset
                step.run(*arguments)
            elif isinstance(step, _Make):
                tensor = torch.empty(step.shape, dtype=step.dtype, device=device)
                tensors.append(tensor)
                addresses.append(tensor.data_ptr())
                del tensor
            else:
                step.function(*[view.of(tensors) for view in step.views])
            for number in done:
                tensors[number] = None
        return [None if view is None else view.of(tensors) for view in self.results]


class _Memory(NamedTuple):
    """New memory while it is recorded."""

    number: int
    address: int
    whole: _How
    dtype: torch.dtype


class Recording:
    """Writes down what a pass does.

    The pass makes tensors by `new`, launches kernels by `launch` and has torch compute by `call`; views are its own
    affair. If it uses a tensor that it was neither given nor has made so, nothing is kept.

    Args:
        given: tensors on one device, None for absent ones. The same twice is taken for one.
    """

    def __init__(self, given: Sequence[torch.Tensor | None]):
        self._given: dict[tuple, int] = {}  # address and geometry -> number
        # storage -> of each tensor in it addresses of the first and the last number, and its own number
        self._extents: dict[StorageWeakRef, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(given):
            if tensor is not None and self._given.setdefault(_identity(tensor), number) == number:
                extents = self._extents.setdefault(_storage(tensor), [])
                extents.append((*_extent(tensor), number))
        self._count = len(given)
        self._made: dict[StorageWeakRef, _Memory] = {}
        self._last_uses: dict[int, int] = {}  # of what was made: number -> that of a step
        self._steps: list[_Make | _Launch | _Call] = []
        self._is_whole = True

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes a contiguous tensor in memory of its own. Returns it."""
        self._made[_storage(tensor)] = _Memory(self._count, tensor.data_ptr(), _how(tensor), tensor.dtype)
        self._last_uses[self._count] = len(self._steps)
        self._count += 1
        self._steps.append(_Make(tensor.shape, tensor.dtype))
        return tensor

    def launch(self, run: Callable[..., Any] | None, arguments: Sequence[Any]) -> None:
        """Notes a launch.

        Args:
            run: launches the compiled kernel, given all arguments in order, addresses for tensors; None where there is
                none, as in Triton's interpreter.
            arguments: all of them in order.
        """
        if run is None or not self._is_whole:
            self._is_whole = False
            return
        values, places = list(arguments), []
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                places.append((i, *self._place(value)))
                values[i] = None
        self._steps.append(_Launch(run, values, places))

    def call(self, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Notes a call that works on new tensors, or views of them, in place."""
        self._steps.append(_Call(function, [self._view(tensor) for tensor in tensors]))

    def finish(self, results: Sequence[torch.Tensor | None]) -> Recorded | None:
        """The pass that returns these new tensors, or views of them; None if it cannot be repeated."""
        views = [None if tensor is None else self._view(tensor) for tensor in results]
        if not self._is_whole:
            return None
        done: list[list[int]] = [[] for _ in self._steps]
        for number, step in self._last_uses.items():
            if step < len(done):  # else it is a result
                done[step].append(number)
        return Recorded(list(zip(self._steps, done, strict=True)), views)

    def _use(self, tensor: torch.Tensor) -> _Memory | None:
        """The memory made in which a tensor lies, now in use by the next step; None if it lies elsewhere."""
        memory = self._made.get(_storage(tensor))
        if memory is not None:
            self._last_uses[memory.number] = len(self._steps)
        return memory

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Of which tensor one is a part, or all, and how many bytes behind its start."""
        number = self._given.get(_identity(tensor))
        if number is not None:
            return number, 0
        if (memory := self._use(tensor)) is not None:
            return memory.number, tensor.data_ptr() - memory.address
        first, last = _extent(tensor)
        around = [
            (number, first - start)
            for start, end, number in self._extents.get(_storage(tensor), ())
            if start <= first and last <= end
        ]
        if len(around) == 1:  # else it may be a part of any
            return around[0]
        self._is_whole = False
        return 0, 0

    def _view(self, tensor: torch.Tensor) -> _View:
        memory, how = self._use(tensor), _how(tensor)
        if memory is None or memory.dtype != tensor.dtype:
            self._is_whole = False
            return _View(0, None)
        return _View(memory.number, None if how == memory.whole else how)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """What a tensor lies in: while this is kept, nothing else is equal to it, wherever that lies."""
    return StorageWeakRef(tensor.untyped_storage())


def _how(tensor: torch.Tensor) -> _How:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _identity(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first and last number."""
    first = tensor.data_ptr()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n)
    return first, first + int(reach) * tensor.itemsize


__all__ = ["Recorded", "Recording"]
