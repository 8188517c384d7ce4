"""Builds a trainer from arguments and runs it; used by examples/finetune.py and examples/pretrain.py."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.optimization import get_scheduler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler, get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import cached_file, logging
from trl import SFTTrainer, get_peft_config, get_quantization_config

from ..analysis import num_parameters
from ..errors import DCFormerError, loading_reason, refused
from ..head_systems import HeadSystem, HeadSystemsModel
from ..implementations_dcformer import TRITON
from ..kernels import unsupported_reason
from ..loading import LOADING_ERRORS, damaged_file
from ..modules.saving import from_pretrained_any, is_converted
from ..optimization import names_without_decay, parameter_groups
from .arguments import (
    DataArguments,
    ModelArguments,
    NewModelArguments,
    TrainingConfig,
    paper_learning_rate,
    parse,
    with_recipe,
)
from .data import (
    Rows,
    check_adapters,
    check_chat_template,
    check_output,
    check_special_tokens,
    check_tokenized,
    check_tokenizer,
    longest,
    make_data,
)
from .resume import SetupRecord, check_setup, setup_of

logger = logging.get_logger(__name__)


@dataclass
class PretrainingConfig(TrainingConfig):
    """`TrainingConfig` for a new model: packed, with the paper's learning rate for the model's size."""

    learning_rate: float | None = field(  # type: ignore[assignment]  # filled in before the trainer sees it
        default=None, metadata={"help": "peak; by default the paper's for the model's size"}
    )
    packing: bool = field(default=True, metadata={"help": "fill sequences with documents"})
    compose_rates: str | None = field(
        default=None,
        metadata={
            "help": "learning rates of composition relative to the others: a number, such as 0.1, or 'initial', in "
            "proportion to its initial values (`dcformer.parameter_groups`); needs an --optim that begins with "
            "adamw_torch"
        },
    )

    @property
    def rate_ratios(self) -> Any:
        """`compose_rates` as `parameter_groups` takes it.

        Raises:
            DCFormerError: when it is neither.
        """
        if self.compose_rates in (None, "initial"):
            return self.compose_rates
        try:
            ratio = float(self.compose_rates)  # type: ignore[arg-type]  # None is above
        except ValueError:
            ratio = math.nan
        if not 0 < ratio < math.inf:
            raise DCFormerError(f"--compose_rates {self.compose_rates}: expected a number above 0, or 'initial'")
        return ratio


def prepare_finetuning(arguments: Sequence[str] | None = None) -> tuple[SFTTrainer, str | None]:
    """Checks all input and builds the trainer.

    Args:
        arguments: the command line, `sys.argv[1:]` when None; `--help` lists them.

    Returns:
        the trainer, and the checkpoint to resume from or None: the arguments of `train`.

    Raises:
        DCFormerError, OSError: naming the bad value, what was expected and what to do. Any other error is a bug.
    """
    data, chosen, training = parse((DataArguments, ModelArguments, TrainingConfig), arguments)
    name = chosen.model_name_or_path
    if name is None:
        raise DCFormerError("model_name_or_path is not set: name the model to fine-tune with --model_name_or_path")
    checkpoint = check_output(training, name)
    source = {"revision": chosen.model_revision}
    config = _load("--model_name_or_path", AutoConfig.from_pretrained, name, **source)
    if (training.packing or training.padding_free) and is_converted(config):
        raise DCFormerError(
            f"{name} was converted, and the composition of converted models takes no rows without padding: leave "
            "--packing and --padding_free away."
        )
    if chosen.use_peft and is_converted(config) and "compose" not in (chosen.lora_modules_to_save or ()):
        logger.warning(
            f"{name} was converted, and its composition hardly trains beside adapters, which leave compose.qkw as it "
            "is: add --lora_modules_to_save compose to train all of it."
        )
    setup = setup_of(config, training.world_size, data, chosen, training)
    if checkpoint is not None:
        check_setup(checkpoint, setup)
    rows, held_out = make_data(data, training)
    option = "--tokenizer" if chosen.tokenizer else "--model_name_or_path"
    tokenizer = _load(option, AutoTokenizer.from_pretrained, chosen.tokenizer or name, **source)
    with refused(ValueError, ImportError):
        quantization, adapters = get_quantization_config(chosen), get_peft_config(chosen)
    if quantization is not None:
        source["quantization_config"] = quantization
    model = _load(
        "--model_name_or_path",
        partial(from_pretrained_any, auto_class=AutoModelForCausalLM),
        name,
        dtype=chosen.dtype,
        attn_implementation=chosen.attn_implementation,
        **source,
    )
    own = None
    if chosen.tokenizer:
        with suppress(OSError):  # the model may come without a tokenizer
            own = cached_file(name, "tokenizer.json", revision=chosen.model_revision)
    check_tokenizer(tokenizer, model, rows, own)
    if chosen.use_peft:
        check_adapters(model, chosen.lora_target_modules, "--lora_target_modules")
        check_adapters(model, chosen.lora_modules_to_save, "--lora_modules_to_save")
    trainer = _make_trainer(model, tokenizer, rows, held_out, training, checkpoint, setup, adapters)
    return trainer, checkpoint


def prepare_pretraining(arguments: Sequence[str] | None = None) -> tuple[SFTTrainer, str | None]:
    """As `prepare_finetuning`, for a new model with a preset's shape and a tokenizer's vocabulary.

    Args:
        arguments: the command line, `sys.argv[1:]` when None; `--help` lists them.

    Returns:
        the trainer, and the checkpoint to resume from or None: the arguments of `train`.

    Raises:
        DCFormerError, OSError: as `prepare_finetuning`.
    """
    classes = (DataArguments, NewModelArguments, PretrainingConfig)
    data, chosen, training = parse(classes, arguments)
    if (extended := with_recipe(classes, chosen, training, arguments)) is not None:
        data, chosen, training = parse(classes, extended)
    checkpoint = check_output(training)
    tokenizer = _load("--tokenizer", AutoTokenizer.from_pretrained, chosen.tokenizer)
    config = chosen.make_config(tokenizer)
    if training.learning_rate is None:
        training.learning_rate = paper_learning_rate(num_parameters(config))
    setup = setup_of(config, training.world_size, data, chosen, training)
    if checkpoint is not None:
        check_setup(checkpoint, setup)
    rows, held_out = make_data(data, training)
    set_seed(training.seed)
    with refused(ValueError, ImportError, what=f"--attn_implementation {chosen.attn_implementation}"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=chosen.attn_implementation)
    check_tokenizer(tokenizer, model, rows, own=None)
    return _make_trainer(model, tokenizer, rows, held_out, training, checkpoint, setup), checkpoint


def _load(option: str, load: Callable[..., Any], name: str, **arguments: Any) -> Any:
    """Calls a `from_pretrained`; errors name the option and the damaged file, or both places of a name."""
    try:
        return load(name, **arguments)
    except (ImportError, *LOADING_ERRORS) as error:
        reason: object = damaged_file(name, error) or error
        if isinstance(reason, AttributeError | KeyError | TypeError):  # their messages alone say little
            reason = f"cannot be loaded ({type(error).__name__}: {error})"
        if Path(name).exists():
            raise DCFormerError(f"{option} {name}: {reason}") from error
        raise FileNotFoundError(f"{option} {name}: {loading_reason(name, error)}") from error


def _make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    held_out: Rows | None,
    training: TrainingConfig,
    checkpoint: str | None,
    setup: dict[str, Any],
    peft_config: Any = None,
) -> SFTTrainer:
    """The trainer, with tokenized and checked rows. Completes `training` from model, data and checkpoint."""
    limit, patience = model.config.max_position_embeddings, training.early_stopping_patience
    if held_out is None and patience is not None:
        raise DCFormerError(
            f"--early_stopping_patience {patience} needs held-out rows: give --eval_data, --eval_split or --eval_rows"
        )
    if held_out is None and training.eval_strategy != "no":
        raise DCFormerError(
            f"--eval_strategy {training.eval_strategy.value} needs held-out rows: give --eval_data, --eval_split or "
            "--eval_rows"
        )
    if smoothing := training.label_smoothing_factor:
        systems = [module for module in model.modules() if isinstance(module, HeadSystem) and module.aux_loss_coef]
        if systems:
            raise DCFormerError(
                f"--label_smoothing_factor {smoothing}: TRL makes it from logits alone, so that the losses of "
                f"head_system={model.config.head_system!r} would train nothing. Leave it out"
            )
    if model.config._attn_implementation == TRITON:
        reason = unsupported_reason(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if reason is not None:
            raise DCFormerError(f"--attn_implementation dcformer_triton: {reason}")
    source, taken = training.chat_template_path, None
    if source is not None and not (Path(source).is_file() and source.endswith((".jinja", ".j2"))):  # as TRL has it
        taken = _load("--chat_template_path", AutoTokenizer.from_pretrained, source)
    check_chat_template(tokenizer, training, rows, held_out)
    check_special_tokens(tokenizer, taken, training, rows, held_out)
    training.dataset_text_field = "text"  # the name that `check_rows` gives
    training.max_length = longest(training, limit, isinstance(rows, IterableDataset))
    training.eval_on_start = (
        held_out is not None and checkpoint is None
    )  # a resumed run has this evaluation in its history
    text_config = model.config.get_text_config()
    size = text_config.vocab_size
    callbacks = [SetupRecord(setup), _OneEvaluation(), *([_EarlyStopping(patience)] if patience is not None else [])]
    with refused(ValueError, RuntimeError, ImportError, TemplateError):
        trainer = _Trainer(
            model=model,
            args=training,
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=callbacks,
        )
    if peft_config is not None and (changed := text_config.vocab_size) != size:
        logger.warning(
            f"--chat_template_path {training.chat_template_path}: TRL took over the tokens of its tokenizer, and the "
            f"vocabulary changed from {size} to {changed}. Before these adapters are loaded, call "
            f"resize_token_embeddings({changed}) of the model."
        )
    _check_optimizer(trainer)
    check_tokenized(trainer)
    return trainer


def _check_optimizer(trainer: SFTTrainer) -> None:
    """Refuses an optimizer or schedule that the trainer could not create, or not as asked, when training starts."""
    args = trainer.args
    optimizer = getattr(args.optim, "value", args.optim)
    if getattr(args, "rate_ratios", None) is not None and not optimizer.startswith("adamw_torch"):
        raise DCFormerError(
            f"--optim {optimizer}: --compose_rates needs PyTorch's AdamW, a name that begins with adamw_torch; choose "
            "one, such as --optim adamw_torch, or leave --compose_rates out"
        )
    with refused(ImportError, ValueError, what=f"--optim {optimizer}"):
        kind, options = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    parameter = torch.zeros(1, 1, requires_grad=True)
    is_plain = isinstance(kind, type) and not options.keys() & {"params", "model", "optimizer_dict"}
    if is_plain and issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch."):
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        given = "".join(f", --{name} {getattr(args, name)}" for name in names)
        with refused(ValueError, what=f"--optim {optimizer}{given}"):
            kind([parameter], **options)
    stand_in = torch.optim.SGD([parameter], lr=args.learning_rate)
    what = f"--lr_scheduler_type {args.lr_scheduler_type.value} --lr_scheduler_kwargs {args.lr_scheduler_kwargs}"
    with refused(TypeError, ValueError, what=what):
        get_scheduler(args.lr_scheduler_type, stand_in, 1, 100, args.lr_scheduler_kwargs)


class _EarlyStopping(EarlyStoppingCallback):
    """The library's callback, except that after resuming it continues the checkpoint's count."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]


