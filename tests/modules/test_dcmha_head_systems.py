"""DCMHA with a head system: it begins as plain attention where the system can, and computes what models compute."""

import copy
import pickle

import pytest
import torch
from helpers import randomize
from torch import nn

from dcformer.errors import DCFormerError
from dcformer.modules import DCMHA

# Systems with options at which they are plain attention when made from it.
EXACT = {
    "talking_heads": ({}, {"compose_query": False, "compose_key": False, "compose_static": True}),
    "collaborative": ({}, {}),
    "overlapped": ({"overlap": 0}, {}),
    "mixture_of_heads": ({}, {}),
    "output_gate": ({}, {}),
    "head_pruning": ({}, {"compose_query": False, "compose_key": False, "compose_static": True}),
}
PLAIN = {"compose_query": False, "compose_key": False, "compose_static": True}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(heads=4, width=32):
    torch.manual_seed(1)
    module = nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64).eval()
    nn.init.normal_(module.in_proj_bias)
    nn.init.normal_(module.out_proj.bias)
    return module


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("length", [6, 9])
def test_made_from_plain_attention(name, length):
    """Nothing is composed at first, and the system changes nothing: outputs and weights are the library's."""
    options, compose = EXACT[name]
    module = plain()
    made = DCMHA.from_torch(module, head_system=name, head_system_options=options, zero_init=True, **compose)
    query, states = noise(2, 6, 32), noise(2, length, 32, seed=1)
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[1, -2:] = True
    output, weights = made(query, states, states, key_padding_mask=hidden)
    expected, expected_weights = module(query, states, states, key_padding_mask=hidden)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    assert not any(name.startswith("in_proj") for name, _ in made.named_parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("collaborative", {"shared_key_query_dim": 12}),
        ("overlapped", {"overlap": 2}),
        ("mixture_of_heads", {"num_shared_heads": 1, "num_routed_heads_per_tok": 2}),
        ("output_gate", {"output_gate": "elementwise"}),
    ],
)
def test_chunked_is_eager_with_every_gradient(name, options):
    made = randomize(DCMHA(32, 4, batch_first=True, head_system=name, head_system_options=options)).double()
    query, states = noise(2, 6, 32), noise(2, 9, 32, seed=1)
    found = []
    for implementation in ("eager", "dcformer_chunked"):
        made.zero_grad()
        made.attn_implementation = implementation
        output = made(query, states, states, need_weights=False)[0]
        (output * noise(*output.shape, seed=3)).sum().backward()
        found.append({"": output.detach()} | {n: p.grad for n, p in made.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and any("compose" in n for n in found[0])
    assert any(n.startswith("system.") for n in found[0])
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-9, atol=1e-9, msg=key)


def test_losses_are_the_systems():
    made = DCMHA(32, 4, batch_first=True, head_system="mixture_of_heads", head_system_options={"routing_form": "paper"})
    assert made.losses() == {} and DCMHA(32, 4).losses() == {}
    states = noise(2, 6, 32).float()
    made(states, states, states)
    torch.testing.assert_close(made.losses()["load_balance"], torch.tensor(1.0))  # all of H heads: Σ p


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["boolean", "additive"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "single"])
def test_padding_is_not_in_the_losses(batched, dtype):
    torch.manual_seed(0)
    made = DCMHA(32, 4, head_system="mixture_of_heads", head_system_options={"num_routed_heads_per_tok": 2})
    layer = nn.TransformerEncoderLayer(32, 4, 16, dropout=0)
    layer.self_attn = made
    states, hidden = noise(6, 2, 32).float(), torch.zeros(2, 6, dtype=torch.bool)
    hidden[0, 4:] = hidden[1, :3] = True
    if not batched:
        states, hidden = states[:, 0], hidden[0]
    padding = hidden.to(dtype) if dtype == torch.bool else torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))

    def loss(states, losses):
        layer(states, src_key_padding_mask=padding)
        return losses()["load_balance"]

    changed = states + 3 * noise(*states.shape, seed=1).float() * hidden.t()[..., None]  # of padding alone
    expected = loss(states, lambda: made.system.losses((~hidden).view(-1, 6)))
    for given in (states, changed):
        torch.testing.assert_close(loss(given, made.losses), expected)
    made(states, states, states)  # and no mask of an earlier call
    assert float((made.losses()["load_balance"] - expected).abs()) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_system": "talkative"}, ValueError, "head_system='talkative' is unknown: expected one of plain"),
        ({"head_system": "overlapped", "head_system_options": {"o": 1}}, ValueError, "'o' is not an option"),
        (
            {"head_system": "overlapped", "head_system_options": {"overlap": 99}},
            ValueError,
            "overlap=99 must be",
        ),
        (
            {"head_system": "overlapped"},
            ValueError,
            "overlap='depth0_half' goes by the number of a layer.* 0 to head_dim",
        ),
        (
            {"head_system": "overlapped", "head_system_options": {"overlap": [2, 2]}},
            ValueError,
            r"overlap=\[2, 2\] has 2 entries: expected one for each of the 1 layers",
        ),
        (
            {"head_system": "overlapped", "head_system_options": {"overlap": [9]}},
            ValueError,
            r"overlap\[0\]=9 must be a whole number from 0 to 8",
        ),
        (
            {"head_system": "head_pruning", "head_system_options": {"kept_heads": [[0, 9]]}, **PLAIN},
            ValueError,
            r"kept_heads\[0\]=\[0, 9\]: expected one or more of 0 to 3",
        ),
        ({"head_system": "overlapped", "head_system_options": 3}, ValueError, "head_system_options=3: expected a dict"),
        ({"head_system": "overlapped", "head_system_options": ["overlap"]}, ValueError, "expected a dictionary"),
        ({"head_system": "overlapped", "kdim": 8}, DCFormerError, "kdim=8 and vdim=32: .* as wide as the queries"),
        ({"head_system": "talking_heads"}, ValueError, "talking heads are static composition alone"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DCMHA(32, 4, **arguments)


def test_options_of_layers_have_one_entry():
    """And a system of one's own reads the number of its layer, as in models."""
    pruned = DCMHA(32, 4, head_system="head_pruning", head_system_options={"kept_heads": [[0, 2]]}, **PLAIN)
    overlapped = DCMHA(32, 4, head_system="overlapped", head_system_options={"overlap": [4]})
    assert pruned.out_proj.in_features == 16 and overlapped.out_proj.in_features == 64
    states = noise(5, 2, 32).float()
    for made in (pruned, overlapped):
        assert made(states, states, states)[0].shape == (5, 2, 32)
        assert (made.system.sizes.layer, made.system.sizes.num_layers) == (0, 1)


@pytest.mark.parametrize(
    ("name", "options"), [("overlapped", {"overlap": 4}), ("mixture_of_heads", {}), ("output_gate", {})]
)
def test_nothing_of_a_call_is_in_copies(name, options):
    """Neither masks, which may be of a transform of torch.func that has ended, nor what losses are made of."""
    made = DCMHA(32, 4, batch_first=True, head_system=name, head_system_options=options)
    states, hidden = noise(2, 5, 32).float(), torch.zeros(2, 5, dtype=torch.bool)

    def call(x, padding):
        return made(x, x, x, key_padding_mask=padding)[0]

    torch.func.vmap(call)(states[:, None], hidden[:, None])
    has_losses = name == "mixture_of_heads"
    assert (made._padding is not None) == has_losses
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied._padding is None and copied.losses() == {}
        assert torch.equal(copied(states, states, states)[0], made(states, states, states)[0])
        assert bool(copied.losses()) == has_losses


def test_copies_of_compiled_modules_are_not_compiled():
    """As torch's own: what is compiled computes with the original's parameters."""
    made = DCMHA(32, 4, batch_first=True, head_system="output_gate")
    made.compile(backend="eager")
    states = noise(2, 5, 32).float()
    assert made(states, states, states)[0].any()
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        for parameter in copied.parameters():
            nn.init.zeros_(parameter)
        assert not copied(states, states, states)[0].any()


def test_options_for_a_copy_are_a_dictionary():
    with pytest.raises(ValueError, match=r"head_system_options=3: expected a dictionary of options and their values"):
        DCMHA.from_torch(plain(), head_system="overlapped", head_system_options=3)


def test_keys_and_values_of_other_states_are_refused():
    made = DCMHA(32, 4, head_system="output_gate")
    states = noise(5, 2, 32).float()
    with pytest.raises(DCFormerError, match="keys and values of the same states"):
        made(states, states, states.clone())
    layer = nn.TransformerDecoderLayer(32, 4, 16)
    layer.self_attn, layer.multihead_attn = made, DCMHA(32, 4, head_system="output_gate", **PLAIN)
    assert layer(states, noise(7, 2, 32).float()).shape == (5, 2, 32)
