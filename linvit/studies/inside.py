"""Ranks and scores inside small trained networks, and figures of them."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.attention_figures import comparison_figure
from linvit.analysis.measured import Measured, select
from linvit.analysis.probe import MIXED
from linvit.analysis.rank import MATRICES, STATE, measure_ranks
from linvit.analysis.scores import measure_scores
from linvit.files import LAST
from linvit.runs import Run, load_run

IMAGES = 64
OUTPUT = "output"
Panels = tuple[tuple[str, Mapping[str, object], str], ...]

RANK_PANELS: Panels = (
    ("rank_1e-2", {"matrix": STATE}, "KV state: rank at 1e-2"),
    ("rank_1e-2", {"matrix": MIXED}, "operator's output: rank at 1e-2"),
    ("rank_1e-2", {"matrix": OUTPUT}, "last features: rank at 1e-2"),
    ("effective", {"matrix": STATE}, "KV state: effective rank"),
    ("effective", {"matrix": OUTPUT}, "last features: effective rank"),
)
SCORE_PANELS: Panels = (
    ("entropy", {}, "entropy of |A| / Σ|A|, nats"),
    ("negative_share", {}, "share of scores below zero"),
    ("negative_mass", {}, "share of Σ|A| below zero"),
    ("row_sum", {}, "sum of each row"),
)


@dataclass(frozen=True)
class Inside:
    """Measurements of one network.

    ranks: by condition {"matrix": name}; the matrix "output" is a layer's features after its last step, with local term
    and gate if it has them. scores: of the score matrix as the network computes it, rotation included.
    """

    ranks: list[Measured]
    scores: list[Measured]


def look_inside(network: nn.Module, images: Tensor) -> Inside:
    """Measures every attention layer of the network on images, float (batch, channels, height, width)."""
    ranks = measure_ranks(network, [images])
    steps = [name for name in MATRICES if name != STATE and select(ranks, matrix=name)]
    outputs = [replace(measured, condition={"matrix": OUTPUT}) for measured in select(ranks, matrix=steps[-1])]
    scores = [measured for measured in measure_scores(network, [images]) if measured.condition["rotation"] != "off"]
    return Inside([*ranks, *outputs], [replace(measured, condition={}) for measured in scores])


def rank_figure(networks: Mapping[str, Inside]) -> Figure:
    """Ranks of the state, the operator's output and the last features of every layer, a row for each network."""
    return comparison_figure({name: inside.ranks for name, inside in networks.items()}, RANK_PANELS)


def score_figure(networks: Mapping[str, Inside]) -> Figure:
    """Entropy, negative scores and row sums of every layer, a row for each network."""
    return comparison_figure({name: inside.scores for name, inside in networks.items()}, SCORE_PANELS)


FIGURES = {"ranks": rank_figure, "scores": score_figure}
DESCRIPTIONS = {
    "ranks": "Ranks inside the networks trained with the first seed",
    "scores": "Scores inside the networks trained with the first seed",
}


def of_run(run: Path) -> Inside:
    """Measures the network of a run folder after its last epoch, on the first 64 held-out images."""
    loaded = load_run(run / "checkpoints" / LAST)
    return look_inside(loaded.task.network.eval(), held_out(loaded))


def held_out(run: Run) -> Tensor:
    """The first held-out images."""
    data = run.source().val_set()
    return torch.stack([data[index][0] for index in range(min(IMAGES, len(cast(Sized, data))))])
