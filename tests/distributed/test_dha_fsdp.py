"""Trained search and fusion of heads under FSDP2, on two processes, against one process with the same batches."""

import json

import pytest
from helpers import REPOSITORY

HERE = REPOSITORY / "tests" / "distributed"
TWO_ON_CPU = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0", HERE / "on_cpu.py"]
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", REPOSITORY / "examples" / "accelerate" / "fsdp2.yaml"]


@pytest.mark.distributed
def test_search_and_fusion_on_two_processes_are_those_of_one(start, tmp_path):
    start(HERE / "dha_worker.py", tmp_path / "one.json", "--accumulation", "2")
    start(*FSDP2, *TWO_ON_CPU, HERE / "dha_worker.py", tmp_path / "two.json", "--accumulation", "1")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2) and len(two["losses"]) == 6
    plans = [json.loads(found["plan"]) for found in (one, two)]
    parts = [[layer[kind] for layer in plan["layers"] for kind in ("key", "value")] for plan in plans]
    assert [part["groups"] for part in parts[0]] == [part["groups"] for part in parts[1]]
    for theirs, ours in zip(*parts, strict=True):
        assert ours["displacement"] == pytest.approx(theirs["displacement"], abs=1e-4)
    assert one["same"] and two["same"]
    for ours, theirs in zip(two["losses"], one["losses"], strict=True):
        for name in ("loss", "fusion", "worst", "lambda"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert two["losses"][-1]["fusion"] < two["losses"][0]["fusion"] and two["gap"] <= 1e-6
    assert two["difference"] <= 1e-5
    assert two["logits"] == pytest.approx(one["logits"], abs=1e-3)
