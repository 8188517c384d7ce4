"""Attention: "dcformer_chunked" against the definition, masks, low precision, dropout, memory, traces, errors."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import randomize, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from dcformer import (
    ComposeTrace,
    ComposeWeights,
    DCFormerForCausalLM,
    DHAConfig,
    DHAForCausalLM,
    SideWeights,
    attention_dcformer,
    chunked_dcformer,
    compose,
    masks_dcformer,
)
from dcformer.attention_dcformer import attend, eager_attention
from dcformer.chunked_dcformer import chunked_attention
from dcformer.masks_dcformer import QueryBlockMask, causal_rows, chunked_mask

IMPLEMENTATIONS = {"eager": eager_attention, "dcformer_chunked": chunked_attention}
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64, the same sums in another order


def module(is_causal=True, training=False):
    """What an attention function reads of its module."""
    return SimpleNamespace(is_causal=is_causal, training=training)


def small_blocks(patch, query_block, scores, few=0, alignment=1):
    """Makes the chunked implementation cut even tiny problems into many blocks of queries and slices of the batch."""
    patch.setattr(chunked_dcformer, "MAX_QUERY_BLOCK", query_block)
    patch.setattr(chunked_dcformer, "BLOCK_SCORES", scores)
    patch.setattr(chunked_dcformer, "ONE_THREAD_BLOCK", (query_block, scores))
    patch.setattr(chunked_dcformer, "ONE_THREAD_LEAST", 0)
    patch.setattr(chunked_dcformer, "ALIGNMENT", alignment)
    patch.setattr(masks_dcformer, "FEW_QUERIES", few)


@pytest.fixture
def many_blocks(monkeypatch):
    small_blocks(monkeypatch, query_block=3, scores=200)


# --- problems ---------------------------------------------------------------------------------------------------------


class Inputs:
    """Inputs of one attention call: leaf tensors by name, and how to call an implementation with them."""

    def __init__(
        self,
        batch=2,
        heads=4,
        kv_heads=2,
        groups=1,
        rank=2,
        length=7,
        key_length=7,
        head_dim=8,
        pre="static query_low query_gate key_low key_gate",
        post="static query_low query_gate key_low key_gate",
        dtype=torch.float64,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.groups, self.head_dim = heads, groups, head_dim
        self.shape = (batch, heads, length, key_length)
        self.stages = {"pre": pre.split(), "post": post.split()}
        self.tensors = {}

        def make(name, *shape, scale=1.0):
            values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            self.tensors[name] = values.to(dtype).requires_grad_()

        make("query", batch, heads, length, head_dim)
        make("key", batch, kv_heads, key_length, head_dim)
        make("value", batch, kv_heads, key_length, head_dim)
        # low-rank and static branches of about the size of the skip connection
        m = heads // groups
        for stage, parts in self.stages.items():
            for side, tokens in (("query", length), ("key", key_length)):
                if f"{side}_low" in parts:
                    make(f"{stage}.{side}.down", batch, heads, tokens, rank)
                    make(f"{stage}.{side}.up", batch, heads, tokens, rank, scale=0.5 / math.sqrt(m * rank))
                if f"{side}_gate" in parts:
                    make(f"{stage}.{side}.gate", batch, heads, tokens, scale=0.5)
            if "static" in parts:
                make(f"{stage}.static", groups, m, m, scale=0.5 / math.sqrt(m))
        self.grad = torch.randn(batch, length, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    def to(self, dtype):
        """The same numbers (rounded already) in another dtype."""
        other = Inputs.__new__(Inputs)
        other.__dict__.update(self.__dict__)
        other.tensors = {name: t.detach().to(dtype).requires_grad_() for name, t in self.tensors.items()}
        other.grad = self.grad.to(dtype)
        return other

    def weights(self, stage, tensors=None):
        tensors = self.tensors if tensors is None else tensors
        sides = {}
        for side in ("query", "key"):
            parts = {name: tensors.get(f"{stage}.{side}.{name}") for name in ("down", "up", "gate")}
            sides[side] = SideWeights.of(**parts) if any(part is not None for part in parts.values()) else None
        static = tensors.get(f"{stage}.static")
        if static is None and not any(sides.values()):
            return None
        return ComposeWeights(sides["query"], sides["key"], static, self.groups)

    def call(self, attention, mask=None, tensors=None, is_causal=True, training=False, **kwargs):
        tensors = self.tensors if tensors is None else tensors
        return attention(
            module(is_causal, training),
            *(tensors[name] for name in ("query", "key", "value")),
            mask,
            scaling=self.head_dim**-0.5,
            pre=self.weights("pre", tensors),
            post=self.weights("post", tensors),
            **kwargs,
        )

    def run(self, attention, mask=None, **kwargs):
        """Output and the gradient of every input, by name."""
        output = self.call(attention, mask, **kwargs)[0]
        grads = torch.autograd.grad(output, list(self.tensors.values()), self.grad.to(output.dtype))
        return {"output": output.detach()} | dict(zip(self.tensors, grads, strict=True))


def assert_same(results, expected, **tolerance):
    assert results.keys() == expected.keys()
    for name, truth in expected.items():
        torch.testing.assert_close(results[name], truth, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


BRANCHES = ("static", "query_low", "query_gate", "key_low", "key_gate")
branch_sets = st.sets(st.sampled_from(BRANCHES)).map(lambda names: " ".join(sorted(names)))


@st.composite
def problems(draw, max_batch=3):
    groups = draw(st.integers(1, 3))
    m_heads = draw(st.integers(1, 12 // groups))
    heads = groups * m_heads
    length = draw(st.integers(1, 19))
    branches = st.just("") if draw(st.integers(0, 4)) == 0 else branch_sets
    return {
        "batch": draw(st.integers(1, max_batch)),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "groups": groups,
        "rank": draw(st.integers(1, 3)),
        "length": length,
        "key_length": length + draw(st.integers(0, 9)),
        "head_dim": 2 * draw(st.integers(2, 40)),
        "pre": draw(branches),
        "post": draw(branches),
        "seed": draw(st.integers(0, 2**31)),
    }


block_sizes = st.fixed_dictionaries(
    {
        "query_block": st.integers(1, 11),
        "scores": st.integers(1, 3000),
        "few": st.sampled_from([0, 0, 0, 16]),
        "alignment": st.sampled_from([1, 2, 3, 16]),
    }
)


@st.composite
def masks(draw, shape):
    """(mask for eager, mask for chunked, other arguments); the two are made independently where they can be."""
    batch, heads, length, key_length = shape
    kind = draw(
        st.sampled_from(
            ["causal", "window", "full", "boolean", "additive", "per head", "padded", "packed", "additive head"]
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    window = (
        draw(st.integers(1, key_length + 2)) if kind in ("window", "padded", "packed") and draw(st.booleans()) else None
    )
    if kind in ("causal", "window"):
        return None, None, {"sliding_window": window}
    if kind == "full":
        return None, None, {"is_causal": False, "sliding_window": window}
    if kind in ("boolean", "additive", "per head", "additive head"):
        lead = (draw(st.sampled_from([1, batch])), heads if "head" in kind else 1)
        density = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
        mask = torch.rand(*lead, length, key_length, generator=generator) < density  # rows without any key happen
        if "additive" in kind:
            bias = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
            hide = draw(st.sampled_from([float("-inf"), torch.finfo(torch.float64).min]))
            mask = bias.masked_fill(~mask, hide)
        return mask, mask, {}

    # Padding and documents: Transformers' mask functions against the definition, written out.
    offset = key_length - length
    real = torch.ones(batch, key_length, dtype=torch.bool)
    documents = torch.zeros(batch, key_length, dtype=torch.long)
    functions = [causal_mask_function if window is None else sliding_window_causal_mask_function(window)]
    if kind == "padded":
        for row in range(batch):
            pads = draw(st.integers(0, key_length))
            left = draw(st.booleans())
            real[row, :pads] &= not left
            real[row, key_length - pads :] &= left
    else:
        starts = torch.rand(batch, key_length, generator=generator) < 0.3
        documents = starts.long().cumsum(-1)
        functions.append(packed_sequence_mask_function(documents))
    position = torch.arange(length)[:, None] + offset
    keys = torch.arange(key_length)
    dense = (keys <= position) & (keys > position - (window or key_length + 1))
    dense = dense[None] & real[:, None, :] & (documents[:, offset:, None] == documents[:, None, :])
    chunked = chunked_mask(
        batch,
        length,
        key_length,
        q_offset=offset,
        mask_function=and_masks(*functions),
        attention_mask=real,
        allow_is_causal_skip=kind == "padded",
        local_size=window,
    )
    if kind == "padded" and real.all():
        assert isinstance(chunked, QueryBlockMask) and chunked.is_plain
    return dense[:, None], chunked, {}


# --- chunked is eager -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(data=st.data(), fields=problems(), blocks=block_sizes)
def test_chunked_is_eager_output_and_every_gradient(data, fields, blocks):
    problem = Inputs(**fields)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, **blocks)
        mask, chunked, kwargs = data.draw(masks(problem.shape))
        expected = problem.run(eager_attention, mask, **kwargs)
        results = problem.run(chunked_attention, chunked, **kwargs)
        with torch.no_grad():
            inference = problem.call(chunked_attention, chunked, **kwargs)[0]
    assert_same(results, expected, **EXACT)
    assert torch.equal(inference, results["output"])


@pytest.mark.parametrize("branch", ["", *BRANCHES])
@pytest.mark.parametrize("stage", ["pre", "post"])
@pytest.mark.parametrize("groups", [1, 3])
def test_each_branch_alone(branch, stage, groups, many_blocks):
    problem = Inputs(heads=6, kv_heads=3, groups=groups, **({"pre": "", "post": ""} | {stage: branch}))
    expected = problem.run(eager_attention)
    assert_same(problem.run(chunked_attention), expected, **EXACT)
    if branch:  # the branch does something, and every weight of it matters
        assert all(grad.abs().max() > 1e-3 for name, grad in expected.items() if name.startswith(stage))


@pytest.mark.parametrize(
    ("fields", "options", "calls"),
    [
        ({}, {}, 1),
        ({}, {"is_causal": False}, 1),
        ({"key_length": 9}, {"is_causal": False}, 1),
        ({}, {"sliding_window": 7}, 1),
        ({}, {"sliding_window": 4}, 0),
        ({"key_length": 9}, {}, 0),
        ({"pre": "query_gate"}, {}, 0),
    ],
)
def test_without_composition_torch_attends(fields, options, calls, many_blocks, monkeypatch):
    """Where it needs no mask, which it would keep whole."""
    problem, real, seen = Inputs(**({"pre": "", "post": ""} | fields)), F.scaled_dot_product_attention, []
    expected = problem.run(eager_attention, **options)

    def spy(query, *args, **kwargs):
        seen.append(query.shape[2])
        return real(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    assert_same(problem.run(chunked_attention, **options), expected, **EXACT)
    assert seen == [7] * 2 * calls  # once more in the backward pass


def test_torchs_attention_has_no_second_derivatives(many_blocks):
    """Whichever way they are asked for: an error, as where heads are composed, and never a part of them."""
    problem = Inputs(pre="", post="")
    output = problem.call(chunked_attention)[0]
    inputs = list(problem.tensors.values())
    grads = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    for ask in (
        lambda: torch.autograd.grad(penalty, inputs, retain_graph=True, allow_unused=True),
        lambda: penalty.backward(inputs=inputs, retain_graph=True),
        lambda: penalty.backward(),
    ):
        with pytest.raises(NotImplementedError, match=r"second derivatives.*attn_implementation='eager'"):
            ask()


def test_only_some_inputs_require_gradients(many_blocks):
    problem = Inputs()
    expected = problem.run(eager_attention)
    for name in problem.tensors:
        tensors = {other: t.detach() for other, t in problem.tensors.items()}
        tensors[name].requires_grad_()
        output = problem.call(chunked_attention, tensors=tensors)[0]
        (grad,) = torch.autograd.grad(output, tensors[name], problem.grad)
        torch.testing.assert_close(grad, expected[name], **EXACT)


@pytest.mark.parametrize(
    ("query_block", "scores", "expected"),
    [
        (3, 10**6, [(slice(0, 3), n) for n in (0, 3, 6, 9)]),  # one slice of the batch, blocks of three queries
        (16, 3 * 4 * 11 * 11, [(slice(0, 3), 0)]),  # 3 sequences, 4 heads, 11 queries, 11 keys: all fits
        (3, 4 * 9 * 6, [(slice(0, 3), n) for n in (0, 3)] + [(slice(b, b + 2), n) for b in (0, 2) for n in (6, 9)]),
        (16, 1, [(slice(b, b + 1), n) for b in (0, 1, 2) for n in (0, 8)]),  # never fewer than eight queries
    ],
)
def test_small_limits_really_cut_the_problem_up(query_block, scores, expected, monkeypatch):
    """Or the comparison above would compare one block with itself."""
    small_blocks(monkeypatch, query_block, scores)
    plan = chunked_dcformer._Call(torch.zeros(3, 4, 11, 8), torch.zeros(3, 4, 11, 8), [], True, None, 0.0, None, 4)
    starts = sorted((b.batch.start, min(b.batch.stop, 3), b.queries.start) for b in plan.blocks)
    assert starts == sorted((part.start, min(part.stop, 3), start) for part, start in expected)
    sizes = [block.size() for block in plan.blocks]
    assert sizes == sorted(sizes, reverse=True)  # in whose memory the others fit


def test_one_thread_has_smaller_blocks_unless_it_drops_weights(monkeypatch):
    """Dropped weights are drawn block by block: they must not depend on how many threads a pass has."""
    query = torch.zeros(16, 12, 128, 4)

    def cut(threads, dropout=0.0):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        plan = chunked_dcformer._Call(query, query, [], True, 16, dropout, None, 12)
        return sorted((b.queries.start, b.queries.stop, b.batch.start, b.batch.stop) for b in plan.blocks)

    whole = [(0, 128, 0, 10), (0, 128, 10, 16)]
    assert cut(2) == whole and cut(1, dropout=0.1) == cut(2, dropout=0.1) == whole
    assert cut(1) == [(0, 48, 0, 16), (48, 96, 0, 14), (48, 96, 14, 16), (96, 128, 0, 16)]
    query = query.to("meta")
    assert chunked_dcformer._Call(query, query, [], True, 16, 0.0, None, 12).one_thread is False


@pytest.mark.parametrize(("window", "batch", "blocks"), [(None, 1, 1), (None, 2, 3), (16, 2, 1), (16, 3, 3)])
def test_little_work_of_one_thread_stays_in_one_block(window, batch, blocks, monkeypatch):
    """16 heads and 48 queries that see 128 keys, or 64 in a window: 98,304 and 49,152 scores of a sequence."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    query = torch.zeros(batch, 16, 128, 4)
    assert len(chunked_dcformer._Call(query, query, [], True, window, 0.0, None, 16).blocks) == blocks


