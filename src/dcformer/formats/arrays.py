"""Arrays on disk, as JAX trainers store them, written one at a time: zarr folders, and Orbax checkpoints.

Orbax saves a pytree whose arrays are all in memory; the parameters and both Adam moments of a large model need not
fit there. How a leaf is written is a public extension point of Orbax, the type handler. The leaves given to Orbax
here are `LazyArray`s, and the handler registered for them loads one, writes it with TensorStore to the specification
that Orbax gives, and frees it before it loads the next. Names, compression and metadata are thus Orbax's own, and
nothing of this module is needed to restore the result. The handler is registered for the one call only.
"""

import ctypes
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import missing_extra


@dataclass(frozen=True)
class LazyArray:
    """An array that is loaded only when it is written.

    Attributes:
        shape: The shape of what `load` returns.
        dtype: The dtype of what `load` returns, of NumPy or of ml_dtypes (bfloat16).
        load: Returns the array. Called once; nothing else should refer to the result, or it stays in memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The number of elements; some versions of Orbax log it."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in memory, as `write_orbax` reports progress."""
        return self.size * self.dtype.itemsize


def return_freed_memory() -> None:
    """Makes glibc return freed memory to the system.

    glibc keeps memory for the thread that freed it, and TensorStore compresses and decompresses on several threads:
    without this call, chunks of several arrays would count as used at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def write_zarr(
    folder: str | os.PathLike, arrays: Mapping[str, LazyArray], *, progress: Callable[[int], None] | None = None
) -> None:
    """Writes arrays one at a time, each in a folder of its own as a single zstd-compressed chunk.

    Args:
        folder: where to write; created if absent.
        arrays: folder name -> array.
        progress: called with the number of bytes of each array once it is on disk, before compression.

    Raises:
        MissingExtraError: when tensorstore is not installed.
        OSError, ValueError: when an array cannot be written.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise missing_extra("jax", "writing zarr arrays", error.name or str(error)) from error
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
        return_freed_memory()  # of the previous array, which TensorStore frees only after reporting it written
        array = lazy.load()
        return_freed_memory()
        store.write(array, can_reference_source_data_indefinitely=True).result()
        del array, store
        if progress is not None:
            progress(lazy.nbytes)


@contextmanager
def _interrupts_held() -> Iterator[list[int]]:
    """Holds KeyboardInterrupt back until the end, inside of which Orbax and JAX do not expect it.

    JAX loses it where it comes up in its callback of garbage collection. Orbax closes its event loop while TensorStore
    still writes for it, which can end the process. Other threads get no signals, and a program's own handler of them
    stays: then nothing is held back.

    Yields:
        the signals so far: once there is one, nothing that takes long should begin.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


def write_orbax(
    folder: str | os.PathLike,
    tree: Mapping[str, Any],
    *,
    ocdbt: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes `tree` as an Orbax item, such as the folder `state` of a step.

    At most one array is in memory, along with its compressed form, or with a copy if `load` returns an array that is
    not C-contiguous; the memory that `load` itself needs adds to that. After an error, partial output stays: write to
    a temporary folder and rename it. An interrupt waits until the array is written, and takes effect then.

    Args:
        folder: Where to write, `<root>/<step>/state` for a `CheckpointManager`; created if absent. A step needs no
            other file.
        tree: Nested dict of `LazyArray`s, NumPy arrays and numbers.
        ocdbt: True for one OCDBT store, False for one folder per array, as the original trainer writes.
        progress: Called with the number of bytes of each array, before compression, once it is on disk.

    Raises:
        MissingExtraError: JAX, Orbax or TensorStore is not installed.
        FileExistsError: `folder` is not empty.
        ValueError: A loaded array differs from its `LazyArray` in shape or dtype, or TensorStore cannot write it.
        Exception: Whatever `load` or `progress` raises.
    """
    with _interrupts_held() as interrupts:  # from before JAX is imported, which adds its callback
        _write_orbax(folder, tree, ocdbt, progress, interrupts)


def _write_orbax(
    folder: str | os.PathLike,
    tree: Mapping[str, Any],
    ocdbt: bool,
    progress: Callable[[int], None] | None,
    interrupts: list[int],
) -> None:
    try:
        import jax
        import orbax.checkpoint as ocp
        import tensorstore as ts
    except ImportError as error:
        raise missing_extra("jax", "writing an Orbax checkpoint", error.name or str(error)) from error

    class LazyArrayHandler(ocp.type_handlers.NumpyHandler):
        """Writes `LazyArray`s one after the other; on disk they are NumPy arrays, and the metadata says so."""

        async def serialize(self, values, infos, args=None):
            for value, info in zip(values, infos, strict=True):
                if interrupts:
                    raise InterruptedError  # it becomes a KeyboardInterrupt
                array = value.load()
                return_freed_memory()
                # Made C-contiguous here: TensorStore would keep the original in memory while it compresses.
                array = np.asarray(array, order="C")
                if (array.shape, array.dtype) != (value.shape, value.dtype):
                    raise ValueError(
                        f"{info.name}: expected {value.dtype} {value.shape}, loaded {array.dtype} {array.shape}"
                    )
                spec = ocp.type_handlers.get_json_tspec_write(
                    info, use_ocdbt=ocdbt, global_shape=array.shape, local_shape=array.shape, dtype=array.dtype
                )
                # Orbax sets both as well, but its oldest supported versions do so elsewhere. The second option writes
                # zeros to a file too, so that a reader can tell them from a lost chunk.
                spec |= {"dtype": array.dtype.name, "store_data_equal_to_fill_value": True}
                store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
                await store.write(array, can_reference_source_data_indefinitely=True)
                del array, store
                return_freed_memory()
                if progress is not None:
                    progress(value.nbytes)
            return []  # no background work

    path = Path(os.path.abspath(folder))
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty")
    registry = ocp.type_handlers.create_type_handler_registry(
        (LazyArray, LazyArrayHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused, but Orbax warns if it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, type_handler_registry=registry)
    handler.save(path, args=ocp.args.PyTreeSave(_lazy(tree)))
    # The original trainer's Orbax (0.5) reads the tree from this file, and restores nothing without it.
    (path / "checkpoint").write_bytes(ocp.msgpack_utils.msgpack_serialize(_placeholders(tree)))


def mark_step(folder: str | os.PathLike, item: str) -> None:
    """Records the type of a step's item, so that `CheckpointManager(root).restore(step)` works without arguments.

    Args:
        folder: the step, `<root>/<step>`.
        item: name of the item in it that `write_orbax` wrote.

    Raises:
        ImportError: Orbax is not installed.
    """
    import orbax.checkpoint as ocp

    handlers = {item: ocp.PyTreeCheckpointHandler.typestr()}
    Path(folder, "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handlers}))


def _lazy(node: Any) -> Any:
    """The tree with every leaf as a `LazyArray`."""
    if isinstance(node, Mapping):
        return {key: _lazy(value) for key, value in node.items()}
    if isinstance(node, LazyArray):
        return node
    array = np.asarray(node)
    return LazyArray(array.shape, array.dtype, lambda: array)


def _placeholders(node: Any, name: str = "") -> Any:
    """The tree with each leaf replaced by the name under which its array is stored."""
    if isinstance(node, Mapping):
        return {key: _placeholders(value, f"{name}.{key}" if name else key) for key, value in sorted(node.items())}
    return f"PLACEHOLDER://{name}"


__all__ = ["LazyArray", "mark_step", "return_freed_memory", "write_orbax", "write_zarr"]
