"""Ablation and patching against changes of the parameters, and what they refuse."""

import copy

import pytest
import torch
from analysis_models import random_model

from dcformer.analysis import TERMS, ablate, breakdown, patch_heads, trace
from dcformer.errors import DCFormerError


def without(model, *names):
    """A copy in which named parameters of composition are zero."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for layer in changed.model.layers:
            for name in names:
                getattr(layer.self_attn.compose, name).zero_()
    return changed


@pytest.fixture
def model():
    return random_model(torch.float64, compose_static=True, compose_groups=2)


@pytest.fixture
def ids():
    return torch.randint(97, (2, 9))


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_terms_are_what_their_parameters_make(model, ids, implementation):
    """Zero parameters and ablated terms are the same, in every implementation that hooks reach."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for terms, changed in (
            (["q_proj", "k_proj"], without(model, "qkw")),
            (["static"], without(model, "pre_static", "post_static")),
            (["q_proj", "k_proj", "static"], without(model, "qkw", "pre_static", "post_static")),
        ):
            with ablate(model, terms=terms):
                found = model(ids, use_cache=False).logits
            assert torch.allclose(found, changed(ids, use_cache=False).logits, atol=1e-12), terms
            assert not torch.allclose(found, model(ids, use_cache=False).logits, atol=1e-3), terms


def test_an_ablated_stage_is_attention_without_it(model, ids):
    with ablate(model, stages="pre"):
        run = trace(model, ids)
    for layer in run.layers.values():
        assert torch.equal(layer.composed_scores, layer.scores)
        assert not torch.allclose(layer.composed_weights, layer.weights)


@pytest.mark.parametrize("term", TERMS)
def test_a_trace_sees_the_ablation(model, ids, term):
    """Inside the context a breakdown has the term no longer, for the heads and the stage that were named."""
    before = breakdown(trace(model, ids, layers=[0]), 0, "pre", 5, 3)
    with ablate(model, terms=term, stages="pre", heads=[(0, 2)], layers=[0]):
        run = trace(model, ids)
    after = breakdown(run, 0, "pre", 5, 3)
    wanted = before.after.clone()
    wanted[2] -= before.terms[term][2]
    assert torch.allclose(after.after, wanted, atol=1e-12)
    assert torch.allclose(after.before, before.before)
    assert before.terms[term][2].abs() > 1e-6


def test_generation_inside_the_context(model):
    """The changes hold with a cache: a decoded step is what a whole forward pass computes."""
    ids = torch.randint(97, (1, 6))
    with torch.no_grad(), ablate(model, terms=["q_proj", "k_gate"]), ablate(model, heads=[(1, 0)]):
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        whole = model(out.sequences, use_cache=False).logits[:, 5:8]
    # generate hands logits out in float32
    assert torch.allclose(torch.stack(out.logits, dim=1), whole.float(), atol=1e-5)


def test_patching_another_run(model, ids):
    """All heads of all layers and positions make the run the other one, up to the embeddings."""
    source = trace(model, ids)
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    with torch.no_grad(), patch_heads(model, source, heads):
        run = trace(model, ids.flip(1))
    for number, layer in run.layers.items():
        assert torch.equal(layer.z, source.layers[number].z)
    with patch_heads(model, source, [(1, 3)], positions=[4, -1]):
        run = trace(model, ids.flip(1))
    plain = trace(model, ids.flip(1))
    changed = run.layers[1].z != plain.layers[1].z
    assert changed[:, [4, 8], 3].all() and changed.sum() == changed[:, [4, 8], 3].sum()
    assert torch.equal(run.layers[1].z[:, [4, 8], 3], source.layers[1].z[:, [4, 8], 3])


def test_patching_stages(model, ids):
    source, other = trace(model, ids), ids.flip(1)
    with patch_heads(model, source, stages=["pre", "post"], layers=[1]):
        run = trace(model, other)
    assert torch.equal(run.layers[1].post.query.packed, source.layers[1].post.query.packed)
    plain = trace(model, other)
    assert torch.equal(run.layers[0].z, plain.layers[0].z) and not torch.equal(run.layers[1].z, plain.layers[1].z)


def test_bad_input(model, ids):
    run = trace(model, ids, layers=[1], positions=[2, 3])
    for context, message in (
        (ablate(model), "ablate needs heads"),
        (ablate(model, heads=[(2, 0)]), "layer 2 is out of range"),
        (ablate(model, heads=[(0, 4)]), "head 4 is out of range: there are 4"),
        (ablate(model, heads=[]), "heads is empty"),
        (ablate(model, terms=[]), "no term is named"),
        (ablate(model, terms="q_proj", heads=[(0, 1)], layers=[1]), r"heads of layer 0 are named, but layers=\[1\]"),
        (patch_heads(model, run, []), "heads is empty"),
        (ablate(model, heads=[3]), r"heads holds 3: expected pairs \(layer, head\)"),
        (ablate(model, heads=3), r"heads holds 3: expected pairs \(layer, head\)"),
        (ablate(model, heads=[("a", 0)]), "layer 'a' is not a whole number"),
        (ablate(model, heads=[(0, 0)], scale="x"), "scale='x' is not a number"),
        (ablate(model, terms="q_proj", scale=None), "scale=None is not a number"),
        (ablate(model, terms=3), "term 3 is unknown: expected some of"),
        (patch_heads(model, run, [(1, 0)], layers=[0]), r"layers=\[0\] says whose stages are patched, and heads name"),
        (ablate(model, terms="proj"), "term 'proj' is unknown: expected some of"),
        (ablate(model, stages="mid"), "stage 'mid' is unknown"),
        (patch_heads(model, run), "either heads .* or stages"),
        (patch_heads(model, run, [(0, 0)]), r"layer 0 was not traced: expected one of \[1\]"),
        (patch_heads(model, run, [(1, 0)], positions=[5]), r"query position 5 was not kept"),
        (patch_heads(model, run, stages="pre"), "patched at all positions"),
    ):
        with pytest.raises(DCFormerError, match=message), context:
            pass
    whole = trace(model, ids)
    for patch in (patch_heads(model, whole, [(1, 0)]), patch_heads(model, whole, stages="pre")):
        with patch, pytest.raises(DCFormerError, match="runs of the same shape"):
            model(ids[:1, :4], use_cache=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.config._attn_implementation = "dcformer_triton"
    with pytest.raises(DCFormerError, match="past the modules that are changed here"), ablate(model, heads=[(0, 0)]):
        pass
