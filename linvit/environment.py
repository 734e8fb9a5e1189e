"""Where a run was made (versions, commit, devices, command; an entry for each start), and how processes start."""

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from linvit.files import write_json

PACKAGES = ("linvit", "torch", "torchvision", "timm", "lightning", "torchmetrics", "numpy", "pillow")

_rows = 1


def forks_of(*modules: str) -> BaseContext:
    """The way to start processes: each forked from one that has imported the modules, once for all of them.

    Where processes cannot be forked (Windows), each imports what it needs.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the new process inherits: Ctrl-C is for this one
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, handler)
    first = context.Process(target=int)  # so that Ctrl-C while the modules are imported meets nothing half begun
    first.start()
    first.join()
    return context


def end_with_parent() -> None:
    """Makes this process end when the one that started it does, also when that is killed."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def share_rows(processes: int) -> None:
    """Says that so many neighbouring processes share the rows of every image, and so have the same images."""
    global _rows
    _rows = processes


def sharing() -> int:
    """How many processes share the rows of an image; 1 unless `share_rows` says otherwise."""
    return _rows


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Sets torch's number of threads, and restores it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def replica() -> tuple[int, int]:
    """Which of the groups of processes that have images of their own this is, and their number."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() // _rows, distributed.get_world_size() // _rows
    return 0, 1


def describe(devices: int, world_size: int) -> dict[str, Any]:
    """Versions, linvit's commit if it runs from a git checkout, device names, command line and starting time.

    devices, world_size: the trainer's number of devices per machine, and of processes in total.
    """
    if torch.cuda.is_available():
        device_names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    else:
        device_names = [f"{processor()}, {os.cpu_count()} cores"]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "devices": device_names,
        "devices_used": devices,
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def commit() -> str | None:
    """The commit of linvit's checkout, with `-dirty` appended if code or recipes have changed; None outside of one."""
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed, though perhaps below somebody else's repository
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(top)recipes")
    return f"{head}-dirty" if changed else head


def processor_facts() -> dict[str, str]:
    """What Linux says of the first processor: "model name", "flags" and others; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor() -> str:
    """The processor's name, with family and model, which a virtual machine does not hide: "AMD EPYC, family 25.17"."""
    facts = processor_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {facts['cpu family']}.{facts['model']}" if "cpu family" in facts else name


def append(path: Path, entry: dict[str, Any]) -> None:
    """Adds an entry to the JSON list in `path`; a file that cannot be read as JSON is replaced by a new list."""
    try:
        entries = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        entries = []
    write_json(path, [*entries, entry], indent=1)


def memory(device: str = "cpu") -> int:
    """Bytes of memory of this machine, or of its GPU for "cuda"; 8 GiB where the system does not say."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
