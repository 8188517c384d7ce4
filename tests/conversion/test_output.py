"""What is written appears complete or not at all, and safetensors files are what safetensors itself writes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import randomise, tiny_config
from huggingface_hub import save_torch_state_dict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
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

pytest.importorskip("tensorstore", reason="JAX checkpoints need tensorstore: pip install 'dcformer[jax]'")

QUIET = {"progress": False}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "native"
    randomise(DCFormerForCausalLM(tiny_config())).save_pretrained(folder)
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
    output = tmp_path / "new" / "parents" / "out"
    with complete_folder(output, 100) as folder:
        (folder / "file").write_text("new")
        assert not output.exists() and folder.parent == output.parent
    assert (output / "file").read_text() == "new"
    assert names_in(output.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("no"), ConversionError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_an_exception_leaves_nothing(error, existing, tmp_path):
    output = tmp_path / "out"
    if existing:
        filled(output)
    with pytest.raises(type(error)) as raised, complete_folder(output, 100, overwrite=True) as folder:
        filled(folder / "deep")
        raise error
    assert raised.value is error
    assert names_in(tmp_path) == (["out"] if existing else [])
    assert not existing or contents(output) == {Path("file"): b"old"}


def test_existing_output(tmp_path):
    (tmp_path / "file").write_text("old")
    filled(tmp_path / "folder")
    for name in ("file", "folder"):
        before = contents(tmp_path)
        match = f"{name} exists and is not empty.*--overwrite"
        with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / name, 100):
            pytest.fail("nothing should be written")
        assert contents(tmp_path) == before
        with complete_folder(tmp_path / name, 100, overwrite=True) as folder:
            (folder / "other").write_text("new")
            assert contents(tmp_path / "folder") or name == "folder"  # the old one stays until the end
        assert contents(tmp_path / name) == {Path("other"): b"new"}
    assert names_in(tmp_path) == ["file", "folder"]


def test_an_empty_folder_is_no_output(tmp_path):
    (tmp_path / "out").mkdir()
    with complete_folder(tmp_path / "out", 100) as folder:
        (folder / "file").write_text("new")
    assert contents(tmp_path / "out") == {Path("file"): b"new"}


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("state", ["incomplete", "replaced"])
def test_leftovers_of_a_killed_run(kind, state, tmp_path):
    """They are cleared away, and nothing of them gets into the output."""
    leftover = tmp_path / f".out.{state}"
    if kind == "folder":
        filled(leftover / "deep")
    else:
        leftover.write_text("old")
    filled(tmp_path / "out")
    with complete_folder(tmp_path / "out", 100, overwrite=True) as folder:
        assert not names_in(folder)
        (folder / "new").write_text("new")
    assert names_in(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == {Path("new"): b"new"}


def test_a_refused_output_touches_no_leftovers(tmp_path):
    """They may be those of a conversion that is running."""
    filled(tmp_path / "out")
    filled(tmp_path / ".out.incomplete")
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match="exists"), complete_folder(tmp_path / "out", 100):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("target", ["filled", "empty", "absent"])
def test_output_is_a_link(target, tmp_path):
    """What it points to is written, there and not beside the link."""
    (tmp_path / "elsewhere").mkdir()
    if target != "absent":
        (tmp_path / "elsewhere" / "out").mkdir()
    if target == "filled":
        (tmp_path / "elsewhere" / "out" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "out")
    with complete_folder(tmp_path / "link", 100, overwrite=target == "filled") as folder:
        assert folder.parent == (tmp_path / "elsewhere").resolve()
        (folder / "new").write_text("new")
    assert (tmp_path / "link").is_symlink() and names_in(tmp_path / "link") == ["new"]
    assert names_in(tmp_path) == ["elsewhere", "link"] and names_in(tmp_path / "elsewhere") == ["out"]


def test_the_old_output_comes_back_when_renaming_fails(tmp_path, monkeypatch):
    filled(tmp_path / "out")
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".incomplete"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    match = "out cannot be written: Input/output error"
    with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / "out", 100, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert names_in(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == {Path("file"): b"old"}


@pytest.mark.parametrize("name", ["file/out", "n" * 300])
def test_impossible_outputs(name, tmp_path):
    (tmp_path / "file").write_text("old")
    match = r"cannot be written: (File exists|Not a directory|File name too long)"
    with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / name, 100):
        pytest.fail("nothing should be written")
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["native", "pax"])
def test_the_source_is_not_replaced(native, pax, kind, tmp_path, monkeypatch):
    """Not by name, not by a link or another spelling, and not the folder around it."""
    source = shutil.copytree(pax if kind == "native" else native, tmp_path / "run" / "source")
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    before = contents(tmp_path)
    for output in (source, tmp_path / "run", tmp_path / "link", ".", source / ".." / "source"):
        for spelling in (source, tmp_path / "link", "."):
            with pytest.raises(ConversionError, match="holds the checkpoint that is converted"):
                convert(kind, spelling, output, overwrite=True)
    assert contents(tmp_path) == before
    if kind == "native":
        with pytest.raises(ConversionError, match="holds the checkpoint that is converted"):
            convert(kind, f"file://{source}", tmp_path / "run", overwrite=True)
    convert(kind, source, tmp_path / "run" / "source2")  # only its name begins alike
    convert(kind, source, source / "inside")
    assert before.items() < contents(tmp_path).items()


# --- killed, and no room ----------------------------------------------------------------------------------------------


# Runs conversions each in a process of its own, forked from one that has imported everything: argv is a folder, and
# per conversion what happens to it, what it writes and from what. Prints how each ended.
DRIVER = """
import contextlib, os, resource, signal, sys
import orbax.checkpoint
import dcformer.conversion.convert
from dcformer.conversion.cli import main

