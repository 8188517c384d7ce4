"""A decoding step as one operator, against the same kernels with a cache between them: bit for bit."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from kernel_device import DEVICE
from test_prepare import CHANGES, PLAIN, SHAPES, SWITCHES, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dcformer.cache_dcformer import GrowingLayer, Room, StaticFullLayer
from dcformer.kernels import step
from dcformer.kernels.ops import triton_attention
from dcformer.kernels.prepare import prepare

pytestmark = [
    pytest.mark.usefixtures("poison", "accesses"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
CAPACITY = 37
FILL = 7.0  # of rows that nobody has written


def room_of(attention, batch, filled, dtype, in_place, capacity=CAPACITY):
    """Memory of which some rows hold numbers; the others must be neither read nor written."""
    heads, dim = attention.config.num_key_value_heads, attention.head_dim
    memory = [
        torch.full((batch, heads, capacity, dim + attention.compose.channels[stage]), FILL, dtype=dtype, device=DEVICE)
        for stage in ("pre", "post")
    ]
    for rows in memory:
        rows[:, :, :filled] = 0.5 * torch.randn(rows[:, :, :filled].shape).to(DEVICE, dtype)
    place = torch.tensor(filled, device=DEVICE) if in_place else None
    return Room(None, *memory, place, 0 if in_place else filled)


def in_pieces(attention, x, product, rope, room, filled, mask=None, is_causal=None):
    """What `decode_step` does, with a copy of the cache in between; also the rows that it then holds."""
    parts = attention.fused.split(product)
    query, *new, (generated, statics) = prepare(attention, x, parts, rope)
    rows = [old[:, :, :filled].clone() for old in (room.keys, room.values)]
    rows = [torch.cat([old, tokens], dim=2) for old, tokens in zip(rows, new, strict=True)]
    states, sides = zip(
        *(
            attention.compose.unpack(packed, attention.head_dim, stage)
            for packed, stage in zip(rows, ("pre", "post"), strict=True)
        ),
        strict=True,
    )
    weights = [
        attention.compose.stage_weights(generated.get((stage, "query")), side, statics.get(stage))
        for stage, side in zip(("pre", "post"), sides, strict=True)
    ]
    out, _ = triton_attention(attention, query, *states, mask, attention.scaling, 0.0, *weights, is_causal=is_causal)
    return out, rows


@torch.no_grad()
def check(shape, switches, dtype, in_place, filled=20, mask=None):
    attention, _, embedding = make(shape, dtype, **switches)
    batch, tokens = shape[-2:]
    x = torch.randn(batch, tokens, 32).to(DEVICE, dtype)
    rope = embedding(x, filled + torch.arange(tokens, device=DEVICE)[None])
    product, room = attention.fused(x), room_of(attention, batch, filled, dtype, in_place)
    count = filled + tokens
    if mask is None and in_place:
        mask = torch.ones(1, 1, tokens, count, dtype=torch.bool, device=DEVICE).tril(filled)
    expected, rows = in_pieces(attention, x, product, rope, room, filled, mask)
    behind = [memory[:, :, count:].clone() for memory in (room.keys, room.values)]
    versions = room.keys._version, room.values._version
    if in_place:  # of which the host does not know how much is filled
        mask = torch.nn.functional.pad(mask, (0, CAPACITY - count))
    asked = []

    def lend(*arguments):
        asked.append(arguments)
        return room

    found, returned = step.decode_step(attention, x, product, rope, lend, mask)
    assert returned is room and found.dtype == dtype
    assert torch.equal(found, expected)
    for memory, held, after in zip((room.keys, room.values), rows, behind, strict=True):
        assert torch.equal(memory[:, :, :count], held) and torch.equal(memory[:, :, count:], after)
    assert versions < (room.keys._version, room.values._version)
    ((shapes, like),) = asked
    assert shapes == [(*rows.shape[:2], tokens, rows.shape[3]) for rows in (room.keys, room.values)]
    assert like.dtype == dtype and like.device == room.keys.device


@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("switches", [*SWITCHES, {"compose_pre": False, "compose_key": False}], ids=str)
def test_switches(switches, in_place):
    check((6, 2, 2, 2, 24, 2, 3), switches, torch.float32, in_place)


@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, in_place):
    check((6, 2, 1, 2, 24, 2, 1), {"compose_static": True}, dtype, in_place)


# The largest takes two minutes here; `test_prepare` and `test_decode` have its parts.
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.long] * (s[0] == 32 and s[-1] == 16), id=str(s)) for s in SHAPES]
)
def test_shapes(shape):
    check(shape, {}, torch.float32, in_place=shape[-1] % 2 == 1)


@pytest.mark.parametrize("filled", [0, 1, CAPACITY - 3])
@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
def test_the_first_and_the_last_rows(in_place, filled):
    check((6, 2, 1, 2, 24, 2, 3), {}, torch.float32, in_place, filled)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_additive", [False, True])
@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
def test_masks(in_place, is_additive, batch):
    """Padding on the left, and a query that sees nothing."""
    mask = torch.ones(batch, 1, 3, 23, dtype=torch.bool, device=DEVICE).tril(20)
    mask[-1, :, :, :5] = False
    mask[-1, :, 1] = False
    if is_additive and not in_place:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    check((6, 2, 1, 2, 24, 2, 3), {}, torch.float32, in_place, mask=mask)


@torch.no_grad()
def test_without_causality():
    attention, _, embedding = make((6, 2, 1, 2, 24, 2, 3), torch.float32)
    x = torch.randn(2, 3, 32, device=DEVICE)
    rope, product = embedding(x, torch.arange(3, device=DEVICE)[None]), attention.fused(x)
    room = room_of(attention, 2, 5, x.dtype, False)
    expected, _ = in_pieces(attention, x, product, rope, room, 5, is_causal=False)
    found, _ = step.decode_step(attention, x, product, rope, lambda *_: room, None, None, False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [35, 37, 10**6, 2**33])
@torch.no_grad()
def test_a_static_cache_that_is_full_gives_nan(place):
    """Nothing outside of it is touched; the host does not know."""
    attention, _, embedding = make((6, 2, 1, 2, 24, 2, 3), torch.float32)
    x = torch.randn(2, 3, 32, device=DEVICE)
    rope = embedding(x, torch.arange(3, device=DEVICE)[None])
    room = room_of(attention, 2, CAPACITY, x.dtype, True)._replace(place=torch.tensor(place, device=DEVICE))
    keys, values = room.keys[:, :, :34].clone(), room.values[:, :, :34].clone()
    mask = torch.ones(1, 1, 3, CAPACITY, dtype=torch.bool, device=DEVICE)
    found, _ = step.decode_step(attention, x, attention.fused(x), rope, lambda *_: room, mask)
    assert found.isnan().all()
    assert torch.equal(room.keys[:, :, :34], keys) and torch.equal(room.values[:, :, :34], values)


def _turned(name):
    """The parameter has its numbers, laid out column by column in the same memory."""

    def change(attention):
        parameter = getattr(attention.compose, name)
        numbers = parameter.detach().clone()
        parameter.data = parameter.data.view(-1).as_strided(parameter.shape, (1, parameter.shape[0]))
        parameter.copy_(numbers)

    change.__name__ = f"{name} turned"
    return change


class _Wrapped(torch.Tensor):
    """A tensor of which operators get what it holds."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrap = partial(tree_map_only, cls, lambda tensor: tensor.held)
        return function(*unwrap(args), **unwrap(kwargs or {}))


