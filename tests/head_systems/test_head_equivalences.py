"""What systems are in terms of each other, of plain attention and of composition, in float64."""

import pytest
import torch
from head_cases import attend, by_definition, converted, make_bare, masks, plain_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from dcformer import compose_dcformer
from dcformer.compose_dcformer import ComposeWeights, SideWeights
from dcformer.head_systems import HeadSizes, from_talking_heads
from dcformer.head_systems.attention_head_systems import HeadSystemsAttention
from dcformer.head_systems.collaborative_cp import decompose
from dcformer.head_systems.overlapped import PARADIGMS
from dcformer.head_systems.pretrained_head_systems import HeadSystemsDecoderLayer
from dcformer.head_systems.vision import HeadSystemsViTAttention
from dcformer.modeling_dcformer import DCFormerAttention, DCFormerDecoderLayer, apply_rotary
from dcformer.vision.modeling_dcvit import DCViTAttention

SIZES = HeadSizes(hidden_size=24, num_heads=4, num_kv_heads=4, head_dim=6)
BIASED = HeadSizes(hidden_size=24, num_heads=4, num_kv_heads=4, head_dim=6, bias=True)
GROUPED = HeadSizes(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=6, bias=True)
EXACT = 1e-12  # the issue's; the largest differences seen are of the order of 1e-15


