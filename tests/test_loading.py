"""Which file of a model folder is damaged: every command's error names it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from dcformer import DCFormerForCausalLM
from dcformer.hub_dcformer import weight_files
from dcformer.loading import damaged_file
from dcformer.publish import main as publish
from dcformer.synthetic import build_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder with safetensors, and one with `pytorch_model.bin`."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = build_tokenizer()
    model = DCFormerForCausalLM(tiny_config(vocab_size=len(tokenizer)))
    for folder in (root / "safetensors", root / "bin"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (root / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), root / "bin" / "pytorch_model.bin")
    return root


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "half of it": cut,
    "nothing": lambda file: file.write_bytes(b""),
    "noise": lambda file: file.write_bytes(bytes(range(256))),
    "a Git LFS pointer": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "something else": lambda file: torch.save([1], file) if file.suffix == ".bin" else file.write_text("[]"),
    "code": lambda file: torch.save({"a": Path()}, file) if file.suffix == ".bin" else file.write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["bin/pytorch_model.bin", "safetensors/model.safetensors", "safetensors/tokenizer.json",
             "safetensors/config.json", "safetensors/tokenizer_config.json"],
)  # fmt: skip
def test_the_damaged_file_is_named(folders, name, damage, tmp_path, capsys):
    folder = shutil.copytree((folders / name).parent, tmp_path / "model")
    file = folder / Path(name).name
    assert damaged_file(folder, OSError()) is None
    DAMAGE[damage](file)
    assert (damaged_file(folder, OSError()) or "").startswith(f"{file} ")
    assert publish([str(folder), str(tmp_path / "out")]) == 1
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert last.startswith("error: ") and str(file) in last
    assert not (tmp_path / "out").exists()


def test_damaged_index(folders, tmp_path):
    folder = shutil.copytree(folders / "safetensors", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for content in ("{", json.dumps([1])):
        index.write_text(content)
        assert (damaged_file(folder, OSError()) or "").startswith(f"{index} is damaged")
        with pytest.raises(OSError, match=r"index\.json is damaged"):
            weight_files(folder, {})


def test_bugs_are_not_explained_away(folders):
    with pytest.raises(KeyError):
        damaged_file(folders / "bin", KeyError("raised here"))
