"""Configuration: names, validation, layer patterns, published sizes and costs, legacy keys, round trips."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.compose_dcformer import DCFormerCompose, compose

L, G = "sliding_attention", "full_attention"
SWITCHES = (
    "compose_pre",
    "compose_post",
    "compose_query",
    "compose_key",
    "compose_projection",
    "compose_gate",
    "compose_static",
)
PLAIN = {name: False for name in ("compose_pre", "compose_post", "compose_query", "compose_key", "compose_static")}
PRESETS = (  # name, layers, E, H, D, F: dcmha.md "Sizes" and, for the 8B, its published configuration
    ("dcformer-405m", 24, 1024, 16, 64, 2816),
    ("dcformer-834m", 24, 1536, 24, 64, 4096),
    ("dcformer-1.4b", 24, 2048, 32, 64, 5632),
    ("dcformer-2.8b", 32, 2560, 32, 80, 6912),
    ("dcformer-6.9b", 32, 4096, 32, 128, 11008),
    ("dcformer-13b", 40, 5120, 40, 128, 13824),
    ("dcformer-33b", 60, 6656, 52, 128, 17920),
    ("dcformer-8b-mgate", 48, 4096, 32, 128, 5632),
    ("dcpythia-2.8b", 32, 2560, 32, 80, 10240),
    ("dcpythia-6.9b", 32, 4096, 32, 128, 16384),
)


def describes_a_model(switches: dict[str, bool]) -> bool:
    """Whether a combination of switches is accepted: something to compose, something to compose it with, or nothing."""
    stage = switches["compose_pre"] or switches["compose_post"]
    dynamic = switches["compose_query"] or switches["compose_key"]
    if not stage:
        return not dynamic and not switches["compose_static"]
    if dynamic:
        return switches["compose_projection"] or switches["compose_gate"]
    return switches["compose_static"]


ALL_SWITCHES = [
    dict(zip(SWITCHES, values, strict=True)) for values in itertools.product((False, True), repeat=len(SWITCHES))
]
VALID_SWITCHES = [switches for switches in ALL_SWITCHES if describes_a_model(switches)]


def fields_of(config: DCFormerConfig) -> dict:
    """What a configuration says, without where it was loaded from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def count_parameters(config: DCFormerConfig) -> tuple[int, int, int]:
    """Parameters of the built model on the meta device: all, those of composition, those of the embeddings."""
    model_class = DCPythiaForCausalLM if isinstance(config, DCPythiaConfig) else DCFormerForCausalLM
    with torch.device("meta"):
        model = model_class(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    compose_size = sum(size for name, size in sizes.items() if ".compose." in name)
    embeddings = sum(size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name)
    return sum(sizes.values()), compose_size, embeddings


# --- names and defaults -----------------------------------------------------------------------------------------------


def test_defaults_are_dcformer_405m():
    """Those that no tensor's shape shows, and the preset of that name."""
    config = DCFormerConfig()
    assert (config.sliding_window, config.layer_types) == (256, [L, G] * 12)
    assert (config.norm_eps, config.qk_norm_eps, config.compose_act) == (1e-5, 1e-5, "gelu_pytorch_tanh")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert DCFormerConfig.from_preset("dcformer-405m").to_dict() == config.to_dict()


def test_dcpythia_defaults_are_dcpythia_2_8b():
    config = DCPythiaConfig()
    assert (config.rope_parameters["partial_rotary_factor"], config.hidden_act) == (0.25, "gelu")
    assert DCPythiaConfig.from_preset("dcpythia-2.8b").to_dict() == config.to_dict()


def test_what_is_said_about_rope_wins_over_pythias_quarter():
    said = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert DCPythiaConfig(rope_parameters=dict(said)).rope_parameters == said
    assert DCPythiaConfig(partial_rotary_factor=0.5).rope_parameters["partial_rotary_factor"] == 0.5
    whole = DCPythiaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})  # as a stored one would say it
    assert "partial_rotary_factor" not in whole.rope_parameters


