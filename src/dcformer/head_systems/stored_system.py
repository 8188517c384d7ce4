"""Refuses checkpoints of another head system, whose tensors would be left out with a warning."""

from typing import Any

from ..stored_dcformer import stored_config
from .configuration_head_systems import HeadSystemsConfig


def check_same_system(config_class: Any, path: Any, kwargs: dict[str, Any]) -> None:
    """Compares what a folder holds with what it is to be loaded as; without a type of model there, says nothing.

    Args:
        config_class: `HeadSystemsConfig` or `HeadSystemsViTConfig`.
        path: as for `from_pretrained`; None for a model without stored weights.
        kwargs: as for `from_pretrained`, perhaps with a `config` or a `head_system`.

    Raises:
        ValueError: naming both systems.
    """
    if path is None:
        return
    stored = stored_config(config_class, path, kwargs)
    if not stored.get("model_type"):  # an adapter, whose base model has it; anything else Transformers refuses
        return
    wanted = getattr(kwargs.get("config"), "head_system", None) or kwargs.get("head_system")
    if stored["model_type"] != config_class.model_type:
        advice = "load it with its own class"
        if config_class is HeadSystemsConfig:
            advice += ", and make a model with a head system from it with to_head_system"
        found, expected = stored["model_type"], config_class.model_type
        raise ValueError(f"{path} is of model type {found!r}, not {expected!r}: {advice}.")
    if wanted is not None and wanted != (found := stored.get("head_system", "plain")):
        raise ValueError(
            f"{path} is a checkpoint with head_system={found!r}, and the model to load has head_system={wanted!r}: "
            "leave the configuration to the checkpoint."
        )


__all__ = ["check_same_system"]