def test_blocks_that_see_more_keys_have_fewer_queries(monkeypatch):
    small_blocks(monkeypatch, query_block=32, scores=2 * 32 * 32)
    plan = chunked_dcformer._Call(torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 64, 8), [], True, None, 0.0, None, 2)
    assert sorted((b.queries.start, b.queries.stop) for b in plan.blocks) == [(0, 32), (32, 48), (48, 64)]
    cached = chunked_dcformer._Call(torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 128, 8), [], True, None, 0.0, None, 2)
    assert sorted(b.queries.start for b in cached.blocks) == [0, 10, 19, 27, 35, 43, 51, 59]


def test_blocks_are_aligned_where_there_is_enough(monkeypatch):
    """Whole multiples of queries but for the last block, and of keys but where there are no more."""
    small_blocks(monkeypatch, query_block=32, scores=2 * 32 * 40, alignment=16)
    query, key = torch.zeros(1, 2, 70, 8), torch.zeros(1, 2, 77, 8)
    for mask in ([], [torch.ones(1, 1, 70, 77, dtype=torch.bool).tril(7).triu(-20)]):
        plan = chunked_dcformer._Call(query, key, mask, not mask, 28, 0.0, None, 2)
        blocks = sorted(plan.blocks, key=lambda block: block.queries.start)
        assert len(blocks) > 2
        for block in blocks:
            assert block.queries.start % 16 == 0 and block.keys.start % 16 == 0
            assert block.keys.stop % 16 == 0 or block.keys.stop == 77
            seen = (max(0, block.queries.start - 20), block.queries.stop + 7)  # keys
            assert block.keys.start <= seen[0] < block.keys.start + 16 and seen[1] <= block.keys.stop < seen[1] + 16


