"""Composed attention of a few queries (decoding, assisted decoding) over a whole cache, split over its keys, in Triton.

Heads of a group mix twice, before and after the softmax, so one program takes all M heads of a group, over one split of
the keys. Three kernels, nothing in between but maps that are linear in S:

    scores   q·k of the split, head by head -> composed in place -> maps [B, H, T, S] in float32, and the split's maxima
             and sums of exponentials
    output   all splits' maxima and sums -> softmax -> composed in place -> rounded, times v -> the split's part of the
             output; composed weights are signed and need not sum to one, so parts simply add
    add      the parts, in a fixed order; not run when there is one split

Inside a program the maps change hands through memory: the first half writes rows, head after head, the second reads
columns, all heads, with a barrier in between. The reason is shapes: products want [keys, channels] of a head, mixing
wants [heads, keys].

Key-wise weights are read where the cache keeps them, behind keys and values (`DCFormerCompose.pack`): 2R + 1 neighbours
in a row, fetched with one load. Keys that no query sees are not read.

Names: i_ index, o_ offset, m_ mask, p_ pointer, b_ block; h heads, m heads of a group, r rows (a head's queries one
after the other), t queries, s keys, d channels of a head, c channels of key-wise weights, p splits.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment, arg-type"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow; weights are optional)

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from ..chunked_dcformer import flatten_weights
from ..compose_dcformer import ComposeWeights, SideWeights
from .limits import MAX_QUERIES, require_supported
from .triton.precision import product, rounded

# What a stage composes with, as flags of the kernels.
QUERY_MAPS, QUERY_GATES, KEY_MAPS, KEY_GATES, STATIC = (tl.constexpr(1 << i) for i in range(5))
# Splits are whole units, and maps are padded to them: rows stay aligned for wide loads.
UNIT = tl.constexpr(16)

# Two waves of the 132 multiprocessors of an H100 or H200. Only a matter of speed, so it is not asked of the device.
_PROGRAMS = 264
_TILE_BYTES = 16384  # of keys or values, per stage of the software pipeline
_MAP_TILE = 512  # elements of a tile [heads, keys], if it has more than 16 keys
_STATISTICS_TILE = 1024  # of a tile [splits, heads]
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def _visible_keys(p_visible, o_t, stride_as, o_s, m_s):
    """Which keys queries see, True or False in the shape of `m_s`; p_visible None: all of `m_s`."""
    if p_visible is None:
        return m_s
    else:
        return tl.load(p_visible + o_t + o_s.to(tl.int64) * stride_as, mask=m_s, other=0) != 0


@triton.jit
def _split_keys(p_visible, stride_at, stride_as, i_p, split_len, T, S, B_T: tl.constexpr, B_V: tl.constexpr):
    """The keys of split i_p that queries see lie in first <= s < last; first is a whole unit. None: first >= last."""
    first = i_p * split_len
    last = tl.minimum(first + split_len, S)
    if p_visible is not None:
        start, stop = first, last
        first, last = stop, start
        o_t = tl.arange(0, B_T)[:, None]
        for o in range(start, stop, B_V):
            o_s = (o + tl.arange(0, B_V))[None, :]
            # [b_t, b_v]
            visible = _visible_keys(p_visible, o_t.to(tl.int64) * stride_at, stride_as, o_s, (o_t < T) & (o_s < stop))
            first = tl.minimum(first, tl.min(tl.where(visible, o_s, stop)))
            last = tl.maximum(last, tl.max(tl.where(visible, o_s + 1, start)))
        first = first // UNIT * UNIT
    return first, last


@triton.jit
def _join_splits(p_max, p_sum, n_p, m_m, H: tl.constexpr, B_M: tl.constexpr, B_P: tl.constexpr):
    """Maximum and sum of exponentials of a query's rows, [b_m], from those of all splits, [n_p, H]."""
    top, total = tl.full([B_M], float("-inf"), tl.float32), tl.zeros([B_M], tl.float32)
    o_m = tl.arange(0, B_M)
    for o in tl.range(0, n_p, B_P, num_stages=4):
        o_p = o + tl.arange(0, B_P)
        o_stat = o_p[:, None] * H + o_m[None, :]
        m_stat = (o_p < n_p)[:, None] & m_m[None, :]
        tops = tl.load(p_max + o_stat, mask=m_stat, other=float("-inf"))  # [b_p, b_m]
        sums = tl.load(p_sum + o_stat, mask=m_stat, other=0.0)  # [b_p, b_m]
        above = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - safe) + tl.sum(sums * tl.exp(tops - safe[None, :]), 0)
        top = above
    # a query that sees nothing has weights exp(-inf - 0) / 1
    return tl.where(top == float("-inf"), 0.0, top), tl.where(total == 0.0, 1.0, total)


