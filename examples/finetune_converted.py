"""Fine-tunes a ViT of Transformers with converted attention, all its own parameters frozen, on the digits.

    python examples/finetune_converted.py --output runs/converted           # three seeds, about two minutes on one core
    python examples/finetune_converted.py --output runs/look --seeds 0 --steps 20   # a look at how it goes

A seed: a small ViT is trained on scikit-learn's digits; its attention is converted (`convert_attention`), which changes
nothing at first; the composition alone is trained on, by Transformers' `Trainer`. Beside it, from the same ViT and for
as many steps: the ViT as it was with all of its parameters trained on, which says what steps alone bring. The converted
model is saved, loaded, and evaluated again from its files. A seed that is in `results.json` is not run again.
"""

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path

import torch
from digits import load_digits
from study import spread, write_text
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from dcformer.errors import MissingExtraError, require_extra
from dcformer.modules import convert_attention, from_pretrained_converted

SMALL = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_labels": 10,
    "initializer_range": 0.1,  # at the usual 0.02 positions are learned late
}
LABELS = {
    "trained": "ViT, trained",
    "converted": "converted, nothing trained",
    "composition": "converted, composition trained",
    "further": "ViT, all of it trained on",
}


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Images and labels as the models' arguments."""
    images, labels = zip(*rows, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.stack(labels)}


def accuracy(predictions) -> dict[str, float]:
    """Percent of the test images that are right."""
    return {"accuracy": 100 * float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def trainer_of(model, output: Path, steps: int, learning_rate: float, seed: int) -> Trainer:
    """Transformers' trainer for a model, on the digits."""
    train, test = (TensorDataset(*split) for split in load_digits())
    arguments = TrainingArguments(
        str(output),
        max_steps=steps,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=256,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        seed=seed,
        save_strategy="no",
        dataloader_pin_memory=False,
        report_to="none",
        logging_steps=max(1, steps // 4),
    )
    return Trainer(model, arguments, data_collator=collate, train_dataset=train, eval_dataset=test,
                   compute_metrics=accuracy)  # fmt: skip


def scores(trainer: Trainer) -> dict[str, float]:
    """Accuracy, loss and number of trained parameters of the trainer's model."""
    found = trainer.evaluate()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {"accuracy": found["eval_accuracy"], "loss": found["eval_loss"], "trained": trained}


def run(seed: int, steps: int, learning_rate: float, output: Path) -> dict[str, dict[str, float]]:
    """One seed: the scores of every row of `LABELS`; writes the converted model to `output`."""
    set_seed(seed)
    model = ViTForImageClassification(ViTConfig(**SMALL))
    trainer = trainer_of(model, output, steps, 2e-3, seed)
    trainer.train()
    found = {"trained": scores(trainer)}
    further = trainer_of(copy.deepcopy(model), output, steps, learning_rate, seed)

    convert_attention(model)  # zero_init: it computes what it did
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".compose." in name
    trainer = trainer_of(model, output, steps, learning_rate, seed)
    found["converted"] = scores(trainer) | {"trained": 0}
    trainer.train()
    found["composition"] = scores(trainer)
    further.train()
    found["further"] = scores(further)

    trainer.save_model(str(output))  # a folder that `from_pretrained_converted` loads
    loaded = from_pretrained_converted(output, ViTForImageClassification)
    again = scores(trainer_of(loaded, output, steps, learning_rate, seed))
    if again["loss"] != found["composition"]["loss"]:
        raise RuntimeError(f"the loaded model's loss is {again['loss']}, was {found['composition']['loss']}")
    return found


def table(runs: list[dict]) -> str:
    """Means over seeds with standard deviations, in Markdown."""
    lines = ["| | accuracy, % | loss | parameters trained |", "|---|---|---|---|"]
    for name, label in LABELS.items():
        cells = []
        for what, digits in (("accuracy", 2), ("loss", 4)):
            values = [scored[name][what] for scored in runs]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {spread(values):.{digits}f}")
        lines.append(f"| {label} | {cells[0]} | {cells[1]} | {runs[0][name]['trained']:,} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> list[dict]:
    """Runs the seeds, prints the table and returns their scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the models and results.json")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="of the first training, and of each that follows")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="after the conversion")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    try:
        require_extra("train", "examples/finetune_converted.py", "accelerate")
        load_digits()
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    path, runs = options.output / "results.json", []
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for seed in options.seeds:
        settings = f"seed {seed}, {options.steps} steps, learning rate {options.learning_rate:g}"
        if settings not in done:
            print(settings, flush=True)
            done[settings] = run(seed, options.steps, options.learning_rate, options.output / f"seed{seed}")
            write_text(path, json.dumps(done, indent=1) + "\n")
        runs.append(done[settings])
    print(table(runs))
    return runs


if __name__ == "__main__":
    main()
