"""What is written appears complete or not at all, and safetensors files are what safetensors itself writes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import randomize, tiny_config
from huggingface_hub import save_torch_state_dict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dcformer import DCFormerForCausalLM
from dcformer.conversion import (
    ConversionError,
    compare_tensors,
    convert_jax_to_safetensors,
    convert_safetensors_to_jax,
    open_checkpoint,
)
from dcformer.conversion.output import SafetensorsWriter, complete_folder
from dcformer.errors import DCFormerError

pytest.importorskip("tensorstore", reason="JAX checkpoints need tensorstore: pip install 'dcformer[jax]'")

QUIET = {"progress": False}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "native"
    randomize(DCFormerForCausalLM(tiny_config())).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pax(native, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax") / "pax"
    convert_safetensors_to_jax(native, folder, format="pax", **QUIET)
    return folder


def convert(kind, source, output, **options):
    """One of the three things that are written: "native", "maxtext" or "pax"."""
    if kind == "native":
        return convert_jax_to_safetensors(source, output, **options, **QUIET)
    return convert_safetensors_to_jax(source, output, format=kind, **options, **QUIET)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def filled(folder, text="old"):
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


# --- a complete folder, or none ---------------------------------------------------------------------------------------


def test_appears_at_the_end(tmp_path):
    """In a folder that may be there already, if it is empty."""
    for output in (tmp_path / "new" / "parents" / "out", tmp_path / "empty" / "out"):
        with complete_folder(output, 100) as folder:
            (folder / "file").write_text("new")
            assert not (output / "file").exists() and folder.parent == output.parent
        assert contents(output.parent) == {Path("out/file"): b"new"}
        (tmp_path / "empty" / "out").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    ("make", "what"),
    [(filled, "is not empty"), (lambda path: path.write_text("old"), "is not a folder")],
    ids=["folder", "file"],
)
def test_existing_output_and_leftovers(make, what, tmp_path):
    """Refused with nothing touched, as leftovers may be a running conversion's; replaced and cleared on demand."""
    for name in ("out", ".out.incomplete", ".out.replaced"):
        make(tmp_path / name)
    before = contents(tmp_path)
    match = f"out exists and {what}.*--overwrite"
    with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / "out", 100):
        pytest.fail("nothing should be written")
    assert contents(tmp_path) == before
    with complete_folder(tmp_path / "out", 100, overwrite=True) as folder:
        assert not names_in(folder)
        (folder / "new").write_text("new")
        assert (tmp_path / "out").is_file() or contents(tmp_path / "out") == {Path("file"): b"old"}  # until the end
    assert contents(tmp_path) == {Path("out/new"): b"new"}


def test_output_is_a_link(tmp_path):
    """Its target is written, with the temporary folder beside the target."""
    filled(tmp_path / "elsewhere" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "out")
    with complete_folder(tmp_path / "link", 100, overwrite=True) as folder:
        assert folder.parent == (tmp_path / "elsewhere").resolve()
        (folder / "new").write_text("new")
    assert (tmp_path / "link").is_symlink() and names_in(tmp_path / "link") == ["new"]


def test_the_old_output_comes_back_when_renaming_fails(tmp_path, monkeypatch):
    filled(tmp_path / "out")
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".incomplete"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    match = f"out cannot be written: {os.strerror(errno.EIO)}"
    with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / "out", 100, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert contents(tmp_path) == {Path("out/file"): b"old"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/out", "file is a file, not"), ("file/folder/out", "file is a file, not a folder"), ("n" * 300, "")],
)
def test_impossible_outputs(name, reason, tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ConversionError, match=f"cannot be written: .*{reason}"), complete_folder(tmp_path / name, 100):
        pytest.fail("nothing should be written")
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["native", "pax"])
def test_the_source_is_not_replaced(native, pax, kind, tmp_path, monkeypatch):
    """Not by name, not by a link or another spelling, and not the folder around it."""
    source = shutil.copytree(pax if kind == "native" else native, tmp_path / "run" / "source")
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    before = contents(tmp_path)
    for spelling in [source, tmp_path / "link", "."] + [f"file://{source}"] * (kind == "native"):
        for output in (source, tmp_path / "run", tmp_path / "link", "."):
            with pytest.raises(ConversionError, match="holds the checkpoint to convert"):
                convert(kind, spelling, output, overwrite=True)
    assert contents(tmp_path) == before
    convert(kind, source, tmp_path / "run" / "source2")  # only its name begins alike
    convert(kind, source, source / "inside")
    assert before.items() < contents(tmp_path).items()


