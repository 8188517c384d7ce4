"""Configurations in the hub format are read, and never written."""

import copy
import json
import re

import pytest
import torch
from helpers import documented_rows, fields_of, tiny_config
from transformers import AutoConfig

from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.analysis import num_compose_parameters
from dcformer.hub_dcformer import StoredWeights, complete_config
from dcformer.legacy_dcformer import is_hub_config, native_fields, undecided_fields

L, G = "sliding_attention", "full_attention"

HUB_2_8B = {
    "model_type": "dcformer",
    "architectures": ["DCFormer"],
    "auto_map": {
        "AutoConfig": "configuration_dcformer.DCFormerConfig",
        "AutoModelForCausalLM": "modeling_dcformer.DCFormer",
    },
    "block_size": 2048,
    "dim": 2560,
    "head_dim": 80,
    "intermediate_size": 6912,
    "n_head": 32,
    "n_layer": 32,
    "n_local_heads": 32,
    "norm_eps": 1e-6,
    "rope_base": 10000,
    "use_qk_norm": True,
    "use_dcmha": True,
    "query_wise": False,
    "q_chunk_size": 128,
    "window_size": 256,
    "window_type": None,
    "vocab_size": 50257,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "is_training": False,
    "use_gradient_checkpointing": False,
}
HUB_PYTHIA_6_9B = HUB_2_8B | {
    "model_type": "dcpythia",
    "architectures": ["DCPythia"],
    "dim": 4096,
    "head_dim": 128,
    "intermediate_size": 16384,
    "norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "use_linear_bias": True,
    "use_parallel_residual": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HUB_8B = HUB_2_8B | {
    "dim": 4096,
    "head_dim": 128,
    "intermediate_size": 5632,
    "mgate": True,
    "mgate_dim": 44,
    "block_size": 4096,
    "rope_base": 500000,
    "window_type": "LGLL",
    "vocab_size": 152064,
    "n_layer": 48,
    "prefill_pad": True,
}
HUB_KEYS = (  # everything of theirs that is not also a name of ours or of Transformers
    "block_size",
    "dim",
    "n_head",
    "n_layer",
    "n_local_heads",
    "rope_base",
    "use_qk_norm",
    "use_dcmha",
    "query_wise",
    "q_chunk_size",
    "window_size",
    "window_type",
    "torch_dtype",
    "is_training",
    "use_gradient_checkpointing",
    "rotary_pct",
    "use_linear_bias",
    "mgate",
    "mgate_dim",
    "prefill_pad",
    "auto_map",
)


@pytest.mark.parametrize(
    ("stored", "preset", "architecture"),
    [
        (HUB_2_8B, "dcformer-2.8b", "DCFormerForCausalLM"),
        (HUB_PYTHIA_6_9B, "dcpythia-6.9b", "DCPythiaForCausalLM"),
        (HUB_8B, "dcformer-8b-mgate", "DCFormerForCausalLM"),
    ],
    ids=["DCFormer-2.8B", "DCPythia-6.9B", "8B"],
)
def test_hub_configurations_are_read_and_never_written(stored, preset, architecture, tmp_path):
    """The config.json of a hub repository gives the checkpoint's preset; once saved, none of its keys are left."""
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(stored))
    config = AutoConfig.from_pretrained(hub)
    of_the_checkpoint = {
        "dtype": torch.float16,
        "bos_token_id": stored["bos_token_id"],
        "eos_token_id": stored["eos_token_id"],
        "architectures": [architecture],
    }
    expected = DCFormerConfig.from_preset(preset, **of_the_checkpoint)
    assert type(config) is type(expected)
    assert fields_of(config) == fields_of(expected)
    assert not [key for key in HUB_KEYS if key != "torch_dtype" and hasattr(config, key)]

    config.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not set(stored) & set(HUB_KEYS)
    again = AutoConfig.from_pretrained(tmp_path / "saved")
    assert type(again) is type(config)
    assert fields_of(again) == fields_of(config)


def hub_config(**fields) -> DCFormerConfig:
    """A small configuration in the hub format."""
    small = {"dim": 64, "n_head": 4, "n_layer": 4, "intermediate_size": 160, "vocab_size": 128, "block_size": 64}
    return DCFormerConfig.from_dict(small | fields)


def test_hub_head_dim():
    assert hub_config().head_dim == 16
    assert hub_config(head_dim=24).head_dim == 24


@pytest.mark.parametrize(
    ("fields", "window", "layer_types"),
    [
        ({}, 256, [L, G, L, G]),
        ({"window_type": None, "window_size": 8}, 8, [L, G, L, G]),
        ({"window_type": "LG", "window_size": 8}, 256, [L, G, L, G]),  # a named pattern means 256 in their code
        ({"window_type": "LGLL", "window_size": 8}, 256, [L, G, L, L]),
        ({"window_type": "LGL6", "n_layer": 9}, 256, [L, G, L, L, L, L, L, L, L]),
        ({"window_type": None, "window_size": None}, None, [G, G, G, G]),
    ],
    ids=str,
)
def test_hub_windows(fields, window, layer_types):
    config = hub_config(**fields)
    assert (config.sliding_window, config.layer_types) == (window, layer_types)


