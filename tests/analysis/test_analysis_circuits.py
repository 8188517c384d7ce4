"""OV tables and circuit scores against their definitions, with every norm, bias and MLP that a model may have."""

import pytest
import torch
from analysis_models import random_model
from helpers import randomize

from dcformer import DCFormerModel, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.analysis import circuit_scores, circuit_weights, ov_table, single_token
from dcformer.errors import DCFormerError


def pythia():
    config = DCPythiaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    return randomize(DCPythiaForCausalLM(config))


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("make", [random_model, pythia])
def test_table_is_the_equation(make, final_norm, bundled):
    model, ids = make(), [3, 50, 96]
    table = ov_table(model, bundled[1], 1, -2, ids, k=5, final_norm=final_norm)
    first, second = model.model.layers
    with torch.no_grad():
        x = model.model.embed_tokens(torch.tensor(ids))
        x = x + first.mlp(first.post_attention_layernorm(x))
        weights = second.self_attn
        dim = weights.head_dim
        key_value = 2 // weights.num_key_value_groups
        value = second.input_layernorm(x) @ weights.v_proj.weight[key_value * dim : (key_value + 1) * dim].T
        moved = value @ weights.o_proj.weight[:, 2 * dim : 3 * dim].T
        logits = model.lm_head(model.model.norm(moved) if final_norm else moved)
    assert table.head == 2
    assert torch.allclose(table.logits, logits.topk(5).values, atol=1e-4)
    assert torch.equal(table.ids, logits.topk(5).indices)


def test_scores_are_those_of_the_large_products():
    model = random_model(torch.float64)
    weights = circuit_weights(model, 1)
    embed, unembed = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach().T
    for head in range(4):
        found = circuit_scores(model, 1, head)
        for product, score in (
            (embed @ weights.W_V[head] @ weights.W_O[head] @ unembed, found.copying),
            (embed @ weights.W_Q[head] @ weights.W_K[head].T @ embed.T, found.self_match),
        ):
            values = torch.linalg.eigvals(product)  # [V]
            assert score == pytest.approx((values.sum().real / values.abs().sum()).item(), abs=1e-6)
            assert -1 <= score <= 1


def test_one_text_is_one_token(bundled):
    number = single_token(bundled[1], "tuna")
    for tokens in ("tuna", ["tuna"], number, torch.tensor(number)):
        assert ov_table(*bundled, 0, 0, tokens).tokens == ["tuna"]


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_nan_outside_the_layers(name, bundled):
    """It would be a score of 0 otherwise."""
    model = random_model()
    with torch.no_grad():
        model.get_submodule(name).weight[7, 0] = float("nan")
    with pytest.raises(DCFormerError, match=f"{name}.weight of DCFormerForCausalLM holds NaN or infinity"):
        circuit_scores(model, 0, 0)
    with pytest.raises(DCFormerError, match=f"{name}.weight of DCFormerForCausalLM holds NaN or infinity"):
        ov_table(model, bundled[1], 0, 0, [7])


def test_tokens_that_are_not_one(bundled):
    model, tokenizer = bundled
    assert single_token(tokenizer, " fish") == single_token(tokenizer, "fish")
    for text, message in (
        (" a fish", r"' a fish' is 2 tokens, \['a', 'fish'\]: expected a text that is one token"),
        ("", r"'' is 0 tokens"),
        ("zébra", "'zébra' is unknown to the tokenizer, which makes it '<unk>'"),
        ("zebra", r"'zebra' is 5 tokens, \['z', '##e', .*: expected a text that is one token"),
    ):
        with pytest.raises(DCFormerError, match=message):
            ov_table(model, tokenizer, 0, 0, ["tuna", text])
    for call, message in (
        (lambda: ov_table(model, tokenizer, 4, 0, ["tuna"]), "layer 4 is out of range"),
        (lambda: ov_table(model, tokenizer, 0, 8, ["tuna"]), "head 8 is out of range"),
        (lambda: ov_table(model, tokenizer, 0, 0, [412]), "token id 412 is out of range"),
        (lambda: ov_table(model, tokenizer, 0, 0, [-1]), "token id -1 is out of range"),
        (lambda: ov_table(model, tokenizer, 0, 0, []), "no token id is named"),
        (lambda: ov_table(model, tokenizer, 0, 0, [None]), "token id None is not a whole number"),
        (lambda: ov_table(model, tokenizer, 0, 0, ["tuna"], k=0), "k=0 must be at least 1"),
        (lambda: ov_table(model, tokenizer, 0, 0, ["tuna"], k=2.5), "k 2.5 is not a whole number"),
        (lambda: circuit_scores(DCFormerModel(model.config), 0, 0), "DCFormerModel has no lm_head"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
