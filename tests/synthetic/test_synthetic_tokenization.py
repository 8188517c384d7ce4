"""The word-level tokenizer and the encoding of contexts."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from dcformer.synthetic import (
    TASKS,
    build_tokenizer,
    encode,
    generate_dataset,
    iterate_contexts,
    parse_context,
    questions,
)
from dcformer.synthetic.vocabulary import word_lists

RECORD = {"task_id": "t", "texts": "\nAnna owns the fox\nLeo owns the [ bee ]\nKate owns the [ oak ]\n"}


def words(tokenizer, ids):
    return [tokenizer.decode([i]) for i in ids]


def test_vocabulary(tokenizer):
    print(f"vocabulary: {len(tokenizer)} tokens")
    assert 250 < len(tokenizer) <= 700
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == ["<pad>", "<unk>", "<bos>", "<eos>", "\n"]
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    for name, entries in word_lists().items():
        for entry in entries:
            (token,) = tokenizer(entry)["input_ids"]
            assert token != tokenizer.unk_token_id, (name, entry)


def test_settings(tokenizer):
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == 2048
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 1)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    batch = tokenizer(["the fox", "fox"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"] == [[1, 1], [0, 1]] and batch["input_ids"][1][0] == 0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TASKS), st.integers(0, 2**32), st.sampled_from(["train", "validation", "test"]))
def test_contexts_have_no_unknown_word_and_decode_to_themselves(task, seed, split):
    tokenizer = build_tokenizer()
    (record,) = iterate_contexts(split, 1, seed=seed, tasks=[task])
    for text in (record["texts"], parse_context(record["texts"]).text):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    for question in questions(record):  # what a pipeline is given, and gives back
        ids = tokenizer(question["prompt"])["input_ids"]
        assert tokenizer.decode(ids) == question["prompt"]


def test_unknown_words_and_white_space(tokenizer):
    ids = tokenizer("the  aardvark ,\tthe fox\n\n the bee")["input_ids"]
    assert tokenizer.decode(ids) == "the <unk>, the fox\n\nthe bee"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the, the fox\n\nthe bee"


@settings(max_examples=100, deadline=None)
@given(st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=20))
def test_unknown_words_can_be_spelled(word):
    words, spelling = build_tokenizer(), build_tokenizer(spell=True)
    ids = spelling(f"the {word}, the fox")["input_ids"]
    assert spelling.decode(ids) == f"the {word}, the fox"
    known = word in words.get_vocab()
    assert (words(word)["input_ids"] == spelling(word)["input_ids"]) == known


def test_a_tokenizer_that_spells_knows_the_same_words(tokenizer):
    spelling = build_tokenizer(spell=True)
    assert tokenizer.get_vocab().items() <= spelling.get_vocab().items()
    for record in generate_dataset("test", 1):
        assert spelling(record["texts"])["input_ids"] == tokenizer(record["texts"])["input_ids"]
    assert spelling("desk é")["input_ids"] == [*tokenizer("desk")["input_ids"], tokenizer.unk_token_id]


def test_prompt_and_answer_tokenize_like_the_text(tokenizer):
    for record in generate_dataset("test", 1):
        whole = tokenizer(parse_context(record["texts"]).text)["input_ids"]
        for question in questions(record):
            prompt = tokenizer(question["prompt"])["input_ids"]
            (answer,) = tokenizer(question["answer"])["input_ids"]
            assert tokenizer(question["prompt"] + " " + question["answer"])["input_ids"] == [*prompt, answer]
            assert whole[: len(prompt) + 1] == [*prompt, answer]


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.padding_side, loaded.model_max_length) == ("left", 2048)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    for record in generate_dataset("test", 1):
        assert dict(loaded(record["texts"])) == dict(tokenizer(record["texts"]))
        ids = loaded(record["texts"])["input_ids"]
        assert loaded.decode(ids) == record["texts"]


# --- encode ---


def test_labels_are_the_scored_answers(tokenizer):
    encoded = encode(RECORD, tokenizer)
    assert set(encoded) == {"input_ids", "labels"}
    text = "\nAnna owns the fox\nLeo owns the bee\nKate owns the oak\n"
    assert encoded["input_ids"] == tokenizer(text)["input_ids"]
    pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
    assert all(label in (-100, token) for token, label in pairs)
    assert words(tokenizer, [label for _, label in pairs if label != -100]) == ["bee", "oak"]
    assert [index for index, (_, label) in enumerate(pairs) if label != -100] == [9, 14]


def test_each_answer_of_a_dataset_has_one_label(tokenizer):
    for record in generate_dataset("train", 1):
        labels = [label for label in encode(record, tokenizer)["labels"] if label != -100]
        lines = parse_context(record["texts"]).text.strip("\n").split("\n")
        assert words(tokenizer, labels) == [line.split()[-1] for line in lines[2:]]


def test_answers_of_several_tokens():
    """Any fast tokenizer will do: with one token a character, each character of an answer is labeled."""
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?\n abcdefghijklmnop")}, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    encoded = encode({"texts": "a b\nc [ de f ]\n"}, PreTrainedTokenizerFast(tokenizer_object=characters))
    assert "".join("?\n abcdefghijklmnop"[label] for label in encoded["labels"] if label != -100) == "de f"


def test_max_length_drops_whole_examples_from_the_beginning(tokenizer):
    whole = encode(RECORD, tokenizer)
    assert encode(RECORD, tokenizer, max_length=16) == whole
    for max_length in (15, 14, 12, 11):
        shorter = encode(RECORD, tokenizer, max_length=max_length)
        assert shorter == {key: values[5:] for key, values in whole.items()}
        assert tokenizer.decode(shorter["input_ids"]) == "\nLeo owns the bee\nKate owns the oak\n"
    assert tokenizer.decode(encode(RECORD, tokenizer, 6)["input_ids"]) == "\nKate owns the oak\n"
    with pytest.raises(ValueError, match="max_length is 5: expected enough for the last example, which has 6 tokens"):
        encode(RECORD, tokenizer, max_length=5)


def test_map_and_collate(tokenizer):
    dataset = generate_dataset("train", 1, tasks=TASKS[::20])
    encoded = dataset.map(encode, fn_kwargs={"tokenizer": tokenizer}, remove_columns=dataset.column_names)
    batch = DataCollatorForSeq2Seq(tokenizer)(list(encoded))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert (batch["labels"] != -100).sum(1).tolist() == [6] * len(dataset)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (batch["input_ids"][:, -1] == tokenizer.convert_tokens_to_ids("\n")).all()  # padded on the left
