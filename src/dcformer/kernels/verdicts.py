"""Where the kernels keep what they found out about this machine, and the verdicts of the self-check there.

A verdict is a file of its own, named by a hash of what it depends on: processes do not get in each other's way.
"""

import hashlib
import json
import os
import re
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..files import write_whole

logger = logging.get_logger(__name__)


def cache_folder() -> Path:
    """DCFORMER_CACHE, or `dcformer` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache).

    Without a home folder (a container's user that the system does not know) it is one for that user among temporary
    files.
    """
    folder = os.environ.get("DCFORMER_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "dcformer")
    folder = os.path.expanduser(folder)  # as it is where there is no such user
    if folder.startswith("~"):
        folder = os.path.join(tempfile.gettempdir(), f"dcformer-{os.getuid()}")
    return Path(folder)


def machine(device: torch.device) -> dict[str, str]:
    """What decides whether kernels run right, besides their arguments: the device, its driver and all versions."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": _version("triton"),
        "dcformer": f"{_version('dcformer')} {_sources()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"


@cache
def _driver() -> str:
    """Version of the NVIDIA driver, and of the CUDA that it brings, as far as they can be found."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    cuda = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
    return f"{found[0] if found else 'unknown'}, CUDA {cuda}"


@cache
def _sources() -> str:
    """A digest of the kernels and of what defines them: a version number alone says little about a checkout."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.rglob("*.py"), *here.parent.glob("*_dcformer.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def verdict_file(on: dict[str, str], kind: dict[str, Any]) -> Path:
    """Where the verdict on kernels of a kind on a machine is kept."""
    key = json.dumps([on, kind], sort_keys=True)
    return cache_folder() / "selfcheck" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def kept_verdict(on: dict[str, str], kind: dict[str, Any]) -> tuple[bool, str] | None:
    """Whether the check has passed, and what it said; None where nothing readable is kept."""
    try:
        content = json.loads(verdict_file(on, kind).read_text(encoding="utf-8"))
        passed, summary = content["passed"], content["summary"]
        if type(passed) is not bool or type(summary) is not str or (content["machine"], content["kind"]) != (on, kind):
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return passed, summary


def keep_verdict(on: dict[str, str], kind: dict[str, Any], passed: bool, summary: str) -> None:
    """Keeps a verdict, if the folder can be written; otherwise the next process checks again."""
    path = verdict_file(on, kind)
    content = {"passed": passed, "summary": summary, "machine": on, "kind": kind}
    try:
        write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        logger.info(f"the verdict of the self-check is not kept, {path} cannot be written: {error}")


__all__ = ["cache_folder", "keep_verdict", "kept_verdict", "machine", "verdict_file"]
