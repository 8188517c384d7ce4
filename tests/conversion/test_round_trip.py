"""Native -> JAX -> native gives the same bytes and the same configuration, whatever the model."""

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_stores import read_arrays, write_arrays
from safetensors.torch import load_file
from transformers import AutoConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.conversion import (
    ConversionError,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)

QUIET = {"progress": False}
SWITCHES = [f"compose_{name}" for name in ("pre", "post", "query", "key", "projection", "gate", "static")]
# What a JAX checkpoint does not hold; everything else is to be seen from its shapes, and from generators of zeros.
NOT_IN_SHAPES = [
    "model_type",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "norm_eps",
    "qk_norm_eps",
    "hidden_act",
    "compose_act",
    "use_parallel_residual",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "mixed": torch.float32}


def is_model(switches):
    stages, sides, static = switches[:2], switches[2:4], switches[6]
    return any(stages) == (any(sides) or static) and (any(switches[4:6]) or not any(sides))


VALID_SWITCHES = [
    dict(zip(SWITCHES, values, strict=True))
    for values in itertools.product([True, False], repeat=len(SWITCHES))
    if is_model(values)
]


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def configs(draw, format):
    """A model that the format can hold, of any size and kind. No two of its dimensions need be equal."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    head_dim = draw(st.sampled_from([2, 4, 6, 8]))
    letters = st.lists(st.sampled_from("LG"), min_size=1, max_size=8)
    fields = {
        "vocab_size": draw(st.integers(3, 20)),
        "hidden_size": draw(st.integers(1, 12)),
        "intermediate_size": draw(st.integers(1, 12)),
        "num_hidden_layers": draw(st.integers(1, 8)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(divisors(heads))),
        "head_dim": head_dim,
        "layer_pattern": draw(st.sampled_from(["LG", "LGLL", "LGL6", "G", "L"]) | letters),
        "sliding_window": draw(st.integers(2, 9)),
        "qk_norm": draw(st.booleans()),
        "qk_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 3e-5])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "compose_groups": draw(st.sampled_from(divisors(heads))),
        "compose_rank": draw(st.integers(1, 3)),
        "compose_act": draw(st.sampled_from(["gelu", "gelu_pytorch_tanh"])),
        "max_position_embeddings": draw(st.integers(16, 4096)),
        "bos_token_id": draw(st.none() | st.integers(0, 2)),
        "eos_token_id": draw(st.none() | st.integers(0, 2)),
    }
    fields |= draw(st.sampled_from(VALID_SWITCHES))
    if "L" not in fields["layer_pattern"] and draw(st.booleans()):
        fields["sliding_window"] = None
    rotated = draw(st.sampled_from([d for d in (2, 4, 6, 8) if d <= head_dim]))
    fields["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "partial_rotary_factor": rotated / head_dim,
    }
    if format == "maxtext":
        return DCFormerConfig(**fields)
    kind = draw(st.sampled_from(["gated", "plain", "multi-gate"]))
    if kind == "multi-gate":
        fields["mlp_gates"] = draw(st.sampled_from(divisors(fields["intermediate_size"])))
    fields |= {
        "mlp_type": "plain" if kind == "plain" else "gated",
        "hidden_act": draw(st.sampled_from(["gelu", "silu", "gelu_pytorch_tanh"])),
        "mlp_bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "norm_type": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "use_parallel_residual": draw(st.booleans()),
    }
    return draw(st.sampled_from([DCFormerConfig, DCPythiaConfig]))(**fields)


def fill(model, seed, dtype):
    """Values of every magnitude, zeros of both signs and numbers too small to be normal.

    LayerNorm scales, which Pax stores less one, get no negative zeros, and nothing so small that a double of
    magnitude one cannot tell it.
    """
    random = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        values = random.uniform(1, 2, shape) * 2.0 ** random.integers(-14, 10, shape) * random.choice([-1, 1], shape)
        special = [0.0, 1.0, 2.5, 0.4999]
        if not name.endswith("norm.weight"):
            special += [-0.0, torch.finfo(DTYPES[dtype]).smallest_normal / 4]
        values = np.where(random.random(shape) < 0.2, random.choice(special, shape), values)
        kind = torch.bfloat16 if dtype == "mixed" and name.endswith(("qkw", "_static")) else DTYPES[dtype]
        parameter.data = torch.from_numpy(values).to(kind)
    return model


def save(config, folder, seed=0, dtype="float32", max_shard_size="5GB"):
    model_class = DCPythiaForCausalLM if config.model_type == "dcpythia" else DCFormerForCausalLM
    fill(model_class(config), seed, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(found, expected):
    found, expected = tensors_of(found), tensors_of(expected)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_files(found, expected):
    """Every weight file byte for byte, so also the signs of zeros and the order of tensors."""
    assert_same_tensors(found, expected)
    files = sorted(file.name for file in expected.glob("*.safetensors"))
    assert sorted(file.name for file in found.glob("*.safetensors")) == files
    for file in files:
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file


def architecture(config):
    """Every field, without those that say nothing about this model because of the others."""
    fields = {name: getattr(config, name) for name in (*DCFormerConfig.__annotations__, "model_type")}
    fields["rope_parameters"] = {"partial_rotary_factor": 1.0} | config.rope_parameters
    unused = set()
    composed = [name for name in SWITCHES[:4] if fields[name]]
    unused |= {"compose_projection", "compose_gate", "compose_act"} if not config.compose_generators else set()
    unused |= {"compose_rank"} if not (config.compose_generators and config.compose_projection) else set()
    unused |= {"compose_groups"} if not composed else set()
    unused |= {"qk_norm_eps"} if not config.qk_norm else set()
    unused |= {"sliding_window"} if "sliding_attention" not in config.layer_types else set()
    return {name: value for name, value in fields.items() if name not in unused}


def stored_config(folder):
    return json.loads((folder / "config.json").read_text())


def state_of(root):
    """The folder with the arrays of a checkpoint with one step."""
    (state,) = root.glob("*/state")
    return state


def use_other_moments(state, ocdbt):
    """Overwrites the optimizer's moments, whose names are those of the parameters, with values of their own."""
    moments = read_arrays(state, "opt_state.", ocdbt=ocdbt)
    decoys = {f"opt_state.{n}": np.full_like(a, 777) for n, a in moments.items() if n.startswith(("mu.", "nu."))}
    assert len(decoys) == 2 * len(read_arrays(state, "params.", ocdbt=ocdbt))
    write_arrays(state, decoys, ocdbt=ocdbt)


