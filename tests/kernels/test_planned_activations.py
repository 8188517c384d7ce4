"""`dcformer-plan` against what training with the kernels keeps."""

import dataclasses

import pytest
import torch
from kernel_device import INTERPRETED
from test_planning import SIZES, VARIANTS, step_bytes

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
    found = step_bytes(config, "dcformer_triton", dtype, length)
    assert found <= planned <= 1.1 * found


def test_maps_that_are_kept_are_planned():
    config = DCFormerConfig(**SIZES | {"num_hidden_layers": 2, "save_maps": True})
    setup = Setup(config, 1, batch=2, length=20, dtype=torch.bfloat16)
    maps = 2 * (3 * 2 * config.num_attention_heads * 128 * 32) * 2  # both layers', in 16 bits
    found = step_bytes(config, "dcformer_triton", torch.bfloat16, 20)
    assert maps <= found <= memory(setup).activations <= maps + 1.1 * (found - maps)
    chunked = memory(dataclasses.replace(setup, attention="dcformer_chunked"))
    assert memory(setup).activations == chunked.activations + maps
    one, none = (
        memory(dataclasses.replace(setup, config=DCFormerConfig(**SIZES | {"save_maps": kept}), checkpointing=True))
        for kept in (True, False)
    )
    assert one.activations == none.activations and one.workspace == none.workspace + maps // 2
