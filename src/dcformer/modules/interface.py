"""What converted modules run: the hook that makes composition weights, and the attention functions that use them.

Attention modules of the library end in one call, `attention_interface(self, query, key, value, mask, ...)`, of what
`config._attn_implementation` names. A hook in front of such a module computes composition weights from the states that
it is called with and puts them among its keyword arguments, which it passes on to the attention function; that
function, registered as "dcmha", composes. Where a module passes no keyword arguments on, the weights wait in a slot of
the thread.

Letters: B batch, T queries, S keys, H heads.
"""

import threading
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, EncoderDecoderCache
from transformers.masking_utils import eager_mask

from ..attention_dcformer import attend_without_autocast, eager_attention
from ..chunked_dcformer import chunked_attention
from ..compose_dcformer import Generated, Stages, stages
from ..masks_dcformer import causal_rows
from .finding import CACHES, KEY_STATES, STATES, SUBMODULES, UNSUPPORTED, Call
from .key_weights import layer_with_key_weights

_slot = threading.local()


class Attached(dict[str, Any]):
    """The settings of composition in the configuration of a model that has it. Those of a folder that has been loaded
    without it, by a plain `from_pretrained`, are an ordinary dictionary."""

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return Attached, (dict(self),)  # in a form that `torch.load` reads with `weights_only`


# A configuration may lie beside tensors, or be written as YAML, as trackers of experiments do.
torch.serialization.add_safe_globals([Attached])
for _dumper in {getattr(yaml, name, yaml.Dumper) for name in ("Dumper", "SafeDumper", "CDumper", "CSafeDumper")}:
    _dumper.add_representer(Attached, yaml.representer.SafeRepresenter.represent_dict)


def compose_hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The hook: puts `compose_weights` among the arguments of a converted module."""
    call: Call = module.compose_call  # type: ignore[assignment]
    implementation = module.config._attn_implementation  # type: ignore[union-attr]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{call.path}: attn_implementation={implementation!r} would leave the composition out: call "
            f"model.set_attn_implementation with one of {tuple(IMPLEMENTATIONS)}."
        )
    if not torch.compiler.is_compiling() and next(reversed(module._forward_pre_hooks.values())) is not compose_hook:
        warnings.warn(  # one text for all layers, so that Python shows it once
            "a forward pre-hook of attention was registered after the model was converted, and runs after composition "
            "weights are made. If it changes hidden states, register it with prepend=True; one that only reads may "
            "stay. By default this is shown once, not for every layer.",
            stacklevel=2,
        )
    states = call.argument(args, kwargs, STATES)
    if states.dim() > 3:  # a grid of tokens, [B, rows, columns, E]
        states = states.flatten(1, -2)
    key_states = call.argument(args, kwargs, *KEY_STATES)
    if not call.is_cross and key_states is not None:
        raise ValueError(f"{call.path}: converted as self-attention, but called with encoder states to make keys from.")
    made: list[tuple[nn.Module, Generated]] = []
    for name in SUBMODULES:
        if (generators := getattr(module, name, None)) is None:
            continue
        if name == "compose_key":
            made.append((generators, _of_keys(module, key_states, call.argument(args, kwargs, *CACHES))))
        else:
            made.append((generators, generators(states)))
    weights = stages(made[0][0], *(generated for _, generated in made)) if made else (None, None)  # type: ignore[arg-type]
    if call.passes_kwargs:
        return args, {**kwargs, "compose_weights": weights}
    _slot.weights = (module, weights)
    return args, kwargs


def _of_keys(module: Any, states: torch.Tensor | None, cache: Any) -> Generated:
    """Key-wise weights of encoder states; those that are kept in the cache where it has the keys, too."""
    path: str = module.compose_call.path
    index: Any = getattr(module, "layer_idx", None)
    layer = layer_with_key_weights(cache, index)
    has_keys = isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(index)
    if (states is None or has_keys) and layer is not None and path in layer.key_weights:
        return layer.key_weights[path], {}
    if states is None:
        raise ValueError(
            f"{path}: converted as cross-attention, but called with no states to make keys from, and no cache that has "
            "met them: pass use_cache=False, or a dynamic or static cache that this model, converted as it is, filled "
            "outside of torch.compile; or convert with compose_key=False."
        )
    sides, statics = module.compose_key(states)
    if layer is not None and not torch.compiler.is_compiling():
        layer.key_weights[path] = sides
    return sides, statics


def _attend(
    function: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    compose_weights: Stages | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of Transformers that composes heads, in converted modules, by one of the package's.

    Args:
        function: `eager_attention` or `chunked_attention`.
        query, key, value: [B, H, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
        attention_mask: [B or 1, 1 or H, T or 1, S], boolean (True: visible) or additive.
        position_bias: [B or 1, H, T or 1, S], added to the composed scores.
        compose_weights: from the hook.

    Returns:
        output [B, T, H, Dv], and from eager attention the composed weights [B, H, T, S].
    """
    if unsupported := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(
            f"{unsupported[0]} asks for {UNSUPPORTED[unsupported[0]]}, which composition does not support."
        )
    call: Call | None = getattr(module, "compose_call", None)
    if call is None and type(getattr(getattr(module, "config", None), "dcmha", None)) is dict:
        raise ValueError(
            "the model is of a folder with composition, and was loaded without it, by a plain from_pretrained: load it "
            "with dcformer.from_pretrained_converted. Trainers that load a model themselves, as that of reference, are "
            "to be given it."
        )
    pre, post = (None, None) if call is None else _weights_of(module, call, compose_weights, query, key)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    maps = (query.shape[2], key.shape[2])
    if attention_mask is None and position_bias is not None and is_causal:
        attention_mask = causal_rows(*maps, kwargs.get("sliding_window"), query.device)[:, None]
    parts = [m.expand(*m.shape[:2], *maps) for m in (attention_mask, position_bias) if m is not None]
    if len(parts) == 2:
        mask, bias = parts
        attention_mask = mask + bias if mask.is_floating_point() else bias.masked_fill(~mask.bool(), float("-inf"))
    else:
        attention_mask = parts[0] if parts else None
    trains_bias = attention_mask is not None and attention_mask.requires_grad and torch.is_grad_enabled()
    if function is chunked_attention and trains_bias:
        raise ValueError(
            "a position bias that requires gradients needs attn_implementation='dcmha': call "
            "model.set_attn_implementation('dcmha'). Freezing helps where the bias is of parameters alone, without "
            "gradient checkpointing, with which T5's zeros require gradients."
        )
    return attend_without_autocast(
        function,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        pre=pre,
        post=post,
        is_causal=is_causal,
        **kwargs,
    )


