"""Checks, then times the fused kernels on one GPU, alone and in models, beside a plain Transformer of the same sizes.

    PYTHONPATH=src python benchmarks/gpu_suite.py                      # all sections, at most 8 minutes
    PYTHONPATH=src python benchmarks/gpu_suite.py --sections train --sizes 6.9b 13b
    PYTHONPATH=src python benchmarks/gpu_suite.py --resume             # goes on where the last call stopped
    PYTHONPATH=src python benchmarks/gpu_suite.py --smoke              # tiny shapes on the CPU: does the script run
    PYTHONPATH=src python benchmarks/gpu_suite.py --plot FILE.json     # draws the results of an earlier run

Sections are made of cells, one measurement each, written to DIR/gpu_suite.json as soon as they are done. Before a cell
of DCFormer is timed, its configuration is compared with the definition in float64; where that fails, the timings are
reported as invalid and the exit status is 1. A cell that runs out of memory or raises is recorded, and the next one
begins; where the error has taken the device's context with it, the script starts anew for the cells that are left. Each
section has a share of `--budget-s`; cells that no longer fit are listed as skipped. Goals are printed beside what was
measured; they do not decide the exit status.
"""

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if "--smoke" in sys.argv:  # before anything imports Triton, which decides on import whether it interprets
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F
from cpu_suite import REPOSITORY, read_json, write_json
from one_product import one_product
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from dcformer import ComposeWeights, DCFormerCompose, DCFormerConfig, SideWeights, kernels
from dcformer.attention_dcformer import eager_attention
from dcformer.cache_dcformer import use_static_layers
from dcformer.chunked_dcformer import chunked_attention
from dcformer.kernels import overflow

SECTIONS = {
    "check": "Against the definition in float64: attention, decoding, weight generators, models",
    "op": "Attention alone: forward, and forward and backward",
    "memory": "Peak memory of attention, forward and backward; and of a training pass over 32k tokens",
    "train": "Training tokens/s: forward, backward and fused AdamW, bfloat16, layers compiled",
    "decode": "Greedy decoding of one sequence behind a prompt: static cache, compiled, replayed as one CUDA graph",
    "kernels": "Device time kernel by kernel; what the device does at its best; smaller chunks",
    "tune": "Forward and backward of attention with the tiles that DCFORMER_AUTOTUNE=1 finds, over those of the table",
}
# Of the time budget, in the order in which sections run; what one leaves over goes to those after it.
SHARES = {"check": 0.15, "op": 0.25, "memory": 0.06, "train": 0.26, "decode": 0.24, "kernels": 0.04, "tune": 0.0}
PRESETS = {"2.8b": "dcformer-2.8b", "6.9b": "dcformer-6.9b", "13b": "dcformer-13b"}
MOST_KEPT = 8192  # tokens: of 6.9B, three maps of a layer take 12 GiB
LENGTHS = (4096, 2048, 8192, 1024, 16384, 32768)  # those that goals are about come first
WINDOW = 256
# Those that end in "gates" have gates before the softmax alone, the part of composition that FlexAttention can express:
# all else mixes heads, and a `score_mod` sees the score of one. "kept": maps are, for the backward pass.
IMPLEMENTATIONS = ("ours", "flash", "ours kept", "ours gates", "flex gates", "compiled", "eager", "chunked")
# What training and decoding compare: layer pattern and composition; the first is the plain Transformer, all global. In
# decoding ours have fused projections, and so has the plain one that goals compare them with.
PLAIN = ("G", "plain")
VARIANTS = (PLAIN, ("LG", "full"), ("LG", "kept"), ("LGLL", "query"), ("LGLL", "full"), ("LG", "query"))
ONE_PRODUCT = ("G", "plain, one product")
DECODED = (ONE_PRODUCT, *(variant for variant in VARIANTS[1:] if variant[1] != "kept"), PLAIN)
BASELINES = {"train": PLAIN, "decode": ONE_PRODUCT}
COMPOSITIONS: dict[str, dict[str, bool]] = {
    "full": {},
    "kept": {"save_maps": True},  # of training
    "query": {"compose_key": False},
    "gates": {"compose_post": False, "compose_projection": False},
}
MODELS = ("full", "query")  # compositions of whole models
SEED = 0
GIB = 1 << 30
L2_BYTES = 256 << 20  # written between repeats; more than the second-level cache of any GPU so far
CHECK_ROWS = 64  # queries whose gradients a check follows when there are more than `CHECK_ALL`
CHECK_ALL = 512
# An error may be this many times that of the definition in the same dtype: (largest element, Euclidean norm). The
# kernels keep the maps that cross heads in bfloat16 where the definition has float32. In float32 both are as exact in
# the mean, but the kernels round scores and log-sum-exps, times log2(e), where the definition subtracts the largest
# score; with the few numbers of `--smoke` 0.6 to 1.04 of factors of 2 were used, by the order of sums.
FACTORS = {torch.float32: (4.0, 4.0), torch.bfloat16: (4.0, 3.0)}


# --- FLOPs and bytes --------------------------------------------------------------------------------------------------


def visible_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees: causal, the last query at the last key.

    Args:
        queries, keys: T and S, S >= T.
        window: keys that a query sees at most, its own included; None for all before it.
    """
    offset = keys - queries
    first = min(queries, max(0, (window or keys) - offset))  # queries that see all before them: offset + 1, ...
    whole = first * offset + first * (first + 1) // 2
    return whole + (queries - first) * (window or 0)


def attention_flops(pairs: int, heads: int, dim: int, backward: bool = False) -> int:
    """Operations of plain attention, 2 per multiply-add: q·k and ·v; backward the five products q·k, dO·v, dV, dQ, dK.

    Args:
        pairs: pairs of a query and a key, summed over the batch.
        heads: query heads.
        dim: head dim of queries, keys and values.
        backward: of the backward pass instead of the forward pass.
    """
    return pairs * heads * 2 * dim * (5 if backward else 2)


def compose_flops(
    pairs: int, heads: int, rank: int, stages: int = 2, sides: int = 2, gate: bool = True, backward: bool = False
) -> int:
    """Operations that composition adds, 2 per multiply-add: R down, R up and the gate, per pair, head, stage and side.

    The backward pass has twice as many: gradients of the maps and of the weights.
    """
    return pairs * heads * stages * sides * 2 * (2 * rank + gate) * (2 if backward else 1)


def attention_bytes(
    batch: int, heads: int, queries: int, keys: int, dim: int, channels: int, itemsize: int, backward: bool = False
) -> int:
    """Bytes that must move at least: every input read once, every output written once.

    Args:
        batch, heads, queries, keys, dim: B, H, T, S, D; as many key/value heads as query heads.
        channels: composition weights per head and query, and per head and key; 2 · (2R + 1) for full composition.
        itemsize: bytes of an element. Log-sum-exps are float32.
        backward: of the backward pass: it also reads the output's gradient, and writes a gradient for each input.
    """
    rows = batch * heads
    states = rows * (queries + 2 * keys) * dim * itemsize  # q, k, v
    weights = rows * (queries + keys) * channels * itemsize
    out = rows * queries * (dim * itemsize) + rows * queries * 4
    return 2 * (states + weights) + 2 * out if backward else states + weights + out


# --- the device and its clock -----------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where and how cells run."""

    smoke: bool = False
    repeats: int = 20
    seconds: float = 1.0  # of timed calls per measurement
    slowest: float = 10.0  # a call that is expected to take longer is not made
    batch: int = 8
    prompt: int = 1024
    new_tokens: int = 128
    depth: tuple[int, int] = (4, 8)  # layers of the two models whose difference is the time of a layer
    full_depth: bool = False
    out: Path = REPOSITORY / "runs" / "gpu_suite"
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)  # done so far, by name
    flush: torch.Tensor | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    @property
    def numbered_device(self) -> torch.device:
        """With its index, as the marks of kernels go by it."""
        return torch.empty(0, device=self.device).device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def backend(self) -> str:
        """Of torch.compile."""
        return "eager" if self.smoke else "inductor"

    def config(self, size: str, pattern: str = "LG", composition: str = "full", **fields: Any) -> DCFormerConfig:
        """DCFormer++ of a size; `pattern` "G" has no windows."""
        fields = COMPOSITIONS.get(composition, {}) | {"layer_pattern": pattern} | fields
        if self.smoke:
            sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
            return DCFormerConfig(**(sizes | {"num_hidden_layers": 2, "sliding_window": 8} | fields))
        return DCFormerConfig.from_preset(PRESETS[size], **({"sliding_window": WINDOW} | fields))

    def synchronize(self) -> None:
        """Waits for the device."""
        if not self.smoke:
            torch.cuda.synchronize()

    def clean(self) -> None:
        """Gives back what earlier cells held. Raises where an earlier error has taken the device's context with it."""
        self.flush = None
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()
        if not self.smoke:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes in use on the GPU; 0 on a CPU, where nobody counts."""
        return 0 if self.smoke else torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], Any]) -> int | None:
        """Most bytes in use at any time during a call, those in use before included; None, and no call, on a CPU."""
        if self.smoke:
            return None
        self.flush = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def once(self, call: Callable[[], Any], flush: bool = False) -> float:
        """Seconds of one call, between CUDA events."""
        if flush:
            if self.flush is None:
                self.flush = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
            self.flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def time(self, call: Callable[[], Any], flush: bool = True, per: int = 1) -> dict[str, Any]:
        """Median and spread of a call's seconds, over `per`; the first call, which compiles, apart.

        After two calls of warm-up, `repeats` calls, fewer once `seconds` are spent (but three). On a CPU just one.
        """
        start = time.perf_counter()
        call()
        self.synchronize()
        first = time.perf_counter() - start
        samples: list[float] = []
        if self.smoke:
            samples = [first]
        else:
            call()
        while not self.smoke and len(samples) < self.repeats and (len(samples) < 3 or sum(samples) < self.seconds):
            samples.append(self.once(call, flush))
        samples = [sample / per for sample in samples]
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return {
            "median_s": statistics.median(samples), "min_s": min(samples), "q25_s": low, "q75_s": high,
            "n": len(samples), "first_s": first,
        }  # fmt: skip

    def time_graph(self, call: Callable[[], Any]) -> dict[str, Any]:
        """`time` of a call replayed as a CUDA graph: the device's share, without launches from Python."""
        if self.smoke:
            return {"status": "no CUDA graphs on a CPU"}
        try:
            replay = capture(call)
        except Exception as error:  # a measurement beside the others: its failure is a result
            return {"status": f"not captured: {short(error)}"}
        return {"status": "ok"} | self.time(replay)


