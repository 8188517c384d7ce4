"""Counts from the configuration against built models, and what composition costs against what running it costs."""

import dataclasses

import pytest
import torch
from helpers import PLAIN, VALID_SWITCHES, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.analysis import compose_overhead, num_compose_parameters, num_parameters, training_flops
from dcformer.compose_dcformer import DCFormerCompose, compose
from dcformer.errors import DCFormerError
from dcformer.presets_dcformer import PRESETS


def count_parameters(config: DCFormerConfig) -> tuple[int, int, int]:
    """Parameters of the built model on the meta device: all, those of composition, those of the embeddings."""
    model_class = DCPythiaForCausalLM if isinstance(config, DCPythiaConfig) else DCFormerForCausalLM
    with torch.device("meta"):
        model = model_class(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    compose_size = sum(size for name, size in sizes.items() if ".compose." in name)
    embeddings = sum(size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name)
    return sum(sizes.values()), compose_size, embeddings


@pytest.mark.parametrize("name", PRESETS)
def test_counts_of_published_sizes_are_those_of_the_built_model(name):
    config = DCFormerConfig.from_preset(name)
    total, composition, embeddings = count_parameters(config)
    assert num_parameters(config) == total
    assert num_parameters(config, exclude_embeddings=True) == total - embeddings
    assert num_compose_parameters(config) == composition


@pytest.mark.parametrize("switches", VALID_SWITCHES, ids=lambda s: "".join("01"[value] for value in s.values()))
@pytest.mark.parametrize("groups", [1, 2])
def test_counts_of_every_switch_combination_are_those_of_the_built_model(switches, groups):
    config = tiny_config(**switches, compose_groups=groups, compose_rank=3)
    total, composition, embeddings = count_parameters(config)
    assert num_parameters(config) == total
    assert num_parameters(config, exclude_embeddings=True) == total - embeddings
    assert num_compose_parameters(config) == composition


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
    assert num_parameters(config) == total
    assert num_parameters(config, exclude_embeddings=True) == total - embeddings
    assert num_compose_parameters(config) == composition


@pytest.mark.parametrize(("name", "printed"), [("dcformer-1.4b", "2.6"), ("dcformer-6.9b", "1.3")])
def test_extra_parameters_of_paper_table_2(name, printed):
    overhead = compose_overhead(DCFormerConfig.from_preset(name))
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
    overhead = compose_overhead(config, length)
    assert f"{100 * overhead.paper_flops_ratio:.1f}" == printed
    # The estimate leaves out the second generator layer (2R·M by 2R·M per group) and nothing else.
    r, h, e = config.compose_rank, config.num_attention_heads, config.hidden_size
    second_layer = config.num_hidden_layers * 4 * 2 * (2 * r * h) ** 2
    plain = config.num_hidden_layers * (24 * e**2 + 2 * length * e)  # 12·E² parameters, half of the keys
    assert overhead.flops_per_token - second_layer == pytest.approx(overhead.paper_flops_ratio * plain, rel=1e-12)


@pytest.mark.parametrize("name", ["dcformer-405m", "dcformer-1.4b", "dcformer-6.9b", "dcpythia-6.9b"])
def test_exact_ratios_are_what_their_names_say(name):
    config = DCFormerConfig.from_preset(name)
    overhead = compose_overhead(config, 1024)
    total, composition, embeddings = count_parameters(config)
    assert overhead.parameters == composition
    plain = total - composition - embeddings
    assert overhead.parameter_ratio == composition / plain
    attention = config.num_hidden_layers * 2 * config.num_attention_heads * config.head_dim * 1024
    assert overhead.flops_ratio == pytest.approx(overhead.flops_per_token / (2 * plain + attention), rel=1e-12)
    assert compose_overhead(config) == compose_overhead(config, config.max_position_embeddings)


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
    assert length * compose_overhead(config, length).flops_per_token == count_flops(config, length)


def test_a_model_without_composition_has_no_overhead():
    overhead = compose_overhead(tiny_config(**PLAIN))
    assert dataclasses.astuple(overhead) == (0, 0.0, 0, 0.0, 0.0, 0.0)
    assert compose_overhead(tiny_config(num_hidden_layers=0, **PLAIN)).flops_ratio == 0.0


def test_countings_of_training_differ_in_the_keys_alone():
    """Per query: S/2 keys for attention; for composition S, or as attention; with a window of w, w - w²/2S."""
    length, window = 64, 16
    config = tiny_config(num_hidden_layers=2, layer_pattern="LG", sliding_window=window)
    forward = {name: training_flops(config, length, name) / 3 for name in ("paper", "causal", "windows")}
    per_key = compose_overhead(config, 1).flops_per_token - compose_overhead(config, 0).flops_per_token  # of all layers
    assert forward["paper"] - forward["causal"] == pytest.approx(per_key * length / 2)
    seen = window - window**2 / (2 * length)
    attention = 4 * config.num_attention_heads * config.head_dim
    assert forward["causal"] - forward["windows"] == pytest.approx((per_key / 2 + attention) * (length / 2 - seen))
    whole = tiny_config(num_hidden_layers=2, layer_pattern="G", sliding_window=None)
    assert training_flops(whole, length, "windows") == training_flops(whole, length, "causal")
    with pytest.raises(DCFormerError, match="counting 'all': expected one of paper, causal, windows"):
        training_flops(config, length, "all")


@pytest.mark.parametrize("count", [num_parameters, num_compose_parameters, compose_overhead, training_flops])
def test_configurations_of_other_models_are_refused(count):
    """Those of converted models, too, which say nothing of what composition adds."""
    with pytest.raises(DCFormerError, match=r"config is a LlamaConfig: .* model\.num_parameters\(\)"):
        count(LlamaConfig())
