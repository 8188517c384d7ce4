"""Which keys each query sees, as two numbers: bounds from masks and arguments, made once."""

import dataclasses

import pytest
import torch
from attention_cases import Case, padded_mask
from kernel_device import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from dcformer.kernels import composed_attention, ops
from dcformer.kernels.ops import triton_attention

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def made_bounds(monkeypatch):
    """What bounds are made of, each time that they are."""
    made, real = [], ops._make_bounds
    monkeypatch.setattr(ops, "_known_bounds", {})
    monkeypatch.setattr(ops, "_make_bounds", lambda *args: made.append(args) or real(*args))
    return made


def test_bounds_that_follow_from_numbers_are_made_once(made_bounds):
    """The first time in inference mode, whose tensors no gradients may need; not where tensors are fake."""
    query = torch.randn(1, 2, 20, 16, device=DEVICE)
    with torch.inference_mode():
        expected = composed_attention(query, query, query)
    leaf = query.clone().requires_grad_()
    found = composed_attention(leaf, leaf, leaf)
    found.sum().backward()
    assert len(made_bounds) == 1 and torch.equal(found, expected) and leaf.grad.isfinite().all()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(query)
        assert type(composed_attention(fake, fake, fake)) is type(fake)
    assert len(made_bounds) == 2 and all(type(bounds) is torch.Tensor for bounds in ops._known_bounds.values())
    others = (
        {"causal": False},
        {"causal_offset": 2},
        {"sliding_window": 3},
        {"sliding_window": 3, "causal_offset": -2},
    )
    for options in others * 2:
        composed_attention(query, query, query, **options)
    composed_attention(query[:, :, 1:], query, query)
    assert len(made_bounds) == 7
    start = torch.tensor([2], device=DEVICE)
    for _ in range(2):  # what tensors hold may change
        composed_attention(query, query, query, key_start=start)
        start += 3
    assert len(made_bounds) == 9


def test_what_a_mask_says_serves_later_calls_with_gradients(made_bounds):
    query, mask, module = torch.randn(1, 2, 20, 16, device=DEVICE), padded_mask(), torch.nn.Module()
    with torch.inference_mode():
        expected = triton_attention(module, query, query, query, mask, 0.25)[0]
    leaf = query.clone().requires_grad_()
    found = triton_attention(module, leaf, leaf, leaf, mask, 0.25)[0]
    found.sum().backward()
    assert len(made_bounds) == 1 and torch.equal(found, expected) and leaf.grad.isfinite().all()
    narrow = dataclasses.replace(mask, window=3, _tensors=None)
    windowed = triton_attention(module, query, query, query, narrow, 0.25)[0]
    assert len(made_bounds) == 2 and not torch.equal(windowed, expected)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=str)
def test_sizes_that_only_tensors_know(options):
    """As after `nonzero`: nothing may depend on their values."""
    query, key = torch.randn(1, 2, 20, 16, device=DEVICE), torch.randn(1, 2, 30, 16, device=DEVICE)
    for axis_of in (query, key):
        torch._dynamo.decorators.mark_unbacked(axis_of, 2)
    compiled = torch.compile(lambda q, k: composed_attention(q, k, k, **options), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(query, key), composed_attention(query, key, key, **options))


def test_few_bounds_are_remembered(made_bounds, monkeypatch):
    monkeypatch.setattr(ops, "_MOST_BOUNDS", 2)
    query = torch.randn(1, 2, 5, 16, device=DEVICE)
    for length in (1, 2, 3, 3, 2, 1, 1):
        composed_attention(query[:, :, :length], query, query)
    assert len(made_bounds) == 4 and len(ops._known_bounds) == 2


def test_bounds_far_beyond_the_keys():
    """Of any integer dtype: they are those of the last key, and of none before the first."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 8, device=DEVICE) for n in (20, 24, 24))
    far = 2**40
    whole, causal = composed_attention(query, key, value, causal=False), composed_attention(query, key, value)
    first = torch.arange(5, 25, device=DEVICE)[None]
    later = {"causal": False, "visible": (first, torch.full_like(first, 24))}

    def rows(number, *shape):
        return torch.full(shape, number, device=DEVICE)

    for options, expected in (
        ({"sliding_window": far}, causal),
        ({"sliding_window": 2**31}, causal),
        ({"causal_offset": 2**31 - 1}, whole),
        ({"causal_offset": 2**31, "sliding_window": 2**31 + 50}, whole),
        ({"causal_offset": far, "sliding_window": far - 4}, composed_attention(query, key, value, **later)),
        ({"causal_offset": far}, whole),
        ({"causal_offset": -far}, torch.zeros_like(whole)),
        ({"causal": False, "visible": (rows(-far, 1, 20), rows(far, 1, 20))}, whole),
        ({"causal": False, "visible": (rows(far, 1, 20), rows(far, 1, 20))}, torch.zeros_like(whole)),
        ({"causal": False, "key_start": rows(-far, 2), "key_end": rows(far, 2)}, whole),
    ):
        assert torch.equal(composed_attention(query, key, value, **options), expected), options
    query = key = torch.randn(1, 2, 24, 8, device=DEVICE)
    packed = composed_attention(query, key, value[:1], cu_seqlens=torch.tensor([0, 24], device=DEVICE))
    far_packed = composed_attention(query, key, value[:1], cu_seqlens=torch.tensor([0, far], device=DEVICE))
    assert torch.equal(packed, far_packed)


def test_tokens_outside_all_documents_see_nothing():
    case = Case(heads=2)
    tensors = [case.tensors()[name].to(DEVICE) for name in ("query", "key", "value")]
    found = composed_attention(*tensors, cu_seqlens=torch.tensor([3, 9, 17], device=DEVICE))
    assert found[:, :, :3].eq(0).all() and found[:, :, 17:].eq(0).all()
    inside = [t[:, :, 3:9] for t in tensors]
    torch.testing.assert_close(found[:, :, 3:9], composed_attention(*inside))


def test_visible_intervals():
    case = Case(heads=2, start=(4,), causal=False)
    tensors = [case.tensors()[name].to(DEVICE) for name in ("query", "key", "value")]
    first, last = torch.full((1, 21), 4, device=DEVICE), torch.full((1, 21), 21, device=DEVICE)
    found = composed_attention(*tensors, causal=False, visible=(first, last))
    assert torch.equal(found, composed_attention(*tensors, **case.options()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_bounds_may_be_of_a_dtype_that_does_not_hold_the_number_of_keys(dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 8, device=DEVICE) for n in (4, 300, 300))
    start = torch.tensor([3], device=DEVICE)
    found, expected = (composed_attention(query, key, value, key_start=s) for s in (start.to(dtype), start))
    assert torch.equal(found, expected)
