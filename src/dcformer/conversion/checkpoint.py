"""Checkpoints of every format, presented as a configuration and native tensors."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..configuration_dcformer import DCFormerConfig
from ..errors import ConversionError
from ..formats import FORMATS, FolderFormat, folder_formats
from ..formats.base import Part, TensorInfo, TensorSource, native_shapes
from .inference import SWITCHES, build_config, infer, read_config_file, summary
from .sources import ArraySource, SafetensorsSource, TorchSource, has_weights


@dataclass
class Checkpoint:
    """An open checkpoint: its structure is known and checked, its tensors have not been read.

    Attributes:
        path: where it is.
        format: the name of its format.
        config: of the model; for a checkpoint of arrays inferred and completed with the given fields.
        source: its tensors as stored.
        parts: the stored tensors that make up the model, in the best order to read them.
        notes: assumptions and remarks for the user.
        step: the training step, if the checkpoint records it.
    """

    path: str
    format: str
    config: DCFormerConfig
    source: TensorSource
    parts: list[Part]
    notes: list[str] = field(default_factory=list)
    step: int | None = None

    def __post_init__(self) -> None:
        self.shapes = native_shapes(self.config)
        self._place = {name: (part, k) for part in self.parts for k, name in enumerate(part.natives())}
        self._last: tuple[str, list[torch.Tensor]] | None = None
        self._offset_dtypes: dict[str, torch.dtype | None] = {}
        self._check()

    def _check(self) -> None:
        """Checks that every native tensor is stored once, with the right shape and dtype, and nothing else."""
        where, infos = self.source.location, self.source.infos
        if unplaced := sorted(set(self.shapes) - set(self._place)):
            raise ConversionError(f"{self.format} has no place for {_some(unplaced)}.")
        missing = [part.name for part in self.parts if part.name not in infos]
        if missing:
            raise ConversionError(
                f"{where} lacks {len(missing)} of the {len(self.parts)} tensors of this model: {_some(missing)}. The "
                "checkpoint is incomplete, or belongs to another configuration."
            )
        extra = sorted(set(infos) - {part.name for part in self.parts})
        if extra:
            raise ConversionError(
                f"{where} holds {len(extra)} tensors that this model does not have: {_some(extra)}. Expected "
                f"{self.config.num_hidden_layers} layers; give the right configuration."
            )
        for part in self.parts:
            info, expected = infos[part.name], part.shape(self.config)
            if info.dtype is None:
                raise ConversionError(
                    f"{where} holds {part.name} as {info.stored_dtype}, expected a floating point type (float32, "
                    "bfloat16, float16 or float64)."
                )
            if info.shape != expected and not (
                "v" in part.dims and len(info.shape) == len(expected) and self._is_padded(part, info)
            ):
                raise ConversionError(
                    f"{where} holds {part.name} with shape {list(info.shape)}, expected {list(expected)}"
                    f"{part.dims and f' ({part.dims})'} from the other tensors and the configuration."
                )

    def _is_padded(self, part: Part, info: TensorInfo) -> bool:
        axis, expected = part.dims.split().index("v"), list(part.shape(self.config))
        padded = info.shape[axis] > expected[axis]
        expected[axis] = info.shape[axis]
        return padded and list(info.shape) == expected

    @property
    def is_folder(self) -> bool:
        """Whether it is a model folder, which `from_pretrained` loads."""
        return isinstance(FORMATS[self.format], FolderFormat)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a native tensor, as stored."""
        part, _ = self._place[name]
        dtype = self.source.infos[part.name].dtype
        if part.layout.offset:
            dtype = self._offset_dtype(name, part)
        assert dtype is not None  # checked
        return dtype

    def _offset_dtype(self, name: str, part: Part) -> torch.dtype | None:
        """The dtype of a tensor stored with an offset: that of the bias beside it, or float32 if that would round.

        Tensors that our converter stored in a wider dtype, to be exact, thus return to the model's dtype.
        """
        if part.name not in self._offset_dtypes:
            beside = self._place.get(name.removesuffix("weight") + "bias")
            dtype = self.source.infos[(beside[0] if beside else part).name].dtype
            if dtype in (torch.bfloat16, torch.float16):
                values = self.source.read(part.name).double() + part.layout.offset
                if not torch.allclose(values.to(dtype).double(), values, rtol=0, atol=0, equal_nan=True):
                    dtype = torch.float32
            self._offset_dtypes[part.name] = dtype
        return self._offset_dtypes[part.name]

    def nbytes(self) -> int:
        """Bytes of all native tensors in their stored dtypes."""
        return sum(shape.numel() * self.dtype(name).itemsize for name, shape in self.shapes.items())

    def read(self, name: str) -> torch.Tensor:
        """Reads a native tensor. Successive calls for tensors of one stored tensor read it once.

        Args:
            name: such as "model.layers.0.self_attn.q_proj.weight".

        Returns:
            the tensor in its stored dtype; possibly a view of a larger one.

        Raises:
            ConversionError: when it cannot be read.
        """
        part, place = self._place[name]
        if self._last is None or self._last[0] != part.name:
            self._last = None
            self._last = (part.name, self._split(part))
        return self._finish(part, name, self._last[1][place])

    def forget(self) -> None:
        """Frees the stored tensor that `read` keeps for the next call."""
        self._last = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All native tensors, one at a time, each stored tensor being read once."""
        for part in self.parts:
            pieces = self._split(part)
            for place, name in enumerate(part.natives()):
                yield name, self._finish(part, name, pieces[place])
            del pieces

    def _split(self, part: Part) -> list[torch.Tensor]:
        tensor = self.source.read(part.name)
        if "v" in part.dims:
            tensor = tensor.narrow(part.dims.split().index("v"), 0, self.config.vocab_size)
        return part.split(tensor, self.config)

    def _finish(self, part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if part.layout.offset:
            tensor = (tensor.double() + part.layout.offset).to(self.dtype(name))
        return tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def open_checkpoint(
    path: str | os.PathLike,
    format: str = "auto",
    *,
    config: str | os.PathLike | dict[str, Any] | None = None,
    step: int | None = None,
) -> Checkpoint:
    """Opens a checkpoint of any supported format.

    Args:
        path: a model folder (native or in the hub format), or a JAX checkpoint: its root with steps, a step, or the
            folder of arrays; local, or a URL that TensorStore understands.
        format: the name of a format, or "auto" to detect it.
        config: for JAX checkpoints, a file for `read_config_file` or fields as it returns them; by default a
            `config.json` that this package wrote beside the checkpoint.
        step: of a JAX checkpoint with several; by default the last.

    Returns:
        `Checkpoint`; its notes list what was assumed.

    Raises:
        ConversionError: when the path is not such a checkpoint, or the checkpoint is incomplete or contradicts its
            configuration.
    """
    if format not in ("auto", *FORMATS):
        raise ConversionError(f"format={format!r} is unknown: expected auto, {', '.join(FORMATS)}.")
    location = os.fspath(path)
    is_folder = "://" not in location and _is_model_folder(Path(location))
    if isinstance(FORMATS.get(format), FolderFormat) or (format == "auto" and is_folder):
        if not is_folder:
            what = "is not a model folder" if os.path.exists(location) else "does not exist"
            raise ConversionError(f"{location} {what}: expected a folder with config.json and weight files.")
        if config is not None or step is not None:
            raise ConversionError("--config and --step are for JAX checkpoints: a model folder has its configuration.")
        return _open_folder(Path(location), format)
    return _open_arrays(location, format, config, step)


def _is_model_folder(folder: Path) -> bool:
    weights = ("model.safetensors", "pytorch_model.bin")
    return (folder / "config.json").is_file() and any(has_weights(folder, name) for name in weights)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    safetensors = has_weights(folder, "model.safetensors")
    source: TensorSource = SafetensorsSource(folder) if safetensors else TorchSource(folder)
    format = next((known for known in folder_formats() if known.marker in source.infos), None)
    if format is None:
        raise ConversionError(
            f"{folder} holds neither {' nor '.join(known.marker for known in folder_formats())}, by which its format "
            f"is known; it holds {_some(sorted(source.infos)) or 'no tensors at all'}."
        )
    if name not in ("auto", format.name):
        raise ConversionError(f"{folder} is a {format.name} checkpoint by the names of its tensors, not a {name} one.")
    config = format.read_config(folder, source)
    _refuse_untied_head(folder, format, config, source)
    parts = format.parts(config, generators=format.stored_generators(source), present=list(source.infos))
    used = {part.name for part in parts}
    ignored = [tensor for tensor in format.unused(config, source) if tensor not in used]
    notes = list(source.notes)
    if ignored:
        notes.append(f"{len(ignored)} stored tensors that nothing uses were left out, such as {ignored[0]}")
    source.infos = {tensor: info for tensor, info in source.infos.items() if tensor not in ignored}
    return Checkpoint(str(folder), format.name, config, source, parts, notes)


def _refuse_untied_head(folder: Path, format: FolderFormat, config: Any, source: TensorSource) -> None:
    """Refuses an output projection of its own in a model that is to have none: loading would use it."""
    if not config.tie_word_embeddings or format.head not in source.infos:
        return
    if not torch.equal(source.read(format.head), source.read(format.marker)):
        raise ConversionError(
            f"{folder} has tie_word_embeddings: true, but {format.head} and {format.marker} differ: set it to false in "
            "config.json, or remove the tensor."
        )


def _open_arrays(
    path: str, format: str, config: str | os.PathLike | dict[str, Any] | None, step: int | None
) -> Checkpoint:
    source = ArraySource(path, step, format)
    found = infer(source)
    notes = list(source.notes)
    if config is None:
        config = _config_beside(source.folder, path)
        if config is not None:
            notes.append(f"configuration: {config}")
    given = config if isinstance(config, dict) else read_config_file(config) if config is not None else None
    try:
        model, assumed = build_config(source, found, given)
    except ConversionError as error:
        where = "" if config is None or isinstance(config, dict) else f" (The configuration is {config}.)"
        raise ConversionError(f"{error}{where}") from error
    notes.append(f"found: {summary(found)}")
    if off := [name for name in SWITCHES if not getattr(model, name)]:
        notes.append(f"switched off: {', '.join(off)}")
    notes += [f"assumed {line}" for line in assumed]
    parts = source.format.parts(
        model, period=found.period, stacked=found.stacked, generators=found.generators, present=list(source.infos)
    )
    if not model.compose_generators:  # the trainer stores them even when it does not use them
        used = {part.name for part in parts}
        generators = ("compose.dw1_proj.weight", "compose.qkw", "compose.gate_proj.weight")
        unused = [
            name
            for name, (layout, _) in found.matches.items()
            if layout.natives[0][0].endswith(generators) and name not in used
        ]
        notes += [f"{len(unused)} stored arrays of weight generators that are off were left out"] if unused else []
        source.infos = {name: info for name, info in source.infos.items() if name not in unused}
    kept, stored = model.vocab_size, found.fields["vocab_size"]
    for part in parts:
        if "v" in part.dims and part.name in source.infos:
            stored = max(stored, source.infos[part.name].shape[part.dims.split().index("v")])
    if kept < stored:
        notes.append(f"vocabulary: the first {kept} of {stored} stored rows were kept")
    return Checkpoint(path, source.format.name, model, source, parts, notes, source.step)


def _config_beside(folder: str, path: str) -> str | None:
    """The native configuration that our converter leaves beside a checkpoint, in the folder of its arrays or above.

    Raises:
        ConversionError: on a file of that name that is damaged, in the folder that was given or below.
    """
    if "://" in folder:
        return None
    place, given = Path(folder).resolve(), Path(path.removeprefix("file://")).resolve()
    for candidate in (place, *list(place.parents)[:3]):
        file = candidate / "config.json"
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if '"compose_rank"' in text:
            return str(file)
        try:
            is_damaged = not isinstance(json.loads(text), dict)
        except ValueError:
            is_damaged = True
        if is_damaged and (candidate == given or given in candidate.parents):
            raise ConversionError(
                f"{file} is damaged, it holds no configuration: restore it, remove it, or give --config."
            )
    return None


__all__ = ["Checkpoint", "open_checkpoint"]