def what_shapes_do_not_tell(config):
    told = [*NOT_IN_SHAPES, "tie_word_embeddings"] if config.tie_word_embeddings else NOT_IN_SHAPES
    return {name: getattr(config, name) for name in told if getattr(config, name) is not None}


def check_round_trip(config, folder, format, dtype="float32", seed=0, max_shard_size="5GB", decoys=False, **options):
    native = save(config, folder / "native", seed, dtype, max_shard_size)
    convert_safetensors_to_jax(native, folder / "jax", format=format, **options, **QUIET)
    if decoys:
        use_other_moments(state_of(folder / "jax"), options["ocdbt"])
    for name in ("beside", "inferred"):
        given_fields = None if name == "beside" else what_shapes_do_not_tell(config)
        convert_jax_to_safetensors(
            folder / "jax", folder / name, config=given_fields, max_shard_size=max_shard_size, **QUIET
        )
        assert_same_files(folder / name, native)
        (folder / "jax" / "config.json").unlink(missing_ok=True)
    assert stored_config(folder / "beside") == stored_config(native)
    found = AutoConfig.from_pretrained(folder / "inferred")
    assert architecture(found) == architecture(config)
    assert found.dtype == DTYPES[dtype]


def layers_per_block(draw, config):
    """None for the default, or any number that the pattern and the depth allow."""
    kinds, count = config.layer_types, config.num_hidden_layers
    return draw(st.none() | st.sampled_from([p for p in divisors(count) if kinds[:p] * (count // p) == kinds]))


@pytest.fixture(scope="module")
def orbax():
    return pytest.importorskip("orbax.checkpoint", reason="writing Orbax checkpoints needs pip install 'dcformer[jax]'")


common = {
    "data": st.data(),
    "dtype": st.sampled_from(list(DTYPES)),
    "seed": st.integers(0, 2**32 - 1),
    "max_shard_size": st.sampled_from(["5GB", 1000]),
    "step": st.integers(0, 999),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(config=configs("maxtext"), ocdbt=st.booleans(), with_train_state=st.booleans(), **common)
def test_maxtext(orbax, data, config, **options):
    options["layers_per_block"] = layers_per_block(data.draw, config)
    with tempfile.TemporaryDirectory() as folder:
        check_round_trip(config, Path(folder), "maxtext", decoys=options["with_train_state"], **options)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(config=configs("pax"), **common)
def test_pax(data, config, **options):
    options["layers_per_block"] = layers_per_block(data.draw, config)
    if not config.tie_word_embeddings:
        options["padded_vocab_size"] = data.draw(st.none() | st.integers(config.vocab_size, config.vocab_size + 5))
    with tempfile.TemporaryDirectory() as folder:
        check_round_trip(config, Path(folder), "pax", **options)


@settings(deadline=None, max_examples=4)
@given(config=configs("maxtext"), dtype=common["dtype"], seed=common["seed"], ocdbt=st.booleans())
def test_between_jax_formats(orbax, config, dtype, seed, ocdbt):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        native = save(config, folder / "native", seed, dtype)
        convert_safetensors_to_jax(native, folder / "first", format="maxtext", ocdbt=ocdbt, **QUIET)
        convert_safetensors_to_jax(folder / "first", folder / "pax", format="pax", **QUIET)
        convert_safetensors_to_jax(folder / "pax", folder / "second", format="maxtext", **QUIET)
        convert_jax_to_safetensors(folder / "second", folder / "back", **QUIET)
        assert_same_files(folder / "back", native)
        assert stored_config(folder / "back") == stored_config(native)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 1, "vocab_size": 3},  # layers' tensors of one element, cut out of larger ones
        {"layer_pattern": "G", "sliding_window": None},
        {"compose_groups": 2} | dict.fromkeys(SWITCHES[:4], False),  # groups of a model that composes nothing
    ],
)
@pytest.mark.parametrize("format", ["maxtext", "pax"])
def test_cases_that_once_failed(orbax, fields, format, tmp_path):
    config = DCFormerConfig(
        **{"vocab_size": 7, "hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 4, "sliding_window": 3}
        | {"num_attention_heads": 4, "head_dim": 2, "layer_pattern": "LG"}
        | fields
    )
    check_round_trip(config, tmp_path, format)


# Each once that differs: without dynamic weights, the switches of their two parts say nothing.
DIFFERENT_SWITCHES = [
    switches
    for switches in VALID_SWITCHES
    if switches["compose_query"]
    or switches["compose_key"]
    or (switches["compose_projection"] and switches["compose_gate"])
]


@pytest.mark.slow
@pytest.mark.parametrize("switches", DIFFERENT_SWITCHES, ids=lambda s: "-".join(n[8:] for n in SWITCHES if s[n]))
def test_every_switch_combination(switches, tmp_path):
    """All of them are seen in the checkpoint, the unused weight generators by their zeros."""
    config = DCFormerConfig(vocab_size=7, hidden_size=4, intermediate_size=5, num_hidden_layers=2, head_dim=2,
                            num_attention_heads=4, compose_groups=2, layer_pattern="G", **switches)  # fmt: skip
    native = save(config, tmp_path / "native")
    convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET)
    (tmp_path / "jax" / "config.json").unlink()
    opened = open_checkpoint(tmp_path / "jax", config=what_shapes_do_not_tell(config))
    assert architecture(opened.config) == architecture(config)
    expected = tensors_of(native)
    assert set(opened.shapes) == set(expected)
    for name, tensor in opened.tensors():
        assert torch.equal(tensor, expected[name]), name


def test_layers_of_several_dtypes_lose_nothing(tmp_path):
    """Stacked in one array they have the dtype that holds them all, whichever layer comes last."""
    model = DCFormerForCausalLM(tiny_config(layer_pattern="G"))
    for part in (model.model.layers[1], model.lm_head):
        part.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "native")
    convert_safetensors_to_jax(tmp_path / "native", tmp_path / "jax", format="pax", **QUIET)
    arrays = read_arrays(state_of(tmp_path / "jax"), "mdl_vars.params.lm.")
    bfloat16 = {name for name, array in arrays.items() if array.dtype.name == "bfloat16"}
    assert bfloat16 == {"softmax.logits_ffn.linear.w"}
    convert_jax_to_safetensors(tmp_path / "jax", tmp_path / "back", **QUIET)
    found, expected = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "native")
    assert all(torch.equal(found[name].double(), tensor.double()) for name, tensor in expected.items())
    assert stored_config(tmp_path / "back")["dtype"] == "float32"


