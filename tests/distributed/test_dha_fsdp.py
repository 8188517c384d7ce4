"""Fusion of heads under FSDP2, on two processes, against one process with the same batches."""

import json

import pytest
from helpers import REPOSITORY

HERE = REPOSITORY / "tests" / "distributed"
TWO_ON_CPU = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0",
              "--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer", HERE / "on_cpu.py"]  # fmt: skip
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", REPOSITORY / "examples" / "accelerate" / "fsdp2.yaml"]


@pytest.mark.distributed
def test_fusion_on_two_processes_is_that_of_one(start, tmp_path):
    start(HERE / "dha_worker.py", tmp_path / "one.json", "--accumulation", "2")
    start(*FSDP2, *TWO_ON_CPU, HERE / "dha_worker.py", tmp_path / "two.json", "--accumulation", "1")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2) and len(two["losses"]) == 6
    for ours, theirs in zip(two["losses"], one["losses"], strict=True):
        for name in ("loss", "fusion", "worst", "lambda"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert two["losses"][-1]["fusion"] < two["losses"][0]["fusion"] and two["gap"] <= 1e-6
    assert two["difference"] <= 1e-5
    assert two["logits"] == pytest.approx(one["logits"], abs=1e-3)
