"""Layers removed, swapped, repeated or changed: the kernels give the answer of the definition."""

import copy
import itertools

import pytest
import torch
from helpers import randomize, tiny_config
from kernel_device import DEVICE
from test_surgery import SURGERY, WINDOW, answers

from dcformer import DCFormerForCausalLM


def cases():
    """Every surgery, with padding and without, on one row at once and on two in pieces: a minute in the interpreter."""
    for surgery, padded, pieces in itertools.product(SURGERY, (True, False), (False, True)):
        is_long = pieces and not (padded and surgery is SURGERY[0])
        name = "-".join([surgery.__name__, "padded" if padded else "whole", "in pieces" if pieces else "at once"])
        yield pytest.param(surgery, padded, pieces, id=name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("surgery", "padded", "pieces"), list(cases()))
def test_one_answer_after_surgery(surgery, padded, pieces):
    torch.manual_seed(0)
    whole = randomize(DCFormerForCausalLM(tiny_config(num_hidden_layers=4, sliding_window=WINDOW))).eval().to(DEVICE)
    torch.manual_seed(1)
    ids = torch.randint(97, (2, 31) if pieces else (1, 18)).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0

    def run(implementation, dtype):
        model = copy.deepcopy(whole)
        model.set_attn_implementation(implementation)
        surgery(model)
        return answers(model.to(DEVICE, dtype), ids, mask, {"in pieces": 6} if pieces else {})

    exact, eager, found = (
        run("eager", torch.float64),
        run("eager", torch.float32),
        run("dcformer_triton", torch.float32),
    )
    for name, expected in exact.items():
        allowed = 2 * (eager[name] - expected).abs().max() + 8 * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (found[name] - expected).abs().max() <= allowed, name
