"""Composition with heads as the dimension of a matrix: what is done with all heads of a group for one key.

A program has B_T queries and all M heads of a group, and loops over keys. For one key s, with x [t, h] (scores or
weights) as rows of queries,

    x'[t, h'] = x (1 + gate_q) + Σ_r up_q[r] · (Σ_h x down_q[r])  +  x @ M(s)

The query side is elementwise: its weights, [t, h], stay in registers for the whole loop. The key side with its gate and
the static projection is one product: M(s) [h, h'] comes from `key_side.expand_kernel`. Gradients go back by the same
with up and down exchanged and M transposed.

Heads come in one block of H0 (16 or 32), or in two above 32: H0 = 32 and H1 = 16 or 32 (H1 = 0: one block). Tiles of
all heads are tuples of one tile per block, and matrices tuples of blocks, row by row. Heads from M on do not exist:
they are loaded as zeros and not stored. A stage's constant flags F are those of `layout.Part`. With SPLIT, scores and
their M(s) are float32 where other maps are float16, and products take them as `split` leaves them.
"""
# ruff: noqa: RUF005 - Triton's tuples have no unpacking
# mypy: disable-error-code="no-untyped-def, assignment"
# (arguments of kernels have no types in Python, the annotations there are Triton's; tuples grow)

import triton
import triton.language as tl

from ..layout import Part
from .precision import (
    LARGEST_HALF,
    add_half_product,
    add_product,
    add_times,
    half_product,
    product,
    rounded,
    two_in_a_register,
    uniform,
    within,
)

QUERY, KEY = tl.constexpr(Part.QUERY.value), tl.constexpr(Part.KEY.value)
STATIC, GATE = tl.constexpr(Part.STATIC.value), tl.constexpr(Part.GATE.value)
NO_KEY = tl.constexpr(2147483647)  # no key is as far as this
WEIGHT_SHIFT = tl.constexpr(8)  # P and W are stored times 2^8 in float16: with many keys each is small
GRAD_SHIFT = tl.constexpr(6)  # gradients of the M(s) of scores are stored times 2^-6: scores are larger than weights
LEAST = tl.constexpr(2.0**-126)
MATRIX_GRAD_UNIT = tl.constexpr(2.0**-GRAD_SHIFT.value)

# What kernels are jitted with: counts that follow from lengths, and pointers to single numbers. That one is a multiple
# of 16 makes no better code: Triton would compile each kernel once more for it.
ALIKE = {
    "do_not_specialize": ("n_scales", "n_undo", "n_largest", "n_amplified", "n_parts"),
    "do_not_specialize_on_alignment": ("p_inverse", "p_finite"),
}


@triton.jit
def log2(x):
    """log2 of x >= 0; of 0, that of the smallest normal float32."""
    return tl.log2(tl.maximum(x, LEAST))


