"""Generating, reading and writing synthetic data sets."""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import DCFormerError, require_extra
from ..files import whole_file
from .contexts import parse_context
from .tasks import TASKS, Question, Task

if TYPE_CHECKING:  # only the functions that return one need the extra
    from datasets import Dataset

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
COLUMNS = ("task_id", "texts")

_MAX_DRAWS = 10_000  # per question; the smallest split of the smallest task has some 70 of some 700 questions


def split_of(question: Question) -> Split:
    """The split a question belongs to: 80% train, 10% validation, 10% test.

    It depends on the question's text alone, by a stable hash, so a question of one split never occurs in another,
    whatever the seeds, tasks and sizes.
    """
    digest = hashlib.blake2b(question.prompt.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise DCFormerError(f"split is {split!r}: expected one of {', '.join(map(repr, SPLITS))}")


def _check_sizes(num_examples: int, first_scored: int) -> None:
    if not 0 <= first_scored < num_examples:
        raise DCFormerError(
            f"first_scored is {first_scored} with num_examples {num_examples}: expected 0 <= first_scored "
            "< num_examples, so that at least one answer is scored"
        )


def generate_context(
    task: Task, num_examples: int, rng: random.Random, split: Split = "train", first_scored: int = 2
) -> str:
    """Draw one few-shot context: different questions of one task, all from one split.

    Args:
        task: what the questions are.
        num_examples: number of lines.
        rng: source of randomness.
        split: where the questions come from, see :func:`split_of`.
        first_scored: index of the first line whose answer is put in ``[ ]``.

    Returns:
        The context in the authors' layout: a newline, then one question with its answer a line.

    Raises:
        DCFormerError: if an argument is out of range, or the split has too few questions of the task.
    """
    _check_split(split)
    _check_sizes(num_examples, first_scored)
    drawn: dict[str, Question] = {}
    while len(drawn) < num_examples:
        for _ in range(_MAX_DRAWS):
            question = task.sample(rng)
            if question.prompt not in drawn and split_of(question) == split:
                drawn[question.prompt] = question
                break
        else:
            raise DCFormerError(
                f"found only {len(drawn)} different {split} questions of task {task.task_id!r}, expected "
                f"{num_examples}: ask for fewer with num_examples"
            )
    lines = (question.line(scored=index >= first_scored) for index, question in enumerate(drawn.values()))
    return "\n" + "".join(f"{line}\n" for line in lines)


def iterate_contexts(
    split: Split = "train",
    contexts_per_task: int | None = None,
    num_examples: int = 8,
    seed: int = 0,
    tasks: Iterable[Task] | None = None,
    first_scored: int = 2,
) -> Iterator[dict[str, str]]:
    """Stream contexts, one of each task in turn, again and again.

    Each context has its own random state, made from ``seed``, ``split``, its task and its index; so the stream is the
    same in every process (of one Python version, as ``random`` promises), and neither ``contexts_per_task`` nor the
    choice of ``tasks`` changes any single context.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``; no question is in two of them.
        contexts_per_task: where to stop; ``None`` for a stream without end.
        num_examples: number of lines of a context.
        seed: the stream's seed.
        tasks: which tasks; all 74 by default.
        first_scored: index of the first line whose answer is put in ``[ ]``.

    Yields:
        Rows with ``task_id`` and ``texts``.

    Raises:
        DCFormerError: if an argument is out of range (before the first row is drawn).
    """
    _check_split(split)
    _check_sizes(num_examples, first_scored)
    if contexts_per_task is not None and contexts_per_task < 1:
        raise DCFormerError(f"contexts_per_task is {contexts_per_task}: expected at least 1, or None for no end")
    chosen = TASKS if tasks is None else tuple(tasks)
    if not chosen:
        raise DCFormerError(
            "tasks is empty: expected at least one of dcformer.synthetic.TASKS, or None for all of them"
        )

    def rows() -> Iterator[dict[str, str]]:
        for index in itertools.count() if contexts_per_task is None else range(contexts_per_task):
            for task in chosen:
                rng = random.Random(f"{seed}/{split}/{task.task_id}/{index}")  # a str is seeded by SHA-512
                texts = generate_context(task, num_examples, rng, split, first_scored)
                yield {"task_id": task.task_id, "texts": texts}

    return rows()


def generate_dataset(
    split: Split = "train",
    contexts_per_task: int = 12,
    num_examples: int = 8,
    seed: int = 0,
    tasks: Iterable[Task] | None = None,
    first_scored: int = 2,
) -> "Dataset":
    """Generate a data set of few-shot contexts (paper section 4.3, appendix F).

    Args:
        split: see :func:`iterate_contexts`, as for the other arguments.
        contexts_per_task: number of contexts of each task; the authors' data set has 12.
        num_examples: number of lines of a context; the authors' have 8.
        seed: same seed, same data set.
        tasks: which tasks; all 74 by default.
        first_scored: index of the first scored line; the authors score from the third on.

    Returns:
        A data set with columns ``task_id`` and ``texts``, tasks in turn.

    Raises:
        DCFormerError: if an argument is out of range.
    """
    return dataset_from(iterate_contexts(split, contexts_per_task, num_examples, seed, tasks, first_scored))


def dataset_from(rows: Iterable[dict[str, str]]) -> "Dataset":
    """Collect rows with ``task_id`` and ``texts`` into a :class:`datasets.Dataset` (extra ``[synthetic]``)."""
    require_extra("synthetic", "a data set", "datasets")
    from datasets import Dataset, Features, Value

    return Dataset.from_list(list(rows), features=Features({name: Value("string") for name in COLUMNS}))


def _parse_row(line: bytes) -> dict[str, str]:
    """Parses one line of a jsonl file; errors name what was expected."""
    try:
        row = json.loads(line.decode())
    except ValueError as error:  # not JSON, or not UTF-8
        raise DCFormerError(f"expected a JSON object in UTF-8, got {line.strip()[:80]!r} ({error})") from None
    if not isinstance(row, dict):
        raise DCFormerError(f"expected a JSON object, got {type(row).__name__}")
    for key in COLUMNS:
        if not isinstance(row.get(key), str):
            raise DCFormerError(f"expected a string under {key!r}, got {row.get(key)!r}")
    if not parse_context(row["texts"]).answers:
        raise DCFormerError("expected at least one scored answer, ' [ answer ]', under 'texts', got none")
    return {key: row[key] for key in COLUMNS}


def read_dataset(path: str | os.PathLike[str]) -> "Dataset":
    """Read a jsonl file in the layout of the authors' ``synthetic_dataset.jsonl``, theirs or one of ours.

    Args:
        path: UTF-8 file with one JSON object a line, with strings ``task_id`` and ``texts``; blank lines are skipped.

    Returns:
        A data set with columns ``task_id`` and ``texts``, in the file's order.

    Raises:
        FileNotFoundError: if the file does not exist.
        DCFormerError: naming file, line and what was expected, if a line is malformed or the file has none.
    """
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(_parse_row(line))
                except DCFormerError as error:
                    raise DCFormerError(f"{os.fspath(path)}, line {number}: {error}") from error
    if not rows:
        raise DCFormerError(f"{os.fspath(path)}: expected at least one line with a JSON object, got an empty file")
    return dataset_from(rows)


def write_dataset(dataset: Iterable[dict[str, str]], path: str | os.PathLike[str]) -> None:
    """Write a data set as jsonl in the authors' layout. The file appears complete or not at all.

    Args:
        dataset: a data set, or any rows, with ``task_id`` and ``texts``.
        path: where to write; an existing file is replaced.

    Raises:
        OSError: if the file cannot be written, e.g. because its folder does not exist.
    """
    with whole_file(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        for row in dataset:
            file.write(json.dumps({key: row[key] for key in COLUMNS}, ensure_ascii=False) + "\n")
