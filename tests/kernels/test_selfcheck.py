"""The self-check itself: it passes for right kernels of many kinds, and names the one that is wrong.

Where an implementation is unset, a compiled model asks while it is traced: one graph, and the check is not part of it.
"""

import dataclasses
import json

import pytest
import torch
from helpers import Logits, randomize, tiny_config
from kernel_device import DEVICE, HERE, INTERPRETED
from transformers import BertConfig

from dcformer import DCFormerForCausalLM
from dcformer import selfcheck as selfcheck_command
from dcformer.implementations_dcformer import DEFAULT_ATTENTION
from dcformer.kernels import decode, generator, generator_backward, limits, overflow, passes, selfcheck, step, verdicts
from dcformer.kernels.overflow import NOTHING, Beyond
from dcformer.vision import DCViTConfig
from dcformer_commands.selfcheck import main

# name -> fields of the configuration, window, dtype, dtype of hidden states
KINDS = {
    "grouped-query": ({}, False, "float32", "float32"),
    "window, bfloat16": ({"num_key_value_heads": 4}, True, "bfloat16", "bfloat16"),
    "float16, rank 1, no gate": ({"compose_rank": 1, "compose_gate": False}, False, "float16", "float16"),
    "static, groups, autocast": ({"num_key_value_heads": 4, "compose_static": True, "compose_groups": 2}, False,
                                 "bfloat16", "float32"),
    "gates only": ({"compose_projection": False}, True, "float32", "float32"),
    "query side, before the softmax": ({"compose_key": False, "compose_post": False}, False, "bfloat16", "bfloat16"),
    "key side, rank 3": ({"compose_query": False, "compose_rank": 3, "compose_act": "gelu"}, False,
                         "float32", "float32"),
    "talking heads": ({"compose_query": False, "compose_key": False, "compose_static": True}, False,
                      "float32", "float32"),
    "head dim 80, 6 heads": ({"head_dim": 80, "num_attention_heads": 6, "num_key_value_heads": 6}, False,
                             "bfloat16", "bfloat16"),
    "2 heads of 16": ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}, False,
                      "bfloat16", "bfloat16"),  # few numbers, whose roundings do not even out
    "odd head dim": ({"head_dim": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                      "partial_rotary_factor": 0.5}}, False, "float32", "float32"),
    "no composition": ({"compose_query": False, "compose_key": False, "compose_pre": False, "compose_post": False},
                       True, "float32", "float32"),
}  # fmt: skip


def kind_named(name):
    fields, windowed, dtype, states = KINDS[name]
    return next(k for k in selfcheck.kinds(tiny_config(**fields), dtype, states) if k.windowed == windowed)


@pytest.mark.parametrize("name", KINDS)
def test_right_kernels_pass(name):
    kind = kind_named(name)
    results = selfcheck.run(HERE, kind)
    assert [str(check) for check in results if not check.passed] == []
    names = [check.name for check in results]
    assert len(set(names)) == len(names)
    composes = [stage for stage in ("pre", "post") if getattr(kind, stage)]
    sides = [side for side in ("query", "key") if getattr(kind, side)]
    parts = ["down", "up"] * (kind.rank > 0) + ["gate"] * kind.gate
    weights = [f"{stage}.{side}.{part}" for stage in composes for side in sides for part in parts]
    made = [f"generators, {name}" for name in weights]
    weights += [f"{stage}.static" for stage in composes] * kind.static
    tensors = ("query", "key", "value", *weights)
    gradients = [f"{name}, gradient of {tensor}" for name in ALL[: 1 if kind.windowed else 2] for tensor in tensors]
    assert {"attention, forward", "decoding, 1 query", "decoding, 3 queries", *gradients, *made} <= set(names)
    assert ("fused steps, token 1" in names) == ("fused steps, token 2" in names) == (kind.dtype == kind.states)
    assert ("fused steps, token 3" in names) == (kind.windowed and kind.dtype == kind.states)
    assert all(check.eager > 0 for check in results)  # the yardstick is more than zero, so something was computed


ALL = ("attention", "attention to all keys")  # of kinds without windows
SMALL = dataclasses.replace(kind_named("grouped-query"), heads=2, kv_heads=2, rank=1)


def wrong(tensor, by=1e-3):
    """A little too large, in one place of the last axis only."""
    tensor[..., 0] *= 1 + by
    return tensor


def break_forward(patch):
    right = passes.Passes.forward
    patch.setattr(passes.Passes, "forward", lambda self: (wrong((found := right(self))[0]), *found[1:]))


