"""DCFormer for Transformers: dynamically composable multi-head attention as an ordinary model of the library.

Importing the package registers "dcformer", "dcpythia", "dha", "dcvit", "dcformer_heads" and "dcvit_heads" with
Transformers' Auto classes, and the attention implementations "dcformer_chunked", where Triton is installed
"dcformer_triton", and "dcmha" and "dcmha_chunked" for models that `modules.convert_attention` has converted. The first
model that is made registers the names of tensors in the authors' repositories on the Hub.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention_dcformer import ComposeTrace, LayerTrace
from .compose_dcformer import ComposeSettings, ComposeWeights, DCFormerCompose, SideWeights, compose
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig, DHAConfig
from .head_systems import (
    HeadSystemsConfig,
    HeadSystemsForCausalLM,
    HeadSystemsForSequenceClassification,
    HeadSystemsModel,
    HeadSystemsPreTrainedModel,
    to_head_system,
)
from .head_systems import register as register_head_systems
from .kernels import register as register_kernels
from .modeling_dcformer import (
    DCFormerForCausalLM,
    DCFormerForQuestionAnswering,
    DCFormerForSequenceClassification,
    DCFormerForTokenClassification,
    DCFormerModel,
    DCFormerPreTrainedModel,
    DCPythiaForCausalLM,
    DCPythiaForQuestionAnswering,
    DCPythiaForSequenceClassification,
    DCPythiaForTokenClassification,
    DCPythiaModel,
    DHAForCausalLM,
    DHAForQuestionAnswering,
    DHAForSequenceClassification,
    DHAForTokenClassification,
    DHAModel,
)
from .modules import from_pretrained_converted
from .optimization import parameter_groups
from .remote_code import export_remote_code
from .vision import DCViTConfig, DCViTForImageClassification, DCViTImageProcessor, DCViTModel, DCViTPreTrainedModel
from .vision import register as register_vision

__version__ = "0.1.0"

_AUTO_CLASSES = {
    AutoModel: (DCFormerModel, DCPythiaModel, DHAModel),
    AutoModelForCausalLM: (DCFormerForCausalLM, DCPythiaForCausalLM, DHAForCausalLM),
    AutoModelForSequenceClassification: (
        DCFormerForSequenceClassification,
        DCPythiaForSequenceClassification,
        DHAForSequenceClassification,
    ),
    AutoModelForTokenClassification: (
        DCFormerForTokenClassification,
        DCPythiaForTokenClassification,
        DHAForTokenClassification,
    ),
    AutoModelForQuestionAnswering: (
        DCFormerForQuestionAnswering,
        DCPythiaForQuestionAnswering,
        DHAForQuestionAnswering,
    ),
}
for _config_class in (DCFormerConfig, DCPythiaConfig, DHAConfig):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
for _auto_class, _model_classes in _AUTO_CLASSES.items():
    for _model_class in _model_classes:
        _auto_class.register(_model_class.config_class, _model_class, exist_ok=True)
register_kernels()
register_vision()
register_head_systems()

if not TYPE_CHECKING:  # which would take any name for a module

    def __getattr__(name):
        """Parts that the models do without, such as `dcformer.dha`: imported when they are first asked for."""
        if name.startswith("_") or not name.isidentifier() or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


__all__ = [
    "ComposeSettings",
    "ComposeTrace",
    "ComposeWeights",
    "DCFormerCompose",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCFormerPreTrainedModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "DCViTConfig",
    "DCViTForImageClassification",
    "DCViTImageProcessor",
    "DCViTModel",
    "DCViTPreTrainedModel",
    "DHAConfig",
    "DHAForCausalLM",
    "DHAForQuestionAnswering",
    "DHAForSequenceClassification",
    "DHAForTokenClassification",
    "DHAModel",
    "HeadSystemsConfig",
    "HeadSystemsForCausalLM",
    "HeadSystemsForSequenceClassification",
    "HeadSystemsModel",
    "HeadSystemsPreTrainedModel",
    "LayerTrace",
    "SideWeights",
    "__version__",
    "compose",
    "export_remote_code",
    "from_pretrained_converted",
    "parameter_groups",
    "to_head_system",
]
