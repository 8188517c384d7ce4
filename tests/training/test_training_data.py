"""What is wrong with data, tokenizer or output is said before any training starts."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from helpers import REPOSITORY
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain

from dcformer.synthetic import build_tokenizer
from dcformer.training import DataArguments, ModelArguments, TrainingConfig
from dcformer.training.arguments import _check_file, parse
from dcformer.training.data import check_output, check_rows, load_rows, make_data

CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
DATA = REPOSITORY / "examples" / "data"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """Runs examples/finetune.py with arguments and returns its message; training must not have begun."""
    monkeypatch.setattr("trl.SFTTrainer.train", lambda *a, **k: pytest.fail("training started"))

    def run(*arguments: str, script=finetune, **replaced: str) -> str:
        options = {"model_name_or_path": str(CHECKPOINT), "data": str(DATA / "text_test.jsonl")}
        options |= {"output_dir": str(tmp_path / "out"), "max_steps": "1", "report_to": "none", "use_cpu": "true"}
        if script is pretrain:
            options["tokenizer"] = options.pop("model_name_or_path")
        options |= replaced
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        with pytest.raises(SystemExit) as caught:
            script.main([*flags, *arguments])
        message = str(caught.value)
        return message if message.startswith("error: ") else capsys.readouterr().err

    return run


def test_empty_file_and_no_rows(fails, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl is empty: expected at least one row" in fails(data=str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no rows"):
        check_rows(Dataset.from_dict({"text": []}), None, "here")


@pytest.mark.parametrize("flags", [[], ["--streaming"]], ids=str)
@pytest.mark.parametrize("name", ["blank.jsonl", "header.csv", "rows.parquet"])
def test_files_without_rows(fails, tmp_path, name, flags):
    file = tmp_path / name
    file.write_text({"blank.jsonl": "\n\n", "header.csv": "text\n"}.get(name, ""))
    if name == "rows.parquet":
        Dataset.from_dict({"text": []}).to_parquet(file)
    for argument in ("data", "eval_data"):
        message = fails(*flags, **{argument: str(file)})
        assert message == f"error: {file} has no rows: expected at least one to train on"


def test_missing_and_unknown_files(fails, tmp_path):
    assert "no file nowhere.jsonl" in fails(data="nowhere.jsonl")
    (tmp_path / "rows.doc").write_text("x")
    assert "unknown kind of file, expected one of .json, .jsonl" in fails(data=str(tmp_path / "rows.doc"))


def test_wrong_column(fails, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"body": "the fox", "number": 3}])
    message = fails(data=file)
    assert "columns 'body', 'number', none of which is 'text' or 'messages'" in message and "--column" in message
    assert "no column 'boddy', only 'body', 'number'" in fails(data=file, column="boddy")
    assert "column 'number' holds '3' (int): expected a text, or a list of turns" in fails(data=file, column="number")
    file = write(tmp_path / "turns.jsonl", [{"messages": [{"from": "human", "value": "hi"}]}])
    assert "expected a text, or a list of turns" in fails(data=file)


def test_rows_are_checked(fails, tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    file = write(tmp_path / "rows.jsonl", [{"text": "the fox"}, {"text": "the bee"}, {"text": None}])
    assert f"{file}, row 2: column 'text' holds 'None' (NoneType): expected a text" in fails(data=file)
    assert "rows.jsonl, row 2" in fails(eval_data=file)
    with pytest.raises(ValueError, match="here, row 2"):  # a stream: when the row is read
        list(check_rows(load_rows(file, streaming=True), None, "here"))
    file = write(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}])
    assert "pairs.jsonl, row 1: column 'completion' holds 'None'" in fails(data=file)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", [{"messages": turns}, {"messages": []}])
    message = fails(data=str(tmp_path / "folder"))
    assert "folder (split 'train'), row 1: column 'messages' holds '[]'" in message
    file = write(tmp_path / "chats.jsonl", [{"messages": turns}, {"messages": [{"role": "user", "content": None}]}])
    assert "chats.jsonl, row 1" in fails(data=file)


def test_nulls_are_found_in_all_rows(tmp_path):
    texts = ["the fox"] * 12_345
    texts[12_021] = None
    with pytest.raises(ValueError, match="here, row 12021: column 'text' holds 'None'"):
        check_rows(Dataset.from_dict({"text": texts}), None, "here")
    turns = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="here, row 1500: column 'messages' holds 'None'"):
        check_rows(Dataset.from_dict({"messages": [turns] * 1500 + [None]}), None, "here")


def test_nothing_to_learn_from(fails, tmp_path):
    empty = write(tmp_path / "empty.jsonl", [{"text": ""}] * 9)
    assert "no training row has a token to learn from: all texts" in fails(data=empty)
    assert "no training row has a token to learn from" in fails("--streaming", data=empty)
    assert "no training row has a token to learn from" in fails(data=empty, script=pretrain)
    assert "no held-out row has a token to learn from" in fails(eval_data=empty)
    file = write(tmp_path / "completions.jsonl", [{"prompt": "the fox", "completion": ""}] * 3)
    assert "no training row has a token to learn from" in fails(data=file)
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "the fox " * 9, "completion": " the bee"}] * 3)
    assert "no training row has a token to learn from" in fails(data=file, max_length="6")


def test_held_out_rows_are_not_training_rows(fails, tmp_path):
    assert "has no split 'test': files are one split, 'train'" in fails(eval_split="test")
    assert "held-out rows would be the training rows" in fails(eval_split="train")
    message = fails(eval_data=str(DATA / ".." / "data" / "text_test.jsonl"))
    assert "held-out rows would be the training rows" in message and "--eval_rows" in message
    for pattern in ("text_test.jsonl*", "text_*.jsonl"):  # the second has other files, too
        assert f"split 'train' of {DATA / 'text_test.jsonl'}: name others" in fails(eval_data=str(DATA / pattern))


def make(**options) -> tuple:
    training = TrainingConfig(output_dir="unused", use_cpu=True, max_steps=1, data_seed=options.pop("data_seed", None))
    return make_data(DataArguments(**options), training)


def test_configuration_of_held_out_rows(tmp_path):
    """Held-out rows are of the training rows' configuration where they are of the same data set."""
    names = {config: {split: f"{config}-{split}.jsonl" for split in ("train", "test")} for config in ("plain", "other")}
    configs = []
    for config, files in names.items():
        for split, file in files.items():
            write(tmp_path / file, [{"text": f"{config} {split}"}])
        files = [{"split": split, "path": file} for split, file in files.items()]
        configs.append({"config_name": config, "data_files": files, "default": config == "plain"})
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    rows, held_out = make(data=str(tmp_path), data_config="other", eval_split="test")
    assert (rows["text"][:], held_out["text"][:]) == (["other train"], ["other test"])


