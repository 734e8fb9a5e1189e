"""Networks as files of other runtimes: written, run there, and compared with the network before they are kept."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit.deploy.facts import Facts
from linvit.deploy.formats import Format, Session, format_of, session_of
from linvit.deploy.graph import OnPixels, exported, sample
from linvit.files import check_output_file, reason_of
from linvit.fusion import fuse

TOLERANCE = 1e-4  # of the largest output; what rounding leaves is a hundred times less


@dataclass(frozen=True)
class Exported:
    """An exported file.

    difference: the largest difference between an output and that of the network in float32, over all `sizes`, and
    largest: the largest value of that output; of several outputs, they belong to the least exact one.
    """

    path: Path
    format: str
    facts: Facts
    difference: float
    largest: float
    sizes: tuple[tuple[int, int], ...]


def write(network: nn.Module, path: str | Path, facts: Facts, images: Sequence[Tensor]) -> Exported:
    """Writes a network to a file of the format that the path's suffix names, and runs it there.

    Args:
        network: in evaluation mode, in float32; reads normalized images and returns a tensor, or several.
        path: .onnx, .xml (OpenVINO, with the weights next to it as .bin), .pt2 or .pte.
        facts: what the file says about itself.
        images: real images to compare on, uint8 (batch, channels, height, width), which fit the facts.

    Raises:
        ImportError: if the runtime is missing.
        ValueError: for another suffix, a network that cannot be exported, and a file whose outputs differ from the
            network's; nothing is left behind then.
    """
    target = check_output_file(path)
    format = format_of(target)
    pixels = sample(facts.channels, facts.size, facts.dynamic)
    program = exported(OnPixels(fuse(network, "graph"), facts.mean, facts.std), pixels, facts.dynamic)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        written = Path(folder) / target.name
        session = session_of(format, program, facts.to_json(), written, facts.outputs)
        difference, largest = _compared(OnPixels(network, facts.mean, facts.std), format, session, images)
        if not difference <= TOLERANCE * largest:  # NaN is not
            raise ValueError(
                f"The outputs of the {format.name} file differ from those of the network by {difference:.2g}, the"
                f" largest being {largest:.2g}, so it is not kept: try another format."
            )
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == written):  # weights beside it first
            os.replace(file, target.parent / file.name)
    sizes = tuple((int(batch.shape[2]), int(batch.shape[3])) for batch in images)
    return Exported(target, format.name, facts, difference, largest, sizes)


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
