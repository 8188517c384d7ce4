"""Wrong accesses are found where there are some, and nowhere else; the kernels' own tests say that these have none."""

import pytest
import torch
import triton
import triton.language as tl
from accesses import Accesses
from kernel_device import INTERPRETED

if not INTERPRETED:
    pytest.skip("only Triton's interpreter is watched", allow_module_level=True)


@triton.jit
def neighbor_kernel(p_in, p_out, behind, B: tl.constexpr):
    """Each program adds a block that lies so many blocks behind its own."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(p_out + at, tl.load(p_in + at + behind * B) + 1)


@triton.jit
def mark_kernel(p_mark, add, B: tl.constexpr):
    """All programs write the same place, the same number where `add` is 0."""
    tl.store(p_mark + tl.arange(0, B), tl.full([B], 1, tl.int32) + add * tl.program_id(0))


@triton.jit
def turn_kernel(p_map, p_out, BARRIER: tl.constexpr, B: tl.constexpr):
    """A program writes a block, and reads it the other way round."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(p_map + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(p_out + at, tl.load(p_map + tl.program_id(0) * B + B - 1 - tl.arange(0, B)))


@triton.jit
def turn_in_place_kernel(p_map, BARRIER: tl.constexpr, B: tl.constexpr):
    """A program turns a block round."""
    at = tl.arange(0, B)
    x = tl.load(p_map + B - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(p_map + at, x)


def numbers(n=32):
    return torch.arange(n, dtype=torch.int32)


@pytest.fixture
def accesses(monkeypatch):
    """In place of that which lets no test have a wrong one."""
    return Accesses(monkeypatch)


def found(accesses):
    """What was found, without the lines."""
    return {text.split(": ")[1] for text in accesses.wrong}


def test_programs_that_share_nothing_have_no_race(accesses):
    neighbor_kernel[(4,)](numbers(), numbers(), 0, B=8)
    neighbor_kernel[(3,)](numbers(), numbers(), 1, B=8)
    x = numbers()
    neighbor_kernel[(4,)](x, x, 0, B=8)  # in place
    assert accesses.kernels == {"neighbor_kernel"} and not accesses.wrong
    assert torch.equal(x, numbers() + 1)


def test_launches_wait_for_each_other(accesses):
    x, y = numbers(), numbers()
    for source, target, behind in ((x, y, 1), (y, x, 0), (x, y, 1)):
        neighbor_kernel[(2,)](source, target, behind, B=8)
    assert not accesses.wrong


@pytest.mark.parametrize(("first", "behind"), [(0, -1), (24, 1)])
def test_what_lies_outside_of_all_tensors_is_not_read(accesses, first, behind):
    """Though memory is there, of the tensor of which that one is a part."""
    x, out = numbers(40), numbers()
    neighbor_kernel[(1,)](x[8:][first : first + 8], out, behind, B=8)
    assert found(accesses) == {"reads outside of all tensors"}
    assert torch.equal(out[:8], torch.ones(8, dtype=torch.int32))


def test_what_lies_outside_of_all_tensors_is_not_written(accesses):
    x, out = numbers(), numbers(16)
    neighbor_kernel[(2,)](x, out[:12], 0, B=8)
    assert found(accesses) == {"writes outside of all tensors"}
    assert torch.equal(out[:8], x[:8] + 1) and torch.equal(out[8:], numbers(16)[8:])


def test_tensors_may_be_views_and_parts_of_each_other(accesses):
    x = torch.arange(64, dtype=torch.int32).view(8, 8)
    neighbor_kernel[(4,)](x.T[1:3], numbers(), 0, B=8)  # 16 numbers, from the second one to that before the last five
    mark_kernel[(1,)](x[1:3], 0, B=32)  # 16 of 64
    assert found(accesses) == {"writes outside of all tensors"}


@pytest.mark.parametrize(
    ("first", "behind", "what"),
    [(8, 0, "reads what another program writes"), (0, 1, "writes what another program reads")],
)
def test_programs_that_read_what_others_write(accesses, first, behind, what):
    x = numbers()
    neighbor_kernel[(2,)](x, x[first:], behind, B=8)
    assert found(accesses) == {what}
    assert all("test_accesses.py, line " in text for text in accesses.wrong)


def test_what_several_programs_read_before_one_writes_it(accesses):
    """The last one that read is not the only one."""
    x = numbers()
    neighbor_kernel[(3,)](x, x[8:], 0, B=8)
    assert "reads what another program writes" in found(accesses)


@pytest.mark.parametrize("add", [0, 1])
def test_programs_may_write_the_same_number(accesses, add):
    mark_kernel[(3,)](numbers(4) * 0, add, B=4)
    assert found(accesses) == ({"writes what another program writes"} if add else set())


@pytest.mark.parametrize("barrier", [True, False])
def test_a_program_reads_what_it_wrote_behind_a_barrier(accesses, barrier):
    turn_kernel[(2,)](numbers(), numbers(), BARRIER=barrier, B=16)
    expected = set() if barrier else {"reads what it has written, without a barrier in between"}
    assert found(accesses) == expected


@pytest.mark.parametrize("barrier", [True, False])
def test_a_program_writes_what_other_threads_have_read_behind_a_barrier(accesses, barrier):
    x = numbers(16)
    turn_in_place_kernel[(1,)](x, BARRIER=barrier, B=16)
    expected = set() if barrier else {"writes what it has read, without a barrier in between"}
    assert found(accesses) == expected and torch.equal(x, numbers(16).flip(0))
