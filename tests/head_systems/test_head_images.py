"""Head systems on images: every one trains, equals DCViT where it should, and is saved and loaded."""

import copy
import inspect

import pytest
import torch
from head_cases import CASES, TALKING
from helpers import randomize
from transformers import AutoModelForImageClassification

from dcformer import DCViTConfig, DCViTForImageClassification
from dcformer.head_systems import (
    HeadSystemsViTConfig,
    HeadSystemsViTForImageClassification,
    HeadSystemsViTModel,
    head_importance,
    prune_heads,
)

SMALL = {
    "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 5, "representation_size": None, "qk_norm": None,
}  # fmt: skip
PLAIN = {f"compose_{name}": False for name in ("pre", "post", "query", "key", "static")}


def images(count=6):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("composed", [False, True], ids=["plain", "composed"])
@pytest.mark.parametrize("case", CASES)
def test_trains_and_loads(case, composed, tmp_path):
    name, options = CASES[case]
    switches = TALKING if name == "talking_heads" else {} if composed else PLAIN
    config = HeadSystemsViTConfig(**SMALL, **switches, head_system=name, head_system_options=options)
    torch.manual_seed(0)
    model = randomize(HeadSystemsViTForImageClassification(config))
    labels = torch.arange(6) % 5
    model.train()(images(), labels=labels).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded) is HeadSystemsViTForImageClassification
    with torch.no_grad():
        expected = model(images()).logits
        torch.testing.assert_close(loaded(images()).logits, expected, atol=1e-5, rtol=1e-5)
        loaded.set_attn_implementation("eager")
        torch.testing.assert_close(loaded(images()).logits, expected, atol=1e-4, rtol=1e-4)


def test_attention_of_the_library_is_refused():
    model = HeadSystemsViTForImageClassification(HeadSystemsViTConfig(**SMALL, **PLAIN, head_system="output_gate"))
    with pytest.raises(ValueError, match="attn_implementation='sdpa' is not supported by HeadSystemsViT"):
        model.set_attn_implementation("sdpa")


def test_loading_a_checkpoint_of_another_system_is_refused(tmp_path):
    gate = HeadSystemsViTConfig(**SMALL, **PLAIN, head_system="output_gate")
    HeadSystemsViTForImageClassification(gate).save_pretrained(tmp_path / "gate")
    DCViTForImageClassification(DCViTConfig(**SMALL)).save_pretrained(tmp_path / "none")
    other = {"head_system": "overlapped", "head_system_options": {"overlap": 1}}
    for load in (AutoModelForImageClassification, HeadSystemsViTForImageClassification, HeadSystemsViTModel):
        with pytest.raises(ValueError, match=r"head_system='output_gate'.*head_system='overlapped'"):
            load.from_pretrained(tmp_path / "gate", **other)
    with pytest.raises(ValueError, match=r"head_system='output_gate'.*head_system='plain'"):
        HeadSystemsViTModel.from_pretrained(tmp_path / "gate", config=HeadSystemsViTConfig(**SMALL))
    with pytest.raises(ValueError, match=r"is of model type 'dcvit', not 'dcvit_heads': load it with its own class\.$"):
        HeadSystemsViTForImageClassification.from_pretrained(tmp_path / "none")
    for given in ({}, {"config": DCViTConfig(**SMALL)}):
        with pytest.raises(ValueError, match="head_system='output_gate', which DCViTForImageClassification does not"):
            DCViTForImageClassification.from_pretrained(tmp_path / "gate", **given)


@torch.no_grad()
def test_plain_is_dcvit():
    """The same parameters under other names: a plain system is DCViT's own attention, composed as it is."""
    source = randomize(DCViTForImageClassification(DCViTConfig(**SMALL)))
    model = HeadSystemsViTForImageClassification(HeadSystemsViTConfig(**SMALL)).eval()
    state = source.state_dict()
    for name in list(state):
        for part in ("q_proj", "k_proj", "v_proj"):
            if f"attention.{part}" in name:
                state[name.replace(f"attention.{part}", f"attention.system.{part}")] = state.pop(name)
    model.load_state_dict(state)
    torch.testing.assert_close(model(images()).logits, source(images()).logits, atol=1e-6, rtol=1e-6)


