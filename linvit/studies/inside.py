"""Ranks and scores inside small trained networks: numbers for the claims, a table, and figures side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.attention_figures import comparison_figure
from linvit.analysis.markdown import markdown_table
from linvit.analysis.measured import Measured, select
from linvit.analysis.rank import MATRICES, MIXED, STATE, measure_ranks
from linvit.analysis.scores import measure_scores
from linvit.runs import load_run
from linvit.studies.statistics import estimate
from linvit.studies.table import plus_minus
from linvit.tasks.checkpoints import LAST

MEASURED = (
    "softmax", "softmax_gated", "linear", "efficient", "enhanced", "focused",
    "rala_wide", "rala_uniform", "rala", "mala", "rala_mala",
)  # fmt: skip
IMAGES = 64
OUTPUT = "output"
PLACES = {"state": STATE, "mixed": MIXED, "output": OUTPUT}
RANKS = {"rank": "rank_1e-2", "effective": "effective"}
SCORES = ("entropy", "negative_share")
COLUMNS = {
    "state_rank": "state, rank",
    "state_effective": "effective",
    "mixed_rank": "operator, rank",
    "mixed_effective": "effective",
    "output_rank": "features, rank",
    "output_effective": "effective",
    "entropy": "entropy, nats",
    "negative_share": "negative scores, %",
}
RANK_PANELS = (
    ("rank_1e-2", {"matrix": STATE}, "KV state: rank at 1e-2"),
    ("rank_1e-2", {"matrix": MIXED}, "operator's output: rank at 1e-2"),
    ("rank_1e-2", {"matrix": OUTPUT}, "last features: rank at 1e-2"),
    ("effective", {"matrix": STATE}, "KV state: effective rank"),
    ("effective", {"matrix": OUTPUT}, "last features: effective rank"),
)
SCORE_PANELS = (
    ("entropy", {}, "entropy of |A| / Σ|A|, nats"),
    ("negative_share", {}, "share of scores below zero"),
    ("negative_mass", {}, "their share of Σ|A|"),
    ("row_sum", {}, "sum of a row"),
)
ABOUT = """Means over layers, heads and {images} held-out images, ± a 95 % t-interval over {seeds} seeds; heads are
{width} wide, so no rank is larger. Rank: singular values above 1 % of the largest; effective: exp of their entropy.
State: the KV buffer; operator: what it returns, before local term and modulation; features: after both, class token
left out. Entropy and negative scores: of the whole matrix, with the rotation where there is one. Figures: seed 0, over
the layers."""

Numbers = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Inside:
    """Measurements of one network: ranks by {"matrix": …}, "output" being the features after a layer's last step, with
    its local term and modulation where it has them; scores as the network works, rotation included."""

    ranks: list[Measured]
    scores: list[Measured]


def look_inside(network: nn.Module, images: Tensor) -> Inside:
    """Measures every attention of the network on images (batch, channels, height, width)."""
    ranks = measure_ranks(network, [images])
    steps = [name for name in MATRICES if name != STATE and select(ranks, matrix=name)]
    outputs = [replace(measured, condition={"matrix": OUTPUT}) for measured in select(ranks, matrix=steps[-1])]
    scores = [measured for measured in measure_scores(network, [images]) if measured.condition["rotation"] != "off"]
    return Inside([*ranks, *outputs], [replace(measured, condition={}) for measured in scores])


def summarize(inside: Inside) -> dict[str, float]:
    """Means over layers, heads and images.

    state_rank, mixed_rank, output_rank: singular values above 1 % of the largest, of the KV state (softmax has none),
    of what the operator returns, and of the features after the last step. state_effective and so on: exp of the entropy
    of the singular values. entropy: of the rows of |A| / Σ|A|, in nats. negative_share: of the entries of A.
    """
    means = {}
    for place, matrix in PLACES.items():
        ranks = select(inside.ranks, matrix=matrix)
        means |= {f"{place}_{name}": _mean(ranks, measure) for name, measure in RANKS.items() if ranks}
    return means | {name: _mean(inside.scores, name) for name in SCORES}


def rank_figure(networks: Mapping[str, Inside]) -> Figure:
    """Ranks at 1e-2 of state, operator's output and last features over the layers, effective ones of state and last
    features; a line per network."""
    return comparison_figure({name: inside.ranks for name, inside in networks.items()}, RANK_PANELS)


def score_figure(networks: Mapping[str, Inside]) -> Figure:
    """Entropy, share and mass of negative scores and sums of rows over the layers, a line per network."""
    return comparison_figure({name: inside.scores for name, inside in networks.items()}, SCORE_PANELS)


FIGURES = {"study_ranks": rank_figure, "study_scores": score_figure}


def of_run(run: Path) -> Inside:
    """Measures the network of a run after its last epoch, on the first held-out images."""
    loaded = load_run(run / "checkpoints" / LAST)
    data = loaded.source().val_set()
    images = torch.stack([data[index][0] for index in range(min(IMAGES, len(data)))])
    return look_inside(loaded.task.network.eval(), images)


def by_quantity(networks: Mapping[str, Sequence[Inside | None]]) -> Numbers:
    """Numbers by quantity, network and seed, NaN where a run did not stay finite and so was not measured."""
    means = {name: [summarize(inside) if inside else {} for inside in seeds] for name, seeds in networks.items()}
    return {
        quantity: {name: [seed.get(quantity, math.nan) for seed in seeds] for name, seeds in means.items()}
        for quantity in COLUMNS
    }


def section(numbers: Numbers, first: Mapping[str, Inside]) -> str:
    """Heading, table and figures of the trained networks, as Markdown; nothing where none of seed 0 is finite."""
    if not first:
        return ""
    names = list(numbers["entropy"])
    rows = [[f"`{name}`", *(_cell(numbers[quantity][name], quantity) for quantity in COLUMNS)] for name in names]
    layer = next(iter(first.values())).ranks[0].layer
    about = ABOUT.format(images=IMAGES, seeds=len(numbers["entropy"][names[0]]), width=layer.width)
    shown = "\n".join(f"![Inside the networks trained with seed 0]({name}.svg)" for name in FIGURES)
    table = markdown_table(["network", *COLUMNS.values()], rows, left=1)
    return "\n\n".join(["### Inside the trained networks", " ".join(about.split()), table, shown])


def _cell(values: Sequence[float], quantity: str) -> str:
    factor, digits = (100, 1) if quantity == "negative_share" else (1, 2 if quantity == "entropy" else 1)
    return plus_minus(estimate([factor * value for value in values if math.isfinite(value)]), digits)


def _mean(measured: Sequence[Measured], name: str) -> float:
    return torch.stack([layer.mean(name) for layer in measured]).mean().item()
