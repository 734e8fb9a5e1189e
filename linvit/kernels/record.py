"""Whether the Triton kernels have passed their check on a GPU of this machine: `linvit check-gpu` writes a record.

A record holds for one kind of GPU, these kernels, and these versions of torch and Triton.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

FOLDER = "LINVIT_RECORDS"
_decided: bool | None = None


@contextmanager
def trusted(decision: bool) -> Iterator[None]:
    """A context in which backend="auto" uses the Triton kernels, or not, whatever the records say: for comparisons."""
    global _decided
    before, _decided = _decided, decision
    try:
        yield
    finally:
        _decided = before


@torch.compiler.assume_constant_result
def passed(device: torch.device) -> bool:
    """Whether the kernels have passed on this GPU."""
    return _passed(device.index or 0) if _decided is None else _decided


@cache
def _passed(index: int) -> bool:
    try:
        record = json.loads(path(about(index)).read_text())
    except (OSError, ValueError, PackageNotFoundError):
        return False
    return isinstance(record, dict) and record.get("passed") is True and record.get("about") == about(index)


def forget() -> None:
    """Reads the records again."""
    _passed.cache_clear()


def about(index: int = 0) -> dict[str, str]:
    """What a record holds for: GPU, its compute capability, versions, and a digest of the kernels."""
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "gpu": torch.cuda.get_device_name(index),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "kernels": digest(),
    }


@cache
def digest() -> str:
    """SHA-256 of the source of the kernels."""
    whole = sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def path(about: Mapping[str, str]) -> Path:
    """The file of a record, in the user's cache or the folder named by the environment variable LINVIT_RECORDS."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER) or home / "linvit" / "gpus")
    name = re.sub(r"[^\w.-]+", "-", about["gpu"])
    key = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return folder / f"{name}-{key[:12]}.json"
