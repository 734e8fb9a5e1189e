"""Carries machine code and caches to a GPU machine without network and back."""

import fcntl
import functools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "gpu"
COMMIT = CARRIED / "commit"
TRAVELS = 64  # MiB of code and build/gpu
PIECES, PIECE = 6, 15  # files that come back beside rows, and MiB of each
# KiB of shared memory that a program may have, by compute capability: with more, a launch needs fewer stages.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227}
PROCESSORS = 132  # of an H100 and of an H200
_thread, _depth = threading.RLock(), 0


class _NoGPU:
    """Stands for Triton's driver: says what to compile for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> Any:
        return self  # a kernel keeps what it compiled by device, and this one should not be taken for a real one

    def get_current_stream(self, device: Any) -> int:
        return 0


def share_triton_cache(folder: Path) -> None:
    """Let Triton keep machine code in `folder`, and read what another machine with the same version has put there.

    Every process calls it first, before it imports inductor. The key of an entry is left with the kernel's text and
    line number, its arguments and options, Triton's version, the compute capability and Triton's environment variables.
    Triton's own has its build, which differs by Python's version, and the version of the assembler, which inductor
    exchanges while it runs.
    """
    from triton import __version__
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import cache

    from linvit.files import write_text

    folder = folder.resolve()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    own = cache.triton_key
    for module in list(sys.modules.values()):  # others import it by value
        if getattr(module, "__dict__", {}).get("triton_key") is own:
            module.triton_key = lambda: f"carried-{__version__}"
    CUDABackend.hash = lambda self: f"carried-{self.target.arch}"
    for group in folder.glob("*/__grp__*.json"):  # lists an entry's files with the folder where they were written
        paths = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in paths}
        if here != paths:
            write_text(group, json.dumps({"child_paths": here}))


@contextmanager
def compiling(capability: int) -> Iterator[Counter[str]]:
    """Launches of linvit's kernels only compile, without a GPU, what they would run on one of this capability.

    Counts the kernels "compiled" and those "read" from the cache. The tensors may be on the CPU or on the device
    "meta", where the largest cost nothing: only their types, strides and alignment matter.
    """
    import triton
    from triton.runtime.errors import OutOfResources

    from linvit.kernels import launch

    counts = Counter(compiled=0, read=0)
    run, active = triton.JITFunction.run, triton.runtime.driver._active
    stages, processors = launch._stages, launch._processors

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        binary = run(kernel, *args, warmup=True, **options)
        if binary.metadata.shared > 1024 * SHARED[capability]:
            raise OutOfResources(binary.metadata.shared, 1024 * SHARED[capability], "shared memory")
        return binary

    def count(*, cache_hit: bool, **_: Any) -> None:
        counts["read" if cache_hit else "compiled"] += 1

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.store_binary_only, triton.knobs.compilation.listener = True, count
        try:
            triton.JITFunction.run, triton.runtime.driver._active = compile_alone, _NoGPU(capability)
            launch._stages, launch._processors = {}, lambda device: PROCESSORS
            yield counts
        finally:
            triton.JITFunction.run, triton.runtime.driver._active = run, active
            launch._stages, launch._processors = stages, processors


def prepare(generators: Sequence[Callable[[], object]]) -> str:
    """Compiles what these start for compute capability 9.0 into build/gpu, beside the commit; what travels, in words.

    Raises ValueError if that is more than TRAVELS.
    """
    from linvit.environment import commit
    from linvit.files import write_text

    share_triton_cache(CARRIED / "triton")
    write_text(COMMIT, commit() or "unknown")
    with compiling(90) as counts:
        for number, generate in enumerate(generators, 1):
            generate()
            print(f"{number} of {len(generators)}: {counts['compiled']} kernels compiled, {counts['read']} read")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    sizes: Counter[str] = Counter()
    for path in {ROOT / name for name in names if name} | set(CARRIED.rglob("*")):
        if path.is_file():
            sizes["/".join(path.relative_to(ROOT).parts[:-1][:3])] += path.stat().st_size
    total, largest = sizes.total() / 2**20, ", ".join(f"{name} {n / 2**20:.1f}" for name, n in sizes.most_common(4))
    words = f"{total:.1f} MiB would travel, of at most {TRAVELS}; the largest parts are {largest}"
    if total > TRAVELS:
        raise ValueError(f"{words}: remove from build/gpu what the next jobs do not need")
    return words


def bring_back(rows: Path, out: Path) -> None:
    """Copies rows and, in pieces, inductor's cache into a folder."""
    subprocess.run(["cp", str(rows), str(out)], check=True)
    if (CARRIED / "inductor").exists():
        packed = f"tar cJ -C '{CARRIED}' inductor triton | split -d -b {PIECE}M - '{out}/caches.tar.xz.'"
        subprocess.run(["sh", "-c", f"rm -f '{out}'/caches.tar.xz.*; {packed}"], check=True)
        pieces = sorted(out.glob("caches.tar.xz.*"))
        if len(pieces) > PIECES:
            print(f"The caches need {len(pieces)} pieces, of at most {PIECES}: they do not come back.")
            for piece in pieces:
                piece.unlink()


def unpack() -> None:
    """Unpacks the pieces of caches that an earlier machine has left in build/gpu."""
    if list(CARRIED.glob("caches.tar.xz.*")):
        subprocess.run(["sh", "-c", "cat caches.tar.xz.* | tar xJ && rm caches.tar.xz.*"], cwd=CARRIED, check=True)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits until no other process is in such a block with the same file; blocks of a process may be nested."""
    global _depth
    with _thread, lock.open("a") as file:
        _depth += 1
        if _depth == 1:
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _depth -= 1
            if _depth == 0:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing it is not enough if a process was forked meanwhile


def lock_autotuning(lock: Path) -> None:
    """While torch's inductor times a candidate on the GPU, this process is `alone`."""
    from torch._inductor.runtime import benchmarking

    lock.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):  # newer than PyTorch 2.11
        benchmarking.set_gpu_benchmark_lock_context(functools.partial(alone, lock))
        return
    for timer in [x for x in vars(benchmarking).values() if isinstance(x, type) and "benchmark_gpu" in vars(x)]:
        timer.benchmark_gpu = alone(lock)(timer.benchmark_gpu)
