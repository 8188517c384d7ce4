"""Models and texts for the tests of analysis."""

import torch
from helpers import REPOSITORY, randomize, tiny_config

from dcformer import DCFormerForCausalLM

CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
PROMPT = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"


def random_model(dtype=torch.float32, **fields) -> DCFormerForCausalLM:
    """A small model whose every parameter is random, with eager attention."""
    model = DCFormerForCausalLM(tiny_config(attn_implementation="eager", **fields)).to(dtype)
    return randomize(model)
