"""A decoding step exported with torch.export equals the model."""

import subprocess
import sys

import pytest
import torch
from helpers import randomize, tiny_config
from peft import LoraConfig, get_peft_model

from dcformer import (
    DCFormerForCausalLM,
    DCFormerModel,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
)
from dcformer.export import DecodingStep, export_decoding_step, plain_model

LENGTH = 20  # more than twice the window of the tiny model's local layers
NOT_COMPOSED = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)


def make(model_class=DCFormerForCausalLM, config=None, attn_implementation="dcformer_chunked", **overrides):
    config = config or tiny_config(**overrides)
    return randomize(model_class._from_config(config, attn_implementation=attn_implementation))


@torch.no_grad()
def run(program, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of the program, token by token."""
    step = program.module()
    logits = [step(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(ids.shape[1])]
    return torch.cat(logits, dim=1)


@torch.no_grad()
def run_eagerly(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of the model, decoding token by token with a dynamic cache."""
    cache, logits = None, []
    for i in range(ids.shape[1]):
        output = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("attn_implementation", ["dcformer_chunked", "eager"])
@pytest.mark.parametrize("kinds", [("sliding", "full"), ("full", "full")], ids=["local-global", "global"])
def test_equals_eager_decoding(kinds, attn_implementation):
    model = make(layer_types=[f"{kind}_attention" for kind in kinds], attn_implementation=attn_implementation)
    program = export_decoding_step(model, batch_size=2, max_cache_len=LENGTH)
    ids = torch.randint(0, 97, (2, LENGTH))
    torch.testing.assert_close(run(program, ids), run_eagerly(model, ids), atol=1e-5, rtol=0)


def test_saved_and_loaded_program_begins_anew_at_position_0(tmp_path):
    model = make(tie_word_embeddings=True)
    path = tmp_path / "step.pt2"
    torch.export.save(export_decoding_step(model, max_cache_len=LENGTH), path)
    program = torch.export.load(path)
    step = program.module()
    for _ in range(2):
        ids = torch.randint(0, 97, (1, LENGTH))
        with torch.no_grad():
            logits = [step(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(LENGTH)]
        torch.testing.assert_close(torch.cat(logits, dim=1), run_eagerly(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("overrides", [{"compose_pre": False}, {"compose_key": False}, {"compose_static": True}])
def test_keys_and_values_of_different_width(overrides):
    model = make(**overrides)
    program = export_decoding_step(model, max_cache_len=12)
    ids = torch.randint(0, 97, (1, 12))
    torch.testing.assert_close(run(program, ids), run_eagerly(model, ids), atol=1e-5, rtol=0)


def test_a_model_with_a_layer_less_than_its_configuration():
    model = make(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"])
    del model.model.layers[1]
    program = export_decoding_step(model, max_cache_len=12)
    ids = torch.randint(0, 97, (1, 12))
    torch.testing.assert_close(run(program, ids), run_eagerly(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("system", ["collaborative", "overlapped", "mixture_of_heads", "output_gate", "head_pruning"])
def test_head_systems(system):
    """Whose caches have other heads and channels than plain attention's."""
    options = {"overlapped": {"overlap": 2}, "mixture_of_heads": {"num_routed_heads_per_tok": 2}}.get(system)
    fields = {"num_key_value_heads": 4, "compose_gate": False, "head_system": system, "head_system_options": options}
    config = HeadSystemsConfig(**tiny_config(**fields).to_diff_dict())
    model = make(HeadSystemsForCausalLM, config)
    ids = torch.randint(0, 97, (1, 12))
    torch.testing.assert_close(
        run(export_decoding_step(model, max_cache_len=12), ids), run_eagerly(model, ids), atol=1e-5, rtol=0
    )


def test_dcpythia():
    config = DCPythiaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = make(DCPythiaForCausalLM, config)
    ids = torch.randint(0, 97, (1, 6))
    program = export_decoding_step(model, max_cache_len=6)
    torch.testing.assert_close(run(program, ids), run_eagerly(model, ids), atol=1e-5, rtol=0)


def test_cache_shorter_than_the_window():
    model = make(layer_types=["sliding_attention", "full_attention"])
    ids = torch.randint(0, 97, (1, 6))
    program = export_decoding_step(model, max_cache_len=6)
    torch.testing.assert_close(run(program, ids), run_eagerly(model, ids), atol=1e-5, rtol=0)


def test_model_is_as_before():
    model = make()
    ids = torch.randint(0, 97, (1, LENGTH))
    with torch.no_grad():
        before = model(ids).logits
        export_decoding_step(model, max_cache_len=LENGTH)
        assert torch.equal(model(ids).logits, before)


def test_local_layers_keep_their_window_only():
    step = DecodingStep(make(layer_types=["sliding_attention", "full_attention"]), batch_size=1, max_cache_len=LENGTH)
    assert [step.get_buffer(f"key_cache_{index}").shape[2] for index in (0, 1)] == [8, LENGTH]


def test_program_runs_without_this_package(tmp_path):
    torch.export.save(export_decoding_step(make(), max_cache_len=4), tmp_path / "step.pt2")
    code = (
        "import sys, torch; step = torch.export.load(sys.argv[1]).module(); "
        "print(*step(input_ids=torch.tensor([[1]]), cache_position=torch.tensor([0])).shape); "
        "assert not {'dcformer', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "step.pt2")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["1", "1", "97"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"max_cache_len": 0}, "max_cache_len=0 must be from 1"),
        ({"max_cache_len": 129}, "max_position_embeddings=128"),
    ],
)
def test_refuses_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        export_decoding_step(make(), **arguments)


def test_refuses_what_has_no_head_embeddings():
    for model in (None, DCFormerModel(tiny_config())):
        name = type(model).__name__
        with pytest.raises(TypeError, match=f"{name}: expected a DCFormerForCausalLM with head_embeddings"):
            plain_model(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_embeddings": "mul"}, "LlamaForCausalLM cannot: give one that was trained without composition"),
        ({"head_embeddings": "add"} | NOT_COMPOSED, "'sliding_attention', but the Qwen2ForCausalLM is made with glob"),
        ({"head_embeddings": "add", "attention_bias": True} | NOT_COMPOSED, "'sliding_attention', but the LlamaFor"),
        (
            {"head_embeddings": "add", "qk_norm": True} | NOT_COMPOSED,
            "qk_norm=True has no counterpart in Qwen2ForCausalLM: expected False",
        ),
        (
            {
                "head_embeddings": "mul",
                "layer_types": ["full_attention"] * 2,
                "hidden_size": 20,
                "num_attention_heads": 3,
            }
            | NOT_COMPOSED
            | {"head_dim": 4},
            "hidden_size=20 is not a multiple of num_attention_heads=3, as LlamaConfig wants it even with a head_dim",
        ),
    ],
    ids=str,
)
def test_refusals_name_what_would_be_made(fields, message):
    layers = ["sliding_attention", "full_attention"]
    fields = {"layer_types": layers, "qk_norm": False, "num_key_value_heads": None} | fields
    with pytest.raises(ValueError, match=message):
        plain_model(make(**fields))


def test_adapters_are_no_part_of_a_plain_model():
    fields = NOT_COMPOSED | {"head_embeddings": "mul", "qk_norm": False, "num_key_value_heads": None}
    model = make(**fields, layer_types=["full_attention"] * 2)
    get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"]))
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.mlp\.up_proj\.base_layer.*Merge adapters"):
        plain_model(model)


def test_refuses_models_that_do_not_decode():
    with pytest.raises(TypeError, match="DCFormerModel: expected a DCFormerForCausalLM"):
        export_decoding_step(DCFormerModel(tiny_config()))
    with pytest.raises(ValueError, match="training mode"):
        export_decoding_step(make().train())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        export_decoding_step(DCFormerForCausalLM(tiny_config(rope_parameters=rope)).eval())
    model = make()
    model.config._attn_implementation = "dcformer_triton"
    with pytest.raises(ValueError, match=r"dcformer_triton.*set_attn_implementation"):
        export_decoding_step(model)
