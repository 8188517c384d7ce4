"""What float16 cannot hold is noticed, and nothing else is: marks that calls of `composed_attention` leave."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from attention_cases import Case, eager, fused, gradients_of, outputs_beside_eager, stage_weights, uncomposed
from helpers import hear
from kernel_device import DEVICE, HERE, INTERPRETED, SMALL_TILES

from dcformer import ComposeWeights, SideWeights
from dcformer.kernels import composed_attention, launch, overflow, passes, schemas
from dcformer.kernels.overflow import Beyond

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(
    ("size", "marks"), [(300, Beyond.PRECISION), (3000, Beyond.PRECISION | Beyond.SCORES)], ids=["300", "3000"]
)
@pytest.mark.parametrize("kind", ["static", "query", "key"])
def test_large_scores_that_composition_takes_away_are_noticed(kind, size, marks, unmarked):
    """All heads share them; "pre" subtracts the mean of the heads. Float16 would leave what it rounded by."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 32, 64, device=DEVICE) for _ in range(3))
    query[..., 0] = key[..., 0] = (size * 8) ** 0.5
    query, key, value = (t.bfloat16() for t in (query, key, value))
    pre = ComposeWeights(static=-torch.ones(1, 4, 4, device=DEVICE) / 4)
    if kind != "static":
        pair = torch.zeros(1, 4, 2, 32, device=DEVICE)
        pair[:, :, 0], pair[:, :, 1] = 0.25, -1
        pre = ComposeWeights(**{kind: SideWeights(pair)})
    case = Case(heads=4, length=32, dim=64)
    wide = ComposeWeights(*(None if s is None else SideWeights(s.packed.double()) for s in (pre.query, pre.key)))
    wide.static = None if pre.static is None else pre.static.double()
    exact = eager(case)(query.double(), key.double(), value.double(), wide, None)
    found, lows = composed_attention(query, key, value, pre), eager(case)(query, key, value, pre, None)
    assert overflow.beyond(query.device) == marks
    errors = [(out.double() - exact).norm() for out in (found, lows)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        (slice(0, 3), {"key_start": torch.tensor([3])}),
        (slice(37, 40), {"key_end": torch.tensor([37])}),
        (slice(38, 40), {"causal_offset": -2}),
    ],
    ids=["left padding", "right padding", "later keys"],
)
def test_large_keys_that_nobody_sees_leave_no_mark(hidden, options, unmarked):
    """From a mark on maps of the device are wider."""
    case = Case(length=40, heads=2)
    tensors = {name: tensor.to(HERE) for name, tensor in case.tensors().items()}
    tensors["key"][:, :, hidden] *= 3000
    query, key, value = (tensors[name].bfloat16() for name in ("query", "key", "value"))
    pre, post = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
    options = {name: value.to(HERE) if torch.is_tensor(value) else value for name, value in options.items()}
    composed_attention(query, key, value, pre, post, **options)
    assert not overflow.beyond(HERE)
    composed_attention(query, key, value, pre, post)
    assert overflow.beyond(HERE) == Beyond.PRECISION | Beyond.SCORES


def test_scores_beyond_float16_are_noticed_once(unmarked, monkeypatch, caplog):
    """That pass and those after it keep all maps in float32, forward and backward."""
    hear(monkeypatch, overflow.logger)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    composed_attention(query, key, value)
    assert not overflow.beyond(query.device) and not caplog.records
    query, key = query * 300, key * 300
    exact = attention_of(query, key, value)
    weight = torch.randn(value.shape, device=DEVICE)
    found = []
    for _ in range(2):
        inputs = [t.clone().requires_grad_() for t in (query, key, value)]
        out = composed_attention(*inputs)
        (out.float() * weight).sum().backward()
        # so far apart, the largest score takes it all, unless some were cut off to the same number
        assert (out.detach().double() - exact).abs().max() < 0.02
        found.append([out.detach(), *(t.grad for t in inputs)])
        assert overflow.beyond(query.device) == Beyond.SCORES
    assert all(torch.equal(first, second) and first.isfinite().all() for first, second in zip(*found, strict=True))
    assert len([record for record in caplog.records if "keep all maps in float32" in record.message]) == 1