def test_a_window_touches_only_its_keys(monkeypatch):
    small_blocks(monkeypatch, query_block=4, scores=10**6)
    plan = chunked_dcformer._Call(torch.zeros(1, 1, 20, 8), torch.zeros(1, 1, 26, 8), [], True, 5, 0.0, None, 1)
    assert len(plan.blocks) == 5
    for block in plan.blocks:
        first_position, last_position = block.queries.start + 6, block.queries.stop - 1 + 6
        assert (block.keys.start, block.keys.stop) == (max(0, first_position - 4), last_position + 1)


SWITCHES = [
    {},
    {"compose_pre": False},
    {"compose_post": False},
    {"compose_query": False},
    {"compose_key": False},
    {"compose_projection": False},
    {"compose_gate": False},
    {"compose_static": True},
    {"compose_query": False, "compose_key": False, "compose_static": True},
    {f"compose_{name}": False for name in ("pre", "post", "query", "key")},
]


def model_inputs(kind, batch, length, generator):
    """Token ids and what goes with them, for each way of giving a model sequences of different lengths."""
    inputs = {"input_ids": torch.randint(97, (batch, length), generator=generator)}
    pads = torch.randint(1, length, (batch,), generator=generator)
    if kind == "left":
        inputs["attention_mask"] = (torch.arange(length) >= pads[:, None]).long()
    elif kind == "right":
        inputs["attention_mask"] = (torch.arange(length) < pads[:, None]).long()
    elif kind == "packed":
        cut = int(pads[0])
        restarting = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        inputs["position_ids"] = restarting.expand(batch, -1)
    return inputs