def _weights_of(
    module: nn.Module, call: Call, weights: Stages | None, query: torch.Tensor, key: torch.Tensor
) -> Stages:
    """The composition weights of a call, checked against its queries and keys."""
    if weights is None and not call.passes_kwargs:
        owner, weights = getattr(_slot, "weights", (None, None))
        _slot.weights = (None, None)
        weights = weights if owner is module else None
    if weights is None:
        raise ValueError(f"{call.path}: its forward was called past its hooks; call the module itself.")
    if query.shape[1] != call.heads:
        raise ValueError(
            f"{call.path}: converted for {call.heads} heads, but attention has {query.shape[1]}. Heads that are "
            "divided over devices (tensor parallelism) cannot be composed: use FSDP2 or device_map."
        )
    for stage in weights:
        sides = () if stage is None else ((stage.query, query), (stage.key, key))
        for side, states in sides:
            if side is None or side.packed.shape[-1] == states.shape[2]:
                continue
            numbers = f"{call.path}: composition weights of {side.packed.shape[-1]} tokens, but attention is"
            if states is query:
                raise ValueError(f"{numbers} of {states.shape[2]} queries: convert with compose_query=False.")
            raise ValueError(
                f"{numbers} over {states.shape[2]}. Keys that are cached, or fewer than the states, have no "
                "composition weights: pass use_cache=False, or convert with compose_key=False, or in models with "
                "cross-attention 'uncached'."
            )
    return weights


def _eager(*args: Any, **kwargs: Any) -> Any:
    return _attend(eager_attention, *args, **kwargs)


def _chunked(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attention maps, which attn_implementation='dcmha_chunked' never holds. Call "
            "model.set_attn_implementation('dcmha')."
        )
    return _attend(chunked_attention, *args, **kwargs)


def _generate_without_cache(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **kwargs | {"use_cache": False})


_generate_without_cache.__name__ = "generate"  # by which pickle finds a method, which is that of the class then


def generate_without_cache(model: Any) -> None:
    """Changes a model so that its `generate` makes no cache, also where a program asks for one, as lm-eval does.

    Args:
        model: one that `generates_without_cache`.
    """
    model = getattr(model, "_orig_mod", model)  # behind `torch.compile`, what is compiled
    model.generation_config.use_cache = False
    model.generate = MethodType(_generate_without_cache, model)  # that of a copy is the copy's


# Attention implementations of converted models.
IMPLEMENTATIONS = {"dcmha": _eager, "dcmha_chunked": _chunked}
for _name, _function in IMPLEMENTATIONS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, eager_mask)

__all__ = ["IMPLEMENTATIONS", "Attached", "compose_hook", "generate_without_cache"]
