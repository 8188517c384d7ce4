"""Launches chosen once and repeated: with kernels that only write down what they are given."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")  # which a GPU machine need not have
from hypothesis import given
from hypothesis import strategies as st

from dcformer.kernels import repeated
from dcformer.kernels.repeated import Launch, Repeated, geometry, start


class Compiled:
    """What a launch returns; called with all arguments in order, constants included."""

    def __init__(self, log: list):
        self.log = log

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.log.append((grid, arguments))


class Kernel:
    """Takes arguments by name, as jitted functions do; interpreted, it returns nothing."""

    arg_names = ("p_x", "p_y", "p_behind", "p_out", "p_part", "stride", "scale", "WIDTH")

    def __init__(self, is_interpreted: bool = False):
        self.log: list = []
        self.compiled = None if is_interpreted else Compiled(self.log)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(**arguments: Any) -> Compiled | None:
            assert arguments.pop("num_warps") == 4
            self.log.append(((*grid, 1, 1)[:3], tuple(arguments[name] for name in self.arg_names)))
            return self.compiled

        return call


def make(kernel: Kernel) -> tuple[Repeated, list]:
    chosen = []

    def choose(x, y, scale):
        chosen.append(scale)
        out, rest = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(3, 8, device=x.device)
        arguments = {"p_x": x, "p_y": y, "p_out": out, "p_part": rest[:, 2:5], "stride": x.stride(0), "scale": scale}
        arguments["p_behind"] = None if y is None else y[:, 1:]
        wholes = {} if y is None else {"p_behind": y}
        constants, options = {"WIDTH": x.shape[1]}, {"num_warps": 4}
        return [out, rest], [Launch(kernel, (x.shape[0],), arguments, constants, options, wholes)]

    return Repeated(choose), chosen


def look(argument: Any) -> Any:
    """What a compiled kernel sees of an argument."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@st.composite