@triton.jit
def power(exponent):
    """2 to a whole number from -126 to 126, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def head_ids(i: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """Numbers of the heads of block i: [h]."""
    if i == 0:
        return tl.arange(0, H0)
    else:
        return H0 + tl.arange(0, H1)


# --- which keys -------------------------------------------------------------------------------------------------------


@triton.jit
def intervals(p_first, p_last, o_t, m_t):
    """The keys [first, last) that queries see: two [t]. Queries that are not there see none."""
    first = tl.load(p_first + o_t, mask=m_t, other=NO_KEY)
    last = tl.load(p_last + o_t, mask=m_t, other=0)
    return first, last


@triton.jit
def span(first, last):
    """Bounds of the keys that any of some queries sees; an empty interval if none sees anything."""
    is_seeing = first < last
    return uniform(tl.min(tl.where(is_seeing, first, NO_KEY))), uniform(tl.max(tl.where(is_seeing, last, 0)))


@triton.jit
def tiles_that_see(p_first, p_last, n_t, low, high, B_T: tl.constexpr):
    """Tiles of a chunk's queries: start to stop see any of the keys [low, high), inner to outer between them see all of
    them, every query. Returns start, inner, outer, stop."""
    BLOCK: tl.constexpr = 1024  # queries looked at together
    some_0, some_1 = n_t, 0
    all_0, all_1, count = n_t, 0, 0
    for t in tl.range(0, n_t, BLOCK):
        o_t = t + tl.arange(0, BLOCK)
        first, last = intervals(p_first, p_last, o_t, o_t < n_t)
        sees = (first < last) & (first < high) & (last > low)
        some_0 = tl.minimum(some_0, tl.min(tl.where(sees, o_t, n_t)))
        some_1 = tl.maximum(some_1, tl.max(tl.where(sees, o_t + 1, 0)))
        sees_all = (first <= low) & (last >= high)
        all_0 = tl.minimum(all_0, tl.min(tl.where(sees_all, o_t, n_t)))
        all_1 = tl.maximum(all_1, tl.max(tl.where(sees_all, o_t + 1, 0)))
        count += tl.sum(sees_all.to(tl.int32))
    some_0, some_1, all_0 = uniform(some_0), uniform(some_1), uniform(all_0)
    all_1 = uniform(tl.where(count == all_1 - all_0, all_1, 0))  # none where one between them does not see all
    start, stop = some_0 // B_T, tl.cdiv(some_1, B_T)
    inner = tl.maximum(tl.minimum(tl.cdiv(all_0, B_T), stop), start)
    return start, inner, tl.maximum(all_1 // B_T, inner), stop


# --- maps -------------------------------------------------------------------------------------------------------------


@triton.jit
def place_in_map(i_bg, i_t, G, M: tl.constexpr, n_s, stride_s, B_T: tl.constexpr):
    """Where a tile of B_T queries and a group's heads begin in a map, [B, n_s, tiles, H, B_T]. What a program of
    composition has of a key lies together, and that of the next key is near: in few pages of memory."""
    return i_bg // G * n_s * stride_s + (i_t * G + i_bg % G) * (M * B_T)


@triton.jit
def load_row(p_map, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr):
    """A key's row of a tile of a map, as it lies in memory: blocks [h, t]."""
    out = ()
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        p_row = p_map + o_h[:, None] * B_T + tl.arange(0, B_T)[None, :]
        if M == H0 + H1:
            out = out + (tl.load(p_row),)
        else:
            out = out + (tl.load(p_row, mask=(o_h < M)[:, None], other=0.0),)
    return out


@triton.jit
def store_row(p_map, x, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, B_T: tl.constexpr):
    """Stores blocks [t, h] as a key's row of a tile of a map."""
    x = cast(x, p_map.dtype.element_ty, H1)
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        p_row = p_map + o_h[:, None] * B_T + tl.arange(0, B_T)[None, :]
        if M == H0 + H1:
            tl.store(p_row, tl.trans(x[i]))
        else:
            tl.store(p_row, tl.trans(x[i]), mask=(o_h < M)[:, None])


@triton.jit
def transposed(x, H1: tl.constexpr):
    """Each block transposed: [h, t] to [t, h]."""
    out = ()
    for i in tl.static_range(1 + (H1 > 0)):
        out = out + (tl.trans(x[i]),)
    return out


@triton.jit
def cast(x, dtype: tl.constexpr, H1: tl.constexpr):
    """Each block in another dtype."""
    out = ()
    for i in tl.static_range(1 + (H1 > 0)):
        if x[i].dtype == dtype:
            out = out + (x[i],)
        else:
            out = out + (rounded(x[i].to(tl.float32), dtype),)
    return out


