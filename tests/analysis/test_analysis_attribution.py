"""Integrated gradients: exact where they can be, complete where they cannot."""

import pytest
import torch
from analysis_models import random_model
from torch import nn

from dcformer import DCViTConfig, DCViTForImageClassification
from dcformer.analysis import TERMS, attribute_heads, attribute_terms, single_token, trace
from dcformer.errors import DCFormerError


class Linear(nn.Module):
    """In place of norms and MLPs: what makes a model linear in z."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def linear_model():
    """Logits are linear in all layers' z: the path's attention is fixed by z itself."""
    model = random_model(torch.float64, num_key_value_heads=4)
    model.model.norm = Linear(1.0)
    for layer in model.model.layers:
        layer.mlp = Linear(0.0)
    return model.eval()


@pytest.mark.parametrize("steps", [1, 4])
def test_exact_on_a_model_linear_in_z(steps):
    """A head's attribution is its output times the output layer, whatever the steps."""
    model, ids = linear_model(), torch.randint(97, (1, 7))
    scores, gap = attribute_heads(model, ids, 5, steps, return_gap=True)
    run = trace(model, ids)
    direct = torch.stack([layer.head_outputs[0, -1] @ model.lm_head.weight[5] for layer in run.layers.values()])
    assert torch.allclose(scores, direct.detach(), atol=1e-12) and gap < 1e-10
    versus = attribute_heads(model, ids, 5, steps, versus=9)
    other = torch.stack([layer.head_outputs[0, -1] @ model.lm_head.weight[9] for layer in run.layers.values()])
    assert torch.allclose(versus, (direct - other).detach(), atol=1e-12)
    from_another = attribute_heads(model, ids, 5, steps, baseline=ids.flip(1))
    begin = trace(model, ids.flip(1))
    start = torch.stack([layer.head_outputs[0, -1] @ model.lm_head.weight[5] for layer in begin.layers.values()])
    assert torch.allclose(from_another, (direct - start).detach(), atol=1e-12)
    assert torch.equal(attribute_heads(model, ids, 5, steps, baseline=begin), from_another)


def test_inference_mode_around_it_changes_nothing():
    model, ids = random_model(torch.float64), torch.randint(97, (2, 7))

    def both(ids):
        return attribute_heads(model, ids, 5, 8, tolerance=None), attribute_terms(model, ids, 5, 8, tolerance=None)

    expected = both(ids)
    with torch.inference_mode():
        found = both(ids.clone())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.slow
def test_complete_on_the_bundled_checkpoint(bundled, prompt):
    model, tokenizer = bundled
    target, other = single_token(tokenizer, "fish"), single_token(tokenizer, "fruit")
    for options in ({"versus": other}, {"layers": [1, 2]}):
        _, gap = attribute_heads(model, prompt, target, return_gap=True, **options)
        assert gap < 0.01, options
    for terms in (TERMS, TERMS[1:]):
        _, gap = attribute_terms(model, prompt, target, terms=terms, return_gap=True)
        assert gap < 0.01, terms


def test_a_gap_is_refused(bundled, prompt):
    model, tokenizer = bundled
    target = single_token(tokenizer, "fish")
    with pytest.raises(DCFormerError, match=r"a completeness gap of .*%, more than 5%. Give more steps than 1"):
        attribute_heads(model, prompt, target, steps=1)
    _, gap = attribute_heads(model, prompt, target, steps=1, tolerance=None, return_gap=True)
    assert gap > 0.05


def test_batches_and_padding(bundled):
    """The mean over sequences, each at its last token; on either side padding changes nothing."""
    model, tokenizer = bundled
    texts = [
        "\n< Peter owns the desk. Boris owns the tuna. >. Boris owns a kind of",
        "\n< Peter owns the desk. >. Peter",
    ]
    targets = torch.tensor([single_token(tokenizer, "fish"), single_token(tokenizer, "owns")])
    alone = [
        attribute_heads(model, tokenizer(text, return_tensors="pt"), int(target), 8, tolerance=None)
        for text, target in zip(texts, targets, strict=True)
    ]
    for side in ("left", "right"):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
        together = attribute_heads(model, batch, targets, 8, tolerance=None)
        assert torch.allclose(together, (alone[0] + alone[1]) / 2, atol=2e-4), side


