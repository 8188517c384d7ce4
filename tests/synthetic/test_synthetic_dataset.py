"""Generating, splitting, reading and writing data sets."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcformer.synthetic
from dcformer.synthetic import (
    TASKS,
    Question,
    generate_context,
    generate_dataset,
    get_task,
    iterate_contexts,
    parse_context,
    questions,
    read_dataset,
    split_of,
    write_dataset,
)
from dcformer.synthetic.__main__ import main

SPLITS = ("train", "validation", "test")
any_seed = st.integers(0, 2**32)


def prompts(record) -> list[str]:
    """The question texts of a generated context."""
    lines = parse_context(record["texts"]).text.strip("\n").split("\n")
    return [line.rsplit(" ", 1)[0] for line in lines]


def test_layout():
    texts = generate_context(TASKS[2], 8, random.Random(0))
    lines = texts.split("\n")
    assert lines[0] == lines[-1] == "" and len(lines) == 10
    assert all(re.fullmatch(r"< .+ >\. \w+ owns a kind of \w+", line) for line in lines[1:3])
    assert all(re.fullmatch(r"< .+ >\. \w+ owns a kind of \[ \w+ \]", line) for line in lines[3:-1])


def test_layout_is_the_authors(authors_file):
    """Line for line, their contexts and ours match the same pattern."""
    pattern = re.compile(r"\n(?:[^\[\]\n]+\n){2}(?:[^\[\]\n]+ \[ [^\[\]\n]+ \]\n){6}")
    theirs, ours = read_dataset(authors_file), generate_dataset("test")
    assert theirs.column_names == ours.column_names == ["task_id", "texts"]
    assert len(theirs) == len(ours) == 74 * 12
    assert all(pattern.fullmatch(texts) for dataset in (theirs, ours) for texts in dataset["texts"])


@given(st.integers(1, 10), st.data())
def test_num_examples_and_first_scored(num_examples, data):
    first_scored = data.draw(st.integers(0, num_examples - 1))
    task = data.draw(st.sampled_from(TASKS))
    context = parse_context(generate_context(task, num_examples, random.Random(0), "train", first_scored))
    assert [answer.num_shots for answer in context.answers] == list(range(first_scored, num_examples))
    assert context.text.count("\n") == num_examples + 1


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TASKS), any_seed, st.sampled_from(SPLITS))
def test_questions_of_a_context_are_different_and_of_its_split(task, seed, split):
    (record,) = iterate_contexts(split, 1, seed=seed, tasks=[task])
    lines = prompts(record)
    assert len(set(lines)) == 8
    assert {split_of_text(line) for line in lines} == {split}


def split_of_text(prompt: str) -> str:
    statement, query = prompt.split(" ", 1)
    return split_of(Question(statement, query, ""))


@settings(max_examples=15, deadline=None)
@given(st.tuples(any_seed, any_seed, any_seed))
def test_no_question_is_in_two_splits(seeds):
    lines = [
        {line for record in iterate_contexts(split, 2, seed=seed, tasks=TASKS[::5]) for line in prompts(record)}
        for split, seed in zip(SPLITS, seeds, strict=True)
    ]
    assert not (lines[0] & lines[1] or lines[0] & lines[2] or lines[1] & lines[2])


def test_small_tasks_do_repeat_questions_across_seeds():
    """So the test above is not true only because no question ever comes twice."""
    task = [get_task("different-in-set.ordinal->next.item")]
    one, other = ({p for r in iterate_contexts("test", 5, seed=s, tasks=task) for p in prompts(r)} for s in (1, 2))
    assert one & other


def test_the_splits_are_80_10_10():
    rng = random.Random(0)
    found = [split_of(TASKS[0].sample(rng)) for _ in range(4000)]
    for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert found.count(split) / 4000 == pytest.approx(share, abs=0.02)  # at least 3 standard deviations


def test_answers_do_not_decide_the_split():
    assert split_of(Question("a", "b", "c")) == split_of(Question("a", "b", "d"))


# --- seeds ---


@settings(max_examples=10, deadline=None)
@given(any_seed)
def test_same_seed_same_dataset(seed):
    assert generate_dataset(contexts_per_task=1, seed=seed)[:] == generate_dataset(contexts_per_task=1, seed=seed)[:]


def test_other_seed_or_split_other_dataset():
    texts = [generate_dataset(split, 1, seed=seed)["texts"][:] for split, seed in itertools.product(SPLITS, (0, 1))]
    assert all(one != other for one, other in itertools.combinations(texts, 2))


def test_size_and_choice_of_tasks_do_not_change_a_context():
    large = {(row["task_id"], row["texts"]) for row in generate_dataset(contexts_per_task=3)}
    assert len(large) == 3 * 74
    assert {tuple(row.values()) for row in generate_dataset(contexts_per_task=2, tasks=TASKS[10:20])} < large


def test_the_stream_has_no_end_and_takes_tasks_in_turn():
    rows = list(itertools.islice(iterate_contexts("train"), 150))
    assert [row["task_id"] for row in rows] == [TASKS[index % 74].task_id for index in range(150)]
    assert rows[:148] == list(iterate_contexts("train", 2))


@pytest.mark.slow
def test_another_process_makes_the_same_file(tmp_path):
    """With another hash seed, so nothing may depend on ``hash()`` or the order of a set."""
    theirs, ours = tmp_path / "theirs.jsonl", tmp_path / "ours.jsonl"
    source = os.path.dirname(os.path.dirname(os.path.dirname(dcformer.synthetic.__file__)))
    command = [sys.executable, "-m", "dcformer.synthetic", "--split", "test", "--contexts-per-task", "2", "--seed", "5"]
    subprocess.run(
        [*command, "--output", theirs, "--tokenizer", tmp_path / "tokenizer"],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": source},
        check=True,
        capture_output=True,
    )
    write_dataset(generate_dataset("test", 2, seed=5), ours)
    assert theirs.read_bytes() == ours.read_bytes()
    vocabulary = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary == dcformer.synthetic.build_tokenizer().get_vocab()


def test_a_training_set_takes_well_under_a_minute():
    """500 contexts of each task in a minute is 620 a second; this asks for more than that on a busy core."""
    start = time.process_time()
    count = sum(1 for _ in iterate_contexts("train", 20))
    assert count / (time.process_time() - start) > 1000


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "split is 'dev': expected one of 'train', 'validation', 'test'"),
        ({"num_examples": 2}, "first_scored is 2 with num_examples 2"),
        ({"first_scored": -1}, "first_scored is -1"),
        ({"contexts_per_task": 0}, "contexts_per_task is 0: expected at least 1"),
        ({"tasks": []}, "tasks is empty"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate_dataset(**arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        iterate_contexts(**arguments)  # at once, not when the first row is drawn


def test_more_examples_than_questions():
    task = get_task("different-in-set.ordinal->next.item")
    with pytest.raises(ValueError, match=r"found only \d+ different test questions .* expected 1000"):
        generate_context(task, 1000, random.Random(0), "test")


# --- files ---


def test_write_then_read(tmp_path):
    dataset = generate_dataset("validation", 1)
    write_dataset(dataset, tmp_path / "data.jsonl")
    assert read_dataset(tmp_path / "data.jsonl")[:] == dataset[:]
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("old")

    def rows():
        yield {"task_id": "a", "texts": "b"}
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_dataset(rows(), path)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_reads_the_authors_file(authors_file):
    dataset = read_dataset(authors_file)
    asked = [question for record in dataset for question in questions(record)]
    assert len(dataset) == 888 and len(set(dataset["task_id"])) == 74
    assert len(asked) == 888 * 6
    assert {question["num_shots"] for question in asked} == set(range(2, 8))
    assert asked[0]["prompt"].endswith(">. Ruth does not have a kind of") and asked[0]["answer"] == "vehicle"


def test_writing_the_authors_data_changes_nothing(authors_file, tmp_path):
    write_dataset(read_dataset(authors_file), tmp_path / "data.jsonl")
    theirs = [json.loads(line) for line in authors_file.read_text(encoding="utf-8").splitlines()]
    ours = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    assert theirs == ours


GOOD = json.dumps({"task_id": "a", "texts": "\nx y\nx [ y ]\n"}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"expected a JSON object in UTF-8, got b'\{'"),
        (b'{"texts": "\xff"}', "expected a JSON object in UTF-8"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"texts": "x [ y ]"}', "expected a string under 'task_id', got None"),
        (b'{"task_id": "a", "texts": 3}', "expected a string under 'texts', got 3"),
        (b'{"task_id": "a", "texts": "x y"}', "expected at least one scored answer"),
        (b'{"task_id": "a", "texts": "x [y]"}', r"unexpected bracket in 'x \[y\]'"),
    ],
)
def test_malformed_line(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: {message}"):
        read_dataset(path)


def test_empty_file(tmp_path):
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"data\.jsonl: expected at least one line"):
        read_dataset(tmp_path / "data.jsonl")


# --- the command line ---


def test_command_line(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    options = ["--split", "test", "--contexts-per-task", "1", "--num-examples", "4", "--first-scored", "1"]
    assert main([*options, "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote 74 test contexts of 74 tasks, 4 examples each, to {path}.\n"
    assert read_dataset(path)[:] == generate_dataset("test", 1, num_examples=4, first_scored=1)[:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts-per-task", "0"], "--contexts-per-task is 0: expected at least 1"),
        (["--num-examples", "1"], "first_scored is 2 with num_examples 1"),
        (
            ["--contexts-per-task", "1", "--output", "absent/data.jsonl"],
            "--output absent/data.jsonl or --tokenizer cannot be written: No such file or directory",
        ),
        (["--contexts-per-task", "1", "--tokenizer", __file__], "is a file: expected a folder"),
    ],
)
def test_command_line_errors(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(["--output", "data.jsonl", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
