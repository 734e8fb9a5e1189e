"""The compiled kernels: a library for each instruction set, from the wheel or compiled on this machine.

`python -m linvit.kernels.cpu.compiling FOLDER` compiles those of a wheel.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock

SOURCES = [Path(__file__).with_name(name) for name in ("linear_attention.cpp", "depthwise.cpp")]
INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}
"""Compiler flags by what torch calls the capability of the processor; no flags for others, such as arm64."""
PREBUILT = Path(__file__).with_name("prebuilt")


def load() -> None:
    """Loads the library for this processor; without one for this torch in the wheel, compiles it in half a minute.

    Raises:
        ValueError: if there is no C++ compiler or ninja, or compiling fails; the message says what to do.
    """
    library = prebuilt()
    if library.is_file():
        torch.ops.load_library(library)
    else:
        compile_library(torch.backends.cpu.get_cpu_capability())


def prebuilt() -> Path:
    """Where the wheel has the library for this torch and this processor, if it brought one."""
    return _place(PREBUILT, torch.backends.cpu.get_cpu_capability())


def compile_library(capability: str, folder: Path | None = None) -> None:
    """Compiles the library, or finds it compiled, in torch's folder of extensions or another, and loads it.

    Raises as `load`.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of CUDA without a GPU
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available
    from torch.utils.cpp_extension import load as compiled

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ValueError(f"The CPU kernel must be compiled, but there is no C++ compiler {compiler!r}: install g++.")
    scripts = str(Path(sys.executable).parent)  # of an environment that is not activated
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), scripts))
    if not is_ninja_available():
        raise ValueError("The CPU kernel is compiled with ninja, which is not installed: pip install ninja.")
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    flags = ["-O3", "-std=c++20", "-fno-math-errno", "-ffp-contract=fast", *INSTRUCTIONS.get(capability, []), *openmp]
    try:
        place = Path(folder or _get_build_directory(_name(capability), verbose=False))
        library, digest, lock = place / f"{_name(capability)}.so", place / "linvit.sha256", place / "linvit.lock"
        for path in (library, digest, lock):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.is_file():  # a broken link, a pipe …
                path.unlink(missing_ok=True)
        with FileLock(lock):
            if digest.is_file() and digest.read_text() == _digest(library, flags):  # a truncated library crashes
                torch.ops.load_library(library)
                return
            with tempfile.TemporaryDirectory(dir=place) as fresh:
                compiled(
                    _name(capability),
                    [str(source) for source in SOURCES],
                    extra_cflags=flags,
                    extra_ldflags=openmp,
                    build_directory=fresh,
                    is_python_module=False,
                )
                os.replace(Path(fresh) / library.name, library)
            digest.write_text(_digest(library, flags))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        lines = str(error).strip().splitlines()
        raise ValueError(
            f"{compiler!r} could not compile the CPU kernel ({lines[-1] if lines else error}): set CXX to g++ 11 or"
            " clang 14 or newer, or do not call build()."
        ) from error


def _digest(library: Path, flags: Sequence[str]) -> str:
    """A hash of the library and of what it was compiled from."""
    if not library.is_file():
        return ""
    parts = [" ".join(flags).encode(), torch.__version__.encode()]
    parts += [path.read_bytes() for path in (library, *sorted(Path(__file__).parent.glob("*.[ch]*")))]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def compile_prebuilt(folder: Path) -> None:
    """Compiles the libraries for every processor of this machine's architecture, each in a process of its own."""
    here = torch.backends.cpu.get_cpu_capability()
    for capability in INSTRUCTIONS if here in INSTRUCTIONS else (here,):
        place = _place(folder, capability)
        work = place.parent / capability
        work.mkdir(parents=True, exist_ok=True)
        code = "import sys, pathlib; from linvit.kernels.cpu.compiling import compile_library as compile;"
        code += "compile(sys.argv[1], pathlib.Path(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", code, capability, str(work)], check=True)
        os.replace(work / place.name, place)
        shutil.rmtree(work)


def _place(folder: Path, capability: str) -> Path:
    """The library in a folder of libraries; one works with all torch releases of one minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return folder / f"torch{major}.{minor}" / f"{_name(capability)}.so"


def _name(capability: str) -> str:
    return "linvit_cpu_" + "".join(letter for letter in capability.lower() if letter.isalnum())


if __name__ == "__main__":
    compile_prebuilt(Path(sys.argv[1]))
