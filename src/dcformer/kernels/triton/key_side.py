"""The key side: `expand_kernel` makes each key's matrix M(s) of its weights, `project_kernel` takes gradients back.

    M(s)[h, h'] = Σ_r down_k[r, h] · up_k[r, h'] + (h = h') gate_k[h] + static[h, h']

Programs have B_S keys of one group of heads; B_H is a power of two that holds all heads.

The weights are read where they lie, in the order of a generator or behind a cache's keys and values: [B, Hkv, REP,
channels, S] of any strides.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from .heads import ALIKE, GATE, KEY, STATIC, intervals, span, tiles_that_see
from .precision import LARGEST_HALF, rounded, within


@triton.jit
def _side_tile(p_w, i_bg, o_s, o_h, G, rep, stride_wb, stride_wh, stride_wr, stride_ws, M: tl.constexpr):
    """Where the first channel of a group's heads and some keys lies: pointers [s, h]."""
    o_h = i_bg % G * M + o_h  # of all query heads, in 64 bits
    p_head = p_w + i_bg // G * stride_wb + (o_h // rep * stride_wh + o_h % rep * stride_wr)[None, :]
    return p_head + o_s[:, None].to(tl.int64) * stride_ws


@triton.jit
def _grad_tile(p_w, i_bg, o_s, o_h, S, M: tl.constexpr, C: tl.constexpr):
    """The same in the gradients, which are contiguous."""
    return p_w + i_bg * M * C * S + o_h[None, :] * (C * S) + o_s[:, None]


@triton.jit
def _load_channel(p_tile, mask):
    """A channel of the key side's weights: [s, h] in float32."""
    return tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_channel(p_tile, grad, mask, ADD: tl.constexpr):
    """Stores [s, h] as a channel of the gradients, or adds it to the stored value."""
    if ADD:
        grad += tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_tile, rounded(grad, p_tile.dtype.element_ty), mask=mask)


@triton.jit(**ALIKE)
def expand_kernel(
    p_wk, p_static, p_m, p_mark, p_amplified,
    stride_wb, stride_wh, stride_wr, stride_wc: tl.int64, stride_ws, G, rep, S, s_0, n_s, largest,
    F: tl.constexpr, R: tl.constexpr, M: tl.constexpr, HP: tl.constexpr, B_H: tl.constexpr, B_S: tl.constexpr,
    MARK: tl.constexpr, AMPLIFIED: tl.constexpr,
):  # fmt: skip
    """M(s) of a stage for the keys of a chunk: p_m [B·G, n_s, HP, HP], zeros beyond the M heads, within ±largest.

    Args:
        p_wk: the key side's weights.
        p_static: [G, M, M], from row to column.
        p_mark: becomes 1, with MARK, where a number may be beyond: sums of the largest parts are. (A maximum of all
            numbers would hold them all in registers.)
        p_amplified: with AMPLIFIED, what M(s) may multiply the largest number of a gradient with, [B·G, programs].
    """
    i_s, i_bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_s, o_h = i_s * B_S + tl.arange(0, B_S), tl.arange(0, B_H)
    m_side = (o_s + s_0 < S)[:, None] & (o_h < M)[None, :]
    out = tl.zeros([B_S, B_H, B_H], tl.float32)  # [s, h, h']
    bound, amplified = tl.zeros([B_S], tl.float32), tl.zeros([B_S], tl.float32)
    if STATIC & F:
        mask = (o_h < M)[:, None] & (o_h < M)[None, :]
        static = tl.load(p_static + i_bg % G * M * M + o_h[:, None] * M + o_h[None, :], mask=mask, other=0.0)
        static = static.to(tl.float32)
        out += static[None, :, :]
        bound += tl.max(tl.abs(static))
        amplified += tl.max(tl.sum(tl.abs(static), 1))
    if KEY & F:
        p_tile = _side_tile(p_wk, i_bg, s_0 + o_s, o_h, G, rep, stride_wb, stride_wh, stride_wr, stride_ws, M)
        for r in tl.static_range(R):
            down = _load_channel(p_tile + r * stride_wc, m_side)
            up = _load_channel(p_tile + (R + r) * stride_wc, m_side)
            out += down[:, :, None] * up[:, None, :]
            bound += tl.max(tl.abs(down), 1) * tl.max(tl.abs(up), 1)
            if AMPLIFIED:
                amplified += tl.max(tl.abs(down), 1) * tl.sum(tl.abs(up), 1)
        if GATE & F:
            gate = _load_channel(p_tile + 2 * R * stride_wc, m_side)
            bound += tl.max(tl.abs(gate), 1)
            amplified += tl.max(tl.abs(gate), 1)
            out += tl.where((o_h[:, None] == o_h[None, :])[None, :, :], gate[:, :, None], 0.0)
    if MARK:
        if tl.max(bound) > largest:
            tl.store(p_mark, 1)  # all that store, store the same
    if AMPLIFIED:
        tl.store(p_amplified + i_bg * tl.num_programs(0) + i_s, tl.max(amplified))
    out = within(out, largest)
    p_out = p_m + (i_bg * n_s + o_s)[:, None, None] * (HP * HP) + o_h[None, :, None] * HP + o_h[None, None, :]
    mask = (o_s < n_s)[:, None, None] & (o_h < HP)[None, :, None] & (o_h < HP)[None, None, :]
    tl.store(p_out, rounded(out, p_m.dtype.element_ty), mask=mask)


