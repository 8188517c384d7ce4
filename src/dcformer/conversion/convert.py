"""The conversions: any checkpoint -> a model folder, and any checkpoint -> a JAX checkpoint."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

from ..hub_dcformer import tokenizer_special_ids
from .checkpoint import Checkpoint, open_checkpoint
from .errors import ConversionError, first_line
from .formats import Part, format_parts, layer_period
from .inference import layer_windows, maxtext_config
from .orbax_writer import LazyArray, mark_step, write_orbax
from .output import SafetensorsWriter, complete_folder, refuse_to_replace
from .pax_writer import write_pax

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COUNTED_AT_ONCE = 2**20  # elements looked at in one go to count NaN and infinity


@dataclass
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, source_format: what was read.
        output, output_format: what was written.
        notes: what was assumed, noticed or changed.
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


class _Finite:
    """Looks for NaN and infinity, and refuses or remembers them."""

    def __init__(self, allowed: bool):
        self.allowed = allowed
        self.found: list[str] = []

    def check(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1)
        # NaN where any value is. Takes no memory, and a tenth of the time of counting.
        if not flat.numel() or all(bool(extreme.isfinite()) for extreme in flat.aminmax()):
            return
        bad = sum(int((~piece.isfinite()).sum()) for piece in flat.split(_COUNTED_AT_ONCE))
        if not self.allowed:
            raise ConversionError(
                f"{name} holds {bad} values that are NaN or infinite as {str(tensor.dtype).removeprefix('torch.')}, of "
                f"{tensor.numel()}: the checkpoint is damaged, or the dtype too narrow. Give --allow-nonfinite to keep "
                "them."
            )
        self.found.append(f"{name} holds {bad} values that are NaN or infinite")


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
    dtype: str = "keep",
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a JAX checkpoint (MaxText or Pax) to a folder that `from_pretrained` loads.

    Args:
        checkpoint: its root with steps, a step, or the folder of arrays; a local path or a URL that TensorStore
            understands.
        output: the folder to make.
        config: what shapes cannot tell: a file in the words of this package, of the authors' config.json, or of MaxText
            (JSON or YAML, complete or not), or native fields. What neither gives is assumed, and reported.
        step: which step of a root; the last one when not given.
        format: "maxtext", "pax" or "auto".
        dtype: "keep" (each tensor as stored), "float32", "bfloat16" or "float16".
        max_shard_size: largest size of a safetensors file, in bytes or like "5GB".
        tokenizer: folder or name of a tokenizer to put beside the model; its special tokens go into the configuration.
        allow_nonfinite: keep NaN and infinity instead of refusing them.
        overwrite: replace an existing output.
        progress: show a progress bar.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: when the checkpoint is damaged, is incomplete, contradicts its configuration, or cannot be
            written; nothing is left at `output` then.
    """
    if format not in ("auto", "maxtext", "pax"):
        raise ConversionError(f"format={format!r} is unknown: expected auto, maxtext or pax.")
    opened = open_checkpoint(checkpoint, format, config=config, step=step)
    if opened.format in ("native", "hub"):
        raise ConversionError(f"{checkpoint} is a model folder, not a JAX checkpoint.")
    return write_safetensors(
        opened,
        output,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
        allow_nonfinite=allow_nonfinite,
        overwrite=overwrite,
        progress=progress,
    )