def test_seed_of_held_out_rows():
    parts = [
        make(data=str(DATA / "text_test.jsonl"), eval_rows=9, data_seed=seed)[1]["text"][:] for seed in (None, 42, 0)
    ]
    assert parts[0] == parts[1] != parts[2]


def test_held_out_rows_of_a_stream_are_no_stream():
    """How many they are is known, so that those which several processes repeat are left out."""
    texts = load_rows(str(DATA / "text_test.jsonl"))["text"][:]
    rows, held_out = make(data=str(DATA / "text_test.jsonl"), eval_rows=9, streaming=True)
    assert isinstance(held_out, Dataset) and held_out["text"][:] == texts[:9]
    assert sorted(row["text"] for row in rows) == sorted(texts[9:])


@pytest.mark.parametrize("streaming", [False, True])
def test_folders_of_save_to_disk(fails, tmp_path, streaming):
    one = Dataset.from_dict({"text": ["the fox", "the bee"]}).with_format("pandas")
    one.save_to_disk(tmp_path / "one")
    DatasetDict(train=one, test=one.select([1])).save_to_disk(tmp_path / "both")
    rows, held_out = make(
        data=str(tmp_path / "one"), eval_data=str(tmp_path / "both"), eval_split="test", streaming=streaming
    )
    assert sorted(row["text"] for row in rows) == ["the bee", "the fox"]
    assert isinstance(rows, IterableDataset if streaming else Dataset)
    assert list(held_out) == [{"text": "the bee"}]
    message = fails(data=str(tmp_path / "both"), split="valid")
    assert f"{tmp_path / 'both'} has no split 'valid', only 'train', 'test': choose one of them" in message
    assert "has no split 'test', only 'train'" in fails(data=str(tmp_path / "one"), eval_split="test")


