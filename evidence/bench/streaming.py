"""Networks over large images, strip by strip and at once, each in a process of its own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import timm
import torch
from torch import Tensor

from linvit.bench.exactness import TOLERANCES, check
from linvit.bench.machine import in_new_process, peak_above
from linvit.bench.options import Options as CommonOptions
from linvit.bench.page import OF_NETWORKS
from linvit.bench.rows import Progress, Report, Row, growth
from linvit.environment import memory
from linvit.ranges import Count, Range
from linvit.streaming import run_in_strips

PLAIN, STREAMED = "plain", "streamed"
BYTES_PER_PIXEL = 300  # of an ordinary forward, a little more than measured for MAViT-T
GIB = 2**30
COLUMNS = OF_NETWORKS


@dataclass(frozen=True)
class Options(CommonOptions):
    """Options of Networks, sides of the square images in pixels, GiB for a strip's maps."""

    names: Sequence[str] = ("mavit_tiny_linear",)
    sides: Sequence[Annotated[int, Range(32, 65_536)]] = (1024, 2048, 4096)
    strip_memory: Annotated[float, Range(above=0)] = 1.0
    rounds: Count = 1
    memory: bool = True


class Noise:
    """A square image of noise that is made row by row, 16 pixels of which have one colour; it is never in memory."""

    def __init__(self, side: int, seed: int) -> None:
        self.shape = (1, 3, side, side)
        self._cells = torch.randn(1, 3, -(-side // 16), -(-side // 16), generator=torch.Generator().manual_seed(seed))

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from start to stop."""
        side = self.shape[2]
        across = torch.arange(start, stop) // 16
        return self._cells[:, :, across][..., torch.arange(side) // 16]


def measure(options: Options, report: Report, progress: Progress) -> None:
    """Measures both, and checks the streamed logits against the ordinary ones where these fit into memory."""
    for name in options.names:
        for side in options.sides:
            progress.group(f"{name}, {side} × {side} px", 2)
            plain, expected = _measured(options, name, side, PLAIN, report, progress)
            streamed, logits = _measured(options, name, side, STREAMED, report, progress)
            if logits is not None and expected is not None:
                tolerance = TOLERANCES[torch.float32]
                streamed.error = check(f"{name} at {side} px", (logits,), (expected,), tolerance)
                streamed.base, streamed.ratio = f"{name} plain float32", plain.median_ms / streamed.median_ms
    report.findings["growth"] = growth(report.rows)
    report.findings["memory_growth"] = growth(report.rows, quantity="peak_mib")


def _measured(
    options: Options, name: str, side: int, variant: str, report: Report, progress: Progress
) -> tuple[Any, Tensor | None]:
    """Adds a row; also returns the logits, None if nothing was computed."""
    progress.say(f"computing {variant}")
    row = Row(name, variant, "float32", 1, options.threads, size=(side, side))
    report.rows.append(row)
    needed = BYTES_PER_PIXEL * side**2
    if variant == PLAIN and needed > memory("cpu"):
        row.skipped = f"needs about {needed / GIB:.0f} GiB of memory, this machine has {memory('cpu') / GIB:.0f}"
        return row, None
    try:
        milliseconds, row.peak_mib, logits = in_new_process(_computed, options, name, side, variant)
    except MemoryError:
        row.skipped = "the process was killed, often because memory runs out"
        return row, None
    row.median_ms, row.rounds, row.clock = milliseconds, 1, "cpu"
    progress.advance()
    return row, logits


def _computed(options: Options, name: str, side: int, variant: str) -> tuple[float, float | None, Tensor]:
    """Milliseconds of CPU time, peak in MiB above inputs and weights, and the logits."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    network = timm.create_model(name).eval().requires_grad_(False).to(memory_format=torch.channels_last)
    image = Noise(side, options.seed)
    whole = image.read(0, side).contiguous(memory_format=torch.channels_last) if variant == PLAIN else None
    results: list[Tensor | None] = []
    network(image.read(0, 64)[..., :64])  # the first call of a process is slower

    @torch.inference_mode()
    def call() -> None:
        if variant == PLAIN:
            results.append(network(whole))
        else:
            results.append(run_in_strips(network, image, memory=options.strip_memory).logits)

    began = time.process_time()
    peak = peak_above(call)
    milliseconds = 1000 * (time.process_time() - began)
    (logits,) = results
    assert logits is not None
    return milliseconds, peak, logits.clone()
