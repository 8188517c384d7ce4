"""Models in shards of FSDP2: gathered where a function only reads them, refused by name where it changes them."""

import pytest
import torch
from helpers import randomize, tiny_config
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer import DCFormerForCausalLM, HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.analysis import circuit_scores, circuit_weights, head_diversity, trace
from dcformer.errors import DCFormerError
from dcformer.head_systems import head_importance, prune_heads, to_head_system
from dcformer.modules import convert_attention, load_compose, save_compose
from dcformer.shards import gathered, is_sharded

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def shard():
    """Puts a model in shards of a group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def of(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    yield of
    torch.distributed.destroy_process_group()


def _dcformer():
    return DCFormerForCausalLM(tiny_config())


def _llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=4))


def _converted():
    return convert_attention(_llama(), zero_init=False)


def _pruned():
    return HeadSystemsForCausalLM(HeadSystemsConfig(**SIZES, head_system="head_pruning"))


def test_parameters_are_gathered(shard):
    model = _dcformer()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not is_sharded(model)
    assert all(gathered(parameter) is parameter for parameter in model.parameters())
    shard(model)
    assert is_sharded(model)
    for name, parameter in model.named_parameters():
        assert type(gathered(parameter)) is torch.Tensor and torch.equal(gathered(parameter), before[name])
    gathered(model.model.norm.weight).sum().backward()
    assert torch.equal(gathered(model.model.norm.weight.grad), torch.ones_like(before["model.norm.weight"]))


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (_llama, lambda m, _: convert_attention(m), "LlamaAttention is in shards .*: convert before"),
        (_llama, load_compose, "LlamaAttention is in shards .*: convert before"),
        (_converted, load_compose, r"is in shards .*: load the composition before"),
        (_dcformer, lambda m, _: to_head_system(m, "output_gate"), r"FSDP\w+ is in shards .*: convert it before"),
        (_dcformer, lambda m, _: head_importance(m, []), r"FSDP\w+ is in shards .*: convert it before"),
        (_pruned, lambda m, _: head_importance(m, []), r"FSDP\w+ is in shards .*: load it again, whole"),
        (_pruned, lambda m, _: prune_heads(m), r"FSDP\w+ is in shards .*: load it again, whole"),
        (_dcformer, lambda m, _: circuit_scores(m, 0, 0), r"FSDP\w+ is in shards .*: load it again, whole"),
    ],
)
def test_what_changes_a_model_refuses_shards(shard, tmp_path, make, call, message):
    save_compose(_converted(), tmp_path / "compose.safetensors")
    model = shard(make())
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(DCFormerError, match=message):
        call(model, tmp_path / "compose.safetensors")
    assert [name for name, _ in model.named_modules()] == before


def test_what_is_no_model_is_named():
    with pytest.raises(TypeError, match="model is a str"):
        head_importance("x", [])
    with pytest.raises(DCFormerError, match="y cannot be read"):
        load_compose("x", "y")


def test_analysis_reads_gathered_weights(shard):
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation="eager"))).eval()
    ids = torch.arange(12)[None]
    weights, diversity = circuit_weights(model, 1), head_diversity(model, "ov")
    outputs = trace(model, ids).layers[1].head_outputs
    shard(model)
    for name, tensor in vars(circuit_weights(model, 1)).items():
        assert torch.equal(tensor, getattr(weights, name)), name
    torch.testing.assert_close(trace(model, ids).layers[1].head_outputs, outputs)
    torch.testing.assert_close(head_diversity(model, "ov").curves, diversity.curves)


def test_analysis_refuses_heads_on_several_devices(monkeypatch):
    """It would take a part of them for all."""
    model = _dcformer()
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(DCFormerError, match="heads of this DCFormerForCausalLM are divided over devices"):
        circuit_weights(model, 0)


def test_a_saved_composition_is_whole(shard, tmp_path):
    model = _converted()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_compose(shard(model), tmp_path / "compose.safetensors")
    other = load_compose(_llama(), tmp_path / "compose.safetensors")
    for name, tensor in other.state_dict().items():
        assert ".compose" not in name or torch.equal(tensor, expected[name]), name
