"""The compiled kernels: a library for each instruction set, from the wheel or compiled on this machine; and libraries
of users' formulas, which need no headers of torch.

`python -m linvit.kernels.cpu.compiling FOLDER` compiles those of a wheel.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from filelock import FileLock

from linvit.formulas import Formula, named_formula
from linvit.formulas.cpp_source import TABLE, library_source, named_source
from linvit.kernels.support import FEATURE_MAPS, NORMALIZERS

SOURCES = [Path(__file__).with_name(name) for name in ("linear_attention.cpp", "depthwise.cpp")]
INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}
"""Compiler flags by what torch calls the capability of the processor; no flags for others, such as arm64."""
FLAGS = ("-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp-simd")
HEADER = Path(__file__).with_name("formula.h")
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

    compiler = _compiler("The CPU kernel")
    scripts = str(Path(sys.executable).parent)  # of an environment that is not activated
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), scripts))
    if not is_ninja_available():
        raise ValueError("The CPU kernel is compiled with ninja, which is not installed: pip install ninja.")
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    flags = [*FLAGS, *INSTRUCTIONS.get(capability, []), *openmp]

    named = named_source(
        [named_formula(name, True) for name in FEATURE_MAPS], [named_formula(name, False) for name in NORMALIZERS]
    )

    def compile_in(fresh: Path) -> None:
        (fresh / "named.h").write_text(named)
        compiled(
            _name(capability),
            [str(source) for source in SOURCES],
            extra_cflags=flags,
            extra_include_paths=[str(fresh), str(HEADER.parent)],
            extra_ldflags=openmp,
            build_directory=str(fresh),
            is_python_module=False,
        )

    try:
        place = Path(folder or _get_build_directory(_name(capability), verbose=False))
        texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.[ch]*"))]
        facts = [" ".join(flags).encode(), torch.__version__.encode(), named.encode(), *texts]
        library = place / f"{_name(capability)}.so"
        if not _fresh(library, "linvit", facts, compile_in):  # what torch has compiled it has loaded, too
            torch.ops.load_library(library)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        lines = str(error).strip().splitlines()
        raise ValueError(
            f"{compiler!r} could not compile the CPU kernel ({lines[-1] if lines else error}): set CXX to g++ 11 or"
            " clang 14 or newer, or do not call build()."
        ) from error


_addresses: dict[str, int] = {}  # of tables in this process, by the digest of the formula


def compile_formula(formula: Formula) -> int:
    """Compiles a feature map or normalizer in a second or two, or finds it compiled in the user's cache; loads it.

    Returns:
        The address of its table of functions, see `formula.h`, in this process; the library stays loaded.

    Raises:
        ValueError: if there is no C++ compiler, or compiling fails.
    """
    if formula.digest not in _addresses:
        _addresses[formula.digest] = _compile(library_source(formula))
    return _addresses[formula.digest]


def _compiler(what: str) -> str:
    """The C++ compiler; ValueError if there is none for what is to be compiled."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ValueError(f"{what} must be compiled, but there is no C++ compiler {compiler!r}: install g++.")
    return compiler


def _compile(source: str) -> int:
    compiler = _compiler("The formulas")
    flags = [*FLAGS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()), "-shared", "-fPIC"]
    facts = [compiler.encode(), " ".join(flags).encode(), HEADER.read_bytes(), source.encode()]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = home / "linvit" / "formulas" / f"{hashlib.sha256(b''.join(facts)).hexdigest()[:32]}.so"

    def compile_in(fresh: Path) -> None:
        logging.getLogger(__name__).warning(
            "Compiling a function for the C++ kernel takes a second or two; from then on it is found in %s",
            library.parent,
        )
        (fresh / "formula.cpp").write_text(source)
        command = [compiler, *flags, "-I", str(HEADER.parent), str(fresh / "formula.cpp")]
        subprocess.run([*command, "-o", str(fresh / library.name)], check=True, capture_output=True, text=True)

    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _fresh(library, library.stem, facts, compile_in)
        return ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(library)), TABLE))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        line = next((line for line in said.splitlines() if "error" in line), said.strip())
        raise ValueError(f"{compiler!r} could not compile the formulas: {line}.") from error


def _fresh(library: Path, stem: str, facts: Sequence[bytes], compile_in: Callable[[Path], None]) -> bool:
    """Compiles a library unless it is whole and was compiled from these facts; whether it did.

    stem: of the files beside it.
    """
    digest, lock = library.with_name(f"{stem}.sha256"), library.with_name(f"{stem}.lock")
    for path in (library, digest, lock):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.is_file():  # a broken link, a pipe …
            path.unlink(missing_ok=True)

    def hashed() -> str:
        return hashlib.sha256(b"".join((library.read_bytes(), *facts))).hexdigest()

    with FileLock(lock):
        if library.is_file() and digest.is_file() and digest.read_text() == hashed():  # a truncated library crashes
            return False
        with tempfile.TemporaryDirectory(dir=library.parent) as fresh:
            compile_in(Path(fresh))
            os.replace(Path(fresh) / library.name, library)
        digest.write_text(hashed())
    return True


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
