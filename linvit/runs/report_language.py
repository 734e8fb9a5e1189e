"""`linvit eval --report` of a decoder: what its tokens cost by their place in a row, and what it writes."""

import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linvit.analysis.report import paragraph, picture, preformatted, table, write_page
from linvit.data import Source, TextPreprocessing
from linvit.models.sequence import Decoder, DecoderCache
from linvit.runs.evaluate import table_rows
from linvit.runs.generate import write_text
from linvit.runs.report import curve
from linvit.runs.restore import Restored, source_for
from linvit.tasks.language import IGNORED

PROMPTS = ("", "def ", "import ")
WRITTEN, TEMPERATURE = 300, 0.8
POINTS = 32
READ, PIECE = 256, 37  # tokens


def write_report(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    path: Path,
    data: str | None = None,
    num_workers: int | None = None,
) -> None:
    """Writes the page of a decoder on source_for(restored, data); measured is what `evaluate` returned."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = source_for(restored, data, num_workers)
    told = f"{restored.told()} Data: {source.preprocessing.corpus}."
    network: Any = restored.judged.to(device).eval()
    bits, counts = bits_by_place(network, source, device)
    sections: list[tuple[str, Any]] = [
        ("What was measured", [table(table_rows(measured)), paragraph(told)]),
        *curve(restored),
        ("Cost by place in the row", [picture(place_figure(bits, counts), "bits a token by place in the row")]),
    ]
    sections.append(("One row read in other ways", _forms(network, source, device)))
    if isinstance(restored.preprocessing, TextPreprocessing):
        sections.append(("What it writes", _samples(restored)))
    write_page(path, f"linvit: {restored.name}", sections)


@torch.inference_mode()
def bits_by_place(network: nn.Module, source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean bits of the validation targets at each place of a row, and how many there are; both (context,)."""
    bits = counts = torch.zeros(())
    for tokens, targets in source.val_dataloader():
        wanted = targets["targets"].to(device)
        logits = network(tokens.to(device), targets["documents"].to(device)).float()
        nats = cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        bits = bits + nats.view_as(wanted).double().sum(0).cpu() / torch.log(torch.tensor(2.0))
        counts = counts + (wanted != IGNORED).sum(0).cpu()
    return bits / counts.clamp_min(1), counts


def place_figure(bits: Tensor, counts: Tensor) -> Figure:
    """Mean bits a token over the place in the row, in groups of neighbours on a logarithmic axis."""
    places = torch.arange(1, len(bits) + 1)
    asked = counts > 0
    edges = torch.logspace(0, torch.log10(torch.tensor(float(len(bits) + 1))), POINTS).round().unique()
    middle, mean = [], []
    for low, high in itertools.pairwise(edges.tolist()):
        group = asked & (places >= low) & (places < high)
        if group.any():
            weights = counts[group].double()
            middle.append(float((places[group] * weights).sum() / weights.sum()))
            mean.append(float((bits[group] * weights).sum() / weights.sum()))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(middle, mean, marker="o", color="#0072B2")
    axes.set(xlabel="place in the row: tokens seen", ylabel="bits a token", xscale="log")
    axes.grid(alpha=0.3)
    return figure


def _forms(network: Decoder, source: Source, device: torch.device) -> list[str]:
    """How far logits are from those of the whole row at once, on the first tokens of the validation data."""
    tokens = next(iter(source.val_dataloader()))[0][:1, :READ].to(device)
    rows = []
    for dtype in (torch.float32, torch.float64):
        found = distances(deepcopy(network).to(dtype), tokens)
        words = {"arithmetic": str(dtype).removeprefix("torch.")}
        rows.append(words | {name: f"{value:.0e}" for name, value in found.items()})
    told = "Largest difference of a logit from the whole row read at once, over the largest logit; one document."
    return [table(rows), paragraph(told)]


@torch.inference_mode()
def distances(network: Decoder, tokens: Tensor) -> dict[str, float]:
    """Relative distance of the logits of tokens (1, tokens) from the chunked form, by the way of reading."""

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


def _samples(restored: Restored) -> list[str]:
    parts = []
    for seed, prompt in enumerate(PROMPTS):
        text = "".join(write_text(restored, prompt, WRITTEN, TEMPERATURE, 0.95, seed))
        asked = f"after {prompt!r}" if prompt else "from the start of a document"
        parts += [paragraph(f"{asked}, temperature {TEMPERATURE}, top-p 0.95, seed {seed}:"), preformatted(text)]
    return parts
