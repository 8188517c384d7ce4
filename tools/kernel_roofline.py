"""How fast the kernels could be: an ESTIMATE from arithmetic and compiled code, not a measurement.

`make kernel-roofline`, or with `ARGS=--json`. For every kernel of attention, fully composed with R = 2 in bfloat16:
what it asks of tensor cores, of the schedulers that issue instructions, of the units for exp, of L2 and of memory, and
which of them takes longest. The sum over kernels is the least time that this design can take on a device of such
figures. Then models: linear parts at an assumed efficiency, plain attention as a fused kernel does it, and what share
of their bounds the kernels must reach to meet a goal.

What it leaves out: launches of the training pass, tails of grids, dependencies between instructions, norms, rotary
embeddings, the optimizer. Memory is counted as if nothing stayed in L2 between kernels. Products count the maps and
states that they stream; with `operands` also what their tiles read from L2 again: the truth lies between.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch

from dcformer import DCFormerConfig
from dcformer.kernels.balance import keys_of_a_program, lengths
from dcformer.kernels.launch import BESIDES, padded
from dcformer.kernels.layout import Layout, Part
from dcformer.kernels.overflow import NOTHING, Beyond
from dcformer.kernels.problem import head_blocks
from dcformer.kernels.sizes import ceil_div, round_up
from dcformer.kernels.triton.heads import matrix_side
from dcformer.kernels.tuning import Tile, choose, resident_programs

RANK = 2
CHANNELS = 2 * RANK + 1  # of packed weights, per stage and side
FULL = Layout(Part.QUERY | Part.KEY | Part.GATE, Part.QUERY | Part.KEY | Part.GATE, rank=RANK)
WINDOW = 256
PATTERNS = {"LG": 0.5, "LGLL": 0.75}  # of layers, and the share of those with a window
VOCABULARY = 50257
BF16, FP32 = 2, 4  # bytes
ROWS_PADDED = 8  # channels that a cache has behind keys, and behind values
MULTIPROCESSORS = 132  # of the devices below
SEQUENCES = 2  # that run at once: of 2048 tokens, in the backward pass on an H200

# Instructions issued (one for a warp) per query, key and head that exists, sm_90: `kernel_report.issued` of the tiles
# in `tuning`; `--compile` finds them anew. Kernel -> heads up to -> number. "lse_masked": of keys that not all queries
# of a tile see; "split": with scores in two parts.
ISSUED: dict[str, dict[int, float]] = {
    "lse": {16: 0.505, 32: 0.47, 40: 0.717},
    "lse_masked": {16: 0.569, 32: 0.536, 40: 0.812},
    "compose": {16: 0.738, 32: 0.699, 40: 1.108},
    "weights": {16: 0.793, 32: 0.709, 40: 1.094},
    "back_1": {16: 1.004, 32: 0.846, 40: 2.02},
    "back_0": {16: 1.156, 32: 0.953, 40: 1.784},
    "lse_split": {16: 0.791, 32: 0.707, 40: 1.089},
    "lse_masked_split": {16: 0.893, 32: 0.772, 40: 1.192},
    "compose_split": {16: 1.047, 32: 0.951, 40: 1.545},
    "weights_split": {16: 1.062, 32: 0.963, 40: 1.606},
    "back_0_split": {16: 1.402, 32: 1.301, 40: 2.344},
}


@dataclass(frozen=True)
class Device:
    """What a GPU can do in a second.

    Attributes:
        tensor: bfloat16 operations on tensor cores, dense.
        issue: instructions of warps.
        exp: exponentials.
        l2, hbm: bytes between L2 and cores, and between memory and L2.
    """

    name: str
    tensor: float
    issue: float
    exp: float
    l2: float
    hbm: float


def device(
    name: str = "H200",
    multiprocessors: int = MULTIPROCESSORS,
    clock: float = 1.7e9,
    tensor: float = 989e12,
    l2: float = 5.5e12,
    hbm: float = 4.8e12,
) -> Device:
    """A device with 4 schedulers and 16 units for exp per multiprocessor."""
    return Device(name, tensor, multiprocessors * 4 * clock, multiprocessors * 16 * clock, l2, hbm)


# By what is in the names that drivers give them.
DEVICES = {"H200": device("H200"), "H100": device("H100", hbm=3.35e12)}


@dataclass(frozen=True)
class Shape:
    """A model's sizes: H heads of D channels, E and F wide, L layers."""

    name: str
    heads: int
    dim: int
    width: int
    inner: int
    layers: int

    @classmethod
    def of(cls, name: str, config: DCFormerConfig) -> "Shape":
        """The sizes of a configuration."""
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        return cls(name, heads, config.head_dim, config.hidden_size, config.intermediate_size, layers)

    @property
    def linear(self) -> int:
        """Parameters of a layer's matrices: q, k, v, o and the three of the MLP."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def generator(self) -> int:
        """Parameters of a layer's four weight generators."""
        hidden = 2 * RANK * self.heads
        return 4 * (self.width * (hidden + self.heads) + hidden * 2 * RANK * self.heads)