def test_derived_sizes():
    config = DCFormerConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, norm_eps=1e-4)
    assert (config.head_dim, config.num_key_value_heads, config.qk_norm_eps) == (16, 3, 1e-4)
    # a head_dim that is not hidden_size / heads, and heads that do not divide hidden_size
    config = DCFormerConfig(hidden_size=100, num_attention_heads=6, head_dim=8, qk_norm_eps=1e-6)
    assert (config.head_dim, config.num_key_value_heads, config.qk_norm_eps) == (8, 6, 1e-6)


# --- validation -------------------------------------------------------------------------------------------------------

BAD_FIELDS = [
    *(
        ({name: 0, "head_dim": 4} | ({"head_dim": 0} if name == "head_dim" else {}), f"{name}=0")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
    ),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"hidden_size": 100, "num_attention_heads": 16}, "hidden_size=100 is not a multiple of num_attention_heads=16"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=16 must be a multiple of num_key_value_heads=3"),
    ({"norm_type": "batchnorm"}, "norm_type='batchnorm'"),
    ({"hidden_act": "swish-x"}, "hidden_act='swish-x' is unknown"),
    ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is unknown"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": "x"}}, "partial_rotary_factor=x must be"),
    ({"mlp_type": "moe"}, "mlp_type='moe'"),
    ({"mlp_gates": -2}, "mlp_gates=-2"),
    ({"mlp_gates": 44, "mlp_type": "plain"}, "mlp_gates=44 needs mlp_type='gated', got 'plain'"),
    ({"mlp_gates": 7}, "intermediate_size=2816 must be a multiple of mlp_gates=7"),
    ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ({"hidden_dropout": 1.5}, "hidden_dropout=1.5"),
    ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    ({"head_dim": 5}, "head_dim * partial_rotary_factor = 5 * 1.0 = 5"),
    ({"head_dim": 12, "partial_rotary_factor": 0.25}, "12 * 0.25 = 3"),
    ({"head_dim": 4, "partial_rotary_factor": 0.25}, "4 * 0.25 = 1"),
    ({"layer_types": ["full_attention", "linear"] * 12}, "layer_types holds unknown ['linear']"),
    ({"layer_types": [G] * 3}, "len(layer_types)=3 must equal num_hidden_layers=24"),
    ({"sliding_window": None, "layer_pattern": "LG"}, "sliding_window=None"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"sliding_window": 1}, "sliding_window=1"),
    *(
        ({"layer_pattern": bad}, f"layer_pattern={bad!r}")
        for bad in (
            "",
            "LX",
            "lg",
            "2LG",
            "L G",
            "LG0",
            "G0",
            [],
            ["L", "global"],
            3,
        )
    ),
    ({"compose_rank": 0}, "compose_rank=0"),
    ({"compose_groups": 0}, "compose_groups=0"),
    ({"compose_groups": 3}, "num_attention_heads=16 must be a multiple of compose_groups=3"),
    ({"compose_act": "relu"}, "compose_act='relu'"),
    ({"compose_pre": False, "compose_post": False}, "compose_query and compose_key on"),
    (
        {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_static": True},
        "compose_key and compose_static on",
    ),
    ({"compose_query": False, "compose_key": False}, "compose_pre and compose_post on"),
    ({"compose_query": False, "compose_key": False, "compose_post": False}, "compose_pre on"),
    ({"compose_projection": False, "compose_gate": False}, "compose_projection and compose_gate are both off"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[message[:60] for _, message in BAD_FIELDS])
def test_a_configuration_that_describes_no_model_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ValueError) as error:
        DCFormerConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [("compose_rank", "2"), ("hidden_size", 64.0), ("compose_pre", "yes"), ("layer_types", L)]
)
def test_wrong_types_are_refused_by_name(field, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'.*{value!r}|'{field}'(.|\n)*{value!r}"):
        DCFormerConfig(**{field: value})


def test_a_field_broken_later_is_refused_when_saving(tmp_path):
    config = tiny_config()
    config.compose_rank = 0
    with pytest.raises(StrictDataclassClassValidationError, match="compose_rank=0"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=lambda s: "".join("01"[value] for value in s.values()))
def test_switch_combinations_are_accepted_exactly_when_they_describe_a_model(switches):
    if describes_a_model(switches):
        config = tiny_config(**switches)
        assert {name: getattr(config, name) for name in SWITCHES} == switches
    else:
        with pytest.raises(ValueError, match="compose_"):
            tiny_config(**switches)


# --- layer patterns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        ("LG", 5, [L, G, L, G, L]),
        ("LGLL", 8, [L, G, L, L, L, G, L, L]),  # 3:1 is window, global, window, window
        ("LGL6", 10, [L, G, L, L, L, L, L, L, L, G]),  # 7:1, period of 8
        ("L", 2, [L, L]),
        ("G", 2, [G, G]),
        ("G1L2", 4, [G, L, L, G]),
        ("L12G", 13, [L] * 12 + [G]),
        (["L", "G", "G"], 4, [L, G, G, L]),
        ([L, G], 3, [L, G, L]),
        ("LG", 0, []),
    ],
)
def test_layer_patterns(pattern, layers, expected):
    config = DCFormerConfig(num_hidden_layers=layers, layer_pattern=pattern)
    assert config.layer_types == expected
    assert not hasattr(config, "layer_pattern")
    assert "layer_pattern" not in config.to_dict()


