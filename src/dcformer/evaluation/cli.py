"""The command line ``dcformer-eval``: lm-eval's, with DCFormer registered and this package's tasks found."""

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import dcformer  # noqa: F401  registers the model types: `--model hf` loads them without remote code

from .items import FILE_KEY, NUM_SHOTS, EvaluationError, read_paper_file

TASKS_FOLDER = Path(__file__).resolve().parent / "tasks"

_PAPER_TASKS = ("dcformer_synthetic", *(f"dcformer_synthetic_{num_shots}shot" for num_shots in NUM_SHOTS))


def _given(args: argparse.Namespace, name: str) -> Any:
    """An option as lm-eval will see it: from the command line, or else from the file of ``--config``."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    value = getattr(args, name, None)
    if value is None and getattr(args, "config", None):
        value = EvaluatorConfig.load_yaml_config(args.config).get(name)
    return value


def _check_paper_file(args: argparse.Namespace) -> None:
    """Reads the paper's file if a task needs it: lm-eval would only after the model is loaded."""
    from lm_eval.utils import simple_parse_args_string

    tasks = _given(args, "tasks") or []
    names = tasks.split(",") if isinstance(tasks, str) else [n for t in tasks for n in str(t).split(",")]
    if any(fnmatch(task, name) for name in names for task in _PAPER_TASKS):
        metadata = _given(args, "metadata") or {}
        read_paper_file((simple_parse_args_string(metadata) if isinstance(metadata, str) else metadata).get(FILE_KEY))


def _share_items_between_processes() -> None:
    """Makes each process of ``accelerate launch`` evaluate its share of the items on any device.

    lm-eval 0.4.13 does so only where it sees several GPUs; on CPUs every process would evaluate everything.
    """
    import torch
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


def _run() -> None:
    try:
        from lm_eval.__main__ import HarnessCLI, setup_logging
    except ModuleNotFoundError as error:
        raise EvaluationError(
            f"dcformer-eval needs lm-eval (no module {error.name!r}): pip install 'dcformer[eval]'"
        ) from error

    setup_logging()
    parser = HarnessCLI()
    args = parser.parse_args()
    if hasattr(args, "include_path"):  # lm-eval's `run`, `ls` and `validate`; later folders override earlier ones
        folders = [TASKS_FOLDER, _given(args, "include_path")]
        args.include_path = [folder for folder in folders if folder]
    if args.command == "run":
        _check_paper_file(args)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _share_items_between_processes()
    try:
        parser.execute(args)
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise EvaluationError(f"{error}. `dcformer-eval ls tasks` lists what there is.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, with all options of ``lm_eval``.

    Args:
        arguments: the arguments; the process's when not given.

    Returns:
        0, or 1 on an error that is found before the model is loaded. Wrong usage exits with 2.
    """
    before = sys.argv
    if arguments is not None:
        sys.argv = ["dcformer-eval", *arguments]  # lm-eval reads it from there
    try:
        _run()
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0
