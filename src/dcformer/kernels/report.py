"""Compiles every kernel for GPUs that need not be there, and prints what it takes: registers, stack, shared memory.

`python -m dcformer.kernels.report` (or `make kernel-report`). A kernel whose stack is not 0 spills registers to memory;
one that wants more shared memory than a block may have does not run.
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
from .launch import GATE, KEY, LAUNCHES, QUERY, Layout, constants
from .tuning import Tile, choose

SHARED_LIMIT = {80: 163, 89: 99, 90: 227}  # KiB per block
# (sizes of the paper, head dim)
SIZES = (("405M", 64), ("2.8B", 80), ("6.9B 13B", 128))
FULL = Layout(pre=QUERY | KEY | GATE, post=QUERY | KEY | GATE, rank=2)

# arguments that are multiples of 16 for lengths, strides and addresses that are; the launcher finds that out by itself
_ALIGNED = {"T", "S", "n_t", "n_s", "s_0", "t_0", "stride_map", "stride_ib"}
_ALIGNED |= {f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhts"}
_FLOAT32 = {"p_lse", "p_delta", "p_gwk", "p_gwq"}  # tensors in float32 for every dtype
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers per thread, stack bytes per thread (spills), shared KiB per block."""

    registers: int
    stack: int
    shared: float


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
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{field}:(\d+)", text)[1]) for field in ("REG", "STACK"))  # type: ignore[index]
    return Usage(registers, stack, compiled.metadata.shared / 1024)


def attention_spec(
    name: str, dim: int, arch: int, dtype: str = "bf16", layout: Layout = FULL, tile: Tile | None = None
) -> dict[str, Any]:
    """A kernel of `attention` as the launcher launches it on an architecture; see `compile_usage`.

    Args:
        name: of `launch.LAUNCHES`.
        dim: head dim.
        arch: compute capability.
        dtype: "bf16", "fp16" or "fp32".
        layout: what composition there is.
        tile: instead of the one from the table.
    """
    kernel = LAUNCHES[name].kernel
    tile = tile or choose(name, dim, _DTYPES[dtype], arch)
    known = constants(name, layout, dim, dim, tile)
    found = {key: known[key] for key in kernel.arg_names if key in known}
    maps = "bf16" if dtype == "bf16" else "fp32"
    signature = {}
    for key in kernel.arg_names:
        if key in found:
            signature[key] = "constexpr"
        elif key.startswith("p_"):
            signature[key] = "*i32" if key in ("p_first", "p_last") else f"*{dtype}"
            signature[key] = f"*{maps}" if key in ("p_maps", "p_tiles", "p_grads") else signature[key]
            signature[key] = "*fp32" if key in _FLOAT32 else signature[key]
        else:
            signature[key] = {"scale": "fp32", "stride_map": "i64"}.get(key, "i32")
    aligned = [i for i, key in enumerate(kernel.arg_names) if signature[key][0] == "*" or key in _ALIGNED]
    return {
        "kernel": kernel, "signature": signature, "constexprs": found, "num_warps": tile.num_warps,
        "num_stages": tile.num_stages, "attrs": {(i,): [["tt.divisibility", 16]] for i in aligned},
    }  # fmt: skip


def attention_specs(arch: int) -> list[dict[str, Any]]:
    """The kernels of `attention`, in bfloat16, fully composed (pre, post, query, key, gates), R = 2.

    The number of heads does not matter. Those that only stream maps know no head dim, and come once.
    """
    specs = []
    for name, launch in LAUNCHES.items():
        streams = "D" not in launch.kernel.arg_names
        for sizes, dim in (("", 128),) if streams else SIZES:
            specs.append(attention_spec(name, dim, arch) | {"label": f"{name} {sizes}".strip()})
    return specs


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
    """Prints the table. Returns 1 when a kernel spills or wants too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities")
    parser.add_argument("--only", default="", help="kernels whose label matches this expression")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    work = _work(tuple(args.arch), args.only)
    task = partial(_compile_nth, tuple(args.arch), args.only)  # by number: processes cannot be sent kernels
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        usages = list(tqdm(pool.map(task, range(len(work))), total=len(work), desc="compiling"))
    print("| kernel | sm | tile | warps | stages | registers | stack | shared KiB |\n|---|---|---|---|---|---|---|---|")
    bad = 0
    for (spec, arch), usage in zip(work, usages, strict=True):
        tile = "x".join(str(spec["constexprs"][key]) for key in ("B_T", "B_S") if key in spec["constexprs"])
        flawed = usage.stack > 0 or usage.shared > SHARED_LIMIT[arch]
        bad += flawed
        print(
            f"| {spec['label']} | {arch} | {tile} | {spec['num_warps']} | {spec['num_stages']} | {usage.registers} "
            f"| {usage.stack} | {usage.shared:.0f}{' !' if flawed else ''} |"
        )
    print(f"\n{len(work)} compiled, {bad} with spills or too much shared memory")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
