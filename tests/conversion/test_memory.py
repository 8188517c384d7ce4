"""Peak memory of conversions: at most three times the largest stored tensor and 500 MB, whatever the checkpoint's size.

Each conversion runs in a process of its own, on a checkpoint of 1.6 GB with a largest stored tensor of 168 MB. The
values of every tensor are one block of random values, repeated, which compresses as badly as trained weights.
"""

import json
import mmap
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

from dcformer import DCFormerConfig
from dcformer.conversion import open_checkpoint
from dcformer.formats import FORMATS
from dcformer.formats.base import native_shapes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc"),
]

MB = 10**6
ALLOWANCE = 500 * MB
# A part of the allowance that importing a CPU build of torch (220 MB) stays within; CUDA builds take more.
TORCH_IMPORT = 250 * MB
DISK_SPACE = 4000 * MB
DTYPE = torch.bfloat16
CONFIG = DCFormerConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=10,
    num_attention_heads=16,
    architectures=["DCFormerForCausalLM"],
    dtype=DTYPE,
)
BLOCK = (torch.randn(2**23, generator=torch.Generator().manual_seed(0)) * 0.02).to(DTYPE)

# Prints the process's peak in bytes: after importing torch, and at the end.
CONVERT = """
import json, pathlib, re, sys

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

import torch
after_torch = peak()
from dcformer import conversion
function, source, output, options = sys.argv[1:]
getattr(conversion, function)(source, output, progress=False, **json.loads(options))
print(json.dumps([after_torch, peak()]))
"""


def start_of(name: str) -> int:
    """Where in the block the values of a tensor begin."""
    return zlib.crc32(name.encode()) % len(BLOCK)


def values(name: str, shape: torch.Size) -> torch.Tensor:
    """The values of a native tensor."""
    start, end = start_of(name), start_of(name) + shape.numel()
    return BLOCK.repeat(-(-end // len(BLOCK)))[start:end].view(shape)


def write_hub(folder):
    """A single `pytorch_model.bin`, with q, k and v fused, as published; filled in place, to need little memory."""
    folder.mkdir()
    fused = [f"layers.{i}.attention.wqkv.weight" for i in range(CONFIG.num_hidden_layers)]
    parts, shapes = FORMATS["hub"].parts(CONFIG, present=fused), native_shapes(CONFIG)
    with torch.serialization.skip_data():
        torch.save(
            {part.name: torch.empty(part.shape(CONFIG), dtype=DTYPE) for part in parts}, folder / "pytorch_model.bin"
        )
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        stored = torch.load(folder / "pytorch_model.bin", mmap=True, weights_only=True)
    for part in parts:
        tensors = [values(name, shapes[name]) for name in part.natives()]
        stored[part.name].copy_(part.join(tensors, CONFIG, DTYPE))
    CONFIG.save_pretrained(folder)
    return folder


def check_values(folder, *names: str):
    """First, middle and last elements of native tensors; of all of them when none are named."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.shapes == native_shapes(CONFIG)
    for name in names or checkpoint.shapes:
        tensor = checkpoint.read(name)
        assert tensor.dtype == DTYPE
        for place in (0, tensor.numel() // 2, tensor.numel() - 1):
            expected = BLOCK[(start_of(name) + place) % len(BLOCK)]
            assert tensor[np.unravel_index(place, tensor.shape)] == expected, name


def convert(function: str, source, output, **options):
    """Converts in a new process, and checks what it needed."""
    command = [sys.executable, "-c", CONVERT, function, str(source), str(output), json.dumps(options)]
    after_torch, peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    infos = [list(open_checkpoint(place).source.infos.values()) for place in (source, output)]
    largest = max(info.nbytes for side in infos for info in side)
    bound = 3 * largest + ALLOWANCE + max(0, after_torch - TORCH_IMPORT)
    everything = after_torch + min(sum(info.nbytes for info in side) for side in infos)
    assert everything > 1.5 * bound  # or this would show nothing
    assert peak > largest  # likewise
    assert peak <= bound, f"{peak / MB:.0f} MB, bound {bound / MB:.0f} MB"
    return output


@pytest.fixture
def folder(tmp_path):
    if shutil.disk_usage(tmp_path).free < DISK_SPACE:
        pytest.skip(f"needs {DISK_SPACE / MB:.0f} MB of disk space")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.long
def test_conversions(folder):
    """From one format to the next, so that one checkpoint is generated, and two are on disk at a time."""
    hub, native, maxtext, back, pax = (folder / name for name in ("hub", "native", "maxtext", "back", "pax"))
    write_hub(hub)
    convert("convert_hub_to_safetensors", hub, native)
    shutil.rmtree(hub)
    check_values(native)
    pytest.importorskip("orbax.checkpoint", reason='needs Orbax: pip install "dcformer[jax]"')
    convert("convert_safetensors_to_jax", native, maxtext, format="maxtext")
    shutil.rmtree(native)
    convert("convert_jax_to_safetensors", maxtext, back)
    shutil.rmtree(maxtext)
    check_values(back)
    convert("convert_safetensors_to_jax", back, pax, format="pax")
    check_values(pax, "model.embed_tokens.weight", "model.layers.9.mlp.down_proj.weight", "lm_head.weight")
