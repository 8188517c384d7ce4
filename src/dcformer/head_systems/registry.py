"""The head systems by name, and their making from a configuration."""

from typing import Any

from .base import HeadSystem
from .collaborative import Collaborative
from .head_pruning import HeadPruning
from .mixture_of_heads import MixtureOfHeads
from .options import HeadSizes, HeadSystemOptions
from .output_gate import OutputGate
from .overlapped import Overlapped
from .plain import Plain
from .talking_heads import TalkingHeads

HEAD_SYSTEMS: dict[str, type[HeadSystem]] = {
    "plain": Plain,
    "talking_heads": TalkingHeads,
    "collaborative": Collaborative,
    "overlapped": Overlapped,
    "mixture_of_heads": MixtureOfHeads,
    "output_gate": OutputGate,
    "head_pruning": HeadPruning,
}


def system_class(name: str) -> type[HeadSystem]:
    """The class of a system.

    Raises:
        ValueError: on an unknown name.
    """
    if name not in HEAD_SYSTEMS:
        raise ValueError(f"head_system={name!r} is unknown: expected one of {', '.join(HEAD_SYSTEMS)}.")
    return HEAD_SYSTEMS[name]


def options_of(config: Any) -> HeadSystemOptions:
    """The options of a configuration's system.

    Args:
        config: with `head_system` and `head_system_options`.

    Raises:
        ValueError: on an unknown system or option.
    """
    return system_class(config.head_system).options_class.of(config.head_system_options)


def sizes_of(config: Any, layer: int = 0) -> HeadSizes:
    """The sizes of a layer of a language model.

    Args:
        config: a `DCFormerConfig`.
        layer: which, from 0.
    """
    rotary_dim, qk_norm = config.rotary_dim, bool(config.qk_norm)
    return _sizes(config, layer, bias=config.attention_bias, rotary_dim=rotary_dim, qk_norm=qk_norm)


def image_sizes_of(config: Any, layer: int = 0) -> HeadSizes:
    """The sizes of a layer of a vision Transformer, which has no RoPE and as many keys and values as queries."""
    return _sizes(config, layer, bias=config.qkv_bias, qk_norm=config.qk_norm is not None)


def _sizes(config: Any, layer: int, **own: Any) -> HeadSizes:
    return HeadSizes(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layer=layer,
        num_layers=config.num_hidden_layers,
        composed=config.composes,
        **own,
    )


def make_system(config: Any, layer: int = 0, sizes: HeadSizes | None = None) -> HeadSystem:
    """The system of a layer.

    Args:
        config: with `head_system` and `head_system_options`.
        layer: which, from 0.
        sizes: the layer's; by default those of a language model.
    """
    return system_class(config.head_system)(sizes or sizes_of(config, layer), options_of(config))


__all__ = ["HEAD_SYSTEMS", "image_sizes_of", "make_system", "options_of", "sizes_of", "system_class"]