def capture(call: Callable[[], Any], warm_ups: int = 2) -> Callable[[], None]:
    """A CUDA graph of a call, ready to be replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def short(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# --- attention alone --------------------------------------------------------------------------------------------------

MODULE = SimpleNamespace(is_causal=True, training=False)


@dataclass
class Inputs:
    """Of one layer's attention: leaves [B, H, N, D], [B, H, N, R] and [B, H, N] by name, as a model lays them out."""

    tensors: dict[str, torch.Tensor]
    window: int | None

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tensors["query"], self.tensors["key"], self.tensors["value"]

    def stage(self, stage: str) -> ComposeWeights:
        """Weights of "pre" or "post"."""
        sides = {}
        for side in ("query", "key"):
            parts = [self.tensors.get(f"{stage}.{side}.{part}") for part in ("down", "up", "gate")]
            sides[side] = SideWeights.of(*parts) if any(part is not None for part in parts) else None
        return ComposeWeights(**sides)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """New leaves of another dtype."""
        return Inputs({name: t.detach().to(dtype).requires_grad_() for name, t in self.tensors.items()}, self.window)


def make_inputs(
    bench: Bench, config: DCFormerConfig, tokens: int, window: int | None, queries: int | None = None
) -> Inputs:
    """Random inputs of one sequence. Down-projections have the norm that models give them; composition does much."""
    generator = torch.Generator(bench.device).manual_seed(SEED)
    heads, dim, rank, queries = config.num_attention_heads, config.head_dim, config.compose_rank, queries or tokens
    where = {"device": bench.device, "dtype": torch.float32, "generator": generator}
    tensors = {
        name: torch.randn(1, length, heads, dim, **where).to(bench.dtype).transpose(1, 2)
        for name, length in (("query", queries), ("key", tokens), ("value", tokens))
    }
    lengths = {"query": queries, "key": tokens}
    for stage, side in config.compose_generators:
        shape = (1, heads, lengths[side])
        if config.compose_projection:
            tensors[f"{stage}.{side}.down"] = torch.randn(*shape, rank, **where).to(bench.dtype)
            tensors[f"{stage}.{side}.up"] = (0.1 * torch.randn(*shape, rank, **where)).to(bench.dtype)
        tensors[f"{stage}.{side}.gate"] = torch.tanh(0.3 * torch.randn(*shape, **where)).to(bench.dtype)
    return Inputs({name: t.detach().requires_grad_() for name, t in tensors.items()}, window)


def ours(inputs: Inputs, **options: Any) -> torch.Tensor:
    """The fused kernels: [B, H, T, D]."""
    pre, post, window = inputs.stage("pre"), inputs.stage("post"), inputs.window
    return kernels.composed_attention(*inputs.states, pre, post, sliding_window=window, **options)


def eager(inputs: Inputs) -> torch.Tensor:
    """The definition: [B, T, H, D]."""
    scale, pre, post = inputs.tensors["query"].shape[-1] ** -0.5, inputs.stage("pre"), inputs.stage("post")
    window = inputs.window
    return eager_attention(MODULE, *inputs.states, None, scale, pre=pre, post=post, sliding_window=window)[0]


def chunked(inputs: Inputs) -> torch.Tensor:
    """Plain torch, linear in memory: [B, T, H, D]."""
    scale, pre, post = inputs.tensors["query"].shape[-1] ** -0.5, inputs.stage("pre"), inputs.stage("post")
    window = inputs.window
    return chunked_attention(MODULE, *inputs.states, None, scale, pre=pre, post=post, sliding_window=window)[0]


def flash(inputs: Inputs) -> torch.Tensor:
    """Plain attention, no composition and no window: torch's own FlashAttention 2."""
    with nullcontext() if inputs.tensors["query"].device.type == "cpu" else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*inputs.states, is_causal=True)


def flex(bench: Bench, tokens: int, window: int | None) -> Callable[[Inputs], torch.Tensor]:
    """FlexAttention, compiled, with gates before the softmax and a block mask of who sees what: [B, H, T, D].

    The scores of a head times 1 + gate_q[t] + gate_k[s]: all of composition that does not mix heads. On a CPU, where it
    has no backward pass, it is not compiled.
    """
    reach = window or tokens
    mask = create_block_mask(
        lambda b, h, t, s: (t >= s) & (t - s < reach), None, None, tokens, tokens, device=bench.device
    )
    attend = flex_attention if bench.smoke else torch.compile(flex_attention, dynamic=False)

    def call(inputs: Inputs) -> torch.Tensor:
        query_gate, key_gate = (inputs.tensors[f"pre.{side}.gate"] for side in ("query", "key"))
        states = inputs.states
        if bench.smoke:
            query_gate, key_gate, *states = (t.detach() for t in (query_gate, key_gate, *states))
        gates = lambda score, b, h, t, s: score * (1 + query_gate[b, h, t] + key_gate[b, h, s])  # noqa: E731
        return attend(*states, score_mod=gates, block_mask=mask)

    return call


