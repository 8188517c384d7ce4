"""Orbax checkpoints written array by array: what Orbax itself makes of them, and how much memory writing takes."""

import gc
import json
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES

from dcformer.formats.arrays import LazyArray, write_orbax

RESTORE = """
import sys
import numpy as np
import orbax.checkpoint as ocp
restored = ocp.PyTreeCheckpointer().restore(sys.argv[1])
assert not any(name.startswith("dcformer") for name in sys.modules)
kernel = restored["params"]["decoder"]["mlp"]["kernel"]
np.savez(sys.argv[2], kernel=kernel, step=restored["step"], zeros=restored["params"]["decoder"]["zeros"])
"""

# Prints by how much writing raised the peak of the process's memory, in bytes. Random bits, so that the compressed
# form is as large as the array; no temporary in `load`.
MEMORY = """
import os, pathlib, re, sys
import numpy as np
from dcformer.formats.arrays import LazyArray, write_orbax

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

folder, ocdbt, count, size = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3]), int(sys.argv[4])
bits = np.frombuffer(os.urandom(size), np.int32)
array = LazyArray(bits.shape, bits.dtype, bits.copy)
write_orbax(folder + "/warm-up", {"step": 1}, ocdbt=ocdbt)
before = peak()
write_orbax(folder + "/state", {str(i): array for i in range(count)}, ocdbt=ocdbt)
print(peak() - before)
"""


@pytest.fixture
def ocp():
    return pytest.importorskip("orbax.checkpoint", reason='needs Orbax: pip install "dcformer[jax]"')


def arrays() -> dict:
    """A small tree of every kind of leaf, as NumPy arrays."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(0)
    kernel = random.standard_normal((6, 3, 8), np.float32)

    def params(scale):
        return {
            "decoder": {
                "mlp": {"kernel": kernel * scale},
                "scale": (kernel[0] * scale).astype(ml_dtypes.bfloat16),
                "zeros": np.zeros((5, 7), np.float32),
            }
        }

    moments = {"count": np.asarray(1000, np.int32), "mu": params(0.1), "nu": params(0.01)}
    return {"step": np.asarray(1000, np.int32), "params": params(1.0), "opt_state": moments}


def lazy(node):
    if isinstance(node, dict):
        return {key: lazy(value) for key, value in node.items()}
    return LazyArray(node.shape, node.dtype, node.copy)


def assert_same(actual, expected, names=()):
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected), names
        for key, value in expected.items():
            assert_same(actual[key], value, (*names, key))
        return
    assert actual.dtype == expected.dtype, names
    np.testing.assert_array_equal(np.asarray(actual), expected, str(names))


@pytest.mark.parametrize("ocdbt", [False, True])
class TestRestore:
    def test_checkpointer_in_a_process_without_dcformer(self, ocp, tmp_path, ocdbt):
        tree = arrays()
        write_orbax(tmp_path / "state", lazy(tree), ocdbt=ocdbt)
        command = [sys.executable, "-c", RESTORE, str(tmp_path / "state"), str(tmp_path / "restored.npz")]
        subprocess.run(command, check=True, cwd=tmp_path)
        with np.load(tmp_path / "restored.npz") as restored:
            assert_same(restored["kernel"], tree["params"]["decoder"]["mlp"]["kernel"])
            assert_same(restored["zeros"], tree["params"]["decoder"]["zeros"])
            assert_same(restored["step"], tree["step"])

    def test_every_leaf(self, ocp, tmp_path, ocdbt):
        tree = arrays()
        write_orbax(tmp_path / "state", lazy(tree), ocdbt=ocdbt)
        assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "state"), tree)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
        assert_same(ocp.Checkpointer(handler).restore(tmp_path / "state"), tree)

    def test_checkpoint_manager(self, ocp, tmp_path, ocdbt):
        tree = arrays()
        write_orbax(tmp_path / "1000" / "state", lazy(tree), ocdbt=ocdbt)
        with ocp.CheckpointManager(tmp_path) as manager:
            assert manager.all_steps() == [1000]
            restored = manager.restore(1000, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
        assert_same(restored["state"], tree)

    def test_as_the_original_trainer(self, ocp, tmp_path, ocdbt):
        """A named checkpointer per item, a target tree, arrays as jax.Array with a sharding and another dtype."""
        import jax

        tree = {"params": arrays()["params"]}
        write_orbax(tmp_path / "7" / "state", lazy(tree), ocdbt=ocdbt)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, jax.numpy.bfloat16, sharding=sharding), tree
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        checkpointers = {"state": ocp.PyTreeCheckpointer(use_ocdbt=False)}
        with ocp.CheckpointManager(tmp_path, checkpointers) as manager:
            assert manager.latest_step() == 7
            kwargs = {"state": {"restore_args": restore_args}}
            restored = manager.restore(7, items={"state": target}, restore_kwargs=kwargs)["state"]
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
        assert_same(restored, jax.tree.map(lambda array: array.astype(jax.numpy.bfloat16), tree))


class TestFiles:
    def test_as_orbax_writes_them(self, ocp, tmp_path):
        """One folder per array: the very files and bytes of Orbax's own saving of NumPy arrays."""
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        write_orbax(ours, lazy(arrays()))
        theirs.mkdir()
        ocp.PyTreeCheckpointHandler(use_ocdbt=False).save(theirs, args=ocp.args.PyTreeSave(arrays()))

        def files(folder: Path) -> dict[str, bytes]:
            paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "checkpoint")
            return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

        written, expected = files(ours), files(theirs)
        assert json.loads(written.pop("_METADATA")) == json.loads(expected.pop("_METADATA"))
        assert written == expected
        assert "params.decoder.zeros/0.0" in written  # zeros are stored like any other values

    def test_as_the_original_trainer_wrote_them(self, ocp, tmp_path):
        """`.zarray` and the file of the tree, against a checkpoint of Orbax 0.5.1."""
        original = FIXTURES / "A1" / "checkpoints" / "1000" / "state"
        tree: dict = {}
        for zarray in original.glob("*/.zarray"):
            *parents, key = zarray.parent.name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            header = json.loads(zarray.read_text())
            node[key] = np.zeros(header["shape"], header["dtype"])
        write_orbax(tmp_path / "state", tree)
        for zarray in original.glob("*/.zarray"):
            written = tmp_path / "state" / zarray.relative_to(original)
            assert json.loads(written.read_text()) == json.loads(zarray.read_text())
        assert (tmp_path / "state" / "checkpoint").read_bytes() == (original / "checkpoint").read_bytes()