def mixture(is_uniform=False):
    """A mixture of heads whose balance loss counts; uniform: with routers of zeros."""
    options = {"num_routed_heads_per_tok": 2, "router_aux_loss_coef": 5.0}
    config = HeadSystemsViTConfig(**SMALL, **PLAIN, head_system="mixture_of_heads", head_system_options=options)
    model = HeadSystemsViTForImageClassification(config)
    for layer in model.dcvit.layers if is_uniform else ():
        torch.nn.init.zeros_(layer.attention.system.router.weight)
    return model


def test_the_balance_loss_is_in_the_loss():
    model, labels = mixture(is_uniform=True).eval(), torch.arange(6) % 5
    out = model(images(), labels=labels)
    extra = float(out.loss - torch.nn.functional.cross_entropy(out.logits, labels)) / 5
    assert extra == pytest.approx(2.0, rel=1e-5)  # K at uniform routing


def test_parts_of_a_batch_add_up():
    """As `Trainer` adds up the losses of accumulated parts, each with the number of all images."""
    model, labels = mixture(is_uniform=True).eval(), torch.arange(6) % 5
    parts = [model(images()[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=6).loss for i in (0, 2, 4)]
    assert float(sum(parts)) == pytest.approx(float(model(images(), labels=labels).loss), rel=1e-5)


def test_outputs_have_losses_logits_and_gates():
    """As those of language models."""
    model, labels = mixture(), torch.arange(6) % 5
    model.set_attn_implementation("eager")
    out = model(images(), labels=labels)
    assert float(out.loss - torch.nn.functional.cross_entropy(out.logits, labels)) == pytest.approx(
        5 * float(out.aux_loss), rel=1e-5
    )
    assert out.aux_loss.requires_grad and out.router_logits is None and out.head_gates is None
    out = model(images(), output_attentions=True)
    assert [maps.shape for maps in out.attentions] == [(6, 4, 16, 16)] * 2
    assert [gates.shape for gates in out.head_gates] == [(6, 16, 4)] * 2 and out.router_logits is None
    assert [rows.shape for rows in model(images(), output_router_logits=True).router_logits] == [(6, 16, 4)] * 2
    model.config.head_system_options["output_router_logits"] = True
    assert HeadSystemsViTForImageClassification(model.config)(images()).router_logits is not None


def test_fewer_layers_keep_the_overlaps_of_the_first():
    config = HeadSystemsViTConfig(**SMALL, head_system="overlapped", head_system_options={"overlap": [1, 2]})
    config.num_hidden_layers = 1
    assert config.head_system_options == config.to_dict()["head_system_options"] == {"overlap": [1]}
    assert HeadSystemsViTForImageClassification(config)(images()).logits.shape == (6, 5)
    config.num_hidden_layers = 2
    assert config.head_system_options == {"overlap": [1, 2]}


@pytest.mark.parametrize("composed", [False, True], ids=["plain", "composed"])
@torch.no_grad()
def test_heads_are_removed(composed, tmp_path):
    config = HeadSystemsViTConfig(**SMALL, **({} if composed else PLAIN), head_system="head_pruning")
    model = randomize(HeadSystemsViTForImageClassification(config)).eval()
    model.dcvit.layers[0].attention.system.log_alpha.copy_(torch.tensor([3.0, -4.0, -4.0, -1.0]))
    expected, before = model(images()).logits, sum(p.numel() for p in model.parameters())
    removed = prune_heads(model)
    row = 32 + config.qkv_bias  # of each of 8 channels; their columns of the output, and a gate
    assert removed == 2 * (8 * row * (1 if composed else 3) + 8 * 32 + 1)
    assert sum(p.numel() for p in model.parameters()) == before - removed
    assert model.config.head_system_options["kept_heads"] == [[0, 3], [0, 1, 2, 3]]
    model.save_pretrained(tmp_path)
    for found in (model, AutoModelForImageClassification.from_pretrained(tmp_path)):
        torch.testing.assert_close(found(images()).logits, expected, atol=1e-6, rtol=1e-5)
    with torch.enable_grad():
        importance = head_importance(model, [{"pixel_values": images(), "labels": torch.arange(6) % 5}])
    assert (importance == 0).nonzero().tolist() == [[0, 1], [0, 2]]


def test_initial_values():
    config = HeadSystemsViTConfig(**SMALL, **PLAIN, head_system="head_pruning")
    for model_class in (HeadSystemsViTForImageClassification, HeadSystemsViTModel):
        layers = model_class(config).base_model.layers
        assert all((layer.attention.system.log_alpha == 3).all() for layer in layers)
    torch.manual_seed(0)
    config = HeadSystemsViTConfig(**SMALL, **PLAIN, head_system="collaborative")
    for model_class in (HeadSystemsViTForImageClassification, HeadSystemsViTModel):
        mixing = model_class(config).base_model.layers[0].attention.system.mixing.weight
        assert float(mixing.std()) == pytest.approx(0.2, rel=0.25)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="num_shared_heads=4 must be a whole number from 0 to 3"):
        HeadSystemsViTConfig(**SMALL, head_system="mixture_of_heads", head_system_options={"num_shared_heads": 4})