def both_passes(attend: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> Callable[[], Any]:
    """Forward and backward of all inputs, from a random gradient of the output."""
    leaves = [t for name, t in inputs.tensors.items() if attend is not flash or "." not in name]
    with torch.no_grad():
        grad = torch.randn_like(attend(inputs))
    return lambda: torch.autograd.grad(attend(inputs), leaves, grad)


def forward_only(attend: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> Callable[[], Any]:
    """The forward pass, nothing kept."""

    def call() -> None:
        with torch.no_grad():
            attend(inputs)

    return call


# --- checks -----------------------------------------------------------------------------------------------------------


def compare(
    found: dict[str, torch.Tensor], low: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """Whether results are as near to float64 as the definition in the same dtype is, times `FACTORS`, plus rounding.

    Args:
        found: what is checked, by name.
        low: the definition in `dtype`: its error is the yardstick.
        truth: the definition in float64.
        dtype: of the inputs; the rounding band is two units in its last place of the largest element, or the norm.

    Returns:
        status "ok" or "failed"; how much of the allowed error the worst tensor uses, and its name.
    """
    if not found.keys() == low.keys() == truth.keys():
        return {"status": "failed", "detail": f"results differ in kind: {sorted(found.keys() ^ truth.keys())}"}
    measures = (lambda t: t.abs().max(), torch.linalg.vector_norm)
    used = {}
    for name, exact in truth.items():
        for measure, factor in zip(measures, FACTORS[dtype], strict=True):
            error, yardstick = (float(measure(x[name].double() - exact)) for x in (found, low))
            allowed = factor * yardstick + 2 * torch.finfo(dtype).eps * float(measure(exact))
            share = error / allowed if allowed else (0.0 if error == 0 else math.inf)
            used[name] = max(used.get(name, 0.0), math.inf if math.isnan(share) else share)
    worst = max(used, key=lambda name: used[name])
    return {"status": "ok" if used[worst] <= 1 else "failed", "worst": worst, "share_of_allowed": used[worst]}


def checked_rows(bench: Bench, length: int) -> list[int]:
    """Queries that a check follows: all of them, or some at the start, in the middle and at the end."""
    if length <= CHECK_ALL:
        return list(range(length))
    third = CHECK_ROWS // 3
    middle = length // 2 - third // 2
    return [*range(third), *range(middle, middle + third), *range(length - (CHECK_ROWS - 2 * third), length)]


def check_attention(
    bench: Bench, size: str, window: int | None, tokens: int, composition: str, implementation: str = "ours"
) -> dict[str, Any]:
    """Output and all gradients of attention over a sequence, where the output's gradient is zero but for some queries.

    So the definition in float64 needs the maps of those queries only, and no length is too long to be checked.
    `implementation` may be "flex", on a CPU for its output alone.
    """
    config = bench.config(size, composition=composition)
    inputs = make_inputs(bench, config, tokens, window)
    rows = torch.tensor(checked_rows(bench, tokens), device=bench.device)
    position = torch.arange(tokens, device=bench.device)
    visible = position[None] <= rows[:, None]
    if window is not None:
        visible &= position[None] > rows[:, None] - window
    shape = (1, config.num_attention_heads, len(rows), config.head_dim)
    grad = torch.randn(shape, device=bench.device, dtype=torch.float32).to(bench.dtype)

    def definition(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        some = inputs.to(dtype)
        leaves = dict(some.tensors)
        part = {
            n: t if n.startswith("key") or n == "value" or ".key." in n else t[:, :, rows] for n, t in leaves.items()
        }
        at_rows = Inputs(part, None)
        scale, pre, post = config.head_dim**-0.5, at_rows.stage("pre"), at_rows.stage("post")
        out, _ = eager_attention(MODULE, *at_rows.states, visible[None, None], scale, pre=pre, post=post)
        out = out.transpose(1, 2)
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))
        return {"output": out.detach()} | {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}

    attend = flex(bench, tokens, window) if implementation == "flex" else partial(ours, save_maps=config.save_maps)
    out = attend(inputs)
    found, low, truth = {"output": out.detach()[:, :, rows]}, definition(bench.dtype), definition(torch.float64)
    if not out.requires_grad:  # FlexAttention on a CPU
        return compare(found, {"output": low["output"]}, {"output": truth["output"]}, bench.dtype)
    everywhere = torch.zeros_like(out).index_copy(2, rows, grad)
    grads = torch.autograd.grad(out, list(inputs.tensors.values()), everywhere)
    found |= {f"gradient of {n}": g for n, g in zip(inputs.tensors, grads, strict=True)}
    return compare(found, low, truth, bench.dtype)


def check_decode(bench: Bench, size: str, tokens: int, composition: str) -> dict[str, Any]:
    """`composed_decode` of one query over a cache with an unfilled end."""
    config = bench.config(size, composition=composition)
    inputs = make_inputs(bench, config, tokens, None, queries=1)
    visible = (torch.arange(tokens, device=bench.device) < tokens - tokens // 8).view(1, 1, 1, -1)
    scale = config.head_dim**-0.5
    with torch.no_grad():
        low, truth = (
            eager_attention(MODULE, *x.states, visible, scale, pre=x.stage("pre"), post=x.stage("post"))[0]
            for x in (inputs, inputs.to(torch.float64))
        )
        pre, post = inputs.stage("pre"), inputs.stage("post")
        found = kernels.composed_decode(*inputs.states, pre, post, scale=scale, visible=visible)
    found = found.transpose(1, 2)
    return compare({"output": found}, {"output": low}, {"output": truth}, bench.dtype)


def check_generator(bench: Bench, size: str, tokens: int, composition: str) -> dict[str, Any]:
    """`generate_weights` and its gradients against `DCFormerCompose`."""
    config = bench.config(size, composition=composition)
    torch.manual_seed(SEED)
    with torch.device(bench.device):
        module = DCFormerCompose(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        states = torch.randn(1, tokens, config.hidden_size)
    module, states = module.to(bench.dtype), states.to(bench.dtype)

    def results(function: Callable[..., Any], states: torch.Tensor) -> dict[str, torch.Tensor]:
        generated, _ = function(states)
        tensors = {
            f"{stage} {side} {part}": getattr(weights, part)
            for (stage, side), weights in generated.items()
            for part in ("down", "up", "gate")
        }
        generator = torch.Generator(bench.device).manual_seed(SEED)
        total = sum(
            (t * torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype)).sum() for t in tensors.values()
        )
        grads = torch.autograd.grad(total, list(module.parameters()))
        names = [f"gradient of {name}" for name, _ in module.named_parameters()]
        return {name: t.detach() for name, t in tensors.items()} | dict(zip(names, grads, strict=True))

    found, low = results(partial(kernels.generate_weights, compose=module), states), results(module, states)
    module = module.double()
    return compare(found, low, results(module, states.double()), bench.dtype)


def check_model(bench: Bench, size: str, composition: str) -> dict[str, Any]:
    """Logits, those of a decoding step and every gradient of a local and a global layer, behind a small vocabulary."""
    vocabulary = 64 if bench.smoke else 512
    config = bench.config(size, composition=composition, num_hidden_layers=2, vocab_size=vocabulary)
    model = build_model(bench, config)
    ids = make_ids(bench, config, 1, 9 if bench.smoke else 300)

    def results(attention: str) -> dict[str, torch.Tensor]:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            found = {"decoding logits": model(ids[:, -1:], past_key_values=cache, use_cache=True).logits}
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        found |= {"logits": output.logits.detach()}
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    found, low = results("dcformer_triton"), results("eager")
    model = model.double()
    return compare(found, low, results("eager"), bench.dtype)


CHECKS: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": check_attention,
    "decode": check_decode,
    "generator": check_generator,
    "model": check_model,
}


def ensure_checked(bench: Bench, kind: str, *arguments: Any) -> dict[str, Any]:
    """The check of a configuration, made now unless it has been: a cell of section "check"."""
    name = " ".join(str(a) for a in ("check", kind, *("global" if a is None else a for a in arguments)))
    if name not in bench.cells:
        bench.cells[name] = {"section": "check", "name": name} | guarded(
            bench, partial(CHECKS[kind], bench, *arguments)
        )
    return bench.cells[name]


# --- models -----------------------------------------------------------------------------------------------------------


def build_model(bench: Bench, config: DCFormerConfig, plain: bool = False) -> Any:
    """A randomly initialized causal language model on the device; `plain`: Llama with the same sizes, all global."""
    attention, built = "dcformer_triton", config
    if plain:
        attention = "sdpa"
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        shared = {name: getattr(config, name) for name in (*names.split(), "head_dim", "max_position_embeddings")}
        built = LlamaConfig(**shared, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tie_word_embeddings)
    torch.manual_seed(SEED)
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(built, attn_implementation=attention, dtype=bench.dtype)


def build_decoder(bench: Bench, config: DCFormerConfig, composition: str = "full") -> Any:
    """The same for decoding; ours with fused projections, Llama with or without one product for q, k and v."""
    model = build_model(bench, config, composition.startswith("plain")).eval()
    if composition == ONE_PRODUCT[1]:
        one_product(model)
    elif composition != PLAIN[1]:
        model.fuse_projections()
    return model


def make_ids(bench: Bench, config: DCFormerConfig, batch: int, tokens: int) -> torch.Tensor:
    """Random token ids [B, T], the same for every model."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(config.vocab_size, (batch, tokens), generator=generator).to(bench.device)


def compile_layers(bench: Bench, model: Any) -> None:
    """Compiles each layer by itself: as fast as the whole, and one compilation serves all layers of a kind."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in model.model.layers:
        layer.compile(backend=bench.backend, dynamic=False)


def compiled_frames() -> dict[str, Any]:
    """What torch.compile has done in this cell: frames compiled and seen, graph breaks by reason."""
    counters = torch._dynamo.utils.counters
    return {
        "compiled": counters["frames"].get("ok", 0),
        "frames": counters["frames"].get("total", 0),
        "graph_breaks": dict(counters["graph_break"]),
    }  # fmt: skip


def extrapolate(times: tuple[float, float], depths: tuple[int, int], layers: int) -> dict[str, float]:
    """Seconds of a layer, of the rest, and of a model with `layers` layers, from those of two depths."""
    layer = (times[1] - times[0]) / (depths[1] - depths[0])
    rest = times[0] - layer * depths[0]
    return {"layer_s": layer, "rest_s": rest, "full_s": rest + layers * layer}


def train(bench: Bench, size: str, pattern: str, composition: str, full_depth: bool = False) -> dict[str, Any]:
    """Tokens/s of training steps at T = 2048 (its prefix at the smaller depth shares weights and compiled layers)."""
    plain, tokens = (pattern, composition) == PLAIN, 12 if bench.smoke else 2048
    full = bench.config(size, pattern, composition)
    layers = full.num_hidden_layers
    depths = (layers,) if full_depth else bench.depth
    config = bench.config(size, pattern, composition, num_hidden_layers=depths[-1])
    model = build_model(bench, config, plain).train()
    compile_layers(bench, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not bench.smoke)
    batch = 2 * bench.batch
    while True:
        batch //= 2
        ids = make_ids(bench, config, batch, tokens)

        def step(ids: torch.Tensor = ids) -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        try:
            step()
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        optimizer.zero_grad(set_to_none=True)  # here, where the error no longer holds what it was about
        bench.clean()
        compile_layers(bench, model)
    timings, peaks = {}, {}
    for depth in sorted(depths, reverse=True):
        model.config.num_hidden_layers = depth  # the layers beyond it have no gradients, and the optimizer skips them
        timings[depth] = bench.time(step, flush=False)
        peaks[depth] = bench.peak(step)
    result: dict[str, Any] = {"batch": batch, "tokens": tokens, "layers": layers, "timings": timings, "peaks": peaks}
    result["parameters_built"] = model.num_parameters()
    result |= compiled_frames()
    medians = {depth: timing["median_s"] for depth, timing in timings.items()}
    if full_depth:
        result["full_s"] = medians[layers]
    else:
        result |= extrapolate((medians[depths[0]], medians[depths[1]]), bench.depth, layers)
    return result | {"tokens_per_s": batch * tokens / result["full_s"]}


def decoding_step(
    bench: Bench, model: Any, config: DCFormerConfig, forward: Callable | None = None
) -> tuple[Callable, Callable]:
    """A greedy decoding step behind a cached prompt, and what takes the cache back to the prompt's end.

    One function for all models: the token, its position and the cache are tensors that the step changes in place.
    `forward` runs the model in a step; the model, compiled, when not given.
    """
    ids = make_ids(bench, config, 1, bench.prompt)
    cache = StaticCache(config=model.config, max_cache_len=bench.prompt + bench.new_tokens + 16)
    if hasattr(model.config, "compose_rank"):
        use_static_layers(cache, model.config.sliding_window)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        first = model(ids, **options).logits[:, -1].argmax(-1, keepdim=True)
    token, position = first.clone(), torch.full((1, 1), bench.prompt, device=bench.device)
    forward = forward or torch.compile(model, backend=bench.backend, dynamic=False)

    def step() -> None:
        with torch.no_grad():
            logits = forward(token, position_ids=position, **options).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))
            position.add_(1)

    def rewind() -> None:
        token.copy_(first)
        position.fill_(bench.prompt)
        for layer in cache.layers:  # sliding layers stay full: as much work, other keys
            layer.cumulative_length.fill_(bench.prompt)

    step.token, step.cache = token, cache  # type: ignore[attr-defined]
    return step, rewind


