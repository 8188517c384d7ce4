"""What every checkpoint format has: a table of tensors, a way to recognise a checkpoint, to read and to write it.

A format is a subclass of `FolderFormat` (a model folder: `config.json` beside weights) or `ArrayFormat` (zarr arrays,
as JAX trainers write them) in a module of its own, and one instance of it in the list of `dcformer.formats`. It says
what is special about the format; opening, checking, converting and comparing checkpoints are in `dcformer.conversion`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig

from ..configuration_dcformer import DCFormerConfig
from ..errors import CONFIG_ERRORS, ConversionError, raise_bug
from ..layouts_dcformer import TensorLayout, foreign_shape, from_native, layer_dims, to_native
from ..modeling_dcformer import DCFormerForCausalLM
from .arrays import LazyArray


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a stored tensor before it is read.

    Attributes:
        shape: as stored.
        dtype: as stored; None for one that PyTorch has no floating point type for.
        stored_dtype: its name in the storage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    stored_dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * (1 if self.dtype is None else self.dtype.itemsize)


class TensorSource(Protocol):
    """A checkpoint's tensors, wherever they are stored.

    Attributes:
        location: where it is, for messages.
        infos: stored name -> what is known of it.
        notes: what was noticed while looking, for the user.
    """

    location: str
    infos: dict[str, TensorInfo]
    notes: list[str]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as stored.

        Raises:
            ConversionError: when it cannot be read, naming it.
        """
        ...


@dataclass(frozen=True)
class Part:
    """One stored tensor of a checkpoint, and the native tensors that it holds.

    Attributes:
        name: of the stored tensor.
        layout: its kind.
        layers: the layers stacked in it, in order; just (0,) for a tensor outside the layers.
        stacked: whether there is a dimension "l" for them.
        generators: weight generators it holds, when it is of that kind.
        whole: the shape of a native tensor stored as it is.
    """

    name: str
    layout: TensorLayout
    layers: tuple[int, ...] = (0,)
    stacked: bool = False
    generators: int = 4
    whole: tuple[int, ...] | None = None

    @property
    def dims(self) -> str:
        """Its dimensions as stored."""
        return self.layout.foreign_dims if self.stacked else layer_dims(self.layout.foreign_dims)

    def natives(self) -> list[str]:
        """Names of the native tensors it holds, layer by layer."""
        return [name.format(i=i) for i in self.layers for name, _ in self.layout.natives]

    def shape(self, config: DCFormerConfig) -> tuple[int, ...]:
        """Its shape as stored, without a padded vocabulary."""
        if self.whole is not None:
            return self.whole
        return foreign_shape(self.layout, config, self.generators, len(self.layers) if self.stacked else None)

    def split(self, tensor: torch.Tensor, config: DCFormerConfig) -> list[torch.Tensor]:
        """The stored tensor -> the native ones, in the order of `natives`; views where that is possible."""
        if self.whole is not None:
            return [tensor]
        layers = tensor.unbind(self.dims.split().index("l")) if self.stacked else [tensor]
        return [native for layer in layers for native in to_native(self.layout, layer, config, self.generators)]

    def join(self, tensors: Iterable[torch.Tensor], config: DCFormerConfig, dtype: torch.dtype) -> torch.Tensor:
        """Native tensors, in the order of `natives` and taken one layer at a time -> the stored one."""
        tensors = iter(tensors)
        if not self.stacked:
            return self._join_layer(tensors, config, dtype)
        axis = self.dims.split().index("l")
        stored = torch.empty(self.shape(config), dtype=dtype)
        for place in range(len(self.layers)):
            stored.select(axis, place).copy_(self._join_layer(tensors, config, dtype))
        return stored

    def _join_layer(self, tensors: Iterable[torch.Tensor], config: DCFormerConfig, dtype: torch.dtype) -> torch.Tensor:
        layer = [tensor for _, tensor in zip(self.layout.natives, tensors, strict=False)]
        if self.layout.offset:
            layer = [tensor.double() - self.layout.offset for tensor in layer]
        stored = from_native(self.layout, layer, config, self.generators)
        return stored.to(dtype, memory_format=torch.contiguous_format)  # cast and transposed in one copy


