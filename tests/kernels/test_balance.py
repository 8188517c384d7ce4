"""How many keys a program takes. How well programs then end together: tests/tools/test_kernel_rounds.py."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dcformer.kernels.balance import keys_of_a_program, lengths
from dcformer.kernels.sizes import ceil_div


@settings(max_examples=100, deadline=None)
@given(
    tiles=st.lists(st.integers(0, 9000), max_size=40).map(tuple),
    copies=st.integers(1, 2000),
    resident=st.sampled_from((1, 132, 264)),
    step=st.sampled_from((16, 64)),
)
def test_the_number_of_keys(tiles, copies, resident, step):
    """A multiple of the step, of which few hold all keys, as each part has sums of its own in memory: up to 64, or so
    many that there are four times as many programs as run at once."""
    n_keys = keys_of_a_program(tiles, copies, resident, 6, step)
    assert n_keys >= step and n_keys % step == 0
    parts = ceil_div(max(tiles, default=0), n_keys)
    assert parts <= max(64, 4 * resident / max(1, len(tiles) * copies))


def test_a_few_queries_of_many_keys():
    """As prefilled with a long cache, or in the chunks of a long sequence: most multiprocessors have work."""
    for tiles in (1, 2):
        n_keys = keys_of_a_program((32768,) * tiles, 1, 264, 12, 16)
        assert 250 <= tiles * ceil_div(32768, n_keys) <= 4 * 264


def test_few_programs_and_many():
    one, even = (2048,) * 32, (2048,) * 33
    assert keys_of_a_program(one, 8, 264, 6, 16) >= 2048  # 256 programs run at once, as they are
    assert keys_of_a_program(one, 1, 264, 6, 16) == 256  # the same by parts
    assert keys_of_a_program(even, 8, 264, 6, 16) >= 2048
    assert keys_of_a_program(even, 8, 260, 6, 16) < 512  # four programs of 2,048 keys would run alone
    assert keys_of_a_program((), 1, 264, 6, 16) == keys_of_a_program((0, 0), 1, 264, 6, 16) == 16


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lengths_hold_what_is_seen(data):
    """As many keys as lie between a multiple of the step and the last one that the block sees; never less."""
    tile, step = data.draw(st.sampled_from((1, 4, 16))), data.draw(st.sampled_from((1, 4, 16)))
    block = tile * data.draw(st.integers(1, 3))
    n_t, n_s = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 60))
    low = data.draw(st.integers(-60, 30))
    high = data.draw(st.integers(low, 70))
    found = lengths(n_t, n_s, low, high, tile, block, step)
    assert len(found) == ceil_div(n_t, tile)
    for i, length in enumerate(found):
        first = i * tile // block * block
        queries = range(first, min(n_t, first + block))
        seen = [s for s in range(n_s) if any(t + low <= s <= t + high for t in queries)]
        if seen:
            assert length == seen[-1] + 1 - seen[0] // step * step
