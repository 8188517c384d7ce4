"""Runs from tables and from trainers' folders; what is not a run is refused by row and column."""

import json
import math

import pytest
from helpers import tiny_config

from dcformer.analysis import num_parameters, training_flops
from dcformer.errors import DCFormerError
from dcformer.scaling import of_family, read_points

HEAD = "family,parameters,tokens,loss,embedding_parameters,flops,seed\n"


def table(tmp_path, text):
    file = tmp_path / "runs.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_table(tmp_path):
    file = table(tmp_path, HEAD + "b,1e6,2e7,3.5,1e5,9e13,2\nv,1e6,2e7,3.4,,,\n")
    first, second = read_points(file)
    assert (first.family, first.parameters, first.tokens, first.loss, first.seed) == ("b", 1e6, 2e7, 3.5, 2)
    assert first.compute("6nd") == 6 * 1e6 * 2e7
    assert first.compute("6nd-nonembed") == pytest.approx(6 * 9e5 * 2e7)
    assert first.compute("flops") == 9e13
    assert (second.embedding_parameters, second.flops, second.seed) == (None, None, 0)
    for measure, column in (("6nd-nonembed", "embedding_parameters"), ("flops", "flops")):
        with pytest.raises(DCFormerError, match=f"row 3: no {column}, which --compute {measure} needs"):
            second.compute(measure)
    assert of_family([first, second], "v") == [second]
    with pytest.raises(DCFormerError, match="no run is of family 'w': found b, v"):
        of_family([first, second], "w")


def test_perplexities(tmp_path):
    file = table(tmp_path, "family,parameters,tokens,loss\nb,1e6,2e7,30\n")
    (point,) = read_points(file, perplexity=True)
    assert point.loss == math.log(30)
    with pytest.raises(DCFormerError, match=r"row 2, column loss: 30 .*--perplexity"):
        read_points(file)


def test_sizes_of_several_lengths(tmp_path):
    file = table(tmp_path, "family,parameters,tokens,loss\nb,1e6,2e7,3\nc,1e6,3e7,3\nb,1e6,3e7,2.9\n")
    with pytest.raises(DCFormerError, match=r"row 4, column tokens: 3e\+07, but .*row 2 .* --mixed-tokens"):
        read_points(file)
    assert len(read_points(file, mixed_tokens=True)) == 3


ROWS = {
    "column family: empty": ",1e6,2e7,3,,,",
    "column parameters: 'many', expected a number": "b,many,2e7,3,,,",
    "column parameters: empty": "b,,2e7,3,,,",
    "column tokens: -1, expected a finite number above 0": "b,1e6,-1,3,,,",
    "column loss: nan, expected a finite number": "b,1e6,2e7,nan,,,",
    "column flops: inf, expected a finite number": "b,1e6,2e7,3,,inf,",
    "column seed: -1": "b,1e6,2e7,3,,,-1",
}


@pytest.mark.parametrize("message", ROWS)
def test_bad_rows(message, tmp_path):
    file = table(tmp_path, HEAD + "b,1e6,2e7,3,,,\n" + ROWS[message] + "\n")
    with pytest.raises(DCFormerError, match=f"runs.csv, row 3, {message}"):
        read_points(file)


def test_bad_tables(tmp_path):
    with pytest.raises(DCFormerError, match="no column 'tokens'"):
        read_points(table(tmp_path, "family,parameters,loss\n"))
    with pytest.raises(DCFormerError, match="no runs"):
        read_points(table(tmp_path, HEAD))
    with pytest.raises(DCFormerError, match="cannot be read"):
        read_points(tmp_path / "missing.csv")


@pytest.fixture
def folder(tmp_path):
    """Two runs as our trainers leave them, one with a checkpoint below it."""
    for family, loss in (("plain", 3.0), ("composed", 2.9)):
        for run in (tmp_path / family / "small", tmp_path / family / "small" / "checkpoint-5"):
            run.mkdir(parents=True)
            tiny_config().save_pretrained(run)
            setup = {"seed": 4, "max_length": 64}
            state = {
                "log_history": [{"eval_loss": 9.0}, {"num_tokens": 500.0}, {"num_tokens": 1000.0}, {"eval_loss": loss}],
                "stateful_callbacks": {"SetupRecord": {"args": {"setup": setup}, "attributes": {}}},
            }
            (run / "trainer_state.json").write_text(json.dumps(state))
    return tmp_path


def test_trainers_folders(folder):
    points = read_points(folder)
    config = tiny_config()
    found = {(p.family, p.loss, p.seed, p.tokens) for p in points}
    assert found == {("plain", 3.0, 4, 1000.0), ("composed", 2.9, 4, 1000.0)}
    for point in points:
        assert point.parameters == num_parameters(config)
        assert point.parameters - point.embedding_parameters == num_parameters(config, exclude_embeddings=True)
        assert point.flops == training_flops(config, 64) * 1000


def test_trainers_folders_that_are_none(folder):
    with pytest.raises(DCFormerError, match="is one run: name the folder above"):
        read_points(folder / "plain" / "small")
    state = folder / "plain" / "small" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"eval_loss": 3.0}]}))
    with pytest.raises(DCFormerError, match="no num_tokens in its history"):
        read_points(folder)
    state.write_text("{")
    with pytest.raises(DCFormerError, match="cannot be read as a trainer's output"):
        read_points(folder)
