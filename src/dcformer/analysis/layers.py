"""Where the parts are that analysis looks at: layers, attention and generators of any model of this package.

A layer is a module with an attention that has a `DCFormerCompose`. That describes DCFormer, DCPythia, DCViT and every
variant of attention, and nothing else has to be known of the model.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ..compose_dcformer import DCFormerCompose
from ..errors import DCFormerError


class Layer(NamedTuple):
    """A layer and its attention."""

    module: Any
    attention: Any

    @property
    def heads(self) -> int:
        """H."""
        return self.attention.config.num_attention_heads

    def output_weights(self) -> torch.Tensor:
        """[H, D, E]: what each head's output z_h is multiplied by, a view of `o_proj`."""
        return self.attention.o_proj.weight.T.unflatten(0, (self.heads, -1))


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model, in order.

    Raises:
        DCFormerError: on a model without attention of this package, and on one of which heads have been removed.
    """
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
        if hasattr(layer.attention.o_proj, "base_layer"):
            raise DCFormerError(
                "a projection of the heads' outputs has an adapter, and its weight is not all that they are multiplied "
                "with: call merge_and_unload() first."
            )
        options = getattr(layer.attention.config, "head_system_options", None) or {}
        if any(len(kept) < layer.heads for kept in options.get("kept_heads") or ()):
            raise DCFormerError(
                "heads of this model have been removed (kept_heads), and those that are left have other numbers: "
                "analyse it before prune_heads, with its gates."
            )
    return found


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
    for number in numbers if isinstance(numbers, Iterable) else [numbers]:
        if int(number) != number:
            raise DCFormerError(f"{what} {number} is not a whole number.")
        if not (-count if from_end else 0) <= number < count:
            raise DCFormerError(f"{what} {number} is out of range: there are {count}, numbered 0 to {count - 1}.")
        result.append(int(number) % count)
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


__all__ = ["Layer", "chosen", "layers_of", "refuse_nonfinite"]
