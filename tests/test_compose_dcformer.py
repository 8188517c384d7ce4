"""Composition: the definition against loops, the weight generators against their formulas, cache packing, init."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers import randomize, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcformer import (
    ComposeSettings,
    ComposeWeights,
    DCFormerCompose,
    DCFormerConfig,
    DCFormerForCausalLM,
    SideWeights,
    compose,
)
from dcformer.compose_dcformer import COMPOSE_NORM_EPS, accumulation_dtype, compose_init_std
from dcformer.implementations_dcformer import FUSED_ATTENTION, FusedAttention, LayerKernels

pytestmark = pytest.mark.usefixtures("poison")
GENERATORS = [("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key")]


# --- compose ----------------------------------------------------------------------------------------------------------


def compose_by_loops(maps, static, query, key, groups):
    """The five branches for one (batch, query, key, head) at a time, in NumPy. Weights are dicts or None."""
    batch, heads, length, key_length = maps.shape
    m_heads = heads // groups
    out = np.zeros_like(maps)
    for b, t, s, g, m in np.ndindex(batch, length, key_length, groups, m_heads):
        a = [maps[b, g * m_heads + j, t, s] for j in range(m_heads)]
        total = a[m]
        if static is not None:
            total += sum(a[j] * static[g, j, m] for j in range(m_heads))
        for side, n in ((query, t), (key, s)):
            if side is None:
                continue
            if side["down"] is not None:
                w1, w2 = side["down"][b, :, n], side["up"][b, :, n]  # [H, R]
                for r in range(w1.shape[-1]):
                    hidden = sum(a[j] * w1[g * m_heads + j, r] for j in range(m_heads))
                    total += hidden * w2[g * m_heads + m, r]
            if side["gate"] is not None:
                total += a[m] * side["gate"][b, g * m_heads + m, n]
        out[b, g * m_heads + m, t, s] = total
    return out


def random_side(rng, batch, heads, tokens, rank, has_low_rank, has_gate):
    return {
        "down": rng.standard_normal((batch, heads, tokens, rank)) if has_low_rank else None,
        "up": rng.standard_normal((batch, heads, tokens, rank)) if has_low_rank else None,
        "gate": rng.standard_normal((batch, heads, tokens)) if has_gate else None,
    }


def as_side(arrays):
    if arrays is None:
        return None
    return SideWeights.of(**{k: None if array is None else torch.from_numpy(array) for k, array in arrays.items()})


@settings(deadline=None, max_examples=50)
@given(
    m_heads=st.integers(1, 6),
    groups=st.integers(1, 3),
    rank=st.integers(1, 3),
    batch=st.integers(1, 2),
    length=st.integers(1, 3),
    key_length=st.integers(1, 4),
    has_static=st.booleans(),
    query_branches=st.tuples(st.booleans(), st.booleans()),
    key_branches=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**31),
)
def test_compose_is_its_formula(
    m_heads, groups, rank, batch, length, key_length, has_static, query_branches, key_branches, seed
):
    rng, heads = np.random.default_rng(seed), m_heads * groups
    maps = rng.standard_normal((batch, heads, length, key_length))
    static = rng.standard_normal((groups, m_heads, m_heads)) if has_static else None
    query = random_side(rng, batch, heads, length, rank, *query_branches) if any(query_branches) else None
    key = random_side(rng, batch, heads, key_length, rank, *key_branches) if any(key_branches) else None
    weights = ComposeWeights(
        as_side(query), as_side(key), None if static is None else torch.from_numpy(static), groups=groups
    )
    result = compose(torch.from_numpy(maps), weights)
    expected = compose_by_loops(maps, static, query, key, groups)
    # float64 sums of at most 3·(R·M·M + M) products of normal numbers
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_compose_with_nothing_is_the_identity():
    maps = torch.randn(1, 2, 3, 4)
    assert compose(maps, None) is maps
    assert torch.equal(compose(maps, ComposeWeights()), maps)


def test_compose_keeps_the_dtype_of_the_maps_and_leaves_them_alone():
    maps = torch.randn(1, 4, 3, 5)
    before = maps.clone()
    side = SideWeights(torch.randn(1, 4, 5, 3).bfloat16())
    result = compose(maps, ComposeWeights(query=side, static=torch.randn(1, 4, 4).bfloat16()))
    assert result.dtype == torch.float32
    assert torch.equal(maps, before)
    # low-precision weights are widened, not the maps narrowed
    wide = SideWeights(side.packed.double())
    widened = ComposeWeights(query=SideWeights(side.packed.float()))
    assert torch.equal(compose(maps, ComposeWeights(query=side)), compose(maps, widened))
    exact = compose(maps.double(), ComposeWeights(query=wide))
    magnitude = compose(maps.double().abs(), ComposeWeights(query=SideWeights(wide.packed.abs())))
    # at most 4 + 4 + 2 roundings on the way of any product: M adds, the second factor, R + skip + gate adds
    error = (compose(maps, ComposeWeights(query=side)).double() - exact).abs()
    assert (error <= 16 * torch.finfo(torch.float32).eps * magnitude).all()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_groups_are_independent_and_branches_read_the_same_input(seed):
    """Groups compose alone; and the map is linear in the maps, with the branches' contributions adding up."""
    rng = np.random.default_rng(seed)
    maps = torch.from_numpy(rng.standard_normal((1, 6, 3, 4)))
    query, key = (as_side(random_side(rng, 1, 6, n, 2, True, True)) for n in (3, 4))
    static = torch.from_numpy(rng.standard_normal((2, 3, 3)))
    together = compose(maps, ComposeWeights(query, key, static, groups=2))

    def heads(side, part):
        return SideWeights(side.packed[:, part])

    for group, part in enumerate((slice(0, 3), slice(3, 6))):
        alone = ComposeWeights(heads(query, part), heads(key, part), static[group : group + 1], groups=1)
        torch.testing.assert_close(compose(maps[:, part], alone), together[:, part], rtol=1e-13, atol=1e-13)
    parts = [
        ComposeWeights(query=query, groups=2),
        ComposeWeights(key=key, groups=2),
        ComposeWeights(static=static, groups=2),
    ]
    added = maps + sum(compose(maps, part) - maps for part in parts)
    torch.testing.assert_close(added, together, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    heads=st.sampled_from([(1, 1), (4, 1), (2, 3)]),
    tokens=st.integers(0, 4),
    rank=st.integers(0, 4),
    has_gate=st.booleans(),
    is_cached=st.booleans(),
)
def test_parts_of_side_weights(heads, tokens, rank, has_gate, is_cached):
    """What is packed comes out again, of either form, as views where the heads of a key/value head are not shared."""
    if not rank and not has_gate:
        return
    kv_heads, repeats = heads
    down, up = (torch.randn(2, kv_heads * repeats, tokens, rank) if rank else None for _ in range(2))
    gate = torch.randn(2, kv_heads * repeats, tokens) if has_gate else None
    side = SideWeights.of(down, up, gate)
    assert side.packed.shape == (2, kv_heads * repeats, 2 * rank + has_gate, tokens) and side.packed.is_contiguous()
    if is_cached:  # rows of a cache, tokens far apart
        rows = side.packed.unflatten(1, heads).permute(0, 1, 4, 2, 3).contiguous()
        side = SideWeights(rows.permute(0, 1, 3, 4, 2))
    assert side.rank == rank
    for found, expected in zip((side.down, side.up, side.gate), (down, up, gate), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert torch.equal(found, expected)
            is_view = found.untyped_storage().data_ptr() == side.packed.untyped_storage().data_ptr()
            assert is_view or not tokens or (is_cached and repeats > 1)
    assert len(side.tensors()) == 2 * (rank > 0) + has_gate
    assert torch.equal(side.by_head, SideWeights.of(down, up, gate).packed)


def test_gradients_pass_through_packing():
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5))]
    side = SideWeights.of(*leaves)
    (side.down.sum() + 2 * side.up.sum() + 3 * side.gate.sum()).backward()
    assert [leaf.grad.unique().tolist() for leaf in leaves] == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"down": (1, 2, 5, 3)},
        {"up": (1, 2, 5, 3), "gate": (1, 2, 5)},
        {"down": (1, 2, 5, 3), "up": (1, 2, 5, 2)},
        {"down": (1, 2, 5, 3), "up": (1, 2, 5, 3), "gate": (1, 2, 4)},
    ],
)
def test_parts_that_make_no_side_are_refused(shapes):
    with pytest.raises(ValueError, match=r"expected down and up of one shape \[B, H, N, R\], a gate"):
        SideWeights.of(**{name: torch.zeros(shape) for name, shape in shapes.items()})


