"""Parsing contexts and making prompts of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcformer.synthetic import Answer, generate_dataset, parse_context, questions, read_dataset

TEXTS = "\n< A. >. is one\n< B. >. is [ two ]\n< C. >. is in [ South Korea ]\n"


def test_parse_context():
    context = parse_context(TEXTS)
    assert context.text == "\n< A. >. is one\n< B. >. is two\n< C. >. is in South Korea\n"
    assert context.answers == (Answer("two", 27, 30, 1), Answer("South Korea", 45, 56, 2))
    assert all(context.text[a.start : a.end] == a.text for a in context.answers)


def test_questions():
    assert questions({"task_id": "t", "texts": TEXTS}) == [
        {"task_id": "t", "prompt": "\n< A. >. is one\n< B. >. is", "answer": "two", "num_shots": 1},
        {
            "task_id": "t",
            "prompt": "\n< A. >. is one\n< B. >. is two\n< C. >. is in",
            "answer": "South Korea",
            "num_shots": 2,
        },
    ]


def test_two_answers_on_a_line():
    context = parse_context("a [ b ] c [ d ]\ne [ f ]")
    assert context.text == "a b c d\ne f"
    assert [(a.text, a.start, a.num_shots) for a in context.answers] == [("b", 2, 0), ("d", 6, 0), ("f", 10, 1)]


@pytest.mark.parametrize("texts", ["a [b]", "a [ b", "a b ]", "[ b ]", "a [  ]", "a [ b\n]", "a [ [ b ] ]", "a [  b ]"])
def test_brackets_out_of_place(texts):
    with pytest.raises(ValueError, match=r"unexpected bracket in .*expected scored answers as ' \[ answer \]'"):
        parse_context(texts)


word = st.text(st.characters(exclude_characters="[]", exclude_categories=("Z", "C")), min_size=1, max_size=5)
example = st.tuples(st.lists(word, min_size=1, max_size=4).map(" ".join), word, st.booleans())


@given(st.lists(example, max_size=6))
def test_parsing_undoes_formatting(examples):
    text = "\n" + "".join(f"{prompt} {answer}\n" for prompt, answer, _ in examples)
    texts = "\n" + "".join(f"{p} [ {a} ]\n" if scored else f"{p} {a}\n" for p, a, scored in examples)
    context = parse_context(texts)
    assert context.text == text
    assert [(a.text, a.num_shots) for a in context.answers] == [
        (answer, index) for index, (_, answer, scored) in enumerate(examples) if scored
    ]
    assert all(text[a.start : a.end] == a.text and text[a.start - 1] == " " for a in context.answers)


def check_prompts(records):
    for record in records:
        text = parse_context(record["texts"]).text
        assert text == record["texts"].replace("[ ", "").replace(" ]", "")
        for question in questions(record):
            assert text.startswith(question["prompt"] + " " + question["answer"] + "\n")
            assert not question["prompt"].endswith(" ")
            assert question["prompt"].count("\n") == question["num_shots"] + 1


def test_prompts_of_our_dataset():
    check_prompts(generate_dataset("validation", 1))


def test_prompts_of_the_authors_dataset(authors_file):
    check_prompts(read_dataset(authors_file))
