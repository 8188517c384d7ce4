"""Composed attention in Triton: the kernels of the forward and the backward pass.

Softmax sits between two mixings of heads, so one pass over the keys cannot do it. Of the mixing only low-rank maps
cross heads: hidden_r(t, s) = Σ_j A_j(t, s) · down[r, j], R of them per side and stage. For a chunk of queries at a time
the forward pass runs

    maps of the scores, log-sum-exps, maps of the weights, composed weights

each a kernel that takes one tile of queries and keys, keeps its maps in registers, loops over the heads of a group, and
recomputes the tile of scores of each from q and k. Composed weights times values is a matrix product of torch.

The backward pass keeps a chunk's tiles of scores A and of weights P, as the maps of each are made. Then it takes
gradients back through the stages, with kernels of the same kind:

    maps of the scores, of the weights      A, P
    grads, back     after the softmax       dW = dO·v and its maps; then W, dP, and gradients of the stage's weights
    grads, back     before the softmax      dA' = P · (dP - Σ_s P dP) and its maps; then dA, and gradients of weights

(W the composed weights, A' the composed scores.) Matrix products of torch make the gradients of values (W, dO), queries
(dA, k) and keys (dA, q), and of static projections, which are such products too: with one, the forward pass also keeps
A and P.

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
    compose_tile,
    load_maps,
    load_products,
    load_rows,
    load_states,
    load_states_transposed,
    product,
    rounded,
    row_sums,
    store_rows,
    zero_tiles,
)

# What maps are made of: scores q·k; weights, the softmax of composed scores; the gradients of what a stage makes.
SCORES, WEIGHTS, GRAD_SCORES, GRAD_WEIGHTS = 0, 1, 2, 3


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
def _is_unseen(p_first, p_last, o_t, m_t, s_0, B_S: tl.constexpr):
    """Whether none of the queries sees any of the B_S keys from s_0."""
    first = tl.load(p_first + o_t, mask=m_t, other=2147483647)  # [b_t]
    last = tl.load(p_last + o_t, mask=m_t, other=0)  # [b_t]
    lowest = tl.min(tl.where(first < last, first, 2147483647))
    highest = tl.max(tl.where(first < last, last, 0))
    return (highest <= s_0) | (lowest >= s_0 + B_S)


@triton.jit
def _store_zeros(p_tiles, stride_map, o_map, m_map, M, B_T: tl.constexpr, B_S: tl.constexpr):
    """Fills the tiles of a group's heads with zeros: torch reads all of a chunk."""
    for i_m in range(M):
        tl.store(p_tiles + i_m * stride_map + o_map, tl.zeros([B_T, B_S], p_tiles.dtype.element_ty), mask=m_map)


@triton.jit
def _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T: tl.constexpr, B_S: tl.constexpr):
    """Queries and keys of a tile: o_t, m_t [b_t], o_s, m_s [b_s]; their place in a map, o_map, m_map [b_t, b_s].

    A chunk's last keys may lie beyond S, so that the rows of maps stay aligned: they have a place, but do not exist.
    """
    o_t = t_0 + i_t * B_T + tl.arange(0, B_T)
    o_s = s_0 + i_s * B_S + tl.arange(0, B_S)
    m_t, m_column = o_t < t_0 + n_t, o_s < s_0 + n_s
    o_map = (o_t - t_0)[:, None] * n_s + (o_s - s_0)[None, :]
    return o_t, m_t, o_s, m_column & (o_s < S), o_map, m_t[:, None] & m_column[None, :]


@triton.jit
def _store_maps(p_maps, stride, o_map, m_map, tiles, first, count: tl.constexpr):
    for r in tl.static_range(count):
        tl.store(p_maps + (first + r) * stride + o_map, rounded(tiles[r], p_maps.dtype.element_ty), mask=m_map)


