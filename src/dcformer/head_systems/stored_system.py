"""Refuses checkpoints of another head system, whose tensors would be left out with a warning."""

from typing import Any

_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def check_same_system(config_class: Any, path: Any, kwargs: dict[str, Any]) -> None:
    """Compares what a folder holds with what it is to be loaded as.

    Args:
        config_class: `HeadSystemsConfig`.
        path: as for `from_pretrained`; None for a model without stored weights.
        kwargs: as for `from_pretrained`, perhaps with a `config` or a `head_system`.

    Raises:
        ValueError: naming both systems.
    """
    if path is None:
        return
    stored, _ = config_class.get_config_dict(path, **{name: kwargs[name] for name in _HUB if name in kwargs})
    wanted = getattr(kwargs.get("config"), "head_system", None) or kwargs.get("head_system")
    if stored.get("model_type") != config_class.model_type:
        raise ValueError(
            f"{path} is of model type {stored.get('model_type')!r}, not {config_class.model_type!r}: load it "
            "with its own class, and make a model with a head system from it with to_head_system."
        )
    if wanted is not None and wanted != (found := stored.get("head_system", "plain")):
        raise ValueError(
            f"{path} is a checkpoint with head_system={found!r}, and the model to load has head_system={wanted!r}: "
            "leave the configuration to the checkpoint."
        )


__all__ = ["check_same_system"]