@settings(deadline=None, max_examples=25)
@given(
    switches=st.sampled_from(SWITCHES),
    fields=st.fixed_dictionaries(
        {
            "num_attention_heads": st.sampled_from([2, 4, 6]),
            "num_key_value_heads": st.sampled_from([1, 2]),
            "compose_groups": st.sampled_from([1, 2]),
            "compose_rank": st.integers(1, 3),
            "sliding_window": st.sampled_from([2, 3, 8, None]),
            "mlp_gates": st.sampled_from([0, 4]),
            "use_parallel_residual": st.booleans(),
        }
    ),
    kind=st.sampled_from(["plain", "left", "right", "packed"]),
    length=st.integers(2, 23),
    blocks=block_sizes,
    seed=st.integers(0, 2**31),
)
def test_models_agree_in_logits_and_every_gradient(switches, fields, kind, length, blocks, seed):
    model = randomize(DCFormerForCausalLM(tiny_config(head_dim=8, **fields, **switches))).double()
    inputs = model_inputs(kind, 2, length, torch.Generator().manual_seed(seed))
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, **blocks)
        for implementation in IMPLEMENTATIONS:
            model.set_attn_implementation(implementation)
            model.zero_grad(set_to_none=True)
            logits = model(**inputs, use_cache=False).logits
            logits.logsumexp(-1).mean().backward()
            results[implementation] = {"logits": logits.detach()} | {
                name: parameter.grad for name, parameter in model.named_parameters()
            }
    assert_same(results["dcformer_chunked"], results["eager"], **EXACT)
    assert all(grad is not None for grad in results["eager"].values())


# --- rows that see nothing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("hide", ["boolean", "-inf", "minimum", "another dtype's minimum"])
@pytest.mark.parametrize("rows", ["one", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", [0, 16])
def test_fully_masked_rows_give_zeros_and_no_gradient(attention, hide, rows, dtype, few, monkeypatch):
    small_blocks(monkeypatch, 3, 200, few)
    problem = Inputs(dtype=dtype)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    dark = torch.zeros(2, 7, dtype=torch.bool)  # which queries see nothing
    dark[1, 4] = True
    dark |= rows == "all"
    mask[dark[:, None]] = False
    if hide != "boolean":
        # bfloat16's is 0.997 times float32's
        factors = {"-inf": float("inf"), "minimum": 1.0, "another dtype's minimum": 0.99}
        value = factors[hide] * torch.finfo(dtype).min
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value)
    results = problem.run(attention, mask)
    assert not results["output"][dark].any()
    assert not results["query"].transpose(1, 2)[dark].any()
    assert all(torch.isfinite(result).all() for result in results.values())
    if rows == "one":
        assert results["output"][~dark].abs().sum(dim=(-1, -2)).min() > 0
    else:
        assert not any(result.any() for result in results.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_all_padding_sequence_leaves_the_model_finite(implementation, many_blocks):
    model = randomize(DCFormerForCausalLM(tiny_config()))
    model.set_attn_implementation(implementation)
    attention_mask = torch.ones(2, 9, dtype=torch.long)
    attention_mask[1] = 0
    logits = model(torch.randint(97, (2, 9)), attention_mask=attention_mask).logits
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


# --- properties of the model ------------------------------------------------------------------------------------------

UNCHANGED = 1e-6  # what an output may move by; float64 rounding is far below


@pytest.fixture(scope="module")
def double_model():
    """Two local layers around a global one, in float64, composition at full strength."""
    config = tiny_config(num_hidden_layers=3, sliding_window=4, num_attention_heads=6, head_dim=8, compose_static=True)
    return randomize(DCFormerForCausalLM(config)).double()


def logits_of(model, implementation, input_ids, **kwargs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(input_ids, use_cache=False, **kwargs).logits


def other_tokens(tokens):
    return (tokens + 1 + torch.randint_like(tokens, 90)) % 97


lengths = st.integers(2, 25)
seeds = st.integers(0, 2**31)
by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@by_implementation
@settings(deadline=None, max_examples=12)
@given(length=lengths, place=st.integers(0, 10**6), query_block=st.integers(1, 9), seed=seeds)
def test_a_later_token_changes_nothing_before_it(double_model, implementation, length, place, query_block, seed):
    torch.manual_seed(seed)
    ids = torch.randint(97, (2, length))
    place %= length
    changed = ids.clone()
    changed[:, place] = other_tokens(ids[:, place])
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, query_block, 300)
        before, after = (logits_of(double_model, implementation, x) for x in (ids, changed))
    difference = (before - after).abs().amax(dim=-1)
    assert (difference[:, :place] <= UNCHANGED).all()
    assert (difference[:, place] > 1e-3).all()  # but the token itself matters


@by_implementation
@settings(deadline=None, max_examples=12)
@given(side=st.sampled_from(["left", "right"]), length=lengths, query_block=st.integers(1, 9), seed=seeds)
def test_padding_changes_nothing(double_model, implementation, side, length, query_block, seed):
    """Neither what the padded positions hold, nor that they are there: each sequence is as it is alone."""
    torch.manual_seed(seed)
    mask = model_inputs(side, 3, length, torch.Generator().manual_seed(seed))["attention_mask"]
    ids = torch.randint(97, (3, length))
    changed = torch.where(mask.bool(), ids, other_tokens(ids))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, query_block, 300)
        before, after = (
            logits_of(double_model, implementation, x, attention_mask=mask, position_ids=positions)
            for x in (ids, changed)
        )
        real = mask.bool()
        assert (before - after)[real].abs().max() <= UNCHANGED
        for row in range(3):
            alone = logits_of(double_model, implementation, ids[row, real[row]][None])
            assert (alone[0] - before[row, real[row]]).abs().max() <= UNCHANGED


@by_implementation
@settings(deadline=None, max_examples=12)
@given(parts=st.lists(st.integers(1, 12), min_size=2, max_size=4), query_block=st.integers(1, 9), seed=seeds)
def test_packed_sequences_are_as_they_are_apart(double_model, implementation, parts, query_block, seed):
    torch.manual_seed(seed)
    sequences = [torch.randint(97, (1, part)) for part in parts]
    positions = torch.cat([torch.arange(part) for part in parts])[None]
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, query_block, 300)
        together = logits_of(double_model, implementation, torch.cat(sequences, dim=1), position_ids=positions)
        apart = [logits_of(double_model, implementation, sequence) for sequence in sequences]
    assert (together - torch.cat(apart, dim=1)).abs().max() <= UNCHANGED


