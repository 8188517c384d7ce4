"""Where the parts are that analysis looks at: layers, attention and generators of any model of this package.

A layer is a module with an attention that has a `DCFormerCompose`. That describes DCFormer, DCPythia, DCViT and every
variant of attention, and nothing else has to be known of the model.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ..compose_dcformer import DCFormerCompose
from ..errors import DCFormerError
from ..shards import gathered


class Layer(NamedTuple):
    """A layer and its attention."""

    module: Any
    attention: Any

    @property
    def heads(self) -> int:
        """H."""
        return self.attention.config.num_attention_heads

    def output_weights(self) -> torch.Tensor:
        """[H, D, E]: what each head's output z_h is multiplied by, a view of `o_proj` (FSDP2: gathered)."""
        return gathered(self.attention.o_proj.weight).T.unflatten(0, (self.heads, -1))


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model, in order.

    Args:
        model: of this package. One that `convert_attention` made is not: the library's own models differ in where norms
            are, in what scales them, and in what else attention does.

    Raises:
        DCFormerError: on anything but a model of this package, on one of which heads have been removed, and on one
            whose heads are divided over devices (tensor parallelism).
    """
    if not isinstance(model, nn.Module):
        raise DCFormerError(
            f"a model of type {type(model).__name__}: expected a DCFormer, DCPythia or DCViT model, which "
            "from_pretrained loads from a folder."
        )
    if getattr(model, "tp_size", None) not in (None, 1):
        raise DCFormerError(
            f"the heads of this {type(model).__name__} are divided over devices (tensor parallelism): load it again, "
            "whole."
        )
    if any(hasattr(module, "compose_call") for module in model.modules()):
        raise DCFormerError(
            "analysis is of this package's own models, DCFormer, DCPythia and DCViT, and this one was converted "
            "(convert_attention)."
        )
    found = [
        Layer(module, child)
        for module in model.modules()
        for child in module.children()
        if isinstance(getattr(child, "compose", None), DCFormerCompose) and hasattr(child, "o_proj")
    ]
    if not found:
        raise DCFormerError(
            f"{type(model).__name__} has no layer with composable attention of this package: expected a DCFormer, "
            "DCPythia or DCViT model. A model wrapped by another library has the original inside."
        )
    for layer in found:
        refuse_adapters([layer.attention.o_proj])
        options = getattr(layer.attention.config, "head_system_options", None) or {}
        if any(len(kept) < layer.heads for kept in options.get("kept_heads") or ()):
            raise DCFormerError(
                "heads of this model have been removed (kept_heads), and those that are left have other numbers: "
                "analyze it before prune_heads, with its gates."
            )
    return found


def refuse_adapters(modules: Iterable[nn.Module]) -> None:
    """Refuses modules whose weight is not all that they multiply with.

    Raises:
        DCFormerError: on a module with an adapter.
    """
    if any(hasattr(module, "base_layer") for module in modules):
        raise DCFormerError(
            "a projection of the heads has an adapter, and its weight is not all that it multiplies with: call "
            "merge_and_unload() first."
        )


def listed(values: Any) -> list[Any]:
    """Several values as a list; of one value, which may be a text, a list of it."""
    values = values.tolist() if hasattr(values, "tolist") else values  # of a tensor or an array
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def named(names: Iterable[str] | str | None, known: Sequence[str], what: str) -> list[str]:
    """Names as a list.

    Args:
        names: some or one of those that are known; None for all.
        known: all names.
        what: they are of, for the message.

    Raises:
        DCFormerError: on an unknown name, and on none.
    """
    found = list(known) if names is None else listed(names)
    if not found:
        raise DCFormerError(f"no {what} is named: expected some of {tuple(known)}.")
    if unknown := [name for name in found if name not in known]:
        raise DCFormerError(f"{what} {unknown[0]!r} is unknown: expected some of {tuple(known)}.")
    return found


def whole(number: Any, what: str) -> int:
    """A whole number of any type of integers.

    Args:
        number: to be one.
        what: it is, for the message.

    Raises:
        DCFormerError: on anything else.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise DCFormerError(f"{what} {number!r} is not a whole number of type int.") from None


def chosen(numbers: Iterable[int] | int | None, count: int, what: str, from_end: bool = True) -> list[int]:
    """Numbers counted from 0, or from the end where negative, as numbers from 0.

    Args:
        numbers: of layers, heads or positions; None for all.
        count: how many there are.
        what: they are, for the message.
        from_end: take negative numbers, which token ids are not to be.

    Raises:
        DCFormerError: on a number out of range, and on anything that is not a whole number.
    """
    if numbers is None:
        return list(range(count))
    result = []
    for number in (whole(number, what) for number in listed(numbers)):
        if not (-count if from_end else 0) <= number < count:
            raise DCFormerError(f"{what} {number} is out of range: there are {count}, numbered 0 to {count - 1}.")
        result.append(number % count)
    if not result:
        raise DCFormerError(f"no {what} is named: name some, or None for all.")
    return result


def refuse_nonfinite(model: nn.Module, what: str) -> NoReturn:
    """Says where NaN and infinity in a result come from.

    Args:
        model: that gave it.
        what: the result, for the message.

    Raises:
        DCFormerError: naming the layer and the parameter; or the result, where all parameters are finite.
    """
    places = [(f"layer {number}: ", layer.module) for number, layer in enumerate(layers_of(model))] + [("", model)]
    for place, module in places:
        for name, parameter in module.named_parameters():
            if not parameter.isfinite().all():
                raise DCFormerError(
                    f"{place}{name} of {type(model).__name__} holds NaN or infinity. Load the checkpoint again, "
                    "or find the training step after which it was saved."
                )
    raise DCFormerError(
        f"{what} hold NaN or infinity, and no parameter does: either the inputs do, or the numbers are too large for "
        "the model's dtype; load it in float32."
    )


__all__ = ["Layer", "chosen", "layers_of", "listed", "named", "refuse_adapters", "refuse_nonfinite", "whole"]
