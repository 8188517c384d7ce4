"""Compiles every kernel for GPUs that need not be there, and prints what it takes: registers, stack, shared memory.

`python -m dcformer.kernels.report` (or `make kernel-report`). A kernel whose stack is not 0 spills registers to memory;
one that wants more shared memory than a block may have does not run. For attention it also prints the instructions that
a multiprocessor issues (one for a warp) per query, key and head.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import decode, generator
from .attention import join_kernel
from .launch import GATE, KEY, LAUNCHES, QUERY, Layout, constants
from .tuning import CANDIDATES, Tile, choose

SHARED_LIMIT = {80: 163, 89: 99, 90: 227}  # KiB per block
# (sizes of the paper, head dim)
SIZES = (("405M", 64), ("2.8B", 80), ("6.9B 13B", 128))
FULL = Layout(pre=QUERY | KEY | GATE, post=QUERY | KEY | GATE, rank=2)

# arguments that are multiples of 16 for lengths, strides and addresses that are; the launcher finds that out by itself
_ALIGNED = {"T", "S", "n_t", "n_s", "s_0", "t_0", "stride_map", "stride_ib"}
_ALIGNED |= {f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhts"}
_LENGTHS = {"T", "S", "n_t", "stride_ib"}
_FLOAT32 = {"p_lse", "p_lse_parts", "p_delta", "p_gwk", "p_gwq"}  # tensors in float32 for every dtype
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread.
        stack: bytes per thread; not 0 when registers spill.
        shared: KiB per block.
        instructions: of one thread in one turn of each innermost loop that reads memory, summed over these loops.
    """

    registers: int
    stack: int
    shared: float
    instructions: int


def compile_usage(spec: dict[str, Any], arch: int) -> Usage:
    """Compiles a kernel for an architecture (80, 89 or 90) and reads the usage from its machine code.

    Args:
        spec: `kernel`, `signature` (argument -> type), `constexprs`, `attrs` as `ASTSource` takes them, and
            `num_warps`, `num_stages` and perhaps `maxnreg`.
        arch: compute capability.
    """
    source = ASTSource(
        fn=spec["kernel"], signature=spec["signature"], constexprs=spec["constexprs"], attrs=spec["attrs"]
    )
    options = {key: spec[key] for key in ("num_warps", "num_stages", "maxnreg") if spec.get(key)}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))  # type: ignore[index]
    return Usage(registers, stack, compiled.metadata.shared / 1024, _instructions_in_loops(code))


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _instructions_in_loops(code: str) -> int:
    """Instructions of all innermost loops that read memory, in machine code as `nvdisasm` prints it.

    A branch back to a label ends a loop; one that holds another loop is not innermost.
    """
    labels: dict[str, int] = {}
    count, loops, loads = 0, [], []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/\s+\S", line):
            count += 1
            if re.search(r"\b(LDG|LDGSTS|UTMALDG)\b", line):
                loads.append(count)
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], count))
    loops = [(start, stop) for start, stop in loops if any(start < load <= stop for load in loads)]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(stop - start for start, stop in inner)


def attention_spec(
    name: str,
    dim: int,
    arch: int,
    dtype: str = "bf16",
    layout: Layout = FULL,
    tile: Tile | None = None,
    is_odd: bool = False,
) -> dict[str, Any]:
    """A kernel of `attention` as the launcher launches it on an architecture; see `compile_usage`.

    Args:
        name: of `launch.LAUNCHES`.
        dim: head dim.
        arch: compute capability.
        dtype: "bf16", "fp16" or "fp32".
        layout: what composition there is.
        tile: instead of the one from the table.
        is_odd: numbers of queries and keys that are no multiples of 16; rows of maps are always.
    """
    kernel = LAUNCHES[name][0]
    tile = tile or choose(name, dim, _DTYPES[dtype], arch, layout.rank)
    known = constants(name, layout, dim, dim, tile)
    found = {key: known[key] for key in kernel.arg_names if key in known}
    maps = "bf16" if dtype == "bf16" else "fp32"
    signature = {}
    for key in kernel.arg_names:
        if key in found:
            signature[key] = "constexpr"
        elif key.startswith("p_"):
            signature[key] = "*i32" if key in ("p_first", "p_last") else f"*{dtype}"
            signature[key] = f"*{maps}" if key in ("p_maps", "p_tiles", "p_grads", "p_weight_grads") else signature[key]
            signature[key] = "*fp32" if key in _FLOAT32 else signature[key]
        else:
            signature[key] = {"scale": "fp32", "stride_map": "i64"}.get(key, "i32")
    known_aligned = _ALIGNED - _LENGTHS if is_odd else _ALIGNED
    aligned = [i for i, key in enumerate(kernel.arg_names) if signature[key][0] == "*" or key in known_aligned]
    return {
        "kernel": kernel, "signature": signature, "constexprs": found, "num_warps": tile.num_warps,
        "num_stages": tile.num_stages, "attrs": {(i,): [["tt.divisibility", 16]] for i in aligned},
    }  # fmt: skip


