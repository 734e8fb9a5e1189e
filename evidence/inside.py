"""What studies measure inside their trained networks: numbers for the claims, a table and figures."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import Tensor

from linvit.analysis.attention_figures import magnitude_comparison, score_map_figure
from linvit.analysis.magnitude import measure_magnitude
from linvit.analysis.measured import Measured, select
from linvit.analysis.probe import MIXED
from linvit.analysis.rank import STATE
from linvit.analysis.scores import Map, score_maps
from linvit.files import LAST
from linvit.runs import load_run
from linvit.runs.analyze import ImageRun
from linvit.runs.images import PHOTOS, photos
from linvit.studies.inside import DESCRIPTIONS as OF_FIGURES
from linvit.studies.inside import IMAGES, OUTPUT, Inside, held_out, of_run
from linvit.studies.table import estimate, plus_minus

MEASURED = (
    "softmax", "softmax_gated", "linear", "efficient", "enhanced", "focused",
    "rala_wide", "rala_uniform", "rala", "mala", "rala_mala",
)  # fmt: skip
SHOWN = ("softmax", "linear", "rala", "mala")
FEW = 16  # held-out images whose queries are multiplied by factors
IN_THE_MIDDLE = (0.5, 0.5)
PLACES = {"state": STATE, "mixed": MIXED, "output": OUTPUT}
RANKS = {"rank": "rank_1e-2", "effective": "effective"}
SCORES = ("entropy", "negative_share")
COLUMNS = {
    "state_rank": "state, rank",
    "state_effective": "state, effective",
    "mixed_rank": "operator output, rank",
    "mixed_effective": "operator output, effective",
    "output_rank": "features, rank",
    "output_effective": "features, effective",
    "entropy": "entropy, nats",
    "negative_share": "negative scores, %",
}
ABOUT = """Means over layers, heads and {images} held-out images, ± half of the 95 % t-interval over {seeds} seeds. No
rank can exceed the width of a head. *rank*: number of singular values above 1 % of the largest; *effective*: exp of the
entropy of the singular values. *state*: the sum of keys times values; *operator output*: before the local term and the
gate; *features*: after both, without the class token. Entropy and negative scores are those of the whole score matrix,
with rotation if the mechanism has it."""
ABOUT_DRAWN = """The figures show the first seed. Ranks and scores: a row for each network, in it a dot for each layer,
the first on top; bars are one standard deviation over images and heads."""
ABOUT_SHOWN = """The photograph: scores of the query in the middle (the dot) over the image as the network reads it,
mean over heads; red is positive, blue negative, and each map has its own scale. The photograph comes with scikit-learn,
is by {photographer} (Flickr) and licensed CC BY 2.0. Magnitude: over {images} held-out images, all queries of a layer
are multiplied by a; deeper layers are darker. p is the score of the best key over that of the key at the upper
quartile, median over queries; queries for which one of the two is not positive at every a are left out."""

Numbers = dict[str, dict[str, list[float]]]


def summarize(inside: Inside) -> dict[str, float]:
    """Means over layers, heads and images.

    state_rank, mixed_rank, output_rank: number of singular values above 1 % of the largest, of the KV state (softmax
    has none), of the operator's output, and of the features after the last step. state_effective, mixed_effective,
    output_effective: exp of the entropy of the singular values. entropy: of the rows of |A| / Σ|A|, in nats.
    negative_share: of the entries of A that are negative, 0..1.
    """
    means: dict[str, float] = {}
    for place, matrix in PLACES.items():
        ranks = select(inside.ranks, matrix=matrix)
        means |= {f"{place}_{name}": _mean(ranks, measure) for name, measure in RANKS.items() if ranks}
    return means | {name: _mean(inside.scores, name) for name in SCORES}


@dataclass(frozen=True)
class Shown:
    """What figures show of one network: a photograph as it reads it, its score maps, and scores as queries grow."""

    photo: Tensor
    maps: list[Map]
    magnitude: list[Measured]


def photograph_figure(networks: Mapping[str, Shown]) -> Figure:
    """A row for each network: the photograph, and the scores of the query in its middle in every layer."""
    images = [network.photo for network in networks.values()]
    return score_map_figure(images, [network.maps for network in networks.values()], IN_THE_MIDDLE, list(networks))


def magnitude_figure(networks: Mapping[str, Shown]) -> Figure:
    """The scores of every layer as its queries grow, in the colour of the network."""
    return magnitude_comparison({name: network.magnitude for name, network in networks.items()})


SHOWN_FIGURES = {"photograph": photograph_figure, "magnitude": magnitude_figure}
DESCRIPTIONS = {
    **OF_FIGURES,
    "photograph": "Scores of the middle of a photograph in the layers of networks trained with the first seed",
    "magnitude": "Scores of networks trained with the first seed, their queries multiplied by a factor",
}


def shown_of_run(run: Path) -> Shown:
    """What figures show of a run folder's network after its last epoch: a photograph and held-out images."""
    loaded = cast(ImageRun, load_run(run / "checkpoints" / LAST))
    subject = loaded.subject()
    assert subject.transform is not None
    photo = subject.transform(photos(loaded.preprocessing.channels)[-1])
    (maps,) = score_maps(subject.network, photo.unsqueeze(0), IN_THE_MIDDLE)
    return Shown(subject.displayed(photo), maps, measure_magnitude(subject.network, [held_out(loaded)[:FEW]]))


def numbers_of(run: Path) -> dict[str, float]:
    """The means of `summarize` over the network of a run folder."""
    return summarize(of_run(run))


def by_quantity(networks: Mapping[str, Sequence[Mapping[str, float]]]) -> Numbers:
    """quantity → network → one number per seed, NaN if the run diverged and so was not measured.

    networks: the result of `numbers_of` for each seed of each network.
    """
    return {
        quantity: {name: [seed.get(quantity, math.nan) for seed in seeds] for name, seeds in networks.items()}
        for quantity in COLUMNS
    }


def cells(numbers: Numbers) -> list[dict[str, str]]:
    """A row of a table for each network: means over the seeds with half of their intervals."""
    return [
        {"network": name, **{words: _cell(numbers[quantity][name], quantity) for quantity, words in COLUMNS.items()}}
        for name in numbers["entropy"]
    ]


def about(numbers: Numbers, drawn: Collection[str]) -> list[str]:
    """What the table and those of the figures that are drawn show, in paragraphs."""
    seeds = len(next(iter(numbers["entropy"].values())))
    texts = [ABOUT.format(images=IMAGES, seeds=seeds)]
    if drawn:
        texts[0] += f" {ABOUT_DRAWN}"
    if SHOWN_FIGURES.keys() & set(drawn):
        texts.append(ABOUT_SHOWN.format(photographer=list(PHOTOS.values())[-1], images=FEW))
    return [" ".join(text.split()) for text in texts]


def _cell(values: Sequence[float], quantity: str) -> str:
    factor, digits = (100, 1) if quantity == "negative_share" else (1, 2 if quantity == "entropy" else 1)
    return plus_minus(estimate([factor * value for value in values if math.isfinite(value)]), digits)


def _mean(measured: Sequence[Measured], name: str) -> float:
    return torch.stack([layer.mean(name) for layer in measured]).mean().item()
