"""Comparing checkpoints: every kind of difference is found and named, and nothing else is called one."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import randomize, tiny_config
from safetensors.torch import load_file, save_file

from dcformer import DCFormerForCausalLM
from dcformer.conversion import (
    ConversionError,
    compare_logits,
    compare_tensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)
from dcformer.conversion.verification import Comparison, compare_configs, format_table
from dcformer_commands.convert import main

pytest.importorskip("tensorstore", reason="JAX checkpoints need tensorstore: pip install 'dcformer[jax]'")

QKW = "model.layers.1.self_attn.compose.qkw"
INFINITY = float("inf")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "native"
    randomize(DCFormerForCausalLM(tiny_config())).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pax_folder(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pax") / "pax"
    convert_safetensors_to_jax(model_folder, folder, format="pax", progress=False)
    return folder


@pytest.fixture
def copy(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "copy")


def change_tensors(folder, change):
    """Rewrites a folder's tensors; `change` gets the dictionary of them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def set_value(name, index, value):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


def compare(first, second, **options):
    return compare_tensors(open_checkpoint(first), open_checkpoint(second), progress=False, **options)


def verify(*arguments):
    return main(["verify", "--no-progress", *map(str, arguments)])


def different(comparisons):
    return {c.name: c.difference for c in comparisons if not c.is_equal}


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_equal_across_formats(model_folder, pax_folder, order, capsys):
    folders = [model_folder, pax_folder][::order]
    comparisons = compare(*folders)
    names = set(load_file(model_folder / "model.safetensors"))
    assert {c.name for c in comparisons} == names and len(comparisons) == len(names)
    assert all(c.is_equal and c.difference == 0 for c in comparisons)
    assert verify(*folders) == 0
    assert f"{len(names)} compared, 0 different" in capsys.readouterr().out


def test_each_stored_tensor_is_read_once(tmp_path, monkeypatch):
    """Whichever comes first, the one that stacks its layers leads."""
    DCFormerForCausalLM(tiny_config(num_hidden_layers=6)).save_pretrained(tmp_path / "native")
    convert_safetensors_to_jax(tmp_path / "native", tmp_path / "pax", format="pax", progress=False)
    for order in (1, -1):
        first, second = [open_checkpoint(tmp_path / name) for name in ("native", "pax")][::order]
        pax = first if first.format == "pax" else second
        reads = []
        read = pax.source.read
        monkeypatch.setattr(pax.source, "read", lambda name, reads=reads, read=read: reads.append(name) or read(name))
        assert not different(compare_tensors(first, second, progress=False))
        assert sorted(reads) == sorted(pax.source.infos)


@pytest.mark.parametrize(("name", "index"), [(QKW, 17), ("model.norm.weight", 31), ("lm_head.weight", 97 * 32 - 1)])
@pytest.mark.parametrize("other", ["native", "pax"])
def test_one_value_changed(model_folder, pax_folder, copy, name, index, other, capsys):
    old = float(load_file(model_folder / "model.safetensors")[name].view(-1)[index])
    change_tensors(copy, set_value(name, index, old + 0.5))
    against = model_folder if other == "native" else pax_folder
    assert verify(against, copy, "--num-tokens", 0) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line]
    assert row.split()[:3] == [name, "5.000e-01", "DIFFERENT"]
    found = different(compare(against, copy))
    assert found == {name: pytest.approx(0.5, abs=1e-6)}