def test_files_that_cannot_be_read(fails, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "the fox"}\n{"text": "the\n')
    for flags in ((), ("--streaming",)):
        assert "rows.jsonl cannot be read as rows of one kind: JSON" in fails(*flags, data=str(tmp_path / "rows.jsonl"))
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", [{"text": "the fox"}])
    write(tmp_path / "mixed" / "b.jsonl", [{"body": "the fox", "number": 3}])
    assert "mixed cannot be read as rows of one kind" in fails(data=str(tmp_path / "mixed"))
    (tmp_path / "mixed" / "c.csv").write_text("text\nthe fox\n")
    assert "matches files of different kinds (csv, json)" in fails(data=str(tmp_path / "mixed" / "*"))
    assert f"--config {tmp_path}/absent.yaml: No such file" in fails("--config", str(tmp_path / "absent.yaml"))
    assert f"--config {tmp_path}: Is a directory" in fails("--config", str(tmp_path))
    (tmp_path / "run.yaml").write_text("max_steps: [1\n")
    assert "run.yaml" in fails("--config", str(tmp_path / "run.yaml"))


def test_names_that_are_not_there(fails):
    for name in ("model_name_or_path", "tokenizer", "chat_template_path"):
        assert f"error: --{name} nowhere/at-all: no such file or folder, and not found" in fails(
            **{name: "nowhere/at-all"}
        )
    assert "--tokenizer nowhere: no such file or folder" in fails(tokenizer="nowhere", script=pretrain)
    assert "no file nowhere/*.jsonl" in fails(data="nowhere/*.jsonl")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "0"),
        ("learning_rate", "-0.001"),
        ("per_device_train_batch_size", "0"),
        ("per_device_eval_batch_size", "0"),
        ("gradient_accumulation_steps", "0"),
        ("num_train_epochs", "0"),
        ("early_stopping_patience", "0"),
        ("max_steps", "0"),
        ("learning_rate", "inf"),
        ("learning_rate", "nan"),
        ("num_train_epochs", "inf"),
    ],
)
def test_values_that_no_run_can_have(fails, name, value):
    assert f"{name} is {float(value):g}: expected more" in fails(**{name: value}).replace(".0:", ":")


@pytest.mark.parametrize("name", ["weight_decay", "max_grad_norm"])
@pytest.mark.parametrize("value", ["-1.0", "inf", "nan"])
def test_values_below_zero(fails, name, value):
    assert f"{name} is {value}: expected 0 or more, and finite: give another --{name}" in fails(**{name: value})


def test_what_cannot_run_here(fails, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if "dcformer_triton" in ALL_ATTENTION_FUNCTIONS.valid_keys():
        assert "dcformer_triton: the fused kernels need a CUDA device" in fails(attn_implementation="dcformer_triton")
    assert "Liger has no kernels for DCFormer" in fails("--use_liger_kernel")
    if find_spec("wandb") is None:
        assert "requires wandb to be installed" in fails(report_to="wandb")


def test_adapters_that_fit_no_layer(fails):
    message = fails("--use_peft", "--lora_target_modules", "q_proj", "nonsense")
    assert "--lora_target_modules names 'nonsense', which is not a layer" in message
    assert "names 'nonsense'" in fails("--use_peft", "--lora_target_modules", "nonsense")
    assert "--lora_modules_to_save names 'compost'" in fails("--use_peft", "--lora_modules_to_save", "compost")


@pytest.mark.parametrize("flags", [[], ["--streaming"], ["--assistant_only_loss"]], ids=str)
def test_conversations_without_a_chat_template(flags, fails):
    conversations = str(DATA / "chat_test.jsonl")
    message = fails(*flags, data=conversations)
    assert f"the tokenizer {CHECKPOINT} has no chat template: give one with --chat_template_path" in message
    if not flags:
        assert "no chat template" in fails(eval_data=conversations)


def test_chat_template_without_answers(fails, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "the fox"}]}])
    flags = ["--assistant_only_loss", "--chat_template_path", str(DATA / "chat_template.jinja")]
    assert "has no assistant tokens" in fails(*flags, data=file)


