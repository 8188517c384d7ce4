"""The examples of CONTRIBUTING.md for a variant of attention, a model of it, and a kernel backend."""

import copy
import re

import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config
from transformers import AutoModelForCausalLM
from transformers import initialization as init

from dcformer import (
    ComposeTrace,
    DCFormerCompose,
    DCFormerForCausalLM,
    DCFormerModel,
    implementations_dcformer,
    modeling_dcformer,
)
from dcformer.implementations_dcformer import FUSED_ATTENTION
from dcformer.vision import DCViTConfig, DCViTModel
from dcformer.vision.modeling_dcvit import DCViTAttention, DCViTLayer


def example(title):
    """What the block of Python below a heading defines."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index(f"## {title}") :]
    marked = r"<!-- tests/test_extending.py runs this -->\n```python\n(.*?)^```"
    scope: dict = {"__name__": "example"}
    exec(re.search(marked, section, re.DOTALL | re.MULTILINE)[1], scope)
    return scope


@pytest.fixture(scope="module")
def variant():
    return example("How to add a variant of attention")


def tokens():
    return torch.randint(1, 97, (2, 21), generator=torch.Generator().manual_seed(0))


def gated(variant):
    config = variant["GatedConfig"](**{k: v for k, v in tiny_config().to_dict().items() if k != "model_type"})
    return randomize(AutoModelForCausalLM.from_config(config)).eval()


def test_a_variant_changes_one_module(variant):
    model = gated(variant)
    assert type(model) is variant["GatedForCausalLM"]
    assert all(type(layer.self_attn) is variant["GatedAttention"] for layer in model.model.layers)
    plain = DCFormerForCausalLM(model.config).eval()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all("output_gate" in name for name in unexpected)
    opened = copy.deepcopy(model)
    for layer in opened.model.layers:
        layer.self_attn.output_gate.weight.data.zero_()
        layer.self_attn.output_gate.bias.data.fill_(100.0)  # a gate that is open is none
    torch.testing.assert_close(opened(tokens()).logits, plain(tokens()).logits)
    assert not torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-3)


@torch.no_grad()
def test_a_variant_generates_trains_and_loads(variant, tmp_path):
    model, ids = gated(variant), tokens()
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("dcformer_chunked")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    with torch.enable_grad():
        model.train()(ids, labels=ids).loss.backward()
    assert all(layer.self_attn.output_gate.weight.grad.abs().max() > 0 for layer in model.model.layers)
    assert "GatedDecoderLayer" in model._no_split_modules  # which a device_map keeps on one device
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_variant_of_composition_changes_what_makes_its_weights():
    model = example("How to add a variant of composition")["BoundedForCausalLM"](tiny_config())
    model, ids = randomize(model, scale=3.0), tokens()
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("dcformer_chunked")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    made, _ = model.model.layers[0].self_attn.compose(torch.randn(1, 5, model.config.hidden_size) * 10)
    assert made and all(0.9 < side.packed.abs().max() <= 1 for side in made.values())
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    model.fuse_projections()
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    plain = DCFormerForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(ids).logits, expected, atol=1e-3)


def with_composition(kind):
    """A language model whose layers' weights are made by that class."""
    attention = type("Attention", (modeling_dcformer.DCFormerAttention,), {"compose_class": kind})
    layer = type("Layer", (modeling_dcformer.DCFormerDecoderLayer,), {"attention_class": attention})
    return type("LM", (DCFormerForCausalLM,), {"decoder_class": type("M", (DCFormerModel,), {"layer_class": layer})})


class Scaled(DCFormerCompose):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scale = torch.nn.Parameter(torch.empty(4096))


class SaysHow(Scaled):
    def init_weights(self):
        init.constant_(self.scale, 3.0)


def test_parameters_of_a_variant_begin_as_it_says_when_a_checkpoint_lacks_them(tmp_path):
    DCFormerForCausalLM(tiny_config()).save_pretrained(tmp_path)
    for make in (lambda kind: kind(tiny_config()), lambda kind: kind.from_pretrained(tmp_path)):
        with pytest.raises(
            NotImplementedError, match=r"Scaled has parameters of its own \(scale\): give it an init_weights"
        ):
            make(with_composition(Scaled))
        model = make(with_composition(SaysHow))
        assert all(torch.all(layer.self_attn.compose.scale == 3) for layer in model.model.layers)
    extended = type("Extended", (DCFormerCompose,), {})
    with_composition(extended)(tiny_config())  # which has none


@pytest.mark.parametrize("kind", [Scaled, SaysHow])
def test_parameters_of_a_variant_in_images_begin_as_it_says(kind):
    class Attention(DCViTAttention):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            self.compose = kind(config)

    layer = type("Layer", (DCViTLayer,), {"attention_class": Attention})
    model_class = type("Model", (DCViTModel,), {"layer_class": layer})
    config = DCViTConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, image_size=8, patch_size=4)
    if kind is Scaled:
        with pytest.raises(NotImplementedError, match="Scaled has parameters of its own"):
            model_class(config)
    else:
        model = model_class(config)
        assert torch.all(model.layers[0].attention.compose.scale == 3)


@torch.no_grad()
def test_a_backend_is_a_function_and_a_mask(monkeypatch):
    monkeypatch.setattr(implementations_dcformer, "FUSED_ATTENTION", fused := dict(FUSED_ATTENTION))
    monkeypatch.setattr(modeling_dcformer, "FUSED_ATTENTION", fused)
    example("How to add a kernel backend")
    model, ids = randomize(DCFormerForCausalLM(tiny_config())).eval(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("my_kernels")
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, atol=1e-4, rtol=1e-4)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    model(ids, compose_trace=(trace := ComposeTrace()))
    assert len(trace.layers) == model.config.num_hidden_layers  # what the definition takes reaches it
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    assert not torch.allclose(model.train()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(ValueError, match="cannot run this model: head dims are at most 128"):
        DCFormerForCausalLM._from_config(tiny_config(head_dim=256), attn_implementation="my_kernels")
