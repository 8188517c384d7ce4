"""What a head system costs: parameters, operations and cache, counted from a model on the meta device."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from ..analysis import num_parameters, training_flops
from ..configuration_dcformer import DCFormerConfig
from .base import HeadSystem
from .configuration_head_systems import HeadSystemsConfig
from .modeling_head_systems import HeadSystemsForCausalLM


@dataclass(frozen=True)
class SystemCosts:
    """Costs of a model with a head system.

    Attributes:
        parameters: of the causal language model.
        flops_per_token: of the matrix products in the attention layers at a number of keys, 2 per multiply-add, without
            those of composition.
        activated_flops_per_token: the same where scores, values and output of heads that a token does not take were
            left out, which no implementation here does; other than `flops_per_token` for mixtures of heads only.
        cache_channels: numbers that the cache holds for each token, all layers together.
    """

    parameters: int
    flops_per_token: int
    activated_flops_per_token: int
    cache_channels: int


def system_costs(config: HeadSystemsConfig, sequence_length: int | None = None) -> SystemCosts:
    """Costs of a model that is built without memory for parameters.

    Args:
        config: the model's.
        sequence_length: S, in tokens; `max_position_embeddings` when not given. Every layer counts as global.

    Raises:
        TypeError: on a configuration of another kind, such as a vision Transformer's.
        ValueError: on a length below 1.
    """
    if not isinstance(config, HeadSystemsConfig):
        raise TypeError(
            f"config is a {type(config).__name__}: expected a HeadSystemsConfig, of a language model; with "
            "head_system='plain' it counts a DCFormer."
        )
    length: Any = config.max_position_embeddings if sequence_length is None else sequence_length
    if not isinstance(length, Integral) or length < 1:
        raise ValueError(f"sequence_length={length!r}: expected a whole number of tokens, at least 1.")
    length = int(length)
    model = _built(config)
    attentions: list[Any] = [layer.self_attn for layer in model.model.layers]
    systems = [attention.system for attention in attentions]
    return SystemCosts(
        parameters=model.num_parameters(),
        flops_per_token=sum(system.flops(length) for system in systems),
        activated_flops_per_token=sum(system.activated_flops(length) for system in systems),
        cache_channels=sum(
            attention.system.cache_heads * (width + attention.compose.channels[stage])
            for attention in attentions
            for stage, width in zip(("pre", "post"), attention.cache_widths, strict=True)
        ),
    )


def _built(config: HeadSystemsConfig) -> Any:
    with torch.device("meta"):
        return HeadSystemsForCausalLM(type(config).from_dict(config.to_dict()))


def count_parameters(config: DCFormerConfig, exclude_embeddings: bool = False) -> int:
    """`num_parameters` of any language model of this package, with a head system or without."""
    whole = num_parameters(config, exclude_embeddings)
    if not isinstance(config, HeadSystemsConfig):
        return whole
    return system_costs(config).parameters + whole - num_parameters(config)


def count_training_flops(config: DCFormerConfig, sequence_length: int | None = None) -> float:
    """`training_flops`, by the paper's counting, of any language model of this package."""
    whole = training_flops(config, sequence_length)
    if not isinstance(config, HeadSystemsConfig):
        return whole
    length: Any = config.max_position_embeddings if sequence_length is None else sequence_length
    half, systems = length / 2, [layer.self_attn.system for layer in _built(config).model.layers]
    return whole + 3 * sum(system.flops(half) - HeadSystem.flops(system, half) for system in systems)  # over plain ones


__all__ = ["SystemCosts", "count_parameters", "count_training_flops", "system_costs"]