class _OwnParameter(torch.nn.Parameter):
    """One that may be more than its numbers, as those of quantization are."""


def _subclass(name):
    def change(attention):
        held = attention.compose if name == "pre_static" else getattr(attention, name)
        own = "pre_static" if name == "pre_static" else "weight"
        parameter = getattr(held, own)
        setattr(held, own, _OwnParameter(parameter.detach(), requires_grad=False))

    change.__name__ = f"{name} of a subclass"
    return change


OF_SUBCLASSES = [_subclass("q_norm"), _subclass("pre_static")]


@pytest.mark.parametrize("change", [*CHANGES, _turned("post_static"), _turned("qkw"), *OF_SUBCLASSES, None])
@torch.no_grad()
def test_what_is_left_to_the_layer(change):
    """What the kernel cannot know of, and a cache that lends nothing: no row is written, nobody is asked in vain."""
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32, compose_static=True)
    x = torch.randn(1, 1, 32, device=DEVICE)
    rope, product = embedding(x, torch.arange(1, device=DEVICE)[None]), attention.fused(x)
    room = room_of(attention, 1, 5, x.dtype, False)
    assert step.decode_step(attention, x, product, rope, lambda *_: room) is not None
    before, lend = room.keys.clone(), (lambda *_: None) if change is None else (lambda *_: room)
    if change is not None:
        change(attention)
    # of the projections the layer has asked before
    is_noticed = not attention.fused.is_intact(attention.projections().values())
    assert is_noticed or step.decode_step(attention, x + 1, product + 1, rope, lend) is None
    assert torch.equal(room.keys, before)


