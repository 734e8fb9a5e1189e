"""Measures of the score matrix: the entropy of its rows and its negative share (MALA, ICCV 2025)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from linvit.analysis.measured import Layer, Measured, Values, check_matrix, gather
from linvit.analysis.probe import Inputs, Operands, Probe, mapped, one_by_one, visit
from linvit.formulas.normalizer import resolve_normalizer
from linvit.layers.operator import rotated
from linvit.ops.position import rotate
from linvit.ops.state import summarize
from linvit.ranges import Share, check

ROWS = 512  # most rows of a matrix that are measured
LARGEST = 2**25  # most entries of score matrices in memory at once


def entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of |A| / Σ|A| over the last dimension: of the row itself if nothing in it is negative.

    Args:
        scores: (…, keys).

    Returns:
        (…), between 0 and log(keys); 0 for a row of zeros.
    """
    check_matrix("scores", scores, axes=1)
    mass = scores.abs()
    total = mass.sum(-1, keepdim=True)
    share = torch.where(total > 0, mass / total.clamp_min(torch.finfo(mass.dtype).tiny), 0)
    return torch.special.entr(share).sum(-1)


def score_measures(scores: Tensor) -> dict[str, Tensor]:
    """Means over the rows of matrices (batch, heads, queries, keys), each (batch, heads).

    entropy: of |A|/Σ|A|, in nats. entropy_share: over log(keys), its largest possible value. negative_share: of the
    entries, those below zero. negative_mass: their share of Σ|A|. row_sum: Σ_j A_ij. largest: of |A|/Σ|A|.
    """
    check_matrix("scores", scores, axes=4)
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
    network: nn.Module, batches: Iterable[Inputs], layers: Sequence[str] | None = None
) -> list[Measured]:
    """score_measures of every attention over more than one token, for each image and head.

    The class token is among rows and columns; of more than 512 rows, 512 evenly chosen ones are measured. condition:
    {"rotation": "on"} for the network as it is, and "off" for the same queries and keys without their rotation; "none"
    if there is no rotation.

    Args and raises as in `measure_ranks`.
    """

    def measures(probe: Probe) -> Values:
        for index in range(len(probe.operands.query)):  # one image at a time: the matrix is tokens × tokens
            operands = one_image(probe.operands, index)
            turns = operands.rotary is not None
            yield {"rotation": "on" if turns else "none"}, _measured_rows(operands)
            if turns:
                yield {"rotation": "off"}, _measured_rows(replace(operands, rotary=None))

    return gather(network, batches, layers, measures)


def score_rows(operands: Operands, places: Tensor) -> Tensor:
    """Only these rows of each head's score matrix, (batch, heads, places, keys).

    Hydra has one head per channel, whose rows may not fit into memory together: heads are then computed in groups. In
    attention by blocks every row is computed, head by head.
    """
    operands.check_linear()
    if "mixing" in (operands.options or {}):
        by_head = (slice(head, head + 1) for head in range(operands.query.shape[1]))
        return torch.cat([_selected(operands, slice(None), head).scores()[:, :, places] for head in by_head], 1)
    rows = _at_queries(operands, places)
    batch, heads, queries, _ = rows.query.shape
    size = max(1, LARGEST // (batch * queries * rows.key.shape[-2]))
    if size >= heads or callable((rows.options or {}).get("normalizer")):
        scores = rows.scores()
    else:
        scores = torch.cat(
            [_selected(rows, slice(None), slice(start, start + size)).scores() for start in range(0, heads, size)], 1
        )
    read_share, value_share = operands.shares
    scores = read_share * scores
    scores[:, :, torch.arange(len(places)), places] += value_share
    return scores


def evenly(length: int, most: int) -> Tensor:
    """At most `most` indices spread evenly from 0 to length - 1; two or more include both ends."""
    return torch.linspace(0, length - 1, min(length, most)).round().long()


def _at_queries(operands: Operands, places: Tensor) -> Operands:
    """Operands, already rotated, whose score matrix has only the rows of these queries; without the shares."""
    rotary = operands.rotary
    if operands.options is None:
        query, key = rotated(operands.query, operands.key, rotary)
        return Operands(query[:, :, places], key, operands.value, None)
    ready = scaled(operands, 1.0)
    query, key, options = ready.query[:, :, places], ready.key, dict(ready.options or {})
    if rotary is not None:  # den is computed without it
        den = query @ summarize(key, key, key[..., :1], mapped(operands)[2]).z.unsqueeze(-1)
        normalize = resolve_normalizer(options.get("normalizer", "divide"))
        options["normalizer"] = lambda num, _, mass, scale, eps: normalize(num, den, mass, scale, eps)
        query, key = rotate(ready.query, rotary)[:, :, places], rotate(key, rotary)
    return Operands(query, key, ready.value, options)


def scaled(operands: Operands, factor: float) -> Operands:
    """The operands with κ(q), or for softmax q, multiplied by `factor`; the weights of tokens stay as they are.

    For linear attention, queries and keys are returned with κ already applied.
    """
    if operands.options is None:
        return replace(operands, query=operands.query * factor)
    query, key, weights = mapped(operands)
    options = {**operands.options, "feature_map": "identity"}
    if weights.exponent is not None:
        options["weighting"] = weights.visible_exponent().softmax(-1)
    return replace(operands, query=query * factor, key=key, value=operands.value.to(key.dtype), options=options)


def _measured_rows(operands: Operands) -> dict[str, Tensor]:
    return score_measures(score_rows(operands, evenly(operands.query.shape[-2], ROWS)))


def one_image(operands: Operands, index: int) -> Operands:
    """The operands of one image of the batch."""
    return _selected(operands, slice(index, index + 1))


def _selected(operands: Operands, *images_and_heads: slice) -> Operands:
    tokens = {name: getattr(operands, name)[images_and_heads] for name in ("query", "key", "value")}
    options = operands.options
    if options and isinstance(options.get("weighting"), Tensor):
        options = {**options, "weighting": options["weighting"][images_and_heads]}
    if options and "mixing" in options and options["mixing"].ndim == 3:
        options = {**options, "mixing": options["mixing"][images_and_heads[1:]]}
    return replace(operands, options=options, **tokens)


@dataclass(frozen=True)
class Map:
    """One query's row of the score matrix, mean over heads, on the grid of the image's tokens (height, width)."""

    layer: Layer
    token: tuple[int, int]
    scores: Tensor


def score_maps(
    network: nn.Module, inputs: Inputs, point: tuple[float, float], layers: Sequence[str] | None = None
) -> list[list[Map]]:
    """For each image, the row of the token that covers a point, in every attention over more than one token.

    point: (height, width), each from 0 to 1 of the image. Maps are in the network's order, without the class
    token. Other arguments and errors as in `visit`; a point outside the image is a ValueError.
    """
    check({"point": tuple[Share, Share]}, {"point": point})
    of_images = []
    for image in one_by_one(inputs):
        maps: list[Map] = []
        visit(network, image, lambda probe, maps=maps: maps.append(_map(probe, point)), layers)  # type: ignore[misc]
        of_images.append([shown for shown in maps if shown.layer.grid != (1, 1)])
    return of_images


def _map(probe: Probe, point: tuple[float, float]) -> Map:
    y, x = (min(int(share * length), length - 1) for share, length in zip(point, probe.grid, strict=True))
    query = probe.num_prefix + y * probe.grid[1] + x
    row = score_rows(probe.operands, torch.tensor([query]))[0, :, 0, probe.num_prefix :]
    scores = row.mean(0).unflatten(0, probe.grid)
    return Map(Layer.of(probe), (y, x), scores.float().cpu())