@by_implementation
def test_the_window_is_w_keys_with_the_querys_own(implementation, many_blocks):
    """Only the newest w tokens reach a local layer's output, and the oldest of them does."""
    model = randomize(
        DCFormerForCausalLM(tiny_config(num_hidden_layers=1, sliding_window=4, layer_pattern="L"))
    ).double()
    ids = torch.randint(97, (1, 12))
    base = logits_of(model, implementation, ids)[0, -1]
    for place in range(12):
        changed = ids.clone()
        changed[0, place] = other_tokens(ids[0, place])
        moved = (logits_of(model, implementation, changed)[0, -1] - base).abs().max()
        assert (moved > 1e-4) == (place >= 12 - 4), place


# --- low precision ----------------------------------------------------------------------------------------------------


def naive_attention(module, query, key, value, mask, scaling, pre, post, **kwargs):
    """Composed attention with every single operation in the dtype of the inputs."""

    def naive_compose(maps, weights):
        def grouped(tensor):
            return tensor.unflatten(1, (weights.groups, -1))

        a = grouped(maps)
        out = a + torch.einsum("bgjts,gjm->bgmts", a, weights.static)
        for side, n in ((weights.query, "t"), (weights.key, "s")):
            hidden = torch.einsum(f"bgjts,bgj{n}r->bgrts", a, grouped(side.down))
            out = out + torch.einsum(f"bgrts,bgm{n}r->bgmts", hidden, grouped(side.up))
            out = out + torch.einsum(f"bgmts,bgm{n}->bgmts", a, grouped(side.gate))
        return out.flatten(1, 2)

    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = naive_compose(query @ key.transpose(-1, -2) * scaling, pre)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = naive_compose(scores.masked_fill(~visible, float("-inf")).softmax(-1), post)
    return (weights @ value).transpose(1, 2), None


def assert_no_worse_than_naive(results, naive, exact, dtype):
    """Errors at most 1.6 times the naive low-precision ones in norm, the largest at most twice theirs, plus a rounding.

    In float32 nothing is computed in a wider type than the naive way does: the errors are as large, and differ by the
    order of sums, which is the machine's. Over 40 seeds the norms differed by up to 1.4, the largest errors by up to 4.
    """
    times_largest = 6 if dtype == torch.float32 else 2
    for name, truth in exact.items():
        assert results[name].dtype == dtype, name
        found, allowed = (x[name].double() - truth for x in (results, naive))
        assert torch.isfinite(allowed).all(), f"{name}: the naive computation overflows and says nothing"
        eps = torch.finfo(dtype).eps
        assert found.norm() <= 1.6 * allowed.norm() + eps * truth.norm() / 8, name  # an eighth of a rounding each
        assert found.abs().max() <= times_largest * allowed.abs().max() + eps * truth.abs().max(), name


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_low_precision_is_no_worse_than_computing_in_it(attention, dtype, groups, seed, monkeypatch):
    small_blocks(monkeypatch, 8, 2000)
    problem = Inputs(heads=6, kv_heads=3, groups=groups, length=33, key_length=33, head_dim=16, dtype=dtype, seed=seed)
    exact = problem.to(torch.float64).run(eager_attention)
    assert_no_worse_than_naive(problem.run(attention), problem.run(naive_attention), exact, dtype)