@triton.jit
def split(x, count: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles as products of matrices take them. With SPLIT each of float32, within ±65504, becomes two of float16: its
    rounded values, and what remains of them; the former of all tiles come first. Else they stay as they are."""
    if SPLIT:
        held, left = (), ()
        for i in tl.static_range(count):
            half = x[i].to(tl.float16)
            held = held + (half,)
            left = left + ((x[i] - half.to(tl.float32)).to(tl.float16),)
        x = held + left
    return x


@triton.jit
def diagonal(factor: tl.constexpr, dtype: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """Blocks [h, h'] with a number on the diagonal: what `widened` takes. To be made before a loop: Triton 3.9 would
    write it to shared memory in each turn."""
    out = ()
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        out = out + (tl.where(o_h[:, None] == o_h[None, :], factor, 0.0).to(dtype),)
    return out


@triton.jit
def widened(x, ones, H1: tl.constexpr, SPLIT: tl.constexpr = False):
    """Blocks [t, h] in float32, where products of matrices leave their results: a product with `diagonal` of 1, or of a
    power of two (float32 has none). With SPLIT they are of `split`.

    Exact. A mere conversion would leave them where loads do, and what follows would go through shared memory. float32
    is left as it is: tensor cores have no exact product for it.
    """
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    for i in tl.static_range(NB):
        if x[i].dtype == tl.float32:
            out = out + (x[i],)
        elif SPLIT:
            out = out + (add_product(product(x[NB + i], ones[i]), x[i], ones[i]),)
        else:
            out = out + (product(x[i], ones[i]),)
    return out


@triton.jit
def load_heads(
    p_x, stride_h, o_t, m_t, other: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr
):  # fmt: skip
    """One number per query and head: blocks [t, h], `other` where there is none."""
    out = ()
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        p_tile = p_x + o_h[None, :] * stride_h + o_t[:, None]
        out = out + (tl.load(p_tile, mask=m_t[:, None] & (o_h < M)[None, :], other=other),)
    return out


@triton.jit
def store_heads(p_x, x, stride_h, o_t, m_t, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """Stores blocks [t, h]."""
    for i in tl.static_range(1 + (H1 > 0)):
        o_h = head_ids(i, H0, H1)
        tl.store(p_x + o_h[None, :] * stride_h + o_t[:, None], x[i], mask=m_t[:, None] & (o_h < M)[None, :])


@triton.jit
def filled(value: tl.constexpr, count: tl.constexpr, B_T: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """`count` times blocks [t, h] of one value in float32, in a flat tuple."""
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.full([B_T, H0], value, tl.float32),)
        if H1 > 0:
            out = out + (tl.full([B_T, H1], value, tl.float32),)
    return out


# --- composition ------------------------------------------------------------------------------------------------------


@triton.jit
def _load_channel(
    p_w, c: tl.constexpr, T, o_t, m_t, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr
):  # fmt: skip
    """A channel of the query side, in float32: blocks [t, h]. What is infinite is NaN: of a map, infinity means what
    float16 does not hold."""
    loaded, out = load_heads(p_w + c * T, C * T, o_t, m_t, 0.0, M, H0, H1), ()
    for i in tl.static_range(1 + (H1 > 0)):
        x = loaded[i].to(tl.float32)
        out = out + (tl.where(tl.abs(x) < float("inf"), x, float("nan")),)
    return out


@triton.jit
def load_side(
    p_w, T, o_t, m_t,
    F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    WIDE: tl.constexpr = 99,  # more than there are
):  # fmt: skip
    """Weights of the query side, [M, C, T] in memory, in float32: R down, R up and 1 + gate, each blocks [t, h]; a flat
    tuple. Channels from number WIDE on keep their dtype, of 16 bits: see `add_times`; the gate is itself then."""
    out = ()
    for c in tl.static_range(side_channels(F, R)):
        channel = _load_channel(p_w, c, T, o_t, m_t, C, M, H0, H1)
        for i in tl.static_range(1 + (H1 > 0)):
            x = channel[i]
            if c < WIDE:
                out = out + (1.0 + x if c == 2 * R else x,)
            else:
                out = out + (two_in_a_register(x.to(p_w.dtype.element_ty)),)
    return out


@triton.jit
def load_half_side(
    p_w, p_mark, T, o_t, m_t, matters,
    F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
):  # fmt: skip
    """R down, R up and the gate in float16, as `composed_half` takes them. Down and up of a query and a rank are times
    two powers of two that undo each other, for which the largest of down is between 1 and 2: their product with weights
    is not infinite, and what they share does not matter. What is infinite in float16 is cut off; then p_mark becomes 1
    if the query matters [t]."""
    NB: tl.constexpr = 1 + (H1 > 0)
    down, up, gate = (), (), ()
    if QUERY & F:
        worst = tl.zeros([o_t.shape[0]], tl.float32)
        for r in tl.static_range(R):
            x = _load_channel(p_w, r, T, o_t, m_t, C, M, H0, H1)
            exponent = tl.floor(log2(_largest(x, H1)))
            exponent = tl.minimum(tl.maximum(exponent, -126.0), 126.0).to(tl.int32)
            for i in tl.static_range(NB):
                down = down + (_half(x[i] * power(-exponent)[:, None]),)
            x, more = _load_channel(p_w, R + r, T, o_t, m_t, C, M, H0, H1), power(exponent)
            worst = tl.maximum(worst, _largest(x, H1) * more)
            for i in tl.static_range(NB):
                up = up + (_half(x[i] * more[:, None]),)
        if GATE & F:
            x = _load_channel(p_w, 2 * R, T, o_t, m_t, C, M, H0, H1)
            worst = tl.maximum(worst, _largest(x, H1))
            for i in tl.static_range(NB):
                gate = gate + (_half(x[i]),)
        if uniform(tl.max(tl.where(matters, worst, 0.0))) > LARGEST_HALF:
            tl.store(p_mark, 1)  # all that store, store the same
    return down + up + gate


@triton.jit
def _largest(x, H1: tl.constexpr):
    """The largest size of a query's heads: [t]."""
    largest = tl.max(tl.abs(x[0]), 1)
    if H1 > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(x[1]), 1))
    return largest


