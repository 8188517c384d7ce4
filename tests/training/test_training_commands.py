"""Every command of docs/training.md and of the examples' docstrings runs, for two steps."""

import shlex
import sys

import pytest
from helpers import REPOSITORY, documented_commands

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain

PROGRAMS = {"examples/finetune.py": finetune, "examples/pretrain.py": pretrain}
SMALL = ["--max_steps", "2", "--save_steps", "2", "--eval_steps", "2", "--per_device_train_batch_size", "2"]
SMALL += ["--use_cpu", "--disable_tqdm", "true"]


def commands() -> list[str]:
    found = documented_commands(REPOSITORY / "docs" / "training.md", REPOSITORY / "docs" / "index.md")
    found += [
        shlex.split(line) for program in PROGRAMS.values() for line in program.__doc__.splitlines() if ".yaml" in line
    ]
    return list(dict.fromkeys(shlex.join(words) for words in found if words[0] == "python" and words[1] in PROGRAMS))


def test_there_are_commands():
    assert len(commands()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, program, *arguments = shlex.split(command)
    arguments[arguments.index("--output_dir") + 1] = str(tmp_path / "out")
    PROGRAMS[program].main([*arguments, *SMALL])
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    assert list((tmp_path / "out").glob("*model.safetensors"))
