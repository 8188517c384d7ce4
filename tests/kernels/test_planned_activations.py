"""`dcformer-plan` against what training with the kernels keeps."""

import pytest
import torch
from kernel_device import INTERPRETED
from test_planning import SIZES, VARIANTS, kept_bytes

from dcformer import DCFormerConfig
from dcformer.planning import Setup, memory

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="measures a model on the CPU: needs TRITON_INTERPRET=1")
CASES = [("full", 20), ("full", 90), ("groups", 20), ("no gate", 20), ("query-wise, rank 1", 20)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("variant", "length"), CASES)
def test_planned_as_the_chunked_implementation(variant, length, dtype):
    """Chunked attention keeps a little more. (For rows of at most `FEW_QUERIES` tokens it keeps their maps, too.)"""
    config = DCFormerConfig(**(SIZES | {"num_hidden_layers": 2} | VARIANTS[variant]))
    planned = memory(Setup(config, 1, batch=2, length=length, dtype=dtype)).activations
    found = kept_bytes(config, "dcformer_triton", dtype, length)
    assert found <= planned <= 1.1 * found
