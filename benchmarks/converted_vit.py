"""What conversion costs a vision Transformer: `python benchmarks/converted_vit.py`.

A ViT-S/16 of Transformers at 224 px (197 tokens, bidirectional), random weights, as it is (eager and sdpa) and with
its attention converted ("dcmha" and "dcmha_chunked"): a forward pass, and one with its backward pass. All four are
timed in turn, in one process, after their outputs have been compared. Prints tables with the median of the rounds and,
relative to plain eager attention, the median ratio and its range over rounds.
"""

import argparse
import copy
import os
import statistics
import time

import torch
from transformers import ViTConfig, ViTForImageClassification

from dcformer.modules import convert_attention


def models(layers: int) -> dict[str, ViTForImageClassification]:
    """The same model with four implementations of attention."""
    torch.manual_seed(0)
    fields = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_hidden_layers": layers}
    plain = ViTForImageClassification(ViTConfig(**fields, num_labels=1000))
    converted = convert_attention(copy.deepcopy(plain))
    found = {}
    for name, model in (("eager", plain), ("sdpa", plain), ("dcmha", converted), ("dcmha_chunked", converted)):
        found[name] = copy.deepcopy(model)
        found[name].set_attn_implementation(name)
    return found


def seconds(model: ViTForImageClassification, images: torch.Tensor, train: bool) -> float:
    """One step."""
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        loss = model(images).logits.square().mean()
        if train:
            model.zero_grad()
            loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    candidates, images = models(arguments.layers), torch.randn(arguments.batch, 3, 224, 224)
    with torch.no_grad():
        expected = candidates["eager"](images).logits
        for name, model in candidates.items():
            torch.testing.assert_close(model(images).logits, expected, rtol=0, atol=1e-5, msg=name)  # float32
        for parameters in zip(*(candidates[name].parameters() for name in ("dcmha", "dcmha_chunked")), strict=True):
            moved = parameters[0] + 0.02 * torch.randn_like(parameters[0])  # away from where composition does nothing
            for parameter in parameters:
                parameter.copy_(moved)
        expected, found = (candidates[name](images).logits for name in ("dcmha", "dcmha_chunked"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    added = sum(p.numel() for p in candidates["dcmha"].parameters()) / sum(
        p.numel() for p in candidates["eager"].parameters()
    )
    print(
        f"ViT-S/16, {arguments.layers} layers, batch {arguments.batch}, float32, {torch.get_num_threads()} thread(s); "
        f"torch {torch.__version__}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; parameters x{added:.3f}"
    )
    for train in (False, True):
        rounds = [
            {name: seconds(model, images, train) for name, model in candidates.items()}
            for _ in range(arguments.rounds + 1)
        ][1:]  # the first warms up
        print(
            f"\n| {'training step' if train else 'forward pass'} | seconds | times eager | range |\n|---|---|---|---|"
        )
        for name in candidates:
            ratios = [one[name] / one["eager"] for one in rounds]
            median = statistics.median(one[name] for one in rounds)
            print(f"| {name} | {median:.3f} | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} |")


if __name__ == "__main__":
    main()
