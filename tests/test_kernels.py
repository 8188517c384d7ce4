"""Without Triton: importing works, and naming the kernels says what is missing."""

import subprocess
import sys

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
