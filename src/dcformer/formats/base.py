"""The interface of checkpoint formats: a table of tensors, and how a checkpoint is recognized, read and written.

A format is a module with a subclass of `FolderFormat` (a model folder: `config.json` beside weight files) or
`ArrayFormat` (zarr arrays, as JAX trainers write them); `dcformer.formats` lists an instance of it. The subclass holds
only what is special to the format. `dcformer.conversion` opens, checks, converts and compares checkpoints.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PreTrainedConfig

from ..configuration_dcformer import DCFormerConfig
from ..errors import CONFIG_ERRORS, ConversionError, DCFormerError, raise_bug
from ..head_systems import HeadSystemsConfig
from ..heads_dcformer import HEAD_FIELDS
from ..layouts_dcformer import TensorLayout, foreign_shape, from_native, layer_dims, to_native
from ..loading import refuse_mixtures
from ..modeling_dcformer import DCFormerForCausalLM
from .arrays import LazyArray


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a stored tensor, known before it is read.

    Attributes:
        shape: as stored.
        dtype: as stored; None when it is not a floating point type of PyTorch.
        stored_dtype: the dtype's name in the file.
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
        infos: stored name -> metadata.
        notes: remarks for the user.
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
    """A stored tensor of a checkpoint, and the native tensors in it.

    Attributes:
        name: of the stored tensor.
        layout: its row of the format's table.
        layers: the layers stacked in it, in order; (0,) for a tensor outside the layers.
        stacked: whether it has a dimension "l" for layers.
        generators: the number of weight generators in it, if it holds any.
        whole: its shape, when it is a native tensor stored unchanged.
    """

    name: str
    layout: TensorLayout
    layers: tuple[int, ...] = (0,)
    stacked: bool = False
    generators: int = 4
    whole: tuple[int, ...] | None = None

    @property
    def dims(self) -> str:
        """The dimensions as stored."""
        return self.layout.foreign_dims if self.stacked else layer_dims(self.layout.foreign_dims)

    def natives(self) -> list[str]:
        """Names of the native tensors in it, layer by layer."""
        return [name.format(i=i) for i in self.layers for name, _ in self.layout.natives]

    def shape(self, config: DCFormerConfig) -> tuple[int, ...]:
        """The shape as stored, without vocabulary padding."""
        if self.whole is not None:
            return self.whole
        return foreign_shape(self.layout, config, self.generators, len(self.layers) if self.stacked else None)

    def split(self, tensor: torch.Tensor, config: DCFormerConfig) -> list[torch.Tensor]:
        """Splits the stored tensor into native ones, in the order of `natives`; views where possible."""
        if self.whole is not None:
            return [tensor]
        layers = tensor.unbind(self.dims.split().index("l")) if self.stacked else [tensor]
        return [native for layer in layers for native in to_native(self.layout, layer, config, self.generators)]

    def join(self, tensors: Iterable[torch.Tensor], config: DCFormerConfig, dtype: torch.dtype) -> torch.Tensor:
        """Joins native tensors, taken one layer at a time in the order of `natives`, into the stored one."""
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
    """Name -> shape of every tensor that a causal language model with this configuration saves."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def layer_period(config: DCFormerConfig) -> int:
    """The period P of the layer pattern: the length of the shortest pattern that repeats over the depth."""
    kinds, count = list(config.layer_types or ()), config.num_hidden_layers
    return next(p for p in range(1, count + 1) if count % p == 0 and kinds[:p] * (count // p) == kinds)


def layer_windows(config: DCFormerConfig) -> list[int | None]:
    """Each layer's window: how many keys a query sees, or None for all."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types or ()]


class Format:
    """A checkpoint format.

    Attributes:
        name: as given on the command line.
        title: as used in messages.
    """

    name: str
    title: str

    def layouts(self, mlp_type: str, norm_type: str) -> list[TensorLayout]:
        """The format's table of tensors for one type of model.

        It may list tensors that a model lacks: a checkpoint has those rows whose native tensors the model has.

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
        """The stored tensors that make up a model. Native tensors that the format cannot hold are in none of them.

        Args:
            config: the model's.
            period: P, the layers per block, where blocks are stacked.
            stacked: False for a checkpoint whose blocks are not stacked, although the format can stack them.
            generators: the number of stored weight generators.
            present: names in the checkpoint. They decide where a format has alternatives (fused or separate q, k, v;
                tied embeddings).

        Raises:
            ConversionError: for a model with head maps or embeddings, which no other format than the native one has.
        """
        if fields := [name for name in HEAD_FIELDS if getattr(config, name) is not None]:
            raise ConversionError(
                f"the {self.title} format has no {fields[0]}: keep the model in this package's own format."
            )
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
        kinds = {part.layout.foreign for part in fused if part.name in present}
        apart = {part.natives()[0] for part in parts if len(part.layout.natives) == 1 and part.name in present}
        taken = {  # a layer that has neither form lacks that of the other layers
            part.name: part.natives()
            for part in fused
            if part.name in present or (part.layout.foreign in kinds and apart.isdisjoint(part.natives()))
        }
        others = {part.name for part in fused} - taken.keys()
        there = {native for natives in taken.values() for native in natives}
        return [p for p in parts if p.name in taken or (p.name not in others and p.natives()[0] not in there)]

    def _layouts_for(self, config: DCFormerConfig, present: set[str]) -> list[TensorLayout]:
        """`layouts`, adapted to a model where `mlp_type` and `norm_type` do not suffice."""
        return self.layouts(config.mlp_type, config.norm_type)

    def unstacked(self, foreign: str) -> str:
        """The tensor name of a single layer, for blocks that are not stacked: "{i}" is the layer, "{b}" its block."""
        return foreign

    def config_words(self, content: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        """Keys of a configuration file that identify this format: its own keys, and those shared with others."""
        return set(), set()

    def fields_of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Translates a configuration file with this format's keys into the native fields that it determines.

        Besides fields of `DCFormerConfig` these may be "layer_pattern", "rope_theta", "partial_rotary_factor",
        "model_type", and "period", the layers per block.

        Raises:
            ConversionError: on values that no model of this package can have.
        """
        raise NotImplementedError


class FolderFormat(Format):
    """A format of model folders.

    Attributes:
        marker: the name of a tensor that every checkpoint of this format has, and no other format's.
        head: the name of the output projection, absent when embeddings are tied.
    """

    marker: str
    head: str

    def read_config(self, folder: Path, source: TensorSource) -> DCFormerConfig:
        """The configuration of a folder.

        Raises:
            ConversionError: when it is not the configuration of a model of this package, or has mixtures of heads.
        """
        try:
            if "model_type" not in PreTrainedConfig.get_config_dict(folder)[0]:
                raise ValueError("it has no model_type: expected dcformer, dcpythia or dha")
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, *CONFIG_ERRORS) as error:
            raise_bug(error)
            raise ConversionError(f"{folder / 'config.json'} is not a valid configuration ({error}).") from error
        try:
            refuse_mixtures(folder)
        except DCFormerError as error:
            raise ConversionError(str(error)) from error
        if not isinstance(config, DCFormerConfig):
            raise ConversionError(
                f"{folder / 'config.json'} is of model_type {config.model_type!r}, expected dcformer, dcpythia or dha."
            )
        if isinstance(config, HeadSystemsConfig):
            raise ConversionError(
                f"{folder / 'config.json'} is of a model with a head system (model_type {config.model_type!r}), which "
                "dcformer-convert does not read, as no other format has a place for it: load and save it with "
                "from_pretrained and save_pretrained."
            )
        return config

    def stored_generators(self, source: TensorSource) -> int:
        """The number of stored weight generators."""
        return 4

    def unused(self, config: DCFormerConfig, source: TensorSource) -> list[str]:
        """Names of stored tensors that the model does not use."""
        return [name for name in source.infos if config.tie_word_embeddings and name == self.head]


@dataclass
class Found:
    """What the names and shapes of a checkpoint's arrays reveal.

    Attributes:
        fields: configuration fields.
        reasons: field -> the array that determined it.
        matches: array -> its layout, and whether layers are stacked in it.
        period: P, the layers per block.
        stacked: whether blocks are stacked in one array.
        generators: the number of stored weight generators.
        lacking: the absent embedding or output projection, when embeddings are tied.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    matches: dict[str, tuple[TensorLayout, bool]] = field(default_factory=dict)
    period: int = 1
    stacked: bool = True
    generators: int = 0
    lacking: str = ""


class ArrayFormat(Format):
    """A format of zarr arrays, each in its own folder or all in one OCDBT store, without a configuration.

    In its tables "{s}" is a layer's place in its block, and "l" the dimension along which blocks are stacked.

    Attributes:
        prefix: a regular expression for what may precede a parameter's name.
        roots: the first components of all parameter names.
        certain_prefix: one that nothing but parameters has.
        has_one_eps: the trainer's norms of queries and keys have the epsilon of all others.
        stacked_layers, single_layers: how the names of a layer begin when blocks are stacked, and when they are not,
            with "{b}" for the number of the block or "{i}" for the number of the layer.
        options: names of the options that only this format's `array_shape`, `write` and `copies` take.
        limits: a sentence on what the format cannot hold, for messages.
    """

    prefix: str
    roots: tuple[str, ...]
    certain_prefix: str = ""
    has_one_eps: bool = False
    stacked_layers: str = ""
    single_layers: str = ""
    options: frozenset[str] = frozenset()
    limits: str = ""

    def parameter(self, key: str) -> str | None:
        """The parameter's name, from its key in the store; None for keys that are not parameters."""
        match = re.fullmatch(rf"(?:{self.prefix})((?:{'|'.join(self.roots)})\..*)", key)
        return match[1] if match else None

    def unknown_parameter(self, key: str) -> str | None:
        """The name of what must be a parameter by its prefix, whatever it is; None for other keys."""
        match = re.fullmatch(rf"(?:{self.certain_prefix})(.+)", key) if self.certain_prefix else None
        return match[1] if match else None

    def unstacked(self, foreign: str) -> str:
        return foreign.replace(self.stacked_layers, self.single_layers, 1) if self.stacked_layers else foreign

    def kind(self, names: Collection[str]) -> tuple[str, str]:
        """(mlp_type, norm_type), inferred from the names of the arrays."""
        return "gated", "rmsnorm"

    def assumed(self, found: Found) -> dict[str, Any]:
        """Fields that a checkpoint does not determine and whose defaults differ between trainers.

        Names that are not fields describe how the trainer is assumed to compute; they are only reported.
        """
        return {}

    def trained_dtype(self, part: Part) -> torch.dtype:
        """The dtype that the trainer gives a parameter: bfloat16 for qkw and static projections, else float32."""
        narrow = part.layout.natives[0][0].endswith(("compose.qkw", "compose.pre_static", "compose.post_static"))
        return torch.bfloat16 if narrow else torch.float32

    def array_shape(self, part: Part, config: DCFormerConfig, **options: Any) -> tuple[int, ...]:
        """The shape of a parameter in a new checkpoint. Rows beyond those of the model are filled with zeros.

        Args:
            part: the parameter.
            config: of the model.
            options: those of `self.options`.

        Raises:
            ConversionError: when an option asks for a shape that the model cannot have.
        """
        return part.shape(config)

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
            arrays: parameter name -> array, to be loaded one at a time.
            config: of the model.
            period: the layers per block.
            step: the step's number.
            progress: called with the number of bytes of each array once it is on disk.
            options: those of `self.options`.

        Raises:
            MissingExtraError: when a library is not installed.
            OSError, ValueError: when an array cannot be written.
        """
        raise NotImplementedError

    def copies(self, **options: Any) -> int:
        """The size of what `write` writes, as a multiple of the parameters' size."""
        return 1

    def computes_otherwise(self, config: DCFormerConfig) -> list[str]:
        """What the format's trainer would compute differently from the model, in lines for a warning."""
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