def convert_hub_to_safetensors(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    dtype: str = "keep",
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a folder as the authors publish it (config.json, pytorch_model.bin) to native names and safetensors.

    `from_pretrained` loads such folders as they are; converted ones load faster, in less memory, on several devices.

    Args:
        checkpoint: the folder.
        tokenizer: of another folder; the one in `checkpoint`, if there is one, when not given.
        output, dtype, max_shard_size, allow_nonfinite, overwrite, progress: as for `convert_jax_to_safetensors`.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: as `convert_jax_to_safetensors`; pickled code in a `.bin` is never run.
    """
    opened = open_checkpoint(checkpoint, "hub")
    if tokenizer is None and (Path(checkpoint) / "tokenizer.json").is_file():
        tokenizer = checkpoint
    return write_safetensors(
        opened,
        output,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
        allow_nonfinite=allow_nonfinite,
        overwrite=overwrite,
        progress=progress,
    )


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
    """Writes an opened checkpoint of any format as a model folder; see `convert_jax_to_safetensors`."""
    started = time.perf_counter()
    refuse_to_replace(checkpoint.path, output)
    wanted = _parse_dtype(dtype, "keep")
    report = ConversionReport(checkpoint.path, checkpoint.format, os.fspath(output), "native", checkpoint.notes[:])
    announced = {
        name: (shape, checkpoint.dtype(name) if wanted is None else wanted) for name, shape in checkpoint.shapes.items()
    }
    total = sum(shape.numel() * kind.itemsize for shape, kind in announced.values())
    config, finite = checkpoint.config, _Finite(allow_nonfinite)
    loaded_tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)
    with complete_folder(output, total, overwrite) as folder:
        writer = SafetensorsWriter(folder, announced, max_shard_size)
        try:
            with _progress(total, "writing safetensors", progress) as update:
                for name, tensor in checkpoint.tensors():
                    # One copy at most, and nothing kept while the next one is read: see the tests of peak memory.
                    tensor = tensor.to(announced[name][1], memory_format=torch.contiguous_format).contiguous()
                    finite.check(name, tensor)
                    writer.write(name, tensor)
                    update(tensor.nbytes)
                    del tensor
            files = writer.close()
        finally:
            writer.abort()
        config.dtype = _common_dtype([kind for _, kind in announced.values()])
        config.architectures = ["DCPythiaForCausalLM" if config.model_type == "dcpythia" else "DCFormerForCausalLM"]
        if loaded_tokenizer is not None:
            report.notes += _take_special_tokens(config, str(tokenizer), loaded_tokenizer)
            loaded_tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _generation_config(checkpoint, special).save_pretrained(folder)
    report.tensors, report.nbytes = len(announced), total
    kinds = sorted({str(kind).removeprefix("torch.") for _, kind in announced.values()})
    report.notes += [*finite.found, f"{len(files)} safetensors files, tensors in {', '.join(kinds)}"]
    report.seconds = time.perf_counter() - started
    return report


def _common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds all of these."""
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return common


def _generation_config(checkpoint: Checkpoint, special: dict[str, Any]) -> GenerationConfig:
    """That of the checkpoint's folder, if it has one, with these special tokens."""
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
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a damaged or foreign folder leads the library to
        raise ConversionError(f"tokenizer={os.fspath(path)!r} cannot be loaded ({error}).") from error


def _take_special_tokens(config: Any, path: str | os.PathLike, tokenizer: Any) -> list[str]:
    """Puts a tokenizer's special tokens into a configuration; says what that changed."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids |= {name: number for name, (_, number) in tokenizer_special_ids(path, {}).items()}
    notes = []
    for name, new in ids.items():
        if new is None or new >= config.vocab_size:
            continue
        old = getattr(config, name)
        if old not in (None, new):
            notes.append(f"{name} = {new}, as the tokenizer has it; the configuration said {old}")
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
    ocdbt: bool = False,
    with_train_state: bool = False,
    dtype: str = "keep",
    step: int = 0,
    layers_per_block: int | None = None,
    padded_vocab_size: int | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a model folder to a JAX checkpoint that the original trainers restore.

    Beside the step, the model's `config.json` is left for the way back, and for MaxText `maxtext.yml` with the fields
    of its configuration.

    Args:
        model: the folder, native or as the authors publish it. (Any other supported checkpoint works too.)
        output: the root to make; the checkpoint is in `<output>/<step>/state` (MaxText) or
            `<output>/checkpoint_<step>/state` (Pax).
        format: "maxtext" (an Orbax checkpoint) or "pax" (a zarr array per parameter).
        ocdbt: write Orbax's OCDBT store; False writes a folder per array, as the original trainer does.
        with_train_state: write a full MaxText train state, with zero Adam moments, instead of parameters only.
        dtype: "keep" (each tensor as stored), "trainer" (qkw and static projections in bfloat16, all else in float32,
            as MaxText trains), "float32", "bfloat16" or "float16".
        step: the step's number.
        layers_per_block: layers in a block of the trainer's scan; the period of the layer pattern when not given.
        padded_vocab_size: rows of the embedding, zeros beyond the vocabulary (Pax).
        allow_nonfinite, overwrite, progress: as for `convert_jax_to_safetensors`.

    Returns:
        `ConversionReport`.

    Raises:
        ConversionError: when the format has no place for a tensor of the model, an option does not apply to it, or as
            `convert_jax_to_safetensors`.
    """
    started = time.perf_counter()
    if format not in ("maxtext", "pax"):
        raise ConversionError(f"format={format!r} is unknown: expected maxtext or pax.")
    if format == "pax" and (ocdbt or with_train_state):
        raise ConversionError(
            "--ocdbt and --with-train-state are for MaxText: a Pax checkpoint is one zarr array per parameter, and its "
            "trainer makes new optimiser states."
        )
    if format == "maxtext" and padded_vocab_size is not None:
        raise ConversionError("--padded-vocab-size is for Pax: MaxText has one size for the embedding and the head.")
    if step < 0:
        raise ConversionError(f"step={step} must not be negative.")
    refuse_to_replace(model, output)
    opened = open_checkpoint(model)
    config = opened.config
    if not config.num_hidden_layers:
        raise ConversionError(f"{opened.path} has no layers, and a {format} checkpoint needs some.")
    pattern = layer_period(config)
    period = pattern if layers_per_block is None else layers_per_block
    if period < 1 or config.num_hidden_layers % period or period % pattern:
        raise ConversionError(
            f"layers_per_block={layers_per_block} must divide the model's {config.num_hidden_layers} layers and be a "
            f"multiple of the {pattern} after which their windows repeat."
        )
    parts = format_parts(format, config, period=period)
    homeless = sorted(set(opened.shapes) - {name for part in parts for name in part.natives()})
    if homeless:
        advice = " Pax has biases, LayerNorm, plain and multi-gate MLPs: --format pax." if format == "maxtext" else ""
        raise ConversionError(
            f"A {format} checkpoint has no place for {len(homeless)} of the model's tensors, such as {homeless[0]}."
            + advice
        )
    if padded_vocab_size is not None and not any(part.dims == "v e" for part in parts):
        raise ConversionError("--padded-vocab-size pads the embedding, which this model shares with its head.")
    report = ConversionReport(opened.path, opened.format, os.fspath(output), format, opened.notes[:])
    finite = _Finite(allow_nonfinite)
    choose = _DtypeChoice(opened, dtype)
    arrays: dict[str, LazyArray] = {}
    for part in parts:
        rows = padded_vocab_size if part.dims == "v e" else None
        arrays[part.name] = _lazy_array(opened, part, choose(part), rows, finite)
    report.notes += choose.notes
    total = sum(array.nbytes for array in arrays.values()) * (3 if with_train_state else 1)
    with complete_folder(output, total, overwrite) as folder:
        with _progress(total, f"writing {format}", progress) as update:
            if format == "maxtext":
                tree = _maxtext_tree(arrays, step, with_train_state)
                write_orbax(folder / str(step) / "state", tree, ocdbt=ocdbt, progress=update)
                mark_step(folder / str(step), "state")
                settings = yaml.safe_dump(maxtext_config(config, period), sort_keys=True)
                (folder / "maxtext.yml").write_text(settings)
            else:
                named = {f"mdl_vars.params.lm.{name}": array for name, array in arrays.items()}
                write_pax(folder / f"checkpoint_{step:08d}" / "state", named, progress=update)
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    report.tensors, report.nbytes = len(arrays), total
    report.notes += [*finite.found, *_not_stored(format, config, period)]
    report.seconds = time.perf_counter() - started
    return report


class _Natives(Sequence):
    """The native tensors of one stored tensor, each read when asked for."""

    def __init__(self, checkpoint: Checkpoint, names: list[str], finite: _Finite):
        self._checkpoint, self._names, self._finite = checkpoint, names, finite

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._checkpoint.read(self._names[index])
        self._finite.check(self._names[index], tensor)
        return tensor


def _lazy_array(checkpoint: Checkpoint, part: Part, dtype: torch.dtype, rows: int | None, finite: _Finite) -> LazyArray:
    """A stored tensor of the new checkpoint, put together when it is written."""
    shape = part.shape(checkpoint.config)
    if rows is not None:
        if rows < shape[0]:
            raise ConversionError(f"padded_vocab_size={rows} is less than the model's vocab_size={shape[0]}.")
        shape = (rows, *shape[1:])

    def load() -> np.ndarray:
        joined = part.join(_Natives(checkpoint, part.natives(), finite), checkpoint.config, dtype).contiguous()
        checkpoint.forget()
        finite.check(part.name, joined)
        if joined.shape != shape:
            joined = torch.cat([joined, joined.new_zeros(shape[0] - joined.shape[0], *shape[1:])])
        return _to_numpy(joined)

    return LazyArray(shape, _numpy_dtype(dtype), load)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype == torch.bfloat16:
        import ml_dtypes  # comes with tensorstore, which whoever writes JAX checkpoints has

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(str(dtype).removeprefix("torch."))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(_numpy_dtype(tensor.dtype))
    return tensor.contiguous().numpy()


class _DtypeChoice:
    """Chooses in which dtype a stored tensor is written."""

    def __init__(self, checkpoint: Checkpoint, dtype: str):
        self.wanted, self.like_trainer = _parse_dtype(dtype, "keep", "trainer"), dtype == "trainer"
        self.checkpoint = checkpoint
        self.notes: list[str] = []

    def __call__(self, part: Part) -> torch.dtype:
        dtype = self.wanted
        if self.like_trainer:
            narrow = part.name.endswith((".qkw", "pre_proj.w", "post_proj.w"))
            dtype = torch.bfloat16 if narrow else torch.float32
        if dtype is None:
            dtype = _common_dtype([self.checkpoint.dtype(name) for name in part.natives()])
        if part.layout.offset and self.wanted is None and not self.like_trainer:
            dtype = self._exact(part, dtype)
        return dtype

    def _exact(self, part: Part, dtype: torch.dtype) -> torch.dtype:
        """The narrowest dtype in which values less the offset give back the values.

        16-bit values without rounding: that tells the reader that they were 16-bit.
        """
        tensors = [self.checkpoint.read(name) for name in part.natives()]
        for candidate in (dtype, torch.float32, torch.float64):
            back = [(t.double() - part.layout.offset).to(candidate).double() + part.layout.offset for t in tensors]
            back = [b if t.itemsize == 2 else b.to(t.dtype).double() for b, t in zip(back, tensors, strict=True)]
            pairs = zip(back, tensors, strict=True)
            if all(torch.allclose(b, t.double(), rtol=0, atol=0, equal_nan=True) for b, t in pairs):
                if candidate != dtype:
                    self.notes.append(
                        f"{part.name} is stored as {str(candidate).removeprefix('torch.')}: scale - 1 needs it"
                    )
                return candidate
        self.notes.append(f"{part.name}: some values are too small for scale - 1, and are rounded")
        return torch.float64


def _maxtext_tree(arrays: Mapping[str, LazyArray], step: int, with_train_state: bool) -> dict[str, Any]:
    """Dotted names -> the nested tree of a MaxText state."""

    def zeros(array: LazyArray) -> LazyArray:
        return LazyArray(array.shape, array.dtype, lambda: np.zeros(array.shape, array.dtype))

    def nested(change: Callable[[LazyArray], LazyArray]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, array in arrays.items():
            *path, leaf = name.split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[leaf] = change(array)
        return tree

    params = nested(lambda array: array)
    if not with_train_state:
        return {"params": params}
    moments = {"count": np.int32(0), "mu": nested(zeros), "nu": nested(zeros)}
    return {"step": np.int32(step), "params": params, "opt_state": moments}


def _not_stored(format: str, config: Any, period: int) -> list[str]:
    """What a trainer must be told, because its checkpoints do not hold it."""
    rope = config.rope_parameters
    rotated = rope.get("partial_rotary_factor", 1.0)
    told = {
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
    lines = [f"{name}: {json.dumps(value)}" for name, value in told.items() if value is not None]
    notes = [f"not stored in a {format} checkpoint (see config.json): {'; '.join(lines)}"]
    if format == "maxtext":
        computed = {
            "GELU of the weight generators": (config.compose_act, "gelu_pytorch_tanh"),
            "q/k norm epsilon": (config.qk_norm_eps if config.qk_norm else config.norm_eps, config.norm_eps),
            "rotated part of a head": (rotated, 1.0),
            "RoPE type": (rope["rope_type"], "default"),
            "parallel residual": (config.use_parallel_residual, False),
        }
        others = [f"{name} {theirs!r}, not {ours!r}" for name, (ours, theirs) in computed.items() if ours != theirs]
        if others:
            notes.append(f"WARNING: the MaxText trainer computes another model: {'; '.join(others)}")
    return notes


__all__ = [
    "DTYPES",
    "ConversionReport",
    "convert_hub_to_safetensors",
    "convert_jax_to_safetensors",
    "convert_safetensors_to_jax",
    "write_safetensors",
]