def test_layer_types_given_are_kept():
    assert DCFormerConfig(num_hidden_layers=3, layer_types=[G, L, L]).layer_types == [G, L, L]


def test_without_a_window_every_layer_is_global():
    assert DCFormerConfig(num_hidden_layers=3, sliding_window=None).layer_types == [G, G, G]
    assert DCFormerConfig(num_hidden_layers=2, sliding_window=None, layer_pattern="G").layer_types == [G, G]


# --- published sizes and counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset[0])
def test_presets_are_the_published_sizes_and_count_themselves(preset):
    name, layers, hidden, heads, head_dim, intermediate = preset
    config = DCFormerConfig.from_preset(name)
    assert type(config) is (DCPythiaConfig if name.startswith("dcpythia") else DCFormerConfig)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    assert (*sizes, config.intermediate_size) == (layers, hidden, heads, head_dim, intermediate)
    assert config.num_key_value_heads == heads
    total, composition, embeddings = count_parameters(config)
    assert config.num_parameters() == total
    assert config.num_parameters(exclude_embeddings=True) == total - embeddings
    assert config.num_compose_parameters() == composition


def test_presets_of_published_pytorch_checkpoints():
    mgate = DCFormerConfig.from_preset("dcformer-8b-mgate")
    assert (mgate.vocab_size, mgate.max_position_embeddings, mgate.mlp_gates) == (152064, 4096, 44)
    assert mgate.rope_parameters["rope_theta"] == 500000.0
    assert mgate.layer_types[:4] == [L, G, L, L]
    for name in ("dcformer-2.8b", "dcformer-8b-mgate", "dcpythia-6.9b"):
        config = DCFormerConfig.from_preset(name)
        assert (config.compose_act, config.qk_norm_eps) == ("gelu", 1e-6)
    assert DCFormerConfig.from_preset("dcformer-2.8b").norm_eps == 1e-6
    assert DCFormerConfig.from_preset("dcpythia-6.9b").norm_eps == 1e-5


def test_preset_overrides_and_unknown_names():
    config = DCFormerConfig.from_preset("dcformer-8b-mgate", num_hidden_layers=3, compose_rank=1, norm_eps=1e-3)
    assert (config.layer_types, config.compose_rank, config.norm_eps) == ([L, G, L], 1, 1e-3)
    with pytest.raises(ValueError, match=r"'dcformer-7b'.*dcformer-6\.9b.*dcpythia-2\.8b"):
        DCFormerConfig.from_preset("dcformer-7b")


