"""The projections of an attention layer as one matrix product, for inference.

Queries, keys, values and the first layer of the composition weights all read the same hidden states. For the few tokens
of a decoding step five products cost five launches and hardly more work than one. `FusedProjections` makes them one,
without a second copy of the parameters: the layers keep their modules and parameters, whose data become the rows of one
weight.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn


def has_no_hooks(module: nn.Module) -> bool:
    """Whether nothing happens around a module's forward: no hook, no offloading."""
    state = vars(module)  # asked in every step of decoding: attributes of modules are slow
    is_hooked = (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )
    return not is_hooked and "forward" not in state


def is_plain_linear(linear: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that is nothing but weight and bias.

    No for an adapter, quantization, sharding, offloading or other hooks.
    """
    if type(linear) is not nn.Linear or not has_no_hooks(linear):
        return False
    parameters = vars(linear)["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    return type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


class FusedProjections:
    """Linear layers of the same input as one. While it is in use the data of their parameters are views of its own.

    Args:
        linears: layers that have passed `_check_fusable`; None for those that a model does not have.

    Attributes:
        linears: as given.
        sizes: rows of each layer that is present.
        weight: [all rows, E], those of the layers one after the other.
        bias: [all rows], zero for layers without one; None when no layer has one.
        remembered: what kernels have found out about the layer around it; None before.
    """

    @torch.inference_mode(mode=False)  # what it makes outlives such a mode
    @torch.no_grad()
    def __init__(self, linears: Sequence[nn.Linear | None]):
        self.linears = tuple(linears)
        self.remembered: Any = None
        present = [linear for linear in linears if linear is not None]
        first = present[0].weight
        self.sizes = [linear.weight.shape[0] for linear in present]
        self.weight = torch.empty(sum(self.sizes), first.shape[1], dtype=first.dtype, device=first.device)
        has_bias = any(linear.bias is not None for linear in present)
        self.bias = self.weight.new_zeros(sum(self.sizes)) if has_bias else None
        self._places: list[tuple[nn.Linear, list[tuple[str, torch.Tensor | None, int]]]] = []
        start = 0
        for linear, size in zip(present, self.sizes, strict=True):
            _move(linear.weight, self.weight[start : start + size])
            if self.bias is not None and linear.bias is not None:
                _move(linear.bias, self.bias[start : start + size])
            self._places.append((linear, [(name, p, _address(p)) for name, p in linear._parameters.items()]))
            start += size

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, E] -> the outputs of all layers, one after the other, [B, T, all rows]."""
        return F.linear(hidden_states, self.weight, self.bias)

    def split(self, product: torch.Tensor) -> list[torch.Tensor | None]:
        """[B, T, all rows] -> for every layer its output, [B, T, rows of the layer], a view; None for absent ones."""
        parts = iter(product.split(self.sizes, dim=-1))
        return [None if linear is None else next(parts) for linear in self.linears]

    def is_intact(self, linears: Iterable[nn.Module | None]) -> bool:
        """Whether these layers are still the fused ones, with their parameters where they were put.

        Not so when one has been replaced, hooked, moved or given other tensors since: the product would not know of it.
        """
        for one, other in zip(linears, self.linears, strict=True):
            if one is not other:
                return False
        for linear, parameters in self._places:
            if not has_no_hooks(linear):
                return False
            now = vars(linear)["_parameters"]
            for name, parameter, address in parameters:
                if now.get(name) is not parameter or (parameter is not None and parameter.data_ptr() != address):
                    return False
        return True


def _move(parameter: torch.Tensor, place: torch.Tensor) -> None:
    """Copies a parameter to a place, which becomes its memory. It stays the same object."""
    place.copy_(parameter)
    parameter.data = place


def _address(parameter: torch.Tensor | None) -> int:
    return 0 if parameter is None else parameter.data_ptr()


@torch.inference_mode(mode=False)
@torch.no_grad()
def _release(linears: Iterable[nn.Module | None]) -> None:
    """Gives the parameters of fused layers memory of their own again; None for those that a model does not have."""
    for linear in linears:
        for parameter in () if linear is None else linear.parameters(recurse=False):
            parameter.data = parameter.data.clone()


@torch.inference_mode(mode=False)
def _copy_fused(attention: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Puts copies of fused parameters into a state dict: a hook of a module with `fused` and `projections()`.

    What saves a state dict takes tensors of one memory to be the same, and keeps one of them.
    """
    if attention.fused is None:
        return
    for name, linear in attention.projections().items():
        for own in () if linear is None else linear._parameters:
            tensor = state_dict.get(f"{prefix}{name}.{own}")
            if tensor is not None and not isinstance(tensor, nn.Parameter):  # which `keep_vars` asks for
                state_dict[f"{prefix}{name}.{own}"] = tensor.clone()


def _check_fusable(layers: Iterable[dict[str, nn.Module]], model: nn.Module) -> None:
    """Whether layers can be fused.

    Args:
        layers: for every attention, name -> layer.
        model: the model that they are in.

    Raises:
        ValueError: when one cannot, naming it and what to do.
    """
    modules = model.modules()  # a layer that the model has twice comes once
    owners = Counter(parameter.data_ptr() for module in modules for parameter in module.parameters(recurse=False))
    for together in layers:
        kinds: dict[tuple[torch.dtype, torch.device], str] = {}
        for name, linear in together.items():
            if not is_plain_linear(linear):
                kind = f"{type(linear).__module__}.{type(linear).__name__}"  # PEFT's have torch's names
                _refuse(
                    f"{name} is more than a torch.nn.Linear ({kind}, its weight "
                    f"{type(getattr(linear, 'weight', None)).__name__}, perhaps with hooks)",
                    "merge or remove adapters, quantization, offloading, tensor parallelism and hooks",
                )
            weight, shape = linear.weight, (linear.out_features, linear.in_features)
            if weight.is_meta or tuple(weight.shape) != shape:
                _refuse(
                    f"the weight of {name} is {tuple(weight.shape)} on {weight.device}, expected {shape} with data",
                    "load the model whole",
                )
            for parameter in linear.parameters():
                if parameter.grad is not None:
                    _refuse(f"{name} holds a gradient", "call model.zero_grad()")
                if owners[parameter.data_ptr()] > 1:
                    _refuse(f"{name} shares its memory with another parameter of the model", "give it a copy")
                kinds.setdefault((parameter.dtype, parameter.device), name)
        if len(kinds) > 1:
            found = ", ".join(f"{name} {dtype} on {device}" for (dtype, device), name in kinds.items())
            _refuse(f"projections of a layer differ ({found})", "bring them to one dtype and one device")


def _refuse(reason: str, advice: str) -> NoReturn:
    raise ValueError(f"the projections cannot be fused: {reason}. To fuse them, {advice} first.")


class FusableAttention(nn.Module):
    """An attention layer whose projections can be fused: its state, and what keeps it right when the layer is moved,
    converted, copied or saved.

    Attributes:
        fused: of `FusableModel.fuse_projections`; None before, and in copies.
    """

    layer_idx: int

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedProjections | None = None
        self.register_state_dict_post_hook(_copy_fused)

    def projections(self) -> dict[str, nn.Module | None]:
        """The layers that read the hidden states, in the order in which `fused` has them; None for absent ones."""
        own: Any = self._modules  # read in every step of decoding: attributes of modules are slow
        of_compose = own["compose"]._modules
        return {
            "q_proj": own["q_proj"],
            "k_proj": own["k_proj"],
            "v_proj": own["v_proj"],
            "compose.dw1_proj": of_compose.get("dw1_proj"),
            "compose.gate_proj": of_compose.get("gate_proj"),
        }

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """What moves or converts a module: parameters that got memory of their own are fused again."""
        super()._apply(fn, recurse)
        if self.fused is not None and not self.fused.is_intact(self.projections().values()):
            self.fused = FusedProjections(self.fused.linears)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"fused": None, "was_fused": self.fused is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_fused = state.pop("was_fused", False)
        super().__setstate__(state)
        if was_fused:  # copies have memory of their own; pickle keeps parameters in one piece
            _release(self.projections().values())

    def fused_product(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, E] -> the results of `projections`, one after the other, [B, T, all rows]."""
        if self.training or torch.is_grad_enabled():
            raise ValueError(
                f"the projections of layer {self.layer_idx} are fused, which is for inference only, and "
                f"{'the model is in training mode' if self.training else 'gradients are enabled'}: call model.unfuse() "
                "first, or model.eval() and compute under torch.no_grad()."
            )
        fused: Any = self.fused
        if not torch.compiler.is_compiling() and not fused.is_intact(self.projections().values()):
            raise ValueError(
                f"the projections of layer {self.layer_idx} have changed since they were fused (a module, hook or "
                "tensor is new): call model.unfuse(), and model.fuse_projections() if they are to be fused again."
            )
        return fused(hidden_states)


class FusableModel(nn.Module):
    """A model with such layers."""

    def fuse_projections(self) -> None:
        """Makes the projections of each layer one matrix product: q, k, v, and composition's first layers.

        For inference: a decoding step launches less. Parameters keep their names, values and objects, and become views
        of one tensor per layer; nothing is stored twice, except a layer at a time while fusing. What `save_pretrained`
        writes does not change, and `state_dict` holds copies. A forward pass in training mode or with gradients enabled
        is refused until `unfuse`. Copies of the model (`copy.deepcopy`, pickle) are not fused. A compiled model does
        not notice if projections are replaced later.

        Layers that are fused already are left alone.

        Raises:
            ValueError: in training mode; when a projection is not a plain layer with its data in one place (adapters,
                quantization, tensor parallelism, offloading, hooks, the meta device), holds a gradient or shares its
                memory with another parameter. Nothing is changed then.
        """
        if self.training:
            raise ValueError("fuse_projections is for inference, and the model is in training mode: call model.eval().")
        layers = {
            name: {f"{name}.{part}": linear for part, linear in module.projections().items() if linear is not None}
            for name, module in self.named_modules()
            if isinstance(module, FusableAttention) and module.fused is None
        }
        _check_fusable(layers.values(), self)
        for name in layers:
            attention: Any = self.get_submodule(name)
            attention.fused = FusedProjections(tuple(attention.projections().values()))

    def unfuse(self) -> None:
        """Undoes `fuse_projections`: every parameter has memory of its own again. Does nothing to other layers."""
        for module in self.modules():
            if isinstance(module, FusableAttention) and module.fused is not None:
                _release(module.fused.linears)
                module.fused = None


__all__ = ["FusableAttention", "FusableModel", "FusedProjections", "has_no_hooks", "is_plain_linear"]
