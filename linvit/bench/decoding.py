"""Speed and memory of writing token by token, linear mechanisms against softmax with a cache of keys and values.

`python -m linvit.bench.decoding FIGURE.svg` measures one decoder after contexts of 1,024, 8,192 and 65,536 tokens,
one sequence, one thread, mechanisms in turn, each context in rounds; it prints a table and draws it.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from linvit.analysis.figures import figure_path, save_figure
from linvit.layers.cache import KeyValues
from linvit.models.registry import create
from linvit.models.sequence import Decoder, DecoderCache

MECHANISMS = ("softmax", "linear", "mala", "rala")
CONTEXTS = (1024, 8192, 65_536)
COLOURS = {"softmax": "#D55E00", "linear": "#555555", "mala": "#0072B2", "rala": "#009E73"}
PIECE = 2048  # tokens of the context that are read at once
VOCABULARY = 257


@dataclass(frozen=True)
class Point:
    """Decoding after a context: best seconds a token over the rounds, and bytes that the decoder keeps."""

    mechanism: str
    context: int
    seconds: float
    memory: int


@torch.inference_mode()
def measure(
    name: str = "sequence_nano", contexts: Sequence[int] = CONTEXTS, tokens: int = 32, rounds: int = 5
) -> list[Point]:
    """Points of every mechanism; after each context `tokens` are written, `rounds` times, in turn."""
    torch.manual_seed(0)
    networks = {mechanism: create(name, VOCABULARY, mechanism=mechanism).eval() for mechanism in MECHANISMS}
    points = []
    for context in contexts:
        held = {mechanism: filled(network, context) for mechanism, network in networks.items()}
        sizes = {mechanism: memory.num_bytes() for mechanism, memory in held.items()}
        best = dict.fromkeys(MECHANISMS, float("inf"))
        for _ in range(rounds):
            for mechanism, network in networks.items():
                best[mechanism] = min(best[mechanism], _seconds(network, held[mechanism], tokens))
        points += [Point(mechanism, context, best[mechanism], sizes[mechanism]) for mechanism in MECHANISMS]
    return points


@torch.inference_mode()
def filled(network: Decoder, context: int) -> DecoderCache:
    """What a decoder keeps of that many tokens.

    They are read by linear mechanisms; softmax attention's keys and values are drawn, because reading takes time
    quadratic in them, and writing costs the same whatever they are.
    """
    memory = DecoderCache()
    if network.mechanism != "softmax":
        for piece in torch.randint(VOCABULARY, (1, context)).split(PIECE, dim=1):
            network.read(piece, memory)
        return memory
    network.read(torch.randint(VOCABULARY, (1, 4)), memory)
    for layer in memory.layers:
        assert isinstance(layer.read, KeyValues)
        assert layer.read.key is not None
        more = (*layer.read.key.shape[:2], context - layer.read.length, layer.read.key.shape[-1])
        layer.read.append(torch.randn(more), torch.randn(more))
    memory.tokens = context
    return memory


def _seconds(network: Decoder, memory: DecoderCache, tokens: int) -> float:
    token = torch.zeros(1, 1, dtype=torch.long)
    start = time.perf_counter()
    for _ in range(tokens):
        token = network.read(token, memory)[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / tokens


def decoding_figure(points: Sequence[Point]) -> Figure:
    """Tokens a second and memory over the context, whose axis is logarithmic, as is that of memory."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for mechanism in dict.fromkeys(point.mechanism for point in points):
        own = [point for point in points if point.mechanism == mechanism]
        style = {"marker": "o", "color": COLOURS[mechanism], "label": mechanism, "alpha": 0.8}
        speed.plot([point.context for point in own], [1 / point.seconds for point in own], **style)
        memory.plot([point.context for point in own], [point.memory / 2**20 for point in own], **style)
    for axes, label in ((speed, "tokens a second"), (memory, "memory of what was read, MiB")):
        axes.set(xlabel="tokens of context", ylabel=label, xscale="log")
        contexts = sorted({point.context for point in points})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.set_ylim(0, None)
    memory.set_yscale("log")
    memory.legend(frameon=False)
    return figure


def markdown(points: Sequence[Point]) -> list[str]:
    """The table, line by line."""
    rows = ["| context | mechanism | tokens a second | against softmax | memory |", "|---:|---|---:|---:|---:|"]
    softmax = {point.context: point.seconds for point in points if point.mechanism == "softmax"}
    for point in points:
        ratio = softmax[point.context] / point.seconds
        rows.append(
            f"| {point.context:,} | {point.mechanism} | {1 / point.seconds:,.0f} | {ratio:.2f}× |"
            f" {point.memory / 2**20:.2f} MiB |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", type=figure_path)
    parser.add_argument("--model", default="sequence_nano", help="a name that `linvit models --sequence` lists")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    points = measure(options.model, options.contexts)
    print("\n".join(markdown(points)))
    save_figure(decoding_figure(points), options.figure)


if __name__ == "__main__":
    main()
