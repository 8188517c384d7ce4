"""Where tensors are written: folders that appear only when they are complete, safetensors files filled in place."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from .errors import ConversionError

_SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@contextmanager
def complete_folder(output: str | os.PathLike, nbytes: int, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `output` at the end, and only if nothing went wrong.

    What is written lies in a hidden neighbour, `.<name>.incomplete`, until it is renamed. A conversion that was killed
    leaves that neighbour behind; the next one to the same output starts it anew.

    Args:
        output: must not exist, or be an empty folder, unless `overwrite`.
        nbytes: about how much will be written, to refuse early what the disk cannot hold.
        overwrite: replace an existing folder, once the new one is complete.

    Yields:
        the folder to write into.

    Raises:
        ConversionError: when the output exists, or the disk is full; then nothing is left.
    """
    output = Path(os.path.abspath(output))
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not overwrite:
        raise ConversionError(f"{output} exists and is not empty: choose another --output, or give --overwrite.")
    work = output.with_name(f".{output.name}.incomplete")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if work.exists():
            shutil.rmtree(work)
        free = shutil.disk_usage(output.parent).free
        if nbytes > free:
            raise ConversionError(
                f"{output.parent} has {free / 1e9:.2f} GB free, {nbytes / 1e9:.2f} GB will be written: make room, or "
                "choose another --output."
            )
        work.mkdir()
        yield work
        if output.exists():
            aside = output.with_name(f".{output.name}.replaced")
            output.rename(aside)
            work.rename(output)
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        else:
            work.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConversionError(
                f"Writing {output} failed: {error.strerror}. Make room, or choose another --output; nothing was left."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise ConversionError(f"{output} cannot be written: {error.strerror}.") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


class SafetensorsWriter:
    """Writes a model's safetensors files one tensor at a time, in any order, without keeping them in memory.

    safetensors' own writer takes the tensors of a whole file at once. Its format has a header with every tensor's place
    before the data, all of which is known beforehand, so the files are laid out first and filled in place; at the end
    safetensors opens them as a check.

    Args:
        folder: where to.
        tensors: name -> (shape, dtype) of everything that will be written.
        max_shard_size: largest size of a file, in bytes or like "5GB".
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
        max_shard_size: int | str = "5GB",
    ):
        self.folder = folder
        self._missing = set(tensors)
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int, torch.Size, torch.dtype]] = {}
        meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
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
        # wide dtypes first, so that every tensor is aligned to its own
        for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
            shape, dtype = tensors[name]
            start, end = end, end + shape.numel() * dtype.itemsize
            header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._places[name] = (file, start, shape, dtype)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        opened = open(self.folder / file, "wb")  # noqa: SIM115  # closed in `close`
        self._files[file] = opened
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
        for name in tensors:
            _, start, shape, dtype = self._places[name]
            self._places[name] = (file, 8 + len(text) + start, shape, dtype)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor; its shape and dtype must be those announced."""
        file, offset, shape, dtype = self._places[name]
        if tensor.shape != shape or tensor.dtype != dtype or name not in self._missing:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, announced {dtype} {list(shape)}, once.")
        self._files[file].seek(offset)
        self._files[file].write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.remove(name)

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
                raise ConversionError(f"{file} was not written well ({error}).") from error
        return sorted(self._files)

    def abort(self) -> None:
        """Closes the files as they are."""
        for opened in self._files.values():
            opened.close()


__all__ = ["SafetensorsWriter", "complete_folder"]
