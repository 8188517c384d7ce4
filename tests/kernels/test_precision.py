"""`triton/precision.py`: numbers as dtypes hold them, in the interpreter as on a GPU."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kernel_device import DEVICE

from dcformer.kernels.triton.precision import rounded

# No numbers below 2^-126: the interpreter makes zeros of them.
NORMAL = st.integers(0x00800000, 0x7F7FFFFF) | st.integers(0x80800000, 0xFF7FFFFF)
# A NaN of float16 becomes the first; added to what rounds it, its bits would wrap around to those of a small number.
NANS = (0x7FFFE000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001)
EDGES = (0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F808001)


@triton.jit
def _store_rounded(p_in, p_out, n: tl.constexpr):
    o_n = tl.arange(0, n)
    tl.store(p_out + o_n, rounded(tl.load(p_in + o_n), p_out.dtype.element_ty))


def by_kernel(bits: np.ndarray, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """16 numbers of float32, given as bits: as a kernel rounds them, and as PyTorch does."""
    numbers = torch.from_numpy(bits.view(np.float32))
    out = torch.empty(16, dtype=dtype, device=DEVICE)
    _store_rounded[(1,)](numbers.to(DEVICE), out, n=16)
    return out.cpu(), numbers.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(bits=arrays(np.uint32, 16, elements=NORMAL | st.sampled_from(NANS + EDGES)))
@settings(deadline=None)
def test_numbers_are_rounded_to_nearest_even_and_nan_stays(bits, dtype):
    found, expected = by_kernel(bits, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_every_nan_stays_one():
    found, _ = by_kernel(np.resize(np.array(NANS, np.uint32), 16), torch.bfloat16)
    assert found.isnan().all()
