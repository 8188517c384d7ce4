"""`dcformer-plan`: its formulas against what small models take, and the commands of docs/scale_out.md."""

import json
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import REPOSITORY, documented_commands
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer import DCFormerConfig, DCFormerForCausalLM, chunked_dcformer, planning
from dcformer.planning import OPTIMIZERS, Setup, activation_bytes, collectives, memory, saved_logits_bytes
from dcformer_commands.plan import main


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    """The roofline is a tool of the source tree."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))


SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
}
VARIANTS = {
    "full": {},
    "groups": {"compose_groups": 2},
    "grouped queries": {"num_key_value_heads": 2},
    "query-wise, rank 1": {"compose_key": False, "compose_rank": 1},
    "no gate": {"compose_gate": False},
    "gates alone": {"compose_projection": False},
    "static": {"compose_static": True},
    "talking heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "plain": {"compose_query": False, "compose_key": False, "compose_pre": False, "compose_post": False},
    "multi-gate": {"mlp_gates": 4},
    "pythia": {"norm_type": "layernorm", "qk_norm": False, "mlp_type": "plain", "use_parallel_residual": True},
    "partial rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}
MEASURE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from test_planning import SIZES, VARIANTS, kept_bytes
from dcformer import DCFormerConfig
cases = [("full", 16), ("full", 90), ("groups", 16), ("no gate", 16), ("query-wise, rank 1", 16)]
print(json.dumps([
    [name, str(dtype), length, kept_bytes(
        DCFormerConfig(**(SIZES | {"num_hidden_layers": 1} | VARIANTS[name])), "dcformer_triton", dtype, length)]
    for name, length in cases for dtype in (torch.float32, torch.bfloat16)]))
"""


def kept_bytes(config, attention, dtype, length=32, checkpointing=False):
    """Bytes of all storages, parameters and buffers aside, that autograd keeps at the end of the forward pass."""
    model = DCFormerForCausalLM(config).to(dtype).train()
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    ids = torch.randint(0, config.vocab_size, (2, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_activations(variant, dtype, attention):
    """Within 0.1 %: scalars and masks' rows are not counted."""
    config = DCFormerConfig(**(SIZES | VARIANTS[variant]))
    setup = Setup(config, gpus=1, batch=2, length=32, dtype=dtype, attention=attention)
    planned = activation_bytes(setup) + saved_logits_bytes(setup)
    assert planned == pytest.approx(kept_bytes(config, attention, dtype), rel=1e-3)


@pytest.mark.slow
def test_activations_of_the_kernels():
    """In Triton's interpreter, which a process chooses when it starts."""
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(REPOSITORY / "tests")],
        env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert len(measured) == 10
    for variant, dtype, length, found in measured:
        config = DCFormerConfig(**(SIZES | {"num_hidden_layers": 1} | VARIANTS[variant]))
        setup = Setup(config, 1, batch=2, length=length, dtype=getattr(torch, dtype.removeprefix("torch.")))
        planned = activation_bytes(setup) + saved_logits_bytes(setup)
        assert planned == pytest.approx(found, rel=1e-3), (variant, dtype, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointing(dtype):
    """What is kept at the end of the forward pass; a layer's own comes when it runs again."""
    config = DCFormerConfig(**SIZES)
    setup = Setup(config, 1, batch=2, length=32, dtype=dtype, attention="dcformer_chunked", checkpointing=True)
    planned = activation_bytes(setup) - planning.layer_activation_bytes(setup) + saved_logits_bytes(setup)
    planned -= 2 * 32 * 16 * dtype.itemsize  # cosines and sines: held all the while, though not by autograd
    found = kept_bytes(config, "dcformer_chunked", dtype, checkpointing=True)
    assert planned == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("variant", ["full", "groups", "static", "multi-gate", "pythia"])
def test_parameters_gradients_and_optimizer(variant):
    config = DCFormerConfig(**(SIZES | VARIANTS[variant]))
    model = DCFormerForCausalLM(config)
    optimizers = {
        "adamw": torch.optim.AdamW(model.parameters()),
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
        "sgd_momentum": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    ids = torch.arange(24).view(2, 12)
    model(ids, labels=ids).loss.backward()
    for name, optimizer in optimizers.items():
        optimizer.step()
        states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
        parts = memory(Setup(config, 1, optimizer=name, length=32))
        assert parts.optimizer == sum(t.nbytes for t in states)
        assert parts.parameters == sum(p.nbytes for p in model.parameters())
        assert parts.gradients == sum(p.grad.nbytes for p in model.parameters())
        assert parts.gathered == 0
    assert set(OPTIMIZERS) - set(optimizers) == {"adamw_8bit"}  # not installed here


class Peak(TorchDispatchMode):
    """Most bytes of storages alive at once: those given, and all that operations make while the mode is on."""

    def __init__(self, held):
        super().__init__()
        self.sizes, self.now, self.top = {}, 0, 0
        self.add(held)

    def add(self, tensors):
        for storage in (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.top = max(self.top, self.now)
                weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves(out))
        return out


@pytest.mark.parametrize("attention", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"hidden_size": 256, "intermediate_size": 1024}, 16),
        ({"vocab_size": 8192, "num_hidden_layers": 1}, 64),
        ({"num_hidden_layers": 8}, 128),
        ({"num_hidden_layers": 1, "max_position_embeddings": 256}, 256),
    ],
    ids=["parameters", "logits", "layers", "attention"],
)
def test_peak_of_a_training_step(monkeypatch, fields, length, attention):
    """Between what is there at the end of the forward pass and the sum of all parts, each the largest in some case.

    Blocks of scores are small here, or those of the chunked attention would be larger than all else in such a model.
    """
    for module in (chunked_dcformer, planning):
        monkeypatch.setattr(module, "BLOCK_SCORES", 1 << 16)
    config = DCFormerConfig(**(SIZES | fields))
    model = DCFormerForCausalLM(config).train()
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, config.vocab_size, (2, length))

    def step():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # which makes the optimizer's states
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with Peak([*model.parameters(), *model.buffers(), *states]) as peak:
        step()
    setup = Setup(config, 1, batch=2, length=length, dtype=torch.float32, attention=attention)
    parts = memory(setup)
    kept = parts.parameters + parts.optimizer + parts.activations + saved_logits_bytes(setup)
    assert kept <= peak.top <= parts.total


