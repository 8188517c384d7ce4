"""Powers of two that bring bfloat16 into the range of float16, which has three more bits, and gradients into it:
`states_kernel`, `scale_kernel`.

What products multiply with maps in float16 is copied in float16, times a power of two for each few tokens of a head,
which they undo: so numbers are read once, and it does not matter what is in other tokens. Everything after dO is linear
in it, so a factor of gradients that is the same for all queries of a block and all heads of a group can be undone where
sums leave the maps. It is chosen by what dW and dP can be at most, from the norms of dO and of values and from
composition weights: nothing is cut off, however large or small a loss is scaled.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from .heads import ALIKE, GATE, GRAD_SHIFT, KEY, LEAST, NO_KEY, QUERY, STATIC, intervals, log2, power, span

TARGET = tl.constexpr(14)  # log2 of what dP and what a log-sum-exp's gradient adds may be: a factor of 4 below the end
FEWEST = tl.constexpr(-12)  # log2 of that for the query with the least; see `scale_kernel`


@triton.jit
def finite(x):
    """|x|, zero where it is infinite or not a number."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _seen_keys(p_first, p_last, start, stop):
    """Bounds of the keys that any of the queries start to stop sees."""
    low, high = tl.full([], NO_KEY, tl.int32), tl.full([], 0, tl.int32)
    for t in range(start, stop, 1024):
        o_t = t + tl.arange(0, 1024)
        first, last = span(*intervals(p_first, p_last, o_t, o_t < stop))
        low, high = tl.minimum(low, first), tl.maximum(high, last)
    return low, high


@triton.jit
def _some_keys(p_first, p_last, T):
    """Bounds of the keys that any of 32 queries among T sees."""
    o_t = tl.arange(0, 32) * tl.cdiv(T, 32)
    return span(*intervals(p_first, p_last, o_t, o_t < T))