def test_tolerance(model_folder, copy, capsys):
    old = float(load_file(model_folder / "model.safetensors")[QKW].view(-1)[0])
    change_tensors(copy, set_value(QKW, 0, old + 2.0**-7))
    (difference,) = different(compare(model_folder, copy)).values()
    assert difference == pytest.approx(2.0**-7, rel=1e-4)
    assert not different(compare(model_folder, copy, atol=difference))
    assert different(compare(model_folder, copy, atol=difference * 0.999)) == {QKW: difference}
    assert verify(model_folder, copy, "--atol", 0.01, "--num-tokens", 0) == 0
    assert verify(model_folder, copy, "--atol", 0.005, "--num-tokens", 0) == 1
    capsys.readouterr()
    assert verify(model_folder, copy, "--atol", 0.01, "--num-tokens", 0, "--all") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(QKW)]
    assert row.split()[1:3] == [f"{difference:.3e}", "equal"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (float("nan"), float("nan"), 0.0),
        (INFINITY, INFINITY, 0.0),
        (-INFINITY, -INFINITY, 0.0),
        (float("nan"), 1.0, INFINITY),
        (1.0, float("nan"), INFINITY),
        (float("nan"), INFINITY, INFINITY),
        (INFINITY, -INFINITY, INFINITY),
        (INFINITY, 1.0, INFINITY),
        (0.0, -0.0, 0.0),
        (3e38, -3e38, 6e38),
    ],
)
def test_special_values(model_folder, tmp_path, first, second, expected):
    folders = [shutil.copytree(model_folder, tmp_path / name) for name in "ab"]
    for folder, value in zip(folders, (first, second), strict=True):
        change_tensors(folder, set_value(QKW, 5, value))
    (comparison,) = [c for c in compare(*folders, atol=1e38) if c.name == QKW]
    assert comparison.difference == pytest.approx(expected, rel=1e-6)
    assert comparison.is_equal == (expected == 0)


def test_equal_values_in_other_dtypes(tmp_path):
    """Another dtype does not count as a difference, a rounded value does."""
    model = randomize(DCFormerForCausalLM(tiny_config()))
    model.save_pretrained(tmp_path / "unrounded")
    folders = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        folders[dtype] = tmp_path / str(dtype)
        model.to(torch.bfloat16).to(dtype).save_pretrained(folders[dtype])
    for other in (torch.float32, torch.float64):
        comparisons = compare(folders[torch.bfloat16], folders[other])
        assert not different(comparisons)
        assert comparisons[0].detail.endswith(f"bfloat16 and {str(other).removeprefix('torch.')}")
    found = different(compare(folders[torch.bfloat16], tmp_path / "unrounded"))
    assert "lm_head.weight" in found and 0 < max(found.values()) < 0.01


@pytest.mark.parametrize("value", ["nan", "-1", "-1e-9"])
@pytest.mark.parametrize("option", ["--atol", "--logits-atol"])
def test_a_tolerance_that_is_none(model_folder, option, value, capsys):
    assert verify(model_folder, model_folder, f"{option}={value}", "--num-tokens", 0) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and f"error: {option}={float(value)} must be a number of at least 0" in printed.err
    with pytest.raises(ConversionError, match=r"^atol=.* must be a number of at least 0"):
        compare(model_folder, model_folder, atol=float(value))
    with pytest.raises(ConversionError, match=r"^atol=.* must be a number of at least 0"):
        compare_logits(model_folder, model_folder, atol=float(value))


def test_missing_tensors(model_folder, copy, capsys):
    change_config(copy, qk_norm=False)
    norms = [f"model.layers.{i}.self_attn.{side}_norm.weight" for i in range(2) for side in "qk"]
    change_tensors(copy, lambda tensors: [tensors.pop(name) for name in norms])
    for folders in ((model_folder, copy), (copy, model_folder)):
        assert different(compare(*folders)) == dict.fromkeys(norms, INFINITY)
        assert verify(*folders) == 1
        out = capsys.readouterr().out
        assert sum(line.endswith(f"missing in {copy}") for line in out.splitlines()) == 4
        assert "logits" not in out


def test_other_shapes(model_folder, tmp_path, capsys):
    DCFormerForCausalLM(tiny_config(intermediate_size=48, vocab_size=90)).save_pretrained(tmp_path / "other")
    found = different(compare(model_folder, tmp_path / "other"))
    assert found["lm_head.weight"] == found["model.layers.0.mlp.up_proj.weight"] == INFINITY
    assert verify(model_folder, tmp_path / "other") == 1
    assert "[64, 32] and [48, 32]" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, -1])
