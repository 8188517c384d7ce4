"""Files and folders appear whole or not at all."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file

from dcformer.files import lacks_room, whole_file, whole_folder, why_not_written


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [None, "old"], ids=["new", "replaced"])
def test_a_file_is_whole_or_as_it_was(before, tmp_path):
    path = tmp_path / "file.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert names_in(tmp_path) == ([] if before is None else ["file.json"])
    assert before is None or path.read_text() == before
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
        assert path.exists() == (before is not None) and unfinished.name.startswith(".file.json.")
    assert path.read_text() == "new" and names_in(tmp_path) == ["file.json"]


def test_a_file_hands_its_permissions_on(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077], ids=oct)
def test_permissions_are_those_of_the_umask(tmp_path, umask):
    """Of files that a library makes for their owner only, too."""
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "file") as unfinished:
            save_file({"a": torch.ones(1)}, unfinished)
        with whole_folder(tmp_path / "out") as unfinished:
            (unfinished / "inner").mkdir()
            save_file({"a": torch.ones(1)}, unfinished / "inner" / "file.safetensors")
            (unfinished / "program").touch(0o700)
            (unfinished / "secret").touch(0o600)
            (tmp_path / "other").touch(0o600)
            (unfinished / "link.safetensors").symlink_to(tmp_path / "other")
    finally:
        os.umask(before)
    for path in (tmp_path / "file", tmp_path / "out" / "inner" / "file.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    for path in (tmp_path / "out", tmp_path / "out" / "inner"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    kept = {"out/program": 0o700, "out/secret": 0o600, "other": 0o600}
    assert {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in kept} == kept


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError), whole_file(tmp_path / "taken") as unfinished:
        unfinished.write_text("new")
    assert names_in(tmp_path) == ["taken"] and names_in(tmp_path / "taken") == ["inside"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path, barrier = tmp_path / "file", threading.Barrier(2, timeout=20)

    def write(letter):
        with whole_file(path) as unfinished:
            barrier.wait()  # both have begun
            unfinished.write_text(letter * 1000)
            barrier.wait()  # both have written

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 1000, "b" * 1000) and names_in(tmp_path) == ["file"]


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    """The other cases are those of conversions: tests/conversion/test_output.py."""
    path = tmp_path / "above" / "out"
    with pytest.raises(KeyboardInterrupt), whole_folder(path) as unfinished:
        (unfinished / "file").write_text("half")
        raise KeyboardInterrupt
    assert names_in(tmp_path / "above") == []
    for text in ("new", "newer"):
        with whole_folder(path) as unfinished:
            assert names_in(unfinished) == []
            (unfinished / "file").write_text(text)
        assert names_in(tmp_path / "above") == ["out"] and (path / "file").read_text() == text


def test_one_process_writes_a_folder(tmp_path, monkeypatch):
    """Others are kept out, in threads too; the lock goes with the process."""
    path = tmp_path / "out"
    with whole_folder(path) as unfinished:
        (unfinished / "file").write_text("first")
        with pytest.raises(BlockingIOError), whole_folder(path):
            pytest.fail("two write the same folder")
        assert names_in(unfinished) == ["file"]
    assert names_in(tmp_path) == ["out"] and (path / "file").read_text() == "first"
    monkeypatch.setattr("dcformer.files._remove", lambda removed: removed.name.endswith("replaced") and begin(removed))
    others = []

    def begin(removed):
        """Another writer, while the first one removes the former folder."""
        if removed.exists():
            others.append(whole_folder(path))
            (others[0].__enter__() / "file").write_text("other")

    with whole_folder(path) as unfinished:
        (unfinished / "file").write_text("more")
    monkeypatch.undo()
    others[0].__exit__(None, None, None)
    assert (path / "file").read_text() == "other" and names_in(tmp_path) == ["out"]
    killed = "import os, sys; from dcformer.files import whole_folder\nwith whole_folder(sys.argv[1]): os._exit(1)"
    subprocess.run([sys.executable, "-c", killed, path], check=False)
    assert names_in(tmp_path) == [".out.incomplete", "out"]
    with whole_folder(path) as unfinished:
        (unfinished / "file").write_text("second")
    assert names_in(tmp_path) == ["out"] and (path / "file").read_text() == "second"


def test_temporary_files_of_a_killed_process_do_not_stay(tmp_path):
    """In a folder that is continued; others' files do."""
    path = tmp_path / "out"
    killed = """import os, sys
from dcformer.files import whole_file, whole_folder
with whole_folder(sys.argv[1], "this") as folder, whole_file(folder / "plan.json") as unfinished:
    unfinished.write_text("half")
    (folder / ".own.tmp").write_text("")
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", killed, path], check=False)
    assert len(names_in(tmp_path / ".out.incomplete")) == 3
    with whole_folder(path, "this") as unfinished:
        assert names_in(unfinished) == [".own.tmp", ".unfinished"]
    assert names_in(path) == [".own.tmp"]


def test_errors_of_the_system_are_known_by_any_name(tmp_path):
    """Of libraries, which have errors of their own; and what is none keeps its traceback."""
    resource = pytest.importorskip("resource")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, limits[1]))
    writers = [
        lambda path: path.write_text("a" * 5000),
        lambda path: save_file({"a": torch.ones(2000)}, path),
        lambda path: torch.save(torch.ones(2000), path),
    ]
    errors = []
    try:
        for i, write in enumerate(writers):
            with pytest.raises(Exception) as raised:  # each has its own
                write(tmp_path / str(i))
            errors.append(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    reasons = [os.strerror(errno.EFBIG)] * 2 + ["a file could not be written to its end"]  # torch does not say why
    assert [why_not_written(error) for error in errors] == reasons and all(map(lacks_room, errors))
    readonly = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert why_not_written(readonly) == os.strerror(errno.EROFS) and not lacks_room(readonly)
    late = RuntimeError("basic_ios::clear: iostream error")  # torch's, where closing is what fails
    assert why_not_written(late) == reasons[-1] and lacks_room(late)
    bug = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert why_not_written(bug) is None and not lacks_room(bug)
