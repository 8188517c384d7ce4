"""What ``dcformer-eval`` adds to lm-eval: DCFormer's registration, this package's tasks, and early errors."""

import argparse
import copy
import io
import logging
import math
import os
import re
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

import dcformer  # registers the model types: `--model hf` loads them without remote code

from ..errors import DCFormerError, first_line, raise_bug, reports
from ..loading import LOADING_ERRORS, check_parameters, damaged_file, named_device, refuse_mixtures
from ..modules.saving import is_converted
from .items import FILE_KEY, NUM_SHOTS, EvaluationError, read_paper_file

TASKS_FOLDER = Path(__file__).resolve().parent / "tasks"

_PAPER_TASKS = {"dcformer_synthetic", *(f"dcformer_synthetic_{num_shots}shot" for num_shots in NUM_SHOTS)}
_HF_MODELS = ("hf", "hf-auto", "huggingface")  # lm-eval's names of one class


# --- checks that lm-eval makes late, or never ------------------------------------------------------------------------


def _add_tasks(args: argparse.Namespace, own: str | list[str] | None) -> None:
    """Puts this package's tasks before the user's folders (later folders override earlier ones)."""
    folders = [own] if isinstance(own, str) else own or []
    for folder in folders:
        if not Path(folder).is_dir():
            raise EvaluationError(f"--include_path {folder}: expected a folder of tasks (YAML files), found none there")
    args.include_path = [TASKS_FOLDER, *folders]


def _check_batch_size(batch_size: Any) -> None:
    if not re.fullmatch(r"[1-9]\d*|auto(:\d+(\.\d+)?)?", str(batch_size)):
        raise EvaluationError(f"--batch_size {batch_size}: expected a number of at least 1, auto, or auto:N")


def _check_limit(limit: Any) -> None:
    if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
        raise EvaluationError(f"--limit {limit}: expected a number of items of a task, or below 1 a share, above 0")


def _check_model(model_args: Mapping[str, Any], gen_kwargs: Mapping[str, Any], chat_template: bool | str) -> Any:
    """Checks a model by its configuration, tokenizer and, where it is this package's, files, before these are loaded.

    Returns:
        the configuration, of any model.
    """
    source = model_args.get("pretrained")
    if not source:
        raise EvaluationError("no model: add --model_args pretrained=FOLDER (or a name on the Hub)")
    dtype = model_args.get("dtype", "auto")
    if dtype != "auto" and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise EvaluationError(f"--model_args dtype={dtype}: expected auto, float32, bfloat16 or float16")
    where = {name: model_args[name] for name in ("revision", "subfolder", "trust_remote_code") if name in model_args}
    named = model_args.get("tokenizer") or source
    refuse_mixtures(source, where)
    try:
        config = AutoConfig.from_pretrained(source, **where)
        tokenizer = AutoTokenizer.from_pretrained(named, **where)
    except LOADING_ERRORS as error:
        reason = damaged_file(source, error) or damaged_file(named, error) or first_line(error)
        raise EvaluationError(
            f"--model_args pretrained={source}: expected a folder (or a name on the Hub) with config.json and a "
            f"tokenizer, or tokenizer=FOLDER beside it ({reason})"
        ) from error
    if chat_template and not tokenizer.chat_template:
        raise EvaluationError(
            f"--apply_chat_template: the tokenizer of {named} has no chat template; leave the option out, or put a "
            "chat_template.jinja into its folder"
        )
    _check_lengths(config, model_args.get("max_length"), gen_kwargs.get("max_gen_toks"))
    if not isinstance(config, dcformer.DCFormerConfig) or "peft" in model_args:
        return config
    try:
        check_parameters(source, config, where)
    except (DCFormerError, OSError) as error:
        raise EvaluationError(f"--model_args pretrained={source}: {first_line(error)}") from error
    # Added tokens do not count: a model may lack those at the end, such as runs of spaces.
    if tokenizer.vocab_size > config.vocab_size:
        raise EvaluationError(
            f"the tokenizer of {named} has {tokenizer.vocab_size} tokens, the model a vocabulary of "
            f"{config.vocab_size}: name the model's own by --model_args tokenizer=FOLDER"
        )
    return config


