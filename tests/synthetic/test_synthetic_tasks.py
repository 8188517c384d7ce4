"""The 74 tasks: what they are, and that each question has the answer an independent solver finds."""

import random
import re
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcformer.synthetic import LIST_TASKS, TASKS, Question, get_task, questions, read_dataset
from dcformer.synthetic.tasks import wording
from dcformer.synthetic.vocabulary import (
    CAPABILITY_TO_TOOLS,
    CLASS_TO_OBJECTS,
    COUNTRY_TO_CITIES,
    DAYS,
    MONTHS,
    NAMES,
    OPPOSITES,
    ORDINALS,
    word_lists,
)

any_task = st.sampled_from(TASKS)
any_seed = st.integers(0, 2**32)


# --- an independent solver: it reads the text of a question and knows the facts of the word lists, not the tasks ---

ENTITIES = {
    word
    for name, words in word_lists().items()
    if name not in ("names", "classes", "countries", "capabilities")
    for word in words
}
RING = {word: (sequence, i) for sequence in (ORDINALS, DAYS, MONTHS) for i, word in enumerate(sequence)}


def whose(groups):
    return {member: group for group, members in groups.items() for member in members}


def neighbor(word, step):
    sequence, index = RING[word]
    if sequence is ORDINALS and not 0 <= index + step < len(sequence):
        return None
    return sequence[(index + step) % len(sequence)]


RULES = {  # wording -> function from entity to answer; anything else is a copy
    "kind of": whose(CLASS_TO_OBJECTS).__getitem__,
    "city in": whose(COUNTRY_TO_CITIES).__getitem__,
    "tool to": whose(CAPABILITY_TO_TOOLS).__getitem__,
    "opposite of": {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}.__getitem__,
    "slot just before": lambda word: neighbor(word, +1),
    "slot just after": lambda word: neighbor(word, -1),
}


def solve(prompt: str) -> set[str]:
    """Every answer that fits the line; a well-posed question has one."""
    if prompt.startswith("<"):
        statement, query = re.fullmatch(r"< (.+) >\. (.+)", prompt).groups()
    else:
        statement, query = re.fullmatch(r"(Here are .+?)\. (Which .+)", prompt).groups()
    rule = next((rule for phrase, rule in RULES.items() if phrase in query), lambda word: word)
    denied = " not " in query
    if query.startswith("Which"):
        items = Counter(word for word in re.findall(r"\w+", statement) if word in ENTITIES)
        assert sum(items.values()) == 3
        named = [word for word in re.findall(r"\w+", query.split("?")[0]) if word in ENTITIES]
        assert len(named) == denied
        return {rule(word) for word, count in items.items() if (word not in named if denied else count == 1)}
    facts = []
    for sentence in statement.split("."):
        words = re.findall(r"\w+", sentence)
        if words:
            (person,) = (word for word in words if word in NAMES)
            (entity,) = (word for word in words if word in ENTITIES)
            facts.append((person, entity))
    assert len(facts) == 3
    if query.startswith("Who"):
        attribute = re.findall(r"\w+", query)[-1]
        return {person for person, entity in facts if (rule(entity) == attribute) != denied}
    subject = query.split()[0]
    return {rule(entity) for person, entity in facts if (person == subject) != denied}


@given(any_task, any_seed)
def test_the_solver_finds_exactly_the_answer(task, seed):
    question = task.sample(random.Random(seed))
    assert solve(question.prompt) == {question.answer}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.task_id)
def test_every_task_often(task):
    rng = random.Random(task.task_id)
    answers = Counter()
    for _ in range(150):
        question = task.sample(rng)
        assert solve(question.prompt) == {question.answer}, question
        assert re.fullmatch(r"\w+", question.answer)
        answers[question.answer] += 1
        statement, _, query = question.prompt.replace(". Which", ">. Which").partition(">. ")
        answerable = NAMES if query.startswith("Who") else ENTITIES
        assert len({word for word in re.findall(r"\w+", statement) if word in answerable}) == task.choices
    assert len(answers) >= 9
    assert max(answers.values()) < 40  # no answer is a good guess


def test_the_solver_can_fail():
    assert solve("< Anna owns the fox. Leo owns the bee. Kate owns the oak. >. Anna owns a kind of") == {"mammal"}
    assert solve("< Anna owns the fox. Leo owns the bee. Kate owns the oak. >. Anna does not own the") == {"bee", "oak"}
    assert solve("Here are Monday, Friday, Friday. Which is different? The slot just after") == {"Sunday"}


# --- the table ---


def test_there_are_74_distinct_tasks():
    assert len(TASKS) == 74
    assert len({task.task_id for task in TASKS}) == 74
    assert len({(task.pattern, task.transformation.name, task.template) for task in TASKS}) == 74


def test_patterns_and_transformations_are_the_papers():
    assert Counter(task.pattern for task in TASKS) == {
        "same-person": 14,
        "the-other-person": 14,
        "same-object": 14,
        "the-other-class": 14,
        "other-in-set": 9,
        "different-in-set": 9,
    }
    assert {task.transformation.name for task in TASKS} == {
        "copy-object",
        "copy-city",
        "copy-tool",
        "object->superclass",
        "city->country",
        "object->capability",
        "adjective->opposite",
        "ordinal->next",
        "ordinal->previous",
    }


