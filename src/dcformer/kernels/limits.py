"""What the fused kernels can do, in one place: the model, the operators, the self-check and docs/kernels.md ask here.

Imports torch, and never Triton: the question has an answer where there are no kernels too.
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

MAX_HEAD_DIM = 256
MAX_RANK = 4
MAX_HEADS = 64  # of a group
MAX_QUERIES = 16  # of the kernels for decoding
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of the weight generators, as `config.compose_act` names them -> GELU's flavor
ACTIVATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}

_OTHERS = "use attn_implementation='dcformer_chunked' or 'eager', or leave it unset"
_EAGER = "use attn_implementation='eager'"
# kind of mask -> what is the matter with it, and what takes it
_MASKS = {
    "per head": f"the fused kernels take no mask per head: {_EAGER} or 'dcformer_chunked'",
    "bias": "the fused kernels add no biases to scores, the attention mask has some: use "
    "attn_implementation='eager' or 'dcformer_chunked'",
    "gaps": "the fused kernels need masks in which each query sees keys without gaps (causal, windows, padding on "
    "either side, packed documents) where there are many queries or gradients: use "
    "attn_implementation='dcformer_chunked' or 'eager'",
    "gradients": f"an attention mask that requires gradients is beyond the fused kernels: {_EAGER}",
}


@dataclass(frozen=True)
class Limit:
    """A row of the table in docs/kernels.md.

    Attributes:
        name: of what.
        supported: what the kernels can do.
        otherwise: what takes the rest.
        beyond: arguments of `unsupported_reason` that are outside.
    """

    name: str
    supported: str
    otherwise: str
    beyond: dict[str, Any]


LIMITS = (
    Limit(
        "device",
        f"CUDA, compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more, with Triton installed; the CPU in "
        "Triton's interpreter (`TRITON_INTERPRET=1`), for tests, in one thread",
        "`dcformer_chunked`, `eager`",
        {"device": torch.device("meta")},
    ),
    Limit(
        "dtype",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
        "`dcformer_chunked`, `eager`",
        {"dtype": torch.float64},
    ),
    Limit(
        "head dim, of keys and of values", f"1 to {MAX_HEAD_DIM}", "`dcformer_chunked`, `eager`",
        {"head_dim": MAX_HEAD_DIM + 1},
    ),
    Limit("heads of a group", f"1 to {MAX_HEADS}", "`dcformer_chunked`, `eager`", {"heads": MAX_HEADS + 1}),
    Limit(
        "rank of the low-rank part", f"1 to {MAX_RANK}, or none", "`dcformer_chunked`, `eager`",
        {"rank": MAX_RANK + 1},
    ),
    Limit(
        "activation of the weight generators",
        ", ".join(f"`{name}`" for name in ACTIVATIONS),
        "`dcformer_chunked`, `eager`",
        {"activation": "silu"},
    ),
    Limit("dropout of weights in training", "none", "`dcformer_chunked`, `eager`", {"dropout": 0.1}),
    Limit(
        "mask per head", "no", "`dcformer_chunked`, `eager`", {"mask": "per head"},
    ),
    Limit("mask that adds biases", "no", "`dcformer_chunked`, `eager`", {"mask": "bias"}),
    Limit(
        "mask with gaps (the keys that a query sees are not an interval)",
        f"up to {MAX_QUERIES} queries without gradients",
        "`dcformer_chunked`, `eager`",
        {"mask": "gaps"},
    ),
    Limit("mask with gradients", "no", "`eager`", {"mask": "gradients"}),
    Limit(
        "keys and values of different numbers of heads (`key_head_map`, `value_head_map`)", "no",
        "`dcformer_chunked`, `eager`",
        {"head_maps": True},
    ),
    Limit(
        "keys that are wider than values (`head_embeddings`)", "no",
        "`dcformer_chunked`, `eager`",
        {"head_embeddings": True},
    ),
    Limit("maps (`compose_trace`)", "no", "`eager`", {"trace": True}),
)  # fmt: skip


def limits_table() -> str:
    """The limits as a Markdown table: that of docs/kernels.md."""
    rows = [("", "fused kernels", "beyond that"), ("---",) * 3]
    rows += [(limit.name, limit.supported, limit.otherwise) for limit in LIMITS]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def unsupported_reason(
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    heads: int | None = None,
    rank: int = 0,
    activation: str | None = None,
    dropout: float = 0.0,
    mask: str | None = None,
    head_maps: bool = False,
    head_embeddings: bool = False,
    trace: bool = False,
) -> str | None:
    """Why the fused kernels cannot do something. What is not given is not looked at.

    Args:
        device: of the tensors.
        dtype: of queries, keys and values.
        head_dim: the larger of those of keys and values.
        heads: of a group.
        rank: R; 0 without a low-rank part.
        activation: of the weight generators, as `config.compose_act` names it.
        dropout: probability with which composed weights are dropped.
        mask: what an attention mask has: "per head", "bias", "gaps" or "gradients".
        head_maps: whether the model says which key and value head each query head reads.
        head_embeddings: whether the model makes its heads with embeddings.
        trace: whether the maps are asked for.

    Returns:
        The first reason, as one clause that names the value, the limit and what to use instead; None when all is within
        the limits.
    """
    if device is not None and (reason := _device_reason(device.type, device.index)) is not None:
        return reason
    if dtype is not None and dtype not in DTYPES:
        return f"{dtype} is beyond the fused kernels, expected one of {DTYPES}: {_OTHERS}"
    if head_dim is not None and not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head dim {head_dim} is beyond the fused kernels, which have 1 to at most {MAX_HEAD_DIM}: {_OTHERS}"
    if heads is not None and not 1 <= heads <= MAX_HEADS:
        return f"{heads} heads per group are beyond the fused kernels, which have 1 to at most {MAX_HEADS}: {_OTHERS}"
    if not 0 <= rank <= MAX_RANK:
        return f"rank {rank} is beyond the fused kernels, which have ranks of 1 to {MAX_RANK}: {_OTHERS}"
    if activation is not None and activation not in ACTIVATIONS:
        known = " and ".join(ACTIVATIONS)
        return f"compose_act={activation!r} is beyond the fused weight generators, which have {known}: {_OTHERS}"
    if dropout:
        return f"attention_dropout={dropout} is not part of the fused kernels: set it to 0, or {_OTHERS}"
    if mask is not None:
        return _MASKS[mask]
    if head_maps:
        return f"key_head_map and value_head_map are beyond the fused kernels, which pair keys with values: {_OTHERS}"
    if head_embeddings:
        return f"head_embeddings are beyond the fused kernels, whose keys and values have one width: {_OTHERS}"
    if trace:
        return f"the fused kernels never hold the maps that compose_trace collects: {_EAGER}"
    return None


@torch.compiler.assume_constant_result
def _device_reason(kind: str, index: int | None) -> str | None:
    """`unsupported_reason` of a device. A constant of a graph that is traced."""
    if is_interpreted() and kind in ("cpu", "cuda"):
        return None
    if sys.modules.get("triton") is None and find_spec("triton") is None:
        return f"the fused kernels need Triton, which is not installed: pip install 'dcformer[kernels]', or {_OTHERS}"
    if kind != "cuda":
        return (
            f"the fused kernels need a CUDA device, the tensors are on {kind!r}: {_OTHERS} (TRITON_INTERPRET=1, set "
            "before the start, runs them slowly on a CPU, for tests)"
        )
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"the fused kernels need a CUDA device, and this PyTorch finds none: {_OTHERS}"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return (
            f"the fused kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, "
            f"{torch.cuda.get_device_name(index)} has {capability[0]}.{capability[1]}: {_OTHERS}"
        )
    return None


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, as TRITON_INTERPRET has it when they are imported."""
    precision = sys.modules.get(f"{__package__}.triton.precision")
    if precision is not None:
        return bool(precision.INTERPRETED.value)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def require_supported(*, instead: str = "dcformer.attention_dcformer.eager_attention", **what: Any) -> None:
    """Raises ValueError with the `unsupported_reason` of its arguments, if there is one.

    Args:
        instead: what those call who have no model, and with it no `attn_implementation`.
        what: arguments of `unsupported_reason`.
    """
    reason = unsupported_reason(**what)
    if reason is not None:
        raise ValueError(f"{reason}. Without a model, call {instead} instead.")


__all__ = ["LIMITS", "Limit", "limits_table", "require_supported", "unsupported_reason"]
