"""What can be converted: the attention modules of a model, and what of each must be known to compose its heads.

A module counts when the source of its `forward` calls what `ALL_ATTENTION_FUNCTIONS` gives. Which of its arguments hold
states, whether it passes keyword arguments on, and what it asks of the attention function is read from that source.
Other modules whose class is called attention and takes a softmax are attention that cannot be converted.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from ..cache_dcformer import CACHE_NAMES
from ..compose_dcformer import ComposeSettings, DCFormerCompose
from ..errors import DCFormerError
from .dcmha import one_side

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
STATES = "hidden_states"
KEY_STATES = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
CACHES = (*CACHE_NAMES, "layer_past")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_CROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_attn|(?<![a-z])x_attn", re.IGNORECASE)
_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ATTENDS = re.compile(rf"softmax|scaled_dot_product_attention|multi_head_attention_forward|{_INTERFACE}", re.IGNORECASE)
SUBMODULES = ("compose", "compose_query", "compose_key")
# Arguments of attention functions that composition does not know.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks of keys",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
}
UNCACHED = "uncached"  # a value of `compose_key`


@dataclass(frozen=True)
class Call:
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
class Found:
    """An attention module that can be converted, and the settings of its generators by the names of submodules."""

    module: nn.Module
    call: Call
    settings: dict[str, ComposeSettings]
    weight: torch.Tensor | None  # of a projection; the generators take its device and dtype. None: it is not a tensor


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
    own = [getattr(module, name) for name in SUBMODULES if hasattr(module, name)]
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


def _examine(module: nn.Module, path: str, call: ast.Call, forward: Callable, compose: dict[str, Any]) -> Found:
    """What is needed to convert a module; raises a `DCFormerError` that names it where that is not possible."""
    where = f"{path} ({type(module).__name__})"
    parameters = inspect.signature(forward).parameters
    if STATES not in parameters:
        raise DCFormerError(f"{where}: its forward has no argument {STATES!r}, from which weights could be computed.")
    for keyword in call.keywords:
        if keyword.arg in UNSUPPORTED and not _is_off(module, keyword.value):
            raise DCFormerError(f"{where}: uses {UNSUPPORTED[keyword.arg]} ({keyword.arg}), which is not supported.")
    widths = _input_widths(module)
    if not widths:
        raise DCFormerError(f"{where}: none of its submodules is a linear projection.")
    counts = [*_sizes(module), *_plain_heads(module), *_sizes(getattr(module, "config", None))]
    heads = next(iter(counts), None)
    if heads is None:
        raise DCFormerError(f"{where}: neither it nor its config says how many heads there are ({', '.join(_HEADS)}).")
    is_cross = _is_cross(module, path)
    if compose["compose_key"] == UNCACHED:
        both_ways = getattr(getattr(module, "config", None), "use_bidirectional_attention", False)  # and caches
        says = [getattr(module, name) for name in ("is_causal", "is_decoder") if hasattr(module, name)]
        writes = "update" in inspect.unwrap(forward).__code__.co_names  # of a cache: one that does not say, as Doge's
        is_decoder = any(says) or both_ways or (not says and writes)
        is_cached = not is_cross and is_decoder
        compose = compose | {"compose_key": not (is_cached and set(CACHES) & set(parameters))}
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
    facts = Call(
        path=path,
        heads=heads,
        is_cross=is_cross,
        positions={name: places[name] for name in (STATES, *KEY_STATES, *CACHES) if name in places},
        passes_kwargs=_passes_kwargs(call, parameters),
    )
    weight: Any = getattr(module.get_submodule(query), "weight", None)
    return Found(module, facts, settings, weight if isinstance(weight, torch.Tensor) else None)


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


def _plain_heads(module: nn.Module) -> list[int]:
    """H, by `head_dim` and separate projections of one width, as the configuration may have it of other layers."""
    widths = {
        name[0]: width
        for name, child in module.named_children()
        if (width := getattr(child, "out_features", None)) and name[0] in "qkv"
    }
    dim, width = getattr(module, "head_dim", None), widths.get("q")
    is_plain = len(widths) == 3 and len(set(widths.values())) == 1
    return [width // dim] if is_plain and width and isinstance(dim, int) and dim > 0 and width % dim == 0 else []


def _is_cross(module: nn.Module, path: str) -> bool:
    says = getattr(module, "is_cross_attention", None)
    if isinstance(says, bool):
        return says
    return bool(_CROSS.search(type(module).__name__) or _CROSS.search(".".join(path.split(".")[-2:])))


def find_attention(model: nn.Module, compose: dict[str, Any]) -> list[Found]:
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


def other_attention(model: nn.Module, found: list[Found]) -> dict[type, list[str]]:
    """Attention that is not in what `find_attention` found: class -> paths. Attention without a softmax, as linear
    attention and state spaces have it, has no weights to compose and does not count."""
    inside = {id(module) for one in found for module in one.module.modules()}
    others: dict[type, list[str]] = {}
    for path, module in model.named_modules():
        if id(module) not in inside and _is_attention(type(module)):
            others.setdefault(type(module), []).append(path)
    return others


def _is_attention(kind: type) -> bool:
    """Whether a class of modules is called attention, and any of its methods names a softmax or what takes one."""
    if not _CALLED_ATTENTION.search(kind.__name__):
        return False
    own = [value for base in kind.__mro__ if base is not nn.Module for value in vars(base).values()]
    codes = [code for value in own if (code := getattr(inspect.unwrap(value), "__code__", None))]  # type: ignore[arg-type]
    names = set()
    for code in codes:  # grows: functions in functions
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(map(_ATTENDS.search, names))


__all__ = [
    "CACHES",
    "KEY_STATES",
    "STATES",
    "SUBMODULES",
    "UNCACHED",
    "UNSUPPORTED",
    "Call",
    "Found",
    "find_attention",
    "other_attention",
]
