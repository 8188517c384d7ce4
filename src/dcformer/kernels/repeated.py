"""Launches that are chosen once and then repeated: the host's part of a decoding step.

What an operator of decoding launches follows from the geometry of its tensors and a few numbers, and these are the same
in all layers of a step. Choosing tiles, and Triton's look at some forty arguments of each launch, take the host longer
than the device needs for the kernels. So the first call of a geometry chooses, and the others give the compiled kernels
their pointers and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Sequence[torch.Tensor | None]


@dataclass
class Launch:
    """One kernel launch: everything that compilation and the launcher need to know.

    Attributes:
        kernel: the jitted function.
        grid: programs along one to three axes.
        arguments: what is known when it runs, by name.
        constants: what is known when it is compiled, by name.
        options: of the compiler, `num_warps` for one.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> Any:
        """Launches the kernel. Returns it as it was compiled; from Triton's interpreter None."""
        return self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


@dataclass(frozen=True)
class _Place:
    """Where an argument comes from: a tensor by its number, or the part of one that was made."""

    number: int
    part: tuple[Any, ...] | None = None  # size, strides, offset

    def find(self, tensors: Tensors) -> torch.Tensor | None:
        tensor = tensors[self.number]
        return tensor if self.part is None or tensor is None else tensor.as_strided(*self.part)


@dataclass(frozen=True)
class _Known:
    """What was launched: shapes and dtypes of what was made, and each kernel with its grid, arguments and places."""

    made: list[tuple[torch.Size, torch.dtype]]
    launches: list[tuple[Any, tuple[int, int, int], list[Any], list[tuple[int, _Place]]]]


def geometry(tensors: Tensors) -> tuple:
    """All of some tensors on one device that may decide about a launch, alignment to 16 bytes included."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)


class Repeated:
    """A function that chooses launches, called once for each geometry.

    Args:
        choose: (tensors, then numbers) -> the tensors that it made, contiguous and each with memory of its own, and the
            launches that fill them. Every tensor that a launch takes is one of the given or the made ones, or a part of
            the latter. It must depend on nothing but numbers and `geometry`.
        most: how many choices are remembered; the oldest is forgotten.
    """

    def __init__(self, choose: Callable[..., tuple[list[torch.Tensor], list[Launch]]], most: int = 256):
        self.choose, self.most = choose, most
        self._known: dict[tuple, _Known] = {}

    def __call__(self, tensors: Tensors, *numbers: Any) -> list[torch.Tensor]:
        """Launches what was or is chosen.

        Args:
            tensors: on one device, the first one not None; None for absent ones.
            numbers: hashable.

        Returns:
            the tensors that were made.
        """
        assert tensors[0] is not None
        device = tensors[0].device
        key = (device, numbers, geometry(tensors))
        known = self._known.get(key)
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            if known is None:
                return self._first(key, tensors)
            made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in known.made]
            found = [*tensors, *made]
            for kernel, grid, values, places in known.launches:
                arguments = values.copy()
                for i, place in places:
                    arguments[i] = place.find(found)
                kernel[grid](*arguments)
        return made

    def _first(self, key: tuple, tensors: Tensors) -> list[torch.Tensor]:
        """Chooses, launches and remembers; the interpreter has no compiled kernels to remember."""
        given = [None if t is None else t.detach() for t in tensors]  # a tensor that is given twice is two
        made, launches = self.choose(*given, *key[1])
        kernels = [launch.run() for launch in launches]
        if all(kernel is not None for kernel in kernels):
            steps = []
            for kernel, launch in zip(kernels, launches, strict=True):
                named = launch.constants | launch.arguments
                values = [named.get(name) for name in launch.kernel.arg_names]
                places = [(i, _place(x, given, made)) for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
                for i, _ in places:
                    values[i] = None
                x, y, z, *_ = (*launch.grid, 1, 1)
                steps.append((kernel, (x, y, z), values, places))
            while len(self._known) >= self.most:
                self._known.pop(next(iter(self._known)), None)
            self._known[key] = _Known([(t.shape, t.dtype) for t in made], steps)
        return made


def _place(argument: torch.Tensor, given: Tensors, made: list[torch.Tensor]) -> _Place:
    for number, tensor in enumerate([*given, *made]):
        if argument is tensor:
            return _Place(number)
    for number, tensor in enumerate(made, len(given)):
        if argument.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            return _Place(number, (argument.shape, argument.stride(), argument.storage_offset()))
    raise AssertionError("a launch takes a tensor that was neither given nor made")


__all__ = ["Launch", "Repeated", "geometry"]
