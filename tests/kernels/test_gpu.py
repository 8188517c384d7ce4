"""What only a GPU shows: real shapes, fuzzed ones, CUDA graphs, streams, determinism, memory, the sanitizer."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config
from kernel_device import INTERPRETED, load_gpu_suite

if INTERPRETED:
    pytest.skip("needs a CUDA device and compiled kernels, TRITON_INTERPRET is set", allow_module_level=True)

import attention_cases
import test_decode
from attention_cases import Case

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.kernels import composed_attention, composed_decode, overflow, selfcheck

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def suite():
    return load_gpu_suite()


@pytest.fixture
def bench(suite):
    bench = suite.Bench(repeats=3, prompt=40, new_tokens=12)
    yield bench
    bench.clean()


def in_a_process(code, *before, **environment):
    """Runs Python code that finds the tests' modules, with a command before it."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    command = [*before, sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def needs_memory(gib):
    """Skips on GPUs too small for what the definition in float64 holds."""
    total = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
    if total < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory for the definition in float64, this GPU has {total:.0f}")


# --- numbers ----------------------------------------------------------------------------------------------------------


def some_case(seed):
    """A random call of `composed_attention`; head dims and ranks from a few, as each is a compilation."""
    pick = random.Random(seed)
    heads = pick.choice((1, 2, 4, 6, 12, 32))
    kv_heads = pick.choice([n for n in (1, 2, 3, 4, 6, 12, 32) if heads % n == 0])
    length = pick.choice((1, 15, 16, 63, 64, 65, 127, 200, 300))
    documents = pick.random() < 0.2
    keys = None if documents or pick.random() < 0.5 else length + pick.randrange(150)
    batch, total = 1 if documents else pick.choice((1, 2)), keys or length
    window = pick.choice((None, None, 1, 16, 17, 64, 100))
    return Case(
        batch=batch, heads=heads, kv_heads=kv_heads, length=length, keys=keys, dim=pick.choice((32, 80, 128)),
        stages=pick.choice((("pre", "post"),) * 3 + (("pre",), ("post",))),
        sides=pick.choice((("query", "key"),) * 3 + (("query",), ("key",))),
        rank=pick.choice((2, 2, 1)), gate=pick.random() < 0.8, static=pick.random() < 0.2,
        groups=pick.choice([g for g in (1, 1, 2) if heads % g == 0]), window=window,
        start=tuple(pick.randrange(total) for _ in range(batch)) if pick.random() < 0.3 else None,
        end=tuple(pick.randrange(total + 1) for _ in range(batch)) if pick.random() < 0.2 else None,
        documents=(0, length // 3, length // 2 + 1, length) if documents and length > 4 else None,
        chunk=pick.choice((None, None, 16, 64)), dtype=pick.choice((*DTYPES, torch.bfloat16)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_some_attention(seed, monkeypatch):
    attention_cases.check(some_case(seed), monkeypatch)


@pytest.mark.parametrize("seed", range(16))
def test_some_decoding(seed):
    pick = random.Random(seed)
    heads = pick.choice((2, 6, 32, 40))
    shape = {
        "B": pick.choice((1, 3)), "H": heads, "KV": pick.choice((heads, heads // 2)), "T": pick.choice((1, 1, 2, 16)),
        "S": pick.choice((1, 17, 300, 2049)), "D": pick.choice((64, 80, 128)), "dtype": pick.choice(DTYPES),
        "parts": (*test_decode.FULL, *(("static",) if pick.random() < 0.3 else ())),
    }  # fmt: skip
    visible = None
    if pick.random() < 0.6:
        visible = torch.rand(shape["B"], 1, shape["T"], shape["S"]).to("cuda") < pick.choice((0.1, 0.9))
    test_decode.check(test_decode.inputs(**shape), visible, num_splits=(None, 1, 7))


@pytest.mark.parametrize("composition", ["full", "query"])
@pytest.mark.parametrize("size, window, tokens", [
    ("2.8b", None, 2048), ("2.8b", 256, 2048), ("6.9b", None, 2048), ("6.9b", 256, 2048), ("6.9b", None, 2049),
    ("6.9b", 256, 4099), ("13b", None, 1000), ("2.8b", None, 32768),
])  # fmt: skip
def test_real_shapes(suite, bench, size, window, tokens, composition):
    """bfloat16, as models have it; the last is where offsets into the maps are largest."""
    needs_memory(40)
    result = suite.check_attention(bench, size, window, tokens, composition)
    assert result["status"] == "ok", result


@pytest.mark.parametrize("kind, arguments", [("decode", (3000,)), ("generator", (1000,)), ("model", ())])
@pytest.mark.parametrize("size", ["2.8b", "6.9b"])
def test_real_decoding_generators_and_models(suite, bench, size, kind, arguments):
    needs_memory(40)
    result = suite.CHECKS[kind](bench, size, *arguments, "full")
    assert result["status"] == "ok", result


# --- the same again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 100])
def test_gradients_are_the_same_bits_from_run_to_run(window):
    case = Case(heads=8, length=1000, dim=64, window=window, static=window is None, dtype=torch.bfloat16)
    first = attention_cases.run(case, case.dtype, attention_cases.fused(case))
    for _ in range(3):
        again = attention_cases.run(case, case.dtype, attention_cases.fused(case))
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("window", [None, 64])
def test_forward_and_backward_in_a_cuda_graph(suite, bench, window):
    """Replayed on other inputs, the graph gives what a call gives."""
    config = bench.config("2.8b", num_attention_heads=4)
    inputs = suite.make_inputs(bench, config, 300, window)
    leaves, results = list(inputs.tensors.values()), []
    grad = torch.randn(1, 4, 300, config.head_dim, device="cuda", dtype=torch.bfloat16)

    def call():
        out = suite.ours(inputs)
        results[:] = [out, *torch.autograd.grad(out, leaves, grad)]

    replay = suite.capture(call)
    captured = list(results)
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf) * 0.5)
            grad.normal_()
        replay()
        found = [t.clone() for t in captured]
        call()
        assert all(torch.equal(one, other) for one, other in zip(found, results, strict=True))


@pytest.mark.parametrize("how", ["reduce-overhead", "CUDA graph"])
def test_static_decoding_loop(suite, bench, how):
    """Tokens of a compiled loop over a static cache are those of the eager definition without a cache."""
    fields = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 16}
    model = randomize(DCFormerForCausalLM(tiny_config(**fields))).cuda()
    ids = suite.make_ids(bench, model.config, 1, bench.prompt)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for _ in range(bench.new_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    model.set_attn_implementation("dcformer_triton")
    compiled = torch.compile(model, dynamic=False, mode=how if how == "reduce-overhead" else "default")

    def forward(*args, **kwargs):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args, **kwargs)

    step, _ = suite.decoding_step(bench, model, model.config, forward if how == "reduce-overhead" else compiled)
    tokens = [step.token.clone()]
    step()
    tokens.append(step.token.clone())
    # Capturing warms up by two steps. They are part of the sequence: the windows' keys cannot be taken back.
    following = []
    if how == "CUDA graph":
        warm = lambda: (step(), following.append(step.token.clone()))  # noqa: E731
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm(), warm()
        torch.cuda.current_stream().wait_stream(stream)
        step_again = suite.capture(step, warm_ups=0)
    else:
        step_again = step
    tokens += following
    while len(tokens) < bench.new_tokens:
        step_again()
        tokens.append(step.token.clone())
    assert torch.equal(torch.cat(tokens, dim=1), ids[:, bench.prompt :])


@pytest.fixture
def small():
    """A model of this implementation, in bfloat16, and some token ids."""
    model = randomize(DCFormerForCausalLM(tiny_config())).to("cuda", torch.bfloat16)
    model.set_attn_implementation("dcformer_triton")
    return model, torch.randint(1, 97, (2, 40), device="cuda")


def test_graphs_of_torch_compile_before_any_other_pass(small, monkeypatch):
    """Such a graph lets nothing be kept of the memory that its warm-up asks for; the first pass makes the marks."""
    model, ids = small

    def step(ids):
        return model(ids, labels=ids, use_cache=False).loss

    expected = step(ids)
    expected.backward()
    of_eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(overflow, "_watches", {})
    monkeypatch.setattr(overflow, "_found", {})
    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False)
    for _ in range(4):  # compiled, warmed up, recorded, replayed
        model.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(ids)
        loss.backward()
        torch.testing.assert_close(loss.detach().clone(), expected.detach(), rtol=0.02, atol=0)
    assert torch.device("cuda", torch.cuda.current_device()) in overflow._watches
    for name, p in model.named_parameters():
        difference = (p.grad - of_eager[name]).norm()  # compiled, the other modules round elsewhere
        assert difference <= 0.2 * of_eager[name].norm() + 1e-4, name


def test_a_padded_forward_pass_in_a_cuda_graph(suite, small):
    """Nothing of the mask is read while it is captured; replayed, it is that of the inputs then."""
    model, ids = small
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = []

    @torch.no_grad()
    def call():
        found[:] = [model(ids, attention_mask=mask, use_cache=False).logits]

    replay = suite.capture(call)
    captured = found[0]
    for hidden in (3, 7):
        mask.fill_(1)
        mask[1, :hidden] = 0
        replay()
        call()
        seen = mask.bool()
        torch.testing.assert_close(captured[seen], found[0][seen], rtol=0.02, atol=0.02)  # of logits of about 1


GAPS = """
import copy
import torch
import test_model
model = test_model.with_implementation(copy.deepcopy(test_model.model_named("mha")), "dcformer_triton")
ids, length = test_model.tokens(), test_model.LENGTH
gaps = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril()
compiled = torch.compile(lambda mask: model(ids, attention_mask=mask).logits, backend="aot_eager", fullgraph=True)
with torch.no_grad():
    compiled(gaps)
    torch.cuda.synchronize()
    print("no gaps")
    gaps[:, :, 4, 2] = False
    compiled(gaps)
    torch.cuda.synchronize()
print("gaps")
"""


def test_a_mask_with_gaps_in_a_graph_ends_the_process():
    """An assertion on the device, after which a process can do nothing more: so it is one of its own."""
    run = in_a_process(GAPS)
    assert run.returncode and run.stdout.split("\n")[:1] == ["no gaps"] and "gaps\n" not in run.stdout[8:], run.stdout
    assert "assert" in run.stderr


# --- the self-check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, states", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("preset", ["dcformer-405m", "dcformer-2.8b", "dcformer-6.9b"])
def test_the_self_check_passes(preset, dtype, states):
    device = torch.device("cuda", torch.cuda.current_device())
    for kind in selfcheck.kinds(DCFormerConfig.from_preset(preset), dtype, states):
        assert [str(check) for check in selfcheck.run(device, kind) if not check.passed] == []


def test_the_default_on_this_device_is_what_the_self_check_says(monkeypatch, tmp_path):
    """A model whose implementation is unset runs the check, keeps its verdict and takes the kernels."""
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_passed", {})
    model = randomize(DCFormerForCausalLM(tiny_config())).to("cuda", torch.bfloat16)
    ids = torch.arange(1, 41, device="cuda")[None]
    with torch.no_grad():
        found = model(ids).logits
        model.set_attn_implementation("dcformer_triton")
        assert torch.equal(found, model(ids).logits)  # the kernels' bits, which chunked does not give
        assert set(selfcheck._passed.values()) == {True} and len(list((tmp_path / "selfcheck").iterdir())) == 2
        model.set_attn_implementation("dcformer_chunked")
        assert not torch.equal(found, model(ids).logits)


# --- memory, streams, devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 256])
def test_memory_is_linear_in_length(suite, bench, window):
    peaks = {}
    for tokens in (2048, 8192):
        bench.clean()
        peaks[tokens] = suite.memory_cell(bench, "2.8b", window, tokens, "ours")["peak_bytes"]
    assert peaks[8192] <= 1.1 * 4 * peaks[2048], peaks


def test_two_streams():
    """Calls on two streams at once give what they give one after the other."""
    cases = [Case(heads=8, length=700, dim=64, dtype=torch.bfloat16, window=window) for window in (None, 50)]
    expected = [attention_cases.run(case, case.dtype, attention_cases.fused(case)) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(3):
        found = []
        for case, stream in zip(cases, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(attention_cases.run(case, case.dtype, attention_cases.fused(case)))
        torch.cuda.synchronize()
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [torch.randn(1, 4, 100, 64, dtype=torch.bfloat16) for _ in range(3)]
    first, second = (composed_attention(*(t.to(f"cuda:{i}") for t in tensors)) for i in range(2))
    assert second.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())
    q, k, v = test_decode.inputs(B=1, H=4, KV=4, T=1, S=300, D=64, dtype=torch.bfloat16)[:3]
    expected = composed_decode(q, k, v, scale=0.125)
    for i in (0, 1, 0, 1):  # launches that are repeated are those of the tensors' device
        found = composed_decode(*(t.to(f"cuda:{i}") for t in (q, k, v)), scale=0.125)
        assert found.device.index == i and torch.equal(found.cpu(), expected.cpu())


SANITIZED = """
import torch
import attention_cases, test_decode
from attention_cases import Case
for case in (Case(length=37, heads=2, dim=80, dtype=torch.bfloat16), Case(length=70, heads=2, window=5, static=True)):
    attention_cases.run(case, case.dtype, attention_cases.fused(case))
test_decode.run(test_decode.inputs(H=6, S=63, D=80), num_splits=3)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool):
    """No access out of bounds, no race in shared memory."""
    binary = shutil.which("compute-sanitizer")
    if binary is None:
        pytest.skip("compute-sanitizer is not installed here (it comes with the CUDA toolkit)")
    options = [binary, "--tool", tool, "--error-exitcode", "9"]
    run = in_a_process(SANITIZED, *options, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert run.returncode == 0 and "done" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def test_the_fuzzer_makes_calls_of_all_kinds():
    cases = [some_case(seed) for seed in range(24)]
    for field in ("window", "start", "documents", "chunk", "keys"):
        values = {getattr(case, field) is None for case in cases}
        assert values == {True, False}, field
    assert {case.dtype for case in cases} == set(DTYPES)
    assert all(replace(case, batch=case.batch).tensors()["query"].shape[2] == case.length for case in cases[:3])