def test_a_mark_that_another_thread_has_seen(unmarked, monkeypatch):
    """It looks between the kernels of this one and its look: the pass is run again all the same."""
    real = passes.look

    def look(device):
        with ThreadPoolExecutor(max_workers=1) as other:
            other.submit(real, device).result()
        return real(device)

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    query, key = query * 300, key * 300
    monkeypatch.setattr(passes, "look", look)
    found = composed_attention(query, key, value)
    assert overflow.beyond(HERE) == Beyond.SCORES
    assert (found.double() - attention_of(query, key, value)).abs().max() < 0.02


def test_scores_of_a_later_call_on_a_gpu_are_not_waited_for(unmarked, monkeypatch):
    """The mark is copied every so many calls, and read when the copy is there; the call that finds it is right."""
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(overflow, "FIRST", 8)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    for _ in range(overflow.FIRST):
        composed_attention(query, key, value)
    query, key = query * 300, key * 300
    for _ in range(3 * overflow._EVERY):
        found = composed_attention(query, key, value)
        if overflow.beyond(query.device):
            break
        torch.cuda.synchronize()
    assert overflow.beyond(query.device) == Beyond.SCORES
    assert (found.double() - attention_of(query, key, value)).abs().max() < 0.02


def attention_of(query, key, value):
    """Plain causal attention in float64."""
    scores = query.double() @ key.double().transpose(2, 3) * query.shape[3] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.double()


def test_marks_are_memory_of_another_thread(unmarked, monkeypatch):
    """What a thread asks for while a graph of torch.compile is warmed up is that graph's."""
    real, threads = overflow._new_marks, []
    monkeypatch.setattr(
        overflow, "_new_marks", lambda *args, **kw: (threads.append(threading.get_ident()), real(*args, **kw))[1]
    )
    with torch.inference_mode():
        marks = [overflow.mark_of(HERE, what) for what in (Beyond.SCORES, Beyond.GRADIENTS, Beyond.SCORES)]
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert [int(mark) for mark in marks] == [0, 0, 0] and marks[0].data_ptr() == marks[2].data_ptr()
    assert all(mark.shape == (1,) and mark.data_ptr() % 16 == 0 for mark in marks)


