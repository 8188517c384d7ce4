"""The static window layer holds and shows exactly what the library's own does."""

import pytest
import torch
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from dcformer.cache_dcformer import StaticWindowLayer, use_static_window_layers


def _states(start, count):
    """Keys and values [1, 2, count, 3] that tell their position."""
    positions = torch.arange(start, start + count, dtype=torch.float32).view(1, 1, count, 1)
    return positions.expand(1, 2, count, 3) + 1, -positions.expand(1, 2, count, 3) - 1


@settings(deadline=None, max_examples=60)
@given(
    window=st.integers(2, 7),
    capacity=st.integers(2, 20),
    pieces=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_same_as_the_librarys_layer(window, capacity, pieces):
    own = StaticWindowLayer(max_cache_len=capacity, sliding_window=window)
    library = StaticSlidingWindowLayer(max_cache_len=capacity, sliding_window=window)
    seen = 0
    for count in pieces:
        assert tuple(int(n) for n in own.get_mask_sizes(count)) == library.get_mask_sizes(count)
        ours = own.update(*_states(seen, count))
        theirs = library.update(*_states(seen, count))
        for mine, its in zip(ours, theirs, strict=True):
            assert torch.equal(mine, its)
        seen += count
        assert int(own.get_seq_length()) == library.get_seq_length() == seen
    own.reset()
    assert int(own.get_seq_length()) == 0 and not own.keys.any()
    assert torch.equal(own.update(*_states(5, 1))[0][0, 0, 0], torch.full((3,), 6.0))


def test_decoding_keeps_its_memory_in_place():
    layer = StaticWindowLayer(max_cache_len=9, sliding_window=4)
    layer.update(*_states(0, 3))
    addresses = layer.keys.data_ptr(), layer.values.data_ptr(), layer.cumulative_length.data_ptr()
    for step in range(3, 9):
        layer.update(*_states(step, 1))
    assert addresses == (layer.keys.data_ptr(), layer.values.data_ptr(), layer.cumulative_length.data_ptr())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [20, 5])  # longer and shorter than the window
def test_only_sliding_layers_are_replaced(ahead, capacity):
    config = tiny_config()
    length = min(capacity, config.sliding_window)
    cache = StaticCache(config=config, max_cache_len=capacity)
    if ahead:
        cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    use_static_window_layers(cache, config.sliding_window)
    assert [type(layer) for layer in cache.layers] == [StaticWindowLayer, StaticLayer]
    assert cache.layers[0].max_cache_len == length
    if ahead:
        assert cache.layers[0].keys.shape == (2, 2, length, 16)