@pytest.mark.parametrize("switches", VALID_SWITCHES, ids=lambda s: "".join("01"[value] for value in s.values()))
@pytest.mark.parametrize("groups", [1, 2])
def test_counts_of_every_switch_combination_are_those_of_the_built_model(switches, groups):
    config = tiny_config(**switches, compose_groups=groups, compose_rank=3)
    total, composition, embeddings = count_parameters(config)
    assert config.num_parameters() == total
    assert config.num_parameters(exclude_embeddings=True) == total - embeddings
    assert config.num_compose_parameters() == composition


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"mlp_type": "plain", "mlp_bias": True, "norm_type": "layernorm"},
        {"mlp_type": "plain"},
        {"mlp_gates": 4},
        {"qk_norm": False, "num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 0},
        {"head_dim": 10, "compose_static": True, "compose_groups": 4},
    ],
    ids=str,
)
def test_counts_of_other_architectures(fields):
    config = tiny_config(**fields)
    total, composition, embeddings = count_parameters(config)
    assert config.num_parameters() == total
    assert config.num_parameters(exclude_embeddings=True) == total - embeddings
    assert config.num_compose_parameters() == composition


@pytest.mark.parametrize(("name", "printed"), [("dcformer-1.4b", "2.6"), ("dcformer-6.9b", "1.3")])
def test_extra_parameters_of_paper_table_2(name, printed):
    overhead = DCFormerConfig.from_preset(name).compose_overhead()
    assert f"{100 * overhead.paper_parameter_ratio:.1f}" == printed


@pytest.mark.parametrize(
    ("name", "length", "printed"),
    [
        ("dcformer-1.4b", 2048, "4.8"),
        ("dcformer-6.9b", 2048, "1.9"),
        ("dcformer-6.9b", 4096, "2.4"),
        ("dcformer-6.9b", 8192, "3.3"),
    ],
)
def test_extra_flops_of_paper_table_2(name, length, printed):
    config = DCFormerConfig.from_preset(name)
    overhead = config.compose_overhead(length)
    assert f"{100 * overhead.paper_flops_ratio:.1f}" == printed
    # The estimate leaves out the second generator layer (2R·M by 2R·M per group) and nothing else.
    r, h, e = config.compose_rank, config.num_attention_heads, config.hidden_size
    second_layer = config.num_hidden_layers * 4 * 2 * (2 * r * h) ** 2
    plain = config.num_hidden_layers * (24 * e**2 + 2 * length * e)  # 12·E² parameters, half of the keys
    assert overhead.flops_per_token - second_layer == pytest.approx(overhead.paper_flops_ratio * plain, rel=1e-12)


@pytest.mark.parametrize("name", ["dcformer-405m", "dcformer-1.4b", "dcformer-6.9b", "dcpythia-6.9b"])
def test_exact_ratios_are_what_their_names_say(name):
    config = DCFormerConfig.from_preset(name)
    overhead = config.compose_overhead(1024)
    total, composition, embeddings = count_parameters(config)
    assert overhead.parameters == composition
    plain = total - composition - embeddings
    assert overhead.parameter_ratio == composition / plain
    attention = config.num_hidden_layers * 2 * config.num_attention_heads * config.head_dim * 1024
    assert overhead.flops_ratio == pytest.approx(overhead.flops_per_token / (2 * plain + attention), rel=1e-12)
    assert config.compose_overhead() == config.compose_overhead(config.max_position_embeddings)


def count_flops(config: DCFormerConfig, length: int) -> int:
    """Forward operations that composition really does for `length` queries and keys, counted while it runs.

    Matrix products by PyTorch's own counter. Gates are the only elementwise products with a map: a multiplication and
    the addition to the sum, 2 per element of the map.
    """

    def gate_flops(a_shape, b_shape, *args, out_shape=None, **kwargs):
        return 2 * torch.Size(out_shape).numel()

    module = DCFormerCompose(config)
    states = torch.zeros(1, length, config.hidden_size)
    maps = torch.zeros(1, config.num_attention_heads, length, length)
    with FlopCounterMode(display=False) as generating:
        sides, statics = module(states)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mul: gate_flops}) as mixing:
        for stage in ("pre", "post"):
            weights = module.stage_weights(sides.get((stage, "query")), sides.get((stage, "key")), statics.get(stage))
            compose(maps, weights)
    return config.num_hidden_layers * (generating.get_total_flops() + mixing.get_total_flops())


@pytest.mark.parametrize("switches", VALID_SWITCHES[::3], ids=lambda s: "".join("01"[value] for value in s.values()))
@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_those_that_running_it_costs(switches, groups):
    # sizes above 1 everywhere: PyTorch turns products over an axis of 1 into elementwise ones
    config = tiny_config(**switches, num_attention_heads=6, head_dim=4, compose_groups=groups)
    length = 5
    assert length * config.compose_overhead(length).flops_per_token == count_flops(config, length)


