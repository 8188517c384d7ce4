"""What is wrong with data, tokenizer or output is said before any training starts."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset, IterableDataset
from helpers import REPOSITORY
from transformers import AutoTokenizer

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain

from dcformer.synthetic import build_tokenizer
from dcformer.training.data import check_rows, load_rows

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


def test_too_long(fails, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"text": "the fox"}, {"text": "the " * 600}])
    message = fails(data=file)
    assert "row 1 has 601 tokens, more than the model's max_position_embeddings 512" in message
    assert "max_length is 513: expected 1 to 512" in fails(max_length="513")
    assert "max_length is 0" in fails(max_length="0")


def test_mismatched_tokenizer(fails, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.add_tokens(["aardvark"])
    tokenizer.save_pretrained(tmp_path / "larger")
    message = fails(tokenizer=str(tmp_path / "larger"))
    assert "token ids up to 288, the model's vocabulary has 288" in message and "leave out --tokenizer" in message

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "aardvark"]
    vocabulary = state["model"]["vocab"]
    vocabulary["fox"], vocabulary["wolf"] = vocabulary["wolf"], vocabulary["fox"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "other" / "tokenizer_config.json").write_text((CHECKPOINT / "tokenizer_config.json").read_text())
    message = fails(tokenizer=str(tmp_path / "other"))
    assert "is not the model's: 2 of its 288 tokens, such as 'fox'" in message

    file = write(tmp_path / "rows.jsonl", [{"text": "Call me what you like, and whenever you want to."}])
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
    assert "no whole checkpoint at" in message


def test_options_that_contradict(fails):
    assert "--streaming needs --max_steps" in fails("--streaming", max_steps="-1")
    assert "need held-out rows: give --eval_data" in fails(eval_strategy="steps")
    assert "give one of the two" in fails(eval_rows="3", eval_data="x.jsonl")
    assert "leaves nothing to train on" in fails(eval_rows="74")
    assert "not conversational" in fails("--assistant_only_loss")
    assert fails(model_name_or_path="nowhere/at-all").startswith("error: ")
    assert "Unknown preset 'dcformer-7b'" in fails(preset="dcformer-7b", script=pretrain)
    assert "'num_layers', which is no field" in fails(config_overrides="{num_layers: 4}", script=pretrain)


def test_missing_extra():
    code = "import sys; sys.modules['trl'] = None; sys.path.insert(0, 'examples'); import finetune; finetune.main([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert 'error: dcformer.training needs the extra "train"' in done.stderr
    assert 'pip install "dcformer[train]"' in done.stderr


@pytest.mark.parametrize("streaming", [False, True])
def test_kinds_of_files(tmp_path, streaming):
    Dataset.from_dict({"text": ["the fox", "the bee"]}).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text,number\nthe fox,1\nthe bee,2\n")
    (tmp_path / "rows.txt").write_text("the fox\nthe bee\n")
    for name in ("rows.parquet", "rows.csv", "rows.txt"):
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