# --- LayerNorm scales, which Pax stores less one ----------------------------------------------------------------------


def pythia_with_scale(folder, value, dtype):
    config = tiny_config(norm_type="layernorm")
    model = DCFormerForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = value
    model.save_pretrained(folder)
    return folder


def test_a_missing_bias_of_the_last_norm_is_named(tmp_path):
    native = pythia_with_scale(tmp_path / "native", 1.5, torch.float32)
    convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET)
    shutil.rmtree(state_of(tmp_path / "jax") / "mdl_vars.params.lm.final_ln.bias")
    with pytest.raises(ConversionError, match=r"lacks 1 of .*final_ln\.bias"):
        convert_jax_to_safetensors(tmp_path / "jax", tmp_path / "back", **QUIET)


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("bfloat16", 1.5, "bfloat16"),
        ("bfloat16", 0.10009765625, "float32"),
        ("bfloat16", 2.0**-30, "float64"),
        ("float16", 0.0999755859375, "float32"),
        ("float32", 0.7, "float32"),
        ("float32", 0.1, "float64"),
        ("float32", -1 - 2.0**-23, "float64"),
    ],
)
def test_scale_minus_one_is_exact(dtype, value, stored, tmp_path):
    """In a wider dtype where that is needed, for that array only, and the report says so."""
    native = pythia_with_scale(tmp_path / "native", value, DTYPES[dtype])
    report = convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET)
    name = "transformer.repeat.sub.x_layers_1.layer_norm.scale"
    arrays = read_arrays(state_of(tmp_path / "jax"), "mdl_vars.params.lm.")
    assert {n for n, array in arrays.items() if array.dtype.name != dtype} == ({name} if stored != dtype else set())
    assert arrays[name].dtype.name == stored
    assert arrays[name][0, 3] == np.float64(tensors_of(native)["model.layers.1.input_layernorm.weight"][3].double()) - 1
    assert (f"{name} is stored as {stored}" in str(report)) == (stored != dtype)
    convert_jax_to_safetensors(tmp_path / "jax", tmp_path / "back", **QUIET)
    assert_same_files(tmp_path / "back", native)


