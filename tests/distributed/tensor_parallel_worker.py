"""Loads every checkpoint of a folder split over the processes; writes what it computes and how often it communicates.

torchrun ... tensor_parallel_worker.py FOLDER: for FOLDER/NAME, a checkpoint, FOLDER/NAME.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from collectives import Collectives
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import dcformer


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split(path, **arguments):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **arguments)


def compute(path, arguments):
    """Logits, loss, gradients, generated tokens and collectives of a checkpoint; why it cannot be fused."""
    model = split(path, **arguments)
    ids = torch.arange(26).view(2, 13)
    with torch.no_grad(), Collectives() as inference:
        logits = model(ids, use_cache=False).logits
    with Collectives() as forward:
        loss = model(ids, labels=ids, use_cache=False).loss
    with Collectives() as backward:
        loss.backward()
    counts = {"inference": inference.counts, "forward": forward.counts, "backward": backward.counts}
    refused = None
    if isinstance(model, dcformer.DCFormerForCausalLM):
        try:
            model.fuse_projections()
        except ValueError as error:
            refused = str(error)
    composed = [p for name, p in model.named_parameters() if ".compose." in name]
    return {
        "logits": logits,
        "loss": loss.detach(),
        "grads": {name: full(p.grad) for name, p in model.named_parameters()},
        "generated": model.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0),
        "counts": counts,
        "fusing": refused,
        "compose_share": sum(p.to_local().numel() for p in composed) / max(1, sum(p.numel() for p in composed)),
    }


def main(folder):
    dist.init_process_group("gloo")
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        arguments = {"distributed_config": DistributedConfig(tp_plan="auto")}
        if path.name.startswith("tp_plan"):
            arguments = {"tp_plan": "auto"}  # as before Transformers 5.18
        if path.name.startswith("eager"):
            arguments["attn_implementation"] = "eager"
        try:
            found = compute(path, arguments)
        except ValueError as error:
            found = {"error": str(error)}
        if dist.get_rank() == 0:
            torch.save(found, path.with_suffix(".pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