@pytest.mark.parametrize("length", [12, 40], ids=["few queries", "many"])
@pytest.mark.parametrize("attention", [eager_attention, chunked_attention])
@torch.no_grad()
def test_composed_weights_are_rounded_before_the_values(attention, length):
    """Values of 1 and -1 leave small differences of weights, which show whether they were rounded."""
    problem = Inputs(heads=4, kv_heads=4, length=length, key_length=length, dtype=torch.bfloat16)
    signs = torch.tensor([1.0, -1.0]).repeat(length // 2)[:, None].expand_as(problem.tensors["value"])
    problem.tensors["value"] = signs.to(torch.bfloat16)
    maps = attend(
        problem.tensors["query"], problem.tensors["key"], causal_rows(length, length, None, "cpu")[:, None], None,
        problem.head_dim**-0.5,
        problem.weights("pre"), problem.weights("post"),
    )  # fmt: skip
    found = problem.call(attention)[0].float()

    def share_equal(weights):
        expected = torch.matmul(weights.double(), signs.double()).transpose(1, 2).to(torch.bfloat16).float()
        return (found == expected).double().mean()

    assert share_equal(maps.composed_weights.to(torch.bfloat16)) > 0.95
    assert share_equal(maps.composed_weights) < 0.8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_models_are_no_worse_than_computing_in_it(implementation, dtype, monkeypatch):
    """The whole model; the naive one is the same with scores, softmax and composition in its own dtype too."""
    small_blocks(monkeypatch, 5, 500)
    model = randomize(DCFormerForCausalLM(tiny_config(num_attention_heads=4, num_key_value_heads=2))).to(dtype)
    exact_model = DCFormerForCausalLM(model.config).double()
    exact_model.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    inputs = model_inputs("left", 2, 21, torch.Generator().manual_seed(5))
    real = inputs["attention_mask"].bool()

    def run(model, implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        logits = model(**inputs, use_cache=False).logits[real]
        logits.square().mean().backward()
        return {"logits": logits.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}

    exact, results = run(exact_model, "eager"), run(model, implementation)
    # Norms stay as they are, which makes this the stricter yardstick: with their epsilon in float16 they overflow.
    monkeypatch.setattr(attention_dcformer, "accumulation_dtype", lambda dtype: dtype)
    naive = run(model, "eager")
    assert_no_worse_than_naive(results, naive, exact, dtype)


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped_weights(problem, seed, p, attention=chunked_attention, training=True):
    """Composed weights after dropout, [B, H, T, S]: values are the unit vectors, so the output is the weights."""
    _, _, _, key_length = problem.shape
    kv_heads = problem.tensors["key"].shape[1]
    unit = torch.eye(key_length, dtype=torch.float64).expand(problem.shape[0], kv_heads, -1, -1)
    torch.manual_seed(seed)
    tensors = {name: t.detach() for name, t in problem.tensors.items()} | {"value": unit}
    with torch.no_grad():
        output = problem.call(attention, tensors=tensors, is_causal=False, training=training, dropout=p)[0]
    return output.transpose(1, 2)


def test_dropout_drops_and_scales_independently(many_blocks):
    p, problem = 0.3, Inputs(batch=3, groups=2, length=24, key_length=24, seed=4)
    whole = dropped_weights(problem, 0, 0.0)
    for attention in IMPLEMENTATIONS.values():
        undropped = dropped_weights(problem, 0, 0.0, attention)
        assert torch.equal(dropped_weights(problem, 0, p, attention, training=False), undropped)
    dropped = dropped_weights(problem, 1, p)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - p), rtol=1e-12, atol=1e-14)
    assert abs(kept.double().mean() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())
    # Heads, groups, sequences, blocks of queries and calls are dropped independently: in any two of them a share of
    # p² + (1-p)² of the places agrees.
    agree = p**2 + (1 - p) ** 2
    pairs = {
        "heads": (kept[0, 0], kept[0, 1]),
        "groups": (kept[0, 0], kept[0, 2]),
        "sequences": (kept[0, 0], kept[1, 0]),
        "blocks of three queries": (kept[..., 0:3, :], kept[..., 3:6, :]),
        "calls": (kept, dropped_weights(problem, 2, p) != 0),
    }
    for name, (one, other) in pairs.items():
        share = (one == other).double().mean()
        assert abs(share - agree) <= 5 * math.sqrt(agree * (1 - agree) / one.numel()), name
    assert torch.equal(dropped, dropped_weights(problem, 1, p))  # the same after the same torch.manual_seed


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_dropout_preserves_the_mean(attention, many_blocks):
    p, problem = 0.2, Inputs(batch=1, heads=2, kv_heads=2, length=5, key_length=5, seed=2)
    whole = dropped_weights(problem, 0, 0.0, attention)
    samples = torch.stack([dropped_weights(problem, seed, p, attention) for seed in range(300)])
    # Each weight w is w/(1-p) or 0: standard deviation |w|·sqrt(p/(1-p)), over 300 draws.
    error = (samples.mean(0) - whole).abs()
    assert (error <= 5 * whole.abs() * math.sqrt(p / (1 - p) / 300) + 1e-12).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_dropout_is_the_same_in_forward_and_backward(groups, many_blocks):
    """Finite differences of the forward pass with one seed: they fit only if backward drops the same places."""
    problem = Inputs(batch=2, heads=4, kv_heads=2, groups=groups, length=5, key_length=6, head_dim=4, seed=7)

    def forward(*tensors):
        torch.manual_seed(11)
        named = dict(zip(problem.tensors, tensors, strict=True))
        return problem.call(chunked_attention, tensors=named, training=True, dropout=0.4)[0]

    assert torch.autograd.gradcheck(forward, tuple(problem.tensors.values()), fast_mode=True)


@by_implementation
def test_dropout_in_a_model(implementation, many_blocks):
    model = randomize(DCFormerForCausalLM(tiny_config(attention_dropout=0.5)))
    model.set_attn_implementation(implementation)
    ids = torch.randint(97, (1, 10))
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(3)
    third = model(ids, use_cache=False).logits
    torch.manual_seed(3)
    assert torch.equal(third, model(ids, use_cache=False).logits)