def _check_lengths(config: Any, asked: Any, generated: Any) -> None:
    """Checks `max_length` and `max_gen_toks`, where given, against the context that a configuration has, if any.

    Models with `rope_parameters` may leave it, of which there is a warning; most others have a table of positions.
    """
    text_config = config.get_text_config(decoder=True)
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is None or longest < 1:  # XLNet's -1
        return
    if asked is not None:
        is_length, has_rope = isinstance(asked, int) and asked >= 1, hasattr(text_config, "rope_parameters")
        if not is_length or (asked > longest and not has_rope):
            raise EvaluationError(
                f"--model_args max_length={asked}: expected 1 to {longest}, the model's max_position_embeddings"
            )
        if asked > longest:
            logging.getLogger("lm_eval").warning(
                f"--model_args max_length={asked} is beyond {longest}, the model's max_position_embeddings"
            )
    most = asked or longest
    if generated is not None and not (isinstance(generated, int) and 1 <= generated < most):
        raise EvaluationError(
            f"--gen_kwargs max_gen_toks={generated}: expected 1 to {most - 1}, within the model's context"
        )


def _check_output(path: str | os.PathLike) -> None:
    """Checks that the results folder can be written: lm-eval would only warn, at the end."""
    folder = Path(path).parent if Path(path).suffix == ".json" else Path(path)  # as lm-eval has it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise EvaluationError(
            f"--output_path {path}: no file can be written to the folder {folder} ({error.strerror}); choose another"
        ) from error


def _check(options: Any) -> Any:
    """Checks lm-eval's configuration of a run (`EvaluatorConfig`) before lm-eval loads the model.

    Returns:
        the model's configuration, where it is one of Transformers.
    """
    tasks = [options.tasks] if isinstance(options.tasks, str) else options.tasks
    names = [name for task in tasks or () for name in str(task).split(",")]
    if not names:
        raise EvaluationError("no tasks: add --tasks NAME,NAME")
    if any(fnmatch(task, name) for task in _PAPER_TASKS for name in names):
        read_paper_file((options.metadata or {}).get(FILE_KEY))
    _check_batch_size(options.batch_size)
    _check_limit(options.limit)
    if "use_cache" in (options.gen_kwargs or {}):
        raise EvaluationError("--gen_kwargs use_cache: lm-eval sets it itself; leave it out")
    config = None
    if options.model in _HF_MODELS:
        config = _check_model(options.model_args, options.gen_kwargs or {}, options.apply_chat_template)
    if options.output_path:
        _check_output(options.output_path)
    return config


# --- the command ------------------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> str | None:
    """Adds this package's tasks to the arguments, and checks a run's. Returns the model of Transformers to evaluate."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    if args.command != "run":
        if hasattr(args, "include_path"):  # lm-eval's `ls` and `validate`
            _add_tasks(args, args.include_path)
        return None
    args.tasks = [name for name in args.tasks or () if name]
    with redirect_stdout(io.StringIO()):  # with --config it prints all values, and does so again when it runs
        options = EvaluatorConfig.from_cli(copy.deepcopy(args))
    _add_tasks(args, options.include_path)
    if args.device and options.model in _HF_MODELS:  # lm-eval takes the CPU in place of what it does not find
        named_device(args.device)
    config = _check(options)
    if config is None:
        return None
    if is_converted(config) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from .sharing import NAME

        args.model = NAME
    return str(options.model_args["pretrained"])


def _is_of_the_evaluation(error: Exception) -> bool:
    """Whether an error was raised while lm-eval evaluated items."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    places = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames)
    return ("lm_eval.evaluator", "evaluate") in places


@reports
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
    model = None
    try:
        model = _prepare(args)
        parser.execute(args)
    except (DCFormerError, BrokenPipeError):
        raise
    except Exception as error:  # of lm-eval or the libraries below it: options, tasks, model, data
        if _is_of_the_evaluation(error):
            raise
        raise_bug(error, (Exception,))
        logging.getLogger("lm_eval").debug("before the evaluation", exc_info=True)
        if model is not None and (damaged := damaged_file(model, error)):
            raise EvaluationError(f"--model_args pretrained={model}: {damaged}") from error
        raise EvaluationError(
            f"{first_line(error)} ({type(error).__name__}; `dcformer-eval run --help` and `dcformer-eval ls tasks` "
            "list options and tasks, LMEVAL_LOG_LEVEL=debug shows where this was raised)"
        ) from error
    return 0
