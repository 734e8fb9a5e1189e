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

from linvit.deploy.facts import DETECTIONS, Facts, SequenceFacts
from linvit.deploy.formats import Format, session_of
from linvit.deploy.graph import OnPixels, exported, sample, traced
from linvit.deploy.int8 import quantized, write_sensitivity
from linvit.deploy.runtimes import MANIFEST, PACKAGE, Session, silent_stderr
from linvit.errors import SettingError
from linvit.files import check_output_file, check_writable, explained
from linvit.fusion import fuse

WORST_INT8 = 0.5  # of the outputs' root mean square; trained networks lose a few hundredths, outputs of zero are 1
MASK_TOLERANCE = 10
"""Masks are steeper: in trained networks they differ by up to 1e-4 where boxes differ by 1e-6 of their size."""

LEAST_SAME = 0.99
"""Rounding may decide otherwise which of two equal boxes suppresses the other, or which detection is the last."""

TINY = torch.finfo(torch.float32).tiny
Example = tuple[nn.Module, tuple[Tensor, ...], tuple[Any, ...] | None]
Outputs = tuple[Tensor, ...]


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

    network: in evaluation mode, in float32; reads normalized images and returns a tensor, or several. images: real
    ones to compare on, uint8 (batch, channels, height, width), which fit the facts. calibration: images to calibrate
    8-bit layers on, in one batch; None for a file in float32. report: with `calibration`, folder for the sensitivity
    of the layers to 8 bits.

    Raises ValueError for a network that cannot be exported, and a file whose outputs differ from the network's; nothing
    is left behind then. ImportError without torchao, if `calibration` is given.
    """
    if path.suffix == PACKAGE and (path / MANIFEST).is_file():
        check_writable(path.parent)
    else:
        path = check_output_file(path)
    if report is not None:
        check_writable(report)
    pixels = sample(facts.channels, facts.size, facts.dynamic).to(format.pixels)
    program = exported(OnPixels(fuse(network, "graph"), facts.mean, facts.std), pixels, facts.dynamic)
    if calibration is not None:
        if report is not None:
            write_sensitivity(program, calibration, path.suffix, facts.dynamic, report)
        program = quantized(program, calibration, path.suffix, facts.dynamic)

    def compare(session: Session) -> Difference:
        answers = _answers(OnPixels(network, facts.mean, facts.std), format, session, images)
        if facts.outputs == DETECTIONS:
            return _detected_difference(answers, format)
        difference = _small_difference(answers, format, facts.calibrated > 0)
        return difference if facts.outputs == ("outputs",) else difference._replace(same=None)

    return _kept(format, program, path, facts, compare, [tuple(batch.shape[2:]) for batch in images])


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

    network: from a batch to its logits, in float32, as a tuple of one. example: the module that is written, with inputs
    for it and their `dynamic_shapes`. batches: inputs to compare on. whole: from the session of the file to the same
    function as `network`.
    """

    def compare(session: Session) -> Difference:
        answers = _answers(network, format, whole(session), batches)
        return _small_difference(answers, format, int8=False)._replace(same=None)

    sizes = [tuple(batch.shape[1:2]) for batch in batches]
    return _kept(format, traced(*example), check_output_file(path), facts, compare, sizes)