def test_scale_too_small_for_minus_one(tmp_path):
    native = pythia_with_scale(tmp_path / "native", 1e-30, torch.float32)
    report = convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET)
    assert "x_layers_1.layer_norm.scale: some values are too small for scale - 1 and were rounded" in str(report)
    convert_jax_to_safetensors(tmp_path / "jax", tmp_path / "back", **QUIET)
    found, expected = tensors_of(tmp_path / "back"), tensors_of(native)
    different = {name for name in expected if not torch.equal(found[name], expected[name])}
    assert different == {"model.layers.1.input_layernorm.weight"}
    expected["model.layers.1.input_layernorm.weight"][3] = 0
    assert torch.equal(
        found["model.layers.1.input_layernorm.weight"], expected["model.layers.1.input_layernorm.weight"]
    )


# --- what a format cannot hold ----------------------------------------------------------------------------------------


def refuse(native, folder, match, **options):
    with pytest.raises(ConversionError, match=match):
        convert_safetensors_to_jax(native, folder / "jax", **options, **QUIET)
    assert sorted(path.name for path in folder.iterdir()) == ["native"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"attention_bias": True}, r"model\.layers\.0\.self_attn\.\w_proj\.bias"),
        ({"mlp_bias": True}, r"model\.layers\.0\.mlp\.\w+_proj\.bias"),
        ({"norm_type": "layernorm"}, r"model\.\S*norm\.bias"),
        ({"mlp_type": "plain"}, r"model\.layers\.0\.mlp\.\w+_proj\.weight"),
        ({"mlp_gates": 4}, r"model\.layers\.0\.mlp\.multi_gate_proj\.weight"),
    ],
)
def test_models_that_maxtext_has_no_place_for(overrides, named, tmp_path):
    native = save(tiny_config(**overrides), tmp_path / "native")
    refuse(native, tmp_path, f"maxtext checkpoint has no place for .*{named}.*--format pax", format="maxtext")


