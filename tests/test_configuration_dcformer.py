"""Configuration: names, validation, layer patterns, round trips."""

import dataclasses
import inspect
import json
import re

import pytest
import torch
from helpers import ALL_SWITCHES, PLAIN, SWITCHES, VALID_SWITCHES, describes_a_model, fields_of, tiny_config
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig
from dcformer.analysis import num_compose_parameters
from dcformer.modeling_dcformer import DCFormerRotaryEmbedding

L, G = "sliding_attention", "full_attention"

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
    given = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert DCPythiaConfig(rope_parameters=dict(given)).rope_parameters == given
    assert DCPythiaConfig(partial_rotary_factor=0.5).rope_parameters["partial_rotary_factor"] == 0.5
    whole = DCPythiaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})  # as a stored one would say it
    assert "partial_rotary_factor" not in whole.rope_parameters


def test_layers_changed_in_place_stay_when_there_are_more_again():
    config = DCFormerConfig(num_hidden_layers=4)
    config.num_hidden_layers = 2
    config.layer_types[0] = G
    config.num_hidden_layers = 3
    assert config.layer_types == [G, G, L]
    config.num_hidden_layers = 4
    assert config.layer_types == [G, G, L, G]


def test_a_layer_pattern_that_is_set_says_the_layers():
    config = DCFormerConfig(num_hidden_layers=3)
    config.layer_pattern = "GL"
    assert config.layer_types == [G, L, G] and "layer_pattern" not in config.to_dict()


def test_derived_sizes():
    config = DCFormerConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, norm_eps=1e-4)
    assert (config.head_dim, config.num_key_value_heads, config.qk_norm_eps) == (16, 3, 1e-4)
    # a head_dim that is not hidden_size / heads, and heads that do not divide hidden_size
    config = DCFormerConfig(hidden_size=100, num_attention_heads=6, head_dim=8, qk_norm_eps=1e-6)
    assert (config.head_dim, config.num_key_value_heads, config.qk_norm_eps) == (8, 6, 1e-6)


# --- validation -------------------------------------------------------------------------------------------------------

ROPES = {  # what each kind of RoPE needs, for heads of 64 channels
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {},
}


