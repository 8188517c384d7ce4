"""`dcformer-plan` against what small models take, and the commands of docs/scale_out.md."""

import math
import re
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import REPOSITORY, documented_commands, kept_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer import (
    DCFormerConfig,
    DCFormerForCausalLM,
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
    chunked_dcformer,
    planning,
)
from dcformer.analysis import num_parameters
from dcformer.errors import DCFormerError
from dcformer.planning import OPTIMIZERS, Setup, collectives, memory, report
from dcformer_commands.plan import main

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
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
    "head maps": {
        "key_head_map": [[0, 0, 1, 1], [0] * 4, [1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3]],
        "value_head_map": [[0] * 4, [0, 0, 1, 1], [0, 0, 1, 1], [3, 1, 2, 0], [0, 0, 1, 1]],
    },
    "head embeddings, add": {"head_embeddings": "add"},
    "head embeddings, mul": {"head_embeddings": "mul"},
    "partial rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


def step_bytes(config, attention, dtype, length=32, checkpointing=False, batch=2):
    """Bytes that autograd keeps of a model at the end of the forward pass."""
    model = DCFormerForCausalLM(config).to(dtype).train()
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return kept_bytes(model, lambda: model(ids, labels=ids, use_cache=False))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "batch", "dtype", "variant"),
    [
        *(("eager", 1, torch.float32, variant) for variant in VARIANTS),
        *(("dcformer_chunked", 2, torch.bfloat16, variant) for variant in VARIANTS),
        *(("eager", 2, torch.bfloat16, variant) for variant in ("full", "multi-gate", "head maps")),
        *(("dcformer_chunked", 2, torch.float32, variant) for variant in ("full", "multi-gate", "head maps")),
    ],
    ids=str,
)
def test_activations(variant, dtype, attention, batch):
    config = DCFormerConfig(**(SIZES | VARIANTS[variant]))
    setup = Setup(config, gpus=1, batch=batch, length=32, dtype=dtype, attention=attention)
    found = step_bytes(config, attention, dtype, batch=batch)
    # what autograd keeps of the tokens is not of the step, which is given them; scalars make up the rest
    assert found - 8 * batch * 32 <= memory(setup).activations <= found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointing(dtype):
    """What is kept at the end of the forward pass; a layer's own comes when it runs again."""
    config = DCFormerConfig(**SIZES)
    setup = Setup(config, 1, batch=2, length=32, dtype=dtype, attention="dcformer_chunked", checkpointing=True)
    found = step_bytes(config, "dcformer_chunked", dtype, checkpointing=True)
    rotary = 2 * 32 * 16 * dtype.itemsize  # cosines and sines: held all the while, though not by autograd
    assert found + rotary - 8 * 2 * 32 <= memory(setup).activations <= found + rotary


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "checkpointing"), [("eager", False), ("dcformer_chunked", False), ("eager", True)]
)
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
def test_peak_of_a_training_step(monkeypatch, fields, length, attention, checkpointing):
    """Between what is held at the end of the forward pass and the sum of all parts, each the largest in some case.

    Blocks of scores are small here, or those of the chunked attention would be larger than all else in such a model.
    """
    for module in (chunked_dcformer, planning):
        monkeypatch.setattr(module, "BLOCK_SCORES", 1 << 16)
    config = DCFormerConfig(**(SIZES | fields))
    model = DCFormerForCausalLM(config).train()
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
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
    parts = memory(replace(setup, checkpointing=checkpointing))
    kept = parts.parameters + parts.optimizer + parts.activations
    assert kept <= peak.top <= parts.total


def test_shares():
    """GPUs that share parameters and layers have a share of each, rows rounded up; half of both is a quarter."""
    config = DCFormerConfig(**(SIZES | {"vocab_size": 104, "compose_groups": 2}))
    whole = memory(Setup(config, 1, length=32))
    for gpus, parallel in ((2, 1), (8, 1), (2, 2), (4, 2)):
        parts = memory(Setup(config, gpus, parallel, length=32))
        assert parts.parameters == pytest.approx(whole.parameters / gpus, rel=0.02)
        assert parts.optimizer == 2 * parts.parameters
    one, two = (memory(Setup(config, 2, t, length=32, batch=2, attention="eager")) for t in (1, 2))
    assert one.activations / 2 < two.activations < one.activations


@pytest.mark.parametrize("variant", ["groups", "multi-gate", "pythia", "grouped queries"])
def test_shares_of_a_layer(variant):
    """The parameters that the model's tensor-parallel plan leaves on the first of two processes."""
    config = DCFormerConfig(**(SIZES | {"vocab_size": 101, "compose_groups": 2} | VARIANTS[variant]))
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    numbers = 0
    for name, parameter in model.named_parameters():
        generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
        style = model.tp_plan.get(generic) or model.tp_plan.get(generic.rpartition(".")[0], "")
        shape = list(parameter.shape)
        if style.startswith("colwise") or style == "embedding_rowwise":
            shape[0] = math.ceil(shape[0] / 2)
        elif style == "rowwise" and not name.endswith(".bias"):
            shape[1] = math.ceil(shape[1] / 2)
        numbers += math.prod(shape)
    assert memory(Setup(config, 2, 2, length=32)).parameters == 4 * numbers


def test_memory_without_the_kernels():
    """Eager attention keeps maps: quadratic in the length; the chunked implementation does not."""
    config = DCFormerConfig.from_preset("dcformer-6.9b", max_position_embeddings=8192)
    kept = {
        how: [memory(Setup(config, 64, length=length, attention=how)).activations for length in (4096, 8192)]
        for how in ("dcformer_chunked", "eager")
    }
    assert kept["eager"][1] / kept["eager"][0] > 3.5
    assert kept["dcformer_chunked"][1] / kept["dcformer_chunked"][0] == pytest.approx(2, abs=0.01)
    assert kept["dcformer_chunked"][1] < kept["eager"][1] / 10


