"""Carries machine code, caches and data to a GPU machine without network and back."""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

MEBIBYTE = 2**20
ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "gpu"
# KiB of shared memory that a program may have, by compute capability: with more, a launch needs fewer stages.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227}
PROCESSORS = 132  # of an H100 and of an H200


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

    Every process calls it first, before it imports torch's inductor. The key of an entry is left with the kernel's
    text and line number, its arguments and options, Triton's version, the compute capability and Triton's environment
    variables. Triton's own has its build, which differs by Python's version, and the version of the assembler, which
    inductor exchanges while it runs.
    """
    from triton import __version__
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import cache

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
            temporary = group.with_name(f"tmp.{os.getpid()}.{group.name}")
            temporary.write_text(json.dumps({"child_paths": here}))
            temporary.replace(group)


@contextmanager
def compiling(capability: int) -> Iterator[Counter[str]]:
    """Launches of linvit's kernels only compile, without a GPU, what they would run on one of this capability.

    Counts the kernels "compiled" and those "read" from the cache. The tensors may be on the CPU or on the device
    "meta", where the largest cost nothing: only their types, strides and alignment matter.
    """
    import triton
    from triton.runtime.errors import OutOfResources

    from linvit.kernels import launch

    if launch.interpreted():
        raise ValueError("TRITON_INTERPRET is 1, so that Triton compiles nothing: unset it before Python starts")
    counts = Counter(compiled=0, read=0)
    run, active = triton.JITFunction.run, triton.runtime.driver._active
    stages, processors = launch._stages, launch._processors

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        binary = run(kernel, *args, warmup=True, **options)
        needed, given = binary.metadata.shared, 1024 * SHARED[capability]
        if needed > given:
            raise OutOfResources(needed, given, "shared memory")
        return binary

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.store_binary_only = True
        triton.knobs.compilation.listener = lambda *, cache_hit, **rest: counts.update(
            ["read" if cache_hit else "compiled"]
        )
        try:
            triton.JITFunction.run = compile_alone
            triton.runtime.driver._active = _NoGPU(capability)
            launch._stages, launch._processors = {}, lambda device: PROCESSORS
            yield counts
        finally:
            triton.JITFunction.run, triton.runtime.driver._active = run, active
            launch._stages, launch._processors = stages, processors


def pack(folder: Path, into: Path, mebibytes: int) -> list[Path]:
    """Write a folder as pieces FOLDER.tar.xz.00, … in `into`, none larger than so many MiB. Nothing may write to it."""
    into.mkdir(parents=True, exist_ok=True)
    name = f"{folder.resolve().name}.tar.xz"
    parts = []
    with TemporaryFile(dir=into) as whole:
        with tarfile.open(fileobj=whole, mode="w:xz") as archive:
            archive.add(folder, ".")
        whole.seek(0)
        while data := whole.read(mebibytes * MEBIBYTE):
            parts.append(into / f"{name}.{len(parts):02d}.part")
            parts[-1].write_bytes(data)
    for old in into.glob(f"{name}.[0-9][0-9]"):
        old.unlink()
    return [part.rename(part.with_suffix("")) for part in parts]


def unpack(pieces: Path, into: Path) -> None:
    """Put the contents of a packed folder into another. `pieces` is FOLDER.tar.xz, without the numbers."""
    found = sorted(pieces.parent.glob(f"{pieces.name}.[0-9][0-9]"))
    try:
        with TemporaryFile() as whole:
            for number, piece in enumerate(found):
                if piece.suffix != f".{number:02d}":
                    raise EOFError
                with piece.open("rb") as data:
                    shutil.copyfileobj(data, whole)
            whole.seek(0)
            with tarfile.open(fileobj=whole, mode="r:xz") as archive:
                archive.extractall(into, filter="data")
    except (EOFError, lzma.LZMAError, tarfile.ReadError):
        names = ", ".join(piece.name for piece in found) or "none"
        raise ValueError(f"{pieces} is not complete (pieces found: {names}): copy all of its pieces again") from None


def check_size(limit_mebibytes: float = 64) -> float:
    """MiB that travel: the files that git knows or does not ignore, and build/gpu. ValueError if above the limit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    paths = {ROOT / name for name in listed} | set(CARRIED.rglob("*"))
    sizes: Counter[str] = Counter()
    for path in paths:
        if path.is_file():
            sizes["/".join(path.relative_to(ROOT).parts[:-1][:3]) or path.name] += path.stat().st_size
    total = sizes.total() / MEBIBYTE
    if total > limit_mebibytes:
        largest = ", ".join(f"{name} {size / MEBIBYTE:.1f}" for name, size in sizes.most_common(4))
        raise ValueError(
            f"{total:.1f} MiB would travel, and at most {limit_mebibytes:g} fit; the largest parts are {largest}: "
            "remove from build/gpu what the next jobs do not need"
        )
    return total
