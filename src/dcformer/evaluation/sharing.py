"""lm-eval's model of Transformers: for several processes on any device, and for converted models."""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..modules.interface import generate_without_cache
from ..modules.saving import from_pretrained_any, generates_without_cache

NAME = "dcformer-hf"

if not torch.accelerator.is_available():
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise accelerate treats each process as the only one


@register_model(NAME)
class SharingHFLM(HFLM):
    """`--model hf` in which each process of ``accelerate launch`` evaluates its share of the items, and models that
    `convert_attention` has changed come with their composition, and generate without a cache where they have to (one
    that is given as a model, and not by name, does so from then on).

    lm-eval 0.4.13 shares items only where it sees several GPUs; on CPUs every process would evaluate everything.
    """

    AUTO_MODEL_CLASS: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size == 1 and hasattr(self, "accelerator"):  # lm-eval keeps it if there are several processes
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if generates_without_cache(self.config):
            generate_without_cache(self.model)

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """As lm-eval's, which loads by the class that it has chosen and asks for that class later."""
        chosen = self.AUTO_MODEL_CLASS
        self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=partial(from_pretrained_any, auto_class=chosen))
        try:
            super()._create_model(*args, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = chosen


__all__ = ["NAME", "SharingHFLM"]
