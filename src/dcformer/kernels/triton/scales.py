"""Powers of two that bring bfloat16 into the range of float16, which has three more bits, and gradients into it:
`norms_kernel`, `halves_kernel`, `scale_kernel`.

What products multiply with maps in float16 is copied in float16, times a power of two for each head of keys, which they
undo. Everything after dO is linear in it, so a factor of gradients that is the same for all queries of a block and all
heads of a group can be undone where sums leave the maps. It is chosen by what dW and dP can be at most, from the norms
of dO and of values and from composition weights: nothing is cut off, however large or small a loss is scaled.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from .heads import GATE, KEY, LOST, QUERY, STATIC

TARGET = tl.constexpr(14)  # log2 of what dP and what a log-sum-exp's gradient adds may be: a factor of 4 below the end
LEAST = tl.constexpr(2.0**-126)
FEWEST = tl.constexpr(-12)  # log2 of that for the query with the least; see `scale_kernel`


@triton.jit
def finite(x):
    """|x|, zero where it is infinite or not a number."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def log2(x):
    """Of a size, 0 included: of what float32 has least."""
    return tl.log2(tl.maximum(x, LEAST))


@triton.jit
def power(exponent):
    """2 to a whole number from -126 to 126, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_norms(
    p_x, p_norms, p_rows, stride_b, stride_h, stride_n, n_bh, H, count, dim,
    B_D: tl.constexpr, B_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norms over the channels of B_N rows of x [B, H, count, dim]: the largest to p_norms [B·H, blocks], with ROWS all
    to p_rows [B·H, count].

    They are of finite numbers. Where others are among them, a row's norm is infinite, and a largest one negative.
    Squares are those of numbers up to 2: none is out of range.
    """
    i_n, i_bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n_blocks = tl.maximum(tl.cdiv(count, B_N), 1)
    if (i_n < n_blocks) & (i_bh < n_bh):
        o_n, o_d = i_n * B_N + tl.arange(0, B_N), tl.arange(0, B_D)
        p_tile = p_x + i_bh // H * stride_b + i_bh % H * stride_h + o_n[:, None].to(tl.int64) * stride_n + o_d[None, :]
        x = tl.load(p_tile, mask=(o_n < count)[:, None] & (o_d < dim)[None, :], other=0.0).to(tl.float32)  # [n, d]
        is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1)
        exponent = tl.floor(log2(tl.max(finite(x), 1)))
        exponent = tl.minimum(exponent, 126.0).to(tl.int32)
        x = finite(x) * power(-exponent)[:, None]
        norm = power(exponent) * tl.sqrt(tl.sum(x * x, 1))
        largest = tl.max(norm)
        largest = tl.where(tl.min(is_finite) > 0, largest, -tl.maximum(largest, LEAST))
        tl.store(p_norms + i_bh * n_blocks + i_n, largest)
        if ROWS:
            tl.store(p_rows + i_bh * count + o_n, tl.where(is_finite > 0, norm, float("inf")), mask=o_n < count)


