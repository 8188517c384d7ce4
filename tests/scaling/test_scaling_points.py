"""Runs from tables and from trainers' folders; what is not a run is refused by row and column."""

import json
import math

import pytest
import torch
from helpers import PLAIN, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from dcformer import DCFormerConfig, DCFormerForCausalLM, HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.analysis import num_parameters, training_flops
from dcformer.errors import DCFormerError
from dcformer.head_systems.costs import count_training_flops
from dcformer.modules import convert_attention
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
    (none,) = read_points(table(tmp_path, HEAD + "b,1e6,2e7,3.5,0,,\n"))
    assert none.compute("6nd-nonembed") == none.compute("6nd")
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
    "column seed: 1.5, expected a whole number": "b,1e6,2e7,3,,,1.5",
    "column embedding_parameters: 1e\\+06, expected less than parameters": "b,1e6,2e7,3,1e6,,1",
    "column parameters: 1e\\+160, times column tokens": "b,1e160,1e160,3,,,",
}


@pytest.mark.parametrize("message", ROWS)
def test_bad_rows(message, tmp_path):
    file = table(tmp_path, HEAD + "b,1e6,2e7,3,,,\n" + ROWS[message] + "\n")
    with pytest.raises(DCFormerError, match=f"runs.csv, row 3, {message}"):
        read_points(file)


def test_blank_lines_count_as_in_an_editor(tmp_path):
    with pytest.raises(DCFormerError, match=r"runs\.csv, row 5, column loss: 0"):
        read_points(table(tmp_path, HEAD + "\nb,1e6,2e7,3,,,\n\nb,2e6,2e7,0,,,\n"))


def test_runs_that_are_there_twice(tmp_path):
    file = table(tmp_path, HEAD + "b,1e6,2e7,3,,,1\nb,1e6,2e7,3,,,2\nb,1e6,2e7,3.1,,,1\n")
    with pytest.raises(DCFormerError, match=r"row 4: family 'b', 1e\+06 parameters, seed 1, as .*row 2: remove one"):
        read_points(file)


def test_bad_tables(tmp_path):
    with pytest.raises(DCFormerError, match="row 2: '9' after the last column"):
        read_points(table(tmp_path, HEAD + "b,1e6,2e7,3,,,1,9\n"))
    with pytest.raises(DCFormerError, match="no column 'tokens'"):
        read_points(table(tmp_path, "family,parameters,loss\n"))
    with pytest.raises(DCFormerError, match="no runs"):
        read_points(table(tmp_path, HEAD))
    with pytest.raises(DCFormerError, match="column 'loss' is there twice"):
        read_points(table(tmp_path, "family,parameters,tokens,loss,loss\n"))
    with pytest.raises(DCFormerError, match="cannot be read"):
        read_points(tmp_path / "missing.csv")


def state_of(counts, loss=3.0, last=None, setup=None, speeds=None):
    """A trainer's state: tokens counted at steps, an evaluation before and after, rows and steps a second."""
    last = last or max(counts)
    history = [{"eval_loss": 9.0, "eval_num_tokens": 0.0, "step": 0}]
    history += [{"loss": 5.0, "num_tokens": float(count), "step": step} for step, count in counts.items()]
    callbacks = {"SetupRecord": {"args": {"setup": setup}, "attributes": {}}} if setup else {}
    history += [{"eval_loss": loss, "step": last}]
    if speeds:
        rows, steps = speeds
        history += [{"train_samples_per_second": rows, "train_steps_per_second": steps, "step": last}]
    return {
        "global_step": last,
        "log_history": history,
        "num_input_tokens_seen": 0,
        "stateful_callbacks": callbacks,
    }


def write(run, state, config=None):
    run.mkdir(parents=True, exist_ok=True)
    (config or tiny_config()).save_pretrained(run)
    (run / "trainer_state.json").write_text(json.dumps(state))


PACKED = {"seed": 4, "max_length": 64, "packing": True}


@pytest.fixture
def folder(tmp_path):
    """Two runs as our trainers leave them, one with a checkpoint below it."""
    for family, loss in (("plain", 3.0), ("composed", 2.9)):
        for run in (tmp_path / family / "small", tmp_path / family / "small" / "checkpoint-5"):
            write(run, state_of({5: 500, 10: 1000}, loss, setup=PACKED))
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


class WiderConfig(DCFormerConfig):
    model_type = "wider_dcformer"


