"""Compiles every kernel for GPUs that need not be there, and prints what it takes: registers, stack, shared memory.

`make kernel-report ARGS="--arch 90 --shapes 6.9b"`, or with `--json`. A kernel whose stack is not 0 spills registers to
memory; one that wants more shared memory than a block may have does not run. For attention it also counts the
instructions of one warp per query, key and head in the innermost loop.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from packaging.version import Version
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from dcformer import DCFormerConfig
from dcformer.kernels import decode, generator, generator_backward, prepare
from dcformer.kernels.launch import LAUNCHES, Gradients
from dcformer.kernels.layout import Layout, Part, stages_of
from dcformer.kernels.overflow import NOTHING, Beyond
from dcformer.kernels.passes import Passes
from dcformer.kernels.problem import Visibility
from dcformer.kernels.repeated import COMPILER, Launch
from dcformer.kernels.schemas import new_norms
from dcformer.kernels.tuning import Tile, launch_options

# products of gradients in scaled float16 -> kernel of `LAUNCHES`: another code than that of the same kernel elsewhere
SCALED = {"grad_weights": "scores", "grad_query": "values", "grad_key": "keys"}

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}  # KiB per block
SHAPES = ("405m", "2.8b", "6.9b", "13b")
FULL = Layout(pre=Part.QUERY | Part.KEY | Part.GATE, post=Part.QUERY | Part.KEY | Part.GATE, rank=2)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LENGTH = 2048
_BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))  # of any architecture: specialization does not depend on it
_OPTIONS = {"num_warps": 4, "num_stages": 3}  # Triton's own, where a launch does not say
# Bytes that a kernel may spill: a few of those that change in no inner loop; on sm_90 since Triton 3.9 alone.
_MAY_SPILL = dict.fromkeys(SHARED_LIMIT, 32) | {90: 32 if Version(triton.__version__) >= Version("3.9") else 0}
_PRODUCTS = {LAUNCHES[name][0] for name in ("scores", "values", "keys")}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread.
        stack: bytes per thread; not 0 when registers spill.
        shared: KiB per block.
        loops: instructions of one thread in one turn of each innermost loop that reads memory.
        products: of those that also multiply matrices on tensor cores.
        spilling: of `loops`, those that read or write the stack.
    """

    registers: int
    stack: int
    shared: float
    loops: tuple[int, ...]
    products: tuple[int, ...] = ()
    spilling: tuple[int, ...] = ()


def compile_spec(spec: dict[str, Any], arch: int) -> Any:
    """Compiles a kernel for an architecture. Returns what Triton makes of it.

    Args:
        spec: `kernel`, `signature` (argument -> type), `constexprs`, `attrs` as `ASTSource` takes them, and
            `num_warps`, `num_stages` and perhaps `maxnreg`.
        arch: compute capability, such as 90.
    """
    source = ASTSource(
        fn=spec["kernel"], signature=spec["signature"], constexprs=spec["constexprs"], attrs=spec["attrs"]
    )
    options = {key: spec[key] for key in ("num_warps", "num_stages", "maxnreg") if spec.get(key)}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | COMPILER)


def compile_usage(spec: dict[str, Any], arch: int) -> Usage:
    """Compiles a kernel, and reads the usage from its machine code. Arguments are those of `compile_spec`."""
    compiled = compile_spec(spec, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))  # type: ignore[index]
    products, spilling = _loops(code, r"\b\w*MMA\b"), _loops(code, r"\b(LDL|STL)\b")
    return Usage(registers, stack, compiled.metadata.shared / 1024, _loops(code), products, spilling)


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _loops(code: str, also: str = "") -> tuple[int, ...]:
    """Instructions of all innermost loops that read memory, in machine code as `nvdisasm` prints it; of those with an
    instruction that the expression `also` matches, if it is given.

    A branch back to a label ends a loop; one that holds another loop is not innermost.
    """
    labels: dict[str, int] = {}
    count, loops, loads, others = 0, [], [], []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/\s+\S", line):
            count += 1
            if re.search(r"\b(LDG|LDGSTS|UTMALDG)\b", line):
                loads.append(count)
            if re.search(also, line):
                others.append(count)
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], count))
    loops = [(start, stop) for start, stop in loops if any(start < load <= stop for load in loads)]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return tuple(stop - start for start, stop in inner if any(start < other <= stop for other in others))


