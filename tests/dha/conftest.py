"""Fixtures of DHA's tests."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


@pytest.fixture
def wide_norms(monkeypatch):
    """The library's RMS norms compute in float32 even of float64: here in float64, as this package's do."""

    def forward(self, states):
        return self.weight * torch.nn.functional.rms_norm(states, states.shape[-1:], eps=self.variance_epsilon)

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
