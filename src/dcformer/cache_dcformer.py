"""Additions to the library's caches: layers, and checks for caches that another model filled.

All caches are Transformers' own. Its dynamic layers copy all that they hold for every new token: `GrowingLayer` has
room for some. Its static layers give values as many heads as keys, and the sliding one keeps its length as a Python
int, which makes a compiled decoding step a new graph when the window fills up, and a second one before that.
`generate(cache_implementation="static")` uses `StaticFullLayer` and `StaticWindowLayer` instead.
Letters: B batch, T new tokens, S all that are held, Hkv key/value heads, which keys and values may have each their own.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
import transformers
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from .attention_dcformer import active_transform
from .configuration_dcformer import DCFormerConfig
from .heads_dcformer import HEAD_FIELDS
from .masks_dcformer import is_captured

# What the library calls a cache, an argument of models and a field of what they return: `cache` from Transformers 5.24.
CACHE_NAMES = ("past_key_values", "cache")
CACHE_NAME = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})

# How many more tokens a growing layer that moves gets memory for: 1/16 of its length, and 32 at least.
ROOM_DIVISOR, LEAST_ROOM = 16, 32

_NAMES = ("keys", "values")  # of a layer
_REFUSED = f"{CACHE_NAME} does not belong to this model"
_OUTDATED = "`past_key_values` is deprecated and will be removed in version 5.40.0 of Transformers: pass `cache`."
_ADVICE = "Pass a cache that this model filled, or none."

# Attribute of every cache in use, and of its copies: (fields, bound). `fields` are those of the configuration by which
# the model that last used the cache reads its rows, groups among them; fields that only change numbers are left out.
# `bound` is how many tokens the cache may hold for that model, or None.
_LAST_USER = "_dcformer_last_user"
_ROW_FIELDS = (
    "head_dim", "compose_rank", "compose_groups", "compose_projection", "compose_gate", "compose_pre", "compose_post",
    "compose_key", *HEAD_FIELDS,
)  # fmt: skip
_LAYER_FIELDS = ("num_hidden_layers", "layer_types", "sliding_window")


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a `forward` with an argument `cache`, which callers may also name `past_key_values`.

    From Transformers 5.24 on the latter warns, as in the library's own models. Before, it is the library's name, and so
    the one in the signature, which PEFT reads. None is not a cache by either name.

    Raises:
        ValueError: by what is decorated, on a call with two caches.
    """

    @wraps(forward)
    def with_either_name(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("past_key_values", None)
        if given is not None:
            if kwargs.get("cache") is not None:
                raise ValueError("Both `past_key_values` and `cache` are set: they are two names of one argument.")
            if CACHE_NAME == "cache" and not torch.compiler.is_compiling():
                warnings.warn(_OUTDATED, FutureWarning, stacklevel=2)
            kwargs["cache"] = given
        return forward(*args, **kwargs)

    signature = inspect.signature(forward)
    shown = [p.replace(name=CACHE_NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    with_either_name.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return with_either_name


def check_cache_names(others: Mapping[str, Any]) -> None:
    """Refuses a cache under an unknown name, as a later library may have: it would be ignored, and the output wrong.

    Args:
        others: what a model was called with besides what it knows, by name.

    Raises:
        TypeError: naming it.
    """
    for name, value in others.items():
        if isinstance(value, Cache):
            raise TypeError(
                f"{name}={type(value).__name__}(...) is a cache by a name that this code does not know: expected "
                f"{' or '.join(CACHE_NAMES)}. If it comes from Transformers ({transformers.__version__}), take an "
                "earlier version of it, or a later one of dcformer (and export remote code again)."
            )


def check_cache_layers(cache: Cache, config: DCFormerConfig, length: int) -> None:
    """Refuses a cache whose layers another model made.

    All of them are looked at where the model that used the cache last, if any, had other fields than this one.

    Args:
        cache: that of a forward pass.
        config: the model's.
        length: tokens of the forward pass.

    Raises:
        ValueError: saying what does not fit.
    """
    if torch.compiler.is_compiling():
        return
    if getattr(cache, "layers", None) is None:
        raise ValueError(f"{_REFUSED}: a {type(cache).__name__} is not a Transformers cache of layers. {_ADVICE}")
    values = vars(config)  # attributes of a configuration are slow
    user = {name: values[name] for name in (*_ROW_FIELDS, *_LAYER_FIELDS)}
    last_user, bound = getattr(cache, _LAST_USER, (None, None))
    if last_user != user:
        bound = _check_all_layers(cache, config)
        # Shapes do not tell everything apart: ranks 1 to 3 are padded to the same width.
        found = last_user or user
        wrong = [name for name in _ROW_FIELDS if found[name] != user[name]]
        if wrong and int(cache.get_seq_length()):
            raise ValueError(
                f"{_REFUSED}: {wrong[0]} of the model that filled it is {found[wrong[0]]}, of this model "
                f"{user[wrong[0]]}. {_ADVICE}"
            )
        setattr(cache, _LAST_USER, (copy.deepcopy(user), bound))  # lists may change in place
    if bound is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return  # a captured graph must not wait for the length
    if int(cache.get_seq_length()) + length > bound:
        raise ValueError(_short_window(cache.is_sliding.index(True), bound, config))


def _check_all_layers(cache: Cache, config: DCFormerConfig) -> int | None:
    """Refuses layers that cannot serve the model's.

    Returns:
        how many tokens the cache may hold, where that is known and windows of its layers end there; or None.
    """
    layers: Any = cache.layers
    count = min(config.num_hidden_layers, len(config.layer_types))  # a model may have fewer layers than the first says
    grows = cache.layer_class_to_replicate is not None  # a DynamicCache made without a configuration
    if len(layers) > count or (len(layers) < count and not grows):
        raise ValueError(f"{_REFUSED}: it has {len(layers)} layers, the model has {count}. {_ADVICE}")
    # A static layer does not say whether its length is its window, or that of the cache where this is shorter.
    whole = [layer.max_cache_len for layer in layers if isinstance(layer, StaticLayer) and not layer.is_sliding]
    bound = None
    for index, (layer, kind) in enumerate(zip(layers, config.layer_types, strict=False)):
        window = config.sliding_window if kind == "sliding_attention" else None
        if getattr(layer, "is_sliding", False):
            is_static = isinstance(layer, StaticLayer)
            held = layer.max_cache_len if is_static else getattr(layer, "sliding_window", window)
            is_shortened = is_static and (not whole or held >= max(whole))  # the cache is shorter than the window
            if window is None or (held < window and not is_shortened):
                raise ValueError(_short_window(index, held, config))
            if held < window:
                bound = held
        keys, values = (config.cached_heads(stage, index) for stage in ("pre", "post"))
        if isinstance(layer, StaticLayer) and not isinstance(layer, _OwnValues) and keys != values:
            raise ValueError(
                f"{CACHE_NAME} cannot hold layer {index}, which has {keys} key and {values} value heads: a "
                f"{type(layer).__name__} gives values as many heads as keys. Call cache_dcformer.use_static_layers("
                'cache, config.sliding_window) before its first use, or generate(cache_implementation="static").'
            )
    return bound


def _short_window(index: int, held: int, config: DCFormerConfig) -> str:
    kind = config.layer_types[index]
    window = config.sliding_window if kind == "sliding_attention" else None
    return (
        f"{_REFUSED}: layer {index} of the cache keeps a window of {held} keys, but the model's layer is {kind!r} with "
        f"sliding_window={window}. {_ADVICE}"
    )


def check_cache_rows(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, widths: tuple[int, int], head_dim: int
) -> None:
    """Refuses a cache whose first layer holds keys or values of another form than the new ones.

    Args:
        cache: that of a forward pass.
        key, value: of the first layer, [B, Hkv, T, D + channels].
        widths: channels of a key and of a value, without those of composition.
        head_dim: those that a plain model of this configuration would cache.

    Raises:
        ValueError: on another batch, head count, width, dtype or device.
    """
    for name, new, width in (("keys", key, widths[0]), ("values", value, widths[1])):
        old = getattr(cache.layers[0], name, None) if cache.layers else None
        if old is None or old.dim() != 4 or not old.shape[2]:
            continue
        expected = (new.shape[0], new.shape[1], new.shape[3])
        found = (old.shape[0], old.shape[1], old.shape[3])
        if expected != found:
            wrong = f"{CACHE_NAME} does not belong to this model and batch"
            if (found[0], found[2]) == (expected[0], head_dim):
                wrong = (
                    f"{CACHE_NAME} is a plain model's, or a prefix of PEFT's prefix tuning, which this model cannot "
                    f"use (prompt tuning and LoRA work): its {name} carry composition weights, made from the hidden "
                    "state of each token, or belong to other heads (key_head_map, value_head_map, head_embeddings)"
                )
                if isinstance(cache, StaticCache) and not cache.get_seq_length():
                    raise ValueError(
                        f"{CACHE_NAME} is an empty static cache for rows of a plain model, as `generate` of a model "
                        "around this one allocates it for prefill_chunk_size: leave prefill_chunk_size or the static "
                        "cache out."
                    )
            raise ValueError(
                f"{wrong}: layer 0 of the cache holds {name} of (batch, heads, channels) {found}, the model makes "
                f"{expected} ({width} channels plus those of composition). Pass a cache that this model filled for the "
                "same batch, or none."
            )
        moves = getattr(cache, "offloading", False)  # between devices, by itself
        if old.dtype != new.dtype or (old.device != new.device and not moves):
            raise ValueError(
                f"{CACHE_NAME} does not fit this model: layer 0 of the cache holds {name} in {old.dtype} on "
                f"{old.device}, the model makes {new.dtype} on {new.device}. Fill it with the model as it is now "
                "(dtype, device, autocast), or convert the keys and values of its layers."
            )


class Room(NamedTuple):
    """Memory of a cache's layer, lent to a kernel that writes the rows of new tokens behind those that are filled.

    Attributes:
        layer: whose it is.
        keys, values: all of its memory, [B, Hkv, capacity, channels].
        place: the first of the new rows, an integer on the device; or None.
        row: the same for the host, where there is no `place`; else 0.
        is_ring: rows begin anew at the end of the memory, so that there is always place for one token: its row is
            `place` modulo the capacity. Masks are in the order of tokens all the same.
    """

    layer: Any
    keys: torch.Tensor
    values: torch.Tensor
    place: torch.Tensor | None
    row: int
    is_ring: bool = False

    def count(self, length: int) -> None:
        """Tells the layer that so many rows have been filled."""
        if self.is_ring:
            self.layer.count()
        elif self.place is not None:
            self.layer.cumulative_length.add_(length)
        else:
            self.layer.take(length)


def lend_room(cache: Cache, layer_idx: int, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> Room | None:
    """What a cache can lend for new rows, instead of taking them by `update`.

    Args:
        cache: that of a forward pass.
        layer_idx: the layer's place in it.
        shapes: of new keys and values, [B, Hkv, T, channels].
        like: of their dtype and device.

    Returns:
        the room; None for a cache or a layer that does more than to keep rows (the library's static windows, which
        move), for several tokens of a static window, and for one that holds other rows: `update` and its checks see to
        these.
    """
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading or layer_idx >= len(cache.layers):
        return None
    layer: Any = cache.layers[layer_idx]
    if type(layer) in (GrowingLayer, GrowingWindowLayer):
        return layer.lend(shapes, like)
    is_ring = type(layer) is StaticWindowLayer
    if type(layer) not in (StaticLayer, StaticFullLayer, StaticWindowLayer) or not layer.is_initialized:
        return None
    if is_ring and shapes[0][2] > 1:
        return None
    place = layer.cumulative_length
    if (place.dtype, place.device) != (torch.int64, like.device):
        return None
    for held, shape in zip((layer.keys, layer.values), shapes, strict=True):
        if not _go_together(held, shape, like) or shape[2] > held.shape[2] or held.stride(3) != 1:
            return None
    return Room(layer, layer.keys, layer.values, place, 0, is_ring)


def _go_together(held: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> bool:
    """Whether rows of a shape [B, Hkv, T, channels] and of the form of `like` can go behind those that are held."""
    if held.dtype != like.dtype or held.device != like.device or held.dim() != 4:
        return False
    batch, heads, _, channels = held.shape
    return batch == shape[0] and heads == shape[1] and channels == shape[3]


@dataclass(frozen=True)
class _Rows:
    """Which rows of some memory a layer holds.

    Attributes:
        memory: [B, Hkv, capacity, channels].
        first: of the rows that are held.
        length: so many are.
        held: these, [B, Hkv, length, channels], as the layer has given them out; None before.
    """

    memory: torch.Tensor
    first: int
    length: int
    held: torch.Tensor | None


class _LayerWithRoom(DynamicLayer):
    """A dynamic layer with memory that has room for more tokens.

    What was given out is never written to again: keys and values that something else has put here (beams chosen anew, a
    cut) are copied once, with new room behind them. `keys` and `values` are views, made when somebody asks for them:
    seldom while kernels fill lent memory, and a view takes the host as long as a launch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._memory: dict[str, _Rows] = {}  # of "keys" and "values"

    def __getattr__(self, name: str) -> torch.Tensor:
        """Keys or values that nobody has asked for since they were lent."""
        rows = vars(self).get("_memory", {}).get(name)
        if rows is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        held = rows.memory.narrow(2, rows.first, rows.length)
        self._memory[name] = replace(rows, held=held)
        setattr(self, name, held)
        return held

    def __getstate__(self) -> dict[str, Any]:
        """What copies get: the tokens, and not the memory behind them, which goes on to be this layer's."""
        return {**vars(self), "keys": self.keys, "values": self.values, "_memory": {}}

    def reset(self) -> None:
        """Forgets all tokens, and their memory."""
        super().reset()
        self._memory.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Puts sequences in another order, in memory of their own."""
        self._leave_memory()
        super().reorder_cache(beam_idx)

    def lend(self, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> Room | None:
        """As `lend_room`; the rows are used up once `take` counts them."""
        if not self.is_initialized or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if active_transform(like):
            return None
        keys, values = self._rows("keys"), self._rows("values")
        if keys.length != values.length or not self._is_whole(keys):
            return None
        if not (_go_together(keys.memory, shapes[0], like) and _go_together(values.memory, shapes[1], like)):
            return None
        memory = self._reserve("keys", keys, shapes[0], like), self._reserve("values", values, shapes[1], like)
        return Room(self, *memory, None, keys.length)

    def take(self, length: int) -> None:
        """Counts so many tokens whose rows have been written to the memory of `lend`."""
        held = self._memory["keys"].length + length
        for name in _NAMES:
            self._hold(name, held, held)

    def _is_whole(self, keys: _Rows) -> bool:
        """Whether these are all the keys that the next query sees, and no more."""
        return True

    def _leave_memory(self) -> None:
        """Keys and values become plain attributes, of which this class knows nothing."""
        for name in _NAMES:
            getattr(self, name)
        self._memory.clear()

    def _rows(self, name: str) -> _Rows:
        """What is held; without room behind it where something else has put it here."""
        rows = self._memory.get(name)
        if rows is None or vars(self).get(name, rows.held) is not rows.held:
            held = getattr(self, name)
            memory = held if held.dim() == 4 else held.new_empty(0, 0, 0, 0)  # as the library begins
            rows = self._memory[name] = _Rows(memory, 0, memory.shape[2] if held.numel() else 0, held)
        return rows

    def _reserve(self, name: str, rows: _Rows, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Memory that begins with what is held, `_rows`, and has room for more of this shape behind it."""
        memory, first, length = rows.memory, rows.first, rows.length + shape[2]
        is_frozen = memory.is_inference() and not torch.is_inference_mode_enabled()
        if not memory.numel() or first + length > memory.shape[2] or is_frozen:
            room, held = max(LEAST_ROOM, length // ROOM_DIVISOR), getattr(self, name)
            # whole multiples of 16 tokens: strides of another alignment would be other kernels
            memory, first = like.new_empty(*shape[:2], -(length + room) // 16 * -16, shape[3]), 0
            if rows.length:
                memory[:, :, : rows.length] = held
            self._memory[name] = _Rows(memory, 0, rows.length, held)
        return memory.narrow(2, first, memory.shape[2] - first) if first else memory

    def _hold(self, name: str, length: int, keep: int) -> None:
        """Holds the last `keep` of `length` tokens from the first that was held."""
        rows = self._memory[name]
        self._memory[name] = _Rows(rows.memory, rows.first + length - keep, keep, None)
        vars(self).pop(name, None)


class GrowingLayer(_LayerWithRoom):
    """All keys and values, [B, Hkv, S, channels], at the front of memory that has room for more.

    The numbers are those of the library's layer. While gradients are recorded, and in graphs, tokens are added in the
    library's way.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [B, Hkv, T, channels]; returns all."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or active_transform(key_states, value_states):
            self._leave_memory()
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for name, new in zip(_NAMES, (key_states, value_states), strict=True):
            self._append(name, new)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens that are held."""
        return super().get_seq_length() if "keys" in vars(self) else self._memory["keys"].length

    def _append(self, name: str, new: torch.Tensor) -> None:
        """Adds tokens [B, Hkv, T, channels] behind those that are held."""
        rows = self._rows(name)
        memory, length = rows.memory, rows.length + new.shape[-2]
        if rows.length and (memory.dtype, memory.device, *memory.shape[:2]) != (new.dtype, new.device, *new.shape[:2]):
            setattr(self, name, torch.cat([getattr(self, name), new], dim=-2))  # or its error
            return
        self._reserve(name, rows, new.shape, new)[:, :, rows.length : length] = new
        self._hold(name, length, length)


class GrowingWindowLayer(_LayerWithRoom, DynamicSlidingWindowLayer):
    """The last keys and values that a window's next query sees, as the library's layer keeps them.

    They move through memory that has room for more. Only room that is lent is filled so; `update` is the library's.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [B, Hkv, T, channels]; returns those that the T queries may see."""
        self._leave_memory()
        return super().update(key_states, value_states, *args, **kwargs)

    def take(self, length: int) -> None:
        """Counts so many tokens whose rows have been written to the memory of `lend`."""
        self.cumulative_length += length
        held = self._memory["keys"].length + length
        keep = min(held, self.sliding_window - 1)
        for name in _NAMES:
            self._hold(name, held, keep)

    def _is_whole(self, keys: _Rows) -> bool:
        """Not while the library keeps what is behind the window, to take tokens back."""
        is_behind = getattr(self, "record_past", False)
        return not is_behind and keys.length == min(self.cumulative_length, self.sliding_window - 1)


def use_growing_layers(cache: Cache) -> None:
    """Puts layers of this file in the place of the library's empty ones in a dynamic cache.

    Args:
        cache: that of a forward pass; other caches are left alone.
    """
    if type(cache) is not DynamicCache or cache.offloading or torch.compiler.is_compiling():
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "is_initialized", True):
            continue
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            window = GrowingWindowLayer(sliding_window=layer.sliding_window)
            vars(window).update(vars(layer))  # what `generate` has asked of it, too
            cache.layers[index] = window


class _OwnValues(StaticLayer):
    """A static layer whose values have a head count of their own, that of the first ones it gets."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes memory for keys and values [B, Hkv, S, channels], each with the head count of the first it gets."""
        super().lazy_initialization(key_states, value_states)
        if value_states.shape[1] != self.num_heads:
            self.values = self.values.new_zeros(*value_states.shape[:2], *self.values.shape[2:])
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)  # as the library marks what this one replaces


class StaticFullLayer(_OwnValues):
    """All keys and values up to `max_cache_len`, [B, Hkv, max_cache_len, channels], each with heads of their own."""


class StaticWindowLayer(_OwnValues, StaticSlidingWindowLayer):
    """The last `sliding_window` keys and values, [B, Hkv, window, channels], in a ring: a token's row is its position
    modulo the window. Results are the library's, in the order of tokens.

    One token at a time, the length is the tensor `cumulative_length`, and filling up and going round are the same
    operations. Longer pieces (the prefill) go the library's way, by a Python int.
    """

    is_croppable = False  # what the ring has written over is lost
    _int_is_stale = False
    _is_in_a_graph = False  # captured by hand, whose replays count on the device alone

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [B, Hkv, T, channels]; returns the ones that the T queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[-2] > 1:
            return self._update_by_int(key_states, value_states, *args, **kwargs)
        place = (self.cumulative_length % self.max_cache_len).view(1)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.index_copy_(2, place, new)  # in place: a compiled graph knows these tensors by their address
        self.count()
        rows = self._rows_in_order()
        return self.keys.index_select(2, rows), self.values.index_select(2, rows)

    def count(self) -> None:
        """Counts one token, whose row has been filled."""
        self._int_is_stale = True
        if not torch.compiler.is_compiling() and is_captured(self.cumulative_length.device):
            self._is_in_a_graph = True
        self.cumulative_length.add_(1)

    def _update_by_int(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` by several tokens. The library's layer has its rows in order before and after."""
        self._count_in_python()
        if self.cumulative_length_int >= self.max_cache_len:
            rows = self._rows_in_order()
            for held in (self.keys, self.values):
                held.copy_(held.index_select(2, rows))
        states = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length.fill_(self.cumulative_length_int)
        if self.cumulative_length_int >= self.max_cache_len:
            places = self._rows_in_order().argsort()
            for held in (self.keys, self.values):  # not `index_copy_` of itself: inductor reads what it has overwritten
                held.copy_(held.index_select(2, places))
        return states

    def _rows_in_order(self) -> torch.Tensor:
        """Rows of the last tokens that are held, the oldest first; as many as there are rows: [window]."""
        oldest = (self.cumulative_length - self.max_cache_len).clamp(min=0)
        return (torch.arange(self.max_cache_len, device=self.keys.device) + oldest) % self.max_cache_len

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
        if self._int_is_stale or self._is_in_a_graph:
            self.cumulative_length_int = int(self.cumulative_length)
            self._int_is_stale = False


def use_static_layers(cache: StaticCache, sliding_window: int | None) -> None:
    """Puts layers of this file in the place of the library's empty ones in a static cache.

    Args:
        cache: before its first use.
        sliding_window: keys that a local layer's query sees, `config.sliding_window`.

    Raises:
        ValueError: for a cache that holds tokens, which would be lost.
    """
    if any(type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int for layer in cache.layers):
        raise ValueError("use_static_layers is for a cache before its first use, and this one holds tokens.")
    for index, layer in enumerate(cache.layers):
        own: StaticLayer
        if type(layer) is StaticSlidingWindowLayer:
            own = StaticWindowLayer(max_cache_len=layer.max_cache_len, sliding_window=sliding_window)
        elif type(layer) is StaticLayer and not layer.is_initialized:
            own = StaticFullLayer(max_cache_len=layer.max_cache_len)
        else:
            continue
        if layer.is_initialized:  # generate allocates ahead for `prefill_chunk_size`
            own.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])
        cache.layers[index] = own


__all__ = [
    "GrowingLayer",
    "GrowingWindowLayer",
    "Room",
    "StaticFullLayer",
    "StaticWindowLayer",
    "check_cache_layers",
    "check_cache_rows",
    "lend_room",
    "use_growing_layers",
    "use_static_layers",
]
