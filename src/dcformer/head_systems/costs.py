"""What a head system costs: parameters, operations and cache, from the configuration alone."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from ..analysis import num_parameters
from .configuration_head_systems import HeadSystemsConfig
from .mixture_of_heads import MixtureOfHeads
from .registry import make_system


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
    """Costs of a model, counted from the sizes of its layers.

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
    with torch.device("meta"):
        systems = [make_system(config, layer) for layer in range(config.num_hidden_layers)]
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    plain = config.hidden_size * 2 * (q + kv) + config.attention_bias * (q + 2 * kv + config.hidden_size)
    cache = 0
    for system in systems:
        repeats = config.num_attention_heads // (system.cache_heads if system.sizes.composed else 1)
        channels = 2 * config.compose_rank * config.compose_projection + config.compose_gate
        for stage, width in zip(("pre", "post"), system.cache_widths, strict=True):
            has_keys = (stage, "key") in config.compose_generators
            cache += system.cache_heads * (width + (-(-channels * repeats // 8) * 8 if has_keys else 0))
    dense = [system.flops(length) for system in systems]
    active = [s.flops(length, activated=True) if isinstance(s, MixtureOfHeads) else s.flops(length) for s in systems]
    return SystemCosts(
        parameters=num_parameters(config) + sum(system.num_parameters() - plain for system in systems),
        flops_per_token=sum(dense),
        activated_flops_per_token=sum(active),
        cache_channels=cache,
    )


__all__ = ["SystemCosts", "system_costs"]