class _Pointer:
    """What Triton's launcher looks at of a tensor, which may be without memory. Storages begin at aligned addresses."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self._offset = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return 4096 + self._offset


def spec_of(kernel: Any, values: Mapping[str, Any], options: Mapping[str, int]) -> dict[str, Any]:
    """What `compile_usage` takes, of a launch: as Triton's launcher specialises its arguments.

    Args:
        kernel: the jitted function.
        values: of all arguments, by name; tensors may be without memory.
        options: of the compiler.
    """
    names = [parameter.name for parameter in kernel.params]
    given = {name: values[name] for name in names}
    given |= {name: _Pointer(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
    _, found, _ = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)(**given)
    signature, constants, attrs = {}, {}, {}
    for i, (name, (kind, special)) in enumerate(zip(names, found, strict=True)):
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = values[name]
        elif special and (attributes := _BACKEND.parse_attr(special)):
            attrs[(i,)] = attributes
    return {"kernel": kernel, "signature": signature, "constexprs": constants, "attrs": attrs, **_OPTIONS, **options}


def launch_spec(launch: Launch) -> dict[str, Any]:
    """The same of a launch that a module of kernels has chosen."""
    return spec_of(launch.kernel, launch.constants | launch.arguments, launch.options)


# --- attention --------------------------------------------------------------------------------------------------------


class Launches(Passes):
    """Keeps the launches of a pass, as specs of `compile_usage`, instead of running them.

    Attributes:
        specs: name of the kernel -> its first launch.
        tiles: instead of those of `tuning`, by name of the kernel.
    """

    def __init__(self, *args: Any, tiles: dict[str, Tile] | None = None, arch: int = 90):
        self.specs: dict[str, dict[str, Any]] = {}
        self.tiles = tiles or {}
        super().__init__(*args)
        self.arch = arch

    def _tile(self, name: str) -> Tile:
        return self.tiles.get(name) or super()._tile(name)

    def _start(self, kernel, grid, name, tile, values) -> None:  # type: ignore[no-untyped-def]
        name = name or kernel.__name__.removesuffix("_kernel")
        if values.get("SCALED"):
            name = next((scaled for scaled, plain in SCALED.items() if plain == name), name)
        if values.get("start"):  # not the code of the forward pass
            name += "_backward"
        if name not in self.specs:
            spec = spec_of(kernel, values, {} if tile is None else launch_options(tile))
            self.specs[name] = spec | {"name": name, "tile": tile, "heads": self.M, "dim": self.D}


def attention_specs(
    heads: int, dim: int, arch: int, dtype: torch.dtype = torch.bfloat16, layout: Layout = FULL, is_odd: bool = False,
    tiles: dict[str, Tile] | None = None, beyond: Beyond = NOTHING,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The kernels of attention as they are launched for one sequence, by name; see `compile_usage`.

    Args:
        heads, dim: H and D.
        arch: compute capability.
        dtype: of queries, keys and values.
        layout: what composition there is.
        is_odd: numbers of queries and keys that are not multiples of 16.
        tiles: instead of those of `tuning`, by name of the kernel.
        beyond: what has exceeded float16.
    """
    length = _LENGTH - is_odd
    new = {"device": "meta", "dtype": dtype}
    q = torch.empty(1, length, heads, dim, **new).transpose(1, 2)
    group = heads // layout.groups
    weights: list[torch.Tensor | None] = []
    for flags in (layout.pre, layout.post):
        weights.append(torch.empty(1, heads, layout.channels, length, **new) if flags & Part.QUERY else None)
        weights.append(torch.empty(1, heads, 1, layout.channels, length, **new) if flags & Part.KEY else None)
        weights.append(torch.empty(layout.groups, group, group, **new) if flags & Part.STATIC else None)
    bounds = torch.empty(1, length, device="meta", dtype=torch.int32)
    seen = Visibility(bounds, bounds, high=0)
    problem = Launches(q, q, q, stages_of(weights), seen, layout, dim**-0.5, 2**34, beyond, tiles=tiles, arch=arch)
    (chunk,) = problem.chunks(maps=3)
    lse = torch.empty(1, heads, length, device="meta")
    grads = [None if t is None else torch.empty_like(t, dtype=torch.float32) for t in weights]
    norms = new_norms(q, q)
    problem._forward_chunk(chunk, problem._values(norms), q, lse)
    problem._backward_chunk(chunk, problem._sources(q, norms), lse, None, Gradients(q, q, q, stages_of(grads)))
    return problem.specs


