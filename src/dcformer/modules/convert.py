"""`convert_attention`: composition of heads in any model of Transformers whose attention goes through its interface.

Attention modules of the library end in one call, `attention_interface(self, query, key, value, mask, ...)`, of what
`config._attn_implementation` names. So nothing is rewritten: a hook in front of such a module computes composition
weights from the states that it is called with and puts them among its keyword arguments, which it passes on to the
attention function; that function, registered as "dcmha", composes. Where a module passes no keyword arguments on, the
weights wait in a slot of the thread.

Letters: B batch, T queries, S keys, H heads.
"""

import ast
import inspect
import json
import os
import re
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from ..attention_dcformer import attend_composed, eager_attention
from ..chunked_dcformer import chunked_attention
from ..compose_dcformer import ComposeSettings, DCFormerCompose, Generated, Stages, stages
from ..errors import DCFormerError
from ..masks_dcformer import causal_rows
from .dcmha import make_generators, one_side

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_STATES = "hidden_states"
_KEY_STATES = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
_CACHES = ("past_key_values", "layer_past")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
_SUBMODULES = ("compose", "compose_query", "compose_key")
# Arguments of attention functions that composition does not know.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks of keys",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What composes by default: as in `DCMHA`.
_DEFAULTS = {f.name: f.default for f in fields(ComposeSettings) if f.name.startswith("compose_")} | {
    "compose_act": "gelu"
}
_README = """This model's attention heads are composed (DCMHA). Load it with

    import dcformer
    from transformers import {auto_class}

    model = dcformer.from_pretrained_converted(folder, {auto_class})

`from_pretrained` of Transformers alone would leave the composition out, with a warning about unused weights.
"""
_UNCACHED = "uncached"  # a value of `compose_key`
_slot = threading.local()


@dataclass(frozen=True)
class _Call:
    """What the hook and the attention function know of a converted module.

    Attributes:
        path: the module's name in the model.
        heads: H.
        is_cross: keys are made from states of their own.
        positions: name -> place of the arguments that hold states and the cache, among the positional ones.
        passes_kwargs: whether the module hands unknown keyword arguments to the attention function.
    """

    path: str
    heads: int
    is_cross: bool
    positions: dict[str, int]
    passes_kwargs: bool

    def argument(self, args: tuple, kwargs: Mapping[str, Any], *names: str) -> Any:
        """The first of some arguments of a call that is there and not None."""
        for name in names:
            place = self.positions.get(name, len(args))
            found = kwargs.get(name, args[place] if place < len(args) else None)
            if found is not None:
                return found
        return None


@dataclass
class _Found:
    """An attention module that can be converted, and the settings of its generators by the names of submodules."""

    module: nn.Module
    call: _Call
    settings: dict[str, ComposeSettings]
    weight: torch.Tensor  # of a projection; the generators take its device and dtype


# --- finding ----------------------------------------------------------------------------------------------------------


