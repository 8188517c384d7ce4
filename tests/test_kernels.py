"""The kernels without a GPU: absent Triton is said so, importing needs none, and the interpreter runs their tests."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY

HAS_TRITON = importlib.util.find_spec("triton") is not None


ABSENT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import dcformer
from dcformer import DCFormerConfig, DCFormerForCausalLM, kernels
config = DCFormerConfig(
    vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
assert not kernels.is_available()
try:
    DCFormerForCausalLM(config).set_attn_implementation("dcformer_triton")
except ValueError as error:
    print(error)
try:
    kernels.composed_attention
except ImportError as error:
    print(error)
"""


def test_without_triton_everything_imports_and_naming_the_kernels_says_what_to_install():
    run = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    named, used = run.stdout.splitlines()
    assert "Triton is not installed" in named and "dcformer[kernels]" in named
    assert "triton" in used


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a suite of its own
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install 'dcformer[kernels]'")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="tests/kernels runs in this process")
def test_kernels_in_the_interpreter():
    """`tests/kernels` in a process of its own: Triton decides on import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "tests/kernels"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
