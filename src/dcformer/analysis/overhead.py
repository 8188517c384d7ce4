"""Parameters of a model and the cost of composition, from the configuration alone (arXiv 2405.08553, section 3.3)."""

from dataclasses import dataclass
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError

COUNTINGS = ("paper", "causal", "windows")  # of `training_flops`


@dataclass(frozen=True)
class ComposeOverhead:
    """What composition adds to a model (paper section 3.3 and Table 2).

    Attributes:
        parameters: parameters added, exact: equal to what counting the built model's composition tensors gives.
        parameter_ratio: `parameters` over all other parameters outside the embeddings.
        flops_per_token: floating point operations added to the forward pass of one token at the given sequence
            length, exact for the formula of composition: 2 per multiply-add, over all keys of the sequence.
        flops_ratio: `flops_per_token` over the forward operations of the plain model's layers, whose attention counts
            half of the keys, as in the paper.
        paper_parameter_ratio: the paper's leading-order estimate, (2R+1)/(3D) for full composition: generator
            projections from the hidden state only, over the 12·E² parameters of a Transformer layer.
        paper_flops_ratio: the paper's leading-order estimate, 4(2R+1)(1+r)/((12+r)D) with r = S/E.
    """

    parameters: int
    parameter_ratio: float
    flops_per_token: int
    flops_ratio: float
    paper_parameter_ratio: float
    paper_flops_ratio: float


def _check_config(config: Any) -> None:
    if not isinstance(config, DCFormerConfig):
        raise DCFormerError(
            f"config is a {type(config).__name__}: expected that of a language model of this package. Other models, "
            "converted ones too, count their own: model.num_parameters()."
        )


def num_parameters(config: DCFormerConfig, exclude_embeddings: bool = False) -> int:
    """Number of parameters of the causal language model.

    Args:
        config: the model's. Of one with a head system, those that it has with plain attention: see `system_costs`.
        exclude_embeddings: leave out the input embedding and the output projection.

    Raises:
        DCFormerError: for a configuration that is not of this package, that of a converted model among them.
    """
    _check_config(config)
    e, d, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, (sum(config.num_key_heads) + sum(config.num_value_heads)) * d
    seeds = d if config.head_embeddings else q
    attention = (config.num_hidden_layers * seeds + kv) * (e + config.attention_bias)  # q, k and v in all layers
    others = 3 * q * bool(config.head_embeddings) + 2 * d * config.qk_norm
    attention += config.num_hidden_layers * (q * e + e * config.attention_bias + others)
    matrices = 3 if config.mlp_type == "gated" else 2
    mlp = matrices * e * f + ((matrices - 1) * f + e) * config.mlp_bias + config.mlp_gates * e
    norm = e * (2 if config.norm_type == "layernorm" else 1)
    total = attention + config.num_hidden_layers * (mlp + 2 * norm) + norm + num_compose_parameters(config)
    if not exclude_embeddings:
        total += config.vocab_size * e * (1 if config.tie_word_embeddings else 2)
    return total


def num_compose_parameters(config: DCFormerConfig) -> int:
    """Number of parameters that composition adds to the model, all layers together. Errors as of `num_parameters`."""
    _check_config(config)
    e, h, r = config.hidden_size, config.num_attention_heads, config.compose_rank
    m, generators = h // config.compose_groups, len(config.compose_generators)
    low_rank = e * 2 * r * h + (2 * r * h) * (2 * r * m) if config.compose_projection else 0
    gate = e * h if config.compose_gate else 0
    static = (config.compose_pre + config.compose_post) * h * m if config.compose_static else 0
    return config.num_hidden_layers * (generators * (low_rank + gate) + static)


def compose_overhead(config: DCFormerConfig, sequence_length: int | None = None) -> ComposeOverhead:
    """What composition adds in parameters and in forward operations per token (paper section 3.3, Table 2).

    Args:
        config: the model's.
        sequence_length: S, in tokens; `max_position_embeddings` when not given. Every layer is counted as global, as
            the paper does.

    Returns:
        `ComposeOverhead`, exact counts and the paper's leading-order ratios.

    Raises:
        DCFormerError: as `num_parameters`.
    """
    parameters = num_compose_parameters(config)
    s = config.max_position_embeddings if sequence_length is None else sequence_length
    e, h, d, r = config.hidden_size, config.num_attention_heads, config.head_dim, config.compose_rank
    layers, m, generators = config.num_hidden_layers, h // config.compose_groups, len(config.compose_generators)
    plain = num_parameters(config, exclude_embeddings=True) - parameters

    per_head = 2 * r * config.compose_projection + config.compose_gate  # multiply-adds per (query, key, head)
    static = (config.compose_pre + config.compose_post) * config.compose_static
    generate = 2 * parameters - 2 * layers * static * h * m
    mix = layers * 2 * s * h * (generators * per_head + static * m)
    matmuls = layers * (2 * (h * d) * s)  # QK and PV over the causal half of S keys
    rho = s / e
    return ComposeOverhead(
        parameters=parameters,
        parameter_ratio=parameters / plain if plain else 0.0,
        flops_per_token=generate + mix,
        flops_ratio=(generate + mix) / (2 * plain + matmuls) if plain else 0.0,
        paper_parameter_ratio=generators * per_head / (12 * d),
        paper_flops_ratio=generators * per_head * (1 + rho) / ((12 + rho) * d),
    )


def training_flops(config: DCFormerConfig, sequence_length: int | None = None, counting: str = "paper") -> float:
    """Operations that training takes per token: three times those of the forward pass, composition included.

    Args:
        config: the model's.
        sequence_length: S, as for `compose_overhead`.
        counting: over which keys attention and composition are counted, one of `COUNTINGS`: "paper" counts q kᵀ and p v
            over the causal half of S and composition over all of S, in every layer, as the paper does; "causal" counts
            composition over the causal half too; "windows" counts both over the keys that a layer's window leaves.

    Returns:
        2 per multiply-add of every matrix and the output projection, of q kᵀ and p v, and of composition; times 3.

    Raises:
        DCFormerError: for a counting that there is not; as `num_parameters`.
    """
    if counting not in COUNTINGS:
        raise DCFormerError(f"counting {counting!r}: expected one of {', '.join(COUNTINGS)}")
    s = config.max_position_embeddings if sequence_length is None else sequence_length
    overhead, none = compose_overhead(config, s).flops_per_token, compose_overhead(config, 0).flops_per_token
    matrices = num_parameters(config, exclude_embeddings=True) - num_compose_parameters(config)
    others = 2 * matrices + 2 * config.vocab_size * config.hidden_size + none
    attention_per_key = 4 * config.num_attention_heads * config.head_dim
    mixing = float(overhead - none)  # of S keys in every layer
    keys = [
        _mean_keys(s, config.sliding_window if counting == "windows" and kind == "sliding_attention" else None)
        for kind in config.layer_types
    ]
    attention = attention_per_key * sum(keys)
    if counting != "paper" and s:
        mixing *= sum(keys) / (s * max(1, len(keys)))
    return 3.0 * (others + attention + mixing)


def _mean_keys(length: int, window: int | None) -> float:
    """Keys per query: half of them, or of the last `window`, which the first queries do not fill."""
    reach = length if window is None else min(window, length)
    return reach - reach * reach / (2 * length) if length else 0.0


__all__ = [
    "COUNTINGS",
    "ComposeOverhead",
    "compose_overhead",
    "num_compose_parameters",
    "num_parameters",
    "training_flops",
]
