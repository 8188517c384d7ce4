"""Layers removed, swapped, repeated or changed: the kernels give the answer of the definition."""

import copy

import pytest
import torch
from helpers import randomise, tiny_config
from kernel_device import DEVICE, INTERPRETED
from test_surgery import SURGERY, WINDOW, answers

from dcformer import DCFormerForCausalLM

# Of whole rows the interpreter, which takes a minute for each case, does the first alone.
CASES = [(surgery, True) for surgery in SURGERY] + [
    (surgery, False) for surgery in SURGERY[: 1 if INTERPRETED else None]
]


@pytest.mark.parametrize(
    ("surgery", "padded"),
    CASES,
    ids=[f"{surgery.__name__}-{'padded' if padded else 'whole'}" for surgery, padded in CASES],
)
def test_one_answer_after_surgery(surgery, padded):
    torch.manual_seed(0)
    whole = randomise(DCFormerForCausalLM(tiny_config(num_hidden_layers=4, sliding_window=WINDOW))).eval().to(DEVICE)
    torch.manual_seed(1)
    ids = torch.randint(97, (2, 31)).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0

    def run(implementation, dtype):
        model = copy.deepcopy(whole)
        model.set_attn_implementation(implementation)
        surgery(model)
        return answers(model.to(dtype), ids, mask, {"in pieces": 6})

    exact, eager, found = (
        run("eager", torch.float64),
        run("eager", torch.float32),
        run("dcformer_triton", torch.float32),
    )
    for name, expected in exact.items():
        allowed = 2 * (eager[name] - expected).abs().max() + 8 * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (found[name] - expected).abs().max() <= allowed, name
