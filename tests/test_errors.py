"""What the user can put right is one line; a bug keeps its traceback, wherever it is."""

import functools
import shutil
import sys

import huggingface_hub
import pytest
import torch
from helpers import REPOSITORY, tiny_config

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerModel, publish
from dcformer.errors import DCFormerError, MissingExtraError, loading_reason, raise_bug, refused, require_extra
from dcformer.synthetic.__main__ import main as synthetic
from dcformer_commands import convert, plan
from dcformer_commands import eval as evaluate

CHECKPOINT = str(REPOSITORY / "checkpoints" / "dcformer-synthetic")
BUGS = (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Injected(str):
    """The message of an injected bug."""


def finetune(arguments):
    pytest.importorskip("trl")
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import finetune

    return finetune.main(arguments)


def lm_eval(arguments):
    manager = pytest.importorskip("lm_eval.tasks", reason="needs the extra [eval]").TaskManager
    with pytest.MonkeyPatch.context() as patch:  # reading all of the library's tasks takes seconds
        few = functools.partialmethod(manager.__init__, include_defaults=False)
        patch.setattr(manager, "__init__", few)
        return evaluate.main(arguments)


def serve(arguments):
    pytest.importorskip("fastapi", reason="needs the extra [serve]")
    pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    from dcformer import serving

    return serving.main(arguments)


def analyze(arguments):
    pytest.importorskip("matplotlib", reason="needs the extra [analysis]")
    from dcformer_commands import analyze

    return analyze.main(arguments)


def selfcheck(arguments):
    from dcformer_commands import selfcheck

    return selfcheck.main(arguments)


TUNE = ["--model_name_or_path", CHECKPOINT, "--data", str(REPOSITORY / "examples" / "data" / "text_test.jsonl")]
TUNE += ["--max_steps", "1", "--report_to", "none", "--use_cpu", "--output_dir", "{out}"]
SCORE = ["--model", "hf", "--model_args", f"pretrained={CHECKPOINT}", "--tasks", "dcformer_synthetic_heldout"]
# What is called with right arguments, and a function far below that has a bug.
PLACES = [
    (convert.main, "safetensors-to-jax --model {model} --output {out} --format pax", "conversion.convert._not_stored"),
    (convert.main, "verify {model} {model}", "conversion.checkpoint.native_shapes"),
    (convert.main, "verify {model} {model}", "conversion.cli.compare_tensors"),
    (convert.main, "verify {model} {model}", "conversion.verification._largest_difference"),
    (plan.main, "--preset dcformer-405m", "planning.collectives"),
    (plan.main, "--set compose_rank=1", "planning.measure_step"),
    (publish.main, "{model} {out}", "publish.folder.model_card"),
    (publish.main, "{model} {out} --remote_code", "publish.folder.export_remote_code"),
    (synthetic, "--output {out}", "synthetic.dataset.split_of"),
    (finetune, TUNE, "training.data.check_rows"),
    (finetune, TUNE, "training.run.check_tokenizer"),
    (finetune, TUNE, "training.data._check_readable"),
    (lm_eval, SCORE, "evaluation.cli._check_batch_size"),
    (lm_eval, SCORE, "evaluation.items._choices"),
    (selfcheck, "--device meta", "loading.named_device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    DCFormerForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", BUGS)
@pytest.mark.parametrize(("command", "arguments", "place"), PLACES, ids=[place for *_, place in PLACES])
def test_a_bug_keeps_its_traceback(command, arguments, place, kind, model, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise kind(Injected("a bug"))

    words = arguments.split() if isinstance(arguments, str) else arguments
    words = [word.format(model=model, out=tmp_path / "out") for word in words]
    monkeypatch.setattr(f"dcformer.{place}", fail)
    with pytest.raises(kind) as caught:
        command(words)
    assert isinstance(caught.value.args[0], Injected)


def test_why_a_name_was_not_found(tmp_path):
    """Something that is there, or an error of another kind, is not a missing folder."""
    assert loading_reason(tmp_path / "no", OSError("no\nnet")).startswith("no such file or folder, and")
    assert loading_reason(tmp_path / "no", OSError("no\nnet")).endswith(" either: no net")
    assert loading_reason(tmp_path, OSError("no net")) == loading_reason("no", ValueError("no net")) == "no net"


# Commands that load a model, "{model}": a folder, or a name on the Hub.
LOADING = {
    "analyze": (analyze, ["{model}", "--text", "Peter owns", "--output", "{out}"]),
    "eval": (lm_eval, [word.replace(CHECKPOINT, "{model}") for word in SCORE]),
    "finetune": (finetune, [word.replace(CHECKPOINT, "{model}") for word in TUNE]),
    "publish": (publish.main, ["{model}", "{out}"]),
    "serve": (serve, ["{model}"]),
    "verify": (convert.main, ["verify", "{model}", "{model}"]),
}
FORMS = [(name, form) for name in LOADING for form in ("folder", "name") if (name, form) != ("verify", "name")]
FORMS += [("serve", "folder@main"), ("serve", "name@main")]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of the Hub with the bundled checkpoint in it."""
    cache = tmp_path_factory.mktemp("hub")
    repository, commit = cache / "models--someone--tiny", "a" * 40
    shutil.copytree(CHECKPOINT, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return cache


@pytest.mark.parametrize("kind", [kind for kind in BUGS if kind is not ValueError])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_bug_in_a_model_keeps_its_traceback(name, form, kind, hub, tmp_path, monkeypatch):
    """Wherever the model comes from. (A model refuses values by a ValueError, as those of Transformers do.)"""

    def fail(*_, **__):
        raise kind(Injected("a bug"))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(DCFormerModel, "__init__", fail)
    command, arguments = LOADING[name]
    model = form.replace("folder", CHECKPOINT).replace("name", "someone/tiny")
    with pytest.raises(kind) as caught:
        command([word.format(model=model, out=tmp_path / "out") for word in arguments])
    assert isinstance(caught.value.args[0], Injected)


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_of_the_server_keeps_its_traceback(kind, monkeypatch):
    server = pytest.importorskip("dcformer.serving.server")

    def fail(*_, **__):
        raise kind(Injected("a bug"))

    monkeypatch.setattr(server, "_own_application", fail)
    with pytest.raises(kind) as caught:
        serve([CHECKPOINT])
    assert isinstance(caught.value.args[0], Injected)


@pytest.mark.parametrize("kind", [AttributeError, ImportError, KeyError, TypeError])
@pytest.mark.parametrize(
    ("command", "arguments"),
    [(plan.main, ["--set", "compose_rank=1"]), (publish.main, [CHECKPOINT, "{out}"]), (finetune, TUNE)],
    ids=["plan", "publish", "finetune"],
)
def test_a_bug_in_the_configuration_keeps_its_traceback(command, arguments, kind, tmp_path, monkeypatch):
    """There bad values are refused, so a ValueError is one; no other error of ours is."""

    def fail(*_, **__):
        raise kind(Injected("a bug"))

    monkeypatch.setattr(DCFormerConfig, "check_composition", fail)
    with pytest.raises(kind) as caught:
        command([word.format(out=tmp_path / "out") for word in arguments])
    assert isinstance(caught.value.args[0], Injected)


def test_refusals_of_libraries_are_ours():
    with pytest.raises(DCFormerError, match=r"^--size 3: .*not supported between"), refused(TypeError, what="--size 3"):
        torch.nn.Dropout("3")  # the library's own code fails
    with pytest.raises(TypeError), refused(TypeError, what="--size 3"):
        len(3)  # ours does
    with pytest.raises(ZeroDivisionError), refused(TypeError):
        1 / 0  # noqa: B018
    mismatch = RuntimeError("shapes differ; pass ignore_mismatched_sizes=True")
    raise_bug(mismatch)
    raise_bug(ValueError("refused"))
    with pytest.raises(RuntimeError, match="ours"):
        raise_bug(RuntimeError("ours"))


def test_missing_extra(monkeypatch):
    require_extra("train", "training", "json", "sys")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError) as caught:
        require_extra("train", "training", "json", "trl")
    assert str(caught.value) == 'training needs trl, which is not installed: pip install "dcformer[train]"'
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, DCFormerError)