class _OneEvaluation(TrainerCallback):
    """Evaluates no step twice: a stream that is resumed where a pass had ended reaches that end again."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = [entry for entry in state.log_history if entry["step"] == state.global_step]
        if any(name.startswith("eval_") for entry in last for name in entry):
            control.should_evaluate = False


class _Trainer(SFTTrainer):
    """TRL's trainer, with `token_accuracy`, the share of held-out tokens predicted right.

    (TRL's own `mean_token_accuracy` is a mean over batches.) Takes no step when the resumed run had already ended.
    """

    optimizer: Any
    _counts: list[int] | None = None  # while evaluating: for each batch, tokens predicted right and tokens with a loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts = self._counts
        if counts is None:
            return self._loss(model, inputs, *args, **kwargs)

        def count(**arguments: Any) -> Any:
            outputs = model(**arguments)
            if arguments.get("fused_lm_head"):
                for part in (outputs.is_top1, outputs.label_mask):
                    counts.append(self.accelerator.gather(part.sum()).sum().item())
            return outputs

        self._leave_repeated_rows_out(inputs["labels"])
        return self._loss(count, inputs, *args, **kwargs)

    def _loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss, with that of head systems: TRL goes past the model's head, which would add it."""
        found = super().compute_loss(*args, **kwargs)
        if self._systems is None or (added := self._systems.take_loss()) is None:
            return found
        if kwargs.get("num_items_in_batch") is not None:  # the losses of accumulated batches are added up
            added = added / self.current_gradient_accumulation_steps
        return found + added

    @cached_property
    def _systems(self) -> HeadSystemsModel | None:
        """The decoder of a model with a head system."""
        return next((module for module in self.model.modules() if isinstance(module, HeadSystemsModel)), None)

    def _leave_repeated_rows_out(self, labels: torch.Tensor) -> None:
        """Takes the labels of rows that come twice: accelerate fills up the last batches, one for each process.

        `gather_for_metrics` drops what such rows give, but not from a batch's mean or sum.
        """
        accelerator, remainder = self.accelerator, self.accelerator.gradient_state.remainder
        if accelerator.num_processes == 1 or not accelerator.gradient_state.end_of_dataloader or remainder <= 0:
            return
        rows = self.callback_handler.eval_dataloader.dataset
        is_joined = self.padding_free and isinstance(rows, Dataset)  # labels are [1, T], those of one row after another
        if is_joined and self.args.train_sampling_strategy == "group_by_length":  # of held-out rows, too
            logger.warning_once(
                "held-out rows that are joined and grouped by length: those that several processes repeat count twice. "
                "Leave --train_sampling_strategy away for the exact figures."
            )
            return
        own = len(labels)  # rows of this process
        if is_joined:
            own = self.args.eval_batch_size // (accelerator.num_processes if accelerator.split_batches else 1)
        first = accelerator.process_index * own
        kept = min(max(remainder - first, 0), own)
        if is_joined:
            first += len(rows) - remainder
            labels[:, sum(map(len, rows[first : first + kept]["input_ids"])) :] = -100
        else:
            labels[kept:] = -100

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        ratios = getattr(self.args, "rate_ratios", None)
        if self.optimizer is None and ratios is not None:
            chosen = self.model if model is None else model
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, chosen)
            groups = parameter_groups(chosen, self.args.learning_rate, self.args.weight_decay, ratios)
            self.optimizer = optimizer_class(groups, **options)
        return super().create_optimizer(model)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """As the library's, and as `parameter_groups`: without composition and without head embeddings."""
        excluded = names_without_decay(model)
        return [name for name in SFTTrainer.get_decay_parameter_names(self, model) if name not in excluded]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the library's, in a folder that is there from the start.

        Whether it is decides in each process if the best model is loaded, which needs all of them. The library looks
        behind a barrier, but before FSDP's shards make the folder.
        """
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            Path(self._get_output_dir(trial), name).mkdir(parents=True, exist_ok=True)
        super()._save_checkpoint(model, trial)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        counts: list[int] = []
        self._counts = counts
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._counts = None
        output.metrics[f"{metric_key_prefix}_token_accuracy"] = sum(counts[::2]) / max(1, sum(counts[1::2]))
        return output

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """As the library's; of a stream, which it takes for one pass, the pass and the batches that a run has had."""
        passes, batches = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        if batches and isinstance(self.train_dataset, IterableDataset):
            saved = TrainerState.load_from_json(str(Path(str(checkpoint), TRAINER_STATE_NAME)))
            # Passes, and the batches of one more over those that all steps of that run would have taken. So an epoch of
            # exactly 1 is the first pass, where the run ended; there may be more steps now.
            passes = math.ceil(saved.epoch) - 1
            batches = round((saved.epoch - passes) * saved.max_steps * self.args.gradient_accumulation_steps)
        return passes, batches

    @cached_property
    def _order(self) -> torch.Generator:
        """Of rows that are grouped by length."""
        return torch.Generator()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As the library's; rows that are grouped by length have an order that follows from seed and epoch, too."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = self._order
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._order.manual_seed(seed + kwargs["epoch"])
        stops = [callback for callback in self.callback_handler.callbacks if isinstance(callback, _EarlyStopping)]
        stopped = any(stop.early_stopping_patience_counter >= stop.early_stopping_patience for stop in stops)
        if stopped or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            if self.is_world_process_zero():
                print(f"the run had ended at step {self.state.global_step}: no steps remain")
        else:
            super()._run_epoch(*args, **kwargs)


