"""Maps that a forward pass keeps for the backward pass (`save_maps`) change nothing but the time."""

from types import SimpleNamespace

import pytest
import torch
from attention_cases import CASES, Case, fused, padded_mask, run, stage_weights, zeros
from hypothesis import given
from hypothesis import strategies as st
from kernel_device import DEVICE, HERE

from dcformer.kernels import composed_attention, overflow, passes, schemas
from dcformer.kernels import problem as problems
from dcformer.kernels.layout import Layout, Stage
from dcformer.kernels.ops import triton_attention
from dcformer.kernels.overflow import Beyond
from dcformer.kernels.passes import Passes
from dcformer.kernels.problem import Visibility
from dcformer.kernels.triton.heads import WEIGHT_SHIFT

pytestmark = pytest.mark.usefixtures("poison", "accesses")


def test_weights_are_kept_as_exactly_as_maps_are(unmarked, monkeypatch):
    """Without a key side of "post", which would be in that dtype, they are not rounded to that of the states."""
    kept, real = [], Passes._compose

    def spy(self, name, chunk, **arguments):
        real(self, name, chunk, **arguments)
        if name == "weights":
            kept.append(arguments["p_weights"].float())

    monkeypatch.setattr(Passes, "_compose", spy)
    run(Case(heads=2, sides=("query",), dtype=torch.bfloat16), torch.bfloat16, fused(Case(sides=("query",))))
    (weights,) = kept
    weights = weights / 2**WEIGHT_SHIFT.value
    weights = weights[(weights > 1e-3) & (weights < 0.999)]
    assert (weights == weights.bfloat16().float()).float().mean() < 0.3 and weights.numel() > 100


KEEPING = {
    "everything": CASES["everything"],
    "grouped-query": CASES["grouped-query"],
    "two blocks of heads": Case(heads=34, length=10),
    "chunks of a window": Case(heads=2, length=260, window=20, sides=("query",), rank=1, start=(7,), end=(250,)),
    "later queries": Case(heads=2, length=130, keys=170, window=9, sides=("key",), rank=1),
    "bfloat16": Case(heads=2, length=40, dtype=torch.bfloat16),
}


def chunks_of_kept_maps(problem, maps, real=Passes.chunks):
    keeps, problem.keeps = problem.keeps, True
    found = real(problem, maps)
    problem.keeps = keeps
    return found