def _attention_call(module: nn.Module, path: str) -> tuple[ast.Call, Callable] | None:
    """The call of the attention function in a module's `forward`, and that method; None where it has none.

    Raises:
        DCFormerError: for a module that composes already, and one whose call is not found.
    """
    where = f"{path} ({type(module).__name__})"
    if hasattr(module, "compose_call"):
        raise DCFormerError(f"{where}: converted already. Convert a model once, or start from the original.")
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    is_attention = code is not None and _INTERFACE in code.co_names
    own = [getattr(module, name) for name in _SUBMODULES if hasattr(module, name)]
    if own and (is_attention or any(isinstance(submodule, DCFormerCompose) for submodule in own)):
        raise DCFormerError(f"{where}: has a submodule for composition of its own.")
    if not is_attention:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError) as error:
        raise DCFormerError(f"{where}: the source of its forward cannot be read.") from error
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _INTERFACE in ast.unparse(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            return node, forward
    raise DCFormerError(f"{where}: no call of the attention function is found in its forward.")


def _examine(module: nn.Module, path: str, call: ast.Call, forward: Callable, compose: dict[str, Any]) -> _Found:
    """What is needed to convert a module; raises a `DCFormerError` that names it where that is not possible."""
    where = f"{path} ({type(module).__name__})"
    parameters = inspect.signature(forward).parameters
    if _STATES not in parameters:
        raise DCFormerError(f"{where}: its forward has no argument {_STATES!r}, from which weights could be computed.")
    for keyword in call.keywords:
        if keyword.arg in _UNSUPPORTED and not _is_off(module, keyword.value):
            raise DCFormerError(f"{where}: uses {_UNSUPPORTED[keyword.arg]} ({keyword.arg}), which is not supported.")
    widths = _input_widths(module)
    if not widths:
        raise DCFormerError(f"{where}: none of its submodules is a linear projection.")
    heads = next((n for owner in (module, getattr(module, "config", None)) for n in _sizes(owner)), None)
    if heads is None:
        raise DCFormerError(f"{where}: neither it nor its config says how many heads there are ({', '.join(_HEADS)}).")
    is_cross = _is_cross(module, path)
    if compose["compose_key"] == _UNCACHED:
        is_cached = not is_cross and (getattr(module, "is_causal", False) or getattr(module, "is_decoder", False))
        compose = compose | {"compose_key": not (is_cached and set(_CACHES) & set(parameters))}
    query = next((name for name in widths if name.startswith("q")), next(iter(widths)))
    key = next((name for name in widths if name.startswith("k")), next((n for n in widths if n != query), query))
    try:
        whole = ComposeSettings(widths[query], heads, heads, **compose)
    except ValueError as error:
        raise DCFormerError(f"{where}: {error}") from error
    settings = {"compose": whole}
    if is_cross:
        sides = {side: one_side(whole, side, widths[name]) for side, name in (("query", query), ("key", key))}
        settings = {f"compose_{side}": of_side for side, of_side in sides.items() if of_side is not None}
    places = {name: i - 1 for i, name in enumerate(parameters)}  # without self
    facts = _Call(
        path=path,
        heads=heads,
        is_cross=is_cross,
        positions={name: places[name] for name in (_STATES, *_KEY_STATES, *_CACHES) if name in places},
        passes_kwargs=_passes_kwargs(call, parameters),
    )
    return _Found(module, facts, settings, module.get_submodule(query).weight)  # type: ignore[arg-type]  # a tensor


def _passes_kwargs(call: ast.Call, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a call passes on all keyword arguments of its method: `call(..., **kwargs)`."""
    rest = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    return any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in rest
        for keyword in call.keywords
    )


def _input_widths(module: nn.Module) -> dict[str, int]:
    """Name -> width of the input of each linear layer directly below a module."""
    widths = {
        name: getattr(child, "in_features", None) or getattr(child, "nx", None)  # nx: the library's Conv1D
        for name, child in module.named_children()
    }
    return {name: width for name, width in widths.items() if width}


def _is_off(module: nn.Module, value: ast.expr) -> bool:
    """Whether an argument is None for this module."""
    if isinstance(value, ast.Constant):
        return value.value is None
    is_own = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"
    return is_own and getattr(module, value.attr, None) is None  # type: ignore[attr-defined]


def _sizes(owner: Any) -> list[int]:
    return [size for name in _HEADS if isinstance(size := getattr(owner, name, None), int)]


def _is_cross(module: nn.Module, path: str) -> bool:
    says = getattr(module, "is_cross_attention", None)
    if isinstance(says, bool):
        return says
    return bool(_CROSS.search(type(module).__name__) or _CROSS.search(".".join(path.split(".")[-2:])))


def _find(model: nn.Module, compose: dict[str, Any]) -> list[_Found]:
    """All attention modules of a model, examined; raises a `DCFormerError` at the first that cannot be converted."""
    found = []
    for path, module in model.named_modules():
        if (at := _attention_call(module, path)) is not None:
            found.append(_examine(module, path, *at, compose))
    if not found:
        raise DCFormerError(
            f"{type(model).__name__} has no attention that goes through Transformers' attention interface "
            f"({_INTERFACE}), so there is nothing to convert."
        )
    return found


# --- the hook and the attention functions -----------------------------------------------------------------------------


def _compose(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The hook: puts `compose_weights` among the arguments of a converted module."""
    call: _Call = module.compose_call  # type: ignore[assignment]
    implementation = module.config._attn_implementation  # type: ignore[union-attr]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{call.path}: attn_implementation={implementation!r} would leave the composition out: call "
            f"model.set_attn_implementation with one of {tuple(IMPLEMENTATIONS)}."
        )
    states = call.argument(args, kwargs, _STATES)
    key_states = call.argument(args, kwargs, *_KEY_STATES)
    if (key_states is not None) != call.is_cross:
        kind, got = ("cross-attention", "no") if call.is_cross else ("self-attention", "encoder")
        raise ValueError(f"{call.path}: converted as {kind}, but called with {got} states to make keys from.")
    made: list[tuple[nn.Module, Generated]] = []
    for name in _SUBMODULES:
        if (generators := getattr(module, name, None)) is None:
            continue
        if name == "compose_key":
            made.append((generators, _of_keys(generators, call, key_states, args, kwargs)))
        else:
            made.append((generators, generators(states)))
    weights = stages(made[0][0], *(generated for _, generated in made)) if made else (None, None)  # type: ignore[arg-type]
    if call.passes_kwargs:
        return args, {**kwargs, "compose_weights": weights}
    _slot.weights = (module, weights)
    return args, kwargs


def _of_keys(
    generators: nn.Module, call: _Call, states: torch.Tensor, args: tuple, kwargs: dict[str, Any]
) -> Generated:
    """Key-wise weights of encoder states, kept in the cache of a generation for as long as the states are the same."""
    cache = call.argument(args, kwargs, *_CACHES)
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return generators(states)
    kept = cache.__dict__.setdefault("dcmha_keys", {})
    if call.path not in kept or kept[call.path][0] is not states:
        kept[call.path] = (states, generators(states))
    return kept[call.path][1]


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
    if unsupported := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(
            f"{unsupported[0]} asks for {_UNSUPPORTED[unsupported[0]]}, which composition does not support."
        )
    call: _Call | None = getattr(module, "compose_call", None)
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
    return attend_composed(
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
    module: nn.Module, call: _Call, weights: Stages | None, query: torch.Tensor, key: torch.Tensor
) -> Stages:
    """The composition weights of a call, checked against its queries and keys."""
    if weights is None and not call.passes_kwargs:
        owner, weights = getattr(_slot, "weights", (None, None))
        _slot.weights = (None, None)
        weights = weights if owner is module else None
    if weights is None:
        raise ValueError(f"{call.path}: its forward was called past its hooks; call the module itself.")
    if query.shape[1] != call.heads:
        raise ValueError(f"{call.path}: converted for {call.heads} heads, but attention has {query.shape[1]}.")
    for stage in weights:
        sides = () if stage is None else ((stage.query, query), (stage.key, key))
        for side, states in sides:
            if side is None or side.packed.shape[-1] == states.shape[2]:
                continue
            raise ValueError(
                f"{call.path}: composition weights of {side.packed.shape[-1]} tokens, but attention is over "
                f"{states.shape[2]}. Cached keys have no composition weights: pass use_cache=False, or convert with "
                "compose_key=False, or in models with cross-attention 'uncached'."
            )
    return weights


def _eager(*args: Any, **kwargs: Any) -> Any:
    return _attend(eager_attention, *args, **kwargs)


def _chunked(*args: Any, **kwargs: Any) -> Any:
    return _attend(chunked_attention, *args, **kwargs)


# Attention implementations of converted models.
IMPLEMENTATIONS = {"dcmha": _eager, "dcmha_chunked": _chunked}
for _name, _function in IMPLEMENTATIONS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, eager_mask)


