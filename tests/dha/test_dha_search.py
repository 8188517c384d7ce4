"""Distances, groups, costs, budgets and plans."""

import itertools
import json
import math
import random
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sources import GROUPED, MAKE, SIZES, llama, make, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer import DCFormerConfig, DHAConfig, dha
from dcformer.dha.plan import HeadPlan, canonical, consecutive_groups, uniform_count
from dcformer.dha.search import (
    ALLOCATIONS,
    SCORES,
    best_groups,
    candidates,
    cka_distances,
    divide_budget,
    group_score,
    operator_distances,
    part_cost,
    weight_distances,
)
from dcformer.errors import DCFormerError


def splits(heads, size):
    """Every grouping of a list of heads into groups of a size."""
    if not heads:
        yield []
        return
    first, *rest = heads
    for others in itertools.combinations(rest, size - 1):
        for groups in splits([head for head in rest if head not in others], size):
            yield [[first, *others], *groups]


def symmetric(n, seed):
    numbers = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((numbers + numbers.T) / 2).fill_diagonal_(0).tolist()


# --- distances --------------------------------------------------------------------------------------------------------


def test_weight_distances():
    weight, bias = torch.randn(6, 4, 64, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    weight[4], bias[4] = weight[1], bias[1]
    found = weight_distances(weight, bias)
    rows = torch.cat([weight, bias[..., None]], -1).flatten(1)
    expected = torch.cdist(rows, rows).square() / rows.square().sum(-1).mean()
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert found[1, 4] == 0 and found[0, 1] == pytest.approx(2, abs=0.5)
    assert weight_distances(weight)[1, 4] == 0
    bias[4] += 1  # equal weights, other biases
    assert weight_distances(weight, bias)[1, 4] > 0.01
    assert torch.equal(weight_distances(weight.bfloat16())[1], weight_distances(weight.bfloat16())[4])


def test_operator_distances_at_the_start():
    """2/n between all heads; displacement n - G, which is the paper's equation 7."""
    for n, dim in ((8, 3), (6, 5)):
        operator = torch.eye(n)[:, :, None].expand(n, n, dim)
        distances = operator_distances(operator)
        off = ~torch.eye(n, dtype=torch.bool)
        assert (distances[off] - 2 / n).abs().max() <= 1e-12 and distances.diagonal().max() == 0
        for count in (g for g in range(1, n + 1) if n % g == 0):
            groups = consecutive_groups(n, count)
            score = group_score(distances.tolist(), groups)
            assert n * part_cost(score, n // count, "displacement") == pytest.approx(n - count, abs=1e-12)


def test_displacement_is_what_mean_pooling_moves():
    """Equation 7: the squared distance of the rows to their group's mean, of any operator and of weights."""
    operator = torch.randn(8, 8, 3, dtype=torch.float64)
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]
    moved = sum(
        (operator[head] - operator[group].mean(0)).square().sum() for group in groups for head in group
    ) / 3  # fmt: skip
    found = 8 * part_cost(group_score(operator_distances(operator).tolist(), groups), 4, "displacement")
    assert found == pytest.approx(moved.item(), abs=1e-11)
    weight = torch.randn(8, 4, 9, dtype=torch.float64)
    moved = sum((weight[head] - weight[group].mean(0)).square().sum() for group in groups for head in group)
    share = 8 * moved / weight.square().sum()
    found = part_cost(group_score(weight_distances(weight).tolist(), groups), 4, "displacement")
    assert found == pytest.approx(share.item(), abs=1e-11)


def test_cka_distances():
    weight = torch.randn(5, 4, 32, dtype=torch.float64)
    weight[3] = 2.5 * torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0] @ weight[0]  # turned and scaled
    weight[4] = 0
    found = cka_distances(weight)
    assert found[0, 3] == pytest.approx(0, abs=1e-12) and 0.5 < found[0, 1] < 1
    gram = [w.T @ w for w in weight]
    expected = 1 - (gram[0] * gram[1]).sum() / (gram[0].norm() * gram[1].norm())
    assert found[0, 1] == pytest.approx(expected.item(), abs=1e-12)
    assert found[4].tolist() == [1, 1, 1, 1, 0]


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 4])
def test_groups_of_eight_heads_are_the_best(count, seed):
    for instance in range(4):
        distances = symmetric(8, instance)
        found = best_groups(distances, count, seed)
        least = min(group_score(distances, groups) for groups in splits(list(range(8)), 8 // count))
        assert group_score(distances, found) == pytest.approx(least, abs=1e-12)
        assert found == best_groups(distances, count, seed)  # the same again


def test_the_best_grouping_seen_is_kept(monkeypatch):
    """Stopped while it is hot, the last grouping is any; the best of thousands is that of all 35."""
    module = sys.modules[best_groups.__module__]  # the package has a function of its name
    monkeypatch.setattr(module, "_COLDEST", 0.95)
    monkeypatch.setattr(module, "_PROPOSALS", 3000)
    for instance in range(8):
        distances = symmetric(8, instance)
        least = min(group_score(distances, groups) for groups in splits(list(range(8)), 4))
        assert group_score(distances, best_groups(distances, 2)) == pytest.approx(least, abs=1e-12)


def test_costs_of_a_part():
    assert [part_cost(12.0, 4, allocation) for allocation in ("score", "root", "displacement")] == [12, 6, 3]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_planted_groups_of_32_heads_are_found(count):
    for seed in range(3):
        heads = random.Random(seed).sample(range(32), 32)
        planted = canonical([heads[i::count] for i in range(count)])
        center = torch.randn(count, 4, 16)
        weight = torch.empty(32, 4, 16)
        for group, middle in zip(planted, center, strict=True):
            for head in group:
                weight[head] = middle + 0.5 * torch.randn(4, 16)
        assert best_groups(weight_distances(weight).tolist(), count, seed) == planted


@settings(deadline=None, max_examples=20)
@given(n=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 24, 40, 52]), data=st.data())
def test_groups_are_a_partition(n, data):
    count = data.draw(st.sampled_from([count for count in range(1, n + 1) if n % count == 0]))
    blocks = data.draw(st.sampled_from([b for b in range(1, count + 1) if count % b == 0]))
    distances = symmetric(n, data.draw(st.integers(0, 9)))
    groups = best_groups(distances, count, blocks=blocks)
    assert sorted(itertools.chain(*groups)) == list(range(n)) and {len(group) for group in groups} == {n // count}
    assert groups == canonical(groups)
    assert all(len({head // (n // blocks) for head in group}) == 1 for group in groups)
    assert group_score(distances, groups) <= group_score(distances, consecutive_groups(n, count)) + 1e-12


def test_heads_without_distances_stay_where_they_are():
    assert best_groups(torch.zeros(8, 8).tolist(), 4) == consecutive_groups(8, 4)
    with pytest.raises(DCFormerError, match="8 heads cannot be split into 3"):
        best_groups(symmetric(8, 0), 3)


# --- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_budget_is_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    parts = [
        {count: rng.random() / count for count in rng.choice([(1, 2, 4), (1, 2), (2, 4, 8), (1, 7)])} for _ in "abcdef"
    ]
    budget = rng.randint(sum(map(min, parts)), sum(map(max, parts)))
    found = divide_budget(parts, budget)
    choices = [choice for choice in itertools.product(*parts) if sum(choice) <= budget]
    cost = {choice: sum(part[count] for part, count in zip(parts, choice, strict=True)) for choice in choices}
    assert sum(found) <= budget
    assert cost[tuple(found)] == pytest.approx(min(cost.values()), abs=1e-9)


def test_ties_are_broken_alike():
    """Whatever the order in which a part's counts come."""
    counts, rng = [1, 2, 4, 8], random.Random(0)
    found = [divide_budget([dict.fromkeys(rng.sample(counts, 4), 0.0) for _ in range(6)], 9) for _ in range(20)]
    assert found == [found[0]] * 20 and sum(found[0]) == 9


@pytest.mark.parametrize("score", ["weights", "cka"])
def test_heads_that_tie_are_grouped_alike_with_any_number_of_threads(score):
    """Pairs of equal heads, and large enough for several threads."""
    weight = torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            distances = {"weights": weight_distances, "cka": cka_distances}[score](weight).tolist()
            found.append([best_groups(distances, count) for count in (2, 4)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_without_a_signal_counts_are_equal():
    for allocation in ("score", "root", "displacement"):
        for n, share in ((32, 0.25), (32, 0.5), (24, 0.25), (40, 0.1)):
            groups = {c: part_cost(c * math.comb(n // c, 2), n // c, allocation) for c in candidates(n, share)}
            budget = math.floor(share * 12 * n + 1e-9)
            if share * n == int(share * n) and int(share * n) in groups:
                assert set(divide_budget([groups] * 12, budget)) == {int(share * n)}, (allocation, n)
    assert divide_budget([dict.fromkeys((2, 4, 8), 0.0)] * 6, 24) == [4] * 6


def test_a_signal_moves_the_budget():
    """Values five times closer than keys give their heads to the keys."""
    score = {c: c * math.comb(32 // c, 2) for c in (4, 8, 16)}
    near, far = ({c: part_cost(x * s, 32 // c, "root") for c, s in score.items()} for x in (0.2, 1.0))
    picked = divide_budget([far, near] * 4, 64)
    assert sum(picked) <= 64 and sum(picked[::2]) > sum(picked[1::2])


def test_candidates():
    assert candidates(32, 0.25) == [4, 8, 16] and candidates(32, 0.5) == [8, 16, 32]
    assert candidates(7, 0.5) == [1, 7] and candidates(13, 0.25) == [1] and candidates(7, 1.0) == [7]
    assert candidates(40, 0.25) == [5, 8, 10, 20] and candidates(6, 0.4) == [2, 3]
    assert candidates(32, 0.25, blocks=8) == [8, 16]


# --- plans ------------------------------------------------------------------------------------------------------------


def source_of(n, layers=1, width=None):
    fields = SIZES | {"num_hidden_layers": layers, "num_attention_heads": n, "hidden_size": width or 4 * n}
    return llama(**fields)


@pytest.mark.parametrize(("n", "ratio"), [(6, 0.3), (6, 1.0), (7, 0.5), (7, 0.25), (24, 0.3), (40, 0.25), (52, 0.3)])
@pytest.mark.filterwarnings("ignore:kv_ratio")  # the next test's
def test_any_number_of_heads_and_any_ratio(n, ratio):
    model = source_of(n)
    for allocation in ALLOCATIONS if n < 8 else ("uniform", "root"):
        plan = dha.search(model, ratio, allocation=allocation, progress=False)
        assert sum(plan.num_key_heads + plan.num_value_heads) <= ratio * 2 * n + 1e-9
        assert all(n % count == 0 for count in plan.num_key_heads + plan.num_value_heads)
        folded = dha.from_plan(model, plan)
        assert folded.config.kv_saving == pytest.approx(plan.kv_saving)
        assert folded(tokens(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("n", "ratio", "blocks", "message"),
    [
        (7, 0.9, 1, r"kv_ratio=0\.9 is 12 of 14 heads, and 2 are kept \(0\.1429\): .* can be 1, 7 of 7\."),
        (12, 0.9, 1, r"is 21 of 24 heads, and 12 are kept \(0\.5\): .* can be 1, 2, 3, 4, 6, 12 of 12\."),
        (12, 0.9, 4, r"is 21 of 24 heads, and 8 are kept \(0\.3333\): .* can be 4, 12 of 12\."),
    ],
)
def test_a_ratio_that_no_count_comes_near_is_said_to_keep_fewer(n, ratio, blocks, message):
    model = source_of(n)
    for make_plan in (partial(dha.search, progress=False), dha.uniform_plan):
        with pytest.warns(UserWarning, match=message):
            make_plan(model, ratio, head_blocks=blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dha.search(model, 1.0, progress=False)
        dha.search(source_of(12), 0.25, progress=False)


def test_one_key_head_and_all_value_heads():
    """Planted: keys are all alike, values are not."""
    model = make("llama")
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight
        with torch.no_grad():
            weight.copy_(weight[:4].repeat(8, 1))
    plan = dha.search(model, 0.75, allocation="score", progress=False)
    assert plan.num_key_heads == [4, 4] and plan.num_value_heads == [8, 8]  # candidates are 4 and 8
    only = dha.HeadPlan(plan.source, [[list(range(8))]] * 2, [consecutive_groups(8, 8)] * 2, 0.6)
    folded = dha.from_plan(model, only)
    assert folded.config.num_key_heads == [1, 1] and folded.config.num_value_heads == [8, 8]
    torch.testing.assert_close(folded(tokens()).logits, model(tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MAKE)
def test_duplicated_heads_are_found_in_every_part(name):
    """Heads i and its twin, in random order: by weights they form the groups, and pooling them changes nothing."""
    model = make(name, torch.float64)
    source = dha.HeadSource(model)
    twins = {}
    for layer in range(2):
        for kind in ("key", "value"):
            n = source.sizes.heads(layer, kind)
            heads = random.Random(f"{layer}{kind}").sample(range(n), n)
            twins[layer, kind] = canonical([heads[i : i + 2] for i in range(0, n, 2)])
            module, slot = source.family.projection(layer, kind)
            for tensor in model.get_submodule(module).parameters():
                rows = tensor.data.unflatten(0, (n, source.family.slots, -1))
                for one, other in twins[layer, kind]:
                    rows[other, slot] = rows[one, slot]
    plan = dha.search(model, 0.5, progress=False)
    assert {(layer, kind): groups for layer, kind, groups in plan.parts} == twins
    folded, expected = dha.from_plan(model, plan), model(tokens()).logits
    # the library's norms round to float32
    assert (folded(tokens()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert max(plan.displacements) == 0


def test_copies_of_a_grouped_query_model_are_found():
    """A GQA model whose heads were copied to MHA, at its own ratio: folding the copies costs nothing."""
    gqa = make("llama-gqa-bias-tied")
    config = LlamaConfig(**(SIZES | {"attention_bias": True, "tie_word_embeddings": True}))
    mha, state = LlamaForCausalLM(config).eval(), gqa.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].unflatten(0, (4, 4)).repeat_interleave(2, 0).flatten(0, 1)
    mha.load_state_dict(state)
    for score in ("weights", "cka"):
        plan = dha.search(mha, 0.5, score=score, progress=False)
        assert plan.key_groups == plan.value_groups == [consecutive_groups(8, 4)] * 2
    folded = dha.from_plan(mha, plan)
    assert folded.num_parameters() == gqa.num_parameters()
    torch.testing.assert_close(folded(tokens()).logits, gqa(tokens()).logits, atol=1e-5, rtol=0)


def test_a_head_of_zeros():
    model = make("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[4:8] = 0
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    for score in ("weights", "cka", "uniform"):
        plan = dha.search(model, 0.5, score=score, progress=False)
        assert dha.from_plan(model, plan)(tokens()).logits.isfinite().all()


def test_bfloat16_and_float32_have_one_fingerprint():
    model = make("qwen2-bias")
    plan = dha.search(model, 0.5, progress=False)
    half = make("qwen2-bias", torch.bfloat16)
    folded = dha.from_plan(half, plan)
    assert folded.dtype == torch.bfloat16 and folded(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("blocks", [2, 4])
def test_groups_stay_inside_blocks(blocks):
    plan = dha.search(make("llama"), 0.5, head_blocks=blocks, progress=False)
    for _, _, groups in plan.parts:
        assert all(len({head // (8 // blocks) for head in group}) == 1 for group in groups)
    with pytest.raises(DCFormerError, match=r"kv_ratio=0\.25"):
        dha.search(make("llama"), 0.25, head_blocks=4, progress=False)


@pytest.mark.parametrize("score", SCORES)
def test_every_score_makes_a_plan(score):
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [tokens(2, 10, seed) for seed in range(3)]
    plan = dha.search(model, 0.25, score, allocation="root", batches=batches, steps=3, progress=False)
    assert plan.score == score and plan.steps == (3 if score in ("function", "operator") else 0)
    after = model.state_dict()  # frozen, and without mixers
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.training
    again = dha.search(model, 0.25, score, allocation="root", batches=batches, steps=3, progress=False)
    assert again == plan


def test_a_plan_is_a_file_that_a_person_can_edit(tmp_path):
    model = make("llama")
    plan = dha.search(model, 0.25, allocation="root", progress=False)
    plan.save(tmp_path / "plan.json")
    assert HeadPlan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    content["layers"][1]["value"] = {"heads": 8, "groups": [[i] for i in range(8)][::-1]}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    edited = HeadPlan.load(tmp_path / "plan.json")
    assert edited.num_value_heads == [plan.num_value_heads[0], 8] and edited.value_groups[1] == [[i] for i in range(8)]
    assert dha.from_plan(model, edited).config.num_value_heads[1] == 8


EDITS = {
    "head 8 is out of range": lambda part: part.update(groups=[[0, 1, 2, 3], [4, 5, 6, 8]]),
    "head 7 is in 0 groups": lambda part: part.update(groups=[[0, 1, 2, 3], [4, 5, 6]]),
    "head 3 is in 2 groups": lambda part: part.update(groups=[[0, 1, 2, 3], [3, 5, 6, 7]]),
    "groups of .2, 6. heads": lambda part: part.update(groups=[[0, 1], [2, 3, 4, 5, 6, 7]]),
    "'heads' is 3, and there are": lambda part: part.update(heads=3),
    "is not a list of groups": lambda part: part.update(groups=[0, 1], heads=2),
    "head 0.0 is out of range: expected a whole number from 0 to 7": lambda part: part.update(
        groups=[[0.0, 1, 2, 3], [4, 5, 6, 7]]
    ),
    "head 'a' is out of range": lambda part: part.update(groups=[["a", 1, 2, 3], [4, 5, 6, 7]]),
    "KeyError": lambda part: part.pop("groups"),
}


@pytest.mark.parametrize("message", EDITS)
def test_an_invalid_edit_is_refused_where_it_is(message, tmp_path):
    plan = dha.uniform_plan(make("llama"), 0.25)
    content = json.loads(plan.to_json())
    EDITS[message](content["layers"][1]["key"])
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(DCFormerError, match=message) as error:
        HeadPlan.load(tmp_path / "plan.json")
    assert "KeyError" in message or "layer 1, key heads" in str(error.value)
    assert "plan.json" in str(error.value)


def test_other_broken_plans(tmp_path):
    plan = dha.uniform_plan(make("llama"), 0.25)
    for text, message in (("{", "not a plan"), ("[]", "not a plan"), ('{"format": "x"}', "not a plan")):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(DCFormerError, match=message):
            HeadPlan.load(tmp_path / "plan.json")
    for field, value, message in (
        ("version", 2, "version 2 of plans"),
        ("kv_ratio", "half", "kv_ratio='half'"),
        ("seed", "x", "seed='x' must be a whole number"),
    ):
        with pytest.raises(DCFormerError, match=message):
            HeadPlan.from_json(json.dumps(json.loads(plan.to_json()) | {field: value}))
    with pytest.raises(DCFormerError, match="cannot be read"):
        HeadPlan.load(tmp_path / "none.json")
    content = json.loads(plan.to_json())
    content["layers"].pop()
    with pytest.raises(DCFormerError, match="of 1 layers, its source has 2"):
        HeadPlan.from_json(json.dumps(content))
    content = json.loads(plan.to_json()) | {"tie": True}
    content["layers"][0]["key"] = {"heads": 8, "groups": [[i] for i in range(8)]}
    with pytest.raises(DCFormerError, match="tie is true"):
        HeadPlan.from_json(json.dumps(content))


WRONG = (None, True, -1, 99, 1.5, "x", [], {}, [[]], [0], [[0, 1], [2, 3]])


def test_no_edit_of_a_plan_ends_in_an_error_of_ours():
    """Every value of the file in turn becomes something else: it is refused by name, or still a plan."""
    model = make("llama-gqa-bias-tied")
    sizes, text = dha.HeadSource(model).sizes, dha.search(model, 0.5, progress=False).to_json()

    def places(value):
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield (key,)
            yield from ((key, *rest) for rest in places(value[key]))

    refused = 0
    for *above, last in places(json.loads(text)):
        for wrong in WRONG:
            content = json.loads(text)
            parent = content
            for key in above:
                parent = parent[key]
            parent[last] = wrong
            try:
                plan = HeadPlan.from_json(json.dumps(content))
                plan.check_source(sizes)
            except DCFormerError:
                refused += 1
                continue
            assert 0 < plan.kv_saving < 1 and DHAConfig(
                **GROUPED, **{f"{kind}_head_map": plan.head_map(kind) for kind in ("key", "value")}
            )
    assert refused > 800


def test_a_plan_for_another_source_is_refused():
    model, other = make("llama"), make("llama")
    plan = dha.search(model, 0.25, progress=False)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.neg_()
    with pytest.raises(DCFormerError, match="another source: fingerprint"):
        dha.from_plan(other, plan)
    with pytest.raises(DCFormerError, match="another source: fingerprint"):
        dha.fuse(other, plan, [tokens()], steps=1, progress=False)
    for name, field in (("mistral-window", "model_type"), ("llama-gqa-bias-tied", "key_heads")):
        with pytest.raises(DCFormerError, match=f"another source: {field}"):
            dha.from_plan(make(name), plan)
    sizes_only = dha.uniform_plan(model.config, 0.25)
    assert dha.from_plan(other, sizes_only).config.num_key_heads == [2, 2]  # made without weights, for any


def test_uniform_plans():
    plan = dha.uniform_plan(LlamaConfig(**SIZES), 0.25)
    assert plan.key_groups == plan.value_groups == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2 and plan.kv_saving == 0.75
    grouped = dha.uniform_plan(DCFormerConfig(**SIZES, num_key_value_heads=4), 0.5)
    assert grouped.head_map("key") == [[0, 0, 0, 0, 1, 1, 1, 1]] * 2
    assert uniform_count(6, 0.4) == 2 and uniform_count(7, 0.9) == 1 and uniform_count(52, 0.3) == 13
    with pytest.raises(DCFormerError, match=r"below the fewest heads possible: give at least 0\.125"):
        dha.uniform_plan(DHAConfig(**SIZES), 0.1)


def test_a_uniform_plan_of_a_folder_is_that_of_its_model(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    assert dha.uniform_plan(tmp_path, 0.5) == dha.uniform_plan(model, 0.5)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan"), None, True])
def test_ratios_outside_are_refused(ratio):
    with pytest.raises(DCFormerError, match="kv_ratio"):
        dha.search(make("llama"), ratio, progress=False)


def test_ratio_and_seed_may_be_numbers_of_numpy(tmp_path):
    plan = dha.search(make("llama"), np.float32(0.5), seed=np.int64(3), progress=False)
    plan.save(tmp_path / "plan.json")
    assert HeadPlan.load(tmp_path / "plan.json") == plan == dha.search(make("llama"), 0.5, seed=3, progress=False)


def test_arguments_of_search_are_checked():
    model = make("llama")
    for arguments, message in (
        ({"score": "mse"}, "score='mse'.*weights"),
        ({"allocation": "even"}, "allocation='even'.*uniform"),
        ({"score": "function"}, "give batches"),
        ({"kv_ratio": 0.1}, "below the fewest heads"),
        ({"kv_ratio": 0.1, "allocation": "root"}, "below the fewest heads"),
        ({"head_blocks": 3}, "head_blocks"),
        ({"head_blocks": 0}, "head_blocks=0 must be a whole number of at least 1"),
        ({"head_blocks": "2"}, "head_blocks='2' must be"),
        ({"tie": "x"}, "tie='x' must be True or False"),
        *(({"seed": seed}, "seed=.* must be a whole number") for seed in ("a", None, 1.5, True, -1)),
        ({"score": "function", "batches": [tokens()], "lr": -1}, "lr=-1 must be"),
    ):
        with pytest.raises(DCFormerError, match=message):
            dha.search(model, **arguments, progress=False)
    for wrong in ("kv_ratoi", "alocation", "head_block"):
        with pytest.raises(TypeError, match=wrong):
            dha.search(model, **{wrong: 1}, progress=False)
    for other, name in ((None, "NoneType"), (model.config, "LlamaConfig")):
        with pytest.raises(DCFormerError, match=f"{name} is not a model: give a causal language model, or its folder"):
            dha.search(other, progress=False)


def test_a_search_whose_loss_is_not_finite_says_at_which_step():
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("inf")
    with pytest.raises(DCFormerError, match=r"loss is (nan|inf) at step 0"):
        dha.search(model, 0.5, "function", batches=[tokens()], steps=2, progress=False)
    assert not any("mixer" in name for name, _ in model.named_modules())
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = float("nan")
    with pytest.raises(DCFormerError, match="layer 1: the value projection holds NaN"):
        dha.search(model, 0.5, progress=False)
    for score in ("cka", "uniform"):
        with pytest.raises(DCFormerError, match="layer 1: the value projection holds NaN"):
            dha.search(model, 0.5, score, progress=False)


@pytest.mark.parametrize("options", [{}, {"tie": True}, {"score": "uniform"}, {"score": "cka"}], ids=str)
def test_displacements_of_a_plan_are_of_each_part(options):
    """The share of the part's squared weight that mean pooling moves, times n, by whatever groups were chosen."""
    model = llama()
    plan = dha.search(model, 0.25, progress=False, **options)
    found = iter(plan.displacements)
    for layer, kind, groups in plan.parts:
        weight = dha.HeadSource(model).heads(layer, kind)[0].double()
        moved = sum((weight[head] - weight[group].mean(0)).square().sum() for group in groups for head in group)
        assert next(found) == pytest.approx((len(weight) * moved / weight.square().sum()).item(), rel=1e-5)


def test_trained_search_sees_the_function_but_the_operator_does_not():
    """Twins of heads planted in every part, after training mixtures: by function all are found, by operator not."""
    model = make("llama")
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            with torch.no_grad():
                rows = projection.weight.unflatten(0, (8, -1))
                rows[4:] = rows[:4]
    twins = [[i, i + 4] for i in range(4)]
    batches = [tokens(4, 16, seed) for seed in range(10)]
    arguments = {"batches": batches, "steps": 10, "progress": False}
    function, operator = (dha.search(model, 0.5, score, **arguments) for score in ("function", "operator"))
    assert function.key_groups == function.value_groups == [twins] * 2
    assert twins not in operator.key_groups + operator.value_groups


def test_function_is_the_distance_of_mixed_weights(monkeypatch):
    """Operators by which heads i and i + 4 come to be the same."""
    model = llama(attention_bias=True)
    operator = torch.zeros(8, 8, 4)  # [n, n, D]
    for head in range(8):
        operator[head, head % 4] = 1
    parts = {(layer, kind): operator for layer in range(2) for kind in ("key", "value")}
    monkeypatch.setattr(sys.modules[best_groups.__module__], "train_search", lambda *_, **__: parts)
    plan = dha.search(model, 0.5, "function", batches=[tokens()], progress=False)
    assert plan.key_groups == plan.value_groups == [[[0, 4], [1, 5], [2, 6], [3, 7]]] * 2
    assert plan.displacements == [0] * 4  # the weights as they are tell the pairs apart
    assert min(dha.search(model, 0.5, progress=False).displacements) > 1