@pytest.mark.parametrize("name", KEEPING)
def test_maps_that_are_kept_change_nothing(name, unmarked, monkeypatch):
    case, launched, real = KEEPING[name], [], Passes._compose

    def spy(self, name, *args, **kwargs):
        launched.append(name)
        real(self, name, *args, **kwargs)

    monkeypatch.setattr(Passes, "_compose", spy)
    monkeypatch.setattr(Passes, "chunks", chunks_of_kept_maps)  # sums have the same order
    expected = run(case, case.dtype, fused(case))
    chunks = -(-case.length // 128) if case.window else 1
    assert launched == ["lse", "compose"] * chunks + ["weights", "back_1", "back_0"] * chunks
    launched.clear()
    found = run(case, case.dtype, lambda *tensors: composed_attention(*tensors, **case.options(), save_maps=True))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert launched == ["lse", "weights"] * chunks + ["back_1", "back_0"] * chunks


def test_maps_of_several_parts_of_the_batch_are_kept(monkeypatch):
    case = Case(batch=3, length=20)
    monkeypatch.setattr(Passes, "chunks", chunks_of_kept_maps)
    monkeypatch.setattr(problems, "FIRST_CHUNK", 16)
    parts, real = [], Passes._rows
    monkeypatch.setattr(Passes, "_rows", lambda *a, **k: (parts.append(part) or part for part in real(*a, **k)))

    def kept(*tensors):
        return composed_attention(*tensors, **case.options() | {"chunk_bytes": 1, "save_maps": True})

    def anew(*tensors):
        return composed_attention(*tensors, **case.options() | {"chunk_bytes": 1})

    found = run(case, torch.float32, kept)
    assert [rows for rows, _ in parts] == [slice(i, i + 1) for i in range(3)] * 2
    expected = run(case, torch.float32, anew)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("found", list(Beyond), ids=lambda found: found.name)
def test_kept_maps_are_made_anew_when_others_are_needed(found, unmarked, monkeypatch):
    """A mark between the passes: the backward pass has the results that it has without kept maps."""
    case, results = Case(heads=2, length=20, dtype=torch.bfloat16), []
    for save_maps in (False, True):
        monkeypatch.setattr(overflow, "_found", {})
        tensors = {name: t.to(DEVICE, case.dtype).requires_grad_() for name, t in case.tensors().items()}
        grad = tensors.pop("grad").detach()
        weights = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
        out = composed_attention(tensors["query"], tensors["key"], tensors["value"], *weights, save_maps=save_maps)
        monkeypatch.setattr(overflow, "_found", {HERE: found})
        out.backward(grad)
        results.append({name: t.grad for name, t in tensors.items()})
    assert all(torch.equal(results[1][name], tensor) for name, tensor in results[0].items())
    again = composed_attention(tensors["query"], tensors["key"], tensors["value"], save_maps=True)
    assert torch.equal(again, composed_attention(tensors["query"], tensors["key"], tensors["value"]))


def test_maps_are_kept_for_gradients_alone(monkeypatch):
    made = []
    monkeypatch.setattr(passes, "new_kept", lambda *args: made.append(schemas.new_kept(*args)) or made[-1])
    query = zeros(1, 2, 20, 16).requires_grad_()
    with torch.no_grad():
        composed_attention(query, query, query, save_maps=True)
    composed_attention(query.detach(), query.detach(), query.detach(), save_maps=True)
    composed_attention(query, query, query)
    assert not made
    composed_attention(query, query, query, save_maps=True)
    assert [kept.shape for kept in made] == [(128, 3 * 2 * 32)]


@pytest.mark.parametrize(("factor", "found"), [(30, Beyond.PRECISION), (400, Beyond.PRECISION | Beyond.SCORES)])
def test_a_mark_that_a_pass_with_kept_maps_leaves(factor, found, unmarked):
    """The pass runs again, without: as where no maps are kept. So does a second backward pass."""
    case, results = Case(heads=2, length=20, dtype=torch.bfloat16), []
    for save_maps in (False, True):
        overflow._found.clear()
        overflow._watches.clear()
        tensors = {name: t.to(DEVICE, case.dtype).requires_grad_() for name, t in case.tensors().items()}
        grad, weights = tensors.pop("grad").detach(), [stage_weights(tensors, stage, 1) for stage in ("pre", "post")]
        states = [tensors[name] for name in ("query", "key", "value")]
        composed_attention(states[0] * 0.1, *states[1:], *weights, save_maps=save_maps)  # leaves none
        assert not overflow.beyond(HERE)
        out = composed_attention(states[0] * factor, *states[1:], *weights, save_maps=save_maps)
        assert overflow.beyond(HERE) == found
        for _ in range(2):
            results.append([out, *torch.autograd.grad(out, list(tensors.values()), grad, retain_graph=True)])
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_kept_maps_serve_several_backward_passes_and_gradients_of_log_sum_exps(unmarked):
    case, results = Case(heads=2, length=20), []
    for save_maps in (False, True):
        tensors = {n: t.to(DEVICE).requires_grad_() for n, t in case.tensors().items() if n != "grad"}
        weights = [stage_weights(tensors, stage, 1) for stage in ("pre", "post")]
        states = [tensors[name] for name in ("query", "key", "value")]
        loss = [x.sum() for x in composed_attention(*states, *weights, save_maps=save_maps, return_lse=True)]
        loss = loss[0] * 2 + loss[1]
        for _ in range(2):
            results.append(torch.autograd.grad(loss, list(tensors.values()), retain_graph=True))
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@given(
    length=st.integers(1, 3000), more=st.integers(-3000, 3000), window=st.none() | st.integers(1, 900),
    ahead=st.integers(-500, 500), bound=st.integers(1, 1 << 24),
)  # fmt: skip
def test_kept_maps_have_room(length, more, window, ahead, bound):
    """Whatever chunks see, and each its own; with windows no more than 9 times what is seen, and what rounds up."""
    keys = max(1, length + more)
    low = -schemas.UNBOUNDED if window is None else ahead - window + 1
    query, key = (torch.empty(2, 3, n, 1, dtype=torch.bfloat16, device="meta") for n in (length, keys))
    bounds = torch.empty(1, length, dtype=torch.int32, device="meta")
    seen = Visibility(bounds, bounds, low, ahead)
    this = Passes(query, key, key, (Stage(), Stage()), seen, Layout(0, 0), 1.0, bound, keeps=True)
    kept, chunks = schemas.new_kept(query, key, low, ahead), this.chunks(maps=1)
    assert chunks == this.chunks(maps=3) and sum(chunk.n_t for chunk in chunks) == length
    maps, unit = this.kept_maps(kept, chunks), this.unit
    assert [[x.shape for x in of] for of in maps] == [[(2, c.n_s, c.n_p // unit, 3, unit)] * 3 for c in chunks]
    ends = [0, *(of[0].storage_offset() + sum(x.numel() for x in of) for of in maps)]
    assert all(of[0].storage_offset() >= end for of, end in zip(maps, ends, strict=False)) and ends[-1] <= kept.numel()
    of_global = 3 * 2 * 3 * -(-length // 128) * 128 * -(-keys // 16) * 16
    assert kept.numel() <= of_global
    if window is not None:
        assert kept.numel() <= 3 * 2 * 3 * (length + 127) * (9 * window + 128 + 96)


def test_maps_to_be_kept_are_a_switch_with_a_mask_too():
    query, module = torch.randn(1, 2, 20, 16, device=DEVICE), torch.nn.Module()
    module.config = SimpleNamespace(save_maps="no")
    for mask in (None, padded_mask(), torch.ones(1, 1, 20, 20, dtype=torch.bool, device=DEVICE)):
        with pytest.raises(ValueError, match="save_maps='no': expected True or False"):
            triton_attention(module, query, query, query, mask, 0.25)


def test_one_graph_keeps_maps_of_all_lengths():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled, counts = torch.compile(composed_attention, fullgraph=True, backend=backend, dynamic=True), []
    for length in (20, 21, 40, 130):
        query = zeros(1, 1, length, 16).requires_grad_()
        found, expected = (
            torch.autograd.grad(f(query, query, query, sliding_window=5, save_maps=True).sum(), query)[0]
            for f in (compiled, composed_attention)
        )
        assert torch.equal(found, expected)
        counts.append(len(graphs))
    assert len(set(counts[1:])) == 1  # the first length of all may have one of its own
