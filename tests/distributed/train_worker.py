"""Trains a small model with Trainer and writes the losses: train_worker.py OUTPUT --batch N [--checkpointing].

`--model` is a name of `MODELS`, `--smoothing` that of labels.
"""

import json
from collections import Counter

import torch
from accelerate.utils import DistributedType
from collectives import Collectives
from small_run import parser, training_arguments
from transformers import Trainer, TrainerCallback

from dcformer import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCFormerForSequenceClassification,
    DCViTConfig,
    DCViTForImageClassification,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
)

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "initializer_range": 0.1,
}


IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "language": lambda: DCFormerForCausalLM(DCFormerConfig(**CONFIG)),
    "pruned heads": lambda: HeadSystemsForCausalLM(HeadSystemsConfig(**CONFIG, head_system="head_pruning")),
    "images": lambda: DCViTForImageClassification(DCViTConfig(**IMAGES, image_size=16, patch_size=4, num_labels=3)),
    "texts": lambda: DCFormerForSequenceClassification(DCFormerConfig(**CONFIG, num_labels=3, pad_token_id=0)),
}


class Look(TrainerCallback):
    """What is sharded, seen after a step, and what the last step communicates."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.collectives = Collectives()
        self.collectives.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.collectives.__exit__(None, None, None)
        self.counts, self.numbers = Counter(), Counter()
        for (kind, shape), count in self.collectives.counts.items():
            self.counts[kind] += count
            self.numbers[kind] += count * shape[0]

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        self.whole = sum(p.numel() for p in model.parameters())
        local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        self.local = sum(p.numel() for p in local)
        states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        self.state = sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in states)


def rows(count=24, length=21):
    """Rows of different lengths: losses are means over tokens, not over rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, (count, length), generator=generator)
    labels = ids.clone()
    for i in range(count):
        labels[i, length - i % 5 :] = -100
    return [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]


def labeled(name, count=24):
    """Rows of one of `MODELS` that is not a language model."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(count):
        picture = {"pixel_values": torch.randn(3, 16, 16, generator=generator)}
        text = {"input_ids": torch.randint(1, 97, (21,), generator=generator)}
        rows.append((picture if name == "images" else text) | {"labels": torch.tensor(i % 3)})
    return rows


def main():
    arguments = parser()
    arguments.add_argument("--model", default="language", choices=MODELS)
    arguments.add_argument("--smoothing", type=float, default=0.0)
    arguments.add_argument("--checkpointing", action="store_true")
    options = arguments.parse_args()
    torch.manual_seed(0)
    model = MODELS[options.model]()
    look = Look()
    trainer = Trainer(
        model=model,
        args=training_arguments(
            options, gradient_checkpointing=options.checkpointing, label_smoothing_factor=options.smoothing
        ),
        train_dataset=labeled(options.model) if options.model in ("images", "texts") else rows(),
        callbacks=[look],
    )
    trainer.train()
    history = [{k: entry[k] for k in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    kind = trainer.accelerator.distributed_type
    found = {
        "history": history,
        "whole": look.whole,
        "local": look.local,
        "state": look.state,
        "counts": look.counts,
        "numbers": look.numbers,
    }
    found |= {"fsdp2": kind == DistributedType.FSDP and trainer.accelerator.is_fsdp2}
    if trainer.is_world_process_zero():
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