# --- the weight generators --------------------------------------------------------------------------------------------


def stored_layout(module, config):
    """The module's tensors as the formulas have them: dw1 [E,G,C,K], qkw [G,C,K,2R,M], dd [E,G,C·M]; None if absent."""
    groups, count = config.compose_groups, len(config.compose_generators)
    m, r = config.num_attention_heads // groups, config.compose_rank
    dw1 = qkw = dd = None
    if config.compose_projection:
        dw1 = module.dw1_proj.weight.T.reshape(config.hidden_size, groups, count, 2 * r * m)
        qkw = module.qkw.reshape(groups, count, 2 * r * m, 2 * r, m)
    if config.compose_gate:
        dd = module.gate_proj.weight.T.reshape(config.hidden_size, groups, count * m)
    return dw1, qkw, dd


def erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


GELUS = {"gelu": erf_gelu, "gelu_pytorch_tanh": tanh_gelu}


def make_compose(config, dtype=torch.float64, scale=0.5, seed=0):
    """A composition module with every weight far from its initialization."""
    module = DCFormerCompose(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


@settings(deadline=None, max_examples=30)
@given(
    m_heads=st.integers(1, 4),
    groups=st.integers(1, 3),
    rank=st.integers(1, 3),
    hidden_size=st.integers(3, 12),
    sides=st.sampled_from([(True, True), (True, False), (False, True)]),
    stages=st.sampled_from([(True, True), (True, False), (False, True)]),
    branches=st.sampled_from([(True, True), (True, False), (False, True)]),
    act=st.sampled_from(sorted(GELUS)),
    seed=st.integers(0, 2**31),
)
def test_generators_are_their_formulas(m_heads, groups, rank, hidden_size, sides, stages, branches, act, seed):
    config = tiny_config(
        hidden_size=hidden_size,
        num_attention_heads=m_heads * groups,
        num_key_value_heads=m_heads * groups,
        head_dim=4,
        compose_rank=rank,
        compose_groups=groups,
        compose_query=sides[0],
        compose_key=sides[1],
        compose_pre=stages[0],
        compose_post=stages[1],
        compose_projection=branches[0],
        compose_gate=branches[1],
        compose_act=act,
    )
    module = make_compose(config, seed=seed)
    x = torch.randn(2, 3, hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    generated, _ = module(x)
    expected_order = [(stage, side) for stage, side in GENERATORS if stages[stage == "post"] and sides[side == "key"]]
    assert list(generated) == expected_order
    dw1, qkw, dd = stored_layout(module, config)
    for c, generator in enumerate(expected_order):
        side = generated[generator]
        assert (side.down is None, side.up is None) == (not branches[0],) * 2
        assert (side.gate is None) == (not branches[1])
        for group in range(groups):
            heads = slice(group * m_heads, (group + 1) * m_heads)
            if branches[0]:
                h = GELUS[act](torch.einsum("bte,ek->btk", x, dw1[:, group, c]))
                pair = torch.einsum("btk,kim->btim", h, qkw[group, c])  # [B, T, 2R, M]
                w1, w2 = pair[:, :, :rank], pair[:, :, rank:]
                w1 = w1 / torch.sqrt((w1**2).mean(dim=-1, keepdim=True) + 1e-6)
                torch.testing.assert_close(side.down[:, heads], w1.permute(0, 3, 1, 2), rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(side.up[:, heads], w2.permute(0, 3, 1, 2), rtol=1e-9, atol=1e-11)
            if branches[1]:
                gate = torch.tanh(x @ dd[:, group, c * m_heads : (c + 1) * m_heads])
                torch.testing.assert_close(side.gate[:, heads], gate.transpose(1, 2), rtol=1e-9, atol=1e-11)


def test_the_two_gelus_differ_measurably():
    """Or the test above could not tell them apart."""
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    assert (erf_gelu(x) - tanh_gelu(x)).abs().max() > 1e-4


def test_the_norm_runs_over_the_heads_of_a_group_with_its_epsilon():
    config = tiny_config(num_attention_heads=6, num_key_value_heads=6, head_dim=4, compose_groups=2)
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    assert COMPOSE_NORM_EPS == 1e-6
    for side in make_compose(config, scale=1.0)(x)[0].values():
        mean_square = side.down.unflatten(1, (2, 3)).pow(2).mean(dim=2)
        torch.testing.assert_close(mean_square, torch.ones_like(mean_square), rtol=1e-3, atol=0)
    # where the second layer gives next to nothing the epsilon decides, and the result stays small instead of noise
    module = make_compose(config, scale=1.0)
    with torch.no_grad():
        module.qkw.mul_(1e-9)
    for side in module(x)[0].values():
        assert side.down.abs().max() < 1e-4
        assert torch.isfinite(side.down).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generators_in_low_precision(dtype):
    """The norm and the tanh in float32: the error stays within the rounding of the inputs of those functions."""
    config = tiny_config(num_attention_heads=4, num_key_value_heads=4)
    module = make_compose(config, dtype=dtype, scale=0.2)
    x = torch.randn(2, 6, 32).to(dtype)
    generated, _ = module(x)
    wide = DCFormerCompose(config).double()
    wide.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    exact, _ = wide(x.double())

    def naive(c):
        """Everything in `dtype`."""
        dw1, qkw, dd = stored_layout(module, config)
        pair = torch.einsum("btk,kim->btim", tanh_gelu(x @ dw1[:, 0, c]), qkw[0, c])
        down, up = pair[:, :, :2], pair[:, :, 2:]
        down = down / torch.sqrt((down**2).mean(dim=-1, keepdim=True) + 1e-6)
        gate = torch.tanh(x @ dd[:, 0, c * 4 : (c + 1) * 4])
        return [down.permute(0, 3, 1, 2), up.permute(0, 3, 1, 2), gate.transpose(1, 2)]

    for c, generator in enumerate(GENERATORS):
        triples = zip(generated[generator].tensors(), exact[generator].tensors(), naive(c), strict=True)
        for result, truth, reference in triples:
            assert result.dtype == dtype
            error, allowed = (result - truth).abs().max(), (reference - truth).abs().max()
            assert error <= 2 * allowed + torch.finfo(dtype).eps * truth.abs().max()


def test_the_norm_of_low_precision_generators_is_in_float32():
    """Only each head's own result is rounded: errors of 64 heads cancel in their mean square, a common one does not."""
    heads, eps = 64, torch.finfo(torch.bfloat16).eps
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=heads, head_dim=4, compose_rank=1)
    for side in make_compose(config, torch.bfloat16)(torch.randn(1, 200, 32).bfloat16())[0].values():
        down = side.down.double()  # [B, H, N, R]
        # five standard deviations of 64 relative errors, uniform in ±eps/2, of numbers that are squared
        band = 5 * eps / math.sqrt(3) * down.pow(4).sum(dim=1).sqrt() / heads
        assert ((down.pow(2).mean(dim=1) - 1).abs() <= band).all()


# --- behind the cache's keys and values -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    kv_heads=st.integers(1, 4),
    repeats=st.integers(1, 4),
    rank=st.integers(1, 4),
    head_dim=st.sampled_from([4, 6, 80]),
    tokens=st.integers(1, 5),
    branches=st.sampled_from([(True, True), (True, False), (False, True)]),
    stage=st.sampled_from(["pre", "post"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_pack_and_unpack_are_inverse(kv_heads, repeats, rank, head_dim, tokens, branches, stage, dtype):
    heads = kv_heads * repeats
    config = tiny_config(
        hidden_size=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        compose_rank=rank,
        compose_projection=branches[0],
        compose_gate=branches[1],
    )
    module = make_compose(config, dtype=dtype)
    side = module(torch.randn(2, tokens, 8).to(dtype))[0][stage, "key"]
    states = torch.randn(2, kv_heads, tokens, head_dim).to(dtype)
    packed = module.pack(states, side, stage)
    used = repeats * (2 * rank * branches[0] + branches[1])
    channels = packed.shape[-1] - head_dim
    assert packed.shape[:3] == states.shape[:3]
    assert packed.dtype == dtype
    assert channels == config.compose_cache_channels(stage)
    assert channels % 8 == 0 and used <= channels < used + 8
    assert not packed[..., head_dim + used :].any()

    again, side_again = module.unpack(packed, head_dim, stage)
    assert torch.equal(again, states)
    assert side_again.tensors()[0].dtype == dtype
    for name in ("down", "up", "gate"):
        before, after = getattr(side, name), getattr(side_again, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert torch.equal(before, after)


def test_a_query_heads_channels_sit_behind_its_own_key_head():
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    module = DCFormerCompose(config)
    gate = torch.arange(4.0)[None, :, None].expand(1, 4, 3)
    side = SideWeights.of(*(gate[..., None].expand(1, 4, 3, 2) for _ in range(2)), gate)
    packed = module.pack(torch.full((1, 2, 3, 8), -1.0), side, "pre")
    assert set(packed[0, 0, :, 8:].unique().tolist()) == {0.0, 1.0}
    assert set(packed[0, 1, :, 8:].unique().tolist()) == {0.0, 2.0, 3.0}


def test_nothing_to_pack():
    module = DCFormerCompose(tiny_config(compose_key=False))
    states = torch.randn(1, 2, 3, 8)
    assert module.pack(states, None, "pre") is states
    again, side = module.unpack(states, 8, "pre")
    assert again is states and side is None


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of keys and values: autocast narrows them
def test_an_implementation_may_bring_its_own_generators(allowed, gradients, dtype, monkeypatch):
    """`packed` is `forward` and `pack`, whoever computes it; without gradients, in the memory that the cache gets."""
    module, calls = make_compose(tiny_config(), torch.float32), []
    hidden, key, value = torch.randn(1, 3, 32), *torch.randn(2, 1, 2, 3, 8).to(dtype)

    def generate(hidden_states, compose, first_layer):
        calls.append("generate")
        return compose(hidden_states, None, first_layer)

    def generate_packed(hidden_states, compose, *wide_and_first_layer):
        calls.append("generate_packed")
        *wide, first_layer = wide_and_first_layer
        generated, statics = compose(hidden_states, None, first_layer)
        for states, stage in zip(wide, ("pre", "post"), strict=True):
            states.copy_(compose.pack(states[..., :8], generated.pop((stage, "key")), stage))
        return generated, statics

    own = LayerKernels(lambda compose, hidden_states: allowed, generate, generate_packed)
    fused = FusedAttention(lambda config: None, lambda *arguments: False, own)
    monkeypatch.setitem(FUSED_ATTENTION, "own", fused)
    generated, _ = module(hidden)
    with torch.set_grad_enabled(gradients):
        *packed, (found, _) = module.packed(hidden, key, value, "own")
    for states, made, stage in zip((key, value), packed, ("pre", "post"), strict=True):
        assert made.dtype == torch.float32
        assert torch.equal(made, module.pack(states, generated[stage, "key"], stage))
        assert torch.equal(found[stage, "query"].up, generated[stage, "query"].up)
    assert calls == (["generate" if gradients else "generate_packed"] if allowed else [])
    calls.clear()
    module(hidden, "own")
    assert calls == (["generate"] if allowed else [])
    assert module.packed(hidden, key, value)[0].shape == packed[0].shape and len(calls) == allowed
    known = [2 * part for part in module.first_layer(hidden)]  # what is known is not computed again
    for implementation in ("own", None):
        again, _ = module(hidden, implementation, known)
        assert not torch.equal(again["pre", "query"].gate, generated["pre", "query"].gate)
        assert torch.equal(again["pre", "query"].gate, module(hidden, None, known)[0]["pre", "query"].gate)


def test_stage_weights():
    config = tiny_config(compose_groups=2, compose_static=True)
    module = make_compose(config)
    sides, statics = module(torch.randn(1, 3, 32, dtype=torch.float64))
    weights = module.stage_weights(sides["post", "query"], sides["post", "key"], statics["post"])
    assert weights.groups == 2
    assert weights.query is sides["post", "query"] and weights.key is sides["post", "key"]
    assert torch.equal(weights.static, module.post_static.view(2, 2, 2))
    dynamic = make_compose(tiny_config(compose_groups=2, compose_query=False))
    sides, statics = dynamic(torch.randn(1, 3, 32, dtype=torch.float64))
    assert statics == {}
    assert dynamic.stage_weights(None, sides["pre", "key"], None).groups == 2
    talking = make_compose(tiny_config(compose_query=False, compose_key=False, compose_static=True))
    sides, statics = talking(torch.randn(1, 3, 32, dtype=torch.float64))
    assert sides == {}
    assert talking.stage_weights(None, None, statics["pre"]).static.shape == (1, 4, 4)
    assert talking.stage_weights(None, None, None) is None


@pytest.mark.parametrize(("head_dim", "limit"), [(128, 0.07), (80, 0.11)])
def test_cache_overhead_in_bytes(head_dim, limit):
    """What a real cache holds after a forward pass, against the same model without composition."""

    def cache_bytes(**switches):
        config = tiny_config(num_key_value_heads=4, head_dim=head_dim, sliding_window=None, **switches)
        model = DCFormerForCausalLM(config).to(torch.bfloat16).eval()
        with torch.no_grad():
            cache = model(torch.zeros(1, 16, dtype=torch.long), use_cache=True).past_key_values
        return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))

    off = {f"compose_{name}": False for name in ("pre", "post", "query", "key")}
    plain = cache_bytes(**off)
    assert plain == 2 * 2 * 4 * 16 * head_dim * 2
    assert plain < cache_bytes() <= (1 + limit) * plain


# --- initialization ---------------------------------------------------------------------------------------------------


def assert_normal(tensor, std, name):
    """Mean 0 and the given std, at five standard errors of the sample (about 1 in 2 million by chance)."""
    sample, n = tensor.detach().double().flatten(), tensor.numel()
    assert n >= 64, f"{name}: too few numbers to say anything"
    assert abs(sample.mean()) <= 5 * std / math.sqrt(n), name
    assert abs(sample.std() / std - 1) <= 5 / math.sqrt(2 * (n - 1)), (name, float(sample.std()), std)
    # normal, not uniform: the fourth moment of a normal sample is 3 ± 5·sqrt(96/n), a uniform one's 1.8
    if n >= 4096:
        kurtosis = ((sample / std) ** 4).mean()
        assert abs(kurtosis - 3) <= 5 * math.sqrt(96 / n), name


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("made", ["constructor", "from_config", "meta"])
def test_initialization_is_the_papers(groups, made, tmp_path):
    """As the paper has it, whichever way the model comes to be; and after every other weight has been initialized."""
    e, h, r = 128, 16, 2
    config = tiny_config(
        hidden_size=e,
        num_attention_heads=h,
        num_key_value_heads=h,
        intermediate_size=256,
        num_hidden_layers=2,
        compose_rank=r,
        compose_groups=groups,
        compose_static=True,
        initializer_range=0.03,
    )
    torch.manual_seed(3)
    if made == "constructor":
        model = DCFormerForCausalLM(config)
    elif made == "from_config":
        model = DCFormerForCausalLM._from_config(config)
    else:  # a checkpoint without any of these weights: Transformers builds on meta and initializes what is missing
        DCFormerForCausalLM(config).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model, info = DCFormerForCausalLM.from_pretrained(None, config=config, state_dict={}, output_loading_info=True)
        assert "model.layers.0.self_attn.compose.qkw" in info["missing_keys"]
    m = h // groups
    k = 2 * r * m
    for layer in model.model.layers:
        module = layer.self_attn.compose
        assert module.dw1_proj.weight.shape == (groups * 4 * k, e)
        assert module.qkw.shape == (groups * 4 * k, 2 * r * m)
        assert module.gate_proj.weight.shape == (groups * 4 * m, e)
        assert_normal(module.dw1_proj.weight, math.sqrt(2 / (e + k)), "dw1")
        assert_normal(module.qkw, 0.02 / (math.sqrt(2 * h * r) * (h + r)), "qkw")
        assert_normal(module.gate_proj.weight, 0.05 * math.sqrt(2 / (e + h)), "dd")
        for static in (module.pre_static, module.post_static):
            assert static.shape == (h, m)
            assert_normal(static, 0.1 * math.sqrt(1 / m), "static")
        for name, linear in layer.named_modules():
            if isinstance(linear, nn.Linear) and "compose" not in name:
                assert_normal(linear.weight, 0.03, name)
        assert torch.equal(layer.input_layernorm.weight, torch.ones(e))
    assert_normal(model.lm_head.weight, 0.03, "lm_head")
    assert_normal(model.model.embed_tokens.weight, 0.03, "embed_tokens")


def test_initialization_does_not_depend_on_the_order_of_modules():
    """`_init_weights` visits a composition's own Linear layers too; whatever comes last, composition's values stay."""
    config = tiny_config(hidden_size=128, num_attention_heads=16, num_key_value_heads=16, initializer_range=0.7)
    model = DCFormerForCausalLM(config)
    module = model.model.layers[0].self_attn.compose
    std = compose_init_std(config)
    for name, parameter in module.named_parameters():
        assert_normal(parameter, std[name], name)
        assert std[name] < 0.2  # so that 0.7 would be noticed
    assert not any("bias" in name for name, _ in module.named_parameters())


def test_biases_start_at_zero():
    model = DCFormerForCausalLM(tiny_config(attention_bias=True, mlp_bias=True, norm_type="layernorm"))
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * (4 + 3 + 2) + 1
    assert not any(bias.any() for bias in biases)


def test_composition_starts_near_the_identity():
    """The paper found small dynamic weights at the start critical: composition changes maps by about a tenth."""
    config = tiny_config(hidden_size=128, num_attention_heads=16, num_key_value_heads=16)
    module = DCFormerForCausalLM(config).model.layers[0].self_attn.compose
    sides, _ = module(torch.randn(1, 8, 128))
    maps = torch.randn(1, 16, 8, 8)
    for stage in ("pre", "post"):
        change = compose(maps, module.stage_weights(sides[stage, "query"], sides[stage, "key"], None)) - maps
        assert 0 < change.norm() / maps.norm() < 0.15


def test_accumulation_dtype():
    assert accumulation_dtype(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert accumulation_dtype(dtype) == torch.float32


SETTINGS = [
    {},
    {"compose_rank": 3, "compose_groups": 2, "compose_static": True},
    {"compose_key": False, "compose_act": "gelu"},
    {"compose_projection": False, "num_key_value_heads": 1},
    {"compose_query": False, "compose_key": False, "compose_static": True},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_settings_do_what_a_configuration_does(fields):
    config = tiny_config(**fields)
    settings = ComposeSettings(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(ComposeSettings)}
    )
    own, of_config = DCFormerCompose(settings), DCFormerCompose(config)
    for parameter in of_config.parameters():  # the model initializes some of them
        torch.nn.init.zeros_(parameter)
    own.load_state_dict(randomize(of_config).state_dict())
    assert settings.compose_generators == config.compose_generators and own.channels == of_config.channels
    assert compose_init_std(settings) == compose_init_std(config)
    states = torch.randn(2, 5, config.hidden_size)
    (dynamic, statics), (expected, expected_statics) = own(states), of_config(states)
    assert dynamic.keys() == expected.keys() and statics.keys() == expected_statics.keys()
    for generator, side in dynamic.items():
        assert all(map(torch.equal, side.tensors(), expected[generator].tensors()))
    assert all(torch.equal(static, expected_statics[stage]) for stage, static in statics.items())


def test_settings_have_the_configurations_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(DCFormerConfig)}
    own = {field.name: field.default for field in dataclasses.fields(ComposeSettings)}
    assert own.keys() <= defaults.keys()
    given = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    assert all(own[name] == defaults[name] for name in own if name not in given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"compose_groups": 3}, "compose_groups=3"),
        ({"compose_act": "relu"}, "compose_act='relu'"),
        ({"compose_rank": 1.5}, r"compose_rank=1\.5 must be a whole number"),
        ({"compose_groups": True}, "compose_groups=True must be a whole number"),
        ({"compose_pre": "yes"}, "compose_pre='yes': expected True or False"),
        ({"compose_static": 0}, "compose_static=0: expected True or False"),
        ({"compose_pre": False, "compose_post": False}, "both off"),
    ],
    ids=str,
)
def test_settings_that_describe_no_composition(fields, message):
    with pytest.raises(ValueError, match=message):
        ComposeSettings(**({"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | fields))
