"""What lies between the projections of a decoding step and its attention, in one Triton kernel.

Behind the one product of `FusedProjections` queries and keys are normalised and rotated, composition weights are
generated, and keys and values get those of their tokens behind them. In torch that is some fifteen launches for a few
kilobytes. Here a program takes a head of the queries, keys or values, or a generator of a group (`generator_kernel`),
and writes where the next reader wants it: queries and query-side weights as the kernels of decoding read them, keys and
values as rows of the cache, channels included. The cache itself stays the library's, which takes the rows.

It rounds where torch rounds. Letters as in `generator`; T new tokens of a sequence, D head dim, P rotary dim.
"""

# Of a kernel's arguments only compile-time constants have a type, tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from ..compose_dcformer import COMPOSE_NORM_EPS, DCFormerCompose, Generated
from ..fusion_dcformer import has_no_hooks
from ..modeling_dcformer import DCFormerRMSNorm
from .generator import APPROXIMATE, _axes, _generated, _options, _row_arguments, _tile, can_replace, generator_kernel
from .limits import DTYPES, MAX_QUERIES, require_supported, unsupported_reason
from .repeated import Launch, Repeated
from .schemas import DEVICES, prepare_op, prepared_shapes, refuse_backward
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
    p_row, stride, p_weight, p_cos, p_sin, stride_c, p_out, stride_o, N, eps,
    D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, B_N: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """One head of T tokens from p_row to p_out: RMS norm if NORM, RoPE of the first P channels, or as it is."""
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
        m_turned = m_n & (o_d < P)[None, :]
        other = _normed(p_row, stride, p_weight, o_n, o_other, m_turned, scale, NORM)  # [b_n, b_d]
        o_c = o_n[:, None].to(tl.int64) * stride_c + o_d[None, :]
        cos = tl.load(p_cos + o_c, mask=m_turned, other=0.0).to(tl.float32)  # [b_n, b_d]
        sin = tl.load(p_sin + o_c, mask=m_turned, other=0.0).to(tl.float32)  # [b_n, b_d]
        turned = rounded(out * cos, dtype).to(tl.float32)
        turned += rounded(tl.where(is_first[None, :], -other, other) * sin, dtype).to(tl.float32)
        out = tl.where(m_turned, turned, out)
    p_tile = p_out + o_n[:, None].to(tl.int64) * stride_o + o_d[None, :]
    tl.store(p_tile, rounded(out, dtype), mask=m_tile)