@pytest.mark.parametrize(
    ("overrides", "options", "match"),
    [
        ({"num_hidden_layers": 6}, {"layers_per_block": 4}, "must divide the model's 6 layers"),
        ({"num_hidden_layers": 6}, {"layers_per_block": 3}, "a multiple of the 2 after which their windows repeat"),
        ({}, {"layers_per_block": 0}, "layers_per_block=0 must divide"),
        ({"num_hidden_layers": 0}, {}, "has no layers"),
        ({}, {"padded_vocab_size": 96}, "padded_vocab_size=96 is less than the model's vocab_size=97"),
        ({"tie_word_embeddings": True}, {"padded_vocab_size": 100}, "shares with its head"),
        ({}, {"format": "maxtext", "padded_vocab_size": 100}, "is for Pax"),
        ({}, {"ocdbt": True}, "--ocdbt is for MaxText"),
        ({}, {"with_train_state": True}, "--with-train-state is for MaxText"),
        ({}, {"ocbdt": True}, "ocbdt=True is not an option of any format: expected ocdbt, "),
        ({}, {"step": -1}, "step=-1: expected a whole number from 0 on"),
        ({}, {"step": "0"}, "step='0': expected a whole number"),
        ({}, {"format": "orbax"}, "format='orbax' is unknown"),
        ({}, {"dtype": "int8"}, "dtype='int8' is unknown"),
    ],
)
def test_options_that_do_not_apply(overrides, options, match, tmp_path):
    native = save(tiny_config(**overrides), tmp_path / "native")
    refuse(native, tmp_path, match, **({"format": "pax"} | options))


@pytest.mark.parametrize(("hidden_act", "named"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu")])
def test_the_activation_is_told_to_the_trainer(orbax, hidden_act, named, tmp_path):
    native = save(tiny_config(hidden_act=hidden_act), tmp_path / "native")
    report = convert_safetensors_to_jax(native, tmp_path / "jax", format="maxtext", **QUIET)
    assert yaml.safe_load((tmp_path / "jax" / "maxtext.yml").read_text())["mlp_activations"] == [named, "linear"]
    assert f'MLP activation: "{hidden_act}"' in str(report)


def test_rope_is_told_to_the_trainer(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    native = save(tiny_config(rope_parameters=rope), tmp_path / "native")
    report = str(convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET))
    assert 'RoPE base: 500000.0; RoPE type: "linear"; rotated part of a head: 0.5' in report
    assert open_checkpoint(tmp_path / "jax").config.rope_parameters == rope


def test_a_window_of_null_in_a_file(tmp_path):
    """`sliding_window: null` in a file means a model without local layers, as it does for `DCFormerConfig`."""
    native = save(tiny_config(), tmp_path / "native")
    convert_safetensors_to_jax(native, tmp_path / "jax", format="pax", **QUIET)
    (tmp_path / "given.json").write_text('{"sliding_window": null, "norm_eps": 1e-5}')
    config = open_checkpoint(tmp_path / "jax", config=tmp_path / "given.json").config
    assert (config.sliding_window, config.layer_types) == (None, ["full_attention"] * 2)
