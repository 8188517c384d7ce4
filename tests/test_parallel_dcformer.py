"""The tensor-parallel plan names what a model has, and sizes that would cut a group are refused."""

from types import SimpleNamespace

import pytest
import torch
from helpers import PLAIN, VALID_SWITCHES, tiny_config

from dcformer import DCFormerForCausalLM
from dcformer.parallel_dcformer import check_tensor_parallel


@pytest.mark.parametrize("switches", [*VALID_SWITCHES[::5], PLAIN], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mlp_gates": 4},
        {"mlp_type": "plain", "qk_norm": False},
        {"num_key_value_heads": 4, "key_head_map": [[0, 0, 1, 1], [0, 0, 0, 0]]},
        {"num_key_value_heads": None, "head_embeddings": "mul"},
    ],
    ids=str,
)
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
        ({"compose_groups": 8, "num_key_value_heads": None, "head_embeddings": "add"}, {1, 2, 4, 8}),
        ({"compose_groups": 4, "num_key_value_heads": None, "head_embeddings": "add"}, {1, 2, 4}),
        ({"num_key_value_heads": None, "head_embeddings": "add", **PLAIN}, {1, 2, 4, 8}),
        (dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False), {1, 2, 4, 8}),
    ],
    ids=str,
)
def test_tensor_parallel_sizes_that_cut_nothing(fields, sizes):
    config = tiny_config(**({"num_attention_heads": 8, "num_key_value_heads": 8} | fields))
    for size in range(1, 9):
        if size in sizes:
            check_tensor_parallel(config, size)
        else:
            with pytest.raises(ValueError, match=f"is not a multiple of the tensor-parallel size {size}"):
                check_tensor_parallel(config, size)


@pytest.mark.parametrize(
    ("row", "sizes"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], {1, 2, 4}),
        ([1, 0, 0, 1, 3, 2, 2, 3], {1, 2}),
        ([0, 1, 2, 3, 0, 1, 2, 3], {1}),
        ([0] * 8, {1}),
        ([4, 5, 6, 7, 0, 1, 2, 3], {1}),  # the other rank's heads
    ],
)
@pytest.mark.parametrize("field", ["key_head_map", "value_head_map"])
def test_tensor_parallel_sizes_that_cut_no_map(field, row, sizes):
    straight = list(range(8))
    config = tiny_config(num_attention_heads=8, num_key_value_heads=8, **PLAIN, **{field: [straight, row]})
    for size in (1, 2, 4, 8):
        if size in sizes:
            check_tensor_parallel(config, size)
        else:
            with pytest.raises(ValueError, match=rf"{field}\[1\] cannot be cut for the tensor-parallel size {size}"):
                check_tensor_parallel(config, size)


def test_pipeline_stages_are_refused():
    model = DCFormerForCausalLM(tiny_config())
    with pytest.raises(ValueError, match=r"pp_size=2: DCFormerForCausalLM does not run in pipeline stages.*FSDP"):
        DCFormerForCausalLM.maybe_distribute_model(model, SimpleNamespace(pp_size=2, tp_size=1), object())
