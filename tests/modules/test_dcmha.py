"""`DCMHA` against `torch.nn.MultiheadAttention`, and against the formula of composition written as loops."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import randomize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcformer import ComposeSettings
from dcformer.attention_dcformer import eager_attention
from dcformer.errors import DCFormerError
from dcformer.modules import DCMHA
from dcformer.modules.dcmha import make_generators

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # the specification's
B, T, S, E, H = 3, 5, 7, 24, 4
SIZES = {
    "self": {"kdim": None, "vdim": None},
    "cross": {"kdim": None, "vdim": None},
    "kdim": {"kdim": 10, "vdim": 14},
}
MASKS = ("none", "bool", "float", "per head", "padding", "float padding", "both", "mixed")


def inputs(case, dtype, batch_first=False, batched=True):
    kdim, vdim = (SIZES[case][name] or E for name in ("kdim", "vdim"))
    generator = torch.Generator().manual_seed(3)
    keys = T if case == "self" else S
    shapes = [(T, B, E), (keys, B, kdim), (keys, B, vdim)]
    found = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    if case == "self":
        found = [found[0]] * 3
    if not batched:
        return [x[:, 0] for x in found]
    return [x.transpose(0, 1) for x in found] if batch_first else found


def masks(kind, keys, dtype, batched=True):
    """Keyword arguments; every query sees the first key, as `nn.MultiheadAttention` gives NaN otherwise."""
    generator = torch.Generator().manual_seed(4)
    batch = B if batched else 1

    def hidden(*shape):
        mask = torch.rand(shape, generator=generator) < 0.4
        mask[..., 0] = False
        return mask

    bias = torch.randn((T, keys), generator=generator, dtype=dtype)
    padding = hidden(batch, keys) if batched else hidden(keys)
    return {
        "none": {},
        "bool": {"attn_mask": hidden(T, keys)},
        "float": {"attn_mask": bias.masked_fill(hidden(T, keys), float("-inf"))},
        "per head": {"attn_mask": hidden(batch * H, T, keys)},
        "padding": {"key_padding_mask": padding},
        "float padding": {
            "key_padding_mask": torch.zeros(padding.shape, dtype=dtype).masked_fill(padding, float("-inf"))
        },
        "both": {"attn_mask": hidden(T, keys), "key_padding_mask": padding},
        "mixed": {"attn_mask": bias, "key_padding_mask": padding},
    }[kind]


def pair(case, dtype, **options):
    """The library's module, and ours with its parameters."""
    theirs = nn.MultiheadAttention(E, H, **SIZES[case], dtype=dtype, **options)
    nn.init.normal_(theirs.out_proj.bias)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    return theirs, DCMHA.from_torch(theirs, zero_init=True)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # the library's, about "mixed"
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", SIZES)
def test_without_composition_it_is_the_librarys(case, mask, dtype):
    """Both batch orders and inputs without a batch; averaged weights, those of each head, and none."""
    for batch_first, batched in ((False, True), (True, True), (False, False)):
        theirs, ours = pair(case, dtype, batch_first=batch_first)
        states = inputs(case, dtype, batch_first, batched)
        given = masks(mask, T if case == "self" else S, dtype, batched)
        for options in ({}, {"average_attn_weights": False}):
            expected = theirs(*states, **given, **options)
            found = ours(*states, **given, **options)
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape and one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE[dtype])
        output, weights = ours(*states, **given, need_weights=False)
        assert weights is None
        torch.testing.assert_close(output, theirs(*states, **given)[0], rtol=0, atol=TOLERANCE[dtype])


def test_zero_init_can_learn():
    """The first gradient reaches `up` and the gates; `down` follows at the second step."""
    module = DCMHA(E, H, zero_init=True, compose_static=True)
    x, y = torch.randn(T, B, E), torch.randn(S, B, E)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for step in range(2):
        optimizer.zero_grad()
        module(x, y, y)[0].square().sum().backward()
        for side in ("query", "key"):
            grad = module.compose[side].qkw.grad.unflatten(1, (2, -1))
            assert grad[:, 1].any() and bool(grad[:, 0].any()) == bool(step)
            assert module.compose[side].gate_proj.weight.grad.any()
        assert module.compose["query"].pre_static.grad.any() and module.compose["query"].post_static.grad.any()
        optimizer.step()


