"""What ``dcformer-eval`` adds to lm-eval: DCFormer is registered, this package's tasks are found, errors come early."""

import argparse
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoTokenizer

import dcformer  # registers the model types: `--model hf` loads them without remote code

from ..conversion.errors import CONFIG_ERRORS, first_line
from ..errors import DCFormerError, raise_bug
from .items import FILE_KEY, NUM_SHOTS, EvaluationError, read_paper_file

TASKS_FOLDER = Path(__file__).resolve().parent / "tasks"

_PAPER_TASKS = {"dcformer_synthetic", *(f"dcformer_synthetic_{num_shots}shot" for num_shots in NUM_SHOTS)}
_HF_MODELS = ("hf", "hf-auto", "huggingface")  # lm-eval's names of one class


# --- what lm-eval would find late, or never ---------------------------------------------------------------------------


def _add_tasks(args: argparse.Namespace) -> None:
    """Puts this package's tasks before the user's folder (later folders override earlier ones)."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    own = args.include_path
    if own is None and getattr(args, "config", None):
        own = EvaluatorConfig.load_yaml_config(args.config).get("include_path")
    folders = [own] if isinstance(own, str) else own or []
    for folder in folders:
        if not Path(folder).is_dir():
            raise EvaluationError(f"--include_path {folder}: expected a folder of tasks (YAML files), got none there")
    args.include_path = [TASKS_FOLDER, *folders]


def _check_batch_size(batch_size: Any) -> None:
    if not re.fullmatch(r"[1-9]\d*|auto(:\d+(\.\d+)?)?", str(batch_size)):
        raise EvaluationError(f"--batch_size {batch_size}: expected a number of at least 1, auto, or auto:N")


def _check_model(model_args: Mapping[str, Any], chat_template: bool | str) -> None:
    """What configuration and tokenizer tell about one of our models: they are read before its weights."""
    source = model_args.get("pretrained")
    if not source:
        raise EvaluationError("no model: add --model_args pretrained=FOLDER (or a name on the Hub)")
    dtype = model_args.get("dtype", "auto")
    if dtype != "auto" and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise EvaluationError(f"--model_args dtype={dtype}: expected auto, float32, bfloat16 or float16")
    where = {name: model_args[name] for name in ("revision", "subfolder", "trust_remote_code") if name in model_args}
    named = model_args.get("tokenizer") or source
    try:
        config = AutoConfig.from_pretrained(source, **where)
        tokenizer = AutoTokenizer.from_pretrained(named, **where)
    except (OSError, *CONFIG_ERRORS) as error:
        raise_bug(error)
        raise EvaluationError(
            f"--model_args pretrained={source}: expected a folder (or a name on the Hub) with config.json and a "
            f"tokenizer, or tokenizer=FOLDER beside it ({first_line(error)})"
        ) from error
    if not isinstance(config, dcformer.DCFormerConfig):
        return
    longest, asked = config.max_position_embeddings, model_args.get("max_length")
    if asked is not None and not (isinstance(asked, int) and 1 <= asked <= longest):
        raise EvaluationError(
            f"--model_args max_length={asked}: expected 1 to {longest}, the model's max_position_embeddings"
        )
    # Added tokens are left out: a model may do without those at the end, such as runs of spaces.
    if tokenizer.vocab_size > config.vocab_size and "peft" not in model_args:
        raise EvaluationError(
            f"the tokenizer of {named} has {tokenizer.vocab_size} tokens, the model a vocabulary of "
            f"{config.vocab_size}: name the model's own by --model_args tokenizer=FOLDER"
        )
    if chat_template and not tokenizer.chat_template:
        raise EvaluationError(
            f"--apply_chat_template: the tokenizer of {named} has no chat template; leave the option out, or put a "
            "chat_template.jinja into its folder"
        )


def _check_output(path: str | os.PathLike) -> None:
    """Makes the folder of the results and writes there: where lm-eval cannot, it only warns, at the end."""
    folder = Path(path).parent if Path(path).suffix == ".json" else Path(path)  # as lm-eval has it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise EvaluationError(
            f"--output_path {path}: no file can be written to the folder {folder} ({error.strerror}); choose another"
        ) from error


def _check(options: Mapping[str, Any]) -> None:
    """Looks at the arguments of ``simple_evaluate`` before it loads the model."""
    tasks, metadata, tracker = options["tasks"], options["metadata"] or {}, options["evaluation_tracker"]
    if not tasks:
        raise EvaluationError("no tasks: add --tasks NAME,NAME")
    if any(isinstance(task, str) and task in _PAPER_TASKS for task in tasks):
        read_paper_file(metadata.get(FILE_KEY))
    _check_batch_size(options["batch_size"])
    if options["model"] in _HF_MODELS:
        _check_model(options["model_args"], options["apply_chat_template"])
    if tracker.output_path:
        _check_output(tracker.output_path)


# --- the command ------------------------------------------------------------------------------------------------------


def _share_items_between_processes() -> None:
    """Makes each process of ``accelerate launch`` evaluate its share of the items on any device.

    lm-eval 0.4.13 does so only where it sees several GPUs; on CPUs every process would evaluate everything.
    """
    from lm_eval.models.huggingface import HFLM

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise accelerate takes each process for the only one
    initialise = HFLM.__init__
    if getattr(initialise, "shares_items", False):
        return

    @functools.wraps(initialise)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if self.world_size == 1 and hasattr(self, "accelerator"):  # lm-eval keeps it if there are several processes
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    wrapped.shares_items = True  # type: ignore[attr-defined]
    HFLM.__init__ = wrapped


def _run(parser: Any, args: argparse.Namespace) -> None:
    import lm_eval.evaluator

    begun = False

    def checked(simple_evaluate: Callable) -> Callable:
        def call(**options: Any) -> Any:
            _check(options)
            return simple_evaluate(**options)

        return call

    def noted(evaluate: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            begun = True
            return evaluate(*args, **kwargs)

        return call

    try:
        if hasattr(args, "include_path"):  # lm-eval's `run`, `ls` and `validate`
            _add_tasks(args)
        if args.command == "run":
            args.tasks = [name for name in args.tasks or () if name]
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                _share_items_between_processes()
        with (
            patch.object(lm_eval, "simple_evaluate", checked(lm_eval.simple_evaluate)),
            patch.object(lm_eval.evaluator, "evaluate", noted(lm_eval.evaluator.evaluate)),
        ):
            parser.execute(args)
    except DCFormerError:
        raise
    except Exception as error:  # of lm-eval or the libraries below it: options, tasks, model, data
        if begun:
            raise
        raise_bug(error, (Exception,))
        logging.getLogger("lm_eval").debug("before the evaluation", exc_info=True)
        raise EvaluationError(
            f"{first_line(error)} ({type(error).__name__}; `dcformer-eval run --help` and `dcformer-eval ls tasks` "
            "list options and tasks, LMEVAL_LOG_LEVEL=debug shows where this was raised)"
        ) from error


def run(parser: Any, args: argparse.Namespace) -> int:
    """Runs lm-eval's command line, with DCFormer and this package's tasks.

    Args:
        parser: lm-eval's.
        args: what it made of the command line.

    Returns:
        0, or 1 on an error that is found before items are evaluated: it is printed as one line.

    Raises:
        Exception: whatever goes wrong once items are evaluated, and bugs.
    """
    try:
        _run(parser, args)
    except DCFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