SHAPES = {
    name: Shape.of(name, DCFormerConfig.from_preset(f"dcformer-{name.lower()}"))
    for name in ("405M", "2.8B", "6.9B", "13B")
}
# Share of a plain Transformer's throughput that must be reached in training (T = 2048, windows in every other layer),
# and what is striven for; and in decoding (batch 1, prompt 1024 and 128 new tokens).
TRAINING_GOALS = {"2.8B": (0.78, 0.88), "6.9B": (0.90, 0.93), "13B": (0.88, 0.94)}
DECODING_GOALS = {("2.8B", "LG"): 0.96, ("6.9B", "LG"): 0.98, ("2.8B", "LGLL"): 1.05, ("6.9B", "LGLL"): 1.05}
# Launches that a layer has more of than Llama's in a compiled decoding step, without a window and with one: with fused
# projections and Llama's q, k and v one product, too; with three, as in Llama's own code; without fused projections.
# Counted by `tools/decode_launches.py`.
EXTRA_LAUNCHES = {"fused": (1, 1), "fused, Llama not": (-1, -1), "not fused": (11, 15)}
LENGTHS = (2048, 4096)  # tokens in training that `--json` has
DECODED = 1152  # keys of a step of decoding
# What is estimated besides, in words -> as an option of `attention_work`.
HOWS: dict[str, dict[str, bool]] = {
    "": {}, ", with operands": {"operands": True}, ", maps kept": {"save_maps": True},
    ", large scores": {"split_scores": True},
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a kernel, or a few, ask for: operations, instructions of warps, exponentials, bytes."""

    name: str
    flops: float = 0.0
    instructions: float = 0.0
    exps: float = 0.0
    l2: float = 0.0
    hbm: float = 0.0

    def times(self, gpu: Device) -> dict[str, float]:
        """Seconds that each resource needs, by name."""
        return {
            "tensor": self.flops / gpu.tensor, "issue": self.instructions / gpu.issue, "exp": self.exps / gpu.exp,
            "L2": self.l2 / gpu.l2, "HBM": self.hbm / gpu.hbm,
        }  # fmt: skip

    def bound(self, gpu: Device) -> tuple[str, float]:
        """The resource that takes longest, and seconds."""
        times = self.times(gpu)
        name = max(times, key=times.__getitem__)
        return name, times[name]


def seconds(work: Iterable[Work], gpu: Device) -> float:
    """Sum of the bounds."""
    return sum(w.bound(gpu)[1] for w in work)


@dataclass(frozen=True)
class _Kind:
    """What a kernel of composition does for a key and its queries.

    Attributes:
        dots: products with a matrix of heads by heads.
        exps: exponentials per element.
        maps_in, maps_out: maps read and written.
        matrices: M(s) read.
        channels: of the query side, read by each program.
        parts: sums for each query that a program writes.
        grads: it writes parts of the gradient of M(s).
    """

    dots: int
    exps: float = 0.0
    maps_in: int = 1
    maps_out: int = 1
    matrices: int = 1
    channels: int = CHANNELS
    parts: int = 0
    grads: bool = False


_KINDS = {
    "lse": _Kind(dots=2, exps=1, maps_out=0, parts=1),  # and one in each turn, which has several keys
    "compose": _Kind(dots=3 + RANK, exps=1, matrices=2, channels=2 * CHANNELS),
    "weights": _Kind(dots=3 + RANK, exps=1, maps_out=2, matrices=2, channels=2 * CHANNELS),
    "back_1": _Kind(dots=5, maps_in=2, parts=CHANNELS + 2, grads=True),
    "back_0": _Kind(dots=5, maps_in=3, parts=CHANNELS, grads=True),
}
# More products of those that read scores, where these are in two parts: to widen both, and to compose them.
_SPLIT_DOTS = {"lse": 3, "compose": 3, "weights": 3, "back_0": 1}


def matrix_bytes(heads: int) -> tuple[int, int]:
    """Bytes of M(s) of a key, or of its gradient, that kernels of composition move between cores and L2, and L2 and
    memory. Two blocks of heads are loaded and stored one by one, in sectors of 32 bytes for each of their rows."""
    side, (first, second) = matrix_side(heads), head_blocks(heads)
    rows = [(row * side, column, column + width) for row in range(side)
            for column, width in ((0, min(first, side)), (first, side - first)) if width > 0]  # fmt: skip
    sectors = sum((BF16 * (row + stop) - 1) // 32 - BF16 * (row + start) // 32 + 1 for row, start, stop in rows)
    whole = side**2 * BF16
    return (32 * sectors if second else whole), whole


def pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, causal."""
    reach = min(length, window or length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def visited(length: int, b_t: int, window: int | None, b_s: int = 1) -> int:
    """Keys that tiles of b_t queries visit, causal: summed over the tiles, in steps of b_s."""
    count = 0
    for t in range(0, length, b_t):
        last = min(t + b_t, length)  # keys below it are seen
        first = max(0, t - window + 1) if window else 0
        count += min(-(-last // b_s) * b_s, -(-length // b_s) * b_s) - first // b_s * b_s
    return count


def seen_by_all(length: int, b_t: int, window: int | None, b_s: int = 1) -> int:
    """Of these keys those that all queries of a tile see, in steps of b_s from the first that any sees."""
    count = 0
    for t in range(0, length, b_t):
        first, latest = (max(0, n - window + 1) if window else 0 for n in (t, min(t + b_t, length) - 1))
        start = first + -(-(latest - first) // b_s) * b_s
        count += max(0, (t + 1 - start) // b_s * b_s)
    return count


def spans(length: int, window: int | None, b_t: int, step: int) -> tuple[int, ...]:
    """Keys of each tile of b_t queries, causal, from a multiple of `step`."""
    return lengths(length, round_up(length, 16), -length if window is None else 1 - window, 0, b_t, b_t, step)


def part_count(name: str, length: int, window: int | None, tile: Tile, heads: int) -> int:
    """Into how many parts programs of a kernel split the keys of a tile of queries: `scores`, one of composition."""
    step = tile.b_s if name == "scores" else 16
    tiles = spans(length, window, tile.b_t, step)
    copies = SEQUENCES * (heads if name == "scores" else 1)
    resident = MULTIPROCESSORS * resident_programs(name, tile, 90)
    n_keys = keys_of_a_program(tiles, copies, resident, BESIDES[name], step, name == "scores")
    return ceil_div(max(tiles), n_keys)


def composition_work(
    name: str, shape: Shape, length: int, window: int | None, tile: Tile, issued: float, masked: float | None = None,
    split_scores: bool = False,
) -> Work:  # fmt: skip
    """What a kernel of composition asks for, for one sequence.

    Args:
        name: of `launch.LAUNCHES`.
        tile: how it is launched.
        issued: instructions of warps per query, key and head.
        masked: of keys that not all queries of a tile see, if another number.
        split_scores: scores and their M(s) have 32 bits.
    """
    heads = sum(head_blocks(shape.heads))  # with those that do not exist
    kind = _KINDS[name]
    if split_scores and name in _SPLIT_DOTS:
        more = {"dots": _SPLIT_DOTS[name], "maps_in": 1, "matrices": 1}
        kind = replace(kind, **{field: getattr(kind, field) + n for field, n in more.items()})
    keys = visited(length, tile.b_t, window)
    area = keys * tile.b_t  # pairs in visited tiles
    count = part_count(name, length, window, tile, shape.heads)
    programs = ceil_div(length, tile.b_t) * count
    matrix_l2, matrix = matrix_bytes(shape.heads)
    maps = BF16 * shape.heads * area * (kind.maps_in + kind.maps_out)
    side = BF16 * shape.heads * kind.channels
    parts = FP32 * shape.heads * kind.parts * length * (count if kind.parts > 1 else 1)
    grads = keys * kind.grads
    at_edges = 0 if masked is None else (keys - seen_by_all(length, tile.b_t, window, tile.b_s)) * tile.b_t
    return Work(
        name,
        flops=2.0 * kind.dots * heads**2 * area,
        instructions=(issued * (area - at_edges) + (masked or 0.0) * at_edges) * shape.heads,
        exps=(kind.exps + (1 / tile.b_s if name == "lse" else 0)) * area * heads,
        l2=maps + parts + (grads + keys * kind.matrices) * matrix_l2 + programs * tile.b_t * side,
        hbm=maps + parts + grads * matrix + length * (matrix * kind.matrices + side),
    )


def product_work(
    name: str, shape: Shape, length: int, window: int | None, tile: Tile, operands: bool, split_scores: bool = False
) -> Work:
    """What a product of a map and states asks for, for one sequence: two of the three are read, one is written.

    Args:
        operands: whether to count in L2 what each tile of a map reads of states: the keys' for `scores_kernel` and
            `values_kernel`, whose programs loop over keys, the queries' for `keys_kernel`, over queries. A program of
            `scores_kernel` also reads its own queries.
        split_scores: numbers of its map have 32 bits.
    """
    keys = visited(length, tile.b_t, window, tile.b_s)
    area = keys * tile.b_t
    maps = (FP32 if split_scores else BF16) * shape.heads * area
    row = BF16 * shape.heads * shape.dim  # states of a token
    states = 2 * row * length  # those read, and those read or written
    per_tile, others = {
        "scores_kernel": (tile.b_s, length * part_count("scores", length, window, tile, shape.heads)),
        "values_kernel": (tile.b_s, length),
        "keys_kernel": (tile.b_t, length),
    }[FUNCTIONS[name]]
    tiles = area / (tile.b_t * tile.b_s)
    return Work(
        name, flops=2.0 * padded(shape.dim) * area * shape.heads,
        l2=maps + (row * (tiles * per_tile + others) if operands else states), hbm=maps + states,
    )  # fmt: skip


def stored(name: str, heads: int) -> float:
    """Instructions per query, key and head from `ISSUED`."""
    bounds = ISSUED[name]
    return bounds[min((bound for bound in bounds if heads <= bound), default=max(bounds))]


def attention_work(
    shape: Shape, length: int, window: int | None, issued: Callable[[str, int], float], arch: int = 90,
    operands: bool = False, save_maps: bool = False, split_scores: bool = False,
) -> tuple[list[Work], list[Work]]:  # fmt: skip
    """Forward and backward pass of a layer's attention for one sequence, kernel by kernel, with what torch does.

    Args:
        issued: (kernel, heads) -> instructions of warps per query, key and head.
        operands: see `product_work`.
        save_maps: the forward pass keeps the maps that the backward pass needs. That windows are then cut into more
            chunks, which share some keys, is left out.
        split_scores: scores are in two parts.
    """
    beyond = Beyond.PRECISION if split_scores else NOTHING

    def tile(name: str) -> Tile:
        return choose(name, shape.heads, shape.dim, torch.bfloat16, arch, RANK, window, beyond)

    def composed(name: str) -> Work:
        suffix = "_split" if split_scores and name in _SPLIT_DOTS else ""
        masked = issued(f"{name}_masked{suffix}", shape.heads) if f"{name}_masked" in ISSUED else None
        count = issued(name + suffix, shape.heads)
        return composition_work(name, shape, length, window, tile(name), count, masked, split_scores)

    def product(name: str, kind: str) -> Work:  # instructions take half of their bounds or less
        return product_work(name, shape, length, window, tile(kind), operands, split_scores and name == "scores")

    _, matrix = matrix_bytes(shape.heads)
    matrices = (2 + split_scores) * length * matrix
    side = BF16 * shape.heads * length * CHANNELS
    expand = Work("expand", instructions=0.0, l2=matrices + 2 * side, hbm=matrices + 2 * side)
    # gradients of matrices, read, those of the key side written
    grads = sum(visited(length, tile(name).b_t, window) for name in ("back_1", "back_0")) * matrix
    key_grads = 2 * side * 2
    project = Work("project", l2=grads + key_grads, hbm=grads + key_grads)
    # parts of query-side gradients are read, the sums written, and rounded
    count = part_count("back_1", length, window, tile("back_1"), shape.heads)
    parts = FP32 * shape.heads * length * count * (2 * CHANNELS + 2)
    sums = parts + 2 * side * (2 + 2 + 1)

    def states(count: int) -> Work:
        """So many passes over queries, keys, values or gradients of the output; a quarter of one from L2 alone, for
        rows that all programs of a head read, and for bounds of the mask, once for a multiprocessor."""
        size = BF16 * shape.heads * length * shape.dim
        return Work("states", l2=(count + 0.25) * size, hbm=count * size)

    # values are copied in the forward pass, the other three in the backward pass. `scale` reads little
    forward = [
        expand, states(2), product("scores", "scores"), composed("lse"),
        composed("weights" if save_maps else "compose"), product("values", "values"),
    ]  # fmt: skip
    # log-sum-exps are made anew of scores that may have been others in the forward pass
    anew = [] if save_maps else [product("scores", "scores"), *[composed("lse")] * split_scores, composed("weights")]
    backward = [
        expand, states(6), *anew, product("grad_values", "keys"),
        product("grad_weights", "scores"), composed("back_1"), composed("back_0"), product("grad_query", "values"),
        product("grad_key", "keys"), project, Work("sums (torch)", l2=sums, hbm=sums),
    ]  # fmt: skip
    return forward, backward


# Work of `attention_work` -> the function that profiles name.
FUNCTIONS = {
    "expand": "expand_kernel", "states": "states_kernel", "lse": "lse_kernel",
    "scores": "scores_kernel", "grad_weights": "scores_kernel",
    "compose": "compose_kernel", "weights": "compose_kernel", "values": "values_kernel", "grad_query": "values_kernel",
    "grad_values": "keys_kernel", "grad_key": "keys_kernel", "back_1": "back_1_kernel", "back_0": "back_0_kernel",
    "project": "project_kernel",
}  # fmt: skip


def function_times(
    shape: Shape, length: int, window: int | None, gpu: Device, issued: Callable[[str, int], float] = stored
) -> dict[str, dict[str, float]]:
    """What the launches of each function need in a forward and a backward pass, by function: seconds by resource, and
    "bound", the sum of their bounds. What torch does is left out."""
    out: dict[str, dict[str, float]] = {}
    for work in itertools.chain(*attention_work(shape, length, window, issued)):
        if work.name in FUNCTIONS:
            times = out.setdefault(FUNCTIONS[work.name], {"bound": 0.0})
            for resource, needed in (work.times(gpu) | {"bound": work.bound(gpu)[1]}).items():
                times[resource] = times.get(resource, 0.0) + needed
    return out


def flash_seconds(shape: Shape, length: int, window: int | None, gpu: Device, efficiency: float = 1.0) -> float:
    """Plain attention, forward (2 products) and backward (5), at a share of the tensor cores' peak."""
    return 7 * 2.0 * shape.dim * pairs(length, window) * shape.heads / (gpu.tensor * efficiency)


def generator_work(shape: Shape, tokens: int) -> list[Work]:
    """The weight generators of a layer, forward: the first layers (torch), and the kernel behind them."""
    hidden = 2 * RANK * shape.heads
    first, second = shape.width * 4 * (hidden + shape.heads), 4 * hidden * 2 * RANK * shape.heads
    between = 4 * (hidden + shape.heads) * tokens * BF16
    out = 4 * CHANNELS * shape.heads * tokens * BF16
    read = tokens * shape.width * BF16
    return [
        Work("generator, first layer (torch)", 2.0 * first * tokens, hbm=first * BF16 + read + between),
        Work("generator kernel", 2.0 * second * tokens, hbm=second * BF16 + between + out),
    ]


def decode_work(shape: Shape, keys: int, batch: int = 1) -> list[Work]:
    """A layer's attention for one new token per sequence, over `keys` keys in the cache."""
    cache = batch * shape.heads * keys * (shape.dim + ROWS_PADDED) * BF16
    maps = batch * shape.heads * keys * FP32
    flops = 2.0 * batch * shape.heads * keys * shape.dim
    return [
        Work("decode scores", flops, exps=batch * shape.heads * keys, hbm=cache + maps),
        Work("decode output", flops, exps=batch * shape.heads * keys, hbm=cache + maps),
    ]


@dataclass(frozen=True)
class Assumptions:
    """What models are estimated with.

    Attributes:
        linear: share of the tensor cores' peak that matrix products of training reach.
        flash: the same for plain attention, forward and backward.
        stream: share of the memory's rate that decoding reaches.
        launch: seconds between kernels in a CUDA graph.
        extra_launches: see `EXTRA_LAUNCHES`.
    """

    linear: float = 0.7
    flash: float = 0.5
    stream: float = 0.8
    launch: float = 1.5e-6
    extra_launches: tuple[int, int] = EXTRA_LAUNCHES["fused"]


@dataclass(frozen=True)
class Training:
    """Seconds of a layer, forward and backward, one sequence.

    Attributes:
        linear: matrix products, a share of the output layer included.
        flash: plain attention of a global layer.
        generator: weight generators.
        attention: composed attention at its bounds, mean over layers.
    """

    linear: float
    flash: float
    generator: float
    attention: float

    def throughput(self, share: float = 1.0) -> float:
        """Of a plain Transformer's, with kernels at a share of their bounds."""
        return (self.linear + self.flash) / (self.linear + self.generator + self.attention / share)

    def needed(self, goal: float) -> float:
        """Share of their bounds that kernels must reach for a goal; above 1: out of reach; inf: at no speed."""
        budget = (self.linear + self.flash) / goal - self.linear - self.generator
        return self.attention / budget if budget > 0 else float("inf")


def training(
    shape: Shape, length: int, local: float, gpu: Device, issued: Callable[[str, int], float],
    assumed: Assumptions = Assumptions(), arch: int = 90, operands: bool = False, save_maps: bool = False,
    split_scores: bool = False,
) -> Training:  # fmt: skip
    """A layer of a model with a share `local` of windowed layers."""
    output = shape.width * VOCABULARY / shape.layers
    linear = 3 * 2.0 * length * (shape.linear + output) / (gpu.tensor * assumed.linear)
    first, kernel = generator_work(shape, length)
    # three passes over the matrix; behind it the backward pass moves at least twice what the kernel does
    generator = 3 * first.flops / (gpu.tensor * assumed.linear) + 3 * kernel.bound(gpu)[1]
    attention = 0.0
    for share, window in ((local, WINDOW), (1 - local, None)):
        works = attention_work(shape, length, window, issued, arch, operands, save_maps, split_scores)
        attention += share * sum(seconds(work, gpu) for work in works)
    return Training(linear, flash_seconds(shape, length, None, gpu, assumed.flash), generator, attention)


def decoding_throughput(
    shape: Shape, keys: int, local: float, gpu: Device, assumed: Assumptions = Assumptions()
) -> float:
    """Of an all-global Transformer's, one sequence, a share `local` of layers with windows: bytes and launches."""

    def step(composed: bool) -> float:
        weights = shape.linear + (shape.generator if composed else 0)
        layer = weights * BF16 / gpu.hbm / assumed.stream
        in_global, in_local = assumed.extra_launches
        kinds = ((local, min(keys, WINDOW), in_local), (1 - local, keys, in_global)) if composed else ((1.0, keys, 0),)
        for share, seen, extra in kinds:
            work = decode_work(shape, seen)
            moved = sum(w.hbm for w in work) if composed else 2 * shape.heads * seen * shape.dim * BF16
            layer += share * (moved / gpu.hbm / assumed.stream + extra * assumed.launch)
        return shape.layers * layer + shape.width * VOCABULARY * BF16 / gpu.hbm / assumed.stream

    return step(composed=False) / step(composed=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def compiled(arch: int, shapes: Iterable[Shape]) -> Callable[[str, int], float]:
    """The same from code compiled now."""
    import kernel_report

    dims = {shape.heads: shape.dim for shape in (*SHAPES.values(), *shapes)}  # the summary is of all

    @cache
    def issued(name: str, heads: int) -> float:
        found = kernel_report.Beyond.PRECISION if name.endswith("_split") else kernel_report.NOTHING
        kernel = name.removesuffix("_split").removesuffix("_masked")
        spec = kernel_report.attention_specs(heads, dims[heads], arch, beyond=found)[kernel]
        usage = kernel_report.compile_usage(spec, arch)
        return kernel_report.issued(spec, usage, "_masked" in name) or 0.0

    return issued


def table(title: str, work: list[Work], gpu: Device) -> str:
    """Rows of a pass in Markdown, milliseconds; the last one is the sum of the bounds."""
    lines = [f"| {title} | GFLOP | tensor | issue | exp | L2 | GB | HBM | bound |", "|---|" + "---|" * 8]
    for w in work:
        times, (name, least) = w.times(gpu), w.bound(gpu)
        tensor, issue, exp, l2, hbm = (f"{1e3 * seconds:.3f}" for seconds in times.values())
        lines.append(
            f"| {w.name} | {w.flops / 1e9:.1f} | {tensor} | {issue} | {exp} | {l2} | {w.hbm / 1e9:.2f} | {hbm} "
            f"| {name} {1e3 * least:.3f} |"
        )
    return "\n".join([*lines, f"| **sum of bounds** | | | | | | | | **{1e3 * seconds(work, gpu):.3f}** |"])


def summary(gpu: Device, issued: Callable[[str, int], float], length: int, assumed: Assumptions, arch: int) -> str:
    """Sums of bounds; models, and what goals ask for; in Markdown."""
    lines = [
        f"| attention, T = {length} | forward, global | backward | forward, window {WINDOW} | backward "
        f"| plain, global, at {assumed.flash:.0%} |",
        "|---|" + "---|" * 5,
    ]
    for shape in SHAPES.values():
        both = (attention_work(shape, length, window, issued, arch) for window in (None, WINDOW))
        sums = [seconds(work, gpu) for passes in both for work in passes]
        sums.append(flash_seconds(shape, length, None, gpu, assumed.flash))
        lines.append(f"| {shape.name} | " + " | ".join(f"{1e3 * s:.3f}" for s in sums) + " |")
    lines += [
        "",
        "| training | linear | plain attention | generators | composed attention | at bounds | required | takes "
        "| desired | takes |",
        "|---|" + "---|" * 9,
    ]
    for shape in SHAPES.values():
        for pattern, local in PATTERNS.items():
            t = training(shape, length, local, gpu, issued, assumed, arch)
            goals = TRAINING_GOALS.get(shape.name) if pattern == "LG" else None
            needs = [cell for goal in goals for cell in (f"{goal:.0%}", verdict(t.needed(goal)))] if goals else [""] * 4
            ms = " | ".join(f"{1e3 * s:.3f}" for s in (t.linear, t.flash, t.generator, t.attention))
            lines.append(f"| {shape.name} {pattern} | {ms} | {t.throughput():.1%} | {' | '.join(needs)} |")
    lines += ["", both_rules(issued, assumed, arch)]
    hows = {how: replace(assumed, extra_launches=extra) for how, extra in EXTRA_LAUNCHES.items()}
    hows["bytes alone"] = replace(assumed, extra_launches=(0, 0))
    heads = " | ".join(f"LG, {how} | LGLL, {how}" for how in hows)
    lines += ["", f"| decoding, S = {DECODED} | {heads} | goals |"]
    lines += ["|---|" + "---|" * (2 * len(hows) + 1)]
    for shape in SHAPES.values():
        found = {
            (pattern, how): decoding_throughput(shape, DECODED, local, gpu, assumptions)
            for how, assumptions in hows.items()
            for pattern, local in PATTERNS.items()
        }
        goals = [
            f"{pattern} {goal:.0%}" + (": out of reach, by bytes" if found[pattern, "bytes alone"] < goal else "")
            for (name, pattern), goal in DECODING_GOALS.items()
            if name == shape.name
        ]
        cells = [shape.name, *(f"{ratio:.1%}" for ratio in found.values()), ", ".join(goals)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def both_rules(issued: Callable[[str, int], float], assumed: Assumptions, arch: int) -> str:
    """What models reach in training on `DEVICES` by both rules for products, see `product_work`, with maps that are
    kept, and with large scores; in Markdown."""
    heads = " | ".join(f"{name}{how}" for name in DEVICES for how in HOWS)
    lines = [f"| LG, T = 2048: at bounds / at 75% of them | {heads} |", "|---|" + "---|" * len(HOWS) * len(DEVICES)]
    for shape in SHAPES.values():
        both = [
            training(shape, 2048, PATTERNS["LG"], gpu, issued, assumed, arch, **how)
            for gpu, how in itertools.product(DEVICES.values(), HOWS.values())
        ]
        cells = (f"{found.throughput():.1%} / {found.throughput(0.75):.1%}" for found in both)
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def training_rows(
    names: Iterable[str], issued: Callable[[str, int], float], assumed: Assumptions, arch: int
) -> list[dict[str, object]]:
    """Shares of a plain Transformer's throughput in training, with kernels at their bounds and at 75% of them.

    Those that end in `_operands` count what tiles of products read again, those in `_save_maps` are with maps that are
    kept, those in `_split_scores` with scores in two
    parts.
    """
    rows: list[dict[str, object]] = []
    for gpu in DEVICES.values():
        for name in names:
            for tokens in LENGTHS:
                for pattern, local in PATTERNS.items():
                    row: dict[str, object] = {"shape": name, "pattern": pattern, "tokens": tokens, "gpu": gpu.name}
                    for how in HOWS.values():
                        suffix = "".join(f"_{option}" for option in how)
                        found = training(SHAPES[name], tokens, local, gpu, issued, assumed, arch, **how)
                        row["at_bounds" + suffix] = round(found.throughput(), 4)
                        row["at_75" + suffix] = round(found.throughput(0.75), 4)
                    rows.append(row)
    return rows


def attention_rows(names: Iterable[str], issued: Callable[[str, int], float], arch: int) -> list[dict[str, object]]:
    """Milliseconds at bounds of a layer's attention, one sequence, and of each of its kernels."""
    rows: list[dict[str, object]] = []
    for gpu, name, tokens, window in itertools.product(DEVICES.values(), names, LENGTHS, (None, WINDOW)):
        passes = attention_work(SHAPES[name], tokens, window, issued, arch)
        for which, work in zip(("forward", "backward"), passes, strict=True):
            kernels = {w.name: round(1e3 * w.bound(gpu)[1], 4) for w in work}
            row = {"shape": name, "window": window, "tokens": tokens, "gpu": gpu.name, "pass": which}
            rows.append(row | {"ms": round(1e3 * seconds(work, gpu), 4), "kernels": kernels})
    return rows


def decoding_rows(names: Iterable[str], assumed: Assumptions) -> list[dict[str, object]]:
    """Shares of a plain Transformer's speed in decoding: by launches of a layer, see `EXTRA_LAUNCHES`, and by bytes."""
    rows: list[dict[str, object]] = []
    for gpu, name, (pattern, local) in itertools.product(DEVICES.values(), names, PATTERNS.items()):
        row: dict[str, object] = {"shape": name, "pattern": pattern, "tokens": DECODED, "gpu": gpu.name}
        for how, extra in (EXTRA_LAUNCHES | {"bytes alone": (0, 0)}).items():
            launched = replace(assumed, extra_launches=extra)
            row[how] = round(decoding_throughput(SHAPES[name], DECODED, local, gpu, launched), 4)
        rows.append(row)
    return rows


def verdict(share: float) -> str:
    """What a goal needs, in words."""
    return f"{share:.0%} of bounds" + (": out of reach of this design" if share > 1 else "")


def operators(gpu: Device, issued: Callable[[str, int], float], assumed: Assumptions, arch: int) -> str:
    """The goals of attention alone, 6.9B."""
    shape = SHAPES["6.9B"]

    def both(length: int, window: int | None) -> float:
        return sum(seconds(w, gpu) for w in attention_work(shape, length, window, issued, arch))

    ours, plain = both(4096, None), flash_seconds(shape, 4096, None, gpu, assumed.flash)
    near, far = both(8192, WINDOW), both(8192, None)
    return (
        f"Attention alone, 6.9B, forward and backward: T = 4096 at bounds {1e3 * ours:.2f} ms, plain attention "
        f"{1e3 * plain:.2f} ms: {ours / plain:.1f} times (goal: at most 6; needs {verdict(ours / (6 * plain))}). "
        f"T = 8192: window {WINDOW} {1e3 * near:.2f} ms, global {1e3 * far:.2f} ms: {far / near:.1f} times faster "
        "(goal: at least 4)."
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=(80, 89, 90), help="whose code and tiles")
    parser.add_argument("--compile", action="store_true", help="compile the kernels instead of using stored counts")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--json", action="store_true", help="print the tables as JSON, for H100 and H200 and for 2,048 and 4,096 tokens"
    )
    figures = parser.add_argument_group("the device; an H200 unless said otherwise")
    figures.add_argument("--tensor", type=float, default=989e12, help="FLOP/s, dense bfloat16")
    figures.add_argument("--multiprocessors", type=int, default=MULTIPROCESSORS)
    figures.add_argument("--clock", type=float, default=1.7e9, help="Hz")
    figures.add_argument("--l2", type=float, default=5.5e12, help="bytes/s")
    figures.add_argument("--hbm", type=float, default=4.8e12, help="bytes/s")
    shares = parser.add_argument_group("assumed shares of peaks")
    shares.add_argument("--linear", type=float, default=0.7)
    shares.add_argument("--flash", type=float, default=0.5)
    shares.add_argument("--stream", type=float, default=0.8)
    args = parser.parse_args(argv)
    if args.arch != 90 and not args.compile:
        parser.error(f"--arch {args.arch}: stored counts are those of sm_90; add --compile")
    for name in ("length", "tensor", "multiprocessors", "clock", "l2", "hbm"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: expected a number above 0")
    for name in ("linear", "flash", "stream"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(f"--{name} {getattr(args, name)}: expected a share, above 0 and at most 1")
    fixed = ("length", "tensor", "multiprocessors", "clock", "l2", "hbm")
    if args.json and (given := [name for name in fixed if getattr(args, name) != parser.get_default(name)]):
        parser.error(f"--{given[0]} {getattr(args, given[0])}: --json is of fixed devices and lengths; leave one out")
    gpu = device("GPU", args.multiprocessors, args.clock, args.tensor, args.l2, args.hbm)
    assumed = Assumptions(args.linear, args.flash, args.stream)
    issued = compiled(args.arch, [SHAPES[name] for name in args.sizes]) if args.compile else stored
    if args.json:
        found = {
            "training": training_rows(args.sizes, issued, assumed, args.arch),
            "attention": attention_rows(args.sizes, issued, args.arch),
            "decoding": decoding_rows(args.sizes, assumed),
        }
        print(json.dumps(found, indent=1))
        return 0

    print("ESTIMATE, not a measurement. Milliseconds; one sequence, forward and backward, bfloat16, R = 2.")
    if args.compile:
        counts = {heads for name in args.sizes for heads in [SHAPES[name].heads]}
        found = {name: {n: round(issued(name, n), 3) for n in sorted(counts)} for name in ISSUED}
        print(f"\nISSUED = {found}")
    for name in args.sizes:
        for window in (None, WINDOW):
            passes = attention_work(SHAPES[name], args.length, window, issued, args.arch)
            for which, work in zip(("forward", "backward"), passes, strict=True):
                print(f"\n{table(f'{name}, {which}, ' + (f'window {window}' if window else 'global'), work, gpu)}")
        print(f"\n{table(f'{name}, generators, {args.length} tokens', generator_work(SHAPES[name], args.length), gpu)}")
        print(f"\n{table(f'{name}, decoding, S = {DECODED}', decode_work(SHAPES[name], DECODED), gpu)}")
    print(f"\n{summary(gpu, issued, args.length, assumed, args.arch)}")
    print(f"\n{operators(gpu, issued, assumed, args.arch)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
