"""Arguments of the training scripts, from the command line or a YAML file: the library's, with our defaults."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from transformers.utils import logging
from trl import ModelConfig, SFTConfig, TrlParser

from ..configuration_dcformer import DCFormerConfig
from ..errors import CONFIG_ERRORS, DCFormerError, raise_bug, refused
from ..peft_dcformer import LORA_TARGETS
from ..recipes import check_overrides, recipe

logger = logging.get_logger(__name__)

# Training arguments that must be finite and above 0 if given.
_POSITIVE = (
    "learning_rate",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "early_stopping_patience",
)
# ... and 0 or more.
_NOT_NEGATIVE = ("weight_decay", "max_grad_norm")

# Schedules that take `min_lr_rate`.
_TO_MINIMUM = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")

# Peak learning rates of the paper's scaling runs, each with the number of parameters up to which it is used.
_PAPER_RATES = ((600e6, 3e-4), (1.1e9, 2.5e-4), (float("inf"), 2e-4))


def paper_learning_rate(parameters: int) -> float:
    """The paper's peak learning rate (405M: 3e-4, 834M: 2.5e-4, 1.4B: 2e-4).

    Args:
        parameters: the model's number of parameters.

    Returns:
        3e-4 up to 600M parameters, 2.5e-4 up to 1.1B, 2e-4 above.
    """
    return next(rate for limit, rate in _PAPER_RATES if parameters <= limit)


@dataclass
class DataArguments:
    """The source of rows. A row is a text, a conversation ("messages"), or a "prompt" with its "completion"."""

    data: str = field(metadata={"help": "file or pattern such as 'texts/*.jsonl', folder, or name on the Hub"})
    data_config: str | None = field(default=None, metadata={"help": "configuration of a data set on the Hub"})
    split: str = field(default="train", metadata={"help": "split to train on"})
    column: str | None = field(
        default=None,
        metadata={"help": "column with the texts or conversations; by default `text` or `messages`"},
    )
    eval_data: str | None = field(
        default=None, metadata={"help": "held-out rows, in the form of --data; by default --data itself"}
    )
    eval_split: str | None = field(default=None, metadata={"help": "split of the held-out rows; by default train"})
    eval_rows: int = field(default=0, metadata={"help": "hold out this many rows of the training data instead"})
    streaming: bool = field(default=False, metadata={"help": "read rows while training; needs --max_steps"})
    shuffle_buffer: int = field(
        default=1000, metadata={"help": "rows among which a stream is shuffled; 0 for no shuffling"}
    )

    def __post_init__(self) -> None:
        if self.eval_rows and (self.eval_data or self.eval_split):
            raise DCFormerError(
                f"--eval_rows {self.eval_rows} holds out training rows, and --eval_data or --eval_split names others: "
                "give one of the two"
            )
        if self.eval_rows < 0 or self.shuffle_buffer < 0:
            raise DCFormerError(f"eval_rows={self.eval_rows}, shuffle_buffer={self.shuffle_buffer}: expected 0 or more")


@dataclass
class ModelArguments(ModelConfig):
    """TRL's model arguments (`--use_peft`, `--load_in_4bit`, ...), with LoRA on every linear layer of a DCFormer."""

    tokenizer: str | None = field(default=None, metadata={"help": "folder or name; by default the model's own"})
    lora_target_modules: list[str] | None = field(
        default_factory=LORA_TARGETS.copy, metadata={"help": "names of the layers that get adapters"}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout of adapters; the paper trains without dropout"})

    def __post_init__(self) -> None:
        super().__post_init__()
        # TRL unpacks a single name, which PEFT takes for a regular expression over full paths: `q_proj` matches none
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            self.lora_target_modules = [self.lora_target_modules]


@dataclass
class NewModelArguments:
    """A model from scratch."""

    tokenizer: str = field(metadata={"help": "folder or name of the tokenizer; its size becomes the vocabulary's"})
    preset: str = field(default="dcformer-405m", metadata={"help": "a published size, see DCFormerConfig.from_preset"})
    recipe: str | None = field(
        default=None,
        metadata={
            "help": "a run of the paper, such as dcformer-405m or transformer++-405m-qknorm (docs/scaling.md), in "
            "place of --preset: its model, batch, steps and rates, but for what is given otherwise"
        },
    )
    scale: float = field(
        default=1.0,
        metadata={
            "help": "share of the recipe's steps, and so tokens, unless --max_steps or --num_train_epochs is given"
        },
    )
    devices: int | None = field(
        default=None,
        metadata={
            "help": "devices that share the recipe's batch, which decides the accumulation; by default this run's"
        },
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={
            "help": "configuration fields to change, e.g. '{\"num_hidden_layers\": 4}' (JSON or YAML); those of the "
            "command line are added to those of the file, and win"
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "eager, dcformer_chunked or dcformer_triton; by default the best available"},
    )

    def make_config(self, tokenizer: Any) -> DCFormerConfig:
        """The recipe's model or the preset, with the overrides, the vocabulary and special tokens of the tokenizer.

        Args:
            tokenizer: of the new model.

        Returns:
            the configuration of the new model.

        Raises:
            DCFormerError: on an unknown recipe, preset or field, an invalid value, or overrides that are not a mapping.
        """
        with refused(ValueError):
            config = recipe(self.recipe).config if self.recipe else DCFormerConfig.from_preset(self.preset)
        fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        fields["vocab_size"] = len(tokenizer)
        overrides = _mapping(self.config_overrides)
        try:
            changes = fields | overrides
            if self.recipe:
                return recipe(self.recipe, **changes).config
            config = DCFormerConfig.from_preset(self.preset, **changes)
            check_overrides(config, changes)
            return config
        except CONFIG_ERRORS as error:
            raise_bug(error)
            raise DCFormerError(f"--config_overrides {overrides}: {error}") from error


def _mapping(overrides: Any) -> dict[str, Any]:
    """Configuration overrides, which may be text in JSON or YAML, or None."""
    mapping = given = overrides or {}
    if isinstance(given, str):
        try:
            mapping = json.loads(given)  # first, because YAML takes 5e5 for a string
        except ValueError:
            try:
                mapping = yaml.safe_load(given)
            except yaml.YAMLError as error:
                raise DCFormerError(f"--config_overrides {given!r}: {error}") from error
    if not isinstance(mapping, dict):
        raise DCFormerError(f"--config_overrides {given!r}: expected a mapping such as {{num_hidden_layers: 4}}")
    return mapping


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's training arguments with the defaults of the paper's recipe (section 4 of arXiv 2405.08553).

    AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped at norm 1, 1 % warm-up, cosine to 10 % of the
    peak, no dropout, bfloat16 where the GPU has it.
    """

    output_dir: str | None = field(default=None, metadata={"help": "folder for checkpoints, logs and the final model"})
    learning_rate: float = field(default=3e-5, metadata={"help": "peak; a tenth of the paper's for pre-training"})
    adam_beta2: float = field(default=0.95, metadata={"help": "beta2 of AdamW"})
    weight_decay: float = field(default=0.1, metadata={"help": "weight decay"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "largest norm of the gradients"})
    warmup_steps: float = field(default=0.01, metadata={"help": "steps; below 1 a share of all steps"})
    lr_scheduler_type: str = field(default="cosine_with_min_lr", metadata={"help": "the library's schedules"})
    lr_scheduler_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "arguments of the schedule, JSON; by default min_lr_rate 0.1 for those that take it"},
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "longest sequence in tokens. With packing or streaming the model's max_position_embeddings by "
            "default; otherwise rows are truncated only if this is given, and longer ones are an error without it"
        },
    )
    packing_strategy: str = field(
        default="bfd_split",
        metadata={
            "help": "bfd_split loses no token, bfd truncates what does not fit",
            "choices": ["bfd", "bfd_split"],  # TRL's "wrapped" does not keep documents apart
        },
    )
    gradient_checkpointing: bool | None = (
        field(  # None rather than False, which would override the name that the option gets in v6
            default=None,
            metadata={"help": "recompute activations: less memory, slower", "nargs": "?", "const": True},
        )
    )
    bf16: bool | None = field(
        default=None,
        metadata={"help": "bfloat16 mixed precision; on GPUs by default", "nargs": "?", "const": True},
    )
    report_to: None | str | list[str] = field(  # noqa: RUF036  # the library's order: HfArgumentParser goes by it
        default="tensorboard", metadata={"help": "tensorboard, none, wandb, ..."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "stop after this many evaluations without improvement, and keep the best model"}
    )

    def __post_init__(self) -> None:
        given: Any = self  # mypy does not follow TRL
        if not given.output_dir:  # the library would take "trainer_output"
            raise DCFormerError("output_dir is not set: name a folder for checkpoints and the model with --output_dir")
        for name in (*_POSITIVE, *_NOT_NEGATIVE):
            value, may_be_zero = getattr(given, name), name in _NOT_NEGATIVE
            is_finite = isinstance(value, int | float) and 0 <= value < math.inf
            if value is not None and not (is_finite and (value or may_be_zero)):
                least = "0 or more" if may_be_zero else "more than 0"
                raise DCFormerError(f"{name} is {value}: expected {least}, and finite: give another --{name}")
        if given.max_steps == 0:
            raise DCFormerError("max_steps is 0: expected more, or -1 to train for --num_train_epochs")
        if given.use_liger_kernel:
            raise DCFormerError(
                "use_liger_kernel: Liger has no kernels for DCFormer. Leave it out, TRL's fused cross entropy is used"
            )
        if given.eval_packing and not (given.packing or given.padding_free):
            raise DCFormerError(
                "eval_packing is True without packing: TRL would join held-out documents and not keep them apart. Give "
                "--packing, too, or leave --eval_packing out"
            )
        if given.lr_scheduler_kwargs is None and given.lr_scheduler_type in _TO_MINIMUM:
            given.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        if given.early_stopping_patience is not None:
            given.load_best_model_at_end = True
            if given.eval_strategy == "no":
                given.eval_strategy = given.save_strategy
            if given.eval_steps is None:
                given.eval_steps = given.save_steps
        if given.bf16 is None:
            given.bf16 = (
                not given.fp16 and not given.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            )
        given.dataloader_pin_memory = given.dataloader_pin_memory and torch.cuda.is_available()
        super().__post_init__()


def with_recipe(
    classes: Sequence[type],
    chosen: NewModelArguments,
    training: TrainingConfig,
    arguments: Sequence[str] | None = None,
) -> list[str] | None:
    """The command line with the training arguments of the recipe that it, or its YAML file, names.

    Args:
        classes: of the arguments, as for `parse`.
        chosen, training: as parsed from `arguments`.
        arguments: the command line, `sys.argv[1:]` when None.

    Returns:
        the recipe's arguments before those given, which win; None without a recipe.

    Raises:
        DCFormerError: on an unknown recipe or scale, beside a preset, and when its batch cannot be shared out.
    """
    if chosen.recipe is None:
        if chosen.scale != 1.0 or chosen.devices is not None:
            raise DCFormerError("--scale and --devices are of a recipe: name one with --recipe")
        return None
    line = list(sys.argv[1:] if arguments is None else arguments)
    given = _given(classes, line)
    if "preset" in given:
        raise DCFormerError(
            f"--preset {chosen.preset} and --recipe {chosen.recipe} both name a model: give one of the two"
        )
    run = recipe(chosen.recipe).scaled(chosen.scale)
    is_by_epochs = "max_steps" in given or "num_train_epochs" in given
    if training.max_steps > 0:  # which goes before epochs
        run, is_by_epochs = replace(run, steps=training.max_steps), False
    own_batch = "gradient_accumulation_steps" in given
    if own_batch and chosen.devices is not None:
        raise DCFormerError(
            f"--devices {chosen.devices} decides the accumulation, and --gradient_accumulation_steps "
            f"{training.gradient_accumulation_steps} is given: leave one of the two out"
        )
    per_device = training.per_device_train_batch_size
    here = training.world_size * training.train_batch_size // per_device
    devices = here if chosen.devices is None else chosen.devices
    values = run.arguments(*((1, 1) if own_batch else (devices, per_device)))
    if devices != here:
        taken = run.sequences * here // devices
        logger.warning(
            f"--devices is {devices}, and this run has {here}: a step takes {taken} sequences and not the recipe's "
            f"{run.sequences}. Start {devices} processes, as with accelerate launch --num_processes, or leave it out."
        )
    values.pop("per_device_train_batch_size")
    if is_by_epochs:
        values |= {"max_steps": -1, "warmup_steps": 0.01}
    if "lr_scheduler_type" in given:
        values.pop("lr_scheduler_kwargs")
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in values.items()}
    return [word for name, text in texts.items() if name not in given for word in (f"--{name}", text)] + line


def _split(line: Sequence[str]) -> tuple[str | None, list[str]]:
    """The YAML file that a command line names, if any, and its other words."""
    words = [part for word in line for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in words:
        return None, words
    at = words.index("--config")
    if at + 1 == len(words):
        raise DCFormerError("--config names no file: expected a YAML file of arguments, as those in examples/configs")
    return words[at + 1], words[:at] + words[at + 2 :]


def _check_file(classes: Sequence[type], file: str) -> None:
    """Refuses names that no argument has, and values of another type or beside its choices; the parser takes care of
    other text."""
    with open(file, encoding="utf-8") as text:  # whose name is in errors of YAML
        given = yaml.safe_load(text)
    if not isinstance(given, dict):
        return  # refused by the parser, which also has variables of the environment, "env"
    kinds: dict[Any, Any] = {name: kind for part in classes for name, kind in get_type_hints(part).items()}
    choices = {f.name: [*f.metadata["choices"]] for part in classes for f in fields(part) if "choices" in f.metadata}
    for name, value in given.items():
        if name == "env":
            continue
        if name not in kinds:
            raise DCFormerError(f"--config {file}: {name!r} is not an argument; --help lists all arguments")
        if value is not None and value not in (known := choices.get(name, [value])):
            raise DCFormerError(f"--config {file}: {name} is {value!r}: expected one of {', '.join(map(str, known))}")
        kind = kinds[name]
        options = (kind, *get_args(kind))
        # a number or date may be meant as text; the library's annotation of fsdp is narrower than what it takes
        is_text = str in options and not isinstance(value, bool | list | dict)
        try:
            if not (isinstance(value, str) or is_text or name == "fsdp"):
                type_validator(name, value, kind | int if float in options else kind)
        except TypeError as error:
            advice = "give another, or leave it out"
            if isinstance(value, bool):
                advice = "if it is a word, quote it: YAML takes no, off, yes and on for false and true"
            raise DCFormerError(
                f"--config {file}: {name} is {json.dumps(value, default=str)}: expected "
                f"{kind.__name__ if isinstance(kind, type) else kind}; {advice}"
            ) from error


def _given(classes: Sequence[type], line: Sequence[str]) -> set[str]:
    """Names of the arguments on a command line that has been parsed, and in its YAML file."""
    file, line = _split(line)
    names = set() if file is None else set(yaml.safe_load(Path(file).read_text(encoding="utf-8")))
    parser = TrlParser(classes)
    every = [f.name for kind in classes for f in fields(kind)]
    parser.set_defaults_with_config(**dict.fromkeys(every, argparse.SUPPRESS))
    return names | set(vars(parser.parse_known_args(line)[0]))


def parse(classes: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parses arguments. The command line takes precedence over the YAML file of `--config`, and that over defaults.

    Of `--config_overrides` each field does so on its own.

    Args:
        classes: dataclasses whose fields are the arguments.
        arguments: the command line, `sys.argv[1:]` when None.

    Returns:
        an object of each class, in their order.

    Raises:
        DCFormerError: on invalid values or unknown options, an invalid or unreadable YAML file, or unknown arguments in
            it.
    """

    def refuse(message: str) -> NoReturn:  # argparse prints its usage, which has a hundred lines here
        raise DCFormerError(f"{message}; --help lists all arguments")

    parser = TrlParser(classes)
    parser.error = refuse  # type: ignore[method-assign]
    file, words = _split(sys.argv[1:] if arguments is None else arguments)
    # ImportError: a library of --report_to or --optim
    with refused(ValueError, RuntimeError, ImportError, yaml.YAMLError):
        try:
            if file is not None:
                _check_file(classes, file)
                words = ["--config", file, *words]
            parsed = tuple(parser.parse_args_and_config(words))
        except OSError as error:
            raise DCFormerError(
                f"--config {error.filename}: {error.strerror}. Expected a YAML file of arguments, such as those in "
                "examples/configs."
            ) from error
    for part in parsed:
        if isinstance(part, NewModelArguments):
            of_file = _mapping(parser.get_default("config_overrides"))
            part.config_overrides = of_file | _mapping(part.config_overrides)
    return parsed
