"""Exported folders load where the package is not installed: tried in a process that cannot import it."""

import json
import subprocess
import sys
import sysconfig

import pytest
import torch
from helpers import randomize, tiny_config

import dcformer
from dcformer.head_systems import HEAD_SYSTEMS

# Runs without the `site` module, so that an editable install's path files are not read: only what really lies in
# site-packages can be imported.
LOADER = """
import sys
sys.path.append(sys.argv[1])
import importlib.util
assert importlib.util.find_spec("dcformer") is None, "the package can be imported here, so this would show nothing"
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
folder, output = sys.argv[2:4]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
ids = torch.arange(40)[None] % config.vocab_size
result = {"implementation": model.config._attn_implementation, "window": config.sliding_window}
with torch.no_grad():
    result["logits"] = model(ids).logits
    result["generated"] = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("eager")
    result["eager"] = model(ids).logits
if "AutoModel" in config.auto_map:
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__.endswith("Model")
    AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
torch.save(result, output)
"""


def _load_elsewhere(folder, tmp_path):
    """Loads a folder in a process without the package; returns what it computed."""
    output = tmp_path / "result.pt"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOADER, sysconfig.get_paths()["purelib"], str(folder), str(output)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(output)


def _same_as(model, result):
    ids = torch.arange(40)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(result["logits"], model(ids).logits, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(result["eager"], result["logits"], atol=1e-4, rtol=1e-4)
        generated = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert result["generated"].tolist() == generated.tolist()
    assert result["implementation"] == "dcformer_default"  # where no kernels are registered: chunked


MAPS = {"key_head_map": [[0, 1, 1, 0], [0, 0, 0, 0]], "value_head_map": [[0, 0, 0, 0], [3, 0, 2, 1]]}


HEADS = """
import os
import sys
sys.path.append(sys.argv[1])
import torch
import transformers
for folder in sys.argv[2:]:
    auto_map = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).auto_map
    heads = [name for name in auto_map if name != "AutoConfig"]
    assert len(heads) > 2
    for name in heads:
        if (child := os.fork()) == 0:  # a process that has loaded nothing else of the folder
            model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
            with torch.no_grad():
                model(torch.arange(9)[None])
            assert type(model).__module__.startswith("transformers_modules."), type(model)
            saved = f"{folder}-{name}"
            transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).save_pretrained(saved)
            transformers.AutoModel.from_pretrained(saved, trust_remote_code=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, (folder, name)
"""


def test_systems_of_ones_own_are_refused(tmp_path, monkeypatch):
    """Their code would not be in the folder, and whoever gets it would be the first to know."""
    monkeypatch.setitem(HEAD_SYSTEMS, "own", type("Own", (HEAD_SYSTEMS["plain"],), {"__module__": "my_systems"}))
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config = dcformer.HeadSystemsConfig(**sizes, num_attention_heads=2, head_system="own")
    dcformer.HeadSystemsForCausalLM(config).save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"head_system='own', which is my_systems\.Own and no part of this package"):
        dcformer.export_remote_code(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    type("Own", (dcformer.DCFormerForCausalLM,), {})(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"architectures=\['Own'\], no class of model_type='dcformer'"):
        dcformer.export_remote_code(tmp_path)


@pytest.mark.slow
def test_every_head_loads_first(tmp_path):
    """Those of the library's heads, too, which ask `AutoModel` for the decoder."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    folders = []
    for config in (
        dcformer.DCFormerConfig(**sizes, num_attention_heads=2),
        dcformer.DCPythiaConfig(**sizes, num_attention_heads=2),
        dcformer.DHAConfig(**sizes, num_attention_heads=2),
        dcformer.HeadSystemsConfig(**sizes, num_attention_heads=2, head_system="output_gate"),
    ):
        folders.append(str(tmp_path / config.model_type))
        model = getattr(dcformer, type(config).__name__.replace("Config", "ForCausalLM"))(config)
        model.save_pretrained(folders[-1])
        dcformer.export_remote_code(folders[-1])
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", HEADS, sysconfig.get_paths()["purelib"], *folders],
        env=environment, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("family", ["DCFormer", "DCPythia", "DHA", "MHE"])
def test_exported_folder_loads_without_the_package(tmp_path, family):
    config = tiny_config()
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(config, name) for name in fields}
    if family == "DCPythia":
        config = dcformer.DCPythiaConfig(sliding_window=8, **sizes)
    elif family == "DHA":
        config = dcformer.DHAConfig(**sizes, **MAPS)
    elif family == "MHE":
        config = tiny_config(head_embeddings="add", num_key_value_heads=None)
    model = randomize(getattr(dcformer, type(config).__name__.replace("Config", "ForCausalLM"))(config))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    dcformer.export_remote_code(folder)
    _same_as(model, _load_elsewhere(folder, tmp_path))


def test_register_for_auto_class_exports_too(tmp_path, monkeypatch):
    monkeypatch.setattr(dcformer.DCFormerConfig, "_auto_class", None)
    monkeypatch.setattr(dcformer.DCFormerForCausalLM, "_auto_class", None)
    dcformer.DCFormerConfig.register_for_auto_class()
    dcformer.DCFormerForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model = randomize(dcformer.DCFormerForCausalLM(tiny_config()))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    _same_as(model, _load_elsewhere(folder, tmp_path))


def test_exported_folder_uses_the_package_where_it_is(tmp_path):
    from transformers import AutoModelForCausalLM

    randomize(dcformer.DCFormerForCausalLM(tiny_config())).save_pretrained(tmp_path)
    dcformer.export_remote_code(tmp_path)
    for trust in (None, False, True):
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)) is (
            dcformer.DCFormerForCausalLM
        )


def test_export_refuses_other_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        dcformer.export_remote_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    with pytest.raises(ValueError, match="model_type='llama'"):
        dcformer.export_remote_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dcformer", "dim": 8}))
    with pytest.raises(ValueError, match="native keys"):
        dcformer.export_remote_code(tmp_path)
    for content, match in (("{", "damaged"), ("[]", "holds a list, expected a configuration")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"config\.json.* {match}"):
            dcformer.export_remote_code(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]
