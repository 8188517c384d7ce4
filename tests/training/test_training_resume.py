"""A run that is killed and resumed ends where the uninterrupted run ends, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY
from safetensors.torch import load_file

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune

CHAT = ["--config", "examples/configs/finetune_synthetic.yaml", "--eval_steps", "4"]
TEXT = ["--model_name_or_path", "checkpoints/dcformer-synthetic", "--data", "examples/data/text_test.jsonl"]
FEW = "few.jsonl"  # the first lines of the texts, in the test's folder, of which an epoch takes three steps
PACKED = ["--data", FEW, "--packing", "--max_length", "128"]
RUNS = {
    "packed, accumulated, several epochs": [*TEXT[:2], *PACKED, "--gradient_accumulation_steps", "2"],
    "packed stream": [*TEXT, "--streaming", "--packing", "--shuffle_buffer", "50", "--max_length", "200"],
    "conversations, adapters with dropout": [*CHAT, "--use_peft", "--lora_dropout", "0.1"],
}
FIRST, *OTHERS = RUNS


def options(arguments: list[str], folder: Path, *more: str) -> list[str]:
    found = [*arguments, "--output_dir", str(folder), *more]
    found += ["--max_steps", "20", "--save_steps", "4", "--logging_steps", "1", "--save_total_limit", "9"]
    return [*found, "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--report_to", "none", "--use_cpu"]


def start(words: list[str]) -> subprocess.Popen:
    """In a process of its own, with as many threads as this one has: others may add up otherwise."""
    threads = {name: str(torch.get_num_threads()) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "examples/finetune.py", *words]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def history(folder: Path) -> list[dict]:
    """The loss curve without times; TRL counts `num_tokens` from the start of the process."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timed = ("runtime", "per_second", "num_tokens", "total_flos", "train_loss")
    return [{name: value for name, value in e.items() if not any(t in name for t in timed)} for e in entries]