def native_shapes(config: DCFormerConfig) -> dict[str, torch.Size]:
    """Name -> shape of every tensor that a causal language model of this configuration is saved with."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def layer_period(config: DCFormerConfig) -> int:
    """The length P of the shortest pattern of layers that, repeated, makes up the whole depth."""
    kinds, count = list(config.layer_types or ()), config.num_hidden_layers
    return next(p for p in range(1, count + 1) if count % p == 0 and kinds[:p] * (count // p) == kinds)


def layer_windows(config: DCFormerConfig) -> list[int | None]:
    """The keys that each layer's queries see; None for all."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types or ()]


class Format:
    """A checkpoint format.

    Attributes:
        name: on the command line.
        title: in sentences.
    """

    name: str
    title: str

    def layouts(self, mlp_type: str, norm_type: str) -> list[TensorLayout]:
        """The table of the whole format, for one kind of model.

        Which of its tensors a checkpoint has follows from the model's configuration, by way of the native tensors that
        such a model has.

        Args:
            mlp_type, norm_type: as in the configuration.
        """
        raise NotImplementedError

    def parts(
        self,
        config: DCFormerConfig,
        *,
        period: int = 1,
        stacked: bool = True,
        generators: int = 4,
        present: Iterable[str] = (),
    ) -> list[Part]:
        """The stored tensors that make up a model. Native tensors without a place in the format are in none of them.

        Args:
            config: the model's.
            period: P, layers of a pattern block, where blocks are stacked.
            stacked: False where a format that stacks blocks was told not to.
            generators: weight generators stored.
            present: names in the checkpoint: where a format stores the same in several ways (fused or separate q, k, v;
                tied embeddings), those that are there are taken.
        """
        natives, present, count = native_shapes(config), set(present), config.num_hidden_layers
        parts = []
        for layout in self._layouts_for(config, present):
            native = layout.natives[0][0]
            if native.format(i=0) not in natives:
                continue
            if "{i}" not in native:
                parts.append(Part(layout.foreign, layout))
            elif stacked and "{i}" not in layout.foreign:
                layers = [tuple(range(s, count, period)) for s in range(period)]
                parts += [Part(layout.foreign.format(s=s), layout, layers[s], True, generators) for s in range(period)]
            else:
                name = self.unstacked(layout.foreign)
                parts += [
                    Part(name.format(i=i, b=i // period, s=i % period), layout, (i,), False, generators)
                    for i in range(count)
                ]
        fused = [part for part in parts if len(part.layout.natives) > 1]
        there = {native for part in fused if part.name in present for native in part.natives()}
        return [part for part in parts if (part.name in present if part in fused else part.natives()[0] not in there)]

    def _layouts_for(self, config: DCFormerConfig, present: set[str]) -> list[TensorLayout]:
        """`layouts` for a model, where its kind alone does not decide."""
        return self.layouts(config.mlp_type, config.norm_type)

    def unstacked(self, foreign: str) -> str:
        """The name of one layer's tensor where blocks are not stacked: "{i}" is the layer, "{b}" its block."""
        return foreign

    def config_words(self, content: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        """The words of a configuration file that are this format's: those of no other, and those of others, too."""
        return set(), set()

    def fields_of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration file in this format's words -> the native fields that it decides.

        Besides fields of `DCFormerConfig`: "layer_pattern", "rope_theta", "partial_rotary_factor", "model_type", and
        "period", the layers per block.

        Raises:
            ConversionError: on values that describe no model of this package.
        """
        raise NotImplementedError


class FolderFormat(Format):
    """A format of model folders.

    Attributes:
        marker: the name of a tensor that every checkpoint of this format has, and of no other.
        head: the name of the output projection, left out where embeddings are tied.
    """

    marker: str
    head: str

    def read_config(self, folder: Path, source: TensorSource) -> DCFormerConfig:
        """The configuration of a folder.

        Raises:
            ConversionError: when it describes no model of this package.
        """
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, *CONFIG_ERRORS) as error:
            raise_bug(error)
            raise ConversionError(f"{folder / 'config.json'} describes no model ({error}).") from error
        if not isinstance(config, DCFormerConfig):
            raise ConversionError(
                f"{folder / 'config.json'} is of model_type {config.model_type!r}, expected dcformer or dcpythia."
            )
        return config

    def stored_generators(self, source: TensorSource) -> int:
        """How many weight generators the tensors hold."""
        return 4

    def unused(self, config: DCFormerConfig, source: TensorSource) -> list[str]:
        """Names of stored tensors that say nothing about the model."""
        return [name for name in source.infos if config.tie_word_embeddings and name == self.head]


@dataclass
class Found:
    """What the names and shapes of a checkpoint's arrays say.

    Attributes:
        fields: configuration fields.
        reasons: field -> the array that says so.
        matches: array -> its layout, and whether layers are stacked in it.
        period: P, layers of a pattern block.
        stacked: whether blocks are stacked in one array.
        generators: weight generators stored; 0 when there are none.
        lacking: the array without which embeddings are tied.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    matches: dict[str, tuple[TensorLayout, bool]] = field(default_factory=dict)
    period: int = 1
    stacked: bool = True
    generators: int = 0
    lacking: str = ""


class ArrayFormat(Format):
    """A format of arrays in zarr, a folder for each or all in one OCDBT store, without a configuration.

    Its tables name the place of a layer in a block by "{s}", and the dimension along which blocks are stacked by "l".

    Attributes:
        prefix: a regular expression of what may stand before a parameter's name; nothing else begins with a root.
        roots: the first components of all names.
        stacked_layers, single_layers: the beginning of a layer's names where blocks are stacked, and where they are
            not: with "{b}" for the number of a block, or "{i}" for that of the layer.
        options: of `write`, beside those that every format has.
        limits: why the format has not the others' options and tensors.
    """

    prefix: str
    roots: tuple[str, ...]
    stacked_layers: str = ""
    single_layers: str = ""
    options: frozenset[str] = frozenset()
    limits: str = ""

    def parameter(self, key: str) -> str | None:
        """The name of a parameter, from its key in the store; None for anything else."""
        match = re.fullmatch(rf"(?:{self.prefix})((?:{'|'.join(self.roots)})\..*)", key)
        return match[1] if match else None

    def unstacked(self, foreign: str) -> str:
        return foreign.replace(self.stacked_layers, self.single_layers, 1) if self.stacked_layers else foreign

    def kind(self, names: Collection[str]) -> tuple[str, str]:
        """(mlp_type, norm_type), as the names of the arrays show them."""
        return "gated", "rmsnorm"

    def assumed(self, found: Found) -> dict[str, Any]:
        """Fields that a checkpoint does not tell and that its trainer sets otherwise than `conversion` assumes.

        A name that is no field says how the trainer is taken to compute; it is just reported.
        """
        return {}

    def write(
        self,
        folder: Path,
        arrays: Mapping[str, LazyArray],
        *,
        config: DCFormerConfig,
        period: int,
        step: int,
        progress: Callable[[int], None],
        **options: Any,
    ) -> None:
        """Writes a checkpoint for the format's trainer.

        Args:
            folder: the root, which exists.
            arrays: parameter's name -> array, to be loaded one at a time.
            config, period: the model's, and its layers per block.
            step: the step's number.
            progress: called with the number of bytes of each array once it is on disk.
            options: those of `self.options`.

        Raises:
            MissingExtraError: when a library is not installed.
            OSError, ValueError: when an array cannot be written.
        """
        raise NotImplementedError

    def copies(self, **options: Any) -> int:
        """How many times the size of the parameters `write` writes."""
        return 1

    def computes_otherwise(self, config: DCFormerConfig) -> list[str]:
        """What the format's trainer cannot be told and computes otherwise, in lines for a warning."""
        return []


__all__ = [
    "ArrayFormat",
    "FolderFormat",
    "Format",
    "Found",
    "Part",
    "TensorInfo",
    "TensorSource",
    "layer_period",
    "layer_windows",
    "native_shapes",
]
