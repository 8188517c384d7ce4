"""Output of conversions: folders that appear only when complete, and safetensors files filled in place."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from ..errors import ConversionError, DCFormerError
from ..files import UNFINISHED, lacks_room, what_is_in_the_way, whole_folder, why_not_written

# In the order in which safetensors lays out a file: wide dtypes first, so that every tensor is aligned.
_SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@contextmanager
def complete_folder(
    output: str | os.PathLike, nbytes: int, overwrite: bool = False, made_from: str | None = None
) -> Iterator[Path]:
    """A folder to write into, which becomes `output` at the end if no error occurred.

    It is a `whole_folder` with the checks of a conversion, whose errors are the user's to correct.

    Args:
        output: must not exist, or be an empty folder, unless `overwrite`.
        nbytes: about how much will be written, to refuse at once what the disk cannot hold.
        overwrite: replace an existing folder, once the new one is complete.
        made_from: one line that says what the content is made from. With it, an interrupted or killed run leaves what
            it has written, and the next one that is made from the same gets it to go on (`SafetensorsWriter(resume)`).

    Yields:
        the folder to write into.

    Raises:
        ConversionError: when the output exists or cannot be written, another process is writing it, or the disk is
            full. Nothing is left then.
    """
    output = local_path(output)
    if (what := what_is_in_the_way(output)) is not None:
        if not overwrite:
            raise ConversionError(f"{output} exists and {what}: choose another --output, or give --overwrite.")
        if output in (Path.cwd(), *Path.cwd().parents):
            raise ConversionError(f"{output} holds the current folder and is not replaced: choose another --output.")
    try:
        with whole_folder(output, made_from) as work:
            free = shutil.disk_usage(output.parent).free
            if nbytes > free and all(entry.name == UNFINISHED for entry in work.iterdir()):  # else it has most already
                raise ConversionError(
                    f"{output.parent} has {free / 1e9:.2f} GB free, {nbytes / 1e9:.2f} GB will be written: make room, "
                    "or choose another --output."
                )
            yield work
    except DCFormerError:
        raise
    except BlockingIOError as error:
        raise ConversionError(
            f"{output} is being written by another process: wait until it ends, or choose another --output."
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        if lacks_room(error):
            raise ConversionError(
                f"Writing {output} failed: {reason}. Make room, or choose another --output; nothing was left."
            ) from error
        raise ConversionError(f"{output} cannot be written: {reason}.") from error


def local_path(path: str | os.PathLike) -> Path:
    """The real path of an output.

    Raises:
        ConversionError: when it is not on this machine.
    """
    local = os.fspath(path).removeprefix("file://")
    if "://" in local:
        raise ConversionError(f"--output {local} is not a local folder: convert to one, then copy it there.")
    return Path(os.path.realpath(local))


def refuse_to_replace(source: str | os.PathLike, output: str | os.PathLike) -> None:
    """Raises a ConversionError when writing `output` would replace the checkpoint being read, or part of it."""
    local, target = os.fspath(source).removeprefix("file://"), local_path(output)
    kept = Path(os.path.realpath(local))
    replaces_part = kept in target.parents and target.exists() and (not target.is_dir() or any(target.iterdir()))
    if "://" not in local and (target in (kept, *kept.parents) or replaces_part):
        raise ConversionError(f"{output} holds the checkpoint to convert, {source}: choose another --output.")


class SafetensorsWriter:
    """Writes a model's safetensors files one tensor at a time, in any order, without keeping them in memory.

    safetensors' own writer needs all tensors of a file at once. A file begins with a header of every tensor's place,
    which is known beforehand; so files are laid out first and then filled in place. At the end, safetensors opens them
    as a check.

    Args:
        folder: where to write.
        tensors: name -> (shape, dtype) of everything that will be written.
        max_shard_size: largest size of a file, in bytes or like "5GB".
        resume: the folder is a `complete_folder` with `made_from`: go on with what an interrupted run has written.

    Attributes:
        written: names of tensors that are written already.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
        max_shard_size: int | str = "5GB",
        resume: bool = False,
    ):
        self.folder = folder
        self._record = folder / UNFINISHED if resume else None
        self.written: set[str] = set()
        if self._record is not None:  # the last line is empty, or was not written to its end
            self.written = tensors.keys() & set(self._record.read_text(encoding="utf-8").split("\n")[1:-1])
        self._missing = tensors.keys() - self.written
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int, torch.Size, torch.dtype]] = {}
        meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
        if isinstance(max_shard_size, str) and max_shard_size.isdecimal():
            max_shard_size = int(max_shard_size)
        is_size = isinstance(max_shard_size, (Integral, str)) and max_shard_size != 0
        if not is_size or str(max_shard_size).startswith("-"):
            raise ConversionError(f"max_shard_size={max_shard_size!r}: expected bytes above 0, or a size like '5GB'.")
        try:
            split = split_state_dict_into_shards_factory(
                meta,
                get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise ConversionError(f"max_shard_size={max_shard_size!r} is not understood ({error}).") from error
        for file, names in split.filename_to_tensors.items():
            self._lay_out(file, {name: tensors[name] for name in names})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _lay_out(self, file: str, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        order = list(_SAFETENSORS_DTYPES)
        for name in sorted(tensors, key=lambda name: (order.index(tensors[name][1]), name)):
            shape, dtype = tensors[name]
            start, end = end, end + shape.numel() * dtype.itemsize
            header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._places[name] = (file, start, shape, dtype)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        mode: Literal["r+b", "wb"] = "r+b" if self.written else "wb"
        opened = open(self.folder / file, mode)  # noqa: SIM115  # closed in `close`
        self._files[file] = opened
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
        for name in tensors:
            _, start, shape, dtype = self._places[name]
            self._places[name] = (file, 8 + len(text) + start, shape, dtype)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, whose shape and dtype must be as announced."""
        file, offset, shape, dtype = self._places[name]
        if tensor.shape != shape or tensor.dtype != dtype or name not in self._missing:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, announced {dtype} {list(shape)}, once.")
        # a tensor of one element counts as contiguous whatever its stride, which `view` refuses
        flat = tensor.detach().contiguous().as_strided((shape.numel(),), (1,))
        self._files[file].seek(offset)
        self._files[file].write(flat.view(torch.uint8).numpy().data)
        self._missing.remove(name)
        if self._record is not None:
            self._files[file].flush()
            os.fsync(self._files[file].fileno())  # the tensor is on the disk before its name is
            with open(self._record, "a", encoding="utf-8") as record:
                record.write(f"{name}\n")

    def close(self) -> list[str]:
        """Finishes the files.

        Returns:
            their names.

        Raises:
            ConversionError: when a tensor was never written, or a file cannot be opened.
        """
        self.abort()
        if self._missing:
            raise ConversionError(f"{len(self._missing)} tensors were not written: {sorted(self._missing)[:4]}.")
        for file in self._files:
            try:
                with safe_open(self.folder / file, "pt"):
                    pass
            except SafetensorError as error:
                raise ConversionError(f"{file} was not written correctly ({error}).") from error
        return sorted(self._files)

    def abort(self) -> None:
        """Closes the files as they are."""
        for opened in self._files.values():
            opened.close()


__all__ = ["SafetensorsWriter", "complete_folder", "refuse_to_replace"]