def states(rows=2, length=9, size=24):
    return torch.randn(rows, length, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def largest(one, other):
    """The largest difference, which `pytest -rP` shows."""
    found = float((one - other).detach().abs().max())
    print(f"{found:.1e}", end=" ")
    return found


@pytest.mark.parametrize("kind", masks(2, 9))
@pytest.mark.parametrize("sizes", [SIZES, BIASED, GROUPED], ids=["plain", "biased", "grouped"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("collaborative", {"content_bias": True}),
        ("overlapped", {"overlap": 0}),
        ("mixture_of_heads", {}),
        ("mixture_of_heads", {"num_shared_heads": 1}),
        ("mixture_of_heads", {"num_shared_heads": 3}),
        ("mixture_of_heads", {"num_shared_heads": 2, "router": "query_norm"}),
        ("output_gate", {"output_gate_scale": 2.0}),
        ("output_gate", {"output_gate_scale": 2.0, "output_gate": "elementwise", "output_gate_bias": True}),
        ("head_pruning", {}),
    ],
)
def test_a_converted_layer_is_the_plain_one(name, options, sizes, kind):
    if name == "overlapped" and sizes is GROUPED:
        pytest.skip("overlapped heads have no grouped keys and values")
    layer, x, visible = plain_layer(sizes), states(), masks(2, 9)[kind]
    system, weight = converted(name, sizes, layer, **options)
    assert largest(attend(system, weight, x, visible), by_definition(layer, sizes, x, visible)) < EXACT


# --- talking heads ----------------------------------------------------------------------------------------------------


def test_talking_heads_are_static_composition():
    layer, x, visible = plain_layer(SIZES), states(), masks(2, 9)["causal"]
    generator = torch.Generator().manual_seed(3)
    pre, post = (torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    system, weight = converted("talking_heads", SIZES, layer)
    weights = [ComposeWeights(static=from_talking_heads(p).view(1, 4, 4)) for p in (pre, post)]
    found = attend(system, weight, x, visible, pre=weights[0], post=weights[1])
    q, k, v = (layer[name](x).unflatten(-1, (-1, 6)).transpose(1, 2) for name in "qkv")
    scores = torch.einsum("bjts,jm->bmts", q @ k.mT * 6**-0.5, pre).masked_fill(~visible, float("-inf"))
    maps = torch.einsum("bjts,jm->bmts", scores.softmax(-1), post)
    assert largest(found, layer["o"]((maps @ v).transpose(1, 2).flatten(2))) < EXACT
    with pytest.raises(ValueError, match=r"shape \(4, 3\)"):
        from_talking_heads(torch.zeros(4, 3))


def test_talking_heads_in_groups():
    p = torch.randn(2, 3, 3)
    assert torch.equal(from_talking_heads(p).view(2, 3, 3), p - torch.eye(3))


# --- collaborative ----------------------------------------------------------------------------------------------------


def test_collaborative_needs_the_content_bias():
    """Without it the queries' biases would be lost."""
    with pytest.raises(ValueError, match="content_bias=False: the queries' biases would be lost"):
        converted("collaborative", BIASED, plain_layer(BIASED))


def test_collaborative_keeps_the_scaling():
    assert make_bare("collaborative", SIZES, shared_key_query_dim=12).scaling == 6**-0.5
    assert make_bare("collaborative", SIZES, shared_key_query_dim=12, scaling=0.5).scaling == 0.5


@pytest.mark.parametrize("rank", [5, 12, 24])
def test_decomposition_at_the_true_rank(rank):
    """A plain layer whose scores a collaborative layer of `rank` dims can have, made from one."""
    truth = make_bare("collaborative", SIZES, shared_key_query_dim=rank, mixing_init="normal")
    mixed = truth.q_proj.weight.T[None] * truth.mixing()[:, None]  # [H, E, rank]
    padded = [torch.linalg.svd(m @ truth.k_proj.weight) for m in mixed]
    width = min(rank, 24)
    layer = plain_layer(wide := HeadSizes(hidden_size=24, num_heads=4, num_kv_heads=4, head_dim=width))
    with torch.no_grad():
        layer["q"].weight.copy_(torch.cat([(u * s.sqrt())[:, :width].T for u, s, _ in padded]))
        layer["k"].weight.copy_(torch.cat([(s.sqrt()[:, None] * v)[:width] for _, s, v in padded]))
    found = decompose(*(layer[n].weight.T.unflatten(1, (4, -1)).transpose(0, 1) for n in "qk"), rank)
    assert found.error < 1e-6
    if rank < 4 * width:
        system, weight = converted("collaborative", wide, layer, shared_key_query_dim=rank)
        visible = masks(2, 9)["causal"]
        error = largest(attend(system, weight, states(), visible), by_definition(layer, wide, states(), visible))
        print(f"rank {rank}: relative error {found.error:.1e}, output {error:.1e}")
        assert error < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_decomposition_below_its_dims(seed):
    """Two heads that choose some of nine components, not all of which are then used."""
    torch.manual_seed(seed)
    one, two = torch.randn(2, 12, 9, dtype=torch.float64)
    chosen = [torch.randperm(9)[:6] for _ in range(2)]
    query, key = (torch.stack([matrix[:, places] for places in chosen]) for matrix in (one, two))
    for dims in range(len(set(torch.cat(chosen).tolist())), 10):
        assert decompose(query, key, dims).error < 1e-8
    nothing = decompose(torch.zeros_like(query), key, 6)
    assert nothing.error == 0 and torch.isfinite(nothing.query).all() and not nothing.mixing.any()


@pytest.mark.parametrize("dims", [6, 12, 18])
def test_decomposition_of_a_random_layer_respects_the_bound(dims):
    layer = plain_layer(SIZES)
    found = decompose(*(layer[name].weight.T.unflatten(1, (4, -1)).transpose(0, 1) for name in "qk"), dims)
    stack = torch.stack([a.T @ b for a, b in zip(*(layer[n].weight.unflatten(0, (4, -1)) for n in "qk"), strict=True)])
    made = torch.einsum("xc,hc,yc->hxy", found.query, found.mixing, found.key)
    error = float((stack - made).norm() / stack.norm())
    print(f"{dims} of 24 dims: error {error:.4f}, HOSVD {found.hosvd_error:.4f}")
    assert found.error == pytest.approx(error, abs=1e-9)
    assert found.hosvd_error / 2**0.5 <= error < 1


def rotated(dim, positions, dtype=torch.float64):
    """`turn` of a model: RoPE over the first `dim` channels of a head, half-split."""

    def turn(heads):
        half = min(dim, heads.shape[-1]) // 2
        angles = positions.to(dtype)[:, None] * 100.0 ** (-2 * torch.arange(dim // 2, dtype=dtype)[:half] / dim)
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[None] for f in (torch.cos, torch.sin))
        return apply_rotary(heads, cos, sin)

    return turn


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 4).map(lambda n: 2 * n),
    rotary=st.integers(1, 4),
    share=st.floats(0.05, 1),
)
def test_collaborative_scores_are_relative_when_tied(heads, head_dim, rotary, share):
    """Any even number of shared dims, and RoPE over any part of a head."""
    dims = max(2, int(heads * head_dim * share) // 2 * 2)
    sizes = HeadSizes(24, heads, heads, head_dim, rotary_dim=2 * min(rotary, head_dim // 2))
    system = make_bare("collaborative", sizes, shared_key_query_dim=dims)
    x, visible = states(1, 5), masks(1, 5)["causal"]
    weight = torch.randn(24, heads * head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turn = [rotated(sizes.rotary_dim, torch.arange(5) + shift) for shift in (0, 1000)]
    one, other = (attend(system, weight, x, visible, t) for t in turn)
    assert largest(one, other) < 1e-9
    assert system.mixing().shape == (heads, dims)


def test_untied_mixing_is_refused_and_changes_scores():
    sizes = HeadSizes(24, 4, 4, 6, rotary_dim=4)
    system = make_bare("collaborative", sizes, shared_key_query_dim=12)
    mixing = system.mixing().detach()
    system.mixing.set(2 * mixing)
    assert torch.equal(system.mixing(), 2 * mixing)
    untied = mixing.clone()
    untied[1, 2] += 1.0  # channel 2 is rotated with channel 0
    with pytest.raises(ValueError, match=r"tie channels c and c \+ 2 of each block of 6"):
        system.mixing.set(untied)
    assert torch.equal(system.mixing(), 2 * mixing)
    free = mixing.clone()
    free[1, 5] += 1.0  # is not rotated
    system.mixing.set(free)
    assert torch.equal(system.mixing(), free)
    with pytest.raises(ValueError, match=r"shape \(4, 3\): expected \(4, 12\)"):
        system.mixing.set(mixing[:, :3])


@pytest.mark.parametrize("rotary_dim", [0, 4, 6])
def test_collaborative_in_blocks_is_static_composition(rotary_dim):
    """Theorem 2.1 of the paper: mixing that is constant inside each head's block is a mix of the heads' scores."""
    sizes = HeadSizes(24, 4, 4, 6, rotary_dim=rotary_dim)
    layer, x, visible = plain_layer(sizes), states(), masks(2, 9)["causal"]
    p = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    turn = rotated(rotary_dim, torch.arange(9)) if rotary_dim else lambda heads: heads
    system, weight = converted("collaborative", sizes, layer)
    system.mixing.set(p.T.repeat_interleave(6, dim=1))
    found = attend(system, weight, x, visible, turn)
    plain, weight = converted("plain", sizes, layer)
    static = ComposeWeights(static=from_talking_heads(p).view(1, 4, 4))
    assert largest(found, attend(plain, weight, x, visible, turn, pre=static)) < EXACT


# --- overlapped -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(heads=st.integers(1, 5), head_dim=st.integers(1, 6), data=st.data())
def test_overlapped_heads_have_their_neighbors_channels(heads, head_dim, data):
    """Columns h·D - o to (h + 1)·D + o of the padded heads; scores are the own and the two neighbors' parts."""
    overlap = data.draw(st.integers(0, head_dim))
    sizes = HeadSizes(12, heads, heads, head_dim)
    system = make_bare("overlapped", sizes, overlap=overlap)
    x = states(2, 5, 12)
    plain = system.project(x, x)
    wide = system.expand(*plain)
    for narrow, found in zip(plain, wide, strict=True):
        flat = torch.nn.functional.pad(narrow.transpose(1, 2).flatten(2), (overlap, overlap))
        for head in range(heads):
            assert torch.equal(found[:, head], flat[..., head * head_dim : (head + 1) * head_dim + 2 * overlap])
    q, k = plain[:2]
    scores = q @ k.mT
    for head in range(heads):
        if head > 0 and overlap:
            scores[:, head] += q[:, head - 1, :, -overlap:] @ k[:, head - 1, :, -overlap:].mT
        if head < heads - 1:
            scores[:, head] += q[:, head + 1, :, :overlap] @ k[:, head + 1, :, :overlap].mT
    assert largest(wide[0] @ wide[1].mT, scores) < EXACT


def test_dead_slices_of_the_output_projection_get_no_gradient():
    system = make_bare("overlapped", SIZES, overlap=2)
    weight = torch.randn(24, system.output_width, dtype=torch.float64, requires_grad=True)
    attend(system, weight, states(), masks(2, 9)["causal"]).pow(2).sum().backward()
    dead = torch.zeros(system.output_width, dtype=torch.bool)
    dead[:2] = dead[-2:] = True
    assert (weight.grad[:, dead] == 0).all() and (weight.grad[:, ~dead].abs().amax(0) > 0).all()


def test_paradigms_of_the_authors():
    found = {name: [rule(layer, 5) for layer in range(5)] for name, rule in PARADIGMS.items()}
    assert found == {
        "depth0": [0, 1, 2, 3, 4],
        "depth1": [1, 2, 3, 4, 5],
        "depth0_half": [0, 0, 1, 1, 2],
        "depth1_half": [1, 1, 2, 2, 3],
        "depth0_reverse": [4, 3, 2, 1, 0],
        "depth1_reverse": [5, 4, 3, 2, 1],
        "depth0_half_reverse": [2, 1, 1, 0, 0],
        "depth1_half_reverse": [3, 2, 2, 1, 1],
    }


# --- mixture of heads -------------------------------------------------------------------------------------------------


def routed(form, kept, shared=0, std=1.0, router="linear"):
    """A system with random routers, its gates [B, T, H] for random states, and these."""
    system = make_bare(
        "mixture_of_heads",
        SIZES,
        num_shared_heads=shared,
        num_routed_heads_per_tok=kept,
        routing_form=form,
        router=router,
    )
    for name in ("router", "shared_router", "balance_router"):
        if getattr(system, name, None) is not None:
            torch.nn.init.normal_(getattr(system, name).weight, std=std)
    x = states()
    return system, system.route(x, system.project(x, x)[0]), x


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("form", ["code", "paper"])
def test_gates_are_the_equations(form, kept, shared):
    system, gates, x = routed(form, kept, shared)
    p = (x @ system.router.weight.T).softmax(-1)
    chosen = p >= p.sort(dim=-1, descending=True).values[..., kept - 1 : kept]
    expected = p * chosen if form == "paper" else kept * p * chosen / (p * chosen).sum(-1, keepdim=True)
    if shared:
        parts = (x @ system.balance_router.weight.T).softmax(-1)
        own = torch.ones_like(p[..., :1])
        if shared > 1:
            own = (x @ system.shared_router.weight.T).softmax(-1)
        factor = (2 * shared, 2) if form == "code" else (1, 1)
        expected = torch.cat([factor[0] * parts[..., :1] * own, factor[1] * parts[..., 1:] * expected], dim=-1)
    assert (system.shared_router is None) == (shared < 2)
    assert largest(gates, expected) < EXACT
    assert ((gates == 0).sum(-1) == SIZES.num_heads - shared - kept).all()


@pytest.mark.parametrize(("form", "expected"), [("paper", 2 / 4), ("code", 2.0)])
def test_balance_loss(form, expected):
    """K/Hr and K at uniform routing; more when all tokens choose alike."""
    system, _, _ = routed(form, 2, std=0.0)
    assert float(system.losses()["load_balance"]) == pytest.approx(expected, abs=1e-12)
    collapsed, _, x = routed(form, 2, std=0.0)
    x = torch.cat([x[..., :-1], torch.ones_like(x[..., :1])], dim=-1)
    collapsed.router.weight.data[:2, -1] = 3.0
    collapsed.route(x, collapsed.project(x, x)[0])
    assert float(collapsed.losses()["load_balance"]) > 1.5 * expected
    assert not collapsed.losses(), "the losses of a forward pass are given once"


def test_uniform_gates_of_the_paper_and_the_code():
    for form, value in (("code", 1.0), ("paper", 1 / (2 * 2))):
        _, gates, _ = routed(form, 2, shared=2, std=0.0)
        assert torch.allclose(gates, torch.full_like(gates, value))


def test_padding_changes_no_balance():
    system, gates, x = routed("code", 2)
    system.route(x[:, 3:], system.project(x[:, 3:], x[:, 3:])[0])
    expected = system.losses()["load_balance"]
    other = torch.cat([100 * x[:, :3], x[:, 3:]], dim=1)
    found = system.route(other, system.project(other, other)[0])
    assert torch.equal(found[:, 3:], gates[:, 3:])
    mask = torch.ones(2, 9)
    mask[:, :3] = 0
    assert largest(system.losses(mask)["load_balance"], expected) < EXACT
    system.route(other, system.project(other, other)[0])
    assert largest(system.losses()["load_balance"], expected) > 1e-3


def test_quantized_gates_have_a_gradient():
    system, gates, _ = routed("code", 2, shared=1, router="query_norm")
    assert set(gates.unique().tolist()) == {0.0, 1.0} and (gates.sum(-1) == 3).all() and (gates[..., 0] == 1).all()
    (gates * torch.randn(gates.shape, dtype=gates.dtype)).sum().backward()
    assert system.q_proj.weight.grad.abs().max() > 0
    assert sum(p.numel() for p in system.parameters()) == 3 * 24 * 24


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_norms_take_no_side(dtype):
    """Queries as long as each other, whatever their length: uniform p, with finite gradients. Others: by definition."""
    system = make_bare("mixture_of_heads", SIZES, router="query_norm", num_routed_heads_per_tok=2)
    for scale in (0.0, 1e-3, 1.0, 1e3):
        query = (states()[:, None, :, :6].repeat(1, 4, 1, 1) * scale).to(dtype).requires_grad_()
        gates = system.route(states().to(dtype), query)
        assert (system._routed_by[0] == 0.25).all() and (gates.sum(-1) == 2).all()
        (gates * torch.arange(4)).sum().backward()
        assert query.grad.isfinite().all()
    query = torch.randn(2, 4, 9, 6, generator=torch.Generator().manual_seed(5)).to(dtype)
    norms = query.to(torch.promote_types(dtype, torch.float32)).norm(dim=-1).mT
    system.route(states().to(dtype), query)
    assert torch.equal(system.router_logits, norms / norms.std(dim=-1, keepdim=True))


# --- gates and pruning ------------------------------------------------------------------------------------------------


def test_headwise_gate_is_the_querywise_gate_of_composition():
    """2·sigmoid(2u) = 1 + tanh(u): composition's gate has half the weights."""
    layer, x, visible = plain_layer(SIZES), states(), masks(2, 9)["causal"]
    system, weight = converted("output_gate", SIZES, layer, output_gate_scale=2.0)
    torch.nn.init.normal_(system.gate_proj.weight)
    settings_ = compose_dcformer.ComposeSettings(
        24, 4, 4, compose_pre=False, compose_key=False, compose_projection=False
    )
    generators = compose_dcformer.DCFormerCompose(settings_).double()
    with torch.no_grad():
        generators.gate_proj.weight.copy_(system.gate_proj.weight / 2)
    generated, _ = generators(x)
    post = ComposeWeights(query=SideWeights(generated["post", "query"].packed))
    plain, own = converted("plain", SIZES, layer)
    found = attend(system, weight, x, visible)
    assert largest(found, attend(plain, own, x, visible, post=post)) < EXACT
    assert largest(found, attend(plain, own, x, visible)) > 1e-3


def test_a_closed_gate_removes_the_head():
    layer, x, visible = plain_layer(SIZES), states(), masks(2, 9)["causal"]
    expected_weight = layer["o"].weight.detach().clone()
    expected_weight[:, 6:12] = 0
    plain, _ = converted("plain", SIZES, layer)
    expected = attend(plain, expected_weight, x, visible)
    gate, weight = converted("output_gate", SIZES, layer, output_gate_scale=2.0, output_gate_bias=True)
    gate.gate_proj.bias.data[1] = -1e4
    assert largest(attend(gate, weight, x, visible), expected) < EXACT
    pruned, weight = converted("head_pruning", SIZES, layer)
    pruned.log_alpha.data[1] = -10.0
    assert largest(attend(pruned, weight, x, visible), expected) < EXACT


def test_hard_concrete_gates():
    """Zero, one and between in training; the expected number of open gates is the penalty."""
    system = make_bare("head_pruning", HeadSizes(24, 2000, 2000, 2))
    system.log_alpha.data.normal_()
    torch.manual_seed(0)
    gates = torch.stack([system.train().head_gates() for _ in range(200)])
    assert {0.0, 1.0} < set(gates.flatten().tolist())
    open_ = (gates > 0).double().mean() * 2000
    # 400,000 draws of at most variance 1/4: a standard error of 2000 · 0.0008 = 1.6
    assert abs(float(system.losses()["l0"]) - float(open_)) < 8
    expected = (system.log_alpha.sigmoid() * 1.2 - 0.1).clamp(0, 1)
    assert largest(system.eval().head_gates(), expected) < EXACT


def test_core_names_its_attention_in_one_line():
    assert DCFormerDecoderLayer.attention_class is DCFormerAttention
    assert HeadSystemsDecoderLayer.attention_class is HeadSystemsAttention
    assert HeadSystemsDecoderLayer.__init__ is DCFormerDecoderLayer.__init__


def test_a_system_changes_steps_of_the_attention_and_not_its_course():
    assert HeadSystemsAttention.forward is DCFormerAttention.forward
    assert HeadSystemsViTAttention.forward is DCViTAttention.forward
