"""A model built by hand whose head 1 can only answer with head 0's pattern, through one query-wise projection.

Two layers; the first does nothing. In the second, head 0 looks at the token "key" and writes nothing, head 1 sees all
tokens alike and its circuit writes the "answer" for "key"; a query-wise projection gives head 1 the pattern of head 0.
Everything else is zero, so that every number can be computed by hand.
"""

import math

import pytest
import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.analysis import (
    TERMS,
    ablate,
    attribute_heads,
    attribute_terms,
    breakdown,
    circuit_scores,
    composition_summary,
    ov_table,
    patch_heads,
    trace,
)

E, H, D, V = 16, 2, 8, 6
ASK, KEY, OTHER, ANSWER = 0, 1, 2, 3  # tokens; each has a channel of its own
IDS = torch.tensor([[OTHER, KEY, OTHER, ASK]])
SHARP = 40.0  # head 0's score from "ask" to "key", but for the norm
GIVEN = 2.5  # what the projection gives
SIZE = 4.0  # of an embedding: its only entry, so that its root mean square is 1
NORMED = SIZE / math.sqrt(SIZE**2 / E + 1e-5)  # what a layer's norm makes of it


@pytest.fixture
def model():
    config = DCFormerConfig(
        vocab_size=V, hidden_size=E, intermediate_size=8, num_hidden_layers=2, num_attention_heads=H, head_dim=D,
        sliding_window=None, qk_norm=False, compose_rank=1, compose_gate=False, compose_key=False, compose_pre=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e60}, attn_implementation="eager",
    )  # fmt: skip
    model = DCFormerForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        tokens = torch.arange(V)
        model.model.embed_tokens.weight[tokens, tokens] = SIZE
        model.lm_head.weight[tokens, tokens] = 1
        attention = model.model.layers[1].self_attn
        # the pair of channels 1 and 5 of a head hardly turns at this theta
        attention.q_proj.weight[1, ASK] = SHARP * math.sqrt(D) / SIZE**2  # head 0: where ask meets key
        attention.k_proj.weight[1, KEY] = 1
        attention.v_proj.weight[D, KEY] = 1  # head 1
        attention.o_proj.weight[ANSWER, D] = 1
        # one generator (post, query); its hidden unit 0 answers to "ask"; RMS norm over 2 heads makes down = (√2, 0)
        attention.compose.dw1_proj.weight[0, ASK] = 5.0
        active = attention.compose.act_fn(torch.tensor(5.0 * NORMED, dtype=torch.float64))
        attention.compose.qkw[0, 0] = 100.0  # down of head 0
        attention.compose.qkw[0, H + 1] = GIVEN / math.sqrt(2) / active  # up of head 1
    return model


def expected_weight():
    """Composed weight of head 1 from "ask" to "key": a uniform 1/4, and what it is given of head 0's."""
    score = SHARP * NORMED**2 / SIZE**2
    looks = math.exp(score) / (math.exp(score) + 3)
    return 0.25, GIVEN * looks


def logit(weight):
    """The answer's logit when head 1 looks at "key" with this weight, through the norms."""
    values = torch.zeros(E, dtype=torch.float64)
    values[ASK], values[ANSWER] = SIZE, weight * NORMED
    return (values[ANSWER] / (values.square().mean() + 1e-5).sqrt()).item()


def test_the_logit_is_as_computed_by_hand(model):
    assert model(IDS).logits[0, -1, ANSWER].item() == pytest.approx(logit(sum(expected_weight())), abs=1e-6)
    assert model(IDS).logits[0, -1].argmax() == ANSWER


def test_breakdown_names_the_head_and_the_term(model):
    found = breakdown(trace(model, IDS), 1, "post", -1, 1)
    own, given = expected_weight()
    assert found.largest(1) == ("q_proj", 0)
    assert found.terms["input"][1].item() == pytest.approx(own)
    assert found.sources["q_proj"][0, 1].item() == pytest.approx(given, abs=1e-6)
    assert found.after[1].item() == pytest.approx(own + given, abs=1e-6)
    everything_else = sum(found.sources[term].abs().sum() for term in TERMS[1:]) - found.sources["q_proj"][0, 1]
    assert everything_else.item() == pytest.approx(0, abs=1e-12)
    assert found.projections["q_proj"].down[:, 0].tolist() == pytest.approx([math.sqrt(2), 0], abs=1e-6)
    assert found.projections["q_proj"].hidden.item() == pytest.approx(math.sqrt(2), abs=1e-6)
    one = composition_summary(trace(model, IDS, positions=[3]))[-1]
    assert one.shares["q_proj"] == pytest.approx(1) and one.flow.argmax() == 1  # from head 0 to head 1
    assert one.inflow[1].item() == pytest.approx(GIVEN) and one.inflow[0] == 0 and one.outflow[0] == one.inflow[1]


