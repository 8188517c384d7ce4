"""Products, rounding and a function that are the same compiled and in Triton's interpreter."""
# mypy: disable-error-code="no-untyped-def"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from ..overflow import LARGEST

# Triton's interpreter multiplies the bit patterns of bfloat16; there operands are widened, which changes no product.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


LARGEST_HALF = tl.constexpr(65504.0)  # of float16
LARGEST_SCORE = tl.constexpr(LARGEST)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to another dtype, to nearest even; the interpreter would truncate to bfloat16."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = tl.where(x == x, x, 0.0).to(tl.int32, bitcast=True)  # those of a NaN could wrap around
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    return x.to(dtype)


@triton.jit
def within(x, largest):
    """x, cut off at ±largest. NaN stays."""
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    """[x, d] times [d, y] in float32, exact for float32 inputs."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b):
    """total [x, y] + a [x, d] times b [d, y] in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def tanh(x):
    """Accurate to 1e-6 of the result, near zero too, where the formula with exp cancels and a series does not."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.04, series, tl.where(x < 0, -size, size))
