"""Files and folders that appear whole or not at all: they are written as a hidden neighbour, which is then renamed."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A file to write, which becomes `path` at the end if no error occurred; otherwise it is removed.

    Processes that write the same file do not disturb each other: the last one's stays.

    Args:
        path: in a folder that exists. A file that is there is replaced, and hands its permissions on.

    Yields:
        the file to write, `.<name>.<any>.tmp` in the same folder. It does not exist yet.

    Raises:
        OSError: when it cannot become `path`, as where that is a folder.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield unfinished
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end if no error occurred; otherwise it is removed.

    What is at `path` already, a file or a folder, is replaced then; it is briefly `.<name>.replaced`. A killed process
    leaves the hidden neighbours behind; the next one with the same `path` removes them.

    Args:
        path: the folder; those above it are made.

    Yields:
        the folder to write into, `.<name>.incomplete`, empty.

    Raises:
        OSError: when it cannot be made or renamed. What was there is there again.
    """
    target = Path(path)
    unfinished, aside = (target.with_name(f".{target.name}.{state}") for state in ("incomplete", "replaced"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
        unfinished.mkdir()
        yield unfinished
        if target.exists():
            _remove(aside)
            target.rename(aside)
            try:
                unfinished.rename(target)
            except BaseException:
                aside.rename(target)
                raise
        else:
            unfinished.rename(target)
        _remove(aside)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


__all__ = ["whole_file", "whole_folder"]
