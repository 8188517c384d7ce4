"""Learning rates for models with composition: parameter groups for any of PyTorch's optimizers.

Whether lower rates help is open: docs/training.md has what was measured. One rate for all is the default everywhere.
"""

from typing import Any

from torch import nn

from .compose_dcformer import DCFormerCompose, compose_init_std
from .heads_dcformer import EMBEDDING_NAMES


def composition_rate_ratios(config: Any) -> dict[str, float]:
    """Learning rates of composition's parameters, relative to that of ordinary matrices.

    Adam moves an entry by up to the learning rate a step, however small the entry is. Composition starts with entries
    that are much smaller than those of other matrices (`compose_init_std`; for `qkw` some hundred times), so at one
    rate for all they are overwritten within the first steps. These ratios keep the relative change of a step no larger
    than that of an ordinary matrix: std of a parameter / std of ordinary matrices, at most 1.

    Args:
        config: a `DCFormerConfig`, or another configuration with its fields of composition and `initializer_range`.

    Returns:
        parameter name within `DCFormerCompose` -> ratio in (0, 1].
    """
    return {name: min(1.0, std / config.initializer_range) for name, std in compose_init_std(config).items()}


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.1, ratios: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with learning rates of their own for composition.

    For training from scratch. One line for `transformers.Trainer`; its schedule scales every group's own rate:

        Trainer(model, args, ..., optimizers=(torch.optim.AdamW(parameter_groups(model, lr=3e-4)), None))

    Args:
        model: a model whose `config` describes its composition: one of this package's, or one with `DCFormerCompose`.
        lr: peak learning rate of everything outside composition.
        weight_decay: of matrices outside composition, embeddings of tokens included. Composition, norms, biases and
            head embeddings, which act as biases or scales, get none.
        ratios: learning rates of composition's parameters relative to `lr`, by their name within `DCFormerCompose`;
            `composition_rate_ratios(model.config)` when not given. {} means `lr` for all of them.

    Returns:
        groups with "params", "lr", "weight_decay" and "name": "matrices", "vectors" (norms, biases, head embeddings)
        and one for each kind of composition's parameters ("compose.qkw", ...). Every trainable parameter is in exactly
        one of them; groups without parameters are left out.

    Raises:
        ValueError: when `lr` or a ratio is not above 0, or a ratio is of no parameter of composition.
    """
    config: Any = model.config
    if ratios is None:
        ratios = composition_rate_ratios(config)
    known = compose_init_std(config)
    if not lr > 0 or any(not ratio > 0 for ratio in ratios.values()):
        raise ValueError(f"lr={lr} and ratios={ratios}: expected numbers above 0.")
    if unknown := [name for name in ratios if name not in known]:
        raise ValueError(f"ratios name {unknown[0]!r}: expected some of {', '.join(known)}.")

    composition = {
        id(parameter): name
        for module in model.modules()
        if isinstance(module, DCFormerCompose)
        for name, parameter in module.named_parameters()
    }
    groups: dict[str, dict[str, Any]] = {}

    def add(group: str, parameter: nn.Parameter, ratio: float, decay: float) -> None:
        new = {"name": group, "params": [], "lr": lr * ratio, "weight_decay": decay}
        groups.setdefault(group, new)["params"].append(parameter)

    for path, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = composition.get(id(parameter))
        if name is not None:
            add(f"compose.{name.removesuffix('.weight')}", parameter, ratios.get(name, 1.0), 0.0)
        elif parameter.ndim > 1 and path.rpartition(".")[2] not in EMBEDDING_NAMES:
            add("matrices", parameter, 1.0, weight_decay)
        else:
            add("vectors", parameter, 1.0, 0.0)
    return list(groups.values())


__all__ = ["composition_rate_ratios", "parameter_groups"]
