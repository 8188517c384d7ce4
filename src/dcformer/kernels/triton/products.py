"""Products of maps with queries, keys and values, one head each: `scores_kernel`, `values_kernel`, `keys_kernel`.

Axis 0 of a grid has sequences times tiles times heads, see `_program`: programs of a sequence's heads run side by side,
as their numbers lie so in maps, and those that take longest come first, so that only short ones are left when
multiprocessors fall idle. Sequences follow each other, so that states that many programs read stay in the L2 cache.

Only what some query sees is multiplied. Maps come from memory that nobody has written: what `scores_kernel` makes
covers all that the kernels of composition read, and what those have written covers all pairs of a query and a key that
it sees. So the products that read maps take zeros for pairs that are not seen, and do without that check inside, where
all are.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from .heads import ALIKE, NO_KEY, intervals, span, tiles_that_see
from .precision import LARGEST_HALF, LARGEST_SCORE, add_product, product, rounded, uniform, within


@triton.jit
def _program(n_bh, H):
    """The sequence, head (both in 64 bits) and tile of a program, and how many tiles there are. Of n_bh heads in all, H
    are of one sequence."""
    i, n_tiles = tl.program_id(0), tl.num_programs(0) // n_bh
    i_b, i = i // (H * n_tiles), i % (H * n_tiles)
    return i_b.to(tl.int64), (i % H).to(tl.int64), i // H, n_tiles


@triton.jit
def _load_states(p_x, stride_n, o_n, m_n, o_d, D: tl.constexpr):
    """Queries, keys or values of a head: [n, d], zeros beyond the tokens and the D channels."""
    p_tile = p_x + o_n[:, None].to(tl.int64) * stride_n + o_d[None, :]
    return tl.load(p_tile, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _load_all_states(p_x, o_x, o_d, D: tl.constexpr, B_D: tl.constexpr):
    """The same of tokens that all are there, at places o_x [n, d]."""
    if D == B_D:
        return tl.load(p_x + o_x)
    else:
        return tl.load(p_x + o_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def _places(o_t, H, UNIT: tl.constexpr):
    """Where queries lie in a head's map: UNIT of them, those of H heads, the next UNIT."""
    return o_t // UNIT * (H * UNIT) + o_t % UNIT


@triton.jit
def _load_map(p_map, stride_s, o_s, o_t, n_s, n_p, H, UNIT: tl.constexpr):
    """A tile of a head's map: [s, t]."""
    p_tile = p_map + o_s[:, None].to(tl.int64) * stride_s + _places(o_t, H, UNIT)[None, :]
    return tl.load(p_tile, mask=(o_s < n_s)[:, None] & (o_t < n_p)[None, :], other=0.0)


@triton.jit
def _cut(x, finite):
    """A tile of a map in float16 without numbers that are infinite although dO is finite: those are cut off. And how
    many these are."""
    is_cut = tl.where(finite > 0, tl.abs(x), 0.0) == float("inf")
    most = tl.full([], LARGEST_HALF, x.dtype)
    return tl.where(is_cut, tl.where(x > 0, most, -most), x), tl.sum(is_cut.to(tl.int32))


@triton.jit
def _is_broken(total, m_n):
    """Whether a number of the rows m_n of a tile is not finite."""
    return uniform(tl.max(tl.where(m_n[:, None] & ((tl.abs(total) < float("inf")) == 0), 1, 0))) > 0


