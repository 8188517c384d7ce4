"""The weight generators in Triton: everything behind their first layer in one kernel.

A generator's first layer is a matrix product over the hidden size, and stays with torch (`_first_layer`). What follows
is small and, in torch, some twenty launches that each read and write the same few megabytes: GELU, a batched product,
the RMS norm over the heads of a group, the gates' tanh, copies into the layout in which attention reads the weights,
and into the channels behind keys and values. Here one program does all of it for a block of tokens and one generator of
one group of heads.

It rounds where torch rounds: pre-activations, activations and the product's result to the model's dtype, everything
between in float32.

Two ways out, both without a copy afterwards:
    weights [C, B, H, W, N], tokens last: of each generator what `SideWeights` holds and the attention kernels read;
    rows [B, Hkv, N, channels], for the key side: what a cache keeps behind keys and values, `DCFormerCompose.pack`.
W channels belong to a head and a token: R `down`, R `up`, one gate, as far as present.

Letters: B batch, N tokens, E hidden size, H query heads, G groups, M = H/G heads of a group, R rank, C generators in
use, K = 2·R·M hidden width of a generator. Under tensor parallelism H and G are those of the rank.
Names in kernels: i_ index, o_ offset, m_ mask, p_ pointer, b_ block.
"""

# Of a kernel's arguments only compile-time constants have a type, tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from transformers.activations import ACT2FN

from ..attention_dcformer import active_transform
from ..compose_dcformer import (
    COMPOSE_NORM_EPS,
    DCFormerCompose,
    Generated,
    SideWeights,
)
from ..fusion_dcformer import has_no_hooks, is_plain_linear
from ..implementations_dcformer import FirstLayer
from . import generator_backward  # noqa: F401 - it registers the gradients' kernel
from .limits import ACTIVATIONS, require_supported, unsupported_reason
from .repeated import Launch, Repeated
from .schemas import DEVICES, generate_packed_op, generate_weights_op, generated_shape, refuse_backward
from .sizes import ceil_div, power_of_2
from .triton.precision import product, rounded, tanh

_INSTEAD = "the DCFormerCompose itself"  # of what computes the weights without kernels
APPROXIMATE = {type(ACT2FN[name]): flavor for name, flavor in ACTIVATIONS.items()}


# --- kernel -----------------------------------------------------------------------------------------------------------


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:  # x/2·(1 + tanh(u)) is x·sigmoid(2u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _low_rank_pair(
    p_hidden, p_qkw, stride_hn, o_n, m_n, K: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    TANH: tl.constexpr, EPS: tl.constexpr, B_N: tl.constexpr, B_K: tl.constexpr, B_I: tl.constexpr, B_M: tl.constexpr,
):  # fmt: skip
    """`down` and `up` of a block of tokens: [b_n, b_i, b_m] in float32, rows i of `down` and then of `up`.

    The product has a column for each (i, m), padded to powers of two on both axes; what is beyond them is zero.
    """
    o_c = tl.arange(0, B_I * B_M)
    o_ci, o_cm = o_c // B_M, o_c % B_M
    m_c = (o_ci < 2 * R) & (o_cm < M)
    pair = tl.zeros([B_N, B_I * B_M], tl.float32)
    for i_k in range(0, K, B_K):
        o_k = i_k + tl.arange(0, B_K)
        m_k = o_k < K
        p_tile = p_hidden + o_n[:, None].to(tl.int64) * stride_hn + o_k[None, :]
        hidden = tl.load(p_tile, mask=m_n[:, None] & m_k[None, :], other=0.0)  # [b_n, b_k]
        hidden = rounded(_gelu(hidden.to(tl.float32), TANH), hidden.dtype)
        p_tile = p_qkw + o_k[:, None] * K + (o_ci * M + o_cm)[None, :]
        qkw = tl.load(p_tile, mask=m_k[:, None] & m_c[None, :], other=0.0)  # [b_k, b_i · b_m]
        pair += product(hidden, qkw)
    pair = rounded(pair, p_qkw.dtype.element_ty).to(tl.float32)
    pair = tl.reshape(pair, [B_N, B_I, B_M])
    scale = tl.rsqrt(tl.sum(pair * pair, axis=2) / M + EPS)  # [b_n, b_i]
    scale = tl.where((tl.arange(0, B_I) < R)[None, :], scale, 1.0)
    return pair * scale[:, :, None]


