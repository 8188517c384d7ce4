"""What a decoding step and the passes of attention cost the host outside of CUDA graphs, measured without a GPU.

    python tools/host_time.py [--shapes small 6.9b] [--dtype bfloat16]

Kernels are compiled for a GPU and all up to the call of the driver runs as it would there; a stand-in for the launcher
does nothing. Tensors are on the CPU, where torch computes when it would only launch on a GPU: that is part of the
figures, and least with the shape "small"; the host's own work does not depend on the shape. The hidden size is 64.

Decoding: each figure is of many calls, of a dynamic cache that grows by a token a step, while nothing else is timed.
Kernels have been compiled, but no launch is remembered: every length is new. Three columns: the shortest call, as other
work on the machine only ever adds; the median; and the median of the first layer's calls, where launches are chosen
when one has to be. Asking a GPU what it can do is left out (`limits._device_reason`).

Passes: forward and backward over 64 tokens, as a model's layers repeat them; as the first layer chooses them for a new
length, and the second, which writes them down; and as if nothing was ever like it, so that Triton looks at all
arguments of each launch. Asking for marks (`overflow.look`) is left out: it waits for a CPU.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

LAYERS = 2
HEADS = {"small": (4, 16), "405m": (16, 64), "2.8b": (32, 80), "6.9b": (32, 128), "13b": (40, 128)}
# what is timed: label -> where the function is. `decode_step` is all between a layer's product and its last projection
TIMED = {
    "layer": ("dcformer.modeling_dcformer.DCFormerDecoderLayer", "forward"),
    "Llama's layer": ("transformers.models.llama.modeling_llama.LlamaDecoderLayer", "forward"),
    "check of the fused weights": ("dcformer.fusion_dcformer.FusedProjections", "is_intact"),
    "fused product": ("dcformer.fusion_dcformer.FusedProjections", "__call__"),
    "decode_step": ("dcformer.kernels.step", "decode_step"),
    "attention": ("dcformer.modeling_dcformer.DCFormerAttention", "forward"),
    "Llama's attention": ("transformers.models.llama.modeling_llama.LlamaAttention", "forward"),
    "an operator's launches": ("dcformer.kernels.repeated.Repeated", "__call__"),
}


def fake_driver(launches: Counter[str]) -> Any:
    """A driver of Triton that compiles for sm_90 and launches nothing, but counts in `launches`."""
    from triton.backends.compiler import GPUTarget

    class Launcher:
        def __init__(self, source: Any, metadata: Any):
            self.name = metadata.name

        def __call__(self, *arguments: Any) -> None:
            launches[self.name] += 1

    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *arguments: (1, 1, 32, 0, 1024),
        ),
    )


def decode(model: Any, steps: int, rounds: int = 1) -> None:
    """Decodes so many tokens behind an empty cache."""
    from transformers import DynamicCache

    with torch.no_grad():
        for _ in range(rounds):
            cache = DynamicCache(config=model.config)
            for _ in range(steps):
                model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)


def forget() -> None:
    """Forgets all launches, so that lengths are new. Kernels stay compiled."""
    from dcformer.kernels import decode, generator, prepare, step

    for module in (decode, generator, prepare, step):
        module._RUN._known.clear()


def times(label: str, model: Any, steps: int) -> tuple[float, float, float]:
    """Seconds of calls of one of `TIMED` while decoding: the shortest, the median, and that of the first layer's."""
    owner, name = TIMED[label]
    module, _, attribute = owner.rpartition(".")
    holder: Any = sys.modules[owner] if owner in sys.modules else getattr(sys.modules[module], attribute)
    function, seconds = getattr(holder, name), []

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return result

    forget()
    with mock.patch.object(holder, name, timed):
        decode(model, steps)
    per_step = len(seconds) // steps
    seconds = seconds[per_step:]  # the first token is the prompt, which goes another way
    first = [x for i, x in enumerate(seconds) if i % per_step < per_step // LAYERS]
    return min(seconds), median(seconds), median(first)


def print_row(label: str, seconds: Sequence[float]) -> None:
    """Prints a line of the table."""
    print(f"  {label:38}" + "".join(f"{x * 1e6:9.0f} us" for x in seconds), flush=True)


def passes(heads: int, dim: int, dtype: torch.dtype, calls: int) -> None:
    """Prints what the passes of attention take, fully composed, R = 2."""
    from dcformer.kernels import passes as recorded
    from dcformer.kernels import repeated
    from dcformer.kernels.layout import Layout, Part, Stage
    from dcformer.kernels.passes import Passes
    from dcformer.kernels.problem import Visibility
    from dcformer.kernels.schemas import new_norms

    length, flags = 64, int(Part.QUERY | Part.KEY | Part.GATE)
    states = torch.ones(1, heads, length, dim, dtype=dtype)
    sides = torch.ones(1, heads, 5, length, dtype=dtype), torch.ones(1, heads, 1, 5, length, dtype=dtype)
    first, last = torch.zeros(1, length, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32)[None]
    seen = Visibility(first, last, -length, 1)
    saved = torch.zeros(1, heads, length), torch.zeros(0, 0), new_norms(states, states)

    def problem() -> Passes:
        return Passes(states, states, states, (Stage(*sides),) * 2, seen, Layout(flags, flags, 1, 2), 0.125)

    runs = {"forward pass": lambda: problem().forward(), "backward pass": lambda: problem().backward(states, *saved)}
    with mock.patch("dcformer.kernels.passes.look", lambda device: False):
        for label, run in runs.items():
            for _ in range(3):  # compiles, and writes down
                run()
            for name in ("", ", first of a new length", ", second of a new length", ", of a new kind"):
                seconds = []
                for _ in range(calls):
                    if name:
                        recorded._recorded.clear()
                    if "second" in name:
                        run()
                    if "kind" in name:
                        repeated._compiled.clear()
                    start = time.perf_counter()
                    run()
                    seconds.append(time.perf_counter() - start)
                print_row(label + name, (min(seconds), median(seconds)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=HEADS, default=["small"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=200, help="tokens decoded, or passes, for each figure")
    parser.add_argument("--window", type=int, help="of all layers of DCFormer; none when not given")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("unset TRITON_INTERPRET: interpreted kernels have no launcher.")
    from transformers import LlamaConfig, LlamaForCausalLM
    from triton.runtime import driver

    from dcformer import DCFormerConfig, DCFormerForCausalLM
    from dcformer.kernels import step  # noqa: F401  # so that its function can be timed

    torch.set_num_threads(1)
    launches: Counter[str] = Counter()
    driver.set_active(fake_driver(launches))
    with ExitStack() as stack:
        stack.enter_context(mock.patch("dcformer.kernels.limits._device_reason", lambda *_: None))
        for shape in arguments.shapes:
            heads, dim = HEADS[shape]
            sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS}
            sizes |= {"num_attention_heads": heads, "head_dim": dim}
            dtype = getattr(torch, arguments.dtype)
            llama = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()
            kinds = None if arguments.window is None else ["sliding_attention"] * LAYERS
            config = DCFormerConfig(**sizes, sliding_window=arguments.window, layer_types=kinds)
            model = DCFormerForCausalLM(config).to(dtype).eval()
            model.set_attn_implementation("dcformer_triton")
            model.fuse_projections()
            launches.clear()
            for _ in range(2):  # all variants of kernels are compiled, those for new lengths too
                forget()
                decode(llama, arguments.steps)
                decode(model, arguments.steps)
            calls = 2 * arguments.steps * LAYERS
            kernels = ", ".join(f"{name} {count / calls:.2f}" for name, count in launches.items())
            print(f"{shape}: kernels per layer: {kernels}")
            print(f"  {'':38}{'shortest':>12}{'median':>12}{'first layer':>12}")
            for label in TIMED:
                print_row(label, times(label, llama if "Llama" in label else model, arguments.steps))
            passes(heads, dim, dtype, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