# --- converting -------------------------------------------------------------------------------------------------------


def _settings(compose: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of composition, from those that are given."""
    if unknown := sorted(set(compose) - set(_DEFAULTS)):
        raise DCFormerError(f"{', '.join(unknown)} unknown: expected some of {', '.join(_DEFAULTS)}.")
    if (key := compose.get("compose_key", True)) not in (True, False, _UNCACHED):
        raise DCFormerError(f"compose_key={key!r} is unknown: expected True, False or {_UNCACHED!r}.")
    return _DEFAULTS | dict(compose)


def _attach(
    model: PreTrainedModel,
    found: list[_Found],
    compose: dict[str, Any],
    zero_init: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[RemovableHandle]:
    """Gives every module that was found its generators and its hook; returns the hooks' handles."""
    handles = []
    for one in found:
        for name, settings in one.settings.items():
            generators = make_generators(settings, zero_init)
            one.module.add_module(name, generators.to(device or one.weight.device, dtype or one.weight.dtype))
            generators.train(one.module.training)
        one.module.compose_call = one.call  # type: ignore[assignment]
        handles.append(one.module.register_forward_pre_hook(_compose, with_kwargs=True))
    model.config.dcmha = compose
    model.save_pretrained = partial(_save_pretrained, model)  # type: ignore[method-assign]
    return handles


def _detach(model: PreTrainedModel, found: list[_Found], handles: list[RemovableHandle], implementation: str) -> None:
    """Undoes a conversion that did not succeed."""
    for one, handle in zip(found, handles, strict=True):
        handle.remove()
        for name in (*one.settings, "compose_call"):
            delattr(one.module, name)
    del model.config.dcmha, model.save_pretrained
    model.set_attn_implementation(implementation)


def convert_attention(
    model: PreTrainedModel,
    *,
    zero_init: bool = True,
    example: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **compose: Any,
) -> PreTrainedModel:
    """Composes the heads of all attention of a model of Transformers, in place.

    Every attention module gets weight generators (`compose`, or `compose_query` and `compose_key` for cross-attention),
    and the model the attention implementation "dcmha", which is eager; `set_attn_implementation("dcmha_chunked")` uses
    less memory and has no attention maps. The settings are put into `config.dcmha`.

    Args:
        model: any, as long as its attention goes through Transformers' attention interface.
        zero_init: the model computes at first what it did; see `make_generators`. False: small random weights.
        example: arguments of the model. It is run on them once, and the conversion undone if that fails.
        device, dtype: of the generators; by default those of the module's projections.
        compose: `compose_rank`, `compose_groups`, `compose_pre`, `compose_post`, `compose_query`, `compose_key`,
            `compose_projection`, `compose_gate`, `compose_static`, `compose_act` as in `DCMHA`. Key-wise weights of
            cached keys are in no cache of another model: to generate with one, use `compose_key=False`; or "uncached",
            which leaves out key-wise weights only where keys are cached from step to step, in causal self-attention,
            and has them in encoders and cross-attention.

    Returns:
        `model`.

    Raises:
        DCFormerError: naming module and reason, where attention cannot be converted. The model is then unchanged.
    """
    settings = _settings(compose)
    found = _find(model, settings)
    for one in found:
        is_known = not one.weight.is_meta and one.weight.dtype in _DTYPES
        if not is_known and (device is None or dtype is None):
            what = "offloaded" if one.weight.is_meta else f"quantised ({one.weight.dtype})"
            raise DCFormerError(
                f"{one.call.path}: its projections are {what}: pass device and dtype of the generators."
            )
    implementation = model.config._attn_implementation
    handles = _attach(model, found, settings, zero_init, device, dtype)
    try:
        model.set_attn_implementation("dcmha")
        for one in found:
            if (now := one.module.config._attn_implementation) != "dcmha":  # type: ignore[union-attr]
                raise DCFormerError(f"{one.call.path}: its attention implementation cannot be set; it stays {now!r}.")
        if example is not None:
            _try(model, found, example)
    except DCFormerError:
        _detach(model, found, handles, implementation)
        raise
    return model


def _try(model: PreTrainedModel, found: list[_Found], example: Mapping[str, Any]) -> None:
    """Runs a converted model once; every module's attention must have been computed."""
    ran: set[str] = set()
    handles = [
        one.module.register_forward_hook(lambda *_, path=one.call.path: ran.add(path))  # type: ignore[misc]
        for one in found
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(**example)
    except Exception as error:  # whatever a model raises, it is undone and told
        raise DCFormerError(f"the converted {type(model).__name__} does not run on the example: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    if idle := [one.call.path for one in found if one.call.path not in ran]:
        raise DCFormerError(
            f"{', '.join(idle)}: converted, but not used on the example. Give an example that uses all."
        )


# --- saving and loading -----------------------------------------------------------------------------------------------


def _save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of a converted model: the library's, and a README that says how to load the folder."""
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if (readme := Path(save_directory) / "README.md").parent.is_dir() and not readme.exists():
        readme.write_text(_README.format(auto_class=type(model).__name__), encoding="utf-8")


def from_pretrained_converted(folder: str | os.PathLike, auto_class: Any, **kwargs: Any) -> Any:
    """Loads what `save_pretrained` of a converted model has written.

    Args:
        folder: the folder, or a repository on the Hub.
        auto_class: such as `AutoModelForSequenceClassification`, or a model's class.
        kwargs: as for `from_pretrained`; fields are overridden in a `config`. `attn_implementation` is "dcmha" or
            "dcmha_chunked".

    Returns:
        the model, converted.

    Raises:
        DCFormerError: when the folder's model is not a converted one, or tensors of its composition are missing.
    """
    hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
    config = kwargs.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(folder, **{name: kwargs[name] for name in hub if name in kwargs})
    compose = getattr(config, "dcmha", None)
    if compose is None:
        raise DCFormerError(
            f"{folder} is not a converted model: its configuration has no 'dcmha'. Use from_pretrained."
        )
    if (name := kwargs.setdefault("attn_implementation", "dcmha")) not in IMPLEMENTATIONS:
        raise DCFormerError(f"attn_implementation={name!r} cannot compose heads: use one of {tuple(IMPLEMENTATIONS)}.")
    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        model_class = auto_class
    else:
        with torch.device("meta"):
            model_class = type(auto_class.from_config(config))

    def make(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        model_class.__init__(self, *args, **options)
        _attach(self, _find(self, _settings(compose)), compose, zero_init=False)

    converted: Any = type(
        model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__}
    )
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = converted.from_pretrained(folder, config=config, output_loading_info=True, **kwargs)
    model.__class__ = model_class
    if missing := sorted(set(info["missing_keys"]) & set(_names(model))):
        raise DCFormerError(f"{folder} lacks {len(missing)} tensors of the composition, such as {missing[0]}.")
    return (model, info) if wants_info else model


def _names(model: nn.Module) -> list[str]:
    """The tensors of a converted model's composition."""
    return [
        f"{path}.{name}.{tensor}"
        for path, module in model.named_modules()
        if hasattr(module, "compose_call")
        for name in _SUBMODULES
        if hasattr(module, name)
        for tensor in module.get_submodule(name).state_dict()
    ]


def save_compose(model: PreTrainedModel, path: str | os.PathLike) -> None:
    """Writes only the composition of a converted model, 1-3 % of its parameters, with its settings.

    Args:
        model: a converted model.
        path: the file, in safetensors format.

    Raises:
        DCFormerError: when the model is not converted.
    """
    if not (names := _names(model)):
        raise DCFormerError(f"{type(model).__name__} is not converted: call convert_attention first.")
    state = model.state_dict()
    tensors = {name: state[name].detach().cpu().contiguous() for name in names}
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    save_file(tensors, unfinished, {"format": "pt", "dcmha": json.dumps(model.config.dcmha)})
    os.replace(unfinished, path)


def load_compose(model: PreTrainedModel, path: str | os.PathLike) -> PreTrainedModel:
    """Puts a composition that `save_compose` wrote into a model, which is converted if it is not yet.

    Args:
        model: of the architecture and sizes of the one that was saved.
        path: the file.

    Returns:
        `model`.

    Raises:
        DCFormerError: when the file is none, or does not fit. The model is then unchanged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            settings = (file.metadata() or {}).get("dcmha")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise DCFormerError(f"{path} cannot be read: {error}") from error
    if settings is None:
        raise DCFormerError(f"{path} is not a composition: save_compose writes one.")
    compose, names = json.loads(settings), _names(model)
    if names:
        if differ := sorted(name for name in compose if compose[name] != model.config.dcmha[name]):
            raise DCFormerError(f"{path} was saved with other settings than the model's: {', '.join(differ)} differ.")
        own = {name: model.get_parameter(name).shape for name in names}
    else:
        with torch.device("meta"):
            own = {
                f"{one.call.path}.{name}.{tensor}": parameter.shape
                for one in _find(model, _settings(compose))
                for name, of_one in one.settings.items()
                for tensor, parameter in make_generators(of_one, zero_init=True).named_parameters()
            }
    if odd := sorted(set(own) ^ set(tensors)):
        raise DCFormerError(f"{path} is of another model: {odd[0]} is in only one of them.")
    for name, shape in own.items():
        if shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)} in it and {tuple(shape)} in the model"
            raise DCFormerError(f"{path} is of a model of another size: {name} is {shapes}.")
    if not names:
        convert_attention(model, **compose)
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(name).copy_(tensor)
    return model


__all__ = ["IMPLEMENTATIONS", "convert_attention", "from_pretrained_converted", "load_compose", "save_compose"]
