"""Learning rates for models with composition: parameter groups for any of PyTorch's optimizers.

One rate for all is the default. Lower ones of composition were measured on three tasks (docs/training_results.md):
a tenth was ahead on one and gained nothing on two, rates in proportion to the initial values were worse.
"""

import math
import re
from collections.abc import Iterator
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal, TypeGuard

from torch import nn
from transformers import PreTrainedConfig

from .compose_dcformer import ComposeSettings, DCFormerCompose, compose_init_std
from .heads_dcformer import EMBEDDING_NAMES

# Composition's parameters, by their name within `DCFormerCompose`.
_NAMES = tuple(compose_init_std(ComposeSettings(1, 1, 1)))
# What others make of a parameter's name: PEFT; parametrizations, pruning, weight norm and checkpointing of PyTorch.
_WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)|(?<![^.])parametrizations\.(?=[^.]+\.original\d*$)"
    r"|\.original\d*$|_(orig|g|v)$|(?<![^.])_checkpoint_wrapped_module\."
)


def composition_rate_ratios(config: Any) -> dict[str, float]:
    """Learning rates of composition's parameters, relative to that of ordinary matrices.

    Adam moves an entry by up to the learning rate a step, however small the entry is. Composition starts with entries
    that are much smaller than those of other matrices (`compose_init_std`; for `qkw` some hundred times). These ratios
    keep the relative change of a step no larger than that of an ordinary matrix: std of a parameter / std of ordinary
    matrices, at most 1.

    Args:
        config: a `DCFormerConfig` or `DCViTConfig`, or anything with their fields of composition. Ordinary matrices
            have its `initializer_range` or `init_std`; where it has neither, 1 / sqrt(`hidden_size`), Xavier's.

    Returns:
        parameter name within `DCFormerCompose` -> ratio in (0, 1].
    """
    std = compose_init_std(config)
    if gate := getattr(config, "compose_gate_init", 0):  # DCViT's; gates that start at 0 have the ratio of others
        m = config.num_attention_heads // config.compose_groups
        std["gate_proj.weight"] = gate * math.sqrt(2 / (config.hidden_size + m))
    ordinary = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    ordinary = ordinary or config.hidden_size**-0.5
    return {name: min(1.0, value / ordinary) for name, value in std.items()}