@pytest.mark.parametrize("case", ["mixture", "pruning"])
def test_a_model_is_copied_between_forward_and_backward(case):
    """What a system keeps of the forward pass, a graph perhaps, is not copied."""
    name, options = CASES[case]
    config = HeadSystemsViTConfig(**SMALL, **PLAIN, head_system=name, head_system_options=options)
    model = HeadSystemsViTForImageClassification(config).train()
    loss = model(images(), labels=torch.arange(6) % 5).loss
    copied = copy.deepcopy(model)
    loss.backward()
    assert all(torch.equal(*pair) for pair in zip(copied.parameters(), model.parameters(), strict=True))
    assert copied(images()).logits.shape == (6, 5)


@torch.no_grad()
def test_arguments_are_those_of_dcvit():
    """By place and by name: `Trainer` keeps the columns of a data set that a forward pass names."""
    model, theirs = HeadSystemsViTForImageClassification.forward, DCViTForImageClassification.forward
    assert list(inspect.signature(model).parameters) == list(inspect.signature(theirs).parameters)
    config = HeadSystemsViTConfig(
        **SMALL, head_system="mixture_of_heads", head_system_options={"num_routed_heads_per_tok": 1}
    )
    model = randomize(HeadSystemsViTForImageClassification(config)).eval()
    mask = torch.ones(6, 16, dtype=torch.long)
    mask[:, 9:] = 0
    by_place = model(images(), None, False, mask)
    by_name = model(images(), attention_mask=mask)
    assert torch.equal(by_place.logits, by_name.logits) and torch.equal(by_place.aux_loss, by_name.aux_loss)
    assert not torch.equal(by_name.aux_loss, model(images()).aux_loss)


def test_parts_of_several_labels_add_up():
    """The loss of heads counts by the share of images, however many labels each has."""
    options = {"head_system": "head_pruning", "head_system_options": {"l0_penalty": 1.0}}
    model = randomize(HeadSystemsViTForImageClassification(HeadSystemsViTConfig(**SMALL, **options))).eval()
    labels = torch.eye(5)[torch.arange(6) % 5]
    whole = model(images(), labels=labels)
    parts = [model(images()[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=labels.numel()) for i in (0, 2, 4)]
    assert whole.aux_loss > 1
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
