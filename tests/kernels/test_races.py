"""Races are found where there are some, and nowhere else; the kernels' own tests say that these have none."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_device import INTERPRETED
from races import Races

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
def races(monkeypatch):
    """In place of that which lets no test have any."""
    return Races(monkeypatch)


def found(races):
    """What was found, without the lines."""
    return {text.split(": ")[1] for text in races.found}


def test_programs_that_share_nothing_have_no_race(races):
    neighbor_kernel[(4,)](numbers(), numbers(), 0, B=8)
    neighbor_kernel[(3,)](numbers(), numbers(), 1, B=8)
    x = numbers()
    neighbor_kernel[(4,)](x, x, 0, B=8)  # in place
    assert races.kernels == {"neighbor_kernel"} and not races.found
    assert torch.equal(x, numbers() + 1)


def test_launches_wait_for_each_other(races):
    x, y = numbers(), numbers()
    for source, target, behind in ((x, y, 1), (y, x, -1), (x, y, 1)):
        neighbor_kernel[(2,)](source[8:], target, behind, B=8)
    assert not races.found


@pytest.mark.parametrize(("behind", "what"), [(-1, "reads what another"), (1, "writes what another program reads")])
def test_programs_that_read_what_others_write(races, behind, what):
    x = numbers()
    neighbor_kernel[(2,)](x[8:], x[8:], behind, B=8)
    assert len(found(races)) == 1 and what in found(races).pop()
    assert all("test_races.py, line " in text for text in races.found)


def test_what_several_programs_read_before_one_writes_it(races):
    """The last one that read is not the only one."""
    x = numbers()
    neighbor_kernel[(3,)](x, x[8:], 0, B=8)
    assert "reads what another program writes" in found(races)


@pytest.mark.parametrize("add", [0, 1])
def test_programs_may_write_the_same_number(races, add):
    mark_kernel[(3,)](numbers(4) * 0, add, B=4)
    assert found(races) == ({"writes what another program writes"} if add else set())


@pytest.mark.parametrize("barrier", [True, False])
def test_a_program_reads_what_it_wrote_behind_a_barrier(races, barrier):
    turn_kernel[(2,)](numbers(), numbers(), BARRIER=barrier, B=16)
    expected = set() if barrier else {"reads what it has written, without a barrier in between"}
    assert found(races) == expected


@pytest.mark.parametrize("barrier", [True, False])
def test_a_program_writes_what_other_threads_have_read_behind_a_barrier(races, barrier):
    x = numbers(16)
    turn_in_place_kernel[(1,)](x, BARRIER=barrier, B=16)
    expected = set() if barrier else {"writes what it has read, without a barrier in between"}
    assert found(races) == expected and torch.equal(x, numbers(16).flip(0))
