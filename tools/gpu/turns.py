"""Processes that share a GPU take turns where they measure, by a lock on a file."""

import fcntl
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_entering = threading.Lock()
_inside: dict[Path, tuple[IO[str], int]] = {}  # the locked file, and how many blocks of this process are inside


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with the same file.

    Blocks of one process do not wait for each other, whether nested or in different threads: one that waits for a
    thread of its own would never end.
    """
    with _entering:
        file, blocks = _inside.get(lock) or (lock.open("a"), 0)
        if not blocks:
            fcntl.flock(file, fcntl.LOCK_EX)
        _inside[lock] = file, blocks + 1
    try:
        yield
    finally:
        with _entering:
            file, blocks = _inside.pop(lock)
            if blocks > 1:
                _inside[lock] = file, blocks - 1
            else:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing it is not enough if a process was forked meanwhile
                file.close()


def lock_autotuning(lock: Path) -> None:
    """While torch's inductor times a candidate on the GPU, this process is `alone`.

    Not while it compiles, nor while anything else runs on the GPU: what else is measured needs a block of its own.
    """
    from torch._inductor.runtime import benchmarking

    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):  # newer versions have a place for it
        benchmarking.set_gpu_benchmark_lock_context(functools.partial(alone, lock))
        return
    timers = [x for x in vars(benchmarking).values() if isinstance(x, type) and "benchmark_gpu" in vars(x)]
    for timer in timers:
        timer.benchmark_gpu = _in_turn(timer.benchmark_gpu, lock)
    if not timers:
        warnings.warn("inductor has no `benchmark_gpu` in this PyTorch: its timings disturb each other", stacklevel=2)


def _in_turn(time: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    @functools.wraps(time)
    def timed(*args: Any, **options: Any) -> Any:
        with alone(lock):
            return time(*args, **options)

    return timed
