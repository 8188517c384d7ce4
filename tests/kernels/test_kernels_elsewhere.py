"""The kernels under DCMHA and DCViT, whose attention is not causal, against eager; tolerances as in `test_model`."""

import pytest
import torch
from helpers import randomize
from kernel_device import DEVICE
from test_model import Operators, assert_as_exact, compared

from dcformer.modules import DCMHA
from dcformer.vision import DCViTConfig, DCViTForImageClassification


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(model, output):
    """The output, and the gradients that a projection of it on fixed noise has."""
    (output * noise(*output.shape, seed=9).to(output.dtype)).sum().backward()
    return {"output": output.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Module(DCMHA):
    """A `DCMHA` that is told its implementation as models are."""

    def set_attn_implementation(self, name):
        self.attn_implementation = name


@pytest.mark.parametrize(
    ("queries", "keys", "options", "masks"),
    [
        (5, 9, {}, {}),
        (17, 17, {"num_kv_heads": 2, "compose_groups": 2}, {"key_padding_mask": torch.arange(17)[None] >= 12}),
        (7, 7, {"qk_norm": True}, {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)}),
        (1, 20, {"compose_static": True, "compose_rank": 1}, {}),
    ],
    ids=["cross", "padded", "causal", "one query"],
)
def test_dcmha(queries, keys, options, masks):
    model = randomize(Module(64, 4, kdim=48, vdim=40, batch_first=True, **options)).to(DEVICE)
    inputs = noise(2, queries, 64), noise(2, keys, 48, seed=1), noise(2, keys, 40, seed=2)
    masks = {
        name: mask.to(DEVICE).expand(2, -1) if mask.shape[0] == 1 else mask.to(DEVICE) for name, mask in masks.items()
    }

    def call(module):
        dtype = module.out_proj.weight.dtype
        return gradients(module, module(*(x.to(dtype) for x in inputs), need_weights=False, **masks)[0])

    assert_as_exact(*compared(model, call))
    with Operators() as operators:  # the last of the three
        call(model)
    assert operators.counts()["composed_attention"] == 1


def test_dcvit():
    config = DCViTConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=12, patch_size=4,
        num_labels=5, pooling="cls",
    )  # fmt: skip
    model = randomize(DCViTForImageClassification(config)).to(DEVICE)
    images = noise(2, 3, 12, 12)

    def call(module):
        return gradients(module, module(images.to(module.dtype)).logits)

    assert_as_exact(*compared(model, call))
    model.set_attn_implementation("dcformer_triton")
    with Operators() as operators:
        model(images)
    assert operators.counts()["composed_attention"] == config.num_hidden_layers
