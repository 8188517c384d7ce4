"""Numbers of any size in 16 bits: errors of `composed_attention` beside those of eager, both against float64."""

import dataclasses
import math

import pytest
import torch
from attention_cases import (
    LOW,
    SHAPES,
    SWITCHES,
    VISIBILITY,
    Case,
    beside_eager,
    check,
    eager,
    fused,
    gradients_of,
    outputs_beside_eager,
    problem,
    run,
    stage_weights,
    uncomposed,
)
from kernel_device import DEVICE, HERE, INTERPRETED, SMALL_TILES

from dcformer import ComposeWeights, SideWeights
from dcformer.kernels import composed_attention, overflow, schemas
from dcformer.kernels import problem as problems
from dcformer.kernels.layout import Layout, Part
from dcformer.kernels.overflow import Beyond
from dcformer.kernels.problem import Visibility

pytestmark = pytest.mark.usefixtures("poison")


# the largest ratios of errors in bfloat16 and in float16, rounded up, with the tiles of the interpreter and of a GPU
BESIDE = {
    "8 heads, 48 tokens": (Case(length=48, heads=8), 0.89, 3),
    "one head of keys": (Case(length=48, heads=8, kv_heads=1), 0.85, 3),
    "2 heads, 200 tokens": (Case(length=200, heads=2), 0.92, 3.6),
    "all keys seen, head dim 32": (Case(length=64, heads=8, dim=32, causal=False), 0.83, 3.8),
    "composition weights of 1": (Case(length=64, heads=8, dim=32, strength=1.0), 0.85, 2.3),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_in_16_bits_beside_those_of_eager(name, dtype, unmarked):
    """In bfloat16 they are less than eager's, which rounds W and gradients of scores to it where the kernels have
    float16; results are rounded to it by both. In float16 they are more, as eager has all maps in float32. Prints rows
    of docs/kernels.md.
    """
    case, *most = BESIDE[name]
    errors = beside_eager(dataclasses.replace(case, dtype=dtype))
    for tensor, (ours, eagers) in errors.items():
        print(f"| {tensor} | {ours:.2e} | {eagers:.2e} | {ours / eagers:.2f} |")
    ratios = {tensor: ours / eagers for tensor, (ours, eagers) in errors.items()}
    print(f"| {name} | {ratios['out']:.2f} | {max(ratios.values()):.2f} |")
    assert max(ratios.values()) <= most[dtype == torch.float16]


@pytest.mark.parametrize(
    ("found", "most"),
    [
        (Beyond.GRADIENTS, 2.0), (Beyond.PRECISION, 0.9), (Beyond.PRECISION | Beyond.GRADIENTS, 1.01),
        (Beyond.SCORES, 1.01),
    ],
    ids=["gradients", "precision", "both", "range"],
)  # fmt: skip
def test_errors_in_bfloat16_after_a_mark(found, most, unmarked):
    """Of ordinary tensors that come after those that left it, in the same process. Prints rows of docs/kernels.md."""
    overflow._found[HERE] = found
    errors = beside_eager(Case(length=48, heads=8, dtype=torch.bfloat16))
    ratios = {tensor: ours / eagers for tensor, (ours, eagers) in errors.items()}
    print(f"| {' | '.join(f'{ratios[name]:.2f}' for name in ('out', 'query', 'key'))} | {max(ratios.values()):.2f} |")
    assert max(ratios.values()) <= most


@pytest.mark.long
@pytest.mark.parametrize("cases", [SWITCHES, SHAPES, VISIBILITY], ids=["switches", "shapes", "visibility"])
def test_errors_in_bfloat16_of_all_cases_beside_those_of_eager(cases, unmarked):
    """Some tensors of few numbers are off by more than eager's, as roundings fall: few of them, by little. Prints what
    docs/kernels.md says of them."""
    ratios = []
    for name, case in cases.items():
        errors = beside_eager(dataclasses.replace(case, dtype=torch.bfloat16))
        ratios += [(ours / eagers, f"{name}: {tensor}") for tensor, (ours, eagers) in errors.items() if eagers > 0]
    above = sorted((ratio, of) for ratio, of in ratios if ratio > 1)
    for ratio, of in reversed(above):
        print(f"| {of} | {ratio:.2f} |")
    middle = sorted(ratio for ratio, _ in ratios)[len(ratios) // 2]
    print(f"{len(above)} of {len(ratios)} above 1; the median is {middle:.2f}")
    assert middle < 0.9 and len(above) < 0.03 * len(ratios) and max(ratios)[0] < 1.4


@pytest.mark.parametrize("exponent", [-80, 60])
def test_gradients_of_any_size_lose_nothing(exponent, unmarked):
    """Whatever a loss is multiplied with: in bfloat16 a power of two changes exponents only, those of each 16 queries
    (a tile) by themselves."""
    case = Case(length=40, kv_heads=2, static=True, dtype=torch.bfloat16)
    expected = gradients_of(case)
    found = gradients_of(case, torch.full((40,), 2.0**exponent))
    assert all(torch.equal(found[name], expected[name] * 2.0**exponent) for name in expected)
    factors = 2.0 ** (exponent // 20 * (torch.arange(40) // 16)).double()
    found = gradients_of(case, factors)
    for name in ("query", "pre.query.down", "post.query.up"):
        factor = factors.view(1, 1, -1, *(1,) * (expected[name].dim() - 3)).to(DEVICE)
        assert torch.equal(found[name], expected[name] * factor), name
    assert not overflow.beyond(HERE)


def test_queries_and_keys_of_any_size_lose_nothing(unmarked):
    """Products take them to float16, times powers of two: scores are the same, so gradients but for factors."""
    case = Case(length=40, kv_heads=2, window=20, dtype=torch.bfloat16)
    tensors, factor = case.tensors(), 2.0**60
    expected = gradients_of(case)
    found = gradients_of(case, query=tensors["query"] * factor, key=tensors["key"] / factor)
    assert torch.equal(found.pop("query") * factor, expected.pop("query"))
    assert torch.equal(found.pop("key") / factor, expected.pop("key"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("name", ["grouped-query", "odd dims", "one sequence of many heads", "large behind"])
def test_copies_in_float16_keep_all_bits(name, unmarked):
    """Down to 2^-31 of the largest number of 64 tokens of a head, or where such blocks share a power of two down to
    2^-17 of the largest of each token."""
    torch.manual_seed(0)
    B, H, kv_heads, T, S, D = {
        "grouped-query": (2, 6, 2, 150, 70, 16), "odd dims": (1, 2, 2, 65, 64, 20),
        "one sequence of many heads": (1, 40, 40, 20, 20, 16), "large behind": (1, 1, 1, 150, 150, 16),
    }[name]  # fmt: skip

    def states(tokens, heads, dim):
        x = torch.randn(B, tokens, heads, dim, device=DEVICE).transpose(1, 2)
        far = 2.0 ** torch.randint(-60, 60, (B, kv_heads, 1, 1), device=DEVICE)  # apart from each other
        near = 2.0 ** torch.randint(-12, 1, (B, heads, tokens, 1), device=DEVICE)
        rep = heads // kv_heads
        mine = 2.0 ** (4 * (torch.arange(heads, device=DEVICE) % rep))[:, None, None]  # the last head's are largest
        if name == "large behind":
            near[:, :, 64:] *= 2.0**20
        return (x * near * mine * far.repeat_interleave(rep, 1)).bfloat16()

    query, key, value, grad = states(T, H, D), states(S, kv_heads, D), states(S, kv_heads, D + 4), states(T, H, D + 4)
    problem = uncomposed(query, key, value)
    norms = schemas.new_norms(query, key)
    values = problem._values(norms)
    sources = problem._sources(grad, norms)
    assert torch.allclose(sources.grad_norms.double(), grad.double().norm(dim=-1), rtol=1e-6)
    norms = torch.nn.functional.pad(value.double().norm(dim=-1), (0, -S % 64)).unflatten(2, (-1, 64)).amax(-1)
    assert torch.allclose(sources.value_norms.double(), norms, rtol=1e-6)
    for x, copy in (
        (query, sources.query), (key, sources.key), (grad, sources.grad), (value, values),
    ):  # fmt: skip
        length = x.shape[2]
        assert copy.tensor.dtype == torch.float16 and copy.undo.shape == (*x.shape[:2], -(-length // 64))
        undo = copy.undo.double().repeat_interleave(64, 2)[:, :, :length, None]
        blocks = torch.nn.functional.pad(copy.tensor.double(), (0, 0, 0, -length % 64)).unflatten(2, (-1, 64))
        largest = blocks.abs().amax(dim=(3, 4))
        smallest = blocks.abs().amax(4).where(blocks.abs().amax(4) > 0, math.inf).amin(3)  # of any token
        assert ((largest >= 2.0**14) | (smallest >= 1)).all() and (largest < 2.0**16).all()
        lost = (copy.tensor.double() * undo - x.double()).abs()
        assert (lost <= undo * 2.0**-25).all() and (lost[x.double().abs() >= undo * 2.0**-17] == 0).all()
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("name", ["query", "key", "value", "grad"])
def test_tokens_of_very_different_sizes_lose_nothing(name, unmarked):
    """Each 64 of a head have a power of two of their own where one for all would not do: so errors of those that see,
    or are seen by, small ones only are no larger than eager's, too."""
    case, results = Case(length=200, heads=2, kv_heads=1, window=20, dtype=torch.bfloat16), []
    changed = case.tensors()
    changed[name][:, :, 64:128] *= 2.0**-30
    for dtype, attend in ((torch.float64, eager(case)), (torch.bfloat16, eager(case)), (torch.bfloat16, fused(case))):
        tensors = {n: t.to(DEVICE, torch.bfloat16).to(dtype).requires_grad_() for n, t in changed.items()}
        grad = tensors.pop("grad").detach()
        stages = (stage_weights(tensors, stage, case.groups) for stage in ("pre", "post"))
        out = attend(tensors["query"], tensors["key"], tensors["value"], *stages)
        out.backward(grad)
        results.append([x.double().detach() for x in (out, *(tensors[n].grad for n in ("query", "key", "value")))])
    # gradients of maps share a power of two, and those of queries that see small values only would lose bits
    assert overflow.beyond(HERE) == (Beyond.GRADIENTS if name == "value" else Beyond(0))
    for what, exact, low, found in zip(("out", "query", "key", "value"), *results, strict=True):
        for tokens in (slice(0, 44), slice(84, 108), slice(148, 200)):  # those see, and are seen by, their own kind
            error, allowed = ((x - exact)[:, :, tokens].norm() / exact[:, :, tokens].norm() for x in (found, low))
            most = 2 if overflow.beyond(HERE) and what != "out" else 1  # gradients of maps are bfloat16 then
            assert error <= most * allowed, (what, tokens, error, allowed)


@pytest.mark.parametrize("heads", [3, 34])
def test_powers_of_two_that_down_and_up_share_change_nothing(heads, unmarked):
    """Weights are composed in float16, which would have few bits of such down, or not hold it or such up."""
    case, found = Case(length=9, heads=heads, dtype=torch.bfloat16, stages=("post",), rank=3), []
    for factor in (1.0, 2.0**-24, 2.0**24):
        tensors = case.tensors()
        tensors["post.query.down"][:, :, 4, 1] *= factor
        tensors["post.query.up"][:, :, 4, 1] /= factor
        given = {name: t.to(DEVICE, torch.bfloat16) for name, t in tensors.items()}
        weights = stage_weights(given, "post", 1)
        found.append(composed_attention(given["query"], given["key"], given["value"], post=weights))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and not overflow.beyond(HERE)


@pytest.mark.parametrize("heads", [3, 34])
def test_the_largest_down_may_be_of_any_head(heads, unmarked):
    case = Case(length=9, heads=heads, dtype=torch.bfloat16, stages=("post",))
    tensors = case.tensors()
    tensors["post.query.down"][:, -1] *= 2.0**20
    tensors["post.query.up"] *= 2.0**-20
    ours, eagers = outputs_beside_eager(case, tensors)
    assert ours <= eagers and not overflow.beyond(HERE)


@pytest.mark.parametrize("states, weights", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16),
                                             (torch.bfloat16, torch.float16)], ids=str)  # fmt: skip
def test_composition_weights_of_another_dtype(states, weights, unmarked):
    case = Case(length=5, heads=32)
    tensors = {name: t.to(states).to(weights).to(DEVICE, torch.float64) for name, t in case.tensors().items()}

    def attend(attend, of_states, of_weights):
        query, key, value = (tensors[name].to(of_states) for name in ("query", "key", "value"))
        given = {name: t.to(of_weights) for name, t in tensors.items()}
        return attend(query, key, value, *(stage_weights(given, stage, 1) for stage in ("pre", "post"))).double()

    exact, found = attend(eager(case), torch.float64, torch.float64), attend(fused(case), states, weights)
    assert (found - exact).norm() <= 2 * torch.finfo(states).eps * exact.norm()


@pytest.mark.parametrize("spread", [0.1, 0.03])
def test_heads_whose_mean_is_taken_away(spread, unmarked):
    """What is left of weights that are nearly the same is less exact than with eager: see docs/kernels.md."""
    case = Case(length=40, heads=8, dtype=torch.bfloat16, stages=("post",), sides=("query",), rank=1)
    tensors, generator = case.tensors(), torch.Generator().manual_seed(1)
    for name in ("query", "key"):
        shared, own = tensors[name][:, :1], torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = (shared + spread * own).bfloat16().float()
    tensors["post.query.down"] = torch.ones_like(tensors["post.query.down"])
    tensors["post.query.up"] = torch.full_like(tensors["post.query.up"], -1 / 8)
    tensors["post.query.gate"] = torch.zeros_like(tensors["post.query.gate"])
    ours, eagers = outputs_beside_eager(case, tensors)
    print(f"| heads that differ by {spread}, less their mean | {ours:.2e} | {eagers:.2e} | {ours / eagers:.2f} |")
    assert ours <= 12 * eagers


@pytest.mark.parametrize("kind", ["keys behind", "keys before", "queries"])
def test_tokens_that_nobody_sees_change_nothing(kind, unmarked):
    """Such as padding: whatever numbers it has, powers of two of the others are the same."""
    case = Case(length=48, heads=2, kv_heads=1, dtype=torch.bfloat16, causal=kind == "queries")
    case = dataclasses.replace(case, **{"keys behind": {"end": (30,)}, "keys before": {"start": (30,)}}.get(kind, {}))
    tensors, options, hidden = case.tensors(), case.options(), slice(30, 48) if kind == "keys behind" else slice(0, 30)
    names = ("query", "grad") if kind == "queries" else ("key", "value")
    if kind == "queries":
        if not SMALL_TILES:
            pytest.skip("gradients of a tile share a power of two")
        hidden, sees = slice(0, 32), torch.arange(48, device=DEVICE) >= 32  # two tiles
        options["visible"] = (torch.zeros_like(sees).int()[None], torch.where(sees, 48, 0).int()[None])
    results = []
    for factor in (1.0, 2.0**40):
        given = {name: t.to(DEVICE, case.dtype, copy=True) for name, t in tensors.items()}
        for name in names:
            given[name][:, :, hidden] *= factor
        grad = given.pop("grad")
        given = {name: t.requires_grad_() for name, t in given.items()}
        stages = (stage_weights(given, stage, case.groups) for stage in ("pre", "post"))
        out = composed_attention(given["query"], given["key"], given["value"], *stages, **options)
        out.backward(grad)
        results.append([out, *(t.grad for t in given.values())])
    assert all(torch.equal(first, second) and first.any() for first, second in zip(*results, strict=True))
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("factor", [2.0**40, math.nan])
def test_keys_between_others_that_nobody_sees_change_nothing(factor, unmarked):
    """Queries 64 to 159 see nothing; the others see the last four keys, those in front of and behind keys 64 to 156."""
    length, results = 224, []
    sees = (torch.arange(length, device=DEVICE) < 64) | (torch.arange(length, device=DEVICE) >= 160)
    visible = torch.zeros_like(sees).int()[None], torch.where(sees, length, 0).int()[None]
    states = torch.randn(4, 1, 2, length, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).bfloat16()
    for number in (1.0, factor):
        query, key, value, grad = (x.clone() for x in states)
        key[:, :, 64:157] *= number
        value[:, :, 64:157] *= number
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = composed_attention(*leaves, sliding_window=4, visible=visible)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*results, strict=True))
    assert not overflow.beyond(HERE)


def test_values_beyond_a_chunk_change_no_gradients(unmarked, monkeypatch):
    """A chunk's power of two is that of the values which its queries may see."""
    monkeypatch.setattr(problems, "FIRST_CHUNK", 64)
    length = 192
    states = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).bfloat16()
    first = torch.clamp(torch.arange(length, dtype=torch.int32, device=DEVICE) - 7, min=0)[None]
    last = torch.arange(1, length + 1, dtype=torch.int32, device=DEVICE)[None]
    found = []
    for factor in (1.0, 2.0**20):
        values = states.clone()
        values[:, :, 128:] *= factor
        problem = uncomposed(states, states, values, Visibility(first, last, -7, 1), 0.25, chunk_bytes=0)
        assert len(problem.chunks(maps=3)) == 3
        found.append(problem.backward(states, *problem.forward()[1:]))
    for name in ("query", "key"):
        first_half = [getattr(grads, name)[:, :, :56] for grads in found]
        assert torch.equal(*first_half) and first_half[0].any()


@pytest.mark.parametrize("sink", [11.0, 16.0])
def test_small_weights_beside_a_large_one(sink, unmarked):
    """A first key whose value is zero takes nearly all weight, as models have it: what is left are sums of small ones.
    Its score is rounded to 2^-6 or 2^-7, which all others' weights are off by."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 200, 16, device=DEVICE) for _ in range(3))
    query[..., 0], key[..., 0] = 4.0, 0.0
    key[:, :, 0], value[:, :, 0] = 0.0, 0.0
    key[:, :, 0, 0] = sink
    query, key, value = (t.bfloat16() for t in (query, key, value))
    case = Case(heads=2, length=200)
    exact = eager(case)(query.double(), key.double(), value.double(), None, None)
    found, low = composed_attention(query, key, value), eager(case)(query, key, value, None, None)
    errors = [(out.double() - exact).norm() / exact.norm() for out in (found, low)]
    assert errors[0] <= 2 * errors[1], errors
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_that_are_zero_or_not_finite(dtype, unmarked):
    """Zeros give zeros. What is not finite stays among the queries and tiles of keys that it belongs to, and is no
    reason to do without float16: loss scaling produces it on purpose."""
    length, later = (40, 32) if SMALL_TILES else (160, 128)  # keys from there on are in other tiles than query 20
    case = Case(length=length, heads=2, dtype=dtype)
    assert all((grad == 0).all() for grad in gradients_of(case, torch.zeros(length)).values())
    expected = gradients_of(case)
    for value in (math.inf, math.nan):
        factors = torch.ones(length)
        factors[20] = value
        found = gradients_of(case, factors)
        others = torch.arange(length) != 20
        assert torch.equal(found["query"][:, :, others], expected["query"][:, :, others])
        assert not found["query"][:, :, 20].isfinite().any()
        for name in ("key", "value"):
            assert not found[name][:, :, :21].isfinite().any()
            assert found[name][:, :, later:].isfinite().all()
    assert not overflow.beyond(HERE)


@pytest.mark.parametrize("scale", [1e20, 1e29, 1e37])
def test_very_large_scores_in_float32(scale):
    """Softmax takes the largest, negative ones as well."""
    case = Case(length=20, heads=2)
    tensors = {name: tensor.to(DEVICE) for name, tensor in case.tensors().items()}
    states = [tensors[name] for name in ("query", "key", "value")]
    found = composed_attention(*states, scale=scale)
    scores = (states[0].double() @ states[1].double().mT).masked_fill(~case.visible().to(DEVICE), -torch.inf)
    best = scores.argmax(-1)  # [B, H, T]
    assert (scores.amax(-1) < 0).any()
    torch.testing.assert_close(found, states[2].gather(2, best[..., None].expand_as(found)))


@pytest.mark.parametrize("name", [name for name in LOW if "float16" in name and "bfloat16" not in name])
def test_float32_maps_are_as_exact_as_eager(name, unmarked, monkeypatch):
    """For float16 inputs, which tells: with float16 maps errors are up to three times those of eager."""
    monkeypatch.setattr(overflow, "_found", {HERE: Beyond.SCORES})
    for part, (ours, eagers) in beside_eager(LOW[name]).items():
        assert ours <= 1.1 * eagers, (part, ours / eagers)


@pytest.mark.parametrize(
    "name", ["all, bfloat16", pytest.param("two blocks of heads, bfloat16", marks=pytest.mark.long)]
)
def test_composed_weights_and_gradients_in_bfloat16(name, unmarked, monkeypatch):
    case = LOW[name]
    usual = run(case, case.dtype, fused(case))["out"]
    monkeypatch.setattr(overflow, "_found", {HERE: Beyond.GRADIENTS})
    assert not torch.equal(run(case, case.dtype, fused(case))["out"], usual)
    check(case, monkeypatch)


@dataclasses.dataclass(frozen=True)
class LargeGate(Case):
    """Gradients of scores are large, those of queries and keys, which are small, are not."""

    def tensors(self):
        tensors = super().tensors()
        tensors |= {name: (0.001 * tensors[name]).to(self.dtype).float() for name in ("query", "key")}
        return tensors | {"pre.key.gate": torch.full_like(tensors["pre.key.gate"], 5e4)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_gradients_of_scores_beside_eager(dtype, unmarked):
    """Float16 would not hold them, whatever those of queries and keys are."""
    errors = beside_eager(LargeGate(heads=2, length=40, sides=("key",), dtype=dtype))
    assert overflow.beyond(HERE) == Beyond.GRADIENTS
    for part in ("query", "key"):
        ours, eagers = errors[part]
        assert ours <= (1.1 if dtype == torch.float16 else 2) * eagers, (part, ours / eagers)


@dataclasses.dataclass(frozen=True)
class LargeScores(Case):
    """Queries are times a factor; queries and keys have a direction in common, which adds `shared` to all scores.
    Composition is what models have."""

    factor: float = 1
    shared: float = 0

    def tensors(self):
        tensors = {name: t * 0.2 if "." in name else t for name, t in super().tensors().items()}
        tensors["query"] *= self.factor
        if self.shared:
            for name in ("query", "key"):
                tensors[name][..., 0] = (self.shared * self.dim**0.5) ** 0.5
        return {name: t.to(self.dtype).float() for name, t in tensors.items()}


# name -> case, the most that errors may be of eager's, and the marks that it leaves
LARGE_SCORES = {
    "random, 20": (LargeScores(factor=4), 1.1, Beyond(0)),
    "shared, 8": (LargeScores(shared=8), 1.3, Beyond(0)),
    "random, 50": (LargeScores(factor=10), 1.1, Beyond.PRECISION),
    "random, 150": (LargeScores(factor=30), 1.1, Beyond.PRECISION),
    "random, 300": (LargeScores(factor=60), 1.1, Beyond.PRECISION),
    "random, 500": (LargeScores(factor=100), 1.1, Beyond.PRECISION | Beyond.SCORES),
    "random, 10,000": (LargeScores(factor=2000), 1.1, Beyond.PRECISION | Beyond.SCORES),
    "shared, 20": (LargeScores(shared=20), 1.1, Beyond.PRECISION),
    "shared, 20, static": (LargeScores(shared=20, static=True), 1.1, Beyond.PRECISION),
    "shared, 200": (LargeScores(shared=200), 1.3, Beyond.PRECISION),
    "shared, 200, static": (LargeScores(shared=200, static=True), 1.3, Beyond.PRECISION),
    "shared, 600": (LargeScores(shared=600), 1.1, Beyond.PRECISION | Beyond.SCORES),
}


@pytest.mark.parametrize("visible", [{}, {"window": 5}], ids=["causal", "window"])
def test_large_scores_of_two_blocks_of_heads(visible, unmarked):
    """In two parts: with static projections, and groups of 34 heads."""
    case = LargeScores(factor=60, heads=68, groups=2, length=20, static=True, dtype=torch.bfloat16, **visible)
    errors = beside_eager(case)
    assert overflow.beyond(HERE) == Beyond.PRECISION
    assert max(ours / eagers for ours, eagers in errors.values()) <= 1.1


@pytest.mark.parametrize("name", LARGE_SCORES)
def test_large_scores_beside_eager(name, unmarked):
    """Where float16 would be coarser than what eager has, its two parts are not. Prints the rows of docs/kernels.md, of
    which the bounds are the largest, rounded up."""
    case, most, found = LARGE_SCORES[name]
    errors = beside_eager(dataclasses.replace(case, length=48, dim=64, dtype=torch.bfloat16))
    assert overflow.beyond(HERE) == found
    for part, (ours, eagers) in errors.items():
        print(f"| {name} | {part} | {ours:.2e} | {eagers:.2e} | {ours / eagers:.2f} |")
    assert max(ours / eagers for ours, eagers in errors.values()) <= most


def test_large_scores_in_float16_models(unmarked):
    """Scores are in two parts, all other maps float16 as ever; so errors are at most 2.1 times those of eager."""
    errors = beside_eager(LargeScores(factor=30, length=48, dim=64, dtype=torch.float16))
    ratios = {name: ours / eagers for name, (ours, eagers) in errors.items()}
    print(f"| float16, 150 | {ratios['out']:.2f} | {max(ratios.values()):.2f} |")
    assert overflow.beyond(HERE) == Beyond.PRECISION and max(ratios.values()) <= 2.5, ratios
    this = problem(64, Layout(Part.QUERY, Part.QUERY, 1, 2))
    this.q = this.q.half()
    this.beyond = Beyond.PRECISION
    assert (this.score_dtype, this.map_dtype, this.grad_dtype) == (torch.float32, torch.float16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_queries_that_see_one_key_have_no_gradients_of_scores(dtype):
    """Exactly: their weight is 1 whatever the score is, and sums are of what is stored. (Compiled, kernels may make a
    score from the same numbers with one rounding less than others do.)"""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 20, 16, device=DEVICE).to(dtype).requires_grad_() for _ in range(3))
    sides = [(0.3 * torch.randn(1, 4, 5, 20, device=DEVICE)).to(dtype).requires_grad_() for _ in range(4)]
    pre, post = (ComposeWeights(SideWeights(a), SideWeights(b)) for a, b in (sides[:2], sides[2:]))
    out = composed_attention(query, key, value, pre, post, sliding_window=1)
    out.backward(torch.randn(out.shape, device=DEVICE).to(dtype))
    allowed = 0.0 if INTERPRETED else 1e-5
    assert all((t.grad.abs() <= allowed).all() for t in (query, key, *sides[:2]))
    assert all((t.grad.abs() > 1e-2).any() for t in (value, *sides[2:]))
