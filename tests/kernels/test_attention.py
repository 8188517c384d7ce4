"""`composed_attention` against the definition in float64: every switch, awkward shapes, who sees what, three dtypes."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_cases import CASES, Case, check, eager, fused, run, stage_weights
from kernel_device import DEVICE, INTERPRETED

from dcformer import ComposeWeights, SideWeights, compose
from dcformer.attention_dcformer import eager_attention
from dcformer.kernels import composed_attention, launch, ops, passes, schemas
from dcformer.kernels import problem as problems
from dcformer.kernels.ops import triton_attention
from dcformer.kernels.passes import Passes
from dcformer.kernels.triton.compose import join_kernel

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name, monkeypatch):
    check(CASES[name], monkeypatch)


def test_gradients_are_as_exact_as_float32_allows():
    """All gradients of a small problem within a few units in the last place of their largest."""
    case = Case(heads=2, length=18, static=True)
    truth, found = run(case, torch.float64, eager(case)), run(case, torch.float32, fused(case))
    for name, expected in truth.items():
        error = (found[name].double() - expected).abs().max() / expected.abs().max()
        assert error <= 16 * torch.finfo(torch.float32).eps, f"{name}: {error:.3g}"


def test_runs_are_bitwise_equal():
    case = Case(kv_heads=2, static=True, window=9)
    first, second = (run(case, torch.float32, fused(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_heads_that_share_a_key_are_cut_into_parts_where_programs_are_few(monkeypatch):
    """Keys that nobody sees come first, and others behind those of the last tile."""
    case, grids = Case(heads=12, kv_heads=1, length=18, keys=41, start=(17,), static=True, batch=1), []
    truth = run(case, torch.float64, eager(case))

    def spy(self, kernel, grid, chunk, name="", tile=None, real=Passes._launch, **arguments):
        if name == "keys":
            grids.append((grid[0], arguments["rep"]))
        return real(self, kernel, grid, chunk, name, tile, **arguments)

    monkeypatch.setattr(Passes, "_launch", spy)
    for few, parts in ((0, 1), (3, 1), (4, 2), (7, 3), (8, 3), (25, 12), (1000, 12)):
        monkeypatch.setattr(launch, "_FEW_INTERPRETED" if INTERPRETED else "_FEW_PROGRAMS", few)
        grids.clear()
        found = run(case, torch.float32, fused(case))
        for name, expected in truth.items():
            error = (found[name].double() - expected).abs().max() / expected.abs().max()
            assert error <= 2e-6, f"{few}, {name}: {error:.3g}"
        if INTERPRETED:
            assert grids == [(3 * parts, 12 // parts)] * 2, few


def test_strides_do_not_matter():
    case = Case(heads=2)
    tensors = {name: t.to(DEVICE) for name, t in case.tensors().items() if name in ("query", "key", "value")}
    expected = composed_attention(*tensors.values())
    moved = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors.values())
    assert torch.equal(composed_attention(*moved), expected)
    odd = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors.values()]
    assert torch.equal(composed_attention(*odd), expected)
    module = torch.nn.Module()
    for length in (1, 4, 16, 20):  # decoding, and more queries than it takes
        found, wanted = (
            triton_attention(module, query[:, :, :length], key, value, None, 0.25)[0]
            for query, key, value in (odd, tensors.values())
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dim", [1, 16])
def test_one_channel_and_no_queries(dim):
    """Strides of a dimension of size 1 mean nothing; with no queries there is no output."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    query, key, value = (torch.randn(2, dim, 2, 20, device=DEVICE).permute(0, 2, 3, 1) for _ in range(3))
    for length in (0, 3, 20):
        few = query[:, :, :length]
        found, _ = triton_attention(module, few, key, value, None, dim**-0.5, is_causal=False)
        wanted, _ = eager_attention(module, few, key, value, None, dim**-0.5, is_causal=False)
        assert found.shape == (2, length, 2, dim)
        torch.testing.assert_close(found, wanted)


def test_log_sum_exp():
    case = Case(batch=2, end=(21, 0), stages=(), heads=2)
    tensors = {name: t.to(DEVICE) for name, t in case.tensors().items()}
    out, lse = composed_attention(tensors["query"], tensors["key"], tensors["value"], return_lse=True, **case.options())
    scores = torch.matmul(tensors["query"], tensors["key"].transpose(2, 3)) * case.dim**-0.5
    expected = scores.masked_fill(~case.visible().to(DEVICE), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse[0], expected[0])
    assert lse[1].eq(torch.inf).all() and out[1].eq(0).all()