# --- killed, and no room ----------------------------------------------------------------------------------------------


# Converts, and is killed at the third tensor. argv: source, output.
KILLED = """
import os, signal, sys
from dcformer.conversion import convert_jax_to_safetensors, output

write, written = output.SafetensorsWriter.write, []

def killing(self, name, tensor):
    write(self, name, tensor)
    written.append(name)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

output.SafetensorsWriter.write = killing
convert_jax_to_safetensors(*sys.argv[1:], progress=False)
"""


@pytest.mark.slow
def test_killed_in_the_middle(native, pax, tmp_path):
    """No output, and the next run starts again and finishes."""
    output = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, pax, output], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert names_in(tmp_path) == [".out.incomplete"] and contents(tmp_path / ".out.incomplete")
    convert("native", pax, output)
    assert names_in(tmp_path) == ["out"]
    comparisons = compare_tensors(open_checkpoint(native), open_checkpoint(output), **QUIET)
    assert len(comparisons) == 31 and all(comparison.is_equal for comparison in comparisons)


@pytest.mark.parametrize("kind", ["native", "pax", "maxtext"])
def test_files_may_grow_no_larger(native, pax, kind, tmp_path):
    """A real error of the system, whichever library writes, and nothing is left."""
    resource = pytest.importorskip("resource")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, limits[1]))
    try:
        with pytest.raises(ConversionError, match=f"out failed: {os.strerror(errno.EFBIG)}. Make room"):
            convert(kind, pax if kind == "native" else native, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not names_in(tmp_path)


def test_too_little_room_is_seen_early(native, pax, tmp_path, monkeypatch):
    """Before anything is written, to the byte."""
    size = sum(tensor.nbytes for tensor in load_file(native / "model.safetensors").values())
    usage = shutil.disk_usage(tmp_path)
    refused = pytest.raises(ConversionError, match="will be written: make room")
    for free, ending in ((size - 1, refused), (size, nullcontext())):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with ending:
            convert("native", pax, tmp_path / "out")
        assert names_in(tmp_path) == ["out"] * (free == size)


def tensorstore_error(number):
    return ValueError(f"Error writing local file \"/x\": {os.strerror(number)} [os_error_code='{number}']")


def safetensors_error(number):
    return SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("error", "match"),
    [
        (RuntimeError("a bug"), None),
        (ConversionError("refused"), None),
        (KeyboardInterrupt(), None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), f"out failed: {os.strerror(errno.ENOSPC)}. Make room"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), f"out cannot be written: {os.strerror(errno.EIO)}"),
        (tensorstore_error(errno.EDQUOT), f"out failed: {os.strerror(errno.EDQUOT)}. Make room"),
        (tensorstore_error(errno.EROFS), f"out cannot be written: {os.strerror(errno.EROFS)}"),
        (safetensors_error(errno.ENOSPC), f"out failed: {os.strerror(errno.ENOSPC)}. Make room"),
        (SafetensorError("Error while deserializing header: invalid JSON"), None),
        (DCFormerError(f"a source is damaged: {safetensors_error(errno.EIO)}"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_leave_nothing(error, match, existing, tmp_path):
    """What was there before stays. Errors of the system, from Python or from libraries, are explained."""
    if existing:
        filled(tmp_path / "out")
    kind = ConversionError if match else type(error)
    with pytest.raises(kind, match=match) as raised, complete_folder(tmp_path / "out", 1, overwrite=True) as folder:
        filled(folder / "deep")
        raise error
    assert error is (raised.value.__cause__ if match else raised.value)
    assert contents(tmp_path) == ({Path("out/file"): b"old"} if existing else {})


# --- safetensors files ------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def states(draw):
    """Named tensors of any dtypes and shapes: scalars, empty ones, views that are not contiguous."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.text("abc.01é", min_size=1, max_size=6), unique=True, min_size=1, max_size=8))
    shapes = st.lists(st.sampled_from((0, 1, 2, 3, 7)), max_size=4).map(tuple)
    views = st.sampled_from(
        [torch.Tensor.contiguous, torch.nn.Parameter, lambda t: t.transpose(0, -1) if t.dim() else t]
    )
    state = {}
    for name in names:
        tensor = torch.randn(draw(shapes), generator=generator, dtype=torch.float64)
        state[name] = draw(views)(tensor.to(draw(st.sampled_from(DTYPES))))
    return state


def write_state(folder, state, max_shard_size="5GB", order=None):
    writer = SafetensorsWriter(folder, {name: (t.shape, t.dtype) for name, t in state.items()}, max_shard_size)
    for name in order or state:
        writer.write(name, state[name])
    return writer.close()


def plain(state):
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


@settings(deadline=None, max_examples=150)
@given(state=states(), data=st.data())
def test_the_bytes_of_safetensors(tmp_path_factory, state, data):
    folder = tmp_path_factory.mktemp("one")
    order = data.draw(st.permutations(list(state)))
    assert write_state(folder, state, order=order) == ["model.safetensors"]
    save_file(plain(state), folder / "expected", {"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (folder / "expected").read_bytes()


@settings(deadline=None, max_examples=60)
@given(state=states(), size=st.integers(1, 400))
def test_the_shards_of_the_hub_library(tmp_path_factory, state, size):
    # Without empty tensors: they all lie at address zero, and the library takes them for one under several names.
    state = {name: tensor for name, tensor in state.items() if tensor.numel()}
    assume(state)
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    files = write_state(ours, state, size)
    save_torch_state_dict(plain(state), theirs, max_shard_size=size)
    found, expected = contents(ours), contents(theirs)
    assert files == sorted(str(path) for path in expected if path.suffix == ".safetensors")
    index = Path("model.safetensors.index.json")
    assert (index in found) == (index in expected) == (len(files) > 1)
    assert json.loads(found.pop(index, b"0")) == json.loads(expected.pop(index, b"0"))
    assert found == expected


def test_writer_wants_what_was_announced(tmp_path):
    announced = {"a": (torch.Size([2, 3]), torch.float32), "b": (torch.Size([4]), torch.float16)}
    writer = SafetensorsWriter(tmp_path, announced)
    for tensor in (torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"a: .*announced torch.float32 \[2, 3\], once"):
            writer.write("a", tensor)
    with pytest.raises(KeyError):
        writer.write("c", torch.zeros(1))
    writer.write("a", torch.ones(2, 3))
    with pytest.raises(ValueError, match="once"):
        writer.write("a", torch.zeros(2, 3))
    with pytest.raises(ConversionError, match=r"1 tensors were not written: \['b'\]"):
        writer.close()


def test_shard_sizes_that_are_text(tmp_path):
    for size in ("much", "5XB", ""):
        with pytest.raises(ConversionError, match="is not understood"):
            SafetensorsWriter(tmp_path, {"a": (torch.Size([2]), torch.float32)}, size)
    assert not names_in(tmp_path)
    assert len(write_state(tmp_path, {name: torch.ones(10) for name in "abc"}, "40")) == 3


# --- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(native, tmp_path):
    """A copy of the model whose tensor `name` holds `value` at its end."""

    def make(name, value):
        folder = shutil.copytree(native, tmp_path / "damaged")
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[-1] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(("name", "value"), [(Q_PROJ, np.nan), ("model.norm.weight", -np.inf)])
def test_nonfinite_values(damaged, name, value, tmp_path):
    """Refused with the name of the tensor, and kept on demand, on the way to JAX and on the way back."""
    match = rf"{name} holds 1 values that are NaN or infinite as float32, of \d+: .*--allow-nonfinite"
    source = damaged(name, value)
    for kind, start, output in (("pax", source, "pax"), ("native", tmp_path / "pax", "back")):
        with pytest.raises(ConversionError, match=match):
            convert(kind, start, tmp_path / "refused")
        report = convert(kind, start, tmp_path / output, allow_nonfinite=True)
        assert f"{name} holds 1 values that are NaN or infinite" in str(report)
    assert names_in(tmp_path) == ["back", "damaged", "pax"]
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("value", "dtype"), [(3.4e38, "bfloat16"), (-7e4, "float16")])
def test_values_that_a_narrower_dtype_cannot_hold(damaged, value, dtype, tmp_path):
    source = damaged(Q_PROJ, value)
    convert("pax", source, tmp_path / "pax")
    for kind, start, name in (("pax", source, r"query\.w"), ("native", tmp_path / "pax", Q_PROJ)):
        with pytest.raises(ConversionError, match=rf"{name} holds 1 values that are NaN or infinite as {dtype}"):
            convert(kind, start, tmp_path / "out", dtype=dtype)
    assert names_in(tmp_path) == ["damaged", "pax"]
