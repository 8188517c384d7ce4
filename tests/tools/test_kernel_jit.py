"""All kernels compile as they are launched: by Triton's just-in-time compiler, which specialises arguments by value.

The interpreter compiles nothing, and the report compiles one specialization. `make test-min` runs this with the lowest
Triton that is allowed.
"""

import json

import pytest
from helpers import run_source

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

from dcformer.kernels.overflow import Beyond

# In a process of its own, as the driver stays; numbers mean nothing, as nothing is launched.
COMPILE = """
import json, sys
from collections import Counter
from unittest import mock

import torch
from transformers import DynamicCache, StaticCache
from triton.runtime import driver

sys.path.insert(0, "tools")
from host_time import fake_driver
from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.cache_dcformer import use_static_layers
from dcformer.kernels import overflow

fields, dtype, found = json.loads(sys.argv[1])
overflow._found[torch.device("cpu")] = overflow.Beyond(found)
launched = Counter()
driver.set_active(fake_driver(launched))
sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
config = DCFormerConfig(**(sizes | {"num_attention_heads": 4, "sliding_window": 8} | fields))
model = DCFormerForCausalLM(config).to(getattr(torch, dtype))
model.set_attn_implementation("dcformer_triton")
ids = torch.zeros(1, 21, dtype=torch.long)
with mock.patch("dcformer.kernels.limits._device_reason", lambda *_: None):
    model(ids, labels=ids).loss.backward()
    model.eval().zero_grad()
    with torch.no_grad():
        for fuse in (False, True):
            if fuse:
                model.fuse_projections()
            caches = DynamicCache(config=config), *(StaticCache(config=config, max_cache_len=32) for _ in range(2))
            use_static_layers(caches[2], config.sliding_window)
            for cache in caches:
                for part in ids.split((17, 1, 3), dim=1):
                    model(part, past_key_values=cache)
print(json.dumps(launched))
"""
# what every model launches
COMMON = {
    "scores_kernel", "lse_kernel", "compose_kernel", "values_kernel", "keys_kernel", "back_1_kernel", "back_0_kernel",
    "output_kernel", "prepare_kernel", "states_kernel", "scale_kernel",
}  # fmt: skip
GENERATORS = {"generator_kernel", "generator_backward_kernel"}
MATRICES = {"expand_kernel", "project_kernel"} | GENERATORS
CASES = {
    "full": ({"compose_static": True, "num_key_value_heads": 2}, "bfloat16", MATRICES),
    "one head": ({"num_attention_heads": 1, "compose_rank": 1}, "float32", MATRICES),
    "two blocks of heads": ({"num_attention_heads": 34, "num_hidden_layers": 1}, "bfloat16", MATRICES),
    "scores in two parts": ({"compose_static": True}, "bfloat16", MATRICES, Beyond.PRECISION),
    "after two marks": ({"num_key_value_heads": 2}, "bfloat16", MATRICES, Beyond.PRECISION | Beyond.GRADIENTS),
    "query side": ({"compose_key": False, "compose_groups": 2}, "float16", GENERATORS),
    "no composition": (
        {f"compose_{name}": False for name in ("pre", "post", "query", "key", "gate", "projection")},
        "float32",
        set(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_launch_compiles(case):
    fields, dtype, more, *found = CASES[case]
    run = run_source("-c", COMPILE, json.dumps([fields, dtype, sum(found)]))
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    launched = json.loads(run.stdout.splitlines()[-1])
    assert set(launched) >= COMMON | more, launched