# --- memory -----------------------------------------------------------------------------------------------------------


class MemoryMeter(TorchDispatchMode):
    """Counts what operations allocate: the most alive at once, the largest single tensor, and how many operations."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.largest, self.operations = 0, 0, 0, 0
        self._seen = weakref.WeakSet()

    def _freed(self, size):
        self.alive -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                size = storage.nbytes()
                self.alive += size
                self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
                weakref.finalize(storage, self._freed, size)
        return out


def test_the_memory_meter_meters():
    with MemoryMeter() as meter:
        x = torch.zeros(1000)
        y = x + 1
        del x
        z = y * 2
        y.add_(1)
        view = z[:10]
    assert (meter.largest, meter.peak, meter.alive) == (4000, 8000, 8000)
    del y, z, view
    assert meter.alive == 0


def training_step_memory(implementation, length, padded, window):
    config = tiny_config(
        num_hidden_layers=1,
        vocab_size=7,
        intermediate_size=8,
        hidden_size=8,
        head_dim=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=window,
        layer_pattern="G" if window is None else "L",
    )
    model = randomize(DCFormerForCausalLM(config))
    model.set_attn_implementation(implementation)
    attention_mask = torch.ones(2, length, dtype=torch.long)
    attention_mask[0, : length // 4] = 0
    ids = torch.randint(7, (2, length))
    with MemoryMeter() as meter:
        logits = model(ids, attention_mask=attention_mask if padded else None, use_cache=False).logits
        logits.mean().backward()
    return meter


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [None, 32], ids=["global", "local"])
def test_chunked_memory_is_linear_in_length_and_eagers_is_quadratic(padded, window, monkeypatch):
    """Forward and backward of a layer, the mask included, from one length to twice it."""
    monkeypatch.setattr(chunked_dcformer, "BLOCK_SCORES", 1 << 13)
    short, long = (training_step_memory("dcformer_chunked", length, padded, window) for length in (256, 512))
    assert long.peak <= 2.05 * short.peak  # twice, and 5% for what the allocation order may add
    assert long.largest <= 2 * short.largest
    assert long.largest < 2 * 512 * 512  # bytes: no map of one head, in any dtype above one byte
    short, long = (training_step_memory("eager", length, padded, window) for length in (128, 256))
    assert long.peak >= 3.5 * short.peak
    assert long.largest == 4 * short.largest


def test_chunked_inference_memory_is_linear_too(monkeypatch):
    monkeypatch.setattr(chunked_dcformer, "BLOCK_SCORES", 1 << 13)
    peaks = []
    for length in (256, 512):
        problem = Inputs(length=length, key_length=length, dtype=torch.float32)
        with torch.no_grad(), MemoryMeter() as meter:
            problem.call(chunked_attention)
        peaks.append(meter.peak)
    assert peaks[1] <= 2.05 * peaks[0]


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_causal_attention_with_more_queries_than_keys(attention, many_blocks):
    """The last query sees the last key; the first ones see nothing and give zeros."""
    problem = Inputs(length=9, key_length=5, pre="query_low key_gate", post="")
    output = problem.run(attention)["output"]
    assert not output[:, :4].any()
    assert output[:, 4:].abs().amax(dim=(-1, -2)).min() > 0


# --- traces and returned weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_trace_holds_the_maps_of_the_definition(dtype):
    problem = Inputs(dtype=dtype, heads=4, kv_heads=2, groups=2)
    trace = ComposeTrace()
    output, returned = problem.call(eager_attention, compose_trace=trace, sliding_window=3)
    (maps,) = trace.layers
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for t in vars(maps).values()} == {compute}
    assert {t.shape for t in vars(maps).values()} == {problem.shape}
    exact = problem.to(torch.float64).tensors
    key, value = (exact[name].repeat_interleave(2, dim=1) for name in ("key", "value"))
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    scores = torch.einsum("bhtd,bhsd->bhts", exact["query"], key) * problem.head_dim**-0.5
    torch.testing.assert_close(maps.scores.double(), scores, **tolerance)
    assert torch.equal(maps.composed_scores, compose(maps.scores, problem.weights("pre")))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    hidden = (distance < 0) | (distance >= 3)
    weights = maps.composed_scores.masked_fill(hidden, float("-inf")).softmax(-1)
    torch.testing.assert_close(maps.weights, weights, rtol=1e-6, atol=0)
    assert torch.equal(maps.composed_weights, compose(maps.weights, problem.weights("post")))
    assert torch.equal(returned, maps.composed_weights.to(dtype))
    torch.testing.assert_close(
        output.double().transpose(1, 2),
        returned.double() @ value,
        rtol=torch.finfo(dtype).eps,
        atol=8 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_no_trace_of_plain_attention(implementation):
    """Transformers' own functions hold no maps; a model without composition may use them."""
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64}
    model = DHAForCausalLM(DHAConfig(**fields, num_hidden_layers=2, num_attention_heads=4)).eval()
    ids = torch.randint(97, (1, 6))
    model.set_attn_implementation(implementation)
    message = rf"compose_trace.*attn_implementation='{implementation}'.*attn_implementation='eager'"
    with pytest.raises(ValueError, match=message):
        model(ids, compose_trace=ComposeTrace())
    with pytest.raises(ValueError, match=message):
        model.generate(ids, compose_trace=ComposeTrace(), max_new_tokens=2)
    model.set_attn_implementation("eager")
    trace = ComposeTrace()
    model(ids, compose_trace=trace)
    assert len(trace.layers) == 2


