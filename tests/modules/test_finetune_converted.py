"""The example that fine-tunes a converted ViT, at few steps."""

import json
import sys

import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))

ARGUMENTS = ["--seeds", "0", "--steps", "12", "--learning-rate", "0.01"]


def test_composition_is_trained_alone_and_saved(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra `vision`)")
    pytest.importorskip("accelerate", reason='accelerate is not installed: pip install "dcformer[train]"')
    import finetune_converted

    (found,) = finetune_converted.main([*ARGUMENTS, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"| ViT, trained | {found['trained']['accuracy']:.2f} ± nan |" in printed
    # conversion changes nothing, training does, and of the composition alone
    assert found["converted"]["loss"] == pytest.approx(found["trained"]["loss"], abs=1e-5)
    assert found["composition"]["loss"] < found["converted"]["loss"] - 1e-3
    assert found["composition"]["trained"] == 14592 and found["further"]["trained"] == found["trained"]["trained"]
    assert "from_pretrained_converted" in (tmp_path / "seed0" / "README.md").read_text()
    assert list(json.loads((tmp_path / "results.json").read_text()).values()) == [found]

    monkeypatch.setattr(finetune_converted, "run", None)  # what is done is not run again
    assert finetune_converted.main([*ARGUMENTS, "--output", str(tmp_path)]) == [found]


def test_wrong_usage(tmp_path, capsys):
    import finetune_converted

    with pytest.raises(SystemExit) as stopped:
        finetune_converted.main(["--steps", "0", "--output", str(tmp_path)])
    assert stopped.value.code == 2 and "--steps 0: expected at least 1" in capsys.readouterr().err
