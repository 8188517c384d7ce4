"""JAX checkpoints on disk for tests, written and read without the package's own code."""

from pathlib import Path

import numpy as np
import pytest

tensorstore = pytest.importorskip("tensorstore", reason="JAX checkpoints need tensorstore: pip install 'dcformer[jax]'")


def write_arrays(folder, arrays, *, ocdbt=False, driver="zarr"):
    """Writes arrays under their full names: a folder each, or one OCDBT store."""
    for name, array in arrays.items():
        array = np.asarray(array)
        store = {"driver": "file", "path": f"{folder}/{name}/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": f"file://{Path(folder).resolve()}/", "path": f"{name}/"}
        tensorstore.open(
            {
                "driver": driver,
                "kvstore": store,
                "dtype": array.dtype.name,
                "create": True,
                "delete_existing": True,
                "store_data_equal_to_fill_value": True,
                "schema": {"domain": {"shape": list(array.shape)}},
            }
        ).result().write(array).result()
    return Path(folder)


def write_maxtext(folder, params, *, train_state=False, ocdbt=False, prefix="params.", driver="zarr"):
    """A MaxText item `state`; optimizer moments, if asked for, are decoys with values of their own."""
    arrays = {prefix + name: array for name, array in params.items()}
    if train_state:
        arrays |= {"step": np.int32(7), "opt_state.count": np.int32(7)}
        for moment, value in (("mu", 1e3), ("nu", 1e6)):
            arrays |= {f"opt_state.{moment}.{n}": np.full_like(np.asarray(a), value) for n, a in params.items()}
    return write_arrays(folder, arrays, ocdbt=ocdbt, driver=driver)


def write_pax(folder, params, *, prefix="mdl_vars.params.lm."):
    """A Pax checkpoint's arrays, with optimizer states that must be left alone."""
    arrays = {prefix + name: array for name, array in params.items()}
    decoys = {f"opt_states_0.no_prefix.m.params.lm.{n}": np.full_like(np.asarray(a), 1e3) for n, a in params.items()}
    return write_arrays(folder, arrays | decoys | {"step": np.int32(7)})


def read_arrays(folder, prefix, *, ocdbt=False):
    """name without the prefix -> array, of everything in a folder or OCDBT store whose name begins so."""
    base = f"file://{Path(folder).resolve()}/"
    store = {"driver": "ocdbt", "base": base} if ocdbt else base
    keys = [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
    arrays = {}
    for key in keys:
        name = key.removesuffix("/.zarray")
        if name == key or not name.startswith(prefix):
            continue
        place = {**store, "path": f"{name}/"} if ocdbt else f"{base}{name}/"
        arrays[name.removeprefix(prefix)] = np.asarray(
            tensorstore.open({"driver": "zarr", "kvstore": place}).result().read().result()
        )
    return arrays
