"""Sources of tensors, read one at a time: safetensors and PyTorch folders, and JAX checkpoints.

All have the same interface: `infos` lists the tensors without reading them, `read` returns one. No source keeps tensors
in memory that it has not returned.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import ConversionError, first_line, missing_extra
from ..formats import ArrayFormat, array_formats
from ..formats.arrays import return_freed_memory
from ..formats.base import TensorInfo
from ..stored_dcformer import stored_tensors, weight_files

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OF_SAFETENSORS = dict(zip(("F64", "F32", "F16", "BF16"), FLOATS, strict=True))
# Touched pages of a mapped file count as memory: the mapping is renewed after this many bytes.
_REMAP_BYTES = 64 * 2**20


class NoArraysError(ConversionError):
    """There is a folder, and nothing of a JAX checkpoint in it."""


class SafetensorsSource:
    """The safetensors files of a model folder."""

    def __init__(self, folder: str | os.PathLike):
        self.location = os.fspath(folder)
        self.infos: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self._files: dict[str, Path] = {}
        for file in _weight_files(Path(folder), safetensors=True):
            try:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  # a file, not a dictionary
                        part = opened.get_slice(name)
                        kind = part.get_dtype()
                        self.infos[name] = TensorInfo(tuple(part.get_shape()), _OF_SAFETENSORS.get(kind), kind)
                        self._files[name] = file
            except (SafetensorError, OSError) as error:
                raise ConversionError(_damaged(file, error)) from error

    def read(self, name: str) -> torch.Tensor:
        try:
            with safe_open(self._files[name], "pt") as opened:  # opened anew each time: see _REMAP_BYTES
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConversionError(_damaged(self._files[name], error)) from error


class TorchSource:
    """The `pytorch_model.bin` files of a model folder. Pickled code is never run."""

    def __init__(self, folder: str | os.PathLike):
        self.location = os.fspath(folder)
        self.infos: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self._files: dict[str, Path] = {}
        self._open: tuple[Path, dict[str, Any]] | None = None
        self._used = 0
        for file in _weight_files(Path(folder), safetensors=False):
            for name, read in self._load(file).items():
                tensor = read()  # mapped, not read
                dtype = tensor.dtype if tensor.dtype in FLOATS else None
                self.infos[name] = TensorInfo(tuple(tensor.shape), dtype, str(tensor.dtype))
                self._files[name] = file

    @staticmethod
    def _load(file: Path) -> dict[str, Any]:
        try:
            return {name: read for name, _, read in stored_tensors(str(file))}
        except OSError as error:
            raise ConversionError(str(error)) from error

    def read(self, name: str) -> torch.Tensor:
        file = self._files[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # unmapped before it is mapped again
            self._open, self._used = (file, self._load(file)), 0
        tensor = self._open[1][name]().clone()
        self._used += tensor.nbytes
        if self._used > _REMAP_BYTES:
            self._open = None
        return tensor


def _weight_files(folder: Path, safetensors: bool) -> list[Path]:
    """A model's weight files: a single one, or those named by the index."""
    try:
        return [Path(file) for file in weight_files(folder, {"use_safetensors": safetensors})]
    except OSError as error:
        raise ConversionError(str(error)) from error


def _damaged(file: Path, error: Exception) -> str:
    return f"{file} is damaged or truncated ({first_line(error)}): copy or download it again."


def has_weights(folder: Path, name: str) -> bool:
    """Whether a model folder holds weight files with this name."""
    return (folder / name).is_file() or (folder / f"{name}.index.json").is_file()


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
_ITEMS = ("state", "default", "items", "params", "model_params")
_STEP = re.compile(r"(?:checkpoint_|step_|)0*(\d+)")


