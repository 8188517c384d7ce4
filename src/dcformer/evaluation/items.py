"""The items of the tasks in ``tasks/``: the YAML files name these functions as their ``custom_dataset``.

lm-eval calls each with the values of ``--metadata`` and ``--model_args`` as keyword arguments; others are ignored.
"""

from typing import TYPE_CHECKING, Any

from dcformer.synthetic import generate_dataset, get_task, parse_context, questions, read_dataset
from dcformer.synthetic.tasks import Task
from dcformer.synthetic.vocabulary import NAMES

from ..errors import DCFormerError, require_extra

if TYPE_CHECKING:  # this module imports without the extra
    from datasets import Dataset

FILE_KEY = "dcformer_synthetic_file"
NUM_SHOTS = range(2, 8)

_PERSON_ANSWERS = ("same-object", "the-other-class")


class EvaluationError(DCFormerError):
    """An evaluation that cannot start; the message says why and what to do."""


def read_paper_file(path: Any) -> "Dataset":
    """Read the file of the paper's synthetic set.

    Args:
        path: the user's ``dcformer_synthetic_file``, or ``None``.

    Returns:
        A data set with columns ``task_id`` and ``texts``.

    Raises:
        EvaluationError: if no file is named, the file cannot be read or has another format, or a scored shot count is
            missing.
    """
    if path is None:
        raise EvaluationError(
            f"the tasks of the paper's synthetic set need its file: --metadata {FILE_KEY}=synthetic_dataset.jsonl "
            "(from the authors' repository, or written by python -m dcformer.synthetic)"
        )
    try:
        contexts = read_dataset(str(path))
    except (OSError, DCFormerError) as error:
        raise EvaluationError(
            f"--metadata {FILE_KEY}={path}: expected a file with one JSON object a line, task_id and texts with the "
            f"scored words in [ ] ({error})"
        ) from error
    found = {item["num_shots"] for record in contexts for item in questions(record)}
    if missing := sorted(set(NUM_SHOTS) - found):
        raise EvaluationError(
            f"--metadata {FILE_KEY}={path}: expected words in [ ] after {NUM_SHOTS[0]} to {NUM_SHOTS[-1]} examples of "
            f"a text, got none after {', '.join(map(str, missing))}"
        )
    return contexts


def _table(rows: list[dict[str, Any]]) -> "Dataset":
    require_extra("eval", "evaluation", "datasets")
    from datasets import Dataset

    return Dataset.from_list(rows)


def paper_items(num_shots: int, dcformer_synthetic_file: Any = None, **_: Any) -> "dict[str, Dataset]":
    """The scored words of the paper's synthetic set that follow a number of examples.

    Args:
        num_shots: examples before the question, 2 to 7.
        dcformer_synthetic_file: path of the file.

    Returns:
        The split ``test`` with ``task_id``, ``prompt``, ``answer`` and ``target``, the answer with the space before it.

    Raises:
        EvaluationError: see :func:`read_paper_file`.
    """
    asked = [item for record in read_paper_file(dcformer_synthetic_file) for item in questions(record)]
    chosen = [item for item in asked if item["num_shots"] == num_shots]
    return {"test": _table([{**item, "target": f" {item['answer']}"} for item in chosen])}


def _answers_of(task: Task) -> dict[str, str]:
    """Word of a statement -> the answer of this task that it leads to."""
    if task.pattern in _PERSON_ANSWERS:
        return {name: name for name in NAMES}
    relations = task.transformation.relations
    return {entity: answer for relation in relations for answer, members in relation.items() for entity in members}


def _choices(task: Task, prompt: str) -> list[str]:
    """The answers to which the facts of the last question lead, each once, in the order of the facts."""
    words = prompt.rsplit("\n", 1)[-1].replace(",", " ").replace(".", " ").replace("?", " ").split()
    answers = _answers_of(task)
    return list(dict.fromkeys(answers[word] for word in words if word in answers))


def _heldout() -> "Dataset":
    """The contexts of `make demo`; the generator puts none of their lines into training data."""
    return generate_dataset("test", contexts_per_task=4, num_examples=3, seed=2026)


def heldout_items(**_: Any) -> "dict[str, Dataset]":
    """The held-out questions of this package's generator, those of ``make demo``.

    Returns:
        The split ``test`` with ``task_id``, ``prompt``, ``answer``, ``target`` (the answer with the space before it),
        ``choices`` (the answers that the facts of the question lead to, two or three) and ``gold``, the right one's
        index.
    """
    rows = []
    for record in _heldout():
        item = questions(record)[-1]
        choices = _choices(get_task(item["task_id"]), item["prompt"])
        gold = choices.index(item["answer"])
        rows.append({**item, "target": f" {item['answer']}", "choices": choices, "gold": gold})
    return {"test": _table(rows)}


def heldout_contexts(**_: Any) -> "dict[str, Dataset]":
    """The texts that end with the held-out questions.

    Returns:
        The split ``test`` with ``task_id`` and ``text``, the whole context without brackets.
    """
    rows = [{"task_id": record["task_id"], "text": parse_context(record["texts"]).text} for record in _heldout()]
    return {"test": _table(rows)}
