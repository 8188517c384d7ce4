"""Layers removed, swapped, repeated or changed: the kernels give the answer of the definition."""

import copy

import pytest
import torch
from helpers import randomise, tiny_config
from kernel_device import DEVICE, INTERPRETED
from test_surgery import SURGERY, WINDOW, answers

from dcformer import DCFormerForCausalLM


@pytest.mark.parametrize("surgery", SURGERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_one_answer_after_surgery(surgery, padded):
    """The interpreter takes a minute for a case; of most whole rows it does one, of 18 tokens, without pieces."""
    is_short = INTERPRETED and not padded and surgery is not SURGERY[0]
    torch.manual_seed(0)
    whole = randomise(DCFormerForCausalLM(tiny_config(num_hidden_layers=4, sliding_window=WINDOW))).eval().to(DEVICE)
    torch.manual_seed(1)
    ids = torch.randint(97, (1, 18) if is_short else (2, 31)).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0

    def run(implementation, dtype):
        model = copy.deepcopy(whole)
        model.set_attn_implementation(implementation)
        surgery(model)
        return answers(model.to(dtype), ids, mask, {} if is_short else {"in pieces": 6})

    exact, eager, found = (
        run("eager", torch.float64),
        run("eager", torch.float32),
        run("dcformer_triton", torch.float32),
    )
    for name, expected in exact.items():
        allowed = 2 * (eager[name] - expected).abs().max() + 8 * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (found[name] - expected).abs().max() <= allowed, name
