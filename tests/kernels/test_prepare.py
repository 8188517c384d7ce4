"""The kernel between projections and attention of a decoding step, against the layer's own operations in float64."""

import copy

import pytest
import torch
from helpers import tiny_config
from kernel_device import DEVICE
from test_generator import SWITCHES as GENERATOR_SWITCHES
from test_generator import assert_sides_within, assert_within
from torch.nn.utils import parametrize

from dcformer.fusion_dcformer import FusedProjections
from dcformer.kernels.prepare import prepare
from dcformer.modeling_dcformer import DCFormerAttention, DCFormerRotaryEmbedding, apply_rotary

pytestmark = [
    pytest.mark.usefixtures("poison", "accesses"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
SWITCHES = [
    *GENERATOR_SWITCHES,
    PLAIN,
    {"compose_query": False, "compose_key": False, "compose_static": True},
    {"qk_norm": False},
    {"attention_bias": True},
    PARTIAL,
]
# heads, key/value heads, groups, rank, head dim, batch, tokens
SHAPES = [
    (4, 4, 1, 1, 8, 1, 1),
    (6, 2, 1, 2, 24, 2, 3),
    (12, 4, 2, 4, 64, 1, 5),
    (16, 16, 1, 2, 64, 2, 1),
    (20, 5, 5, 3, 80, 1, 2),
    (32, 32, 1, 2, 128, 1, 1),
    (32, 8, 4, 2, 96, 3, 16),
    (40, 8, 5, 2, 128, 1, 1),
    (40, 40, 1, 1, 8, 1, 16),
]


def make(shape, dtype, **switches):
    """An attention layer whose projections are fused, and the same in float64."""
    heads, kv_heads, groups, rank, dim, _, _ = shape
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "hidden_size": 32}
    config = tiny_config(**(fields | {"compose_groups": groups, "compose_rank": rank} | switches))
    attention = DCFormerAttention(config, 0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    attention = attention.to(DEVICE, dtype).eval()
    exact = copy.deepcopy(attention).double()
    attention.fused = FusedProjections(tuple(attention.projections().values()))
    return attention, exact, DCFormerRotaryEmbedding(config).to(DEVICE)


def by_torch(attention, hidden_states, projected, rotary):
    """What the layer does without the kernel."""
    shape = (*hidden_states.shape[:2], -1, attention.head_dim)
    query, key, value = (part.view(shape) for part in projected[:3])
    query, key = attention.q_norm(query).transpose(1, 2), attention.k_norm(key).transpose(1, 2)
    query, key = (apply_rotary(states, *rotary) for states in (query, key))
    return query, *attention.compose.packed(hidden_states, key, value.transpose(1, 2), None, projected[3:])


@torch.no_grad()
def check(dtype, shape, switches, start=0):
    attention, exact, rope = make(shape, dtype, **switches)
    batch, tokens = shape[-2:]
    x = torch.randn(batch, tokens, 32).to(DEVICE, dtype)
    positions = start + torch.arange(tokens, device=DEVICE)[None]
    if batch > 1:
        positions = positions + torch.arange(batch, device=DEVICE)[:, None]
    rotary = rope(x, positions)
    projected = attention.fused.split(attention.fused(x))
    found = prepare(attention, x, projected, rotary)
    low = by_torch(attention, x, projected, rotary)
    wide = [part if part is None else part.double() for part in projected]
    truth = by_torch(exact, x.double(), wide, [part.double() for part in rotary])
    assert found is not None
    for name, *tensors in zip(("query", "key", "value"), found, low, truth, strict=False):
        assert_within(*tensors, name=name)
        assert tensors[0].dtype == dtype
    assert torch.equal(found[2][..., : shape[4]], low[2][..., : shape[4]])  # values go through untouched
    queries = [{name: side for name, side in one[3][0].items() if name[1] == "query"} for one in (found, low, truth)]
    assert found[3][0].keys() <= low[3][0].keys()
    assert_sides_within(*queries)
    assert found[3][1].keys() == low[3][1].keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_switches(switches, dtype):
    check(dtype, (6, 2, 2, 2, 24, 2, 3), switches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(torch.float32, shape, {})


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_ranks_of_grouped_queries(rank):
    check(torch.bfloat16, (12, 3, 1, rank, 64, 1, 1), {}, start=1000)


@torch.no_grad()
def test_what_is_left_to_torch():
    shape = (4, 2, 1, 2, 8, 1, 17)
    attention, _, rope = make(shape, torch.float32)
    for tokens, dtype, expected in ((16, None, True), (17, None, False), (1, torch.bfloat16, False)):
        x = torch.randn(1, tokens, 32, device=DEVICE)
        rotary = [part.to(dtype or part.dtype) for part in rope(x, torch.arange(tokens, device=DEVICE)[None])]
        assert (prepare(attention, x, attention.fused.split(attention.fused(x)), rotary) is not None) == expected
    x = torch.randn(1, 1, 32, device=DEVICE)
    rotary = rope(x, torch.zeros(1, 1, dtype=torch.long, device=DEVICE))
    with torch.enable_grad():
        assert prepare(attention, x, attention.fused.split(attention.fused(x)), rotary) is None
    attention.q_norm.register_forward_hook(lambda *_: None)
    assert prepare(attention, x, attention.fused.split(attention.fused(x)), rotary) is None


def _hooked(name):
    return lambda attention: attention.get_submodule(name).register_forward_hook(lambda *_: None)


class _Longer(torch.nn.Module):
    def forward(self, parameter):
        return parameter * 1.5


def _parametrized(name):
    return lambda attention: parametrize.register_parametrization(attention.compose, name, _Longer())


def _norm_of_another_dtype(attention):
    attention.k_norm.double()


def _another_norm(attention):
    attention.q_norm = torch.nn.RMSNorm(attention.head_dim)


def _another_epsilon(attention):
    attention.q_norm.eps *= 2


def _another_activation(attention):
    attention.compose.act_fn = torch.nn.SiLU()


def _another_parameter(attention):
    attention.compose.qkw = type("Sharded", (torch.nn.Parameter,), {})(attention.compose.qkw)


def _parameter_of_another_dtype(attention):
    attention.compose.qkw.data = attention.compose.qkw.data.double()


def _parameter_elsewhere(attention):
    attention.compose.pre_static = torch.nn.Parameter(attention.compose.pre_static.to("meta"))


def _another_linear(attention):
    attention.compose.dw1_proj = torch.nn.Sequential(attention.compose.dw1_proj)


def _own_forward(attention):
    attention.compose.gate_proj.forward = lambda x: x


CHANGES = [
    *(_hooked(name) for name in ("q_norm", "k_norm")),
    *(_hooked(f"compose{name}") for name in ("", ".dw1_proj", ".gate_proj", ".act_fn")),
    *(_parametrized(name) for name in ("qkw", "pre_static", "post_static")),
    _norm_of_another_dtype, _another_norm, _another_epsilon, _another_activation, _another_parameter,
    _parameter_of_another_dtype, _parameter_elsewhere, _another_linear, _own_forward,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_between_two_steps_are_noticed(change):
    """Nothing is remembered of what the kernel may take the place of."""
    attention, _, rope = make((6, 2, 1, 2, 24, 1, 1), torch.float32, compose_static=True)
    x = torch.randn(1, 1, 32, device=DEVICE)
    projected, rotary = attention.fused.split(attention.fused(x)), rope(x, torch.arange(1, device=DEVICE)[None])
    assert prepare(attention, x, projected, rotary) is not None
    change(attention)
    assert prepare(attention, x, projected, rotary) is None


@torch.no_grad()
def test_a_parametrized_static_projection_alone_is_noticed():
    """Without generators nothing else is looked at; `decode_step` would read none."""
    switches = {"compose_query": False, "compose_key": False, "compose_static": True}
    attention, _, rope = make((6, 2, 1, 2, 24, 1, 1), torch.float32, **switches)
    x = torch.randn(1, 1, 32, device=DEVICE)
    projected, rotary = attention.fused.split(attention.fused(x)), rope(x, torch.arange(1, device=DEVICE)[None])
    assert prepare(attention, x, projected, rotary) is not None
    _parametrized("post_static")(attention)
    assert prepare(attention, x, projected, rotary) is None


@torch.no_grad()
def test_parts_that_are_not_of_one_product_are_refused():
    attention, _, rope = make((6, 2, 1, 2, 24, 2, 3), torch.float32)
    x = torch.randn(2, 3, 32, device=DEVICE)
    projected, rotary = attention.fused.split(attention.fused(x)), rope(x, torch.arange(3, device=DEVICE)[None])
    for i in range(5):
        parts = [part.contiguous() if i == j else part for j, part in enumerate(projected)]
        with pytest.raises(ValueError, match="expected those of one tensor"):
            prepare(attention, x, parts, rotary)
