"""Key-wise composition weights beside the keys that a cache holds of encoder states.

A model makes the keys of cross-attention once for a generation, and so are their weights. What is done to the cache
then, by a search with beams or a caller, is done to its layers: those of this file do to the weights what the
library's do to keys. Copies and pickles of a cache have the weights as well.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from ..compose_dcformer import SideWeights

Sides = dict[tuple[str, str], SideWeights]  # (stage, side) -> weights, as `DCFormerCompose` makes them


class _WithKeyWeights(CacheLayerMixin):
    """What the layers of this file have besides the library's.

    Attributes:
        key_weights: path of a module -> the weights of its keys that the layer holds.
    """

    key_weights: dict[str, Sides]

    def reset(self) -> None:
        """Forgets the keys, and their weights."""
        super().reset()
        self.key_weights = {}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Puts sequences in another order."""
        super().reorder_cache(beam_idx)
        self._change(lambda packed: packed.index_select(0, beam_idx.to(packed.device)))

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces weights [B, H, channels, S], all in the same way."""
        self.key_weights = {
            path: {at: SideWeights(change(side.packed)) for at, side in sides.items()}
            for path, sides in self.key_weights.items()
        }


class KeyWeightsDynamicLayer(_WithKeyWeights, DynamicLayer):
    """A dynamic layer that also holds weights of its keys."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence."""
        super().batch_repeat_interleave(repeats)
        self._change(lambda packed: packed.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some of the sequences."""
        super().batch_select_indices(indices)
        self._change(lambda packed: packed[indices])


class KeyWeightsStaticLayer(_WithKeyWeights, StaticLayer):
    """A static layer that also holds weights of its keys."""


_CLASSES: dict[type, Any] = {DynamicLayer: KeyWeightsDynamicLayer, StaticLayer: KeyWeightsStaticLayer}


def layer_with_key_weights(cache: Any, index: int | None) -> Any:
    """The layer of a cache in which a module's weights are kept.

    Args:
        cache: as the module is called with it.
        index: the module's `layer_idx`.

    Returns:
        the layer, which has been made one of this file's; None where there is none, or one of another kind, such as a
        quantized one. In graphs, layers stay what they are.
    """
    cache = getattr(cache, "cross_attention_cache", cache)  # of encoder-decoders
    if not isinstance(cache, Cache) or index is None:
        return None
    may_change = not torch.compiler.is_compiling()
    if may_change and cache.layer_class_to_replicate is not None:  # as its `update` does
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if may_change and type(layer) in _CLASSES:
        layer.__class__ = _CLASSES[type(layer)]
        layer.key_weights = {}
    return layer if isinstance(layer, _WithKeyWeights) else None


__all__ = ["KeyWeightsDynamicLayer", "KeyWeightsStaticLayer", "layer_with_key_weights"]