def test_get_task():
    assert all(get_task(task.task_id) is task for task in TASKS)
    with pytest.raises(ValueError, match=r"'task0'.*expected one of the 74"):
        get_task("task0")


def test_order_is_that_of_the_authors_file(authors_file):
    """Their task{i} and TASKS[i] agree on what can be told from the text alone."""
    texts = defaultdict(list)
    for record in read_dataset(authors_file):
        for question in questions(record):
            texts[record["task_id"]].append((question["prompt"].rsplit("\n", 1)[1], question["answer"]))
    names = {answer for _, answer in texts["task4"]}  # "who does not have ...?"
    phrases = {"kind of": "superclass", "city in": "country", "thing that can": "capability", "opposite of": "opposite"}
    for index, task in enumerate(TASKS):
        prompt, _ = texts[f"task{index}"][0]
        query = prompt.rsplit(".", 1)[1]
        in_set = prompt.startswith("There are")
        assert in_set == task.pattern.endswith("in-set")
        negated = task.pattern.startswith("the-other") or task.pattern == "other-in-set"
        assert (" not " in query) == negated, (task.task_id, query)
        to_person = task.pattern in ("same-object", "the-other-class")
        answers = {answer for _, answer in texts[f"task{index}"]}
        assert (len(answers & names) > 3) == to_person
        for phrase, transformation in phrases.items():
            assert (phrase in query) == task.transformation.name.endswith(transformation), (task.task_id, query)
        assert ("just before" in query) == (task.transformation.name == "ordinal->next")
        assert ("just after" in query) == (task.transformation.name == "ordinal->previous")


# --- no shortcuts ---


@given(st.lists(st.tuples(any_task, any_seed), min_size=2, max_size=40))
def test_one_text_has_one_answer_whatever_the_task(draws):
    answers = {}
    for task, seed in draws:
        question = task.sample(random.Random(seed % 50))
        assert answers.setdefault(question.prompt, (task, question.answer)) == (task, question.answer)


def test_the_answers_place_says_nothing():
    """The fact or item that holds the answer is the first, second or third equally often."""
    for task in TASKS:
        rng, places = random.Random(task.task_id), Counter()
        for _ in range(600):
            question = task.sample(rng)
            if question.prompt.startswith("<"):
                facts = question.statement.strip("<>. ").split(". ")
                held = [solve(f"< {fact}. {fact}. {fact}. >. {affirm(question)}") for fact in facts]
            else:
                items = question.statement.removeprefix("Here are ").rstrip(".").split(", ")
                held = [{item} if items.count(item) == 1 else set() for item in items]
            (place,) = (index for index, found in enumerate(held) if found)
            places[place] += 1
        # standard deviation of a place's count is 11.5
        assert all(140 < places[place] < 260 for place in range(3)), (task.task_id, places)


def affirm(question: Question) -> str:
    """A query that only the fact with the answer satisfies, as found by its answer."""
    if question.query.startswith("Who"):
        return f"{question.answer} owns the"
    people = [name for name in re.findall(r"\w+", question.statement) if name in NAMES]
    subject = question.query.split()[0]
    other = {name for name in people if name != subject}
    return f"{subject if ' not ' not in question.query else other.pop()} owns the"


def test_no_article_depends_on_the_answer():
    """The words around the entities never contain "an": it would tell vowels from consonants."""
    assert not any(re.search(r"\ban\b", text, re.IGNORECASE) for text in wording())


# --- the word lists ---


def test_no_word_is_in_two_lists_or_in_the_wording():
    counts = Counter(word for words in word_lists().values() for word in words)
    assert [word for word, count in counts.items() if count > 1] == []
    assert counts.keys().isdisjoint(word for text in wording() for word in re.findall(r"\w+", text))


def test_every_word_is_one_word():
    assert all(re.fullmatch(r"[A-Za-z]+", word) for words in word_lists().values() for word in words)


# --- our own family ---


@pytest.mark.parametrize("task", LIST_TASKS, ids=lambda task: task.task_id)
def test_list_tasks_ask_for_the_item_at_a_place(task, tokenizer):
    rng = random.Random(0)
    places = Counter()
    rule = {
        entity: answer
        for relation in task.transformation.relations
        for answer in relation
        for entity in relation[answer]
    }
    for _ in range(90):
        question = task.sample(rng)
        items = re.fullmatch(r"Here are (.*)\.", question.statement)[1].replace("the ", "").split(", ")
        place = ["first", "second", "third"].index(re.match(r"Which is (\w+)\?", question.query)[1])
        assert rule[items[place]] == question.answer
        assert sum(rule[item] == question.answer for item in items) == 1
        assert tokenizer.unk_token_id not in tokenizer(question.line(scored=False))["input_ids"]
        places[place] += 1
    assert min(places.values()) > 15
    assert get_task(task.task_id) is task and task not in TASKS
