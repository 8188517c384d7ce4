"""What `composed_attention` cannot do: one error that says so, and what to use instead."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_cases import padded_mask, zeros
from kernel_device import DEVICE

from dcformer import ComposeWeights, SideWeights
from dcformer.attention_dcformer import eager_attention
from dcformer.chunked_dcformer import chunked_attention
from dcformer.kernels import composed_attention, composed_decode
from dcformer.kernels.ops import triton_attention

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("length", [4, 20])
def test_transforms_name_eager(length):
    """They would leave out what the kernels contribute to a derivative."""
    query, key, value = (torch.randn(1, 2, n, 16, device=DEVICE) for n in (length, 20, 20))
    module = torch.nn.Module()

    def call(query):
        return triton_attention(module, query, key, value, None, 0.25)[0]

    for transform in (
        lambda: torch.func.jvp(call, (query,), (query,)),
        lambda: torch.func.vmap(call)(query[None]),
        lambda: torch.func.grad(lambda query: call(query).sum())(query),
    ):
        with pytest.raises(NotImplementedError, match=r"dcformer_triton.*torch.func.*attn_implementation='eager'"):
            transform()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        with pytest.raises(NotImplementedError, match=r"dcformer_triton.*forward-mode.*attn_implementation='eager'"):
            call(dual)


@pytest.mark.parametrize("window", [0, -3])
def test_a_mask_whose_window_is_none_is_refused(window):
    query = torch.randn(1, 2, 20, 16, device=DEVICE)
    mask = dataclasses.replace(padded_mask(), window=window)
    with pytest.raises(ValueError, match=f"sliding_window={window}: expected at least 1"):
        triton_attention(torch.nn.Module(), query, query, query, mask, 0.25)


def test_a_window_belongs_to_causal_attention():
    """Without a mask; in every implementation, for few queries and for many."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE) for _ in range(3))
    for length in (4, 20):
        few = query[:, :, :length]
        given = torch.nn.Module(), few, key, value, None, 0.25
        found, wanted, chunked = (
            attend(*given, sliding_window=3, is_causal=False)[0]
            for attend in (triton_attention, eager_attention, chunked_attention)
        )
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(chunked, wanted)


