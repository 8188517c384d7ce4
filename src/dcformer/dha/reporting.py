"""What a folded model saves: heads per layer, bytes of cache, parameters. Read from its configuration."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..cache_report import layer_bytes_per_token
from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError
from ..head_systems import HeadSystemsConfig
from .sources import load_config


@dataclass(frozen=True)
class HeadReport:
    """What a model's head maps save; as text, a table.

    Attributes:
        key_heads, value_heads: of every layer, [L].
        source_heads: n, of both kinds in every layer before.
        kv_saving: share of key and value heads that are saved.
        token_bytes, source_token_bytes: of the cache for one token, all layers; with composition's channels.
        parameters_removed: of the key and value projections.
        context: tokens.
        cache_bytes, source_cache_bytes: of the cache for the context; local layers hold at most their window.
        dtype: of the cache.
    """

    key_heads: list[int]
    value_heads: list[int]
    source_heads: int
    kv_saving: float
    token_bytes: int
    source_token_bytes: int
    parameters_removed: int
    context: int
    cache_bytes: int
    source_cache_bytes: int
    dtype: str

    def __str__(self) -> str:
        width = len(str(len(self.key_heads) - 1))
        lines = [f"{'layer':>{max(5, width)}}  keys  values   of {self.source_heads} each"]
        for layer, pair in enumerate(zip(self.key_heads, self.value_heads, strict=True)):
            lines.append(f"{layer:>{max(5, width)}}  {pair[0]:>4}  {pair[1]:>6}")
        share = self.token_bytes / self.source_token_bytes
        lines += [
            f"heads: {sum(self.key_heads)} key and {sum(self.value_heads)} value heads, "
            f"{self.kv_saving:.1%} of {2 * len(self.key_heads) * self.source_heads} saved",
            f"cache, {self.dtype}: {self.token_bytes:,} bytes per token, {share:.1%} of {self.source_token_bytes:,}",
            f"cache of {self.context:,} tokens: {self.cache_bytes / 2**20:,.2f} MiB of "
            f"{self.source_cache_bytes / 2**20:,.2f} MiB",
            f"parameters removed: {self.parameters_removed:,}",
        ]
        return "\n".join(lines)


def report(model: Any, context: int = 4096, dtype: torch.dtype = torch.bfloat16) -> HeadReport:
    """What the head maps of a model save.

    Args:
        model: a model of this package, its configuration, or its folder, of which only the configuration is read.
        context: tokens of a cache.
        dtype: of the cache.

    Returns:
        `HeadReport`.

    Raises:
        DCFormerError: when it is another kind of model, the context is not positive, or the dtype is none of torch's.
    """
    config = load_config(model) if isinstance(model, str | os.PathLike) else getattr(model, "config", model)
    if not isinstance(config, DCFormerConfig):
        raise DCFormerError(
            f"a {getattr(config, 'model_type', type(config).__name__)} model has no head maps: fold it."
        )
    if isinstance(config, HeadSystemsConfig) and config.head_system != "plain":
        raise DCFormerError(
            f"head_system={config.head_system!r} has no head maps: dcformer.head_systems.system_costs counts its cache."
        )
    if type(context) is not int or context < 1:
        raise DCFormerError(f"context={context!r}: expected a whole number of at least 1 token.")
    if not isinstance(dtype, torch.dtype):
        raise DCFormerError(f"dtype={dtype!r}: expected one of torch's, as torch.bfloat16.")
    plain: Any = type(config).from_dict(config.to_dict())
    plain.key_head_map = plain.value_head_map = None
    bytes_of, source_bytes_of = (
        [layer_bytes_per_token(one, layer, dtype)[1] for layer in range(config.num_hidden_layers)]
        for one in (config, plain)
    )
    windows: Any = config.sliding_window
    held = [min(context, windows) if kind == "sliding_attention" else context for kind in config.layer_types or ()]
    n: Any = config.num_key_value_heads
    removed = sum(2 * n - k - v for k, v in zip(config.num_key_heads, config.num_value_heads, strict=True))
    rows: Any = config.head_dim
    return HeadReport(
        key_heads=config.num_key_heads,
        value_heads=config.num_value_heads,
        source_heads=n,
        kv_saving=config.kv_saving,
        token_bytes=sum(bytes_of),
        source_token_bytes=sum(source_bytes_of),
        parameters_removed=removed * rows * (config.hidden_size + config.attention_bias),
        context=context,
        cache_bytes=sum(one * tokens for one, tokens in zip(bytes_of, held, strict=True)),
        source_cache_bytes=sum(one * tokens for one, tokens in zip(source_bytes_of, held, strict=True)),
        dtype=str(dtype).removeprefix("torch."),
    )


__all__ = ["HeadReport", "report"]
