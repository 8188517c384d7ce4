"""TransformerLens hooks our own forward pass: composition is in its patterns."""

from functools import partial

import pytest
import torch
from analysis_models import CHECKPOINT, random_model
from helpers import randomize
from transformers import AutoTokenizer

from dcformer import DCPythiaConfig, DCPythiaForCausalLM
from dcformer.analysis import trace


def pythia():
    return randomize(
        DCPythiaForCausalLM(
            DCPythiaConfig(
                vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                sliding_window=4, attn_implementation="eager",
            )
        )
    )  # fmt: skip


def former(**fields):
    return random_model(vocab_size=288, num_key_value_heads=4, **fields)


MODELS = {
    "dcformer": former,
    "dcpythia": pythia,
    "layernorm": lambda: former(norm_type="layernorm", mlp_type="plain", hidden_act="gelu"),
    "parallel": lambda: former(use_parallel_residual=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_hooks_see_what_the_model_computes(name, tmp_path):
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge

    from dcformer.analysis.transformer_lens import register

    register()
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(tmp_path)
    ids = torch.randint(5, 288, (2, 9))
    expected = trace(model, ids)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
    # the library's wrappers of norms compute them in their own order of operations: some roundings of float32
    close = partial(torch.allclose, atol=5e-6, rtol=1e-5)
    assert close(logits, expected.logits)
    for number, layer in expected.layers.items():
        at = f"blocks.{number}."
        assert close(cache[at + "attn.hook_pattern"], layer.composed_weights)
        assert (layer.composed_weights - layer.weights).abs().max() > 1e-2  # skipping composition would be noticed
        assert close(cache[at + "attn.hook_z"], layer.z)
        assert close(cache[at + "hook_resid_pre"], layer.resid_pre)
        assert close(cache[at + "hook_resid_post"], layer.resid_post)
        if not model.config.use_parallel_residual:
            assert close(cache[at + "hook_resid_mid"], layer.resid_mid)


@pytest.mark.filterwarnings("error:Custom architecture adapter")
def test_the_bundled_checkpoint_is_equal(bundled, prompt):
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge

    from dcformer.analysis.transformer_lens import register

    register()
    expected = trace(bundled[0], prompt)
    bridge = TransformerBridge.boot_transformers(str(CHECKPOINT), device="cpu")
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(prompt["input_ids"])
    assert torch.equal(logits, expected.logits)
    assert torch.equal(cache["blocks.3.attn.hook_pattern"], expected.layers[3].composed_weights)


def test_without_the_library():
    from dcformer.analysis import transformer_lens as ours

    with pytest.raises(AttributeError, match="LlamaArchitectureAdapter"):
        ours.LlamaArchitectureAdapter  # noqa: B018  # looked up for its error
    try:
        import transformer_lens  # noqa: F401  # whether it is there
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install .transformer-lens"):
            ours.register()