STOPS = ["--early_stopping_patience", "3", "--learning_rate", "1.0", "--warmup_steps", "0", "--max_steps", "20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "lost"),
    [(["--max_steps", "3"], 0), (["--num_train_epochs", "0.08"], 0), (STOPS, 0), (STOPS, 1)],
    ids=["last step", "last part of an epoch", "stopped early", "about to stop early"],
)
def test_killed_after_the_last_checkpoint(arguments, lost, tmp_path, monkeypatch):
    """While it evaluated or saved: no step more is taken. Or, `lost`, before the checkpoint where it stopped early."""
    monkeypatch.chdir(REPOSITORY)
    flags = [*TEXT, *arguments, "--eval_rows", "10", "--save_steps", "1", "--logging_steps", "1", "--use_cpu"]
    flags += ["--per_device_train_batch_size", "2", "--report_to", "none", "--disable_tqdm", "true"]
    flags += ["--output_dir", str(tmp_path)]
    summary = finetune.main(flags)
    whole, entries = load_file(tmp_path / "model.safetensors"), history(tmp_path)
    steps = json.loads((tmp_path / "trainer_state.json").read_text())["global_step"]
    assert steps == (3 if "20" not in arguments else pytest.approx(5, abs=2))
    checkpoints = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    assert checkpoints[-1].name == f"checkpoint-{steps}"
    for path in {*tmp_path.iterdir()} - {*checkpoints[: len(checkpoints) - lost]}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    again = finetune.main([*flags, "--resume_from_checkpoint", "last"])
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    assert history(tmp_path) == entries
    assert [again[name] for name in ("before", "after", "eval_loss")] == [
        summary[name] for name in ("before", "after", "eval_loss")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "first", "more"),
    [
        (6, 7, []),
        (6, 7, ["--gradient_accumulation_steps", "2", "--packing", "--max_length", "64"]),
        (40, 7, []),
        (8, 6, ["--save_strategy", "epoch", "--eval_strategy", "epoch", "--eval_rows", "2"]),  # where a pass has ended
    ],
    ids=str,
)
def test_a_stream_of_several_passes_is_resumed_in_its_pass(rows, first, more, tmp_path, monkeypatch):
    """Of three batches a pass, or fewer, or more than there are steps; of which there may be more than at first."""
    monkeypatch.chdir(REPOSITORY)
    lines = (REPOSITORY / "examples" / "data" / "text_test.jsonl").read_text().splitlines()[:rows]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--model_name_or_path", "checkpoints/dcformer-synthetic", "--data", str(tmp_path / "few.jsonl")]
    flags += ["--streaming", "--use_cpu", "--per_device_train_batch_size", "2", "--report_to", "none"]
    flags += ["--logging_steps", "1", "--save_steps", "1", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant"]
    flags += more
    finetune.main([*flags, "--output_dir", str(tmp_path / "whole"), "--max_steps", "11"])
    part = [*flags, "--output_dir", str(tmp_path / "part")]
    finetune.main([*part, "--max_steps", str(first)])
    for name in ("model.safetensors", "trainer_state.json"):
        (tmp_path / "part" / name).unlink()
    finetune.main([*part, "--max_steps", "11", "--resume_from_checkpoint", "last"])
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(whole[name].equal(resumed[name]) for name in whole)
    losses = [
        [
            (entry["step"], key, entry[key])
            for entry in history(tmp_path / name)
            for key in entry
            if key.endswith("loss")
        ]
        for name in ("whole", "part")
    ]
    assert losses[0] == losses[1] and sum(key == "loss" for _, key, _ in losses[0]) == 11


@pytest.mark.slow
@pytest.mark.parametrize("seed", [[], ["--data_seed", "7"]], ids=["seed", "data seed"])
def test_rows_grouped_by_length_are_resumed_in_their_epoch(seed, tmp_path, monkeypatch):
    """In the second of two; where it begins, too, and in its middle."""
    monkeypatch.chdir(REPOSITORY)
    lines = (REPOSITORY / "examples" / "data" / "text_test.jsonl").read_text().splitlines()[:10]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--model_name_or_path", "checkpoints/dcformer-synthetic", "--data", str(tmp_path / "few.jsonl"), *seed]
    flags += ["--train_sampling_strategy", "group_by_length", "--per_device_train_batch_size", "2", "--use_cpu"]
    flags += ["--num_train_epochs", "2", "--save_steps", "1", "--logging_steps", "1", "--learning_rate", "1e-3"]
    flags += ["--report_to", "none", "--disable_tqdm", "true"]
    finetune.main([*flags, "--output_dir", str(tmp_path / "whole")])
    whole, entries = load_file(tmp_path / "whole" / "model.safetensors"), history(tmp_path / "whole")
    assert sum("loss" in entry for entry in entries) == 10
    for step in (5, 7):
        part = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", part / f"checkpoint-{step}")
        finetune.main([*flags, "--output_dir", str(part), "--resume_from_checkpoint", "last"])
        resumed = load_file(part / "model.safetensors")
        assert all(whole[name].equal(resumed[name]) for name in whole) and history(part) == entries


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [RUNS[FIRST], *(pytest.param(RUNS[name], marks=pytest.mark.long) for name in OTHERS)], ids=RUNS
)
def test_killed_and_resumed(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    lines = (REPOSITORY / "examples" / "data" / "text_test.jsonl").read_text().splitlines()
    (tmp_path / FEW).write_text("\n".join(lines[: len(lines) // 8]) + "\n")
    arguments = [str(tmp_path / FEW) if word == FEW else word for word in arguments]
    finetune.main(options(arguments, tmp_path / "whole"))

    process = start(options(arguments, tmp_path / "killed"))
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed" / "checkpoint-8" / "trainer_state.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "trainer_state.json").exists(), "the run had ended before it was killed"
    # as if the kill had come while the newest checkpoint was written: the one before it counts
    (tmp_path / "killed" / "checkpoint-8" / "trainer_state.json").write_text('{"epoch": 0.')
    torch.manual_seed(1)  # as little is left of the whole run as in a new process
    finetune.main(options(arguments, tmp_path / "killed", "--resume_from_checkpoint", "last"))

    entries = history(tmp_path / "whole")
    assert sum("loss" in entry for entry in entries) == 20
    assert history(tmp_path / "killed") == entries
    (file,) = (tmp_path / "whole").glob("*model.safetensors")
    whole, resumed = load_file(file), load_file(tmp_path / "killed" / file.name)
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
