"""Fields of DCViT, their validation, and the sizes of the paper's Table 7."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig

from dcformer import DCViTConfig, DCViTForImageClassification
from dcformer.vision import VISION_PRESETS


@pytest.mark.parametrize(
    ("preset", "parameters"), [("vit-s/16", 22_122_472), ("dcvit-s/16", 22_705_480), ("vit-m/16", 38_999_016)]
)
def test_parameters_of_table_7(preset, parameters):
    with torch.device("meta"):
        model = DCViTForImageClassification(DCViTConfig.from_preset(preset))
    assert model.num_parameters() == parameters
    named = dict(model.named_parameters())
    composition = sum(p.numel() for name, p in named.items() if ".compose." in name)
    norms = sum(p.numel() for name, p in named.items() if "q_norm" in name or "k_norm" in name)
    assert (composition, norms) == ((581_472, 1_536) if preset == "dcvit-s/16" else (0, 0))


def test_defaults_are_the_papers():
    config = DCViTConfig(num_labels=1000)
    preset = DCViTConfig.from_preset("dcvit-s/16")
    assert config.compose_gate_init == 0.05 and preset.compose_gate_init == 0.005  # the paper's, the fork's
    config.compose_gate_init = 0.005
    assert config.to_dict() == preset.to_dict()
    assert (config.position_embedding_type, config.pooling, config.qk_norm) == ("sincos2d", "mean", "layernorm")
    assert config.representation_size == config.hidden_size == 384 and config.compose_static
    assert DCViTConfig(hidden_size=64, num_attention_heads=4).representation_size == 64


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": None, "representation_size": None, "pooling": "cls", "position_embedding_type": "learned"},
        {"representation_size": 24, "image_size": [32, 48], "patch_size": [16, 8], "num_labels": 7},
    ],
)
def test_stored_and_read(fields, tmp_path):
    config = DCViTConfig(**fields)
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is DCViTConfig
    for name in ("qk_norm", "representation_size", "pooling", "position_embedding_type", "num_labels", "grid"):
        assert getattr(read, name) == getattr(config, name), name
    different = {key: (a, b) for key, a in config.to_dict().items() if a != (b := read.to_dict()[key])}
    assert different.keys() <= {"_name_or_path", "architectures", "transformers_version"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"image_size": 225}, "image_size=225"),
        ({"image_size": [32, 33]}, "image_size=[32, 33]"),
        ({"image_size": [32, 32, 3]}, "[height, width]"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"num_attention_heads": 5}, "num_attention_heads=5"),
        ({"hidden_size": 6, "num_attention_heads": 1}, "hidden_size=6"),
        ({"num_channels": 0}, "num_channels=0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        *(({"layer_norm_eps": bad}, f"layer_norm_eps={bad}") for bad in (-1.0, float("nan"), float("inf"))),
        ({"pooling": "max"}, "pooling='max'"),
        ({"qk_norm": "rmsnorm"}, "qk_norm='rmsnorm'"),
        ({"position_embedding_type": "rope"}, "position_embedding_type='rope'"),
        ({"representation_size": 0}, "representation_size=0"),
        ({"hidden_act": "glu"}, "hidden_act='glu'"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob=1.0"),
        *(({"compose_gate_init": bad}, f"compose_gate_init={bad}") for bad in (-1.0, float("nan"), float("inf"))),
        ({"compose_groups": 4}, "compose_groups=4"),
        ({"compose_gates": True}, "unknown fields of composition: compose_gates. Expected some of compose_rank,"),
        ({"compose_pre": False, "compose_post": False}, "compose_pre and compose_post are both off"),
    ],
)
def test_invalid_fields_are_named(fields, named):
    with pytest.raises(ValueError) as error:
        DCViTConfig(**fields)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "initializer_range", "grid"])
def test_what_follows_from_fields_cannot_be_given(name, tmp_path):
    DCViTConfig().save_pretrained(tmp_path)
    for call in (DCViTConfig, partial(DCViTConfig.from_pretrained, tmp_path)):
        with pytest.raises(ValueError, match=rf"^{name}=6 cannot be given: .*\. Leave it out\.$"):
            call(**{name: 6})


def test_a_field_broken_later_is_refused():
    config = DCViTConfig()
    config.pooling = "max"
    with pytest.raises(ValueError, match="pooling='max'"), torch.device("meta"):
        DCViTForImageClassification(config)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"'dcvit-b/16': expected one of \['dcvit-s/16', 'vit-m/16', 'vit-s/16'\]"):
        DCViTConfig.from_preset("dcvit-b/16")
    assert set(VISION_PRESETS) == {"dcvit-s/16", "vit-m/16", "vit-s/16"}