def break_gradients(patch, of, by=1e-3):
    right = passes.Passes.backward

    def backward(self, *args):
        grads = right(self, *args)
        for grad in of(grads):
            wrong(grad, by)
        return grads

    patch.setattr(passes.Passes, "backward", backward)


def break_launches(patch, module):
    right = module._RUN

    def run(*arguments, **options):
        made = right(*arguments, **options)
        wrong(made[0])
        return made

    patch.setattr(module, "_RUN", run)


def break_generator(patch, packed):
    right = generator._launch

    def launched(hidden, gates, qkw, weights, rows, *args):
        right(hidden, gates, qkw, weights, rows, *args)
        if bool(rows) == packed:
            wrong(rows[0] if packed else weights)

    patch.setattr(generator, "_launch", launched)


def break_generator_gradient(patch):
    right = generator_backward._RUN

    def run(tensors, *numbers):
        right(tensors, *numbers)
        wrong(tensors[1])  # of what the product with `qkw` gave
        return []

    patch.setattr(generator_backward, "_RUN", run)


def make_nan(patch):
    right = passes.Passes.forward

    def forward(self):
        out, *others = right(self)
        out[0, 0, 0, 0] = float("nan")
        return out, *others

    patch.setattr(passes.Passes, "forward", forward)


BROKEN = {
    "forward": (break_forward, {"attention, forward"}),
    "NaN": (make_nan, {"attention, forward"}),
    "gradient of keys": (lambda p: break_gradients(p, lambda grads: [grads.key]), {"attention, gradient of key"}),
    "gradient of weights": (
        lambda p: break_gradients(p, lambda grads: [stage.query for stage in grads.weights]),
        {f"attention, gradient of {i}.query.{part}" for i in ("pre", "post") for part in ("down", "up", "gate")},
    ),
    "decoding": (lambda p: break_launches(p, decode), {"decoding, 1 query", "decoding, 3 queries"}),
    "fused steps": (lambda p: break_launches(p, step), {"fused steps, token 1", "fused steps, token 2"}),
    "generator": (
        lambda p: break_generator(p, False),
        {
            f"generators, {stage}.{side}.{part}"
            for stage in ("pre", "post") for side in ("query", "key") for part in ("down", "up", "gate")
        },
    ),
    "generator into the cache": (
        lambda p: break_generator(p, True), {"generators into the cache, weights behind each key"}
    ),
    "gradient of a generator": (
        break_generator_gradient,
        {f"generators, gradient of {name}" for name in ("hidden states", "dw1_proj.weight", "qkw")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_kernels_are_caught_and_named(name, monkeypatch):
    """Off by one part in a thousand, at every so many numbers: float32 is a thousand times as exact."""
    break_it, expected = BROKEN[name]
    expected = expected | {check.replace("attention,", "attention to all keys,") for check in expected}
    break_it(monkeypatch)
    failed = [check for check in selfcheck.run(HERE, SMALL) if not check.passed]
    assert failed, "nothing was caught"
    assert {check.name for check in failed} <= expected
    if name != "gradient of weights" and name != "generator":  # of all weights one channel may be a gate, or hidden
        assert {check.name for check in failed} == expected
    for check in failed:
        assert check.name in str(check) and "is allowed" in str(check)


def test_a_ring_that_is_read_as_if_it_were_none_is_caught(monkeypatch):
    right = decode.launches
    monkeypatch.setattr(decode, "launches", lambda *given: right(*given[:10], None, *given[11:]))
    failed = [check for check in selfcheck.run(HERE, dataclasses.replace(SMALL, windowed=True)) if not check.passed]
    assert [check.name for check in failed] == ["fused steps, token 3"]


@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_wrong_gradients_are_caught_in_bfloat16(of, monkeypatch):
    """Where the yardstick's own maps are rounded: one channel is off by a fifth."""
    break_gradients(monkeypatch, lambda grads: [getattr(grads, of)], by=0.2)
    failed = [check for check in selfcheck.run(HERE, dataclasses.replace(SMALL, dtype="bfloat16")) if not check.passed]
    assert [check.name for check in failed] == [f"{name}, gradient of {of}" for name in ALL]


# marks, dtype -> a gradient that is broken, by the little that is caught
MARKED = {
    (Beyond.PRECISION, "bfloat16"): 0.2,
    (Beyond.PRECISION, "float16"): 0.05,
    (Beyond.GRADIENTS, "bfloat16"): 0.2,
    (Beyond.SCORES, "bfloat16"): 0.2,
}


@pytest.mark.parametrize(("found", "dtype"), MARKED, ids=str)
def test_kernels_that_follow_a_mark_are_checked(found, dtype, monkeypatch):
    """The right ones pass, wrong ones do not; marks are on the device only while they are."""
    kind = dataclasses.replace(SMALL, dtype=dtype, states=dtype, beyond=found)
    ran, right = [], passes.Passes.backward
    monkeypatch.setattr(passes.Passes, "backward", lambda self, *args: ran.append(self.beyond) or right(self, *args))
    monkeypatch.setattr(overflow, "_found", {})
    assert [str(check) for check in selfcheck.run(HERE, kind) if not check.passed] == []
    assert set(ran) == {found} and overflow.beyond(HERE) == NOTHING
    break_gradients(monkeypatch, lambda grads: [grads.key], by=MARKED[found, dtype])
    failed = [check for check in selfcheck.run(HERE, kind) if not check.passed]
    assert [check.name for check in failed] == [f"{name}, gradient of key" for name in ALL]


def test_large_scores_that_lose_bits_are_caught(monkeypatch):
    """In float16 models, whose other errors do not hide it: kernels for ordinary scores, given large ones."""
    monkeypatch.setattr(overflow, "_watches", {})  # marks that are left here are this test's
    right = passes.Passes.beyond.fset
    monkeypatch.setattr(passes.Passes, "beyond", passes.Passes.beyond.setter(lambda self, _: right(self, NOTHING)))
    kind = dataclasses.replace(SMALL, dtype="float16", states="float16", beyond=Beyond.PRECISION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "beyond", lambda device: NOTHING)
        failed = [check.name for check in selfcheck.run(HERE, kind) if not check.passed]
    assert {"attention, gradient of query", "attention, gradient of key"} <= set(failed)


def test_the_check_leaves_the_callers_surroundings_alone():
    """Neither random numbers nor modes of the caller matter, or change."""
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16), torch.device("meta"):
        results = selfcheck.run(HERE, SMALL)
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled(DEVICE)
    assert torch.equal(torch.get_rng_state(), state)
    again = selfcheck.run(HERE, SMALL)
    assert [(check.name, check.passed) for check in results] == [(check.name, True) for check in again]
    # Not bit for bit: the order of a sum may depend on where a tensor lies in memory.
    assert [check.allowed for check in results] == pytest.approx([check.allowed for check in again], rel=0.5)


def test_a_kind_beyond_the_limits_is_refused():
    with pytest.raises(ValueError, match="head dim 257"):
        list(selfcheck.checks(HERE, dataclasses.replace(SMALL, head_dim=257)))


def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path))  # no verdict of what was not run is kept
    results = selfcheck.run(HERE, SMALL)
    monkeypatch.setattr(selfcheck, "run", lambda device, kind: results)  # the numbers are tested above
    assert main(["--preset", "dcformer-405m", "--dtype", "float32", "--autocast", "--device", DEVICE]) == 0
    out = capsys.readouterr().out
    assert all(check.name in out for check in results) and f"{len(results)} results, 0 beyond" in out
    if INTERPRETED:
        assert "says nothing about a GPU" in out
    kinds = []
    monkeypatch.setattr(selfcheck, "run", lambda device, kind: kinds.append(kind) or results)
    command = ["--preset", "dcformer-405m", "--dtype", "float32", "float16", "--beyond", "scores", "precision"]
    assert main([*command, "--device", DEVICE]) == 0
    found = Beyond.SCORES | Beyond.PRECISION
    assert {(kind.dtype, kind.beyond) for kind in kinds} == {("float32", NOTHING), ("float16", found)}
    out = capsys.readouterr().out
    assert "global float16 after the mark of scores after the mark of precision\n" in out and "global float32\n" in out


