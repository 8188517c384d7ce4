"""Composed attention in Triton: the kernels of the forward and the backward pass.

Softmax sits between two mixings of heads, so one pass over the keys cannot do it. Of the mixing only low-rank maps
cross heads: hidden_r(t, s) = Σ_j A_j(t, s) · down[r, j], R of them per side and stage. For a chunk of queries at a time
the forward pass runs

    maps of the scores, lse, maps of the weights, output

where `maps` loops over heads for one tile, the others are per head, as in flash attention, and each recomputes its tile
of scores from q and k. The backward pass keeps a chunk's tiles of scores A, of weights P and of the gradient dW of the
composed weights W, as the maps of each are made. Everything after that streams them, without a matrix product:

    maps of A, of P, of dW                  q·k, q·k, dO·v
    key_sums, back     after the softmax    key-side gradients; query-side ones, W, and dW becomes dP, the gradient of P
    grad_maps                               P becomes P · (dP - Σ_s P dP), the gradient of the composed scores; its maps
    key_sums, back     before the softmax   key-side gradients; query-side ones, and dA, the gradient of A

and matrix products of torch make the gradients of values (W, dO), queries (dA, k) and keys (dA, q), and of the static
projections. A static projection in the forward pass keeps A and P too, and is a matrix product of torch.

The keys that a query sees are an interval, [first, last) per query; tiles outside it are not visited. A query that sees
nothing has log-sum-exp +inf, which makes its weights zero. Maps are garbage where no query of a tile sees a key. They
are loaded by masks of whole rows, which keeps loads wide, and what is not visible is dropped afterwards.
"""
# mypy: disable-error-code="no-untyped-def"
# (arguments of kernels have no types in Python; the annotations there are Triton's)

import triton
import triton.language as tl

from .tiles import (
    add_products,
    add_rows,
    add_sums,
    compose_tile,
    load_maps,
    load_rows,
    load_states,
    load_states_transposed,
    product,
    store_rows,
    zero_rows,
    zero_tiles,
)

# What a tile of a head may be: scores q·k; weights, the softmax of composed scores; the gradient of the composed
# weights, dO·v; the gradient of the composed scores.
SCORES, WEIGHTS, GRAD_COMPOSED, GRAD_SCORES = 0, 1, 2, 3


@triton.jit
def _softmax_tile(composed, p_lse, o_t, m_t, visible):
    lse = tl.load(p_lse + o_t, mask=m_t, other=float("inf"))  # [b_t]
    return tl.where(visible, tl.exp(composed - lse[:, None]), 0.0)


