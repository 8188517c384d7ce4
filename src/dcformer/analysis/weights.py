"""The matrices of each head's two circuits, from a model or, layer by layer, from a folder that is not loaded.

Names are those of TransformerLens. Letters: H query heads, E hidden size, D head dim, G groups, M heads of a group.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING

from ..errors import CONFIG_ERRORS, DCFormerError, refused
from ..layouts_dcformer import foreign_shape, hub_layouts, to_native
from ..legacy_dcformer import is_hub_config
from ..shards import gathered
from .layers import chosen, layers_of, refuse_adapters

CIRCUITS = ("qk", "ov")
_LAYER = "model.layers.{}.self_attn."
_LAYERS = {"dcformer": _LAYER, "dcpythia": _LAYER, "dha": _LAYER, "dcvit": "dcvit.layers.{}.attention."}  # of folders


@dataclass
class CircuitWeights:
    """A layer's matrices per query head, in float64.

    QK-norm's scales are folded into W_Q and W_K, and so are multiplied head embeddings. The norm itself, RoPE, biases
    and the layer's input norm are left out.

    Attributes:
        W_Q, W_K, W_V: [H, E, D]; shared key and value heads are repeated for each query head that reads them.
        W_O: [H, D, E].
        pre, post: [H, H], identity plus static projection, from head (row) to head (column); identity without one.
    """

    W_Q: torch.Tensor
    W_K: torch.Tensor
    W_V: torch.Tensor
    W_O: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor

    def factors(self, circuit: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B, [H, E, D] each, with A Bᵀ the circuit's E×E matrix: W_Q W_Kᵀ or W_V W_O.

        Raises:
            DCFormerError: on another circuit than "qk" or "ov".
        """
        if circuit not in CIRCUITS:
            raise DCFormerError(f"circuit={circuit!r} is unknown: expected 'qk' or 'ov'.")
        return (self.W_Q, self.W_K) if circuit == "qk" else (self.W_V, self.W_O.mT)

    def mixing(self, circuit: str) -> torch.Tensor:
        """[H, H]: which circuits (rows) make up a head's circuit (columns) with the static projection folded in.

        Theorems 2.1 and 2.2 of the paper: QK_m becomes Σ_j P[j, m] QK_j, and OV_j becomes Σ_m P[j, m] OV_m.
        """
        return self.pre if circuit == "qk" else self.post.T


def circuit_weights(model: nn.Module, layer: int) -> CircuitWeights:
    """The matrices of a layer's circuits, per head.

    Args:
        model: of this package.
        layer: its number.

    Returns:
        `CircuitWeights`, on the CPU.

    Raises:
        DCFormerError: on a layer out of range, NaN among the weights, adapters, and heads that share channels.
    """
    layers = layers_of(model)
    (layer,) = chosen([layer], len(layers), "layer")
    attention = layers[layer].attention
    refuse_adapters(
        module for name, module in attention.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj"))
    )
    state = dict(attention.named_parameters())
    if (system := getattr(attention, "system", None)) is not None:
        if not system.keeps_shapes:
            raise DCFormerError(
                f"head_system={attention.config.head_system!r}: its heads share channels, and have no circuits of "
                "their own. trace, breakdown and attribute_heads say what they do."
            )
        # its projections are those of plain heads
        state = {name.removeprefix("system."): parameter for name, parameter in state.items()}
    return _from_tensors(state.get, attention.config, layer)


