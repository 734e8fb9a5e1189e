"""Networks as files of other runtimes: written, run there, and compared with the network before they are kept."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from linvit.deploy.coreml import MANIFEST, PACKAGE
from linvit.deploy.detections import LEAST_SAME, matched
from linvit.deploy.facts import DETECTIONS, Facts, SequenceFacts
from linvit.deploy.formats import Format, session_of
from linvit.deploy.graph import OnPixels, exported, sample, traced
from linvit.deploy.quantizing import quantized
from linvit.deploy.runtime import Session, silent_stderr
from linvit.deploy.sensitivity import write_sensitivity
from linvit.errors import SettingError
from linvit.files import check_output_file, check_writable, reason_of
from linvit.fusion import fuse

WORST_INT8 = 0.5  # of the outputs' root mean square; trained networks lose a few hundredths, outputs of zero are 1
TINY = torch.finfo(torch.float32).tiny
Example = tuple[nn.Module, tuple[Tensor, ...], tuple[Any, ...] | None]
Answer = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class Difference(NamedTuple):
    """What a file loses against the network in float32, over all images; of several outputs, that of the least exact.

    difference: the largest difference. largest: the largest value of that output. error: root mean square of the
    differences over that of the output. same: share of the images, of a segmentor the positions, whose largest logit is
    that of the same class; of files that choose detections, the share of those that the network has too, on which alone
    the other values are measured; None for other outputs.
    """

    difference: float
    largest: float
    error: float
    same: float | None


@dataclass(frozen=True)
class Exported:
    """An exported file.

    sizes: of the batches that it was compared on, height and width in pixels, or number of tokens or frames.
    difference, largest, error, same: see `Difference`; None if the runtime does not run on this system, where nothing
    was compared.
    """

    path: Path
    format: str
    facts: Facts | SequenceFacts = field(repr=False)  # it has the names of all classes
    sizes: tuple[tuple[int, ...], ...]
    difference: float | None = None
    largest: float | None = None
    error: float | None = None
    same: float | None = None


def write(
    network: nn.Module,
    path: Path,
    format: Format,
    facts: Facts,
    images: Sequence[Tensor],
    calibration: Tensor | None = None,
    report: Path | None = None,
) -> Exported:
    """Writes a network to a file, and runs it in its runtime if that runs on this system.

    Args:
        network: in evaluation mode, in float32; reads normalized images and returns a tensor, or several.
        path: of the file, with the format's suffix.
        format: of the file.
        facts: what the file says about itself.
        images: real images to compare on, uint8 (batch, channels, height, width), which fit the facts.
        calibration: images to calibrate 8-bit layers on, likewise in one batch; None for a file in float32.
        report: with `calibration`, folder for the sensitivity of the layers to 8 bits; None for no report.

    Raises:
        ImportError: if `calibration` is given and torchao is missing.
        ValueError: for a network that cannot be exported, and a file whose outputs differ from the network's; nothing
            is left behind then.
    """
    if path.suffix == PACKAGE and (path / MANIFEST).is_file():
        check_writable(path.parent)
        target = path
    else:
        target = check_output_file(path)
    if report is not None:
        check_writable(report)
    pixels = sample(facts.channels, facts.size, facts.dynamic).to(format.pixels)
    program = exported(OnPixels(fuse(network, "graph"), facts.mean, facts.std), pixels, facts.dynamic)
    if calibration is not None:
        if report is not None:
            write_sensitivity(program, calibration, target.suffix, facts.dynamic, report)
        program = quantized(program, calibration, target.suffix, facts.dynamic)
    about = facts.to_json(), ("images",), facts.outputs

    def check(session: Session) -> Difference:
        answers = _answers(OnPixels(network, facts.mean, facts.std), format, session, images)
        if facts.outputs == DETECTIONS:
            return _detected_difference(answers, format)
        difference = _difference(answers)
        _check_difference(difference, format, facts.calibrated > 0)
        return difference if facts.outputs == ("outputs",) else difference._replace(same=None)

    difference = _kept(format, program, target, about, check)
    sizes = tuple((int(batch.shape[2]), int(batch.shape[3])) for batch in images)
    return Exported(target, format.name, facts, sizes, *(difference or ()))


def write_sequence(
    network: Session,
    path: Path,
    format: Format,
    facts: SequenceFacts,
    example: Example,
    batches: Sequence[Tensor],
    whole: Callable[[Session], Session],
) -> Exported:
    """Writes a decoder or Conformer to a file, as `write` does.

    Args:
        network: from a batch to its logits, in float32, as a tuple of one.
        path, format: of the file.
        facts: what the file says about itself.
        example: the module that is written, with inputs for it and their `dynamic_shapes`.
        batches: inputs to compare the file with the network on.
        whole: from the session of the file to the same function of the file.

    Raises ValueError as `write`.
    """
    target = check_output_file(path)
    about = facts.to_json(), facts.inputs, facts.outputs

    def check(session: Session) -> Difference:
        difference = _difference(_answers(network, format, whole(session), batches))
        _check_difference(difference, format, int8=False)
        return difference._replace(same=None)

    difference = _kept(format, traced(*example), target, about, check)
    return Exported(target, format.name, facts, tuple((batch.shape[1],) for batch in batches), *(difference or ()))


def _kept(
    format: Format,
    program: ExportedProgram,
    target: Path,
    about: tuple[str, Sequence[str], Sequence[str]],
    check: Callable[[Session], Difference],
) -> Difference | None:
    """Writes a program, and keeps the file if the check passes; about: facts, and the names of inputs and outputs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        written = Path(folder) / target.name
        session = session_of(format, program, written, *about)
        difference = None if session is None else check(session)
        files = sorted(Path(folder).iterdir(), key=lambda file: file == written)  # weights beside it first
        if target.is_dir():
            os.replace(target, Path(folder) / "replaced")
        for file in files:
            os.replace(file, target.parent / file.name)
    return difference


