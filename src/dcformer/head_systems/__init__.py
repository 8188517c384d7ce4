"""Head systems: the other ways in which heads interact, in the same models. See docs/head_systems.md.

`HEAD_SYSTEMS` names them; `HeadSystemsConfig(head_system=..., head_system_options=...)` makes models of one,
`to_head_system` makes them from plain checkpoints.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from .base import HeadSystem
from .configuration_head_systems import HeadSystemsConfig
from .convert import to_head_system
from .costs import SystemCosts, system_costs
from .modeling_head_systems import (
    HeadSystemsForCausalLM,
    HeadSystemsForSequenceClassification,
    HeadSystemsModel,
)
from .options import HeadSizes, HeadSystemOptions
from .pretrained_head_systems import HeadSystemsPreTrainedModel
from .pruning import head_importance, prune_heads
from .registry import HEAD_SYSTEMS, make_system, sizes_of
from .talking_heads import from_talking_heads
from .vision import HeadSystemsViTConfig, HeadSystemsViTForImageClassification, HeadSystemsViTModel


def register() -> None:
    """Registers "dcformer_heads" and "dcvit_heads" with Transformers' Auto classes."""
    AutoConfig.register(HeadSystemsViTConfig.model_type, HeadSystemsViTConfig, exist_ok=True)
    AutoModel.register(HeadSystemsViTConfig, HeadSystemsViTModel, exist_ok=True)
    AutoModelForImageClassification.register(HeadSystemsViTConfig, HeadSystemsViTForImageClassification, exist_ok=True)
    AutoConfig.register(HeadSystemsConfig.model_type, HeadSystemsConfig, exist_ok=True)
    AutoModel.register(HeadSystemsConfig, HeadSystemsModel, exist_ok=True)
    AutoModelForCausalLM.register(HeadSystemsConfig, HeadSystemsForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(HeadSystemsConfig, HeadSystemsForSequenceClassification, exist_ok=True)


__all__ = [
    "HEAD_SYSTEMS",
    "HeadSizes",
    "HeadSystem",
    "HeadSystemOptions",
    "HeadSystemsConfig",
    "HeadSystemsForCausalLM",
    "HeadSystemsForSequenceClassification",
    "HeadSystemsModel",
    "HeadSystemsPreTrainedModel",
    "HeadSystemsViTConfig",
    "HeadSystemsViTForImageClassification",
    "HeadSystemsViTModel",
    "SystemCosts",
    "from_talking_heads",
    "head_importance",
    "make_system",
    "prune_heads",
    "register",
    "sizes_of",
    "system_costs",
    "to_head_system",
]
