"""Launches that are chosen once and then repeated, as the host may take longer for them than the device.

What an operator of decoding launches follows from the geometry of its tensors and a few numbers, and these are the same
in all layers of a step and in many steps. Choosing tiles, and Triton's look at some forty arguments of each launch,
take the host longer than the device needs for the kernels. So the first call of a geometry chooses, and the others give
the compiled kernels addresses, the few numbers that vary, and nothing else: `Repeated`. Longer passes are written down
and repeated (`recording`); what is not does without Triton's look where arguments were alike before: `start`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from .sizes import round_up

Tensors = Sequence[torch.Tensor | None]

# What the compiler is told of every kernel: a product and a sum are one instruction. By itself Triton 3.10 would not.
COMPILER = MappingProxyType({"enable_fp_fusion": True})

_MOST_COMPILED = 4096  # of `_compiled`; the oldest is forgotten
_ALIGNMENT = 256  # bytes, of tensors that share memory
_compiled: dict[tuple, tuple[Any, Any]] = {}  # what `start` was given -> the jitted function, and as it was compiled


def start(
    kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any], options: Mapping[str, int], device: torch.device
) -> Callable[..., Any] | None:
    """Launches a kernel as `kernel[grid](**values, **options, **COMPILER)` does.

    Args:
        kernel: the jitted function.
        grid: programs along one to three axes.
        values: all arguments in their order, each of one type in all calls: tensors, numbers.
        options: of the compiler.
        device: of the tensors.

    Returns:
        what launches the compiled kernel, given all arguments in order, addresses for tensors; None in the interpreter.
    """
    key, arguments = [id(kernel), device, *options.items()], []
    for value in values.values():
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            key += (value.dtype, address % 16 == 0)  # all that code depends on
            arguments.append(address)
        else:
            key.append(value)
            arguments.append(value)
    like = tuple(key)
    known = _compiled.get(like)
    if known is not None:
        run = _on(known[1], grid)
        run(*arguments)
        return run
    made = kernel[grid](**values, **options, **COMPILER)
    if made is None:  # as Triton's interpreter returns
        return None
    keep(_compiled, like, (kernel, made), _MOST_COMPILED)
    return _on(made, grid)


def _on(compiled: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches a compiled kernel, given all its arguments in order."""
    x, y, z, *_ = (*grid, 1, 1)
    return compiled[x, y, z]


def keep(known: dict[tuple, Any], key: tuple, value: Any, most: int) -> None:
    """Remembers a value, and forgets the oldest ones beyond so many."""
    while len(known) >= most and key not in known:
        try:
            known.pop(next(iter(known)), None)
        except (RuntimeError, StopIteration):  # another thread has been here
            continue
    known[key] = value


@dataclass
class Launch:
    """One kernel launch: everything that compilation and the launcher need to know.

    Attributes:
        kernel: the jitted function.
        grid: programs along one to three axes.
        arguments: what is known when it runs, by name.
        constants: what is known when it is compiled, by name.
        options: of the compiler, `num_warps` for one; besides those of `COMPILER`.
        wholes: for arguments that are a part of another tensor which was given, by name, that one.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]
    wholes: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> Any:
        """Launches the kernel. Returns it as it was compiled; from Triton's interpreter None."""
        return self.kernel[self.grid](**self.arguments, **self.constants, **self.options, **COMPILER)


@dataclass(frozen=True)
class _Known:
    """What was launched.

    Attributes:
        made: shapes, strides and dtypes of what was made and is returned.
        scratch: bytes of memory for all else that was made.
        offsets: where in there each of it begins.
        launches: of each kernel what launches it, all arguments in order; which of them are addresses: of the tensor of
            a number, so many bytes behind its start; and which of them vary, by name.
    """

    made: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    scratch: int
    offsets: list[int]
    launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int, int]], list[tuple[int, str]]]]