def calls(draw) -> Iterator[tuple]:
    shape = draw(st.sampled_from([(2, 3), (3, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))

    def tensor():
        offset = draw(st.sampled_from([0, 1, 16]))
        memory = torch.zeros(offset + shape[0] * shape[1] * 2, dtype=dtype)[offset:]
        rows = memory.view(2, *shape)[0]
        return rows.T.contiguous().T if draw(st.booleans()) else rows

    x = tensor()
    y = draw(st.sampled_from(["none", "same", "other"]))
    return x, {"none": None, "same": x, "other": tensor()}[y], draw(st.sampled_from([0.5, 2.0]))


@given(st.lists(calls(), min_size=1, max_size=12))
def test_a_repeated_launch_is_the_chosen_one(sequence):
    """Whatever came before: grid, numbers, given tensors and those that were made, parts of both included."""
    kernel = Kernel()
    run, chosen = make(kernel)
    for x, y, scale in sequence:
        out, rest = run([x, y], scale)
        grid, arguments = kernel.log[-1]
        assert (out.shape, out.dtype, rest.shape) == (x.shape, x.dtype, (3, 8))
        assert grid == (x.shape[0], 1, 1)
        expected = (x, y, None if y is None else y[:, 1:], out, rest[:, 2:5], x.stride(0), scale, x.shape[1])
        assert [look(argument) for argument in arguments] == [look(argument) for argument in expected]
    assert len(kernel.log) == len(sequence)
    assert len(chosen) == len({(geometry([x, y]), scale) for x, y, scale in sequence})


def test_what_is_made_is_new_each_time():
    run, _ = make(Kernel())
    x = torch.zeros(2, 3)
    results = [run([x, None], 1.0)[0] for _ in range(3)]
    assert len({result.data_ptr() for result in results}) == 3


def test_what_is_not_returned_may_be_empty():
    kernel = Kernel()

    def choose(x):
        made = [torch.empty(7), torch.empty(0)]
        arguments = dict.fromkeys(Kernel.arg_names[:-1]) | {"p_out": made[0], "p_part": made[1]}
        return made, [Launch(kernel, (1,), arguments, {"WIDTH": 1}, {"num_warps": 4})]

    run = Repeated(choose, returned=1)
    for _ in range(3):
        (found,) = run([torch.zeros(4)])
    assert kernel.log[-1][1][3] == found.data_ptr()


@pytest.mark.parametrize("returned", [0, 1, 3])
def test_what_is_not_returned_shares_memory(returned):
    """New memory in each call, in which tensors do not overlap and are aligned."""
    kernel, sizes = Kernel(), (7, 500, 3)

    def choose(x):
        made = [torch.empty(size) for size in sizes]
        arguments = dict.fromkeys(Kernel.arg_names[:-1])
        arguments |= {"p_x": x, "p_out": made[0], "p_part": made[1][5:], "p_behind": made[2]}
        return made, [Launch(kernel, (1,), arguments, {"WIDTH": 1}, {"num_warps": 4})]

    run, kept = Repeated(choose, returned=returned), []
    for number in range(3):
        found = run([torch.zeros(4)])
        kept.append(found)
        assert [x.shape for x in found] == [(size,) for size in sizes[:returned]]
        if not number:
            continue  # the tensors themselves, not addresses
        _, (_, _, last, first, middle, *_) = kernel.log[-1]
        starts = dict(enumerate((first, middle - 20, last)))  # 5 numbers of 4 bytes in front
        assert [starts[i] for i in range(returned)] == [x.data_ptr() for x in found]
        spans = sorted((start, start + 4 * sizes[i]) for i, start in starts.items())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        alone = [starts[i] for i in range(returned, len(sizes))]
        assert all((start - alone[0]) % 256 == 0 for start in alone)
    assert not returned or len({found[0].data_ptr() for found in kept}) == 3


def test_the_interpreter_is_always_asked():
    kernel = Kernel(is_interpreted=True)
    run, chosen = make(kernel)
    for _ in range(3):
        run([torch.zeros(2, 3), None], 1.0)
    assert len(chosen) == len(kernel.log) == 3


def test_the_oldest_choice_is_forgotten():
    kernel = Kernel()
    run, chosen = make(kernel)
    run.most = 2
    for scale in (1.0, 2.0, 3.0, 2.0, 3.0, 1.0):
        run([torch.zeros(2, 3), None], scale)
    assert chosen == [1.0, 2.0, 3.0, 1.0] and len(run._known) == 2


def test_a_tensor_from_elsewhere_is_an_error():
    elsewhere, kernel = torch.zeros(3), Kernel()
    arguments = dict.fromkeys(Kernel.arg_names[:-1]) | {"p_x": elsewhere}
    run = Repeated(lambda x: ([], [Launch(kernel, (1,), arguments, {"WIDTH": 1}, {"num_warps": 4})]))
    with pytest.raises(AssertionError, match="neither given nor made"):
        run([torch.zeros(2)])


def test_alignment_is_part_of_a_geometry():
    """Triton compiles wide loads where an address is a multiple of 16 bytes."""
    run, chosen = make(Kernel())
    memory = torch.zeros(40)
    start = -memory.data_ptr() % 16 // 4
    for offset in (0, 4, 1, 8):
        run([memory[start + offset :][:6].view(2, 3), None], 1.0)
    assert len(chosen) == 2


def test_what_varies_is_given_anew_and_chooses_nothing():
    kernel, chosen = Kernel(), []

    def choose(x):
        chosen.append(len(x))
        arguments = {name: None for name in Kernel.arg_names[:-1]} | {"p_x": x, "stride": -1}
        return [], [Launch(kernel, (1,), arguments, {"WIDTH": 1}, {"num_warps": 4})]

    run = Repeated(choose, key_of=lambda tensors: tensors[0].dtype)
    memory = torch.zeros(9)
    for length in (5, 7, 2):
        run([memory[:length]], varying={"stride": length, "of_another_launch": 1})
        assert kernel.log[-1][1][Kernel.arg_names.index("stride")] == length
    assert chosen == [5]


def test_the_device_is_part_of_a_geometry():
    run, chosen = make(Kernel())
    memory = torch.zeros(40)
    start = -memory.data_ptr() % 16 // 4
    for x in (memory[start : start + 6].view(2, 3), torch.zeros(2, 3, device="meta")) * 2:
        assert {made.device for made in run([x, None], 1.0)} == {x.device}
    assert len(chosen) == 2


class Jitted:
    """Takes all arguments by name; each launch that Triton looks at has a kernel of its own, which notes them."""

    def __init__(self, is_interpreted: bool = False):
        self.log: list = []
        self.made, self.is_interpreted = 0, is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(num_warps: int, enable_fp_fusion: bool, **arguments: Any) -> Any:
            self.made += 1
            number, log = self.made, self.log

            class Made:
                def __getitem__(self, grid: tuple[int, int, int]) -> Any:
                    return lambda *values: log.append((number, grid, values))

            Made()[(*grid, 1, 1)[:3]](*map(look, arguments.values()))
            return None if self.is_interpreted else Made()

        return call


@given(st.lists(calls(), min_size=1, max_size=12))
def test_a_started_kernel_is_that_of_like_arguments(sequence):
    """Grid and arguments are those given; the kernel is another one if a dtype, an alignment or a number is."""
    kernel, of_likes = Jitted(), {}
    for x, y, scale in sequence:
        rest = x if y is None else y
        start(kernel, (len(x), 7), {"p_x": x, "p_y": rest, "scale": scale}, {"num_warps": 4}, x.device)
        number, grid, arguments = kernel.log[-1]
        assert grid == (len(x), 7, 1) and arguments == (x.data_ptr(), rest.data_ptr(), scale)
        likes = (x.dtype, x.data_ptr() % 16 == 0, rest.dtype, rest.data_ptr() % 16 == 0, scale)
        assert of_likes.setdefault(likes, number) == number
    assert len(set(of_likes.values())) == len(of_likes) == kernel.made


def test_every_kernel_may_fuse_products_and_sums():
    """Whatever Triton does by itself, which is to change."""
    told = []

    class Told:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: told.append(given)

    start(Told(), (1,), {"n": 1}, {"num_warps": 4}, torch.device("cpu"))
    Launch(Told(), (1,), {"n": 1}, {}, {"num_warps": 4}).run()
    assert told == [{"n": 1, "num_warps": 4, "enable_fp_fusion": True}] * 2


def test_a_started_kernel_has_its_options_and_its_device():
    kernel, x = Jitted(), torch.zeros(3)
    for options, device in (({"num_warps": 4}, "cpu"), ({"num_warps": 8}, "cpu"), ({"num_warps": 4}, "cuda:1")):
        for _ in range(2):
            start(kernel, (1,), {"p_x": x}, options, torch.device(device))
    assert [number for number, *_ in kernel.log] == [1, 1, 2, 2, 3, 3]
    other = Jitted()
    start(other, (1,), {"p_x": x}, {"num_warps": 4}, x.device)
    assert other.made == 1


def test_the_interpreter_is_always_started():
    kernel = Jitted(is_interpreted=True)
    for _ in range(3):
        start(kernel, (1,), {"p_x": torch.zeros(3)}, {"num_warps": 4}, torch.device("cpu"))
    assert kernel.made == 3


def test_the_oldest_compiled_kernel_is_forgotten(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST_COMPILED", 2)
    monkeypatch.setattr(repeated, "_compiled", {})
    kernel = Jitted()
    for scale in (1.0, 2.0, 3.0, 2.0, 3.0, 1.0):
        start(kernel, (1,), {"scale": scale}, {"num_warps": 4}, torch.device("cpu"))
    assert kernel.made == 4 and len(repeated._compiled) == 2


def test_another_thread_may_forget_in_between():
    class Busy(dict):
        """A table that another thread changes when its oldest is looked for, once."""

        def __iter__(self):
            if self.pop("first", None):
                raise RuntimeError("dictionary changed size during iteration")
            return super().__iter__()

    known = Busy(first=1, second=2)
    repeated.keep(known, "third", 3, 1)
    assert known == {"third": 3}