def test_second_derivatives_are_refused():
    query, key, value = (torch.randn(1, 2, 8, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(composed_attention(query, key, value).sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
        grad.sum().backward()


def test_batched_gradients_are_refused():
    query, key, value = (torch.randn(1, 2, 8, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    for result in composed_attention(query, key, value, return_lse=True):
        with pytest.raises(NotImplementedError, match=r"batched gradients.*attn_implementation='eager'"):
            grads = torch.randn(3, *result.shape, device=DEVICE)
            torch.autograd.grad(result, query, grads, is_grads_batched=True)


ERRORS = {
    r"query \(2, 3, 4\).* do not fit together": ((zeros(2, 3, 4),) * 3, {}),
    "do not fit together": ((zeros(1, 4, 5, 16), zeros(1, 3, 5, 16), zeros(1, 3, 5, 16)), {}),
    "expected one of": ((zeros(1, 2, 5, 16, dtype=torch.float64),) * 3, {}),
    "at most 256": ((zeros(1, 2, 5, 300),) * 3, {}),
    "sliding_window=0": ((zeros(1, 2, 5, 16),) * 3, {"sliding_window": 0}),
    "needs causal=True": ((zeros(1, 2, 5, 16),) * 3, {"sliding_window": 3, "causal": False}),
    "sliding_window=3.0: expected an integer": ((zeros(1, 2, 5, 16),) * 3, {"sliding_window": 3.0}),
    "causal_offset=2.5: expected an integer": ((zeros(1, 2, 5, 16),) * 3, {"causal_offset": 2.5}),
    "causal_offset=2 needs causal=True": ((zeros(1, 2, 5, 16),) * 3, {"causal_offset": 2, "causal": False}),
    "chunk_bytes=-1: expected at least 0": ((zeros(1, 2, 5, 16),) * 3, {"chunk_bytes": -1}),
    "key_start is on device 'meta'": ((zeros(1, 2, 5, 16),) * 3, {"key_start": torch.zeros(1, device="meta").int()}),
    "key_end is torch.float32: expected integers": ((zeros(1, 2, 5, 16),) * 3, {"key_end": torch.ones(1)}),
    r"visible\[1\] is torch.bool: expected integers": (
        (zeros(1, 2, 5, 16),) * 3,
        {"visible": (torch.zeros(1, 5, dtype=torch.int32), torch.ones(1, 5, dtype=torch.bool))},
    ),
    "65 heads per group are beyond the fused kernels, which have 1 to at most 64: .*call .*eager_attention instead": (
        (zeros(1, 65, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights(zeros(1, 65, 5, 5)))},
    ),
    "key_start is": ((zeros(2, 2, 5, 16),) * 3, {"key_start": torch.tensor([0, 1, 2])}),
    "visible has": ((zeros(2, 2, 5, 16),) * 3, {"visible": (torch.zeros(3, 5).int(),) * 2}),
    "cu_seqlens is": ((zeros(1, 2, 5, 16),) * 3, {"cu_seqlens": torch.tensor([0])}),
    "one packed row": ((zeros(2, 2, 5, 16),) * 3, {"cu_seqlens": torch.tensor([0, 5])}),
    "groups=3 must be an integer that divides 2": ((zeros(1, 2, 5, 16),) * 3, {"pre": ComposeWeights(groups=3)}),
    "have 2 and 1 groups": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(static=zeros(2, 1, 1), groups=2), "post": ComposeWeights(static=zeros(1, 2, 2))},
    ),
    "rank 5 is beyond the fused kernels, which have ranks of 1 to 4": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights(zeros(1, 2, 10, 5)))},
    ),
    "pre.query holds": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights.of(gate=zeros(1, 2, 4)))},
    ),
    "the same parts": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights(zeros(1, 2, 1, 5)), SideWeights(zeros(1, 2, 2, 5)))},
    ),
    "expected one dtype. Convert them": (
        (zeros(1, 2, 5, 16), *(zeros(1, 2, 5, 16, dtype=torch.bfloat16),) * 2),
        {},
    ),
    "query is on .* and pre on meta: expected all tensors on one device": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights(torch.zeros(1, 2, 5, 5, device="meta")))},
    ),
    r"static is torch.float32 \(1, 3, 3\)": (
        (zeros(1, 2, 5, 16),) * 3,
        {"post": ComposeWeights(static=zeros(1, 3, 3))},
    ),
    r"static is torch.int64 \(1, 2, 2\): expected floating point": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(static=torch.ones(1, 2, 2, dtype=torch.int64, device=DEVICE))},
    ),
    "query holds torch.float8_e5m2 .*: expected floating point of 16 to 64 bits": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(SideWeights(zeros(1, 2, 5, 5).to(torch.float8_e5m2)))},
    ),
    "pre is of type SideWeights: expected ComposeWeights": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": SideWeights(zeros(1, 2, 5, 5))},
    ),
    "pre.query is of type Tensor: expected SideWeights or None": (
        (zeros(1, 2, 5, 16),) * 3,
        {"pre": ComposeWeights(zeros(1, 2, 5, 5))},
    ),
    "post.key.packed is of type NoneType: expected a tensor": (
        (zeros(1, 2, 5, 16),) * 3,
        {"post": ComposeWeights(key=SideWeights(None))},
    ),
    "post.static is of type ndarray: expected a tensor": (
        (zeros(1, 2, 5, 16),) * 3,
        {"post": ComposeWeights(static=np.zeros((1, 2, 2), np.float32))},
    ),
    "key has the layout torch.sparse_coo: expected a dense tensor": (
        (zeros(1, 2, 5, 16), zeros(1, 2, 5, 16).to_sparse(), zeros(1, 2, 5, 16)),
        {},
    ),
    "query has the layout of nested tensors: expected a dense tensor": (
        (torch.nested.nested_tensor([torch.randn(2, 5, 16)]), *(zeros(1, 2, 5, 16),) * 2),
        {},
    ),
    "scale='a': expected a finite number": ((zeros(1, 2, 5, 16),) * 3, {"scale": "a"}),
    "scale=1e\\+39: expected a finite number": ((zeros(1, 2, 5, 16),) * 3, {"scale": 1e39}),
    "scale=3e\\+38: expected a finite number within 2.3e38": ((zeros(1, 2, 5, 16),) * 3, {"scale": 3e38}),
    "scale=nan: expected a finite number": ((zeros(1, 2, 5, 16),) * 3, {"scale": math.nan}),
    "return_lse='yes': expected True or False": ((zeros(1, 2, 5, 16),) * 3, {"return_lse": "yes"}),
    "query is of type list: expected a tensor": (([1], *(zeros(1, 2, 5, 16),) * 2), {}),
    r"visible\[1\] is of type NoneType: expected a tensor": (
        (zeros(1, 2, 5, 16),) * 3,
        {"visible": (torch.zeros(1, 5).int(), None)},
    ),
    "causal=None: expected True or False": ((zeros(1, 2, 5, 16),) * 3, {"causal": None}),
    "save_maps=1: expected True or False": ((zeros(1, 2, 5, 16),) * 3, {"save_maps": 1}),
    "sliding_window=True: expected an integer": ((zeros(1, 2, 5, 16),) * 3, {"sliding_window": True}),
    "key_start is of type list: expected a tensor": ((zeros(1, 2, 5, 16),) * 3, {"key_start": [3]}),
    "visible is of type Tensor: expected two tensors": (
        (zeros(1, 2, 5, 16),) * 3,
        {"visible": torch.zeros(2, 5).int()},
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_cannot_be_done_says_so(message):
    tensors, options = ERRORS[message]
    with pytest.raises(ValueError, match=message):
        composed_attention(*tensors, **options)


@pytest.mark.parametrize("heads, kv_heads", [(66, 33), (71, 1), (134, 2)])
def test_heads_that_do_not_mix_may_be_many(heads, kv_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 20, 8, device=DEVICE) for n in (heads, kv_heads, kv_heads))
    found = composed_attention(query, key, value)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(composed_decode(query[:, :, -1:], key, value), exact[:, :, -1:])
