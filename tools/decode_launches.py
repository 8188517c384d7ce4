"""Counts the launches of a layer in a compiled decoding step: DCFormer with fused projections beside Llama.

    TRITON_INTERPRET=1 python tools/decode_launches.py

Inductor traces and schedules one step of a static cache for a batch of one, on the CPU, and is stopped before it
generates code. What its scheduler has left after fusion is counted: a fused group of operations is one launch, so is an
external operation (a matrix product, Llama's attention), and this package's operators are as many as they launch
kernels. The difference between models of three layers and of two is a layer.

The same scheduler decides for GPUs, with other rules, and two of these are followed here, which matters most for Llama:
a `cat` is not split (`force_pointwise_cat`: RoPE has four of them), and a reduction is one launch with the generated
operation that reads its result (a norm and its scale). Products stay external, as they do on a GPU unless inductor is
told to search (`max_autotune`); what it would then fuse with them is not counted.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Kernels behind an operator: scores, output, and the sum of the splits.
KERNELS = {"composed_decode": 3, "prepare_decode": 1, "decode_step": 4, "generate_packed": 1}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


class _ScheduledError(Exception):
    """Raised in the place of generating code."""


def scheduled(model: Any) -> Counter[str]:
    """What inductor schedules for one token of a static cache: name -> launches."""
    import torch._inductor.config
    from torch._inductor import ir, scheduler
    from transformers import StaticCache

    from dcformer import DCFormerForCausalLM
    from dcformer.cache_dcformer import use_static_layers

    found: Counter[str] = Counter()

    def stop(self: Any) -> None:
        generated = [node for node in self.nodes if not isinstance(node, scheduler.ExternKernelSchedulerNode)]
        read = {dependency.name for node in generated for dependency in node.unmet_dependencies}
        for node in self.nodes:
            if isinstance(node, scheduler.NopKernelSchedulerNode):
                continue
            if node.is_reduction() and read & node.get_buffer_names():  # counted with what reads it
                continue
            name = "generated"
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                if isinstance(node.node, ir.MultiOutput):  # one of the results of an operation that has several
                    continue
                overload = getattr(node.node, "op_overload", None)
                name = overload.__name__.partition(".")[0] if overload is not None else node.node.python_kernel_name
                name = name or type(node.node).__name__
            found[name] += KERNELS.get(name, 1)
        raise _ScheduledError

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=64)
    if isinstance(model, DCFormerForCausalLM):
        use_static_layers(cache, model.config.sliding_window)  # as `generate` does
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        step = torch.compile(model, fullgraph=True)
        with (
            mock.patch.object(scheduler.Scheduler, "codegen", stop),
            torch._inductor.config.patch(fx_graph_cache=False, force_pointwise_cat=True),
        ):
            try:
                step(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[4]]))
            except Exception:  # the compiler wraps what stops it
                if not found:
                    raise
    return found


def per_layer(make: Any) -> Counter[str]:
    """Launches of a layer: those of three layers less those of two.

    Args:
        make: number of layers -> model.
    """
    many, few = (scheduled(make(layers)) for layers in (3, 2))
    many.subtract(few)
    return Counter({name: count for name, count in many.items() if count})


def models(fused: bool = True, window: int | None = None) -> dict[str, Any]:
    """Name -> what makes the model, for `per_layer`. DCFormer has QK-norm, and the window, if there is one, in all
    layers; Llama has neither, and three products for queries, keys and values, or one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dcformer import DCFormerConfig, DCFormerForCausalLM

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from one_product import one_product

    def ours(layers: int) -> Any:
        fields = {"sliding_window": window, "num_hidden_layers": layers}
        if window is not None:
            fields["layer_types"] = ["sliding_attention"] * layers
        config = DCFormerConfig(**(SIZES | fields))
        model = DCFormerForCausalLM(config).eval()
        model.set_attn_implementation("dcformer_triton")
        if fused:
            model.fuse_projections()
        return model

    def llama(layers: int) -> Any:
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).eval()

    def one_product_llama(layers: int) -> Any:
        return one_product(llama(layers))

    return {"llama": llama, "llama, one product": one_product_llama, "dcformer": ours}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not os.environ.get("TRITON_INTERPRET") and not torch.cuda.is_available():
        parser.error("set TRITON_INTERPRET=1: without a GPU the kernels are interpreted.")
    makers = models()
    makers["dcformer, windows"] = models(window=32)["dcformer"]
    makers["dcformer, not fused"] = models(fused=False)["dcformer"]
    makers["dcformer, not fused, windows"] = models(fused=False, window=32)["dcformer"]
    for name, make in makers.items():
        counts = per_layer(make)
        print(f"{name:28} {counts.total():3} launches per layer: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
