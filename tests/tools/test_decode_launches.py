"""Launches of a compiled decoding step, as inductor schedules them, and the host's part of a step."""

import ast
import importlib
import re

import pytest
import torch
from helpers import REPOSITORY, run_source
from packaging.version import Version

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

IS_LATER = Version(torch.__version__) >= Version("2.14")  # makes two launches one where nothing is fused

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(REPOSITORY / "tools"))
    roofline = importlib.import_module("kernel_roofline")


@pytest.mark.slow
def test_a_fused_layer_launches_at_most_one_more_than_llamas():
    """In a process of its own, as Triton decides on import whether it interprets."""
    run = run_source("tools/decode_launches.py", interpreted=True)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    lines = re.findall(r"^(\S.*?) +(\d+) launches per layer: (.*)$", run.stdout, re.MULTILINE)
    counts = {name: int(count) for name, count, _ in lines}
    assert counts["llama"] > 12  # 7 products, attention, norms, RoPE, the cache, activations
    assert max(counts["dcformer"], counts["dcformer, windows"]) <= counts["llama"] + 1
    assert counts["dcformer, not fused"] > counts["dcformer"] + 4
    for how, suffix, llama in (
        ("fused", "", "llama, one product"), ("fused, Llama not", "", "llama"), ("not fused", ", not fused", "llama")
    ):  # fmt: skip
        found = tuple(counts[f"dcformer{suffix}{kind}"] - counts[llama] for kind in ("", ", windows"))
        saved = how == "not fused" and IS_LATER
        assert roofline.EXTRA_LAUNCHES[how] == tuple(n + saved for n in found)
    parts = {name: ast.literal_eval(part) for name, _, part in lines}
    assert parts["llama"]["mm"] == 7 and parts["dcformer"]["mm"] == parts["llama, one product"]["mm"] == 5
    assert parts["llama"]["generated"] <= 7  # RoPE's `cat` is whole and a norm counted once, as on a GPU
    assert parts["dcformer"]["generated"] <= 5  # rows of the static cache are not among them
    assert parts["dcformer"]["decode_step"] == parts["dcformer, windows"]["decode_step"] == 4


@pytest.mark.slow
def test_host_time_is_measured_without_a_gpu():
    """Every function is called, and a fused layer launches one kernel before attention. No time is judged."""
    run = run_source("tools/host_time.py", "--shapes", "405m", "--dtype", "float32", "--steps", "20")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "prepare_kernel 1.00, scores_kernel 1.00, output_kernel 1.00" in run.stdout
    lines = [line for line in run.stdout.splitlines() if " us" in line]
    times = [[float(time) for time in re.findall(r"(\d+) us", line)] for line in lines]
    assert len(times) == 8 + 2 * 4 and all(0 < shortest <= min(medians) for shortest, *medians in times)


# What the launcher is given goes into a list, `launched`.
LISTEN = """
import sys
from collections import Counter
from unittest import mock

import torch
from triton.runtime import driver

sys.path.insert(0, "tools")
from host_time import decode, fake_driver

def look(argument):
    if isinstance(argument, torch.Tensor):
        argument = argument.data_ptr()
    if isinstance(argument, int) and argument > 2**31:  # an address, which a repeated launch is given as a number
        return "address", argument % 16
    # profilers' hooks and what is for them are objects of each launch
    return argument if isinstance(argument, (int, float, tuple, type(None))) else type(argument)

launched, stand_in = [], fake_driver(Counter())
plain = stand_in.launcher_cls
class Launcher(plain):
    def __call__(self, *arguments):
        launched.append((self.name, [look(argument) for argument in arguments]))
stand_in.launcher_cls = Launcher
driver.set_active(stand_in)
"""
SECOND_LAYERS = """
from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.kernels import decode as decode_kernels, generator, prepare, step as step_kernels

sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
for fields in ({}, {"num_key_value_heads": 2, "compose_static": True}):
    config = DCFormerConfig(**sizes, num_attention_heads=4, sliding_window=None, **fields)
    model = DCFormerForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation("dcformer_triton")
    known = [module._RUN._known for module in (decode_kernels, generator, prepare, step_kernels)]
    model.register_forward_pre_hook(lambda *_: [one.clear() for one in known] and None)
    for fuse in (False, True):
        if fuse:
            model.fuse_projections()
        launched.clear()
        with mock.patch("dcformer.kernels.limits._device_reason", lambda *_: None):
            decode(model, 40, rounds=2)
        half = sum(name == "scores_kernel" for name, _ in launched) // 2
        assert half == 80, half
        steps, step = [], []
        for name, arguments in launched:
            if step and name in ("prepare_kernel", "generator_kernel") and "scores_kernel" in [n for n, _ in step]:
                steps.append(step)
                step = []
            step.append((name, arguments))
        steps.append(step)
        assert len(steps) == 160, len(steps)
        for first, second in zip(steps[::2], steps[1::2], strict=True):
            assert first == second, (first, second)
        print("equal:", Counter(name for name, _ in launched))
"""