def test_large_tensors_are_compared_to_their_end(model_folder, copy, monkeypatch, place):
    """Tensors are compared piece by piece; a piece of odd length cuts every one of them."""
    monkeypatch.setattr("dcformer.conversion.verification._COMPARED_AT_ONCE", 7)
    change_tensors(copy, set_value(QKW, place, 100.0))
    assert set(different(compare(model_folder, copy))) == {QKW}


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 9},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"norm_eps": 1e-3},
        {"qk_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"compose_act": "gelu"},
        {"use_parallel_residual": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_decisive_fields(model_folder, copy, fields, capsys):
    """What the tensors do not show is a difference too, and is named with both values."""
    assert compare_configs(open_checkpoint(model_folder), open_checkpoint(copy)) == []
    before = open_checkpoint(model_folder).config
    change_config(copy, **fields)
    assert verify(model_folder, copy, "--num-tokens", 0) == 1
    ((name, value),) = fields.items()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("configurations differ")]
    assert line.startswith(f"configurations differ in {name}: ")
    if name != "rope_parameters":
        assert line.endswith(f"{getattr(before, name)!r} and {value!r}")


def test_heads_cut_otherwise(tmp_path, capsys):
    """Four heads of eight have the same tensors as two of sixteen, in a model without q/k norms and composition."""
    plain = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key", "qk_norm"), False)
    for heads in (4, 2):
        config = tiny_config(num_attention_heads=heads, num_key_value_heads=heads, head_dim=32 // heads, **plain)
        torch.manual_seed(0)
        randomize(DCFormerForCausalLM(config)).save_pretrained(tmp_path / str(heads))
    assert verify(tmp_path / "4", tmp_path / "2", "--num-tokens", 0) == 1
    out = capsys.readouterr().out
    assert "0 different" in out
    assert "configurations differ in num_attention_heads: 4 and 2" in out
    assert "configurations differ in head_dim: 8 and 16" in out


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"compose_projection": False, "compose_groups": 1}, {"compose_projection": False, "compose_groups": 2}),
        ({"compose_query": True, "compose_key": False}, {"compose_query": False, "compose_key": True}),
        ({"compose_pre": True, "compose_post": False}, {"compose_pre": False, "compose_post": True}),
    ],
    ids=["groups", "sides", "stages"],
)
def test_compositions_with_the_same_tensors(tmp_path, one, other, capsys):
    """Names and shapes do not tell what the parameters of generators are for."""
    for name, fields in (("one", one), ("other", other)):
        torch.manual_seed(0)
        randomize(DCFormerForCausalLM(tiny_config(**fields))).save_pretrained(tmp_path / name)
    assert verify(tmp_path / "one", tmp_path / "other", "--num-tokens", 0) == 1
    out = capsys.readouterr().out
    assert "0 different" in out
    for name in other:
        differs = one[name] != other[name]
        assert (f"configurations differ in {name}: {one[name]} and {other[name]}" in out) == differs


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ({}, {"max_position_embeddings": 4096, "initializer_range": 0.5, "eos_token_id": 3}),
        ({"qk_norm": False}, {"qk_norm_eps": 0.1}),
        ({"layer_pattern": "G"}, {"sliding_window": 99}),
        ({"compose_projection": False}, {"compose_rank": 3}),
        (
            dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False),
            {"compose_rank": 3, "compose_groups": 2, "compose_act": "gelu"},
        ),
    ],
)
def test_fields_without_effect(tmp_path, model, fields, capsys):
    """Two ways to write down one model do not count as a difference."""
    DCFormerForCausalLM(tiny_config(**model)).save_pretrained(tmp_path / "a")
    change_config(shutil.copytree(tmp_path / "a", tmp_path / "b"), **fields)
    assert verify(tmp_path / "a", tmp_path / "b") == 0
    assert "configurations differ" not in capsys.readouterr().out


def test_only_the_window_differs(model_folder, copy, capsys):
    """Equal tensors, other outputs: the logits show it as well."""
    change_config(copy, sliding_window=4)
    assert verify(model_folder, copy) == 1
    out = capsys.readouterr().out
    assert "configurations differ in sliding_window: 8 and 4" in out
    (row,) = [line for line in out.splitlines() if "DIFFERENT" in line]
    assert row.startswith("logits")
    # shorter than both windows
    assert compare_logits(model_folder, copy, num_tokens=4).is_equal


# --- logits -----------------------------------------------------------------------------------------------------------


