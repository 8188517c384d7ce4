"""The summary of a text equals what every entry's breakdown adds up to."""

import math

import pytest
import torch
from analysis_models import random_model
from helpers import PLAIN

from dcformer.analysis import TERMS, breakdown, compose_map, composition_summary, trace


@pytest.mark.parametrize("padded", [slice(0), slice(0, 4), slice(5, 7)], ids=("no", "left", "right"))
def test_summary_is_the_mean_of_breakdowns(padded):
    model, ids = random_model(torch.float64, compose_static=True, sliding_window=4), torch.randint(97, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, padded] = 0  # one of the queries that are kept is among them, and keys
    run = trace(model, {"input_ids": ids, "attention_mask": mask}, positions=[3, 6])
    found = {(one.layer, one.stage): one for one in composition_summary(run)}
    assert list(found) == [(layer, stage) for layer in (0, 1) for stage in ("pre", "post")]
    for (layer, stage), one in found.items():
        entries = [
            (breakdown(run, layer, stage, t, s, b), compose_map(run, layer, stage, t, s, b))
            for b in range(2)
            for t in (3, 6)
            for s in range(t + 1)
            if mask[b, t] and mask[b, s] and (layer == 1 or t - s < 4)  # the first layer is local
        ]
        eye = torch.eye(4, dtype=torch.float64)
        maps = torch.stack([matrix for _, matrix in entries])
        assert one.deviation == pytest.approx((maps - eye).flatten(1).norm(dim=1).mean().item() / 2)
        assert torch.allclose(one.mean_map, (maps - eye).mean(0))
        off = maps.abs().mean(0) * (1 - eye)
        assert torch.allclose(one.inflow, off.sum(0)) and torch.allclose(one.outflow, off.sum(1))
        change = torch.stack([entry.after - entry.before for entry, _ in entries])
        assert sum(one.shares.values()) == pytest.approx(1)
        for term in TERMS[1:]:
            parts = torch.stack([entry.terms[term] for entry, _ in entries])
            assert one.shares[term] == pytest.approx(((parts * change.sign()).sum() / change.abs().sum()).item())
            assert one.magnitudes[term] == pytest.approx(parts.abs().mean().item())
        if stage == "pre":
            assert one.flow is one.borrowed is one.row_sum is one.most_negative is None
            continue
        flow = sum((entry.before[:, None] * matrix).abs() for entry, matrix in entries)
        assert torch.allclose(one.flow, flow / flow.sum())
        assert one.borrowed == pytest.approx((one.flow * (1 - eye)).sum().item())
        weights = run.layers[layer].composed_weights
        sums = weights.sum(-1).transpose(1, 2)[mask[:, [3, 6]].bool()]  # [real queries, H]
        assert one.row_sum == pytest.approx(sums.mean().item())
        assert one.most_negative == min(entry.after.min().item() for entry, _ in entries)


def test_the_least_weight_is_no_paddings():
    """A query that is padding on the right sees keys, and may give them the least weight of all."""
    model, ids, mask = random_model(torch.float64), torch.randint(97, (1, 7)), torch.ones(1, 7, dtype=torch.long)
    mask[:, 4:] = 0
    padded = composition_summary(trace(model, {"input_ids": ids, "attention_mask": mask}))
    for one, other in zip(padded, composition_summary(trace(model, ids[:, :4])), strict=True):
        assert one.most_negative == pytest.approx(other.most_negative), (one.layer, one.stage)
    nothing = {"input_ids": ids, "attention_mask": torch.zeros_like(mask)}
    assert all(
        math.isnan(one.most_negative) for one in composition_summary(trace(model, nothing)) if one.stage == "post"
    )


def test_without_composition():
    for one in composition_summary(trace(random_model(**PLAIN), torch.randint(97, (1, 6)))):
        assert one.deviation == 0 and not any(one.shares.values()) and not one.inflow.any()
        if one.stage == "post":
            assert one.borrowed == 0 and one.row_sum == pytest.approx(1) and one.most_negative > 0


def test_the_bundled_checkpoint_is_far_from_probabilities(bundled, prompt):
    """The fact that every figure has to respect: rows do not add up to 1, and weights are negative."""
    found = [one for one in composition_summary(trace(bundled[0], prompt)) if one.stage == "post"]
    assert min(one.most_negative for one in found) < -1 and max(one.row_sum for one in found) > 2
    assert all(one.borrowed > 0.5 for one in found)