def issued(spec: dict[str, Any], usage: Usage, is_masked: bool = False) -> float | None:
    """Instructions of one warp per query, key and head (that exists) in the inner loop of a kernel of attention; None
    for those that do not loop over pairs of queries and keys. Some kernels mask keys in a loop of its own: that of the
    other is meant, where all queries of a tile see the keys, and with `is_masked` that one."""
    name, tile, constants = spec["name"], spec["tile"], spec["constexprs"]
    loops, name = usage.products or usage.loops, SCALED.get(name, name)
    if name not in LAUNCHES or not loops:
        return None
    count = (max if is_masked else min)(loops)
    if "M" not in constants:  # products
        return count * tile.num_warps / (tile.b_t * tile.b_s)
    keys = tile.b_s if name == "lse" else 1
    return count * tile.num_warps / (tile.b_t * keys * spec["heads"])


# --- decoding and generators ------------------------------------------------------------------------------------------

_new = partial(torch.empty, device="meta", dtype=torch.bfloat16)
_RANK = 2
_CHANNELS = 2 * _RANK + 1  # of a head: two low-rank vectors and a gate
_ROWS = _CHANNELS + 3  # of a key side behind cached keys and values, which are padded


def _cached(batch: int, heads: int, length: int, dim: int) -> torch.Tensor:
    """Keys or values with composition weights behind them, [B, H, S, D + channels]."""
    return _new(batch, heads, length, dim + _ROWS)


def decode_launches(
    batch: int, heads: int, dim: int, queries: int, keys: int = _LENGTH, is_static: bool = False, is_ring: bool = False
) -> list[Launch]:
    """Those of decoding, fully composed, with a mask; `is_static`: with static projections, `is_ring`: rows are one."""
    stages = []
    for _ in range(2):
        rows = _cached(batch, heads, keys, dim)
        key_side = rows[..., None, dim : dim + _CHANNELS].permute(0, 1, 3, 4, 2)  # [B, H, 1, 5, S]
        static = _new(1, heads, heads) if is_static else None
        stages.append((rows[..., :dim], _new(batch, heads, _CHANNELS, queries), key_side, static))
    (key, *pre), (value, *post) = stages
    visible = torch.empty(batch, 1, queries, keys, dtype=torch.uint8, device="meta")
    states = _new(batch, heads, queries, dim), key, value
    place = torch.empty((), dtype=torch.int64, device="meta") if is_ring else None
    return decode.launches(*states, *pre, *post, visible, place, 1, dim**-0.5, None)[1]


def generator_launches(heads: int, dim: int, tokens: int, is_packed: bool) -> list[Launch]:
    """That of all four generators; packed, the key side's go into rows behind keys and values."""
    pair, gates = _new(1, tokens, 4 * 2 * _RANK * heads), _new(1, tokens, 4 * heads)
    qkw = _new(1, 4, 2 * _RANK, heads, 2 * _RANK * heads)
    rows = [_cached(1, heads, tokens, dim)[..., dim:] if is_packed else None for _ in range(2)]
    weights = _new(2 if is_packed else 4, 1, heads, _CHANNELS, tokens)
    return generator.launches(weights, pair, gates, qkw, *rows, 2, 2, heads, _RANK, "none")[1]