def test_models_of_images_can_be_checked(capsys, monkeypatch, tmp_path):
    """Their layers are of one kind, and see all keys, which is checked of every kind without windows."""
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "cache"))
    DCViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(tmp_path)
    kinds = []
    monkeypatch.setattr(selfcheck_command, "_check_kind", lambda device, kind: kinds.append(kind) or True)
    assert main(["--model", str(tmp_path), "--dtype", "float32", "--device", DEVICE]) == 0
    assert [(kind.heads, kind.windowed) for kind in kinds] == [(4, False)]
    BertConfig().save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--device", DEVICE]) == 1
    assert "is a 'bert' model: expected one of this package" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [({"hidden_size": "x"}, "expected int, got str"), ({"compose_rank": 0}, "compose_rank=0"), ([], "")],
    ids=str,
)
def test_the_command_with_a_bad_configuration(content, message, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "dcformer"} | content if content else content))
    assert main(["--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: ") and error.count("\n") == 1 and message in error


def test_the_command_without_a_model(capsys):
    assert main(["--model", "no/model", "--device", DEVICE]) == 1
    assert capsys.readouterr().err.startswith("error: no/model: no such file or folder, and not found on the Hub")


# --- the default, traced ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The device of these tests counts as a GPU on which the check passes; a list of the kinds that it was run for."""
    kinds = []

    def run(device, kind):
        kinds.append(kind)
        return []

    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_passed", {})
    monkeypatch.setattr(selfcheck, "is_gpu", lambda device: device.type == DEVICE)
    monkeypatch.setattr(selfcheck, "is_interpreted", lambda: False)
    monkeypatch.setattr(verdicts, "machine", lambda device: {"device": "this"})
    monkeypatch.setattr(selfcheck, "run", run)
    return kinds


real_run = selfcheck.run


class Graphs:
    """A backend that counts graphs and the operators in them."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs, self.operators = 0, set()

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        for node in graph.graph.nodes:
            if str(node.target).startswith(("dcformer.composed_", "dcformer.generate_")):
                self.operators.add(str(node.target).split(".")[1])
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


def unset_model():
    return randomize(DCFormerForCausalLM(tiny_config(num_key_value_heads=4))).to(DEVICE)


@pytest.mark.parametrize("is_known", [False, True], ids=["checked while tracing", "checked before"])
def test_a_compiled_default_is_one_graph_with_the_kernels(asked, is_known, monkeypatch):
    model, backend = unset_model(), Graphs()
    ids = torch.arange(1, 10, device=DEVICE)[None]
    if is_known:
        model(ids)
    else:  # the check itself, in the middle of tracing

        def run_it(device, kind):
            asked.append(kind)
            results = real_run(device, kind)
            assert len(results) > 40 and type(results[0].error) is float
            return results

        monkeypatch.setattr(selfcheck, "run", run_it)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss = compiled(ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert backend.graphs == 1 and backend.operators == {"composed_attention", "generate_weights"}
    assert len(asked) == len(set(asked)) == 2
    model.zero_grad()
    model.set_attn_implementation("dcformer_triton")
    expected = model(ids, labels=ids, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_a_compiled_default_that_failed_is_one_graph_without_kernels(asked, monkeypatch):
    bad = selfcheck.Check("attention, forward", "norm", 9.0, 1.0, 3.0)
    monkeypatch.setattr(selfcheck, "run", lambda device, kind: [bad])
    model, backend = unset_model(), Graphs()
    ids = torch.arange(1, 21, device=DEVICE)[None]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        found = compiled(ids, use_cache=False).logits
    assert backend.graphs == 1 and not backend.operators
    model.set_attn_implementation("dcformer_chunked")
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_have_no_kernels(asked, strict):
    model = unset_model()
    ids = torch.arange(1, 21, device=DEVICE)[None]
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids,), strict=strict)
        targets = {str(node.target) for node in program.graph.nodes}
        assert not [t for t in targets if "composed_attention" in t or "generate_weights" in t]
        assert asked == []
        torch.testing.assert_close(program.module()(ids), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["dynamic", "static"]
)
def test_generate_with_the_default(asked, options):
    model = unset_model()
    ids = torch.arange(1, 8, device=DEVICE)[None]
    options |= {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **options)
    # A static cache's masks are tensors, which hold the window: the kernels are given none.
    kinds = {kind.windowed for kind in asked}
    assert kinds == ({False} if "cache_implementation" in options else {True, False})
    assert model.config._attn_implementation == DEFAULT_ATTENTION
    for name in ("dcformer_triton", "eager"):
        model.set_attn_implementation(name)
        assert torch.equal(model.generate(ids, **options), found)


def test_the_default_under_autocast_asks_about_both_dtypes(asked):
    model = unset_model()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        model(torch.arange(1, 21, device=DEVICE)[None])
    assert {(kind.dtype, kind.states) for kind in asked} == {("bfloat16", "float32")}


@pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter in this run")
def test_the_default_never_interprets(asked, monkeypatch):
    monkeypatch.setattr(selfcheck, "is_interpreted", limits.is_interpreted)
    monkeypatch.setattr(selfcheck, "_told", set())
    kind = kind_named("grouped-query")
    *fields, _ = dataclasses.astuple(kind)
    assert not selfcheck.may_use(DEVICE, None, *fields) and asked == []
    assert any("TRITON_INTERPRET" in reason for reason in selfcheck._told)
