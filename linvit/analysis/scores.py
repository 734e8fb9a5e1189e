"""The score matrix in numbers: how spread its rows are, and how much of it is negative (MALA, ICCV 2025)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from linvit.analysis.measured import Gathered, Layer, Measured
from linvit.analysis.probe import Probe, visit
from linvit.layers.axes import Operands

MEASURES = ("entropy", "entropy_share", "negative_share", "negative_mass", "row_sum", "largest")


def entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of |A| / Σ|A| over the last dimension: of the row itself where nothing in it is negative.

    Args:
        scores: (…, keys).

    Returns:
        (…), between 0 and log(keys); 0 for a row of zeros.
    """
    mass = scores.abs()
    total = mass.sum(-1, keepdim=True)
    share = torch.where(total > 0, mass / total.clamp_min(torch.finfo(mass.dtype).tiny), 0)
    return torch.special.entr(share).sum(-1)


def score_measures(scores: Tensor) -> dict[str, Tensor]:
    """Means over the rows of matrices (batch, heads, queries, keys), each (batch, heads).

    entropy: of |A|/Σ|A|, in nats. entropy_share: over log(keys), its largest possible value. negative_share: how many
    of the entries are below zero. negative_mass: their part of Σ|A|. row_sum: Σ_j A_ij. largest: of |A|/Σ|A|.
    """
    rows = entropy(scores)
    mass = scores.abs().sum(-1)
    safe = mass.clamp_min(torch.finfo(scores.dtype).tiny)
    keys = scores.shape[-1]
    return {
        "entropy": rows.mean(-1),
        "entropy_share": rows.mean(-1) / max(torch.tensor(float(keys)).log().item(), 1e-12),
        "negative_share": (scores < 0).to(scores.dtype).mean((-2, -1)),
        "negative_mass": (scores.clamp_max(0).abs().sum(-1) / safe).mean(-1),
        "row_sum": scores.sum(-1).mean(-1),
        "largest": (scores.abs().amax(-1) / safe).mean(-1),
    }


def measure_scores(
    network: nn.Module, batches: Iterable[Tensor], layers: Sequence[str] | None = None
) -> list[Measured]:
    """score_measures of every attention over more than one token, for each image and head.

    The matrix is the whole one, class token included. condition: {"rotation": "on"} as the network works, and "off"
    for the same queries and keys without their rotation, where they have one; "none" where there is none.

    Args and raises as in `measure_ranks`.
    """
    gathered = Gathered()

    def look(probe: Probe) -> None:
        if probe.grid == (1, 1):
            return
        layer = Layer.of(probe)
        for one in range(len(probe.operands.query)):  # one image at a time: the matrix is tokens × tokens
            operands = one_image(probe.operands, one)
            scores = {"on" if layer.rotated else "none": operands.scores()}
            if layer.rotated:
                scores["off"] = replace(operands, rotary=None).scores()
            for rotation, matrix in scores.items():
                gathered.add(layer, {"rotation": rotation}, score_measures(matrix))

    for images in batches:
        visit(network, images, look, layers)
    return gathered.result()


def one_image(operands: Operands, index: int) -> Operands:
    """The operands of one image of the batch."""
    parts = {name: getattr(operands, name)[index : index + 1] for name in ("query", "key", "value")}
    return replace(operands, **parts)


@dataclass(frozen=True)
class Map:
    """One query's row of the score matrix, mean over heads, on the grid of the image's tokens (height, width)."""

    layer: Layer
    token: tuple[int, int]
    scores: Tensor


def score_maps(
    network: nn.Module, images: Tensor, point: tuple[float, float], layers: Sequence[str] | None = None
) -> list[list[Map]]:
    """For each image, the row of the token that covers a point, in every attention over more than one token.

    Args:
        network: as in `visit`.
        images: (batch, channels, height, width).
        point: (height, width), each from 0 to 1 of the image.
        layers: names of layers, all by default.

    Returns:
        Maps in the network's order, for each image; the class token is left out of them.

    Raises:
        ValueError: as `visit`.
    """
    found: list[list[Map]] = []
    for image in images.split(1):
        maps: list[Map] = []
        visit(network, image, lambda probe, maps=maps: maps.append(_map(probe, point)), layers)
        found.append([one for one in maps if one.layer.grid != (1, 1)])
    return found


def _map(probe: Probe, point: tuple[float, float]) -> Map:
    row, column = (min(int(share * length), length - 1) for share, length in zip(point, probe.grid, strict=True))
    query = probe.num_prefix + row * probe.grid[1] + column
    scores = probe.scores()[0, :, query, probe.num_prefix :].mean(0).unflatten(0, probe.grid)
    return Map(Layer.of(probe), (row, column), scores.float().cpu())