@triton.jit
def _load_rows(p_x, o_n, o_d, stride_n, count, dim):
    """Rows o_n of x [count, dim] in float32: [n, d], zeros beyond."""
    p_tile = p_x + o_n[:, None].to(tl.int64) * stride_n + o_d[None, :]
    return tl.load(p_tile, mask=(o_n < count)[:, None] & (o_d < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _exponent(size, target: tl.constexpr):
    """Of the power of two that brings a size to 2^target at least and, but for a rounding, below twice that."""
    return tl.minimum(tl.maximum(target - tl.floor(log2(size)), -126.0), 126.0).to(tl.int32)


@triton.jit
def _find_exponent(size, matters, near, p_undo, p_mark, MARK: tl.constexpr):
    """Of the power of two for rows whose largest numbers are `size` [n]; p_undo is what undoes it.

    It brings the largest of those that matter to 2^14 at least, and below 2^15 but for a rounding: of bfloat16 no bit
    is lost down to 2^-31 of that. Or it is that which brings `near` to 2^10, if that is not 0 and no row's is less than
    1 then, or too large: other rows may have the same, and no bit is lost down to 2^-17 of each row's. With MARK,
    p_mark becomes 1 where a row's is less than 2^-24 of the largest.
    """
    largest = tl.max(tl.where(matters, size, 0.0))
    least = tl.min(tl.where(matters & (size > 0), size, largest))
    exponent, shared = _exponent(largest, 14.0), _exponent(near, 10.0)
    fits = (largest * power(shared) < 2.0**15) & (least * power(shared) >= 1.0)
    exponent = tl.where((near > 0) & (fits | (largest == 0)), shared, exponent)
    tl.store(p_undo, power(-exponent))
    if MARK:
        if least < largest * 2.0**-24:
            tl.store(p_mark, 1)  # all that store, store the same
    return exponent


@triton.jit
def _store_norms(
    x, size, matters, o_n, p_largest, p_rows, count, OF_BLOCK: tl.constexpr, OF_ROWS: tl.constexpr
):  # fmt: skip
    """Norms over the channels of rows [n, d], of which `size` [n] is the largest number: with OF_BLOCK the largest of
    those that matter to p_largest, with OF_ROWS all to p_rows [count].

    They are of finite numbers. Where others are among them, a row's norm is infinite, and a largest one negative.
    Squares are those of numbers up to 2: none is out of range.
    """
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1)
    exponent = tl.minimum(tl.floor(log2(size)), 126.0).to(tl.int32)
    x = finite(x) * power(-exponent)[:, None]
    norm = power(exponent) * tl.sqrt(tl.sum(x * x, 1))
    if OF_BLOCK:
        largest = tl.max(tl.where(matters, norm, 0.0))
        all_finite = tl.min(tl.where(matters, is_finite, 1)) > 0
        tl.store(p_largest, tl.where(all_finite, largest, -tl.maximum(largest, LEAST)))
    if OF_ROWS:
        tl.store(p_rows + o_n, tl.where(is_finite > 0, norm, float("inf")), mask=o_n < count)


@triton.jit
def _store_states(
    states, out, strides, seen, sizes, dim,
    B_D: tl.constexpr, B_N: tl.constexpr, OF_KEYS: tl.constexpr, COPIED: tl.constexpr, OF_BLOCK: tl.constexpr,
    OF_ROWS: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """B_N rows of x [B, H, count, dim]: with COPIED in float16 to p_half [B·H, count, dim], see `_find_exponent`;
    with OF_BLOCK and OF_ROWS their norms, see `_store_norms`. p_undo and p_largest are [B·H, blocks of B_N rows].

    What matters are keys that some query sees, and queries that see some key. Others, such as padding, may be anything.
    Blocks of keys share a power of two where they can, as `values_kernel` is faster then.
    """
    p_x, p_half, p_undo = states
    p_largest, p_rows, p_mark = out
    stride_b, stride_h, stride_n = strides
    p_first, p_last, stride_ib = seen
    n_bh, H, T, count, before, behind = sizes
    i_n, i_bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n_blocks = tl.maximum(tl.cdiv(count, B_N), 1)
    if (i_n < n_blocks) & (i_bh < n_bh):
        o_n, o_d = i_n * B_N + tl.arange(0, B_N), tl.arange(0, B_D)
        p_x += i_bh // H * stride_b + i_bh % H * stride_h
        p_first += i_bh // H * stride_ib
        p_last += i_bh // H * stride_ib
        near = tl.zeros([], tl.float32)
        if OF_KEYS:
            # by queries that may see these
            start, stop = tl.maximum(i_n * B_N - behind, 0), tl.minimum((i_n + 1) * B_N - before, T)
            low, high = _seen_keys(p_first, p_last, start, stop)
            matters = (o_n >= low) & (o_n < high)
            if COPIED:
                low, high = _some_keys(p_first, p_last, T)
                first_rows = tl.minimum(low, count) + tl.arange(0, 8)
                near = tl.max(finite(_load_rows(p_x, first_rows, o_d, stride_n, tl.minimum(count, high), dim)))
        else:
            first, last = intervals(p_first, p_last, o_n, o_n < count)
            matters = first < last
        x = _load_rows(p_x, o_n, o_d, stride_n, count, dim)
        size, i_block = tl.max(finite(x), 1), i_bh * n_blocks + i_n
        if OF_BLOCK or OF_ROWS:
            _store_norms(x, size, matters, o_n, p_largest + i_block, p_rows + i_bh * count, count, OF_BLOCK, OF_ROWS)
        if COPIED:
            exponent = _find_exponent(size, matters, near, p_undo + i_block, p_mark, MARK)
            x = _load_rows(p_x, o_n, o_d, stride_n, count, dim)  # from L1: to hold them would take registers
            x = tl.where(matters[:, None], x * power(exponent), 0.0)
            p_tile = p_half + i_bh * count * dim + o_n[:, None].to(tl.int64) * dim + o_d[None, :]
            tl.store(p_tile, x.to(tl.float16), mask=(o_n < count)[:, None] & (o_d < dim)[None, :])


@triton.jit(**ALIKE)
def states_kernel(
    p_v, p_g, p_k, p_q, p_v_half, p_g_half, p_k_half, p_q_half, p_v_undo, p_g_undo, p_k_undo, p_q_undo,
    p_largest, p_rows, p_mark, p_first, p_last,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_kb, stride_kh, stride_kn, stride_qb, stride_qh, stride_qn, stride_ib,
    n_bh, H, rep, T, S, D, DV, start, before, behind,
    B_D: tl.constexpr, B_N: tl.constexpr, COPIED: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """What passes need of values, dO, keys and queries, in this order along axis 1 of the grid, from number `start` on:
    see `_store_states`. Norms are of blocks of values, and of all rows of dO. Query t sees no keys but t + before to
    t + behind."""
    which, seen, out = start + tl.program_id(1), (p_first, p_last, stride_ib), (p_largest, p_rows, p_mark)
    of_keys, of_queries = (n_bh // rep, H // rep, T, S, before, behind), (n_bh, H, T, T, before, behind)
    if which == 0:
        strides = (stride_vb, stride_vh, stride_vn)
        _store_states(
            (p_v, p_v_half, p_v_undo), out, strides, seen, of_keys, DV, B_D, B_N, True, COPIED, True, False, MARK
        )
    elif which == 1:
        strides = (stride_gb, stride_gh, stride_gn)
        _store_states(
            (p_g, p_g_half, p_g_undo), out, strides, seen, of_queries, DV, B_D, B_N, False, COPIED, False, True, MARK
        )
    elif which == 2:
        strides = (stride_kb, stride_kh, stride_kn)
        _store_states(
            (p_k, p_k_half, p_k_undo), out, strides, seen, of_keys, D, B_D, B_N, True, COPIED, False, False, MARK
        )
    else:
        strides = (stride_qb, stride_qh, stride_qn)
        _store_states(
            (p_q, p_q_half, p_q_undo), out, strides, seen, of_queries, D, B_D, B_N, False, COPIED, False, False, MARK
        )


@triton.jit(**ALIKE)
def scale_kernel(
    p_norms, p_largest, p_amplified, p_extra, p_w1, p_scale, p_mark,
    G, kv_heads, T, t_0, n_t, s_0, n_s, n_largest, n_amplified,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, B_H: tl.constexpr,
    B_KV: tl.constexpr, B_V: tl.constexpr, BLOCK: tl.constexpr, B_T: tl.constexpr, B_N: tl.constexpr,
    EXTRA: tl.constexpr, MARK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The power of two for each BLOCK queries of a group of heads, its inverse, and whether their dO is finite.

    Args:
        p_norms: of dO, [B·H, T].
        p_largest: the largest norms of B_N values each, [B, Hkv, n_largest]; those of the chunk's keys are looked at.
        p_amplified: how much larger the key side and the static projection after the softmax make a gradient at most,
            [B·G, n_amplified].
        p_extra: with EXTRA, what is added to the gradients of composed scores before they are multiplied by weights,
            [B·H, n_t].
        p_scale: [3, B·G, blocks of BLOCK queries].
        p_mark: with MARK it becomes 1 where float16 would keep less than bfloat16 does: where composition may make
            gradients 2048 times as large; and with FEW where the largest dW of a query, if it has one, may be less
            than 2^-12 for the values of some block: most numbers are about 2^-5 of such bounds, and float16 has 8 bits
            down to 2^-17; less than 2^-6 with a key side or a static projection before the softmax.
    """
    i_t, i_bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_h = tl.arange(0, B_H)
    m_h = o_h < M
    # norms of values: of all heads, so that it does not matter which query heads share them
    values, least_values = tl.zeros([B_V], tl.float32), tl.full([B_V], float("inf"), tl.float32)
    are_finite, o_v = tl.full([B_V], 1, tl.int32), tl.arange(0, B_KV)
    p_largest += i_bg // G * kv_heads * n_largest
    for i in range(s_0 // B_N, tl.minimum(tl.cdiv(s_0 + n_s, B_N), n_largest), B_V):
        o = i + tl.arange(0, B_V)
        is_here = (o < tl.cdiv(s_0 + n_s, B_N)) & (o < n_largest)
        mask = is_here[:, None] & (o_v < kv_heads)[None, :]
        part = tl.load(p_largest + o[:, None] + o_v[None, :] * n_largest, mask=mask, other=0.0)  # [block, head]
        here = tl.max(tl.abs(part), 1)
        values = tl.maximum(values, here)
        least_values = tl.minimum(least_values, tl.where(here > LEAST, here, float("inf")))  # of finite numbers
        are_finite = tl.minimum(are_finite, tl.min((part >= 0).to(tl.int32), 1))
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
            fewest = log2(tl.min(least)) + log2(tl.min(least_values)) + exponent
            least_size: tl.constexpr = FEWEST + GRAD_SHIFT if (KEY | STATIC) & F_PRE else FEWEST
            if tl.where(value > 0, fewest, 0.0) < least_size:
                tl.store(p_mark, 1)
    stride = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    p_scale += i_bg * tl.num_programs(0) + i_t
    tl.store(p_scale, power(exponent.to(tl.int32)))
    tl.store(p_scale + stride, power(-exponent.to(tl.int32)))
    tl.store(p_scale + 2 * stride, tl.minimum(tl.min(is_finite), tl.min(are_finite)).to(tl.float32))
