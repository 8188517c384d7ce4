"""Training rows for the synthetic tasks: a statement once, and several questions about it beside each other.

The tasks ask one question of each statement, and most of a text is the statement. Here every question of the tasks'
wording that has just one answer is asked of the same tokens: the questions all follow the statement, and none sees
another. Position ids and mask say so. A model reads each as if its text were that statement and that question alone,
at a third of the tokens an answer.

    < Felix is greedy. Noah is timid. David is generous. >.   Who is the opposite of generous?   -> Felix
                                                              David is the opposite of           -> greedy
"""

import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from dcformer.synthetic import TASKS, Question, Task, Transformation, build_tokenizer, split_of
from dcformer.synthetic.tasks import NAMED, PATTERNS, PERSON_TRANSFORMATIONS, SET_TRANSFORMATIONS, UNNAMED
from dcformer.synthetic.vocabulary import NAMES

_TOKEN = re.compile(r"\n|\w+|[^\w\s]")  # as the tokenizer splits, but some ten times as fast
_vocabulary = cache(lambda: build_tokenizer().get_vocab())


@dataclass(frozen=True)
class Stage:
    """What rows ask for.

    Attributes:
        facts: facts or items of a statement, two or three; the tasks have three. Of two, nothing occurs twice.
        patterns: names of the attention patterns that questions may have.
        forms: of the facts, "plain", "inverted" or "item".
        words: names of the transformations that may be asked for; None for all.
    """

    facts: int = 3
    patterns: Collection[str] = tuple(PATTERNS)
    forms: Collection[str] = ("plain", "inverted", "item")
    words: Collection[str] | None = None


def token_ids(text: str) -> list[int]:
    """Token ids of a text in the tasks' words; what the tokenizer makes of it."""
    return [_vocabulary()[token] for token in _TOKEN.findall(text)]


def _readings(
    group: tuple[Transformation, ...], topic: object, entities: list[str], words: Collection[str] | None
) -> Iterator[tuple]:
    """Each transformation that can be asked about these entities, with what it makes of them."""
    for transformation in group:
        if words is not None and transformation.name not in words:
            continue
        for relation in transformation.relations if transformation.topic is topic else ():
            answers = {entity: answer for answer, members in relation.items() for entity in members}
            if all(entity in answers for entity in entities):
                yield transformation, [answers[entity] for entity in entities]
                break


def statement_and_questions(task: Task, stage: Stage, rng: random.Random) -> tuple[str, list[Question]]:
    """A statement as the task has it, and the questions of the training split about it.

    Args:
        task: whose pattern, wording and words the statement has.
        stage: how many facts it has, and what may be asked about them.
        rng: source of randomness.

    Returns:
        the statement; and its questions, the task's own first, without those of other splits (perhaps none is left).
    """
    facts, transformation, topic, pattern = stage.facts, task.transformation, task.transformation.topic, task.pattern
    relation = rng.choice(transformation.relations)
    asked: list[tuple[str, bool, str, str]] = []  # pattern, whether it is of the task's words, query, answer
    if task.form == "item":
        odd, twice = (rng.choice(relation[answer]) for answer in rng.sample(list(relation), 2))
        items = [odd, *[twice] * (facts - 1)]
        rng.shuffle(items)
        statement = f"Here are {', '.join(task.template.format(entity=item) for item in items)}."
        for reading, answers in _readings(SET_TRANSFORMATIONS, topic, items, stage.words):
            answer_of = dict(zip(items, answers, strict=True))
            own = reading is transformation
            others = {twice: odd} if facts > 2 else {twice: odd, odd: twice}
            for item, other in others.items():
                named = NAMED.format(item=topic.item.format(entity=item))
                asked.append(("other-in-set", own, f"{named} {reading.lead}", answer_of[other]))
            if facts > 2:
                asked.append(("different-in-set", own, f"{UNNAMED} {reading.lead}", answer_of[odd]))
    else:
        answers = rng.sample(list(relation), facts)
        entities = [rng.choice(relation[answer]) for answer in answers]
        people = rng.sample(NAMES, facts)
        if facts > 2 and pattern == "the-other-person":
            people = [people[0], *[people[1]] * (facts - 1)]
        if facts > 2 and pattern == "the-other-class":
            members = relation[answers[1]]
            entities[1:] = rng.sample(members, 2) if len(members) > 1 else [*members, *members]
        pairs = list(zip(people, entities, strict=True))
        rng.shuffle(pairs)
        stated = (task.template.format(person=person, entity=entity) for person, entity in pairs)
        statement = f"< {' '.join(stated)} >."
        people = [person for person, _ in pairs]
        for reading, answers in _readings(PERSON_TRANSFORMATIONS, topic, [entity for _, entity in pairs], stage.words):
            own = reading is transformation
            # (what is named, what is asked for, the two patterns, wording when it is true of one fact or of all others)
            for named, wanted, patterns, wording in (
                (people, answers, ("same-person", "the-other-person"), ("{} {}", "{} {}")),
                (answers, people, ("same-object", "the-other-class"), ("Who {1} {0}?", "Who {1} {0}?")),
            ):
                for name in dict.fromkeys(named):
                    same = {w for n, w in zip(named, wanted, strict=True) if n == name}
                    other = {w for n, w in zip(named, wanted, strict=True) if n != name}
                    for found, kind, words, predicate in (
                        (same, patterns[0], wording[0], reading.affirmed),
                        (other, patterns[1], wording[1], reading.denied),
                    ):
                        if len(found) == 1:
                            asked.append((kind, own, words.format(name, predicate), *found))
    rng.shuffle(asked)
    asked.sort(key=lambda question: question[:2] != (pattern, True))
    questions = [
        Question(statement, query.rstrip(), answer) for kind, _, query, answer in asked if kind in stage.patterns
    ]
    return statement, [question for question in questions if split_of(question) == "train"]