def decode(bench: Bench, size: str, pattern: str, composition: str, full_depth: bool = False) -> dict[str, Any]:
    """Tokens/s of greedy decoding of one sequence, each step one CUDA graph, from models of two depths."""
    layers = bench.config(size, pattern, composition).num_hidden_layers
    result: dict[str, Any] = {"prompt": bench.prompt, "new_tokens": bench.new_tokens, "layers": layers, "timings": {}}
    for depth in (layers,) if full_depth else bench.depth:
        bench.clean()
        config = bench.config(size, pattern, composition, num_hidden_layers=depth)
        model = build_decoder(bench, config, composition)
        step, rewind = decoding_step(bench, model, config)
        for _ in range(1 if bench.smoke else 3):
            step()
        result |= compiled_frames() | {"mode": "compiled"}
        replay: Callable[[], Any] = step
        if not bench.smoke:
            try:
                replay, result["mode"] = capture(step), "compiled, CUDA graph"
            except Exception as error:  # both models must be in the same mode to be compared: the goals see to it
                result["not_captured"] = short(error)

        def sequence(replay: Callable[[], Any] = replay, rewind: Callable[[], Any] = rewind) -> None:
            rewind()
            for _ in range(bench.new_tokens):
                replay()

        result["timings"][depth] = bench.time(sequence, flush=False, per=bench.new_tokens)
        held = int(step.cache.get_seq_length())  # type: ignore[attr-defined]
        if held != bench.prompt + bench.new_tokens:
            raise RuntimeError(f"the cache holds {held} tokens, expected {bench.prompt + bench.new_tokens}")
        del model, step, rewind, replay, sequence
    medians = [timing["median_s"] for timing in result["timings"].values()]
    result |= {"full_s": medians[0]} if full_depth else extrapolate((medians[0], medians[1]), bench.depth, layers)
    return result | {"tokens_per_s": 1 / result["full_s"]}


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One measurement. `check`: kind and arguments of what must hold for its timings to count."""

    section: str
    name: str
    run: Callable[[], dict[str, Any]]
    coordinates: dict[str, Any]
    check: tuple | None = None


def op_cell(bench: Bench, size: str, window: int | None, tokens: int, implementation: str) -> dict[str, Any]:
    """Times, rates and peak memory of attention alone over one sequence."""
    how, _, part = implementation.partition(" ")
    config = bench.config(size, composition=part or "full")
    inputs = make_inputs(bench, config, tokens, window)
    attend: Callable
    if how == "flex":
        attend = flex(bench, tokens, window)
    elif how == "compiled":
        attend = torch.compile(eager, backend=bench.backend, dynamic=False)
    else:
        kept = partial(ours, save_maps=config.save_maps)
        attend = {"ours": kept, "eager": eager, "chunked": chunked, "flash": flash}[how]
    heads, dim, rank = config.num_attention_heads, config.head_dim, config.compose_rank
    rank, stages = (0, 1) if part == "gates" else (rank, 2)
    plain = how == "flash"
    pairs = visible_pairs(tokens, tokens, None if plain else window)
    channels = 0 if plain else stages * (2 * rank + 1)
    result: dict[str, Any] = {"compiling": implementation == "compiled"}
    flops = moved = 0
    for name, passes, backward in (("forward", forward_only, False), ("forward_backward", both_passes, True)):
        if how == "flex" and backward and bench.smoke:
            result[name] = {"status": "FlexAttention has no backward pass on a CPU"}
            continue
        estimate = expected_seconds(bench, size, window, tokens, implementation, name)
        if estimate is not None and estimate > bench.slowest:
            result[name] = {"status": f"skipped: would take about {estimate:.0f} s"}
            continue
        # without gradients no maps are kept
        call = partial(attend, inputs) if part == "kept" and not backward else passes(attend, inputs)
        before = bench.allocated()
        timing = bench.time(call)
        flops += attention_flops(pairs, heads, dim, backward)
        flops += 0 if plain else compose_flops(pairs, heads, rank, stages, backward=backward)
        moved += attention_bytes(1, heads, tokens, tokens, dim, channels, inputs.states[0].element_size(), backward)
        timing |= {"tflops": flops / timing["median_s"] / 1e12, "gb_per_s": moved / timing["median_s"] / 1e9}
        timing |= {"inputs_bytes": before, "peak_bytes": bench.peak(call)}
        if how in ("ours", "flash"):
            timing["graph"] = bench.time_graph(call)
        result[name] = timing
    return result


def expected_seconds(bench: Bench, size: str, window: int | None, tokens: int, how: str, pass_: str) -> float | None:
    """From the longest shorter sequence measured, by the square of its length; None where there is none."""
    known = [
        (cell["tokens"], cell[pass_]["median_s"])
        for cell in bench.cells.values()
        if (cell.get("section"), cell.get("size"), cell.get("window"), cell.get("implementation"))
        == ("op", size, window, how)
        and "median_s" in cell.get(pass_, {})
        and cell["tokens"] < tokens
    ]
    return max(known)[1] * (tokens / max(known)[0]) ** 2 if known else None


def memory_cell(bench: Bench, size: str, window: int | None, tokens: int, implementation: str) -> dict[str, Any]:
    """Peak memory of one forward and backward pass of attention, inputs and gradients included, and without them."""
    inputs = make_inputs(bench, bench.config(size), tokens, window)
    own = sum(t.nbytes for t in inputs.tensors.values())
    call = both_passes({"ours": ours, "eager": eager, "chunked": chunked, "flash": flash}[implementation], inputs)
    call()
    peak = bench.peak(call)
    return {"peak_bytes": peak, "inputs_bytes": own, "workspace_bytes": None if peak is None else peak - 2 * own}


def long_model_cell(bench: Bench, size: str, tokens: int, attention: str) -> dict[str, Any]:
    """A training pass (forward, backward) of two layers at full width over one long sequence."""
    config = bench.config(size, num_hidden_layers=2, max_position_embeddings=tokens)
    model = build_model(bench, config).train()
    model.set_attn_implementation(attention)
    ids = make_ids(bench, config, 1, tokens)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    return {"peak_bytes": bench.peak(step), "timing": bench.time(step, flush=False)}


def kernels_cell(bench: Bench, call: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Device time of each kernel in one call: count, microseconds, share, the longest first."""
    work = call()
    work()
    bench.synchronize()
    activity = torch.profiler.ProfilerActivity.CPU if bench.smoke else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        bench.synchronize()
    name = "self_cpu_time_total" if bench.smoke else "self_device_time_total"
    rows = [(event.key, event.count, float(getattr(event, name))) for event in profile.key_averages()]
    rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
    total = sum(row[2] for row in rows)
    if not total:
        raise RuntimeError("the profiler saw no kernel: is CUPTI allowed here?")
    top = [{"kernel": k[:120], "count": n, "us": us, "share": us / total} for k, n, us in rows[:25]]
    return {"total_us": total, "kernels": top}