@pytest.mark.parametrize("ocdbt", [False, True])
class TestLaziness:
    def test_one_array_at_a_time(self, ocp, tmp_path, ocdbt):
        loaded: list[weakref.ref] = []
        written: list[int] = []

        def load():
            assert len(written) == len(loaded)  # each is on disk before the next is loaded
            assert not any(reference() is not None for reference in loaded)
            array = np.ones((100, 10), np.float32)
            loaded.append(weakref.ref(array))
            return array

        tree = {str(index): LazyArray((100, 10), np.dtype(np.float32), load) for index in range(5)}
        write_orbax(tmp_path / "state", tree, ocdbt=ocdbt, progress=written.append)
        assert len(loaded) == 5
        assert written == [4000] * 5

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
    def test_memory(self, ocp, tmp_path, ocdbt):
        size = 60 * 2**20
        command = [sys.executable, "-c", MEMORY, str(tmp_path), str(ocdbt), "6", str(size)]
        increase = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert increase > size  # or nothing was measured
        assert increase < 2 * size + 100 * 2**20  # six such arrays are 360 MB


class TestInterrupts:
    @pytest.fixture(autouse=True)
    def handler(self):
        """Python's own: a shell has what it starts in the background ignore the signal."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("place", ["anywhere", "where Python loses exceptions"])
    def test_what_is_begun_is_written(self, ocp, tmp_path, place):
        """TensorStore never writes for an event loop that is gone, and JAX's callback of collections loses nothing."""

        def interrupt(*_):
            signal.raise_signal(signal.SIGINT)

        def load():
            loaded.append(1)
            if place == "anywhere":
                interrupt()
            else:
                gc.callbacks.append(interrupt)
                gc.collect()
                gc.callbacks.remove(interrupt)
            return np.zeros(3)

        loaded, written = [], []
        tree = {name: LazyArray((3,), np.dtype(np.float64), load) for name in "abc"}
        with pytest.raises(KeyboardInterrupt):
            write_orbax(tmp_path / "state", tree, progress=written.append)
        assert (loaded, written) == ([1], [24])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_other_threads_and_handlers(self, ocp, tmp_path):
        with ThreadPoolExecutor() as pool:
            pool.submit(write_orbax, tmp_path / "state", {"a": np.zeros(3)}).result()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tree = {"a": LazyArray((), np.dtype(np.int64), lambda: signal.raise_signal(signal.SIGINT) or np.asarray(1))}
        write_orbax(tmp_path / "another", tree)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class TestErrors:
    @pytest.mark.parametrize("ocdbt", [False, True])
    def test_of_the_loader(self, ocp, tmp_path, ocdbt):
        def load():
            raise KeyError("no such tensor")

        written: list[int] = []
        tree = {"a": np.zeros(3), "b": LazyArray((3,), np.dtype(np.float32), load), "c": np.zeros(3)}
        with pytest.raises(KeyError, match="no such tensor"):
            write_orbax(tmp_path / "state", tree, ocdbt=ocdbt, progress=written.append)
        assert written == [24]

    def test_of_the_disk(self, ocp, tmp_path):
        def load():
            (tmp_path / "state" / "b").write_text("a file where the array's folder should be")
            return np.zeros(3)

        with pytest.raises(ValueError, match=r"Error writing local file .*state/b"):
            write_orbax(tmp_path / "state", {"b": LazyArray((3,), np.dtype(np.float64), load)})

    @pytest.mark.parametrize("array", [np.zeros(4, np.float32), np.zeros(3, np.float64)])
    def test_other_array_than_announced(self, ocp, tmp_path, array):
        tree = {"a": {"b": LazyArray((3,), np.dtype(np.float32), lambda: array)}}
        with pytest.raises(ValueError, match=r"a\.b: expected float32 \(3,\), loaded"):
            write_orbax(tmp_path / "state", tree)

    def test_folder_in_use(self, ocp, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError, match="not empty"):
            write_orbax(tmp_path, {"a": np.zeros(3)})

    def test_orbax_missing(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
        with pytest.raises(
            ImportError, match=r'needs (orbax\.checkpoint|jax), which is not installed: pip install "dcformer\[jax\]"'
        ):
            write_orbax(tmp_path / "state", {"a": np.zeros(3)})
