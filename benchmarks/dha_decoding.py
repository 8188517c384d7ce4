"""Decoding with a full cache: a model with a quarter or a half of its key and value heads beside its source, on a CPU.

    python benchmarks/dha_decoding.py --context 4096 --rounds 7

Both are made from one Llama with random weights. The caches hold random keys and values of `--context` tokens, so no
prefill is needed. Before anything is timed, a step of the folded model is compared with that of its expansion. Rounds
take turns; a row has the median of a step's time and of its ratio to the source's in that round.
"""

import argparse
import copy
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dcformer import dha

RATIOS = (0.5, 0.25)


def filled(model, key_heads, value_heads, context: int, dtype: torch.dtype) -> DynamicCache:
    """A cache of a model with random rows, [1, heads, context, D] in each layer."""
    cache = DynamicCache()
    width = model.config.head_dim
    for layer, (keys, values) in enumerate(zip(key_heads, value_heads, strict=True)):
        generator = torch.Generator().manual_seed(layer)
        rows = [torch.randn(1, heads, context, width, generator=generator).to(dtype) for heads in (keys, values)]
        cache.update(*rows, layer)
    return cache


@torch.no_grad()
def steps(model, cache: DynamicCache, count: int) -> float:
    """Seconds of a decoding step."""
    token = torch.tensor([[1]])
    start = time.perf_counter()
    for _ in range(count):
        token = model(token, past_key_values=cache).logits.argmax(-1)
    return (time.perf_counter() - start) / count


@torch.no_grad()
def check(folded, context: int) -> None:
    """A cached step of a folded model against its expansion, on a prompt of real keys."""
    ids = torch.randint(100, (1, min(context, 64)))
    logits = []
    for model in (folded, dha.expand(folded)):
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        logits.append(model(ids[:, :1], past_key_values=cache).logits)
    difference = (logits[0] - logits[1]).abs().max() / logits[1].abs().max()
    if difference > 1e-4:
        raise SystemExit(f"error: a cached step differs from that of the expanded model by {difference:.1e}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="in a round (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--attention", nargs="+", default=["sdpa", "eager"], help="implementations of the folded models"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=options.layers, max_position_embeddings=2 * options.context)
    source = LlamaForCausalLM(config).eval()
    n = [16] * options.layers
    models = {"MHA source, sdpa": (source, n, n)}
    for ratio in RATIOS:
        plan = dha.search(source, ratio, progress=False)
        folded = dha.from_plan(source, plan)
        check(folded, options.context)
        for name in options.attention:
            one = copy.deepcopy(folded)
            one.set_attn_implementation(name)
            models[f"{100 * ratio:.0f} % of the heads, {name}"] = (one, plan.num_key_heads, plan.num_value_heads)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, (model, keys, values) in models.items():
            cache = filled(model, keys, values, options.context, torch.float32)
            steps(model, cache, 1)
            times[name].append(steps(model, cache, options.steps))
    first = next(iter(times))
    print(f"| {options.context:,} tokens, {options.layers} layers | ms a step | ratio (range) | cache, MiB |")
    print("|---|---|---|---|")
    for name, (model, keys, values) in models.items():
        ratios = [a / b for a, b in zip(times[name], times[first], strict=True)]
        held = 4 * options.context * model.config.head_dim * sum(keys + values) / 2**20
        print(
            f"| {name} | {1000 * statistics.median(times[name]):.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {held:.0f} |"
        )


if __name__ == "__main__":
    main()
