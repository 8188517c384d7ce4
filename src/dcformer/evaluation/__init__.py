"""Evaluation with lm-eval: ``dcformer-eval``, and tasks of this package. Needs the extra ``[eval]``.

Importing this does not import lm-eval. ``TASKS_FOLDER`` is for the ``include_path`` of ``lm_eval.tasks.TaskManager``.
"""

from dcformer_commands.eval import main

from .cli import TASKS_FOLDER
from .items import (
    EvaluationError,
    heldout_contexts,
    heldout_items,
    paper_items,
)

__all__ = [
    "TASKS_FOLDER",
    "EvaluationError",
    "heldout_contexts",
    "heldout_items",
    "main",
    "paper_items",
]
