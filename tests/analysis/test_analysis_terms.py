"""A composed entry is the sum of its named terms, for every model that there can be."""

import pytest
import torch
from analysis_models import random_model
from helpers import PLAIN, VALID_SWITCHES
from hypothesis import given, settings
from hypothesis import strategies as st

from dcformer.analysis import TERMS, breakdown, component_over_keys, compose_map, trace
from dcformer.compose_dcformer import compose
from dcformer.errors import DCFormerError

LENGTH = 5
SHAPES = ({"compose_groups": 1}, {"compose_groups": 2, "num_key_value_heads": 4, "compose_rank": 1})


def check_every_entry(run, layer, stage, batch):
    """Terms, sources and the map, at every query and key of a sequence, within 1e-6 of the largest entry."""
    before, after = run.layers[layer].maps(stage)
    bound = 1e-6 * max(1.0, after.abs().max().item())
    for t in range(run.length):
        for s in range(run.length):
            found = breakdown(run, layer, stage, t, s, batch)
            assert tuple(found.terms) == TERMS and torch.equal(found.before, before[batch, :, t, s])
            assert (sum(found.terms.values()) - after[batch, :, t, s]).abs().max() <= bound
            matrix = compose_map(run, layer, stage, t, s, batch)
            assert (before[batch, :, t, s] @ matrix - after[batch, :, t, s]).abs().max() <= bound
            for term, sources in found.sources.items():
                assert (sources.sum(0) - found.terms[term]).abs().max() <= bound, term
            for name, projection in found.projections.items():
                groups = run.layers[layer].composition(stage).groups
                hidden = projection.hidden.view(groups, 1, -1)  # [G, 1, R]
                back = (hidden * projection.up.unflatten(0, (groups, -1))).sum(-1).flatten()
                assert (back - found.terms[name]).abs().max() <= bound


@pytest.mark.parametrize("shape", SHAPES, ids=("gqa", "groups"))
@pytest.mark.parametrize(
    "switches", VALID_SWITCHES, ids=lambda s: "+".join(k[8:] for k, v in s.items() if v) or "plain"
)
def test_terms_add_up(switches, shape):
    model = random_model(num_hidden_layers=1, **switches, **shape)
    run = trace(model, torch.randint(97, (1, LENGTH)))
    for stage in ("pre", "post"):
        check_every_entry(run, 0, stage, 0)
    found = breakdown(run, 0, "post", -1, 0)
    present = {
        "static": switches["compose_static"] and switches["compose_post"],
        "q_proj": switches["compose_query"] and switches["compose_post"] and switches["compose_projection"],
        "q_gate": switches["compose_query"] and switches["compose_post"] and switches["compose_gate"],
        "k_proj": switches["compose_key"] and switches["compose_post"] and switches["compose_projection"],
        "k_gate": switches["compose_key"] and switches["compose_post"] and switches["compose_gate"],
    }
    for term, is_there in present.items():
        assert bool(found.terms[term].abs().sum() > 0) == is_there, term