@triton.jit
def maps_kernel(
    p_q, p_k, p_lse, p_first, p_last, p_wq, p_wk, p_maps, p_tiles,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_ib, n_maps, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    SOURCE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Hidden maps of scores (SOURCE 0) or weights (1), for one tile: a loop over a group's heads.

    They go to their place in p_maps [B·G, n_maps, n_t, n_s]. With KEEP, the tiles themselves go to p_tiles
    [B, H, n_t, n_s], zeros where nothing is seen.
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map, m_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T, B_S)
    first_bh = i_bg * M  # heads of a group are neighbours
    p_tiles += first_bh * stride_map
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    if _is_unseen(p_first, p_last, o_t, m_t, s_0 + i_s * B_S, B_S):
        if KEEP:
            _store_zeros(p_tiles, stride_map, o_map, m_map, M, B_T, B_S)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    o_d = tl.arange(0, B_D)
    p_maps += i_bg * n_maps * stride_map
    p_wq, p_wk = p_wq + first_bh * n_wq * T, p_wk + first_bh * n_wk * S
    pre, post, _, _ = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    stage = pre
    FLAGS: tl.constexpr = F_POST if SOURCE else F_PRE
    PRE_MAPS: tl.constexpr = R * ((F_PRE & 1) + (F_PRE & 2) // 2) if SOURCE else 0
    if SOURCE:
        stage = post
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    RK: tl.constexpr = R if FLAGS & 2 else 0
    held = load_products(p_maps, stride_map, o_map, m_map, visible, 0, PRE_MAPS, B_S)
    query_maps, key_maps = zero_tiles(B_T, B_S, RQ), zero_tiles(B_T, B_S, RK)
    for i_m in tl.range(M, disable_licm=True):
        i_h = i_g * M + i_m
        p_wq_h, p_wk_h = p_wq + i_m * n_wq * T, p_wk + i_m * n_wk * S
        q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)
        k = load_states_transposed(p_k + i_b * stride_kb + i_h // rep * stride_kh, stride_ks, o_s, m_s, o_d, D)
        tile = product(q, k) * scale
        if SOURCE:
            here = (p_wq_h, p_wk_h, p_maps)
            tile = compose_tile(tile, held, here + pre[3:], i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
            lse = tl.load(p_lse + (first_bh + i_m) * T + o_t, mask=m_t, other=float("inf"))  # [b_t]
            tile = tl.exp(tile - lse[:, None])  # anything where not visible
        if KEEP:
            kept = rounded(tl.where(visible, tile, 0.0), p_tiles.dtype.element_ty)
            tl.store(p_tiles + i_m * stride_map + o_map, kept, mask=m_map)
        query_maps = add_products(query_maps, tile, load_rows(p_wq_h, T, o_t, m_t, stage[3], RQ), 1, RQ)
        key_maps = add_products(key_maps, tile, load_rows(p_wk_h, S, o_s, m_s, stage[4], RK), 0, RK)
    _store_maps(p_maps, stride_map, o_map, m_map, query_maps, stage[5], RQ)
    _store_maps(p_maps, stride_map, o_map, m_map, key_maps, stage[5] + RQ, RK)


@triton.jit
def lse_kernel(
    p_q, p_k, p_lse_parts, p_first, p_last, p_wq, p_wk, p_maps,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_ib, n_maps, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    F_PRE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """A tile's part of the log-sum-exp of composed scores: a loop over a group's heads.

    p_lse_parts [tiles of keys, B, H, n_t]; -inf where nothing is seen.
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map, m_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T, B_S)
    n_bh, first_bh = tl.num_programs(2).to(tl.int64) * M, i_bg * M  # heads of a group are neighbours
    p_lse_parts += (i_s * n_bh + first_bh) * n_t + o_t - t_0
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    if _is_unseen(p_first, p_last, o_t, m_t, s_0 + i_s * B_S, B_S):
        for i_m in range(M):
            tl.store(p_lse_parts + i_m * n_t, tl.full([B_T], float("-inf"), tl.float32), mask=m_t)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    o_d = tl.arange(0, B_D)
    p_maps += i_bg * n_maps * stride_map
    MAPS: tl.constexpr = R * ((F_PRE & 1) + (F_PRE & 2) // 2)
    held = load_products(p_maps, stride_map, o_map, m_map, visible, 0, MAPS, B_S)
    for i_m in tl.range(M, disable_licm=True):
        i_h = i_g * M + i_m
        q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)  # [b_t, b_d]
        k = load_states_transposed(p_k + i_b * stride_kb + i_h // rep * stride_kh, stride_ks, o_s, m_s, o_d, D)
        i_bh = first_bh + i_m
        pre = (p_wq + i_bh * n_wq * T, p_wk + i_bh * n_wk * S, p_maps, 0, 0, 0, T, S, stride_map)
        tile = product(q, k) * scale
        tile = compose_tile(tile, held, pre, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
        tile = tl.where(visible, tile, float("-inf"))
        top = tl.max(tile, 1)  # [b_t]
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(tile - base[:, None]), 1)  # [b_t]
        lse = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(p_lse_parts + i_m * n_t, lse, mask=m_t)


@triton.jit
def join_kernel(
    p_lse_parts, p_lse, T, t_0, n_t, n_parts, n_bh, B_P: tl.constexpr, B_T: tl.constexpr
):  # fmt: skip
    """Log-sum-exps of a chunk from the parts of its tiles: p_lse [B·H, T]; +inf where nothing is seen."""
    i_bh, i_t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_t = i_t * B_T + tl.arange(0, B_T)
    m_t = o_t < n_t
    top, total = tl.full([B_T], float("-inf"), tl.float32), tl.zeros([B_T], tl.float32)
    for i_p in range(0, n_parts, B_P):
        o_p = i_p + tl.arange(0, B_P)
        p_part = p_lse_parts + (o_p[:, None].to(tl.int64) * n_bh + i_bh) * n_t + o_t[None, :]
        part = tl.load(p_part, mask=(o_p < n_parts)[:, None] & m_t[None, :], other=float("-inf"))  # [b_p, b_t]
        above = tl.maximum(top, tl.max(part, 0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(part - base[None, :]), 0)
        top = above
    seen = total > 0
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(p_lse + i_bh * T + t_0 + o_t, lse, mask=m_t)


@triton.jit
def composed_kernel(
    p_q, p_k, p_composed, p_lse, p_first, p_last, p_wq, p_wk, p_maps,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_ib, n_maps, stride_map: tl.int64,
    n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s, scale,
    F_PRE: tl.constexpr, F_POST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, B_D: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Composed weights of a tile: p_composed [B, H, n_t, n_s], zeros where nothing is seen: a loop over heads."""
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map, m_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T, B_S)
    first_bh = i_bg * M  # heads of a group are neighbours
    p_composed += first_bh * stride_map
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    if _is_unseen(p_first, p_last, o_t, m_t, s_0 + i_s * B_S, B_S):
        _store_zeros(p_composed, stride_map, o_map, m_map, M, B_T, B_S)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    o_d = tl.arange(0, B_D)
    p_maps += i_bg * n_maps * stride_map
    p_wq, p_wk = p_wq + first_bh * n_wq * T, p_wk + first_bh * n_wk * S
    pre, post, _, _ = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    PRE_MAPS: tl.constexpr = R * ((F_PRE & 1) + (F_PRE & 2) // 2)
    POST_MAPS: tl.constexpr = R * ((F_POST & 1) + (F_POST & 2) // 2)
    pre_maps = load_products(p_maps, stride_map, o_map, m_map, visible, 0, PRE_MAPS, B_S)
    post_maps = load_products(p_maps, stride_map, o_map, m_map, visible, post[5], POST_MAPS, B_S)
    for i_m in tl.range(M, disable_licm=True):
        i_h = i_g * M + i_m
        q = load_states(p_q + i_b * stride_qb + i_h * stride_qh, stride_qt, o_t, m_t, o_d, D)  # [b_t, b_d]
        k = load_states_transposed(p_k + i_b * stride_kb + i_h // rep * stride_kh, stride_ks, o_s, m_s, o_d, D)
        here = (p_wq + i_m * n_wq * T, p_wk + i_m * n_wk * S, p_maps)
        tile = product(q, k) * scale
        tile = compose_tile(tile, pre_maps, here + pre[3:], i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_PRE, R, R)
        lse = tl.load(p_lse + (first_bh + i_m) * T + o_t, mask=m_t, other=float("inf"))  # [b_t]
        tile = tl.where(visible, tl.exp(tile - lse[:, None]), 0.0)
        tile = compose_tile(tile, post_maps, here + post[3:], i_m, o_t, m_t, o_s, m_s, o_map, m_map, F_POST, R, R)
        if F_POST & 4:
            tile = tl.where(visible, tile, 0.0)
        tl.store(p_composed + i_m * stride_map + o_map, rounded(tile, p_composed.dtype.element_ty), mask=m_map)


@triton.jit
def grads_kernel(
    p_do, p_v, p_grads, p_weight_grads, p_delta, p_maps, p_first, p_last, p_wq, p_wk,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_ot, stride_ib,
    n_maps, stride_map: tl.int64, n_wq, n_wk, H, G, rep, T, S, t_0, n_t, s_0, n_s,
    STAGE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, DV: tl.constexpr, B_DV: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Gradients of what a stage makes, and their hidden maps, for one tile: a loop over a group's heads.

    After the softmax (STAGE 1) they are dO·v, and go to p_grads [B, H, n_t, n_s]. Before it, p_grads holds the weights,
    which become weights · (p_weight_grads - p_delta [B, H, n_t]): back through the softmax. Zeros where nothing is
    seen. The hidden maps of the transposed composition go to their place in p_maps [B·G, n_maps, n_t, n_s].
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    M = H // G
    o_t, m_t, o_s, m_s, o_map, m_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T, B_S)
    first_bh = i_bg * M  # heads of a group are neighbours
    p_grads += first_bh * stride_map
    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    if _is_unseen(p_first, p_last, o_t, m_t, s_0 + i_s * B_S, B_S):
        if STAGE:  # before the softmax, the weights are zeros
            _store_zeros(p_grads, stride_map, o_map, m_map, M, B_T, B_S)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    o_dv = tl.arange(0, B_DV)
    p_maps += i_bg * n_maps * stride_map
    p_wq, p_wk = p_wq + first_bh * n_wq * T, p_wk + first_bh * n_wk * S
    p_weight_grads += first_bh * stride_map
    p_delta += first_bh * n_t + o_t - t_0
    _, _, back, back_post = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    FLAGS: tl.constexpr = F_POST if STAGE else F_PRE
    if STAGE:
        back = back_post
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    RK: tl.constexpr = R if FLAGS & 2 else 0
    query_maps, key_maps = zero_tiles(B_T, B_S, RQ), zero_tiles(B_T, B_S, RK)
    for i_m in tl.range(M, disable_licm=True):
        p_grad = p_grads + i_m * stride_map + o_map
        if STAGE:
            i_h = i_g * M + i_m
            do = load_states(p_do + i_b * stride_ob + i_h * stride_oh, stride_ot, o_t, m_t, o_dv, DV)
            p_v_h = p_v + i_b * stride_vb + i_h // rep * stride_vh
            v = load_states_transposed(p_v_h, stride_vs, o_s, m_s, o_dv, DV)
            grad = tl.where(visible, product(do, v), 0.0)
        else:
            weights = tl.load(p_grad, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
            grad = tl.load(p_weight_grads + i_m * stride_map + o_map, mask=m_map, other=0.0).to(tl.float32)
            grad = weights * (grad - tl.load(p_delta + i_m * n_t, mask=m_t, other=0.0)[:, None])
        tl.store(p_grad, rounded(grad, p_grads.dtype.element_ty), mask=m_map)
        p_wq_h, p_wk_h = p_wq + i_m * n_wq * T, p_wk + i_m * n_wk * S
        query_maps = add_products(query_maps, grad, load_rows(p_wq_h, T, o_t, m_t, back[3] + R, RQ), 1, RQ)
        key_maps = add_products(key_maps, grad, load_rows(p_wk_h, S, o_s, m_s, back[4] + R, RK), 0, RK)
    _store_maps(p_maps, stride_map, o_map, m_map, query_maps, back[5], RQ)
    _store_maps(p_maps, stride_map, o_map, m_map, key_maps, back[5] + RQ, RK)


@triton.jit
def back_kernel(
    p_tiles, p_grads, p_composed, p_delta, p_maps, p_gwq, p_gwk, p_first, p_last, p_wq, p_wk, stride_ib,
    n_maps, stride_map: tl.int64, n_wq, n_wk, H, G, T, S, t_0, n_t, s_0, n_s, scale,
    STAGE: tl.constexpr, F_PRE: tl.constexpr, F_POST: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, B_T: tl.constexpr, B_S: tl.constexpr,
):  # fmt: skip
    """Takes gradients back through a stage of composition, for one tile: a loop over a group's heads.

    p_tiles, p_grads and p_composed are [B, H, n_t, n_s]: what the stage composes (weights in STAGE 1, scores in 0), the
    gradient of what it makes, and an output. p_gwq [tiles of keys, B, H, C, n_t] and p_gwk
    [tiles of queries, B, H, C, n_s], in float32, get this tile's part of the gradients of packed weights.

    After the softmax, p_grads becomes the gradient of the weights, p_composed the composed weights, rounded as in the
    forward pass, and p_delta [tiles of keys, 2, B, H, n_t] gets Σ_s weights · gradient and Σ_s weights. Before it,
    p_composed becomes the gradient of the scores times `scale`, which is that of q·k.
    """
    i_s, i_t, i_bg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b = i_bg // G
    M = H // G
    o_t, m_t, o_s, m_s, o_map, m_map = _chunk_tile(i_t, i_s, t_0, n_t, s_0, n_s, S, B_T, B_S)
    n_bh, first_bh = tl.num_programs(2).to(tl.int64) * M, i_bg * M  # heads of a group are neighbours
    p_tiles, p_grads = p_tiles + first_bh * stride_map, p_grads + first_bh * stride_map
    p_composed += first_bh * stride_map
    p_gwq += (i_s * n_bh + first_bh) * C * n_t + o_t - t_0
    p_gwk += (i_t * n_bh + first_bh) * C * n_s + o_s - s_0
    p_delta += (2 * i_s * n_bh + first_bh) * n_t + o_t - t_0
    FLAGS: tl.constexpr = F_POST if STAGE else F_PRE
    RQ: tl.constexpr = R if FLAGS & 1 else 0
    RK: tl.constexpr = R if FLAGS & 2 else 0
    NQ: tl.constexpr = 1 if FLAGS & 9 == 9 else 0
    NK: tl.constexpr = 1 if FLAGS & 10 == 10 else 0

    p_first, p_last = p_first + i_b * stride_ib, p_last + i_b * stride_ib
    if _is_unseen(p_first, p_last, o_t, m_t, s_0 + i_s * B_S, B_S):
        _store_zeros(p_composed, stride_map, o_map, m_map, M, B_T, B_S)
        no_row, no_column = tl.zeros([B_T], tl.float32), tl.zeros([B_S], tl.float32)
        for i_m in range(M):
            for c in tl.static_range(2 * RQ + NQ):
                tl.store(p_gwq + (i_m * C + c) * n_t, no_row, mask=m_t)
            for c in tl.static_range(2 * RK + NK):
                tl.store(p_gwk + (i_m * C + c) * n_s, no_column, mask=m_s)
            if STAGE:
                store_rows(p_delta + i_m * n_t, n_bh * n_t, 0, m_t, (no_row, no_row), 0, 2)
        return
    visible = _positions(p_first, p_last, o_t, m_t, o_s)
    p_maps += i_bg * n_maps * stride_map
    p_wq, p_wk = p_wq + first_bh * n_wq * T, p_wk + first_bh * n_wk * S
    stage, post, back, back_post = _stages(p_wq, p_wk, p_maps, T, S, stride_map, M, F_PRE, F_POST, R, C)
    if STAGE:
        stage, back = post, back_post
    query_maps = load_maps(p_maps, stride_map, o_map, m_map, visible, stage[5], RQ)
    key_maps = load_maps(p_maps, stride_map, o_map, m_map, visible, stage[5] + RQ, RK)
    query_back = load_maps(p_maps, stride_map, o_map, m_map, visible, back[5], RQ)
    key_back = load_maps(p_maps, stride_map, o_map, m_map, visible, back[5] + RQ, RK)
    for i_m in tl.range(M, disable_licm=True):
        p_grad = p_grads + i_m * stride_map + o_map
        tile = tl.load(p_tiles + i_m * stride_map + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        grad = tl.load(p_grad, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
        p_row, p_column = p_gwq + i_m * C * n_t, p_gwk + i_m * C * n_s
        store_rows(p_row, n_t, 0, m_t, row_sums(query_back, tile, 1, RQ), 0, RQ)
        store_rows(p_row, n_t, 0, m_t, row_sums(query_maps, grad, 1, RQ), R, RQ)
        store_rows(p_row, n_t, 0, m_t, row_sums((tile,), grad, 1, NQ), 2 * R, NQ)
        store_rows(p_column, n_s, 0, m_s, row_sums(key_back, tile, 0, RK), 0, RK)
        store_rows(p_column, n_s, 0, m_s, row_sums(key_maps, grad, 0, RK), R, RK)
        store_rows(p_column, n_s, 0, m_s, row_sums((tile,), grad, 0, NK), 2 * R, NK)
        here = (p_wq + i_m * n_wq * T, p_wk + i_m * n_wk * S, p_maps)
        held = query_back + key_back
        grad = compose_tile(grad, held, here + back[3:], i_m, o_t, m_t, o_s, m_s, o_map, m_map, FLAGS, R, 0)
        if FLAGS & 4:
            grad = tl.where(visible, grad, 0.0)
        if STAGE:
            grad = rounded(grad, p_grads.dtype.element_ty)
            tl.store(p_grad, grad, mask=m_map)
            tl.store(p_delta + i_m * n_t, tl.sum(tile * grad.to(tl.float32), 1), mask=m_t)
        else:
            out = rounded(grad * scale, p_composed.dtype.element_ty)
            tl.store(p_composed + i_m * stride_map + o_map, out, mask=m_map)
    if STAGE:  # a loop of its own, or registers run out
        held = query_maps + key_maps
        for i_m in range(M):
            tile = tl.load(p_tiles + i_m * stride_map + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
            tl.store(p_delta + (n_bh + i_m) * n_t, tl.sum(tile, 1), mask=m_t)
            here = (p_wq + i_m * n_wq * T, p_wk + i_m * n_wk * S, p_maps)
            out = compose_tile(tile, held, here + stage[3:], i_m, o_t, m_t, o_s, m_s, o_map, m_map, FLAGS, R, R)
            if FLAGS & 4:
                out = tl.where(visible, out, 0.0)
            tl.store(p_composed + i_m * stride_map + o_map, rounded(out, p_composed.dtype.element_ty), mask=m_map)