def _kept(
    format: Format,
    program: ExportedProgram,
    target: Path,
    facts: Facts | SequenceFacts,
    compare: Callable[[Session], Difference],
    sizes: Sequence[tuple[int, ...]],
) -> Exported:
    """Writes a program, and keeps the file if `compare`, which gets its session, raises nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        written = Path(folder) / target.name
        session = session_of(format, program, written, facts.to_json(), facts.inputs, facts.outputs)
        difference = () if session is None else compare(session)
        files = sorted(Path(folder).iterdir(), key=lambda file: file == written)  # weights beside it first
        if target.is_dir():
            os.replace(target, Path(folder) / "replaced")
        for file in files:
            os.replace(file, target.parent / file.name)
    return Exported(target, format.name, facts, tuple(sizes), *difference)


def _answers(
    network: Session, format: Format, session: Session, images: Iterable[Tensor]
) -> Iterator[tuple[Outputs, Outputs]]:
    """The outputs of the network and of the file, batch by batch."""
    for batch in images:
        with torch.inference_mode():
            expected = network(batch)
        with (
            explained(
                lambda reason: (
                    f"{format.name} cannot run this network at its size ({reason}): try a larger `size`, another"
                    " format, or `dynamic=False` if the file is for any size."
                ),
                raised=SettingError,
            ),
            silent_stderr(),
        ):
            outputs = session(batch)
        yield expected, outputs


def _detected_difference(answers: Iterable[tuple[Outputs, Outputs]], format: Format) -> Difference:
    """The difference of the detections of both; raises ValueError for a file that has others than the network."""
    expected, outputs, same = matched(answers, format.tolerance)
    if same < LEAST_SAME:
        raise SettingError(
            f"Of the detections, {same:.1%} are the same in the {format.name} file and the network, expected"
            f" {LEAST_SAME:.0%}, so the file is not kept: try another format or other `images`."
        )
    return _difference([(expected, outputs)])._replace(same=same)


def _small_difference(answers: Iterable[tuple[Outputs, Outputs]], format: Format, int8: bool) -> Difference:
    """The difference of the outputs of both; raises ValueError for one that is too large, or NaN."""
    difference = _difference(answers)
    by, way = f"{difference.difference:.2g}", "try another format"
    exact = difference.difference <= format.tolerance * difference.largest
    if int8:
        exact, by = difference.error <= WORST_INT8, f"{difference.error:.0%} (root mean square)"
        way = "calibrate on images like those of the training, or leave `int8` out"
    if not exact:
        raise ValueError(
            f"The outputs of the {format.name} file differ from those of the network by {by}, the largest being"
            f" {difference.largest:.2g}, so it is not kept: {way}."
        )
    return difference


def _difference(answers: Iterable[tuple[Outputs, Outputs]]) -> Difference:
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


def matched(answers: Iterable[tuple[Outputs, Outputs]], tolerance: float) -> tuple[Outputs, Outputs, float]:
    """The detections of all images that network and file agree on, in pairs, and their share of all detections.

    Two detections agree if their labels are the same, if their scores, and boxes as shares of the largest coordinate,
    differ by at most the tolerance, and their masks by at most ten times as much. answers: for each image the outputs
    DETECTIONS of the network and of the file.
    """
    ours: list[Outputs] = []
    theirs: list[Outputs] = []
    count = 0
    for expected, outputs in answers:
        here, there = _pairs(expected, outputs, tolerance)
        ours.append(tuple(values[here] for values in expected))
        theirs.append(tuple(values[there] for values in outputs))
        count += max(len(expected[0]), len(outputs[0]))
    if count == 0:
        raise SettingError(
            "The network detects nothing in the images that the file is compared on: set `images` to some with objects"
            " of its classes."
        )
    share = sum(len(outputs[0]) for outputs in ours) / count
    expected, outputs = (tuple(map(torch.cat, zip(*each, strict=True))) for each in (ours, theirs))
    return expected, outputs, share


def _pairs(expected: Outputs, outputs: Outputs, tolerance: float) -> tuple[Tensor, Tensor]:
    """The places of the detections that agree, each the closest to the other."""
    if 0 in (len(expected[0]), len(outputs[0])):
        return torch.arange(0), torch.arange(0)
    scale = expected[0].abs().amax().clamp_min(1)  # pixels
    ours, theirs = (
        torch.cat((boxes / scale, scores[:, None], masks.flatten(1) / MASK_TOLERANCE), dim=1).double()
        for boxes, scores, _, masks in (expected, outputs)
    )
    gaps = (ours[:, None] - theirs).abs().amax(-1)  # cdist would leave NaN out
    gaps[expected[2][:, None] != outputs[2]] = torch.inf
    closest, back = gaps.argmin(1), gaps.argmin(0)
    here = torch.arange(len(ours))
    agree = (back[closest] == here) & (gaps[here, closest] <= tolerance)
    return here[agree], closest[agree]
