"""Memory, communication and speed of training a DCFormer on many GPUs, by arithmetic: `dcformer-plan`.

Letters: B sequences of T tokens that a GPU takes at once, L layers, E hidden size, F MLP width, H query heads (Hkv of
keys and values) of D channels, R rank, G groups, M = H/G, C generators, V vocabulary, w bytes of a number in the
compute dtype, n GPUs that share parameters (FSDP), t GPUs that share a layer (tensor parallelism).

Memory of parameters, gradients and optimizer is exact, activations are those that autograd keeps (tests compare both
with small models; groups of a single head and batches of one keep less in eager attention than counted here). What a
step needs for a moment is an estimate, the total an upper bound (tests hold the peak of a step to it), and speed an
estimate, too, unless measurements are given.
"""

import argparse
import difflib
import json
import math
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import RopeParameters

from .chunked_dcformer import BLOCK_SCORES
from .configuration_dcformer import PRESETS, DCFormerConfig
from .conversion.errors import CONFIG_ERRORS
from .errors import DCFormerError, MissingExtraError, raise_bug, refused, require_extra
from .modeling_dcformer import DCFormerForCausalLM

FP32, INT32, INT64 = 4, 4, 8  # bytes
IMPLEMENTATIONS = ("dcformer_triton", "dcformer_chunked", "eager")
# Bytes of state per parameter; AdamW has two moments in float32. (Steps, 4 bytes per tensor, are left out.)
OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd_momentum": 4, "sgd": 0}
# Bytes of memory, of dense bfloat16 operations per second, and of bytes per second to memory.
GPUS = {"h100": (80e9, 989e12, 3.35e12), "h200": (141e9, 989e12, 4.8e12)}
GIB = 1 << 30
# Fields without influence on how long a training step takes.
NEUTRAL_FIELDS = {
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "norm_eps",
    "num_hidden_layers",  # which is counted
    "pad_token_id",
    "qk_norm_eps",
    "use_cache",
}


@dataclass(frozen=True)
class Setup:
    """What is trained, and on what.

    Attributes:
        config: the model.
        gpus: in all.
        tensor_parallel: t, GPUs that share a layer; the n = gpus / t others share parameters (FSDP2, full sharding).
        batch: B, sequences per forward pass of a data-parallel rank.
        length: T, tokens of a sequence.
        accumulation: forward passes per optimizer step.
        dtype: compute dtype; parameters, gradients and optimizer states are in float32.
        optimizer: a name in `OPTIMIZERS`.
        checkpointing: gradient checkpointing of every layer.
        attention: attention implementation.
        memory: bytes of a GPU.

    Raises:
        ValueError: on numbers below 1, unknown names, and sizes that do not divide or that the model does not have.
    """

    config: DCFormerConfig
    gpus: int = 64
    tensor_parallel: int = 1
    batch: int = 1
    length: int = 2048
    accumulation: int = 1
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    checkpointing: bool = False
    attention: str = "dcformer_triton"
    memory: float = 80e9

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "batch", "length", "accumulation"):
            if getattr(self, name) < 1:
                raise DCFormerError(f"{name}={getattr(self, name)}: expected at least 1")
        if not 0 < self.memory < math.inf:
            raise DCFormerError(f"memory={self.memory:g}: expected the bytes of a GPU, more than 0")
        if self.gpus % self.tensor_parallel:
            raise DCFormerError(f"gpus={self.gpus} is no multiple of tensor_parallel={self.tensor_parallel}")
        if self.optimizer not in OPTIMIZERS:
            raise DCFormerError(f"optimizer={self.optimizer!r}: expected one of {sorted(OPTIMIZERS)}")
        if self.attention not in IMPLEMENTATIONS:
            raise DCFormerError(f"attention={self.attention!r}: expected one of {IMPLEMENTATIONS}")
        if self.length > self.config.max_position_embeddings:
            raise DCFormerError(
                f"length={self.length} is above max_position_embeddings={self.config.max_position_embeddings}"
            )
        if self.tensor_parallel > 1:
            with refused(ValueError):
                self.config.check_tensor_parallel(self.tensor_parallel)

    @property
    def shards(self) -> int:
        """n, GPUs that share parameters."""
        return self.gpus // self.tensor_parallel

    @property
    def width(self) -> int:
        """w, bytes of a number in the compute dtype."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        parameters, gradients, optimizer: in float32, the GPU's share.
        gathered: parameters and gradients that are whole for a moment.
        activations: what layers keep for the backward pass.
        logits: log-probabilities, their gradient, and the model's logits in the compute dtype.
        workspace: what attention needs while it runs.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        """Sum of all parts: as if all were there at once."""
        return sum(vars(self).values())


# --- parameters -------------------------------------------------------------------------------------------------------


def local_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Parameter -> its shape on the first of the t GPUs that share a layer, by the model's tensor-parallel plan."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(setup.config)
    plan = model.tp_plan if setup.tensor_parallel > 1 else {}
    shapes = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
        style = plan.get(generic) or plan.get(generic.rpartition(".")[0], "")
        bias = name.endswith(".bias")
        if style.startswith("colwise") or style == "embedding_rowwise":
            shape[0] = math.ceil(shape[0] / setup.tensor_parallel)
        elif style == "rowwise" and not bias:
            shape[1] = math.ceil(shape[1] / setup.tensor_parallel)
        shapes[name] = tuple(shape)
    return shapes


def sharded_parameters(setup: Setup) -> int:
    """Parameters that one GPU keeps: of each tensor ceil(rows / n) rows, which is what FSDP2's first rank has."""
    return sum(math.ceil(shape[0] / setup.shards) * math.prod(shape[1:]) for shape in local_shapes(setup).values())