def test_a_model_without_composition_has_no_overhead():
    overhead = tiny_config(**PLAIN).compose_overhead()
    assert dataclasses.astuple(overhead) == (0, 0.0, 0, 0.0, 0.0, 0.0)
    assert tiny_config(num_hidden_layers=0, **PLAIN).compose_overhead().flops_ratio == 0.0


# --- special cases of the architecture --------------------------------------------------------------------------------


def test_plain_transformer_when_everything_is_off():
    config = tiny_config(**PLAIN)
    assert config.compose_generators == ()
    assert config.compose_cache_channels("pre") == config.compose_cache_channels("post") == 0
    assert config.num_compose_parameters() == 0
    model = DCFormerForCausalLM(config)
    assert not [name for name, _ in model.named_parameters() if "compose" in name]


def test_talking_heads_is_the_static_projection_alone():
    config = tiny_config(compose_query=False, compose_key=False, compose_static=True)
    assert config.compose_generators == ()
    assert config.compose_cache_channels("pre") == config.compose_cache_channels("post") == 0
    names = {
        name.split("compose.")[1] for name, _ in DCFormerForCausalLM(config).named_parameters() if "compose" in name
    }
    assert names == {"pre_static", "post_static"}


def test_generators_keep_the_order_of_stored_tensors():
    assert tiny_config().compose_generators == (("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"))
    assert tiny_config(compose_query=False).compose_generators == (("pre", "key"), ("post", "key"))
    assert tiny_config(compose_pre=False).compose_generators == (("post", "query"), ("post", "key"))


@pytest.mark.parametrize(
    ("fields", "channels"),
    [
        ({}, 16),  # two query heads per key head: 2 · (2R + 1) = 10
        ({"num_key_value_heads": 4}, 8),  # 5
        ({"num_key_value_heads": 1}, 24),  # 20
        ({"compose_gate": False}, 8),  # 2 · 2R = 8, nothing to pad
        ({"compose_projection": False}, 8),  # 2
        ({"compose_rank": 4, "num_key_value_heads": 4}, 16),  # 9
        ({"compose_key": False}, 0),
    ],
)
def test_cache_channels(fields, channels):
    config = tiny_config(**fields)
    assert config.compose_cache_channels("pre") == config.compose_cache_channels("post") == channels


def test_cache_channels_of_a_stage_that_is_off():
    config = tiny_config(compose_pre=False)
    assert (config.compose_cache_channels("pre"), config.compose_cache_channels("post")) == (0, 16)


# --- the authors' configurations --------------------------------------------------------------------------------------

