"""`dcformer-analyze`: what it writes, and that it writes nothing on bad input."""

import copy
import json
import math
import os
import re
import shutil
import stat
from html import unescape

import pytest
import torch
from analysis_models import CHECKPOINT, PROMPT, random_model
from helpers import PLAIN, tiny_config
from safetensors.torch import save_file
from test_analysis_html import parsed
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dcformer import HeadSystemsConfig, HeadSystemsForCausalLM
from dcformer.analysis import attribute_heads, cli, composition_summary, head_diversity, single_token, trace
from dcformer.errors import DCFormerError
from dcformer.modules import convert_attention
from dcformer_commands.analyze import main

TEXT = PROMPT.replace("\n", "\\n")


@pytest.fixture
def no_heavy_import():
    pytest.importorskip("matplotlib")


NO_ROOM = pytest.mark.filterwarnings("error:constrained_layout not applied")  # what is beside the axes is too large


@pytest.mark.slow
@NO_ROOM
def test_a_text(tmp_path, capsys, bundled, prompt, no_heavy_import):
    model, tokenizer = bundled
    output = tmp_path / "a" / "out"
    arguments = [str(CHECKPOINT), "--text", TEXT, "--target", " fish", "--output", str(output)]
    other = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)  # another model of the same name
    assert main([*arguments, "--compare", str(other), "--theme", "dark"]) == 0
    names = {"attribution", "breakdown", "diversity", "mean_maps", "rows", "terms"}
    files = {f"{name}.png" for name in names} | {"report.html", "heads.html", "metrics.json"}
    assert (
        {file.name for file in output.iterdir()}
        == files
        == set(re.findall(r"[\w]+\.\w+", capsys.readouterr().out)) & files
    )
    metrics = json.loads((output / "metrics.json").read_text())
    run = trace(model, prompt)
    scores = attribute_heads(model, prompt, single_token(tokenizer, "fish"))
    assert torch.allclose(torch.tensor(metrics["attribution"]["scores"]), scores, atol=1e-4)
    assert metrics["attribution"]["completeness_gap"] < 0.01
    assert list(metrics["diversity"]) == [CHECKPOINT.name, f"{CHECKPOINT.name} (--compare)"]
    assert metrics["diversity"][CHECKPOINT.name]["qk"]["area"] == head_diversity(model, "qk").area.tolist()
    for found, expected in zip(metrics["composition"], composition_summary(run), strict=True):
        assert found["shares"] == pytest.approx(expected.shares)
    shown = metrics["shown"]
    assert shown["layer"] == int(scores.abs().sum(1).argmax()) and shown["query"] == 23
    after = run.layers[shown["layer"]].composed_weights[0, :, 23, shown["key"]]
    assert torch.allclose(torch.tensor(list(shown["terms"].values())).sum(0), after, atol=1e-4)
    report = (output / "report.html").read_text()
    assert report.count("data:image/png;base64,") == len(names) and "http" not in report
    # figures keep their size: what is wider than the page is moved sideways, not made too small to read
    assert "max-width: 100%" not in report and report.count('<div tabindex="0"><img') == len(names)
    assert parsed((output / "heads.html").read_text())[0]["tokens"][-1] == "of"
    assert main(arguments) == 1 and "exists already: name a new folder" in capsys.readouterr().err


