"""What runs where no attention implementation is named: the decision, and the limits that it asks about.

There is no GPU here. Tensors on "meta" stand for those on one: the kernels' operators have fake kernels, so a model
there calls what it would call. The interpreter's tests (tests/kernels/test_selfcheck.py) run the check itself.
"""

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerForSequenceClassification, plain_dcformer
from dcformer.chunked_dcformer import chunked_attention
from dcformer.implementations_dcformer import DEFAULT_ATTENTION
from dcformer.kernels import limits, overflow, selfcheck, unsupported_reason, verdicts
from dcformer.kernels.overflow import NOTHING, Beyond

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install 'dcformer[kernels]'")
MACHINE = {"device": "Fake 100", "driver": "1", "torch": "2", "triton": "3", "dcformer": "0"}
GOOD = selfcheck.Check("attention, forward", "norm", 1.0, 1.0, 3.0)
BAD = selfcheck.Check("decoding, 1 query", "largest", 9.0, 1.0, 3.0)


class Operators(TorchDispatchMode):
    """Names of the kernels' operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if function.namespace == "dcformer" and name.startswith(("composed_", "generate_")):
            self.names.add(name)
        return function(*args, **(kwargs or {}))


class Gpu:
    """A machine whose "meta" device is a GPU: `results` of the self-check, `runs` the kinds it saw."""

    def __init__(self, patch, folder, records):
        self.results, self.runs, self.machine, self.records, self.reason = [GOOD], [], dict(MACHINE), records, None
        patch.setenv("DCFORMER_CACHE", str(folder))
        patch.setattr(selfcheck, "_passed", {})
        patch.setattr(selfcheck, "_told", set())
        patch.setattr(selfcheck, "is_gpu", lambda device: device.type == "meta")
        patch.setattr(selfcheck, "is_interpreted", lambda: False)
        patch.setattr(selfcheck, "run", self.run)
        patch.setattr(verdicts, "machine", lambda device: dict(self.machine))
        has_autocast = torch.is_autocast_enabled  # knows no "meta"
        patch.setattr(torch, "is_autocast_enabled", lambda device: device != "meta" and has_autocast(device))
        patch.setattr(limits, "_device_reason", lambda kind, index: self.reason if kind == "meta" else "no GPU")

    def run(self, device, kind):
        self.runs.append(kind)
        if isinstance(self.results, Exception):
            raise self.results
        return self.results

    def forget(self):
        """As a new process."""
        selfcheck._passed.clear()
        selfcheck._told.clear()
        self.records.clear()

    @property
    def warnings(self):
        return [record.getMessage() for record in self.records if "fused kernels" in record.getMessage()]


CALLED = []


def chunked(module, query, *args, **kwargs):
    """The chunked implementation, which says that it was called; on "meta", where it cannot run, only that."""
    CALLED.append("chunked")
    if query.device.type == "meta":
        return torch.empty_like(query.transpose(1, 2)), None
    return chunked_attention(module, query, *args, **kwargs)


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.list = []

    def emit(self, record):
        self.list.append(record)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    handler = Records()
    selfcheck.logger.addHandler(handler)
    AttentionInterface.register("dcformer_chunked", chunked)
    yield Gpu(monkeypatch, tmp_path / "cache", handler.list)
    selfcheck.logger.removeHandler(handler)
    AttentionInterface.register("dcformer_chunked", chunked_attention)


def model(**fields):
    return randomize(DCFormerForCausalLM(tiny_config(**fields)))


def used(model, length=20, **options):
    """What a forward pass calls: names of operators, or "chunked"."""
    device = model.device
    CALLED.clear()
    ids = torch.ones(1, length, dtype=torch.long, device=device)
    with torch.no_grad(), Operators() as operators:
        model(ids, use_cache=False, **options)
    return operators.names | set(CALLED)


KERNELS, CHUNKED = {"composed_attention", "generate_weights"}, {"chunked"}

# --- where the tensors are --------------------------------------------------------------------------------------------


@needs_triton
def test_a_model_that_is_moved(gpu):
    """Built on the CPU: chunked there, kernels on the GPU, chunked again after its return."""
    here = model()
    rotary, state = here.model.rotary_emb, copy.deepcopy(here.state_dict())
    here.model.rotary_emb = copy.deepcopy(rotary)
    assert here.config._attn_implementation == DEFAULT_ATTENTION
    expected = here(torch.ones(1, 20, dtype=torch.long)).logits
    assert used(here) == CHUNKED and gpu.runs == []
    there = here.to("meta")
    assert used(there) == KERNELS
    assert used(there, length=3) == {"composed_decode", "generate_weights"}
    back = there.to_empty(device="cpu")
    back.load_state_dict(state)
    back.model.rotary_emb = rotary  # buffers that no state dict holds
    assert used(back) == CHUNKED
    torch.testing.assert_close(back(torch.ones(1, 20, dtype=torch.long)).logits, expected)
    assert {kind.windowed for kind in gpu.runs} == {True, False} and len(gpu.runs) == 2  # once for each kind of layer
    assert gpu.warnings == []


@needs_triton
def test_without_composition_torchs_attention_comes_first(gpu, monkeypatch):
    """Which chunked calls: for more than a few queries of which none is padded, in layers without a window."""
    monkeypatch.setattr(plain_dcformer, "has_values", lambda device: True)
    switches = {"compose_query": False, "compose_key": False, "compose_pre": False, "compose_post": False}
    plain = model(layer_pattern="G", **switches).to("meta")
    assert used(plain) == {"chunked"} and gpu.runs == []
    assert used(plain, length=3) == {"composed_decode"}
    assert used(model(layer_pattern="L", **switches).to("meta")) == {"composed_attention"}


@needs_triton
def test_layers_on_several_devices_decide_for_themselves(gpu):
    attention = [layer.self_attn for layer in model().model.layers]
    attention[1].to("meta")
    for layer, device, expected in zip(attention, ("cpu", "meta"), (set(), KERNELS), strict=True):
        states = torch.zeros(1, 20, 32, device=device)
        cos, sin = (torch.zeros(1, 20, 8, device=device) for _ in range(2))
        with torch.no_grad(), Operators() as operators:
            layer(states, (cos, sin))
        assert operators.names == expected


@needs_triton
@pytest.mark.parametrize("name", ["dcformer_chunked", "eager"])
def test_a_named_implementation_is_pinned(gpu, name):
    pinned = model(attn_implementation=name).to("meta")
    expected = CHUNKED if name == "dcformer_chunked" else set()
    assert used(pinned) == expected
    later = model().to("meta")
    assert used(later) == KERNELS
    later.set_attn_implementation(name)
    assert later.config._attn_implementation == name and used(later) == expected
    later.set_attn_implementation(None)  # unset again
    assert later.config._attn_implementation == DEFAULT_ATTENTION and used(later) == KERNELS


@needs_triton
def test_the_default_stays_one_in_copies_and_is_not_stored(gpu, tmp_path):
    first = model()
    for config in (first.config, copy.deepcopy(first.config)):
        again = DCFormerForCausalLM(config)
        assert again.config._attn_implementation == DEFAULT_ATTENTION and used(again.to("meta")) == KERNELS
    first.save_pretrained(tmp_path)
    stored = (tmp_path / "config.json").read_text()
    assert "attn" not in stored and DEFAULT_ATTENTION not in stored
    loaded = DCFormerForCausalLM.from_pretrained(tmp_path)
    assert used(loaded.to("meta")) == KERNELS
    named = DCFormerForCausalLM.from_pretrained(tmp_path, attn_implementation="dcformer_chunked")
    assert used(named.to("meta")) == CHUNKED


@needs_triton
def test_models_with_other_heads_decide_alike(gpu):
    other = DCFormerForSequenceClassification(tiny_config(pad_token_id=0, num_labels=3)).eval().to("meta")
    assert used(other) == KERNELS


# --- what the self-check said -----------------------------------------------------------------------------------------


@needs_triton
def test_a_check_that_fails_means_chunked_and_one_warning(gpu):
    gpu.results = [GOOD, BAD]
    there = model(layer_types=["full_attention"] * 2).to("meta")
    assert used(there) == CHUNKED == used(there)
    assert len(gpu.runs) == 1
    assert len(gpu.warnings) == 1
    warning = gpu.warnings[0]
    assert "Fake 100" in warning and "decoding, 1 query is off by 9 (largest), 3 is allowed" in warning
    assert "dcformer_chunked" in warning and "attention, forward" not in warning
    gpu.forget()  # a later process says so too, without another check
    assert used(there) == CHUNKED
    assert len(gpu.runs) == 1 and len(gpu.warnings) == 1 and "decoding, 1 query" in gpu.warnings[0]


@needs_triton
@pytest.mark.parametrize("results", [[GOOD, BAD], RuntimeError("no compiler")], ids=["failed", "impossible"])
def test_two_kinds_of_layers_that_fail_are_one_warning(gpu, results):
    gpu.results = results
    there = model().to("meta")
    assert len(set(there.config.layer_types)) == 2
    assert used(there) == CHUNKED == used(there)
    assert len(gpu.runs) == 2 and len(gpu.warnings) == 1


@needs_triton
def test_a_kept_verdict_spares_the_check(gpu):
    there = model().to("meta")
    assert used(there) == KERNELS
    gpu.forget()
    gpu.results = RuntimeError("not again")
    assert used(there) == KERNELS and len(gpu.runs) == 2


@needs_triton
@pytest.mark.parametrize("what", list(MACHINE))
def test_another_device_driver_or_version_is_checked_again(gpu, what):
    there = model(layer_types=["full_attention"] * 2).to("meta")
    used(there)
    gpu.forget()
    gpu.machine[what] = "other"
    gpu.results = [BAD]
    assert used(there) == CHUNKED and len(gpu.runs) == 2
    gpu.forget()
    gpu.machine[what] = MACHINE[what]  # and back: what was kept for it still holds
    assert used(there) == KERNELS and len(gpu.runs) == 2


@needs_triton
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"passed": true}', '{"passed": "yes", "summary": ""}', b"\xff", "[" * 200_000],
    ids=lambda content: str(content)[:20],
)
def test_a_damaged_cache_is_checked_again(gpu, content):
    there = model(layer_types=["full_attention"] * 2).to("meta")
    used(there)
    (path,) = (verdicts.cache_folder() / "selfcheck").iterdir()
    good = path.read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    gpu.forget()
    assert used(there) == KERNELS and len(gpu.runs) == 2
    assert path.read_bytes() == good  # whole again


@needs_triton
def test_a_verdict_on_something_else_is_not_taken(gpu):
    """A file under the right name that says it is about another machine."""
    there = model(layer_types=["full_attention"] * 2).to("meta")
    used(there)
    (path,) = (verdicts.cache_folder() / "selfcheck").iterdir()
    content = json.loads(path.read_text())
    content["machine"]["driver"] = "other"
    path.write_text(json.dumps(content))
    gpu.forget()
    assert used(there) == KERNELS and len(gpu.runs) == 2


@needs_triton
@pytest.mark.parametrize("passes", [True, False])
def test_after_a_mark_the_kernels_are_checked_again(gpu, passes, monkeypatch):
    """They keep other maps then; those of float32 models do not."""
    monkeypatch.setattr(overflow, "_found", {})
    models = [model(layer_types=["full_attention"] * 2).to("meta", dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert used(models[0]) == used(models[1]) == KERNELS and len(gpu.runs) == 2
    overflow._found[torch.device("meta")] = Beyond.PRECISION
    gpu.results = [GOOD] if passes else [BAD]
    assert (used(models[0]) == KERNELS) == passes
    assert used(models[1]) == KERNELS  # as kept
    assert [kind.beyond for kind in gpu.runs] == [NOTHING, NOTHING, Beyond.PRECISION]
    assert ("global bfloat16 after the mark of precision" in "".join(gpu.warnings)) != passes


@needs_triton
def test_a_layer_that_is_computed_again_asks_nothing_new(gpu, monkeypatch):
    """In the backward pass of a checkpoint, where its first pass has left the mark: what the pass did is done again,
    and a check, with a backward pass of its own, would wait for the one that is under way."""
    monkeypatch.setattr(overflow, "_found", {})
    kind = selfcheck.kinds(tiny_config(layer_types=["full_attention"] * 2), "bfloat16")[0]
    *fields, _ = vars(kind).values()
    assert selfcheck.may_use("meta", None, *fields) and len(gpu.runs) == 1
    overflow._found[torch.device("meta")] = Beyond.PRECISION
    gpu.results, found = [BAD], []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(selfcheck.may_use("meta", None, *fields)))
    x.sum().backward()
    assert found == [True] and len(gpu.runs) == 1
    assert not selfcheck.may_use("meta", None, *fields) and len(gpu.runs) == 2


@needs_triton
@pytest.mark.parametrize("there_is", ["file", "folder"])
def test_a_folder_that_cannot_be_written_is_no_error(gpu, tmp_path, there_is):
    if there_is == "file":
        (tmp_path / "cache").write_text("in the way")
    else:  # where the verdict would be
        kind = selfcheck.kinds(tiny_config(layer_types=["full_attention"] * 2), "float32")[0]
        verdicts.verdict_file(MACHINE, vars(kind)).mkdir(parents=True)
    there = model(layer_types=["full_attention"] * 2).to("meta")
    assert used(there) == KERNELS
    gpu.forget()
    assert used(there) == KERNELS and len(gpu.runs) == 2
    assert not list(tmp_path.rglob(".*"))  # nothing half-written is left


@needs_triton
@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), False),
        (RuntimeError("Failed to find C compiler"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), True),
    ],
    ids=["memory", "compiler", "device"],
)
def test_a_check_that_cannot_run_means_chunked(gpu, error, is_kept, monkeypatch):
    """It is kept only where the device is broken for this process: the next one must not break it again."""
    traces = []
    monkeypatch.setattr(selfcheck.logger, "debug", lambda *_, exc_info: traces.append(exc_info and sys.exc_info()[1]))
    gpu.results = error
    there = model(layer_types=["full_attention"] * 2).to("meta")
    assert used(there) == CHUNKED == used(there)
    assert len(gpu.runs) == 1 and len(gpu.warnings) == 1
    assert "could not run on Fake 100, for heads=4/2 groups=1 head_dim=8 rank=2" in gpu.warnings[0]
    assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in gpu.warnings[0]
    assert traces == [error]  # for whom looks for it
    gpu.forget()
    gpu.results = [GOOD]
    assert used(there) == (CHUNKED if is_kept else KERNELS)


@needs_triton
def test_a_check_is_about_a_kind_of_layer(gpu):
    """Heads, groups, head dim, rank, switches, dtype and window: each is another question."""
    base = {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 4}
    others = [
        {}, {"num_attention_heads": 8, "num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"compose_groups": 2},
        {"head_dim": 16}, {"compose_rank": 1}, {"compose_gate": False}, {"compose_static": True},
        {"compose_pre": False}, {"compose_key": False}, {"compose_projection": False}, {"compose_act": "gelu"},
        {"layer_types": ["sliding_attention"] * 2},
    ]  # fmt: skip
    for fields in others:
        used(model(**(base | fields)).to("meta"))
    used(model(**base).to("meta", torch.bfloat16))
    assert len(gpu.runs) == len(set(gpu.runs)) == len(others) + 1
    assert gpu.runs[-1].dtype == gpu.runs[-1].states == "bfloat16"


@needs_triton
def test_kinds_of_a_configuration_are_those_that_its_model_asks_about(gpu):
    config = tiny_config(compose_static=True, compose_groups=2, num_key_value_heads=4)
    used(DCFormerForCausalLM(config).eval().to("meta"))
    assert set(selfcheck.kinds(config, "float32")) == set(gpu.runs)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits_are_where_the_table_says():
    within = {
        "device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 256, "heads": 64, "rank": 4,
        "activation": "gelu", "dropout": 0.0, "mask": None, "trace": False, "head_maps": False,
        "head_embeddings": False,
    }  # fmt: skip
    for limit in limits.LIMITS:
        ((name, _),) = limit.beyond.items()
        assert name in within
        reason = unsupported_reason(**limit.beyond)
        assert reason is not None and ("use " in reason or "set it to" in reason), limit.name
        if name != "device":
            assert unsupported_reason(**{name: within[name]}) is None
    assert {name for limit in limits.LIMITS for name in limit.beyond} == set(within)
    assert unsupported_reason() is None and unsupported_reason(rank=0, head_dim=1) is None
    assert unsupported_reason(head_dim=0) is not None


def test_the_docs_have_the_table():
    page = (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert limits.limits_table() in page, f"docs/kernels.md should have:\n{limits.limits_table()}"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 5), "need compute capability 8.0, Fake 100 has 7.5"), ((8, 0), None), ((9, 0), None), ((12, 0), None)],
)
@needs_triton
def test_devices(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fake 100")
    found = unsupported_reason(device=torch.device("cuda", 0))
    assert found is None if reason is None else reason in found


@needs_triton
def test_devices_without_cuda(monkeypatch):
    monkeypatch.setattr(limits, "is_interpreted", lambda: False)
    assert "on 'cpu'" in unsupported_reason(device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds none" in unsupported_reason(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert "finds none" in unsupported_reason(device=torch.device("cuda", 0))


def test_devices_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(limits, "is_interpreted", lambda: False)
    assert "Triton, which is not installed" in unsupported_reason(device=torch.device("cuda", 0))


def test_the_limits_need_torch_alone():
    path = str(REPOSITORY / "src/dcformer/kernels/limits.py")
    program = "import runpy, sys\nsys.modules['triton'] = sys.modules['transformers'] = None\n"
    program += f"reason = runpy.run_path({path!r})['unsupported_reason']\n"
    program += "import torch\nprint(reason(rank=9))\nprint(reason(device=torch.device('cuda', 0)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "rank 9" in run.stdout and "Triton, which is not installed" in run.stdout


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"head_dim": 264}, "head dim 264"), ({"compose_rank": 5}, "rank 5"), ({"dtype": torch.float64}, "torch.float64")],
)
def test_models_beyond_the_limits_are_chunked_with_one_warning(gpu, fields, reason):
    there = model(**fields).to("meta", fields.get("dtype", torch.float32))
    assert used(there) == CHUNKED == used(there)
    assert gpu.runs == [] and len(gpu.warnings) == 1 and reason in gpu.warnings[0]


@needs_triton
def test_dropout_of_weights_matters_in_training_only(gpu):
    attention = model(attention_dropout=0.1).to("meta").model.layers[0].self_attn
    states = [torch.zeros(shape, device="meta") for shape in ((1, 20, 32), (1, 4, 20, 8), (1, 2, 20, 8))]
    assert not selfcheck.is_default(attention.train(), *states, None)
    assert gpu.runs == [] and len(gpu.warnings) == 1 and "attention_dropout=0.1" in gpu.warnings[0]
    assert selfcheck.is_default(attention.eval(), *states, None)


def test_devices_beyond_the_limits_are_chunked_with_one_warning(gpu):
    gpu.reason = "the fused kernels need something newer"
    there = model().to("meta")
    assert used(there) == CHUNKED and gpu.runs == []
    assert len(gpu.warnings) == 1 and "something newer" in gpu.warnings[0]


@needs_triton
def test_masks_that_the_default_leaves_to_chunked(gpu):
    """Their contents would have to be read on the device; naming the kernels reads them."""
    there = model().to("meta")
    ones = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta")
    assert used(there, length=4, attention_mask=ones) == {"composed_decode", "generate_weights"}
    for mask, reason in (
        (torch.ones(1, 1, 20, 20, dtype=torch.bool), "without gaps"),
        (torch.ones(1, 4, 4, 4, dtype=torch.bool), "per head"),
        (torch.zeros(1, 1, 4, 4), "add no biases"),
    ):
        assert used(there, length=mask.shape[-1], attention_mask=mask.to("meta")) == CHUNKED
        assert reason in gpu.warnings[-1]


def test_gaps_in_the_masks_of_a_model_mean_chunked(monkeypatch):
    """As far as they can be seen: padding in the middle of a row."""
    from dcformer.masks_dcformer import chunked_mask

    pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")
    for hole, expected in ((None, False), (5, True)):
        padding = torch.ones(1, 20, dtype=torch.bool)
        padding[0, :2] = False
        if hole:
            padding[0, hole] = False
        mask = chunked_mask(1, 20, 20, attention_mask=padding)
        reason = selfcheck._mask_reason(mask, 20, torch.device("cpu"))
        assert (reason is not None and "without gaps" in reason) == expected


# --- naming the kernels -----------------------------------------------------------------------------------------------


@needs_triton
def test_naming_the_kernels_on_a_cpu_raises(monkeypatch):
    monkeypatch.setattr(limits, "is_interpreted", lambda: False)
    named = model(attn_implementation="dcformer_triton")
    ids = torch.ones(1, 20, dtype=torch.long)
    message = r"need a CUDA device, the tensors are on 'cpu': use .*'dcformer_chunked' or 'eager', or leave it unset "
    message += r"\(TRITON_INTERPRET=1, .*, for tests\)\. "
    message += r"Without a model, call dcformer\.attention_dcformer\.eager_attention instead\.$"
    for has_cuda in (False, True):  # beside a GPU, too
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        with torch.no_grad():
            for length in (20, 3):
                with pytest.raises(ValueError, match=message):
                    named(ids[:, :length])
    with pytest.raises(ValueError, match=message):
        named(ids, labels=ids)
    named.set_attn_implementation(None)
    named(ids)


@needs_triton
@pytest.mark.parametrize(("fields", "reason"), [({"head_dim": 264}, "head dim 264"), ({"compose_rank": 5}, "rank 5")])
def test_naming_the_kernels_for_a_model_beyond_them_raises(fields, reason):
    with pytest.raises(ValueError, match=f"'dcformer_triton' cannot run this model: {reason}.*'dcformer_chunked'"):
        model(attn_implementation="dcformer_triton", **fields)
    with pytest.raises(ValueError, match=reason):
        model(**fields).set_attn_implementation("dcformer_triton")


# --- the machine ------------------------------------------------------------------------------------------------------


def test_where_verdicts_are_kept(monkeypatch, tmp_path):
    for name in ("DCFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.cache_folder() == tmp_path / ".cache" / "dcformer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert verdicts.cache_folder() == tmp_path / "xdg" / "dcformer"
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "own"))
    assert verdicts.cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("folder", [None, "~nobody-of-that-name/x"])
def test_where_verdicts_are_kept_without_a_home(folder, monkeypatch):
    """A container's user may have no name and no home; the first forward pass on a GPU must not fail for that."""
    for name in ("DCFORMER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if folder is not None:
        monkeypatch.setenv("DCFORMER_CACHE", folder)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    assert verdicts.cache_folder() == Path(tempfile.gettempdir()) / f"dcformer-{os.getuid()}"


def test_what_a_verdict_depends_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake 100")
    found = verdicts.machine(torch.device("cuda", 0))
    assert found["device"] == "Fake 100" and found["capability"] == "9.0" and found["torch"] == torch.__version__
    assert set(MACHINE) <= set(found) and all(found.values())
    json.dumps(found)


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(capsys, *arguments):
    from dcformer_commands.selfcheck import main

    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@needs_triton
@pytest.mark.parametrize("passes", [True, False])
def test_the_command_prints_a_table_and_says_whether_all_is_well(gpu, capsys, passes):
    gpu.results = [GOOD] if passes else [GOOD, BAD]
    preset = ("--preset", "dcformer-405m", "--device", "meta", "--dtype", "bfloat16", "float16")
    code, out, _ = run_command(capsys, *preset)
    assert code == (0 if passes else 1)
    assert "device Fake 100" in out and str(verdicts.cache_folder() / "selfcheck") in out
    assert out.count("heads=16/16 groups=1 head_dim=64 rank=2") == len(gpu.runs) == 4  # two dtypes, window and global
    lines = [line.split() for line in out.splitlines()]
    assert ["attention,", "forward", "norm", "1.00e+00", "1.00e+00", "3.00e+00", "ok"] in lines
    assert (["decoding,", "1", "query", "largest", "9.00e+00", "1.00e+00", "3.00e+00", "OFF"] in lines) != passes
    config = DCFormerConfig.from_preset("dcformer-405m")
    gpu.forget()
    gpu.results = RuntimeError("kept already")
    kind = selfcheck.kinds(config, "bfloat16")[0]
    *fields, _ = vars(kind).values()
    assert selfcheck.may_use("meta", None, *fields) == passes  # models take what the command has found


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("foo", "'foo': Expected one of cpu, cuda"),
        ("", "'': Device string must not be empty"),
        ("cpu:x", "'cpu:x': Invalid device string"),
        ("cuda:3", "'cuda:3': this machine has 2 CUDA devices"),
    ],
)
def test_the_command_names_a_device_that_is_none(monkeypatch, capsys, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, _, err = run_command(capsys, "--preset", "dcformer-405m", "--device", device)
    assert code == 1 and err.startswith(f"error: --device {message}") and len(err.splitlines()) == 1


def test_the_command_without_a_cuda_device_says_what_runs_on_a_cpu(monkeypatch, capsys):
    """`--device cpu` alone is refused by the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run_command(capsys, "--preset", "dcformer-405m", "--device", "cuda:9")
    assert code == 1 and "no CUDA device. Use --device cpu, with TRITON_INTERPRET=1 set before the start." in err
    code, _, err = run_command(capsys, "--preset", "dcformer-405m")
    assert code == 1 and "TRITON_INTERPRET=1 and --device cpu are for a trial" in err


@needs_triton
def test_the_command_where_the_check_cannot_run(gpu, capsys, tmp_path):
    gpu.results = RuntimeError("no compiler")
    code, out, err = run_command(capsys, "--preset", "dcformer-405m", "--device", "meta")
    assert code == 1 and "cannot run: RuntimeError: no compiler" in out and "FAILED" in out
    assert "Traceback" in err and "check_and_keep" in err  # it may be a bug
    gpu.reason = "the fused kernels need something newer"
    code, out, err = run_command(capsys, "--preset", "dcformer-405m", "--device", "meta")
    assert code == 1 and "something newer" in err
    for arguments, message in (
        (("--preset", "dcformer-1t"), "Unknown preset 'dcformer-1t'"),
        (("--model", tmp_path / "none"), "none"),
    ):
        code, _, err = run_command(capsys, *arguments, "--device", "meta")
        assert code == 1 and err.startswith("error: ") and message in err
