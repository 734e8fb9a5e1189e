"""Networks as files of other runtimes: written, run there, and compared with the network before they are kept."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit.deploy.coreml import MANIFEST, PACKAGE
from linvit.deploy.facts import Facts
from linvit.deploy.formats import Format, session_of
from linvit.deploy.graph import OnPixels, exported, sample
from linvit.deploy.runtime import Session
from linvit.files import check_output_file, check_writable, reason_of
from linvit.fusion import fuse


@dataclass(frozen=True)
class Exported:
    """An exported file.

    difference: the largest difference between an output and that of the network in float32, over all `sizes`, and
    largest: the largest value of that output; of several outputs, they belong to the least exact one. Both are None if
    the runtime does not run on this system.
    """

    path: Path
    format: str
    facts: Facts
    difference: float | None
    largest: float | None
    sizes: tuple[tuple[int, int], ...]


def write(network: nn.Module, path: Path, format: Format, facts: Facts, images: Sequence[Tensor]) -> Exported:
    """Writes a network to a file, and runs it in its runtime if that runs on this system.

    Args:
        network: in evaluation mode, in float32; reads normalized images and returns a tensor, or several.
        path: of the file, with the format's suffix.
        format: of the file.
        facts: what the file says about itself.
        images: real images to compare on, uint8 (batch, channels, height, width), which fit the facts.

    Raises:
        ValueError: for a network that cannot be exported, and a file whose outputs differ from the network's; nothing
            is left behind then.
    """
    target = _replaceable(path)
    pixels = sample(facts.channels, facts.size, facts.dynamic).to(format.pixels)
    program = exported(OnPixels(fuse(network, "graph"), facts.mean, facts.std), pixels, facts.dynamic)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        written = Path(folder) / target.name
        session = session_of(format, program, facts.to_json(), written, facts.outputs)
        difference, largest = None, None
        if session is not None:
            difference, largest = _compared(OnPixels(network, facts.mean, facts.std), format, session, images)
            if not difference <= format.tolerance * largest:  # NaN is not
                raise ValueError(
                    f"The outputs of the {format.name} file differ from those of the network by {difference:.2g}, the"
                    f" largest being {largest:.2g}, so it is not kept: try another format."
                )
        files = sorted(Path(folder).iterdir(), key=lambda file: file == written)  # weights beside it first
        if target.is_dir():
            os.replace(target, Path(folder) / "replaced")
        for file in files:
            os.replace(file, target.parent / file.name)
    sizes = tuple((int(batch.shape[2]), int(batch.shape[3])) for batch in images)
    return Exported(target, format.name, facts, difference, largest, sizes)


def _replaceable(path: Path) -> Path:
    """The path; raises ValueError or OSError if something else than a file or package of Core ML is there."""
    if path.suffix == PACKAGE and (path / MANIFEST).is_file():
        check_writable(path.parent)
        return path
    return check_output_file(path)


def _compared(network: nn.Module, format: Format, session: Session, images: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference from the network over all images, and the output's largest value, of the worst output."""
    batches = []
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
        pairs = zip(expected, outputs, strict=True)
        batches.append([[(ours - theirs).abs().max(), ours.abs().max()] for ours, theirs in pairs])
    differences, largest = torch.tensor(batches).amax(0).unbind(-1)
    worst = (differences / largest.clamp_min(torch.finfo(torch.float32).tiny)).argmax()  # NaN is above all
    return float(differences[worst]), float(largest[worst])
