"""Peak memory of a call, measured in a new process, where nothing else has raised the peak."""

import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from linvit.environment import forks_of, memory

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OWN = Path("/proc/self")
MEBIBYTE = 2**20


def check_fits(needed: int, device: str) -> None:
    """Raises ValueError if a benchmark needs more bytes than the machine, or its GPU, has."""
    available = memory(device)
    if needed > available:
        raise ValueError(
            f"The largest of these cases needs at least {needed / 2**30:,.0f} GiB of memory, but this machine has "
            f"{available / 2**30:,.0f} GiB: make sizes, tokens or batches smaller."
        )


def in_new_process(
    function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
) -> Result:
    """The result of a module's function in a new process, forked from one that has imported torch and this package.

    Raises:
        MemoryError: if the process is killed, as happens when memory runs out.
    """
    context = forks_of("torch", "timm", "linvit", function.__module__)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments, **named).result()
        except BrokenProcessPool as error:
            raise MemoryError("The process that measured memory was killed, often because memory ran out.") from error


def peak_of(build: Callable[..., Callable[[], object]], *arguments: object, threads: int = 1) -> float | None:
    """Peak in MiB of the call that build(*arguments) returns, above inputs and weights.

    The call runs once before, so that compilation and one-time allocations do not count. None if the system
    does not let a process reset its peak (Linux does), or kills the process.
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
        (OWN / "clear_refs").write_text("5")
    except OSError:
        return None
    before = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - before) / MEBIBYTE


def peak(
    device: str,
    threads: int,
    call: Callable[[], object],
    build: Callable[..., Callable[[], object]],
    *arguments: object,
) -> float | None:
    """Peak in MiB of a call: on a GPU of the call itself, on a CPU of what build(*arguments) returns, see peak_of."""
    return peak_above_on_gpu(call) if device != "cpu" else peak_of(build, *arguments, threads=threads)


def peak_above_on_gpu(call: Callable[[], object]) -> float:
    """Peak in MiB of one call, above the memory allocated before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MEBIBYTE


def _resident(name: str) -> int:
    line = next(line for line in (OWN / "status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
