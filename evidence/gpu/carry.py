"""Carries machine code and caches to a GPU machine without network and back."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "gpu"
COMMIT = CARRIED / "commit"
TRAVELS = 40  # MiB of build/gpu; code has 15
PACKED = ("inductor", "triton")
CACHES, PIECES, PIECE = "caches.tar.xz", 5, 15  # packed: so many files of so many MiB


def share_triton_cache(folder: Path) -> None:
    """Lets Triton keep machine code in a folder, and read what another machine with the same version has put there.

    Every process calls it first, before it imports inductor. Triton's own key of an entry also has its build, which
    differs by Python's version, and the version of the assembler, which inductor exchanges while it runs.
    """
    from triton import __version__
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import cache

    from linvit.files import write_text

    folder = folder.resolve()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    kernels_key = cache.triton_key
    modules: list[Any] = list(sys.modules.values())
    for module in modules:  # others import it by value
        if getattr(module, "__dict__", {}).get("triton_key") is kernels_key:
            module.triton_key = lambda: f"carried-{__version__}"
    CUDABackend.hash = lambda self: f"carried-{self.target.arch}"
    for group in folder.glob("*/__grp__*.json"):  # lists an entry's files with the folder where they were written
        paths = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in paths}
        if here != paths:
            write_text(group, json.dumps({"child_paths": here}))


def prepare(generators: Sequence[Callable[[], object]]) -> str:
    """Compiles what these start for compute capability 9.0, packed into build/gpu beside the commit; says what travels.

    Raises ValueError if that is more than TRAVELS.
    """
    from evidence.gpu.machine_code import compiling
    from linvit.environment import commit
    from linvit.files import write_text

    unpack()
    share_triton_cache(CARRIED / "triton")
    write_text(COMMIT, commit() or "unknown")
    with compiling(90) as counts:
        for number, generate in enumerate(generators, 1):
            generate()
            print(f"{number} of {len(generators)}: {counts['compiled']} kernels compiled, {counts['read']} read")
    pack(CARRIED)
    for folder in PACKED if list(CARRIED.glob(f"{CACHES}.*")) else ():  # or they were too large, and stay
        shutil.rmtree(CARRIED / folder, ignore_errors=True)
    if (size := sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file()) / 2**20) > TRAVELS:
        raise ValueError(f"build/gpu has {size:.1f} MiB, of at most {TRAVELS}: remove what the next jobs do not need")
    return f"build/gpu has {size:.1f} MiB, of at most {TRAVELS}"


def pack(out: Path) -> None:
    """Copies caches into a folder, in pieces, if they are small enough."""
    packed = f'rm -f "$0"/{CACHES}.*; tar cJ {" ".join(PACKED)} | split -d -b {PIECE}M - "$0/{CACHES}."'
    for folder in (out, *(CARRIED / name for name in PACKED)):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["sh", "-c", packed, str(out)], cwd=CARRIED, env={**os.environ, "XZ_OPT": "-1 -T0"}, check=True)
    pieces = list(out.glob(f"{CACHES}.*"))
    if len(pieces) > PIECES:
        print(f"The caches need {len(pieces)} pieces, of at most {PIECES}: they do not come along.")
        for piece in pieces:
            piece.unlink()


def unpack() -> None:
    """Unpacks the pieces of caches that an earlier machine has left in build/gpu."""
    if list(CARRIED.glob(f"{CACHES}.*")):
        subprocess.run(["sh", "-c", f"cat {CACHES}.* | tar xJ && rm {CACHES}.*"], cwd=CARRIED, check=True)


def lock_autotuning(path: Path) -> None:
    """Lets this process time candidates of torch's inductor only while no other one does, by a lock on a file."""
    from torch._inductor.runtime import benchmarking

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)  # which a thread may take again within

    def alone(time: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(time)
        def timed(*args: Any, **options: Any) -> Any:
            with lock:
                return time(*args, **options)

        return timed

    classes: list[Any] = [x for x in vars(benchmarking).values() if isinstance(x, type)]
    for timer in [x for x in classes if "benchmark_gpu" in vars(x)]:
        timer.benchmark_gpu = alone(timer.benchmark_gpu)
