"""Networks as files of other runtimes: written, run there, and compared with the network before they are kept."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from linvit.deploy.facts import Facts
from linvit.deploy.formats import Format, Session, format_of, session_of
from linvit.deploy.graph import OnPixels, exported, sample
from linvit.deploy.quantizing import need_int8, quantized
from linvit.deploy.sensitivity import write_sensitivity
from linvit.files import check_output_file, check_writable, reason_of
from linvit.fusion import fuse

TOLERANCE = 1e-4  # of the largest output; what rounding leaves is a hundred times less
WORST_INT8 = 0.5  # of the outputs' root mean square; trained networks lose a few hundredths, outputs of zero are 1


@dataclass(frozen=True)
class Exported:
    """An exported file.

    difference: the largest difference between an output and that of the network in float32, over all `sizes`, and
    largest: the largest value of that output. error: root mean square of the differences over that of the output. Of
    several outputs, all belong to the least exact one. same: share of the images, of a segmentor the positions, whose
    largest logit is that of the same class; None for outputs that are not logits.
    """

    path: Path
    format: str
    facts: Facts
    difference: float
    largest: float
    error: float
    same: float | None
    sizes: tuple[tuple[int, int], ...]


def write(
    network: nn.Module,
    path: str | Path,
    facts: Facts,
    images: Sequence[Tensor],
    calibration: Tensor | None = None,
    report: Path | None = None,
) -> Exported:
    """Writes a network to a file of the format that the path's suffix names, and runs it there.

    Args:
        network: in evaluation mode, in float32; reads normalized images and returns a tensor, or several.
        path: .onnx, .xml (OpenVINO, with the weights next to it as .bin), .pt2 or .pte.
        facts: what the file says about itself.
        images: real images to compare on, uint8 (batch, channels, height, width), which fit the facts.
        calibration: images to calibrate 8-bit layers on, likewise in one batch; None for a file in float32.
        report: folder for the sensitivity of the layers to 8 bits; None for no report.

    Raises:
        ImportError: if the runtime is missing.
        ValueError: for another suffix, a network that cannot be exported, and a file whose outputs differ from the
            network's; nothing is left behind then.
    """
    target = check_output_file(path)
    format = format_of(target)
    if calibration is not None:
        need_int8(target.suffix)
    if report is not None:
        check_writable(report)
    pixels = sample(facts.channels, facts.size, facts.dynamic)
    program = exported(OnPixels(fuse(network, "graph"), facts.mean, facts.std), pixels, facts.dynamic)
    if calibration is not None:
        if report is not None:
            write_sensitivity(program, calibration, target.suffix, facts.dynamic, report)
        program = quantized(program, calibration, target.suffix, facts.dynamic)
    return _kept(format, program, OnPixels(network, facts.mean, facts.std), target, facts, images)


def _kept(
    format: Format, program: ExportedProgram, network: nn.Module, target: Path, facts: Facts, images: Sequence[Tensor]
) -> Exported:
    """Writes a program, compares it with the network, and keeps the file if they agree."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        written = Path(folder) / target.name
        session = session_of(format, program, facts.to_json(), written, facts.outputs)
        difference, largest, error, same = _compared(network, format, session, images)
        kept = error <= WORST_INT8 if facts.calibrated else difference <= TOLERANCE * largest
        if not kept:  # nor with NaN
            by = f"{error:.0%} (root mean square)" if facts.calibrated else f"{difference:.2g}"
            way = "calibrate on images like those of the training, or leave `int8` out" if facts.calibrated else ""
            raise ValueError(
                f"The outputs of the {format.name} file differ from those of the network by {by}, the largest being"
                f" {largest:.2g}, so it is not kept: {way or 'try another format'}."
            )
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == written):  # weights beside it first
            os.replace(file, target.parent / file.name)
    sizes = tuple((int(batch.shape[2]), int(batch.shape[3])) for batch in images)
    logits = facts.outputs == ("outputs",)
    return Exported(target, format.name, facts, difference, largest, error, same if logits else None, sizes)


def _compared(
    network: nn.Module, format: Format, session: Session, images: Sequence[Tensor]
) -> tuple[float, float, float, float]:
    """`difference`, `largest` and `error` of the worst output over all images, and `same` of the first output."""
    batches, answers = [], []
    for batch in images:
        with torch.inference_mode():
            expected = network(batch)
        try:
            outputs = session(batch)
        except Exception as error:  # runtimes too
            raise ValueError(
                f"{format.name} cannot run this network at its size ({reason_of(error)}): try a larger `size` or"
                " another format."
            ) from error
        answers.append((expected[0].argmax(1) == outputs[0].argmax(1)).flatten())
        pairs = [(ours.double(), theirs - ours) for ours, theirs in zip(expected, outputs, strict=True)]
        batches.append([[by.abs().max(), x.abs().max(), by.square().sum(), x.square().sum()] for x, by in pairs])
    values = torch.tensor(batches)
    differences, largest = values[..., :2].amax(0).unbind(-1)
    noise, signal = values[..., 2:].sum(0).unbind(-1)
    errors = (noise / signal.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    relative = differences / largest.clamp_min(torch.finfo(torch.float32).tiny)
    worst = relative.argmax()  # NaN is above all
    same = torch.cat(answers).float().mean()
    return float(differences[worst]), float(largest[worst]), float(errors[worst]), float(same)