def rates_cell(bench: Bench) -> dict[str, Any]:
    """What the device does in a second at its best, for bounds: memory, second-level cache, products.

    Bytes count what is read and what is written; products are of bfloat16, 8192 by 8192 by 8192.
    """
    large, small, side = (64, 64, 64) if bench.smoke else (1 << 31, 1 << 23, 8192)
    source = torch.zeros(large, dtype=torch.bfloat16, device=bench.device)
    target = torch.empty_like(source)
    near = torch.zeros(small, dtype=torch.bfloat16, device=bench.device)  # 16 MiB
    a, b = (torch.randn(side, side, device=bench.device).to(torch.bfloat16) for _ in range(2))
    turns = 1 if bench.smoke else 50

    def cached() -> None:
        for _ in range(turns):
            near.add_(1)

    calls: dict[str, tuple[float, Callable[[], Any]]] = {
        "memory_bytes": (2.0 * source.nbytes, lambda: target.copy_(source)),
        "cache_bytes": (2.0 * near.nbytes * turns, cached),
        "flops": (2.0 * side**3, lambda: a @ b),
    }
    timings = {name: bench.time_graph(call) for name, (_, call) in calls.items()}
    if bench.smoke:
        timings = {name: bench.time(call) for name, (_, call) in calls.items()}
    rates = {
        f"{name}_per_s": amount / timings[name]["median_s"]
        for name, (amount, _) in calls.items()
        if "median_s" in timings[name]
    }
    return {"timings": timings} | rates


def chunks_cell(bench: Bench, size: str, tokens: int) -> dict[str, Any]:
    """Forward and backward of attention in chunks of queries as usual, and in chunks that fit second-level cache."""
    inputs = make_inputs(bench, bench.config(size), tokens, None)
    small = 1 << 12 if bench.smoke else torch.cuda.get_device_properties(0).L2_cache_size
    before, after = (bench.time(both_passes(partial(ours, chunk_bytes=n), inputs)) for n in (None, small))
    faster = before["median_s"] / after["median_s"]
    return {"chunk_bytes": small, "timings": {"usual": before, "small": after}, "faster": faster}


