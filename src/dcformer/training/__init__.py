"""Training on text and conversations: arguments, data and checks around TRL's `SFTTrainer`."""

from ..errors import require_extra

require_extra("train", __name__, "accelerate", "datasets", "jinja2", "peft", "pyarrow", "tensorboard", "trl", "yaml")

from ..peft_dcformer import ATTENTION_TARGETS, COMPOSE_TARGETS, LORA_TARGETS, MLP_TARGETS
from .arguments import (
    DataArguments,
    ModelArguments,
    NewModelArguments,
    TrainingConfig,
    paper_learning_rate,
)
from .run import (
    PretrainingConfig,
    prepare_finetuning,
    prepare_pretraining,
    run_program,
    train,
)

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
