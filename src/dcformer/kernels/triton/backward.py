"""Gradients: `back_0_kernel` goes back through softmax and the composition of scores, `sums_kernel` finds those of
composition weights. (Back through the composition of weights goes `compose.compose_kernel`.)

Programs are those of `compose`: B_T queries, all heads of a group, a loop over keys. What is summed over keys is added
up in registers over a program's keys, and stored as parts; gradients of M(s) are one product per key, stored for each
tile of queries. Who adds these parts up does so in one order: torch, and `key_side.project_kernel`.

All tiles of queries that are here and in `compose` have the same size, but for log-sum-exps: where a query of a tile does
not see a key that others see, weights are zero, and what no query of the tile sees nobody has written.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow)

import triton
import triton.language as tl

from .compose import program_keys
from .heads import (
    GATE,
    KEY,
    QUERY,
    STATIC,
    cast,
    composed,
    head_ids,
    hidden,
    intervals,
    load_heads,
    load_matrix,
    load_row,
    load_side,
    place_in_map,
    side_channels,
    store_hidden,
    store_row,
    transposed,
    transposed_matrix,
    widened,
)
from .precision import product, rounded


@triton.jit
def back_0_kernel(
    p_weights, p_grads, p_m0, p_w0, p_first, p_last, p_delta, p_inverse, p_composed, p_out, p_hidden,
    stride_ib, stride_s: tl.int64, stride_r: tl.int64, G, T, t_0, n_t, n_p, s_0, n_s, n_keys, n_scales,
    F_PRE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """From gradients of weights, dP, to those of composed scores, dA, and of scores, dS.

    Args:
        p_weights: the map of weights, P.
        p_grads: the map of dP, times a power of two for BLOCK queries.
        p_delta: Σ_s P dP, [B·H, n_t], times that as well.
        p_inverse: what undoes it, [B·G, n_scales].
        p_composed: the map of dA, to be written, times that; may be the memory of p_weights.
        p_out: the map of dS, to be written, with SCALED times that; may be the memory of p_grads.
        p_hidden: hidden maps of dA with up, to be written.
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    w0 = load_side(p_w0 + i_bg * M * (C * T) + t_0, T, o_t, m_t, F_PRE, R, C, M, H0, H1)
    delta = load_heads(p_delta + i_bg * M * n_t, n_t, o_t, m_t, 0.0, M, H0, H1)
    inverse = tl.load(p_inverse + i_bg * n_scales + i_t * B_T // BLOCK)
    base = place_in_map(i_bg, G, M, n_p, n_s, stride_s)
    p_weights += base
    p_grads += base
    p_composed += base
    p_out += base
    p_hidden += i_bg * n_s * n_p
    HH: tl.constexpr = (H0 + H1) * (H0 + H1)
    stride_m = tl.full([], HH, tl.int64)
    p_m0 += i_bg * n_s * HH
    dtype: tl.constexpr = p_grads.dtype.element_ty
    for s in tl.range(start - s_0, stop - s_0):
        x = transposed(load_row(p_weights + s * stride_s, n_p, o_t, M, H0, H1), H1)
        y = transposed(load_row(p_grads + s * stride_s, n_p, o_t, M, H0, H1), H1)
        m0 = transposed_matrix(load_matrix(p_m0 + s * stride_m, F_PRE, H0, H1), dtype, F_PRE, H1)
        p, dp, da = widened(x, H0, H1), widened(y, H0, H1), ()
        for i in tl.static_range(1 + (H1 > 0)):
            da = da + (p[i] * (dp[i] - delta[i]),)
        grad_hid = hidden(da, w0, R, F_PRE, R, H1)
        narrow = cast(da, dtype, H1)
        store_row(p_composed + s * stride_s, narrow, n_p, o_t, M, H0, H1)
        store_hidden(p_hidden + s * n_p, grad_hid, stride_r, o_t, F_PRE, R)
        ds = composed(narrow, da, w0, grad_hid, m0, 0, F_PRE, R, H1)
        if not SCALED:
            grad = ()
            for i in tl.static_range(1 + (H1 > 0)):
                grad = grad + (ds[i] * inverse,)
            ds = grad
        store_row(p_out + s * stride_s, ds, n_p, o_t, M, H0, H1)


@triton.jit
def _zeros(count: tl.constexpr, B_T: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """`count` times blocks [h, t] of zeros in float32, in a flat tuple."""
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros([H0, B_T], tl.float32),)
        if H1 > 0:
            out = out + (tl.zeros([H1, B_T], tl.float32),)
    return out


@triton.jit
def _add_grads(
    grads, x, y, p_hidden, p_grad_hidden, stride_r, o_t, F: tl.constexpr, R: tl.constexpr, H1: tl.constexpr
):  # fmt: skip
    """Adds a key's part to the gradients of the query side's weights: R of down, R of up, that of the gate."""
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    if QUERY & F:
        for r in tl.static_range(R):
            grad_hid = tl.load(p_grad_hidden + r * stride_r + o_t)[None, :]
            for j in tl.static_range(NB):
                out = out + (grads[r * NB + j] + x[j] * grad_hid,)
        for r in tl.static_range(R):
            hid = tl.load(p_hidden + r * stride_r + o_t)[None, :]
            for j in tl.static_range(NB):
                out = out + (grads[(R + r) * NB + j] + y[j] * hid,)
        if GATE & F:
            for j in tl.static_range(NB):
                out = out + (grads[2 * R * NB + j] + x[j] * y[j],)
    return out


@triton.jit
def _store_rows(p_x, x, stride_h, o_t, m_t, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """Stores blocks [h, t], one number for each query and head."""
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        tl.store(p_x + o_h[:, None] * stride_h + o_t[None, :], x[i], mask=(o_h < M)[:, None] & m_t[None, :])


@triton.jit
def sums_kernel(
    p_x, p_y, p_back, p_hidden, p_grad_hidden, p_first, p_last, p_inverse, p_gwq, p_delta, p_gm,
    stride_ib, stride_s: tl.int64, stride_r: tl.int64, n_bh, G, t_0, n_t, n_p, s_0, n_s, n_keys, n_scales, factor,
    F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    B_T: tl.constexpr, BLOCK: tl.constexpr, POST: tl.constexpr, FACTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of a stage, of what it takes, x, and of gradients of what it makes, y: P and dW, with
    POST; S and dA.

    Args:
        p_x, p_y: these maps; y times a power of two for BLOCK queries.
        p_back: with POST, the map of dP, times that.
        p_hidden, p_grad_hidden: hidden maps of x with down, and of y with up.
        p_inverse: what undoes the power of two, [B·G, n_scales].
        p_gwq: parts of gradients of the query side's weights, times `factor`: [parts of keys, B·H, C, n_t].
        p_delta: with POST, parts of two sums, Σ_s P dP, times the power of two, and Σ_s P: [parts, 2, B·H, n_t].
        p_gm: parts of gradients of M(s), times that and FACTOR: [tiles of queries, B·G, n_s, h, h'].
    """
    i_t, i_s, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t = i_t * B_T + tl.arange(0, B_T)  # in the chunk
    m_t = o_t < n_t
    p_bounds = i_bg // G * stride_ib + t_0
    first, last = intervals(p_first + p_bounds, p_last + p_bounds, o_t, m_t)  # [t]
    start, stop = program_keys(first, last, i_s, n_keys, s_0, n_s)
    base = place_in_map(i_bg, G, M, n_p, n_s, stride_s)
    p_x += base
    p_y += base
    p_back += base
    p_hidden += i_bg * n_s * n_p
    p_grad_hidden += i_bg * n_s * n_p
    HP: tl.constexpr = H0 + H1
    stride_m = tl.full([], HP * HP, tl.int64)
    p_gm += (i_t * (n_bh // M) + i_bg) * n_s * (HP * HP)
    dtype: tl.constexpr = p_y.dtype.element_ty
    NB: tl.constexpr = 1 + (H1 > 0)
    CHANNELS: tl.constexpr = side_channels(F, R)
    grads, sums = _zeros(CHANNELS, B_T, H0, H1), _zeros(2 if POST else 0, B_T, H0, H1)
    for s in tl.range(start - s_0, stop - s_0, num_stages=STAGES):
        x = load_row(p_x + s * stride_s, n_p, o_t, M, H0, H1)  # [h, t]
        y = load_row(p_y + s * stride_s, n_p, o_t, M, H0, H1)
        wide_x, wide_y = cast(x, tl.float32, H1), cast(y, tl.float32, H1)
        at = s * n_p
        grads = _add_grads(grads, wide_x, wide_y, p_hidden + at, p_grad_hidden + at, stride_r, o_t, F, R, H1)
        if POST:
            back, new = load_row(p_back + s * stride_s, n_p, o_t, M, H0, H1), ()
            for i in tl.static_range(NB):
                new = new + (sums[i] + wide_x[i] * back[i].to(tl.float32),)
            for i in tl.static_range(NB):
                new = new + (sums[NB + i] + wide_x[i],)
            sums = new
        if (KEY | STATIC) & F:
            left = cast(x, dtype, H1)
            for i in tl.static_range(NB):
                for j in tl.static_range(NB):
                    o_m = head_ids(i, H0, H1)[:, None] * HP + head_ids(j, H0, H1)[None, :]
                    grad = product(left[i], tl.trans(y[j]))
                    if FACTOR != 1.0:
                        grad *= FACTOR
                    tl.store(p_gm + s * stride_m + o_m, rounded(grad, p_gm.dtype.element_ty))
    i_part = i_s * n_bh + i_bg * M
    factor *= tl.load(p_inverse + i_bg * n_scales + i_t * B_T // BLOCK)
    for c in tl.static_range(CHANNELS):
        channel = ()
        for i in tl.static_range(NB):
            channel = channel + (grads[c * NB + i] * factor,)
        _store_rows(p_gwq + (i_part * C + c) * n_t, channel, C * n_t, o_t, m_t, M, H0, H1)
    if POST:
        for i in tl.static_range(2):
            some = (sums[i * NB],)
            if H1 > 0:
                some = some + (sums[i * NB + 1],)
            _store_rows(p_delta + (i_s * n_bh + i * n_bh + i_part) * n_t, some, n_t, o_t, m_t, M, H0, H1)
