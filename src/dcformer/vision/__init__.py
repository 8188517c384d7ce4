"""DCViT: a vision Transformer with dynamically composable multi-head attention (arXiv 2405.08553, section 4.4)."""

from contextlib import suppress

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

from .big_vision import convert_big_vision
from .configuration_dcvit import VISION_PRESETS, DCViTConfig
from .image_processing_dcvit import DCViTImageProcessor, DCViTImageProcessorPil, ImageFolder, read_image_folder
from .modeling_dcvit import DCViTForImageClassification, DCViTModel, DCViTPreTrainedModel, sincos_positions


def register() -> None:
    """Registers "dcvit" with Transformers' Auto classes."""
    AutoConfig.register(DCViTConfig.model_type, DCViTConfig, exist_ok=True)
    AutoModel.register(DCViTConfig, DCViTModel, exist_ok=True)
    AutoModelForImageClassification.register(DCViTConfig, DCViTForImageClassification, exist_ok=True)
    processors: dict[str, type] = {"pil": DCViTImageProcessorPil, "torchvision": DCViTImageProcessor}
    # The Auto class refuses everything without Pillow, and before Transformers 5.21 without torchvision.
    with suppress(ImportError):
        AutoImageProcessor.register(DCViTConfig, image_processor_classes=processors, exist_ok=True)


__all__ = [
    "VISION_PRESETS",
    "DCViTConfig",
    "DCViTForImageClassification",
    "DCViTImageProcessor",
    "DCViTImageProcessorPil",
    "DCViTModel",
    "DCViTPreTrainedModel",
    "ImageFolder",
    "convert_big_vision",
    "read_image_folder",
    "register",
    "sincos_positions",
]
