"""The formats of exported files: what each takes, and which runtime runs it on this machine."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linvit.data.disk import check_regular
from linvit.deploy import runtimes
from linvit.deploy.facts import Facts, FactsError, SequenceFacts, facts_in
from linvit.deploy.runtimes import PACKAGE, Names, Session
from linvit.errors import SettingError
from linvit.files import explained, reason_of

FLOAT32 = ("float32",)
ONNX = ("onnx", "onnxscript")


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    name: in messages. suffix: of its files. extra: of linvit, which installs `packages`. write, open: as in
    `linvit.deploy.runtimes`. smallest: side in pixels from which a file reads images of any size; 0 if it reads one
    size only. precisions: that its sessions compute in. pixels: dtype of the images that the program reads. tolerance:
    difference from the network at which a file is not kept, as a share of the largest output.
    """

    name: str
    suffix: str
    extra: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, str, Path, Names, Names], None]
    open: Callable[[Path, int | None, str], tuple[str | None, Session | None]]
    smallest: int
    precisions: tuple[str, ...] = FLOAT32
    pixels: torch.dtype = torch.uint8
    tolerance: float = 1e-4  # what rounding leaves in float32 is a hundred times less

    def need(self) -> None:
        """Raises ImportError, naming the extra, if a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise ImportError(
                f"{self.name} needs {', '.join(missing)}: install it with `pip install 'linvit[{self.extra}]'`."
            )


_ALL = (
    Format("ONNX", ".onnx", "onnx", (*ONNX, "onnxruntime"), runtimes.write_onnx, runtimes.open_onnx, 32),
    Format(
        "OpenVINO",
        ".xml",
        "openvino",
        (*ONNX, "openvino"),
        runtimes.write_openvino,
        runtimes.open_openvino,
        32,
        precisions=(*FLOAT32, "bfloat16"),
    ),
    Format("torch.export", ".pt2", "", (), runtimes.write_pt2, runtimes.open_pt2, 64),
    Format("ExecuTorch", ".pte", "executorch", ("executorch",), runtimes.write_executorch, runtimes.open_executorch, 0),
    Format(
        "Core ML",
        PACKAGE,
        "coreml",
        ("coremltools",),
        runtimes.write_coreml,
        runtimes.open_coreml,
        0,
        precisions=("float16",),
        pixels=torch.float32,
        tolerance=1e-2,
    ),
)
FORMATS = {format.suffix: format for format in _ALL}
"""The formats by the suffix of their files."""

COMPILED = Format("AOTInductor", ".pt2", "", (), runtimes.write_compiled, runtimes.open_compiled, 64)
"""Machine code, which is written and run, but never opened: nobody can tell what it does."""


def format_of(path: Path, compiled: bool = False, opset: int | None = None) -> Format:
    """The format of a file, by its suffix, or COMPILED; opset: of a file for ONNX.

    Raises ImportError if the runtime or compiler is missing.
    """
    for option, value, suffix in (("opset", opset, ".onnx"), ("compiled", compiled, COMPILED.suffix)):
        if value and path.suffix != suffix:
            raise SettingError(
                f"`{option}` is for {suffix} files, but {path} has the suffix {path.suffix!r}: change it, or leave"
                f" `{option}` out."
            )
    if compiled:
        runtimes.check_compiler()
        return COMPILED
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({format.name})" for suffix, format in FORMATS.items())
        raise ValueError(f"The file {path} has the suffix {path.suffix!r}, expected one of {known}: change it.")
    format = FORMATS[path.suffix]
    format.need()
    return format if opset is None else replace(format, write=partial(runtimes.write_onnx, opset=opset))


def session_of(
    format: Format,
    program: ExportedProgram,
    path: Path,
    facts: str = "",
    inputs: Names = ("images",),
    outputs: Names = ("outputs",),
    threads: int | None = None,
    precision: str = "float32",
) -> Session | None:
    """The session of a program, written to a file of the format; None if the runtime does not run on this system."""
    with explained(
        lambda reason: (
            f"{format.name} cannot take this network ({reason}): try another format, or `dynamic=False` if the file is"
            " for any size."
        ),
        raised=SettingError,
    ):
        format.write(program, facts, path, inputs, outputs)
        return format.open(path, threads, precision)[1]


def opened(path: Path, threads: int | None = None) -> tuple[Facts | SequenceFacts, Session]:
    """The facts in a file, and its session.

    The session of a file of images is a function from uint8 images (batch, channels, height, width) to its outputs.
    That of a decoder or Conformer takes the tensors that `facts.inputs` names and returns those of `facts.outputs`:
    int64 tokens (batch, tokens), or float32 features (batch, frames, mels); then the float32 states, of which those
    for the next call are returned.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the runtime is missing.
        ValueError: for another suffix, a damaged file, one that linvit did not write, and one whose runtime does not
            run on this system.
    """
    format = format_of(path)
    if not path.exists():
        raise FileNotFoundError(f"The file {path} does not exist: check the path.")
    try:
        for file in path.rglob("*.*") if format.suffix == PACKAGE and path.is_dir() else [path]:
            if file.suffix != ".CoreML":  # the folder in a package
                check_regular(file)
        text, session = format.open(path, threads, "float32")
        facts = facts_in(text, path)
    except FactsError:
        raise
    except Exception as error:  # runtimes raise errors of many classes
        reason = "it is damaged" if isinstance(error, AttributeError | TypeError) else reason_of(error)
        raise ValueError(f"{format.name} cannot read {path} ({reason}): export it again.") from error
    if session is None:
        raise ValueError(
            f"{path} cannot be run here, because {format.name} does not run on {platform.system()}: use it on a system"
            " where it does, or export to another format, such as .onnx."
        )
    return facts, FileSession(path, threads, facts, session)


@dataclass(frozen=True)
class FileSession:
    """The session of a file that was opened; pickled, it is the file's path.

    Raises ValueError if the runtime fails, and FactsError for other outputs than the facts say.
    """

    path: Path
    threads: int | None
    facts: Facts | SequenceFacts
    session: Session

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        name = FORMATS[self.path.suffix].name
        with explained(lambda reason: f"{name} cannot run {self.path} ({reason}): export it again."):
            outputs = self.session(*inputs)
        if len(outputs) != len(self.facts.outputs) or not all(output.dim() for output in outputs):
            described = len(self.facts.outputs)
            raise FactsError(f"{self.path} has {len(outputs)} outputs, but describes {described}: export it again.")
        return outputs

    def __reduce__(self) -> tuple[Any, ...]:
        return _session, (self.path.resolve(), self.threads)


def _session(path: Path, threads: int | None) -> Session:
    return opened(path, threads)[1]