@triton.jit
def prepare_kernel(
    p_q, p_k, p_v, p_hidden, p_gates, p_qkw, p_q_weight, p_k_weight, p_cos, p_sin,
    p_query, p_keys, p_values, p_weights, p_rows_0, p_rows_1,
    stride_xb, stride_xn, stride_cb, stride_cn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_rb_0, stride_rh_0, stride_rn_0, stride_rb_1, stride_rh_1, stride_rn_1, B, H, N, eps,
    HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, GENERATORS: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr, EPS: tl.constexpr,
    SIDES: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
    B_T: tl.constexpr, B_D: tl.constexpr,
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
        p_keys, p_values: out, [B, HKV, N, D and more]; the channels behind the first D are the generators'.
        eps: of the norms of queries and keys.
    """
    i_b, i_j = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
            p_row, stride_xn, p_q_weight, p_cos, p_sin, stride_cn, p_out, D, N, eps, D, P, NORM, B_T, B_D
        )  # fmt: skip
    i_h -= H
    if (i_h >= 0) & (i_h < HKV):
        p_row, p_out = p_k + i_b * stride_xb + i_h * D, p_keys + i_b * stride_kb + i_h.to(tl.int64) * stride_kh
        _prepare_head(
            p_row, stride_xn, p_k_weight, p_cos, p_sin, stride_cn, p_out, stride_kn, N, eps, D, P, NORM, B_T, B_D
        )  # fmt: skip
    i_h -= HKV
    if i_h >= 0:
        p_row, p_out = p_v + i_b * stride_xb + i_h * D, p_values + i_b * stride_vb + i_h.to(tl.int64) * stride_vh
        _prepare_head(
            p_row, stride_xn, p_k_weight, p_cos, p_sin, stride_cn, p_out, stride_vn, N, eps, D, 0, False, B_T, B_D
        )  # fmt: skip


# --- op ---------------------------------------------------------------------------------------------------------------


def _launches(*given: Any) -> tuple[list[torch.Tensor], list[Launch]]:
    """The results of `prepare_op`, and the launch that fills them.

    Args:
        given: queries, keys and values; the seven `others`, None for absent ones; and the numbers of `prepare_op`, its
            plan without places.
    """
    query, key, _, _, gates, _, query_weight, _, cos, _, plan, norm_eps, approximate = given
    head_dim, stages, sides, behind_keys, behind_values, heads_per_group, rank = plan
    width = 2 * rank + (gates is not None)
    shapes = prepared_shapes(query, key, gates is not None, plan)
    queries, keys, values, weights = (torch.empty(shape, dtype=query.dtype, device=query.device) for shape in shapes)
    batch, heads, length, _ = queries.shape
    kv_heads = keys.shape[1]
    rows = [x[..., head_dim:] for x, count in ((keys, behind_keys), (values, behind_values)) if count]
    row_pointers, row_strides, row_sizes = _row_arguments(rows, heads, width)
    generators = heads // heads_per_group * stages * sides
    tile = _tile(heads_per_group, rank, gates is not None, row_sizes["PAD"], batch, length, generators)
    arguments = (
        *given[:10],
        queries,
        keys,
        values,
        weights,
        *row_pointers,
        *query.stride()[:2],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *row_strides,
        batch,
        heads,
        length,
        norm_eps,
    )
    constants = {
        "HKV": kv_heads,
        "D": head_dim,
        "P": cos.shape[-1],
        "NORM": query_weight is not None,
        "GENERATORS": generators,
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
        _options(tile),
    )
    is_empty = not batch or not length
    return [queries, keys, values, weights], [] if is_empty else [launch]


_RUN = Repeated(_launches)


@torch.library.register_kernel(prepare_op.name(), DEVICES)
def _prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    plan: Sequence[int],
    norm_eps: float,
    approximate: str,
) -> tuple[torch.Tensor, ...]:
    given: list[torch.Tensor | None] = [None] * 7
    for place, tensor in zip(plan[7:], others, strict=True):
        given[place] = tensor
    made = _RUN([query, key, value, *given], tuple(plan[:7]), norm_eps, approximate)
    return tuple(refuse_backward("prepare_decode", made, [query, key, value, *given]))


# --- the module's call ------------------------------------------------------------------------------------------------


def _can_prepare(attention: Any, hidden_states: torch.Tensor, states: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether the kernel may take the place of what an attention module does: see `prepare`."""
    compose, norms = attention.compose, (attention.q_norm, attention.k_norm)
    plain_norms = all(type(norm) is nn.Identity for norm in norms)
    if not plain_norms:
        if any(type(norm) is not DCFormerRMSNorm or norm.weight.dtype != states.dtype for norm in norms):
            return False
        if norms[0].eps != norms[1].eps:
            return False
    dtypes = {hidden_states.dtype, cos.dtype} | ({compose.qkw.dtype} if compose.qkw is not None else set())
    return (
        states.shape[1] <= MAX_QUERIES
        and not torch.is_grad_enabled()
        and dtypes == {states.dtype}
        and states.dtype in DTYPES
        and states.stride(-1) == 1
        and unsupported_reason(device=states.device, head_dim=attention.head_dim) is None
        and cos.device == states.device
        and all(has_no_hooks(module) for module in (compose, *norms))
        and (not compose.generators or can_replace(compose, hidden_states))
    )


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
        queries [B, H, N, D], rows of keys and values [B, Hkv, N, D + channels], and what `DCFormerCompose.forward`
        returns, without the key-wise weights that are in the rows. None for more than 16 tokens, with gradients, for
        several dtypes (autocast), and where a norm or the composition is more than its parameters.
    """
    query, key, value, hidden, gates = projected
    assert query is not None
    if not _can_prepare(attention, hidden_states, query, position_embeddings[0]):
        return None
    compose: DCFormerCompose = attention.compose
    stages, sides = _axes(compose) if compose.generators else ([], [])
    rank = compose.rank if hidden is not None else 0
    channels = [compose.channels[stage] for stage in ("pre", "post")]
    require_supported(rank=rank, heads=compose.heads_per_group)
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in position_embeddings)
    norms = [getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm)]
    given = (hidden, gates, None if hidden is None else compose.qkw, *norms, cos, sin)
    plan = [attention.head_dim, len(stages), len(sides), *channels, compose.heads_per_group, rank]
    queries, keys, values, weights = prepare_op(
        query, key, value, [x for x in given if x is not None],
        [*plan, *(i for i, x in enumerate(given) if x is not None)],
        getattr(attention.q_norm, "eps", 0.0), APPROXIMATE.get(type(compose.act_fn), "none"),
    )  # fmt: skip
    stored = [(stage, side) for stage in stages for side in sides[: len(sides) - any(channels)]]
    generated = _generated(stored, weights) if stages else {}
    return queries, keys, values, (generated, compose.static_projections())


# --- for compilers without a GPU --------------------------------------------------------------------------------------


def kernel_specs() -> list[dict[str, Any]]:
    """What to compile to see registers, spills and shared memory, for the published sizes in bfloat16 with R = 2.

    Returns:
        as `generator.kernel_specs`, for one token and for several.
    """
    specs = []
    sizes = ("405M", 16, 64, 64), ("2.8B", 32, 80, 80), ("6.9B", 32, 128, 128), ("13B", 40, 128, 128)
    for (name, heads, dim, rotary), tokens in itertools.product(sizes, (1, MAX_QUERIES)):
        tile = _tile(heads, 2, True, 3, 1, tokens, 4)
        constexprs: dict[str, Any] = {"HKV": heads, "D": dim, "P": rotary, "NORM": True, "GENERATORS": 4}
        constexprs |= {"C": 4, "M": heads, "R": 2, "GATE": 1, "TANH": True, "EPS": COMPOSE_NORM_EPS, "SIDES": 2}
        constexprs |= {"ROWS": 1, "REP": 1, "PAD": 3, "UNIT": 8, "B_T": tokens, **tile}
        constexprs |= {"B_D": power_of_2(dim)} | ({"N": 1} if tokens == 1 else {})
        arguments = prepare_kernel.arg_names
        types = {argument: "*bf16" if argument.startswith("p_") else "i32" for argument in arguments}
        signature = types | {"eps": "fp32"} | dict.fromkeys(constexprs, "constexpr")
        multiples = [i for i, argument in enumerate(arguments) if argument.startswith("p_") or argument == "stride_xn"]
        specs.append(
            {
                "kernel": prepare_kernel,
                "signature": signature,
                "constexprs": constexprs,
                **_options(tile),
                "label": f"prepare {name} N={tokens}",
                "attrs": {(i,): [["tt.divisibility", 16]] for i in multiples},
            }
        )
    return specs


__all__ = ["kernel_specs", "prepare"]