def test_shares():
    """GPUs that share parameters and layers have a share of each, rows rounded up; half of both is a quarter."""
    config = DCFormerConfig(**(SIZES | {"vocab_size": 104, "compose_groups": 2}))
    whole = memory(Setup(config, 1, length=32))
    for gpus, parallel in ((2, 1), (8, 1), (2, 2), (4, 2)):
        parts = memory(Setup(config, gpus, parallel, length=32))
        assert parts.parameters == pytest.approx(whole.parameters / gpus, rel=0.02)
        assert parts.optimizer == 2 * parts.parameters
    one, two = (Setup(config, 2, t, length=32, batch=2, attention="eager") for t in (1, 2))
    assert activation_bytes(one) / 2 < activation_bytes(two) < activation_bytes(one)


def test_memory_without_the_kernels():
    """Eager attention keeps maps: quadratic in the length; the others do not."""
    config = DCFormerConfig.from_preset("dcformer-6.9b", max_position_embeddings=8192)
    kept = {
        how: [activation_bytes(Setup(config, 64, length=length, attention=how)) for length in (4096, 8192)]
        for how in planning.IMPLEMENTATIONS
    }
    assert kept["eager"][1] / kept["eager"][0] > 3.5
    assert kept["dcformer_chunked"][1] / kept["dcformer_chunked"][0] == pytest.approx(2, abs=0.01)
    assert kept["dcformer_triton"][1] < kept["dcformer_chunked"][1] < kept["eager"][1] / 10


# --- communication and speed ------------------------------------------------------------------------------------------


def test_communication():
    config = DCFormerConfig.from_preset("dcformer-6.9b")
    assert collectives(Setup(config, 1)) == []
    gather, scatter = collectives(Setup(config, 64, accumulation=2))
    size = 2 * config.num_parameters()
    assert (gather.count, scatter.count) == (2 * 67, 2 * 34)
    assert scatter.sent == pytest.approx(2 * size * 63 / 64)
    assert 1.9 * scatter.sent < gather.sent < 2 * scatter.sent


