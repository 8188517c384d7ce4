"""The simulation of how programs end, and the choice of their keys beside it."""

import importlib

import pytest
from helpers import REPOSITORY
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

from dcformer.kernels.balance import keys_of_a_program

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(REPOSITORY / "tools"))
    rounds = importlib.import_module("kernel_rounds")


def test_programs_start_in_their_order():
    assert rounds.time([3, 1, 1, 5], 2, 0) == 7  # 3 beside 1, 1, 5
    assert rounds.time([5, 3, 1, 1], 2, 0) == 5
    assert rounds.time([3, 0, 0, 2], 2, 10) == 13  # those without keys take nothing
    assert rounds.time([4] * 6, 4, 1) == 10  # two rounds
    assert rounds.programs_of_composition((3, 10), 1, 4) == [3, 4, 0, 4, 0, 2]


def test_what_was_before():
    """On the first GPU 272 programs of 128 keys, but for half of those at the diagonal, on room for 264."""
    tiles = rounds.spans(2048, None, 64, 16)
    programs = [n for n in rounds.programs_of_composition(tiles, 1, 128) if n]
    assert len(programs) == 272 and programs.count(64) == 16
    before, now = rounds.composition(2048, 1, None)
    assert before == pytest.approx(rounds.time(programs, 264, 6) * 264 / sum(programs))
    assert now < 0.7 * before


def over_the_best(tokens, window, copies, resident):
    """The time of composition with the keys of a program that are chosen, over that with the best number of them."""
    tiles = rounds.spans(tokens, window, 64, 16)
    chosen, *others = (
        rounds.time(rounds.programs_of_composition(tiles, copies, n), resident, 6)
        for n in (keys_of_a_program(tiles, copies, resident, 6, 16), *range(16, 513, 16))
    )
    return chosen / min(others)


WINDOWS, RESIDENT = (None, 64, 128, 256, 512, 1024), (80, 132, 216, 264, 396)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 4096),
    window=st.sampled_from(WINDOWS),
    copies=st.integers(1, 8),
    resident=st.sampled_from(RESIDENT),
)
@example(tokens=129, window=None, copies=4, resident=80)  # 1.31
def test_few_programs_end_together(tokens, window, copies, resident):
    """The choice is made without the simulation, as if all programs took the mean: what that costs is bounded.

    Of 24,000 random cases 8 had over 1.25, and one 1.36, the most.
    """
    assert over_the_best(tokens, window, copies, resident) <= 1.5


def test_programs_mostly_end_together():
    found = [
        over_the_best(tokens, window, copies, resident)
        for tokens in (129, 700, 1024, 2048, 3001)
        for window in WINDOWS
        for copies in (1, 8)
        for resident in RESIDENT
    ]
    assert sorted(found)[int(0.95 * len(found))] < 1.15 and sum(found) / len(found) < 1.05


def test_the_page_has_what_is_printed(capsys):
    rounds.main([])
    page = (REPOSITORY / "docs" / "gpu_history.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page
