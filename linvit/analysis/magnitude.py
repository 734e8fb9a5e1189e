"""How the magnitude of a query changes its scores (MALA, ICCV 2025, figure 2 and equation 12).

With σ_j = s/N · κ(q)·κ(k_j), S = Σ_j σ_j and a query κ(q) multiplied by a, uniform weights and no rotation:

    divide     A_j(a) = σ_j / S                          the same for every a
    magnitude  A_j(a) = σ_j / S + a · (σ_j - S/N)        affine in a
    softmax    A_m(a) / A_n(a) = (A_m(1) / A_n(1))^a     exponential in a

So with magnitude the ratio of two scores moves with a, but only as far as (σ_m - S/N) / (σ_n - S/N), and a key below
the mean similarity gets a negative score from a = (σ_j/S) / (S/N - σ_j) on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from linvit.analysis.measured import Gathered, Layer, Measured, Values, gather
from linvit.analysis.probe import Inputs, Operands, Probe
from linvit.analysis.scores import evenly, one_image, scaled, score_measures, score_rows
from linvit.arguments import kind
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.operator import rotated
from linvit.ranges import Range, Some, check

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
ARGUMENTS = {"factors": Annotated[Sequence[Annotated[float, Range(above=0)]], Some()]}
QUERIES = 64  # per image, evenly spaced
QUARTILE = 0.25  # the second key of a ratio has this rank among the keys, as a share, largest score first
SORTED, LOG_RATIO = "sorted", "log_ratio"
PAPER_SCALE = "mala, paper's scale"
READOUTS = {name: MECHANISMS[name].axes for name in ("softmax", "linear", "mala")}
READOUTS[PAPER_SCALE] = READOUTS["mala"]


def measure_magnitude(
    network: nn.Module,
    batches: Iterable[Inputs],
    layers: Sequence[str] | None = None,
    factors: Sequence[float] = FACTORS,
) -> list[Measured]:
    """Each attention's scores with its queries multiplied by factors; condition: {"factor": a}.

    Measures, means over at most 64 evenly spaced queries per image: those of `score_measures`, and log_ratio, the
    median over queries of log(A_m/A_n) with m the key of the largest score at a = 1 and n the one at the upper
    quartile. Queries for which one of the two is not positive at every factor are left out; NaN if none
    is left.

    Args and raises as in `measure_ranks`.
    """

    check(ARGUMENTS, {"factors": factors})

    def measures(probe: Probe) -> Values:
        for index in range(len(probe.operands.query)):
            operands = _double(one_image(probe.operands, index))
            for factor, values in _by_factor(operands, factors).items():
                values.pop(SORTED)
                yield {"factor": factor}, values

    return gather(network, batches, layers, measures)


def compare_readouts(probe: Probe, factors: Sequence[float] = FACTORS) -> list[Measured]:
    """The queries and keys of one layer under softmax, linear attention and MALA, without rotation; also MALA unscaled.

    condition: {"readout": a name in READOUTS, "factor": a}. Measures as in `measure_magnitude`, and "sorted": each
    query's scores from the largest to the smallest, mean over the queries, (images, heads, keys). The paper writes MALA
    without the factor 1/(N·√width) of the released code; PAPER_SCALE is that form.
    """
    if not isinstance(probe, Probe):
        raise TypeError(f"`probe` is {kind(probe)}, expected a Probe: make it with linvit.analysis.probe.probe")
    check(ARGUMENTS, {"factors": factors})
    gathered = Gathered()
    for index in range(len(probe.operands.query)):
        operands = replace(_double(one_image(probe.operands, index)), rotary=None)
        tokens, width = operands.key.shape[-2:]
        for name, options in READOUTS.items():
            unit = tokens * width**0.5 if name == PAPER_SCALE else 1.0
            measures = _by_factor(replace(operands, options=options), [unit * factor for factor in factors])
            for factor, values in zip(factors, measures.values(), strict=True):
                gathered.add(Layer.of(probe), {"readout": name, "factor": factor}, values)
    return gathered.result()


def _by_factor(operands: Operands, factors: Sequence[float]) -> dict[float, dict[str, Tensor]]:
    places = evenly(operands.query.shape[-2], QUERIES)
    order = score_rows(operands, places).argsort(-1, descending=True)
    pair = order[..., [0, int(QUARTILE * order.shape[-1])]]
    measures, ratios = {}, []
    for factor in factors:
        at_factor = scaled(operands, factor)
        scores = score_rows(at_factor, places)
        measures[factor] = {**score_measures(scores), SORTED: scores.sort(-1, descending=True).values.mean(-2)}
        ratios.append(_log_ratio(at_factor, places, scores, pair))
    kept = torch.stack(ratios).isfinite().all(0)
    for values, ratio in zip(measures.values(), ratios, strict=True):
        values[LOG_RATIO] = ratio.masked_fill(~kept, torch.nan).nanmedian(-1).values
    return measures


def _log_ratio(operands: Operands, places: Tensor, scores: Tensor, pair: Tensor) -> Tensor:
    """log(A_m / A_n) for each query, (batch, heads, queries), pair being m and n; NaN unless both are positive."""
    if operands.options is None:  # small ones are 0 after the softmax
        query, key = rotated(operands.query, operands.key, operands.rotary)
        logits: Tensor = (query[:, :, places] @ key.mT * query.shape[-1] ** -0.5).gather(-1, pair)
        return logits[..., 0] - logits[..., 1]
    both = scores.gather(-1, pair)
    return (both[..., 0].log() - both[..., 1].log()).masked_fill((both <= 0).any(-1), torch.nan)


def _double(operands: Operands) -> Operands:
    return replace(operands, **{name: getattr(operands, name).double() for name in ("query", "key", "value")})