def test_attribution_is_head_1s(model):
    scores, gap = attribute_heads(model, IDS, ANSWER, return_gap=True)
    assert scores.shape == (2, H) and gap < 1e-6
    assert scores[1, 1] / scores.sum() > 0.9 and scores[1, 0] == 0
    by_position = attribute_heads(model, IDS, ANSWER, per_position=True)
    assert by_position.shape == (2, H, 4) and torch.allclose(by_position.sum(-1), scores)
    assert by_position[1, 1, 3] == pytest.approx(scores[1, 1].item())  # only the last position leads to the answer
    terms = attribute_terms(model, IDS, ANSWER, terms=TERMS[1:])
    q_proj = terms[1, 1, TERMS[1:].index("q_proj"), 1]
    assert q_proj.item() == pytest.approx(logit(sum(expected_weight())) - logit(0.25), rel=1e-4)
    assert terms.sum().item() == pytest.approx(q_proj.item())


@pytest.mark.parametrize(
    "how", [{"terms": "q_proj"}, {"stages": "post"}, {"terms": "q_proj", "heads": [(1, 1)]}], ids=str
)
def test_ablation_and_patching(model, how):
    clean = trace(model, IDS)
    drop = logit(sum(expected_weight())) - logit(0.25)
    assert drop > 1
    with ablate(model, **how):
        without = model(IDS).logits[0, -1, ANSWER].item()
        with patch_heads(model, clean, [(1, 1)]):
            patched = model(IDS).logits
        with patch_heads(model, clean, [(1, 0)]):
            other = model(IDS).logits[0, -1, ANSWER].item()
        with patch_heads(model, clean, stages="post"):
            whole = model(IDS).logits
    assert clean.logits[0, -1, ANSWER].item() - without == pytest.approx(drop, abs=1e-6)
    assert torch.equal(patched, clean.logits) and torch.equal(whole, clean.logits)
    assert other == pytest.approx(without, abs=1e-12)  # the head that is borrowed from says nothing
    assert torch.equal(model(IDS).logits, clean.logits)  # nothing is left behind


def test_ablations_that_do_not_matter(model):
    clean = model(IDS).logits
    for how in (
        {"heads": [(1, 0)]},
        {"heads": [(0, 0), (0, 1)]},
        {"stages": "pre"},
        {"terms": ["k_proj", "k_gate", "q_gate", "static"]},
        {"terms": "q_proj", "heads": [(1, 0)]},
        {"terms": "q_proj", "layers": [0]},
    ):
        with ablate(model, **how):
            assert torch.equal(model(IDS).logits, clean), how


def test_scaling(model):
    own, given = expected_weight()
    for how, weight in (
        ({"terms": "q_proj", "scale": 0.5}, own + given / 2),
        ({"terms": "input", "stages": "post", "layers": [1], "heads": [(1, 1)]}, given),
        ({"heads": [(1, 1)], "scale": 0.5}, (own + given) / 2),
        ({"heads": [(1, -1)]}, 0),
    ):
        with ablate(model, **how):
            assert model(IDS).logits[0, -1, ANSWER].item() == pytest.approx(logit(weight), abs=1e-6), how


# --- circuits of copying heads ----------------------------------------------------------------------------------------


class Words:
    """A tokenizer of V words."""

    unk_token_id, unk_token = None, None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def convert_ids_to_tokens(self, ids):
        return [f"w{number}" for number in ids]

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_copying_head(model, sign):
    """Head 0 of layer 0 writes the token that it looks at, or its negative."""
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight[:V, :V] = torch.eye(V)
        attention.o_proj.weight[:V, :V] = sign * torch.eye(V)
        attention.q_proj.weight[:V, :V] = torch.eye(V)
        attention.k_proj.weight[:V, :V] = sign * torch.eye(V)
    found = circuit_scores(model, 0, 0)
    assert found.copying == pytest.approx(sign) and found.self_match == pytest.approx(sign)
    for final_norm in (False, True):
        table = ov_table(model, Words(), 0, 0, ["1", 2, "5"], k=V, final_norm=final_norm)
        assert table.tokens == ["1", "2", "5"] and table.ids.shape == (3, V)
        own = [row[0 if sign == 1 else -1] for row in table.top]
        assert own == ["1", "2", "5"] and bool((table.logits[:, 0] >= table.logits[:, -1]).all())
    assert "| '1' | '1'" in str(table) if sign == 1 else "| '1' | '1'" not in str(table)
    silent = circuit_scores(model, 0, 1)
    assert silent.copying == 0 and silent.self_match == 0
