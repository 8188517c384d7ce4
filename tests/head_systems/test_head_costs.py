"""Parameters and operations from the sizes alone are those of built models."""

import pytest
import torch
from head_cases import CASES, TALKING, heads_config
from helpers import PLAIN
from torch.utils.flop_counter import FlopCounterMode

from dcformer import DCFormerConfig, HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.analysis import training_flops
from dcformer.head_systems import HeadSystemsViTConfig, system_costs
from dcformer.head_systems.costs import count_training_flops

LENGTH = 96
# of DCFormer-405M's layer: the closed forms of the literature, E = 1024, H = 16, D = 64
E, H, D = 1024, 16, 64
PLAIN_PARAMETERS, PLAIN_FLOPS = 4 * E * H * D, 8 * E * H * D + 4 * LENGTH * H * D
LARGE = {
    "plain": ("plain", {}, 0, 0),
    "collaborative": ("collaborative", {}, H * H * D // 2, 2 * LENGTH * H * (H * D - D)),
    "collaborative_half": (
        "collaborative",
        {"shared_key_query_dim": 512, "content_bias": True},
        -2 * E * 512 + H * 256 + E * H,
        -4 * E * 512 + 2 * E * H + 2 * LENGTH * H * (512 + H - D),
    ),
    "overlapped": ("overlapped", {"overlap": 8}, 16 * H * E, 4 * LENGTH * H * 16 + 2 * E * H * 16),
    "mixture": (
        "mixture_of_heads",
        {"num_shared_heads": 4, "num_routed_heads_per_tok": 8},
        E * (12 + 4 + 2),
        2 * E * (12 + 4 + 2),
    ),
    "mixture_one_shared": ("mixture_of_heads", {"num_shared_heads": 1}, E * (15 + 2), 2 * E * (15 + 2)),
    "mixture_query_norm": ("mixture_of_heads", {"router": "query_norm"}, 0, 0),
    "gate": ("output_gate", {}, E * H, 2 * E * H),
    "gate_elementwise": ("output_gate", {"output_gate": "elementwise"}, E * H * D, 2 * E * H * D),
    "pruning": ("head_pruning", {}, H, 0),
    "pruned": ("head_pruning", {"kept_heads": [[0, 3, 5]] * 2}, 3 - 4 * E * 13 * D, -(8 * E + 4 * LENGTH) * 13 * D),
}


def counted_flops(model, config) -> int:
    """Operations of the attention layers per token in a forward pass, of the attention modules alone."""
    ids = torch.ones(1, LENGTH, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counts = counter.get_flop_counts()
    total = 0
    for index in range(config.num_hidden_layers):
        name = next(key for key in counts if key.endswith(f"layers.{index}.self_attn"))
        total += sum(counts[name].values())
    return total // LENGTH


def on_meta(config):
    with torch.device("meta"):
        model = HeadSystemsForCausalLM(config)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("case", LARGE)
def test_counts_at_the_size_of_405m(case):
    name, options, parameters, flops = LARGE[case]
    fields = {key: value for key, value in DCFormerConfig().to_dict().items() if key != "model_type"}
    fields |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, **PLAIN}
    config = HeadSystemsConfig(**fields, head_system=name, head_system_options=options)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (E, H, D)
    model, costs = on_meta(config), system_costs(config, LENGTH)
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert costs.flops_per_token == counted_flops(model, config) == 2 * (PLAIN_FLOPS + flops)
    attention = sum(p.numel() for p in model.model.layers[0].self_attn.parameters())
    assert attention == PLAIN_PARAMETERS + 2 * D + parameters  # 2·D of QK-norm


@pytest.mark.parametrize("case", LARGE)
def test_training_counts_the_causal_half_of_the_keys(case):
    name, options, _, flops = LARGE[case]
    fields = {key: value for key, value in DCFormerConfig().to_dict().items() if key != "model_type"} | PLAIN
    fields |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 2 * LENGTH}
    config = HeadSystemsConfig(**fields, head_system=name, head_system_options=options)
    plain = DCFormerConfig(**fields)
    expected = training_flops(plain) + 3 * 2 * flops  # 96 of 192 keys, in two layers
    assert count_training_flops(config) == expected and count_training_flops(plain) == training_flops(plain)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_counts_of_other_shapes(case, composed, bias):
    config = heads_config(case, composed, attention_bias=bias, hidden_size=40, head_dim=8, num_hidden_layers=3)
    model = on_meta(config)
    assert system_costs(config).parameters == sum(p.numel() for p in model.parameters())
    if not composed and case != "talking_heads":
        assert system_costs(config, LENGTH).flops_per_token == counted_flops(model, config)


def test_activated_share():
    """(Hs + K) / H of scores, values and output; the projections in front stay."""
    config = heads_config("mixture")  # 3 of 4 heads, D = 8, E = 32, grouped
    costs = system_costs(config, 50)
    saved = 2 * (4 * 50 + 2 * 32) * 8 * 1
    assert costs.flops_per_token - costs.activated_flops_per_token == saved
    plain = system_costs(heads_config("gate"), 50)
    assert plain.flops_per_token == plain.activated_flops_per_token


@pytest.mark.parametrize(
    ("config", "length", "error", "says"),
    [
        (heads_config("gate"), -5, ValueError, "sequence_length=-5: expected a whole number of tokens, at least 1"),
        (heads_config("gate"), 0, ValueError, "sequence_length=0: expected a whole number"),
        (heads_config("gate"), 2.5, ValueError, r"sequence_length=2\.5: expected a whole number"),
        (HeadSystemsViTConfig(), None, TypeError, "config is a HeadSystemsViTConfig: expected a HeadSystemsConfig"),
        (DCFormerConfig(), None, TypeError, "config is a DCFormerConfig: expected a HeadSystemsConfig"),
    ],
)
def test_what_has_no_costs_is_refused(config, length, error, says):
    with pytest.raises(error, match=says):
        system_costs(config, length)


def test_talking_heads_count_as_composition():
    assert TALKING["compose_static"]
    costs, plain = system_costs(heads_config("talking_heads")), system_costs(heads_config("plain"))
    assert costs.parameters - plain.parameters == 2 * 2 * 4 * 4  # layers, stages, H, M