LEGACY_2_8B = {
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
LEGACY_PYTHIA_6_9B = LEGACY_2_8B | {
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
LEGACY_8B = LEGACY_2_8B | {
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
LEGACY_KEYS = (  # everything of theirs that is not also a name of ours or of Transformers
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
    ("legacy", "preset", "architecture"),
    [
        (LEGACY_2_8B, "dcformer-2.8b", "DCFormerForCausalLM"),
        (LEGACY_PYTHIA_6_9B, "dcpythia-6.9b", "DCPythiaForCausalLM"),
        (LEGACY_8B, "dcformer-8b-mgate", "DCFormerForCausalLM"),
    ],
    ids=["DCFormer-2.8B", "DCPythia-6.9B", "8B"],
)
def test_published_configurations_are_read_and_never_written(legacy, preset, architecture, tmp_path):
    """A published config.json means the preset of that checkpoint, and saving it leaves no trace of the old names."""
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(legacy))
    config = AutoConfig.from_pretrained(published)
    of_the_checkpoint = {
        "dtype": torch.float16,
        "bos_token_id": legacy["bos_token_id"],
        "eos_token_id": legacy["eos_token_id"],
        "architectures": [architecture],
    }
    expected = DCFormerConfig.from_preset(preset, **of_the_checkpoint)
    assert type(config) is type(expected)
    assert fields_of(config) == fields_of(expected)
    assert not [key for key in LEGACY_KEYS if key != "torch_dtype" and hasattr(config, key)]

    config.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not set(stored) & set(LEGACY_KEYS)
    again = AutoConfig.from_pretrained(tmp_path / "saved")
    assert type(again) is type(config)
    assert fields_of(again) == fields_of(config)


def legacy(**fields) -> DCFormerConfig:
    """A small configuration in the authors' names."""
    small = {"dim": 64, "n_head": 4, "n_layer": 4, "intermediate_size": 160, "vocab_size": 128, "block_size": 64}
    return DCFormerConfig.from_dict(small | fields)


def test_legacy_head_dim():
    assert legacy().head_dim == 16
    assert legacy(head_dim=24).head_dim == 24


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
def test_legacy_windows(fields, window, layer_types):
    config = legacy(**fields)
    assert (config.sliding_window, config.layer_types) == (window, layer_types)


def test_legacy_query_wise_means_no_key_wise_composition():
    config = legacy(query_wise=True)
    assert config.compose_generators == (("pre", "query"), ("post", "query"))


def test_legacy_without_dcmha_is_a_plain_transformer():
    config = legacy(use_dcmha=False)
    assert config.compose_generators == ()
    assert config.num_compose_parameters() == 0


@pytest.mark.parametrize(("n_local_heads", "expected"), [(-1, 4), (None, 4), (4, 4), (2, 2), (1, 1)])
def test_legacy_local_heads(n_local_heads, expected):
    assert legacy(n_local_heads=n_local_heads).num_key_value_heads == expected


def test_legacy_norms_gates_biases_and_rope():
    config = legacy(norm_eps=1e-5, rope_base=500000)
    assert (config.norm_eps, config.qk_norm_eps, config.qk_norm) == (1e-5, 1e-6, False)  # off unless it says so
    assert config.compose_act == "gelu"
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert legacy(use_qk_norm=True).qk_norm
    assert legacy(mgate=False, mgate_dim=44).mlp_gates == 0
    assert legacy(mgate=True, mgate_dim=8).mlp_gates == 8
    assert legacy(mgate=True, intermediate_size=440).mlp_gates == 44
    biased = legacy(use_linear_bias=True, rotary_pct=0.25)
    assert biased.attention_bias and biased.mlp_bias
    assert biased.rope_parameters["partial_rotary_factor"] == 0.25
    unbiased = DCPythiaConfig.from_dict(LEGACY_PYTHIA_6_9B | {"use_linear_bias": False})
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
def test_legacy_static_projection(fields, expected, is_open):
    """What the authors' keys do not say is left to the stored tensors."""
    config = legacy(**fields)
    assert config.compose_static is expected
    assert ("compose_static" in config._open_fields) is is_open
    assert not {"_open_fields", "use_sw", "static_proj"} & set(config.to_dict())
    config.settle(compose_static=True, compose_groups=2, compose_rank=1)
    assert config.compose_static is (True if is_open else expected)
    assert (config.compose_groups, config.compose_rank, config._open_fields) == (2, 1, ())
    assert ("layers.*.self_attn.compose.pre_static" in config.base_model_tp_plan) is config.compose_static


def test_legacy_static_projection_contradicted():
    with pytest.raises(ValueError, match=r"use_sw.*static_proj.*contradict"):
        legacy(use_sw=True, static_proj=False)
    with pytest.raises(ValueError, match="compose_groups=3"):
        legacy().settle(compose_groups=3)


def test_only_legacy_configurations_have_open_fields():
    assert legacy()._open_fields == ("compose_groups", "compose_rank", "compose_static")
    assert DCFormerConfig()._open_fields == DCPythiaConfig()._open_fields == ()
    config = tiny_config()
    config.settle(compose_rank=5)
    assert config.compose_rank == tiny_config().compose_rank


def test_legacy_torch_dtype():
    assert legacy(torch_dtype="bfloat16").dtype == torch.bfloat16
    assert legacy().dtype is None


# --- round trips ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    switches=st.sampled_from(VALID_SWITCHES),
    config_class=st.sampled_from([DCFormerConfig, DCPythiaConfig]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "compose_rank": st.integers(1, 8),
            "compose_groups": st.sampled_from([1, 2, 4]),
            "compose_act": st.sampled_from(["gelu", "gelu_pytorch_tanh"]),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "layer_pattern": st.sampled_from(["LG", "LGLL", "G", "L"]),
            "qk_norm": st.booleans(),
            "norm_eps": st.sampled_from([1e-5, 1e-6]),
            "qk_norm_eps": st.sampled_from([None, 1e-6]),
            "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]),
            "rope_theta": st.sampled_from([1e4, 5e5]),
            "attention_dropout": st.sampled_from([0, 0.0, 0.1]),
            "eos_token_id": st.sampled_from([0, [0, 1], None]),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
        },
    ),
)
def test_json_round_trip(tmp_path_factory, switches, config_class, fields):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4}
    config = config_class(**sizes, **switches, **fields)
    written = config.to_dict()
    json.dumps(written)
    from_dict = config_class.from_dict(written)
    assert from_dict.to_dict() == written

    folder = tmp_path_factory.mktemp("config")
    config.save_pretrained(folder)
    loaded = config_class.from_pretrained(folder)
    assert fields_of(loaded) == fields_of(config)
    # Loading adds transformers_version and model_type to the instance; a second trip must change nothing at all.
    loaded.save_pretrained(folder)
    assert config_class.from_pretrained(folder) == loaded
    by_name = AutoConfig.from_pretrained(folder)
    assert type(by_name) is config_class
    assert by_name == loaded