class WiderForCausalLM(DCFormerForCausalLM):
    config: WiderConfig

    def __init__(self, config):
        super().__init__(config)
        self.own = torch.nn.Parameter(torch.zeros(7))


AutoConfig.register(WiderConfig.model_type, WiderConfig)
AutoModelForCausalLM.register(WiderConfig, WiderForCausalLM)


def test_what_others_add_to_a_model_counts(tmp_path):
    """Head systems by their own costs; of a variant of ours, whose costs nobody knows, the model itself is counted."""
    fields = {name: value for name, value in tiny_config(**PLAIN).to_dict().items() if name != "model_type"}
    config = HeadSystemsConfig(**fields, head_system="collaborative")
    write(tmp_path / "heads" / "small", state_of({5: 500, 10: 1000}, setup=PACKED), config)
    (point,) = read_points(tmp_path)
    model = HeadSystemsForCausalLM(config)
    assert point.parameters == model.num_parameters() != num_parameters(config)
    assert point.embedding_parameters == 2 * model.lm_head.weight.numel()
    assert point.flops == count_training_flops(config, 64) * 1000 != training_flops(config, 64) * 1000

    for composition in (PLAIN, {}):
        config = WiderConfig(**{k: v for k, v in tiny_config(**composition).to_dict().items() if k != "model_type"})
        run = tmp_path / "wider" / "small"
        write(run, state_of({5: 500, 10: 1000}), config)
        WiderForCausalLM(config).save_pretrained(run)
        (point,) = (point for point in read_points(tmp_path) if point.family == "wider")
        assert point.parameters == num_parameters(config) + 7 and point.flops is None


def test_the_loss_is_that_after_the_last_step(tmp_path):
    """Not that of the untrained model: our trainer writes the evaluation after training beside its state."""
    state = state_of({5: 500, 10: 1000})
    state["log_history"].pop()
    write(tmp_path / "plain" / "small", state)
    with pytest.raises(DCFormerError, match="no eval_loss after its last step, 10"):
        read_points(tmp_path)
    (tmp_path / "plain" / "small" / "eval_results.json").write_text('{"eval_loss": 2.5}')
    assert read_points(tmp_path)[0].loss == 2.5