def attention_specs(arch: int) -> list[dict[str, Any]]:
    """The kernels of `attention`, in bfloat16, fully composed (pre, post, query, key, gates), R = 2.

    The number of heads does not matter. Those that only stream maps know no head dim, and come once. Each comes with
    lengths that are multiples of 16, and the largest size with odd lengths too.
    """
    names = join_kernel.arg_names
    blocks = {"B_P": 16, "B_T": 64}
    specs = [
        {
            "label": "join", "kernel": join_kernel, "constexprs": blocks, "num_warps": 4, "num_stages": 3,
            "signature": {name: "constexpr" if name in blocks else "*fp32" if name[:2] == "p_" else "i32"
                          for name in names},
            "attrs": {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name[:2] == "p_"},
        }
    ]  # fmt: skip
    for name, (kernel, _) in LAUNCHES.items():
        streams = not {"D", "DV"} & set(kernel.arg_names)
        for sizes, dim in (("", 128),) if streams else SIZES:
            spec = attention_spec(name, dim, arch)
            tile = choose(name, dim, torch.bfloat16, arch)
            specs.append(spec | {"label": f"{name} {sizes}".strip(), "tile": tile})
        spec = attention_spec(name, 128, arch, is_odd=True)
        specs.append(spec | {"label": f"{name} odd", "tile": choose(name, 128, torch.bfloat16, arch)})
    return specs


def issued(usage: Usage, tile: Tile) -> float:
    """Instructions that a multiprocessor's schedulers issue (for a warp each) per query, key and head."""
    return usage.instructions * tile.num_warps / (tile.b_t * tile.b_s)


def best_tile(name: str, dim: int, arch: int, dtype: str = "bf16") -> tuple[Tile, Usage] | None:
    """The tile for which a kernel of `attention` spills nothing, fits, and issues the fewest instructions; within 2 %
    of that, the one that leaves room for more warps on a multiprocessor, then the squarer one, which reads less.

    Returns:
        the tile and what it takes; None if none of the candidates fits.
    """
    found: list[tuple[Tile, Usage]] = []
    for tile in CANDIDATES:
        if tile.num_stages == 1 and found and found[-1][0].b_t == tile.b_t and found[-1][0].b_s == tile.b_s:
            continue  # one with a pipeline fits
        try:
            usage = compile_usage(attention_spec(name, dim, arch, dtype, tile=tile), arch)
        except Exception:  # the compiler gives up on some
            continue
        if usage.stack == 0 and usage.shared <= SHARED_LIMIT[arch]:
            found.append((tile, usage))
    if not found:
        return None
    found = [entry for entry in found if entry[0].num_stages > 1] or found  # loads behind products want a pipeline
    least = min(issued(usage, tile) for tile, usage in found)

    def rank(entry: tuple[Tile, Usage]) -> tuple[float, int, int]:
        tile, usage = entry
        blocks = min(
            65536 // (usage.registers * 32 * tile.num_warps), int((SHARED_LIMIT[arch] + 1) // (usage.shared + 1))
        )
        return -blocks * tile.num_warps, -min(tile.b_t, tile.b_s), -tile.num_stages

    return min((entry for entry in found if issued(entry[1], entry[0]) <= 1.02 * least), key=rank)


def all_specs(arch: int) -> list[dict[str, Any]]:
    """Every kernel of the package for an architecture: `attention`, `decode`, `generator`."""
    return attention_specs(arch) + decode.kernel_specs() + generator.kernel_specs()


@cache
def _work(archs: tuple[int, ...], only: str) -> list[tuple[dict[str, Any], int]]:
    """The kernels whose label matches `only`, for each architecture."""
    return [(spec, arch) for arch in archs for spec in all_specs(arch) if re.search(only, spec["label"])]


def _compile_nth(archs: tuple[int, ...], only: str, i: int) -> Usage:
    return compile_usage(*_work(archs, only)[i])


def main() -> int:
    """Prints the table.

    Returns:
        1 when a kernel wants too much shared memory, or spills with lengths that are multiples of 16; otherwise 0.
        Spills with odd lengths are only in the table.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90], help="compute capabilities")
    parser.add_argument("--only", default="", help="kernels whose label matches this expression")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    work = _work(tuple(args.arch), args.only)
    task = partial(_compile_nth, tuple(args.arch), args.only)  # by number: processes cannot be sent kernels
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        usages = list(tqdm(pool.map(task, range(len(work))), total=len(work), desc="compiling"))
    print("| kernel | sm | tile | warps | stages | registers | stack | shared KiB | instructions |")
    print("|---|---|---|---|---|---|---|---|---|")
    bad = 0
    for (spec, arch), usage in zip(work, usages, strict=True):
        tile = spec.get("tile")
        too_large = usage.shared > SHARED_LIMIT[arch]
        flawed = usage.stack > 0 or too_large
        bad += too_large or (flawed and not spec["label"].endswith("odd"))
        print(
            f"| {spec['label']} | {arch} | {f'{tile.b_t}x{tile.b_s}' if tile else ''} | {spec['num_warps']} "
            f"| {spec['num_stages']} | {usage.registers} | {usage.stack} | {usage.shared:.0f}{' !' if flawed else ''} "
            f"| {f'{issued(usage, tile):.2f}' if tile else ''} |"
        )
    print(f"\n{len(work)} compiled, {bad} with spills or too much shared memory")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