@pytest.mark.parametrize("script", [finetune, pretrain])
def test_tokenizers_without_an_end(script, fails, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    given = {"script": script, "tokenizer": str(tmp_path / "endless")}
    if script is pretrain:
        sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4"
        given["config_overrides"] = f"{{{sizes}}}"
    tokenizer.eos_token = None
    for pad in (tokenizer.pad_token, None):
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path / "endless")
        assert f"{tmp_path / 'endless'} has no eos_token, with which each text is ended" in fails(**given)
        assert "--eos_token" in fails("--streaming", **given)
    assert "'nothing') is not found" in fails(eos_token="nothing", **given)  # the option counts
    template = str(DATA / "chat_template.jinja")  # conversations end by their template
    message = fails(data=str(DATA / "chat_test.jsonl"), chat_template_path=template, **given)
    assert "has no pad_token, and no eos_token to fill rows up with" in message and "--pad_token" in message


@pytest.mark.parametrize("is_ending", [True, False])
@pytest.mark.parametrize("has_pad", [True, False])
def test_tokens_that_come_with_a_chat_template(is_ending, has_pad, fails, tmp_path):
    """TRL takes over the end of the tokenizer that `chat_template_path` names, also where it has none."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = (DATA / "chat_template.jinja").read_text()
    if not is_ending:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    if is_ending:
        tokenizer.eos_token = None
    if not has_pad:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "own")
    given = {"tokenizer": str(tmp_path / "own"), "chat_template_path": str(tmp_path / "chat")}
    conversations = str(DATA / "chat_test.jsonl")
    if is_ending:
        for data in (str(DATA / "text_test.jsonl"), conversations):
            with pytest.raises(pytest.fail.Exception, match="training started"):
                fails(data=data, output_dir=str(tmp_path / Path(data).stem), **given)
    else:
        message = f"--chat_template_path {tmp_path / 'chat'}: this tokenizer, of which TRL takes over the eos_token"
        assert message in fails(**given)
        assert message in fails(eos_token="<eos>", **given)
        if not has_pad:
            assert "chat no eos_token to fill rows up with" in fails(data=conversations, eos_token="<eos>", **given)


def test_configuration_of_a_new_model(fails):
    message = fails(config_overrides="{hidden_size: abc}", script=pretrain)
    assert "config_overrides {'hidden_size': 'abc'}: " in message
    assert "config_overrides 'compose_groups=8': expected a" in fails(
        config_overrides="compose_groups=8", script=pretrain
    )
    assert "config_overrides '[3]': expected a mapping" in fails(config_overrides="[3]", script=pretrain)
    assert "config_overrides '{a: [': " in fails(config_overrides="{a: [", script=pretrain)
    message = fails(config_overrides="{vocab_size: 5, num_hidden_layers: 1}", script=pretrain)
    assert "has 412 tokens, the model's vocabulary has 5" in message


def test_too_long(fails, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"text": "the fox"}, {"text": "the " * 600}])
    message = fails(data=file)
    assert "training row 1 has 601 tokens, more than the model's max_position_embeddings 512" in message
    assert "held-out row 1 has 601 tokens" in fails(eval_data=file)
    assert "max_length is 513: expected 1 to 512" in fails(max_length="513")
    assert "max_length is 0" in fails(max_length="0")


def test_mismatched_tokenizer(fails, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.add_tokens(["aardvark"])
    tokenizer.save_pretrained(tmp_path / "larger")
    file = write(tmp_path / "added.jsonl", [{"text": "the fox"}, {"text": "the aardvark"}])
    message = fails(tokenizer=str(tmp_path / "larger"), data=file)  # an added token matters where a row has it
    assert "training row 1 has the token 'aardvark' with id 412, the model's vocabulary has 412" in message

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "aardvark"]
    vocabulary = state["model"]["vocab"]
    vocabulary["fox"], vocabulary["wolf"] = vocabulary["wolf"], vocabulary["fox"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "other" / "tokenizer_config.json").write_text((CHECKPOINT / "tokenizer_config.json").read_text())
    message = fails(tokenizer=str(tmp_path / "other"))
    assert "is not the model's: 2 of its 412 tokens, such as 'fox'" in message

    file = write(tmp_path / "rows.jsonl", [{"text": "数学 は とても 楽しい と 思う。"}])
    assert "does not know" in fails(data=file)
    assert "does not know" in fails(data=file, script=pretrain)


def test_output(fails, tmp_path):
    (tmp_path / "file").touch()
    message = fails(output_dir=str(tmp_path / "file" / "out"))
    assert "cannot write to output_dir" in message and "--output_dir" in message
    (tmp_path / "used" / "checkpoint-4").mkdir(parents=True)
    message = fails(output_dir=str(tmp_path / "used"))
    assert "already holds checkpoint-4: continue with --resume_from_checkpoint last" in message
    message = fails(output_dir=str(tmp_path / "used"), resume_from_checkpoint=str(tmp_path / "used" / "checkpoint-4"))
    assert "is not a complete checkpoint" in message
    assert "output_dir is not set: name a folder" in fails(output_dir="")
    message = fails(output_dir=str(CHECKPOINT), resume_from_checkpoint="last")
    assert "is the model to train: choose another with --output_dir" in message
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        assert "already holds a model: choose another" in fails(output_dir=str(tmp_path / name))


def test_output_without_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="error: output_dir is not set"):
        finetune.main(["--model_name_or_path", str(CHECKPOINT), "--data", str(DATA / "text_test.jsonl")])
    assert not list(tmp_path.iterdir())


def write_checkpoint(folder, names):
    folder.mkdir()
    for name in names:
        if name.endswith(".json"):
            (folder / name).write_text("{}")
        elif name.endswith(".safetensors"):
            save_file({"state": torch.ones(9)}, folder / name)
        else:
            numpys = {"numpy": np.random.get_state()} if name.startswith("rng") else {}
            torch.save({"state": {0: torch.ones(9)}, "step": 1, **numpys}, folder / name)


@pytest.mark.parametrize("damage", ["half of it", "noise", "nothing", "other bytes"])
@pytest.mark.parametrize("adapters", [True, False])
def test_checkpoints_with_a_damaged_file(adapters, damage, tmp_path, fails, capsys):
    """Each file of tensors that the trainer loads is damaged once."""
    weights = "adapter_model.safetensors" if adapters else "model.safetensors"
    names = [weights, "optimizer.pt", "scheduler.pt", "rng_state.pth"]
    folders = [tmp_path / f"checkpoint-{step}" for step in (4, 12)]
    for folder in folders:
        write_checkpoint(folder, [*names, "trainer_state.json"])
    training = TrainingConfig(output_dir=str(tmp_path), resume_from_checkpoint="last", use_cpu=True)
    assert check_output(training) == str(folders[1])
    for name in names:
        file = folders[1] / name
        whole = file.read_bytes()
        damaged = {"half of it": whole[: len(whole) // 2], "noise": bytes(range(256)), "nothing": b""}
        file.write_bytes(damaged.get(damage, whole.replace(b"state", b"\xff" * 5)))
        capsys.readouterr()
        assert check_output(training) == str(folders[0])
        assert f"checkpoint-12 is skipped: it has no readable {name}\n" in capsys.readouterr().out
        message = fails(output_dir=str(tmp_path), resume_from_checkpoint=str(folders[1]))
        assert f"error: {folders[1]} is not a complete checkpoint: it has no readable {name}." in message
        file.write_bytes(whole)


def test_newest_whole_checkpoint(tmp_path, capsys):
    """Each file that a checkpoint needs is taken away once, from the newest; then all of them."""
    training = TrainingConfig(output_dir=str(tmp_path), resume_from_checkpoint="last", use_cpu=True)
    assert check_output(training) is None
    files = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
    for step in (4, 12):
        write_checkpoint(tmp_path / f"checkpoint-{step}", files)
    assert check_output(training) == str(tmp_path / "checkpoint-12")
    capsys.readouterr()
    for name, part in zip(files, ("weights", "optimizer", "scheduler", "trainer_state.json"), strict=True):
        (tmp_path / "checkpoint-12" / name).rename(tmp_path / "away")
        assert check_output(training) == str(tmp_path / "checkpoint-4")
        printed = capsys.readouterr().out
        assert f"checkpoint-12 is skipped: it has no readable {part}\n" in printed and "continues from" in printed
        (tmp_path / "away").rename(tmp_path / "checkpoint-12" / name)
    (tmp_path / "checkpoint-12" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    )
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    assert check_output(training) is None
    printed = capsys.readouterr().out
    assert (
        "no readable model-2.safetensors" in printed
        and "has no complete checkpoint: training starts from the beg" in printed
    )


def test_optimizers_and_schedules_that_cannot_be_made(fails):
    message = fails(adam_beta2="1.5")
    assert "error: --optim adamw_torch_fused, --adam_beta1 0.9, --adam_beta2 1.5, --adam_epsilon 1e-08: " in message
    assert "Invalid beta parameter at index 1: 1.5" in message
    assert "Invalid epsilon value: -1.0" in fails(adam_epsilon="-1")
    message = fails(lr_scheduler_kwargs='{"min_rate": 0.1}')
    assert "error: --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {'min_rate': 0.1}: " in message
    assert "cosin " in fails(lr_scheduler_type="cosin")
    if find_spec("bitsandbytes") is None:
        assert "error: --optim adamw_bnb_8bit: " in fails(optim="adamw_bnb_8bit")


WORD = "if it is a word, quote it: YAML takes no, off, yes and on for false and true"
OF_ANOTHER_TYPE = {
    "eval_rows: 0.5": "eval_rows is 0.5: expected int; give another, or leave it out",
    "eval_rows: 5.0": "eval_rows is 5.0: expected int; ",
    "eval_rows: [3]": "eval_rows is [3]: expected int; ",
    "max_steps: 2.5": "max_steps is 2.5: expected int; ",
    "gradient_accumulation_steps: 1.5": "gradient_accumulation_steps is 1.5: expected int; ",
    "per_device_train_batch_size: 2.0": "per_device_train_batch_size is 2.0: expected int; ",
    "seed: null": "seed is null: expected int; ",
    "learning_rate: true": f"learning_rate is true: expected float; {WORD}",
    "use_cpu: 1": "use_cpu is 1: expected bool; ",
    "model_name_or_path: [a]": 'model_name_or_path is ["a"]: expected str | None; ',
    "save_strategy: no": "save_strategy is false: expected ",
    "max_stepz: 3": "'max_stepz' is not an argument; --help lists all arguments",
    "3: 3": "3 is not an argument; ",
}


@pytest.mark.parametrize("line", OF_ANOTHER_TYPE)
def test_files_of_arguments(fails, tmp_path, line):
    file = tmp_path / "run.yaml"
    file.write_text(f"{line}\n")
    for flags in (["--config", str(file)], [f"--config={file}"]):
        message = fails(*flags)
        assert message.startswith(f"error: --config {file}: {OF_ANOTHER_TYPE[line]}")
        assert message.endswith(WORD) == (" false: " in message or " true: " in message)


def test_numbers_of_a_file(tmp_path):
    """Whole numbers are rates as well, YAML takes 1e-3 for text, and text is read as on the command line."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1\nweight_decay: 1e-3\nmax_steps: '7'\nlora_target_modules: q_proj\nsave_strategy: 'no'\n"
        "run_name: 2026\n"
    )
    line = ["--data", "x", "--output_dir", str(tmp_path), f"--config={file}", "--max_grad_norm", "2"]
    _, model, training = parse((DataArguments, ModelArguments, TrainingConfig), line)
    found = (training.learning_rate, training.weight_decay, training.max_steps, training.max_grad_norm)
    assert found == (1, 1e-3, 7, 2) and model.lora_target_modules == ["q_proj"]
    assert training.save_strategy == "no" and str(training.run_name) == "2026"
    for value in ("true", "[full_shard]"):  # beyond the library's annotation
        file.write_text(f"fsdp: {value}\n")
        _check_file((TrainingConfig,), str(file))


