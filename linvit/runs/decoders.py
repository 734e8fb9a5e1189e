"""Shared by the tasks of decoders: networks, their list, and sections of the reports."""

import itertools
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from linvit.analysis.figures import WIDTH, subplots
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.source import Source
from linvit.data.text.recall import RecallPreprocessing
from linvit.layers.mechanisms import at
from linvit.models.registry import create
from linvit.models.sequence import SIZES, Decoder, DecoderCache
from linvit.runs.named import NamedSpec
from linvit.runs.spec import Section
from linvit.tasks.language import IGNORED

if TYPE_CHECKING:
    from linvit.runs.run import Run

VOCABULARIES = {"sequence_nano": 257, "sequence_340m": 32_000}
CONTEXT = 2048
POINTS = 32
READ, PIECE = 256, 37  # tokens


class DecoderSpec(NamedSpec):
    """A task that trains a token decoder."""

    family = "sequence"
    names_classes = False
    instead_of_predict = "use `generate` or `evaluate` instead"

    def facts(self, run: "Run", source: Source) -> tuple[str, ...]:
        return (f"data: {cast(RecallPreprocessing, source.preprocessing).corpus}",)

    def sections(self, run: "Run", source: Source) -> list[Section]:
        placed, device = run.placed_network()
        network = cast(Decoder, placed)
        figure = position_figure(*bits_by_position(network, source, device))
        by_position = "Bits per token by position", [figure_image(figure, "bits per token by position in the row")]
        if not isinstance(network, Decoder):
            return [by_position]  # an exported file has one form
        tokens = next(iter(source.val_dataloader()))[0][:1, :READ].to(device)
        rows = []
        for dtype in (torch.float32, torch.float64):
            differences = distances(deepcopy(network).to(dtype), tokens)
            arithmetic = {"arithmetic": str(dtype).removeprefix("torch.")}
            rows.append(arithmetic | {name: f"{value:.0e}" for name, value in differences.items()})
        words = (
            "Largest difference of a logit from a single pass over the row, relative to the largest logit; one"
            " document."
        )
        return [by_position, ("The same row, computed in other ways", [table(rows), paragraph(words)])]

    listing_caption = (
        f"memory: cache of one sequence after {CONTEXT:,} tokens, float32; for softmax it grows with the tokens"
    )

    def listing(self) -> Iterator[dict[str, Any]]:
        """Decoders with each mechanism: name, mechanism, vocabulary, parameters, memory (bytes of the state after
        CONTEXT tokens, float32), grows (whether this depends on the tokens)."""
        for name in SIZES:
            for mechanism, entry in at("sequences").items():
                memory = DecoderCache()
                with torch.device("meta"):
                    network = create(name, VOCABULARIES[name], mechanism=mechanism)
                    cast(Decoder, network).read(torch.zeros(1, CONTEXT, dtype=torch.long), memory)
                yield {
                    "name": name,
                    "mechanism": mechanism,
                    "vocabulary": VOCABULARIES[name],
                    "parameters": sum(parameter.numel() for parameter in network.parameters()),
                    "memory": memory.num_bytes(),
                    "grows": entry.axes is None,
                }


@torch.inference_mode()
def bits_by_position(network: Decoder, source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean bits per validation target at each position of a row, and their counts; both (context,)."""
    bits = counts = torch.zeros(())
    for tokens, targets in source.val_dataloader():
        wanted = targets["targets"].to(device)
        logits = network(tokens.to(device), targets["documents"].to(device)).float()
        nats = cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        bits = bits + nats.view_as(wanted).double().sum(0).cpu() / torch.log(torch.tensor(2.0))
        counts = counts + (wanted != IGNORED).sum(0).cpu()
    return bits / counts.clamp_min(1), counts


def position_figure(bits: Tensor, counts: Tensor) -> Figure:
    """Mean bits per token over the position in the row, averaged over neighbours, on a logarithmic axis."""
    positions = torch.arange(1, len(bits) + 1)
    edges = torch.logspace(0, torch.log10(torch.tensor(float(len(bits) + 1))), POINTS).round().unique()
    middle, mean = [], []
    for low, high in itertools.pairwise(edges.tolist()):
        group = (counts > 0) & (positions >= low) & (positions < high)
        if group.any():
            weights = counts[group].double()
            middle.append(float((positions[group] * weights).sum() / weights.sum()))
            mean.append(float((bits[group] * weights).sum() / weights.sum()))
    figure, axes = subplots((WIDTH, 3))
    axes.plot(middle, mean, marker="o", color="#0072B2")
    axes.set(xlabel="position in the row", ylabel="bits per token", xscale="log")
    return figure


@torch.inference_mode()
def distances(network: Decoder, tokens: Tensor) -> dict[str, float]:
    """Relative distance of the logits of tokens (1, tokens) from the chunked form, for other ways to compute them."""

    def in_pieces(length: int) -> Tensor:
        memory = DecoderCache()
        return torch.cat([network.read(piece, memory) for piece in tokens.split(length, dim=1)], dim=1)

    whole = network(tokens)
    ways = {
        "explicit matrix": network(tokens, form="matrix"),
        f"in pieces of {PIECE} tokens": in_pieces(PIECE),
        "token by token": in_pieces(1),
    }
    return {name: float((logits - whole).abs().max() / whole.abs().max()) for name, logits in ways.items()}
