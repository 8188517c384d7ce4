"""What DHA computes exactly: mixing that changes nothing, folding of equal mixtures, pooling, expansion."""

import copy

import pytest
import torch
from helpers import randomize
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sources import GROUPED, MAKE, left_padded, llama, make, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dcformer import DHAForCausalLM, dha
from dcformer.dha.folding import fold_heads
from dcformer.dha.mixing import HeadMixer, attach_mixers, detach_mixers
from dcformer.dha.plan import consecutive_groups
from dcformer.dha.sources import HeadSource
from dcformer.errors import DCFormerError


def logits(model, **arguments):
    """Of the positions that are not padding."""
    arguments = arguments or left_padded()
    with torch.no_grad():
        found = model(**arguments).logits
    return found[arguments["attention_mask"].bool()] if "attention_mask" in arguments else found


def mix(model, plan):
    return attach_mixers(HeadSource(model), {(layer, kind): groups for layer, kind, groups in plan.parts})


def different(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", MAKE)
def test_mixers_that_are_not_trained_change_nothing(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = make(name, dtype)
        before = logits(model)
        assert mix(model, dha.search(model, 0.5, progress=False))
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.usefixtures("wide_norms")
def test_equal_rows_fold_exactly(name):
    """Any mixture whose rows are equal inside groups; the same with the source's own library, by expansion."""
    model = make(name, torch.float64)
    plan = dha.search(model, 0.5, allocation="displacement", progress=False)
    for mixer in mix(model, plan).values():
        with torch.no_grad():
            mixer.weight.copy_(torch.randn_like(mixer.weight[:, :1]).expand_as(mixer.weight))
    fused = dha.FusedModel(model, plan)
    soft, folded = logits(model), fused.fold()
    scale = soft.abs().max().item()
    assert different(logits(folded), soft) <= 1e-12 * scale
    assert different(logits(dha.expand(folded)), soft) <= 1e-12 * scale
    single = dha.FusedModel(copy.deepcopy(model).float(), plan)
    assert different(logits(single.fold()), logits(single.model)) <= 1e-5 * scale
    assert different(logits(single.model), before_mixing(model)) > 1e-2  # the mixture did change the function


def before_mixing(model):
    model = copy.deepcopy(model)
    detach_mixers(HeadSource(model, fused=True))
    return logits(model)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 6), count=st.integers(1, 4), dim=st.integers(1, 5), width=st.integers(0, 3), data=st.data())
def test_folding_is_the_sum_over_the_members(size, count, dim, width, data):
    """Against the formula head by head and channel by channel; a share of 1/g each is the mean, to rounding."""
    heads = size * count
    order = data.draw(st.permutations(range(heads)))
    groups = [sorted(order[i * size : (i + 1) * size]) for i in range(count)]
    shape = (heads * dim, width) if width else (heads * dim,)
    rows = torch.randn(shape, dtype=torch.float64)
    operator = torch.randn(count, size, dim, dtype=torch.float64)
    folded = fold_heads(rows, groups, operator)
    for m, group in enumerate(groups):
        for c in range(dim):
            expected = sum(operator[m, place, c] * rows[head * dim + c] for place, head in enumerate(group))
            torch.testing.assert_close(folded[m * dim + c], expected, rtol=0, atol=1e-13)
    mean = torch.stack([rows.unflatten(0, (heads, dim))[group].mean(0) for group in groups]).flatten(0, 1)
    equal = torch.full_like(operator, 1 / size)
    assert different(fold_heads(rows, groups, equal), mean) <= 1e-14 if mean.numel() else True
    assert different(fold_heads(rows, groups), mean) <= 1e-14 if mean.numel() else True


def test_folding_rounds_once():
    rows = torch.randn(16, 8).bfloat16()
    groups, operator = [[0, 3], [1, 2]], torch.randn(2, 2, 4)
    exact = fold_heads(rows.double(), groups, operator.double())
    assert torch.equal(fold_heads(rows, groups, operator), exact.bfloat16())


@pytest.mark.parametrize("bias", [False, True])
def test_consecutive_mean_pooling_is_grouped_query_attention(bias):
    """The library's Llama with two key/value heads and pooled projections."""
    model = randomize(llama(attention_bias=bias), scale=1.0)
    pooled = dha.from_plan(model, dha.uniform_plan(model.config, 0.25))
    assert type(pooled) is DHAForCausalLM and pooled.config.num_key_heads == [2, 2]
    gqa = llama(num_key_value_heads=2, attention_bias=bias).eval()
    state = model.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].unflatten(0, (2, 4, -1)).mean(1).flatten(0, 1)
    gqa.load_state_dict(state)
    assert different(logits(pooled), logits(gqa)) <= 1e-5 * logits(gqa).abs().max()


