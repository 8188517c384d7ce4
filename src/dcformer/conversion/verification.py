"""Compares two checkpoints of any supported formats: tensors, configurations, logits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from ..configuration_dcformer import DCFormerConfig
from ..errors import ConversionError
from ..loading import LOADING_ERRORS, damaged_file
from .checkpoint import Checkpoint

# Fields that affect a model's outputs besides its tensors.
_DECISIVE = (
    "num_attention_heads",
    "num_key_value_heads",
    "key_head_map",
    "value_head_map",
    "head_embeddings",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "norm_eps",
    "qk_norm_eps",
    "hidden_act",
    "compose_act",
    "use_parallel_residual",
    "mlp_gates",
    "compose_pre",
    "compose_post",
    "compose_query",
    "compose_key",
    "compose_rank",
    "compose_groups",
)
_COMPARED_AT_ONCE = 2**22  # elements
_NUM_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """How one thing differs.

    Attributes:
        name: of a native tensor, or "logits".
        detail: shape and dtypes, for the table.
        difference: largest absolute difference; infinity when shapes differ, a checkpoint lacks the tensor, or only one
            of two values is NaN.
        is_equal: whether it is within the tolerance.
    """

    name: str
    detail: str
    difference: float
    is_equal: bool


def compare_tensors(
    first: Checkpoint, second: Checkpoint, *, atol: float = 0.0, progress: bool = True
) -> list[Comparison]:
    """Compares the native tensors of two checkpoints by value; dtypes may differ and are shown.

    Args:
        first, second: opened checkpoints of any formats.
        atol: largest absolute difference that counts as equal; 0 requires equal values.
        progress: show a progress bar.

    Returns:
        one `Comparison` per tensor of either checkpoint.

    Raises:
        ConversionError: when a tensor cannot be read, or `check_tolerance` refuses `atol`.
    """
    check_tolerance(atol)
    results = []
    # in the order of the checkpoint that stacks layers, if any, so that each stored tensor is read once
    stacked, other = sorted((first, second), key=lambda checkpoint: len(checkpoint.parts))
    names = [name for part in stacked.parts for name in part.natives()]
    names += [name for name in other.shapes if name not in stacked.shapes]
    for name in tqdm(names, desc="comparing", unit="tensor", disable=not progress):
        if name not in first.shapes or name not in second.shapes:
            where = second.path if name not in second.shapes else first.path
            results.append(Comparison(name, f"missing in {where}", float("inf"), False))
            continue
        a, b = first.read(name), second.read(name)
        kinds = " and ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (a, b)))
        if a.shape != b.shape:
            detail = f"{list(a.shape)} and {list(b.shape)}"
            results.append(Comparison(name, detail, float("inf"), False))
            continue
        difference = _largest_difference(a, b)
        results.append(Comparison(name, f"{list(a.shape)} {kinds}", difference, difference <= atol))
    return results


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference in float64; NaN equals NaN, infinity equals itself."""
    largest = 0.0
    for x, y in zip(a.reshape(-1).split(_COMPARED_AT_ONCE), b.reshape(-1).split(_COMPARED_AT_ONCE), strict=True):
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = max(largest, float(apart.max()) if apart.numel() else 0.0)
    return largest


def compare_configs(first: Checkpoint, second: Checkpoint) -> list[str]:
    """The fields that affect a model's outputs and differ, as lines of text."""
    lines, config = [], first.config
    dynamic = bool(config.compose_generators)
    used = {
        "qk_norm_eps": config.qk_norm,
        "sliding_window": "sliding_attention" in (config.layer_types or ()),
        "compose_act": dynamic,
        "compose_rank": dynamic and config.compose_projection,
        "compose_groups": config.compose_pre or config.compose_post,
    }
    for name in _DECISIVE:
        a, b = getattr(first.config, name), getattr(second.config, name)
        if name == "rope_parameters":
            a, b = ({"rope_type": "default", "partial_rotary_factor": 1.0} | (rope or {}) for rope in (a, b))
        if a != b and used.get(name, True):
            lines.append(f"{name}: {a!r} and {b!r}")
    return lines


