"""The digits example: what its columns differ in, that it resumes, and that the committed table is of its results."""

import json
import math
import statistics
import sys

import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))
import digits

from dcformer.vision import DCViTConfig

PAGE = (REPOSITORY / "docs" / "vision.md").read_text(encoding="utf-8")
RESULTS = json.loads((digits.OUTPUT / "results.json").read_text())
SHORT = ["--steps", "2", "--seeds", "0", "--columns", "vit", "dcvit"]


def test_columns_differ_in_attention_and_size_alone():
    configs = {name: DCViTConfig(**digits.SMALL | column.fields) for name, column in digits.COLUMNS.items()}
    plain = {"pre": False, "post": False, "query": False, "key": False, "static": False}
    switches = {
        "vit": (plain, None),
        "qk_norm": (plain, "layernorm"),
        "talking": (plain | {"pre": True, "post": True, "static": True}, None),
        "dcvit": ({name: True for name in plain}, "layernorm"),
        "no_qk_norm": ({name: True for name in plain}, None),
        "gated": (plain | {"post": True, "query": True}, None),
        "larger": (plain, None),
    }
    assert configs.keys() == switches.keys()
    for name, config in configs.items():
        found = {switch: getattr(config, f"compose_{switch}") for switch in plain}
        assert (found, config.qk_norm) == switches[name], name
    assert not configs["gated"].compose_projection and configs["gated"].compose_gate
    other = {"hidden_size", "intermediate_size"}  # of the larger one, in the proportion of ViT-M to ViT-S
    assert configs["larger"].hidden_size * 384 == configs["vit"].hidden_size * 512
    for name, config in configs.items():
        changed = {
            key for key, value in config.to_dict().items()
            if value != configs["vit"].to_dict()[key] and not key.startswith(("compose_", "qk_norm"))
        }  # fmt: skip
        assert changed == (other if name == "larger" else set())


def test_digits_are_split_once():
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra `vision`)")
    (train, labels), (test, test_labels) = digits.load_digits()
    assert train.shape == (1000, 1, 8, 8) and test.shape == (797, 1, 8, 8)
    assert train.min() == 0 and train.max() == 0.5 and set(labels.tolist()) == set(range(10))
    rows = {tuple(image.flatten().tolist()) for image in train} & {tuple(i.flatten().tolist()) for i in test}
    assert not rows
    assert len(test_labels) == 797


def test_stops_and_resumes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra `vision`)")
    digits.main([*SHORT[:-1], "--output", str(tmp_path)])
    first = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["column"] for run in first] == ["vit"]
    assert "0 of 1 runs are in" in capsys.readouterr().out
    digits.main([*SHORT, "--output", str(tmp_path)])
    assert "1 of 2 runs are in" in capsys.readouterr().out
    both = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["column"] for run in both] == ["vit", "dcvit"] and both[0] == first[0]
    assert "| DCViT |" in (tmp_path / "table.md").read_text() and "</svg>" in (tmp_path / "digits.svg").read_text()
    monkeypatch.setattr(digits, "train", lambda *_: pytest.fail("nothing is missing"))
    digits.main([*SHORT, "--output", str(tmp_path)])
    digits.main(["--report", "--output", str(tmp_path)])


def test_the_same_seed_gives_the_same_run():
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra `vision`)")
    settings = digits.settings_of("dcvit", seed=3, steps=2)
    runs = [digits.train(settings, digits.load_digits()) for _ in range(2)]
    for run in runs:
        del run["seconds"]
    assert runs[0] == runs[1] and settings.items() <= runs[0].items()


def test_images_of_a_folder(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image", reason="images need Pillow (extra `vision`)")
    for split in ("train", "test"):
        for label, name in enumerate(("dark", "light")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                image.new("RGB", (40, 30), (label * 200 + i,) * 3).save(tmp_path / split / name / f"{i}.png")
    (tmp_path / "train" / "dark" / "broken.png").write_text("no image")
    options = [*SHORT, "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"error: 1 of 7 files .* cannot be read as images: .*broken\.png"):
        digits.main(options)
    assert not (tmp_path / "out").exists()
    digits.main([*options, "--unreadable", "skip"])
    assert "left out 1 files that cannot be read" in capsys.readouterr().out
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert [run["images"] for run in runs] == [6, 6]
    with pytest.raises(SystemExit):  # results of other images are not mixed in
        digits.main([*SHORT, "--output", str(tmp_path / "out")])
    assert "choose another --output" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--columns", "resnet"], ["--steps", "0"]])
def test_wrong_usage(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        digits.main([*options, "--output", str(tmp_path)])
    assert stop.value.code == 2 and options[1] in capsys.readouterr().err


def test_a_difference_and_its_interval():
    values = {0: 1.0, 1: 2.0, 2: 4.0, 9: 7.0}
    mean, half = digits.difference(values, {0: 0.0, 1: 0.0, 2: 0.0})
    assert mean == pytest.approx(7 / 3)
    assert half == pytest.approx(4.303 * statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert digits.shown({0: 2.0, 1: 2.1}, {0: 0.0, 1: 0.0}, 1) == "**+2.0 ± 0.6**"  # the interval leaves 0 out
    assert digits.shown(values, {0: 0.0, 1: 0.0, 2: 0.0}, 2) == "+2.33 ± 3.79"
    assert math.isnan(digits.difference({0: 1.0}, {0: 0.5})[1])


def test_committed_results_are_complete_and_shown():
    wanted = [digits.settings_of(column, seed) for column in digits.COLUMNS for seed in digits.SEEDS]
    runs = RESULTS["runs"]
    assert len(runs) == len(wanted)
    assert all(any(settings.items() <= run.items() for run in runs) for settings in wanted)
    table = digits.table(runs)
    assert (digits.OUTPUT / "table.md").read_text().endswith(table)
    assert table in PAGE
    assert (digits.OUTPUT / "digits.svg").read_text() == digits.picture(runs)


def test_what_the_page_says_of_the_results():
    """Its verdict, that nothing can be told, is that of the intervals: none leaves 0 out."""
    assert "**" not in digits.table(RESULTS["runs"]) and "No difference in the table can be told" in PAGE
    right = [run["right"] for run in RESULTS["runs"]]
    assert f"from {min(right)} to {max(right)} of the 797" in PAGE
    for column in digits.COLUMNS:
        parameters = {run["parameters"] for run in RESULTS["runs"] if run["column"] == column}
        assert len(parameters) == 1