def gradient_launches(heads: int, tokens: int) -> list[Launch]:
    """That of the generators' gradients."""
    pair, gates = _new(4, tokens, 2 * _RANK * heads), _new(1, tokens, 4 * heads)
    grad = _new(4, 1, heads, _CHANNELS, tokens)
    return generator_backward.launches(grad, pair, gates, gates, heads, _RANK)[1]


def prepare_launches(heads: int, dim: int, tokens: int, is_placed: bool) -> list[Launch]:
    """That of QK-norm, RoPE and generators; placed, its rows go to where an integer on the device says."""
    sizes = [heads * dim] * 3 + [4 * 2 * _RANK * heads, 4 * heads]
    product = _new(1, tokens, sum(sizes)).split(sizes, dim=-1)
    others = _new(1, 4, 2 * _RANK, heads, 2 * _RANK * heads), _new(dim), _new(dim), *(_new(1, tokens, dim),) * 2
    memory = [_cached(1, heads, _LENGTH, dim) if is_placed else None for _ in range(2)]
    place = torch.empty((), dtype=torch.int64, device="meta") if is_placed else None
    plan = [dim, 2, 2, _ROWS, _ROWS, heads, _RANK]
    return prepare.launches(*product, *others, *memory, place, False, plan, 1e-6, "tanh")[1]


def other_specs(heads: int, dim: int) -> list[dict[str, Any]]:
    """The kernels of decoding and of the weight generators, in bfloat16 with R = 2."""
    launches = {}
    for batch, queries in ((1, 1), (64, 1), (1, 8)):
        for launch in decode_launches(batch, heads, dim, queries):
            kind = launch.kernel.__name__.removesuffix("_kernel")
            launches[f"decode {kind} B={batch} T={queries}"] = launch
    for launch in decode_launches(1, heads, dim, 1, keys=256, is_ring=True)[:2]:
        launches[f"decode {launch.kernel.__name__.removesuffix('_kernel')} B=1 T=1 ring"] = launch
    for tokens, is_packed in itertools.product((1, 4096), (False, True)):
        name = f"generator N={tokens} {'packed' if is_packed else 'weights'}"
        (launches[name],) = generator_launches(heads, dim, tokens, is_packed)
    (launches["generator N=4096 gradients"],) = gradient_launches(heads, 4096)
    (launches["prepare N=1 in place"],) = prepare_launches(heads, dim, 1, True)
    (launches["prepare N=16"],) = prepare_launches(heads, dim, 16, False)
    return [launch_spec(launch) | {"name": name, "tile": None} for name, launch in launches.items()]


# --- the report -------------------------------------------------------------------------------------------------------


@cache
def _sizes(shape: str) -> tuple[int, int]:
    config = DCFormerConfig.from_preset(f"dcformer-{shape}")
    return config.num_attention_heads, config.head_dim


def all_specs(
    arch: int, shapes: tuple[str, ...] = SHAPES, dtype: str = "bf16", rank: int = 2, beyond: Beyond = NOTHING
) -> list[dict[str, Any]]:
    """Every kernel that models of these shapes need: attention, with lengths that are multiples of 16 and odd ones;
    `decode`, `generator`, `generator_backward` and `prepare`."""
    specs = []
    layout = Layout(FULL.pre, FULL.post, rank=rank)
    for shape in shapes:
        for is_odd in (False, True):
            found = attention_specs(*_sizes(shape), arch, DTYPES[dtype], layout, is_odd, beyond=beyond)
            specs += [spec | {"shape": shape, "odd": is_odd} for spec in found.values()]
        specs += [spec | {"shape": shape, "odd": False} for spec in other_specs(*_sizes(shape))]
    return specs


