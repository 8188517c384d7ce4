"""The conversions: any checkpoint -> a model folder, and any checkpoint -> a checkpoint of arrays."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig

from ..errors import ConversionError, first_line
from ..formats import HUB, NATIVE, array_formats
from ..formats.arrays import LazyArray
from ..formats.base import ArrayFormat, Part, layer_period, layer_windows
from ..formats.native import TOKENS
from ..tokens_dcformer import load_tokenizer, tokenizer_special_ids
from .checkpoint import Checkpoint, open_checkpoint
from .output import SafetensorsWriter, complete_folder, refuse_to_replace
from .sources import NoArraysError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COUNTED_AT_ONCE = 2**20  # elements examined at once to count NaN and infinity


@dataclass
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, source_format: what was read.
        output, output_format: what was written.
        notes: assumptions, remarks and changes.
        tensors: number of tensors written.
        nbytes: their size in bytes.
        seconds: wall-clock time.
    """

    source: str
    source_format: str
    output: str
    output_format: str
    notes: list[str] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"  {note}" for note in self.notes]
        rate = self.nbytes / 1e6 / max(self.seconds, 1e-9)
        lines.append(
            f"{self.source} ({self.source_format}) -> {self.output} ({self.output_format}): {self.tensors} tensors, "
            f"{self.nbytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate:.0f} MB/s)"
        )
        return "\n".join(lines)


def _check_finite(name: str, tensor: torch.Tensor, allowed: bool, notes: list[str]) -> None:
    """Refuses NaN and infinity, or adds them to the notes where they are allowed."""
    flat = tensor.reshape(-1)
    # NaN if any value is. Takes no memory, and a tenth of the time of counting.
    if not flat.numel() or all(bool(extreme.isfinite()) for extreme in flat.aminmax()):
        return
    bad = sum(int((~piece.isfinite()).sum()) for piece in flat.split(_COUNTED_AT_ONCE))
    if not allowed:
        raise ConversionError(
            f"{name} holds {bad} values that are NaN or infinite as {_dtype_name(tensor.dtype)}, of {tensor.numel()}: "
            "the checkpoint is damaged, or the dtype too narrow. Give --allow-nonfinite to keep them."
        )
    notes.append(f"{name} holds {bad} values that are NaN or infinite")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _progress(total: int, what: str, show: bool) -> Iterator[Callable[[int], None]]:
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not show) as bar:
        yield bar.update


def _parse_dtype(name: str, *others: str) -> torch.dtype | None:
    if name in others:
        return None
    if name not in DTYPES:
        raise ConversionError(f"dtype={name!r} is unknown: expected {', '.join((*others, *DTYPES))}.")
    return DTYPES[name]


def convert_jax_to_safetensors(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    config: str | os.PathLike | dict[str, Any] | None = None,
    step: int | None = None,
    format: str = "auto",
    **options: Any,
) -> ConversionReport:
    """Converts a JAX checkpoint to a folder that `from_pretrained` loads.

    Args:
        checkpoint: its root with steps, a step, or the folder of arrays; a local path or a URL that TensorStore
            understands.
        output: the folder to create.
        config: what shapes do not determine: native fields, or a file with native fields or the keys of a format that
            has configurations (JSON or YAML, complete or not). Anything still open is assumed, and reported.
        step: which step of a root; by default the last.
        format: the name of the checkpoint's format, or "auto".
        options: of `write_safetensors`.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: when the checkpoint is damaged or incomplete, contradicts its configuration, or cannot be
            written; then nothing is left at `output`.
    """
    _array_format(format, "auto")
    opened = open_checkpoint(checkpoint, format, config=config, step=step)
    if opened.is_folder:
        raise ConversionError(f"{checkpoint} is a model folder, not a JAX checkpoint.")
    return write_safetensors(opened, output, **options)


def _array_format(name: str, *others: str) -> ArrayFormat | None:
    """The array format with this name; None for the names in `others`."""
    known = {format.name: format for format in array_formats()}
    if name not in (*others, *known):
        raise ConversionError(f"format={name!r} is unknown: expected {', '.join((*others, *known))}.")
    return known.get(name)