@settings(max_examples=15, deadline=None)
@given(
    heads=st.sampled_from([(2, 1, 1), (4, 2, 2), (6, 3, 2), (8, 8, 4), (6, 2, 1)]),
    rank=st.integers(1, 3),
    length=st.integers(1, 6),
    batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_terms_add_up_for_other_shapes(heads, rank, length, batch, dtype):
    count, kv, groups = heads
    model = random_model(
        dtype, hidden_size=24, head_dim=4, num_attention_heads=count, num_key_value_heads=kv, compose_groups=groups,
        compose_rank=rank, compose_static=True, num_hidden_layers=2,
    )  # fmt: skip
    run = trace(model, torch.randint(97, (batch, length)))
    for layer in run.layers:
        check_every_entry(run, layer, "pre", batch - 1)
        check_every_entry(run, layer, "post", batch - 1)


def test_float64_is_exact():
    """In float64 nothing is left but its rounding: no term is missing, however small."""
    run = trace(random_model(torch.float64, compose_static=True), torch.randint(97, (1, 6)))
    found = breakdown(run, 1, "post", 4, 2)
    assert (sum(found.terms.values()) - found.after).abs().max() < 1e-14


def test_terms_are_those_of_compose():
    """Each term is what `compose` adds when the stage has this branch alone."""
    run = trace(random_model(torch.float64, compose_static=True, compose_groups=2), torch.randint(97, (1, 6)))
    layer = run.layers[1]
    weights = layer.post
    query, key = weights.query, weights.key
    side, whole = type(query), type(weights)
    branches = {
        "static": whole(static=weights.static, groups=2),
        "q_proj": whole(query=side.of(query.down, query.up), groups=2),
        "q_gate": whole(query=side.of(gate=query.gate), groups=2),
        "k_proj": whole(key=side.of(key.down, key.up), groups=2),
        "k_gate": whole(key=side.of(gate=key.gate), groups=2),
    }
    found = breakdown(run, 1, "post", 4, 2)
    for term, branch in branches.items():
        added = (compose(layer.weights, branch) - layer.weights)[0, :, 4, 2]
        assert torch.allclose(found.terms[term], added, atol=1e-14), term
        assert added.abs().max() > 1e-6


def test_without_composition_all_is_input():
    run = trace(random_model(**PLAIN), torch.randint(97, (1, 6)))
    found = breakdown(run, 0, "post", 5, 1)
    assert torch.equal(found.terms["input"], found.after)
    assert not any(part.any() for term, part in found.terms.items() if term != "input")
    assert found.projections == {} and torch.equal(compose_map(run, 0, "pre", 3, 1), torch.eye(4))
    with pytest.raises(DCFormerError, match="layer 0 has no key-wise low-rank projection in stage 'pre'"):
        component_over_keys(run, 0, "pre", "key", 0)


def test_component_over_keys():
    run = trace(random_model(), torch.randint(97, (2, 7)), positions=[2, 6])
    pre = run.layers[1].pre
    assert torch.equal(component_over_keys(run, 1, "pre", "key", 1, [3, 0], batch=1), pre.key.down[1, [3, 0], :, 1])
    assert torch.equal(component_over_keys(run, 1, "pre", "query", 0, part="up"), pre.query.up[0, :, :, 0])
    assert component_over_keys(run, 1, "pre", "query", 0).shape == (4, 2)
    assert component_over_keys(run, 1, "pre", "key", 0, 2).shape == (1, 7)


def test_what_was_kept_is_found_by_position():
    """Positions of a trace are those of the text, whatever was kept."""
    model, ids = random_model(), torch.randint(97, (1, 7))
    whole, part = trace(model, ids), trace(model, ids, layers=[1], positions=[6, 2])
    for t in (2, 6, -1):
        one, other = breakdown(whole, 1, "pre", t, 1), breakdown(part, 1, "pre", t, 1)
        assert all(torch.equal(one.terms[term], other.terms[term]) for term in TERMS) and one.t == other.t
    assert breakdown(part, -1, "pre", 2, 0).layer == 1
    for call, message in (
        (lambda: breakdown(part, 1, "pre", 3, 0), r"query position 3 was not kept: expected one of \[6, 2\]"),
        (lambda: breakdown(part, 0, "pre", 2, 0), r"layer 0 was not traced: expected one of \[1\]"),
        (lambda: breakdown(part, 1, "pre", 2, 7), "key position 7 is out of range: there are 7, numbered 0 to 6"),
        (lambda: breakdown(part, 1, "pre", -8, 0), "position -8 is out of range"),
        (lambda: breakdown(part, 1, "pre", 2, None), "key position None is not a whole number"),
        (lambda: breakdown(part, "1", "pre", 2, 0), "layer '1' is not a whole number"),
        (lambda: breakdown(part, 1, "middle", 2, 0), "stage='middle' is unknown"),
        (lambda: breakdown(part, 1, "pre", 2, 0, batch=1), "batch index 1 is out of range"),
        (lambda: component_over_keys(part, 1, "pre", "key", 0, batch=1), "batch index 1 is out of range"),
        (lambda: component_over_keys(part, 1, "pre", "key", 2), "rank 2 is out of range"),
        (lambda: component_over_keys(part, 1, "pre", "keys", 0), "side='keys'"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
