"""Training on text and conversations: arguments, data and checks around TRL's `SFTTrainer`, which is a `Trainer`."""

from importlib.util import find_spec

if _missing := [name for name in ("peft", "tensorboard", "trl") if find_spec(name) is None]:
    raise ImportError(
        f'dcformer.training needs the extra "train", without which {", ".join(_missing)} is missing: '
        'pip install "dcformer[train]"'
    )

from .arguments import (
    ATTENTION_TARGETS,
    COMPOSE_TARGETS,
    LORA_TARGETS,
    MLP_TARGETS,
    DataArguments,
    ModelArguments,
    NewModelArguments,
    TrainingConfig,
    paper_learning_rate,
)
from .run import PretrainingConfig, prepare_finetuning, prepare_pretraining, run_program, train

__all__ = [
    "ATTENTION_TARGETS",
    "COMPOSE_TARGETS",
    "LORA_TARGETS",
    "MLP_TARGETS",
    "DataArguments",
    "ModelArguments",
    "NewModelArguments",
    "PretrainingConfig",
    "TrainingConfig",
    "paper_learning_rate",
    "prepare_finetuning",
    "prepare_pretraining",
    "run_program",
    "train",
]