def test_speed():
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    config = DCFormerConfig.from_preset("dcformer-6.9b")
    fast, slow = (planning.estimate(Setup(config, 64, batch=8), "h100", share, 50e9, 4e11) for share in (1.0, 0.5))
    assert slow.tokens < fast.tokens and "ESTIMATE" in fast.source
    again = planning.estimate(Setup(config, 64, batch=8, checkpointing=True), "h100", 1.0, 50e9, 4e11)
    assert again.tokens == pytest.approx(fast.tokens * 3 / 4, rel=0.01)
    bound = planning.estimate(Setup(config, 64, batch=1), "h100", 1.0, 50e9, 4e11)
    assert "bound by the network" in bound.source


def cell(batch=2, **fields):
    """A cell of 6.9B as `benchmarks/gpu_suite.py` writes it: 10 ms a layer, 80 ms for the rest, of two sequences."""
    cell = {"section": "train", "status": "ok", "size": "6.9b", "pattern": "LG", "composition": "full", "depth": "few"}
    return cell | {"tokens": 2048, "batch": batch, "layers": 32, "layer_s": 0.01, "rest_s": 0.08} | fields


@pytest.fixture
def suite_file(tmp_path):
    """`--measured` and a file of the benchmark, with a slower cell that is not asked for."""
    path = tmp_path / "gpu_suite.json"
    whole = {key: value for key, value in cell(depth="full").items() if key not in ("layer_s", "rest_s")}
    query = cell(composition="query", pattern="LGLL", layer_s=0.005)
    cells = [cell(section="decode"), cell(status="invalid"), whole, query, cell()]
    path.write_text(json.dumps({"cells": cells}))
    return ["--measured", str(path)]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 32 * 0.01 + 0.08),
        (["--set", "num_hidden_layers=64", "norm_eps=1e-6"], 64 * 0.01 + 0.08),
        (["--checkpointing"], 32 * 0.01 * 4 / 3 + 0.08),
        (["--set", "layer_pattern=LGLL", "compose_key=false"], 32 * 0.005 + 0.08),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_measured_speed(suite_file, capsys, words, seconds):
    """64 GPUs with 8 sequences each, four times the measured batch; a network that does not bound."""
    assert main([*suite_file, *words, "--batch", "8", "--network", "1000"]) == 0
    rate = 64 * 8 * 2048 / (4 * seconds)
    printed = capsys.readouterr().out
    assert f": {rate:,.0f} tokens/s" in printed and "one GPU measured: gpu_suite.json" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "compose_rank=8"], "6.9b LG full, differs in compose_rank=8 (measured: 2)"),
        (["--set", "hidden_size=8192"], "differs in hidden_size=8192 (measured: 4096)"),
        (["--set", "vocab_size=60000"], "differs in vocab_size=60000 (measured: 50257)"),
        (["--preset", "dcformer-13b"], "hidden_size=5120 (measured: 4096)"),
        (["--length", "1024"], "differs in length=1024 (measured: 2048)"),
        (["--dtype", "float32"], "dtype=torch.float32 (measured: torch.bfloat16)"),
        (["--attention", "eager"], "attention='eager' (measured: 'dcformer_triton')"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_other_conditions_than_measured(suite_file, capsys, words, message):
    assert main([*suite_file, *words]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "Only the number of layers may be another" in printed.err and not printed.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", 'no list "cells"'),
        ('{"cells": [1]}', 'no list "cells"'),
        ('{"cells": [{"section": "train", "status": "ok"}]}', "no cell of section train"),
    ],
)
def test_bad_measurements(tmp_path, capsys, content, message):
    path = tmp_path / "gpu_suite.json"
    if content is not None:
        path.write_text(content)
    assert main(["--measured", str(path)]) == 1
    printed = capsys.readouterr()
    assert f"error: --measured {path}: {message}" in printed.err and not printed.out