def kernels_calls(bench: Bench, size: str) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What section "kernels" looks into, by name."""
    tokens, config = 12 if bench.smoke else 2048, bench.config(size)

    def attention(window: int | None, tokens: int = tokens, factor: float = 1) -> Callable[[], Any]:
        inputs = make_inputs(bench, config, tokens, window)
        inputs.tensors["query"].data.mul_(factor)
        return both_passes(ours, inputs)

    def training(plain: bool) -> Callable[[], Any]:
        model = build_model(bench, bench.config(size, num_hidden_layers=2), plain).train()
        compile_layers(bench, model)
        ids = make_ids(bench, config, 1 if bench.smoke else 4, tokens)
        return lambda: model(ids, labels=ids, use_cache=False).loss.backward()

    def decoding(plain: bool) -> Callable[[], Any]:
        short_config = bench.config(size, num_hidden_layers=2)
        composition = ONE_PRODUCT[1] if plain else "full"
        return decoding_step(bench, build_decoder(bench, short_config, composition), short_config)[0]

    window = config.sliding_window
    calls: dict[str, Callable[[], Callable[[], Any]]] = {"attention, global": partial(attention, None)}
    if not bench.smoke:
        calls |= {f"attention, window {window}": partial(attention, window)}
        calls |= {"attention, global, T = 1024": partial(attention, None, 1024)}
        for what, work in (("training", training), ("decoding", decoding)):
            calls |= {f"{what}, 2 layers": partial(work, False), f"{what}, 2 layers, plain": partial(work, True)}
    return calls | {"attention, global, scores of up to 50": partial(attention, None, factor=8)}


def tune_cell(bench: Bench, size: str, window: int | None, tokens: int) -> dict[str, Any]:
    """Time before and after the search for tiles that DCFORMER_AUTOTUNE=1 asks for, and the tiles found.

    They go to `tiles.json` in the output folder, or in DCFORMER_CACHE where that is set. What they compute is checked.
    """
    tuning = import_module("dcformer.kernels.tuning")
    if bench.smoke or not callable(getattr(tuning, "autotune_is_on", None)):
        why = "tiles of the interpreter are fixed" if bench.smoke else "dcformer.kernels.tuning has no autotune_is_on"
        return {"status": "skipped", "detail": why}
    call = both_passes(ours, make_inputs(bench, bench.config(size), tokens, window))
    folder = os.environ.get("DCFORMER_CACHE", str(bench.out))
    with patch.dict(os.environ, {"DCFORMER_CACHE": folder, "DCFORMER_AUTOTUNE": "0"}):
        before = bench.time(call)
        os.environ["DCFORMER_AUTOTUNE"] = "1"
        after = bench.time(call)  # the first call searches
        check = check_attention(bench, size, window, tokens, "full")
        tiles = json.loads(tuning.cache_file().read_text())
    result = {"status": "ok" if check["status"] == "ok" else "invalid", "before": before, "after": after}
    return result | {"check": check, "faster": before["median_s"] / after["median_s"], "tiles": tiles}


def plan(bench: Bench, args: argparse.Namespace) -> Iterator[Cell]:
    """All cells of the sections asked for, in order; within a section the ones that goals are about come first."""
    window = bench.config(args.sizes[0]).sliding_window
    windows: dict[int | None, str] = {None: "global", window: f"window {window}"}
    op_sizes = [size for size in args.sizes if size != "13b" or args.sizes == ["13b"]]
    op_sizes.sort(key=lambda size: size != "6.9b")
    compositions = MODELS[: 1 if bench.smoke else None]
    short_length = 17 if bench.smoke else 1000  # no multiple of a tile

    def cell(section: str, run: Callable, *arguments: Any, check: tuple | None = None, **coordinates: Any) -> Cell:
        words = (windows.get(v, "global") if k == "window" else str(v) for k, v in coordinates.items())
        return Cell(section, " ".join([section, *words]), partial(run, bench, *arguments), coordinates, check)

    if "check" in args.sections:
        listed: list[tuple] = []
        for size in op_sizes:
            listed += [("attention", size, w, short_length, c) for c in compositions for w in windows]
            listed += [(kind, size, short_length, c) for c in compositions for kind in ("decode", "generator")]
        listed += [("model", size, c) for c in compositions for size in args.sizes]
        for kind, *arguments in listed:
            words = " ".join("global" if a is None else str(a) for a in (kind, *arguments))
            yield Cell("check", f"check {words}", partial(CHECKS[kind], bench, *arguments), {"kind": kind})
    if "op" in args.sections:
        for tokens in args.lengths:
            for size in op_sizes:
                for w in windows:
                    for how in IMPLEMENTATIONS:
                        if (how == "flash" and w is not None) or (
                            how == "ours kept" and w is None and tokens > MOST_KEPT
                        ):
                            continue
                        named = {"size": size, "window": w, "tokens": tokens, "implementation": how}
                        check: tuple | None = ("attention", size, w, tokens, how.partition(" ")[2] or "full")
                        if how == "flex gates":
                            check = (*check, "flex")
                        elif not how.startswith("ours"):
                            check = None
                        yield cell("op", op_cell, size, w, tokens, how, check=check, **named)
    if "memory" in args.sections:
        size, longest = op_sizes[-1], max(args.lengths)
        lengths = sorted(t for t in args.lengths if t >= 2048 or bench.smoke)
        ends = list(dict.fromkeys((lengths or [longest])[:: max(1, len(lengths) - 1)]))
        jobs: list[tuple[int | None, int, str]] = [(None, tokens, "ours") for tokens in ends]
        jobs += [(None, longest, "eager"), *((None, tokens, "ours") for tokens in lengths if tokens not in ends)]
        jobs += [(window, tokens, "ours") for tokens in lengths if not bench.smoke]
        for attention in ("dcformer_triton", "eager"):
            named = {"kind": "model", "size": size, "tokens": longest, "implementation": attention}
            yield cell("memory", long_model_cell, size, longest, attention, **named)
        for w, tokens, how in jobs:
            named = {"kind": "attention", "size": size, "window": w, "tokens": tokens, "implementation": how}
            yield cell("memory", memory_cell, size, w, tokens, how, **named)
    for section, run, variants in (("train", train, VARIANTS), ("decode", decode, DECODED)):
        if section not in args.sections:
            continue
        variants = variants[: 3 if bench.smoke else None]
        depths = [(size, v, False) for v in variants[:3] for size in args.sizes]
        whole = args.sizes if bench.full_depth else [size for size in args.sizes if size == "2.8b"]
        depths += [(size, v, True) for size in whole for v in variants[:2]]
        depths += [(size, v, False) for v in variants[3:] for size in args.sizes]
        for size, (pattern, composition), full in depths:
            named = {"size": size, "pattern": pattern, "composition": composition, "depth": "full" if full else "few"}
            check = None if composition.startswith("plain") else ("model", size, composition)
            yield cell(section, run, size, pattern, composition, full, check=check, **named)
    if "kernels" in args.sections:
        size, calls = op_sizes[0], kernels_calls(bench, op_sizes[0])
        *alone, last = (what for what in calls if what.startswith("attention"))
        for what in alone:
            yield cell("kernels", kernels_cell, calls[what], size=size, what=what)
        yield cell("kernels", rates_cell, what="rates")
        yield cell("kernels", chunks_cell, size, 17 if bench.smoke else 2048, size=size, what="chunks")
        for what in [what for what in calls if what not in (*alone, last)]:
            yield cell("kernels", kernels_cell, calls[what], size=size, what=what)
    if "tune" in args.sections:
        for size in op_sizes:
            for w in windows:
                yield cell("tune", tune_cell, size, w, 4096, size=size, window=w)
    if "kernels" in args.sections:  # after it, all that the process runs has scores in float32
        yield cell("kernels", kernels_cell, calls[last], size=op_sizes[0], what=last)


# --- goals ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """What is aimed for: a ratio of measured values, at least or at most `bound`. `paper`: the paper's own figure."""

    what: str
    bound: float
    ratio: Callable[[dict[str, dict[str, Any]]], float | None]
    at_least: bool = True
    paper: float | None = None


