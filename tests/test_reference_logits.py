"""Logits of the original JAX and PyTorch code, reproduced from their own weights (those from JAX placed by hand)."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import AUTHORS_WEIGHTS, FIXTURES, authors_folder
from transformers import AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM

TOLERANCE = 5e-5  # the original JAX model's own float32 noise on 4 layers is about 2e-5
IMPLEMENTATIONS = ("eager", "dcformer_chunked")


def _compose_tensors(dw1, qkw, dd):
    """dw1 [E, G, C, K], qkw [G, C, K, 2R, M], dd [E, G, C·M] -> the three native tensors."""
    return {
        "self_attn.compose.dw1_proj.weight": dw1.flatten(1).T,
        "self_attn.compose.qkw": qkw.flatten(3).flatten(0, 2),
        "self_attn.compose.gate_proj.weight": dd.flatten(1).T,
    }


def _arrays(fixture, hidden):
    """The arrays of a fixture by file name, and under "hidden" the output of each layer."""
    arrays = {path.stem: torch.from_numpy(np.load(path)) for path in (FIXTURES / fixture).glob("*.npy")}
    return arrays | {"hidden": [arrays[f"{hidden}_{i}"] for i in range(4)]}


def _load(model, tensors):
    model.load_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def jax_model():
    """The MaxText checkpoint A1 and what the JAX code computed with it."""
    tensorstore = pytest.importorskip("tensorstore", reason="reading a MaxText checkpoint needs tensorstore")
    folder = FIXTURES / "A1"
    hyper = json.loads((folder / "meta.json").read_text())["hyperparameters"]

    def read(name):
        path = folder / "checkpoints" / "1000" / "state" / f"params.{name}"
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
        return torch.from_numpy(np.asarray(tensorstore.open(spec).result().read().result(), dtype=np.float32))

    config = DCFormerConfig(
        vocab_size=hyper["vocab_size"],
        hidden_size=hyper["emb_dim"],
        intermediate_size=hyper["mlp_dim"],
        num_hidden_layers=hyper["num_decoder_layers"],
        num_attention_heads=hyper["num_query_heads"],
        head_dim=hyper["head_dim"],
        sliding_window=8,
        layer_pattern="LG",
        qk_norm=True,
        norm_eps=1e-5,
        compose_act="gelu_pytorch_tanh",
    )
    tensors = {
        "model.embed_tokens.weight": read("token_embedder.embedding"),
        "model.norm.weight": read("decoder.decoder_norm.scale"),
        "lm_head.weight": read("decoder.logits_dense.kernel").T,
    }
    for layer in range(config.num_hidden_layers):
        block, sub = divmod(layer, 2)

        def pick(name, axis=1, block=block, sub=sub):
            return read("decoder.layers." + name.format(sub)).select(axis, block)

        attention = "self_attention_{}."
        named = {
            "input_layernorm.weight": pick("pre_self_attention_layer_norm_{}.scale"),
            "post_attention_layernorm.weight": pick("post_self_attention_layer_norm_{}.scale"),
            "mlp.gate_proj.weight": pick("mlp_{}.wi_0.kernel").T,
            "mlp.up_proj.weight": pick("mlp_{}.wi_1.kernel").T,
            "mlp.down_proj.weight": pick("mlp_{}.wo.kernel").T,
            "self_attn.q_proj.weight": pick(attention + "query.kernel").flatten(1).T,
            "self_attn.k_proj.weight": pick(attention + "key.kernel").flatten(1).T,
            "self_attn.v_proj.weight": pick(attention + "value.kernel").flatten(1).T,
            "self_attn.o_proj.weight": pick(attention + "out.kernel").flatten(0, 1).T,
            "self_attn.q_norm.weight": pick(attention + "q_norm.scale"),
            "self_attn.k_norm.weight": pick(attention + "k_norm.scale"),
            **_compose_tensors(
                pick(attention + "AttentionOp_0.dyn_w_proj.dw1.kernel"),
                pick(attention + "AttentionOp_0.dyn_w_proj.qkw"),
                pick(attention + "AttentionOp_0.dyn_w_proj.dd.kernel"),
            ),
        }
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in named.items()}
    return _load(DCFormerForCausalLM(config), tensors), _arrays("A1", "hidden")


@pytest.fixture(scope="module", params=AUTHORS_WEIGHTS)
def torch_model(request, tmp_path_factory):
    """The published PyTorch layout B1 as a Hub folder, and what the authors' code computed with it."""
    folder = authors_folder(tmp_path_factory.mktemp("authors") / "B1", request.param)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model, _arrays("B1", "prefill_hidden")


def _decode(model, tokens, prompt_length):
    """Logits of the tokens after the prompt, fed one at a time."""
    out = model(tokens[:, :prompt_length], use_cache=True) if prompt_length else None
    cache, logits = (out.past_key_values if out else None), []
    for position in range(prompt_length, tokens.shape[1]):
        out = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("training", [False, True])
def test_jax_forward(jax_model, implementation, training):
    model, expected = jax_model
    model.set_attn_implementation(implementation)
    model.train(training)
    out = model(expected["tokens"], output_hidden_states=True)
    model.eval()
    torch.testing.assert_close(out.logits, expected["logits"], atol=TOLERANCE, rtol=0)
    # Transformers returns the normalized states as the last, and not the last layer's own output
    theirs = [expected["hidden_embed"], *expected["hidden"][:-1], expected["hidden_final_norm"]]
    for ours, states in zip(out.hidden_states, theirs, strict=True):
        torch.testing.assert_close(ours, states, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_jax_decoding(jax_model, implementation):
    model, expected = jax_model
    model.set_attn_implementation(implementation)
    logits = _decode(model, expected["tokens"], 0)
    torch.testing.assert_close(logits, expected["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("training", [False, True])
def test_torch_prefill(torch_model, implementation, training):
    model, expected = torch_model
    model.set_attn_implementation(implementation)
    model.train(training)
    out = model(expected["tokens"], output_hidden_states=True)
    model.eval()
    torch.testing.assert_close(out.logits, expected["prefill_logits"], atol=TOLERANCE, rtol=0)
    for ours, theirs in zip(out.hidden_states[1:-1], expected["hidden"][:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_torch_training(torch_model, implementation):
    """The authors' training forward sees one key more than the window, and is ours with such a window."""
    trained, expected = torch_model
    config = copy.deepcopy(trained.config)
    config.sliding_window += 1
    model = DCFormerForCausalLM._from_config(config, attn_implementation=implementation)
    logits = _load(model, trained.state_dict()).train()(expected["tokens"]).logits
    torch.testing.assert_close(logits, expected["train_logits_fp32_probs"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_torch_decoding(torch_model, implementation):
    model, expected = torch_model
    model.set_attn_implementation(implementation)
    logits = _decode(model, expected["tokens"], 24)
    torch.testing.assert_close(logits, expected["decode_logits"], atol=TOLERANCE, rtol=0)