def test_a_models_trace_and_attentions():
    model = randomize(DCFormerForCausalLM(tiny_config(num_hidden_layers=3)))
    model.set_attn_implementation("eager")
    ids = torch.randint(97, (2, 12))
    trace = ComposeTrace()
    with torch.no_grad():
        traced = model(ids, compose_trace=trace, output_attentions=True)
        plain = model(ids)
    assert len(trace.layers) == len(traced.attentions) == 3
    assert torch.equal(traced.logits, plain.logits)
    for kind, maps, attentions in zip(model.config.layer_types, trace.layers, traced.attentions, strict=True):
        assert torch.equal(attentions, maps.composed_weights)
        torch.testing.assert_close(maps.weights.sum(-1), torch.ones(2, 4, 12), rtol=1e-6, atol=0)
        distance = torch.arange(12)[:, None] - torch.arange(12)
        hidden = (distance < 0) | ((distance >= 8) if kind == "sliding_attention" else False)
        assert not maps.weights[..., hidden].any()
        assert (maps.weights[..., ~hidden] > 0).all()
        assert (maps.composed_scores - maps.scores).abs().max() > 1e-3  # composition is at work


@pytest.mark.parametrize("depth", ["root", "layers"])
def test_a_trace_is_filled_where_arguments_are_cast(depth):
    """As FSDP casts those of modules that it wraps: what is a dataclass arrives as a copy."""
    model, ids, trace = randomize(DCFormerForCausalLM(tiny_config())), torch.randint(97, (2, 12)), ComposeTrace()
    model.set_attn_implementation("eager")

    def cast(module, args, kwargs):
        return _apply_to_tensors(torch.clone, args), _apply_to_tensors(torch.clone, kwargs)

    for module in [model] if depth == "root" else model.model.layers:
        module.register_forward_pre_hook(cast, with_kwargs=True)
    model(ids, compose_trace=trace, use_cache=False)
    assert len(trace.layers) == model.config.num_hidden_layers


def test_a_trace_costs_nothing_when_off():
    problem = Inputs(length=24, key_length=24, dtype=torch.float32)
    map_bytes = 4 * math.prod(problem.shape)

    def measure(trace):
        with torch.no_grad(), MemoryMeter() as meter:
            output, weights = problem.call(eager_attention, compose_trace=trace)
        return output, weights, meter

    trace = ComposeTrace()
    output, weights, off = measure(None)
    traced_output, traced_weights, on = measure(trace)
    assert torch.equal(output, traced_output) and torch.equal(weights, traced_weights)
    assert (off.operations, off.peak) == (on.operations, on.peak)
    assert on.alive - off.alive == 3 * map_bytes  # what a trace keeps beyond the returned weights


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": (2, 3, 7, 8), "value": (2, 3, 7, 8)}, r"key \(2, 3, 7, 8\).*H a multiple of Hkv"),
        ({"value": (2, 2, 6, 8)}, r"value \(2, 2, 6, 8\)"),
        ({"key": (2, 2, 7, 6)}, r"key \(2, 2, 7, 6\)"),
        ({"key": (1, 2, 7, 8), "value": (1, 2, 7, 8)}, r"query \(2, 4, 7, 8\), key \(1, 2, 7, 8\)"),
        ({"value": (1, 2, 7, 8)}, r"value \(1, 2, 7, 8\) do not fit"),
        ({"mask": (2, 7, 7)}, r"mask of shape \(2, 7, 7\).*\[B or 1, 1 or H, T, S\]"),
        ({"mask": (2, 1, 7, 6)}, r"\(2, 1, 7, 6\) does not fit 2 sequences, 4 heads, 7 queries and 7 keys"),
        ({"mask": (2, 1, 1, 7)}, r"\(2, 1, 1, 7\)"),
        ({"mask": (3, 1, 7, 7)}, r"\(3, 1, 7, 7\)"),
        ({"mask": (2, 2, 7, 7)}, r"\(2, 2, 7, 7\)"),
    ],
    ids=str,
)
def test_ill_fitting_shapes_are_refused(attention, changes, message):
    problem = Inputs(pre="", post="")
    mask = torch.ones(changes.pop("mask"), dtype=torch.bool) if "mask" in (changes := dict(changes)) else None
    tensors = problem.tensors | {name: torch.zeros(shape, dtype=torch.float64) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=message):
        problem.call(attention, mask, tensors=tensors)


def test_chunked_cannot_fill_a_trace():
    with pytest.raises(ValueError, match=r"compose_trace.*attn_implementation='eager'"):
        Inputs().call(chunked_attention, compose_trace=ComposeTrace())
    model = DCFormerForCausalLM(tiny_config())
    model.set_attn_implementation("dcformer_chunked")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(torch.zeros(1, 4, dtype=torch.long), compose_trace=ComposeTrace())


def test_a_mask_to_be_trained_needs_eager():
    problem = Inputs(length=20, key_length=20)
    mask = torch.zeros(1, 1, 20, 20, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="'eager'"):
        problem.call(chunked_attention, mask)
    (grad,) = torch.autograd.grad(problem.call(eager_attention, mask)[0].square().sum(), mask)
    assert grad.abs().max() > 0


def test_unknown_implementations_are_refused():
    model = DCFormerForCausalLM(tiny_config())
    for name in ("sdpa", "flash_attention_2"):
        with pytest.raises(ValueError, match=name):
            model.set_attn_implementation(name)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 40)], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_empty_batches_and_sequences(implementation, shape):
    """No rows or no tokens: results and gradients of that size, with masks and caches."""
    model = DCFormerForCausalLM(tiny_config())
    model.set_attn_implementation(implementation)
    ids = torch.zeros(shape, dtype=torch.long)
    for mask in (None, torch.ones_like(ids)):
        output = model(ids, attention_mask=mask, use_cache=False)
        assert output.logits.shape == (*shape, 97)
        output.logits.sum().backward()
        with torch.no_grad():
            assert model(ids, attention_mask=mask, use_cache=True).logits.shape == (*shape, 97)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