def make_row(stage: Stage, examples: int, tokens: int, rng: random.Random) -> dict[str, list[int]]:
    """One row: perhaps some examples, a statement, and as many of its questions as fit.

    Args:
        stage: what it asks for.
        examples: whole questions of the same task before it, each with its answer.
        tokens: the most it may have.
        rng: source of randomness.

    Returns:
        lists of its length T: `input_ids`; `labels`, the answers where the following token would stand and -100
        elsewhere (the answers of questions about the last statement are not among the inputs); `position_ids`; and
        `branch`, 0 for what all see, or the number of the question. The last token is padding: a place for a label.
    """
    while True:
        task = rng.choice(TASKS)
        if task.form not in stage.forms or (stage.words is not None and task.transformation.name not in stage.words):
            continue
        ids, labels = token_ids("\n"), {}
        for _ in range(examples):
            question = task.sample(rng)
            while split_of(question) != "train":
                question = task.sample(rng)
            ids += token_ids(question.prompt)
            labels[len(ids)] = _vocabulary()[question.answer]
            ids += token_ids(f"{question.answer}\n")
        statement, questions = statement_and_questions(task, stage, rng)
        ids += token_ids(statement)
        shared = len(ids)
        positions, branches = list(range(shared)), [0] * shared
        number = 0
        for question in questions:
            query = token_ids(question.query)
            if len(ids) + len(query) < tokens:  # one place is left, for the last label
                number += 1
                ids += query
                positions += range(shared, shared + len(query))
                branches += [number] * len(query)
                labels[len(ids)] = _vocabulary()[question.answer]
        if number and len(ids) < tokens:
            break
    return {
        "input_ids": [*ids, 0],
        "labels": [labels.get(index, -100) for index in range(len(ids) + 1)],
        "position_ids": [*positions, 0],
        "branch": [*branches, -1],
    }


PADDING = {"input_ids": 0, "labels": -100, "position_ids": 0, "branch": -1}


def collate(rows: list[dict[str, list[int]]], window: int) -> dict:
    """A batch as DCFormer takes it.

    Args:
        rows: from `make_row`; T is the length of the longest.
        window: of the sliding layers.

    Returns:
        `input_ids`, `labels`, `position_ids` [B, T], and `attention_mask`: kind of layer -> boolean mask [B, 1, T, T],
        True where a query sees a key: what was before it in its own text.
    """
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
        for name, value in PADDING.items()
    }  # each [B, T]
    branch, position = batch.pop("branch"), batch["position_ids"]
    seen = torch.ones(length, length, dtype=torch.bool).tril()  # [T, T]
    seen = seen & ((branch[:, None] == 0) | (branch[:, None] == branch[:, :, None]))  # [B, T, T]
    near = (position[:, :, None] - position[:, None] < window) | torch.eye(length, dtype=torch.bool)
    masks = {"full_attention": seen[:, None], "sliding_attention": (seen & near)[:, None]}
    return batch | {"attention_mask": masks}
