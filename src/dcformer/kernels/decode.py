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

Key-wise weights are read where the cache keeps them, behind keys and values (`DCFormerCompose.pack`): 2R + 1 neighbors
for each query head, the low rank's fetched with one load where they are aligned. Keys that no query sees are not read.

Names: i_ index, o_ offset, m_ mask, p_ pointer, b_ block; h heads, m heads of a group, r rows (a head's queries one
after the other), t queries, s keys, d channels of a head, c channels of key-wise weights, p splits.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment, arg-type"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow; weights are optional)

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_dcformer import refuse_transforms
from ..compose_dcformer import ComposeWeights
from ..implementations_dcformer import TRITON
from .layout import (
    Layout,
    Part,
    Stage,
    check_states,
    check_types,
    check_weights,
    packed_weights,
    plain_groups,
    stages_of,
)
from .limits import MAX_QUERIES, require_supported
from .repeated import Launch, Repeated
from .schemas import DEVICES, decode_op, place_tensors, refuse_backward
from .sizes import ceil_div, power_of_2, round_up
from .triton.heads import GATE, KEY, QUERY, STATIC
from .triton.precision import product, rounded

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
def _ring_offset(p_place, S):
    """How many rows of a ring the oldest token's lies behind the first one."""
    return (tl.maximum(tl.load(p_place).to(tl.int64) + 1 - S, 0) % S).to(tl.int32)


@triton.jit
def _visible_keys(p_visible, o_t, stride_as, o_s, m_s, offset, S):
    """Which keys queries see, True or False in the shape of `m_s`; p_visible None: all of `m_s`. The mask has them in
    the order of tokens, which begins `offset` rows behind that of a ring."""
    if p_visible is None:
        return m_s
    else:
        if offset is not None:
            o_s = tl.where(o_s < offset, o_s + S, o_s) - offset
        return tl.load(p_visible + o_t + o_s.to(tl.int64) * stride_as, mask=m_s, other=0) != 0


@triton.jit
def _split_keys(p_visible, stride_at, stride_as, offset, i_p, split_len, T, S, B_T: tl.constexpr, B_V: tl.constexpr):
    """The keys of split i_p that queries see lie in first <= s < last; first is a whole unit. None: first >= last."""
    first = i_p * split_len
    last = tl.maximum(tl.minimum(first + split_len, S), first)  # splits behind the last key are empty
    if p_visible is not None:
        start, stop = first, last
        first, last = stop, start
        o_t = tl.arange(0, B_T)[:, None]
        for o in range(start, stop, B_V):
            o_s = (o + tl.arange(0, B_V))[None, :]
            o_a, m_tile = o_t.to(tl.int64) * stride_at, (o_t < T) & (o_s < stop)
            visible = _visible_keys(p_visible, o_a, stride_as, o_s, m_tile, offset, S)  # [b_t, b_v]
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
def _query_weights(p_side, i_b, o_h, i_t, T, m_m, H: tl.constexpr, FLAGS: tl.constexpr, C: tl.constexpr):
    """Query-wise weights of query i_t, of [B, H, C, T]: the C channels, [b_m] in float32, as a flat tuple."""
    out = ()
    if QUERY & FLAGS:
        p_side += (i_b * H + o_h) * (C * T) + i_t
        for c in tl.static_range(C):
            out = out + (tl.load(p_side + c * T, mask=m_m, other=0.0).to(tl.float32),)  # [b_m]
    return out


@triton.jit
def _channel(p_key, m_key, pair, c: tl.constexpr, stride_wc, R: tl.constexpr, PAIRS: tl.constexpr):
    """Channel c of key-wise weights, [b_m, b_s] in float32: out of the low-rank pair [b_m, b_s, 2R], or from memory."""
    if PAIRS:
        m_c = tl.arange(0, 2 * R)[None, None, :] == c
        return tl.sum(tl.where(m_c, pair, 0.0), 2).to(tl.float32)
    else:
        return tl.load(p_key + c * stride_wc, mask=m_key, other=0.0).to(tl.float32)


