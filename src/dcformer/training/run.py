"""From arguments to a trainer that is ready to run, and running it. examples/finetune.py and pretrain.py call this."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import cached_file
from trl import SFTTrainer, get_peft_config, get_quantization_config

from .arguments import DataArguments, ModelArguments, NewModelArguments, TrainingConfig, paper_learning_rate, parse
from .data import check_lengths, check_output, check_tokenizer, make_data, set_max_length


@dataclass
class PretrainingConfig(TrainingConfig):
    """`TrainingConfig` for a model from scratch: packed, at the paper's learning rate for the model's size."""

    learning_rate: float | None = field(  # type: ignore[assignment]  # filled in before the trainer sees it
        default=None, metadata={"help": "peak; the paper's for the model's size when not given"}
    )
    packing: bool = field(default=True, metadata={"help": "fill sequences with documents"})


def prepare_finetuning(arguments: Sequence[str] | None = None) -> tuple[SFTTrainer, str | None]:
    """Checks everything that can be wrong, and builds the trainer.

    Args:
        arguments: the command line, `sys.argv[1:]` when None; `--help` lists them.

    Returns:
        the trainer, and the checkpoint to resume from or None: the arguments of `train`.

    Raises:
        ValueError, OSError: naming the bad value, what was expected and what to do.
    """
    data, chosen, training = parse((DataArguments, ModelArguments, TrainingConfig), arguments)
    if chosen.model_name_or_path is None:
        raise ValueError("model_name_or_path is not set: name the model to fine-tune with --model_name_or_path")
    checkpoint = check_output(training)
    rows, held_out = make_data(data, training)
    source = {"revision": chosen.model_revision}
    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer or chosen.model_name_or_path, **source)
    quantization = get_quantization_config(chosen)
    if quantization is not None:
        source["quantization_config"] = quantization
    model = AutoModelForCausalLM.from_pretrained(
        chosen.model_name_or_path, dtype=chosen.dtype, attn_implementation=chosen.attn_implementation, **source
    )
    own = None
    if chosen.tokenizer:
        own = cached_file(
            chosen.model_name_or_path,
            "tokenizer.json",
            revision=chosen.model_revision,
            _raise_exceptions_for_missing_entries=False,
        )
    check_tokenizer(tokenizer, model, rows, own)
    peft_config = get_peft_config(chosen)
    return _make_trainer(model, tokenizer, rows, held_out, data, training, peft_config, checkpoint), checkpoint


def prepare_pretraining(arguments: Sequence[str] | None = None) -> tuple[SFTTrainer, str | None]:
    """As `prepare_finetuning`, for a new model of a preset's shape and a tokenizer's vocabulary."""
    data, chosen, training = parse((DataArguments, NewModelArguments, PretrainingConfig), arguments)
    checkpoint = check_output(training)
    rows, held_out = make_data(data, training)
    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer)
    config = chosen.make_config(tokenizer)
    if training.learning_rate is None:
        training.learning_rate = paper_learning_rate(config.num_parameters())
    set_seed(training.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=chosen.attn_implementation)
    check_tokenizer(tokenizer, model, rows, own=None)
    return _make_trainer(model, tokenizer, rows, held_out, data, training, None, checkpoint), checkpoint


def _make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Any,
    held_out: Any,
    data: DataArguments,
    training: TrainingConfig,
    peft_config: Any,
    checkpoint: str | None,
) -> SFTTrainer:
    limit = model.config.max_position_embeddings
    set_max_length(training, limit, data.streaming)
    patience = training.early_stopping_patience
    if held_out is None and (patience is not None or training.eval_strategy != "no"):
        raise ValueError(
            f"eval_strategy={training.eval_strategy} and early_stopping_patience={patience} need held-out rows: give "
            "--eval_data, --eval_split or --eval_rows"
        )
    training.eval_on_start = held_out is not None and checkpoint is None  # a resumed run has that line in its history
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[EarlyStoppingCallback(patience)] if patience is not None else None,
    )
    for prepared in (trainer.train_dataset, trainer.eval_dataset):
        if isinstance(prepared, Dataset):
            check_lengths(prepared, limit)
    return trainer


def train(trainer: SFTTrainer, checkpoint: str | None = None) -> dict[str, float]:
    """Trains, evaluates, saves model and tokenizer, and prints what training did to the held-out rows.

    Args:
        trainer: from `prepare_finetuning` or `prepare_pretraining`.
        checkpoint: the folder to resume from, or None.

    Returns:
        `loss` (mean over the run) and, with held-out rows, `before`, `after` and `margin`: the share of held-out tokens
        with a loss (answers only, with `--assistant_only_loss`) that are the model's first choice; and `eval_loss`.
    """
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    summary = {"loss": result.training_loss}
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        first = next(entry for entry in trainer.state.log_history if "eval_mean_token_accuracy" in entry)
        before, after = first["eval_mean_token_accuracy"], metrics["eval_mean_token_accuracy"]
        summary |= {"before": before, "after": after, "margin": after - before, "eval_loss": metrics["eval_loss"]}
        if trainer.is_world_process_zero():
            print(
                f"held-out accuracy: {before:.1%} before, {after:.1%} after, {100 * (after - before):+.1f} points; "
                f"loss {first['eval_loss']:.3f} before, {metrics['eval_loss']:.3f} after"
            )
    if trainer.is_world_process_zero():
        print(f"wrote {trainer.args.output_dir}")
    return summary