@pytest.mark.slow
def test_the_launcher_gets_of_a_repeated_launch_what_triton_would_give_it():
    """Of two layers the first chooses its launches in each step, and Triton looks at them; the second repeats them."""
    run = run_source("-c", LISTEN + SECOND_LAYERS)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count("equal:") == 4
    assert run.stdout.count("prepare_kernel") == 2 and run.stdout.count("generator_kernel") == 2


PASSES = """
import zlib

from dcformer.kernels import launch, passes, problem, repeated
from dcformer.kernels.layout import Layout, Part, Stage
from dcformer.kernels.problem import Visibility

stand_in.utils.load_binary = lambda name, code, *_: (1, zlib.crc32(code) // 2, 32, 0, 1024)  # no function is as another

def run(length, heads, kv_heads, dtype, offset=0, chunk_bytes=None):
    def tensor(*shape):  # not always aligned to 16 bytes
        size = torch.Size(shape).numel()
        return torch.ones(size + 8, dtype=dtype)[offset : offset + size].view(shape)

    q, k = tensor(1, heads, length, 16), tensor(1, kv_heads, length, 16)
    flags = int(Part.QUERY | Part.KEY | Part.GATE)
    stage = Stage(tensor(1, heads, 5, length), tensor(1, kv_heads, heads // kv_heads, 5, length))
    first, last = torch.zeros(1, length, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32)[None]
    this = passes.Passes(
        q, k, k, (stage, stage), Visibility(first, last, -length, 1), Layout(flags, flags, 1, 2), 0.25, chunk_bytes
    )
    _, lse, *kept = this.forward()
    this.backward(q, lse.zero_(), *kept)

problem.FIRST_CHUNK = 16
cases = [(21, 4, 2, torch.bfloat16), (21, 4, 2, torch.bfloat16, 1), (70, 4, 2, torch.bfloat16, 0, 1)]
with mock.patch.object(passes, "look", lambda device: False):
    found = []
    for forgotten in (2, 1, 0):  # by Triton; chosen anew, and remembered from case to case; written down
        launched.clear()
        for case in cases:
            for known in (passes._recorded, repeated._compiled)[:forgotten]:
                known.clear()
            run(*case)
        found.append(list(launched))
by_triton = []
assert found[0] == found[1] == found[2]
assert len({arguments[4] for _, arguments in found[0]}) > 20  # compiled for different arguments
with mock.patch.object(launch.scores_kernel, "run", lambda *_, **__: by_triton.append(1)):
    run(*cases[0])
    assert not by_triton
    passes._recorded.clear()
    run(*cases[0])
    assert not by_triton
    passes._recorded.clear()
    repeated._compiled.clear()
    run(*cases[0])
assert len(by_triton) == 3
print("equal:", len(found[0]))
"""


@pytest.mark.slow
def test_passes_launch_what_triton_would():
    """Whole launches of a forward and a backward pass, the compiled function included, whatever was launched before."""
    run = run_source("-c", LISTEN + PASSES)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "equal:" in run.stdout