@triton.jit
def _compose_tile(
    tile, query, p_side, stride_wh, stride_wr, stride_wc, stride_ws, p_static, p_maps, stride_map,
    o_h, o_m, m_m, o_s, m_s, end, n_m,
    M: tl.constexpr, REP: tl.constexpr, FLAGS: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    ALIGN_W: tl.constexpr,
):  # fmt: skip
    """Composes one query's maps of all heads of a group, [b_m, b_s]: the five branches of `compose`, in float32.

    query: from `_query_weights`. p_side: key-wise weights of a batch row. p_maps: the tile's first head in memory, up
    to key `end`; a static projection reads one head after the other. m_s: which keys exist. n_m: M as a
    variable, because ptxas unrolls a loop of constant length until the registers run out.
    """
    out = tile
    if QUERY & FLAGS:
        for r in tl.static_range(R):
            hidden = tl.sum(tile * query[r][:, None], 0)  # [b_s]
            out += hidden[None, :] * query[R + r][:, None]
        if GATE & FLAGS:
            out += tile * query[2 * R][:, None]
    if KEY & FLAGS:
        o_w = (o_h // REP * stride_wh + o_h % REP * stride_wr)[:, None] + o_s.to(tl.int64)[None, :] * stride_ws
        p_key = p_side + o_w * ALIGN_W
        m_key = m_m[:, None] & m_s[None, :]
        pair = m_key
        if PAIRS:
            # [b_m, b_s, 2R]
            pair = tl.load(p_key[:, :, None] + tl.arange(0, 2 * R)[None, None, :], mask=m_key[:, :, None], other=0.0)
        for r in tl.static_range(R):
            hidden = tl.sum(tile * _channel(p_key, m_key, pair, r, stride_wc, R, PAIRS), 0)  # [b_s]
            out += hidden[None, :] * _channel(p_key, m_key, pair, R + r, stride_wc, R, PAIRS)
        if GATE & FLAGS:
            out += tile * tl.load(p_key + 2 * R * stride_wc, mask=m_key, other=0.0).to(tl.float32)
    if STATIC & FLAGS:
        for j in range(n_m):
            source = tl.load(p_maps + j * stride_map + o_s, mask=o_s < end, other=0.0)  # [b_s]
            column = tl.load(p_static + j * M + o_m, mask=m_m, other=0.0).to(tl.float32)  # [b_m]
            out += column[:, None] * source[None, :]
    return out


# --- kernels ----------------------------------------------------------------------------------------------------------

# Lengths and strides change from step to step or from model to model; none of them is worth a compilation of its own.
_VARYING = ["T", "S", "n_m", "n_p", "n_out", "split_len", "stride_map"]
_VARYING += [f"stride_{x}{y}" for x in ("q", "k", "v", "w", "a") for y in ("b", "h", "t", "s", "r", "c")]


@triton.jit(do_not_specialize=_VARYING)
def scores_kernel(
    p_q, p_k, p_visible, p_place, p_wq, p_wk, p_static, p_maps, p_max, p_sum,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks,
    stride_ab: tl.int64, stride_at: tl.int64, stride_as: tl.int64,
    stride_wb, stride_wh, stride_wr, stride_wc: tl.int64, stride_ws,
    T, S, n_m, n_p, split_len, stride_map, scale,
    G: tl.constexpr, M: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    FLAGS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    ALIGN_Q: tl.constexpr, ALIGN: tl.constexpr, ALIGN_W: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    B_R: tl.constexpr, B_S: tl.constexpr, B_D: tl.constexpr,
    B_M: tl.constexpr, B_N: tl.constexpr, B_T: tl.constexpr, B_V: tl.constexpr,
):  # fmt: skip
    """Composed and masked scores of one split, batch row and group: maps [B, H, T, stride_map·16], and the maximum and
    sum of exponentials of each row in the split, [B, T, n_p, H].

    p_wq [B, H, C, T] contiguous and p_wk [B, Hkv, REP, C, S] are the weights. Strides of queries, keys and p_wk are in
    units of ALIGN_Q, ALIGN and ALIGN_W elements, so that the compiler knows what they are multiples of; stride_wc, from
    channel to channel, is in elements. With p_place rows of keys are a ring, and behind it is the new token's number.
    """
    i_p, i_bg = tl.program_id(0) % n_p, tl.program_id(0) // n_p
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    H: tl.constexpr = G * M
    stride_map = tl.cast(stride_map, tl.int64) * UNIT
    p_maps += (i_b * H + i_g * M) * T * stride_map
    if p_visible is not None:
        p_visible += i_b * stride_ab
    offset = None  # where rows are not a ring
    if p_place is not None:
        offset = _ring_offset(p_place, S)
    first, last = _split_keys(p_visible, stride_at, stride_as, offset, i_p, split_len, T, S, B_T, B_V)
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
    if KEY & FLAGS:
        p_wk += i_b * stride_wb * ALIGN_W
    if STATIC & FLAGS:
        p_static += i_g * M * M
    for i_t in range(T):
        query = _query_weights(p_wq, i_b, o_h, i_t, T, m_m, H, FLAGS, C)
        p_query = p_maps + i_t * stride_map
        top, total = tl.full([B_M], float("-inf"), tl.float32), tl.zeros([B_M], tl.float32)
        for o in range(first, last, B_N):
            o_s = o + tl.arange(0, B_N)
            p_tile = p_query + o_m[:, None] * (T * stride_map) + o_s[None, :]
            m_tile = m_m[:, None] & (o_s < end)[None, :]
            tile = tl.load(p_tile, mask=m_tile, other=0.0)  # [b_m, b_n]
            tile = _compose_tile(
                tile, query, p_wk, stride_wh, stride_wr, stride_wc, stride_ws, p_static, p_query, T * stride_map,
                o_h, o_m, m_m, o_s, o_s < last, end, n_m, M, REP, FLAGS, R, PAIRS, ALIGN_W,
            )  # fmt: skip
            o_a = tl.cast(i_t, tl.int64) * stride_at
            visible = _visible_keys(p_visible, o_a, stride_as, o_s, o_s < last, offset, S)  # [b_n]
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
    p_v, p_visible, p_place, p_wq, p_wk, p_static, p_maps, p_max, p_sum, p_out,
    stride_vb, stride_vh, stride_vs,
    stride_ab: tl.int64, stride_at: tl.int64, stride_as: tl.int64,
    stride_wb, stride_wh, stride_wr, stride_wc: tl.int64, stride_ws,
    T, S, n_m, n_p, split_len, stride_map, n_out,
    G: tl.constexpr, M: tl.constexpr, REP: tl.constexpr, D: tl.constexpr,
    FLAGS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_W: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
    B_R: tl.constexpr, B_S: tl.constexpr, B_D: tl.constexpr, B_P: tl.constexpr,
    B_M: tl.constexpr, B_N: tl.constexpr, B_T: tl.constexpr, B_V: tl.constexpr,
):  # fmt: skip
    """Softmax, composition and product with the values for one split, batch row and group: its part of the output,
    [n_p, B, T, H, D]. Arguments as in `scores_kernel`; the maps become the composed weights.
    """
    i_p, i_bg = tl.program_id(0) % n_p, tl.program_id(0) // n_p
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    H: tl.constexpr = G * M
    stride_map = tl.cast(stride_map, tl.int64) * UNIT
    p_maps += (i_b * H + i_g * M) * T * stride_map
    if p_visible is not None:
        p_visible += i_b * stride_ab
    offset = None  # where rows are not a ring
    if p_place is not None:
        offset = _ring_offset(p_place, S)
    first, last = _split_keys(p_visible, stride_at, stride_as, offset, i_p, split_len, T, S, B_T, B_V)
    end = (last + UNIT - 1) // UNIT * UNIT

    # Softmax and composition, one query after the other; none where nothing is seen.
    o_m = tl.arange(0, B_M)
    m_m = o_m < M
    o_h = (i_g * M + o_m).to(tl.int64)
    if KEY & FLAGS:
        p_wk += i_b * stride_wb * ALIGN_W
    if STATIC & FLAGS:
        p_static += i_g * M * M
    for i_t in range(tl.where(first < last, T, 0)):
        query = _query_weights(p_wq, i_b, o_h, i_t, T, m_m, H, FLAGS, C)
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
                tile, query, p_wk, stride_wh, stride_wr, stride_wc, stride_ws, p_static, p_query, T * stride_map,
                o_h, o_m, m_m, o_s, o_s < last, end, n_m, M, REP, FLAGS, R, PAIRS, ALIGN_W,
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
        o_r = i // n_s % n_r * B_R + tl.arange(0, B_R)
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
        rows = tl.where(i_s == n_s - 1, SHARED * T, 0)  # that are complete: none before the last keys
        m_out = (o_r < rows)[:, None] & (o_d < D)[None, :]
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
        num_splits = ceil_div(_PROGRAMS, programs)
        num_splits = min(num_splits, int(math.sqrt(keys * row_bytes / (8 * queries))))
    length = ceil_div(ceil_div(keys, max(1, num_splits)), UNIT.value) * UNIT.value
    return ceil_div(keys, length), length