def units(setup: Setup) -> tuple[int, int, int]:
    """Parameters on one of the t GPUs of what accelerate's FSDP2 gathers at once.

    Returns:
        of a layer; of the input embedding; of the last norm and the output layer (and the embedding, where tied).
    """
    shapes = local_shapes(setup)
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.0."))
    embedding = math.prod(shapes["model.embed_tokens.weight"])
    tail = sum(map(math.prod, shapes.values())) - setup.config.num_hidden_layers * layer
    return (layer, 0, tail) if setup.config.tie_word_embeddings else (layer, embedding, tail - embedding)


def gathered_bytes(setup: Setup) -> int:
    """Whole parameters and gradients of a moment, in the compute dtype: an estimate.

    Two layers' parameters (the running one and the next) and one layer's gradients before they are summed, or those of
    the embedding; and the output layer, which stays, with its gradients. None where nothing is shared.
    """
    layer, embedding, tail = units(setup)
    return setup.width * (max(3 * layer, 2 * embedding) + 2 * tail) if setup.shards > 1 else 0


# --- activations ------------------------------------------------------------------------------------------------------


def _norm_bytes(setup: Setup, width: int) -> int:
    """Of a norm over `width`, per vector, its output aside: the input in float32 and statistics (RMS: also x / rms)."""
    if setup.config.norm_type == "layernorm":
        return FP32 * width + 2 * FP32
    return FP32 * width + FP32 + setup.width * width


def _has_fused_generators(setup: Setup) -> bool:
    """Whether kernels make composition weights, too: not where the layers before them are split over GPUs."""
    return setup.attention == "dcformer_triton" and setup.tensor_parallel == 1


def _generator_bytes(setup: Setup) -> int:
    """Of the weight generators, per token, on one of the t GPUs, in numbers: C times

    - first layer, before and after its activation: 2·G·K, K = 2·R·M (kernels: before, G·K);
    - second layer: 2·R·H (several groups: R·H more, a copy; then in 16 bits only the copy of `up` remains);
    - RMS norm of `down`: G·R statistics and, in 16 bits, its input, R·H, both in float32; its result, R·H;
    - gates: H in float32 and, in 16 bits or several groups, a copy (kernels: before the tanh, H);
    - eager, in 16 bits: `down`, `up` and gates in float32 instead of their 16-bit results;
    - kernels: packed weights, (2·R + 1)·H, instead of all but the first layer.
    """
    c, w, r = setup.config, setup.width, setup.config.compose_rank
    heads, groups = c.num_attention_heads, c.compose_groups
    wide, several, rh = w < FP32, groups > 1, r * heads
    fused, eager = _has_fused_generators(setup), setup.attention == "eager"
    size = 0
    if setup.attention == "dcformer_triton" and not fused:
        size += (2 * r * c.compose_projection + c.compose_gate) * heads * w  # packed for the kernels of attention
    if c.compose_projection:
        if fused:
            size += 4 * rh * w
        else:
            size += 4 * rh * w + groups * r * FP32 + rh * FP32 * wide
            if eager and wide:
                size += 2 * rh * FP32
            else:
                size += rh * w + (2 * rh * w if not several else rh * w if wide else 3 * rh * w)
    if c.compose_gate:
        copy = FP32 if eager and wide else w if wide or several else 0
        size += heads * (2 * w if fused else FP32 + copy)
    return len(c.compose_generators) * size // setup.tensor_parallel