class ArraySource:
    """The parameters of a JAX checkpoint, one zarr array each: a folder per array, or all in an OCDBT store.

    Args:
        path: the root with its steps, a step, or the folder with the arrays; a local path or a URL that TensorStore
            understands (gs://, s3://, file://).
        step: which step, when `path` is a root; by default the last.
        format: the name of an array format, or "auto".

    Attributes:
        format: the format found.
        folder: the folder with the arrays.
        step: the step's number; None if the path does not contain it.
    """

    def __init__(self, path: str | os.PathLike, step: int | None = None, format: str = "auto"):
        path = os.fspath(path)
        if "://" not in path and not os.path.isdir(path):
            what = "is a file" if os.path.exists(path) else "does not exist"
            raise ConversionError(f"{path} {what}: expected the folder of a checkpoint.")
        try:
            import tensorstore
        except ImportError as error:
            raise missing_extra("jax", "reading a JAX checkpoint", error.name or str(error)) from error
        self._tensorstore = tensorstore
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self.notes: list[str] = []
        self._listings: dict[str, list[str]] = {}
        self.folder, self.step = self._find(path, step)
        self.location = self.folder
        self.infos: dict[str, TensorInfo] = {}
        self._keys: dict[str, tuple[str, str]] = {}  # name -> (driver, place in the store)
        self._ocdbt = "manifest.ocdbt" in self._children(self.folder)
        self.format = self._read_tree([kind for kind in array_formats() if format in (kind.name, "auto")])

    @staticmethod
    def _store(path: str) -> Any:
        """A folder as a key-value store of TensorStore."""
        return f"{path.rstrip('/')}/" if "://" in path else {"driver": "file", "path": f"{os.path.abspath(path)}/"}

    def _children(self, path: str) -> list[str]:
        """Names in a folder."""
        if "://" not in path:
            return sorted(os.listdir(path)) if os.path.isdir(path) else []
        if path not in self._listings:
            try:
                keys = self._tensorstore.KvStore.open(self._store(path)).result().list().result()
            except (ValueError, OSError, NotImplementedError) as error:
                raise ConversionError(f"{path} cannot be listed ({first_line(error)}).") from error
            self._listings[path] = sorted({key.decode().split("/", 1)[0] for key in keys})
        return self._listings[path]

    def _find(self, path: str, step: int | None) -> tuple[str, int | None]:
        """The folder with the arrays, below `path`."""
        if "checkpoints" in self._children(path):  # the folder of a trainer's run
            path = f"{path.rstrip('/')}/checkpoints"
        folder = self._item(path)
        if folder is not None:
            parent = [part for part in path.rstrip("/").split("/") if part][-2:]
            numbers = [int(match[1]) for part in parent if (match := _STEP.fullmatch(part))]
            found = numbers[-1] if numbers else None
            if step is not None and found != step:
                raise ConversionError(f"{path} is not a folder of steps, so --step {step} cannot be chosen in it.")
            return folder, found
        steps = {int(match[1]): name for name in self._children(path) if (match := _STEP.fullmatch(name))}
        complete = {n: item for n, name in steps.items() if (item := self._item(f"{path.rstrip('/')}/{name}", True))}
        if not complete:
            raise NoArraysError(
                f"{path} is not a JAX checkpoint, nor a model folder (config.json and weight files): expected zarr "
                "arrays or an OCDBT store in it, in its "
                f"{', '.join(_ITEMS)}, or in numbered steps. It holds "
                f"{', '.join(self._children(path)[:8]) or 'nothing'}."
            )
        if step is not None and step not in complete:
            raise ConversionError(f"{path} has no step {step!r}: it has {', '.join(map(str, sorted(complete)))}.")
        chosen = max(complete) if step is None else step
        if len(complete) > 1:
            self.notes.append(f"steps {', '.join(map(str, sorted(complete)))}: {chosen} was taken")
        if skipped := sorted(set(steps) - set(complete)):
            self.notes.append(f"steps without arrays, skipped: {', '.join(map(str, skipped))}")
        return complete[chosen], chosen

    def _item(self, path: str, any_item: bool = False) -> str | None:
        """`path`, or its item that holds arrays; None if there is neither. `any_item`: items may have any name."""
        path = path.rstrip("/")
        items = [*_ITEMS, *(self._children(path) if any_item else ())]
        for folder in (path, *(f"{path}/{item}" for item in items)):
            names = self._children(folder) if folder == path or os.path.basename(folder) in self._children(path) else []
            if "manifest.ocdbt" in names:
                return folder
            if any(kind.parameter(name) for name in names for kind in array_formats()):
                return folder
            if "params" in names and self._is_nested(f"{folder}/params"):
                return folder
        return None

    def _is_nested(self, folder: str) -> bool:
        """Whether a folder `params` is the first component of arrays' names rather than an item with arrays."""
        roots = {root for kind in array_formats() for root in kind.roots}
        return bool(({"params"} | roots) & set(self._children(folder)))

    def _read_tree(self, candidates: Sequence[ArrayFormat]) -> ArrayFormat:
        """Lists what is stored, without reading values, and returns the format whose names it has."""
        store = self._store(self.folder)
        base: Any = {"driver": "ocdbt", "base": store} if self._ocdbt else store
        self._base = base
        try:
            keys = [key.decode() for key in self._tensorstore.KvStore.open(base).result().list().result()]
        except (ValueError, OSError) as error:
            raise ConversionError(f"{self.folder} cannot be listed ({first_line(error)}).") from error
        chunks = Counter(self._array_of(key) for key in keys)
        formats: dict[str, ArrayFormat] = {}
        others: list[tuple[str, str]] = []
        drivers = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
        for key in keys:
            ending = next((ending for ending in drivers if key.endswith(ending)), None)
            if ending is None:
                continue
            place = key[: -len(ending)]
            names = {kind: name for kind in candidates if (name := kind.parameter(place.replace("/", ".")))}
            if not names:
                others.append((drivers[ending], place))
                continue
            kind, name = next(iter(names.items()))
            formats[kind.name] = kind
            if name in self._keys:
                raise ConversionError(f"{self.folder} holds {name} twice: {place} and {self._keys[name][1]}.")
            self._keys[name] = (drivers[ending], place)
        if not self._keys:
            raise ConversionError(
                f"{self.folder} holds no parameters of a {' or '.join(kind.name for kind in candidates)} checkpoint "
                f"({len(others)} other arrays): is it another model's, or another --format?"
            )
        if len(formats) > 1:
            raise ConversionError(f"{self.folder} holds parameters of several formats: choose one with --format.")
        (found,) = formats.values()
        unknown = {name: entry for entry in others if (name := found.unknown_parameter(entry[1].replace("/", ".")))}
        self._keys |= unknown  # which is an error, but one of what is expected
        if skipped := len(others) - len(unknown):
            self.notes.append(f"{skipped} arrays other than parameters (step, optimizer states) were skipped")
        for name in sorted(self._keys):
            self._describe(name, chunks)
        return found

    @staticmethod
    def _array_of(key: str) -> str:
        """The array that a key belongs to; chunks are stored as "a/0.1", "a/c/0/1" or "a/0/1"."""
        return re.sub(r"(/c)?(/\d+(\.\d+)*)*$|/c$", "", key)

    def _spec(self, name: str) -> dict[str, Any]:
        driver, place = self._keys[name]
        if isinstance(self._base, str):
            return {"driver": driver, "kvstore": f"{self._base}{place}/"}
        return {"driver": driver, "kvstore": {**self._base, "path": f"{self._base.get('path', '')}{place}/"}}

    def _describe(self, name: str, chunks: Mapping[str, int]) -> None:
        try:
            array = self._tensorstore.open(self._spec(name), open=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise ConversionError(f"{self._place(name)} is damaged ({first_line(error)}).") from error
        dtype = array.dtype.name
        self.infos[name] = TensorInfo(tuple(array.shape), _DTYPES.get(dtype), dtype)
        grid: Any = array.chunk_layout.write_chunk.shape or ()  # None of a single number
        expected = 1
        for length, chunk in zip(array.shape, grid, strict=True):
            expected *= -(-length // chunk) if chunk else 1
        missing = expected - chunks[self._keys[name][1]]
        if missing > 0 and (array.fill_value is None or "_METADATA" in self._children(self.folder)):  # as Orbax writes
            raise ConversionError(
                f"{self._place(name)} lacks {missing} of its {expected} chunks: the checkpoint is incomplete. Copy it "
                "again, or take another step."
            )
        if missing > 0:
            self.notes.append(f"{name}: {missing} of {expected} chunks are not stored and read as {array.fill_value}")

    def _place(self, name: str) -> str:
        return f"{self.folder}, array {self._keys[name][1]}"

    def read(self, name: str) -> torch.Tensor:
        try:
            stored = self._tensorstore.open(self._spec(name), open=True, context=self._context).result()
            array = np.asarray(stored.read().result())
            return_freed_memory()
        except (ValueError, OSError) as error:
            raise ConversionError(
                f"{self._place(name)} cannot be read ({first_line(error)}): a damaged or truncated chunk. "
                "Copy the checkpoint again, or take another step."
            ) from error
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


__all__ = ["FLOATS", "ArraySource", "NoArraysError", "SafetensorsSource", "TorchSource", "has_weights"]