@dataclass(frozen=True)
class _Task:
    """What is compiled: it goes to other processes, which cannot be sent kernels."""

    archs: tuple[int, ...]
    shapes: tuple[str, ...]
    dtype: str
    rank: int
    beyond: Beyond
    only: str

    def work(self) -> list[tuple[dict[str, Any], int]]:
        return [
            (spec, arch) for arch in self.archs
            for spec in all_specs(arch, self.shapes, self.dtype, self.rank, self.beyond)
            if re.search(self.only, spec["name"])
        ]  # fmt: skip


_work = cache(_Task.work)


def _compile_nth(task: _Task, i: int) -> Usage:
    return compile_usage(*_work(task)[i])


def row(spec: dict[str, Any], arch: int, usage: Usage) -> dict[str, Any]:
    """A line of the report."""
    instructions = issued(spec, usage)
    return {
        "kernel": spec["name"], "arch": arch, "shape": spec["shape"], "odd": spec["odd"], "registers": usage.registers,
        "stack": usage.stack, "shared": round(usage.shared, 1),
        "instructions": None if instructions is None else round(instructions, 3),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints the report.

    Returns:
        1 when a kernel wants too much shared memory, or one other than `back_*` spills more than `_MAY_SPILL` with up
        to 32 heads, a product only if it does so in a loop other than its longest, which is for rare numbers;
        otherwise 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 100, 120], choices=SHARED_LIMIT)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="models")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--rank", type=int, default=2, choices=range(1, 5))
    marks = [what.name.lower() for what in Beyond]
    parser.add_argument("--beyond", default="", choices=marks, help="after this mark, see docs/kernels.md")
    parser.add_argument("--only", default="", help="kernels whose name matches this expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print a list instead of a table")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: expected at least 1")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only}: not a regular expression, {error}")
    found = Beyond[args.beyond.upper()] if args.beyond else NOTHING
    task = _Task(tuple(args.arch), tuple(args.shapes), args.dtype, args.rank, found, args.only)
    work = _work(task)
    if not work:
        parser.error(f"--only {args.only}: no kernel has such a name; without --only all are listed")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(_compile_nth, task), range(len(work)))
        usages = list(tqdm(found, total=len(work), desc="compiling", file=sys.stderr))
    rows = [row(spec, arch, usage) for (spec, arch), usage in zip(work, usages, strict=True)]
    too_large = [line for line in rows if line["shared"] > SHARED_LIMIT[line["arch"]]]
    spills = [  # of back_* some cost less than what avoids them; two blocks of heads hardly fit
        line for (spec, arch), usage, line in zip(work, usages, rows, strict=True)
        if line["stack"] > _MAY_SPILL[arch] and line["kernel"][:5] != "back_" and spec.get("heads", 0) <= 32
        and (spec["kernel"] not in _PRODUCTS or set(usage.spilling) - {max(usage.products)})
    ]  # fmt: skip
    if args.json:
        print(json.dumps(rows, indent=1))
        return int(bool(too_large or spills))
    print("| kernel | sm | shape | tile | warps | stages | registers | stack | shared KiB | instructions |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (spec, arch), line in zip(work, rows, strict=True):
        tile = spec["tile"]
        print(
            f"| {line['kernel']}{' odd' if line['odd'] else ''} | {arch} | {line['shape']} "
            f"| {f'{tile.b_t}x{tile.b_s}' if tile else ''} | {spec['num_warps']} | {spec['num_stages']} "
            f"| {line['registers']} | {line['stack']} | {line['shared']:.0f} "
            f"| {'' if line['instructions'] is None else line['instructions']} |"
        )
    print(f"\n{len(work)} compiled, {len(spills)} with spills, {len(too_large)} with too much shared memory")
    return int(bool(too_large or spills))


if __name__ == "__main__":
    sys.exit(main())