# --- the formula ------------------------------------------------------------------------------------------------------


def generated(generators, x, stages, heads, rank, groups, act):
    """The weights of one side, [stage] -> (w1 [N, R, H], w2 [N, R, H], gate [N, H]), as the paper writes them."""
    size = heads // groups
    width = 2 * rank * size  # K
    out = {
        stage: [x.new_zeros(len(x), rank, heads) for _ in range(2)] + [x.new_zeros(len(x), heads)] for stage in stages
    }
    hidden = act(x @ generators.dw1_proj.weight.T).view(len(x), groups, len(stages), width)
    matrix = generators.qkw.view(groups, len(stages), width, 2 * rank, size)
    gates = torch.tanh(x @ generators.gate_proj.weight.T).view(len(x), groups, len(stages), size)
    for group in range(groups):
        heads_of = slice(group * size, (group + 1) * size)
        for c, stage in enumerate(stages):
            pair = torch.einsum("nk,krm->nrm", hidden[:, group, c], matrix[group, c])
            w1, w2 = pair[:, :rank], pair[:, rank:]
            out[stage][0][:, :, heads_of] = w1 / torch.sqrt((w1**2).mean(-1, keepdim=True) + 1e-6)
            out[stage][1][:, :, heads_of] = w2
            out[stage][2][:, heads_of] = gates[:, group, c]
    return out


def composed(vector, static, query, key, size):
    """Compose of the H scores or weights of one pair of tokens; `query` and `key` are (w1, w2, gate) of that token."""
    out = vector.clone()
    for start in range(0, len(vector), size):
        group = slice(start, start + size)
        for m in range(start, start + size):
            if static is not None:
                out[m] += vector[group] @ static[start : start + size, m - start]
            for w1, w2, gate in (query, key):
                for r in range(len(w1)):
                    out[m] += (vector[group] @ w1[r, group]) * w2[r, m]
                out[m] += vector[m] * gate[m]
    return out


