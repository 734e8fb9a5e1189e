"""Memory and time of a segmentor as images grow, linear in all stages (LLLL) against softmax in the last two (LLSS).

`python -m linvit.bench.dense_memory FIGURE.svg` measures Semantic FPN on RAVLT-T with one image and one thread, each
size in a process of its own, prints a table and draws it.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from linvit.analysis.figures import figure_path, save_figure
from linvit.bench.clock import clock_for
from linvit.bench.memory import MEBIBYTE, in_new_process, peak_above
from linvit.models.dense.frameworks import build_dense

BACKBONES = {"LLSS": "ravlt_tiny", "LLLL": "ravlt_tiny_linear"}
SIZES = ((256, 1024), (384, 1536), (512, 2048), (768, 3072))
COLOURS = {"LLSS": "#D55E00", "LLLL": "#0072B2"}
CLASSES, ROUNDS = 150, 2


@dataclass(frozen=True)
class Point:
    """One forward pass: peak of memory above what was in use before (bytes), the better of two CPU times (seconds)."""

    pattern: str
    size: tuple[int, int]
    memory: float
    seconds: float

    @property
    def pixels(self) -> int:
        return math.prod(self.size)


def measure(pattern: str, size: tuple[int, int]) -> Point:
    """Measures in a new process, whose peak nothing else has raised."""
    return in_new_process(measure_here, pattern, size)


@torch.inference_mode()
def measure_here(pattern: str, size: tuple[int, int]) -> Point:
    """Memory and time of this process.

    Raises:
        ValueError: where the system does not tell a process its peak.
    """
    torch.set_num_threads(1)
    network = build_dense("semantic_fpn", BACKBONES[pattern], CLASSES).eval()
    network(torch.zeros(1, 3, 64, 64))  # what the libraries allocate once
    image = torch.randn(1, 3, *size)
    memory = peak_above(lambda: network(image))
    if memory is None:
        raise ValueError("this system does not tell a process its peak of memory: measure on Linux")
    clock = clock_for("cpu", 1)
    return Point(pattern, size, memory * MEBIBYTE, min(clock.seconds(lambda: network(image), 1) for _ in range(ROUNDS)))


def growth(points: Sequence[Point], name: str) -> float:
    """The exponent of pixels with which a measure grows between the two largest sizes."""
    one, two = sorted(points, key=lambda point: point.pixels)[-2:]
    return math.log(getattr(two, name) / getattr(one, name)) / math.log(two.pixels / one.pixels)


def memory_figure(points: Sequence[Point]) -> Figure:
    """Memory and time over pixels, both axes logarithmic, and a grey line that grows as the pixels do."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = {"memory": ("peak memory, GiB", 2**30), "seconds": ("seconds", 1)}
    for axes, (name, (label, unit)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for pattern in BACKBONES:
            own = sorted((point for point in points if point.pattern == pattern), key=lambda point: point.pixels)
            pixels = [point.pixels / 1e6 for point in own]
            values = [getattr(point, name) / unit for point in own]
            words = f"{pattern}: pixels^{growth(own, name):.2f}"
            axes.plot(pixels, values, marker="o", color=COLOURS[pattern], label=words)
        axes.plot(pixels, [values[0] * pixel / pixels[0] for pixel in pixels], color="#BBBBBB", label="linear")
        axes.set(xlabel="million pixels", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(pixels, [f"{pixel:.2g}" for pixel in pixels], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def markdown(points: Sequence[Point]) -> list[str]:
    """The table, line by line."""
    rows = ["| image | pattern | peak memory | time |", "|---|---|---:|---:|"]
    for point in points:
        height, width = point.size
        rows.append(
            f"| {height} × {width} | {point.pattern} | {point.memory / 2**30:.2f} GiB | {point.seconds:.2f} s |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", nargs="?", type=figure_path)
    options = parser.parse_args()
    points = [measure(pattern, size) for size, pattern in itertools.product(SIZES, BACKBONES)]
    print("\n".join(markdown(points)))
    if options.figure:
        save_figure(memory_figure(points), options.figure)


if __name__ == "__main__":
    main()
