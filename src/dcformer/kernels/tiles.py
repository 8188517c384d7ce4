"""What every kernel of composed attention does with one tile of one head: [b_t, b_s], queries by keys, in registers.

Composition weights of a side are packed heads first: [B, H, channels, N] for N tokens, the stage before the softmax
and then the one after it, each with R channels `down`, R `up` and a gate (those that there are). What crosses heads are
maps, [n_t, n_s] for a chunk of queries and the keys that it sees. A stage has R hidden maps of the query side, R of the
key side, and for a static projection one per head.

A stage is passed as a tuple (p_wq, p_wk, p_maps, i_wq, i_wk, i_map, T, S, stride_map): pointers at the weights of a
head and the maps of its group, the numbers of the stage's first channels and first map, and the strides of both. Its
constant flags are 1 query side, 2 key side, 4 static, 8 gates.

Names: i_ index, o_ offset, m_ mask, p_ pointer, b_ block; t queries, s keys, d channels of a head.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow)

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16; there operands are widened, which changes no product.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_rows(p_w, stride, o_n, m_n, first, count: tl.constexpr):
    """`count` channels of packed weights, from channel `first`: a tuple of [b_n] in float32."""
    out = ()
    for r in tl.static_range(count):
        out = out + (tl.load(p_w + (first + r) * stride + o_n, mask=m_n, other=0.0).to(tl.float32),)
    return out


@triton.jit
def load_maps(p_maps, stride, o_map, m_map, visible, first, count: tl.constexpr):
    """`count` maps of a chunk, from map `first`: a tuple of [b_t, b_s] in float32; zeros where not visible."""
    out = ()
    for r in tl.static_range(count):
        tile = tl.load(p_maps + (first + r) * stride + o_map, mask=m_map, other=0.0).to(tl.float32)
        out = out + (tl.where(visible, tile, 0.0),)
    return out


@triton.jit
def zero_tiles(b_t: tl.constexpr, b_s: tl.constexpr, count: tl.constexpr):
    """A tuple of `count` tiles of zeros."""
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros([b_t, b_s], tl.float32),)
    return out


@triton.jit
def add_products(tiles, tile, rows, axis: tl.constexpr, count: tl.constexpr):
    """tiles[r] += tile * rows[r]; the rows lie along the axis that is not `axis`."""
    out = ()
    for r in tl.static_range(count):
        out = out + (tiles[r] + tile * tl.expand_dims(rows[r], axis),)
    return out


@triton.jit
def row_sums(tiles, tile, axis: tl.constexpr, count: tl.constexpr):
    """tiles[r] * tile, summed over an axis: a tuple of vectors."""
    out = ()
    for r in tl.static_range(count):
        out = out + (tl.sum(tiles[r] * tile, axis),)
    return out


@triton.jit
def store_rows(p_w, stride, o_n, m_n, rows, first, count: tl.constexpr):
    """Stores a tuple of [b_n] in channels of packed gradients, from channel `first`."""
    for r in tl.static_range(count):
        tl.store(p_w + (first + r) * stride + o_n, rows[r], mask=m_n)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to another dtype, to nearest even; the interpreter would truncate to bfloat16."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b):
    """[x, d] times [d, y] in float32, exact for float32 inputs."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_products(p_maps, stride, o_map, m_map, visible, first, count: tl.constexpr, B_S: tl.constexpr):
    """As `load_maps`, times one: a product of matrices leaves its result where q·k leaves scores, and what works on
    both, head after head, needs no exchange between threads. Exact: only ones and zeros are multiplied with. Maps in
    float32 are not multiplied, tensor cores have no exact product for them."""
    dtype: tl.constexpr = p_maps.dtype.element_ty
    tiles = load_maps(p_maps, stride, o_map, m_map, visible, first, count)
    if dtype == tl.float32:
        return tiles
    one = (tl.arange(0, B_S)[:, None] == tl.arange(0, B_S)[None, :]).to(tl.float32).to(dtype)
    out = ()
    for r in tl.static_range(count):
        out = out + (product(tiles[r].to(dtype), one),)
    return out


@triton.jit
def load_states(p_x, stride, o_n, m_n, o_d, D: tl.constexpr):
    """Queries, keys or values of a head: [b_n, b_d], zeros beyond the tokens and the D channels."""
    p_tile = p_x + o_n[:, None].to(tl.int64) * stride + o_d[None, :]
    return tl.load(p_tile, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_states_transposed(p_x, stride, o_n, m_n, o_d, D: tl.constexpr):
    """The same as [b_d, b_n]."""
    p_tile = p_x + o_n[None, :].to(tl.int64) * stride + o_d[:, None]
    return tl.load(p_tile, mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)


@triton.jit
def compose_tile(
    tile, held, stage, i_m, o_t, m_t, o_s, m_s, o_map, m_map, F: tl.constexpr, R: tl.constexpr, U: tl.constexpr
):  # fmt: skip
    """Composes a head's tile, from the tile itself and the maps of its group (paper section 3.1, equation 4).

    F are the stage's flags; U is the first channel of the outer weights: R (`up`), or 0 (`down`) for the transposed
    map, which takes gradients back. i_m is the head's number in its group. Hidden maps are at hand in `held`, those of
    the query side first; static ones are loaded.
    """
    p_wq, p_wk, p_maps, i_wq, i_wk, i_map, T, S, stride_map = stage
    factor = tl.zeros_like(tile)
    out = tile
    R_Q: tl.constexpr = R if F & 1 else 0
    R_K: tl.constexpr = R if F & 2 else 0
    for r in tl.static_range(R_Q + R_K):
        hidden = held[r]  # [b_t, b_s]
        if r < R_Q:
            outer = tl.load(p_wq + (i_wq + U + r) * T + o_t, mask=m_t, other=0.0).to(tl.float32)  # [b_t]
            out += hidden * outer[:, None]
        else:
            outer = tl.load(p_wk + (i_wk + U + r - R_Q) * S + o_s, mask=m_s, other=0.0).to(tl.float32)  # [b_s]
            out += hidden * outer[None, :]
    if F & 8:
        if F & 1:
            gate = tl.load(p_wq + (i_wq + 2 * R) * T + o_t, mask=m_t, other=0.0).to(tl.float32)  # [b_t]
            factor += gate[:, None]
        if F & 2:
            gate = tl.load(p_wk + (i_wk + 2 * R) * S + o_s, mask=m_s, other=0.0).to(tl.float32)  # [b_s]
            factor += gate[None, :]
        out += tile * factor
    if F & 4:
        i_static = i_map + R_Q + R_K + i_m
        out += tl.load(p_maps + i_static * stride_map + o_map, mask=m_map, other=0.0).to(tl.float32)  # [b_t, b_s]
    return out
