"""The fused weight generators against `DCFormerCompose` in float64, with tolerances from torch's own error."""

import itertools
import math

import pytest
import torch
from helpers import tiny_config
from kernel_device import DEVICE, INTERPRETED
from torch import nn

from dcformer import DCFormerCompose, SideWeights
from dcformer.kernels import generator
from dcformer.kernels.generator import generate_packed, generate_weights
from dcformer.kernels.schemas import generate_packed_op, generate_weights_op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIM = 8
# Large activations reach exp's overflow in NumPy, where the limit is the right result.
pytestmark = [
    pytest.mark.usefixtures("poison", "accesses"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def make(dtype=torch.float32, scale=0.5, **fields):
    """A composition module with weights far from their initialization, and the same in float64."""
    config = tiny_config(
        **({"num_key_value_heads": fields.get("num_attention_heads", 4), "head_dim": HEAD_DIM} | fields)
    )
    module = DCFormerCompose(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape))
    module = module.to(DEVICE, dtype)
    exact = DCFormerCompose(config).to(DEVICE, torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    return module, exact


def states(batch, length, dtype=torch.float32, size=32):
    return torch.randn(batch, length, size).to(DEVICE, dtype)


def assert_within(result, reference, truth, name=""):
    """The norm of the error of `result` is at most twice that of `reference`, and one rounding; the largest error at
    most eight times that, and four roundings: which number has it, and how large it is, is chance."""
    assert result.shape == reference.shape == truth.shape, name
    assert torch.isfinite(result).all(), name
    for order, times in ((2, 2), (torch.inf, 8)):
        error, allowed, size = (
            torch.linalg.vector_norm(x.double(), order).item() if x.numel() else 0.0
            for x in (result - truth, reference - truth, truth)
        )
        limit = times * allowed + times / 2 * torch.finfo(reference.dtype).eps * size
        assert error <= limit, f"{name}: {error:.3g} against {allowed:.3g} (limit {limit:.3g}, norm {order})"


def assert_sides_within(result, reference, truth):
    assert list(result) == list(reference) == list(truth)
    for generator_name in truth:
        for name in ("down", "up", "gate"):
            tensors = [getattr(sides[generator_name], name) for sides in (result, reference, truth)]
            assert len({tensor is None for tensor in tensors}) == 1, (generator_name, name)
            if tensors[0] is not None:
                assert tensors[0].dtype == tensors[1].dtype
                assert_within(*tensors, name=(generator_name, name))


# --- weights ----------------------------------------------------------------------------------------------------------

SWITCHES = [
    {},
    {"compose_gate": False},
    {"compose_projection": False},
    {"compose_query": False},
    {"compose_key": False},
    {"compose_pre": False},
    {"compose_post": False, "compose_query": False},
    {"compose_static": True, "compose_act": "gelu"},
]
# heads, key/value heads, groups, rank, batch, tokens: head counts other than powers of two, lengths that fill no tile
SHAPES = [
    (4, 4, 1, 1, 1, 1),
    (6, 2, 1, 2, 2, 63),
    (6, 6, 3, 3, 1, 17),
    (8, 2, 4, 2, 4, 21),  # enough programs for blocks of 64 tokens
    (12, 4, 2, 4, 1, 5),
    (16, 16, 1, 2, 2, 3),
    (24, 3, 1, 2, 1, 63),
    (32, 32, 1, 2, 1, 19),
    (40, 8, 5, 2, 1, 16),
    (40, 40, 1, 1, 1, 1),
    (52, 13, 1, 2, 1, 2),
    (52, 4, 4, 4, 1, 17),
    (52, 26, 2, 3, 1, 3),
]


def check_weights(dtype, shape, switches):
    """All that is to be said about one configuration: weights, packed rows, padding."""
    heads, kv_heads, groups, rank, batch, length = shape
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    module, exact = make(dtype, compose_groups=groups, compose_rank=rank, **fields, **switches)
    x = states(batch, length, dtype)
    with torch.no_grad():
        result, statics = generate_weights(x, module)
        reference, expected_statics = module(x)
        truth, _ = exact(x.double())
        assert_sides_within(result, reference, truth)
        assert list(statics) == list(expected_statics)
        assert all(torch.equal(statics[stage], expected_statics[stage]) for stage in statics)

        rows = {stage: poisoned_rows(batch, kv_heads, length, module, stage, dtype) for stage in ("pre", "post")}
        queries, _ = generate_packed(x, module, rows["pre"], rows["post"])
    assert list(queries) == [name for name in result if name[1] == "query"]
    for name, side in queries.items():
        for one, other in zip(side.tensors(), result[name].tensors(), strict=True):
            assert torch.equal(one, other)
    for stage, packed in rows.items():
        before = packed[..., :HEAD_DIM].clone()
        assert torch.isnan(before).all()  # the keys' and values' own part is left alone
        packed[..., :HEAD_DIM] = 0
        # the same kernel, so the same bits; and what `pack` does is exact
        expected = module.pack(packed[..., :HEAD_DIM], result.get((stage, "key")), stage)
        assert torch.equal(packed, expected), stage


def poisoned_rows(batch, kv_heads, length, module, stage, dtype):
    shape = (batch, kv_heads, length, HEAD_DIM + module.channels[stage])
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("i_shape", range(len(SHAPES)))
def test_weights_and_rows(i_shape):
    check_weights(DTYPES[i_shape % 3], SHAPES[i_shape], {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_switches(switches, dtype):
    check_weights(dtype, (6, 2, 2, 2, 2, 5), switches)
    check_weights(dtype, (8, 8, 1, 1, 1, 3), switches)


def test_every_combination_of_switches():
    pairs = ("pre", "post"), ("query", "key"), ("projection", "gate")
    some = (True, True), (True, False), (False, True)
    for values in itertools.product(some, repeat=3):
        on = {
            f"compose_{name}": on
            for pair, ons in zip(pairs, values, strict=True)
            for name, on in zip(pair, ons, strict=True)
        }
        check_weights(torch.float32, (4, 2, 1, 2, 1, 3), on)


def test_nothing_to_generate():
    module, _ = make(**{f"compose_{name}": False for name in ("pre", "post", "query", "key")})
    assert generate_weights(states(1, 3), module) == ({}, {})
    module, _ = make(compose_query=False, compose_key=False, compose_static=True)
    rows = [torch.zeros(1, 4, 3, HEAD_DIM, device=DEVICE) for _ in range(2)]
    generated, statics = generate_packed(states(1, 3), module, *rows)
    assert generated == {} and list(statics) == ["pre", "post"]


def test_the_tolerance_can_fail():
    """The flavors of GELU differ by 5e-4 at most; taking the wrong one is noticed."""
    module, exact = make()
    x = states(2, 9)
    with torch.no_grad():
        reference, truth = module(x)[0], exact(x.double())[0]
        module.act_fn = type(DCFormerCompose(tiny_config(compose_act="gelu")).act_fn)()
        result = generate_weights(x, module)[0]
    with pytest.raises(AssertionError, match="limit"):
        assert_sides_within(result, reference, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_where_torch_rounds(dtype):
    """Only the order of sums differs, which rarely tips a rounding; a rounding more or less would change a third."""
    module, _ = make(dtype, num_attention_heads=12)
    x = states(2, 50, dtype)
    with torch.no_grad():
        result, reference = generate_weights(x, module)[0], module(x)[0]
    for name, side in result.items():
        for one, other in zip(side.tensors(), reference[name].tensors(), strict=True):
            assert (one != other).float().mean() < 0.02


def test_small_and_large_inputs():
    """Gates around zero and at saturation, and pairs at and below the norm's epsilon."""
    for scale in (1e-6, 1e-3, 0.1, 30.0):
        module, exact = make(scale=1.0)
        with torch.no_grad():
            for parameter in (module.gate_proj.weight, module.qkw, exact.gate_proj.weight, exact.qkw):
                parameter.mul_(scale)
            exact.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
            x = states(2, 7)
            assert_sides_within(generate_weights(x, module)[0], module(x)[0], exact(x.double())[0])


def test_tanh_is_accurate_relative_to_itself():
    module, _ = make(compose_projection=False, hidden_size=1, num_attention_heads=2, num_key_value_heads=2, scale=0.0)
    with torch.no_grad():
        module.gate_proj.weight.fill_(1.0)
        x = torch.cat([torch.logspace(-30, 2, 500), -torch.logspace(-30, 2, 500), torch.linspace(-1, 1, 501)])
        gate = generate_weights(x.to(DEVICE)[None, :, None], module)[0]["pre", "query"].gate[0, 0]
    truth = torch.tanh(x.double()).to(DEVICE)
    ulps = 4 if INTERPRETED else 8  # compiled, exponentials and quotients are approximate
    assert ((gate - truth).abs() <= ulps * torch.finfo(torch.float32).eps * truth.abs()).all()


def test_sides_are_what_attention_reads():
    """One tensor of all generators, in their order, each of them contiguous."""
    module, _ = make(num_attention_heads=6, compose_groups=2)
    generated, _ = generate_weights(states(2, 5), module)
    sides = [generated[generator] for generator in module.generators]
    (whole,) = {side.packed.untyped_storage().data_ptr() for side in sides}
    for i, side in enumerate(sides):
        assert side.packed.shape == (2, 6, 5, 5) and side.packed.is_contiguous() and len(side.tensors()) == 3
        assert side.packed.data_ptr() == whole + i * side.packed.numel() * side.packed.element_size()


def test_inference_mode():
    module, _ = make(num_key_value_heads=2)
    with torch.inference_mode():
        x = states(1, 3)
        result, reference = generate_weights(x, module, module.first_layer(x))[0], module(x)[0]
        rows = [poisoned_rows(1, 2, 3, module, stage, x.dtype) for stage in ("pre", "post")]
        queries, _ = generate_packed(x, module, *rows)
    torch.testing.assert_close(result["post", "key"].tensors(), reference["post", "key"].tensors())
    torch.testing.assert_close(queries["pre", "query"].tensors(), reference["pre", "query"].tensors())
    assert not torch.isnan(rows[1][..., HEAD_DIM:]).any()


def test_no_tokens():
    module, _ = make()
    generated, _ = generate_weights(states(2, 0), module)
    assert generated["pre", "key"].down.shape == (2, 4, 0, 2)
    assert generated["pre", "key"].gate.shape == (2, 4, 0)


def test_strided_inputs_and_rows():
    """Pre-activations and rows that are slices of something larger."""
    module, exact = make(num_attention_heads=6, num_key_value_heads=2)
    x = states(2, 14)[:, ::2]
    with torch.no_grad():
        result, _ = generate_weights(x, module)
        assert_sides_within(result, module(x)[0], exact(x.double())[0])
        store = torch.full((2, 3, 12, HEAD_DIM + module.channels["pre"] + 1), float("nan"), device=DEVICE)
        rows = [store[:, :2, 2:9, :-1], store[:, 1:, 5:, :-1][:, :, :7].clone()]
        generate_packed(x, module, *rows)
    for stage, packed in zip(("pre", "post"), rows, strict=True):
        expected = module.pack(torch.zeros_like(packed[..., :HEAD_DIM]), result[stage, "key"], stage)
        assert torch.equal(packed[..., HEAD_DIM:], expected[..., HEAD_DIM:])
    assert torch.isnan(store[:, :, :2]).all() and torch.isnan(store[:, :, 9:]).all()
    assert torch.isnan(store[:, 2]).all() and torch.isnan(store[..., -1]).all()


def test_rows_of_a_wider_dtype():
    """Under autocast keys may be float32 beside 16-bit weights: widening is exact."""
    module, _ = make(torch.bfloat16)
    x = states(1, 5, torch.bfloat16)
    with torch.no_grad():
        result, _ = generate_weights(x, module)
        rows = [poisoned_rows(1, 4, 5, module, stage, torch.float32) for stage in ("pre", "post")]
        generate_packed(x, module, *rows)
    for stage, packed in zip(("pre", "post"), rows, strict=True):
        expected = module.pack(torch.zeros(1, 4, 5, HEAD_DIM, device=DEVICE), result[stage, "key"], stage)
        assert torch.equal(packed[..., HEAD_DIM:], expected[..., HEAD_DIM:])


def test_autocast():
    module, exact = make()
    x = states(2, 9)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        result, _ = generate_weights(x, module)
        reference, _ = module(x)
    truth = exact(x.double())[0]
    for name, side in result.items():
        for kind in ("down", "up", "gate"):
            one, other = getattr(side, kind), getattr(reference[name], kind)
            assert one.dtype == torch.float32
            error, allowed = ((w - getattr(truth[name], kind)).abs().max() for w in (one, other))
            assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * other.abs().max()
    with torch.autocast(DEVICE, torch.bfloat16):
        total = sum(w.sum() for side in generate_weights(x, module)[0].values() for w in side.tensors())
    total.backward()
    assert module.qkw.grad.dtype == module.dw1_proj.weight.grad.dtype == torch.float32


# --- the first layer --------------------------------------------------------------------------------------------------


def test_one_product_where_that_pays():
    """Many tokens: the weights are joined for the call; few: not. What the caller has made is used. Hooks forbid it."""
    module, exact = make()
    rows = module.dw1_proj.weight.shape[0] + module.gate_proj.weight.shape[0]
    few, many = states(1, 3), states(2, rows)
    calls = []

    def count(function, *args):
        before = nn.functional.linear
        nn.functional.linear = lambda *a, **k: calls.append(a[1].shape[0]) or before(*a, **k)
        try:
            return function(*args)
        finally:
            nn.functional.linear = before

    for x, first_layer, expected in ((few, (), 2), (many, (), 1), (few, module.first_layer(few), 0)):
        calls.clear()
        result, _ = count(generate_weights, x, module, first_layer)
        assert len(calls) == expected and sum(calls) == rows * bool(expected)
        assert_sides_within(result, module(x)[0], exact(x.double())[0])
    module.gate_proj.register_forward_hook(lambda *_: calls.append(0))
    calls.clear()
    generate_weights(many, module)
    assert 0 in calls


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(function, module, x):
    """Gradients of a weighted sum of all weights, in the hidden states and every parameter in use."""
    x = x.clone().requires_grad_()
    generated, _ = function(x, module)
    weigh = torch.Generator().manual_seed(5)
    total = 0.0
    for side in generated.values():
        for w in side.tensors():
            total = total + (w * torch.randn(w.shape, generator=weigh).to(w)).sum()
    parameters = {name: p for name, p in module.named_parameters() if "static" not in name}
    found = torch.autograd.grad(total, [x, *parameters.values()])
    return dict(zip(["hidden_states", *parameters], found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape,switches",
    [
        ((4, 2, 1, 2, 2, 5), {}),
        ((6, 6, 2, 3, 1, 9), {"compose_act": "gelu"}),
        ((24, 8, 1, 2, 1, 17), {}),
        ((8, 8, 4, 1, 4, 21), {"compose_post": False}),
        ((6, 3, 1, 2, 2, 7), {"compose_gate": False}),
        ((6, 3, 3, 2, 2, 7), {"compose_projection": False}),
        ((6, 3, 3, 2, 2, 7), {"compose_query": False}),
        ((4, 4, 1, 2, 2, 120), {}),  # one product for the first layer
    ],
)
def test_gradients(shape, switches, dtype):
    heads, kv_heads, groups, rank, batch, length = shape
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    module, exact = make(dtype, compose_groups=groups, compose_rank=rank, **fields, **switches)
    x = states(batch, length, dtype)
    result = gradients(generate_weights, module, x)
    reference = gradients(lambda h, m: m(h), module, x)
    truth = gradients(lambda h, m: m(h), exact, x.double())
    for name in truth:
        assert result[name].dtype == dtype
        assert_within(result[name], reference[name], truth[name], name)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("groups,rank", [(1, 2), (3, 1)])
def test_gradients_are_as_exact_as_the_modules(groups, rank, act):
    """In units of the last place of each gradient's largest number. With few heads a norm may enlarge roundings."""
    module, exact = make(num_attention_heads=6, compose_groups=groups, compose_rank=rank, compose_act=act)
    x = states(2, 21)
    truth = gradients(lambda h, m: m(h), exact, x.double())
    results = gradients(generate_weights, module, x), gradients(lambda h, m: m(h), module, x)
    for name, expected in truth.items():
        unit = torch.finfo(torch.float32).eps * expected.abs().max()
        error, yardstick = ((result[name].double() - expected).abs().max() / unit for result in results)
        assert error <= 1.25 * yardstick + 4, f"{name}: {error:.3g} against {yardstick:.3g}"


@pytest.mark.parametrize("batch,length", [(2, 5), (0, 3), (2, 0)])
def test_gradients_of_any_layout(batch, length):
    """Pre-activations with tokens first in memory, and none at all."""
    columns, found = 4 * 2 * 2 * 3, []  # C · K
    wide, gate = torch.randn(length, batch, columns).to(DEVICE), torch.randn(length, batch, 4 * 3).to(DEVICE)
    qkw = torch.randn(columns, 12).to(DEVICE).requires_grad_()
    for is_dense in (True, False):
        hidden, gates = (x.transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (wide, gate))
        if not is_dense:
            hidden, gates = wide.transpose(0, 1), gate.transpose(0, 1)
        tensors = [hidden.detach().requires_grad_(), gates.detach().requires_grad_(), qkw]
        weights = generate_weights_op(*tensors, 2, 2, 3, 2, "none", torch.float32)
        found.append(torch.autograd.grad(weights.square().sum(), tensors))
    for one, other, tensor in zip(*found, tensors, strict=True):
        assert one.shape == tensor.shape
        torch.testing.assert_close(one, other)


def test_gradients_through_packed_weights():
    """What attention reads is differentiable like the sides it is made of."""
    module, _ = make(num_attention_heads=6, compose_groups=2)
    x = states(2, 5)
    generated, _ = generate_weights(x, module)
    total = sum((side.packed * 2).sum() for side in generated.values())
    again, _ = generate_weights(x, module)
    expected = sum(2 * w.sum() for side in again.values() for w in side.tensors())
    for one, other in zip(
        torch.autograd.grad(total, list(module.parameters())),
        torch.autograd.grad(expected, list(module.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_only_what_is_asked_for_has_a_gradient():
    module, _ = make()
    module.qkw.requires_grad_(False)
    generated, _ = generate_weights(states(1, 3), module)
    generated["post", "key"].up.sum().backward()
    assert module.qkw.grad is None
    assert module.dw1_proj.weight.grad.abs().sum() > 0


def test_batched_gradients_are_refused():
    module, _ = make()
    up = generate_weights(states(1, 3), module)[0]["post", "key"].up
    with pytest.raises(NotImplementedError, match=r"batched gradients.*attn_implementation='eager'"):
        torch.autograd.grad(up, module.qkw, torch.randn(3, *up.shape, device=up.device), is_grads_batched=True)


# --- as operators -----------------------------------------------------------------------------------------------------


def op_tensors(module, x):
    return [
        None if linear is None else linear(x).detach().requires_grad_()
        for linear in (module.dw1_proj, module.gate_proj)
    ] + [None if module.qkw is None else module.qkw.detach().requires_grad_()]


@pytest.mark.parametrize("switches", [{}, {"compose_projection": False}])
def test_opcheck(switches):
    module, _ = make(**switches)
    tensors = op_tensors(module, states(2, 3))
    rank = 2 if module.qkw is not None else 0
    torch.library.opcheck(generate_weights_op, (*tensors, 2, 2, 4, rank, "tanh", torch.float32))
    rows = [torch.zeros(2, 4, 3, module.channels[stage], device=DEVICE) for stage in ("pre", "post")]
    tensors = [None if t is None else t.detach() for t in tensors]
    torch.library.opcheck(generate_packed_op, (*tensors, *rows, 2, 4, rank, "tanh", torch.float32))


@pytest.mark.parametrize("length", [5, 40])  # two products for the first layer, or one
def test_compiles_whole(length):
    module, _ = make(num_attention_heads=2, num_key_value_heads=1)
    x = states(2, length)

    def weights(x):
        generated, _ = generate_weights(x, module)
        return [w for side in generated.values() for w in side.tensors()]

    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    parameters = [p for name, p in module.named_parameters() if "static" not in name]
    for one, other in zip(compiled(x), weights(x), strict=True):
        torch.testing.assert_close(one, other)
    results = [torch.autograd.grad(sum(w.square().sum() for w in f(x)), parameters) for f in (compiled, weights)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)

    def packed(x, rows_0, rows_1):
        generated, _ = generate_packed(x, module, rows_0, rows_1)
        return generated["pre", "query"].down, rows_0 + 0, rows_1 + 0

    with torch.no_grad():
        rows = [[poisoned_rows(2, 1, length, module, stage, x.dtype) for stage in ("pre", "post")] for _ in range(2)]
        functions = (torch.compile(packed, fullgraph=True, backend="aot_eager"), packed)
        results = [function(x, *pair) for function, pair in zip(functions, rows, strict=True)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


# --- tensor parallelism, errors ---------------------------------------------------------------------------------------


def shard(module, rank, size):
    """What a rank holds: its part of every parameter's first dimension."""
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        part = nn.Parameter(parameter.detach().chunk(size)[rank].clone())
        setattr(owner, name.rpartition(".")[2], part)
    return module


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_a_rank_holds_whole_groups(kv_heads):
    fields = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "compose_groups": 4, "compose_static": True}
    module, exact = make(**fields)
    x = states(2, 5)
    reference, truth = module(x)[0], exact(x.double())[0]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for rank in range(2):
        part, _ = make(**fields)
        part.load_state_dict(state)
        shard(part, rank, 2)
        heads = slice(4 * rank, 4 * rank + 4)
        with torch.no_grad():
            result, statics = generate_weights(x, part)
            rows = [poisoned_rows(2, kv_heads // 2, 5, part, stage, x.dtype) for stage in ("pre", "post")]
            generate_packed(x, part, *rows)
        assert statics["pre"].shape == (2, 2, 2)
        local = [
            {name: SideWeights(side.packed[:, heads]) for name, side in sides.items()} for sides in (reference, truth)
        ]
        assert_sides_within(result, *local)
        for stage, packed in zip(("pre", "post"), rows, strict=True):
            expected = part.pack(torch.zeros_like(packed[..., :HEAD_DIM]), result[stage, "key"], stage)
            assert torch.equal(packed[..., HEAD_DIM:], expected[..., HEAD_DIM:])


@pytest.mark.parametrize("switches", [{}, {"compose_projection": False}])
def test_a_cut_through_a_group_is_refused(switches):
    module = shard(make(num_attention_heads=4, **switches)[0], 0, 2)
    with pytest.raises(ValueError, match="must not cut through a group"):
        generate_weights(states(1, 3), module)


def test_refusals():
    module, exact = make()
    with pytest.raises(ValueError, match="float64"):
        generate_weights(states(1, 3, torch.float64), exact)
    rows = [poisoned_rows(1, 4, 3, module, stage, torch.float32) for stage in ("pre", "post")]
    with pytest.raises(RuntimeError, match="no gradients"):
        generate_packed(states(1, 3), module, *rows)
    with torch.no_grad():
        with pytest.raises(ValueError, match="stage 'pre'"):
            generate_packed(states(1, 3), module, rows[0][:, :2], rows[1])
        with pytest.raises(ValueError, match="stage 'post'"):
            generate_packed(states(1, 3), module, rows[0], rows[1][..., ::2])
        module.act_fn = nn.SiLU()
        with pytest.raises(ValueError, match=r"SiLU.*call the DCFormerCompose itself instead"):
            generate_weights(states(1, 3), module)


def test_blocks_cover_what_they_must():
    for heads, rank, batch, length in itertools.product((2, 6, 24, 52, 128), (0, 1, 2, 4), (1, 16), (1, 17, 4096)):
        tile = generator.generator_tile(heads, rank, True, 7, batch, length, 4)
        assert tile["B_I"] >= 2 * rank and tile["B_M"] >= heads and tile["B_P"] >= 8
        assert tile["B_I"] * tile["B_M"] >= 16 and tile["B_N"] >= 16  # the least that tl.dot takes
        assert all(math.log2(size).is_integer() for size in tile.values())
