"""DCViT with head systems: what begins as plain attention, losses, saving, and what is refused."""

import pytest
import torch
from helpers import randomise

from dcformer import DCViTConfig, DCViTForImageClassification

SMALL = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12,
    "patch_size": 4, "num_labels": 3, "qk_norm": None,
}  # fmt: skip
PLAIN = {"compose_query": False, "compose_key": False, "compose_pre": False, "compose_post": False,
         "compose_static": False}  # fmt: skip
STATIC = {"compose_query": False, "compose_key": False}
SYSTEMS = {
    "collaborative": {"shared_key_query_dim": 24},
    "overlapped": {"overlap": "depth1"},
    "mixture_of_heads": {"num_shared_heads": 1, "num_routed_heads_per_tok": 2},
    "output_gate": {},
}


@pytest.fixture
def images():
    return torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def make(name="plain", options=None, **fields):
    torch.manual_seed(0)
    config = DCViTConfig(**SMALL | fields, head_system=name, head_system_options=options)
    return randomise(DCViTForImageClassification(config)).eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [("collaborative", {}), ("overlapped", {"overlap": 0}), ("overlapped", {"overlap": 2}),
     ("mixture_of_heads", {}), ("output_gate", {"output_gate_scale": 2.0})],
)  # fmt: skip
@pytest.mark.parametrize("compose", [{}, PLAIN], ids=["composed", "plain"])
def test_made_from_attention_without_a_system(name, options, compose, images):
    """With the parameters of plain attention the systems that can be it are it; overlapped heads are not."""
    compose = compose | {"qkv_bias": name != "collaborative"}  # a part of whose biases only a softmax leaves out
    plain, model = make(**compose).double(), make(name, options, **compose).double()
    state = plain.state_dict()
    with torch.no_grad():
        for ours, theirs in zip(model.dcvit.layers, plain.dcvit.layers, strict=True):
            old, new = theirs.attention, ours.attention
            weight = new.system.from_mha(old.q_proj, old.k_proj, old.v_proj, old.o_proj)
            new.o_proj.weight.copy_(weight)
            new.o_proj.bias.copy_(old.o_proj.bias)
        rest = {key: value for key, value in state.items() if "_proj" not in key or "compose" in key}
        model.load_state_dict(rest, strict=False)
        difference = (model(images.double()).logits - plain(images.double()).logits).abs().max()
    assert (difference < 1e-12) == (options != {"overlap": 2})


@pytest.mark.parametrize("name", SYSTEMS)
def test_implementations_agree_and_folders_load(name, images, tmp_path):
    model = make(name, SYSTEMS[name]).double()
    with torch.no_grad():
        expected = model(images.double()).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(images.double()).logits, expected, rtol=1e-9, atol=1e-9)
        model.save_pretrained(tmp_path)
        loaded = DCViTForImageClassification.from_pretrained(tmp_path)
        assert type(loaded.dcvit.layers[0].attention.system) is type(model.dcvit.layers[0].attention.system)
        torch.testing.assert_close(loaded(images.double()).logits, expected, rtol=1e-9, atol=1e-9)
    model.train()(images.double(), labels=torch.tensor([0, 1, 2, 0, 1])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "attention.system" in n)


def test_losses_of_the_systems_are_in_the_loss(images):
    options = SYSTEMS["mixture_of_heads"] | {"router_aux_loss_coef": 0.5}
    with_loss, without = (
        make("mixture_of_heads", options),
        make("mixture_of_heads", options | {"router_aux_loss_coef": 0.0}),
    )
    labels = torch.tensor([0, 1, 2, 0, 1])
    one, other = (model(images, labels=labels).loss for model in (with_loss, without))
    model = with_loss.dcvit
    model(images)
    balance = torch.stack([layer.attention.system.losses()["load_balance"] for layer in model.layers]).mean()
    torch.testing.assert_close(one - other, 0.5 * balance)
    assert balance > 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_system": "chatty"}, "head_system='chatty' is unknown"),
        (
            {"head_system": "overlapped", "head_system_options": {"overlap": 9}},
            "the overlap of layer 0=9 must be",
        ),
        ({"head_system": "talking_heads"}, "talking heads are static composition alone"),
        ({"head_system": "output_gate", "head_system_options": {"gate": 1}}, "'gate' is no option"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DCViTConfig(**SMALL | fields)


def test_talking_heads_are_static_composition(images):
    talking, static = make("talking_heads", **STATIC), make(**STATIC)
    names = {f"attention.{name}.": f"attention.system.{name}." for name in ("q_proj", "k_proj", "v_proj")}
    state = {}
    for key, value in static.state_dict().items():
        ours = next((ours for ours in names if ours in key), None)
        state[key if ours is None else key.replace(ours, names[ours])] = value
    talking.load_state_dict(state)
    torch.testing.assert_close(talking(images).logits, static(images).logits, rtol=0, atol=0)
