"""Small models of every kind that can be a source, far from their initialization."""

import torch
from helpers import randomize
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
GROUPED = SIZES | {"num_key_value_heads": 4}


def llama(**fields):
    return LlamaForCausalLM(LlamaConfig(**(SIZES | fields)))


MAKE = {
    "llama": llama,
    "llama-gqa-bias-tied": lambda: llama(num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6)),
    "qwen2-bias": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3-qk-norm": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "neox-partial-rotary": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, rotary_pct=0.5)),
    "dcformer-composed": lambda: DCFormerForCausalLM(DCFormerConfig(**SIZES, sliding_window=6)),
    "dcformer-composed-gqa": lambda: DCFormerForCausalLM(DCFormerConfig(**GROUPED, sliding_window=6)),
    "dcpythia-composed": lambda: DCPythiaForCausalLM(
        DCPythiaConfig(
            **SIZES, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"}
        )
    ),
}


def make(name, dtype=torch.float32):
    """The model of that name, in evaluation mode."""
    torch.manual_seed(0)
    return randomize(MAKE[name](), scale=1.0).to(dtype)


def tokens(rows=2, length=14, seed=0):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows=2, length=14):
    """Arguments of a model: the first row has three tokens of padding."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": tokens(rows, length), "attention_mask": mask, "position_ids": positions}