def _alignment(tensor: torch.Tensor, neighbors: int = -1) -> int:
    """The largest power of two of elements, up to 16 bytes, of which all strides but that of one axis are multiples."""
    align = 16 // tensor.element_size()
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        while axis != neighbors % tensor.dim() and size > 1 and stride % align:
            align //= 2
    return align


def _strides(prefix: str, names: str, tensor: torch.Tensor, unit: int = 1) -> dict[str, int]:
    return {f"stride_{prefix}{name}": s // unit for name, s in zip(names, tensor.stride(), strict=False)}


def _stage_arguments(stage: Stage, flags: int, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of both kernels that come from a stage's composition weights."""
    query, key, static = stage
    arguments: dict[str, Any] = {"p_wq": query, "p_wk": key, "p_static": static}
    align, pairs = 1, False
    if key is None:
        arguments |= {f"stride_w{axis}": 0 for axis in "bhrcs"}
    else:
        # a pair is neighbors of aligned memory, and a power of two of them: one load
        align, width = _alignment(key, neighbors=3), 2 * layout.rank
        wide = min(width, 16 // key.element_size())
        # the address, not the offset in a storage: it is what launches are remembered by
        address = key.storage_offset() * key.element_size() if key.is_meta else key.data_ptr()
        is_aligned = align >= wide and address % 16 == 0
        pairs = key.stride(3) == 1 and width > 0 and width == power_of_2(width) and is_aligned
        arguments |= _strides("w", "bhrcs", key, align) | {"stride_wc": key.stride(3)}
    constants = {"FLAGS": flags, "R": layout.rank, "C": layout.channels, "PAIRS": pairs, "ALIGN_W": align}
    return arguments, constants


def rounded_length(keys: int) -> int:
    """A number of keys for which launches are chosen: that many or more, by at most a sixteenth or 63."""
    return round_up(keys, max(64, power_of_2(keys) // 32))


def visible_strides(visible: torch.Tensor | None) -> dict[str, int]:
    """Of batch rows, queries and keys; 0 where all rows share one."""
    if visible is None:
        return dict.fromkeys(("stride_ab", "stride_at", "stride_as"), 0)
    batch = visible.stride(0) if visible.shape[0] > 1 else 0
    return {"stride_ab": batch, "stride_at": visible.stride(2), "stride_as": visible.stride(3)}


def _key_of(tensors) -> tuple:
    """What decides about `launches` but for numbers: not the very number of keys, which grows from step to step."""
    query, key, value, *weights, visible, _ = tensors
    S = key.shape[2]
    sizes = query.shape, key.shape[1], rounded_length(S), S > 1, value.shape[3]  # strides do not matter to one key
    channels = [None if weight is None else weight.shape[-2] for weight in weights]
    of_all = [None if t is None else (t.stride(), t.dtype, t.data_ptr() & 15) for t in (query, key, value, *weights)]
    seen = None if visible is None else visible.data_ptr() & 15
    return sizes, *channels, *of_all, seen


def launches(query, key, value, *rest) -> tuple[list[torch.Tensor], list[Launch]]:
    """Allocates the output [B, T, H, DV] and what lies in between, and chooses tiles, by `_key_of` only.

    Args:
        query, key, value: as for `decode_op`.
        rest: the six weights of `schemas`; `visible` as uint8 or None; where rows of keys are a ring the new token's
            number, an integer on the device, or None; G, scale, and the most splits or None.
    """
    *weights, visible, place, groups, scale, num_splits = rest
    pre, post = stages = stages_of(weights)
    layout = Layout.of(stages, groups)
    (B, H, T, D), S, DV = query.shape, rounded_length(key.shape[2]), value.shape[3]
    M, repeats, item = H // groups, H // key.shape[1], query.element_size()
    row_bytes = (D + DV) / 2 * item / repeats
    n_p, split_len = split_keys(B * groups, T, S, row_bytes, num_splits)
    dot = item == 2 and math.gcd(M, repeats) * T > 1  # tensor cores need several rows per key
    shared = math.gcd(M, repeats) if dot else M
    units = ceil_div(S, UNIT.value)
    b_m = power_of_2(M)

    def tile(dim: int) -> dict[str, int]:
        """Block sizes of rows, keys and channels."""
        b_d = max(16, power_of_2(dim))
        longest = max(16, power_of_2(min(split_len, S)))
        if dot:
            b_r = min(max(16, power_of_2(shared * T)), 32 if b_d <= 128 else 16)
            return {"B_R": b_r, "B_S": min(64 if b_d <= 128 else 32, longest), "B_D": b_d}
        elements = _TILE_BYTES // item
        b_r = min(4, power_of_2(M * T), max(1, elements // (UNIT.value * b_d)))
        return {"B_R": b_r, "B_S": min(128, longest, max(UNIT.value, elements // (b_r * b_d))), "B_D": b_d}

    output = torch.empty((B, T, H, DV), device=query.device, dtype=query.dtype)
    # one piece of memory for all that lies in between, its parts aligned
    counts = (B * H * T * units * UNIT.value, *(B * T * n_p * H,) * 2, n_p * output.numel() if n_p > 1 else 0)
    counts = [round_up(count, 32) for count in counts]
    between = torch.empty(sum(counts), device=query.device, dtype=torch.float32)
    maps, tops, sums, parts = between.split(counts)
    parts = parts if n_p > 1 else output
    arguments = {
        "p_visible": visible,
        "p_place": None if visible is None else place,
        "p_maps": maps,
        "p_max": tops,
        "p_sum": sums,
        **visible_strides(visible),
        "T": T,
        "S": key.shape[2],
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
        "B_N": min(max(16, _MAP_TILE // b_m), 128, max(16, power_of_2(min(split_len, S)))),
        "B_T": 1 if T == 1 else MAX_QUERIES,
        "B_V": 128,
    }
    stage_arguments, stage_constants = _stage_arguments(pre, layout.pre, layout)
    align_q, align = _alignment(query), _alignment(key)
    options = {"num_warps": 8, "num_stages": 3}
    scores = Launch(
        scores_kernel,
        (n_p * B * groups,),
        {"p_q": query, "p_k": key, **arguments, **stage_arguments, "scale": scale}
        | _strides("q", "bht", query, align_q)
        | _strides("k", "bhs", key, align),
        constants | stage_constants | tile(D) | {"D": D, "ALIGN_Q": align_q, "ALIGN": align},
        options,
    )
    stage_arguments, stage_constants = _stage_arguments(post, layout.post, layout)
    align = _alignment(value)
    b_p = min(power_of_2(n_p), max(16, _STATISTICS_TILE // b_m))
    weighted = Launch(
        output_kernel,
        (n_p * B * groups,),
        {"p_v": value, "p_out": parts, **arguments, **stage_arguments, "n_out": output.numel()}
        | _strides("v", "bhs", value, align),
        constants | stage_constants | tile(DV) | {"D": DV, "ALIGN": align, "B_P": b_p},
        options,
    )
    chosen = [scores, weighted]
    for launch in chosen:
        # Left alone, ptxas may spill so that more programs fit. Room for two of 8 warps per multiprocessor, or for one
        # where more registers are needed.
        many_rows = dot and (launch.constants["B_R"] > 16 or b_m > 32)
        needs_more = many_rows or launch.constants["FLAGS"] & Part.STATIC or item == 4
        launch.options = options | {"maxnreg": 255 if needs_more else 128}
    if n_p > 1:
        b_p = min(128, power_of_2(n_p))
        b_n = 4096 // b_p
        constants = {"B_P": b_p, "B_N": b_n}
        arguments = {"p_parts": parts, "p_out": output, "n_p": n_p, "n_out": output.numel()}
        grid = (ceil_div(output.numel(), b_n),)
        chosen.append(Launch(add_kernel, grid, arguments, constants, options | {"maxnreg": 128}))
    return [output, between], chosen


_RUN = Repeated(launches, _key_of)


@torch.library.register_kernel(decode_op.name(), DEVICES)
def _decode(query, key, value, weights, visible, plan, scale):
    groups, num_splits, *places = plan
    if 0 in (query.shape[0], query.shape[2], key.shape[2]):
        output = query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    else:
        seen = None if visible is None else visible.view(torch.uint8)
        splits = None if num_splits < 0 else num_splits
        tensors = [query, key, value, *place_tensors(weights, places, 6), seen, None]
        varying = {"S": key.shape[2]} | visible_strides(seen)
        output = _RUN(tensors, groups, scale, splits, varying=varying)[0]
    return refuse_backward("composed_decode", [output], [query, key, value, *weights])[0]


def composed_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    scale: float | None = None,
    visible: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Composed attention of a few queries per sequence over all keys; linear in S. Rounds where `eager_attention` does.

    Reads nothing back from the device and chooses everything by shapes, strides and alignment, so it can be captured in
    a CUDA graph; for `torch.compile` it is one operator. The sum over splits has a fixed order: results are
    reproducible.

    Args:
        query: [B, H, T, D], T <= 16; float32, float16 or bfloat16.
        key: [B, Hkv, S, D] of the same dtype, H a multiple of Hkv. Like all tensors here it may be a view, a packed
            cache's first D channels; only its last dimension must be contiguous.
        value: [B, Hkv, S, DV], likewise.
        pre, post: what to compose scores and weights with; None for no composition. All sides present have the
            same parts. Key-wise weights are read where they are, behind cached keys and values for one
            (`DCFormerCompose.unpack`).
        scale: factor of the scores; D ** -0.5 when not given.
        visible: bool [B or 1, 1, T, S], any pattern; None: every query sees all keys. A query that sees nothing gets
            zeros. Keys that no query sees cost nothing.
        num_splits: the most splits of the keys to make (fewer where they would be shorter than 16 keys); None for a
            choice that fills a large GPU.

    Returns:
        [B, H, T, DV] in the dtype of `query`, as of `composed_attention` a view of contiguous [B, T, H, DV].

    Raises:
        ValueError: on shapes, dtypes or devices that do not fit, where gradients would be needed, and beyond
            `unsupported_reason`.
        NotImplementedError: under transforms of `torch.func` and forward-mode differentiation.
    """
    states = {"query": query, "key": key, "value": value}
    check_types(pre, post, scale, states if visible is None else states | {"visible": visible})
    groups = _check(query, key, value, pre, post, visible, num_splits)
    weights, places = packed_weights(pre, post, key.shape[1])
    plan = [groups, -1 if num_splits is None else min(num_splits, 2**31 - 1), *places]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return decode_op(query, key, value, weights, visible, plan, scale).transpose(1, 2)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(query, key, value, pre, post, visible, num_splits) -> int:
    """Refuses what the kernels cannot do. Returns the number of groups of heads that mix."""
    check_states(query, key, value, pre, post, visible)
    (B, H, T, _), S = query.shape, key.shape[2]
    if T > MAX_QUERIES:
        raise ValueError(
            f"composed_decode takes at most {MAX_QUERIES} queries per sequence, not {T}. Longer pieces (a prefill) are "
            "for composed_attention."
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
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
    is_count = isinstance(num_splits, int) and not isinstance(num_splits, bool) and num_splits >= 1
    if num_splits is not None and not is_count:
        raise ValueError(f"num_splits={num_splits!r}: expected an integer of at least 1, or None to have it chosen.")
    groups = check_weights(pre, post, query, key) or plain_groups(H, key.shape[1])
    require_supported(heads=H // groups)
    given = [query, key, value]
    for weights in (pre, post):
        given += [] if weights is None else weights.tensors()
    refuse_transforms(TRITON, *given)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise ValueError(
            "composed_decode has no backward pass and one of its inputs requires gradients. Decode under "
            "torch.no_grad(), or use composed_attention."
        )
    return groups


__all__ = ["MAX_QUERIES", "composed_decode"]