# --- communication ----------------------------------------------------------------------------------------------------


def test_communication():
    config = DCFormerConfig.from_preset("dcformer-6.9b")
    assert collectives(Setup(config, 1)) == []
    gather, scatter = collectives(Setup(config, 64, accumulation=2))
    size = 2 * num_parameters(config)
    assert (gather.count, scatter.count) == (2 * 67, 2 * 34)
    assert scatter.sent == pytest.approx(2 * size * 63 / 64)
    assert 1.9 * scatter.sent < gather.sent < 2 * scatter.sent


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "2"], "compose_groups=1"),
        (["--gpus", "3", "--tensor-parallel", "2"], "gpus=3 is not a multiple of tensor_parallel=2"),
        (["--gpus", "0"], "gpus=0: expected at least 1"),
        (["--length", "4096"], "length=4096 is above max_position_embeddings=2048"),
        (["--set", "compose_rank=0"], "compose_rank=0 must be at least 1"),
        (["--set", "nonsense=3"], "--set nonsense=3: DCFormerConfig has no field 'nonsense'; docs/configuration.md"),
        (["--set", "hidden_sizes=3"], "did you mean hidden_size?"),
        (["--set", "rope_theta=x"], "rope_theta='x' must be a finite number above 0"),
        (["--set", "rope_theta=1", 'rope_parameters={"rope_theta":2}'], "rope_theta has no effect beside rope_param"),
        (["--set", "hidden_size"], "--set hidden_size: expected FIELD=VALUE"),
        (["--set", "hidden_size=abc"], "Field 'hidden_size' expected int, got str"),
        (["--set", 'rope_parameters={"a":1}'], "rope_parameters has unknown keys, a"),
        (["--set", "pad_token_id=99999999"], "pad_token_id=99999999 is not in the vocabulary: expected 0 to 50256"),
        (["--set", "compose_rank=8"], "cannot train this model: rank 8 is beyond the fused kernels"),
        (["--set", "head_dim=512"], "head dim 512 is beyond the fused kernels"),
        (["--set", "num_attention_heads=128"], "128 heads per group are beyond the fused kernels"),
        (["--set", "attention_dropout=0.1"], "attention_dropout=0.1 is not part of the fused kernels"),
        (["--set", "head_embeddings=add"], "head_embeddings are beyond the fused kernels"),
        (["--memory", "-3"], "--memory -3: expected the GB of a GPU, above 0"),
        (["--memory", "0"], "--memory 0: expected"),
        (["--memory", "nan"], "--memory nan: expected"),
        (["--memory", "inf"], "--memory inf: expected"),
        (["--set", "num_hidden_layers=0"], "num_hidden_layers=0: expected at least 1"),
    ],
)
def test_wrong_input(capsys, words, message):
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and message in printed.err
    assert not printed.out


@pytest.mark.parametrize("name", ["collaborative", "mixture_of_heads", "output_gate"])
def test_head_systems(name):
    """Parameters are the system's; those whose heads cannot be divided have no tensor parallelism."""
    config = HeadSystemsConfig(**SIZES, head_system=name, compose_groups=2)
    setup = Setup(config, gpus=1, length=32, attention="dcformer_chunked")
    parameters = HeadSystemsForCausalLM(config).num_parameters()
    assert memory(setup).parameters == 4 * parameters
    assert f"{name}: {parameters:,} parameters" in report(setup, name)
    split = {"gpus": 2, "tensor_parallel": 2}
    if name == "output_gate":
        assert memory(replace(setup, **split)).parameters < memory(setup).parameters
    else:
        with pytest.raises(DCFormerError, match=f"head_system='{name}' has no tensor parallelism"):
            replace(setup, **split)


def test_what_only_other_implementations_can_train(capsys):
    words = ["--preset", "dcformer-405m", "--set", "compose_rank=8", "attention_dropout=0.1"]
    for attention in ("dcformer_chunked", "eager"):
        assert main([*words, "--attention", attention]) == 0
        assert f"; {attention}" in capsys.readouterr().out


def test_padding_beyond_a_part_of_the_vocabulary():
    """A GPU has half of the rows: the padding token's may be among the others."""
    config = DCFormerConfig(**(SIZES | {"vocab_size": 104, "compose_groups": 2}))
    padded = DCFormerConfig(**(SIZES | {"vocab_size": 104, "compose_groups": 2, "pad_token_id": 103}))
    assert memory(Setup(padded, 2, 2, length=32)) == memory(Setup(config, 2, 2, length=32))


@pytest.mark.parametrize("size", [-3e9, 0, math.nan, math.inf])
def test_bytes_of_a_gpu(size):
    with pytest.raises(DCFormerError, match=r"memory=\S+: expected the bytes of a GPU, above 0"):
        Setup(DCFormerConfig(**SIZES), memory=size)


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "scale_out.md").read_text(encoding="utf-8")
COMMANDS = documented_commands(REPOSITORY / "docs" / "scale_out.md")


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "dcformer-plan"], ids=" ".join)
def test_printed_plans(words, capsys):
    """Each plan of the page is what its command prints."""
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip() in PAGE


def test_figure_in_the_text(capsys):
    (batch, total) = re.search(r"at most (\d+) sequences per GPU fit, with ([\d.]+) GiB", PAGE).groups()
    assert main(["--gpus", "64", "--batch", batch]) == 0
    assert f"| **total** of 74.5 | **{total}** |" in capsys.readouterr().out


@pytest.mark.slow
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
