"""Gradients through both compositions and the softmax between them: `back_1_kernel`, then `back_0_kernel`.

Programs are those of `compose`, which has kept the weights: B_T queries, all heads of a group, a loop over keys. To
make weights anew would take the registers that gradients need. Gradients of the query side's weights, and the softmax's
sums, are added up in registers over a program's keys, and stored as parts; those of M(s) are one product per key,
stored for each tile of queries. Who adds these parts up does so in one order: torch, and `key_side.project_kernel`.

Tiles have as many queries as those of `compose`. So where a query does not see a key that others of its tile see,
weights are zero, and nobody need look.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow)

import triton
import triton.language as tl

from .compose import program_keys
from .heads import (
    ALIKE,
    KEY,
    MATRIX_GRAD_UNIT,
    STATIC,
    add_side_grads,
    cast,
    composed,
    diagonal,
    filled,
    hidden,
    intervals,
    load_heads,
    load_matrix,
    load_row,
    load_side,
    place_in_map,
    side_channels,
    split,
    store_heads,
    store_matrix_grad,
    store_row,
    store_side_grads,
    transposed,
    transposed_matrix,
    widened,
)


@triton.jit(**ALIKE)
def back_1_kernel(
    p_weights, p_grads, p_m1, p_w1, p_first, p_last, p_inverse, p_out, p_gwq, p_sums, p_gm,
    stride_ib, stride_s: tl.int64, stride_m: tl.int64, n_bh, G, T, t_0, n_t, s_0, n_s, n_keys, n_scales,
    F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    B_T: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Back through the composition of weights: from dW to dP.

    Args:
        p_weights: the map of weights, P times 2^SHIFT.
        p_grads: the map of dW, times a power of two for BLOCK queries.
        p_inverse: what undoes that, [B·G, n_scales].
        p_out: the map of dP, to be written, times that, too; may be p_grads.
        p_gwq: parts of gradients of the query side's weights, [parts of keys, B·H, C, n_t].
        p_sums: parts of two sums, Σ_s P dP, times the power of two, and Σ_s P: [parts of keys, 2, B·H, n_t].
        p_gm: parts of gradients of M(s), transposed: [tiles of queries, B·G, n_s, h', h]; times the power of two.
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    w1 = load_side(p_w1 + i_bg * M * (C * T) + t_0, T, o_t, m_t, F_POST, R, C, M, H0, H1)
    base = place_in_map(i_bg, i_t, G, M, n_s, stride_s, B_T) + (start - s_0) * stride_s
    p_weights += base
    p_grads += base
    p_out += base
    p_m1 += (i_bg * n_s + start - s_0) * stride_m
    p_gm += ((i_t * (n_bh // M) + i_bg) * n_s + start - s_0) * stride_m
    dtype: tl.constexpr = p_grads.dtype.element_ty
    UNIT: tl.constexpr = 1.0 / (1 << SHIFT)
    delta, mass = filled(0.0, 1, B_T, H0, H1), filled(0.0, 1, B_T, H0, H1)
    grads = filled(0.0, side_channels(F_POST, R), B_T, H0, H1)
    units, ones = diagonal(UNIT, p_weights.dtype.element_ty, H0, H1), diagonal(1.0, dtype, H0, H1)
    for _ in tl.range(start, stop):
        x = transposed(load_row(p_weights, M, H0, H1, B_T), H1)
        row = load_row(p_grads, M, H0, H1, B_T)  # [h', t]
        m1 = load_matrix(p_m1, F_POST, M, H0, H1)
        p = widened(x, units, H1)
        hid = hidden(p, w1, 0, F_POST, R, H1)
        y = transposed(row, H1)
        dw = widened(y, ones, H1)
        grad_hid = hidden(dw, w1, R, F_POST, R, H1)
        grads = add_side_grads(grads, p, dw, hid, grad_hid, F_POST, R, H1)
        dp = composed(y, dw, w1, grad_hid, transposed_matrix(m1, dtype, F_POST, H1), 0, F_POST, R, H1)
        dp = cast(dp, dtype, H1)  # as back_0 reads it: with a sum of others gradients of scores would not sum to zero
        dp_wide = widened(dp, ones, H1)
        deltas, masses = (), ()
        for i in tl.static_range(1 + (H1 > 0)):
            deltas = deltas + (delta[i] + p[i] * dp_wide[i],)
            masses = masses + (mass[i] + p[i],)
        delta, mass = deltas, masses
        store_row(p_out, dp, M, H0, H1, B_T)
        if (KEY | STATIC) & F_POST:
            store_matrix_grad(p_gm, row, cast(x, dtype, H1), UNIT, M, H0, H1)
        p_weights += stride_s
        p_grads += stride_s
        p_out += stride_s
        p_m1 += stride_m
        p_gm += stride_m
    i_part = i_s * n_bh + i_bg * M
    inverse = tl.load(p_inverse + i_bg * n_scales + i_t * B_T // BLOCK)
    store_side_grads(p_gwq + i_part * C * n_t, grads, inverse, C * n_t, n_t, o_t, m_t, F_POST, R, M, H0, H1)
    p_sums += (i_s * n_bh + i_part) * n_t
    store_heads(p_sums, delta, n_t, o_t, m_t, M, H0, H1)
    store_heads(p_sums + tl.cast(n_bh, tl.int64) * n_t, mass, n_t, o_t, m_t, M, H0, H1)


@triton.jit(**ALIKE)
def back_0_kernel(
    p_scores, p_weights, p_grads, p_m0, p_w0, p_first, p_last, p_sums, p_inverse, p_out, p_gwq, p_gm,
    stride_ib, stride_s: tl.int64, stride_m: tl.int64, n_bh, G, T, t_0, n_t, s_0, n_s, n_keys, n_scales, factor,
    F_PRE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Back through the softmax and the composition of scores: from dP to the gradients of scores.

    Args:
        p_weights: the map of weights, P times 2^SHIFT.
        p_grads: the map of dP, times a power of two as for `back_1_kernel`.
        p_sums: Σ_s P dP, times that as well, and Σ_s P: [2, B·H, n_t]. P is rounded, and does not quite sum to one:
            with the former divided by the latter, gradients of composed scores sum to zero, as they must.
        p_out: the map of gradients of scores, to be written, with SCALED times that, too; may be the memory of p_grads.
        p_gwq: as for `back_1_kernel`, times `factor`: ln 2, which takes back the log2(e) of stored scores.
        p_gm: parts of gradients of M(s): [tiles of queries, B·G, n_s, h, h'], without the factor, times the power and
            `MATRIX_GRAD_UNIT`.
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    w0 = load_side(p_w0 + i_bg * M * (C * T) + t_0, T, o_t, m_t, F_PRE, R, C, M, H0, H1)
    p_sums += i_bg * M * n_t
    total = load_heads(p_sums, n_t, o_t, m_t, 0.0, M, H0, H1)
    mass = load_heads(p_sums + tl.cast(n_bh, tl.int64) * n_t, n_t, o_t, m_t, 1.0, M, H0, H1)
    delta = ()
    for i in tl.static_range(1 + (H1 > 0)):
        delta = delta + (tl.where(mass[i] > 0, tl.div_rn(total[i], mass[i]), 0.0),)
    inverse = tl.load(p_inverse + i_bg * n_scales + i_t * B_T // BLOCK)
    base = place_in_map(i_bg, i_t, G, M, n_s, stride_s, B_T) + (start - s_0) * stride_s
    p_scores += base
    p_weights += base
    p_grads += base
    p_out += base
    p_m0 += (i_bg * n_s + start - s_0) * stride_m
    p_gm += ((i_t * (n_bh // M) + i_bg) * n_s + start - s_0) * stride_m
    dtype: tl.constexpr = p_grads.dtype.element_ty
    UNIT: tl.constexpr = 1.0 / (1 << SHIFT)
    grads = filled(0.0, side_channels(F_PRE, R), B_T, H0, H1)
    units, ones = diagonal(UNIT, p_weights.dtype.element_ty, H0, H1), diagonal(1.0, dtype, H0, H1)
    ones_0 = diagonal(1.0, tl.float16 if SPLIT else p_scores.dtype.element_ty, H0, H1)
    for _ in tl.range(start, stop):
        row = load_row(p_scores, M, H0, H1, B_T)  # [h, t]
        weights = transposed(load_row(p_weights, M, H0, H1, B_T), H1)
        y = transposed(load_row(p_grads, M, H0, H1, B_T), H1)
        m0 = load_matrix(p_m0, F_PRE, M, H0, H1)
        p, dp, da = widened(weights, units, H1), widened(y, ones, H1), ()
        for i in tl.static_range(1 + (H1 > 0)):
            da = da + (p[i] * (dp[i] - delta[i]),)
        x = widened(split(transposed(row, H1), 1 + (H1 > 0), SPLIT), ones_0, H1, SPLIT)
        hid, grad_hid = hidden(x, w0, 0, F_PRE, R, H1), hidden(da, w0, R, F_PRE, R, H1)
        grads = add_side_grads(grads, x, da, hid, grad_hid, F_PRE, R, H1)
        narrow = cast(da, dtype, H1)
        ds = composed(narrow, da, w0, grad_hid, transposed_matrix(m0, dtype, F_PRE, H1), 0, F_PRE, R, H1)
        if not SCALED:
            grad = ()
            for i in tl.static_range(1 + (H1 > 0)):
                grad = grad + (ds[i] * inverse,)
            ds = grad
        store_row(p_out, ds, M, H0, H1, B_T)
        if (KEY | STATIC) & F_PRE:
            EXACT: tl.constexpr = SPLIT and p_gm.dtype.element_ty == tl.float32  # see `Problem.sums_exactly`
            if EXACT:
                left, right = split(row, 1 + (H1 > 0), EXACT), split(da, 1 + (H1 > 0), EXACT)
            else:
                left, right = cast(row, dtype, H1), narrow
            store_matrix_grad(p_gm, left, right, MATRIX_GRAD_UNIT, M, H0, H1, EXACT)
        p_scores += stride_s
        p_weights += stride_s
        p_grads += stride_s
        p_out += stride_s
        p_m0 += stride_m
        p_gm += stride_m
    i_part = (i_s * n_bh + i_bg * M) * C
    store_side_grads(p_gwq + i_part * n_t, grads, factor * inverse, C * n_t, n_t, o_t, m_t, F_PRE, R, M, H0, H1)
