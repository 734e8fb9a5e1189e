"""Ranks and scores of small trained networks in a few numbers, and beside each other in figures."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.attention_figures import comparison_figure
from linvit.analysis.measured import Measured, select
from linvit.analysis.rank import MATRICES, MIXED, STATE, measure_ranks
from linvit.analysis.scores import measure_scores

OUTPUT = "output"
PLACES = {"state": STATE, "mixed": MIXED, "output": OUTPUT}
RANKS = {"rank": "rank_1e-2", "effective": "effective"}
SCORES = ("entropy", "negative_share")


@dataclass(frozen=True)
class Looked:
    """Measurements of one network: ranks by {"matrix": …}, "output" being the features after a layer's last step, with
    its local term and modulation where it has them; scores as the network works, rotation included."""

    ranks: list[Measured]
    scores: list[Measured]


def look(network: nn.Module, images: Tensor) -> Looked:
    """Measures every attention of the network on images (batch, channels, height, width)."""
    ranks = measure_ranks(network, [images])
    steps = [name for name in MATRICES if name != STATE and select(ranks, matrix=name)]
    outputs = [replace(one, condition={"matrix": OUTPUT}) for one in select(ranks, matrix=steps[-1])]
    scores = [one for one in measure_scores(network, [images]) if one.condition["rotation"] != "off"]
    return Looked([*ranks, *outputs], [replace(one, condition={}) for one in scores])


def summarize(looked: Looked) -> dict[str, float]:
    """Means over layers, heads and images.

    state_rank, mixed_rank, output_rank: singular values above 1 % of the largest, of the KV state (softmax has none),
    of what the operator returns, and of the features after the last step. state_effective and so on: exp of the entropy
    of the singular values. entropy: of the rows of |A| / Σ|A|, in nats. negative_share: of the entries of A.
    """
    found = {}
    for place, matrix in PLACES.items():
        own = select(looked.ranks, matrix=matrix)
        found |= {f"{place}_{name}": _mean(own, measure) for name, measure in RANKS.items() if own}
    return found | {name: _mean(looked.scores, name) for name in SCORES}


def rank_comparison(networks: Mapping[str, Looked]) -> Figure:
    """Ranks at 1e-2 of state, operator's output and last features over the layers, effective ones of state and last
    features; a line a network."""
    panels = [
        ("rank_1e-2", {"matrix": STATE}, "KV state: rank at 1e-2"),
        ("rank_1e-2", {"matrix": MIXED}, "operator's output: rank at 1e-2"),
        ("rank_1e-2", {"matrix": OUTPUT}, "last features: rank at 1e-2"),
        ("effective", {"matrix": STATE}, "KV state: effective rank"),
        ("effective", {"matrix": OUTPUT}, "last features: effective rank"),
    ]
    return comparison_figure({name: looked.ranks for name, looked in networks.items()}, panels)


def score_comparison(networks: Mapping[str, Looked]) -> Figure:
    """Entropy, share and mass of negative scores and sums of rows over the layers, a line a network."""
    titles = {
        "entropy": "entropy of |A| / Σ|A|, nats",
        "negative_share": "share of scores below zero",
        "negative_mass": "their part of Σ|A|",
        "row_sum": "sum of a row",
    }
    panels = [(name, {}, title) for name, title in titles.items()]
    return comparison_figure({name: looked.scores for name, looked in networks.items()}, panels)


def _mean(measured: list[Measured], name: str) -> float:
    return torch.stack([one.mean(name) for one in measured]).mean().item()
