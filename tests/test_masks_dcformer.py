"""Masks by blocks of queries: what they say of causality, windows, padding and documents."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from dcformer.masks_dcformer import (
    QueryBlockMask,
    causal_intervals,
    causal_rows,
    chunked_mask,
    has_values,
    interval_rows,
    intervals,
)


@pytest.mark.parametrize("is_captured", [False, True])
def test_values_are_not_read_while_a_cuda_graph_is_captured(is_captured, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    assert has_values("cuda") is not is_captured and has_values(torch.device("cuda", 1)) is not is_captured
    assert asked == [torch.device("cuda"), torch.device("cuda", 1)]
    assert has_values("cpu") and not has_values("meta")


def test_a_mask_is_plain_only_where_causality_says_everything():
    whole = torch.ones(2, 40, dtype=torch.bool)
    for mask in (chunked_mask(2, 40, 40), chunked_mask(2, 40, 40, attention_mask=whole), chunked_mask(2, 1, 40, 39)):
        assert isinstance(mask, QueryBlockMask) and mask.is_plain and mask.is_causal
    padded = whole.clone()
    padded[0, 0] = False
    needed = [
        {"attention_mask": padded},
        {"allow_is_causal_skip": False},
        {"q_offset": 3},  # the last query is not the last key
        {"q_offset": torch.tensor(0)},  # not known
    ]
    for kwargs in needed:
        mask = chunked_mask(2, 40, 40, **kwargs)
        assert isinstance(mask, QueryBlockMask) and not mask.is_plain
        assert mask.shape == (2, 1, 40, 40)
    few = chunked_mask(2, 3, 40, q_offset=37, attention_mask=padded)
    assert few.shape == (2, 1, 3, 40) and few.dtype == torch.bool


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_the_model_asks_for_is_what_the_mask_knows(window, is_causal):
    config = tiny_config(attn_implementation="dcformer_chunked", sliding_window=3)
    config.is_causal = is_causal
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = make(config, inputs_embeds=torch.zeros(1, 20, 4), attention_mask=None, past_key_values=None)
    assert (mask.window, mask.is_plain, mask.is_causal) == (window, is_causal, is_causal)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    expected = (distance >= 0) | (not is_causal)
    if window is not None:
        expected &= (distance < window) if is_causal else (distance.abs() <= window)
    assert torch.equal(mask.rows(0, 20)[0, 0], expected)


def test_a_copy_field_by_field_is_the_mask():
    """As FSDP makes one of what a layer is called with, where it casts that."""
    mask = chunked_mask(2, 40, 40, local_size=5)
    mask.seen = {"of": mask}
    copied = dataclasses.replace(mask, **{field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)})
    assert copied == mask and torch.equal(copied.rows(0, 40), mask.rows(0, 40)) and copied.seen is None


def test_rows_are_rows_of_the_whole():
    padded = torch.rand(2, 40) < 0.8
    mask = chunked_mask(2, 30, 40, q_offset=10, attention_mask=padded)
    keys = torch.arange(40)
    whole = (keys <= torch.arange(10, 40)[:, None])[None, None] & padded[:, None, None]
    assert torch.equal(mask.rows(0, 30), whole)
    assert torch.equal(mask.rows(7, 19), whole[:, :, 7:19])


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(17, 600),
    past=st.integers(0, 50),
    window=st.none() | st.integers(2, 700),
    pads=st.integers(0, 20),
    hole=st.booleans(),
    documents=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tensors_say_what_the_rows_say(length, past, window, pads, hole, documents, seed):
    """Intervals where these say everything, else the mask; also beyond the rows that are looked at in one go."""
    generator = torch.Generator().manual_seed(seed)
    keys = length + past
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, :pads] = False
    real[1, keys - pads :] = False
    if hole:
        real[0, keys // 2] = False
    functions = [causal_mask_function if window is None else sliding_window_causal_mask_function(window)]
    if documents:
        functions.append(packed_sequence_mask_function((torch.rand(2, keys, generator=generator) < 0.1).cumsum(-1)))
    mask = chunked_mask(2, length, keys, past, 0, and_masks(*functions), real, allow_is_causal_skip=False)
    rows, tensors = mask.rows(0, length), mask.tensors()
    assert tensors is mask.tensors()  # made once
    if len(tensors) == 1:
        assert hole
        assert torch.equal(tensors[0], rows)
    else:
        first, last = tensors
        assert first.dtype == last.dtype == torch.int32
        assert torch.equal(interval_rows(first, last, 0, keys), rows[:, 0])
        part = rows[:, 0, :, 5:11]
        assert torch.equal(interval_rows(first, last, 5, 11), part)


def test_gaps_are_found():
    rows = torch.tensor([[[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], [[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]]).bool()
    first, last, complete = intervals(rows)
    assert not complete
    assert first.tolist() == [[1, 0, 0], [0, 3, 1]]
    assert last.tolist() == [[3, 0, 4], [3, 4, 2]]
    assert intervals(rows[:1])[2]


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("window", [None, 2])
def test_causal_rows_end_at_the_last_key(length, keys, window):
    position = torch.arange(length)[:, None] + keys - length
    expected = (torch.arange(keys) <= position) & (torch.arange(keys) > position - (window or keys + length))
    assert torch.equal(causal_rows(length, keys, window, "cpu")[0], expected)
    first, last = causal_intervals(length, keys, window, "cpu")
    assert torch.equal(interval_rows(first, last, 0, keys)[0], expected)


def test_on_the_meta_device_no_values_are_looked_at():
    mask = chunked_mask(2, 20, 20, attention_mask=torch.ones(2, 20, dtype=torch.bool, device="meta"), device="meta")
    assert not mask.is_plain
    (whole,) = mask.tensors()
    assert whole.shape == (2, 1, 20, 20) and whole.is_meta