@torch.no_grad()
def test_no_tokens():
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32)
    for shape in ((0, 1, 32), (1, 0, 32)):
        x = torch.randn(shape, device=DEVICE)
        rope = embedding(x, torch.arange(shape[1], device=DEVICE)[None])
        assert step.decode_step(attention, x, attention.fused(x), rope, lambda *_: pytest.fail("asked")) is None


@pytest.mark.parametrize("mask", ["per head", "too short", "bias", "gradients", "elsewhere"])
@torch.no_grad()
def test_masks_that_are_refused(mask):
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 2), torch.float32)
    x = torch.randn(1, 2, 32, device=DEVICE)
    rope, room = embedding(x, torch.arange(2, device=DEVICE)[None]), room_of(attention, 1, 5, x.dtype, False)
    before = room.keys.clone()
    tensor, message = {
        "per head": (torch.ones(1, 6, 2, 7).bool(), "no mask per head"),
        "too short": (torch.ones(1, 1, 2, 6).bool(), r"shape \(1, 1, 2, 6\) does not fit .* 7 keys"),
        "bias": (torch.rand(1, 1, 2, 7), "add no biases"),
        "gradients": (torch.zeros(1, 1, 2, 7), "requires gradients"),
        "elsewhere": (torch.ones(1, 1, 2, 7, dtype=torch.bool, device="meta"), "on device 'meta'"),
    }[mask]
    tensor = tensor if tensor.is_meta else tensor.to(DEVICE)
    tensor.requires_grad_(mask == "gradients")
    with pytest.raises(ValueError, match=message):
        step.decode_step(attention, x, attention.fused(x), rope, lambda *_: room, tensor)
    assert torch.equal(room.keys, before)


@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("switches", [{"compose_static": True}, PLAIN], ids=str)
@torch.no_grad()
def test_operator_is_well_behaved(switches, in_place, monkeypatch):
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32, **switches)
    x = torch.randn(1, 1, 32, device=DEVICE)
    rope, room = embedding(x, torch.arange(1, device=DEVICE)[None]), room_of(attention, 1, 5, x.dtype, in_place)
    calls = []

    def record(*arguments):
        calls.append(arguments)
        return operator(*arguments)

    operator = step.decode_step_op
    monkeypatch.setattr(step, "decode_step_op", record)
    monkeypatch.setattr(step, "is_watched", lambda *tensors: True)
    mask = torch.ones(1, 1, 1, CAPACITY if in_place else 6, dtype=torch.bool, device=DEVICE)
    step.decode_step(attention, x, attention.fused(x), rope, lambda *_: room, mask)
    torch.library.opcheck(operator, calls[0])
    assert torch.Tag.pt2_compliant_tag in operator.tags


def test_a_backward_pass_through_the_operator_is_an_error(monkeypatch):
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32)
    x = torch.randn(1, 1, 32, device=DEVICE)
    calls, operator = [], step.decode_step_op
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(step, "decode_step_op", lambda *arguments: calls.append(arguments))
        patch.setattr(step, "is_watched", lambda *tensors: True)
        rope, room = embedding(x, torch.arange(1, device=DEVICE)[None]), room_of(attention, 1, 5, x.dtype, False)
        step.decode_step(attention, x, attention.fused(x), rope, lambda *_: room)
    product, *rest = calls[0]
    out = operator(product.requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="decode_step has no backward pass"):
        out.sum().backward()


