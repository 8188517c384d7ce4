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
def half_product(a, b):
    """[x, d] times [d, y], all float16."""
    if INTERPRETED:
        return product(a, b).to(tl.float16)
    else:
        return tl.dot(a, b, out_dtype=tl.float16)


@triton.jit
def add_half_product(total, a, b):
    """total [x, y] + a [x, d] times b [d, y], all float16."""
    if INTERPRETED:
        return add_product(total.to(tl.float32), a, b).to(tl.float16)
    else:
        return tl.dot(a, b, total, out_dtype=tl.float16)


@triton.jit
def two_in_a_register(x):
    """A tile of 16 bits, unchanged: as products of matrices leave theirs, neighbors of a row in one register.

    Which they may not be where a loop uses them that did not make them. A compiler must not know that a product of
    zeros is zero.
    """
    if INTERPRETED:
        return x
    else:
        zeros = tl.zeros([x.shape[0], 16], tl.float16)
        zero = half_product(zeros, tl.zeros([16, x.shape[1]], tl.float16))
        return tl.inline_asm_elementwise(
            "or.b32 $0, $1, $2;", "=r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def uniform(x):
    """A scalar of 32 bits that all threads have, in a form from which the assembler sees that.

    What Triton 3.8 and later reduce does not show it. Branches and loops that go by it are taken to diverge then, and
    products inside wait for each other.
    """
    if INTERPRETED:
        return x
    else:
        registers: tl.constexpr = "=f,f" if x.dtype == tl.float32 else "=r,r"
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", registers, [x], dtype=x.dtype, is_pure=True, pack=1
        )


@triton.jit
def add_times(total, x, y):
    """total + x · y of a shape, rounded once; in float32, with x perhaps of 16 bits, or all in float16.

    Of such x two share a register, and are widened here: a conversion of numbers that do not change in a loop would be
    moved before it, and take twice the registers in each turn.
    """
    if total.dtype == tl.float16:
        if INTERPRETED:
            return (total.to(tl.float32) + x.to(tl.float32) * y.to(tl.float32)).to(tl.float16)
        else:
            return tl.fma(x, y, total)
    elif x.dtype == tl.float32:
        return total + x * y
    elif INTERPRETED:
        return total + x.to(tl.float32) * y
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 low, high;
            shl.b32 low, $2, 16;
            and.b32 high, $2, 0xffff0000;
            fma.rn.f32 $0, low, $3, $5;
            fma.rn.f32 $1, high, $4, $6;
            }""",
            "=&f,=f,r,f,f,f,f", [x, y, total], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 h<2>;
            .reg .f32 low, high;
            mov.b32 {h0, h1}, $2;
            cvt.f32.f16 low, h0;
            cvt.f32.f16 high, h1;
            fma.rn.f32 $0, low, $3, $5;
            fma.rn.f32 $1, high, $4, $6;
            }""",
            "=&f,=f,r,f,f,f,f", [x, y, total], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def tanh(x):
    """Accurate to 1e-6 of the result, near zero too, where the formula with exp cancels and a series does not."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.04, series, tl.where(x < 0, -size, size))
