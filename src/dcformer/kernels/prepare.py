"""What lies between the projections of a decoding step and its attention, in one Triton kernel.

Behind the one product of `FusedProjections` queries and keys are normalized and rotated, composition weights are
generated, and keys and values get those of their tokens behind them. In torch that is some fifteen launches for a few
kilobytes. Here a program takes a head of the queries, keys or values, or a generator of a group (`generator_kernel`),
and writes where the next reader wants it: queries and query-side weights as the kernels of decoding read them, keys and
values as rows of the cache, channels included. Where a cache lends its memory they go to their place (`step`); another
one takes the rows (`prepare`).

It rounds where torch rounds. Letters as in `generator`; T new tokens of a sequence, D head dim, P rotary dim.
"""

# Of a kernel's arguments only compile-time constants have a type, tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from ..attention_dcformer import active_transform
from ..compose_dcformer import COMPOSE_NORM_EPS, DCFormerCompose, Generated
from ..fusion_dcformer import has_no_hooks
from ..modeling_dcformer import DCFormerRMSNorm
from .generator import (
    APPROXIMATE,
    generator_axes,
    generator_kernel,
    generator_tile,
    is_plain,
    options_of,
    row_arguments,
    sides_of,
)
from .limits import MAX_QUERIES, require_supported, unsupported_reason
from .repeated import Launch, Repeated
from .schemas import DEVICES, place_tensors, prepare_op, prepared_shapes, refuse_backward
from .sizes import power_of_2
from .triton.precision import rounded

# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _normed(p_row, stride, p_weight, o_n, o_d, m_tile, scale, NORM: tl.constexpr):
    """Channels o_d of T tokens, [b_n, b_d] in float32, with the scale [b_n] and the weights of their norm."""
    x = tl.load(p_row + o_n[:, None].to(tl.int64) * stride + o_d[None, :], mask=m_tile, other=0.0)  # [b_n, b_d]
    out = x.to(tl.float32)
    if NORM:
        weight = tl.load(p_weight + o_d[None, :], mask=m_tile, other=0.0)  # [b_n, b_d]
        out = rounded(out * scale[:, None], x.dtype).to(tl.float32)
        out = rounded(out * weight.to(tl.float32), x.dtype).to(tl.float32)
    return out