def _from_tensors(get: Callable[[str], torch.Tensor | None], config: Any, layer: int) -> CircuitWeights:
    """The matrices, from the tensors of an attention by their names in it."""
    heads, dim = config.num_attention_heads, config.head_dim
    shared = heads // (getattr(config, "num_key_value_heads", None) or heads)
    embeddings = getattr(config, "head_embeddings", None)

    def read_by(kind: str) -> list[int]:
        """The key or value head that each query head reads: of the layer's map, if the model has maps."""
        if embeddings:
            return list(range(heads))
        maps = getattr(config, f"{kind}_head_map", None)
        return [head // shared for head in range(heads)] if maps is None else list(maps[layer])

    def read(name: str) -> torch.Tensor | None:
        tensor = get(name)
        if tensor is None:
            return None
        tensor = gathered(tensor).detach().to("cpu", torch.float64)
        if not tensor.isfinite().all():
            raise DCFormerError(
                f"layer {layer}: {name} holds NaN or infinity: load the checkpoint again, or repair it."
            )
        return tensor

    def projection(name: str, count: int) -> torch.Tensor:
        weight = read(f"{name}_proj.weight")
        embedding = read(f"{name}_embedding") if embeddings else None  # [H, D]
        if embedding is not None and weight is not None:  # one projection for all heads (arXiv 2310.07911)
            factors = 1 + embedding if embeddings == "mul" else torch.ones_like(embedding)
            weight = (factors[..., None] * weight).flatten(0, 1)  # [H·D, E]
            count = heads
        if weight is None or len(weight) != count * dim:
            shape = None if weight is None else tuple(weight.shape)
            raise DCFormerError(
                f"layer {layer}: {name}_proj.weight is {shape}, expected {count} heads of {dim} rows, as the "
                "configuration says: take the one that belongs to these weights."
            )
        weight = weight.unflatten(0, (count, dim)).mT  # [heads, E, D]
        scale = read(f"{name}_norm.weight")
        return weight if scale is None else weight * scale

    def static(name: str) -> torch.Tensor:
        eye, matrix = torch.eye(heads, dtype=torch.float64), read(f"compose.{name}_static")  # [G·M, M]
        return eye if matrix is None else eye + torch.block_diag(*matrix.unflatten(0, (-1, matrix.shape[1])))

    of_key, of_value = read_by("key"), read_by("value")
    key, value = projection("k", max(of_key) + 1)[of_key], projection("v", max(of_value) + 1)[of_value]
    output = read("o_proj.weight")
    if output is None or output.shape[1] != heads * dim:
        raise DCFormerError(f"layer {layer}: o_proj.weight does not have {heads} heads of {dim} columns.")
    output = output.T.unflatten(0, (heads, dim))  # [H, D, E]
    return CircuitWeights(projection("q", heads), key, value, output, static("pre"), static("post"))


class StoredModel:
    """A folder of a DCFormer, DCPythia, DHA or DCViT model with safetensors, read one layer at a time; the model is
    never built.

    Args:
        folder: as `save_pretrained` writes it, or in the hub format.

    Attributes:
        config: the configuration.

    Raises:
        DCFormerError: on a folder without `config.json` or without safetensors, and of another model.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise DCFormerError(f"{folder}: there is no config.json; expected a model folder.")
        with refused(OSError, ValueError):
            content = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.is_hub = is_hub_config(content)
        kind = content.get("model_type", "dcformer")
        if kind not in _LAYERS:
            raise DCFormerError(
                f"{folder}: model_type is {kind!r}, and folders are read of {', '.join(_LAYERS)} only: load the model, "
                "and give it to head_diversity instead of the folder."
            )
        with refused(OSError, *CONFIG_ERRORS):
            self.config: Any = CONFIG_MAPPING[kind].from_pretrained(self.folder)
        self._layer = _LAYERS[kind]
        self.files: dict[str, Path] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with refused(Exception), safe_open(file, "pt") as tensors:
                self.files |= dict.fromkeys(tensors.keys(), file)
        if not self.files:
            raise DCFormerError(
                f"{folder}: there are no safetensors. dcformer-convert hub-to-safetensors writes them from other files."
            )

    def check_finite(self) -> None:
        """Raises a DCFormerError that names a tensor with NaN or infinity, also of those that no circuit needs."""
        for name, file in self.files.items():
            tensor = self._read(name)
            assert tensor is not None
            tensor = tensor if tensor.itemsize > 1 else tensor.float()  # float8 has no isfinite
            if not tensor.isfinite().all():
                raise DCFormerError(f"{file}: {name} holds NaN or infinity: load the checkpoint again, or repair it.")

    def _read(self, name: str) -> torch.Tensor | None:
        if name not in self.files:
            return None
        with safe_open(self.files[name], "pt") as tensors:
            return tensors.get_tensor(name)

    def circuit_weights(self, layer: int) -> CircuitWeights:
        """As the function of the same name; reads the tensors of this layer's attention only."""
        (layer,) = chosen([layer], self.config.num_hidden_layers, "layer")
        prefix = self._layer.format(layer)
        if f"{prefix}o_proj.weight" not in self.files and not self.is_hub:  # of a model without a head
            prefix = prefix.partition(".")[2]
        if not self.is_hub:
            return _from_tensors(lambda name: self._read(prefix + name), self.config, layer)
        natives: dict[str, torch.Tensor] = {}
        for layout in hub_layouts(self.config.mlp_type):
            names = [name.format(i=layer) for name, _ in layout.natives]
            # Static projections are left out: models without them store identities under their names.
            is_wanted = names[0].startswith(prefix) and ".compose." not in names[0]
            if is_wanted and (tensor := self._read(layout.foreign.format(i=layer))) is not None:
                if (expected := foreign_shape(layout, self.config)) != tuple(tensor.shape):
                    raise DCFormerError(
                        f"{layout.foreign.format(i=layer)} is {tuple(tensor.shape)}, expected {expected}."
                    )
                natives |= dict(zip(names, to_native(layout, tensor, self.config), strict=True))
        return _from_tensors(lambda name: natives.get(prefix + name), self.config, layer)


def layer_weights(model: nn.Module | StoredModel) -> tuple[int, Callable[[int], CircuitWeights]]:
    """The number of layers, and what gives the matrices of each."""
    if isinstance(model, StoredModel):
        return model.config.num_hidden_layers, model.circuit_weights
    return len(layers_of(model)), lambda layer: circuit_weights(model, layer)


__all__ = ["CIRCUITS", "CircuitWeights", "StoredModel", "circuit_weights", "layer_weights"]
