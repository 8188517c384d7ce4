"""lm-eval's model of Transformers: for several processes on any device, and for converted models."""

import os
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..modules.saving import AnyCausalLM

NAME, CONVERTED = "dcformer-hf", "dcformer-converted"

if not torch.accelerator.is_available():
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise accelerate treats each process as the only one


@register_model(NAME)
class SharingHFLM(HFLM):
    """`--model hf` in which each process of ``accelerate launch`` evaluates its share of the items.

    lm-eval 0.4.13 does so only where it sees several GPUs; on CPUs every process would evaluate everything.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size == 1 and hasattr(self, "accelerator"):  # lm-eval keeps it if there are several processes
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes


@register_model(CONVERTED)
class ConvertedHFLM(SharingHFLM):
    """The same for models that `convert_attention` has changed, with their composition."""

    AUTO_MODEL_CLASS = AnyCausalLM  # which lm-eval would choose by the configuration


__all__ = ["CONVERTED", "NAME", "ConvertedHFLM", "SharingHFLM"]
