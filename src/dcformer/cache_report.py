"""What composition adds to the bytes that a cache holds for each token: `python -m dcformer.cache_report`.

Key-wise composition weights are stored behind the keys and values they belong to, as extra channels
(`DCFormerConfig.compose_cache_channels`). For each preset the table has the bytes of one token in all layers, computed
from the configuration, and in one layer, measured in a `DynamicCache` that such a layer filled.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .configuration_dcformer import DCFormerConfig
from .modeling_dcformer import attention_class_of
from .presets_dcformer import PRESETS

DTYPES = ("bfloat16", "float16", "float32")


def cache_bytes_per_token(config: DCFormerConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Bytes that one token takes in the cache, all layers together.

    Local layers are counted like global ones, although they hold at most their window of tokens.

    Args:
        config: any DCFormer or DCPythia configuration; for head systems see `system_costs`.
        dtype: dtype of the cached keys and values.

    Returns:
        bytes of plain keys and values, and bytes with composition's channels added.
    """
    layers = [layer_bytes_per_token(config, layer, dtype) for layer in range(config.num_hidden_layers)]
    return sum(plain for plain, _ in layers), sum(composed for _, composed in layers)


def layer_bytes_per_token(config: DCFormerConfig, layer: int, dtype: torch.dtype) -> tuple[int, int]:
    """`cache_bytes_per_token` of one layer, by its number."""
    plain = composed = 0  # numbers
    for stage in ("pre", "post"):
        heads, width = config.cached_heads(stage, layer), config.cache_width(stage, layer)
        plain += heads * (width - config.compose_cache_channels(stage, layer))
        composed += heads * width
    return plain * dtype.itemsize, composed * dtype.itemsize


def measured_bytes_per_layer(config: DCFormerConfig, dtype: torch.dtype = torch.bfloat16, layer_idx: int = 0) -> int:
    """Bytes that one token takes in one layer of a `DynamicCache`, after a forward pass of that layer's attention.

    The attention has the heads, head dim and composition of `config`, but reads a narrow residual stream, on which the
    cache does not depend.

    Args:
        config: any DCFormer or DCPythia configuration.
        dtype: dtype of the layer, and so of what it caches.
        layer_idx: its number; layers differ where `key_head_map` or `value_head_map` make them.

    Returns:
        bytes held in keys and values.
    """
    narrow = copy.deepcopy(config)
    narrow.hidden_size = 8
    narrow._attn_implementation = "eager"
    attention = attention_class_of(narrow)(narrow, layer_idx).to(dtype).requires_grad_(False)
    for parameter in attention.parameters():
        torch.nn.init.zeros_(parameter)
    cache, position = DynamicCache(), torch.zeros(1, 1, config.rotary_dim, dtype=dtype)
    attention(torch.zeros(1, 1, narrow.hidden_size, dtype=dtype), (position, position), cache=cache)
    layer: Any = cache.layers[layer_idx]
    return layer.keys.nbytes + layer.values.nbytes


def report(presets: Sequence[str] = tuple(PRESETS), dtype: torch.dtype = torch.bfloat16) -> str:
    """The table of `python -m dcformer.cache_report`.

    Args:
        presets: names known to `DCFormerConfig.from_preset`.
        dtype: dtype of the cache.

    Returns:
        lines of text: a heading, then one line per preset.

    Raises:
        ValueError: on an unknown preset.
        AssertionError: if a measured layer does not hold the bytes that were counted.
    """
    lines = [
        f"Cache bytes per token, {str(dtype).removeprefix('torch.')}",
        f"{'preset':<18}{'head_dim':>9}{'plain K+V':>12}{'composed':>12}{'overhead':>10}{'measured, one layer':>22}",
    ]
    for name in presets:
        config = DCFormerConfig.from_preset(name)
        plain, composed = cache_bytes_per_token(config, dtype)
        measured = measured_bytes_per_layer(config, dtype)
        if measured * config.num_hidden_layers != composed:
            raise AssertionError(
                f"{name}: a layer holds {measured} bytes, {composed / config.num_hidden_layers} counted"
            )
        overhead = f"{100 * (composed / plain - 1):.2f}%"
        lines.append(f"{name:<18}{config.head_dim:>9}{plain:>12}{composed:>12}{overhead:>10}{measured:>22}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table. `arguments` are those of the command line when not given."""
    parser = argparse.ArgumentParser(prog="python -m dcformer.cache_report", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"any of {', '.join(PRESETS)} (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the cache (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.presets if name not in PRESETS]
    if unknown:
        parser.error(f"unknown preset {unknown[0]!r}: expected any of {', '.join(PRESETS)}")
    print(report(options.presets or tuple(PRESETS), getattr(torch, options.dtype)))


if __name__ == "__main__":
    main()
