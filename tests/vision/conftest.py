"""Small models of images."""

import pytest
import torch

from dcformer import DCViTConfig, DCViTForImageClassification

SMALL = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 5,
}


@pytest.fixture
def make_model():
    """(fields of the configuration) -> a model whose every parameter is random, so that each takes part."""

    def make(attn_implementation="eager", **fields) -> DCViTForImageClassification:
        torch.manual_seed(0)
        model = DCViTForImageClassification(DCViTConfig(**SMALL | fields, attn_implementation=attn_implementation))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model.eval()

    return make


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