TOKENS = {
    "uninterrupted": ({5: 622, 10: 1259, 15: 1896, 20: 2534}, None, 2534),
    "resumed at 10": ({5: 622, 10: 1259, 15: 637, 20: 1275}, None, 2534),
    "resumed at its first entry, by chance with more tokens": ({5: 622, 10: 637, 15: 1275, 20: 1912}, None, 2534),
    "resumed twice": ({5: 500, 10: 500, 15: 1000, 20: 1500, 25: 500, 30: 1000}, None, 3000),
    "resumed between two entries": ({5: 500, 10: 1000, 15: 300, 20: 800}, None, 2000),
    "the last steps are not logged": ({5: 500, 10: 1000}, 12, 1200),
    "uneven texts": ({5: 500, 10: 800, 15: 1500, 20: 1900}, None, 1900),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_a_resumed_run(name, tmp_path):
    counts, last, expected = TOKENS[name]
    write(tmp_path / "plain" / "small", state_of(counts, last=last, setup=PACKED))
    (point,) = read_points(tmp_path)
    assert point.tokens == pytest.approx(expected, abs=1e-6)
    assert point.flops == pytest.approx(training_flops(tiny_config(), 64) * expected)


def test_a_counter_that_goes_on(tmp_path):
    write(tmp_path / "plain" / "small", state_of({5: 500, 10: 500}) | {"num_input_tokens_seen": 1100})
    assert read_points(tmp_path)[0].tokens == 1100


LENGTHS = {  # what a run recorded of its rows, its rows and steps a second, and the length that is counted
    "rows shorter than the context": (None, (160.0, 20.0), 10.0),
    "rows truncated at more than they have": ({"max_length": 64, "packing": False}, (40.0, 20.0), 40.0),
    "packed": (PACKED, (160.0, 20.0), 64),
    "packed up to the context": ({"max_length": None, "packing": True}, None, 128),
    "not told": (None, None, None),
    "truncated rows, not told": ({"max_length": 64, "packing": False}, None, None),
    "too slow for thousandths": (None, (0.072, 0.009), None),
    "speeds that are none": (None, (None, math.nan), None),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_operations_are_counted_at_the_length_of_rows(name, tmp_path):
    """At the context's, attention over keys that no row had would count; not told, a run has no such number."""
    setup, speeds, length = LENGTHS[name]
    config = tiny_config(max_position_embeddings=128)
    write(tmp_path / "plain" / "small", state_of({5: 400, 10: 800}, setup=setup, speeds=speeds), config)
    (point,) = read_points(tmp_path)
    expected = None if length is None else pytest.approx(training_flops(config, length) * 800)
    assert point.flops == expected


@pytest.mark.parametrize(("rows", "length"), [(24, {"max_steps": 3}), (20, {"num_train_epochs": 2})])
def test_the_librarys_trainer_tells_the_length_of_rows(rows, length, tmp_path):
    """With steps of two batches, and a last one in each epoch that is short."""
    config, run = tiny_config(max_position_embeddings=256), tmp_path / "plain" / "small"
    arguments = TrainingArguments(
        str(run), **length, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
        include_num_input_tokens_seen="all", report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    row = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    trainer = Trainer(DCFormerForCausalLM(config), arguments, train_dataset=[row] * rows, eval_dataset=[row])
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    (point,) = read_points(tmp_path)
    assert point.flops == pytest.approx(training_flops(config, 16) * point.tokens, rel=1e-3)


OTHER_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_other_architectures_count_their_own_parameters(name, tmp_path):
    config = AutoConfig.for_model(name, **OTHER_SIZES)
    model = AutoModelForCausalLM.from_config(config)
    for i in range(2):  # without a recorded seed, runs are counted
        write(tmp_path / name / str(i), state_of({5: 500}), config)
    points = read_points(tmp_path)
    assert [point.seed for point in points] == [0, 1]
    assert {point.parameters for point in points} == {sum(p.numel() for p in model.parameters())}
    assert {(point.embedding_parameters, point.flops) for point in points} == {(2 * 64 * 16, None)}


def test_converted_models_are_refused(tmp_path):
    """Where their weights are in shards, or gone, too."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **OTHER_SIZES))
    convert_attention(model)
    write(tmp_path / "llama" / "small", state_of({5: 500}), model.config)
    with pytest.raises(DCFormerError, match="a converted llama"):
        read_points(tmp_path)


def changed(**fields):
    return lambda state: state | fields


def with_loss(loss):
    return lambda state: state | {"log_history": [*state["log_history"], {"eval_loss": loss, "step": 10}]}


STATES = {
    "no num_tokens in its history": lambda state: state | {"log_history": [{"eval_loss": 3.0, "step": 10}]},
    "num_tokens is 0.0 at step 5": lambda _: state_of({5: 0, 10: 0}),
    "num_tokens goes 5, 1000.*cannot be told": lambda _: state_of({5: 5, 10: 1000, 15: 1005, 20: 1010}),
    "eval_loss: nan, expected a finite number": with_loss(math.nan),
    "eval_loss: None, expected a finite number": with_loss(None),
    "eval_loss: -1, expected a finite number": with_loss(-1),
    "eval_loss: 50 is too much for nats": with_loss(50),
    r"stateful_callbacks is \[\], expected dict": changed(stateful_callbacks=[]),
    "log_history is None, expected list": changed(log_history=None),
    "global_step is '7', expected int": changed(global_step="7"),
    "expected an object": lambda _: [],
}


@pytest.mark.parametrize("message", STATES)
def test_trainers_states_that_are_none(message, folder):
    file = folder / "plain" / "small" / "trainer_state.json"
    file.write_text(json.dumps(STATES[message](json.loads(file.read_text()))))
    with pytest.raises(DCFormerError, match=message) as refused:
        read_points(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "expected an object"),
        ('{"model_type": "dcformer", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "unheard-of"}', "unheard-of"),
        ('{"model_type": "clip_vision_model"}', "no language model can be counted"),
    ],
)
def test_configurations_that_are_none(config, message, folder):
    (folder / "plain" / "small" / "config.json").write_text(config)
    with pytest.raises(DCFormerError, match=message) as refused:
        read_points(folder)
    assert "\n" not in str(refused.value)


def test_trainers_folders_that_are_none(folder):
    with pytest.raises(DCFormerError, match="is one run: name the folder above"):
        read_points(folder / "plain" / "small")
    (folder / "plain" / "small" / "trainer_state.json").write_text("{")
    with pytest.raises(DCFormerError, match="cannot be read as a trainer's output"):
        read_points(folder)
