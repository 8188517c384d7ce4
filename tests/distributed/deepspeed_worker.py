"""Trains a saved model with Trainer and writes both: deepspeed_worker.py MODEL OUTPUT --batch N [--checkpointing]."""

import argparse
import json
import math
from pathlib import Path

from train_worker import rows
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import dcformer  # noqa: F401  # registers the model types


class Look(TrainerCallback):
    """What this process holds of the parameters, by name, outside of forward and backward passes."""

    def on_step_end(self, args, state, control, model, **kwargs):
        self.held = {}
        for name, parameter in model.named_parameters():
            whole = math.prod(getattr(parameter, "ds_shape", parameter.shape))
            self.held[name.removeprefix("module.")] = (parameter.numel(), whole)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    look = Look()
    settings = TrainingArguments(  # before the model: where there is DeepSpeed, from_pretrained asks it
        str(options.output),
        max_steps=6,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        eval_strategy="steps",
        eval_steps=3,
        use_cpu=True,
        gradient_checkpointing=options.checkpointing,
        bf16=options.bf16,
        optim="sgd",  # its updates are the gradients: no error is scaled away
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=settings,
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[look],
    )
    trainer.train()
    trainer.save_model()
    engine = trainer.model_wrapped
    found = {
        "history": [entry for entry in trainer.state.log_history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "held": look.held,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "processes": trainer.args.world_size,
    }
    if trainer.is_world_process_zero():
        (options.output / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