@triton.jit
def _store_weights(
    p_weights, N, pair, gate, o_n, m_n, o_h, m_m, R: tl.constexpr, GATE: tl.constexpr, B_I: tl.constexpr
):  # fmt: skip
    """Stores a group's weights of one generator and batch element: [W, N] per head, the first head's at p_weights."""
    p_head = p_weights + (o_h.to(tl.int64) * (2 * R + GATE) * N)[None, :] + o_n[:, None]  # [b_n, b_m]
    m_head = m_n[:, None] & m_m[None, :]
    if R > 0:
        o_i = tl.arange(0, B_I)[None, :, None]
        m_pair = m_head[:, None, :] & (o_i < 2 * R)
        tl.store(p_head[:, None, :] + o_i.to(tl.int64) * N, pair, mask=m_pair)
    if GATE:
        tl.store(p_head + tl.cast(N, tl.int64) * (2 * R), gate, mask=m_head)


@triton.jit
def _store_rows(
    p_rows, stride_rh, stride_rn, UNIT: tl.constexpr, pair, gate, o_n, m_n, o_h, m_m, R: tl.constexpr,
    GATE: tl.constexpr, REP: tl.constexpr, PAD: tl.constexpr, B_I: tl.constexpr, B_P: tl.constexpr,
):  # fmt: skip
    """Stores a group's weights in the channels behind one batch element's keys or values.

    p_rows points at the first of these channels. The REP query heads of a key/value head lie behind one another, W
    channels each; the last of them also writes the PAD zeros that follow.
    """
    W: tl.constexpr = 2 * R + GATE
    o_head = (o_h // REP).to(tl.int64) * stride_rh * UNIT + o_h % REP * W  # [b_m]
    p_head = p_rows + (o_n.to(tl.int64) * stride_rn * UNIT)[:, None] + o_head[None, :]  # [b_n, b_m]
    m_head = m_n[:, None] & m_m[None, :]
    if R > 0:
        o_i = tl.arange(0, B_I)[None, :, None]
        m_pair = m_head[:, None, :] & (o_i < 2 * R)
        tl.store(p_head[:, None, :] + o_i, pair, mask=m_pair)
    if GATE + PAD > 0:
        o_p = tl.arange(0, B_P)[None, :, None]
        tail = tl.zeros([m_head.shape[0], B_P, m_head.shape[1]], p_rows.dtype.element_ty)
        if GATE:
            tail = tl.where(o_p == 0, gate[:, None, :].to(tail.dtype), tail)
        n_tail = GATE + tl.where(o_h % REP == REP - 1, PAD, 0)[None, None, :]
        m_tail = m_head[:, None, :] & (o_p < n_tail)
        tl.store(p_head[:, None, :] + 2 * R + o_p, tail, mask=m_tail)


@triton.jit
def generator_kernel(
    p_hidden, p_gates, p_qkw, p_weights, p_rows_0, p_rows_1,
    stride_hb, stride_hn, stride_gb, stride_gn, stride_rb_0, stride_rh_0, stride_rn_0, stride_rb_1, stride_rh_1,
    stride_rn_1, B, H, N,
    C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr, EPS: tl.constexpr,
    SIDES: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
    B_N: tl.constexpr, B_K: tl.constexpr, B_I: tl.constexpr, B_M: tl.constexpr, B_P: tl.constexpr,
):  # fmt: skip
    """The weights of one generator of one group for a block of one batch element's tokens.

    Grid: (B · ceil(N / b_n), G · C). The C generators of a group are in the order stage, side. With ROWS the last side
    goes to rows instead of weights, p_rows_0 for the first stage and p_rows_1 for the second; their strides are in
    units of UNIT elements, 8 where they can be, as that lets channels be stored together.

    Args:
        p_hidden: [B, N, G·C·K], pre-activations, last axis contiguous (as for all of these); unused when R is 0.
        p_gates: [B, N, G·C·M], pre-activations; unused without GATE.
        p_qkw: [G·C, K, K], contiguous, columns (2, R, M); unused when R is 0.
        p_weights: out, [(SIDES - ROWS) · C / SIDES, B, H, W, N], contiguous, generators in their order; its dtype is
            that to which results are rounded, those in rows too.
        p_rows_0, p_rows_1: out, [B, Hkv, N, REP·W + PAD].
    """
    i_gc = tl.program_id(1)
    n_blocks = tl.cdiv(N, B_N)
    i_b, i_n = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    K: tl.constexpr = 2 * R * M
    W: tl.constexpr = 2 * R + GATE
    o_n = i_n * B_N + tl.arange(0, B_N)
    o_m = tl.arange(0, B_M)
    m_n, m_m = o_n < N, o_m < M
    o_h = i_gc // C * M + o_m
    pair, gate = 0.0, 0.0
    if R > 0:
        p_hidden += i_b * stride_hb + i_gc * K
        p_qkw += i_gc.to(tl.int64) * K * K
        pair = _low_rank_pair(p_hidden, p_qkw, stride_hn, o_n, m_n, K, M, R, TANH, EPS, B_N, B_K, B_I, B_M)
        pair = rounded(pair, p_weights.dtype.element_ty)
    if GATE:
        p_tile = p_gates + i_b * stride_gb + i_gc * M + o_n[:, None].to(tl.int64) * stride_gn + o_m[None, :]
        gate = tl.load(p_tile, mask=m_n[:, None] & m_m[None, :], other=0.0)  # [b_n, b_m]
        gate = rounded(tanh(gate.to(tl.float32)), p_weights.dtype.element_ty)

    i_stage, i_side = i_gc % C // SIDES, i_gc % SIDES
    if i_side < SIDES - ROWS:
        i_generator = i_stage * (SIDES - ROWS) + i_side
        p_out = p_weights + (i_generator * B + i_b) * H * W * N  # 64 bits, as i_b has
        _store_weights(p_out, N, pair, gate, o_n, m_n, o_h, m_m, R, GATE, B_I)
    if ROWS:
        if i_side == SIDES - 1:
            if i_stage == 0:
                p_out = p_rows_0 + i_b * stride_rb_0 * UNIT
                _store_rows(
                    p_out, stride_rh_0, stride_rn_0, UNIT, pair, gate, o_n, m_n, o_h, m_m, R, GATE, REP, PAD, B_I, B_P
                )
            else:
                p_out = p_rows_1 + i_b * stride_rb_1 * UNIT
                _store_rows(
                    p_out, stride_rh_1, stride_rn_1, UNIT, pair, gate, o_n, m_n, o_h, m_m, R, GATE, REP, PAD, B_I, B_P
                )


# --- launch -----------------------------------------------------------------------------------------------------------


def generator_tile(
    heads_per_group: int, rank: int, has_gate: bool, padding: int, batch: int, length: int, programs: int
) -> dict[str, int]:
    """Block sizes: 64 tokens, fewer where there are few or where a generator is wide."""
    b_i = power_of_2(max(1, 2 * rank))
    b_m = max(ceil_div(16, b_i), power_of_2(heads_per_group))  # 16 columns are the least for tl.dot
    is_small = length <= 16 or batch * ceil_div(length, 64) * programs < 64
    return {
        "B_N": 16 if is_small else max(16, min(64, 8192 // (b_i * b_m))),
        "B_K": 32,  # wider ones spill on sm_80
        "B_I": b_i,
        "B_M": b_m,
        "B_P": power_of_2(max(1, has_gate + padding)),
    }


def options_of(tile: dict[str, int]) -> dict[str, int]:
    """Warps and pipeline stages for block sizes."""
    columns = tile["B_I"] * tile["B_M"]
    return {
        "num_warps": 8 if columns >= 128 else 4,
        "num_stages": 4 if tile["B_N"] == 16 and columns <= 128 else 2,
    }


def row_arguments(
    rows: list[torch.Tensor], heads: int, width: int
) -> tuple[list[torch.Tensor | None], list[int], dict[str, int]]:
    """What the kernel takes for the rows of each stage: two pointers, six strides in units, and ROWS, REP, PAD, UNIT.

    Args:
        rows: of at most two stages, each [B, Hkv, N, channels]; with one, both pointers are to it.
        heads: of the queries.
        width: channels of a head's weights.
    """
    both = (rows * 2)[:2]
    strides = [stride for x in both for stride in x.stride()[:3]] or [0] * 6
    repeats = heads // rows[0].shape[1] if rows else 1
    unit = 1 if any(stride % 8 for stride in strides) else 8
    sizes = {"ROWS": int(bool(rows)), "REP": repeats, "PAD": 0, "UNIT": unit}
    if rows:
        sizes["PAD"] = rows[0].shape[-1] - repeats * width
    return [*both] or [None, None], [stride // unit for stride in strides], sizes


def launches(*given: Any) -> tuple[list[torch.Tensor], list[Launch]]:
    """The launch of the kernel, which makes no tensors.

    Args:
        given: `weights`, as the ops return them; hidden, gates and qkw, as they take them, contiguous but for the first
            two axes; the rows of the first and of the second stage, None where there are none; and the numbers stages,
            sides, M, R and GELU's flavor.
    """
    weights, hidden, gates, qkw, rows_0, rows_1, stages, sides, heads_per_group, rank, approximate = given
    _, batch, heads, width, length = weights.shape
    rows = [x for x in (rows_0, rows_1) if x is not None]
    row_pointers, row_strides, row_sizes = row_arguments(rows, heads, width)
    programs = heads // heads_per_group * stages * sides
    tile = generator_tile(heads_per_group, rank, gates is not None, row_sizes["PAD"], batch, length, programs)
    arguments = (
        hidden,
        gates,
        qkw,
        weights,
        *row_pointers,
        *((0, 0) if hidden is None else hidden.stride()[:2]),
        *((0, 0) if gates is None else gates.stride()[:2]),
        *row_strides,
        batch,
        heads,
        length,
    )
    constants = {
        "C": stages * sides,
        "M": heads_per_group,
        "R": rank,
        "GATE": int(gates is not None),
        "TANH": approximate == "tanh",
        "EPS": COMPOSE_NORM_EPS,
        "SIDES": sides,
        **row_sizes,
        **tile,
    }
    grid = (batch * ceil_div(length, tile["B_N"]), programs)
    named = dict(zip(generator_kernel.arg_names, arguments, strict=False))
    return [], [Launch(generator_kernel, grid, named, constants, options_of(tile))]


_RUN = Repeated(launches)


def _launch(
    hidden: torch.Tensor | None,
    gates: torch.Tensor | None,
    qkw: torch.Tensor | None,
    weights: torch.Tensor,
    rows: list[torch.Tensor],
    *numbers: Any,
) -> None:
    """Runs the kernel: the ops' tensors, `weights` as they return them, each stage's `rows`, if any; stages, sides, M,
    R and GELU's flavor."""
    if not weights.shape[1] or not weights.shape[4]:
        return
    require_supported(instead=_INSTEAD, device=weights.device)
    hidden, gates = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (hidden, gates))
    qkw = None if qkw is None else qkw.contiguous()
    _RUN([weights, hidden, gates, qkw, *[*rows, None, None][:2]], *numbers)


# --- ops --------------------------------------------------------------------------------------------------------------


@generate_weights_op.register_kernel(DEVICES)
def _generate_weights(hidden, gates, qkw, stages, sides, heads_per_group, rank, approximate, dtype):
    source = hidden if hidden is not None else gates
    weights = torch.empty(generated_shape(hidden, gates, stages * sides, rank), dtype=dtype, device=source.device)
    _launch(hidden, gates, qkw, weights, [], stages, sides, heads_per_group, rank, approximate)
    return weights


@torch.library.register_kernel(generate_packed_op.name(), DEVICES)
def _generate_packed(hidden, gates, qkw, rows_0, rows_1, sides, heads_per_group, rank, approximate, dtype):
    rows = [x for x in (rows_0, rows_1) if x is not None]
    _, *shape = generated_shape(hidden, gates, len(rows) * sides, rank)
    weights = torch.empty((len(rows) * (sides - 1), *shape), dtype=dtype, device=rows_0.device)
    _launch(hidden, gates, qkw, weights, rows, len(rows), sides, heads_per_group, rank, approximate)
    torch.autograd.graph.increment_version([x for x in rows if not x.is_inference()])
    return refuse_backward("generate_packed", [weights], [hidden, gates, qkw, *rows])[0]


# --- the module's weights ---------------------------------------------------------------------------------------------


def _is_plain(linear: nn.Module) -> bool:
    """Whether a module is nothing but its weight: no adapter, quantization, sharding, offloading or other hook."""
    return is_plain_linear(linear) and linear.bias is None


def can_replace(compose: DCFormerCompose, hidden_states: torch.Tensor) -> bool:
    """Whether the kernels may read the module's parameters past their modules, and know its dtype and activation.

    No where something else is to happen as well: adapters, quantization, sharded or offloaded weights, hooks,
    parametrizations, transforms of `torch.func` and forward-mode differentiation.
    """
    device = hidden_states.device
    return unsupported_reason(device=device, dtype=hidden_states.dtype) is None and is_plain(compose, hidden_states)


def is_plain(compose: DCFormerCompose, hidden_states: torch.Tensor) -> bool:
    """`can_replace` without a look at what the kernels support besides activations."""
    # asked by every layer in every step of decoding: attributes of modules are slow
    modules = vars(compose)["_modules"]
    linears = [modules[name] for name in ("dw1_proj", "gate_proj") if modules.get(name) is not None]
    act_fn = modules["act_fn"]
    if not linears or type(act_fn) not in APPROXIMATE or not has_no_hooks(act_fn):
        return False
    if type(compose) is not DCFormerCompose or not has_no_hooks(compose):  # a parametrization makes a class of its own
        return False
    own = vars(compose)["_parameters"]
    if (qkw := own.get("qkw")) is not None and type(qkw) is not nn.Parameter:
        return False
    parameters = [parameter for parameter in own.values() if parameter is not None]
    for linear in linears:
        if not _is_plain(linear):
            return False
        parameters.append(vars(linear)["_parameters"]["weight"])
    device = hidden_states.device
    for parameter in parameters:
        if parameter.device != device:
            return False
    return active_transform(hidden_states, *parameters) is None


def _first_layer(hidden_states: torch.Tensor, compose: DCFormerCompose) -> FirstLayer:
    """Pre-activations of low rank [B, N, G·C·K] and gates [B, N, G·C·M], in one product where that pays.

    One product saves a pass over the hidden states and, in the backward pass, the addition of two gradients of their
    size; it costs a copy of the weights, which pays when there are more tokens than weight rows. With fewer, or
    where the modules are more than their weights, two products.
    """
    low_rank, gate = compose.dw1_proj, compose.gate_proj
    if low_rank is not None and gate is not None:
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        is_many = tokens >= 2 * (low_rank.weight.shape[0] + gate.weight.shape[0])
        if is_many and _is_plain(low_rank) and _is_plain(gate):
            weights = [low_rank.weight, gate.weight]
            return F.linear(hidden_states, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)
    return compose.first_layer(hidden_states)


def _arguments(hidden_states: torch.Tensor, compose: DCFormerCompose, first_layer: FirstLayer) -> tuple:
    """What both ops take: (hidden, gates, qkw) and (heads_per_group, rank, approximate, dtype)."""
    require_supported(instead=_INSTEAD, dtype=hidden_states.dtype)
    if type(compose.act_fn) not in APPROXIMATE:
        require_supported(instead=_INSTEAD, activation=type(compose.act_fn).__name__)
    count, m, rank = len(compose.generators), compose.heads_per_group, compose.rank
    hidden, gates = first_layer or _first_layer(hidden_states, compose)
    qkw = None
    if hidden is not None and compose.qkw is not None:
        compose._check_whole_groups(hidden.shape[-1], count * 2 * rank * m)
        qkw = compose.qkw.to(hidden.dtype)  # another one only under autocast
    if gates is not None:
        compose._check_whole_groups(gates.shape[-1], count * m)
    return (hidden, gates, qkw), (m, rank, APPROXIMATE[type(compose.act_fn)], hidden_states.dtype)


def generator_axes(compose: DCFormerCompose) -> tuple[list[str], list[str]]:
    """The stages and the sides that have generators, in order."""
    stages, sides = (list(dict.fromkeys(names)) for names in zip(*compose.generators, strict=True))
    return stages, sides


def sides_of(generators: Sequence[tuple[str, str]], weights: torch.Tensor) -> dict[tuple[str, str], SideWeights]:
    """[C, B, H, W, N] as what `DCFormerCompose.forward` returns."""
    return {generator: SideWeights(w) for generator, w in zip(generators, weights.unbind(), strict=True)}


def generate_weights(hidden_states: torch.Tensor, compose: DCFormerCompose, first_layer: FirstLayer = ()) -> Generated:
    """What `DCFormerCompose.forward` returns, from fused kernels; differentiable.

    Args:
        hidden_states: [B, N, E], float32, bfloat16 or float16.
        compose: the module, its parameters on the device of `hidden_states`.
        first_layer: as for `DCFormerCompose.forward`.

    Returns:
        (stage, side) -> `SideWeights` in the dtype of `hidden_states`; and stage -> static projection [G, M, M].

    Raises:
        ValueError: on another dtype or activation, and when tensor parallelism has cut through a group of heads.
    """
    if compose.dw1_proj is None and compose.gate_proj is None:
        return {}, compose.static_projections()
    tensors, options = _arguments(hidden_states, compose, first_layer)
    stages, sides = generator_axes(compose)
    weights = generate_weights_op(*tensors, len(stages), len(sides), *options)
    return sides_of(compose.generators, weights), compose.static_projections()


def generate_packed(
    hidden_states: torch.Tensor,
    compose: DCFormerCompose,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    first_layer: FirstLayer = (),
) -> Generated:
    """As `generate_weights`, but writes key-wise weights where `DCFormerCompose.pack` puts them. For inference only.

    Args:
        hidden_states, compose, first_layer: as there.
        packed_key: [B, Hkv, N, D + channels of stage "pre"], filled from channel D on, padding included; the keys may
            be there already or come later. Not touched without the generator ("pre", "key"). Its dtype may be wider
            than that of `hidden_states`, as under autocast.
        packed_value: the same for values and stage "post".

    Returns:
        (stage, "query") -> `SideWeights`, those of queries only; and stage -> static projection [G, M, M].

    Raises:
        ValueError: as there, and when the rows do not have the shape of these weights.
        RuntimeError: when gradients are wanted: what is written in place has none. Use `generate_weights` and
            `DCFormerCompose.pack`.
    """
    stages, sides = generator_axes(compose) if compose.generators else ([], [])
    if "key" not in sides:
        return generate_weights(hidden_states, compose, first_layer)
    tensors, options = _arguments(hidden_states, compose, first_layer)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, packed_key, packed_value)):
        raise RuntimeError(
            "generate_packed writes in place and has no gradients: use generate_weights and DCFormerCompose.pack, or "
            "call it under torch.no_grad()."
        )
    _, batch, heads, _, length = generated_shape(tensors[0], tensors[1], len(compose.generators), options[1])
    expected = (batch, heads // compose.key_value_repeats[stages[0]], length)
    rows: list[torch.Tensor | None] = [None, None]
    for i, stage in enumerate(stages):
        states, channels = (packed_key if stage == "pre" else packed_value), compose.channels[stage]
        if tuple(states.shape[:-1]) != expected or states.shape[-1] < channels or states.stride(-1) != 1:
            raise ValueError(
                f"rows for stage {stage!r} have shape {tuple(states.shape)} and strides {states.stride()}; expected "
                f"{(*expected, f'D + {channels}')}, the last axis contiguous."
            )
        rows[i] = states[..., states.shape[-1] - channels :]
    weights = generate_packed_op(*tensors, *rows, len(sides), *options)
    return sides_of([(stage, side) for stage in stages for side in sides[:-1]], weights), compose.static_projections()


__all__ = [
    "APPROXIMATE",
    "can_replace",
    "generate_packed",
    "generate_weights",
    "generator_axes",
    "generator_kernel",
    "generator_tile",
    "is_plain",
    "options_of",
    "row_arguments",
    "sides_of",
]