def geometry(tensors: Tensors) -> tuple:
    """All of some tensors on one device that may decide about a launch, alignment to 16 bytes included."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)


class Repeated:
    """A function that chooses launches, called once for each geometry.

    Args:
        choose: (tensors, then numbers) -> the tensors that it made, contiguous and each with memory of its own, and the
            launches that fill them. Every tensor that a launch takes is one of the given or the made ones, or a part of
            one. But for arguments that vary they must depend on nothing but numbers and what `key_of` says.
        key_of: tensors -> what of them decides about launches, hashable.
        most: how many choices are remembered; the oldest is forgotten.
        returned: how many of the tensors that were made a call returns, the first ones; all when not given. The others
            get one piece of memory together.
    """

    def __init__(
        self,
        choose: Callable[..., tuple[list[torch.Tensor], list[Launch]]],
        key_of: Callable[[Tensors], Hashable] = geometry,
        most: int = 256,
        returned: int | None = None,
    ):
        self.choose, self.key_of, self.most, self.returned = choose, key_of, most, returned
        self._known: dict[tuple, _Known] = {}

    def __call__(
        self, tensors: Tensors, *numbers: Any, varying: Mapping[str, int] = MappingProxyType({})
    ) -> list[torch.Tensor]:
        """Launches what was or is chosen.

        Args:
            tensors: on one device, the first one not None; None for absent ones.
            numbers: hashable.
            varying: arguments of launches, by name, by which nothing is chosen. They go to all that have such an
                argument.

        Returns:
            the tensors that were made, as many as are to be returned.
        """
        assert tensors[0] is not None
        device = tensors[0].device
        key = (device, numbers, self.key_of(tensors))
        known = self._known.get(key)
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            if known is None:
                return self._first(key, varying, tensors)
            made = [torch.empty_strided(*size, dtype=dtype, device=device) for *size, dtype in known.made]
            addresses = [0 if t is None else t.data_ptr() for t in (*tensors, *made)]
            if known.offsets:
                scratch = torch.empty(known.scratch, dtype=torch.uint8, device=device)
                base = scratch.data_ptr()
                addresses += [base + offset for offset in known.offsets]
            for run, values, places, names in known.launches:
                arguments = values.copy()
                for i, number, offset in places:
                    arguments[i] = addresses[number] + offset
                for i, name in names:
                    arguments[i] = varying[name]
                run(*arguments)
        return made

    def _first(self, key: tuple, varying: Mapping[str, int], tensors: Tensors) -> list[torch.Tensor]:
        """Chooses, launches and remembers; the interpreter has no compiled kernels to remember."""
        given = [None if t is None else t.detach() for t in tensors]  # a tensor that is given twice is two
        made, launches = self.choose(*given, *key[1])
        for launch in launches:
            launch.arguments |= {name: number for name, number in varying.items() if name in launch.arguments}
        kernels = [launch.run() for launch in launches]
        if all(kernel is not None for kernel in kernels):
            steps = []
            for kernel, launch in zip(kernels, launches, strict=True):
                named = launch.constants | launch.arguments
                values = [named.get(name) for name in launch.kernel.arg_names]
                places, names = [], []
                for i, name in enumerate(launch.kernel.arg_names):
                    value = values[i]
                    if isinstance(value, torch.Tensor):
                        places.append((i, *_place(value, launch.wholes.get(name), given, made)))
                        values[i] = None
                    elif name in varying:
                        names.append((i, name))
                steps.append((_on(kernel, launch.grid), values, places, names))
            returned = [(t.shape, t.stride(), t.dtype) for t in made[: self.returned]]
            offsets, scratch = [], 0
            for tensor in made[len(returned) :]:
                offsets.append(scratch)
                scratch += round_up(tensor.nbytes, _ALIGNMENT)
            keep(self._known, key, _Known(returned, scratch, offsets, steps), self.most)
        return made[: self.returned]


def _place(
    argument: torch.Tensor, whole: torch.Tensor | None, given: Tensors, made: list[torch.Tensor]
) -> tuple[int, int]:
    """Of which tensor an argument is a part, or all, and how many bytes behind its start."""
    whole = argument if whole is None else whole
    memory = argument.untyped_storage().data_ptr()
    for number, tensor in enumerate([*given, *made]):
        has_memory = number >= len(given)  # of its own
        if tensor is not None and (tensor is whole or (has_memory and tensor.untyped_storage().data_ptr() == memory)):
            return number, argument.data_ptr() - tensor.data_ptr()
    raise AssertionError("a launch takes a tensor that was neither given nor made")


__all__ = ["COMPILER", "Launch", "Repeated", "geometry", "keep", "start"]