@pytest.mark.parametrize("source", ["key side", "static"])
def test_matrices_beyond_float16_are_noticed(source, unmarked):
    """As scores are: M(s) before the softmax is kept in the scores' dtype."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    if source == "static":
        pre = ComposeWeights(static=7e4 * torch.eye(2, device=DEVICE)[None].bfloat16())
    else:
        pre = ComposeWeights(key=SideWeights((250 + 100 * torch.rand(1, 2, 5, 20, device=DEVICE)).bfloat16()))
    assert composed_attention(query, key, value, pre).isfinite().all()
    assert overflow.beyond(query.device) == Beyond.SCORES
    inputs = [t.clone().requires_grad_() for t in (query, key, value)]
    found = composed_attention(*inputs, pre)
    found.float().sum().backward()
    assert found.isfinite().all() and all(t.grad.isfinite().all() for t in inputs)


def test_matrices_are_cut_off_until_the_mark_is_seen(unmarked, monkeypatch):
    """As in calls on a GPU that do not wait for it: an infinite entry would leave nothing but NaN."""
    monkeypatch.setattr(passes, "look", lambda device: False)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    pre = ComposeWeights(static=7e4 * torch.eye(2, device=DEVICE)[None].bfloat16())
    assert composed_attention(query, key, value, pre).isfinite().all()
    assert overflow.mark_of(query.device, Beyond.SCORES) and not overflow.beyond(query.device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrices_after_the_softmax_beyond_float16_are_noticed(dtype, unmarked):
    """One pair of head and key has 300 · 300; W fits the dtype where values of keys are small or weights are."""
    case = Case(heads=4, length=20, dtype=dtype, stages=("post",), sides=("key",), rank=1, gate=False)
    tensors = case.tensors()
    for part in ("down", "up"):
        tensors[f"post.key.{part}"][0, 0, 0] = 300
    tensors["value"] *= 2**-10

    def attend(dtype, attend):
        query, key, value = (tensors[name].to(DEVICE, dtype) for name in ("query", "key", "value"))
        of_dtype = {name: tensor.to(DEVICE, dtype) for name, tensor in tensors.items()}
        return attend(query, key, value, None, stage_weights(of_dtype, "post", 1)).double()

    exact, found = attend(torch.float64, eager(case)), attend(dtype, fused(case))
    assert overflow.beyond(HERE) == Beyond.SCORES
    fits = exact.abs().amax(-1) < 30  # W below 65504
    assert 0 < fits.sum() < fits.numel()
    # W is rounded to the dtype, and the output
    assert ((found - exact).abs()[fits] <= 2 * torch.finfo(dtype).eps * exact.abs().amax()).all()
    assert (found - exact)[fits].norm() <= torch.finfo(dtype).eps * exact[fits].norm()


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("part", ["query.gate", "query.up", "key.gate"])
def test_composed_weights_beyond_float16_are_noticed(part, is_awaited, unmarked, monkeypatch):
    """Of bfloat16 inputs, for which they may be as large: the pass is made again with those in bfloat16, too. Without
    that, as later on a GPU, they are cut off, or so are the weights of the query side that make them."""
    case = Case(length=40, heads=2, dtype=torch.bfloat16)
    tensors = case.tensors()
    tensors[f"post.{part}"] = torch.full_like(tensors[f"post.{part}"], 5e4 if part == "key.gate" else 1e5)
    if part == "query.up":  # of two heads it takes away what it adds
        tensors["post.query.down"][:, 1] = -tensors["post.query.down"][:, 0]
    if not is_awaited:
        monkeypatch.setattr(passes, "look", lambda device: False)
    results = []
    for dtype, attend in ((torch.float64, eager(case)), (torch.bfloat16, eager(case)), (torch.bfloat16, fused(case))):
        given = {name: t.to(DEVICE, dtype) for name, t in tensors.items()}
        stages = (stage_weights(given, stage, case.groups) for stage in ("pre", "post"))
        results.append(attend(given["query"], given["key"], given["value"], *stages).double())
    exact, low, found = results
    assert found.isfinite().all()
    if is_awaited:
        assert overflow.beyond(HERE) == Beyond.GRADIENTS
        assert (found - exact).norm() <= 1.1 * (low - exact).norm()
    else:
        assert torch.equal(overflow.mark_of(HERE, Beyond.GRADIENTS).cpu(), torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize("part", ["up", "gate"])
def test_composition_weights_beyond_float16_are_noticed_where_weights_are_small(part, unmarked):
    """What they compose is within float16, they are not."""
    case = Case(length=1, keys=1200, heads=2, dtype=torch.bfloat16, stages=("post",), sides=("query",))
    tensors = case.tensors()
    tensors["query"] *= 0.01
    tensors[f"post.query.{part}"] = torch.full_like(tensors[f"post.query.{part}"], 1e6)
    ours, eagers = outputs_beside_eager(case, tensors)
    assert overflow.beyond(HERE) == Beyond.GRADIENTS
    assert ours <= 1.1 * eagers


def test_parts_of_composed_weights_that_are_infinite_leave_no_nan(unmarked, monkeypatch):
    """In float16, with opposite signs, before the mark is seen: a device adds up in an order of its own."""
    monkeypatch.setattr(passes, "look", lambda device: False)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 32, 20, 16, device=DEVICE).bfloat16() for _ in range(3))
    signs = 1 - 2 * (torch.arange(32, device=DEVICE) % 2)
    post = ComposeWeights(static=(3e4 * signs[None, :, None] * torch.ones(1, 32, 32, device=DEVICE)).bfloat16())
    assert composed_attention(query, key, value, post=post).isfinite().all()


def test_large_composition_weights_of_queries_that_see_nothing_leave_no_mark(unmarked):
    case = Case(length=20, heads=2, dtype=torch.bfloat16, stages=("post",), start=(5,))
    tensors = {name: t.to(DEVICE, torch.bfloat16) for name, t in case.tensors().items()}
    for part in ("down", "up", "gate"):
        tensors[f"post.query.{part}"][:, :, :5] = 1e6
    weights = stage_weights(tensors, "post", 1)
    out = composed_attention(tensors["query"], tensors["key"], tensors["value"], post=weights, **case.options())
    assert out[:, :, 5:].any() and out.isfinite().all() and not overflow.beyond(HERE)


def test_gradients_that_differ_much_between_tokens_are_noticed(unmarked):
    """In float16, values would lose the gradients of tokens that only those see whose gradients are small, of the 64 of
    a head that share a power of two."""
    torch.manual_seed(0)
    states = torch.randn(1, 4, 256, 16, device=DEVICE).bfloat16()
    problem = uncomposed(states, states[:, :2], states[:, :2])
    norms = schemas.new_norms(states, states[:, :2])
    problem._values(norms)
    for tokens, factor, expected in (
        (slice(130, 140), 2.0**-20, Beyond(0)), (slice(130, 140), 0.0, Beyond(0)),
        (slice(128, 192), 2.0**-90, Beyond(0)), (slice(130, 140), 2.0**-28, Beyond.GRADIENTS),
    ):  # fmt: skip
        grad = states.clone()
        grad[:, 2:, tokens] *= factor
        problem._sources(grad, norms)
        assert overflow.look(HERE) == bool(expected) and overflow.beyond(HERE) == expected, factor


@pytest.mark.parametrize("name", ["values", "keys", "queries"])
def test_tokens_much_smaller_than_others_are_noticed(name, unmarked):
    """In float16 outputs and gradients that consist of these alone would lose bits."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 70, 16, device=DEVICE).bfloat16() for _ in range(4))
    small = {"values": value, "keys": key, "queries": query}[name]
    for factor, expected in ((2.0**-20, Beyond(0)), (2.0**-12, Beyond.GRADIENTS)):  # the latter of 2^-20
        small[:, :, 5] *= factor
        problem = uncomposed(query, key, value)
        norms = schemas.new_norms(query, key)
        problem._values(norms)
        problem._sources(grad, norms)
        assert overflow.look(HERE) == bool(expected) and overflow.beyond(HERE) == expected, factor