@triton.jit(**ALIKE)
def scores_kernel(
    p_a, p_b, p_map, p_mark, p_scale, p_first, p_last,
    stride_ab, stride_ah, stride_as, stride_bb, stride_bh, stride_bt, stride_ib, stride_s: tl.int64,
    n_bh, H, G, rep, S, t_0, n_t, n_p, s_0, n_s, n_keys, n_scales, scale, largest,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    MARK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """map[s, t] = scale · (a[s] · b[t]): scores of keys and queries, dW of values and dO.

    A program has B_T queries and n_keys keys, a multiple of B_S, which is a turn. With MARK, p_mark becomes 1 where a
    number of a key that some query sees is beyond ±largest, and all are cut off at ±LARGEST_SCORE. Keys that none of
    BLOCK queries sees are left alone; BLOCK is a multiple of B_T, and of that of the kernels of composition. With
    SCALED numbers are also times p_scale [B·G, n_scales], one for BLOCK queries and a group of heads.
    """
    i_b, i_h, i_tile, n_t_tiles = _program(n_bh, H)
    i_t, i_s = n_t_tiles - 1 - i_tile, tl.program_id(1)  # where masks are causal, the last queries see most
    o_t, o_d = i_t * B_T + tl.arange(0, B_T), tl.arange(0, B_D)  # in the chunk
    m_t = o_t < n_t
    p_a += i_b * stride_ab + i_h // rep * stride_ah
    b = _load_states(p_b + i_b * stride_bb + i_h * stride_bh, stride_bt, t_0 + o_t, m_t, o_d, D)  # [t, d]
    o_step = i_t * B_T // BLOCK * BLOCK + tl.arange(0, BLOCK)
    low, high = span(*intervals(p_first + i_b * stride_ib + t_0, p_last + i_b * stride_ib + t_0, o_step, o_step < n_t))
    start = tl.maximum(tl.minimum(low, high) - s_0, 0) // B_S * B_S + i_s * n_keys
    stop = tl.minimum(start + n_keys, high - s_0)
    if SCALED:
        scale *= tl.load(p_scale + (i_b * G + i_h // (H // G)) * n_scales + i_t * B_T // BLOCK)
    p_map += i_b * n_s * stride_s + i_h * UNIT
    o_map = tl.arange(0, B_S)[:, None].to(tl.int64) * stride_s + _places(o_t, H, UNIT)[None, :]
    worst = tl.zeros([B_S], tl.float32)
    for s in tl.range(start, stop, B_S):
        o_s = s + tl.arange(0, B_S)  # in the chunk
        a = _load_states(p_a, stride_as, s_0 + o_s, o_s + s_0 < S, o_d, D)  # [s, d]
        x = product(a, tl.trans(b)) * scale
        if MARK:
            is_seen = (s_0 + o_s >= low) & (s_0 + o_s < high)  # by any of BLOCK queries
            worst = tl.maximum(worst, tl.where(is_seen, tl.max(tl.abs(x), 1), 0.0))
            x = within(x, LARGEST_SCORE)
        mask = (o_s < n_s)[:, None] & (o_t < n_p)[None, :]
        tl.store(p_map + s * stride_s + o_map, rounded(x, p_map.dtype.element_ty), mask=mask)
    if MARK:
        if uniform(tl.max(worst)) > largest:
            tl.store(p_mark, 1)  # all that store, store the same


@triton.jit
def _factors(p_undo, start, stop):
    """The first of the numbers start to stop, up to 128; 0 where there are no more."""
    o = start + tl.arange(0, 128)
    return tl.load(p_undo + o, mask=o < stop, other=0.0)


@triton.jit
def _common_factor(most, p_undo, start, stop):
    """The largest of numbers start to stop, and whether they are the same; given the first, `most`."""
    least = tl.where(most > 0, most, float("inf"))
    for i in range(start + 128, stop, 128):
        here = _factors(p_undo, i, stop)
        most, least = tl.maximum(most, here), tl.minimum(least, tl.where(here > 0, here, float("inf")))
    undo = uniform(tl.max(most))
    return undo, uniform(tl.min(least)) >= undo


@triton.jit
def _add_values(
    total, count, start, stop, at,
    D: tl.constexpr, B_D: tl.constexpr, B_S: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    COPIED: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Adds mapᵀ v over the tiles start to stop of keys. With CUT also how many numbers of the map are cut off, see
    `_cut`, and with COPIED v without its powers of two. Without MASKED all queries see all these keys."""
    p_map, stride_s, p_v, stride_vs, p_undo, seen, sizes, are_finite = at
    first, last, o_t = seen
    n_p, s_0, n_s, S, H = sizes
    o_d, o_k = tl.arange(0, B_D), tl.arange(0, B_S)
    o_map = o_k[:, None].to(tl.int64) * stride_s + _places(o_t, H, UNIT)[None, :]
    o_v = o_k[:, None].to(tl.int64) * stride_vs + o_d[None, :]
    for i in tl.range(start, stop, num_stages=1 if CUT else None):
        s = i * B_S
        if MASKED:
            o_s = s + o_k
            x = _load_map(p_map, stride_s, o_s, o_t, n_s, n_p, H, UNIT)
            is_seen = ((s_0 + o_s)[:, None] >= first[None, :]) & ((s_0 + o_s)[:, None] < last[None, :])
            x = tl.where(is_seen, x, 0.0).to(x.dtype)
            v = _load_states(p_v, stride_vs, s_0 + o_s, (o_s < n_s) & (s_0 + o_s < S), o_d, D)  # [s, d]
        else:
            x = tl.load(p_map + s * stride_s + o_map, mask=(o_t < n_p)[None, :], other=0.0)
            v = _load_all_states(p_v + (s_0 + s).to(tl.int64) * stride_vs, o_v, o_d, D, B_D)
        if CUT:
            x, n = _cut(x, are_finite[None, :])
            count += n
        if COPIED and CUT:
            total += product(tl.trans(x), v) * tl.load(p_undo + (s_0 + s) // ROWS)
        else:
            total = add_product(total, tl.trans(x), v)
    return total, count


@triton.jit(**ALIKE)
def values_kernel(
    p_map, p_v, p_out, p_mark, p_inverse, p_finite, p_undo, p_first, p_last,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_ot, stride_ib, stride_s: tl.int64,
    n_bh, H, G, rep, S, t_0, n_t, n_p, s_0, n_s, n_scales, n_undo, scale,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SCALED: tl.constexpr, COPIED: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """out[t] = scale · Σ_s map[s, t] v[s]: the output of W and values, dQ of dS and keys.

    With SCALED the map is times powers of two. With COPIED v is float16 where the inputs are bfloat16, see `scales`.

    Args:
        p_mark: with MARK, of a map in float16, becomes 1 where one of its numbers was too large: infinite, although dO
            is finite.
        p_inverse, p_finite: what undoes the powers of two, and whether dO is finite: [B·G, n_scales] for BLOCK queries.
        p_undo: what undoes those of v, [B, Hkv, n_undo] for ROWS keys, a multiple of B_S.
    """
    i_b, i_h, i_tile, n_tiles = _program(n_bh, H)
    i_t = n_tiles - 1 - i_tile  # where masks are causal, the last queries see most
    o_t, o_d = i_t * B_T + tl.arange(0, B_T), tl.arange(0, B_D)  # in the chunk
    m_t = o_t < n_t
    first, last = intervals(p_first + i_b * stride_ib + t_0, p_last + i_b * stride_ib + t_0, o_t, m_t)
    low, high = span(first, last)
    low = tl.maximum(tl.minimum(low, high), s_0)  # of queries that see nothing, both are behind `high`
    start, stop = (low - s_0) // B_S, tl.cdiv(high - s_0, B_S)  # tiles
    # all queries of the tile see the keys between: no checks there
    latest, earliest = uniform(tl.max(tl.where(m_t, first, 0))), uniform(tl.min(tl.where(m_t, last, NO_KEY)))
    earliest = tl.minimum(earliest, high)  # of queries that see nothing, the last may be behind what others see
    inner = tl.maximum(tl.minimum(tl.cdiv(latest - s_0, B_S), stop), start)
    outer = tl.maximum((earliest - s_0) // B_S, inner)
    p_map += i_b * n_s * stride_s + i_h * UNIT
    p_v += i_b * stride_vb + i_h // rep * stride_vh
    are_finite, count = tl.full([B_T], 1.0, tl.float32), tl.full([], 0, tl.int32)
    o_scale = (i_b * G + i_h // (H // G)) * n_scales + o_t // BLOCK
    if SCALED:
        are_finite = tl.load(p_finite + o_scale, mask=m_t, other=0.0)
    total = tl.zeros([B_T, B_D], tl.float32)
    tl.static_assert(not COPIED or ROWS % B_S == 0, "a turn undoes one power of two")
    p_undo += (i_b * (H // rep) + i_h // rep) * n_undo
    has_one_factor = True
    if COPIED:  # loaded here, and looked at behind the loops: nobody waits for them
        factors = _factors(p_undo, low // ROWS, tl.cdiv(high, ROWS))
    at = (p_map, stride_s, p_v, stride_vs, p_undo, (first, last, o_t), (n_p, s_0, n_s, S, H), are_finite)
    total, count = _add_values(total, count, start, inner, at, D, B_D, B_S, UNIT, ROWS, COPIED, True, False)
    total, count = _add_values(total, count, inner, outer, at, D, B_D, B_S, UNIT, ROWS, COPIED, False, False)
    total, count = _add_values(total, count, outer, stop, at, D, B_D, B_S, UNIT, ROWS, COPIED, True, False)
    if COPIED:
        undo, has_one_factor = _common_factor(factors, p_undo, low // ROWS, tl.cdiv(high, ROWS))
        total *= undo
    if MARK:  # as where v is a copy
        if _is_broken(total, m_t) | (has_one_factor == 0):
            total = tl.zeros_like(total)  # anew, block by block
            total, count = _add_values(total, count, start, stop, at, D, B_D, B_S, UNIT, ROWS, COPIED, True, True)
            if count > 0:
                tl.store(p_mark, 1)  # all that store, store the same
    if SCALED:
        total *= tl.load(p_inverse + o_scale, mask=m_t, other=0.0)[:, None]
    p_tile = p_out + i_b * stride_ob + i_h * stride_oh + (t_0 + o_t)[:, None].to(tl.int64) * stride_ot + o_d[None, :]
    tl.store(p_tile, rounded(total * scale, p_out.dtype.element_ty), mask=m_t[:, None] & (o_d < D)[None, :])


@triton.jit
def _add_keys(
    total, count, start, stop, at, scales,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, COPIED: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Adds map q over the tiles start to stop of the chunk's queries, and with CUT how many numbers of the map are cut
    off: see `_cut`. Without MASKED all these queries see all keys."""
    p_map, stride_s, p_q, stride_qt, p_first, p_last, o_s, t_0, n_t, n_p, s_0, n_s, H = at
    p_inverse, p_finite, p_undo = scales
    o_d, o_k = tl.arange(0, B_D), tl.arange(0, B_T)
    # keys that do not exist read what others do, and are not stored
    o_map = tl.minimum(o_s, n_s - 1)[:, None].to(tl.int64) * stride_s
    o_q = o_k[:, None].to(tl.int64) * stride_qt + o_d[None, :]
    for i in tl.range(start, stop, num_stages=1 if CUT else None):
        t = i * B_T  # a multiple of B_T, so that rows of the map are read in vectors
        if MASKED:
            o_t = t + o_k
            m_t = o_t < n_t
            x = _load_map(p_map, stride_s, o_s, o_t, n_s, n_p, H, UNIT)
            first, last = intervals(p_first, p_last, o_t, m_t)
            is_seen = ((s_0 + o_s)[:, None] >= first[None, :]) & ((s_0 + o_s)[:, None] < last[None, :])
            x = tl.where(is_seen, x, 0.0).to(x.dtype)
            q = _load_states(p_q, stride_qt, t_0 + o_t, m_t, o_d, D)  # [t, d]
        else:
            x = tl.load(p_map + o_map + _places(t + o_k, H, UNIT)[None, :])
            q = _load_all_states(p_q + (t_0 + t).to(tl.int64) * stride_qt, o_q, o_d, D, B_D)
        if CUT:
            is_finite = tl.full([], 1.0, tl.float32)
            if SCALED:
                is_finite = tl.load(p_finite + t // BLOCK)
            x, n = _cut(x, is_finite)
            count += n
        if SCALED or COPIED:
            factor = tl.full([], 1.0, tl.float32)
            if SCALED:
                factor *= tl.load(p_inverse + t // BLOCK)
            if COPIED:
                factor *= tl.load(p_undo + (t_0 + t) // ROWS)
            total += product(x, q) * factor
        else:
            total = add_product(total, x, q)
    return total, count


@triton.jit(**ALIKE)
def keys_kernel(
    p_map, p_q, p_out, p_mark, p_inverse, p_finite, p_undo, p_first, p_last,
    stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_os, stride_ib, stride_s: tl.int64,
    n_bh, H, G, rep, S, t_0, n_t, n_p, s_0, n_s, n_scales, n_undo, scale,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, COPIED: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """out[s] = scale · Σ_t map[s, t] q[t], over all heads that share a key: dV of W and dO, dK of dS and queries.

    With ADD it is added to the stored values. SCALED, COPIED, MARK and what belongs to them: see `values_kernel`, with
    q for v: p_undo is [B, H, n_undo], for ROWS queries, a multiple of B_T.
    """
    # of heads of keys; where masks are causal, the first keys are seen by most
    i_b, i_h, i_s, _ = _program(n_bh // rep, H // rep)
    o_s, o_d = i_s * B_S + tl.arange(0, B_S), tl.arange(0, B_D)  # in the chunk
    m_s = (o_s < n_s) & (s_0 + o_s < S)
    p_first += i_b * stride_ib + t_0
    p_last += i_b * stride_ib + t_0
    low = s_0 + i_s * B_S
    start, inner, outer, stop = tiles_that_see(p_first, p_last, n_t, low, tl.minimum(low + B_S, S), B_T)
    tl.static_assert(not COPIED or ROWS % B_T == 0, "a turn undoes one power of two")
    total, count = tl.zeros([B_S, B_D], tl.float32), tl.full([], 0, tl.int32)
    for i_r in range(0, rep):
        i_q = i_h * rep + i_r  # a head of queries
        p_head, p_states = p_map + i_b * n_s * stride_s + i_q * UNIT, p_q + i_b * stride_qb + i_q * stride_qh
        at = (p_head, stride_s, p_states, stride_qt, p_first, p_last, o_s, t_0, n_t, n_p, s_0, n_s, H)
        o_scale = (i_b * G + i_q // (H // G)) * n_scales
        scales = (p_inverse + o_scale, p_finite + o_scale, p_undo + (i_b * H + i_q) * n_undo)
        total, count = _add_keys(
            total, count, start, inner, at, scales, D, B_D, B_T, UNIT, BLOCK, ROWS, SCALED, COPIED, True, False
        )
        total, count = _add_keys(
            total, count, inner, outer, at, scales, D, B_D, B_T, UNIT, BLOCK, ROWS, SCALED, COPIED, False, False
        )
        total, count = _add_keys(
            total, count, outer, stop, at, scales, D, B_D, B_T, UNIT, BLOCK, ROWS, SCALED, COPIED, True, False
        )
    if MARK:
        if _is_broken(total, m_s):
            total = tl.zeros_like(total)
            for i_r in range(0, rep):
                i_q = i_h * rep + i_r
                p_head, p_states = p_map + i_b * n_s * stride_s + i_q * UNIT, p_q + i_b * stride_qb + i_q * stride_qh
                at = (p_head, stride_s, p_states, stride_qt, p_first, p_last, o_s, t_0, n_t, n_p, s_0, n_s, H)
                o_scale = (i_b * G + i_q // (H // G)) * n_scales
                scales = (p_inverse + o_scale, p_finite + o_scale, p_undo + (i_b * H + i_q) * n_undo)
                total, count = _add_keys(
                    total, count, start, stop, at, scales, D, B_D, B_T, UNIT, BLOCK, ROWS, SCALED, COPIED, True, True
                )
            if count > 0:
                tl.store(p_mark, 1)  # all that store, store the same
    total *= scale
    p_tile = p_out + i_b * stride_ob + i_h * stride_oh + (s_0 + o_s)[:, None].to(tl.int64) * stride_os + o_d[None, :]
    mask = m_s[:, None] & (o_d < D)[None, :]
    if ADD:
        total += tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_tile, rounded(total, p_out.dtype.element_ty), mask=mask)
