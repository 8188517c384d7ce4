"""A model that `convert_attention` has converted, trained on two processes."""

import json

import pytest
from helpers import REPOSITORY

WORKER = REPOSITORY / "tests" / "distributed" / "converted_worker.py"


@pytest.mark.distributed
def test_losses_are_those_of_one_process(start, tmp_path):
    start(WORKER, tmp_path / "one.json", "--batch", "4")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    start(*two, WORKER, tmp_path / "two.json", "--batch", "2")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["history"]) == len(two["history"]) == 6
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert one["moved"] == two["moved"]
    assert any(".compose." in name for name in one["moved"])
    assert all(".compose." in name or name.startswith("classifier.") for name in one["moved"])
