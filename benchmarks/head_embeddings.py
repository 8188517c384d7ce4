#!/usr/bin/env python
"""Head embeddings beside ordinary heads at one shape: attention's parameters and the held-out loss after equal steps.

Small language models over bytes, trained on this package's own Python source; the last tenth is held out. Arms: heads
of their own (MHA), shared keys and values (MQA), head embeddings that are added or multiplied, with the default
standard deviation at initialisation, 0.02 and 0, and a single head. Prints a Markdown table with the mean and the range
over seeds.

python benchmarks/head_embeddings.py --steps 600 --seeds 3
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

import dcformer

PLAIN = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)
HEADS, HIDDEN, LAYERS, LENGTH, BATCH = 8, 64, 2, 64, 16
ARMS: dict[str, dict] = {
    "MHA": {},
    "MQA": {"num_key_value_heads": 1},
    "Add": {"head_embeddings": "add"},
    "Mul": {"head_embeddings": "mul"},
    "Add, std 0.02": {"head_embeddings": "add", "head_embedding_init_std": 0.02},
    "Mul, std 0.02": {"head_embeddings": "mul", "head_embedding_init_std": 0.02},
    "Add, zeros": {"head_embeddings": "add", "head_embedding_init_std": 0.0},
    "Mul, zeros": {"head_embeddings": "mul", "head_embedding_init_std": 0.0},
    "single head": {"num_attention_heads": 1, "head_dim": HIDDEN // HEADS},
}


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the package's source, for training and held out."""
    files = sorted(Path(dcformer.__file__).parent.rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def train(fields: dict, seed: int, steps: int, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, float]:
    """Attention's parameters and the loss on held-out text, in nats per byte, of one model."""
    torch.manual_seed(seed)
    config = dcformer.DCFormerConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS, sliding_window=None,
        qk_norm=False, **({"num_attention_heads": HEADS} | PLAIN | fields),
    )  # fmt: skip
    model = dcformer.DCFormerForCausalLM(config).train()
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(dcformer.parameter_groups(model, lr=2e-3), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data[0]) - LENGTH, (BATCH,), generator=order)
        ids = torch.stack([data[0][start : start + LENGTH] for start in starts.tolist()])
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    held_out = data[1][: len(data[1]) // LENGTH * LENGTH].view(-1, LENGTH)
    with torch.no_grad():
        losses = [model(ids, labels=ids, use_cache=False).loss.item() for ids in held_out[::8].split(64)]
    attention = sum(p.numel() for name, p in model.named_parameters() if ".self_attn." in name)
    return attention, statistics.fmean(losses)


def main() -> None:
    """Trains every arm with every seed and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = text()
    rows = []
    with tqdm(total=len(ARMS) * options.seeds, unit="run") as progress:
        for name, fields in ARMS.items():
            found = []
            for seed in range(options.seeds):
                found.append(train(fields, seed, options.steps, data))
                progress.update()
            losses = [loss for _, loss in found]
            rows.append((name, found[0][0], statistics.fmean(losses), min(losses), max(losses)))
    print(f"{options.steps} steps, {options.seeds} seeds, H {HEADS}, E {HIDDEN}, {LAYERS} layers, {LENGTH} bytes\n")
    print("| | attention's parameters | held-out loss | range |\n|---|---|---|---|")
    for name, parameters, mean, low, high in rows:
        print(f"| {name} | {parameters:,} | {mean:.3f} | {low:.3f}-{high:.3f} |")


if __name__ == "__main__":
    main()
