"""Trains a converted ViT with Trainer and writes its losses: converted_worker.py OUTPUT --batch N."""

import json

import torch
from small_run import parser, training_arguments
from transformers import Trainer, ViTConfig, ViTForImageClassification

from dcformer.modules import convert_attention

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
}


def main() -> None:
    options = parser().parse_args()
    torch.manual_seed(0)
    model = convert_attention(ViTForImageClassification(ViTConfig(**CONFIG)), compose_rank=1)
    frozen = {name for name, _ in model.named_parameters() if ".compose." not in name}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen or name.startswith("classifier."))
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(i % 3)} for i in range(24)]
    trainer = Trainer(
        model=model,
        args=training_arguments(options),
        train_dataset=rows,
    )
    trainer.train()
    after = dict(model.named_parameters())
    moved = sorted(name for name, value in before.items() if not torch.equal(value, after[name]))
    found = {
        "processes": trainer.accelerator.num_processes,
        "history": [entry for entry in trainer.state.log_history if "loss" in entry],
        "moved": moved,
    }
    if trainer.is_world_process_zero():
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
