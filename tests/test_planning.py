"""`dcformer-plan`: its formulas against what small models take, and the commands of docs/scale_out.md."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import REPOSITORY

from dcformer import DCFormerConfig, DCFormerForCausalLM, planning
from dcformer.planning import OPTIMIZERS, Setup, activation_bytes, collectives, main, memory, saved_logits_bytes

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


def test_speed(tmp_path, capsys):
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    config = DCFormerConfig.from_preset("dcformer-6.9b")
    fast, slow = (planning.estimate(Setup(config, 64, batch=8), "h100", share, 50e9, 4e11) for share in (1.0, 0.5))
    assert slow.tokens < fast.tokens and "ESTIMATE" in fast.source
    again = planning.estimate(Setup(config, 64, batch=8, checkpointing=True), "h100", 1.0, 50e9, 4e11)
    assert again.tokens == pytest.approx(fast.tokens * 3 / 4, rel=0.01)
    bound = planning.estimate(Setup(config, 64, batch=1), "h100", 1.0, 50e9, 4e11)
    assert "bound by the network" in bound.source
    cell = {"section": "train", "size": "6.9b", "pattern": "LG", "composition": "full", "tokens": 2048}
    path = tmp_path / "gpu_suite.json"
    path.write_text(json.dumps({"cells": [cell | {"status": "ok", "tokens_per_s": 9000.0}]}))
    assert main(["--measured", str(path), "--batch", "8", "--network", "1000"]) == 0
    assert "one GPU measured: gpu_suite.json: 576,000 tokens/s" in capsys.readouterr().out
    assert main(["--measured", str(path), "--preset", "dcformer-13b"]) == 1
    assert "has no measurement of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "2"], "compose_groups=1 is no multiple of the tensor-parallel size 2"),
        (["--gpus", "3", "--tensor-parallel", "2"], "gpus=3 is no multiple of tensor_parallel=2"),
        (["--gpus", "0"], "gpus=0: expected at least 1"),
        (["--length", "4096"], "length=4096 is above max_position_embeddings=2048"),
        (["--set", "compose_rank=0"], "compose_rank=0 must be at least 1"),
        (["--measured", "absent.json"], "absent.json"),
    ],
)
def test_wrong_input(capsys, words, message):
    assert main(words) == 1
    assert message in (printed := capsys.readouterr()).err and "Traceback" not in printed.err


def test_no_estimate(capsys):
    assert main(["--attention", "eager", "--gpus", "64"]) == 0
    assert "Throughput: no estimate" in capsys.readouterr().out


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "scale_out.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line.replace("\\\n", " "))
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", block).splitlines()
    if line.strip()
]


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "dcformer-plan"], ids=" ".join)
def test_printed_plans(words, capsys):
    """Each plan of the page is what its command prints."""
    pytest.importorskip("triton", reason="needs the extra [kernels]")
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip() in PAGE


def test_the_commands_are_known():
    """Every other command of the page: a file or script that exists, and arguments that accelerate knows."""
    from accelerate.commands.launch import launch_command_parser

    others = [c for c in COMMANDS if c[0] not in ("dcformer-plan", "make", "pip")]
    assert others
    for words in others:
        assert words[:2] == ["accelerate", "launch"], words
        known = launch_command_parser().parse_args(words[2:])
        assert (REPOSITORY / known.config_file).is_file() and (REPOSITORY / known.training_script).is_file()
