"""Every command of docs/training.md and of the examples' docstrings runs, for two steps."""

import re
import shlex
import sys

import pytest
import yaml
from helpers import REPOSITORY, documented_commands
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl")

sys.path.insert(0, str(REPOSITORY / "examples"))
import finetune
import pretrain

from dcformer import DCFormerConfig
from dcformer.analysis import num_parameters

PROGRAMS = {"examples/finetune.py": finetune, "examples/pretrain.py": pretrain}
SMALL = ["--max_steps", "2", "--save_steps", "2", "--eval_steps", "2", "--per_device_train_batch_size", "2"]
SMALL += ["--use_cpu", "--disable_tqdm", "true"]
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
PAGE = REPOSITORY / "docs" / "training.md"


def commands() -> list[str]:
    found = documented_commands(PAGE, REPOSITORY / "docs" / "index.md")
    found += [
        shlex.split(line) for program in PROGRAMS.values() for line in program.__doc__.splitlines() if ".yaml" in line
    ]
    return list(dict.fromkeys(shlex.join(words) for words in found if words[0] == "python" and words[1] in PROGRAMS))


OWN = next(command for command in commands() if "runs/tokenizer" in command)


def test_there_are_commands():
    assert len(commands()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands() if command != OWN])
def test_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, program, *arguments = shlex.split(command)
    arguments[arguments.index("--output_dir") + 1] = str(tmp_path / "out")
    PROGRAMS[program].main([*arguments, *SMALL])
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    assert list((tmp_path / "out").glob("*model.safetensors"))


@pytest.mark.slow
def test_a_model_of_ones_own_text(tmp_path, monkeypatch, capsys):
    """The page's tokenizer, and its command for a model as large as it says, with a smaller one."""
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text(encoding="utf-8").split("\n### From your own text to a model\n")[1]
    exec(re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1], {"__name__": "__snippet__"})
    text = "Zwölf Boxkämpfer:\n\n  \u6f22\u5b57"
    tokenizer = AutoTokenizer.from_pretrained("runs/tokenizer")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    _, program, *arguments = shlex.split(OWN)
    place = arguments.index("--config_overrides") + 1
    sizes = yaml.safe_load(arguments[place])
    config = DCFormerConfig.from_preset("dcformer-405m", **sizes, vocab_size=16_000)
    assert f"{num_parameters(config) / 1e6:.0f} million parameters with 16,000 tokens" in section
    arguments[place] = yaml.safe_dump(sizes | TINY)
    PROGRAMS[program].main([*arguments, *SMALL, "--max_length", "64"])
    assert "held-out accuracy: " in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained("runs/own")
    assert model.config.vocab_size == len(tokenizer) and model.generation_config.eos_token_id == tokenizer.eos_token_id