def test_measured_models_are_those_of_the_benchmark(monkeypatch):
    """What `benchmarks/gpu_suite.py` trains, and how it takes a step apart."""
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import gpu_suite

    assert {"layer_s", "rest_s"} < gpu_suite.extrapolate((0.12, 0.16), (4, 8), 32).keys()
    for size in gpu_suite.PRESETS:
        for pattern, composition in gpu_suite.VARIANTS[1:]:
            theirs = gpu_suite.Bench().config(size, pattern, composition)
            ours = planning.measured_config(cell(size=size, pattern=pattern, composition=composition), 64)
            assert ours.to_dict() | {"num_hidden_layers": 0, "layer_types": []} == theirs.to_dict() | {
                "num_hidden_layers": 0, "layer_types": []
            }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "2"], "compose_groups=1 is no multiple of the tensor-parallel size 2"),
        (["--gpus", "3", "--tensor-parallel", "2"], "gpus=3 is no multiple of tensor_parallel=2"),
        (["--gpus", "0"], "gpus=0: expected at least 1"),
        (["--length", "4096"], "length=4096 is above max_position_embeddings=2048"),
        (["--set", "compose_rank=0"], "compose_rank=0 must be at least 1"),
        (["--set", "nonsense=3"], "--set nonsense=3: no field of the configuration"),
        (["--set", "compose_ranks=3"], "did you mean compose_rank?"),
        (["--set", "hidden_size"], "--set hidden_size: expected FIELD=VALUE"),
        (["--set", "hidden_size=abc"], "Field 'hidden_size' expected int, got str"),
        (["--set", 'rope_parameters={"a":1}'], "rope_parameters has no a"),
        (["--memory", "-3"], "--memory -3: expected a number above 0"),
        (["--memory", "0"], "--memory 0: expected a number above 0"),
        (["--network", "-3"], "--network -3: expected a number above 0"),
        (["--network", "0"], "--network 0: expected a number above 0"),
        (["--links", "nan"], "--links nan: expected a number above 0"),
    ],
)
def test_wrong_input(capsys, words, message):
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and message in printed.err
    assert not printed.out


def test_no_estimate(capsys):
    for words in (["--attention", "eager"], ["--set", "num_hidden_layers=0"]):
        assert main(["--gpus", "64", *words]) == 0
        printed = capsys.readouterr().out
        assert "Throughput: no estimate" in printed and "| parameters |" in printed


def test_no_estimate_without_triton(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main([]) == 0
    assert 'needs triton, which is not installed: pip install "dcformer[kernels]"' in capsys.readouterr().out


def test_no_estimate_without_the_source_tree(monkeypatch, capsys):
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    monkeypatch.setitem(sys.modules, "kernel_roofline", None)
    assert main([]) == 0
    assert "put its tools/ into PYTHONPATH" in capsys.readouterr().out


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "scale_out.md").read_text(encoding="utf-8")
COMMANDS = documented_commands(REPOSITORY / "docs" / "scale_out.md")


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "dcformer-plan"], ids=" ".join)
def test_printed_plans(words, capsys):
    """Each plan of the page is what its command prints."""
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip() in PAGE


def test_figure_in_the_text(capsys):
    (batch, total) = re.search(r"(\d+) sequences per GPU without checkpointing are ([\d.]+) GiB", PAGE).groups()
    assert main(["--gpus", "64", "--batch", batch]) == 0
    assert f"| **total** of 74.5 | **{total}** |" in capsys.readouterr().out


def test_printed_activations(capsys):
    """The page's Python block prints the block behind it."""
    code, printed = re.search(r"```python\n(from dcformer import.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL).groups()
    exec(compile(code, "scale_out.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_commands_are_known():
    """Every other command of the page: a file or script that exists, and arguments that accelerate knows."""
    from accelerate.commands.launch import launch_command_parser

    others = [c for c in COMMANDS if c[0] not in ("dcformer-plan", "torchrun")]  # tests/distributed runs the latter
    assert others
    for words in others:
        assert words[:2] == ["accelerate", "launch"], words
        known = launch_command_parser().parse_args(words[2:])
        assert (REPOSITORY / known.config_file).is_file() and (REPOSITORY / known.training_script).is_file()
