"""The command line: every subcommand and script, exit codes, what is printed where, and what is left on disk."""

import filecmp
import importlib
import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config
from jax_stores import read_arrays
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from dcformer import DCFormerForCausalLM
from dcformer.conversion import ConversionError, convert_jax_to_safetensors, convert_safetensors_to_jax
from dcformer_commands.convert import main

SCRIPTS = REPOSITORY / "conversion_scripts"
COMMANDS = ["jax-to-safetensors", "safetensors-to-jax", "hub-to-safetensors", "verify"]
AUTHORS_CONFIG = {
    "model_type": "dcformer",
    "architectures": ["DCFormer"],
    "dim": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_local_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 97,
    "block_size": 128,
    "norm_eps": 1e-5,
    "window_size": 8,
    "window_type": None,
    "use_dcmha": True,
    "use_qk_norm": True,
    "rope_base": 10000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A model folder whose attention is that of the authors' PyTorch code."""
    folder = tmp_path_factory.mktemp("model") / "native"
    config = tiny_config(compose_act="gelu", qk_norm_eps=1e-6, bos_token_id=1, eos_token_id=2)
    randomize(DCFormerForCausalLM(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pax(native, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax") / "pax"
    convert_safetensors_to_jax(native, folder, format="pax", progress=False)
    return folder


@pytest.fixture(scope="module")
def hub(native, tmp_path_factory):
    """The same model as the authors would publish it, written by hand."""
    folder = tmp_path_factory.mktemp("hub") / "hub"
    folder.mkdir()
    names = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    layer = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
    layer |= {f"self_attn.{side}_norm.weight": f"attention.{side}_norm.scale" for side in "qk"}
    layer |= {f"self_attn.{name}_proj.weight": f"attention.w{name}.weight" for name in "qkvo"}
    layer |= {"mlp.gate_proj.weight": "feed_forward.w1.weight", "mlp.up_proj.weight": "feed_forward.w3.weight"}
    layer |= {"mlp.down_proj.weight": "feed_forward.w2.weight"}
    stored = {}
    for name, tensor in load_file(native / "model.safetensors").items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match is None:
            stored[names[name.removesuffix(".weight")] + ".weight"] = tensor
        elif match[2] in layer:
            stored[f"layers.{match[1]}.{layer[match[2]]}"] = tensor
        else:  # one group of four heads, rank 2: K = 16
            kind = match[2].removeprefix("self_attn.compose.").removesuffix(".weight")
            new = {"dw1_proj": "dw1", "qkw": "qkw", "gate_proj": "dd"}[kind]
            shapes = {"dw1": (32, 1, 4, 16), "qkw": (1, 4, 16, 4, 4), "dd": (32, 1, 16)}
            tensor = (tensor if new == "qkw" else tensor.T).reshape(shapes[new])
            stored[f"layers.{match[1]}.attention.dyn_w_proj.{new}"] = tensor
    torch.save({name: tensor.clone() for name, tensor in stored.items()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(AUTHORS_CONFIG))
    return folder


def run(*arguments):
    return main([*map(str, arguments), "--no-progress"])


def assert_same_tensors(found, expected):
    found, expected = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def small_tokenizer(folder, words=20, **special):
    """A tokenizer of `words` words and three special tokens, of ids 0 to 2."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = special or {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


# --- the subcommands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["maxtext", "pax"])
def test_to_jax_and_back(native, tmp_path, format, capsys):
    if format == "maxtext":
        pytest.importorskip("orbax.checkpoint", reason="writing Orbax checkpoints needs pip install 'dcformer[jax]'")
    jax, back = tmp_path / "jax", tmp_path / "back"
    assert run("safetensors-to-jax", "--model", native, "--output", jax, "--format", format) == 0
    out = capsys.readouterr().out
    assert f"{native} (native) -> {jax} ({format}): 31 tensors, 0.1 MB" in out
    assert "layers per block: 2; windows: [8, null]" in out
    assert run("jax-to-safetensors", "--checkpoint", jax, "--output", back) == 0
    captured = capsys.readouterr()
    assert f"{jax} ({format}) -> {back} (native): 31 tensors, 0.1 MB" in captured.out
    assert "1 safetensors files, tensors in float32" in captured.out
    assert "writing" not in captured.err
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(native / name, back / name, shallow=False), name
    assert run("verify", native, jax) == run("verify", jax, back) == run("verify", native, back) == 0
    assert "31 compared, 0 different" in capsys.readouterr().out


def test_hub(hub, native, tmp_path, capsys):
    assert run("hub-to-safetensors", "--checkpoint", hub, "--output", tmp_path / "native") == 0
    assert f"{hub} (hub) -> {tmp_path / 'native'} (native): 31 tensors" in capsys.readouterr().out
    assert_same_tensors(tmp_path / "native", native)
    assert run("verify", hub, tmp_path / "native") == run("verify", native, hub) == 0
    assert run("verify", hub, native, "--first-format", "hub", "--second-format", "native") == 0


def test_hub_straight_to_jax(hub, native, tmp_path):
    given = ["--model", hub, "--output", tmp_path / "jax", "--format", "pax"]
    assert run("safetensors-to-jax", *given) == 0
    assert run("jax-to-safetensors", "--checkpoint", tmp_path / "jax", "--output", tmp_path / "native") == 0
    assert_same_tensors(tmp_path / "native", native)
    assert run("verify", native, tmp_path / "native") == 0


def test_progress_goes_to_stderr(pax, tmp_path, capsys):
    assert main(["jax-to-safetensors", "--checkpoint", str(pax), "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "writing safetensors: 100%" in captured.err and "writing" not in captured.out


@pytest.mark.parametrize("dtype", ["keep", "float32", "bfloat16", "float16"])
def test_dtype(pax, native, tmp_path, dtype, capsys):
    output = tmp_path / "out"
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", output, "--dtype", dtype) == 0
    name = "float32" if dtype == "keep" else dtype
    assert f"tensors in {name}" in capsys.readouterr().out
    found, expected = load_file(output / "model.safetensors"), load_file(native / "model.safetensors")
    for tensor in expected:
        assert torch.equal(found[tensor], expected[tensor].to(getattr(torch, name))), tensor
    assert AutoModelForCausalLM.from_pretrained(output).dtype == getattr(torch, name)


@pytest.mark.parametrize("dtype", ["keep", "trainer", "bfloat16"])
def test_dtype_of_arrays(tmp_path, dtype):
    native, output = tmp_path / "native", tmp_path / "out"
    DCFormerForCausalLM(tiny_config(compose_static=True)).save_pretrained(native)
    assert run("safetensors-to-jax", "--model", native, "--output", output, "--format", "pax", "--dtype", dtype) == 0
    arrays = read_arrays(output / "checkpoint_00000000" / "state", "mdl_vars.params.lm.")
    for name, array in arrays.items():
        narrow = dtype == "bfloat16" or (dtype == "trainer" and name.endswith((".qkw", "_proj.w")))
        assert array.dtype.name == ("bfloat16" if narrow else "float32"), name


@pytest.mark.parametrize(("size", "most"), [("20KB", 20_000), ("30000", 30_000), ("5GB", 10**9)])
def test_max_shard_size(pax, native, tmp_path, size, most):
    output = tmp_path / "out"
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", output, "--max-shard-size", size) == 0
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 1 if most < 10**5 else [file.name for file in files] == ["model.safetensors"]
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= most or len(tensors) == 1
    model, expected = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (output, native))
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


def test_tokenizer(pax, tmp_path, capsys):
    tokenizer = small_tokenizer(tmp_path / "tokenizer")
    config = json.loads((pax / "config.json").read_text()) | {"eos_token_id": 7, "pad_token_id": None}
    (tmp_path / "given.json").write_text(json.dumps(config))
    given = ["--checkpoint", pax, "--config", tmp_path / "given.json"]
    assert run("jax-to-safetensors", *given, "--output", tmp_path / "out", "--tokenizer", tokenizer) == 0
    assert "eos_token_id = 2, as in the tokenizer; the configuration had 7" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    for name, expected in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        assert written[name] == getattr(generation, name) == expected
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("w3 w0 </s>")["input_ids"] == [6, 3, 2]


def test_tokenizer_of_another_model(pax, tmp_path, capsys):
    tokenizer = small_tokenizer(tmp_path / "tokenizer", words=100)
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", tmp_path / "out", "--tokenizer", tokenizer) == 0
    assert "the tokenizer has 103 tokens, the model 97" in capsys.readouterr().out


def test_tokens_beyond_the_vocabulary_are_not_taken(pax, tmp_path):
    special = {"eos_token": "w93", "pad_token": "w94"}  # 96, the last row of the model, and 97
    tokenizer = small_tokenizer(tmp_path / "tokenizer", words=100, **special)
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", tmp_path / "out", "--tokenizer", tokenizer) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written.get("pad_token_id")) == (96, None)


def test_tokenizer_beside_a_published_model(hub, tmp_path):
    """It is taken along unless another one is named."""
    folder = tmp_path / "hub"
    small_tokenizer(folder, eos_token="<pad>")
    for file in hub.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert run("hub-to-safetensors", "--checkpoint", folder, "--output", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<pad>"
    other = small_tokenizer(tmp_path / "other")
    assert run("hub-to-safetensors", "--checkpoint", folder, "--output", tmp_path / "2", "--tokenizer", other) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "2").eos_token == "</s>"


def with_tokenizer(hub, folder, vocabulary, **settings):
    """A copy of a hub folder with the files of GPT-2's tokenizer."""
    shutil.copytree(hub, folder)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    if (added := settings.pop("added_tokens.json", None)) is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | settings))
    return folder


@pytest.mark.parametrize(
    "vocabulary, settings, expected",
    [
        (["<|endoftext|>", "a", "b"], {}, (0, 0)),
        (["a", "b", "</s>"], {}, (1, 2)),  # the configuration's: what GPT-2's class names is in no text
        (["a", "</s>", "b"], {"eos_token": "</s>"}, (1, 1)),
        (["a", "</s>", "b"], {"eos_token": {"__type": "AddedToken", "content": "</s>"}}, (1, 1)),
        (["a", "<|endoftext|>"], {"eos_token": "</s>"}, (1, 2)),  # added behind the vocabulary, by name
        (["a", "b", "c"], {"added_tokens_decoder": {"3": {"content": "<|endoftext|>", "special": True}}}, (3, 3)),
        (["a", "b", "c"], {"added_tokens.json": {"<|endoftext|>": 3}}, (3, 3)),
        (["a", "b", "c"], {"additional_special_tokens": ["<|endoftext|>"]}, (3, 3)),
    ],
)
def test_a_tokenizer_in_other_files_beside_a_published_model(hub, vocabulary, settings, expected, tmp_path):
    folder = with_tokenizer(hub, tmp_path / "hub", vocabulary, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == expected
    assert loaded.generation_config.eos_token_id == expected[1]
    assert run("hub-to-safetensors", "--checkpoint", folder, "--output", tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == expected
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab().items() >= {"a": vocabulary.index("a")}.items()


@pytest.mark.parametrize(
    "kind, tokens, expected",
    [
        ("LlamaTokenizer", ["<unk>", "a", "<s>", "</s>"], (2, 3, None)),
        ("LlamaTokenizer", ["<unk>", "a", "b"], (1, 2, None)),  # the configuration's
        ("Qwen2Tokenizer", ["a", "b", "c"], (1, 2, None)),
        ("Qwen2Tokenizer", ["a", "b", "c", "<|endoftext|>"], (3, 3, 3)),
    ],
)
def test_what_only_the_class_of_a_tokenizer_names_counts_where_its_file_has_it(hub, kind, tokens, expected, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model = models.BPE({token: number for number, token in enumerate(tokens)}, [])
    Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    options = ["--checkpoint", hub, "--output", tmp_path / "out", "--tokenizer", folder]
    assert run("hub-to-safetensors", *options) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tuple(written.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")) == expected


@pytest.mark.parametrize("missing", [["vocab.json", "merges.txt"], ["merges.txt"]])
def test_files_that_make_no_tokenizer(hub, missing, tmp_path, capsys):
    """Without a vocabulary the library would make an empty one."""
    folder = with_tokenizer(hub, tmp_path / "hub", ["<|endoftext|>", "a"])
    for name in missing:
        (folder / name).unlink()
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 2
    assert run("hub-to-safetensors", "--checkpoint", folder, "--output", tmp_path / "without") == 0
    assert "no tokenizer is saved: " in capsys.readouterr().out
    assert json.loads((tmp_path / "without" / "config.json").read_text())["eos_token_id"] == 2
    assert not list((tmp_path / "without").glob("tokenizer*"))
    options = ["--checkpoint", hub, "--output", tmp_path / "named", "--tokenizer", folder]
    assert run("hub-to-safetensors", *options) == 1
    assert f"tokenizer='{folder}' cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "named").exists()


@pytest.fixture
def steps(native, tmp_path):
    """A Pax root with steps 5 and 30, of different values."""
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((native / "config.json").read_bytes())
    tensors = load_file(native / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    for step, folder in ((5, native), (30, changed)):
        assert run("safetensors-to-jax", "--model", folder, "--output", tmp_path / str(step), "--format", "pax",
                   "--step", step) == 0  # fmt: skip
    (tmp_path / "30" / "checkpoint_00000030").rename(tmp_path / "5" / "checkpoint_00000030")
    return tmp_path / "5"


def test_step(steps, native, tmp_path, capsys):
    assert run("jax-to-safetensors", "--checkpoint", steps, "--output", tmp_path / "a", "--step", 5) == 0
    assert_same_tensors(tmp_path / "a", native)
    assert run("jax-to-safetensors", "--checkpoint", steps, "--output", tmp_path / "b") == 0
    assert "steps 5, 30: 30 was taken" in capsys.readouterr().out
    assert_same_tensors(tmp_path / "b", tmp_path / "changed")
    assert run("jax-to-safetensors", "--checkpoint", steps, "--output", tmp_path / "c", "--step", 6) == 1
    assert "has no step 6: it has 5, 30" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("ocdbt", [True, False])
def test_maxtext_options(native, tmp_path, ocdbt):
    pytest.importorskip("orbax.checkpoint", reason="writing Orbax checkpoints needs pip install 'dcformer[jax]'")
    output = tmp_path / "jax"
    given = ["--ocdbt" if ocdbt else "--no-ocdbt", "--with-train-state", "--step", 12]
    assert run("safetensors-to-jax", "--model", native, "--output", output, "--format", "maxtext", *given) == 0
    state = output / "12" / "state"
    assert (state / "manifest.ocdbt").exists() == ocdbt
    params = read_arrays(state, "params.", ocdbt=ocdbt)
    for moment in ("mu", "nu"):
        moments = read_arrays(state, f"opt_state.{moment}.", ocdbt=ocdbt)
        assert set(moments) == set(params) and not any(array.any() for array in moments.values())
    assert read_arrays(state, "step", ocdbt=ocdbt)[""] == 12


def test_pax_options(native, tmp_path):
    assert run("safetensors-to-jax", "--model", native, "--output", tmp_path / "jax", "--format", "pax", "--step", 7,
               "--padded-vocab-size", 104, "--layers-per-block", 2) == 0  # fmt: skip
    arrays = read_arrays(tmp_path / "jax" / "checkpoint_00000007" / "state", "mdl_vars.params.lm.")
    assert arrays["embedding_lookup.emb_var"].shape == (104, 32)
    assert not arrays["embedding_lookup.emb_var"][97:].any()
    assert arrays["softmax.logits_ffn.linear.w"].shape == (32, 97)
    assert arrays["transformer.repeat.sub.x_layers_1.layer_norm.scale"].shape == (1, 32)


# --- outputs that exist -----------------------------------------------------------------------------------------------


def conversions(native, pax, hub):
    return {
        "jax-to-safetensors": ["--checkpoint", pax],
        "safetensors-to-jax": ["--model", native, "--format", "pax"],
        "hub-to-safetensors": ["--checkpoint", hub],
    }


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_existing_output(native, pax, hub, tmp_path, command, capsys):
    output = tmp_path / "out"
    (output / "folder").mkdir(parents=True)
    (output / "folder" / "file").write_text("mine")
    given = conversions(native, pax, hub)[command]
    assert run(command, *given, "--output", output) == 1
    assert f"error: {output} exists and is not empty" in capsys.readouterr().err
    assert (output / "folder" / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run(command, *given, "--output", output, "--overwrite") == 0
    assert not (output / "folder").exists() and (output / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("size", ["0", "-1", "-5GB", 0, None])
def test_sizes_of_shards_that_are_none(pax, tmp_path, size):
    with pytest.raises(ConversionError, match=r"max_shard_size=.*: expected bytes above 0"):
        convert_jax_to_safetensors(pax, tmp_path / "out", max_shard_size=size, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_configuration_beside_the_checkpoint(pax, tmp_path, content):
    """It is not taken for none: the model would be another."""
    folder = shutil.copytree(pax, tmp_path / "pax")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConversionError, match=r"config\.json is damaged, .* or give --config"):
        convert_jax_to_safetensors(folder, tmp_path / "out", progress=False)
    (tmp_path / "config.json").write_text(content)  # this one is somebody else's
    (folder / "config.json").unlink()
    convert_jax_to_safetensors(folder, tmp_path / "out", progress=False)


def test_a_failing_overwrite_leaves_the_old_output(pax, tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "file").write_text("mine")
    given = ["--checkpoint", pax, "--output", output, "--overwrite"]
    assert run("jax-to-safetensors", *given, "--max-shard-size", "much") == 1
    assert "max_shard_size='much' is not understood" in capsys.readouterr().err
    assert (output / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("jax-to-safetensors --checkpoint nowhere --output out", "nowhere does not exist"),
        ("jax-to-safetensors --checkpoint {pax} --output out --format maxtext", "no parameters of a maxtext"),
        ("jax-to-safetensors --checkpoint {pax} --output out --config nowhere", "nowhere cannot be read"),
        ("jax-to-safetensors --checkpoint {pax} --output out --tokenizer nowhere", "'nowhere' cannot be loaded"),
        ("jax-to-safetensors --checkpoint {native} --output out", "is a model folder, not a JAX checkpoint"),
        ("safetensors-to-jax --model nowhere --output out --format pax", "not exist: expected the folder of a check"),
        ("safetensors-to-jax --model {empty} --output out --format pax", "empty is not a model folder: expected"),
        ("safetensors-to-jax --model {fused} --output out --format pax", "fused has trained mixtures of heads"),
        ("verify {native} {fused}", "fused has trained mixtures of heads"),
        ("verify {native} {native} --num-tokens 100000", "num_tokens=100000: expected at most 128, by the model's max"),
        ("verify {native} {native} --num-tokens -5", "--num-tokens -5: expected at least 0"),
        ("safetensors-to-jax --model {native} --output out --format pax --ocdbt", "--ocdbt is for MaxText"),
        ("safetensors-to-jax --model {native} --output out --format pax --layers-per-block 3", "must divide"),
        ("safetensors-to-jax --model {native} --output out --format pax --step -1", "step=-1: expected a whole number"),
        ("hub-to-safetensors --checkpoint {native} --output out", "is a native checkpoint by the names of its tensors"),
        ("hub-to-safetensors --checkpoint nowhere --output out", "nowhere does not exist"),
        ("verify {native} nowhere", "nowhere does not exist: expected the folder of a checkpoint"),
        ("verify {native} {native} --first-step 3", "--config and --step are for JAX checkpoints"),
    ],
)  # fmt: skip
def test_errors(native, pax, tmp_path, tmp_path_factory, arguments, match, capsys, monkeypatch):
    """A line on stderr that says why, status 1, and no output."""
    monkeypatch.chdir(tmp_path)
    empty = tmp_path_factory.mktemp("folder") / "empty"
    empty.mkdir()
    fused = shutil.copytree(native, empty.parent / "fused")
    (fused / "operators.safetensors").touch()
    assert run(*arguments.format(native=native, pax=pax, empty=empty, fused=fused).split()) == 1
    captured = capsys.readouterr()
    assert re.search(f"^error: .*{match}", captured.err, re.MULTILINE)
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "jax-to-pytorch",
        "jax-to-safetensors --checkpoint a",
        "jax-to-safetensors --output a",
        "jax-to-safetensors --checkpoint a --output b --dtype int8",
        "jax-to-safetensors --checkpoint a --output b --step last",
        "jax-to-safetensors --checkpoint a --output b --no-such-option",
        "safetensors-to-jax --model a --output b",
        "safetensors-to-jax --model a --output b --format hub",
        "hub-to-safetensors a b",
        "verify a",
    ],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: dcformer-convert")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    for arguments, program in (([command, "--help"], f"dcformer-convert {command}"), (["--help"], "dcformer-convert")):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: {program} ") and command in out


def test_missing_libraries(native, pax, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    assert run("verify", native, tmp_path / "nowhere") == 1  # which no library would find either
    assert f"error: {tmp_path / 'nowhere'} does not exist: expected the folder" in capsys.readouterr().err
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", tmp_path / "a") == 1
    assert re.search(r"error: .*needs tensorstore, which is not installed: pip install", capsys.readouterr().err)
    for format in ("maxtext", "pax"):
        assert run("safetensors-to-jax", "--model", native, "--output", tmp_path / "b", "--format", format) == 1
        assert re.search(
            r"error: .*needs \S+, which is not installed: pip install \"dcformer\[jax\]\"",
            capsys.readouterr().err,
            re.IGNORECASE,
        )
    assert not list(tmp_path.iterdir())


def test_interrupted(pax, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dcformer.conversion.convert.SafetensorsWriter.write", stop)
    assert run("jax-to-safetensors", "--checkpoint", pax, "--output", tmp_path / "out") == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert not list(tmp_path.iterdir())


# --- as a user starts them --------------------------------------------------------------------------------------------


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPTS / f"convert_{script}.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.long
def test_scripts(native, hub, tmp_path):
    jax, back, converted = tmp_path / "jax", tmp_path / "back", tmp_path / "converted"
    first = start("safetensors_to_jax", "--model", native, "--output", jax, "--format", "pax")
    second = start("hub_to_safetensors", "--checkpoint", hub, "--output", converted)
    status, out, err = finish(first)
    assert status == 0, err
    assert f"{native} (native) -> {jax} (pax)" in out
    status, out, err = finish(second)
    assert status == 0, err
    assert f"{hub} (hub) -> {converted} (native)" in out
    assert_same_tensors(converted, native)
    status, out, err = finish(start("jax_to_safetensors", "--checkpoint", jax, "--output", back))
    assert status == 0, err
    assert f"{jax} (pax) -> {back} (native)" in out
    assert_same_tensors(back, native)


@pytest.mark.parametrize(
    ("script", "source"),
    [("jax_to_safetensors", "--checkpoint"), ("safetensors_to_jax", "--model"), ("hub_to_safetensors", "--checkpoint")],
)
def test_scripts_help_and_fail(script, source, tmp_path, capsys, monkeypatch):
    """Run in this process, as a new one takes seconds to import its libraries."""

    def status(*arguments):
        monkeypatch.setattr(sys, "argv", [f"convert_{script}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(SCRIPTS / f"convert_{script}.py", run_name="__main__")
        return stopped.value.code

    assert status("--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: convert_{script}.py ") and source in out and "--output" in out
    assert status("--output", tmp_path / "out") == 2
    assert f"the following arguments are required: {source}" in capsys.readouterr().err
    format = ["--format", "pax"] if script == "safetensors_to_jax" else []
    assert status(source, tmp_path / "nowhere", "--output", tmp_path / "out", *format) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {tmp_path / 'nowhere'}") and not captured.out


def test_console_script():
    """`dcformer-convert`, as declared and, where the installation is recent enough, as installed."""
    (target,) = re.findall(r'^dcformer-convert = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    module, name = target.split(":")
    assert getattr(importlib.import_module(module), name) is main
    for entry in importlib.metadata.entry_points(group="console_scripts", name="dcformer-convert"):
        assert entry.load() is main
