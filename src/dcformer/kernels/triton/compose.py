"""From scores to composed weights: `lse_kernel`, `join_kernel`, `compose_kernel`.

Scores arrive times log2(e), so that exp2 and log2 suffice; log-sum-exps are base 2. Softmax sits between two
compositions, so its sums need a pass of their own over the scores; `compose_kernel` composes them anew, which is more
exact than to store them. For the backward pass it keeps the weights, too.

A program has B_T queries and all heads of a group, and visits a part of the keys that any of its queries sees. M, H0,
H1, R, C and the flags F_PRE and F_POST are those of `heads`; t_0, n_t, n_p, s_0 and n_s are a chunk, see
`problem.Chunk`; o_t are a tile's queries within it, m_t says which of them exist; HP = matrix_side(M); NB is the number
of blocks of heads, 1, or 2 with H1. A loop counts pointers up from key to key: to multiply strides in each turn would
take more instructions. Behind pointers:

    p_scores, p_weights, p_out  maps of the chunk, [B, n_s, n_p / B_T, H, B_T], a key stride_s from the next: S, P, W;
                     P and W are times 2^SHIFT
    p_m0, p_m1       matrices M(s) of "pre" and "post", [B·G, n_s, HP, HP], in the dtype of S, of P; stride_m = HP · HP
    p_w0, p_w1       query sides, [B, H, C, T]
    p_first, p_last  the first key that a query sees, and the one behind its last, int32 [B or 1, T]
    p_lse            log-sum-exps, float32 [B, H, T]
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow)

import triton
import triton.language as tl

from .heads import (
    ALIKE,
    NO_KEY,
    cast,
    composed,
    composed_half,
    diagonal,
    filled,
    hidden,
    intervals,
    load_half_side,
    load_heads,
    load_matrix,
    load_row,
    load_side,
    place_in_map,
    span,
    split,
    split_matrix,
    store_heads,
    store_row,
    transposed,
    widened,
)
from .precision import uniform

LOWEST = tl.constexpr(-3.4028234e38)  # of float32: below every score; finite, as -inf - -inf is not a number


@triton.jit
def program_keys(first, last, i_s, n_keys, s_0, n_s):
    """The keys of a program: of those that any of its queries sees, part i_s, n_keys of them."""
    low, high = span(first, last)
    low = tl.minimum(low, high)
    start = s_0 + (low - s_0) // 16 * 16 + i_s * n_keys  # n_keys is a multiple of 16
    return tl.maximum(start, low), tl.minimum(tl.minimum(start + n_keys, s_0 + n_s), high)


@triton.jit
def seen_by_all(first, last, m_t, start, stop, B_S: tl.constexpr):
    """Of a program's keys start to stop those that all its queries see, cut to whole turns of B_S."""
    latest, earliest = uniform(tl.max(tl.where(m_t, first, 0))), uniform(tl.min(tl.where(m_t, last, NO_KEY)))
    inner = tl.minimum(start + tl.cdiv(tl.maximum(latest - start, 0), B_S) * B_S, tl.maximum(start, stop))
    outer = start + (tl.minimum(earliest, stop) - start) // B_S * B_S
    return inner, tl.maximum(outer, inner)