def test_masks_of_other_shapes():
    """A mask [B, 1, T, S], or one a kind of layer, names no padding: the target's logit is the last token's."""
    model, ids = random_model(sliding_window=None), torch.randint(97, (2, 6))
    whole = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = attribute_heads(model, ids, 5, 4, tolerance=None)
    for mask in (whole, {"full_attention": whole, "sliding_attention": whole}):
        found = attribute_heads(model, {"input_ids": ids, "attention_mask": mask}, 5, 4, tolerance=None)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype):
    """Sums over channels and positions are never of less than float32."""
    scores, gap = attribute_heads(
        random_model(dtype), torch.randint(97, (1, 5)), 5, 16, tolerance=None, return_gap=True
    )
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and gap == gap


def test_one_layer_equals_captum(bundled, prompt):
    captum = pytest.importorskip("captum.attr")
    model, tokenizer = bundled
    target = single_token(tokenizer, "fish")
    projection = model.model.layers[2].self_attn.o_proj

    def logit(ids):
        return model(ids, use_cache=False).logits[:, -1]

    ids = prompt["input_ids"]
    other = ids.flip(1)
    theirs = captum.LayerIntegratedGradients(logit, projection).attribute(
        ids, baselines=other, target=target, n_steps=64, attribute_to_layer_input=True
    )
    theirs = theirs[0].unflatten(-1, (8, -1)).sum((0, 2))  # [H]
    ours = attribute_heads(model, prompt, target, 64, baseline=other, layers=[2], tolerance=None)[0]
    assert torch.allclose(ours, theirs.float(), atol=1e-4)


def test_images():
    config = DCViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_labels=5, attn_implementation="eager",
    )  # fmt: skip
    model = DCViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    pixels = torch.randn(2, 3, 16, 16)
    scores, gap = attribute_heads(model, pixels, 3, return_gap=True)
    assert scores.shape == (2, 4) and gap < 0.01


def test_bad_input(bundled, prompt):
    model, _ = bundled
    for call, message in (
        (lambda: attribute_heads(model, prompt, 412), "target 412 is out of range: there are 412"),
        (lambda: attribute_heads(model, prompt, -1), "target -1 is out of range"),
        (lambda: attribute_heads(model, prompt, 5, versus=-100), "target -100 is out of range"),
        (lambda: attribute_heads(model, prompt, 1.5), "target 1.5 is not a whole number"),
        (lambda: attribute_heads(model, prompt, " fish"), r"target ' fish' is a text: give its id, single_token"),
        (lambda: attribute_heads(model, prompt, ["a", "b"]), r"target 'a' is a text: give its id, single_token"),
        (lambda: attribute_heads(model, prompt, None), "target None is not a whole number"),
        (lambda: attribute_heads(model, prompt, 5, versus=[None]), "target None is not a whole number"),
        (
            lambda: attribute_heads(model, prompt, torch.tensor([1, 2])),
            "2 targets: expected one id, or one a sequence, 1",
        ),
        (lambda: attribute_heads(model, prompt, torch.tensor([[1]])), r"target \[1\] is not a whole number"),
        (lambda: attribute_heads(model, prompt, []), "0 targets: expected one id, or one a sequence, 1"),
        (lambda: attribute_heads(model, {**prompt, "logits_to_keep": 1}, 5), "inputs with logits_to_keep"),
        (lambda: attribute_heads(model, prompt, 5, steps=2.5), "steps 2.5 is not a whole number"),
        (lambda: attribute_heads(model.model, prompt, 5), "DCFormerModel has no logits"),
        (lambda: attribute_heads(model, prompt, 5, steps=0), "steps=0 must be at least 1"),
        (lambda: attribute_heads(model, prompt, 5, baseline="mean"), "baseline='mean' is unknown"),
        (
            lambda: attribute_heads(model, prompt, 5, baseline=torch.ones(1, 3).long()),
            "baseline has 1 sequences of 3",
        ),
        (lambda: attribute_heads(model, prompt, 5, layers=[4]), "layer 4 is out of range"),
        (lambda: attribute_terms(model, prompt, 5, terms=["gate"]), "term 'gate' is unknown"),
        (lambda: attribute_terms(model, prompt, 5, terms=[]), "no term is named"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