@pytest.mark.parametrize("is_awaited", [True, False])
def test_infinite_composition_weights_are_no_finite_output(is_awaited, unmarked, monkeypatch):
    case = Case(length=40, heads=2, dtype=torch.bfloat16)
    tensors = {name: t.to(DEVICE, case.dtype) for name, t in case.tensors().items()}
    tensors["post.query.gate"][:, :, 20] = math.inf
    if not is_awaited:
        monkeypatch.setattr(passes, "look", lambda device: False)
    stages = (stage_weights(tensors, stage, case.groups) for stage in ("pre", "post"))
    out = composed_attention(tensors["query"], tensors["key"], tensors["value"], *stages)
    others = torch.arange(40) != 20
    assert not out[:, :, 20].isfinite().any() and out[:, :, others].isfinite().all()
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["key", "pre.key.gate"])
def test_a_key_that_is_not_a_number(name, dtype, unmarked):
    """Queries that see it have no log-sum-exp where `eager` has none, and so no gradients; others have theirs."""
    length, this = (70, 20) if SMALL_TILES else (160, 20)  # several parts of keys
    case = Case(length=length, heads=4, dtype=dtype)

    def attend(dtype, attend, is_broken=True):
        tensors = {name: tensor.to(DEVICE, dtype, copy=True) for name, tensor in case.tensors().items()}
        if is_broken:
            tensors[name][0, 1, this] = math.nan
        grad = tensors.pop("grad")
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        weights = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
        result = attend(tensors["query"], tensors["key"], tensors["value"], *weights)
        out, lse = result if isinstance(result, tuple) else (result, None)
        out.backward(grad)
        return out.detach(), lse, tensors

    def fused(*tensors):
        return composed_attention(*tensors, return_lse=True)

    (exact, _, of_eager), (found, lse, of_ours) = attend(torch.float64, eager(case)), attend(dtype, fused)
    whole, whole_lse, _ = attend(dtype, fused, is_broken=False)
    assert torch.equal(found.isnan(), exact.isnan()) and found.isnan().any() and not found.isinf().any()
    assert torch.equal(found[:, :, :this], whole[:, :, :this]) and torch.equal(lse[:, :, :this], whole_lse[:, :, :this])
    assert lse[:, 1, this:].isnan().all() and not lse.isinf().any()
    for grad in ("key", "value"):
        ours, eagers = of_ours[grad].grad.isnan(), of_eager[grad].grad.isnan()
        assert torch.equal(ours[:, :, : this + 1], eagers[:, :, : this + 1]) and ours.any()
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("name", ["query", "key"])
def test_what_is_not_a_number_leaves_no_mark(name, unmarked, monkeypatch):
    """Where it is all that a query sees, too. Compiled, a maximum passes over it; the interpreter's does not."""
    if INTERPRETED:
        builder = "triton.runtime.interpreter.InterpreterBuilder.create_maxnumf"
        monkeypatch.setattr(builder, lambda self, a, b: self.binary_op(a, b, np.fmax))
    case = Case(length=70 if SMALL_TILES else 160, heads=2, dtype=torch.bfloat16)
    tensors = {name: tensor.to(DEVICE, case.dtype) for name, tensor in case.tensors().items()}
    tensors[name][0, 1, 0] = math.nan
    weights = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
    found, lse = composed_attention(*(tensors[n] for n in ("query", "key", "value")), *weights, return_lse=True)
    assert found[:, :, 0].isnan().all() and lse[:, 1, 0].isnan().all() and not overflow.beyond(HERE)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_values_that_are_not_finite_change_nothing_before_them(number, unmarked):
    """Queries of tiles that do not see such a key have the gradients that they have otherwise."""
    length, this, before = (40, 30, 16) if SMALL_TILES else (160, 150, 128)
    case, found = Case(length=length, heads=2, dtype=torch.bfloat16), []
    for value in (number, 0.0):
        values = case.tensors()["value"].clone()
        values[:, :, this] = value
        found.append(gradients_of(case, value=values)["query"][:, :, :before])
    assert torch.equal(*found) and found[0].any()
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_blocks_of_values_that_are_not_finite_leave_no_mark(number, unmarked):
    """They say nothing about how small values are."""
    query, key, value, grad = (torch.randn(1, 2, 72, 16, device=DEVICE).bfloat16() for _ in range(4))
    value[:, :, 64:] = number
    problem = uncomposed(query, key, value)
    problem.backward(grad, *problem.forward()[1:])
    assert not overflow.beyond(HERE)


