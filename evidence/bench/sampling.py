"""One step of generating an image as images grow, a DiT with MALA against one with softmax."""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from evidence.bench.decoding import MECHANISM, per_second
from linvit.bench import machine
from linvit.bench.exactness import TOLERANCES
from linvit.bench.networks import randomised
from linvit.bench.options import Options as CommonOptions
from linvit.bench.page import ERROR, PEAK, SIZE, TIME, TOKENS, Cell, against
from linvit.bench.rows import Progress, Report, Row, Trial, growth, measure_groups
from linvit.models.by_name import create
from linvit.models.dit import DiT
from linvit.ranges import Count

CLASSES = 10
STEPS = 50  # of sampling an image
COLUMNS: dict[str, Cell] = {
    **MECHANISM, **SIZE, **TOKENS, **TIME,
    f"images/s, {STEPS} steps": per_second(STEPS), "× softmax": against("softmax"), **ERROR, **PEAK,
}  # fmt: skip


@dataclass(frozen=True)
class Options(CommonOptions):
    """Mechanisms in one DiT, and sides of the square images in pixels."""

    names: Sequence[str] = ("softmax", "mala")
    network: str = "dit_nano_patch2"
    sides: Sequence[Count] = (16, 32, 64, 128, 256)

    def __post_init__(self) -> None:
        for name, side in itertools.product(self.names, self.sides):
            _network(self, name, side, "meta")  # refuses unknown names and sides that do not fit

    def least_bytes(self) -> int:
        """Tokens of a block in float64, which the network is checked in."""
        return 64 * max(self.sides, default=0) ** 2


def _network(options: Options, name: str, side: int, device: str | None = None) -> DiT:
    with torch.device(device or options.device):
        return cast(DiT, create(options.network, CLASSES, family="generation", input_size=side, mechanism=name))


@torch.inference_mode()
def measure(options: Options, report: Report, progress: Progress) -> None:
    """Checks every mechanism against itself in float64, then times one pass of one image, side by side."""
    torch.manual_seed(options.seed)
    groups = (
        (f"{options.network}, {side} × {side} px", (_trial(options, name, side) for name in options.names))
        for side in options.sides
    )
    measure_groups(groups, options, report, progress)
    report.findings["growth"] = growth(report.rows)


def _trial(options: Options, name: str, side: int) -> Trial:
    network = _network(options, name, side)
    randomised(network, options.seed)
    image = torch.randn(1, network.channels, side, side, device=options.device)
    numbers = [torch.tensor([value], device=options.device) for value in (500, 1)]  # time and class
    tokens = (side // network.patch_size) ** 2
    return Trial(
        Row(name, options.network, "float32", 1, options.threads, tokens=tokens, size=(side, side)),
        f"{name} at {side} px",
        make=lambda: partial(network, image, *numbers),
        expected=lambda: (deepcopy(network).double()(image.double(), *numbers),),
        tolerance=TOLERANCES[torch.float32],
        results=lambda call: (call(),),
        excused=(),
        peak=machine.peak_above if options.device == "cpu" else machine.peak_above_on_gpu,
        rivals={"softmax": f"softmax at {side} px"},
    )
