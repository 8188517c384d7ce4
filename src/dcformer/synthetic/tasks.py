"""The 74 head-composition tasks: attention patterns crossed with transformations.

Source: DCFormer paper (arXiv 2405.08553), section 4.3 and appendix F. To answer, one attention head has to find the
right place (the *attention pattern*) and another has to produce something from the word there (the
*transformation*). The wording and the word lists are this package's own; the crossing is the authors', and in their
order: ``TASKS[i]`` is the counterpart of ``task{i}`` in their ``synthetic_dataset.jsonl``.

Attention patterns (three facts or items in each question):

- ``same-person``: the fact about the person in the query; the answer comes from its entity.
- ``the-other-person``: two facts are about the person in the query; the answer comes from the other person's entity.
- ``same-object``: the fact whose entity (or class, country, ...) the query names; the answer is its person.
- ``the-other-class``: two facts share what the query names; the answer is the person of the third.
- ``other-in-set``: two items are equal and named in the query; the answer comes from the third ("which is not x?").
- ``different-in-set``: the same, unnamed ("which is different?"). Over ordinals or adjectives these two are the
  paper's *different-ordinal* and *different-adjective*.

The first four come in two statement forms, ``plain`` (person first) and ``inverted`` (entity first).

``LIST_TASKS`` is a family of our own with a seventh pattern, ``nth-in-list``: the item at the place the query names.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import DCFormerError
from . import vocabulary as v


@dataclass(frozen=True)
class Question:
    """One example of a task: ``{statement} {query} {answer}``.

    Attributes:
        statement: the facts or items the question is about.
        query: what precedes the answer, articles included; no space at the end.
        answer: a single word.
    """

    statement: str
    query: str
    answer: str

    @property
    def prompt(self) -> str:
        """The line up to the answer, without the space before it. It identifies the question: see ``split_of``."""
        return f"{self.statement} {self.query}"

    def line(self, scored: bool) -> str:
        """The whole line, with the answer in ``[ ]`` if ``scored`` (the layout of the authors' data set)."""
        return f"{self.prompt} [ {self.answer} ]" if scored else f"{self.prompt} {self.answer}"


@dataclass(frozen=True)
class Topic:
    """How entities of one kind are stated.

    Attributes:
        plain: a fact with the person first.
        inverted: the same fact with the entity first.
        item: an entity in an enumeration.
    """

    plain: str
    inverted: str
    item: str


@dataclass(frozen=True)
class Transformation:
    """From an entity to an answer, and how both are worded (paper section 4.3).

    Attributes:
        name: e.g. ``"city->country"``.
        topic: wording of the statements.
        relations: the entities of one question are all drawn from one of these relations (answer -> entities).
        affirmed: predicate before the answer, true of the person.
        denied: its negation.
        lead: the words between the question mark and the answer in the set patterns; may be empty.
    """

    name: str
    topic: Topic
    relations: tuple[v.Relation, ...]
    affirmed: str
    denied: str
    lead: str


OWNING = Topic("{person} owns the {entity}.", "The {entity} belongs to {person}.", "the {entity}")
VISITING = Topic("{person} visited {entity}.", "{entity} welcomed {person}.", "{entity}")
BEING = Topic("{person} is {entity}.", "The {entity} one is {person}.", "{entity}")
TAKING = Topic("{person} took the {entity} slot.", "The {entity} slot went to {person}.", "{entity}")

OBJECT, CITY, TOOL = (
    v.identity(v.entities(relation)) for relation in (v.CLASS_TO_OBJECTS, v.COUNTRY_TO_CITIES, v.CAPABILITY_TO_TOOLS)
)
SEQUENCES = ((v.ORDINALS, False), (v.DAYS, True), (v.MONTHS, True))
NEXT = tuple(v.successors(sequence, cyclic=cyclic) for sequence, cyclic in SEQUENCES)
PREVIOUS = tuple(v.predecessors(sequence, cyclic=cyclic) for sequence, cyclic in SEQUENCES)

# fmt: off
SUPERCLASS = Transformation("object->superclass", OWNING, (v.CLASS_TO_OBJECTS,),
                            "owns a kind of", "does not own a kind of", "A kind of")
COPY_OBJECT = Transformation("copy-object", OWNING, (OBJECT,), "owns the", "does not own the", "The")
COUNTRY = Transformation("city->country", VISITING, (v.COUNTRY_TO_CITIES,),
                         "saw a city in", "did not see a city in", "A city in")
COPY_CITY = Transformation("copy-city", VISITING, (CITY,), "saw", "did not see", "")
CAPABILITY = Transformation("object->capability", OWNING, (v.CAPABILITY_TO_TOOLS,),
                            "owns a tool to", "does not own a tool to", "A tool to")
COPY_TOOL = Transformation("copy-tool", OWNING, (TOOL,), "owns the", "does not own the", "The")
OPPOSITE = Transformation("adjective->opposite", BEING, (v.opposites(v.OPPOSITES),),
                          "is the opposite of", "is not the opposite of", "The opposite of")
NEXT_ORDINAL = Transformation("ordinal->next", TAKING, NEXT,
                              "took the slot just before", "did not take the slot just before", "The slot just before")
PREVIOUS_ORDINAL = Transformation("ordinal->previous", TAKING, PREVIOUS,
                                  "took the slot just after", "did not take the slot just after", "The slot just after")
# fmt: on


def _facts(template: str, people: list[str], entities: list[str], rng: random.Random) -> str:
    """The facts in random order, in angle brackets."""
    facts = [template.format(person=person, entity=entity) for person, entity in zip(people, entities, strict=True)]
    rng.shuffle(facts)
    return f"< {' '.join(facts)} >."


def _distinct(transformation: Transformation, count: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """``count`` entities with as many different answers, and the answers."""
    relation = rng.choice(transformation.relations)
    answers = rng.sample(list(relation), count)
    return [rng.choice(relation[answer]) for answer in answers], answers


def _same_person(transformation: Transformation, template: str, rng: random.Random) -> Question:
    people = rng.sample(v.NAMES, 3)
    entities, answers = _distinct(transformation, 3, rng)
    return Question(_facts(template, people, entities, rng), f"{people[0]} {transformation.affirmed}", answers[0])


def _other_person(transformation: Transformation, template: str, rng: random.Random) -> Question:
    named, other = rng.sample(v.NAMES, 2)
    entities, answers = _distinct(transformation, 3, rng)
    statement = _facts(template, [other, named, named], entities, rng)
    return Question(statement, f"{named} {transformation.denied}", answers[0])


def _same_object(transformation: Transformation, template: str, rng: random.Random) -> Question:
    people = rng.sample(v.NAMES, 3)
    entities, answers = _distinct(transformation, 3, rng)
    statement = _facts(template, people, entities, rng)
    return Question(statement, f"Who {transformation.affirmed} {answers[0]}?", people[0])


def _other_class(transformation: Transformation, template: str, rng: random.Random) -> Question:
    people = rng.sample(v.NAMES, 3)
    relation = rng.choice(transformation.relations)
    shared, odd = rng.sample(list(relation), 2)
    members = relation[shared]
    pair = rng.sample(members, 2) if len(members) > 1 else [*members, *members]
    statement = _facts(template, people, [rng.choice(relation[odd]), *pair], rng)
    return Question(statement, f"Who {transformation.denied} {shared}?", people[0])


def _in_set(transformation: Transformation, item: str, rng: random.Random, query: str) -> Question:
    (odd, twice), answers = _distinct(transformation, 2, rng)
    items = [item.format(entity=entity) for entity in (odd, twice, twice)]
    rng.shuffle(items)
    query = query.format(item=item.format(entity=twice))
    return Question(f"Here are {', '.join(items)}.", f"{query} {transformation.lead}".rstrip(), answers[0])


def _nth_in_list(transformation: Transformation, item: str, rng: random.Random) -> Question:
    entities, answers = _distinct(transformation, 3, rng)
    items = [item.format(entity=entity) for entity in entities]
    index = rng.randrange(len(items))
    query = f"Which is {v.ORDINALS[index]}? {transformation.lead}".rstrip()
    return Question(f"Here are {', '.join(items)}.", query, answers[index])


NAMED, UNNAMED = "Which is not {item}?", "Which is different?"

Sampler = Callable[[Transformation, str, random.Random], Question]
PERSON_PATTERNS: dict[str, Sampler] = {
    "the-other-person": _other_person,
    "same-person": _same_person,
    "the-other-class": _other_class,
    "same-object": _same_object,
}
SET_PATTERNS: dict[str, Sampler] = {
    "other-in-set": partial(_in_set, query=NAMED),
    "different-in-set": partial(_in_set, query=UNNAMED),
}
LIST_PATTERNS: dict[str, Sampler] = {"nth-in-list": _nth_in_list}
PATTERNS: dict[str, Sampler] = {**PERSON_PATTERNS, **SET_PATTERNS, **LIST_PATTERNS}

PERSON_TRANSFORMATIONS = (SUPERCLASS, COPY_OBJECT, COUNTRY, COPY_CITY, CAPABILITY, OPPOSITE, NEXT_ORDINAL)
SET_TRANSFORMATIONS = (
    COPY_OBJECT, SUPERCLASS, COPY_CITY, COUNTRY, COPY_TOOL, CAPABILITY, OPPOSITE, NEXT_ORDINAL, PREVIOUS_ORDINAL,
)  # fmt: skip
LIST_TRANSFORMATIONS = (COPY_OBJECT, SUPERCLASS, COPY_CITY, COUNTRY, COPY_TOOL, CAPABILITY)


@dataclass(frozen=True)
class Task:
    """One head-composition task (paper section 4.3).

    Attributes:
        pattern: the attention pattern, a key of ``PATTERNS``.
        transformation: what is made of the entity attended to.
        form: ``"plain"`` or ``"inverted"`` facts, or ``"item"`` for the set patterns.
    """

    pattern: str
    transformation: Transformation
    form: str

    @property
    def task_id(self) -> str:
        """Readable identity, e.g. ``"same-person.city->country.plain"``."""
        return f"{self.pattern}.{self.transformation.name}.{self.form}"

    @property
    def template(self) -> str:
        """Template of one fact (``{person}``, ``{entity}``) or one item (``{entity}``)."""
        return str(getattr(self.transformation.topic, self.form))

    @property
    def choices(self) -> int:
        """How many different answers the facts of a question lead to; two of the items of a set are equal."""
        return 2 if self.form == "item" else 3

    def sample(self, rng: random.Random) -> Question:
        """Draw a question; its answer follows uniquely from its text.

        Args:
            rng: source of randomness; the same state gives the same question.

        Returns:
            A question. Different tasks never word different questions alike.
        """
        return PATTERNS[self.pattern](self.transformation, self.template, rng)


TASKS: tuple[Task, ...] = (
    *(
        Task(pattern, transformation, form)
        for transformation in PERSON_TRANSFORMATIONS
        for pattern in PERSON_PATTERNS
        for form in ("plain", "inverted")
    ),
    *(
        Task(pattern, transformation, "item")
        for transformation in SET_TRANSFORMATIONS
        for pattern in SET_PATTERNS
    ),
)  # fmt: skip

# A family of our own with the same vocabulary, for fine-tuning. It is not among the paper's 74, and the bundled
# checkpoint was not trained on it. The item is found by its place, as in none of the paper's patterns.
LIST_TASKS: tuple[Task, ...] = tuple(Task("nth-in-list", t, "item") for t in LIST_TRANSFORMATIONS)


def get_task(task_id: str) -> Task:
    """The task with this identity.

    Raises:
        DCFormerError: if no task has it.
    """
    for task in (*TASKS, *LIST_TASKS):
        if task.task_id == task_id:
            return task
    known = ", ".join(task.task_id for task in TASKS[:3])
    raise DCFormerError(
        f"unknown task_id {task_id!r}: expected one of the {len(TASKS)} in dcformer.synthetic.TASKS, such as {known}"
    )


def wording() -> Iterator[str]:
    """All fixed text of the tasks, placeholders removed: with the word lists, every word a question can contain."""
    yield from ("< >.", "Who ?", "Here are , .", UNNAMED, NAMED.format(item=""))
    for t in (*PERSON_TRANSFORMATIONS, *SET_TRANSFORMATIONS):
        for template in (t.topic.plain, t.topic.inverted, t.topic.item):
            yield template.format(person="", entity="")
        yield from (t.affirmed, t.denied, t.lead)
