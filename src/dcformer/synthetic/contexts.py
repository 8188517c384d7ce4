"""Few-shot contexts in the layout of the authors' ``synthetic_dataset.jsonl``.

A context is a newline, then one example a line. A word in ``[ ]`` is a scored answer; the brackets are not part of the
text a model sees.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DCFormerError

_SCORED = re.compile(r" \[ (?P<answer>[^\[\]\s](?:[^\[\]\n]*[^\[\]\s])?) \]")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # str.splitlines would also split at rarer separators


@dataclass(frozen=True)
class Answer:
    """An answer inside a context.

    Attributes:
        text: the answer, without brackets.
        start: index of its first character in ``Context.text``.
        end: index after its last character.
        num_shots: number of examples that precede it.
    """

    text: str
    start: int
    end: int
    num_shots: int


@dataclass(frozen=True)
class Context:
    """A parsed context.

    Attributes:
        text: the plain text, brackets removed: what a model sees.
        answers: the scored answers, in order.
    """

    text: str
    answers: tuple[Answer, ...]


def parse_context(texts: str) -> Context:
    """Separate the plain text of a context from its scored answers.

    Args:
        texts: a context, with its scored answers in ``[ ]``.

    Returns:
        The plain text and where the answers are in it. ``text[:answer.start]`` always ends with the space that
        separates the prompt from the answer.

    Raises:
        DCFormerError: if a bracket is not part of `` [ answer ]`` (each bracket with a space on both sides).
    """
    text, num_shots = "", 0
    answers: list[Answer] = []
    for line in _LINE.findall(texts):
        plain, position = "", 0
        for match in _SCORED.finditer(line):
            plain += line[position : match.start()] + " "
            start = len(text) + len(plain)
            answers.append(Answer(match["answer"], start, start + len(match["answer"]), num_shots))
            plain += match["answer"]
            position = match.end()
        plain += line[position:]
        if "[" in plain or "]" in plain:
            raise DCFormerError(
                f"unexpected bracket in {line.strip()!r}: expected scored answers as ' [ answer ]', "
                "with a space on each side of each bracket"
            )
        text += plain
        num_shots += bool(plain.strip())
    return Context(text, tuple(answers))


def questions(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The scored questions of a context, as prompts to give to a model.

    Args:
        record: a row with ``task_id`` and ``texts``, from :func:`read_dataset` or :func:`generate_dataset`.

    Returns:
        One dictionary per scored answer: ``task_id``; ``prompt``, the plain text up to the answer, without the space
        before it; ``answer``; ``num_shots``, the number of examples before the question. ``prompt + " " + answer`` is
        a prefix of the plain text.
    """
    context = parse_context(record["texts"])
    return [
        {
            "task_id": record["task_id"],
            "prompt": context.text[: answer.start - 1],
            "answer": answer.text,
            "num_shots": answer.num_shots,
        }
        for answer in context.answers
    ]