@pytest.mark.parametrize("in_place", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_where_nobody_watches_the_operator_is_left_out(in_place, monkeypatch):
    """The results are its own, and torch knows that the cache has changed."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32, compose_static=True)
    x = torch.randn(1, 1, 32, device=DEVICE)
    rope, product = embedding(x, torch.arange(1, device=DEVICE)[None]), attention.fused(x)
    room, seen, found = room_of(attention, 1, 5, x.dtype, in_place), [], []
    for watch in (True, False):
        memory = [rows.clone() for rows in (room.keys, room.values)]
        place = None if room.place is None else room.place.clone()
        versions = [rows._version for rows in memory]
        lent = Room(None, *memory, place, room.row)
        with Watching() if watch else nullcontext(), monkeypatch.context() as patch:
            if not watch:
                patch.setattr(step, "decode_step_op", lambda *_: pytest.fail("called"))
            found.append((step.decode_step(attention, x, product, rope, lambda *_, lent=lent: lent)[0], *memory))
        assert all(rows._version > version for rows, version in zip(memory, versions, strict=True))
    assert step.decode_step_op in seen
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("what", ["cos", "keys", "mask", "product"])
@torch.no_grad()
def test_subclasses_of_tensors_see_the_operator(what, monkeypatch):
    attention, _, embedding = make((6, 2, 1, 2, 24, 1, 1), torch.float32)
    x = torch.randn(1, 1, 32, device=DEVICE)
    (cos, sin), product = embedding(x, torch.arange(1, device=DEVICE)[None]), attention.fused(x)
    mask, room = torch.ones(1, 1, 1, 6, dtype=torch.bool, device=DEVICE), room_of(attention, 1, 5, x.dtype, False)
    given = {"cos": cos, "keys": room.keys, "mask": mask, "product": product}
    calls, operator = [], step.decode_step_op
    monkeypatch.setattr(step, "decode_step_op", lambda *arguments: calls.append(arguments) or operator(*arguments))

    def run(cos, keys, mask, product):
        lent = room._replace(keys=keys)
        return step.decode_step(attention, x, product, (cos, sin), lambda *_: lent, mask)[0]

    expected = run(**given)
    assert not calls
    assert torch.equal(run(**given | {what: _Wrapped(given[what])}), expected) and len(calls) == 1


@torch.no_grad()
def test_layers_of_caches_lend_what_the_operator_fills():
    """Steps through the two kinds of layers, in turn with tokens that are added in the ordinary way."""
    attention, _, embedding = make((6, 2, 1, 2, 24, 2, 1), torch.float32)
    results = []
    for layer in (GrowingLayer(), StaticFullLayer(max_cache_len=CAPACITY)):
        generator, found, filled = torch.Generator().manual_seed(5), [], 0
        for tokens, add in ((4, True), (1, False), (2, False), (3, True), (1, False)):
            x = torch.randn(2, tokens, 32, generator=generator).to(DEVICE)
            rope, product = embedding(x, filled + torch.arange(tokens, device=DEVICE)[None]), attention.fused(x)
            if add:
                _, key, value, _ = prepare(attention, x, attention.fused.split(product), rope)
                layer.update(key, value)
            else:
                is_static = isinstance(layer, StaticFullLayer)
                if is_static:
                    room = Room(layer, layer.keys, layer.values, layer.cumulative_length, 0)
                    mask = torch.ones(1, 1, tokens, CAPACITY, dtype=torch.bool, device=DEVICE).tril(filled)
                else:
                    width = 24 + attention.compose.channels["pre"]
                    room, mask = layer.lend([(2, 2, tokens, width)] * 2, product), None
                out, room = step.decode_step(attention, x, product, rope, lambda *_, room=room: room, mask)
                room.count(tokens)
                found.append(out)
            filled += tokens
            assert int(layer.get_seq_length()) == filled
        results.append((found, layer.keys[:, :, :filled], layer.values[:, :, :filled]))
    (outs, *rows), (others, *other_rows) = results
    assert all(torch.equal(one, other) for one, other in zip(outs, others, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(rows, other_rows, strict=True))


@pytest.mark.parametrize("filled", [0, 3, 10, 11, 12, 29])
@pytest.mark.parametrize("switches", [{"compose_static": True}, PLAIN], ids=str)
@pytest.mark.parametrize("is_masked", [True, False])
@torch.no_grad()
def test_a_ring_is_read_as_it_lies(filled, switches, is_masked):
    """Bit for bit what the same rows give that are not a ring, with the mask in their order."""
    window = 11
    attention, _, embedding = make((6, 2, 1, 2, 24, 2, 1), torch.float32, **switches)
    x = torch.randn(2, 1, 32).to(DEVICE)
    rope, product = embedding(x, torch.full((1, 1), filled, device=DEVICE)), attention.fused(x)
    room = room_of(attention, 2, min(filled, window), x.dtype, True, window)
    oldest = max(filled + 1 - window, 0)  # of the tokens that are held after this one
    mask = torch.arange(window, device=DEVICE) <= filled - oldest
    if is_masked:
        mask = mask & (torch.rand(2, 1, 1, window, generator=torch.Generator().manual_seed(3)) < 0.7).to(DEVICE)
    mask = mask.expand(2, 1, 1, window)
    found = []
    for is_ring in (True, False):
        memory = [rows.clone() for rows in (room.keys, room.values)]
        place = torch.tensor(filled if is_ring else filled % window, device=DEVICE)
        lent = Room(None, *memory, place, 0, is_ring)
        of_rows = mask if is_ring else mask.roll(oldest, -1)
        found.append((step.decode_step(attention, x, product, rope, lambda *_, lent=lent: lent, of_rows)[0], *memory))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][1], room.keys) and torch.isfinite(found[0][0]).all()