def _map_bytes(setup: Setup) -> int:
    """Of eager attention, per pair of a query and a key, on one of the t GPUs.

    Each generator's product keeps the scores or weights of H heads and the R·G hidden maps, gates keep H maps per
    stage, the softmax its H results, the product with the values H composed weights; the mask a byte.
    """
    c = setup.config
    count, heads = len(c.compose_generators), c.num_attention_heads
    wide = count * (heads + c.compose_rank * c.compose_groups) if c.compose_projection else 0
    stages = {stage for stage, _ in c.compose_generators}
    wide += heads * len(stages) if c.compose_gate and stages else 0
    wide += heads * (c.compose_pre + c.compose_post) if c.compose_static else 0
    wide += heads  # softmax
    return (FP32 * wide + setup.width * heads) // setup.tensor_parallel + 1


def layer_activation_bytes(setup: Setup) -> int:
    """Bytes that autograd keeps of one layer, without checkpointing.

    Per token: two norms over E and their outputs; QK-norm of H + Hkv vectors; q, k, v and the attention's output,
    (2·H + 2·Hkv)·D·w; generators; 4·F·w of a gated MLP. Eager attention: maps per pair of a query and a key, whether it
    sees it or not. Kernels: H log-sum-exps in float32.
    """
    c, w, t = setup.config, setup.width, setup.tensor_parallel
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    tokens = setup.batch * setup.length
    whole = 2 * (_norm_bytes(setup, c.hidden_size) + c.hidden_size * w)
    if c.use_parallel_residual and w == FP32:
        whole -= FP32 * c.hidden_size  # both norms keep the same input
    split = 2 * w * (heads + kv) * dim
    if c.qk_norm:
        split += (heads + kv) * (FP32 * dim + FP32 + w * dim)
    gates = c.mlp_gates
    mlp = (4 if c.mlp_type == "gated" else 2) * c.intermediate_size * w
    if gates:
        mlp += c.intermediate_size * w + gates * (FP32 + w * (w < FP32))
    per_token = whole + split // t + _generator_bytes(setup) + (mlp if gates else mlp // t)
    fixed = 0
    if setup.attention == "dcformer_triton":
        per_token += FP32 * heads // t
        fixed += 2 * INT32 * setup.length  # first and last key that a query sees
        rows = len(c.compose_generators) * heads * (2 * c.compose_rank + 1)
        if _has_fused_generators(setup) and c.compose_projection and c.compose_gate and tokens >= 2 * rows:
            fixed += rows * c.hidden_size * w  # both first layers, copied into one weight
    elif setup.attention == "eager":
        per_token += 2 * (heads - kv) * dim * w // t  # keys and values, repeated
        if w < FP32:
            per_token += 2 * (FP32 - w) * heads * dim // t  # queries and keys in float32
        fixed += setup.batch * setup.length**2 * _map_bytes(setup)
    if c.norm_type == "layernorm" and w < FP32:
        fixed += 4 * FP32 * c.hidden_size  # scales and biases in float32
    return tokens * per_token + fixed


