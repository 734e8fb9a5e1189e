"""Exported networks in other runtimes, if they are installed."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from linvit.bench.memory import MEBIBYTE, peak_of
from linvit.deploy.facts import SequenceFacts
from linvit.deploy.formats import FORMATS, opened, session_of
from linvit.deploy.graph import exported
from linvit.deploy.int8 import need_int8, quantized
from linvit.deploy.runtimes import Session
from linvit.errors import SettingError
from linvit.fusion import fuse

PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class FileCall:
    """A call of an exported file in its runtime on the CPU, with the same images every time.

    session: of the file. open: makes another one; a function of a module, or a partial of one. path: the file. images:
    what it reads. folder: if it is temporary, kept as long as the call. int8: whether its layers are in 8 bits.
    """

    session: Session
    open: Callable[[], Session]
    path: Path
    images: Tensor
    folder: TemporaryDirectory[str] | None = None
    int8: bool = False

    def __call__(self) -> tuple[Tensor, ...]:
        return self.session(self.images)

    @property
    def mebibytes(self) -> float:
        """Size of the file, with OpenVINO's weights beside it."""
        files = (self.path, self.path.with_suffix(".bin")) if self.path.suffix == ".xml" else (self.path,)
        return sum(file.stat().st_size for file in files) / MEBIBYTE

    def peak(self) -> float | None:
        """Peak in MiB of opening the file and calling it, weights included; see peak_of."""
        return peak_of(_opening, self.open, self.images)


def _opening(open: Callable[[], Session], images: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: open()(images)


def runtime_call(suffix: str, network: nn.Module, x: Tensor, threads: int, int8: bool = False) -> FileCall:
    """The network, folded and written to a file of that format, in its runtime.

    x: images; the runtime computes in their dtype. int8: whether layers with weights are in 8 bits, calibrated on x.

    Raises:
        ImportError: if a package is missing.
        ValueError: if the network cannot be exported, or the runtime does not compute in that dtype.
    """
    runtime = FORMATS[suffix]
    runtime.need()
    if int8:
        need_int8(suffix)
    precision = PRECISIONS.get(x.dtype)
    if precision is None or precision not in runtime.precisions:
        known = " and ".join(runtime.precisions)
        raise ValueError(f"{runtime.name} computes in {known} here, not in {precision or x.dtype}")
    images = x.float().contiguous()
    folder = TemporaryDirectory()
    path = Path(folder.name) / f"network{suffix}"
    with torch.inference_mode(False), torch.no_grad():
        program = exported(fuse(deepcopy(network).float(), "graph"), images.clone())
        program = quantized(program, images, suffix, dynamic=False) if int8 else program
        session = session_of(runtime, program, path, threads=threads, precision=precision)
    assert session is not None  # the runtimes below run on every system
    return FileCall(session, partial(_session, suffix, path, threads, precision), path, images, folder, int8)


def _session(suffix: str, path: Path, threads: int, precision: str) -> Session:
    session = FORMATS[suffix].open(path, threads, precision)[1]
    assert session is not None  # it has been opened before
    return session


def file_call(path: Path, x: Tensor, threads: int) -> FileCall:
    """An exported file of the user's, in its runtime, with images as in x, which are normalized, as pixels.

    Raises as `linvit.deploy.formats.opened`, and ValueError for images that the file cannot read.
    """
    facts, session = opened(path, threads)
    if isinstance(facts, SequenceFacts):
        raise ValueError(f"{path} reads {facts.inputs[0]}, expected a file that reads images: give one.")
    facts.check(x.shape, path)
    if len(x) > 1 and not facts.dynamic:
        raise SettingError(f"{path} reads one image, but the batch has {len(x)}: leave `batches` out.")
    pixels = (x * 64 + 128).clamp(0, 255).to(torch.uint8)
    opening = partial(_session, path.suffix, path, threads, "float32")
    return FileCall(session, opening, path, pixels, int8=facts.calibrated > 0)


RUNTIMES: dict[str, Callable[[nn.Module, Tensor, int, bool], FileCall]] = {
    "onnxruntime": partial(runtime_call, ".onnx"),
    "openvino": partial(runtime_call, ".xml"),
    "executorch": partial(runtime_call, ".pte"),
}