def convert_hub_to_safetensors(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    **options: Any,
) -> ConversionReport:
    """Converts a folder in the hub format (config.json, pytorch_model.bin) to native names and safetensors.

    `from_pretrained` loads such folders directly; converted ones load faster, with less memory, and on several devices.

    Args:
        checkpoint: the folder.
        output: the folder to create.
        tokenizer: another folder's tokenizer; by default the one in `checkpoint`, if any.
        options: the other options of `write_safetensors`.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: as `convert_jax_to_safetensors`. Pickled code in a `.bin` is never run.
    """
    opened = open_checkpoint(checkpoint, HUB.name)
    if tokenizer is None and (Path(checkpoint) / "tokenizer.json").is_file():
        tokenizer = checkpoint
    elif tokenizer is None and (Path(checkpoint) / "tokenizer_config.json").is_file():
        try:
            load_tokenizer(checkpoint, {})
            tokenizer = checkpoint
        except Exception as error:  # of tokenizers that cannot be made there is anything
            opened.notes.append(f"no tokenizer is saved: {first_line(error)}")
    return write_safetensors(opened, output, tokenizer=tokenizer, **options)


def write_safetensors(
    checkpoint: Checkpoint,
    output: str | os.PathLike,
    *,
    dtype: str = "keep",
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Writes an opened checkpoint of any format as a folder that `from_pretrained` loads.

    Args:
        checkpoint: what to convert.
        output: the folder to create.
        dtype: "keep" (each tensor as stored), "float32", "bfloat16" or "float16".
        max_shard_size: largest size of a safetensors file, in bytes or like "5GB".
        tokenizer: folder or name of a tokenizer to save with the model; its special tokens go into the configuration.
        allow_nonfinite: keep NaN and infinity instead of refusing them.
        overwrite: replace an existing output.
        progress: show a progress bar.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: when a tensor cannot be read or the folder cannot be written; then nothing is left at `output`.
    """
    started = time.perf_counter()
    refuse_to_replace(checkpoint.path, output)
    wanted = _parse_dtype(dtype, "keep")
    report = ConversionReport(checkpoint.path, checkpoint.format, os.fspath(output), NATIVE.name, checkpoint.notes[:])
    announced = {
        name: (shape, checkpoint.dtype(name) if wanted is None else wanted) for name, shape in checkpoint.shapes.items()
    }
    total = sum(shape.numel() * kind.itemsize for shape, kind in announced.values())
    config, nonfinite = checkpoint.config, list[str]()
    loaded_tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)
    with complete_folder(output, total, overwrite) as folder:
        writer = SafetensorsWriter(folder, announced, max_shard_size)
        try:
            with _progress(total, "writing safetensors", progress) as update:
                for name, tensor in checkpoint.tensors():
                    # At most one copy, and none while the next tensor is read: see the tests of peak memory.
                    tensor = tensor.to(announced[name][1], memory_format=torch.contiguous_format).contiguous()
                    _check_finite(name, tensor, allow_nonfinite, nonfinite)
                    writer.write(name, tensor)
                    update(tensor.nbytes)
                    del tensor
            files = writer.close()
        finally:
            writer.abort()
        config.dtype = reduce(torch.promote_types, (kind for _, kind in announced.values()))
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        if loaded_tokenizer is not None:
            report.notes += _take_special_tokens(config, str(tokenizer), loaded_tokenizer)
            loaded_tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        special = {name: getattr(config, name) for name in TOKENS}
        _generation_config(checkpoint, special).save_pretrained(folder)
    report.tensors, report.nbytes = len(announced), total
    kinds = sorted({_dtype_name(kind) for _, kind in announced.values()})
    report.notes += [*nonfinite, f"{len(files)} safetensors files, tensors in {', '.join(kinds)}"]
    report.seconds = time.perf_counter() - started
    return report


def _generation_config(checkpoint: Checkpoint, special: dict[str, Any]) -> GenerationConfig:
    """The generation configuration of the checkpoint's folder, or a new one, with these special tokens."""
    if not (Path(checkpoint.path) / "generation_config.json").is_file():
        return GenerationConfig(**special)
    try:
        generation = GenerationConfig.from_pretrained(checkpoint.path)
    except (OSError, ValueError) as error:
        raise ConversionError(f"{checkpoint.path}: generation_config.json is damaged ({first_line(error)}).") from error
    generation.update(**{name: value for name, value in special.items() if value is not None})
    return generation


def _load_tokenizer(path: str | os.PathLike) -> Any:
    try:
        return load_tokenizer(path, {})
    except Exception as error:  # damaged and unrelated folders make the library raise almost anything
        raise ConversionError(f"tokenizer={os.fspath(path)!r} cannot be loaded ({error}).") from error


def _take_special_tokens(config: Any, path: str | os.PathLike, tokenizer: Any) -> list[str]:
    """Copies a tokenizer's special tokens into a configuration. Returns notes on what changed."""
    notes = []
    for name, (_, new) in tokenizer_special_ids(path, {}, tokenizer).items():
        if new >= config.vocab_size:
            continue
        old = getattr(config, name)
        if old not in (None, new):
            notes.append(f"{name} = {new}, as in the tokenizer; the configuration had {old}")
        setattr(config, name, new)
    if len(tokenizer) > config.vocab_size:
        notes.append(
            f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: do they belong together?"
        )
    return notes


def convert_safetensors_to_jax(
    model: str | os.PathLike,
    output: str | os.PathLike,
    *,
    format: str,
    dtype: str = "keep",
    step: int = 0,
    layers_per_block: int | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """Converts a model folder to a JAX checkpoint that the original trainers restore.

    Beside the step, the model's `config.json` is left for converting back, and what the format's trainer reads there.

    Args:
        model: the folder, native or in the hub format. (Any other supported checkpoint works too.)
        output: the root to create, with the step in it where the format's trainer looks for it.
        format: the name of one of `dcformer.formats.array_formats()`.
        dtype: "keep" (each tensor as stored), "trainer" (as the format's `trained_dtype` says), "float32", "bfloat16"
            or "float16".
        step: the step's number.
        layers_per_block: layers in a block of the trainer's scan; by default the period of the layer pattern.
        allow_nonfinite: keep NaN and infinity instead of refusing them.
        overwrite: replace an existing output.
        progress: show a progress bar.
        options: of a single format, as its `write` describes them; the other formats refuse them unless None or False.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: when the format cannot hold a tensor of the model or an option does not apply to it, and as
            `convert_jax_to_safetensors`.
    """
    started = time.perf_counter()
    writer = _array_format(format)
    assert writer is not None  # an unknown one has been refused
    options = {name: value for name, value in options.items() if value not in (None, False)}
    _check_options(writer, options)
    number: Any = step
    if not isinstance(number, Integral) or step < 0:
        raise ConversionError(f"step={step!r}: expected a whole number from 0 on.")
    refuse_to_replace(model, output)
    try:
        opened = open_checkpoint(model)
    except NoArraysError as error:
        raise ConversionError(f"{model} is not a model folder: expected config.json and weight files in it.") from error
    config = opened.config
    period = _layers_per_block(opened, layers_per_block, writer)
    parts = writer.parts(config, period=period)
    if unplaced := sorted(set(opened.shapes) - {name for part in parts for name in part.natives()}):
        raise ConversionError(
            f"A {format} checkpoint has no place for {len(unplaced)} of the model's tensors, such as {unplaced[0]}. "
            + writer.limits
        )
    report = ConversionReport(opened.path, opened.format, os.fspath(output), format, opened.notes[:])
    nonfinite: list[str] = []
    check = partial(_check_finite, allowed=allow_nonfinite, notes=nonfinite)
    arrays: dict[str, LazyArray] = {}
    for part in parts:
        stored_as = _choose_dtype(part, opened, dtype, writer, report.notes)
        arrays[part.name] = _lazy_array(opened, part, writer.array_shape(part, config, **options), stored_as, check)
    total = sum(array.nbytes for array in arrays.values()) * writer.copies(**options)
    with complete_folder(output, total, overwrite) as folder:
        with _progress(total, f"writing {format}", progress) as update:
            writer.write(folder, arrays, config=config, period=period, step=step, progress=update, **options)
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    report.tensors, report.nbytes = len(arrays), total
    report.notes += [
        *nonfinite,
        f"not stored in a {format} checkpoint (see config.json): {_not_stored(config, period)}",
    ]
    if others := writer.computes_otherwise(config):
        report.notes.append(f"WARNING: the {writer.title} trainer computes another model: {'; '.join(others)}")
    report.seconds = time.perf_counter() - started
    return report


def _check_options(writer: ArrayFormat, options: dict[str, Any]) -> None:
    for name in set(options) - writer.options:
        owners = [format.title for format in array_formats() if name in format.options]
        if not owners:
            known = sorted(set().union(*(format.options for format in array_formats())))
            raise ConversionError(
                f"{name}={options[name]!r} is not an option of any format: expected {', '.join(known)}."
            )
        raise ConversionError(f"--{name.replace('_', '-')} is for {' and '.join(owners)}. {writer.limits}")


def _layers_per_block(opened: Checkpoint, given: int | None, writer: ArrayFormat) -> int:
    """P for a model: as given, or the period of its layer pattern."""
    count = opened.config.num_hidden_layers
    if not count:
        raise ConversionError(f"{opened.path} has no layers, and a {writer.name} checkpoint needs some.")
    pattern = layer_period(opened.config)
    period = pattern if given is None else given
    if period < 1 or count % period or period % pattern:
        raise ConversionError(
            f"layers_per_block={given} must divide the model's {count} layers and be a multiple of the {pattern} after "
            "which their windows repeat."
        )
    return period


def _lazy_array(
    checkpoint: Checkpoint,
    part: Part,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    check: Callable[[str, torch.Tensor], None],
) -> LazyArray:
    """A stored tensor of the new checkpoint, assembled when it is written; in rows beyond the model's are zeros."""

    def read(name: str) -> torch.Tensor:
        tensor = checkpoint.read(name)
        check(name, tensor)
        return tensor

    def load() -> np.ndarray:
        # read when `join` consumes it, so that one native tensor is in memory at a time
        joined = part.join((read(name) for name in part.natives()), checkpoint.config, dtype).contiguous()
        checkpoint.forget()
        check(part.name, joined)
        if joined.shape != shape:
            joined = torch.cat([joined, joined.new_zeros(shape[0] - joined.shape[0], *shape[1:])])
        return joined.view(torch.int16).numpy().view(kind) if dtype == torch.bfloat16 else joined.numpy()

    kind = _numpy_dtype(dtype)
    return LazyArray(shape, kind, load)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype == torch.bfloat16:
        import ml_dtypes  # a dependency of tensorstore, without which no JAX checkpoint is written

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_dtype_name(dtype))


def _choose_dtype(part: Part, checkpoint: Checkpoint, dtype: str, writer: ArrayFormat, notes: list[str]) -> torch.dtype:
    """The dtype in which a stored tensor is written; widening is noted."""
    wanted = _parse_dtype(dtype, "keep", "trainer")
    if dtype == "trainer":
        return writer.trained_dtype(part)
    if wanted is not None:
        return wanted
    stored = reduce(torch.promote_types, map(checkpoint.dtype, part.natives()))
    if not part.layout.offset:
        return stored
    # The narrowest dtype from which the values can be recovered; 16-bit values without any rounding, so that the reader
    # can tell that they were 16-bit.
    tensors = [checkpoint.read(name) for name in part.natives()]
    for candidate in (stored, torch.float32, torch.float64):
        back = [(t.double() - part.layout.offset).to(candidate).double() + part.layout.offset for t in tensors]
        back = [b if t.itemsize == 2 else b.to(t.dtype).double() for b, t in zip(back, tensors, strict=True)]
        pairs = zip(back, tensors, strict=True)
        if all(torch.allclose(b, t.double(), rtol=0, atol=0, equal_nan=True) for b, t in pairs):
            if candidate != stored:
                notes.append(f"{part.name} is stored as {_dtype_name(candidate)}: scale - 1 needs it")
            return candidate
    notes.append(f"{part.name}: some values are too small for scale - 1 and were rounded")
    return torch.float64


def _not_stored(config: Any, period: int) -> str:
    """What its checkpoints do not hold and a trainer must be configured with."""
    rope = config.rope_parameters
    rotated = rope.get("partial_rotary_factor", 1.0)
    settings = {
        "layers per block": period,
        "windows": layer_windows(config)[:period],
        "norm epsilon": config.norm_eps,
        "q/k norm epsilon": config.qk_norm_eps if config.qk_norm else None,
        "RoPE base": rope.get("rope_theta"),
        "RoPE type": rope["rope_type"] if rope["rope_type"] != "default" else None,
        "rotated part of a head": rotated if rotated != 1 else None,
        "MLP activation": config.hidden_act,
        "GELU of the weight generators": config.compose_act,
        "parallel residual": config.use_parallel_residual or None,
        "weight generators in use": config.compose_generators if len(config.compose_generators) < 4 else None,
    }
    return "; ".join(f"{name}: {json.dumps(value)}" for name, value in settings.items() if value is not None)


__all__ = [
    "DTYPES",
    "ConversionReport",
    "convert_hub_to_safetensors",
    "convert_jax_to_safetensors",
    "convert_safetensors_to_jax",
    "write_safetensors",
]