def activation_bytes(setup: Setup) -> int:
    """Bytes that autograd keeps of all layers and the final norm.

    With checkpointing the input of each layer, B·T·E·w, and one layer's own while it runs again.
    """
    c, tokens = setup.config, setup.batch * setup.length
    per_layer, layers = layer_activation_bytes(setup), c.num_hidden_layers
    rotary = int(c.head_dim * c.rope_parameters.get("partial_rotary_factor", 1.0))
    outside = tokens * (_norm_bytes(setup, c.hidden_size) + c.hidden_size * setup.width + INT64)
    outside += 2 * setup.length * rotary * setup.width  # cosines and sines
    if c.norm_type == "layernorm" and setup.width < FP32:
        outside += 2 * FP32 * c.hidden_size
    if setup.checkpointing:
        return layers * tokens * c.hidden_size * setup.width + per_layer + outside
    return layers * per_layer + outside


def saved_logits_bytes(setup: Setup) -> int:
    """Log-probabilities that the loss keeps, float32 [B·T, V], and its targets."""
    return setup.batch * setup.length * (FP32 * setup.config.vocab_size + INT64)


def logits_bytes(setup: Setup) -> int:
    """At the end of the forward pass: what is kept, the model's logits (w) and their gradient (float32, then w)."""
    w = setup.width
    more = w + FP32 + (w if w < FP32 else 0)
    return saved_logits_bytes(setup) + setup.batch * setup.length * setup.config.vocab_size * more


