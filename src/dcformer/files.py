"""Files and folders that appear whole or not at all: they are written as a hidden neighbor, which is then renamed."""

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not a Unix: there folders are not locked
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".unfinished"  # in a folder that may be continued: what it is made from, then its writer's own lines
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # names of `whole_file`
_NUMBER = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)")  # TensorStore's text, and that of safetensors
_CUT_SHORT = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed|iostream error")  # torch's: no number


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A file to write, which becomes `path` at the end if no error occurred; otherwise it is removed.

    Processes that write the same file do not disturb each other: the last one's stays.

    Args:
        path: in a folder that exists. An existing file is replaced, and hands its permissions on; else the umask gives
            them, though safetensors 0.8 makes files for their owner only.

    Yields:
        the file to write, `.<name>.<any>.tmp` in the same folder. It does not exist yet.

    Raises:
        OSError: when it cannot become `path`, as where that is a folder.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        unfinished.touch()
        usual = unfinished.stat().st_mode
        unfinished.unlink()
        yield unfinished
        mode = stat.S_IMODE(target.stat().st_mode if target.exists() else usual)
        if stat.S_IMODE(unfinished.stat().st_mode) != mode:  # not all file systems can
            unfinished.chmod(mode)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a file of text in UTF-8, whole or not at all; the folders above it are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def what_is_in_the_way(path: str | os.PathLike) -> str | None:
    """Why a new folder cannot be made at a path, after "exists and"; None where nothing is, or an empty folder."""
    if os.path.isdir(path):
        return "is not empty" if os.listdir(path) else None
    return "is not a folder" if os.path.exists(path) else None


def lacks_room(error: Exception) -> bool:
    """Whether writing failed for want of room, as far as it says so: a full disk, or a limit."""
    return _error_number(error) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or _is_cut_short(error)


def why_not_written(error: Exception) -> str | None:
    """Why writing failed: the system's reason, or the file that is where a folder has to be, which that leaves out.

    None for an error that is not of a system: a bug. Libraries have errors of their own for those of the system.
    """
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:
        place = Path(error.filename)
        for above in (place, *place.parents):
            if above.is_file():
                return f"{above} is a file, not a folder"
    if isinstance(error, OSError):
        return error.strerror
    if _is_cut_short(error):
        return "a file could not be written to its end"
    number = _error_number(error)
    return None if number is None else os.strerror(number)


def _error_number(error: Exception) -> int | None:
    """The system's number of an error, which some libraries put into their text."""
    if isinstance(error, OSError):
        return error.errno
    match = _NUMBER.search(str(error))
    return int(match[1] or match[2]) if match else None


def _is_cut_short(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and _CUT_SHORT.search(str(error)) is not None


def strict_json(value: Any) -> str:
    """A file of JSON, which has no NaN and no infinity: null stands for them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=1, allow_nan=False) + "\n"


def states_of(files: Iterable[Path]) -> list[list[Any]]:
    """Name, size and time of the last change of those that are files, in order: what tells large ones apart."""
    found = [(file.name, file.stat()) for file in sorted(files) if file.is_file()]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in found]


@contextmanager
def whole_folder(path: str | os.PathLike, made_from: str | None = None) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end if no error occurred; otherwise it is removed.

    What is at `path` already, a file or a folder, is replaced then; it is briefly `.<name>.replaced`. A killed process
    leaves the hidden neighbors behind; the next one with the same `path` removes them. One that still writes keeps
    them locked, and others out. Files of safetensors get the permissions of the umask, as in `whole_file`.

    Args:
        path: the folder; those above it are made.
        made_from: one line that says what the content is made from. With it, an interrupted or killed process leaves
            what it has written, and the next one with the same line gets it to go on.

    Yields:
        the folder to write into, `.<name>.incomplete`: empty, but for the file `UNFINISHED` with the line `made_from`
        where that is given; or with what was written before, without the temporary files of `whole_file`.

    Raises:
        BlockingIOError: while another process, or thread, writes a folder for the same `path`.
        OSError: when it cannot be made or renamed. The former folder is then back in place.
    """
    target = Path(path)
    work, aside = (target.with_name(f".{target.name}.{state}") for state in ("incomplete", "replaced"))
    record, started = work / UNFINISHED, f"{made_from}\n".encode()
    with locked_folder(work):
        stays = False  # or it has become `path`
        try:
            if made_from is None or not (record.is_file() and record.read_bytes().startswith(started)):
                for child in work.iterdir():
                    _remove(child)
                if made_from is not None:
                    record.write_bytes(started)
            for child in work.rglob("*.tmp"):
                if _TEMPORARY.fullmatch(child.name):  # of a killed process: nobody else writes here
                    _remove(child)
            yield work
            record.unlink(missing_ok=True)
            usual = work.stat().st_mode & 0o666
            for file in work.rglob("*.safetensors"):
                if not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o600 != usual:
                    file.chmod(usual)
            if target.exists():
                _remove(aside)
                target.rename(aside)
                try:
                    work.rename(target)
                except BaseException:
                    aside.rename(target)
                    raise
            else:
                work.rename(target)
            stays = True  # what is there now is another writer's
            _remove(aside)
        except KeyboardInterrupt:
            stays = stays or made_from is not None
            raise
        finally:
            if not stays:
                shutil.rmtree(work, ignore_errors=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Makes a folder, or takes one that was left behind, and keeps other processes, and threads, out of it.

    Raises:
        BlockingIOError: while another one has it.
        OSError: when it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    held = _make_and_lock(folder)
    try:
        yield
    finally:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # forked children have it open, too
            os.close(held)


def _make_and_lock(folder: Path) -> int | None:
    """Makes a folder, or takes one that was left behind, and locks it until what is returned is closed.

    Raises:
        BlockingIOError: when somebody else has locked it.
    """
    while True:
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir(exist_ok=True)
        if fcntl is None:
            return None
        try:
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # it has become somebody's output in between
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(os.fstat(held), folder.stat()):
                return held
        except OSError as error:
            os.close(held)
            if error.errno in (errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                return None
            if isinstance(error, BlockingIOError):
                raise BlockingIOError("another process is writing it: wait until it ends, or name another.") from error
            raise
        os.close(held)


def _remove(path: Path) -> None:
    """Removes a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


__all__ = [
    "UNFINISHED",
    "lacks_room",
    "locked_folder",
    "what_is_in_the_way",
    "whole_file",
    "whole_folder",
    "why_not_written",
    "write_whole",
]
