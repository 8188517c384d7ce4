"""A JAX checkpoint's configuration: what shapes tell, what a file tells, what is assumed, and contradictions."""

import json

import numpy as np
import pytest
import torch
import yaml
from helpers import tiny_config
from jax_reference import random_maxtext_params, random_pax_params
from jax_stores import write_maxtext, write_pax

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig
from dcformer.conversion import ConversionError, convert_safetensors_to_jax, open_checkpoint
from dcformer.conversion.inference import read_config_file

MAXTEXT_YAML = """
base_config: "base.yml"
run_name: ""
decoder_block: dcformer
base_emb_dim: 32
base_num_query_heads: 4
base_num_kv_heads: 4
base_mlp_dim: 48
base_num_decoder_layers: 4
head_dim: 8
vocab_size: 97
mlp_activations: ["silu", "linear"]
window_size: [5, null]
num_layers_per_block: 2
qk_norm: True
static_proj: False
pre_compose: True
post_compose: True
query_wise: True
key_wise: True
normalization_layer_epsilon: 1.e-05
max_target_length: 512
rope_max_timescale: 50000
dtype: bfloat16
learning_rate: 3.e-4
"""

AUTHORS_JSON = {
    "architectures": ["DCFormer"],
    "auto_map": {"AutoModelForCausalLM": "modeling_dcformer.DCFormer"},
    "block_size": 512,
    "bos_token_id": 1,
    "dim": 32,
    "eos_token_id": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "is_training": False,
    "mgate": False,
    "mgate_dim": 44,
    "model_type": "dcformer",
    "n_head": 4,
    "n_layer": 4,
    "n_local_heads": 4,
    "norm_eps": 1e-06,
    "q_chunk_size": 128,
    "query_wise": False,
    "rope_base": 50000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_dcmha": True,
    "use_qk_norm": True,
    "vocab_size": 97,
    "window_size": 5,
    "window_type": None,
}


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


@pytest.fixture
def maxtext(tmp_path):
    return write_maxtext(tmp_path / "state", random_maxtext_params(seed=1))


def written(tmp_path, content):
    file = tmp_path / "given"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize("seed", range(8))
