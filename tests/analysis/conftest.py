"""The bundled checkpoint, for the tests of analysis."""

import pytest
from analysis_models import CHECKPOINT, PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def bundled():
    """The bundled checkpoint, with eager attention, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="session")
def prompt(bundled):
    """The tokens of a question, [1, 24]; the answer is " fish"."""
    return bundled[1](PROMPT, return_tensors="pt")
