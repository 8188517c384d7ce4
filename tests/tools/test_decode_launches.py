"""Launches of a compiled decoding step, as inductor schedules them, and the host's part of a step."""

import ast
import os
import re
import subprocess
import sys

import pytest
from helpers import REPOSITORY

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")


@pytest.mark.slow
def test_a_fused_layer_launches_at_most_one_more_than_llamas():
    """In a process of its own, as Triton decides on import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "tools/decode_launches.py"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    lines = re.findall(r"^(\S.*?) +(\d+) launches per layer: (.*)$", run.stdout, re.MULTILINE)
    counts = {name: int(count) for name, count, _ in lines}
    assert counts["llama"] > 12  # 7 products, attention, norms, RoPE, the cache, activations
    assert counts["dcformer"] <= counts["llama"] + 1
    assert counts["dcformer, not fused"] > counts["dcformer"] + 4
    parts = {name: ast.literal_eval(part) for name, _, part in lines}
    assert parts["llama"]["mm"] == 7 and parts["dcformer"]["mm"] == 5
    assert parts["dcformer"]["composed_decode"] == 3 and parts["dcformer"]["prepare_decode"] == 1


@pytest.mark.slow
def test_host_time_is_measured_without_a_gpu():
    """Every function is called, and a fused layer launches one kernel before attention. No time is judged."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "tools/decode_host_time.py", "--shapes", "405m", "--dtype", "float32", "--steps", "20"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "prepare_kernel 1.00, scores_kernel 1.00, output_kernel 1.00" in run.stdout
    times = [float(time) for time in re.findall(r"(\d+) us$", run.stdout, re.MULTILINE)]
    assert len(times) == 7 and min(times) > 0
