"""The demonstration and the training script, at small sizes, and the bundled checkpoint itself."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(REPOSITORY / "examples"))
import demo
import train_synthetic

CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"


def test_demo_prints_what_the_model_answers(capsys):
    accuracy = demo.main(["--questions-per-task", "1", "--show", "3"])
    printed = capsys.readouterr().out
    assert printed.count("answer: ") == printed.count("expected: ") >= 3
    assert f"= {accuracy:.1%}" in printed and "of 74 held-out questions" in printed

    # the same questions, one at a time, without pipeline, padding or cache
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    right = 0
    with torch.no_grad():
        for question in demo.held_out_questions(1, seed=2026):
            logits = model(**tokenizer(question["prompt"], return_tensors="pt"), use_cache=False).logits
            right += tokenizer.decode(logits[0, -1].argmax()).strip() == question["answer"]
    assert right == round(accuracy * 74)


def test_bundled_checkpoint():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 8e6
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "dcformer" and "hidden_size" in config and "auto_map" not in config
    reports = json.loads((CHECKPOINT / "training.json").read_text())
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert set(reports) == {"dcformer", "talking-heads", "plain"}
    for report in reports.values():
        assert f"{report['test_accuracy']:.1%}" in card and f"{report['test_loss']:.3f}" in card
        assert report["steps"] == reports["dcformer"]["steps"] and report["seed"] == reports["dcformer"]["seed"]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.model_max_length == config["max_position_embeddings"]


def test_where_the_bundled_model_can_stop():
    """Strings cannot be looked for in a closed vocabulary (docs/generation.md); its words are tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(CHECKPOINT), AutoTokenizer.from_pretrained(CHECKPOINT)
    batch = tokenizer("\n< Peter owns the desk. >. Peter owns a kind of", return_tensors="pt")
    with pytest.raises(ValueError, match="substring not found"):
        model.generate(**batch, max_new_tokens=4, stop_strings=["desk"], tokenizer=tokenizer)
    length = batch["input_ids"].shape[1]
    first, second, *_ = model.generate(**batch, max_new_tokens=4, do_sample=False)[0, length:].tolist()
    assert first != second
    stopped = model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=[tokenizer.eos_token_id, second])
    assert stopped[0, length:].tolist() == [first, second]


def test_bundled_checkpoint_scores_what_its_card_says():
    """A tenth of the held-out contexts, within what so small a sample can deviate."""
    reports = json.loads((CHECKPOINT / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    data = train_synthetic.make_data("test", 1, 3, reports["dcformer"]["seed"], tokenizer)
    right = total = 0
    with torch.no_grad():
        for row in data:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            predicted = model(ids).logits[0].argmax(-1)[:-1]
            scored = labels[1:] != -100
            right, total = right + int((predicted == labels[1:])[scored].sum()), total + int(scored.sum())
    expected = reports["dcformer"]["test_accuracy"]
    assert abs(right / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5


@pytest.mark.slow
def test_training_script_makes_a_checkpoint(tmp_path):
    command = [sys.executable, str(REPOSITORY / "examples" / "train_synthetic.py"), "--steps", "10", "--quiet", "--cpu"]
    command += ["--output", str(tmp_path / "runs"), "--checkpoint", str(tmp_path / "checkpoint")]
    command += ["--test-contexts", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "checkpoint" / "training.json").read_text())["plain"]["steps"] == 10
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer.model_max_length == model.config.max_position_embeddings
