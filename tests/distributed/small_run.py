"""What the runs of the workers with Trainer have in common: their options and how they train."""

import argparse
from pathlib import Path

from transformers import TrainingArguments


def parser() -> argparse.ArgumentParser:
    """Options of every worker: where the findings go, and rows per process and step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    return parser


def training_arguments(options: argparse.Namespace, **others) -> TrainingArguments:
    """Six steps on CPU, each with its loss logged, nothing saved."""
    return TrainingArguments(
        str(options.output.with_suffix("")),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **others,
    )