def _check_difference(difference: Difference, format: Format, int8: bool) -> None:
    exact = difference.error <= WORST_INT8 if int8 else difference.difference <= format.tolerance * difference.largest
    if exact:  # NaN is not
        return
    by = f"{difference.error:.0%} (root mean square)" if int8 else f"{difference.difference:.2g}"
    way = "calibrate on images like those of the training, or leave `int8` out" if int8 else "try another format"
    raise ValueError(
        f"The outputs of the {format.name} file differ from those of the network by {by}, the largest being"
        f" {difference.largest:.2g}, so it is not kept: {way}."
    )


def _answers(network: Session, format: Format, session: Session, images: Iterable[Tensor]) -> Iterator[Answer]:
    for batch in images:
        with torch.inference_mode():
            expected = network(batch)
        try:
            with silent_stderr():
                outputs = session(batch)
        except Exception as error:  # runtimes raise errors of many classes
            raise SettingError(
                f"{format.name} cannot run this network at its size ({reason_of(error)}): try a larger `size`, another"
                " format, or `dynamic=False` if the file is for any size."
            ) from error
        yield expected, outputs


def _detected_difference(answers: Iterable[Answer], format: Format) -> Difference:
    """The difference of the detections of both; raises ValueError for a file that has others than the network."""
    expected, outputs, same = matched(answers, format.tolerance)
    if same < LEAST_SAME:
        raise SettingError(
            f"Of the detections, {same:.1%} are the same in the {format.name} file and the network, expected"
            f" {LEAST_SAME:.0%}, so the file is not kept: try another format or other `images`."
        )
    return _difference([(expected, outputs)])._replace(same=same)


def _difference(answers: Iterable[Answer]) -> Difference:
    classes, batches = [], []
    for expected, outputs in answers:
        classes.append((expected[0].argmax(1) == outputs[0].argmax(1)).flatten())
        pairs = [(ours.double(), theirs - ours) for ours, theirs in zip(expected, outputs, strict=True)]
        batches.append([[by.abs().max(), x.abs().max(), by.square().sum(), x.square().sum()] for x, by in pairs])
    values = torch.tensor(batches)
    differences, largest = values[..., :2].amax(0).unbind(-1)
    noise, signal = values[..., 2:].sum(0).unbind(-1)
    errors = (noise / signal.clamp_min(TINY)).sqrt()
    worst = (differences / largest.clamp_min(TINY)).argmax()  # NaN is above all
    same = torch.cat(classes).float().mean()
    return Difference(float(differences[worst]), float(largest[worst]), float(errors[worst]), float(same))