def test_overrides_when_loading(tmp_path):
    tiny_config(num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    config = DCFormerConfig.from_pretrained(tmp_path, compose_rank=1, compose_key=False)
    assert (config.compose_rank, config.compose_key) == (1, False)


FEWER = {
    "AutoConfig": lambda folder: AutoConfig.from_pretrained(folder, num_hidden_layers=3),
    "set later": lambda folder: set_fields(AutoConfig.from_pretrained(folder), num_hidden_layers=3),
    "model": lambda folder: AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3).config,
    "model, set later": lambda folder: (
        AutoModelForCausalLM.from_pretrained(
            folder, config=set_fields(AutoConfig.from_pretrained(folder), num_hidden_layers=3)
        ).config
    ),
}


def set_fields(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("way", FEWER)
def test_fewer_layers_are_the_first_ones(way, tmp_path):
    model = DCFormerForCausalLM(tiny_config(num_hidden_layers=5, layer_types=[G, L, L, G, L]))
    model.save_pretrained(tmp_path / "five")
    config = FEWER[way](tmp_path / "five")
    assert (config.num_hidden_layers, config.layer_types) == (3, [G, L, L])
    config.save_pretrained(tmp_path / "three")
    saved = AutoConfig.from_pretrained(tmp_path / "three")
    assert fields_of(saved) == fields_of(config) and saved.layer_types == [G, L, L]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "five", config=config)
    loaded.save_pretrained(tmp_path / "three")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "three")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        model.config.num_hidden_layers = 3  # as `assistant_early_exit` does
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected)
        assert len(again.model.layers) == 3
        model.config.num_hidden_layers = 5
        assert model.config.layer_types == [G, L, L, G, L]
        assert not torch.equal(model(ids).logits, expected)


CHANGES = {
    "more layers": ({"num_hidden_layers": 6}, "len(layer_types)=4 must equal num_hidden_layers=6"),
    "no window": ({"sliding_window": None}, "layer_types holds 'sliding_attention' but sliding_window=None"),
    "rank": ({"compose_rank": 0}, "compose_rank=0"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_overrides_that_do_not_fit_the_stored_configuration(case, tmp_path):
    fields, message = CHANGES[case]
    DCFormerForCausalLM(tiny_config(num_hidden_layers=4)).save_pretrained(tmp_path)
    changed = set_fields(AutoConfig.from_pretrained(tmp_path), **fields)
    for load in (
        lambda: AutoConfig.from_pretrained(tmp_path, **fields),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **fields),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, config=changed),
        lambda: DCFormerForCausalLM(changed),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            load()


def test_overrides_of_layers_that_fit(tmp_path):
    tiny_config(num_hidden_layers=4).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=6, layer_pattern="LLG")
    assert config.layer_types == [L, L, G] * 2
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=6, layer_types=[G] * 6, sliding_window=None)
    assert (config.layer_types, config.sliding_window) == ([G] * 6, None)
    config = AutoConfig.from_pretrained(tmp_path, layer_pattern="G", sliding_window=None)
    assert config.layer_types == [G] * 4
    config, unused = AutoConfig.from_pretrained(
        tmp_path, num_hidden_layers=1, compose_gate=False, return_unused_kwargs=True, other=1
    )
    assert (config.layer_types, unused) == ([L], {"other": 1})
    assert not any(name.endswith("compose.gate_proj") for name in config.base_model_tp_plan)