@pytest.mark.parametrize("script", [finetune, pretrain])
def test_no_file_of_arguments(fails, script):
    assert fails("--config", script=script).startswith("error: --config names no file: expected a YAML file")


def test_dtypes(fails, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("dtype: bf17\n")  # argparse looks at the command line's only
    expected = f"error: --config {file}: dtype is 'bf17': expected one of auto, bfloat16, float16, float32"
    assert fails("--config", str(file)) == expected
    assert "invalid choice: 'bf17' (choose from" in fails(dtype="bf17")


def test_folders_that_hold_no_model(fails, tmp_path):
    damaged = shutil.copytree(CHECKPOINT, tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"noise")
    message = fails(model_name_or_path=str(damaged))
    assert f"error: --model_name_or_path {damaged}: {damaged / 'pytorch_model.bin'} is damaged" in message
    (damaged / "tokenizer.json").write_text("{}")
    message = fails(model_name_or_path=str(damaged))
    assert f"error: --model_name_or_path {damaged}: {damaged / 'tokenizer.json'} is damaged" in message
    (tmp_path / "empty").mkdir()
    assert f"--model_name_or_path {tmp_path / 'empty'}: " in fails(model_name_or_path=str(tmp_path / "empty"))
    fused = shutil.copytree(CHECKPOINT, tmp_path / "fused")
    (fused / "operators.safetensors").touch()
    assert f"{fused} has trained mixtures of heads" in fails(model_name_or_path=str(fused))


def test_options_that_contradict(fails):
    assert "--streaming needs --max_steps" in fails("--streaming", max_steps="-1")
    assert "--eval_strategy steps needs held-out rows: give --eval_data" in fails(eval_strategy="steps")
    assert "--early_stopping_patience 2 needs held-out rows" in fails(early_stopping_patience="2")
    assert "give one of the two" in fails(eval_rows="3", eval_data="x.jsonl")
    assert "leaves nothing to train on" in fails(eval_rows="74")
    assert "leaves nothing to train on" in fails("--streaming", eval_rows="74")
    assert "not conversational" in fails("--assistant_only_loss")
    assert "Unknown preset 'dcformer-7b'" in fails(preset="dcformer-7b", script=pretrain)
    assert "DCFormerConfig has no field 'num_layers'" in fails(config_overrides="{num_layers: 4}", script=pretrain)


def test_missing_extra():
    code = "import sys; sys.modules['trl'] = None; sys.path.insert(0, 'examples'); import finetune; finetune.main([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: dcformer.training needs trl, which is not installed" in done.stderr
    assert 'pip install "dcformer[train]"' in done.stderr


@pytest.mark.parametrize("streaming", [False, True])
def test_kinds_of_files(tmp_path, streaming):
    Dataset.from_dict({"text": ["the fox", "the bee"]}).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text,number\nthe fox,1\nthe bee,2\n")
    (tmp_path / "rows.txt").write_text("the fox\nthe bee\n")
    write(tmp_path / "a.jsonl", [{"text": "the fox"}])
    write(tmp_path / "b.jsonl", [{"text": "the bee"}])
    for name in ("rows.parquet", "rows.csv", "rows.txt", "*.jsonl"):
        rows = check_rows(load_rows(str(tmp_path / name), "train", streaming=streaming), None, name)
        assert isinstance(rows, IterableDataset if streaming else Dataset)
        assert list(rows) == [{"text": "the fox"}, {"text": "the bee"}]


def test_renamed_columns_and_folders(tmp_path):
    write(tmp_path / "train.jsonl", [{"chat": [{"role": "user", "content": "hi"}], "id": 1}])
    rows = check_rows(load_rows(str(tmp_path), "train"), "chat", "here")
    assert rows[0] == {"messages": [{"role": "user", "content": "hi"}]}
    write(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b", "id": 1}])
    rows = check_rows(load_rows(str(tmp_path), "train"), None, "here")
    assert rows[0] == {"prompt": "a", "completion": "b"}


@pytest.mark.slow
def test_bundled_data_is_what_its_script_makes(tmp_path):
    subprocess.run([sys.executable, str(DATA / "make.py"), "--output", str(tmp_path)], check=True)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(path.name for path in DATA.iterdir() if ".jsonl" in path.name)
    tokenizer = build_tokenizer()
    for name in files:
        bundled, made = (list(load_rows(str(folder / name), "train")) for folder in (DATA, tmp_path))
        assert bundled == made
        texts = [row["text"] if "text" in row else row["messages"][0]["content"] for row in bundled[:50]]
        assert not any(tokenizer.unk_token_id in tokenizer(text)["input_ids"] for text in texts)
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1e6
    asked = [
        {turn["content"] for row in load_rows(str(DATA / name), "train") for turn in row["messages"][::2]}
        for name in ("chat_train.jsonl.gz", "chat_test.jsonl")
    ]
    assert not asked[0] & asked[1]
