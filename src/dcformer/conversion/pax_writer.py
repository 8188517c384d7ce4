"""Writes Pax checkpoints: one zarr array per parameter, in a folder of the parameter's name."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import missing_extra
from .memory import return_freed_memory
from .orbax_writer import LazyArray


def write_pax(
    folder: str | os.PathLike, arrays: Mapping[str, LazyArray], *, progress: Callable[[int], None] | None = None
) -> None:
    """Writes arrays one at a time, each as a single zstd-compressed chunk.

    Args:
        folder: where to, `<root>/checkpoint_XXXXXXXX/state`; created where absent.
        arrays: full parameter name -> array.
        progress: called with the number of bytes of each array once it is on disk, before compression.

    Raises:
        MissingExtraError: when tensorstore is not installed.
        OSError, ValueError: when an array cannot be written.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise missing_extra("jax", "writing a Pax checkpoint", error.name or str(error)) from error
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, lazy in arrays.items():
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{os.path.abspath(folder)}/{name}/"},
            "dtype": lazy.dtype.name,
            "metadata": {
                "shape": list(lazy.shape),
                "chunks": [max(1, length) for length in lazy.shape],
                "compressor": {"id": "zstd", "level": 1},
            },
            "store_data_equal_to_fill_value": True,
        }
        store = tensorstore.open(spec, create=True, delete_existing=False).result()
        return_freed_memory()  # the last array's, which TensorStore frees just after it has reported it written
        array = lazy.load()
        return_freed_memory()
        store.write(array, can_reference_source_data_indefinitely=True).result()
        del array, store
        if progress is not None:
            progress(lazy.nbytes)


__all__ = ["write_pax"]