@triton.jit
def norms_kernel(
    p_x, p_y, p_x_norms, p_y_norms, p_rows,
    stride_xb, stride_xh, stride_xn, stride_yb, stride_yh, stride_yn,
    x_bh, x_heads, x_count, x_dim, y_bh, y_heads, y_count, y_dim,
    B_D: tl.constexpr, B_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norms of one or two tensors, along axis 1 of the grid; with ROWS those of each row of the second: see
    `_store_norms`."""
    if tl.program_id(1) == 0:
        _store_norms(
            p_x, p_x_norms, p_rows, stride_xb, stride_xh, stride_xn, x_bh, x_heads, x_count, x_dim, B_D, B_N, False
        )
    else:
        _store_norms(
            p_y, p_y_norms, p_rows, stride_yb, stride_yh, stride_yn, y_bh, y_heads, y_count, y_dim, B_D, B_N, ROWS
        )


@triton.jit
def _store_half(
    p_x, p_norms, p_out, p_undo, p_mark, stride_b, stride_h, stride_n, n_bh, H, rep, count, dim,
    B_D: tl.constexpr, B_N: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """B_N rows of x [B, H, count, dim] in float16, times a power of two, to p_out [B·H, count, dim]; what undoes that
    to p_undo [B·H / rep].

    It is one for `rep` heads, and brings their largest norm, of [B·H, blocks], to 2^15 at most. Of bfloat16 no bit is
    lost down to 2^-26 of the largest number, as that becomes 1024 or more. With MARK, p_mark becomes 1 where the rows
    are not zero and the largest norm of all is 2^20 times theirs: bits of most may be lost.
    """
    i_n, i_bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n_blocks = tl.maximum(tl.cdiv(count, B_N), 1)
    if (i_n < n_blocks) & (i_bh < n_bh):
        norms = tl.zeros([1024], tl.float32)
        for i in range(0, rep * n_blocks, 1024):
            o = i + tl.arange(0, 1024)
            p_part = p_norms + i_bh // rep * (rep * n_blocks) + o
            norms = tl.maximum(norms, tl.abs(tl.load(p_part, mask=o < rep * n_blocks, other=0.0)))
        norm = tl.max(norms)
        if MARK:
            here = tl.load(p_norms + i_bh * n_blocks + i_n)
            if (here > 0) & (here < norm * 2.0**-20):
                tl.store(p_mark, 1)  # all that store, store the same
        exponent = tl.floor(15.0 - log2(norm))
        exponent = tl.minimum(tl.maximum(exponent, -126.0), 126.0).to(tl.int32)
        if (i_n == 0) & (i_bh % rep == 0):
            tl.store(p_undo + i_bh // rep, power(-exponent))
        o_n, o_d = i_n * B_N + tl.arange(0, B_N), tl.arange(0, B_D)
        mask = (o_n < count)[:, None] & (o_d < dim)[None, :]
        p_tile = p_x + i_bh // H * stride_b + i_bh % H * stride_h + o_n[:, None].to(tl.int64) * stride_n + o_d[None, :]
        x = tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)  # [n, d]
        p_tile = p_out + i_bh * count * dim + o_n[:, None].to(tl.int64) * dim + o_d[None, :]
        tl.store(p_tile, (x * power(exponent)).to(tl.float16), mask=mask)


@triton.jit
def halves_kernel(
    p_x, p_y, p_x_norms, p_y_norms, p_x_out, p_y_out, p_x_undo, p_y_undo, p_mark,
    stride_xb, stride_xh, stride_xn, stride_yb, stride_yh, stride_yn,
    x_bh, x_heads, x_rep, x_count, x_dim, y_bh, y_heads, y_rep, y_count, y_dim,
    B_D: tl.constexpr, B_N: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """Copies of one or two tensors in float16, along axis 1 of the grid: see `_store_half`."""
    if tl.program_id(1) == 0:
        _store_half(
            p_x, p_x_norms, p_x_out, p_x_undo, p_mark, stride_xb, stride_xh, stride_xn, x_bh, x_heads, x_rep, x_count,
            x_dim, B_D, B_N, MARK,
        )  # fmt: skip
    else:
        _store_half(
            p_y, p_y_norms, p_y_out, p_y_undo, p_mark, stride_yb, stride_yh, stride_yn, y_bh, y_heads, y_rep, y_count,
            y_dim, B_D, B_N, MARK,
        )  # fmt: skip


@triton.jit
def scale_kernel(
    p_norms, p_largest, p_amplified, p_extra, p_w1, p_scale, p_mark, G, kv_heads, T, t_0, n_t, n_largest, n_amplified,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, B_H: tl.constexpr,
    BLOCK: tl.constexpr, B_T: tl.constexpr, EXTRA: tl.constexpr, MARK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The power of two for each BLOCK queries of a group of heads, its inverse, and whether their dO is finite.

    Args:
        p_norms: of dO, [B·H, T].
        p_largest: norms of values, [B, Hkv, n_largest].
        p_amplified: how much larger the key side and the static projection after the softmax make a gradient at most,
            [B·G, n_amplified].
        p_extra: with EXTRA, what is added to the gradients of composed scores before they are multiplied by weights,
            [B·H, n_t].
        p_scale: [3, B·G, blocks of BLOCK queries].
        p_mark: with MARK it becomes 1 where float16 would keep less than bfloat16 does: where composition may make
            gradients 2048 times as large; and with FEW where the largest dW of a query, if it has one, may be less
            than 2^-12: most numbers are about 2^-5 of such bounds, and float16 has 8 bits down to 2^-17; less than
            2^-6 with a key side or a static projection before the softmax.
    """
    i_t, i_bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_h = tl.arange(0, B_H)
    m_h = o_h < M
    # norms of values: of all heads, so that it does not matter which query heads share them
    values, are_finite = tl.zeros([1024], tl.float32), tl.full([1024], 1, tl.int32)
    for i in range(0, kv_heads * n_largest, 1024):
        o = i + tl.arange(0, 1024)
        p_part = p_largest + i_bg // G * kv_heads * n_largest + o
        part = tl.load(p_part, mask=o < kv_heads * n_largest, other=0.0)
        values = tl.maximum(values, tl.abs(part))
        are_finite = tl.minimum(are_finite, (part >= 0).to(tl.int32))
    value = tl.max(values)
    # what composition makes of dW: sums of sizes over heads
    amplified = tl.zeros([], tl.float32)
    if (KEY | STATIC) & F_POST:
        of_keys = tl.zeros([1024], tl.float32)
        for i in range(0, n_amplified, 1024):
            o = i + tl.arange(0, 1024)
            part = tl.load(p_amplified + i_bg * n_amplified + o, mask=o < n_amplified, other=0.0)
            of_keys = tl.maximum(of_keys, finite(part))
        amplified = tl.max(of_keys)
    of_queries = tl.full([B_T], 1.0, tl.float32)
    norm, extra = tl.zeros([B_T], tl.float32), tl.zeros([B_T], tl.float32)
    least, is_finite = tl.full([B_T], float("inf"), tl.float32), tl.full([B_T], 1, tl.int32)
    for t in range(0, BLOCK, B_T):
        o_t = i_t * BLOCK + t + tl.arange(0, B_T)
        mask = (o_t < n_t)[:, None] & m_h[None, :]
        o_map = (i_bg * M + o_h)[None, :] * n_t + o_t[:, None]
        p_row = p_norms + (i_bg * M + o_h)[None, :] * T + (t_0 + o_t)[:, None]
        x = tl.load(p_row, mask=mask, other=0.0)  # [t, h]
        is_finite = tl.minimum(is_finite, tl.min((x < float("inf")).to(tl.int32), 1))
        row = tl.max(finite(x), 1)
        norm = tl.maximum(norm, row)
        least = tl.minimum(least, tl.where(row > 0, row, float("inf")))
        if EXTRA:
            extra = tl.maximum(extra, tl.max(finite(tl.load(p_extra + o_map, mask=mask, other=0.0)), 1))
        if QUERY & F_POST:
            p_w = p_w1 + i_bg * M * (C * T) + t_0 + o_h[None, :] * (C * T) + o_t[:, None]
            here = tl.full([B_T], 1.0, tl.float32)
            if GATE & F_POST:
                here = tl.max(finite(1.0 + tl.load(p_w + 2 * R * T, mask=mask, other=0.0).to(tl.float32)), 1)
            for r in tl.static_range(R):
                down = finite(tl.load(p_w + r * T, mask=mask, other=0.0).to(tl.float32))
                up = finite(tl.load(p_w + (R + r) * T, mask=mask, other=0.0).to(tl.float32))
                here += tl.max(down, 1) * tl.sum(up, 1)
            of_queries = tl.maximum(of_queries, here)
    amplified += tl.max(of_queries)
    size = log2(tl.max(norm)) + log2(value)  # of dW
    over = tl.maximum(size + log2(amplified), log2(tl.max(extra))) - TARGET
    exponent = tl.floor(tl.minimum(tl.maximum(-over, -126.0), 126.0))
    if MARK:
        if amplified > 2048.0:
            tl.store(p_mark, 1)  # all that store, store the same
        if FEW:
            fewest = log2(tl.min(least)) + log2(value) + exponent
            least_size: tl.constexpr = FEWEST + LOST if (KEY | STATIC) & F_PRE else FEWEST
            if tl.where(value > 0, fewest, 0.0) < least_size:
                tl.store(p_mark, 1)
    stride = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    p_scale += i_bg * tl.num_programs(0) + i_t
    tl.store(p_scale, power(exponent.to(tl.int32)))
    tl.store(p_scale + stride, power(-exponent.to(tl.int32)))
    tl.store(p_scale + 2 * stride, tl.minimum(tl.min(is_finite), tl.min(are_finite)).to(tl.float32))