@triton.jit
def _prepare_head(
    p_row, stride, p_weight, p_cos, p_sin, stride_c, p_out, stride_o, N, eps, fits,
    D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, B_N: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """One head of T tokens from p_row to p_out: RMS norm if NORM, RoPE of the first P channels, or as it is.

    NaN where it does not fit, unless that is None.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    o_n, o_d = tl.arange(0, B_N), tl.arange(0, B_D)
    m_n = (o_n < N)[:, None]
    m_tile = m_n & (o_d < D)[None, :]
    scale = tl.zeros([B_N], tl.float32)
    if NORM:
        x = _normed(p_row, stride, p_weight, o_n, o_d, m_tile, scale, False)  # [b_n, b_d]
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)  # [b_n]
    out = _normed(p_row, stride, p_weight, o_n, o_d, m_tile, scale, NORM)  # [b_n, b_d]
    if P > 0:
        is_first = o_d < P // 2
        o_other = tl.where(is_first, o_d + P // 2, o_d - P // 2)
        m_rotated = m_n & (o_d < P)[None, :]
        other = _normed(p_row, stride, p_weight, o_n, o_other, m_rotated, scale, NORM)  # [b_n, b_d]
        o_c = o_n[:, None].to(tl.int64) * stride_c + o_d[None, :]
        cos = tl.load(p_cos + o_c, mask=m_rotated, other=0.0).to(tl.float32)  # [b_n, b_d]
        sin = tl.load(p_sin + o_c, mask=m_rotated, other=0.0).to(tl.float32)  # [b_n, b_d]
        rotated = rounded(out * cos, dtype).to(tl.float32)
        rotated += rounded(tl.where(is_first[None, :], -other, other) * sin, dtype).to(tl.float32)
        out = tl.where(m_rotated, rotated, out)
    if fits is not None:
        out = tl.where(fits, out, float("nan"))
    p_tile = p_out + o_n[:, None].to(tl.int64) * stride_o + o_d[None, :]
    tl.store(p_tile, rounded(out, dtype), mask=m_tile)


@triton.jit(do_not_specialize=["row"])
def prepare_kernel(
    p_q, p_k, p_v, p_hidden, p_gates, p_qkw, p_q_weight, p_k_weight, p_cos, p_sin,
    p_query, p_keys, p_values, p_weights, p_rows_0, p_rows_1, p_place,
    stride_xb, stride_xn, stride_cb, stride_cn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_rb_0, stride_rh_0, stride_rn_0, stride_rb_1, stride_rh_1, stride_rn_1, B, H, N, capacity, row, eps,
    HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, GENERATORS: tl.constexpr,
    PLACED: tl.constexpr, RING: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr,
    EPS: tl.constexpr, SIDES: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, PAD: tl.constexpr,
    UNIT: tl.constexpr, B_T: tl.constexpr, B_D: tl.constexpr,
    B_N: tl.constexpr, B_K: tl.constexpr, B_I: tl.constexpr, B_M: tl.constexpr, B_P: tl.constexpr,
):  # fmt: skip
    """Queries, rows of keys and values, and composition weights of N tokens, at most b_n and b_t.

    Grid: (B, GENERATORS + H + 2·HKV): the generators, in the order of `generator_kernel`, whose arguments have the same
    names here; then the heads of queries, keys and values.

    Args:
        p_q, p_k, p_v, p_hidden, p_gates: [B, N, columns], parts of one product, so that they share strides.
        p_q_weight, p_k_weight: [D] of the norms; unused without NORM.
        p_cos, p_sin: [B or 1, N, P].
        p_query: out, [B, H, N, D], contiguous.
        p_keys, p_values: out, [B, HKV, capacity, D and more]; the channels behind the first D are the generators'.
        p_place: with PLACED, the first of the N rows to write, an integer. If they are not all within the capacity,
            queries become NaN, and the last N rows are written; with RING it is taken modulo the capacity, N is 1.
        row: the first of the N rows without PLACED.
        eps: of the norms of queries and keys.
    """
    i_b, i_j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fits = None
    i_row = tl.cast(row, tl.int64)
    if PLACED:
        i_row = tl.load(p_place).to(tl.int64)
        if RING:
            i_row = i_row % capacity
        else:
            fits = i_row <= capacity - N
            i_row = tl.minimum(i_row, capacity - N)
    p_keys += i_row * stride_kn
    p_values += i_row * stride_vn
    if ROWS:
        p_rows_0 += i_row * stride_rn_0 * UNIT
        p_rows_1 += i_row * stride_rn_1 * UNIT
    if GENERATORS > 0:
        if i_j < GENERATORS:
            generator_kernel(
                p_hidden, p_gates, p_qkw, p_weights, p_rows_0, p_rows_1, stride_xb, stride_xn, stride_xb, stride_xn,
                stride_rb_0, stride_rh_0, stride_rn_0, stride_rb_1, stride_rh_1, stride_rn_1, B, H, N,
                C, M, R, GATE, TANH, EPS, SIDES, ROWS, REP, PAD, UNIT, B_N, B_K, B_I, B_M, B_P,
            )  # fmt: skip
    i_h = i_j - GENERATORS
    p_cos += i_b * stride_cb
    p_sin += i_b * stride_cb
    if (i_h >= 0) & (i_h < H):
        p_row, p_out = p_q + i_b * stride_xb + i_h * D, p_query + (i_b * H + i_h) * N * D
        _prepare_head(
            p_row, stride_xn, p_q_weight, p_cos, p_sin, stride_cn, p_out, D, N, eps, fits, D, P, NORM, B_T, B_D
        )  # fmt: skip
    i_h -= H
    if (i_h >= 0) & (i_h < HKV):
        p_row, p_out = p_k + i_b * stride_xb + i_h * D, p_keys + i_b * stride_kb + i_h.to(tl.int64) * stride_kh
        _prepare_head(
            p_row, stride_xn, p_k_weight, p_cos, p_sin, stride_cn, p_out, stride_kn, N, eps, None, D, P, NORM, B_T, B_D
        )  # fmt: skip
    i_h -= HKV
    if i_h >= 0:
        p_row, p_out = p_v + i_b * stride_xb + i_h * D, p_values + i_b * stride_vb + i_h.to(tl.int64) * stride_vh
        _prepare_head(
            p_row, stride_xn, p_k_weight, p_cos, p_sin, stride_cn, p_out, stride_vn, N, eps, None, D, 0, False, B_T, B_D
        )  # fmt: skip


# --- op ---------------------------------------------------------------------------------------------------------------


def launches(*given: Any) -> tuple[list[torch.Tensor], list[Launch]]:
    """Queries, weights and then rows of keys and values, and the launch that fills them. No launch without tokens.

    Args:
        given: queries, keys and values; the seven `others`, None for absent ones; of a cache keys, values and place
            (None where it is the argument `row`), or three times None; whether its rows are a ring; and the numbers of
            `prepare_op`, its plan without places.
    """
    *first, keys, values, place, is_ring, plan, norm_eps, approximate = given
    query, key, value, hidden, gates, _, query_weight, _, cos, _ = first
    _check_strides([x for x in (query, key, value, hidden, gates) if x is not None])
    head_dim, stages, sides, *_, heads_per_group, rank = plan
    width = 2 * rank + (gates is not None)
    shapes = prepared_shapes(query, key, gates is not None, plan)
    queries, weights = made = [query.new_empty(shape) for shape in shapes[::3]]
    if keys is None:
        keys, values = (query.new_empty(shape) for shape in shapes[1:3])
        made += [keys, values]
    batch, heads, length, _ = queries.shape
    kv_heads = keys.shape[1]
    wholes = [x for x in (keys, values) if x.shape[-1] > head_dim]
    rows = [x[..., head_dim:] for x in wholes]  # composition weights
    row_pointers, row_strides, row_sizes = row_arguments(rows, heads, width)
    generators = heads // heads_per_group * stages * sides
    tile = generator_tile(heads_per_group, rank, gates is not None, row_sizes["PAD"], batch, length, generators)
    arguments = (
        *first,
        queries,
        keys,
        values,
        weights,
        *row_pointers,
        place,
        *query.stride()[:2],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *row_strides,
        batch,
        heads,
        length,
        keys.shape[2],
        0,
        norm_eps,
    )
    constants = {
        "HKV": kv_heads,
        "D": head_dim,
        "P": cos.shape[-1],
        "NORM": query_weight is not None,
        "GENERATORS": generators,
        "PLACED": int(place is not None),
        "RING": int(is_ring),
        "C": stages * sides,
        "M": heads_per_group,
        "R": rank,
        "GATE": int(gates is not None),
        "TANH": approximate == "tanh",
        "EPS": COMPOSE_NORM_EPS,
        "SIDES": max(1, sides),
        **row_sizes,
        "B_T": 1 if length == 1 else MAX_QUERIES,
        "B_D": power_of_2(head_dim),
        **tile,
    }
    launch = Launch(
        prepare_kernel,
        (batch, generators + heads + 2 * kv_heads),
        dict(zip(prepare_kernel.arg_names, arguments, strict=False)),
        constants,
        options_of(tile),
        dict(zip(("p_rows_0", "p_rows_1"), wholes * 2, strict=False)),
    )
    is_empty = not batch or not length
    return made, [] if is_empty else [launch]


def _check_strides(parts: Sequence[torch.Tensor]) -> None:
    """The kernel reads [B, N, columns] of all parts by the strides of the first, those of axes of one element aside."""
    found = {tuple(stride for size, stride in zip(x.shape[:2], x.stride(), strict=False) if size > 1) for x in parts}
    if len(found) > 1 or any(x.stride(2) != 1 for x in parts):
        raise ValueError(
            f"parts of a fused product have strides {[x.stride() for x in parts]}; expected those of one tensor "
            "[B, N, columns], its last axis contiguous."
        )


_RUN = Repeated(launches)


@torch.library.register_kernel(prepare_op.name(), DEVICES)
def _prepare(query, key, value, others, plan, norm_eps, approximate):
    given = [query, key, value, *place_tensors(others, plan[7:], 7)]
    queries, weights, keys, values = _RUN([*given, None, None, None], False, tuple(plan[:7]), norm_eps, approximate)
    return tuple(refuse_backward("prepare_decode", [queries, keys, values, weights], given))


# --- the module's call ------------------------------------------------------------------------------------------------


def fits(hidden_states: torch.Tensor, states: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors; `states` are a part of a product, or all of it."""
    dtype = states.dtype
    if states.shape[1] > MAX_QUERIES or torch.is_grad_enabled() or states.stride(-1) != 1:
        return False
    if hidden_states.dtype != dtype or cos.dtype != dtype or cos.device != states.device:
        return False
    return active_transform(states) is None


def can_prepare(attention: Any, hidden_states: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether the kernel may take the place of what the modules of a layer do with tensors that fit."""
    dtype = states.dtype
    modules = vars(attention)["_modules"]  # asked in every step of decoding: attributes of modules are slow
    compose, query_norm, key_norm = modules["compose"], modules["q_norm"], modules["k_norm"]
    if type(query_norm) is not nn.Identity or type(key_norm) is not nn.Identity:
        for norm in (query_norm, key_norm):
            if type(norm) is not DCFormerRMSNorm or vars(norm)["_parameters"]["weight"].dtype != dtype:
                return False
        if query_norm.eps != key_norm.eps:
            return False
    if not (has_no_hooks(compose) and has_no_hooks(query_norm) and has_no_hooks(key_norm)):
        return False
    if type(compose) is not DCFormerCompose:  # a parametrization makes a class of its own
        return False
    if unsupported_reason(device=states.device, dtype=dtype, head_dim=attention.head_dim) is not None:
        return False
    for module in (compose, query_norm, key_norm):
        for parameter in vars(module)["_parameters"].values():
            if parameter is None:
                continue
            if (
                type(parameter) is not nn.Parameter
                or parameter.device != states.device
                or not parameter.is_contiguous()
            ):
                return False
    if not compose.generators:
        return True
    qkw = vars(compose)["_parameters"].get("qkw")
    return (qkw is None or qkw.dtype == dtype) and is_plain(compose, hidden_states)


def prepare(
    attention: Any,
    hidden_states: torch.Tensor,
    projected: Sequence[torch.Tensor | None],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Generated] | None:
    """QK-norm, RoPE, the generators' second layer and the rows of the cache, in one launch.

    Args:
        attention: the layer's `DCFormerAttention`.
        hidden_states: [B, N, E].
        projected: the parts of its fused product, [B, N, columns] and sharing strides: queries, keys, values, and the
            first layer of low rank and gates, None where they are absent.
        position_embeddings: cosines and sines, each [B or 1, N, P].

    Returns:
        queries [B, H, N, D]; rows of keys and values [B, Hkv, N, D + channels]; and what `DCFormerCompose.forward`
        returns, without the key-wise weights that are in the rows. None for more than 16 tokens, with gradients, for
        several dtypes (autocast), and where a norm or the composition is more than its parameters.
    """
    query, key, value, hidden, gates = projected
    assert query is not None and key is not None
    if not fits(hidden_states, query, position_embeddings[0]) or not can_prepare(attention, hidden_states, query):
        return None
    modules = vars(attention)["_modules"]
    compose: DCFormerCompose = modules["compose"]
    stages, sides = generator_axes(compose) if compose.generators else ([], [])
    channels = [compose.channels[stage] for stage in ("pre", "post")]
    require_supported(rank=compose.rank, heads=compose.heads_per_group)
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in position_embeddings)
    norms = [vars(modules[name])["_parameters"].get("weight") for name in ("q_norm", "k_norm")]
    given = (hidden, gates, None if hidden is None else compose.qkw, *norms, cos, sin)
    plan = [attention.head_dim, len(stages), len(sides), *channels, compose.heads_per_group, compose.rank]
    tensors = (query, key, value, [x for x in given if x is not None])
    plan += [i for i, x in enumerate(given) if x is not None]
    numbers = (plan, getattr(modules["q_norm"], "eps", 0.0), APPROXIMATE.get(type(compose.act_fn), "none"))
    queries, keys, values, weights = prepare_op(*tensors, *numbers)
    stored = [(stage, side) for stage in stages for side in sides[: len(sides) - any(channels)]]
    generated = sides_of(stored, weights) if stages else {}
    return queries, keys, values, (generated, compose.static_projections())


__all__ = ["can_prepare", "fits", "launches", "prepare"]