def rope(kind, **fields):
    """Fields of a configuration with a kind of RoPE."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | ROPES[kind] | fields}


NAN, INF = float("nan"), float("inf")
TEXT = ("2", True, NAN, INF)  # what is not a number, or not a finite one
ABOVE_0, LENGTH = ("factor", "low_freq_factor", "high_freq_factor"), "original_max_position_embeddings"
BAD_ROPES = [
    *(("default", {"rope_theta": bad}, f"rope_theta={bad!r} must be a fin") for bad in (NAN, INF, -1.0, True, None)),
    *(
        (kind, {name: bad}, f"{name}={bad!r} of rope_type='{kind}' must be a finite number above 0")
        for kind, fields in ROPES.items()
        for name in ABOVE_0
        if name in fields or (kind, name) == ("proportional", "factor")
        for bad in (*TEXT, -1.0, 0, 10**400, *[None] * (kind not in ("yarn", "longrope")))
    ),
    *(
        (kind, {name: bad}, f"{name}={bad!r} of rope_type='{kind}' must be a finite number of at least 0")
        for kind, names in (("yarn", ("beta_fast", "beta_slow", "mscale")), ("longrope", ("attention_factor",)))
        for name in names
        for bad in (*TEXT, -1.0, [1.0])
    ),
    *(
        (kind, {LENGTH: bad}, f"{LENGTH}={bad!r} of rope_type='{kind}' must be a finite number above 1")
        for kind in ("yarn", "longrope", "llama3")
        for bad in (*TEXT, None, 0, 1)
    ),
    *(
        ("longrope", {name: bad}, f"{name}={bad!r} of rope_type='longrope' must be a list of 32 finite numbers above")
        for name in ("short_factor", "long_factor")
        for bad in (2.0, "2", None, [], [1.0], [1.0] * 31, *([*[1.0] * 31, one] for one in (*TEXT, None, 0.0)))
    ),
    ("dynamic", {"partial_rotary_factor": 2 / 64}, "rope_type='dynamic' needs a rotary dimension above 2: it would"),
    ("yarn", {"rope_theta": 1}, "rope_type='yarn' needs a rope_theta other than 1: it would divide by zero"),
    ("llama3", {"low_freq_factor": 4.0}, "rope_type='llama3' needs two freq_factors that differ: it would divide"),
]
GOOD_ROPES = [
    *((kind, {"factor": 0.5}) for kind in ROPES if kind != "default"),
    *((kind, {"factor": None, "attention_factor": None}) for kind in ("yarn", "longrope")),
    *((kind, {"attention_factor": 1}) for kind in ("yarn", "longrope")),
    ("yarn", dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), None)),
    ("yarn", dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 0)),
    ("yarn", {"rope_theta": 0.5, "truncate": None}),
    ("linear", dict.fromkeys((LENGTH, "attention_factor", "beta_fast", "low_freq_factor"))),
    ("dynamic", {LENGTH: None}),
    ("longrope", {LENGTH: 4096, "factor": None}),
    ("longrope", {"long_factor": (2.0,) * 32}),
    ("llama3", {"low_freq_factor": 4.0, "high_freq_factor": 1.0}),
    ("proportional", {"partial_rotary_factor": 0.01}),
    ("linear", {"partial_rotary_factor": 2 / 64}),
    ("default", {"factor": "2"}),  # not read
]
BAD_FIELDS = [
    ({"norm_eps": -1.0}, "norm_eps=-1.0 must not be negative"),
    ({"qk_norm_eps": -1.0}, "qk_norm_eps=-1.0 must not be negative"),
    ({"initializer_range": -1.0}, "initializer_range=-1.0 must not be negative"),
    *(
        ({name: bad}, f"{name}={bad} must not be negative, infinite or NaN")
        for name in ("norm_eps", "qk_norm_eps", "initializer_range")
        for bad in (NAN, INF)
    ),
    ({"pad_token_id": 1000, "vocab_size": 97}, "pad_token_id=1000 is not in the vocabulary: expected 0 to 96"),
    ({"rope_theta": 0.0}, "rope_theta=0.0 must be a finite number above 0"),
    ({"rope_theta": "x"}, "rope_theta='x' must be a finite number above 0"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type='linear' needs factor"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
        "rope_parameters of full_attention, sliding_attention: expected one RoPE for all layers",
    ),
    ({"use_dcmha": False}, "use_dcmha: of the hub format"),
    ({"window_size": 3, "block_size": 8}, "block_size, window_size: of the hub format"),
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
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=16"),
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
    (
        {"head_dim": 5, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.8}},
        "The rotary dimension head_dim = 5 must be even",
    ),
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
    ({"compose_ranks": 4}, "unknown fields of composition: compose_ranks. Expected some of compose_rank, compose_gr"),
    ({"compose_groups": 3}, "compose_groups=3 does not divide num_attention_heads=16"),
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


@pytest.mark.parametrize(("kind", "fields", "message"), BAD_ROPES, ids=[message[:70] for *_, message in BAD_ROPES])
def test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value(kind, fields, message):
    with pytest.raises(ValueError) as error:
        DCFormerConfig(**rope(kind, **fields))
    assert message in str(error.value)


def test_rope_of_a_kind_that_is_registered_later_is_its_own_affair(monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "own", lambda config, **kwargs: (torch.ones(32), 1.0))
    config = DCFormerConfig(rope_parameters={"rope_type": "own", "rope_theta": 1e4, "factor": "many"})
    assert DCFormerRotaryEmbedding(config).inv_freq.shape == (32,)


@pytest.mark.parametrize(("kind", "fields"), [*((kind, {}) for kind in ROPES), *GOOD_ROPES], ids=str)
@pytest.mark.parametrize("length", [9, 3000])
def test_rope_that_works_is_not_refused(kind, fields, length):
    """Before and beyond the original length."""
    rotary = DCFormerRotaryEmbedding(DCFormerConfig(**rope(kind, **fields)))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    assert cos.isfinite().all() and sin.isfinite().all()


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


# --- special cases of the architecture --------------------------------------------------------------------------------


def test_plain_transformer_when_everything_is_off():
    config = tiny_config(**PLAIN)
    assert config.compose_generators == ()
    assert config.compose_cache_channels("pre") == config.compose_cache_channels("post") == 0
    assert num_compose_parameters(config) == 0
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


def test_minus_one_is_no_token_for_padding():
    """As older configurations of other models have it; of PyTorch's embeddings it would be the last token."""
    config = DCFormerConfig.from_dict(tiny_config().to_dict() | {"pad_token_id": -1})
    assert DCFormerForCausalLM(config).model.embed_tokens.padding_idx is None


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


# --- documentation ----------------------------------------------------------------------------------------------------


def test_the_docstring_lists_every_field():
    """The one place that says what each means."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    text = inspect.cleandoc(DCFormerConfig.__doc__)  # since Python 3.13 it is without the source's margin anyway
    entries = re.findall(r"^    ([a-z_, ]+) \(`", text, re.MULTILINE)
    documented = {name.strip() for entry in entries for name in entry.split(",")}
    fields = {field.name for field in dataclasses.fields(DCFormerConfig)}
    assert fields - inherited <= documented <= fields | {"layer_pattern"}