class KilledAtTheThird:
    def __init__(self, **options):
        self.count = 0
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def update(self, nbytes):
        self.count += 1
        if self.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

for word in sys.argv[2:]:
    what, kind, source = word.split(",")
    child = os.fork()
    if not child:
        folder = f"{sys.argv[1]}/{what}-{kind}"
        os.mkdir(folder)
        if what == "kill":
            dcformer.conversion.convert.tqdm = KilledAtTheThird
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
        command = ["jax-to-safetensors", "--checkpoint", source]
        if kind != "native":
            command = ["safetensors-to-jax", "--model", source, "--format", kind.removesuffix("+ocdbt")]
            command += ["--ocdbt"] if kind.endswith("+ocdbt") else []
        with open(f"{folder}.err", "w") as err, contextlib.redirect_stderr(err):
            status = main([*command, "--output", f"{folder}/out"])
        os._exit(status)
    print(word, os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def ended(native, pax, tmp_path_factory):
    """(folder, {"kill-native": how it ended, ...}) of conversions that were killed or ran out of room."""
    pytest.importorskip("orbax.checkpoint", reason="writing Orbax checkpoints needs pip install 'dcformer[jax]'")
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    folder = tmp_path_factory.mktemp("ended")
    kinds = {"native": pax, "pax": native, "maxtext": native, "maxtext+ocdbt": native}
    words = [f"{what},{kind},{source}" for what in ("kill", "limit") for kind, source in kinds.items()]
    command = [sys.executable, "-c", DRIVER, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    statuses = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.split(",")[0] in ("kill", "limit"))
    return folder, {"-".join(word.split(",")[:2]): int(status) for word, status in statuses.items()}


@pytest.mark.parametrize("kind", ["native", "pax", "maxtext"])
def test_killed_in_the_middle(native, pax, ended, kind):
    """No output, and the next run starts anew and finishes."""
    folder, statuses = ended
    assert os.WTERMSIG(statuses[f"kill-{kind}"]) == signal.SIGKILL
    folder /= f"kill-{kind}"
    assert names_in(folder) == [".out.incomplete"]
    assert contents(folder / ".out.incomplete")  # it had begun
    convert(kind, pax if kind == "native" else native, folder / "out")
    assert names_in(folder) == ["out"]
    comparisons = compare_tensors(open_checkpoint(native), open_checkpoint(folder / "out"), **QUIET)
    assert len(comparisons) == 31 and all(comparison.is_equal for comparison in comparisons)


@pytest.mark.parametrize("kind", ["native", "pax", "maxtext", "maxtext+ocdbt"])
def test_files_may_grow_no_larger(ended, kind):
    """A real error of the system while writing, whoever writes: an error message, and nothing is left."""
    folder, statuses = ended
    error = (folder / f"limit-{kind}.err").read_text()
    assert os.waitstatus_to_exitcode(statuses[f"limit-{kind}"]) == 1, error
    assert "out failed: File too large. Make room" in error and "Traceback" not in error
    assert not names_in(folder / f"limit-{kind}")


@pytest.mark.parametrize("kind", ["native", "pax", "maxtext"])
def test_too_little_room_is_seen_early(native, pax, kind, tmp_path, monkeypatch):
    """Before anything is written, to the byte."""
    source = pax if kind == "native" else native
    size = sum(tensor.nbytes for tensor in load_file(native / "model.safetensors").values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(ConversionError, match=r"GB free, .* GB will be written: make room"):
        convert(kind, source, tmp_path / "out")
    assert not names_in(tmp_path)
    if kind != "maxtext":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
        convert(kind, source, tmp_path / "out")
        assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("number", "match"),
    [
        (errno.ENOSPC, "out failed: No space left on device. Make room"),
        (errno.EDQUOT, "out failed: Disk quota exceeded. Make room"),
        (errno.EROFS, "out cannot be written: Read-only file system"),
        (errno.EIO, "out cannot be written: Input/output error"),
    ],
)
@pytest.mark.parametrize("raised_by", ["python", "tensorstore"])
def test_errors_of_the_system(pax, native, number, match, raised_by, tmp_path, monkeypatch):
    """In the middle of writing; what was there before stays."""
    if raised_by == "python":
        error = OSError(number, os.strerror(number))
        write, kind = SafetensorsWriter.write, "native"

        def failing(self, name, tensor):
            if name == Q_PROJ:
                raise error
            write(self, name, tensor)

        monkeypatch.setattr(SafetensorsWriter, "write", failing)
    else:
        error = ValueError(f"Error writing local file \"/x\": {os.strerror(number)} [os_error_code='{number}']")
        kind = "pax"

        def failing(folder, arrays, progress):
            filled(folder)
            raise error

        monkeypatch.setattr("dcformer.conversion.convert.write_pax", failing)
    filled(tmp_path / "out")
    with pytest.raises(ConversionError, match=match) as raised:
        convert(kind, pax if kind == "native" else native, tmp_path / "out", overwrite=True)
    assert raised.value.__cause__ is error
    assert names_in(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == {Path("file"): b"old"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_device(tmp_path):
    match = "No space left on device"
    with pytest.raises(ConversionError, match=match), complete_folder(tmp_path / "out", 100) as folder:
        (folder / "file").symlink_to("/dev/full")
        (folder / "file").write_text("x")
    assert not names_in(tmp_path)


# --- safetensors files ------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def states(draw, lengths=(0, 1, 2, 3, 7)):
    """Named tensors of any dtypes and shapes: scalars, empty ones, views that are not contiguous."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.text("abc.01é", min_size=1, max_size=6), unique=True, min_size=1, max_size=8))
    shapes = st.lists(st.sampled_from(lengths), max_size=4).map(tuple)
    state = {}
    for name in names:
        tensor = torch.randn(draw(shapes), generator=generator, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))
        view = draw(st.sampled_from(["contiguous", "transposed", "strided", "parameter"]))
        if view == "transposed":
            tensor = tensor.mT if tensor.dim() > 1 else tensor
        elif view == "strided" and tensor.dim():
            tensor = torch.stack([tensor, tensor], dim=-1)[..., 1]
        elif view == "parameter":
            tensor = torch.nn.Parameter(tensor)
        state[name] = tensor
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
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(state)
    for name, tensor in plain(state).items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_file(plain(state), folder / "expected", {"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (folder / "expected").read_bytes()
    shutil.rmtree(folder)


@settings(deadline=None, max_examples=60)
@given(state=states(lengths=(1, 2, 3, 7)), size=st.integers(1, 400), data=st.data())
def test_the_shards_of_the_hub_library(tmp_path_factory, state, size, data):
    """Without empty tensors, which it takes for one tensor under several names, as they all lie at address zero."""
    assume(all(tensor.numel() for tensor in state.values()))  # to the library, all empty ones share their storage
    folder = tmp_path_factory.mktemp("shards")
    (folder / "ours").mkdir()
    (folder / "theirs").mkdir()
    order = data.draw(st.permutations(list(state)))
    files = write_state(folder / "ours", state, size, order)
    save_torch_state_dict(plain(state), folder / "theirs", max_shard_size=size)
    expected = contents(folder / "theirs")
    assert files == sorted(str(path) for path in expected if path.suffix == ".safetensors")
    found = contents(folder / "ours")
    index = Path("model.safetensors.index.json")
    assert set(found) == set(expected) and (index in found) == (len(files) > 1)
    if index in found:
        assert json.loads(found.pop(index)) == json.loads(expected.pop(index))
    assert found == expected
    shutil.rmtree(folder)


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


@pytest.mark.parametrize("size", ["much", "5XB", ""])
def test_bad_shard_sizes(size, tmp_path):
    with pytest.raises(ConversionError, match="is not understood"):
        SafetensorsWriter(tmp_path, {"a": (torch.Size([2]), torch.float32)}, size)
    assert not names_in(tmp_path)


def test_a_size_in_bytes_may_be_text(tmp_path):
    state = {name: torch.ones(10) for name in "abc"}
    assert len(write_state(tmp_path, state, "40")) == 3


# --- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(native, tmp_path_factory):
    """A copy of the model whose tensor `name` holds `value` at its end."""

    def make(name, value):
        folder = shutil.copytree(native, tmp_path_factory.mktemp("damaged") / "native")
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[-1] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.layers.0.self_attn.compose.qkw"])
def test_nonfinite_values(damaged, name, value, tmp_path):
    """Refused with the name of the tensor, and kept on demand, on the way to JAX and on the way back."""
    match = rf"{name} holds 1 values that are NaN or infinite as float32, of \d+: .*--allow-nonfinite"
    source = damaged(name, value)
    with pytest.raises(ConversionError, match=match):
        convert("pax", source, tmp_path / "refused")
    report = convert("pax", source, tmp_path / "pax", allow_nonfinite=True)
    assert f"{name} holds 1 values that are NaN or infinite" in str(report)
    with pytest.raises(ConversionError, match=match):
        convert("native", tmp_path / "pax", tmp_path / "refused")
    report = convert("native", tmp_path / "pax", tmp_path / "back", allow_nonfinite=True)
    assert f"{name} holds 1 values that are NaN or infinite" in str(report)
    assert names_in(tmp_path) == ["back", "pax"]
    found = load_file(tmp_path / "back" / "model.safetensors")
    for tensor, expected in load_file(source / "model.safetensors").items():
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=0, equal_nan=True)
    np.testing.assert_equal(float(found[name].view(-1)[-1]), value)


def test_nonfinite_values_in_a_layer_norm(tmp_path):
    """They need no wider dtype, and are not reported as rounded."""
    model = DCFormerForCausalLM(tiny_config(norm_type="layernorm"))
    with torch.no_grad():
        model.model.norm.weight[:3] = torch.tensor([np.nan, np.inf, -np.inf])
    model.save_pretrained(tmp_path / "native")
    report = str(convert("pax", tmp_path / "native", tmp_path / "pax", allow_nonfinite=True))
    assert "model.norm.weight holds 3 values that are NaN or infinite" in report
    assert "scale - 1" not in report
    convert("native", tmp_path / "pax", tmp_path / "back", allow_nonfinite=True)
    found = load_file(tmp_path / "back" / "model.safetensors")["model.norm.weight"]
    torch.testing.assert_close(found, model.model.norm.weight.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("value", "dtype"), [(1e6, "float16"), (3.4e38, "bfloat16"), (-7e4, "float16")])
def test_values_that_a_narrower_dtype_cannot_hold(damaged, value, dtype, tmp_path):
    source = damaged(Q_PROJ, value)
    with pytest.raises(ConversionError, match=rf"query\.w holds 1 values that are NaN or infinite as {dtype}"):
        convert("pax", source, tmp_path / "out", dtype=dtype)
    convert("pax", source, tmp_path / "pax")
    with pytest.raises(ConversionError, match=rf"{Q_PROJ} holds 1 values that are NaN or infinite as {dtype}"):
        convert("native", tmp_path / "pax", tmp_path / "out", dtype=dtype)
    assert names_in(tmp_path) == ["pax"]