@pytest.mark.parametrize("name", ["everything", "grouped-query", "chunks of the batch", "nothing seen"])
def test_gradients_of_log_sum_exps(name, monkeypatch):
    """Of output and log-sum-exp together, and of the latter alone, against the definition in float64."""
    case = CASES[name]
    if case.chunk:
        monkeypatch.setattr(problems, "FIRST_CHUNK", case.chunk)
    visible = case.visible().to(DEVICE)
    seen = visible.any(-1)  # [B, 1, T]: elsewhere the log-sum-exp is infinite
    factors = torch.linspace(-1, 1, case.length, device=DEVICE)

    def exact(dtype, share):
        def attend(query, key, value, pre, post):
            keys = key.repeat_interleave(case.heads // key.shape[1], dim=1)
            composed = compose(query @ keys.transpose(2, 3) * case.dim**-0.5, pre).masked_fill(~visible, -torch.inf)
            lse = torch.where(seen[..., None], composed, 0.0).logsumexp(-1)
            total = (torch.where(seen, lse, 0.0) * factors.to(dtype)).sum()
            return eager(case)(query, key, value, pre, post) * share + total

        return run(case, dtype, attend)

    def ours(share):
        def attend(query, key, value, pre, post):
            out, lse = composed_attention(query, key, value, pre, post, return_lse=True, **case.options())
            return out * share + (torch.where(seen, lse, 0.0) * factors).sum()

        return run(case, torch.float32, attend)

    for share in (1.0, 0.0):
        truth, found = exact(torch.float64, share), ours(share)
        for part, expected in truth.items():
            error = (found[part].double() - expected).abs().max()
            assert error <= 2e-6 * expected.abs().max(), (share, part, error, expected.abs().max())


def test_log_sum_exps_of_nothing_have_no_gradients():
    """Whatever is made of the infinite ones: queries that see nothing change no gradient."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(3))
    side = torch.randn(1, 2, 5, 20, device=DEVICE) * 0.3
    found = []
    for grad_of_nothing in (0.0, float("inf")):
        inputs = [t.clone().requires_grad_() for t in (query, key, value, side)]
        pre = ComposeWeights(key=SideWeights(inputs[3]))
        start = torch.tensor([4], device=DEVICE)
        out, lse = composed_attention(*inputs[:3], pre, return_lse=True, key_start=start)
        grad_lse = torch.ones_like(lse)
        grad_lse[:, :, :4] = grad_of_nothing
        torch.autograd.backward([out, lse], [torch.ones_like(out), grad_lse])
        found.append([t.grad for t in inputs])
    assert all(torch.equal(first, second) and first.isfinite().all() for first, second in zip(*found, strict=True))


def test_log_sum_exps_of_many_parts_are_joined():
    """40 of them, in loads of 16; some queries see nothing of a tile, one nothing at all."""
    parts = (5 * torch.randn(40, 6, 20)).masked_fill(torch.rand(40, 6, 20) < 0.3, -torch.inf)
    parts[:, 4, 3] = -torch.inf
    parts[5, 2, 6] = torch.nan
    lse = torch.full((6, 33), torch.nan, device=DEVICE)
    join_kernel[6, 1](parts.to(DEVICE), lse, 33, 10, 20, 40, 6, B_P=16, B_T=64)
    expected = (parts * math.log(2)).logsumexp(0) / math.log(2)  # base 2
    expected[4, 3] = torch.inf
    torch.testing.assert_close(lse[:, 10:30].cpu(), expected, equal_nan=True)
    assert lse[:, :10].isnan().all() and lse[:, 30:].isnan().all()


def test_autocast_changes_nothing():
    case = Case(heads=2, static=True)
    expected = run(case, torch.float32, fused(case))
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(case, torch.float32, fused(case))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"save_maps": True, "sliding_window": 5}], ids=str)
def test_outputs_may_be_changed_in_place(options):
    """As those of the other implementations: variants of a layer do."""
    case = Case(heads=2, length=9)

    def copied(*given):
        output, lse = composed_attention(*given, return_lse=True, **options)
        return output * 2 + lse[..., None]

    def in_place(*given):
        output, lse = composed_attention(*given, return_lse=True, **options)
        output *= 2
        output += lse[..., None]
        return output

    expected, found = (run(case, torch.float32, f) for f in (copied, in_place))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_outputs_of_a_layer_may_be_changed_in_place():
    case, module = Case(heads=2, length=20), SimpleNamespace(is_causal=True, training=False)

    def attend(*given, factor):
        output, _ = triton_attention(module, *given[:3], None, scaling=1.0, pre=given[3], post=given[4])
        output *= factor
        return output.transpose(1, 2)

    once, twice = (run(case, torch.float32, partial(attend, factor=factor))["value"] for factor in (1.0, 2.0))
    torch.testing.assert_close(twice, 2 * once)


def _operator_inputs(requires_grad, **options):
    """Arguments of the forward operator, the gradient of the output, log-sum-exps in base 2."""
    case = Case(heads=2, length=9, static=True)
    made = {name: t.to(DEVICE).requires_grad_() for name, t in case.tensors().items()}
    pre, post = (stage_weights(made, stage, 1) for stage in ("pre", "post"))
    captured, options = [], {"return_lse": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attention_op", lambda *args: captured.extend(args) or schemas.attention_op(*args))
        _, lse = composed_attention(made["query"], made["key"], made["value"], pre, post, **options)

    def leaf(argument):
        if isinstance(argument, list):
            return [leaf(a) for a in argument]
        is_number = torch.is_tensor(argument) and argument.is_floating_point()
        return argument.detach().requires_grad_(requires_grad) if is_number else argument

    return tuple(leaf(argument) for argument in captured), made["grad"].detach(), lse.detach() / math.log(2)


@pytest.mark.parametrize("options", [{}, {"save_maps": True}], ids=str)
def test_operators_are_well_made(options, monkeypatch):
    """Maps that are kept are outputs, whose memory that nobody reads says nothing: here it is zero."""
    monkeypatch.setattr(passes, "new_kept", lambda *sizes: schemas.new_kept(*sizes).zero_())
    args, _, _ = _operator_inputs(requires_grad=True, **options)
    torch.library.opcheck(schemas.attention_op, args)
    args, grad, lse = _operator_inputs(requires_grad=False, **options)
    tests, saved = ("test_schema", "test_faketensor"), list(schemas.attention_op(*args)[1:])
    torch.library.opcheck(schemas.attention_backward_op, (grad, saved, lse, *args), test_utils=tests)


@pytest.mark.parametrize("options", [{}, {"save_maps": True}, {"save_maps": True, "sliding_window": 5}], ids=str)
def test_compiles_to_one_graph(options):
    case = Case(heads=2, length=9 if "sliding_window" not in options else 130)
    compiled = torch.compile(composed_attention, fullgraph=True, backend="aot_eager")
    expected, found = (
        run(case, torch.float32, lambda *t, f=f: f(*t, **options)) for f in (composed_attention, compiled)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