def test_logits_of_two_folders(model_folder, copy):
    assert compare_logits(model_folder, copy) == Comparison("logits", "[1, 64, 97] float32", 0.0, True)
    scale = "model.layers.0.self_attn.q_norm.weight"
    change_tensors(copy, lambda tensors: tensors[scale].mul_(1.5))
    comparison = compare_logits(model_folder, copy, num_tokens=16)
    assert not comparison.is_equal and 1e-3 < comparison.difference < 100
    models = [DCFormerForCausalLM.from_pretrained(folder).eval() for folder in (model_folder, copy)]
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        a, b = (model(ids).logits for model in models)
    comparison = compare_logits(model_folder, copy, tokens=ids)
    assert comparison.detail == "[2, 10, 97] float32"
    assert comparison.difference == pytest.approx(float((a - b).abs().max()), rel=1e-3)
    assert compare_logits(model_folder, copy, tokens=ids, atol=comparison.difference).is_equal


def test_random_tokens_follow_the_seed(model_folder, copy):
    change_tensors(copy, lambda tensors: tensors["lm_head.weight"].mul_(1.5))
    differences = [compare_logits(model_folder, copy, num_tokens=4, seed=seed).difference for seed in (0, 0, 1)]
    assert differences[0] == differences[1] != differences[2]


def test_tokens_on_the_command_line(model_folder, copy, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.array([[3, 1, 4], [1, 5, 9]], np.uint16))
    for words, shape in (
        (["3", "1", "4"], "[1, 3, 97]"),
        (["3,1,4, 1"], "[1, 4, 97]"),
        ([tmp_path / "ids.npy"], "[2, 3, 97]"),
    ):
        assert verify(model_folder, copy, "--tokens", *words) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("logits")]
        assert row.split()[2:] == ["equal", *f"{shape} float32".split()]
    change_tensors(copy, lambda tensors: tensors["model.embed_tokens.weight"][3].mul_(1.01))
    assert verify(model_folder, copy, "--tokens", "1", "2", "--atol", 1) == 0
    assert verify(model_folder, copy, "--tokens", "1", "3", "--atol", 1) == 1
    assert verify(model_folder, copy, "--tokens", "1", "3", "--atol", 1, "--logits-atol", 1) == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["97"], "native, at least one; 97 is none."),
        (["1,-1,97"], "tokens must be ids from 0 to 96 of"),
        (["1,-1,97"], "native, at least one; -1 is none."),
        ([""], "at least one"),
        (["one"], "expected numbers, or a .npy file"),
        (["1.5"], "expected numbers, or a .npy file"),
        ([str(2**70)], "tokens must be"),
        (["nowhere.npy"], "cannot be read"),
        (["float.npy"], "expected integers"),
        (["deep.npy"], "expected integers"),
        (["object.npy"], "cannot be read"),
        (["text.npy"], "cannot be read"),
    ],
)
def test_bad_tokens(model_folder, tmp_path, words, match, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("float.npy", np.array([1.5, 2.0]))
    np.save("deep.npy", np.zeros((1, 1, 3), np.int64))
    np.save("object.npy", np.array([None]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("1 2 3")
    assert verify(model_folder, model_folder, *[f"--tokens={word}" for word in words]) == 1
    assert match in capsys.readouterr().err


def test_logits_need_folders(model_folder, pax_folder, capsys):
    assert verify(model_folder, pax_folder, "--tokens", "1") == 1
    assert "needs two model folders" in capsys.readouterr().err
    assert verify(model_folder, model_folder, "--num-tokens", -3) == 1
    assert "--num-tokens -3: expected at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-tokens", 129), "num_tokens=129: expected at most 128"),
        (("--num-tokens", -1), "--num-tokens -1: expected at least 0"),
        (("--tokens", *[1] * 129), "129 tokens in a row: expected at most 128"),
    ],
    ids=["many", "negative", "given"],
)
def test_lengths_are_refused_before_anything_is_compared(model_folder, monkeypatch, capsys, words, message):
    monkeypatch.setattr("dcformer.conversion.cli.compare_tensors", None)
    assert verify(model_folder, model_folder, *words) == 1
    assert message in capsys.readouterr().err


