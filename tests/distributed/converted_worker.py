"""Trains a converted ViT with Trainer, and writes its losses and its files: converted_worker.py OUTPUT --batch N."""

import json

import torch
from small_run import parser, training_arguments
from transformers import Trainer, ViTConfig, ViTForImageClassification

from dcformer.modules import convert_attention, from_pretrained_converted, save_compose

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
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".compose." in name or name.startswith("classifier."))
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(i % 3)} for i in range(24)]
    trainer = Trainer(
        model=model,
        args=training_arguments(options),
        train_dataset=rows,
    )
    trainer.train()
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in trainer.model.parameters())
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    folder = options.output.with_suffix("")
    trainer.save_model(str(folder))
    save_compose(trainer.model, folder / "compose.safetensors")
    if trainer.is_world_process_zero():
        after = from_pretrained_converted(folder, ViTForImageClassification).state_dict()
        found = {
            "processes": trainer.accelerator.num_processes,
            "history": [entry for entry in trainer.state.log_history if "loss" in entry],
            "moved": sorted(name for name, value in before.items() if not torch.equal(value, after[name])),
            "share": local / sum(p.numel() for p in trainer.model.parameters()),
        }
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