@triton.jit
def _add_parts(
    grad, count, start, stop, at, seen, p_inverse, p_finite,
    B_T: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Adds parts [s, h, h'] of the tiles start to stop of queries, without their powers of two, and how many numbers
    were infinite, and with CUT are cut off instead, if dO is finite. Without MASKED all these queries see all keys."""
    p_gm, stride_gm, mask = at
    p_first, p_last, o_s, n_t = seen
    for i_t in tl.range(start, stop, num_stages=3):
        if MASKED:
            o_t = i_t * B_T + tl.arange(0, B_T)
            low, high = span(*intervals(p_first, p_last, o_t, o_t < n_t))
            is_seen = mask & ((o_s >= low) & (o_s < high))[:, None, None]
            part = tl.load(p_gm + i_t * stride_gm, mask=is_seen, other=0.0).to(tl.float32)
        else:
            part = tl.load(p_gm + i_t * stride_gm, mask=mask, other=0.0).to(tl.float32)
        if CUT:
            most = tl.where(tl.load(p_finite + i_t * B_T // BLOCK) > 0, LARGEST_HALF, float("inf"))
            count += tl.sum((tl.abs(part) > most).to(tl.int32))
            part = within(part, most)
        grad += part * tl.load(p_inverse + i_t * B_T // BLOCK)
    return grad, count


@triton.jit(**ALIKE)
def project_kernel(
    p_gm, p_wk, p_gwk, p_gstatic, p_mark, p_inverse, p_finite, p_first, p_last, stride_ib,
    stride_wb, stride_wh, stride_wr, stride_wc: tl.int64, stride_ws,
    n_bg, G, rep, S, t_0, n_t, s_0, n_s, n_scales, factor,
    F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, HP: tl.constexpr, B_H: tl.constexpr,
    B_S: tl.constexpr, B_T: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr, ADD: tl.constexpr,
    MARK: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of M(s) over the tiles of queries, in their order, and takes them back to what makes M(s).

    Args:
        p_gm: their parts, [tiles of B_T queries, B·G, n_s, HP, HP]; with TRANSPOSED as columns by rows. A tile has
            written those of the keys that any of its queries sees. They are times a power of two.
        p_mark: becomes 1, with MARK, where a part was too large for its dtype: infinite, although dO is finite.
        p_inverse, p_finite: what undoes the power of two, and whether dO is finite, [B·G, n_scales] for BLOCK queries.
        p_gwk: gradients of p_wk, [B, Hkv, REP, C, S] contiguous; with ADD, added to the stored values.
        p_gstatic: parts of the gradient of the static projection, [programs of keys, B·G, M, M].
        factor: of all gradients.
    """
    i_s, i_bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_s, o_h = i_s * B_S + tl.arange(0, B_S), tl.arange(0, B_H)
    m_s = (o_s < n_s) & (o_s + s_0 < S)
    p_first += i_bg // G * stride_ib + t_0
    p_last += i_bg // G * stride_ib + t_0
    p_inverse += i_bg * n_scales
    p_finite += i_bg * n_scales
    low = s_0 + i_s * B_S
    start, inner, outer, stop = tiles_that_see(p_first, p_last, n_t, low, tl.minimum(low + B_S, S), B_T)
    h_stride: tl.constexpr = 1 if TRANSPOSED else HP
    o_m = o_s[:, None, None].to(tl.int64) * (HP * HP) + o_h[None, :, None] * h_stride
    o_m += o_h[None, None, :] * (HP + 1 - h_stride)
    mask = m_s[:, None, None] & (o_h < M)[None, :, None] & (o_h < M)[None, None, :]
    at = (p_gm + i_bg * n_s * (HP * HP) + o_m, tl.cast(n_bg, tl.int64) * n_s * (HP * HP), mask)
    seen = (p_first, p_last, s_0 + o_s, n_t)
    grad, count = tl.zeros([B_S, B_H, B_H], tl.float32), tl.full([], 0, tl.int32)
    grad, count = _add_parts(grad, count, start, inner, at, seen, p_inverse, p_finite, B_T, BLOCK, True, False)
    grad, count = _add_parts(grad, count, inner, outer, at, seen, p_inverse, p_finite, B_T, BLOCK, False, False)
    grad, count = _add_parts(grad, count, outer, stop, at, seen, p_inverse, p_finite, B_T, BLOCK, True, False)
    if MARK:
        if tl.max((tl.abs(grad) < float("inf")).to(tl.int32) ^ 1) > 0:
            grad = tl.zeros_like(grad)
            grad, count = _add_parts(grad, count, start, stop, at, seen, p_inverse, p_finite, B_T, BLOCK, True, True)
            if count > 0:
                tl.store(p_mark, 1)  # all that store, store the same
    grad *= factor
    if STATIC & F:
        o_static = o_h[:, None] * M + o_h[None, :]
        mask = (o_h < M)[:, None] & (o_h < M)[None, :]
        tl.store(p_gstatic + (i_s * n_bg + i_bg) * M * M + o_static, tl.sum(grad, 0), mask=mask)
    if KEY & F:
        m_side = m_s[:, None] & (o_h < M)[None, :]
        p_tile = _side_tile(p_wk, i_bg, s_0 + o_s, o_h, G, rep, stride_wb, stride_wh, stride_wr, stride_ws, M)
        p_grad = _grad_tile(p_gwk, i_bg, s_0 + o_s, o_h, S, M, C)
        for r in tl.static_range(R):
            down = _load_channel(p_tile + r * stride_wc, m_side)
            up = _load_channel(p_tile + (R + r) * stride_wc, m_side)
            _store_channel(p_grad + r * S, tl.sum(grad * up[:, None, :], 2), m_side, ADD)
            _store_channel(p_grad + (R + r) * S, tl.sum(grad * down[:, :, None], 1), m_side, ADD)
        if GATE & F:
            diagonal = tl.where((o_h[:, None] == o_h[None, :])[None, :, :], grad, 0.0)
            _store_channel(p_grad + 2 * R * S, tl.sum(diagonal, 2), m_side, ADD)