def test_an_image(tmp_path, capsys, no_heavy_import):
    image = pytest.importorskip("PIL.Image")
    from dcformer import DCViTConfig, DCViTForImageClassification, DCViTImageProcessor

    config = DCViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    model = DCViTForImageClassification(config)
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(tmp_path / "model")
    size = {"height": 16, "width": 16}
    DCViTImageProcessor(size={"shortest_edge": 16}, crop_size=size).save_pretrained(tmp_path / "model")
    image.new("RGB", (20, 30), (200, 10, 60)).save(tmp_path / "i.png")
    arguments = [str(tmp_path / "model"), "--image", str(tmp_path / "i.png"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--target", "dog", "--query", "5"]) == 0
    assert (tmp_path / "out" / "image.png").is_file() and (tmp_path / "out" / "attribution.png").is_file()
    arguments[-1] = str(tmp_path / "other")
    assert main([*arguments, "--target", "cow"]) == 1
    assert "--target 'cow' is not a label of the model: expected one of ['cat', 'dog']" in capsys.readouterr().err
    texts = [str(tmp_path / "model"), "--text", "a", "--output", str(tmp_path / "other")]
    assert main(texts) == 1
    assert f"{tmp_path / 'model'} is a model of images (dcvit): give --image.\n" in capsys.readouterr().err
    assert main([str(CHECKPOINT), *arguments[1:]]) == 1
    assert f"{CHECKPOINT} is a model of texts (dcformer): give --text.\n" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@NO_ROOM
def test_one_token_and_the_folder_one_is_in(tmp_path, monkeypatch, no_heavy_import):
    """Means of nothing are null: JSON has no NaN. Figures and the page are there all the same."""
    output = tmp_path / "out"
    monkeypatch.chdir(CHECKPOINT)
    assert main([".", "--text", "tuna", "--output", str(output)]) == 0

    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    metrics = json.loads((output / "metrics.json").read_text(), parse_constant=refuse)
    assert list(metrics["diversity"]) == [CHECKPOINT.name]
    assert metrics["length"] == 1 and metrics["map_diversity"]["js of weights"] == [None] * 4
    assert (output / "heads.html").is_file() and (output / "rows.png").is_file()


def test_usage(capsys):
    """What --diversity would not heed is refused."""
    for others in (["--output", "x"], ["--text", ""], ["--layer", "0"], ["--target", "a", "--key", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main([str(CHECKPOINT), "--diversity", *others])
        assert stopped.value.code == 2
        assert f"leave out {', '.join(word for word in others if word[:2] == '--')}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--target", " a fish"], "' a fish' is 2 tokens, ['a', 'fish']"),
        (["--target", "zébra"], "'zébra' is unknown to the tokenizer"),
        (["--layer", "4"], "--layer 4 is out of range"),
        (["--query", "24"], "--query 24 is out of range"),
        (["--key", "-25"], "--key -25 is out of range"),
        (["--query", "2", "--key", "3"], "--key 3: query 2 does not see it in layer 3; expected one of [0, 1, 2]"),
        (["--text", " "], "has no tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_writes_nothing(tmp_path, capsys, change, message, no_heavy_import):
    assert main([str(CHECKPOINT), "--text", TEXT, "--output", str(tmp_path / "out"), *change]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".", "", "here"])
def test_the_current_folder_is_not_written(tmp_path, capsys, monkeypatch, name, no_heavy_import):
    """Nor could it be: that is said before any work."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "here").symlink_to(".")
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setattr(cli, "_load", lambda *_: pytest.fail("work has begun"))
    assert main([str(CHECKPOINT), "--text", TEXT, "--output", name]) == 1
    assert "is the current folder: name a new one" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["here"]


def test_a_folder_that_comes_up_meanwhile(tmp_path):
    """The last step's errors are the user's to correct, too."""
    output = tmp_path / "out"
    with pytest.raises(DCFormerError, match=f"--output {output}: .*not empty"), cli._new_folder(output):
        (output / "another").mkdir(parents=True)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_two_at_once(tmp_path):
    """The second is refused before any work."""
    output = tmp_path / "out"
    with cli._new_folder(output) as work:
        refusal = pytest.raises(DCFormerError, match=f"--output {output}: another process is writing it")
        with refusal, cli._new_folder(output):
            pytest.fail("two write the same folder")
        (work / "file").touch()
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "file"]


def test_a_folder_for_its_owner_only(tmp_path):
    """The umask decides on permissions."""
    before = os.umask(0o077)
    try:
        with cli._new_folder(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_what_is_left_out_is_said(tmp_path, capsys, bundled, monkeypatch, no_heavy_import):
    """On the console, in the report and in the metrics: the page of long texts, diversity of heads without circuits."""
    fields = {
        key: value for key, value in tiny_config().to_dict().items() if key not in ("model_type", "architectures")
    }
    config = HeadSystemsConfig(**fields | {"num_key_value_heads": 4, "vocab_size": 412}, head_system="collaborative")
    HeadSystemsForCausalLM(config).save_pretrained(tmp_path / "model")
    bundled[1].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(cli, "MAX_TOKENS", 3)
    output = tmp_path / "out"
    arguments = [str(tmp_path / "model"), "--text", "tuna " * 4, "--output", str(output)]
    assert main(arguments) == 0
    lines = (
        "diversity.png is left out: head_system='collaborative': its heads share channels, and have no circuits",
        "heads.html is left out: it shows at most 3 tokens, and there are 4.",
    )
    out, report = capsys.readouterr().out, unescape((output / "report.html").read_text())
    left_out = json.loads((output / "metrics.json").read_text())["left_out"]
    for line in lines:
        assert line in out and line in report and line in " ".join(left_out)
    assert (output / "breakdown.png").is_file()
    assert not (output / "diversity.png").exists() and not (output / "heads.html").exists()
    assert main([*arguments[:-1], str(tmp_path / "other"), "--compare", str(CHECKPOINT)]) == 1  # it was asked for
    assert "error: head_system='collaborative'" in capsys.readouterr().err


def test_the_key_shown_is_seen(tmp_path, monkeypatch, no_heavy_import):
    """Without composition nothing changes, and a key that the query sees is shown all the same."""
    model = random_model(**PLAIN, vocab_size=412, sliding_window=2, layer_types=["sliding_attention"] * 2)
    monkeypatch.setattr(cli, "_load", lambda *_: (model, AutoTokenizer.from_pretrained(CHECKPOINT)))
    assert main([str(CHECKPOINT), "--text", "tuna " * 4, "--output", str(tmp_path / "out"), "--layer", "0"]) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["shown"]["key"] == 2


def test_models_are_read_in_float32(tmp_path, bundled):
    copy.deepcopy(bundled[0]).to(torch.bfloat16).save_pretrained(tmp_path)
    bundled[1].save_pretrained(tmp_path)
    model, _ = cli._load(str(tmp_path), False)
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"


def test_no_model(tmp_path, capsys, no_heavy_import):
    assert main([str(tmp_path / "no"), "--text", "a", "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'no'}: no such file or folder, and not found on the Hub")
    assert list(tmp_path.iterdir()) == []


def test_a_fused_folder_is_refused(tmp_path, capsys, bundled, no_heavy_import):
    bundled[0].save_pretrained(tmp_path / "model")
    save_file({"mixer": torch.ones(1)}, tmp_path / "model" / "operators.safetensors")
    assert main([str(tmp_path / "model"), "--text", "a", "--output", str(tmp_path / "out")]) == 1
    assert "model has trained mixtures of heads" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_converted", [False, True])
def test_models_of_other_libraries_are_refused_before_they_are_loaded(tmp_path, capsys, is_converted, no_heavy_import):
    """The library's report of what it leaves out of a converted one would say that composition can be ignored."""
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes))
    (convert_attention(model) if is_converted else model).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert main([str(tmp_path / "model"), "--text", "a", "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'model'} is a model of another library (llama): analysis is of this")
    assert error.count("\n") == 1 and "convert_attention" in error and not (tmp_path / "out").exists()


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rewrite(**fields):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut),
        ("config.json", cut),
        ("config.json", lambda file: file.write_text("[]")),
        ("config.json", rewrite(hidden_size="x")),
        ("tokenizer.json", cut),
    ],
    ids=["weights", "configuration", "a list", "a bad value", "tokenizer"],
)
def test_the_damaged_file_is_named(tmp_path, capsys, name, damage, no_heavy_import):
    folder = shutil.copytree(CHECKPOINT, tmp_path / "model")
    damage(folder / name)
    assert main([str(folder), "--diversity"]) == (name != "tokenizer.json")  # which it does not need
    first = capsys.readouterr().err
    assert main([str(folder), "--text", "a", "--output", str(tmp_path / "out")]) == 1
    for error in [first] * bool(first) + [capsys.readouterr().err]:
        assert error.startswith("error: ") and error.count("\n") == 1 and str(folder / name) in error
    assert not (tmp_path / "out").exists()