@triton.jit
def _add_scores(
    top, total, start, stop, hole, at, w0, ones,
    F_PRE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr,
    B_S: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Adds the exponentials of keys, each relative to the largest score so far, `top`, to `total`.

    The keys are start to stop, but with MASKED two ranges as one: `hole` keys at `inner` are left out, and `stop` is
    less by as many as where the second range ends.
    """
    p_scores, p_m0, stride_s, stride_m, s_0, first, last, inner = at
    NB: tl.constexpr = 1 + (H1 > 0)
    p_scores += (start - s_0) * stride_s
    p_m0 += (start - s_0) * stride_m
    for i_s in tl.range(start, stop, B_S):
        s = i_s
        if MASKED:
            jump = tl.where(i_s == inner, hole, 0)
            p_scores += jump * stride_s
            p_m0 += jump * stride_m
            s += tl.where(i_s < inner, 0, hole)
        turn, above = (), top
        for k in tl.static_range(B_S):
            x = split(transposed(load_row(p_scores + k * stride_s, M, H0, H1, B_T), H1), NB, SPLIT)
            m0 = split_matrix(load_matrix(p_m0 + k * stride_m, F_PRE, M, H0, H1), F_PRE, H1, SPLIT)
            wide = widened(x, ones, H1, SPLIT)
            a = composed(x, wide, w0, hidden(wide, w0, 0, F_PRE, R, H1), m0, R, F_PRE, R, H1, SPLIT)
            highest = ()
            for i in tl.static_range(NB):
                if MASKED:
                    visible = ((s + k >= first) & (s + k < last))[:, None]
                    turn = turn + (tl.where(visible, a[i], LOWEST),)
                else:
                    turn = turn + (a[i],)
                highest = highest + (tl.maximum(above[i], turn[k * NB + i]),)
            above = highest
        sums = ()
        for i in tl.static_range(NB):
            new = total[i] * tl.exp2(top[i] - above[i])
            for k in tl.static_range(B_S):
                new += tl.exp2(turn[k * NB + i] - above[i])
            sums = sums + (new,)
        top, total = above, sums
        p_scores += B_S * stride_s
        p_m0 += B_S * stride_m
    return top, total


@triton.jit(**ALIKE)
def lse_kernel(
    p_scores, p_m0, p_w0, p_first, p_last, p_lse, p_mark,
    stride_ib, stride_l, stride_s: tl.int64, stride_m: tl.int64, n_bh, G, T, t_0, n_t, s_0, n_s, n_keys, unseen,
    largest,
    F_PRE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    B_T: tl.constexpr, B_S: tl.constexpr, MARK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of composed scores over the keys of a part: p_lse [parts, B·H, stride_l], from its first query.

    B_S keys a turn share one rescaling of the sums. Those that all queries see are not masked. `unseen` stands where a
    query sees none of the keys. With MARK, p_mark becomes 1 where the largest score of a query is beyond ±largest.
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    w0 = load_side(p_w0 + i_bg * M * (C * T) + t_0, T, o_t, m_t, F_PRE, R, C, M, H0, H1)
    p_scores += place_in_map(i_bg, i_t, G, M, n_s, stride_s, B_T)
    p_m0 += i_bg * n_s * stride_m
    NB: tl.constexpr = 1 + (H1 > 0)
    top, total = filled(LOWEST, 1, B_T, H0, H1), filled(0.0, 1, B_T, H0, H1)
    start = s_0 + (start - s_0) // B_S * B_S  # a turn never leaves a part, and what nobody sees is masked
    inner, outer = seen_by_all(first, last, m_t, start, stop, B_S)
    at = (p_scores, p_m0, stride_s, stride_m, s_0, first, last, inner)
    ones = diagonal(1.0, tl.float16 if SPLIT else p_scores.dtype.element_ty, H0, H1)
    top, total = _add_scores(top, total, inner, outer, 0, at, w0, ones, F_PRE, R, M, H0, H1, B_T, B_S, False, SPLIT)
    stop -= outer - inner  # the keys before and behind these, in one loop
    top, total = _add_scores(
        top, total, start, stop, outer - inner, at, w0, ones, F_PRE, R, M, H0, H1, B_T, B_S, True, SPLIT
    )
    out = ()
    for i in tl.static_range(NB):
        is_seen = (top[i] > LOWEST) | (total[i] != total[i])  # a maximum passes over NaN
        out = out + (tl.where(is_seen, top[i] + tl.log2(tl.where(is_seen, total[i], 1.0)), unseen),)
        if MARK:
            if uniform(tl.max(tl.where(top[i] > LOWEST, tl.abs(top[i]), 0.0))) > largest:
                tl.store(p_mark, 1)  # all that store, store the same
    store_heads(p_lse + (i_s * n_bh + i_bg * M) * stride_l, out, stride_l, o_t, m_t, M, H0, H1)


@triton.jit(**ALIKE)
def join_kernel(p_parts, p_lse, T, t_0, n_t, n_parts, n_bh, B_P: tl.constexpr, B_T: tl.constexpr):
    """Log-sum-exps of a chunk from those of its parts [parts, B·H, n_t]: p_lse [B·H, T]; +inf where nothing is seen."""
    i_bh, i_t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_t = i_t * B_T + tl.arange(0, B_T)
    m_t = o_t < n_t
    top, total = tl.full([B_T], float("-inf"), tl.float32), tl.zeros([B_T], tl.float32)
    for i_p in range(0, n_parts, B_P):
        o_p = i_p + tl.arange(0, B_P)
        p_part = p_parts + (o_p[:, None].to(tl.int64) * n_bh + i_bh) * n_t + o_t[None, :]
        part = tl.load(p_part, mask=(o_p < n_parts)[:, None] & m_t[None, :], other=float("-inf"))  # [p, t]
        above = tl.maximum(top, tl.max(part, 0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(part - base[None, :]), 0)
        top = above
    is_seen = total != 0  # or NaN
    lse = tl.where(is_seen, top + tl.log2(tl.where(is_seen, total, 1.0)), float("inf"))
    tl.store(p_lse + i_bh * T + t_0 + o_t, lse, mask=m_t)


@triton.jit(**ALIKE)
def compose_kernel(
    p_scores, p_m0, p_m1, p_w0, p_w1, p_first, p_last, p_lse, p_out, p_weights, p_mark,
    stride_ib, stride_s: tl.int64, stride_m: tl.int64, G, T, t_0, n_t, s_0, n_s, n_keys,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr, SHIFT: tl.constexpr, KEEP: tl.constexpr,
    WIDE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Composed weights, zeros where a query does not see a key that others of its tile see. p_out may be p_scores: a
    row is read before written. With KEEP also the weights, to p_weights.

    Where W and what products take of scores are float16, weights are composed in float16: the key side's product takes
    them so, too. p_mark: see `load_half_side`; WIDE: see `load_side`.
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    dtype: tl.constexpr = tl.float16 if SPLIT else p_scores.dtype.element_ty
    HALF: tl.constexpr = dtype == tl.float16 and p_out.dtype.element_ty == tl.float16
    p_w1 += i_bg * M * (C * T) + t_0
    if HALF:
        w1 = load_half_side(p_w1, p_mark, T, o_t, m_t, first < last, F_POST, R, C, M, H0, H1)
    else:
        w1 = load_side(p_w1, T, o_t, m_t, F_POST, R, C, M, H0, H1)
    N_WIDE: tl.constexpr = WIDE if HALF and p_w0.dtype.element_ty.primitive_bitwidth == 16 else 2 * R + 1
    w0 = load_side(p_w0 + i_bg * M * (C * T) + t_0, T, o_t, m_t, F_PRE, R, C, M, H0, H1, N_WIDE)
    lse = load_heads(p_lse + i_bg * M * T + t_0, T, o_t, m_t, float("inf"), M, H0, H1)
    base = place_in_map(i_bg, i_t, G, M, n_s, stride_s, B_T) + (start - s_0) * stride_s
    p_scores += base
    p_out += base
    p_weights += base
    place = (i_bg * n_s + start - s_0) * stride_m
    p_m0 += place
    p_m1 += place
    ones = diagonal(1.0, dtype, H0, H1)
    for s in tl.range(start, stop):
        x = split(transposed(load_row(p_scores, M, H0, H1, B_T), H1), 1 + (H1 > 0), SPLIT)
        m0 = split_matrix(load_matrix(p_m0, F_PRE, M, H0, H1), F_PRE, H1, SPLIT)
        visible = ((s >= first) & (s < last))[:, None]
        wide, p = widened(x, ones, H1, SPLIT), ()
        a = composed(x, wide, w0, hidden(wide, w0, 0, F_PRE, R, H1), m0, R, F_PRE, R, H1, SPLIT)
        for i in tl.static_range(1 + (H1 > 0)):
            p = p + (tl.exp2(tl.where(visible, a[i] - (lse[i] - SHIFT), LOWEST)),)
        m1 = load_matrix(p_m1, F_POST, M, H0, H1)
        if HALF:
            p = cast(p, tl.float16, H1)
        if KEEP:
            store_row(p_weights, p, M, H0, H1, B_T)
        if HALF:
            p = composed_half(p, w1, m1, F_POST, R, H0, H1)
        else:
            narrow = cast(p, p_m1.dtype.element_ty, H1)
            p = composed(narrow, p, w1, hidden(p, w1, 0, F_POST, R, H1), m1, R, F_POST, R, H1)
        store_row(p_out, p, M, H0, H1, B_T)
        p_scores += stride_s
        p_out += stride_s
        p_weights += stride_s
        p_m0 += stride_m
        p_m1 += stride_m