@triton.jit
def _query_weights(
    p_down, p_up, p_gate, stride_db, stride_dh, stride_dt, stride_dr, stride_ub, stride_uh, stride_ut, stride_ur,
    stride_gb, stride_gh, stride_gt, i_b, o_h, i_t, m_m, FLAGS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Query-wise weights of query i_t: R vectors `down`, R `up` and a gate, [b_m] in float32; empty where absent."""
    down, up, gate = (), (), ()
    i_t = tl.cast(i_t, tl.int64)
    if QUERY_MAPS & FLAGS:
        p_down += i_b * stride_db + o_h * stride_dh + i_t * stride_dt
        p_up += i_b * stride_ub + o_h * stride_uh + i_t * stride_ut
        for r in tl.static_range(R):
            down = down + (tl.load(p_down + r * stride_dr, mask=m_m, other=0.0).to(tl.float32),)  # [b_m]
            up = up + (tl.load(p_up + r * stride_ur, mask=m_m, other=0.0).to(tl.float32),)  # [b_m]
    if QUERY_GATES & FLAGS:
        p_gate += i_b * stride_gb + o_h * stride_gh + i_t * stride_gt
        gate = gate + (tl.load(p_gate, mask=m_m, other=0.0).to(tl.float32),)  # [b_m]
    return down, up, gate


@triton.jit
def _channel(p_rows, m_rows, rows, c: tl.constexpr, WHOLE_ROWS: tl.constexpr, B_C: tl.constexpr):
    """Channel c of key-wise weights, [b_m, b_s] in float32: out of whole rows [b_m, b_s, b_c], or from memory."""
    if WHOLE_ROWS:
        m_c = tl.arange(0, B_C)[None, None, :] == c
        return tl.sum(tl.where(m_c, rows, 0.0), 2).to(tl.float32)
    else:
        return tl.load(p_rows + c, mask=m_rows, other=0.0).to(tl.float32)


@triton.jit
def _compose_tile(
    tile, query, p_rows, stride_wh, stride_ws, p_static, p_maps, stride_map, o_h, o_m, m_m, o_s, m_s, end, n_m,
    M: tl.constexpr, FLAGS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    ALIGN_W: tl.constexpr, B_C: tl.constexpr,
):  # fmt: skip
    """Composes one query's maps of all heads of a group, [b_m, b_s]: the five branches of `compose`, in float32.

    query: from `_query_weights`. p_rows: key-wise weights of a batch row. p_maps: the tile's first head in memory, up
    to key `end`; a static projection reads one head after the other. m_s: the keys that there are. n_m: M as a
    variable, because ptxas unrolls a loop of constant length until the registers run out.
    """
    down, up, gate = query
    out = tile
    if QUERY_MAPS & FLAGS:
        for r in tl.static_range(R):
            hidden = tl.sum(tile * down[r][:, None], 0)  # [b_s]
            out += hidden[None, :] * up[r][:, None]
    if QUERY_GATES & FLAGS:
        out += tile * gate[0][:, None]
    if (KEY_MAPS | KEY_GATES) & FLAGS:
        p_rows += (o_h[:, None] * stride_wh + o_s.to(tl.int64)[None, :] * stride_ws) * ALIGN_W
        m_rows = m_m[:, None] & m_s[None, :]
        rows = m_rows
        if WHOLE_ROWS:
            # [b_m, b_s, b_c]
            rows = tl.load(p_rows[:, :, None] + tl.arange(0, B_C)[None, None, :], mask=m_rows[:, :, None], other=0.0)
        if KEY_MAPS & FLAGS:
            for r in tl.static_range(R):
                hidden = tl.sum(tile * _channel(p_rows, m_rows, rows, r, WHOLE_ROWS, B_C), 0)  # [b_s]
                out += hidden[None, :] * _channel(p_rows, m_rows, rows, R + r, WHOLE_ROWS, B_C)
        if KEY_GATES & FLAGS:
            out += tile * _channel(p_rows, m_rows, rows, C - 1, WHOLE_ROWS, B_C)
    if STATIC & FLAGS:
        for j in range(n_m):
            source = tl.load(p_maps + j * stride_map + o_s, mask=o_s < end, other=0.0)  # [b_s]
            column = tl.load(p_static + j * M + o_m, mask=m_m, other=0.0).to(tl.float32)  # [b_m]
            out += column[:, None] * source[None, :]
    return out


# --- kernels ----------------------------------------------------------------------------------------------------------

# Lengths and strides change from step to step or from model to model; none of them is worth a compilation of its own.
_VARYING = ["T", "S", "n_m", "n_p", "n_out", "split_len", "stride_map"]
_VARYING += [f"stride_{x}{y}" for x in ("q", "k", "v", "d", "u", "g", "w", "a") for y in ("b", "h", "t", "s", "r")]


@triton.jit(do_not_specialize=_VARYING)
def scores_kernel(
    p_q, p_k, p_visible, p_down, p_up, p_gate, p_rows, p_static, p_maps, p_max, p_sum,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_ab, stride_at, stride_as,
    stride_db, stride_dh, stride_dt, stride_dr, stride_ub, stride_uh, stride_ut, stride_ur,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_ws,
    T, S, n_m, n_p, split_len, stride_map, scale,
    G: tl.constexpr, M: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    FLAGS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    ALIGN_Q: tl.constexpr, ALIGN: tl.constexpr, ALIGN_W: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    B_R: tl.constexpr, B_S: tl.constexpr, B_D: tl.constexpr,
    B_M: tl.constexpr, B_N: tl.constexpr, B_C: tl.constexpr, B_T: tl.constexpr, B_V: tl.constexpr,
):  # fmt: skip
    """Composed and masked scores of one split, batch row and group: maps [B, H, T, stride_map·16], and the maximum and
    sum of exponentials of each row in the split, [B, T, n_p, H].

    Strides of queries, keys and key-wise weights are in units of ALIGN_Q, ALIGN and ALIGN_W elements, so that the
    compiler knows what they are multiples of.
    """
    i_p, i_bg = tl.program_id(0) % n_p, tl.program_id(0) // n_p
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    H: tl.constexpr = G * M
    stride_map = stride_map.to(tl.int64) * UNIT
    p_maps += (i_b * H + i_g * M) * T * stride_map
    if p_visible is not None:
        p_visible += i_b * stride_ab
    first, last = _split_keys(p_visible, stride_at, stride_as, i_p, split_len, T, S, B_T, B_V)
    end = (last + UNIT - 1) // UNIT * UNIT  # maps are written up to here: -inf beyond `last`

    # Scores, one block of rows after the other. SHARED heads in a row have the same key/value head.
    p_q += i_b * stride_qb * ALIGN_Q
    p_k += i_b * stride_kb * ALIGN
    o_d = tl.arange(0, B_D)
    n_s, n_r = tl.cdiv(last - first, B_S), tl.cdiv(SHARED * T, B_R)
    for i in tl.range(0, M // SHARED * n_r * n_s, num_stages=STAGES):
        i_u = i // tl.maximum(n_r * n_s, 1)  # what fills the pipeline runs even if there is nothing to do
        o_r = i // tl.maximum(n_s, 1) % n_r * B_R + tl.arange(0, B_R)
        m_r = o_r < SHARED * T
        o_rm, o_rt = i_u * SHARED + o_r // T, o_r % T
        o_s = first + i % tl.maximum(n_s, 1) * B_S + tl.arange(0, B_S)
        m_s = o_s < last
        p_row = p_q + ((i_g * M + o_rm).to(tl.int64) * stride_qh + o_rt.to(tl.int64) * stride_qt) * ALIGN_Q
        q = tl.load(p_row[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)  # [b_r, b_d]
        if DOT:
            i_h = ((i_g * M + i_u * SHARED) // REP).to(tl.int64)
            # [b_d, b_s]
            p_tile = p_k + (i_h * stride_kh + o_s.to(tl.int64) * stride_ks)[None, :] * ALIGN + o_d[:, None]
            k = tl.load(p_tile, mask=(o_d < D)[:, None] & m_s[None, :], other=0.0)
            scores = product(q, k)
        else:
            o_h = ((i_g * M + o_rm) // REP).to(tl.int64)
            p_row = p_k + (o_h[:, None] * stride_kh + o_s.to(tl.int64)[None, :] * stride_ks) * ALIGN
            # [b_r, b_s, b_d]
            m_tile = (m_r[:, None] & m_s[None, :])[:, :, None] & (o_d < D)[None, None, :]
            k = tl.load(p_row[:, :, None] + o_d[None, None, :], mask=m_tile, other=0.0)
            scores = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2)
        p_tile = p_maps + (o_rm * T + o_rt)[:, None] * stride_map + o_s[None, :]
        tl.store(p_tile, scores * scale, mask=m_r[:, None] & (o_s < end)[None, :])
    tl.debug_barrier()

    # Composition, one query after the other.
    o_m = tl.arange(0, B_M)
    m_m = o_m < M
    o_h = (i_g * M + o_m).to(tl.int64)
    if (KEY_MAPS | KEY_GATES) & FLAGS:
        p_rows += i_b * stride_wb * ALIGN_W
    if STATIC & FLAGS:
        p_static += i_g * M * M
    for i_t in range(T):
        query = _query_weights(
            p_down, p_up, p_gate, stride_db, stride_dh, stride_dt, stride_dr, stride_ub, stride_uh, stride_ut,
            stride_ur, stride_gb, stride_gh, stride_gt, i_b, o_h, i_t, m_m, FLAGS, R,
        )  # fmt: skip
        p_query = p_maps + i_t * stride_map
        top, total = tl.full([B_M], float("-inf"), tl.float32), tl.zeros([B_M], tl.float32)
        for o in range(first, last, B_N):
            o_s = o + tl.arange(0, B_N)
            p_tile = p_query + o_m[:, None] * (T * stride_map) + o_s[None, :]
            m_tile = m_m[:, None] & (o_s < end)[None, :]
            tile = tl.load(p_tile, mask=m_tile, other=0.0)  # [b_m, b_n]
            tile = _compose_tile(
                tile, query, p_rows, stride_wh, stride_ws, p_static, p_query, T * stride_map, o_h, o_m, m_m, o_s,
                o_s < last, end, n_m, M, FLAGS, R, C, WHOLE_ROWS, ALIGN_W, B_C,
            )  # fmt: skip
            visible = _visible_keys(p_visible, tl.cast(i_t, tl.int64) * stride_at, stride_as, o_s, o_s < last)  # [b_n]
            tile = tl.where(visible[None, :], tile, float("-inf"))
            tl.debug_barrier()  # what was read above is overwritten below
            tl.store(p_tile, tile, mask=m_tile)
            above = tl.maximum(top, tl.max(tile, 1))
            safe = tl.where(above == float("-inf"), 0.0, above)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(tile - safe[:, None]), 1)
            top = above
        o_statistics = ((i_b * T + i_t) * n_p + i_p) * H + o_h
        tl.store(p_max + o_statistics, top, mask=m_m)
        tl.store(p_sum + o_statistics, total, mask=m_m)


@triton.jit(do_not_specialize=_VARYING)
def output_kernel(
    p_v, p_visible, p_down, p_up, p_gate, p_rows, p_static, p_maps, p_max, p_sum, p_out,
    stride_vb, stride_vh, stride_vs, stride_ab, stride_at, stride_as,
    stride_db, stride_dh, stride_dt, stride_dr, stride_ub, stride_uh, stride_ut, stride_ur,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_ws,
    T, S, n_m, n_p, split_len, stride_map, n_out,
    G: tl.constexpr, M: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    FLAGS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_W: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    B_R: tl.constexpr, B_S: tl.constexpr, B_D: tl.constexpr, B_P: tl.constexpr,
    B_M: tl.constexpr, B_N: tl.constexpr, B_C: tl.constexpr, B_T: tl.constexpr, B_V: tl.constexpr,
):  # fmt: skip
    """Softmax, composition and product with the values for one split, batch row and group: its part of the output,
    [n_p, B, T, H, D]. Arguments as in `scores_kernel`; the maps become the composed weights.
    """
    i_p, i_bg = tl.program_id(0) % n_p, tl.program_id(0) // n_p
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    H: tl.constexpr = G * M
    stride_map = stride_map.to(tl.int64) * UNIT
    p_maps += (i_b * H + i_g * M) * T * stride_map
    if p_visible is not None:
        p_visible += i_b * stride_ab
    first, last = _split_keys(p_visible, stride_at, stride_as, i_p, split_len, T, S, B_T, B_V)
    end = (last + UNIT - 1) // UNIT * UNIT

    # Softmax and composition, one query after the other; none where nothing is seen.
    o_m = tl.arange(0, B_M)
    m_m = o_m < M
    o_h = (i_g * M + o_m).to(tl.int64)
    if (KEY_MAPS | KEY_GATES) & FLAGS:
        p_rows += i_b * stride_wb * ALIGN_W
    if STATIC & FLAGS:
        p_static += i_g * M * M
    for i_t in range(tl.where(first < last, T, 0)):
        query = _query_weights(
            p_down, p_up, p_gate, stride_db, stride_dh, stride_dt, stride_dr, stride_ub, stride_uh, stride_ut,
            stride_ur, stride_gb, stride_gh, stride_gt, i_b, o_h, i_t, m_m, FLAGS, R,
        )  # fmt: skip
        o_statistics = (i_b * T + i_t) * n_p * H + i_g * M
        top, total = _join_splits(p_max + o_statistics, p_sum + o_statistics, n_p, m_m, H, B_M, B_P)
        p_query = p_maps + i_t * stride_map
        for o in range(first, last, B_N):
            o_s = o + tl.arange(0, B_N)
            p_tile = p_query + o_m[:, None] * (T * stride_map) + o_s[None, :]
            m_tile = m_m[:, None] & (o_s < end)[None, :]
            tile = tl.load(p_tile, mask=m_tile, other=float("-inf"))  # [b_m, b_n]
            tile = tl.exp(tile - top[:, None]) / total[:, None]
            if STATIC & FLAGS:
                tl.debug_barrier()
                tl.store(p_tile, tile, mask=m_tile)
                tl.debug_barrier()
            tile = _compose_tile(
                tile, query, p_rows, stride_wh, stride_ws, p_static, p_query, T * stride_map, o_h, o_m, m_m, o_s,
                o_s < last, end, n_m, M, FLAGS, R, C, WHOLE_ROWS, ALIGN_W, B_C,
            )  # fmt: skip
            tl.debug_barrier()
            tl.store(p_tile, tile, mask=m_tile)
    tl.debug_barrier()

    # The product with the values, one block of rows after the other: at least one of keys, so that zeros are written.
    p_v += i_b * stride_vb * ALIGN
    o_d = tl.arange(0, B_D)
    n_s, n_r = tl.maximum(tl.cdiv(last - first, B_S), 1), tl.cdiv(SHARED * T, B_R)
    acc = tl.zeros([B_R, B_D], tl.float32)
    for i in tl.range(0, M // SHARED * n_r * n_s, num_stages=STAGES):
        i_u, i_s = i // (n_r * n_s), i % n_s
        o_r = i // tl.maximum(n_s, 1) % n_r * B_R + tl.arange(0, B_R)
        m_r = o_r < SHARED * T
        o_rm, o_rt = i_u * SHARED + o_r // T, o_r % T
        o_s = first + i_s * B_S + tl.arange(0, B_S)
        m_s = o_s < last
        p_tile = p_maps + (o_rm * T + o_rt)[:, None] * stride_map + o_s[None, :]
        weights = tl.load(p_tile, mask=m_r[:, None] & (o_s < end)[None, :], other=0.0)  # [b_r, b_s]
        weights = rounded(weights, p_v.dtype.element_ty)
        acc = tl.where(i_s == 0, 0.0, acc)
        if DOT:
            i_h = ((i_g * M + i_u * SHARED) // REP).to(tl.int64)
            # [b_s, b_d]
            p_tile = p_v + (i_h * stride_vh + o_s.to(tl.int64) * stride_vs)[:, None] * ALIGN + o_d[None, :]
            v = tl.load(p_tile, mask=m_s[:, None] & (o_d < D)[None, :], other=0.0)
            acc += product(weights, v)
        else:
            o_kv = ((i_g * M + o_rm) // REP).to(tl.int64)
            p_row = p_v + (o_kv[:, None] * stride_vh + o_s.to(tl.int64)[None, :] * stride_vs) * ALIGN
            # [b_r, b_s, b_d]
            m_tile = (m_r[:, None] & m_s[None, :])[:, :, None] & (o_d < D)[None, None, :]
            v = tl.load(p_row[:, :, None] + o_d[None, None, :], mask=m_tile, other=0.0)
            acc += tl.sum(weights.to(tl.float32)[:, :, None] * v.to(tl.float32), 1)
        o_out = i_p.to(tl.int64) * n_out + ((i_b * T + o_rt) * H + i_g * M + o_rm) * D
        m_out = (m_r & (i_s == n_s - 1))[:, None] & (o_d < D)[None, :]
        tl.store(p_out + o_out[:, None] + o_d[None, :], rounded(acc, p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=_VARYING)
def add_kernel(p_parts, p_out, n_p, n_out, B_P: tl.constexpr, B_N: tl.constexpr):
    """Adds the parts of the output, [n_p, n_out] in float32, always in the same order."""
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    m_n = o_n < n_out
    acc = tl.zeros([B_N], tl.float32)
    for o in range(0, n_p, B_P):
        o_p = o + tl.arange(0, B_P)
        # [b_p, b_n]
        p_tile = p_parts + o_p[:, None].to(tl.int64) * n_out + o_n[None, :]
        acc += tl.sum(tl.load(p_tile, mask=(o_p < n_p)[:, None] & m_n[None, :], other=0.0), 0)
    tl.store(p_out + o_n, rounded(acc, p_out.dtype.element_ty), mask=m_n)


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass
class _Launch:
    """One kernel launch: everything that compilation and the launcher need to know."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 8
    num_stages: int = 3
    maxnreg: int = 128  # two programs of 8 warps per multiprocessor; left alone, ptxas may spill to squeeze in more

    def run(self) -> None:
        """Launches the kernel."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
        self.kernel[(self.programs,)](**self.arguments, **self.constants, **options)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def split_keys(
    programs: int, queries: int, keys: int, row_bytes: float, num_splits: int | None = None
) -> tuple[int, int]:
    """How to split S keys: (number of splits, their length in whole units of 16 keys).

    Args:
        programs: programs per split, B·G.
        queries: T.
        keys: S.
        row_bytes: bytes that a key adds to what a program reads per head.
        num_splits: the most splits to make; None for a choice that depends on shapes alone.

    By default there are two waves of programs on a large GPU. A program reads its part of the cache and, per query, the
    statistics of all splits (8 bytes per head), so beyond sqrt(S · row_bytes / (8 · T)) splits it only takes longer.
    """
    if num_splits is None:
        num_splits = _ceil_div(_PROGRAMS, programs)
        num_splits = min(num_splits, int(math.sqrt(keys * row_bytes / (8 * queries))))
    length = _ceil_div(_ceil_div(keys, max(1, num_splits)), UNIT.value) * UNIT.value
    return _ceil_div(keys, length), length


def _alignment(tensor: torch.Tensor) -> int:
    """The largest power of two of elements, up to 16 bytes, of which all strides but the last are multiples."""
    align = 16 // tensor.element_size()
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        while size > 1 and stride % align:
            align //= 2
    return align


def _key_rows(side: SideWeights) -> torch.Tensor:
    """Key-wise weights as rows [B, H, S, C] of neighbours: `down`, `up`, gate; if possible a view."""
    parts = [w if w.dim() == 4 else w[..., None] for w in side.tensors()]
    first = parts[0]
    channels = sum(w.shape[-1] for w in parts)
    offset = first.storage_offset()
    in_place = True
    for w in parts:
        in_place &= (
            w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and w.dtype == first.dtype
            and w.storage_offset() == offset
            and w.stride()[:3] == first.stride()[:3]
            and (w.shape[-1] == 1 or w.stride(3) == 1)
        )
        offset += w.shape[-1]
    if in_place:
        return first.as_strided((*first.shape[:3], channels), (*first.stride()[:3], 1))
    return torch.cat(parts, dim=-1)


def _can_load_whole(rows: torch.Tensor, width: int, align: int) -> bool:
    """Whether `width` channels from the start of each row are memory of the tensor, and aligned for wide loads."""
    end = rows.storage_offset() + sum((n - 1) * s for n, s in zip(rows.shape[:-1], rows.stride()[:-1], strict=True))
    has_room = (end + width) * rows.element_size() <= rows.untyped_storage().nbytes()
    return has_room and align >= min(width, 16 // rows.element_size()) and rows.storage_offset() % align == 0


def _strides(prefix: str, names: str, tensor: torch.Tensor | None, unit: int = 1) -> dict[str, int]:
    strides = tensor.stride() if tensor is not None else (0,) * len(names)
    return {f"stride_{prefix}{name}": stride // unit for name, stride in zip(names, strides, strict=False)}


def _stage_arguments(stage: ComposeWeights | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of both kernels that come from a stage's composition weights."""
    stage = stage or ComposeWeights()
    query, key = _only_whole_pairs(stage.query), _only_whole_pairs(stage.key)
    flags = QUERY_MAPS.value * (query.down is not None) | QUERY_GATES.value * (query.gate is not None)
    flags |= KEY_MAPS.value * (key.down is not None) | KEY_GATES.value * (key.gate is not None)
    flags |= STATIC.value * (stage.static is not None)
    rank = max((w.shape[-1] for w in (query.down, key.down) if w is not None), default=0)
    rows = _key_rows(key) if key.tensors() else None
    channels = rows.shape[-1] if rows is not None else 1
    width = _power_of_2(channels)
    align = _alignment(rows) if rows is not None else 1
    arguments = {
        "p_down": query.down,
        "p_up": query.up,
        "p_gate": query.gate,
        "p_rows": rows,
        "p_static": stage.static.contiguous() if stage.static is not None else None,
        **_strides("d", "bhtr", query.down),
        **_strides("u", "bhtr", query.up),
        **_strides("g", "bht", query.gate),
        **_strides("w", "bhs", rows, align),
    }
    constants = {
        "FLAGS": flags,
        "R": rank,
        "C": channels,
        "B_C": width,
        "WHOLE_ROWS": rows is not None and _can_load_whole(rows, width, align),
        "ALIGN_W": align,
    }
    return arguments, constants


def _only_whole_pairs(side: SideWeights | None) -> SideWeights:
    """As in the definition, a low-rank pair counts only when both halves are there."""
    side = side or SideWeights()
    return side if side.down is not None and side.up is not None else SideWeights(gate=side.gate)


@dataclass
class _Plan:
    """The launches of one call, the output [B, T, H, Dv], and nothing that depends on more than shapes and strides."""

    output: torch.Tensor
    launches: list[_Launch] = field(default_factory=list)


def _plan(query, key, value, pre, post, visible, groups, scale, num_splits) -> _Plan:
    """Allocates the output and what lies in between, and chooses tiles, by shapes and strides only."""
    (B, H, T, D), S, DV = query.shape, key.shape[2], value.shape[3]
    M, repeats, item = H // groups, H // key.shape[1], query.element_size()
    row_bytes = (D + DV) / 2 * item / repeats
    n_p, split_len = split_keys(B * groups, T, S, row_bytes, num_splits)
    dot = item == 2 and math.gcd(M, repeats) * T > 1  # tensor cores need several rows per key
    shared = math.gcd(M, repeats) if dot else M
    units = _ceil_div(S, UNIT.value)
    b_m = _power_of_2(M)
    visible_strides = (0, 0, 0)
    if visible is not None:
        visible = visible.view(torch.uint8)
        visible_strides = (visible.stride(0) if visible.shape[0] > 1 else 0, visible.stride(2), visible.stride(3))

    def tile(dim: int) -> dict[str, int]:
        """Block sizes of rows, keys and channels."""
        b_d = max(16, _power_of_2(dim))
        longest = max(16, _power_of_2(min(split_len, S)))
        if dot:
            b_r = min(max(16, _power_of_2(shared * T)), 32 if b_d <= 128 else 16)
            return {"B_R": b_r, "B_S": min(64 if b_d <= 128 else 32, longest), "B_D": b_d}
        elements = _TILE_BYTES // item
        b_r = min(4, _power_of_2(M * T), max(1, elements // (UNIT.value * b_d)))
        return {"B_R": b_r, "B_S": min(128, longest, max(UNIT.value, elements // (b_r * b_d))), "B_D": b_d}

    new = {"device": query.device, "dtype": torch.float32}
    output = torch.empty((B, T, H, DV), device=query.device, dtype=query.dtype)
    maps = torch.empty((B, H, T, units * UNIT.value), **new)
    tops, sums = torch.empty((B, T, n_p, H), **new), torch.empty((B, T, n_p, H), **new)
    parts = torch.empty((n_p, *output.shape), **new) if n_p > 1 else output
    arguments = {
        "p_visible": visible,
        "p_maps": maps,
        "p_max": tops,
        "p_sum": sums,
        "stride_ab": visible_strides[0],
        "stride_at": visible_strides[1],
        "stride_as": visible_strides[2],
        "T": T,
        "S": S,
        "n_m": M,
        "n_p": n_p,
        "split_len": split_len,
        "stride_map": units,
    }
    constants = {
        "G": groups,
        "M": M,
        "REP": repeats,
        "SHARED": shared,
        "DOT": dot,
        "STAGES": 3 if dot else 4,
        "B_M": b_m,
        "B_N": min(max(16, _MAP_TILE // b_m), 128, max(16, _power_of_2(min(split_len, S)))),
        "B_T": 1 if T == 1 else MAX_QUERIES,
        "B_V": 128,
    }
    stage_arguments, stage_constants = _stage_arguments(pre)
    align_q, align = _alignment(query), _alignment(key)
    scores = _Launch(
        scores_kernel,
        n_p * B * groups,
        {"p_q": query, "p_k": key, **arguments, **stage_arguments, "scale": scale}
        | _strides("q", "bht", query, align_q)
        | _strides("k", "bhs", key, align),
        constants | stage_constants | tile(D) | {"D": D, "ALIGN_Q": align_q, "ALIGN": align},
    )
    stage_arguments, stage_constants = _stage_arguments(post)
    align = _alignment(value)
    b_p = min(_power_of_2(n_p), max(16, _STATISTICS_TILE // b_m))
    weighted = _Launch(
        output_kernel,
        n_p * B * groups,
        {"p_v": value, "p_out": parts, **arguments, **stage_arguments, "n_out": output.numel()}
        | _strides("v", "bhs", value, align),
        constants | stage_constants | tile(DV) | {"D": DV, "ALIGN": align, "B_P": b_p},
    )
    for launch in (scores, weighted):  # cases that need more registers: one program per multiprocessor
        many_rows = dot and (launch.constants["B_R"] > 16 or b_m > 32)
        if many_rows or launch.constants["FLAGS"] & STATIC.value or item == 4:
            launch.maxnreg = 255
    plan = _Plan(output, [scores, weighted])
    if n_p > 1:
        b_p = min(128, _power_of_2(n_p))
        b_n = 4096 // b_p
        constants = {"B_P": b_p, "B_N": b_n}
        arguments = {"p_parts": parts, "p_out": output, "n_p": n_p, "n_out": output.numel()}
        plan.launches.append(_Launch(add_kernel, _ceil_div(output.numel(), b_n), arguments, constants))
    return plan


@torch.library.custom_op("dcformer::composed_decode", mutates_args=())
def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre_query_down: torch.Tensor | None,
    pre_query_up: torch.Tensor | None,
    pre_query_gate: torch.Tensor | None,
    pre_key_down: torch.Tensor | None,
    pre_key_up: torch.Tensor | None,
    pre_key_gate: torch.Tensor | None,
    pre_static: torch.Tensor | None,
    post_query_down: torch.Tensor | None,
    post_query_up: torch.Tensor | None,
    post_query_gate: torch.Tensor | None,
    post_key_down: torch.Tensor | None,
    post_key_up: torch.Tensor | None,
    post_key_gate: torch.Tensor | None,
    post_static: torch.Tensor | None,
    visible: torch.Tensor | None,
    groups: int,
    scale: float,
    num_splits: int | None,
) -> torch.Tensor:
    """`composed_decode` as an operator: weights flattened, arguments checked."""
    if 0 in (query.shape[0], key.shape[2]):
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    pre = ComposeWeights(
        SideWeights(pre_query_down, pre_query_up, pre_query_gate),
        SideWeights(pre_key_down, pre_key_up, pre_key_gate),
        pre_static,
    )
    post = ComposeWeights(
        SideWeights(post_query_down, post_query_up, post_query_gate),
        SideWeights(post_key_down, post_key_up, post_key_gate),
        post_static,
    )
    plan = _plan(query, key, value, pre, post, visible, groups, scale, num_splits)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        for launch in plan.launches:
            launch.run()
    return plan.output


@_decode.register_fake
def _(query, key, value, *_):
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def composed_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scale: float,
    visible: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Composed attention of a few queries per sequence over all keys; linear in S. Rounds where `eager_attention` does.

    Reads nothing back from the device and chooses everything by shapes and strides, so it can be captured in a CUDA
    graph; for `torch.compile` it is one operator. The sum over splits has a fixed order: results are reproducible.

    Args:
        query: [B, H, T, D], 1 <= T <= 16; float32, float16 or bfloat16.
        key: [B, Hkv, S, D] of the same dtype, H a multiple of Hkv. Like all tensors here it may be a view, a packed
            cache's first D channels; only its last dimension must be contiguous.
        value: [B, Hkv, S, Dv], likewise.
        pre, post: what to compose scores and weights with, every part optional; None for no composition. Key-wise
            `down`, `up` and gate that are neighbours in memory, as `DCFormerCompose.unpack` gives them without
            grouped-query attention, are read in place; others are copied into rows, [B, H, S, 2R + 1], first.
        scale: factor of the scores, usually D ** -0.5.
        visible: bool [B or 1, 1, T, S], any pattern; None: every query sees all keys. A query that sees nothing gets
            zeros. Keys that no query sees cost nothing.
        num_splits: the most splits of the keys to make (fewer where they would be shorter than 16 keys); None for a
            choice that fills a large GPU.

    Returns:
        [B, T, H, Dv], contiguous, in the dtype of `query`.

    Raises:
        ValueError: on shapes, dtypes or devices that do not fit, where gradients would be needed, and beyond
            `unsupported_reason`.
    """
    groups = _check(query, key, value, pre, post, visible, num_splits)
    return _decode(
        query, key, value, *flatten_weights(pre), *flatten_weights(post), visible, groups, float(scale), num_splits
    )  # fmt: skip


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(query, key, value, pre, post, visible, num_splits) -> int:
    """Refuses what the kernels cannot do. Returns the number of groups of heads that mix."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if (
        {query.dim(), key.dim(), value.dim()} != {4}
        or query.shape[0] != key.shape[0]
        or key.shape[:3] != value.shape[:3]
        or query.shape[3] != key.shape[3]
        or key.shape[1] == 0
        or query.shape[1] % key.shape[1]
    ):
        raise ValueError(
            f"{shapes} do not fit together: expected [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, Dv] with H a "
            "multiple of Hkv."
        )
    B, H, T, D = query.shape
    S = key.shape[2]
    if not 1 <= T <= MAX_QUERIES:
        raise ValueError(
            f"composed_decode takes 1 to {MAX_QUERIES} queries per sequence, not {T}. Longer pieces (a prefill) are "
            "for the forward kernels or attn_implementation='dcformer_chunked'."
        )
    for dim in (D, value.shape[3]):
        require_supported(device=query.device, dtype=query.dtype, head_dim=dim)
    if {key.dtype, value.dtype} != {query.dtype}:
        raise ValueError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: expected one dtype.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(3) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}: expected its last dimension to be contiguous. Pass "
                f"{name}.contiguous()."
            )
    if visible is not None:
        shape = tuple(visible.shape)
        if visible.dtype != torch.bool or len(shape) != 4 or shape[0] not in (1, B) or shape[1:] != (1, T, S):
            raise ValueError(
                f"visible is {visible.dtype} {shape}: expected bool [{B} or 1, 1, {T}, {S}], True where a query sees a "
                "key. Turn an additive mask into one with `mask > torch.finfo(mask.dtype).min / 2`."
            )
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits}: expected at least 1, or None to have it chosen.")
    groups = _check_weights(H, key.shape[1], B, T, S, pre, post)
    tensors = [query, key, value, visible, *flatten_weights(pre), *flatten_weights(post)]
    given = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise ValueError(
            "composed_decode has no backward pass and one of its inputs requires gradients. Decode under "
            "torch.no_grad(), or use attn_implementation='dcformer_chunked'."
        )
    devices = {str(t.device) for t in given}
    if len(devices) > 1:
        raise ValueError(
            f"tensors are on {', '.join(sorted(devices))}: expected all on one device. Move them together."
        )
    return groups


def _check_weights(H: int, KV: int, B: int, T: int, S: int, pre, post) -> int:
    groups = {weights.groups for weights in (pre, post) if weights is not None}
    if len(groups) > 1:
        raise ValueError(f"pre and post have {pre.groups} and {post.groups} groups of heads: expected the same number.")
    G = groups.pop() if groups else KV  # without composition no heads mix
    if G < 1 or H % G:
        raise ValueError(f"{G} groups do not divide {H} heads: expected `ComposeWeights.groups` to be a divisor of H.")
    for stage, weights in (("pre", pre), ("post", post)):
        if weights is None:
            continue
        ranks = set()
        for side, length in (("query", T), ("key", S)):
            sided = getattr(weights, side) or SideWeights()
            for part in ("down", "up", "gate"):
                tensor = getattr(sided, part)
                if tensor is None:
                    continue
                expected = (B, H, length) if part == "gate" else (B, H, length, *tensor.shape[3:4])
                if tuple(tensor.shape) != expected or not tensor.is_floating_point():
                    raise ValueError(
                        f"{stage}.{side}.{part} is {tensor.dtype} {tuple(tensor.shape)}: expected floating point "
                        f"{(B, H, length) if part == 'gate' else f'({B}, {H}, {length}, R)'}. Make the weights from "
                        f"the same tokens as the {'queries' if side == 'query' else 'keys'}."
                    )
                if part != "gate":
                    ranks.add(tensor.shape[3])
        if len(ranks) > 1:
            raise ValueError(f"{stage} has low-rank weights of ranks {sorted(ranks)}: expected one rank.")
        require_supported(rank=max(ranks, default=0))
        if weights.static is not None and tuple(weights.static.shape) != (G, H // G, H // G):
            raise ValueError(
                f"{stage}.static is {tuple(weights.static.shape)}: expected [G, M, M] = {(G, H // G, H // G)}."
            )
    return G


# --- ahead of time ----------------------------------------------------------------------------------------------------

# (name, heads, head dim): the sizes of the paper that the kernels are meant for
SHAPES = (("405M", 16, 64), ("2.8B", 32, 80), ("6.9B", 32, 128), ("13B", 40, 128))


def kernel_specs(
    shapes: tuple[tuple[str, int, int], ...] = SHAPES, dtype: torch.dtype = torch.bfloat16, keys: int = 2048
) -> list[dict[str, Any]]:
    """What to compile ahead of time: the kernels of fully composed decoding (R = 2, all four generators, gates, packed
    cache, a mask) as they are launched for one query (batch 1 and 64) and for 8 queries.

    Returns:
        dictionaries with "label", "kernel" (the jitted function), "signature" (argument -> type, in order),
        "constexprs" (argument -> value), "attrs" (alignment of pointers, as `triton.compiler.ASTSource` takes it), and
        the options "num_warps", "num_stages" and "maxnreg".
    """
    specs = []
    for name, heads, dim in shapes:
        for batch, queries in ((1, 1), (64, 1), (1, 8)):
            example = _example(batch, heads, queries, keys, dim, dtype)
            plan = _plan(**example, groups=1, scale=dim**-0.5, num_splits=None)
            for launch in plan.launches:
                label = f"decode {launch.kernel.__name__.removesuffix('_kernel')} {name} B={batch} T={queries}"
                specs.append({"label": label, **_spec(launch)})
    return specs


def _example(batch, heads, queries, keys, dim, dtype):
    """Tensors without memory, as a model has them when it decodes."""

    def new(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    def stage():
        packed = new(batch, heads, keys, dim + 8)
        weights = packed[..., dim : dim + 5]
        query = SideWeights(new(batch, heads, queries, 2), new(batch, heads, queries, 2), new(batch, heads, queries))
        return packed[..., :dim], ComposeWeights(
            query, SideWeights(weights[..., :2], weights[..., 2:4], weights[..., 4])
        )

    (key, pre), (value, post) = stage(), stage()
    visible = torch.empty((batch, 1, queries, keys), dtype=torch.bool, device="meta")
    query = new(batch, heads, queries, dim)
    return {"query": query, "key": key, "value": value, "pre": pre, "post": post, "visible": visible}


def _spec(launch: _Launch) -> dict[str, Any]:
    signature, constants, attrs = {}, dict(launch.constants), {}
    for i, name in enumerate(launch.kernel.arg_names):
        argument = launch.arguments.get(name)
        if argument is None:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        elif isinstance(argument, torch.Tensor):
            kind = {torch.uint8: "u8"}.get(argument.dtype) or str(_DTYPES[argument.dtype])
            signature[name] = f"*{kind}"
            if argument.storage_offset() * argument.element_size() % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(argument, float) else "i32" if argument < 2**31 else "i64"
    return {
        "kernel": launch.kernel,
        "signature": signature,
        "constexprs": constants,
        "attrs": attrs,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "maxnreg": launch.maxnreg,
    }


__all__ = ["MAX_QUERIES", "composed_decode", "kernel_specs"]
