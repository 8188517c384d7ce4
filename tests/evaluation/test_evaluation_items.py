"""The items of the shipped tasks."""

import json
import sys
from collections import Counter

import pytest
from helpers import REPOSITORY

from dcformer.evaluation import EvaluationError, heldout_contexts, heldout_items, paper_items
from dcformer.evaluation.items import _choices
from dcformer.synthetic import generate_dataset, get_task, parse_context, questions, read_dataset

sys.path.insert(0, str(REPOSITORY / "examples"))
import demo


def test_heldout_items_are_those_of_the_demonstration():
    items = heldout_items()["test"]
    asked = demo.held_out_questions(4, seed=2026)
    assert [(i["task_id"], i["prompt"], i["answer"]) for i in items] == [
        (q["task_id"], q["prompt"], q["answer"]) for q in asked
    ]
    defaults = {action.dest: action.default for action in _demo_options()}
    assert defaults["questions_per_task"] == 4 and defaults["seed"] == 2026
    texts = heldout_contexts()["test"]["text"]
    assert len(texts) == len(items) == 296
    for text, item in zip(texts, items, strict=True):
        assert text == f"{item['prompt']}{item['target']}\n"


def _demo_options():
    """The demonstration's arguments, caught where it would parse them."""
    import argparse

    caught = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, _=None: caught.extend(self._actions) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            demo.main([])
    return caught


def test_choices_are_the_answers_of_the_facts():
    """On questions of every task: the right answer is among them, and each comes from a fact."""
    sizes = Counter()
    for record in generate_dataset("train", contexts_per_task=3, num_examples=4, seed=11):
        task = get_task(record["task_id"])
        for item in questions(record):
            choices = _choices(task, item["prompt"])
            assert item["answer"] in choices and len(set(choices)) == len(choices)
            sizes[task.form == "item", len(choices)] += 1
    assert set(sizes) == {(True, 2), (False, 3)}, sizes

    task = get_task("same-person.object->superclass.plain")
    prompt = "\n< Anna owns the bee. >. Anna owns a kind of insect\n"
    prompt += "< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"
    assert _choices(task, prompt) == ["furniture", "fish", "fruit"]


def test_paper_items_by_shots(paper_file):
    contexts = read_dataset(paper_file)
    for num_shots in range(2, 8):
        items = paper_items(num_shots, dcformer_synthetic_file=paper_file, pretrained="ignored")["test"]
        assert len(items) == len(contexts)
        for item, record in zip(items, contexts, strict=True):
            assert item["num_shots"] == num_shots == item["prompt"].count("\n") - 1
            assert parse_context(record["texts"]).text.startswith(item["prompt"] + item["target"])
            assert item["target"] == f" {item['answer']}" and "[" not in item["prompt"]


def test_the_authors_file(authors_file):
    items = [item for num_shots in range(2, 8) for item in paper_items(num_shots, authors_file)["test"]]
    assert Counter(item["num_shots"] for item in items) == dict.fromkeys(range(2, 8), 888)
    assert len({item["task_id"] for item in items}) == 74
    assert max(len(item["answer"].split()) for item in items) == 3  # "answers" can be several words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "empty file"),
        ("task0,text\n", "expected a JSON object"),
        ('{"task_id": "task0"}\n', "expected a string under 'texts'"),
        ('{"task_id": "task0", "texts": "\\na b\\n"}\n', "at least one scored answer"),
        (json.dumps({"task_id": "t", "texts": "\na b\nc d\ne [ f ]\n"}) + "\n", "got none after 3, 4, 5, 6, 7"),
    ],
    ids=["missing", "empty", "csv", "no texts", "nothing scored", "too few examples"],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvaluationError, match=message) as caught:
        paper_items(2, dcformer_synthetic_file=str(path))
    assert str(path) in str(caught.value)


def test_no_file():
    with pytest.raises(EvaluationError, match="--metadata dcformer_synthetic_file="):
        paper_items(2)