@pytest.mark.parametrize(("config_class", "model_type"), [(DCFormerConfig, "dcformer"), (DCPythiaConfig, "dcpythia")])
def test_auto_classes(config_class, model_type):
    config = AutoConfig.for_model(model_type, hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=7)
    assert type(config) is config_class
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == config_class.__name__.replace("Config", "ForCausalLM")


# --- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switches", [*VALID_SWITCHES[::5], PLAIN], ids=str)
@pytest.mark.parametrize("fields", [{}, {"mlp_gates": 4}, {"mlp_type": "plain", "qk_norm": False}], ids=str)
def test_tensor_parallel_plan_names_only_what_exists(switches, fields):
    config = tiny_config(**switches, **fields)
    with torch.device("meta"):
        model = DCFormerForCausalLM(config).model
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for pattern in config.base_model_tp_plan:
        name = pattern.replace("*", "0")
        assert name in names, f"{pattern} is in the plan but not in the model"
    # a multi-gate MLP stays whole
    split = [pattern for pattern in config.base_model_tp_plan if ".mlp." in pattern or ".post_attention" in pattern]
    assert len(split) == (0 if config.mlp_gates else 4 if config.mlp_type == "gated" else 3)
    assert "base_model_tp_plan" not in config.to_dict()


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"compose_groups": 4}, {1, 2, 4}),
        ({"compose_groups": 2}, {1, 2}),  # 8 key/value heads would do
        ({"compose_groups": 1}, {1}),
        ({"compose_groups": 2, "compose_query": False, "compose_key": False, "compose_static": True}, {1, 2}),
        ({"compose_groups": 8, "num_key_value_heads": 2}, {1, 2}),
        (dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False), {1, 2, 4, 8}),
    ],
    ids=str,
)
def test_tensor_parallel_sizes_that_cut_nothing(fields, sizes):
    config = tiny_config(**({"num_attention_heads": 8, "num_key_value_heads": 8} | fields))
    for size in range(1, 9):
        if size in sizes:
            config.check_tensor_parallel(size)
        else:
            with pytest.raises(ValueError, match=f"is no multiple of the tensor-parallel size {size}"):
                config.check_tensor_parallel(size)


# --- docs/configuration.md --------------------------------------------------------------------------------------------


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of docs/configuration.md."""
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    lines = text.split(f"\n## {heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_reference_lists_every_field_with_its_default():
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for column, config_class in enumerate((DCFormerConfig, DCPythiaConfig)):
        defaults = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(config_class)}
        documented = {}
        for name, default, _ in rows_of("Fields"):
            values = re.findall(r"`([^`]+)`", default)
            documented[name.strip("`")] = values[min(column, len(values) - 1)]
        assert documented == {name: defaults[name] for name in documented}
        assert set(defaults) - inherited <= set(documented)


def test_the_reference_lists_the_presets_and_their_counts():
    documented = {}
    for name, *cells in rows_of("Presets"):
        documented[name.strip("`")] = tuple(int(cell.replace(",", "")) for cell in cells)
    for name, *sizes in PRESETS:
        config = DCFormerConfig.from_preset(name)
        assert documented.pop(name) == (*sizes, config.num_parameters(), config.num_compose_parameters())
    assert not documented


def test_the_reference_lists_the_legacy_keys():
    documented = " ".join(row[0] for row in rows_of("Keys of the published checkpoints"))
    assert set(re.findall(r"`([^`]+)`", documented)) == {*LEGACY_KEYS, "architectures"}
