"""A static cache layer for local attention whose state is tensors only, so that decoding compiles to a single graph.

All caches are Transformers' own; this is the one place where it is found wanting. Its static sliding layer keeps its
length as a Python int, which makes a compiled decoding step a new graph when the window fills up, and a second one
before that. `generate(cache_implementation="static")` uses this layer instead.
"""

from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticSlidingWindowLayer


class StaticWindowLayer(StaticSlidingWindowLayer):
    """The last `sliding_window` keys and values, [B, Hkv, window, channels], in the library's layout.

    One token at a time, the length is the tensor `cumulative_length`, and filling up and moving on are the same
    operations. Longer pieces (the prefill) go the library's way, by a Python int.
    """

    _int_is_stale = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [B, Hkv, T, channels]; returns those that the T queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[-2] > 1:
            self._count_in_python()
            states = super().update(key_states, value_states, *args, **kwargs)
            self.cumulative_length.fill_(self.cumulative_length_int)
            return states
        self._int_is_stale = True
        is_full = self.cumulative_length >= self.max_cache_len
        place = self.cumulative_length.clamp(max=self.max_cache_len - 1).view(1)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            # in place: a compiled graph knows these tensors by their address
            held.copy_(torch.where(is_full, held.roll(-1, dims=-2), held))
            held.index_copy_(2, place, new)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Number of keys that the next `query_length` queries meet, and the position of the first of them."""
        if query_length == 1:
            return self.max_cache_len, (self.cumulative_length - self.max_cache_len + 1).clamp(min=0)
        self._count_in_python()
        return super().get_mask_sizes(query_length)

    def get_seq_length(self) -> Any:
        """Tokens seen so far: a tensor once there are any, as in the library's other static layer."""
        return self.cumulative_length if self.is_initialized else 0

    def reset(self) -> None:
        """Forgets all tokens, keeping the memory."""
        super().reset()
        self._int_is_stale = False

    def _count_in_python(self) -> None:
        if self._int_is_stale:
            self.cumulative_length_int = int(self.cumulative_length)
            self._int_is_stale = False


def use_static_window_layers(cache: StaticCache, sliding_window: int) -> None:
    """Puts a `StaticWindowLayer` in the place of each empty sliding layer of a static cache."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not StaticSlidingWindowLayer:
            continue
        own = StaticWindowLayer(max_cache_len=layer.max_cache_len, sliding_window=sliding_window)
        if layer.is_initialized:  # generate allocates ahead for `prefill_chunk_size`
            own.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])
        cache.layers[index] = own


__all__ = ["StaticWindowLayer", "use_static_window_layers"]
