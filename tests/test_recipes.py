"""Recipes of the paper's table 3: every number that follows from them."""

import pytest
from transformers import TrainingArguments

from dcformer.analysis import compose_overhead, num_compose_parameters
from dcformer.errors import DCFormerError
from dcformer.recipes import RECIPES, recipe

# size: layers, E, H, learning rate, steps, tokens, 6 N tokens, tokens per parameter; millions of parameters without
# composition, of composition, and its share of operations at 2048 tokens
TABLE = {
    "405m": (24, 1024, 16, 3e-4, 13_500, 7.08e9, 1.72e19, 17.5, 411.3, 8.26, 0.067),
    "834m": (24, 1536, 24, 2.5e-4, 28_610, 15e9, 7.51e19, 18.0, 833.9, 18.58, 0.056),
    "1.4b": (24, 2048, 32, 2e-4, 49_591, 26e9, 2.21e20, 18.4, 1439.1, 33.03, 0.048),
}


@pytest.mark.parametrize("size", TABLE)
def test_table_3(size):
    layers, width, heads, rate, steps, tokens, flops, per_parameter, plain, composition, share = TABLE[size]
    run, baseline = recipe(f"dcformer-{size}"), recipe(f"transformer++-{size}")
    assert (run.config.num_hidden_layers, run.config.hidden_size, run.config.num_attention_heads) == (
        layers,
        width,
        heads,
    )
    assert run.config.head_dim == 64 and run.config.sliding_window == 256
    assert (run.learning_rate, run.steps, run.sequences) == (rate, steps, 256)
    assert run.tokens == pytest.approx(tokens, rel=1e-3)
    assert run.flops == pytest.approx(flops, rel=2.5e-3)  # three digits
    assert run.tokens / (run.flops / 6 / run.tokens) == pytest.approx(per_parameter, abs=0.05)
    assert baseline.parameters == pytest.approx(plain * 1e6, abs=5e4)
    assert num_compose_parameters(run.config) == pytest.approx(composition * 1e6, abs=5e3)
    assert compose_overhead(run.config, 2048).flops_ratio == pytest.approx(share, abs=5e-4)
    assert compose_overhead(run.config, 2048).parameter_ratio == pytest.approx(0.027, abs=5e-4)


def test_families():
    assert len(RECIPES) == 15 and all(recipe(name).name == name for name in RECIPES)
    plain, normed = recipe("transformer++-405m"), recipe("transformer++-405m-qknorm")
    for run, qk_norm in ((plain, False), (normed, True)):
        assert run.config.qk_norm is qk_norm
        assert not run.config.compose_generators and not run.config.compose_static
        assert set(run.config.layer_types) == {"full_attention"}
    assert recipe("dcformer-405m-3to1").config.layer_types.count("full_attention") == 6
    assert recipe("dcformer-405m-query").config.compose_generators == (("pre", "query"), ("post", "query"))


def test_arguments():
    arguments = recipe("dcformer-405m").arguments(devices=8, per_device=4)
    assert arguments == {
        "max_steps": 13_500,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    }
    scaled = recipe("dcformer-405m").scaled(0.01)
    assert scaled.steps == 135 and scaled.tokens == 135 * 256 * 2048
    assert recipe("dcformer-405m").scaled(1e-9).steps == 1


@pytest.mark.parametrize(("scale", "warmup"), [(1, 135), (0.1, 14), (0.01, 2), (0.007, 0), (1e-9, 0)])
def test_warm_up_is_one_per_cent(scale, warmup, tmp_path):
    """Rounded up, as the trainer does it; none where it would be a step of rate 0 in a short run."""
    run = recipe("dcformer-405m").scaled(scale)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **run.arguments())
    assert arguments.get_warmup_steps(run.steps) == warmup


def test_overrides_that_a_configuration_turns_into_fields():
    config = recipe("dcformer-405m", layer_pattern="G", rope_theta=5e5, num_labels=3).config
    assert set(config.layer_types) == {"full_attention"} and config.num_labels == 3
    assert config.rope_parameters["rope_theta"] == 5e5


REFUSED = {
    "recipe 'dcformer-7b' is unknown: expected one of dcformer-405m": lambda: recipe("dcformer-7b"),
    "scale is 0: expected more than 0": lambda: recipe("dcformer-405m").scaled(0),
    "scale is 2": lambda: recipe("dcformer-405m").scaled(2),
    "DCFormerConfig has no field 'hidden_sizes'; did you mean hidden_size": lambda: recipe(
        "dcformer-405m", hidden_sizes=2
    ),
    "layer_pattern has no effect beside layer_types": lambda: recipe(
        "dcformer-405m", layer_pattern="G", layer_types=["full_attention"] * 24
    ),
    "devices is 0": lambda: recipe("dcformer-405m").arguments(devices=0),
    "per_device_train_batch_size is 4.0: expected an integer": lambda: recipe("dcformer-405m").arguments(2, 4.0),
    "use 2 or 4 sequences per device": lambda: recipe("dcformer-405m").arguments(devices=8, per_device=3),
    "use 4 or 8 devices": lambda: recipe("dcformer-405m").arguments(devices=6, per_device=4),
    "use 2 devices with 2 sequences each": lambda: recipe("dcformer-405m").arguments(devices=3, per_device=3),
    "use 2 devices with 4 sequences each": lambda: recipe("dcformer-405m").arguments(devices=3, per_device=5),
    "devices is True: expected an integer": lambda: recipe("dcformer-405m").arguments(devices=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_says_so(message):
    with pytest.raises(DCFormerError, match=message):
        REFUSED[message]()
