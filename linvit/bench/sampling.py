"""Speed of drawing images as they grow: a small DiT with softmax attention against the same one with MALA.

`python -m linvit.bench.sampling FIGURE.svg` measures one sampling step of one image of 64 to 16,384 tokens, one
thread, the mechanisms taking turns; it prints a table and draws it.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from linvit.analysis.figures import figure_path, save_figure
from linvit.models.dit import DiT
from linvit.models.registry import create

MECHANISMS = ("softmax", "mala")
COLOURS = {"softmax": "#D55E00", "mala": "#0072B2"}
SIDES = (16, 32, 64, 128, 256)  # pixels; patches of 2
STEPS = 50


@dataclass(frozen=True)
class Point:
    """One pass of one image: its side in pixels, tokens, and best seconds over the rounds."""

    mechanism: str
    side: int
    tokens: int
    seconds: float


@torch.inference_mode()
def measure(sides: Sequence[int] = SIDES, rounds: int = 5, name: str = "dit_nano_patch2") -> list[Point]:
    """Points of both mechanisms at every side; each round times each once, after one pass that is not timed."""
    torch.manual_seed(0)
    points = []
    for side in sides:
        networks = {
            mechanism: create(name, 10, input_size=side, mechanism=mechanism).eval() for mechanism in MECHANISMS
        }
        channels = networks[MECHANISMS[0]].channels
        inputs = torch.randn(1, channels, side, side), torch.tensor([500]), torch.tensor([1])
        best = dict.fromkeys(MECHANISMS, float("inf"))
        for network in networks.values():
            network(*inputs)
        for _ in range(rounds):
            for mechanism, network in networks.items():
                best[mechanism] = min(best[mechanism], _seconds(network, inputs))
        tokens = (side // networks[MECHANISMS[0]].patch_size) ** 2
        points += [Point(mechanism, side, tokens, best[mechanism]) for mechanism in MECHANISMS]
    return points


def _seconds(network: DiT, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    started = time.perf_counter()
    network(*inputs)
    return time.perf_counter() - started


def sampling_figure(points: Sequence[Point]) -> Figure:
    """Images a second at 50 steps over the number of tokens, both logarithmic."""
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for mechanism in MECHANISMS:
        own = [point for point in points if point.mechanism == mechanism]
        rates = [1 / (STEPS * point.seconds) for point in own]
        axes.plot(
            [point.tokens for point in own], rates, marker="o", markersize=4, color=COLOURS[mechanism], label=mechanism
        )
    tokens = sorted({point.tokens for point in points})
    axes.set(xscale="log", yscale="log", xlabel="tokens of an image", ylabel=f"images a second, {STEPS} steps")
    axes.set_xticks(tokens, [f"{number:,}" for number in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def markdown(points: Sequence[Point]) -> list[str]:
    """The lines of a table."""
    lines = ["| side, px | tokens | softmax, ms a pass | MALA, ms a pass | ratio |", "|---:|---:|---:|---:|---:|"]
    for side in dict.fromkeys(point.side for point in points):
        softmax, mala = (
            next(point for point in points if (point.side, point.mechanism) == (side, mechanism))
            for mechanism in MECHANISMS
        )
        lines.append(
            f"| {side} | {softmax.tokens:,} | {1e3 * softmax.seconds:.2f} | {1e3 * mala.seconds:.2f}"
            f" | {softmax.seconds / mala.seconds:.2f} |"
        )
    return lines


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m linvit.bench.sampling", description=__doc__.split("\n")[0])
    parser.add_argument("figure", type=figure_path, help="where the figure goes, .svg or .png")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="sides in pixels")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; the best counts (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    points = measure(options.sides, options.rounds)
    print("\n".join(markdown(points)))
    save_figure(sampling_figure(points), options.figure)


if __name__ == "__main__":
    main()