@pytest.mark.parametrize("options", [{}, {"compose_groups": 2, "compose_rank": 1, "compose_static": True}], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_it_is_the_formula(case, options):
    """A float64 loop over all pairs of tokens, bias and mask after the composition of the scores."""
    module = randomize(DCMHA(E, H, **SIZES[case], dtype=torch.float64, **options), 1.0)
    query, key, value = inputs(case, torch.float64, batched=False)
    rank, groups = options.get("compose_rank", 2), options.get("compose_groups", 1)
    size, dim = H // groups, E // H
    bias = masks("float", len(key), torch.float64)["attn_mask"]
    q, k, v = (x.transpose(1, 2)[0] for x in module._project(query[None], key[None], value[None]))  # [N, H, D]
    sides = [
        generated(module.compose[side], x, ("pre", "post"), H, rank, groups, F.gelu)
        for side, x in (("query", query), ("key", key))
    ]

    def at(stage, t, s):
        return [[w[n] for w in side[stage]] for side, n in zip(sides, (t, s), strict=True)]

    static = {stage: getattr(module.compose["query"], f"{stage}_static") for stage in ("pre", "post")}
    maps = torch.zeros(H, len(query), len(key), dtype=torch.float64)
    for t in range(len(query)):
        scores = [
            composed((q[t] * k[s]).sum(-1) / math.sqrt(dim), static["pre"], *at("pre", t, s), size) + bias[t, s]
            for s in range(len(key))
        ]
        weights = torch.stack(scores, 1).softmax(-1)  # [H, S]
        for s in range(len(key)):
            maps[:, t, s] = composed(weights[:, s], static["post"], *at("post", t, s), size)
    heads = torch.einsum("hts,shd->thd", maps, v)
    with torch.no_grad():
        output, found = module(query, key, value, attn_mask=bias, average_attn_weights=False)
        chunked, _ = module(query, key, value, attn_mask=bias, need_weights=False)
    torch.testing.assert_close(found, maps, rtol=0, atol=1e-12)
    torch.testing.assert_close(output, module.out_proj(heads.flatten(1)), rtol=0, atol=1e-12)
    torch.testing.assert_close(chunked, output, rtol=0, atol=1e-12)
    assert (found.sum(-1) - 1).abs().max() > 1e-3  # composed rows are not a distribution


def test_both_sides_are_rows_of_dcformers_generators():
    """DCFormer's tensors for all four (stage, side), split by rows, give the same weights and the same attention."""
    groups = 2
    of_all = ComposeSettings(E, H, H, compose_groups=groups, compose_act="gelu")
    whole = randomize(make_generators(of_all, zero_init=False).double(), 1.0)
    module = randomize(DCMHA(E, H, compose_groups=groups, dtype=torch.float64, batch_first=True))
    for c, side in enumerate(("query", "key")):
        part = module.compose[side]
        for name in ("dw1_proj.weight", "qkw", "gate_proj.weight"):
            rows = whole.get_parameter(name).unflatten(0, (groups, 2, 2, -1))  # [G, stage, side, K or M, ...]
            part.get_parameter(name).data = rows[:, :, c].flatten(0, 2).clone()
    x = torch.randn(B, T, E, dtype=torch.float64)
    dynamic, static = whole(x)
    stages = [whole.stage_weights(dynamic[s, "query"], dynamic[s, "key"], static.get(s)) for s in ("pre", "post")]
    q, k, v = module._project(x, x, x)
    expected, maps = eager_attention(
        module, q, k, v, None, (E // H) ** -0.5, pre=stages[0], post=stages[1], is_causal=False
    )
    output, weights = module(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, maps, rtol=0, atol=1e-12)
    torch.testing.assert_close(output, module.out_proj(expected.flatten(2)), rtol=0, atol=1e-12)


# --- cross-attention --------------------------------------------------------------------------------------------------


def cross(dtype=torch.float64):
    return randomize(DCMHA(E, H, kdim=10, vdim=14, dtype=dtype, batch_first=True), 1.0)


def test_order_of_the_keys_is_of_no_account():
    module, (query, key, value) = cross(), inputs("kdim", torch.float64, batch_first=True)
    padding = masks("padding", S, torch.float64)["key_padding_mask"]
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    output, weights = module(query, key, value, padding)
    moved, moved_weights = module(query, key[:, order], value[:, order], padding[:, order])
    torch.testing.assert_close(moved, output, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved_weights, weights[..., order], rtol=0, atol=1e-12)


def test_a_key_changes_its_own_weights_only():
    module, (_, key, _) = cross(), inputs("kdim", torch.float64, batch_first=True)
    other = key.clone()
    other[1, 4] += 1
    before, after = (module.compose["key"](x)[0] for x in (key, other))
    for at in (("pre", "key"), ("post", "key")):
        changed = (before[at].packed != after[at].packed).flatten(1, 2).any(1)  # [B, S]
        assert changed.nonzero().tolist() == [[1, 4]]


def test_a_query_changes_its_own_output_only():
    module, (query, key, value) = cross(), inputs("kdim", torch.float64, batch_first=True)
    other = query.clone()
    other[2, 1] += 1
    for need_weights in (True, False):
        before, after = (module(x, key, value, need_weights=need_weights)[0] for x in (query, other))
        assert (before != after).any(-1).nonzero().tolist() == [[2, 1]]


def test_values_make_no_composition_weights():
    module, (query, key, value) = cross(), inputs("kdim", torch.float64, batch_first=True)
    weights, same = (module(query, key, v)[1] for v in (value, value + 1))
    torch.testing.assert_close(same, weights, rtol=0, atol=0)


# --- variants, implementations, masks ---------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3),
    st.booleans(), st.sampled_from(MASKS), st.integers(17, 40),
)  # fmt: skip
def test_chunked_is_eager(query, key, kv_heads, groups, rank, static, mask, length):
    """Outputs and every gradient, over switches, grouped-query attention, masks and lengths."""
    static = static or not (query or key)
    module = DCMHA(
        E, H, num_kv_heads=kv_heads, compose_groups=groups, compose_rank=rank, compose_query=query, compose_key=key,
        compose_static=static, qk_norm=static, dtype=torch.float64,
    )  # fmt: skip
    randomize(module, 1.0).train()
    x = torch.randn(length, B, E, dtype=torch.float64)
    given = {}
    if mask in ("bool", "both"):
        given["attn_mask"] = torch.rand(length, length) < 0.5
    if mask == "float":
        given["attn_mask"] = torch.randn(length, length, dtype=torch.float64)
    if mask == "per head":
        given["attn_mask"] = torch.rand(B * H, length, length) < 0.5
    if mask in ("padding", "both", "mixed", "float padding"):
        given["key_padding_mask"] = torch.rand(B, length) < 0.5
    found = []
    for need_weights in (True, False):
        module.zero_grad()
        output = module(x, x, x, need_weights=need_weights, **given)[0]
        output.square().sum().backward()
        found.append([output, *(p.grad for p in module.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)  # sums of 1e5 float64 products, each of size 10


@pytest.mark.parametrize("lengths", [(0, 3, 2), (3, 0, 2), (3, 3, 0)], ids=["no query", "no key", "no sequence"])
def test_nothing_to_attend(lengths):
    """Empty inputs are inputs, as they are for the library's module."""
    queries, keys, batch = lengths
    theirs, ours = pair("self", torch.float32)
    states = torch.randn(queries, batch, E), *[torch.randn(keys, batch, E)] * 2
    for one, other in zip(ours(*states), theirs(*states), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(ours(*states, need_weights=False)[0], theirs(*states)[0], rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked", None])
def test_rows_that_see_nothing_are_zeros(implementation):
    """As no key is seen, the output is the output projection's bias; every gradient is finite."""
    module = randomize(DCMHA(E, H, attn_implementation=implementation), 1.0).train()
    x = torch.randn(20, B, E, requires_grad=True)
    padding = torch.zeros(B, 20, dtype=torch.bool)
    padding[1] = True
    hidden = torch.zeros(20, 20, dtype=torch.bool)
    hidden[4] = True
    for mask in (hidden, torch.zeros(20, 20).masked_fill(hidden, float("-inf"))):
        output, _ = module(x, x, x, padding, need_weights=False, attn_mask=mask)
        empty = output[:, 1], output[4]
        for rows in empty:
            torch.testing.assert_close(rows, module.out_proj.bias.expand_as(rows), rtol=0, atol=0)
        assert not torch.allclose(output[0, 0], module.out_proj.bias)
        output.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in [x, *module.parameters()])
    if implementation != "dcformer_chunked":
        assert not module(x, x, x, padding)[1][1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_the_least_values_of_a_dtype_are_added(implementation, dtype):
    """As the library adds them: they hide beside greater values, and -inf hides always.

    Not in float16: its least value swallows the library's scores, which are in that dtype, but not ours in float32.
    """
    theirs, ours = pair("self", dtype)
    ours.attn_implementation = implementation
    least, inf = torch.finfo(dtype).min, float("-inf")
    rows = [[least] * 3, [least, least / 2, least], [least, inf, least], [least / 2] * 3, [least, least / 2, 0.5]]
    x, mask = torch.randn(5, 2, E, dtype=dtype), torch.tensor(rows, dtype=dtype)
    expected, weights = theirs(x, x[:3], x[:3], attn_mask=mask)
    tolerance = TOLERANCE.get(dtype, 0.02)
    found, maps = ours(x, x[:3], x[:3], attn_mask=mask, need_weights=implementation == "eager")
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    if maps is not None:
        torch.testing.assert_close(maps, weights, rtol=0, atol=tolerance)


def test_a_trained_mask_gets_its_gradient():
    module, x = randomize(DCMHA(E, H)), torch.randn(20, B, E)
    mask = torch.zeros(20, 20, requires_grad=True)
    module(x, x, x, attn_mask=mask, need_weights=False)[0].square().sum().backward()
    assert mask.grad.any()


def test_dropout_is_of_the_composed_weights_in_training_only():
    module, x = randomize(DCMHA(E, H, dropout=0.5)), torch.randn(20, B, E)
    first, second = (module(x, x, x)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    module.train()
    output, weights = module(x, x, x, average_attn_weights=False)
    assert 0.4 < (weights == 0).float().mean() < 0.6  # 4,800 of them, so four deviations are 0.03
    assert not torch.equal(output, module(x, x, x, need_weights=False)[0])


def test_causal_is_said_by_the_mask():
    theirs, ours = pair("self", torch.float32)
    x = torch.randn(T, B, E)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    expected = theirs(x, x, x, attn_mask=mask, is_causal=True)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True)[0], expected, rtol=0, atol=1e-6)
    with pytest.raises(DCFormerError, match="pass the causal mask as well"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize("is_layer", [True, False])
def test_in_the_librarys_transformer(is_layer):
    """In inference its encoder has a path past the attention module; composition must not be lost there."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    plain = copy.deepcopy(layer)
    layer.self_attn = randomize(DCMHA.from_torch(layer.self_attn), 1.0)
    x = torch.randn(B, T, E)
    if not is_layer:
        layer, plain = (nn.TransformerEncoder(one, 2, enable_nested_tensor=False) for one in (layer, plain))
    expected = layer.train()(x)
    with torch.no_grad():
        found = layer.eval()(x)
        assert not torch.allclose(found, plain.eval()(x), atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_bfloat16_and_autocast():
    """Errors are at most twice those of plain attention in bfloat16, against float64."""
    theirs, ours = pair("self", torch.float64)
    x = torch.randn(40, B, E, dtype=torch.float64)
    exact = theirs(x, x, x)[0]
    low = x.bfloat16()
    error = (theirs.bfloat16()(low, low, low)[0].double() - exact).abs().max()
    assert (copy.deepcopy(ours).bfloat16()(low, low, low)[0].double() - exact).abs().max() <= 2 * error
    ours = ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (True, False):
            found = ours(x.float(), x.float(), x.float(), need_weights=need_weights)[0]
            assert found.dtype == torch.bfloat16 and (found.double() - exact).abs().max() <= 2 * error


def test_compiles_and_copies():
    module, x = randomize(DCMHA(E, H)), torch.randn(20, B, E)
    with torch.no_grad():
        expected = module(x, x, x)[0]
        for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(made(x, x, x)[0], expected, rtol=0, atol=0)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], expected, rtol=0, atol=1e-6)


def test_state_dict_is_the_librarys_and_compose():
    for case in SIZES:
        theirs, ours = pair(case, torch.float32)
        missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert not unexpected and missing and all(name.startswith("compose.") for name in missing)
    without = DCMHA.from_torch(nn.MultiheadAttention(E, H, bias=False))
    assert without.in_proj_bias is None and without.out_proj.bias is None


def test_settings_of_the_module_are_taken_over():
    theirs = nn.MultiheadAttention(E, H, dropout=0.3, bias=False, batch_first=True, dtype=torch.float64).eval()
    ours = DCMHA.from_torch(theirs, compose_key=False, compose_rank=3)
    assert (ours.dropout, ours.in_proj_bias, ours.batch_first, ours.training) == (0.3, None, True, False)
    assert list(ours.compose) == ["query"] and ours.compose["query"].rank == 3
    assert {p.dtype for p in ours.parameters()} == {torch.float64}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 25, "num_heads": 4}, "embed_dim=25 is not a multiple of num_heads=4"),
        ({"embed_dim": 24, "num_heads": 0}, "num_heads=0 must be a whole number of at least 1"),
        ({"embed_dim": 24.0, "num_heads": 4}, r"embed_dim=24\.0 must be a whole number"),
        ({"embed_dim": 24, "num_heads": 4, "num_kv_heads": 2.0}, r"num_kv_heads=2\.0 must be a whole number"),
        ({"embed_dim": 24, "num_heads": 4, "num_kv_heads": 0}, "num_kv_heads=0 must be a whole number of at least 1"),
        ({"embed_dim": 24, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"embed_dim": 24, "num_heads": 4, "dropout": 1.0}, r"dropout=1\.0 must be a number in \[0, 1\)"),
        ({"embed_dim": 24, "num_heads": 4, "dropout": "x"}, "dropout='x' must be a number in"),
        ({"embed_dim": 24, "num_heads": 4, "qk_norm": "rms"}, "qk_norm='rms': expected True or False"),
        ({"embed_dim": 24, "num_heads": 4, "zero_init": "no"}, "zero_init='no': expected True or False"),
        ({"embed_dim": 24, "num_heads": 4, "compose_rank": 1.5}, r"compose_rank=1\.5 must be a whole number"),
        ({"embed_dim": 24, "num_heads": 4, "compose_query": "no"}, "compose_query='no': expected True or False"),
        ({"embed_dim": 24, "num_heads": 4, "head_system_options": {"typo": 1}}, "'typo' is not an option of"),
        (
            {"embed_dim": 24, "num_heads": 4, "compose_groups": 3},
            "compose_groups=3 does not divide num_attention_heads=4",
        ),
        ({"embed_dim": 24, "num_heads": 4, "compose_pre": False, "compose_post": False}, "turn one of them on"),
        ({"embed_dim": 24, "num_heads": 4, "attn_implementation": "sdpa"}, "'sdpa' cannot compose attention heads"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        DCMHA(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_mask": torch.zeros(T, T, dtype=torch.bool)}, r"attn_mask has shape \(5, 5\): expected \(5, 7\) or"),
        ({"attn_mask": torch.zeros(B, T, S)}, r"expected \(5, 7\) or \(12, 5, 7\)"),
        ({"attn_mask": torch.zeros(T, S, dtype=torch.int64)}, "attn_mask is of torch.int64: expected bool, True where"),
        ({"key_padding_mask": torch.zeros(S, B)}, r"key_padding_mask has shape \(7, 3\): expected \(3, 7\)"),
        ({"key_padding_mask": torch.zeros(B, S, dtype=torch.uint8)}, "key_padding_mask is of torch.uint8"),
        ({"key_padding_mask": [[False] * S] * B}, "key_padding_mask is of type list: expected a tensor"),
        ({"query": "a"}, "query is of type str: expected a tensor"),
        ({"key": None}, "key is of type NoneType: expected a tensor"),
        ({"key": torch.zeros(S, B, E + 1)}, r"expected widths \(24, 24, 24\), embed_dim, kdim and vdim"),
        ({"value": torch.zeros(S + 1, B, E)}, r"do not fit together with batch_first=False: expected \[T, B, E\]"),
        ({"key": torch.zeros(S, E)}, "expected three inputs of 2 dimensions, or 3 with a batch"),
    ],
)
def test_bad_inputs(change, message):
    states = dict(zip(("query", "key", "value"), inputs("cross", torch.float32), strict=True))
    with pytest.raises(DCFormerError, match=message):
        DCMHA(E, H)(**(states | change))


def test_weights_of_what_never_holds_them():
    states = inputs("cross", torch.float32)
    module = DCMHA(E, H, attn_implementation="dcformer_chunked")
    with pytest.raises(DCFormerError, match=r"need_weights=True asks for .*chunked.* never holds"):
        module(*states)
    assert module(*states, need_weights=False)[1] is None


def test_modules_that_cannot_be_taken_over():
    with pytest.raises(DCFormerError, match="got a Linear"):
        DCMHA.from_torch(nn.Linear(2, 2))
    changes = {"num_kv_heads": 1, "num_heads": 2, "embed_dim": 8, "kdim": 8, "vdim": 8, "bias": False}
    for name, value in changes.items():
        with pytest.raises(DCFormerError, match=f"{name}={value}: the module's is .* Leave it out, or make a new"):
            DCMHA.from_torch(nn.MultiheadAttention(E, 4), **{name: value})
    assert DCMHA.from_torch(nn.MultiheadAttention(E, 4), num_kv_heads=4, kdim=None).kdim == E
    for name in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(DCFormerError, match=f"{name}=True, which DCMHA does not offer"):
            DCMHA.from_torch(nn.MultiheadAttention(E, H, **{name: True}))


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    with pytest.raises(DCFormerError, match="enable_nested_tensor=False"):
        DCMHA(E, H, batch_first=True)(nested, nested, nested)


@pytest.mark.parametrize("options", [{}, {"head_system": "output_gate"}], ids=["plain", "output gate"])
def test_what_is_frozen_stays_so(options):
    theirs = nn.MultiheadAttention(E, H)
    theirs.out_proj.weight.requires_grad_(False)
    ours = DCMHA.from_torch(theirs, **options)
    assert not ours.out_proj.weight.requires_grad and ours.out_proj.bias.requires_grad
    known = dict(theirs.named_parameters())
    new = [parameter for name, parameter in ours.named_parameters() if name not in known]
    assert new and all(parameter.requires_grad for parameter in new)