def test_the_longest_comparison(model_folder):
    assert compare_logits(model_folder, model_folder, num_tokens=128).is_equal
    for options in ({"num_tokens": 129}, {"tokens": [1] * 129}):
        with pytest.raises(ConversionError, match=r"129.*at most 128, by the model's max_position_embeddings"):
            compare_logits(model_folder, model_folder, **options)


def test_the_default_number_of_tokens_is_never_too_many(tmp_path):
    DCFormerForCausalLM(tiny_config(max_position_embeddings=32)).save_pretrained(tmp_path)
    assert verify(tmp_path, tmp_path) == 0


def test_logits_of_other_vocabularies(model_folder, tmp_path):
    DCFormerForCausalLM(tiny_config(vocab_size=90)).save_pretrained(tmp_path / "small")
    with pytest.raises(ConversionError, match=r"tokens must be ids from 0 to 89 of .*small"):
        compare_logits(model_folder, tmp_path / "small", tokens=[95])
    with pytest.raises(ConversionError, match="vocabularies differ: 97 and 90"):
        compare_logits(model_folder, tmp_path / "small", tokens=[5])


def test_logits_of_damaged_folders(model_folder, copy, tmp_path):
    with pytest.raises(ConversionError, match="nowhere cannot be loaded as a model"):
        compare_logits(model_folder, tmp_path / "nowhere")
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConversionError, match="copy cannot be loaded as a model"):
        compare_logits(model_folder, copy)


# --- the command ------------------------------------------------------------------------------------------------------


def test_wrong_paths(model_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for wrong, match in (("nowhere", "does not exist"), ("empty", "not a JAX checkpoint"), ("file", "is a file")):
        for folders in ((model_folder, tmp_path / wrong), (tmp_path / wrong, model_folder)):
            assert verify(*folders) == 1
            captured = capsys.readouterr()
            assert captured.err.startswith(f"error: {tmp_path / wrong}") and match in captured.err
            assert "compared" not in captured.out


def test_options_of_each_side(model_folder, copy, tmp_path, capsys):
    """Steps, configurations and formats of the two sides do not get mixed up."""
    change_tensors(copy, set_value(QKW, 0, 7.0))
    (tmp_path / "jax").mkdir()
    for step, folder in ((1, model_folder), (2, copy)):
        convert_safetensors_to_jax(folder, tmp_path / str(step), format="pax", step=step, progress=False)
        shutil.move(tmp_path / str(step) / f"checkpoint_{step:08d}", tmp_path / "jax" / f"checkpoint_{step:08d}")
    (tmp_path / "given.yml").write_text("sliding_window: 5\n")
    assert verify(tmp_path / "jax", tmp_path / "jax") == 0
    assert verify(tmp_path / "jax", tmp_path / "jax", "--first-step", 1) == 1
    assert verify(tmp_path / "jax", tmp_path / "jax", "--first-step", 1, "--second-step", 1) == 0
    capsys.readouterr()
    assert verify(tmp_path / "jax", tmp_path / "jax", "--second-config", tmp_path / "given.yml") == 0
    first, second = capsys.readouterr().out.split(f"{tmp_path / 'jax'} (pax)")[1:]
    assert "assumed sliding_window = 256" in first and "assumed sliding_window" not in second
    assert verify(tmp_path / "jax", tmp_path / "jax", "--second-format", "maxtext") == 1
    assert "no parameters of a maxtext checkpoint" in capsys.readouterr().err


def test_table():
    rows = [
        Comparison("a.weight", "[2, 3] float32", 0.0, True),
        Comparison("b", "[4] float32 and bfloat16", 0.125, False),
        Comparison("logits", "[1, 2, 3] float32", 1e-6, True),
    ]
    assert format_table(rows).splitlines() == [
        "tensor  max |diff|  verdict    shape, dtypes",
        "b        1.250e-01  DIFFERENT  [4] float32 and bfloat16",
        "logits   1.000e-06  equal      [1, 2, 3] float32",
        "3 compared, 1 different",
    ]
    assert [line.split()[0] for line in format_table(rows, every=True).splitlines()] == [
        "tensor",
        "a.weight",
        "b",
        "logits",
        "3",
    ]
    assert format_table(rows[:1]) == "1 compared, 0 different"