@triton.jit
def _half(x):
    """float32 in float16, cut off where that is infinite."""
    return two_in_a_register(within(x, LARGEST_HALF).to(tl.float16))


@triton.constexpr_function
def matrix_side(M):
    """Rows and columns of M(s) in memory: heads, up to whole vectors of 16 bytes. On the host, too."""
    return (M + 7) // 8 * 8


@triton.jit
def _matrix_block(i: tl.constexpr, j: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """Where numbers of a block of M(s) lie, and which there are: two [h, h']."""
    HP: tl.constexpr = matrix_side(M)
    o_i, o_j = head_ids(i, H0, H1)[:, None], head_ids(j, H0, H1)[None, :]
    return o_i * HP + o_j, (o_i < HP) & (o_j < HP)


@triton.jit
def load_matrix(p_m, F: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """M(s): its blocks [h, h'], row by row; empty without a key side and a static projection."""
    out = ()
    if (KEY | STATIC) & F:
        for i in tl.static_range(1 + (H1 > 0)):
            for j in tl.static_range(1 + (H1 > 0)):
                o_m, mask = _matrix_block(i, j, M, H0, H1)
                if matrix_side(M) == H0 + H1:
                    out = out + (tl.load(p_m + o_m),)
                else:
                    out = out + (tl.load(p_m + o_m, mask=mask, other=0.0),)
    return out


@triton.jit
def split_matrix(m, F: tl.constexpr, H1: tl.constexpr, SPLIT: tl.constexpr):
    """M(s), see `split`."""
    return split(m, (1 + (H1 > 0)) * (1 + (H1 > 0)) * (((KEY | STATIC) & F) > 0), SPLIT)


@triton.jit
def transposed_matrix(m, dtype: tl.constexpr, F: tl.constexpr, H1: tl.constexpr):
    """The transpose of M(s) in another dtype."""
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    if (KEY | STATIC) & F:
        for i in tl.static_range(NB):
            for j in tl.static_range(NB):
                block = tl.trans(m[j * NB + i])
                if block.dtype == dtype:
                    out = out + (block,)
                else:
                    out = out + (rounded(block.to(tl.float32), dtype),)
    return out


@triton.jit
def _times(x, w):
    if w.dtype == tl.float32:
        return x * w
    else:
        return add_times(tl.zeros_like(x), w, x)


@triton.jit
def hidden(x, w, first: tl.constexpr, F: tl.constexpr, R: tl.constexpr, H1: tl.constexpr):
    """The query side's hidden map: Σ_h x · w[first + r], R of [t, 1]. `first` is 0 for down, R for up."""
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    if QUERY & F:
        for r in tl.static_range(R):
            total = tl.sum(_times(x[0], w[(first + r) * NB]), 1)
            if H1 > 0:
                total += tl.sum(_times(x[1], w[(first + r) * NB + 1]), 1)
            out = out + (total[:, None],)
    return out


@triton.jit
def composed(
    x, wide, w, hid, m, first: tl.constexpr, F: tl.constexpr, R: tl.constexpr, H1: tl.constexpr,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """x' of blocks [t, h], in float32.

    Args:
        x: for products of matrices, in the dtype of m; with SPLIT both are of `split`, and the product of what is
            left of both is left out.
        wide: the same in float32.
        w, hid, m: of `load_side`, `hidden`, `load_matrix`; for gradients `hid` with up, and m transposed.
        first: which weights hidden maps are multiplied with: R for up; 0 for down, in gradients.
    """
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    for j in tl.static_range(NB):
        y = wide[j]
        if QUERY & F:
            if GATE & F:
                if w[2 * R * NB + j].dtype == tl.float32:
                    y *= w[2 * R * NB + j]
                else:
                    y = add_times(y, w[2 * R * NB + j], y)
            for r in tl.static_range(R):
                y = add_times(y, w[(first + r) * NB + j], hid[r])
        if (KEY | STATIC) & F:
            for i in tl.static_range(NB):
                if SPLIT:  # what is left follows what is held: NB blocks of x, NB · NB of m
                    y = add_product(y, x[i], m[(NB + i) * NB + j])
                    y = add_product(y, x[NB + i], m[i * NB + j])
                y = add_product(y, x[i], m[i * NB + j])
        out = out + (y,)
    return out


@triton.jit
def composed_half(x, w, m, F: tl.constexpr, R: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr):
    """x' of blocks [t, h], all in float16, which takes half of the registers and instructions. What is summed over
    heads is so by tensor cores, too. w is of `load_half_side`, m of `load_matrix`.

    It is infinite where float16 does not hold it, or a sum on the way, but of finite numbers never NaN: hidden maps are
    finite, and what is added to a sum is not rounded before.
    """
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    for j in tl.static_range(NB):
        y = x[j]
        if QUERY & F:
            if GATE & F:
                y = add_times(y, w[2 * R * NB + j], x[j])
            for r in tl.static_range(R):
                ones = tl.full([H0, x[j].shape[1]], 1.0, tl.float16)
                hid = half_product(x[0] * w[r * NB], ones)  # the same number for all heads
                if H1 > 0:
                    hid = add_half_product(hid, x[1] * w[r * NB + 1], tl.full([H1, x[j].shape[1]], 1.0, tl.float16))
                y = add_times(y, w[(R + r) * NB + j], hid)
        if (KEY | STATIC) & F:
            for i in tl.static_range(NB):
                y = add_half_product(y, x[i], m[i * NB + j])
        out = out + (y,)
    return out


@triton.constexpr_function
def side_channels(F, R):
    """How many channels a stage's query side has. (A jitted function's result is not a constant before Triton 3.7.)"""
    return bool(Part.QUERY & F) * (2 * R + bool(Part.GATE & F))


@triton.jit
def add_side_grads(grads, x, grad, hid, grad_hid, F: tl.constexpr, R: tl.constexpr, H1: tl.constexpr):
    """Adds a key's part to the gradients of the query side's weights; in the order of `load_side`.

    Args:
        x, grad: what the stage takes, and the gradient of what it makes, in float32.
        hid, grad_hid: their hidden maps, with down and with up.
    """
    NB: tl.constexpr = 1 + (H1 > 0)
    out = ()
    if QUERY & F:
        for r in tl.static_range(R):
            for j in tl.static_range(NB):
                out = out + (grads[r * NB + j] + x[j] * grad_hid[r],)
        for r in tl.static_range(R):
            for j in tl.static_range(NB):
                out = out + (grads[(R + r) * NB + j] + grad[j] * hid[r],)
        if GATE & F:
            for j in tl.static_range(NB):
                out = out + (grads[2 * R * NB + j] + x[j] * grad[j],)
    return out


@triton.jit
def store_side_grads(
    p_grad, grads, factor, stride_h, stride_c, o_t, m_t,
    F: tl.constexpr, R: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
):  # fmt: skip
    """Stores them, times a factor."""
    NB: tl.constexpr = 1 + (H1 > 0)
    for c in tl.static_range(side_channels(F, R)):
        for i in tl.static_range(NB):
            o_h = head_ids(i, H0, H1)
            p_tile = p_grad + c * stride_c + o_h[None, :] * stride_h + o_t[:, None]
            tl.store(p_tile, grads[c * NB + i] * factor, mask=m_t[:, None] & (o_h < M)[None, :])


@triton.jit
def store_matrix_grad(
    p_m, left, right, factor: tl.constexpr, M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """Stores factor · left [h, t] times right [t, h']: a key's part of the gradient of M(s), from a tile of queries.
    With SPLIT both are of `split`."""
    NB: tl.constexpr = 1 + (H1 > 0)
    for i in tl.static_range(NB):
        for j in tl.static_range(NB):
            o_m, mask = _matrix_block(i, j, M, H0, H1)
            grad = product(left[i], right[j])
            if SPLIT:
                grad = add_product(add_product(grad, left[i], right[NB + j]), left[NB + i], right[j])
            if factor != 1.0:
                grad *= factor
            grad = rounded(grad, p_m.dtype.element_ty)
            if matrix_side(M) == H0 + H1:
                tl.store(p_m + o_m, grad)
            else:
                tl.store(p_m + o_m, grad, mask=mask)
