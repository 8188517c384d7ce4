"""Gradients of the weight generators: products of torch, and between them one kernel.

What the first layer gave is multiplied anew, as the kernel of the forward pass keeps nothing. Behind that product one
program goes, for a block of tokens and one generator of one group of heads, from the gradients of weights back through
the RMS norm and the gates' tanh, and from the layout of weights to that of matrices. In torch these are some thirty
launches that each read and write megabytes. It rounds where torch would: what products take, to the model's dtype.

Letters are those of `generator`.
"""

# Of a kernel's arguments only compile-time constants have a type, tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..compose_dcformer import COMPOSE_NORM_EPS
from .repeated import Launch, Repeated
from .schemas import DEVICES, generate_weights_backward_op
from .sizes import ceil_div, power_of_2
from .triton.precision import rounded, tanh


@triton.jit
def generator_backward_kernel(
    p_grad, p_pair, p_gates, p_grad_gates, stride_gb, stride_gn, B, H, N,
    C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, EPS: tl.constexpr,
    B_N: tl.constexpr, B_I: tl.constexpr, B_M: tl.constexpr,
):  # fmt: skip
    """Gradients of one generator of one group for a block of one batch element's tokens.

    Grid: (B · ceil(N / b_n), G · C).

    Args:
        p_grad: of the weights, [C, B, H, W, N], contiguous.
        p_pair: [G·C, B, N, K], `down` before its norm and `up`, columns (2, R, M), whose gradients take their place;
            unused when R is 0.
        p_gates: [B, N, G·C·M], pre-activations, last axis contiguous; unused without GATE.
        p_grad_gates: out, [B, N, G·C·M], contiguous.
    """
    i_gc = tl.program_id(1)
    n_blocks = tl.cdiv(N, B_N)
    i_b, i_n = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    K: tl.constexpr = 2 * R * M
    W: tl.constexpr = 2 * R + GATE
    o_n = i_n * B_N + tl.arange(0, B_N)
    o_m = tl.arange(0, B_M)
    m_head = (o_n < N)[:, None] & (o_m < M)[None, :]  # [b_n, b_m]
    o_h = (i_gc % C * B + i_b) * H + i_gc // C * M + o_m
    p_head = p_grad + (o_h * W * N)[None, :] + o_n[:, None]
    if R > 0:
        o_i = tl.arange(0, B_I)[None, :, None]
        m_pair = m_head[:, None, :] & (o_i < 2 * R)  # [b_n, b_i, b_m]
        grad = tl.load(p_head[:, None, :] + o_i.to(tl.int64) * N, mask=m_pair, other=0.0).to(tl.float32)
        o_row = (i_gc * B + i_b) * N + o_n  # [b_n]
        o_pair = o_row[:, None, None] * K + o_i * M + o_m[None, None, :]
        pair = tl.load(p_pair + o_pair, mask=m_pair, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(pair * pair, axis=2) / M + EPS)[:, :, None]
        normed = pair * scale
        along = tl.sum(grad * normed, axis=2) / M
        grad = tl.where(o_i < R, scale * (grad - normed * along[:, :, None]), grad)
        tl.store(p_pair + o_pair, rounded(grad, p_pair.dtype.element_ty), mask=m_pair)
    if GATE:
        p_tile = p_gates + i_b * stride_gb + i_gc * M + o_n[:, None].to(tl.int64) * stride_gn + o_m[None, :]
        gate = tanh(tl.load(p_tile, mask=m_head, other=0.0).to(tl.float32))
        grad_gate = tl.load(p_head + tl.cast(N, tl.int64) * (2 * R), mask=m_head, other=0.0).to(tl.float32)
        grad_gate *= 1.0 - gate * gate
        o_gate = (i_b * N + o_n)[:, None] * (tl.num_programs(1) * M) + i_gc * M + o_m[None, :]
        tl.store(p_grad_gates + o_gate, rounded(grad_gate, p_grad_gates.dtype.element_ty), mask=m_head)


def launches(
    grad: torch.Tensor, pair: torch.Tensor | None, gates: torch.Tensor | None, grad_gates: torch.Tensor | None,
    heads_per_group: int, rank: int,
) -> tuple[list[torch.Tensor], list[Launch]]:  # fmt: skip
    """The launch of the kernel, which makes no tensors: gradients of `pair` take its place.

    Args:
        grad, pair, gates, grad_gates: as the kernel takes them; None for absent ones.
        heads_per_group, rank: M and R.
    """
    generators, batch, heads, _, length = grad.shape
    programs = generators * heads // heads_per_group
    blocks = {"B_I": power_of_2(max(1, 2 * rank)), "B_M": power_of_2(heads_per_group)}
    # few enough numbers for registers, and tokens for whole sectors of memory
    blocks["B_N"] = max(16, min(64, 4096 // (blocks["B_I"] * blocks["B_M"])))
    strides = (0, 0) if gates is None else gates.stride()[:2]
    arguments = (grad, pair, gates, grad_gates, *strides, batch, heads, length)
    constants = {
        "C": generators, "M": heads_per_group, "R": rank, "GATE": int(gates is not None), "EPS": COMPOSE_NORM_EPS,
        **blocks,
    }  # fmt: skip
    named = dict(zip(generator_backward_kernel.arg_names, arguments, strict=False))
    grid = (batch * ceil_div(length, blocks["B_N"]), programs)
    return [], [Launch(generator_backward_kernel, grid, named, constants, {"num_warps": 4})]


_RUN = Repeated(launches)


@generate_weights_backward_op.register_kernel(DEVICES)
def _generate_weights_backward(grad, hidden, gates, qkw, heads_per_group, rank, approximate):
    generators, batch, heads, _, length = grad.shape
    columns, grad = 2 * rank * heads_per_group, grad.contiguous()
    rows = batch * length, generators * heads // heads_per_group, columns  # [B·N, G·C, K]
    with torch.autocast(grad.device.type, enabled=False):
        pair = grad_gates = None
        if hidden is not None and qkw is not None:
            blocks = qkw.reshape(rows[1], columns, columns)  # [G·C, K, K]
            activated = F.gelu(hidden, approximate=approximate).reshape(rows).transpose(0, 1)
            pair = torch.bmm(activated, blocks)  # [G·C, B·N, K]
        if gates is not None:
            gates = gates if gates.stride(-1) == 1 else gates.contiguous()
            grad_gates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
        if grad.numel():
            _RUN([grad, pair, gates, grad_gates], heads_per_group, rank)
        found = [] if grad_gates is None else [grad_gates]
        if hidden is not None and qkw is not None and pair is not None:
            grad_pair = pair  # whose place it has taken
            grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            torch.bmm(grad_pair, blocks.transpose(1, 2), out=grad_hidden.view(rows).transpose(0, 1))
            grad_hidden = torch.ops.aten.gelu_backward(grad_hidden, hidden, approximate=approximate)
            found = [grad_hidden, *found, torch.bmm(activated.transpose(1, 2), grad_pair).view(qkw.shape)]
        return found


__all__ = ["launches"]