@triton.jit
def _stages(
    p_wq, p_wk, p_maps, T, S, stride_map, M,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The stages before and after the softmax, and the same with the maps of gradients; see `tiles`."""
    C_Q: tl.constexpr = C if F_PRE & 1 else 0  # where the channels of the second stage begin
    C_K: tl.constexpr = C if F_PRE & 2 else 0
    i_post = ((F_PRE & 1) + (F_PRE & 2) // 2) * R + (F_PRE & 4) // 4 * M
    i_back = i_post + ((F_POST & 1) + (F_POST & 2) // 2) * R + (F_POST & 4) // 4 * M
    pre = (p_wq, p_wk, p_maps, 0, 0, 0, T, S, stride_map)
    post = (p_wq, p_wk, p_maps, C_Q, C_K, i_post, T, S, stride_map)
    back_pre = (p_wq, p_wk, p_maps, 0, 0, i_back, T, S, stride_map)
    back_post = (p_wq, p_wk, p_maps, C_Q, C_K, i_back + i_post, T, S, stride_map)
    return pre, post, back_pre, back_post


@triton.jit
def _positions(p_first, p_last, o_t, m_t, o_s):
    """Which keys of a tile each query sees: [b_t, b_s]."""
    first = tl.load(p_first + o_t, mask=m_t, other=2147483647)  # [b_t]
    last = tl.load(p_last + o_t, mask=m_t, other=0)  # [b_t]
    return (o_s[None, :] >= first[:, None]) & (o_s[None, :] < last[:, None])


@triton.jit
def _span(p_first, p_last, o_t, m_t):
    """The interval of keys that any of the queries sees."""
    first = tl.load(p_first + o_t, mask=m_t, other=2147483647)  # [b_t]
    last = tl.load(p_last + o_t, mask=m_t, other=0)  # [b_t]
    return tl.min(tl.where(first < last, first, 2147483647)), tl.max(tl.where(first < last, last, 0))


@triton.jit
def _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, B_T: tl.constexpr, B_S: tl.constexpr):
    """Queries and keys of a tile: o_t, m_t [b_t], o_s, m_s [b_s], and their place in a map, o_map [b_t, b_s]."""
    o_t = t_0 + i_t * B_T + tl.arange(0, B_T)
    o_s = s_0 + i_s * B_S + tl.arange(0, B_S)
    return o_t, o_t < t_0 + n_t, o_s, o_s < s_0 + n_s, (o_t - t_0)[:, None] * n_s + (o_s - s_0)[None, :]


@triton.jit
def _store_maps(p_maps, stride, o_map, m_map, tiles, first, count: tl.constexpr):
    for r in tl.static_range(count):
        tl.store(p_maps + (first + r) * stride + o_map, tiles[r].to(p_maps.dtype.element_ty), mask=m_map)


@triton.jit
def maps_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_first, p_last, p_wq, p_wk, p_maps, p_tiles,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot, stride_ib, n_maps, i_out, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    SOURCE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, B_D: tl.constexpr, DV: tl.constexpr, B_DV: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Hidden maps of scores, weights or the gradient of composed weights for one tile: a loop over a group's heads.

    They go to p_maps [B·G, n_maps, n_t, n_s] from map i_out. With KEEP, the tiles themselves go to p_tiles
    [B, H, n_t, n_s], zeros where nothing is seen.
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, B_T, B_S)
    m_map = m_t[:, None] & m_s[None, :]
    p_tiles += (i_b * H + i_g * M) * stride_map
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    lowest, highest = _span(p_first, p_last, o_t, m_t)
    if (highest <= s_0 + i_s * B_S) | (lowest >= s_0 + (i_s + 1) * B_S):
        if KEEP:  # read whole by torch
            for i_m in range(M):
                tl.store(p_tiles + i_m * stride_map + o_map, tl.zeros([B_T, B_S], p_tiles.dtype.element_ty), mask=m_map)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    o_d, o_dv = tl.arange(0, B_D), tl.arange(0, B_DV)
    p_maps += i_bg * n_maps * stride_map

    # `down` gathers maps of scores and weights, `up` those of gradients
    FLAGS: tl.constexpr = F_PRE if SOURCE == 0 else F_POST
    W: tl.constexpr = R if SOURCE == 2 else 0
    W_Q: tl.constexpr = W + (C if SOURCE and F_PRE & 1 else 0)
    W_K: tl.constexpr = W + (C if SOURCE and F_PRE & 2 else 0)
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    RK: tl.constexpr = R if FLAGS & 2 else 0
    query_maps, key_maps = zero_tiles(B_T, B_S, RQ), zero_tiles(B_T, B_S, RK)
    for i_m in range(M):
        i_h = i_g * M + i_m
        i_kv, i_bh = i_h // rep, i_b * H + i_h
        p_wq_h, p_wk_h = p_wq + i_bh * n_wq * T, p_wk + i_bh * n_wk * S
        if SOURCE == 2:
            do = load_states(p_do + i_b * stride_ob + i_h * stride_oh, stride_ot, o_t, m_t, o_dv, DV)
            v = load_states_transposed(p_v + i_b * stride_vb + i_kv * stride_vh, stride_vs, o_s, m_s, o_dv, DV)
            tile = product(do, v)
        else:
            q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)
            k = load_states_transposed(p_k + i_b * stride_kb + i_kv * stride_kh, stride_ks, o_s, m_s, o_d, D)
            tile = product(q, k) * scale
            if SOURCE == 1:
                pre, _, _, _ = _stages(p_wq_h, p_wk_h, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
                tile = compose_tile(tile, pre, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
                lse = tl.load(p_lse + i_bh * T + o_t, mask=m_t, other=float("inf"))  # [b_t]
                tile = tl.exp(tile - lse[:, None])  # anything where not visible
        if KEEP:
            kept = tl.where(visible, tile, 0.0).to(p_tiles.dtype.element_ty)
            tl.store(p_tiles + i_m * stride_map + o_map, kept, mask=m_map)
        query_maps = add_products(query_maps, tile, load_rows(p_wq_h, T, o_t, m_t, W_Q, RQ), 1, RQ)
        key_maps = add_products(key_maps, tile, load_rows(p_wk_h, S, o_s, m_s, W_K, RK), 0, RK)
    _store_maps(p_maps, stride_map, o_map, m_map, query_maps, i_out, RQ)
    _store_maps(p_maps, stride_map, o_map, m_map, key_maps, i_out + RQ, RK)


@triton.jit
def lse_kernel(
    p_q, p_k, p_lse, p_first, p_last, p_wq, p_wk, p_maps,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_ib, n_maps, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    F_PRE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, B_D: tl.constexpr,
    B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a head's composed scores, for one tile of queries: p_lse [B, H, T]; +inf where nothing is seen."""
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    M = H // G
    i_g, i_m, i_kv, i_bh = i_h // M, i_h % M, i_h // rep, i_b * H + i_h
    o_t = t_0 + i_t * B_T + tl.arange(0, B_T)
    m_t = o_t < t_0 + n_t
    o_d = tl.arange(0, B_D)
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    p_maps += (i_b * G + i_g) * n_maps * stride_map
    pre = (p_wq + i_bh * n_wq * T, p_wk + i_bh * n_wk * S, p_maps, 0, 0, 0, T, S, stride_map)
    p_k += i_b * stride_kb + i_kv * stride_kh
    q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)  # [b_t, b_d]
    lowest, highest = _span(p_first, p_last, o_t, m_t)
    top = tl.full([B_T], float("-inf"), tl.float32)
    total = tl.zeros([B_T], tl.float32)
    begin = s_0 + (tl.maximum(lowest, s_0) - s_0) // B_S * B_S
    for i_s in range(begin, tl.minimum(highest, s_0 + n_s), B_S):
        o_s = i_s + tl.arange(0, B_S)
        m_s = o_s < s_0 + n_s
        visible = _positions(p_first, p_last, o_t, m_t, o_s)
        o_map, m_map = (o_t - t_0)[:, None] * n_s + (o_s - s_0)[None, :], m_t[:, None] & m_s[None, :]
        k = load_states_transposed(p_k, stride_ks, o_s, m_s, o_d, D)  # [b_d, b_s]
        tile = product(q, k) * scale
        tile = compose_tile(tile, pre, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
        tile = tl.where(visible, tile, float("-inf"))
        new_top = tl.maximum(top, tl.max(tile, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(tile - base[:, None]), 1)
        top = new_top
    seen = total > 0
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(p_lse + i_bh * T + o_t, lse, mask=m_t)


@triton.jit
def output_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_first, p_last, p_wq, p_wk, p_maps,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot, stride_ib, n_maps, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, B_D: tl.constexpr, DV: tl.constexpr, B_DV: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """A head's composed weights times its values, for one tile of queries: p_out [B, H, T, DV] by its strides."""
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    M = H // G
    i_g, i_m, i_kv, i_bh = i_h // M, i_h % M, i_h // rep, i_b * H + i_h
    o_t = t_0 + i_t * B_T + tl.arange(0, B_T)
    m_t = o_t < t_0 + n_t
    o_d, o_dv = tl.arange(0, B_D), tl.arange(0, B_DV)
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    p_maps += (i_b * G + i_g) * n_maps * stride_map
    p_wq, p_wk = p_wq + i_bh * n_wq * T, p_wk + i_bh * n_wk * S
    pre, post, _, _ = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    p_k += i_b * stride_kb + i_kv * stride_kh
    p_v += i_b * stride_vb + i_kv * stride_vh
    p_lse += i_bh * T
    q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)  # [b_t, b_d]
    lowest, highest = _span(p_first, p_last, o_t, m_t)
    out = tl.zeros([B_T, B_DV], tl.float32)
    begin = s_0 + (tl.maximum(lowest, s_0) - s_0) // B_S * B_S
    for i_s in range(begin, tl.minimum(highest, s_0 + n_s), B_S):
        o_s = i_s + tl.arange(0, B_S)
        m_s = o_s < s_0 + n_s
        visible = _positions(p_first, p_last, o_t, m_t, o_s)
        o_map, m_map = (o_t - t_0)[:, None] * n_s + (o_s - s_0)[None, :], m_t[:, None] & m_s[None, :]
        k = load_states_transposed(p_k, stride_ks, o_s, m_s, o_d, D)  # [b_d, b_s]
        tile = product(q, k) * scale
        tile = compose_tile(tile, pre, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
        tile = _softmax_tile(tile, p_lse, o_t, m_t, visible)
        tile = compose_tile(tile, post, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_POST, R, R)
        tile = tl.where(visible, tile, 0.0)
        v = load_states(p_v, stride_vs, o_s, m_s, o_dv, DV)  # [b_s, b_dv]
        out += product(tile.to(v.dtype), v)
    p_out += i_b * stride_ob + i_h * stride_oh
    p_tile = p_out + o_t[:, None].to(tl.int64) * stride_ot + o_dv[None, :]
    tl.store(p_tile, out.to(p_out.dtype.element_ty), mask=m_t[:, None] & (o_dv < DV)[None, :])


@triton.jit
def key_sums_kernel(
    p_tiles, p_grads, p_maps, p_gwk, p_first, p_last, p_wq, p_wk, stride_ib, n_maps, stride_map: tl.int64,
    n_wk, H, G, T, S, t_0, n_t, s_0, n_s,
    STAGE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Adds a chunk's gradients of key-side weights to p_gwk [B, H, n_wk, S], for one tile of keys of a head.

    p_tiles and p_grads [B, H, n_t, n_s]: what a stage composes, 0 scores or 1 weights, and the gradient of the result.
    """
    i_s, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    M = H // G
    i_bh = i_b * H + i_h
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    p_maps += (i_b * G + i_h // M) * n_maps * stride_map
    p_tiles, p_grads = p_tiles + i_bh * stride_map, p_grads + i_bh * stride_map
    pre, post, back_pre, back_post = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    FLAGS: tl.constexpr = F_POST if STAGE else F_PRE
    stage, back = pre, back_pre
    if STAGE:
        stage, back = post, back_post
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    RK: tl.constexpr = R if FLAGS & 2 else 0
    NG: tl.constexpr = 1 if FLAGS & 10 == 10 else 0
    to_down, to_up, to_gate = zero_rows(B_S, RK), zero_rows(B_S, RK), zero_rows(B_S, NG)
    for i_t in range(0, (n_t + B_T - 1) // B_T):
        o_t, m_t, o_s, m_s, o_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, B_T, B_S)
        m_map, visible = m_t[:, None] & m_s[None, :], _positions(p_first, p_last, o_t, m_t, o_s)
        tile = tl.load(p_tiles + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        grad = tl.load(p_grads + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        to_up = add_sums(to_up, load_maps(p_maps, stride_map, o_map, m_map, visible, stage[5] + RQ, RK), grad, 0, RK)
        to_down = add_sums(to_down, load_maps(p_maps, stride_map, o_map, m_map, visible, back[5] + RQ, RK), tile, 0, RK)
        if NG:
            to_gate = add_sums(to_gate, (tile,), grad, 0, NG)
    o_s = s_0 + i_s * B_S + tl.arange(0, B_S)
    m_s = o_s < s_0 + n_s
    p_gwk += i_bh * n_wk * S
    add_rows(p_gwk, S, o_s, m_s, to_down, stage[4], RK)
    add_rows(p_gwk, S, o_s, m_s, to_up, stage[4] + R, RK)
    add_rows(p_gwk, S, o_s, m_s, to_gate, stage[4] + 2 * R, NG)


@triton.jit
def back_kernel(
    p_tiles, p_grads, p_composed, p_delta, p_maps, p_gwq, p_first, p_last, p_wq, p_wk,
    stride_ib, n_maps, stride_map: tl.int64, n_wq, n_wk, H, G, T, S, t_0, n_t, s_0, n_s, scale,
    STAGE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Takes a stage's gradient back through composition, for one tile of queries of a head.

    p_tiles and p_grads [B, H, n_t, n_s] are as for `key_sums_kernel`. Writes the gradients of the packed query-side
    weights, p_gwq [B, H, n_wq, T]. After the softmax (stage 1) it also writes p_composed, the composed weights, rounded
    as in the forward pass; p_grads becomes the gradient of the weights; and p_delta [B, H, T] is Σ_s weights · that,
    over Σ_s weights, which is not quite 1: so the gradient of the composed scores sums to zero, as it must.
    Before it (stage 0), p_composed becomes the gradient of the scores times their scale.
    """
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    M = H // G
    i_m, i_bh = i_h % M, i_b * H + i_h
    o_t = t_0 + i_t * B_T + tl.arange(0, B_T)
    m_t = o_t < t_0 + n_t
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    p_maps += (i_b * G + i_h // M) * n_maps * stride_map
    p_tiles, p_grads = p_tiles + i_bh * stride_map, p_grads + i_bh * stride_map
    p_composed += i_bh * stride_map
    p_wq, p_wk = p_wq + i_bh * n_wq * T, p_wk + i_bh * n_wk * S
    pre, post, back_pre, back_post = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    FLAGS: tl.constexpr = F_POST if STAGE else F_PRE
    stage, back = pre, back_pre
    if STAGE:
        stage, back = post, back_post
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    NG: tl.constexpr = 1 if FLAGS & 9 == 9 else 0
    delta, total = tl.zeros([B_T], tl.float32), tl.zeros([B_T], tl.float32)
    to_down, to_up, to_gate = zero_rows(B_T, RQ), zero_rows(B_T, RQ), zero_rows(B_T, NG)
    lowest, highest = _span(p_first, p_last, o_t, m_t)
    begin = (tl.maximum(lowest, s_0) - s_0) // B_S
    end = (tl.minimum(highest, s_0 + n_s) - s_0 + B_S - 1) // B_S
    for i_s in range(begin, end):
        _, _, o_s, m_s, o_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, B_T, B_S)
        m_map, visible = m_t[:, None] & m_s[None, :], _positions(p_first, p_last, o_t, m_t, o_s)
        tile = tl.load(p_tiles + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        grad = tl.load(p_grads + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        to_up = add_sums(to_up, load_maps(p_maps, stride_map, o_map, m_map, visible, stage[5], RQ), grad, 1, RQ)
        to_down = add_sums(to_down, load_maps(p_maps, stride_map, o_map, m_map, visible, back[5], RQ), tile, 1, RQ)
        if NG:
            to_gate = add_sums(to_gate, (tile,), grad, 1, NG)
        grad = compose_tile(grad, back, i_m, o_t, m_t, o_s, m_s, o_map, m_map, FLAGS, R, 0)
        if STAGE:
            grad = tl.where(visible, grad, 0.0).to(p_grads.dtype.element_ty)
            delta += tl.sum(tile * grad.to(tl.float32), 1)
            total += tl.sum(tile, 1)
            tl.store(p_grads + o_map, grad, mask=m_map)
            out = compose_tile(tile, stage, i_m, o_t, m_t, o_s, m_s, o_map, m_map, FLAGS, R, R)
        else:
            out = grad * scale
        tl.store(p_composed + o_map, tl.where(visible, out, 0.0).to(p_composed.dtype.element_ty), mask=m_map)
    if STAGE:
        delta = tl.where(total > 0, delta / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(p_delta + i_bh * T + o_t, delta, mask=m_t)
    p_gwq += i_bh * n_wq * T
    store_rows(p_gwq, T, o_t, m_t, to_down, stage[3], RQ)
    store_rows(p_gwq, T, o_t, m_t, to_up, stage[3] + R, RQ)
    store_rows(p_gwq, T, o_t, m_t, to_gate, stage[3] + 2 * R, NG)


@triton.jit
def grad_maps_kernel(
    p_tiles, p_grads, p_delta, p_maps, p_first, p_last, p_wq, p_wk,
    stride_ib, n_maps, i_out, stride_map: tl.int64, n_wq, n_wk, H, G, T, S, t_0, n_t, s_0, n_s,
    F_PRE: tl.constexpr, R: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Takes gradients back through the softmax, for one tile of queries and keys: a loop over a group's heads.

    p_tiles [B, H, n_t, n_s], the weights, becomes the gradient of the composed scores, from p_grads, that of the
    weights. Its maps go to p_maps [B·G, n_maps, n_t, n_s] from map i_out.
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, B_T, B_S)
    m_map = m_t[:, None] & m_s[None, :]
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    lowest, highest = _span(p_first, p_last, o_t, m_t)
    if (highest <= s_0 + i_s * B_S) | (lowest >= s_0 + (i_s + 1) * B_S):
        return  # the weights are zeros there
    RQ: tl.constexpr = R if F_PRE & 1 else 0
    RK: tl.constexpr = R if F_PRE & 2 else 0
    query_maps, key_maps = zero_tiles(B_T, B_S, RQ), zero_tiles(B_T, B_S, RK)
    for i_m in range(M):
        i_bh = i_b * H + i_g * M + i_m
        p_tile = p_tiles + i_bh * stride_map + o_map
        tile = tl.load(p_tile, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        grad = tl.load(p_grads + i_bh * stride_map + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        delta = tl.load(p_delta + i_bh * T + o_t, mask=m_t, other=0.0)  # [b_t]
        tile *= grad - delta[:, None]
        tl.store(p_tile, tile.to(p_tiles.dtype.element_ty), mask=m_map)
        query_maps = add_products(query_maps, tile, load_rows(p_wq + i_bh * n_wq * T, T, o_t, m_t, R, RQ), 1, RQ)
        key_maps = add_products(key_maps, tile, load_rows(p_wk + i_bh * n_wk * S, S, o_s, m_s, R, RK), 0, RK)
    p_maps += i_bg * n_maps * stride_map
    _store_maps(p_maps, stride_map, o_map, m_map, query_maps, i_out, RQ)
    _store_maps(p_maps, stride_map, o_map, m_map, key_maps, i_out + RQ, RK)