def workspace_bytes(setup: Setup) -> int:
    """What the backward pass of attention needs while it runs: an estimate.

    Kernels: one chunk of n_t queries, B · n_t · T · 2 · (8·R·G + 4·H) bytes, n_t doubled from 64 to at most 512 while
    that is at most 256 MiB or 1/64 of the device's memory; accumulators of dQ, dK, dV in float32. Chunked: a few blocks
    of scores in float32, and float32 copies of q, k, v and their gradients. Eager: three maps of H heads in float32.
    """
    c, t = setup.config, setup.tensor_parallel
    heads = c.num_attention_heads // t
    states = FP32 * setup.batch * setup.length * heads * c.head_dim
    if setup.attention == "eager":
        return 3 * FP32 * setup.batch * setup.length**2 * heads
    if setup.attention == "dcformer_chunked":
        return 8 * FP32 * BLOCK_SCORES + 6 * states
    limit = max(256 << 20, int(setup.memory) // 64)
    of_query = 2 * setup.batch * setup.length * (8 * c.compose_rank * c.compose_groups // t + 4 * heads)
    queries = 64
    while queries < min(512, setup.length) and 2 * queries * of_query <= limit:
        queries *= 2
    return queries * of_query + 3 * states


def memory(setup: Setup) -> Memory:
    """Bytes on the fullest GPU, part by part.

    Returns:
        parameters 4·p, gradients 4·p and optimizer states, p = `sharded_parameters`; and the other parts.
    """
    own = sharded_parameters(setup)
    return Memory(
        parameters=FP32 * own,
        gradients=FP32 * own,
        optimizer=OPTIMIZERS[setup.optimizer] * own,
        gathered=gathered_bytes(setup),
        activations=activation_bytes(setup),
        logits=logits_bytes(setup),
        workspace=workspace_bytes(setup),
    )


# --- communication ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step. `sent`: bytes that a GPU sends, by rings: (n-1)/n of the data, twice that to
    reduce and gather."""

    kind: str
    group: str
    count: int
    sent: float


def collectives(setup: Setup) -> list[Collective]:
    """What a step of `accumulation` forward and backward passes communicates.

    FSDP2, over n: parameters of each layer, and of the input embedding, gathered for the forward and again for the
    backward pass, those of the output layer once; gradients summed and scattered once. Tensor parallelism, over t, of
    hidden states [B, T, E]: forward 2 all-reduces per layer and 1 for the embedding; backward as many (for the inputs
    of attention, of the MLP and of the output layer). Logits are gathered once. With checkpointing, layers run forward
    twice. Scales of QK-norm (D numbers) are summed, too.
    """
    c, n, t, w, times = setup.config, setup.shards, setup.tensor_parallel, setup.width, setup.accumulation
    layers, tokens = c.num_hidden_layers, setup.batch * setup.length
    found = []
    if n > 1:
        layer, embedding, tail = units(setup)
        blocks, twice = layers + bool(embedding), layers * layer + embedding
        ring = times * w * (n - 1) / n
        found += [
            Collective("all-gather", "FSDP", times * (2 * blocks + 1), ring * (2 * twice + tail)),
            Collective("reduce-scatter", "FSDP", times * (blocks + 1), ring * (twice + tail)),
        ]
    if t > 1:
        inputs = (1 + (not c.mlp_gates)) * layers
        count = times * (inputs * (2 + setup.checkpointing) + 2)
        each = 2 * (t - 1) / t * tokens * c.hidden_size * w
        found.append(Collective("all-reduce", "tensor parallel", count, count * each))
        if c.qk_norm:
            small = times * 2 * layers
            found.append(Collective("all-reduce", "QK-norm", small, small * 2 * (t - 1) / t * c.head_dim * FP32))
        logits = tokens * c.vocab_size * w
        found.append(Collective("all-gather", "tensor parallel", times, times * (t - 1) / t * logits))
    return found


# --- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all GPUs together; `source` says where the numbers of a single GPU are from."""

    tokens: float
    source: str


class NoEstimateError(ValueError):
    """A setup that the roofline does not know; the message says what it knows."""


def step_seconds(setup: Setup, compute: float, network: float, links: float) -> tuple[float, str]:
    """A step: FSDP hides behind computation as far as that takes longer, tensor parallelism does not.

    Args:
        setup: what is trained, and on what.
        compute: seconds that a GPU computes.
        network: bytes per second that a GPU sends to GPUs that share parameters.
        links: bytes per second that a GPU sends to GPUs that share a layer.

    Returns:
        its seconds; ", bound by the network" where FSDP takes longer than computation, else "".
    """
    sent = collectives(setup)
    shared = sum(c.sent for c in sent if c.group == "FSDP") / network
    split = sum(c.sent for c in sent if c.group != "FSDP") / links
    return max(compute, shared) + split, ", bound by the network" if shared > compute else ""


def _tokens(setup: Setup) -> int:
    """Of a step, on all GPUs."""
    return setup.accumulation * setup.batch * setup.length * setup.shards


def estimate(setup: Setup, gpu: str, share: float, network: float, links: float) -> Speed:
    """From `tools/kernel_roofline.py`: an ESTIMATE, kernels at a share of their bounds, linear layers at 70% of peak.

    With several groups of heads as if there were one.

    Args:
        setup: what is trained, and on what.
        gpu: a name in `GPUS`.
        share: of the kernels' bounds that they reach, 1.0 for all.
        network, links: as for `step_seconds`.

    Returns:
        Tokens per second of all GPUs, and that this is an estimate.

    Raises:
        NoEstimateError: for anything but the fused kernels, full composition and gated MLPs, which is what it knows;
            and without Triton.
    """
    c = setup.config
    other = c.num_key_value_heads * c.head_dim != c.hidden_size or c.mlp_type != "gated" or c.compose_rank != 2
    other = other or not c.num_hidden_layers
    if setup.attention != "dcformer_triton" or len(c.compose_generators) != 4 or other or c.sliding_window != 256:
        raise NoEstimateError(
            "no estimate: the roofline knows fused kernels, full composition with R = 2, as many key/value heads as "
            "query heads, gated MLPs and windows of 256"
        )
    try:
        require_extra("kernels", "an estimate of the speed", "triton")
    except MissingExtraError as error:
        raise NoEstimateError(str(error)) from error
    try:
        roofline = import_module("kernel_roofline")
    except ModuleNotFoundError as error:
        raise NoEstimateError(
            "no estimate: the roofline is a tool of the source tree and no part of the package; put its tools/ into "
            "PYTHONPATH"
        ) from error

    size, tensor, hbm = GPUS[gpu]
    layers, shape = c.num_hidden_layers, roofline.Shape.of("model", c)
    local = sum(kind == "sliding_attention" for kind in c.layer_types) / layers
    figures = roofline.device(gpu, tensor=tensor, hbm=hbm, memory=size)
    layer = roofline.training(shape, setup.length, local, figures, roofline.stored)
    sequence = layers * (layer.linear + layer.generator + layer.attention / share)
    sequence *= 4 / 3 if setup.checkpointing else 1
    compute = setup.accumulation * setup.batch * sequence / setup.tensor_parallel
    step, bound = step_seconds(setup, compute, network, links)
    source = f"ESTIMATE (roofline, {gpu.upper()}, kernels at {share:.0%} of their bounds{bound})"
    return Speed(_tokens(setup) / step, source)


def read_cells(path: Path) -> list[dict[str, Any]]:
    """What `benchmarks/gpu_suite.py` measured of training: cells with the seconds of a layer and of the rest.

    Args:
        path: its `gpu_suite.json`.

    Returns:
        The cells that ended well and name a published size.

    Raises:
        ValueError: when the file cannot be read, is something else, or has no such cell.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DCFormerError(f"--measured {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DCFormerError(
            f"--measured {path}: no JSON ({error}); expected gpu_suite.json of make bench-gpu"
        ) from error
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise DCFormerError(f'--measured {path}: no list "cells" in it; expected gpu_suite.json of make bench-gpu')
    needed = {"size", "pattern", "composition", "tokens", "batch", "layer_s", "rest_s"}
    found = [
        cell
        for cell in cells
        if (cell.get("section"), cell.get("status")) == ("train", "ok") and needed <= cell.keys()
        if f"dcformer-{cell['size']}" in PRESETS and cell["composition"] in ("full", "query")
    ]
    if not found:
        raise DCFormerError(f"--measured {path}: no cell of section train that is ok and has layer_s and rest_s")
    return found


def measured_config(cell: dict[str, Any], num_hidden_layers: int) -> DCFormerConfig:
    """The model of a cell of `benchmarks/gpu_suite.py`, with another number of layers."""
    return DCFormerConfig.from_preset(
        f"dcformer-{cell['size']}", num_hidden_layers=num_hidden_layers, layer_pattern=cell["pattern"],
        compose_key=cell["composition"] == "full",
    )  # fmt: skip


def _conditions(config: DCFormerConfig, length: int, attention: str, dtype: torch.dtype) -> dict[str, Any]:
    """What decides how long a step takes, but for the number of layers."""
    held = {name: value for name, value in config.to_dict().items() if name not in NEUTRAL_FIELDS}
    return held | {"length": length, "attention": attention, "dtype": dtype}


def measured(setup: Setup, path: Path, network: float, links: float) -> Speed:
    """From what `benchmarks/gpu_suite.py` measured on one GPU: its seconds per layer times the layers, and the rest.

    The seconds of a sequence are those of the measured batch, over its size. Checkpointing takes layers forward again:
    4/3 of their seconds.

    Args:
        setup: what is trained, and on what. Only layers, batch, accumulation and GPUs may differ from what was
            measured (so heads are in one group, and there is no tensor parallelism).
        path: file of the benchmark.
        network, links: as for `step_seconds`.

    Returns:
        Tokens per second of all GPUs, and the measurement that they are from.

    Raises:
        ValueError: when the file has no such measurement; the message names the fields that differ from the nearest.
    """
    wanted = _conditions(setup.config, setup.length, setup.attention, setup.dtype)

    def differences(cell: dict[str, Any]) -> list[str]:
        config = measured_config(cell, setup.config.num_hidden_layers)
        found = _conditions(config, cell["tokens"], "dcformer_triton", torch.bfloat16)
        names = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        return [f"{n}={reprlib.repr(wanted.get(n))} (measured: {reprlib.repr(found.get(n))})" for n in names]

    cell = min(read_cells(path), key=lambda cell: len(differences(cell)))
    if other := differences(cell):
        raise DCFormerError(
            f"--measured {path}: no measurement fits; the nearest, {cell['size']} {cell['pattern']} "
            f"{cell['composition']}, differs in {', '.join(other)}. Only the number of layers may be another."
        )
    layers = setup.config.num_hidden_layers * cell["layer_s"] * (4 / 3 if setup.checkpointing else 1)
    compute = setup.accumulation * setup.batch * (layers + cell["rest_s"]) / cell["batch"]
    step, bound = step_seconds(setup, compute, network, links)
    per_layer = f"{1000 * cell['layer_s']:.2f} ms a layer and {1000 * cell['rest_s']:.2f} ms"
    source = f"one GPU measured: {path.name}, {per_layer} for {cell['batch']} sequences{bound}"
    return Speed(_tokens(setup) / step, source)


# --- command ----------------------------------------------------------------------------------------------------------


def report(setup: Setup, title: str) -> str:
    """Memory and communication as text in Markdown."""
    parts, n, t = memory(setup), setup.shards, setup.tensor_parallel
    where = f"{setup.gpus} GPUs" + (f", {t} share a layer and {n} parameters" if t > 1 else " that share parameters")
    batch = setup.batch * setup.accumulation * n
    lines = [
        f"{title}: {setup.config.num_parameters():,} parameters, {where}; {batch} sequences of {setup.length} tokens "
        f"per step ({batch * setup.length / 1e6:.2f}M tokens); {setup.attention}"
        + (", gradient checkpointing" if setup.checkpointing else ""),
        "",
        "| memory per GPU | GiB |",
        "|---|---|",
        *(f"| {name} | {size / GIB:.2f} |" for name, size in vars(parts).items()),
        f"| **total** of {setup.memory / GIB:.1f} | **{parts.total / GIB:.2f}**"
        + (" |" if parts.total <= 0.92 * setup.memory else " does not fit |"),
        "",
        "| collectives per step | group | number | GB sent per GPU |",
        "|---|---|---|---|",
        *(f"| {c.kind} | {c.group} | {c.count} | {c.sent / 1e9:.2f} |" for c in collectives(setup)),
    ]
    return "\n".join(lines)


def configuration(preset: str, items: Sequence[str]) -> DCFormerConfig:
    """The configuration of a published size, with fields set otherwise.

    Args:
        preset: a name in `PRESETS`.
        items: "FIELD=VALUE", values in JSON or, if they are none, as text: `compose_rank=1`, `layer_pattern=LGLL`.

    Returns:
        The configuration.

    Raises:
        ValueError: on an item of another form, a field that does not exist, or a value that the field does not take.
    """
    known = {field.name for field in fields(DCFormerConfig)} | {"layer_pattern"}
    values = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise DCFormerError(f"--set {item}: expected FIELD=VALUE, such as num_hidden_layers=16")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else " (docs/configuration.md lists them)"
            raise DCFormerError(f"--set {item}: no field of the configuration{meant}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    try:
        config = DCFormerConfig.from_preset(preset, **values)
        if unknown := config.rope_parameters.keys() - RopeParameters.__annotations__.keys():
            raise DCFormerError(
                f"rope_parameters has no {', '.join(sorted(unknown))}; it may have rope_type, rope_theta, ..."
            )
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise DCFormerError(f"--set {' '.join(items)}: {' '.join(str(error).split())}") from error
    return config


def run(options: argparse.Namespace) -> int:
    """Prints a plan.

    Args:
        options: from the command line.

    Returns:
        0, or 1 on input that cannot be planned: nothing but a line that says why is printed.
    """
    try:
        for name in ("memory", "network", "links"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                raise DCFormerError(f"--{name} {value:g}: expected a number above 0")
        config = configuration(options.preset, options.set)
        setup = Setup(
            config, options.gpus, options.tensor_parallel, options.batch, options.length, options.accumulation,
            getattr(torch, options.dtype), options.optimizer, options.checkpointing, options.attention,
            options.memory * 1e9 if options.memory else GPUS[options.gpu][0],
        )  # fmt: skip
        plan = report(setup, " ".join([options.preset, *options.set]))
        speeds = _speeds(setup, options)
    except DCFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(plan, "", *speeds, sep="\n")
    return 0


def _speeds(setup: Setup, options: argparse.Namespace) -> list[str]:
    """The lines about throughput."""
    network, links = options.network * 1e9, options.links * 1e9
    try:
        if options.measured:
            speeds = [measured(setup, options.measured, network, links)]
        else:
            speeds = [estimate(setup, options.gpu, share, network, links) for share in (1.0, 0.5)]
    except NoEstimateError as error:
        return [f"Throughput: {error}"]
    lines = []
    for speed in speeds:
        days = 1e12 / speed.tokens / 86400
        lines.append(f"{speed.source}: {speed.tokens:,.0f} tokens/s, {days:.1f} days for 10^12 tokens.")
    if not options.measured:
        lines.append(
            "Nothing of this has been measured on a GPU: the kernels' bounds are arithmetic (docs/kernels.md)."
        )
    return lines