def _settings_of(composition: DCFormerCompose, owners: list[nn.Module]) -> SimpleNamespace:
    """What `composition_rate_ratios` needs to know of a part: its own sizes, and what its model says of other matrices.

    Args:
        composition: the part.
        owners: the modules that it is in, the innermost first.
    """
    config = next((o.config for o in owners if isinstance(getattr(o, "config", None), PreTrainedConfig)), None)
    known = ("initializer_range", "init_std", "compose_gate_init")
    found: dict[str, Any] = {name: getattr(config, name) for name in known if hasattr(config, name)}
    m, generators = composition.heads_per_group, len(composition.generators)
    if composition.dw1_proj is not None:
        width = composition.dw1_proj.in_features
        heads = composition.dw1_proj.out_features // (generators * 2 * composition.rank)
    elif composition.gate_proj is not None:
        width, heads = composition.gate_proj.in_features, composition.gate_proj.out_features // generators
    else:  # static projections alone, whose std follows from M
        width, heads = getattr(config, "hidden_size", None), m
        width = width or next((o.embed_dim for o in owners if hasattr(o, "embed_dim")), None)
        if width is None:
            found.setdefault("initializer_range", 0.02)
    sizes = {"hidden_size": width or 1, "num_attention_heads": heads, "compose_groups": heads // m}
    return SimpleNamespace(**sizes, compose_rank=max(1, composition.rank), **found)


def _parameters_of(part: DCFormerCompose) -> Iterator[tuple[str, nn.Parameter]]:
    """Its own parameters by name, without adapters."""
    for inner, parameter in part.named_parameters():
        if (name := _WRAPPERS.sub("", inner)) in _NAMES:
            yield name, parameter


def _is_embedding(path: str) -> bool:
    """Whether a parameter is one of head embeddings."""
    return _WRAPPERS.sub("", path).rpartition(".")[2] in EMBEDDING_NAMES


def names_without_decay(model: nn.Module) -> set[str]:
    """Paths of matrices that get no weight decay: composition's, and head embeddings, which act as biases or scales."""
    parts = [module for module in model.modules() if isinstance(module, DCFormerCompose)]
    composition = {id(parameter) for part in parts for _, parameter in _parameters_of(part)}
    named = model.named_parameters()
    return {path for path, p in named if id(p) in composition or _is_embedding(path)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    ratios: float | dict[str, float] | Literal["initial"] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, composition apart: without weight decay, and with its own rates if asked for.

    For training from scratch. One line for `transformers.Trainer`; its schedule scales every group's own rate:

        Trainer(model, args, ..., optimizers=(torch.optim.AdamW(parameter_groups(model, lr=3e-4)), None))

    Args:
        model: any module: a model of this package, one that `convert_attention` has composed, a `DCMHA` or what holds
            some; wrapped by PEFT or not. Without composition there is one rate for all.
        lr: peak learning rate of everything outside composition.
        weight_decay: of matrices outside composition, embeddings of tokens included. Composition, norms, biases and
            head embeddings, which act as biases or scales, get none.
        ratios: learning rates of composition's parameters relative to `lr`: a number for all of them; by their name
            within `DCFormerCompose` ("qkw", "gate_proj.weight", ...), 1 for those that are left out; or "initial":
            `composition_rate_ratios` of each composed part, of its own sizes and of the configuration of the innermost
            model that it is in. 1 for all when not given.

    Returns:
        groups with "params", "lr", "weight_decay" and "name": "matrices", "vectors" (norms, biases, head embeddings)
        and one for each kind of composition's parameters ("compose.qkw", ...) and rate. Every trainable parameter is in
        exactly one of them; groups without parameters are left out. Adapters count as matrices, on composition too.

    Raises:
        ValueError: when `lr` or a ratio is not a number above 0, `weight_decay` none of at least 0, or a ratio is of no
            parameter of composition.
    """
    by_initial_values = isinstance(ratios, str) and ratios == "initial"
    if by_initial_values or ratios is None:
        ratios = {}
    elif not isinstance(ratios, dict):
        if not _is_number(ratios):
            raise ValueError(f"ratios={ratios!r}: expected a number above 0, 'initial', or numbers by name.")
        ratios = dict.fromkeys(_NAMES, ratios)
    if not all(_is_number(number) and number > 0 for number in (lr, *ratios.values())):
        raise ValueError(f"lr={lr!r} and ratios={ratios}: expected numbers above 0.")
    if not _is_number(weight_decay) or weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay!r}: expected a number of at least 0.")
    if unknown := [name for name in ratios if name not in _NAMES]:
        raise ValueError(f"ratios name {unknown[0]!r}: expected some of {', '.join(_NAMES)}.")

    modules = dict(model.named_modules())
    composition: dict[int, tuple[str, float]] = {}  # id of a parameter -> its name, its rate relative to `lr`
    for path, part in modules.items():
        if not isinstance(part, DCFormerCompose):
            continue
        parts = path.split(".") if path else []
        owners = [modules[".".join(parts[:i])] for i in reversed(range(len(parts)))]
        own = composition_rate_ratios(_settings_of(part, owners)) if by_initial_values else ratios
        composition |= {id(p): (name, own.get(name, 1.0)) for name, p in _parameters_of(part)}
    groups: dict[tuple[str, float], dict[str, Any]] = {}

    def add(group: str, parameter: nn.Parameter, ratio: float, decay: float) -> None:
        new = {"name": group, "params": [], "lr": float(lr) * float(ratio), "weight_decay": float(decay)}
        groups.setdefault((group, ratio), new)["params"].append(parameter)

    for path, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in composition:
            name, ratio = composition[id(parameter)]
            add(f"compose.{name.removesuffix('.weight')}", parameter, ratio, 0.0)
        elif parameter.ndim > 1 and not _is_embedding(path):
            add("matrices", parameter, 1.0, weight_decay)
        else:
            add("vectors", parameter, 1.0, 0.0)
    return list(groups.values())


__all__ = ["composition_rate_ratios", "parameter_groups"]
