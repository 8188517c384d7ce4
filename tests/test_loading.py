"""Which file of a model folder is damaged: every command's error names it."""

import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import FIXTURES, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from dcformer import DCFormerForCausalLM, DCFormerModel, stored_dcformer
from dcformer.errors import DCFormerError
from dcformer.loading import check_parameters, damaged_file
from dcformer.publish import main as publish
from dcformer.stored_dcformer import naming_damage, weight_files
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


def test_missing_parameters(folders, tmp_path):
    """By names alone: of any file, of a decoder whose head is tied, of hub folders and of others not at all."""
    for folder in ("safetensors", "bin"):
        check_parameters(folders / folder, AutoConfig.from_pretrained(folders / folder))
    config = tiny_config(tie_word_embeddings=True)
    DCFormerModel(config).save_pretrained(tmp_path / "decoder")
    check_parameters(tmp_path / "decoder", config)
    with pytest.raises(DCFormerError, match=r"/decoder lacks lm_head\.weight: expected those of a causal"):
        check_parameters(tmp_path / "decoder", tiny_config())
    check_parameters(tmp_path / "decoder", LlamaConfig())
    check_parameters(FIXTURES / "B1", AutoConfig.from_pretrained(FIXTURES / "B1"))
    more = tiny_config(tie_word_embeddings=True, num_hidden_layers=config.num_hidden_layers + 1)
    with pytest.raises(DCFormerError, match=r"/decoder lacks model\.layers\..* and \d+ more parameters"):
        check_parameters(tmp_path / "decoder", more)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "half of it": cut,
    "nothing": lambda file: file.write_bytes(b""),
    "noise": lambda file: file.write_bytes(bytes(range(256))),
    "a Git LFS pointer": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "a server's answer": lambda file: file.write_text("error code: 502"),
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


@pytest.mark.parametrize("damage", ["half of it", "nothing", "a Git LFS pointer", "a server's answer"])
@pytest.mark.parametrize("name", ["bin/pytorch_model.bin", "safetensors/model.safetensors"])
def test_models_name_the_damaged_file(folders, name, damage, tmp_path):
    folder = shutil.copytree((folders / name).parent, tmp_path / "model")
    DAMAGE[damage](folder / Path(name).name)
    for model_class in (AutoModelForCausalLM, DCFormerModel, AutoModelForSequenceClassification):
        with pytest.raises(OSError, match=rf"{Path(name).name} is damaged.*: copy or download it again") as caught:
            model_class.from_pretrained(folder)
        assert str(folder) in str(caught.value) and caught.value.__cause__ is not None


def test_models_name_the_damaged_shard(tmp_path):
    model = DCFormerForCausalLM(tiny_config())
    model.save_pretrained(tmp_path / "part", max_shard_size="40KB")
    shards = sorted((tmp_path / "part").glob("*.safetensors"))
    assert len(shards) > 2
    cut(shards[1])
    with pytest.raises(OSError, match=rf"{shards[1].name} is damaged or truncated"):
        DCFormerForCausalLM.from_pretrained(tmp_path, subfolder="part")
    with pytest.raises(RuntimeError, match="size"):  # no file is to blame
        DCFormerModel.from_pretrained(None, config=model.config, state_dict={"norm.weight": torch.ones(3)})


def test_one_byte_of_a_name(folders, tmp_path):
    """Torch's pickles fail in more ways than a list of errors has."""
    folder = shutil.copytree(folders / "bin", tmp_path / "model")
    file = folder / "pytorch_model.bin"
    content = file.read_bytes()
    at = content.index(b"embed_tokens")
    file.write_bytes(content[:at] + b"\xe9" + content[at + 1 :])
    with pytest.raises(OSError, match=r"pytorch_model\.bin is damaged") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


def test_one_byte_of_a_number(folders, tmp_path):
    """Torch reads it as one, and fails as calls with wrong arguments do."""
    folder = shutil.copytree(folders / "bin", tmp_path / "model")
    file = folder / "pytorch_model.bin"
    content = file.read_bytes()
    at = content.index(b"64", content.index(b".storage_alignment"))
    file.write_bytes(content[:at] + b"Z" + content[at + 1 :])
    with pytest.raises(OSError, match=r"pytorch_model\.bin is damaged") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert type(caught.value.__cause__) is ValueError


class _Quantized(torch.Tensor):
    """As a library of quantization has them: in a pickle it is code."""


def test_a_missing_library_is_no_damage(folders, tmp_path):
    folder = shutil.copytree(folders / "bin", tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "quanto", "weights": "int8"}
    config.save_pretrained(folder)
    state = torch.load(folder / "pytorch_model.bin")
    state["model.norm.weight"] = state["model.norm.weight"].as_subclass(_Quantized)
    torch.save(state, folder / "pytorch_model.bin")
    assert "holds more than tensors" in damaged_file(folder, OSError())
    with mock.patch.dict(sys.modules, {"optimum": None, "optimum.quanto": None}), pytest.raises(ImportError):
        AutoModelForCausalLM.from_pretrained(folder)


def test_what_the_system_says_of_a_file(folders, monkeypatch):
    def refuse(file):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(stored_dcformer, "stored_tensors", refuse)
    for error_class, expected in ((OSError, PermissionError), (DCFormerError, DCFormerError)):
        with (
            pytest.raises(expected, match=r"Permission denied.*model\.safetensors"),
            naming_damage(folders / "safetensors", {}, error_class),
        ):
            raise RuntimeError("what the library says")


def test_damaged_index(folders, tmp_path):
    folder = shutil.copytree(folders / "safetensors", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for content in (b"{", b"[1]", b"\xff", b'{"metadata": {}, "weight_map": null}'):
        index.write_bytes(content)
        assert (damaged_file(folder, OSError()) or "").startswith(f"{index} is damaged")
        for read in (lambda: weight_files(folder, {}), lambda: AutoModelForCausalLM.from_pretrained(folder)):
            with pytest.raises(OSError, match=r"index\.json is damaged"):
                read()


def test_bugs_are_not_explained_away(folders):
    with pytest.raises(KeyError):
        damaged_file(folders / "bin", KeyError("raised here"))