def find(cells: dict[str, dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The cell with these coordinates, if its figures count."""
    for cell in cells.values():
        if cell["status"] == "ok" and all(name in cell and cell[name] == value for name, value in wanted.items()):
            return cell
    return None


def speed_ratio(cells: dict, section: str, size: str, variant: tuple[str, str]) -> float | None:
    """Tokens/s of a variant over the plain Transformer's, under equal conditions only."""
    named = {"section": section, "size": size, "depth": "few"}
    ours_, plain = (find(cells, **named, pattern=p, composition=c) for p, c in (variant, BASELINES[section]))
    if not ours_ or not plain or any(ours_.get(k) != plain.get(k) for k in ("batch", "mode", "tokens", "prompt")):
        return None
    return ours_["tokens_per_s"] / plain["tokens_per_s"]


def op_ratio(cells: dict, of: dict[str, Any], over: dict[str, Any]) -> float | None:
    """Time of forward and backward of one op cell over another's."""
    one, other = (find(cells, section="op", **named) for named in (of, over))
    if not one or not other:
        return None
    times = [cell.get("forward_backward", {}).get("median_s") for cell in (one, other)]
    return times[0] / times[1] if all(times) else None


def memory_growth(cells: dict) -> float | None:
    """How much faster than the length the peak memory of attention grows, from 2k to 32k tokens."""
    named = {"section": "memory", "kind": "attention", "size": "2.8b", "window": None, "implementation": "ours"}
    one, other = (find(cells, **named, tokens=tokens) for tokens in (2048, 32768))
    if not one or not other or not one["peak_bytes"]:
        return None
    return other["peak_bytes"] / one["peak_bytes"] / 16


def long_run(cells: dict) -> float | None:
    """1 where ours went through 32k tokens at the width of 2.8B and eager ran out of memory, 0 where not."""
    states = [
        next((c["status"] for c in cells.values() if c.get("kind") == "model" and c["section"] == "memory"
              and c["tokens"] == 32768 and c["size"] == "2.8b" and c["implementation"] == how), None)
        for how in ("dcformer_triton", "eager")
    ]  # fmt: skip
    return None if None in states or "skipped" in states else float(states == ["ok", "out of memory"])


def op_at(size: str, tokens: int, implementation: str, window: int | None = None) -> dict[str, Any]:
    return {"size": size, "tokens": tokens, "implementation": implementation, "window": window}


GOALS = (
    *(
        Goal(f"training tokens/s over Transformer++, {size}, T = 2048, LG, {what}", bound,
             partial(speed_ratio, section="train", size=size, variant=("LG", "full")), paper=paper)
        for size, must, strive, paper in (
            ("2.8b", 0.78, 0.88, 0.745), ("6.9b", 0.90, 0.93, 0.831), ("13b", 0.88, 0.94, 0.844)
        )
        for what, bound in (("must", must), ("strive", strive))
    ),
    *(
        Goal(f"training tokens/s over Transformer++, {size}, T = 2048, LG, maps of few layers kept", bound,
             partial(speed_ratio, section="train", size=size, variant=("LG", "kept")))
        for size, bound in (("2.8b", 0.78), ("6.9b", 0.90), ("13b", 0.88))
    ),
    *(
        Goal(f"decoding tokens/s over Transformer++ with one product for q, k and v, {size}, LG", bound,
             partial(speed_ratio, section="decode", size=size, variant=("LG", "full")), paper=paper)
        for size, bound, paper in (("2.8b", 0.96, 0.879), ("6.9b", 0.98, 0.945))
    ),
    *(
        Goal(f"decoding tokens/s over Transformer++ with one product for q, k and v, 6.9b, LGLL, {composition}", 1.05,
             partial(speed_ratio, section="decode", size="6.9b", variant=("LGLL", composition)), paper=paper)
        for composition, paper in (("query", 1.033), ("full", None))
    ),
    Goal("attention, 6.9b, T = 4096, global: compiled eager over ours", 6.0,
         partial(op_ratio, of=op_at("6.9b", 4096, "compiled"), over=op_at("6.9b", 4096, "ours"))),
    Goal("attention, 6.9b, T = 4096, global: ours over flash", 6.0,
         partial(op_ratio, of=op_at("6.9b", 4096, "ours"), over=op_at("6.9b", 4096, "flash")), at_least=False),
    Goal("attention, 6.9b, T = 8192: our global over our window 256", 4.0,
         partial(op_ratio, of=op_at("6.9b", 8192, "ours"), over=op_at("6.9b", 8192, "ours", WINDOW))),
    Goal("attention, 2.8b: growth of peak memory over that of T, 2k to 32k", 1.1, memory_growth, at_least=False),
    Goal("2 layers of 2.8b train on 32k tokens where eager runs out of memory (1: so it is)", 1.0, long_run),
)  # fmt: skip


def judge(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal with what was reached."""
    out = []
    for goal in GOALS:
        value = goal.ratio(cells)
        met = None if value is None else value >= goal.bound if goal.at_least else value <= goal.bound
        sign = ">=" if goal.at_least else "<="
        reached = "not measured" if met is None else "yes" if met else "no"
        out.append({"what": goal.what, "goal": f"{sign} {goal.bound}", "value": value, "reached": reached,
                    "paper": goal.paper})  # fmt: skip
    return out


# --- running ----------------------------------------------------------------------------------------------------------


def guarded(bench: Bench, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a cell returns, with its wall time; errors become results."""
    start = time.perf_counter()
    try:
        result = {"status": "ok"} | run()
    except torch.OutOfMemoryError as error:
        result = {"status": "out of memory", "detail": short(error)}
    except Exception as error:  # whatever it is, the next cell may do better
        result = {"status": "error", "detail": short(error)}
    try:
        bench.clean()
    except Exception as error:
        result = {
            "status": "error",
            "detail": f"{result.get('detail', '')} {short(error)}".strip(),
            "context_lost": True,
        }
    return result | {"wall_s": time.perf_counter() - start}


def run_cell(bench: Bench, cell: Cell) -> dict[str, Any]:
    """A cell's record. Timings whose check has failed are kept under status "invalid"."""
    verdict = ensure_checked(bench, *cell.check) if cell.check else {"status": "ok"}
    if verdict.get("context_lost"):
        record = {"status": "error", "detail": "not run: its check lost the device", "context_lost": True}
    else:
        record = guarded(bench, cell.run)
    record = {"section": cell.section, "name": cell.name} | cell.coordinates | record
    found = overflow.beyond(bench.numbered_device)
    if found:  # its maps are not the usual ones
        record["beyond"] = [what.name for what in overflow.Beyond if what in found]
    if verdict["status"] != "ok" and record["status"] == "ok":
        record |= {"status": "invalid", "detail": f"{verdict['name']}: {verdict['status']}"}
    return record


def run_suite(bench: Bench, args: argparse.Namespace, content: dict[str, Any], path: Path) -> bool:
    """Runs what there is time for, writing the file after each cell. True when the device's context was lost."""
    bench.cells = {cell["name"]: cell for cell in content["cells"]}

    def save() -> None:
        content["cells"] = list(bench.cells.values())
        content["goals"] = judge(bench.cells)
        write_json(path, content)

    cells = list(plan(bench, args))
    shares = {name: share for name, share in SHARES.items() if name in args.sections}
    limits, used = {}, 0.0
    for name, share in shares.items():
        used += share or 0.05
        limits[name] = used
    limits = {name: args.budget_s * limit / used for name, limit in limits.items()}
    start, last = time.perf_counter(), {}
    for cell in (bar := tqdm(cells, desc="cells", disable=None)):
        known = bench.cells.get(cell.name, {}).get("status")
        if known not in (None, "skipped"):
            continue
        bar.set_postfix_str(cell.name)
        spent = time.perf_counter() - start
        if spent > limits[cell.section] or spent + last.get(cell.section, 0.0) > args.budget_s:
            record = {"status": "skipped", "detail": f"no time left after {spent:.0f} s: --resume goes on from here"}
            record["out_of_time"] = True
            bench.cells[cell.name] = {"section": cell.section, "name": cell.name} | cell.coordinates | record
            save()
            continue
        unfinished = {"section": cell.section, "name": cell.name, "status": "unfinished"} | cell.coordinates
        bench.cells[cell.name] = unfinished  # what a killed run was at; --resume does not try it again
        save()
        bench.cells[cell.name] = record = run_cell(bench, cell)
        last[cell.section] = time.perf_counter() - start - spent
        tqdm.write(f"{cell.name}: {summary(record) or record['status']}", file=sys.stderr)
        save()
        if record.get("context_lost"):
            return True
    save()
    return False


def first_line(*command: str) -> str | None:
    """Of a program's output; None where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip().splitlines() or [""])[0]


def describe(bench: Bench) -> dict[str, Any]:
    """Device, driver, clocks, versions, commit and sources, as far as they can be found out."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,compute_mode"
    out: dict[str, Any] = {
        "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
        **{name: installed(name) for name in ("torch", "triton", "transformers")}, "torch_cuda": torch.version.cuda,
        "commit": first_line("git", "rev-parse", "HEAD"),
        "changed_since_commit": bool(first_line("git", "status", "--porcelain", "--", "src", "benchmarks")),
        "sources": digest(),
        "device": "CPU, Triton's interpreter",
    }  # fmt: skip
    if not bench.smoke:
        properties = torch.cuda.get_device_properties(0)
        out |= {
            "device": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count, "memory_gib": properties.total_memory / GIB,
        }  # fmt: skip
        line = first_line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader") or ""
        out |= dict(zip(query.split(","), line.split(", "), strict=False))
    return out


def digest() -> str:
    """Of the package's source: what is measured, also where there is no git."""
    found = hashlib.sha256()
    for path in sorted((REPOSITORY / "src" / "dcformer").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def differences(one: dict[str, Any], other: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Entries that are not the same, in words."""
    return [f"{name} {one.get(name)}, now {other.get(name)}" for name in names if one.get(name) != other.get(name)]


def changed_setup(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two descriptions (`describe`) differ in that figures depend on, in words."""
    names = ("device", "driver_version", "python", "torch", "triton", "transformers", "sources")
    return differences(one, other, names)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in [header, *rows]
    ]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def summary(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    parts = [cell["status"]] if cell["status"] != "ok" else []
    for name in ("forward", "forward_backward"):
        if "median_s" in (timing := cell.get(name, {})):
            part = f"{name} {1e3 * timing['median_s']:.3g} ms, {timing['tflops']:.3g} TFLOP/s"
            part += f", {timing['gb_per_s']:.3g} GB/s"
            if timing["peak_bytes"]:
                part += f", peak {timing['peak_bytes'] / GIB:.2f} GiB"
            if "median_s" in timing.get("graph", {}):
                part += f" (as a graph {1e3 * timing['graph']['median_s']:.3g} ms)"
            parts.append(part)
        elif "status" in timing:
            parts.append(f"{name} {timing['status']}")
    if "tokens_per_s" in cell:
        together = f", {cell['batch']} sequences" if "batch" in cell else ""
        parts.append(f"{cell['tokens_per_s']:.5g} tokens/s{together}")
    if "layer_s" in cell:
        parts.append(f"{1e3 * cell['layer_s']:.4g} ms a layer, {1e3 * cell['rest_s']:.4g} ms the rest")
    if cell["section"] == "memory" and cell.get("peak_bytes"):
        parts.append(f"peak {cell['peak_bytes'] / GIB:.2f} GiB")
    if "share_of_allowed" in cell:
        parts.append(f"{cell['share_of_allowed']:.2f} of the error allowed ({cell['worst']})")
    if "kernels" in cell:
        parts.append(f"{cell['total_us']:.0f} us")
    if "faster" in cell:
        over = "usual chunks" if cell.get("what") == "chunks" else "the table's tiles"
        parts.append(f"{cell['faster']:.2f} times as fast as with {over}")
    for name, unit in (("memory_bytes", "TB/s memory"), ("cache_bytes", "TB/s cache"), ("flops", "TFLOP/s")):
        if (rate := cell.get(f"{name}_per_s")) is not None:
            parts.append(f"{rate / 1e12:.3g} {unit}")
    return "; ".join([*parts, *([cell["detail"]] if "detail" in cell else [])])


def report(content: dict[str, Any]) -> str:
    """Everything as Markdown."""
    cells = content["cells"]
    lines = [", ".join(f"{name} {value}" for name, value in content["about"].items() if value is not None), ""]
    for section in SECTIONS:
        rows = [[c["name"].removeprefix(section).strip(), summary(c)] for c in cells if c["section"] == section]
        rows = [row for row in rows if not row[1].startswith("skipped")]
        if rows:
            lines += [f"### {section}", "", f"{SECTIONS[section]}.", "", *table(["", ""], rows), ""]
        for cell in cells:
            if cell["section"] == section == "kernels" and "kernels" in cell:
                shown = [[k["kernel"], str(k["count"]), f"{k['us']:.0f}", f"{k['share']:.0%}"] for k in cell["kernels"]]
                lines += [cell["name"], "", *table(["kernel", "count", "us", "share"], shown), ""]
    goals = [
        [g["what"], g["goal"], "-" if g["value"] is None else f"{g['value']:.3g}", g["reached"], str(g["paper"] or "-")]
        for g in content["goals"]
    ]
    lines += ["### Goals", "", *table(["", "goal", "measured", "reached", "paper"], goals), ""]
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell["status"]] = counts.get(cell["status"], 0) + 1
    lines.append("Cells: " + ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) + ".")
    skipped = [c["name"] for c in cells if c["status"] == "skipped"]
    lines += [f"Skipped: {', '.join(skipped)}."] if skipped else []
    bad = [f"{c['name']} ({c['status']})" for c in cells if c["status"] not in ("ok", "skipped", "out of memory")]
    return "\n".join(lines + ([f"Not as they should be: {', '.join(bad)}."] if bad else []))


def draw(content: dict[str, Any], path: Path) -> bool:
    """Plots attention's time against the length, and tokens/s over the plain Transformer's; False: no matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = {cell["name"]: cell for cell in content["cells"]}
    op = [c for c in cells.values() if c["section"] == "op" and c["status"] == "ok" and c.get("forward_backward")]
    panels = sorted({(c["size"], c["window"] or 0) for c in op})
    figure, axes = pyplot.subplots(1, len(panels) + 1, figsize=(4.2 * (len(panels) + 1), 4), squeeze=False)
    for axis, (size, window) in zip(axes[0], panels, strict=False):
        for how in IMPLEMENTATIONS:
            points = sorted(
                (c["tokens"], 1e3 * c["forward_backward"]["median_s"])
                for c in op
                if (c["size"], c["window"] or 0, c["implementation"]) == (size, window, how)
                and "median_s" in c["forward_backward"]
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=how)
        axis.set(title=f"{size}, {f'window {window}' if window else 'global'}", xscale="log", yscale="log")
        axis.set(xlabel="tokens", ylabel="forward and backward, ms")
        axis.legend()
    bars = {
        f"{section} {size} {' '.join(variant)}": ratio
        for section, variants in (("train", VARIANTS), ("decode", DECODED))
        for size in content["options"]["sizes"]
        for variant in variants
        if variant != BASELINES[section] and (ratio := speed_ratio(cells, section, size, variant)) is not None
    }
    axes[0][-1].barh(list(bars), list(bars.values()))
    axes[0][-1].axvline(1.0, color="black", linewidth=0.8)
    axes[0][-1].set(title="tokens/s over the plain Transformer")
    figure.suptitle(content["about"]["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def sequences() -> int:
    """How many a training step has here: as many with kept maps as without, which could not be compared otherwise."""
    is_small = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 * 2**30
    return 4 if is_small else 8


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sizes", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="T")
    parser.add_argument("--budget-s", type=float, default=430, help="no cell begins after that many seconds")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu_suite", metavar="DIR")
    parser.add_argument(
        "--batch", type=int, default=sequences(), help="sequences of a training step; halved where they do not fit"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of a measurement")
    parser.add_argument("--full-depth", action="store_true", help="all sizes with all their layers, not only 2.8b")
    parser.add_argument("--resume", action="store_true", help="keep the cells that DIR already holds")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU in Triton's interpreter")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw an earlier run's JSON, measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print an earlier run's JSON, measure nothing")
    parser.add_argument("--restarts", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name, numbers in (("lengths", args.lengths), ("batch", [args.batch]), ("repeats", [args.repeats])):
        if min(numbers) < 1:
            parser.error(f"--{name} {min(numbers)}: expected at least 1")
    if not args.budget_s >= 0:
        parser.error(f"--budget-s {args.budget_s}: expected seconds, at least 0")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder, this is a file")
    for option, path in (("plot", args.plot), ("markdown", args.markdown)):
        if path:
            try:
                setattr(args, option, (path, read_json(path, {"about", "cells"})))
            except ValueError as error:
                parser.error(f"--{option} {path}: {error}")
    if args.smoke:
        args.sizes, args.lengths = ["smoke"], [17]
    return args


def earlier_cells(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of an earlier run of the same setup, which this one goes on with.

    Raises:
        ValueError: where nothing can be read, or figures were measured in another way: one page says how all were.
    """
    earlier = read_json(path, {"about", "options", "cells"})
    if not (isinstance(earlier["about"], dict) and isinstance(earlier["options"], dict)):
        raise ValueError("expected the JSON of an earlier run, whose about and options are objects")
    changed = changed_setup(earlier["about"], content["about"])
    changed += differences(earlier["options"], content["options"], ("batch", "repeats", "full_depth", "smoke"))
    if changed:
        raise ValueError(f"it was measured with another setup: {'; '.join(changed)}. Name another --out")
    return earlier["cells"]


def let_first_passes_go_by(device: torch.device) -> None:
    """A process waits for the marks of its first passes. What is timed are later ones, which wait for nothing."""
    overflow.mark_of(device, overflow.Beyond.SCORES)  # there are marks to look at
    for _ in range(overflow.FIRST):
        overflow.look(device)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. 1 when a check failed or a cell ended in an error, 2 when there is no device to run on."""
    args = parse_arguments(arguments)
    if args.plot:
        path, content = args.plot
        if not draw(content, path.with_suffix(".png")):
            print("no plot: matplotlib is not installed", file=sys.stderr)
            return 2
        return 0
    if args.markdown:
        print(report(args.markdown[1]))
        return 0
    if args.smoke and os.environ.get("TRITON_INTERPRET") != "1":
        print("--smoke needs TRITON_INTERPRET=1 in the environment before Python starts", file=sys.stderr)
        return 2
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device here: run this on a GPU, or with --smoke", file=sys.stderr)
        return 2
    bench = Bench(smoke=args.smoke, repeats=args.repeats, batch=args.batch, full_depth=args.full_depth, out=args.out)
    if args.smoke:
        bench = Bench(smoke=True, batch=1, prompt=9, new_tokens=2, depth=(1, 2), full_depth=args.full_depth)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {args.out} cannot be made: {error}", file=sys.stderr)
        return 2
    path, start = args.out / "gpu_suite.json", time.perf_counter()
    options = {name: value for name, value in vars(args).items() if name not in ("out", "plot", "markdown")}
    content: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "options": options}
    content |= {"about": describe(bench), "goals": [], "cells": []}
    if args.resume and path.exists():
        try:
            content["cells"] = earlier_cells(path, content)
        except ValueError as error:
            print(f"--resume {path}: {error}", file=sys.stderr)
            return 2
    let_first_passes_go_by(bench.numbered_device)
    lost = run_suite(bench, args, content, path)
    if lost and args.restarts < 5:
        left = max(0.0, args.budget_s - (time.perf_counter() - start))
        given = list(sys.argv[1:] if arguments is None else arguments)
        again = [*given, "--resume", "--restarts", str(args.restarts + 1), "--budget-s", str(left)]
        print("the device's context is lost: starting anew for the cells that are left", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *again])
    print(report(content))
    plotted = draw(content, path.with_suffix(".png"))
    name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    print(
        f"\nWritten: {name}{', and a plot beside it' if plotted else '; no matplotlib here, so no plot (--plot later)'}"
    )
    return int(any(cell["status"] in ("failed", "error", "invalid", "unfinished") for cell in content["cells"]))


if __name__ == "__main__":
    sys.exit(main())