@pytest.mark.parametrize("name", MAKE)
def test_expansion_has_the_same_function(name, tmp_path):
    """Also after saving and loading, and token for token; the source's class where it is one of the library's."""
    model = make(name)
    folded = dha.from_plan(model, dha.search(model, 0.5, allocation="root", progress=False))
    plain = dha.expand(folded)
    named = {"qwen2-bias": "LlamaForCausalLM"}  # Llama's biases hold Qwen2's, and one of the output
    assert type(plain).__name__ == named.get(name, type(model).__name__)
    scale = logits(folded).abs().max()
    assert different(logits(plain), logits(folded)) <= 1e-5 * scale
    for which, saved in (("folded", folded), ("plain", plain)):
        saved.save_pretrained(tmp_path / which)
    folded, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / which).eval() for which in ("folded", "plain"))
    assert different(logits(plain), logits(folded)) <= 1e-5 * scale
    given = {"input_ids": tokens(), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    assert torch.equal(plain.generate(**given), folded.generate(**given))


@pytest.mark.parametrize("name", ["llama", "llama-gqa-bias-tied", "mistral-window", "qwen2-bias", "qwen3-qk-norm"])
def test_a_tied_plan_becomes_a_plain_grouped_query_model(name):
    model = make(name)
    plan = dha.search(model, 0.5, tie=True, progress=False)
    folded = dha.from_plan(model, plan)
    gqa = dha.to_gqa(folded)
    assert gqa.config.num_key_value_heads == folded.config.num_key_heads[0] and gqa.config.model_type != "dha"
    assert gqa.num_parameters() == folded.num_parameters()  # nothing is stored several times
    assert different(logits(gqa), logits(folded)) <= 1e-5 * logits(folded).abs().max()


def test_what_no_grouped_query_model_can_hold_is_refused():
    model = make("llama")
    plan = dha.search(model, 0.5, progress=False)
    assert plan.key_groups != plan.value_groups
    with pytest.raises(DCFormerError, match="tie=True"):
        dha.to_gqa(dha.from_plan(model, plan))
    composed = make("dcformer-composed")
    with pytest.raises(ValueError, match="composition"):
        dha.to_gqa(dha.from_plan(composed, dha.search(composed, 0.5, tie=True, progress=False)))
    with pytest.raises(ValueError, match="no head maps"):
        dha.to_gqa(composed)
    with pytest.raises(ValueError, match="not a language model of this package"):
        dha.expand(model)


def test_the_reason_is_what_each_grouped_query_model_lacks():
    """Qwen2's biases are Llama's, and windows in some layers Qwen3's: no target has both."""
    fields = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    model = randomize(Qwen2ForCausalLM(Qwen2Config(**GROUPED, **fields)), scale=1.0).eval()
    folded = dha.from_plan(model, dha.search(model, 0.5, tie=True, progress=False))
    with pytest.raises(
        DCFormerError, match=r"\(llama: layer_types, .*; mistral: attention_bias.*; qwen3: qk_norm differ"
    ):
        dha.to_gqa(folded)
    plain = dha.expand(folded)  # what the message recommends
    assert different(logits(plain), logits(folded)) <= 1e-5 * logits(folded).abs().max()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_fusion_loss_at_the_start(count):
    """2/g, and 0 for groups of one; the cheap form is the sum over pairs."""
    mixer = HeadMixer(consecutive_groups(8, count), 5, dtype=torch.float64)
    size = 8 // count
    assert mixer.fusion_loss().item() == pytest.approx(2 / size if size > 1 else 0.0, abs=1e-12)
    with torch.no_grad():
        mixer.weight.normal_()
    if size > 1:
        pairs = [
            (mixer.weight[m, i] - mixer.weight[m, k]).square().sum() / (size * 5)
            for m in range(count)
            for i in range(size)
            for k in range(i)
        ]
        assert mixer.fusion_loss().item() == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-12)


def test_a_model_is_mixed_once():
    model = make("llama")
    plan = dha.uniform_plan(model, 0.5)
    mix(model, plan)
    with pytest.raises(ValueError, match="has trained mixtures of heads"):
        mix(model, plan)
    detach_mixers(HeadSource(model, fused=True))
    assert not any("mixer" in name for name, _ in model.named_modules()) and isinstance(model, LlamaForCausalLM)
    mix(model, plan)


def test_a_copy_mixes_with_its_own_weights():
    model = make("neox-partial-rotary")
    mix(model, dha.uniform_plan(model, 0.5))
    other, before = copy.deepcopy(model), logits(model)
    for parameter in other.parameters():
        with torch.no_grad():
            parameter.add_(0.1)
    assert torch.equal(logits(model), before) and not torch.equal(logits(other), before)


def test_fused_projections_cannot_be_mixed():
    model = make("dcformer-composed")
    model.fuse_projections()
    with pytest.raises(ValueError, match="unfuse"):
        dha.search(model, 0.5)


@pytest.mark.parametrize("name", ["llama", "dcformer-composed-gqa"])
@pytest.mark.usefixtures("wide_norms")
def test_a_folded_model_is_a_source_again(name):
    """Rounds: half of the heads, and half of what is left, which is a quarter; by groups of groups."""
    model = make(name, torch.float64)
    half = dha.from_plan(model, dha.search(model, 0.5, allocation="root", progress=False))
    plan = dha.search(half, 0.5, progress=False)
    quarter = dha.from_plan(half, plan)
    assert plan.source.key_heads == half.config.num_key_heads
    assert quarter.config.kv_saving == pytest.approx(0.75)
    mixers = mix(half, plan)
    with pytest.raises(ValueError, match="has trained mixtures of heads"):
        dha.expand(half)
    for mixer in mixers.values():
        with torch.no_grad():
            mixer.weight.fill_(1 / mixer.shape[1])
    assert different(logits(quarter), logits(half)) <= 1e-12 * logits(half).abs().max()
