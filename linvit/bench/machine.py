"""The machine on which speeds are measured, and the peak memory of a call on it."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from linvit.environment import commit, forks_of, memory, processor, processor_facts
from linvit.errors import SettingError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Case = TypeVar("Case")

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
SELF = Path("/proc/self")
MEBIBYTE = 2**20


def check_device(device: str, needed: int = 0) -> None:
    """Raises ValueError for a GPU that is not there, and for more bytes of memory than the machine, or its GPU, has."""
    if device != "cpu" and not torch.cuda.is_available():
        raise SettingError(f"`device` is {device!r}, but torch sees no GPU here: leave it out to measure the CPU.")
    if needed > memory(device):
        raise ValueError(
            f"The largest of these cases needs at least {needed / 2**30:,.0f} GiB of memory, but this machine has "
            f"{memory(device) / 2**30:,.0f} GiB: make sizes, tokens or batches smaller."
        )


def describe(device: str, threads: int) -> dict[str, Any]:
    """processor, instructions (those that matter here), cores, load, threads, torch, python, gpu, commit."""
    facts = processor_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "processor": processor(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
        "commit": commit(),
    }


def sentence(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    if machine["gpu"]:
        facts = [machine["gpu"], machine["processor"]]
    else:
        cores = f"{machine['cores']} cores, {machine['threads']} used"
        load = f"load {' '.join(map(str, machine['load']))}" if machine["load"] else ""
        facts = [machine["processor"], " ".join(machine["instructions"]), cores, load]
    facts += ["freed memory kept" if machine.get("keeps_memory") else "", f"torch {machine['torch']}"]
    if machine.get("commit"):
        head, dirty, _ = machine["commit"].partition("-dirty")
        facts.append(f"commit {head[:12]}{dirty}")
    return "; ".join(filter(None, facts))


def in_new_process(
    function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
) -> Result:
    """The result of a module's function in a new process, forked from one that has imported torch and this package.

    Raises MemoryError if the process is killed, as happens when memory runs out.
    """
    context = forks_of("torch", "timm", "linvit", function.__module__)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments, **named).result()
        except BrokenProcessPool as error:
            raise MemoryError("The process that measured memory was killed, often because memory ran out.") from error


def peak(
    build: Callable[[Case], Callable[[], object]], case: Case, device: str, threads: int, call: Callable[[], object]
) -> float | None:
    """Peak in MiB of the call of a case: on a GPU of the call itself, on a CPU of what build(case) returns."""
    return peak_above_on_gpu(call) if device != "cpu" else peak_of(build, case, threads=threads)


def peak_of(build: Callable[..., Callable[[], object]], *arguments: object, threads: int = 1) -> float | None:
    """Peak in MiB of the call that build(*arguments) returns, above inputs and weights, in a new process.

    There nothing else has raised the peak. The call runs once before, so that compilation and one-time allocations do
    not count. None if the system does not let a process reset its peak (Linux does), or kills the process.
    """
    try:
        return in_new_process(_peak_here, build, arguments, threads)
    except MemoryError:
        return None


def _peak_here(build: Callable[..., Callable[[], object]], arguments: tuple[object, ...], threads: int) -> float | None:
    torch.set_num_threads(threads)
    call = build(*arguments)
    call()
    return peak_above(call)


def peak_above(call: Callable[[], object]) -> float | None:
    """Peak in MiB of one call in this process, above the memory in use before it; see peak_of."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return None
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # freed pages that the allocator keeps would hide as much of the peak
    try:
        (SELF / "clear_refs").write_text("5")
    except OSError:
        return None
    start = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - start) / MEBIBYTE


def _resident(name: str) -> int:
    line = next(line for line in (SELF / "status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_above_on_gpu(call: Callable[[], object]) -> float:
    """Peak in MiB of one call, above the memory allocated before it."""
    call()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - start) / MEBIBYTE
