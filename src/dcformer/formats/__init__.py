"""Checkpoint formats, one module each, and their list. CONTRIBUTING.md explains how to add one."""

from .base import ArrayFormat, FolderFormat, Format
from .hub import HubFormat
from .maxtext import MaxTextFormat
from .native import NativeFormat
from .pax import PaxFormat

NATIVE, HUB = NativeFormat(), HubFormat()
FORMATS: dict[str, Format] = {format.name: format for format in (NATIVE, HUB, MaxTextFormat(), PaxFormat())}


def folder_formats() -> list[FolderFormat]:
    """The formats of model folders."""
    return [format for format in FORMATS.values() if isinstance(format, FolderFormat)]


def array_formats() -> list[ArrayFormat]:
    """The formats of zarr arrays."""
    return [format for format in FORMATS.values() if isinstance(format, ArrayFormat)]


__all__ = ["FORMATS", "HUB", "NATIVE", "ArrayFormat", "FolderFormat", "Format", "array_formats", "folder_formats"]
