"""The DCFormer paper's synthetic head-composition tasks (arXiv 2405.08553, section 4.3 and appendix F)."""

from .contexts import Answer, Context, parse_context, questions
from .dataset import generate_context, generate_dataset, iterate_contexts, read_dataset, split_of, write_dataset
from .tasks import LIST_TASKS, TASKS, Question, Task, Transformation, get_task
from .tokenization import build_tokenizer, encode

__all__ = [
    "LIST_TASKS",
    "TASKS",
    "Answer",
    "Context",
    "Question",
    "Task",
    "Transformation",
    "build_tokenizer",
    "encode",
    "generate_context",
    "generate_dataset",
    "get_task",
    "iterate_contexts",
    "parse_context",
    "questions",
    "read_dataset",
    "split_of",
    "write_dataset",
]