# what is too large for float16 where some inputs of a small case are one number, or times a factor
LARGE = {
    # dW are what they can be at most, for all queries of a key that has all weight
    "gradients of matrices": {f"post_key_{part}": (0, 0) for part in ("down", "up", "gate")}
    | {"value": (1.0, 0), "grad": (1.0, 0)},
    "gradients of scores": {"query": (0, 0.001), "key": (0, 0.001), "pre_key_gate": (5e4, 0)},
    "composed gradients": {"post_key_gate": (3000.0, 0)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*LARGE, "queries with little"])
def test_gradients_beyond_float16_are_noticed(kind, dtype, unmarked, monkeypatch):
    """That pass is made again with these in bfloat16, or of float16 models in float32; without that, as later on a GPU,
    they are finite."""
    case = Case(length=40, heads=2, dtype=dtype, sides=("key",), end=(1,) if kind == "gradients of matrices" else None)
    factors, tensors, changed = torch.full((40,), 2.0**-8), case.tensors(), {}  # float16 holds the results
    for name, (number, factor) in LARGE.get(kind, {}).items():
        changed[name] = number + factor * tensors[name.replace("_", ".")]
    if kind == "queries with little":
        if dtype == torch.float16:
            pytest.skip("what such gradients are is rounded in float16 already")
        factors[5] *= 2.0**-40
    with monkeypatch.context() as patch:
        patch.setattr(passes, "look", lambda device: False)
        found = gradients_of(case, factors, **changed)
        assert all(grad.isfinite().all() for grad in found.values())
    assert not overflow.beyond(HERE)
    found = gradients_of(case, factors, **changed)
    assert overflow.beyond(HERE) == Beyond.GRADIENTS
    again = gradients_of(case, factors, **changed)
    assert all(torch.equal(found[name], again[name]) and found[name].isfinite().all() for name in found)


@pytest.mark.parametrize("found", [Beyond.PRECISION, Beyond.SCORES], ids=lambda found: found.name)
def test_scores_are_what_log_sum_exps_are_of_when_float32_begins_between_passes(found, unmarked, monkeypatch):
    """Scores of 256 are rounded in float16: with another log-sum-exp weights would be off by 6 %."""
    monkeypatch.setattr(launch, "LARGEST_EXACT", 1000.0)
    case = Case(length=20, heads=2, dtype=torch.bfloat16)
    tensors = case.tensors() | {name: torch.full((1, 2, 20, 16), 8.0) for name in ("query", "key")}
    inputs = [tensors[name].to(DEVICE, case.dtype).requires_grad_() for name in ("query", "key", "value")]
    out = composed_attention(*inputs)
    assert not overflow.beyond(HERE)
    overflow._found[HERE] = found
    out.backward(tensors["grad"].to(DEVICE, case.dtype))
    # all keys that a query sees have the same weight
    weights = torch.ones(20, 20, device=DEVICE, dtype=torch.float64).tril()
    exact = (weights / weights.sum(1, keepdim=True)).mT @ tensors["grad"].double().to(DEVICE)
    error = (inputs[2].grad.double() - exact).norm() / exact.norm()
    assert error <= 2 * torch.finfo(torch.bfloat16).eps