def train(trainer: SFTTrainer, checkpoint: str | None = None) -> dict[str, float]:
    """Trains, evaluates, saves model and tokenizer, and prints the held-out accuracy before and after.

    Args:
        trainer: from `prepare_finetuning` or `prepare_pretraining`.
        checkpoint: the folder to resume from, or None. If the run had ended there, no step is taken.

    Returns:
        `loss` (mean over the steps of this call) and, with held-out rows, `before`, `after` and their difference
        `margin`: the share of held-out tokens with a loss (answers only, with `--assistant_only_loss`) that are the
        model's first choice; and `eval_loss`, the trainer's mean over rows of each batch's mean loss per token.
    """
    if trainer.is_world_process_zero():
        trainable, whole = (get_model_param_count(trainer.model, trainable_only=only) for only in (True, False))
        print(f"trains {trainable:,} of {whole:,} parameters")
    result = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_fsdp_enabled:  # checkpoints may be sharded over processes; the final model is not
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if is_converted(trainer.model.config) and trainer.is_world_process_zero():
        card = Path(trainer.args.output_dir, "README.md")
        if card.exists() and "generated_from_trainer" in card.read_text(encoding="utf-8"):
            card.unlink()  # TRL's, which loads the model without its composition
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    summary = {"loss": result.training_loss}
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        first = next(entry for entry in trainer.state.log_history if "eval_token_accuracy" in entry)
        before, after = first["eval_token_accuracy"], metrics["eval_token_accuracy"]
        summary |= {"before": before, "after": after, "margin": after - before, "eval_loss": metrics["eval_loss"]}
        if trainer.is_world_process_zero():
            print(
                f"held-out accuracy: {before:.1%} before, {after:.1%} after, {100 * (after - before):+.1f} points; "
                f"loss {first['eval_loss']:.3f} before, {metrics['eval_loss']:.3f} after"
            )
    if trainer.is_world_process_zero():
        print(f"wrote {trainer.args.output_dir}")
    return summary


def run_program(
    prepare: Callable[[Sequence[str] | None], tuple[SFTTrainer, str | None]], arguments: Sequence[str] | None = None
) -> dict[str, float]:
    """Prepares and trains, as a program. Invalid input ends it before training with one line, `error: ...`.

    Args:
        prepare: `prepare_finetuning` or `prepare_pretraining`.
        arguments: the command line, `sys.argv[1:]` when None.

    Returns:
        what `train` returns.

    Raises:
        SystemExit: with the message and exit status 1, when `prepare` refuses its input. A bug, there or in training,
            keeps its traceback.
    """
    try:
        trainer, checkpoint = prepare(arguments)
    except (DCFormerError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    return train(trainer, checkpoint)