def test_shapes_of_maxtext(seed, tmp_path):
    rng = np.random.default_rng(seed)
    P, H = int(rng.choice([1, 2, 4])), int(rng.choice([2, 4, 6]))
    G = int(rng.choice([g for g in (1, 2, 3) if H % g == 0]))
    sizes = {
        "V": int(rng.integers(50, 99)),
        "E": int(rng.choice([24, 40])),
        "L": P * int(rng.integers(1, 4)),
        "P": P,
        "H": H,
        "Hkv": H // 2,
        "D": 6,
        "F": int(rng.choice([20, 52])),
        "G": G,
        "R": int(rng.integers(1, 4)),
        "qk_norm": bool(rng.integers(2)),
        "static": bool(rng.integers(2)),
    }
    write_maxtext(tmp_path / "state", random_maxtext_params(seed=seed, **sizes))
    config = open_checkpoint(tmp_path).config
    assert type(config) is DCFormerConfig
    found = {
        "V": config.vocab_size,
        "E": config.hidden_size,
        "L": config.num_hidden_layers,
        "P": P,
        "H": config.num_attention_heads,
        "Hkv": config.num_key_value_heads,
        "D": config.head_dim,
        "F": config.intermediate_size,
        "G": config.compose_groups,
        "R": config.compose_rank,
        "qk_norm": config.qk_norm,
        "static": config.compose_static,
    }
    assert found == sizes
    pattern = {1: "G", 2: "LG", 4: "LGLL"}[P]
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    assert config.layer_types == [kinds[letter] for letter in pattern] * (sizes["L"] // P)


def test_what_maxtext_assumes(maxtext):
    opened = open_checkpoint(maxtext)
    config = opened.config
    assert (config.norm_eps, config.qk_norm_eps, config.compose_act) == (1e-5, 1e-5, "gelu_pytorch_tanh")
    assert (config.sliding_window, config.hidden_act) == (256, "silu")
    assert config.rope_parameters["rope_theta"] == 10000
    for name in ("compose_act", "layer_pattern", "norm_eps", "qk_norm_eps", "rope_theta", "sliding_window"):
        assert any(note.startswith(f"assumed {name} = ") for note in opened.notes), name


@pytest.mark.parametrize("kept", ["pre", "post"])
def test_a_stage_without_a_static_projection_is_off_and_named(kept, tmp_path):
    """Whatever its generators are: a stage that is composed has a static projection where the other one has."""
    params = random_maxtext_params(seed=3, static=True)
    off = {"pre": "post", "post": "pre"}[kept]
    write_maxtext(tmp_path / "state", {name: value for name, value in params.items() if f"{off}_proj" not in name})
    opened = open_checkpoint(tmp_path)
    assert getattr(opened.config, f"compose_{kept}") and not getattr(opened.config, f"compose_{off}")
    assert f"switched off: compose_{off}" in opened.notes
    write_maxtext(tmp_path / "whole" / "state", params)
    assert not any("switched off" in note for note in open_checkpoint(tmp_path / "whole").notes)


@pytest.mark.parametrize("mlp", ["plain", "gated", "multi-gate"])
@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_shapes_of_pax(mlp, layer_norm, biases, tmp_path):
    params = random_pax_params(seed=2, mlp=mlp, layer_norm=layer_norm, biases=biases, padded_V=112)
    if biases and mlp != "plain":
        for s in range(2):
            prefix = f"transformer.repeat.sub.x_layers_{s}.ff_layer.ffn_layer1"
            params[f"{prefix}_gate.bias.b"] = params[f"{prefix}.bias.b"]
    write_pax(tmp_path / "state", params)
    opened = open_checkpoint(tmp_path)
    config = opened.config
    assert type(config) is (DCPythiaConfig if layer_norm else DCFormerConfig)
    assert config.vocab_size == 97
    assert "vocabulary: the first 97 of 112 stored rows were kept" in opened.notes
    assert config.mlp_type == ("plain" if mlp == "plain" else "gated")
    assert config.mlp_gates == (4 if mlp == "multi-gate" else 0)
    assert config.mlp_bias == config.attention_bias == biases
    assert config.norm_type == ("layernorm" if layer_norm else "rmsnorm")
    assert config.use_parallel_residual == layer_norm
    assert config.rope_parameters["partial_rotary_factor"] == (0.25 if layer_norm else 1.0)
    assert (config.norm_eps, config.qk_norm_eps) == (1e-5 if layer_norm else 1e-6, 1e-6)
    assert config.hidden_act == ("gelu" if mlp == "plain" else "silu")


def test_maxtext_yaml(maxtext, tmp_path):
    opened = open_checkpoint(maxtext, config=written(tmp_path, MAXTEXT_YAML))
    config = opened.config
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (config.sliding_window, config.max_position_embeddings) == (5, 512)
    assert config.rope_parameters["rope_theta"] == 50000
    assert config.compose_act == "gelu_pytorch_tanh"
    assumed = [note for note in opened.notes if note.startswith("assumed")]
    assert not any(word in note for note in assumed for word in ("window", "pattern", "eps", "rope_theta", "max_pos"))


@pytest.mark.parametrize(
    ("switch", "field"),
    [
        ("pre_compose", "compose_pre"),
        ("post_compose", "compose_post"),
        ("query_wise", "compose_query"),
        ("key_wise", "compose_key"),
    ],
)
def test_maxtext_yaml_turns_off(maxtext, tmp_path, switch, field):
    content = yaml.safe_load(MAXTEXT_YAML) | {switch: False}
    config = open_checkpoint(maxtext, config=written(tmp_path, yaml.safe_dump(content))).config
    assert not getattr(config, field)
    assert len(config.compose_generators) == 2


def test_authors_config(maxtext, tmp_path):
    config = open_checkpoint(maxtext, config=written(tmp_path, AUTHORS_JSON)).config
    assert (config.sliding_window, config.max_position_embeddings, config.norm_eps) == (5, 512, 1e-6)
    assert config.rope_parameters["rope_theta"] == 50000
    # another GELU holds for the authors' PyTorch code only; of the trainer all norms have one epsilon
    assert (config.compose_act, config.qk_norm_eps) == ("gelu_pytorch_tanh", 1e-6)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sliding_window": 7}, {"sliding_window": 7}),
        ({"layer_pattern": "GL"}, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ({"layer_pattern": "G"}, {"layer_types": ["full_attention"] * 4}),
        ({"layer_types": ["full_attention"] * 4}, {"layer_types": ["full_attention"] * 4}),
        ({"rope_theta": 5e5}, {"rope_parameters": ROPE | {"rope_theta": 5e5}}),
        ({"norm_eps": 1e-6}, {"norm_eps": 1e-6, "qk_norm_eps": 1e-6}),
        ({"norm_eps": 1e-6, "qk_norm_eps": 1e-5}, {"norm_eps": 1e-6, "qk_norm_eps": 1e-5}),
        ({"sliding_window": 7, "normalization_layer_epsilon": 1e-3}, {"sliding_window": 7, "qk_norm_eps": 1e-3}),
        ({"sliding_window": 7, "max_target_length": 64}, {"sliding_window": 7, "max_position_embeddings": 64}),
        ({"sliding_window": None, "layer_pattern": "G", "rope_max_timescale": 5e5}, {"sliding_window": None}),
        ({"compose_act": "gelu"}, {"compose_act": "gelu"}),
        ({"compose_key": False}, {"compose_key": False, "compose_query": True}),
        ({"vocab_size": 90}, {"vocab_size": 90}),
        ({"eos_token_id": 3, "model_type": "dcformer"}, {"eos_token_id": 3}),
        ({"window_size": [9, None]}, {"sliding_window": 9}),
        ({"window_size": [9, "None"]}, {"sliding_window": 9}),
        ({"window_size": [9, 4096], "max_target_length": 4096}, {"sliding_window": 9, "max_position_embeddings": 4096}),
        ({"window_size": 7}, {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}),
        ({"block_size": 64, "window_size": 6}, {"sliding_window": 6, "max_position_embeddings": 64}),
        ({"block_size": 64, "query_wise": True}, {"compose_key": False, "compose_query": True}),
        ({"rope_base": 5e5}, {"rope_parameters": ROPE | {"rope_theta": 5e5}}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_parameters": ROPE | {"rope_theta": 5e5}}),
        ({"window_type": "LG"}, {"sliding_window": 256}),
        ({"qk_norm": "True", "num_layers_per_block": 2}, {"qk_norm": True}),
        ({"mlp_activations": ["gelu", "linear"]}, {"hidden_act": "gelu_pytorch_tanh"}),
        ({"base_emb_dim": 64, "emb_dim": 32}, {"hidden_size": 32}),
        ({"pre_compose": False, "post_compose": False}, {"compose_pre": False, "compose_query": False}),
        ({"window_size": [None, None]}, {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_partial_configs(maxtext, tmp_path, given, expected):
    config = open_checkpoint(maxtext, config=written(tmp_path, given)).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_keys_that_contradict_each_other(maxtext, tmp_path):
    given = {"sliding_window": 7, "window_size": [9, None], "max_target_length": 64}
    with pytest.raises(ConversionError, match="sliding_window=7 beside MaxText's own keys, which say 9"):
        open_checkpoint(maxtext, config=written(tmp_path, given))


def test_a_window_and_blocks_that_do_not_say_whose(tmp_path):
    config = tiny_config(num_hidden_layers=6, layer_pattern="LGG")
    DCFormerForCausalLM(config).save_pretrained(tmp_path / "native")
    convert_safetensors_to_jax(tmp_path / "native", tmp_path / "jax", format="maxtext", progress=False)
    (tmp_path / "jax" / "config.json").unlink()
    with pytest.raises(ConversionError, match="sliding_window=8, and blocks of 3 layers do not say which"):
        open_checkpoint(tmp_path / "jax", config={"sliding_window": 8})
    given = {"sliding_window": 8, "layer_pattern": "LGG"}
    assert open_checkpoint(tmp_path / "jax", config=given).config.layer_types == config.layer_types
    with pytest.raises(ConversionError, match="model_type='llama': expected dcformer or dcpythia"):
        open_checkpoint(tmp_path / "jax", config=written(tmp_path, {"model_type": "llama"}))


def test_exponents_without_a_dot_in_yaml(tmp_path):
    assert read_config_file(written(tmp_path, "norm_eps: 1e-6\nsliding_window: 4\n"))["norm_eps"] == 1e-6
    assert read_config_file(written(tmp_path, "normalization_layer_epsilon: 1e-6\n"))["norm_eps"] == 1e-6


def test_smaller_vocabulary(maxtext):
    opened = open_checkpoint(maxtext, config={"vocab_size": 90})
    assert "vocabulary: the first 90 of 97 stored rows were kept" in opened.notes
    tensors = dict(opened.tensors())
    assert tensors["model.embed_tokens.weight"].shape == tensors["lm_head.weight"].shape == (90, 32)


@pytest.mark.parametrize(
    "given",
    [
        {"vocab_size": 98},
        {"hidden_size": 64},
        {"num_attention_heads": 8},
        {"num_key_value_heads": 2},
        {"head_dim": 16},
        {"intermediate_size": 49},
        {"qk_norm": False},
        {"compose_static": True},
        {"compose_rank": 1},
        {"compose_groups": 2},
        {"compose_gate": False},
        {"mlp_type": "plain"},
        {"attention_bias": True},
        {"norm_type": "layernorm"},
        {"tie_word_embeddings": True},
    ],
)
def test_contradictions(maxtext, given):
    ((name, value),) = given.items()
    with pytest.raises(ConversionError, match=f"{name}={value!r}, the checkpoint shows"):
        open_checkpoint(maxtext, config=given)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("- 1\n- 2\n", "holds a list"),
        ('{"hiden_size": 3}', "unknown fields 'hiden_size'"),
        ("a: [1,\n", "cannot be read as JSON or YAML"),
        ('{"window_size": [4, 8]}', "one number for all local layers"),
        ('{"sliding_window": "many"}', "is invalid"),
        ('{"compose_act": "relu"}', "is invalid.*compose_act"),
        ('{"norm_eps": "abc"}', "norm_eps='abc' is not a number"),
        ('{"query_wise": true}', "query_wise means one thing"),
        ('{"mlp_activations": ["tanh", "linear"]}', "mlp_activations"),
    ],
)
def test_bad_config_files(maxtext, tmp_path, content, match):
    with pytest.raises(ConversionError, match=match):
        open_checkpoint(maxtext, config=written(tmp_path, content))


def test_missing_config_file(maxtext, tmp_path):
    with pytest.raises(ConversionError, match="cannot be read"):
        open_checkpoint(maxtext, config=tmp_path / "nowhere.json")


@pytest.mark.parametrize("used", [[0], [1], [2, 3], [0, 2], [1, 3], [0, 1]])
def test_unused_generators_are_left_out(used, tmp_path):
    """Generators of zeros add nothing; the switches that they leave on are those of the others."""
    params = random_maxtext_params(seed=3)
    off = [c for c in range(4) if c not in used]
    for name, array in params.items():
        if name.endswith(".qkw"):
            array[:, :, off] = 0
        if name.endswith("dd.kernel"):
            array.reshape(*array.shape[:-1], 4, -1)[..., off, :] = 0
    write_maxtext(tmp_path / "state", params)
    config = open_checkpoint(tmp_path).config
    stages, sides = {"pre": [0, 1], "post": [2, 3]}, {"query": [0, 2], "key": [1, 3]}
    for name, members in (stages | sides).items():
        assert getattr(config, f"compose_{name}") == bool(set(members) & set(used)), name


def test_two_generators_need_a_configuration(tmp_path):
    params = random_maxtext_params(seed=3)
    for name, array in params.items():
        if name.endswith("dw1.kernel"):
            params[name] = array[:, :, :, :2]
        elif name.endswith(".qkw"):
            params[name] = array[:, :, :2]
        elif name.endswith("dd.kernel"):
            params[name] = array[..., : array.shape[-1] // 2]
    write_maxtext(tmp_path / "state", params)
    with pytest.raises(ConversionError, match="holds 2 weight generators, which may be"):
        open_checkpoint(tmp_path)
    opened = open_checkpoint(tmp_path, config={"compose_key": False})
    assert opened.config.compose_generators == (("pre", "query"), ("post", "query"))
    dict(opened.tensors())
    with pytest.raises(ConversionError, match="has 4 weight generators"):
        open_checkpoint(tmp_path, config={"compose_key": True})


def test_the_written_maxtext_config_describes_the_model(tmp_path):
    """`maxtext.yml` beside a converted checkpoint is enough for the way back."""
    config = DCFormerConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        layer_pattern="LG",
        sliding_window=6,
        qk_norm=True,
        norm_eps=1e-5,
        compose_key=False,
        compose_act="gelu_pytorch_tanh",
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        max_position_embeddings=333,
    )
    DCFormerForCausalLM(config).save_pretrained(tmp_path / "native")
    convert_safetensors_to_jax(tmp_path / "native", tmp_path / "jax", format="maxtext", progress=False)
    (tmp_path / "jax" / "config.json").unlink()
    back = open_checkpoint(tmp_path / "jax", config=tmp_path / "jax" / "maxtext.yml").config
    names = ("layer_types", "sliding_window", "norm_eps", "qk_norm_eps", "max_position_embeddings", "compose_key")
    assert {n: getattr(back, n) for n in names} == {n: getattr(config, n) for n in names}
    assert back.rope_parameters["rope_theta"] == 20000


def test_tied_embeddings_of_maxtext(tmp_path):
    write_maxtext(tmp_path / "state", random_maxtext_params(seed=3, tied=True))
    opened = open_checkpoint(tmp_path / "state", config={"tie_word_embeddings": True})
    assert opened.config.tie_word_embeddings
    assert "assumed normalize_embedding_logits = False" in opened.notes
    given = {"logits_via_embedding": True, "normalize_embedding_logits": True}
    with pytest.raises(ConversionError, match="normalize_embedding_logits divides"):
        open_checkpoint(tmp_path / "state", config=written(tmp_path, given))


@pytest.mark.parametrize("given", [{"rope_base": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}])
def test_another_rope_base_keeps_pythias_quarter(given, tmp_path):
    write_pax(tmp_path / "state", random_pax_params(seed=2))
    rope = open_checkpoint(tmp_path, config=written(tmp_path, given)).config.rope_parameters
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (5e5, 0.25)


def test_bfloat16_scales_less_one_lose_nothing(tmp_path):
    """1 + a bfloat16 scale takes more than bfloat16."""
    params = {name: array.astype("bfloat16") for name, array in random_pax_params(seed=2).items()}
    write_pax(tmp_path / "state", params)
    opened = open_checkpoint(tmp_path)
    scale = opened.read("model.norm.weight")
    assert scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.numpy(), 1 + params["final_ln.scale"].astype(np.float32))
    assert opened.read("model.norm.bias").dtype == torch.bfloat16