def compare_logits(
    first: str | os.PathLike,
    second: str | os.PathLike,
    *,
    tokens: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    num_tokens: int = _NUM_TOKENS,
    seed: int = 0,
    atol: float = 5e-5,
) -> Comparison:
    """Compares the logits of two model folders, both in float32.

    Args:
        first, second: folders that `from_pretrained` loads.
        tokens: token ids, [T] or [B, T]; by default random.
        num_tokens: number of random tokens.
        seed: of the random tokens.
        atol: largest absolute difference that counts as equal.

    Returns:
        one `Comparison`.

    Raises:
        ConversionError: when a folder cannot be loaded, tokens are outside a vocabulary or longer than `check_length`
            allows, the vocabularies differ, or `check_tolerance` refuses `atol`.
    """
    check_tolerance(atol)
    logits: list[torch.Tensor] = []
    ids = None if tokens is None else _as_ids(tokens)
    check_length(num_tokens if ids is None else ids.shape[1], is_random=ids is None)
    for folder in (first, second):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        except LOADING_ERRORS as error:
            reason = damaged_file(folder, error) or error
            raise ConversionError(f"{folder} cannot be loaded as a model ({reason}).") from error
        size = model.config.vocab_size
        check_length(num_tokens if ids is None else ids.shape[1], model.config, is_random=ids is None)
        if ids is None:
            ids = torch.randint(0, size, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
        outside = ids[(ids < 0) | (ids >= size)].tolist()
        if outside or not ids.numel():
            found = f"; {outside[0]} is none" if outside else ""
            raise ConversionError(f"tokens must be ids from 0 to {size - 1} of {folder}, at least one{found}.")
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits)
        del model
    if logits[0].shape != logits[1].shape:
        raise ConversionError(f"The vocabularies differ: {logits[0].shape[-1]} and {logits[1].shape[-1]}.")
    difference = _largest_difference(*logits)
    return Comparison("logits", f"{list(logits[0].shape)} float32", difference, difference <= atol)


def check_tolerance(atol: float, name: str = "atol") -> None:
    """Refuses a tolerance that no difference could be compared with.

    Args:
        atol: largest absolute difference that is to count as equal.
        name: what to call it in the message.

    Raises:
        ConversionError: when it is negative or NaN, with which even equal values would count as different.
    """
    if not atol >= 0:
        raise ConversionError(f"{name}={atol} must be a number of at least 0; 0 asks for equal values.")


def check_length(length: int, *configs: DCFormerConfig, is_random: bool = True) -> None:
    """Refuses a number of tokens to compare logits on.

    Args:
        length: their number.
        configs: of the models. The default number is never refused.
        is_random: they are to be made; otherwise their number is that of given ones.

    Raises:
        ConversionError: when it is below 1, or above `max_position_embeddings`.
    """
    if is_random and length < 1:
        raise ConversionError(f"num_tokens={length} must be at least 1.")
    longest = max(_NUM_TOKENS, min((config.max_position_embeddings for config in configs), default=length))
    if length > longest:
        what = f"num_tokens={length}" if is_random else f"{length} tokens in a row"
        raise ConversionError(f"{what}: expected at most {longest}, by the model's max_position_embeddings.")


def _as_ids(tokens: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Token ids as [B, T] integers."""
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConversionError(f"tokens must be numbers ({error}).") from error
    if ids.dim() not in (1, 2) or (ids.is_floating_point() and ids.numel()):
        kind = str(ids.dtype).removeprefix("torch.")
        raise ConversionError(f"tokens are {kind} {list(ids.shape)}, expected integers [T] or [B, T].")
    return ids.long() if ids.dim() == 2 else ids.long()[None]


def format_table(comparisons: Sequence[Comparison], every: bool = False) -> str:
    """A readable table of comparisons, either all or only the differing ones, with a summary.

    Args:
        comparisons: from `compare_tensors` and `compare_logits`.
        every: also list equal tensors.
    """
    shown = [c for c in comparisons if every or not c.is_equal or c.name == "logits"]
    width = max((len(c.name) for c in shown), default=0)
    verdicts = {True: "equal", False: "DIFFERENT"}
    lines = [f"{c.name:<{width}}  {c.difference:10.3e}  {verdicts[c.is_equal]:<9}  {c.detail}" for c in shown]
    if lines:
        lines.insert(0, f"{'tensor':<{width}}  {'max |diff|':>10}  {'verdict':<9}  shape, dtypes")
    different = sum(not c.is_equal for c in comparisons)
    lines.append(f"{len(comparisons)} compared, {different} different")
    return "\n".join(lines)


__all__ = [
    "Comparison",
    "check_length",
    "check_tolerance",
    "compare_configs",
    "compare_logits",
    "compare_tensors",
    "format_table",
]