def test_missing_parameters_are_refused(tmp_path, capsys, bundled, no_heavy_import):
    """Layers of random numbers are not analyzed."""
    folder = shutil.copytree(CHECKPOINT, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    kept = {name: tensor for name, tensor in bundled[0].state_dict().items() if ".layers.1." not in name}
    save_file({name: tensor.clone() for name, tensor in kept.items()}, folder / "model.safetensors", {"format": "pt"})
    assert main([str(folder), "--text", "a", "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    lost = len(bundled[0].state_dict()) - len(kept)
    assert error.startswith(f"error: {folder} lacks {lost} parameters, model.layers.1.")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_nan_outside_the_circuits(tmp_path, capsys, bundled, name):
    folder = shutil.copytree(CHECKPOINT, tmp_path / "model")
    tensors = {name: tensor.clone() for name, tensor in bundled[0].state_dict().items()}
    tensors[name][3, 0] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for model, compared in ((folder, CHECKPOINT), (CHECKPOINT, folder)):
        assert main([str(model), "--diversity", "--compare", str(compared)]) == 1
        assert f"{folder}/model.safetensors: {name} holds NaN or infinity" in capsys.readouterr().err


def test_diversity_of_a_folder(capsys, bundled, monkeypatch):
    """From safetensors; the model is never built."""
    from dcformer import DCFormerForCausalLM

    monkeypatch.setattr(DCFormerForCausalLM, "__init__", lambda *_: pytest.fail("the model is built"))
    assert main([str(CHECKPOINT), "--diversity", "--compare", str(CHECKPOINT)]) == 0
    out = capsys.readouterr().out
    monkeypatch.undo()
    for circuit in ("qk", "ov"):
        found = head_diversity(bundled[0], circuit)
        assert (
            out.count(f"| {circuit} | {found.area.mean():.3f} ({found.area.min():.3f} to {found.area.max():.3f}") == 2
        )
        assert f"{CHECKPOINT},{circuit}," + ",".join(f"{v:.4f}" for v in found.mean.tolist()) in out
    assert main(["nowhere", "--diversity"]) == 1 and "there is no config.json" in capsys.readouterr().err