def test_hub_query_wise_means_no_key_wise_composition():
    config = hub_config(query_wise=True)
    assert config.compose_generators == (("pre", "query"), ("post", "query"))


def test_hub_without_dcmha_is_a_plain_transformer():
    config = hub_config(use_dcmha=False)
    assert config.compose_generators == ()
    assert num_compose_parameters(config) == 0


@pytest.mark.parametrize(("n_local_heads", "expected"), [(-1, 4), (None, 4), (4, 4), (2, 2), (1, 1)])
def test_hub_local_heads(n_local_heads, expected):
    assert hub_config(n_local_heads=n_local_heads).num_key_value_heads == expected


def test_hub_norms_gates_biases_and_rope():
    config = hub_config(norm_eps=1e-5, rope_base=500000)
    assert (config.norm_eps, config.qk_norm_eps, config.qk_norm) == (1e-5, 1e-6, False)  # off unless it says so
    assert config.compose_act == "gelu"
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert hub_config(use_qk_norm=True).qk_norm
    assert hub_config(mgate=False, mgate_dim=44).mlp_gates == 0
    assert hub_config(mgate=True, mgate_dim=8).mlp_gates == 8
    assert hub_config(mgate=True, intermediate_size=440).mlp_gates == 44
    biased = hub_config(use_linear_bias=True, rotary_pct=0.25)
    assert biased.attention_bias and biased.mlp_bias
    assert biased.rope_parameters["partial_rotary_factor"] == 0.25
    unbiased = DCPythiaConfig.from_dict(HUB_PYTHIA_6_9B | {"use_linear_bias": False})
    assert not unbiased.attention_bias and not unbiased.mlp_bias


@pytest.mark.parametrize(
    ("fields", "expected", "is_open"),
    [
        ({}, False, True),
        ({"use_sw": None}, False, True),
        ({"use_sw": True}, True, False),
        ({"use_sw": False}, False, False),
        ({"static_proj": True}, True, False),
        ({"use_sw": True, "static_proj": True}, True, False),
        ({"compose_static": True}, True, False),
        ({"compose_static": False}, False, False),
    ],
    ids=str,
)
def test_hub_static_projection(fields, expected, is_open):
    """What the authors' keys do not say is left to the stored tensors."""
    config = hub_config(**fields)
    assert config.compose_static is expected
    assert ("compose_static" in config.undecided_fields) is is_open
    assert not {"undecided_fields", "use_sw", "static_proj"} & set(config.to_dict())
    stored = StoredWeights({"layers.0.attention.dyn_w_proj.qkw": (2, 4, 4, 2, 2)}, has_static=True)
    complete = complete_config(config, stored)
    assert complete.compose_static is (True if is_open else expected)
    assert (complete.compose_groups, complete.compose_rank, complete.undecided_fields) == (2, 1, None)
    assert ("layers.*.self_attn.compose.pre_static" in complete.base_model_tp_plan) is complete.compose_static
    assert config.compose_static is expected and config.undecided_fields


def test_hub_static_projection_contradicted():
    with pytest.raises(ValueError, match=r"use_sw.*static_proj.*contradict"):
        hub_config(use_sw=True, static_proj=False)


def test_only_hub_configurations_leave_fields_undecided():
    assert hub_config().undecided_fields == ("compose_groups", "compose_rank", "compose_static")
    assert hub_config(compose_rank=1, use_sw=False).undecided_fields == ("compose_groups", "compose_rank")
    assert DCFormerConfig().undecided_fields == DCPythiaConfig().undecided_fields is None
    stored = StoredWeights({"layers.0.attention.dyn_w_proj.qkw": (2, 4, 4, 10, 2)}, has_static=True)
    assert complete_config(tiny_config(), stored).to_dict() == tiny_config().to_dict()


def test_what_is_read_is_not_changed():
    for keys in (HUB_2_8B, HUB_PYTHIA_6_9B, HUB_8B):
        before = copy.deepcopy(keys)
        fields = native_fields(keys)
        assert keys == before and not set(fields) & (set(HUB_KEYS) - {"torch_dtype"})
        assert is_hub_config(keys) and not is_hub_config(fields)
        assert undecided_fields(keys) == ("compose_groups", "compose_rank", "compose_static")


def test_hub_keys_are_no_arguments():
    with pytest.raises(ValueError, match=r"dim, n_head: of the hub format.*from_dict"):
        DCFormerConfig(dim=64, n_head=4)


def test_hub_torch_dtype():
    assert hub_config(torch_dtype="bfloat16").dtype == torch.bfloat16
    assert hub_config().dtype is None


def test_the_reference_lists_the_hub_keys():
    documented = " ".join(row[0] for row in documented_rows("Keys of the hub format"))
    assert set(re.findall(r"`([^`]+)`", documented)) == {*HUB_KEYS, "architectures"}
