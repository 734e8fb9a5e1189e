"""The papers' claims, each as comparisons that small networks can make, and the rules that decide them.

The statements are in our words. Published numbers are ImageNet-1k top-1 accuracies of DeiT-T, as far as we know
them; those of MALA's tables are second-hand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from linvit.studies.statistics import (
    Estimate,
    estimate,
    holm_levels,
    paired,
    verdict_all,
    verdict_equal,
    verdict_higher,
    verdict_share,
)

MARGIN = 1.0  # percentage points within which two accuracies count as equal
FAR = 10.0  # percentage points: a large loss
ALPHA = 0.05
ACCURACY = "accuracy"
OTHERS = ("linear", "hydra", "efficient", "linear_angular", "enhanced", "focused", "inline", "mlla", "agent")

Numbers = Mapping[str, Mapping[str, Sequence[float]]]

COMPARED: dict[str, Callable[[Estimate], str]] = {
    "higher": verdict_higher,
    "equal": partial(verdict_equal, margin=MARGIN),
}
"""Rules for a pair: the corrected estimate of its difference → verdict."""

COUNTED: dict[str, tuple[Callable[[float], bool], str]] = {
    "diverges": (math.isnan, "{}: {} of {} runs diverged"),
    "zero": (lambda value: value == 0, "{}: {} of {} networks have none"),
}
"""Rules for one variant: the condition that every run must meet, and the words that report how many do."""


@dataclass(frozen=True)
class Claim:
    """A claim: every pair (first, second) of variants is compared seed by seed in one quantity.

    rule: "higher" (first − second > by), "equal" (|first − second| < MARGIN), "diverges" (every run of the first ends
    with a loss that is not finite) or "zero" (the quantity of the first is exactly 0 in every run); the second of the
    last two is "".
    """

    statement: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    rule: str = "higher"
    quantity: str = ACCURACY
    by: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in COMPARED | COUNTED:
            known = ", ".join(COMPARED | COUNTED)
            raise ValueError(f"The rule {self.rule!r} is unknown, expected one of {known}: choose one.")


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and a line of measurements for each pair."""

    claim: Claim
    outcome: str
    measured: tuple[str, ...]


def verdicts(claims: Sequence[Claim], numbers: Numbers, alpha: float = ALPHA) -> list[Verdict]:
    """Decides every claim by rules that were fixed before the experiments.

    Args:
        claims: the claims. All their comparisons are one family of tests, corrected by Holm's procedure (rule "higher")
            and Bonferroni's (rule "equal").
        numbers: quantity → variant → one number per seed, seeds in the same order; NaN if a run diverged.
        alpha: family-wise error rate.

    A comparison without numbers is "not measured", and its claim undecided.
    """
    tested = [
        (claim, pair)
        for claim in claims
        for pair in claim.pairs
        if claim.rule in COMPARED and all(name in numbers.get(claim.quantity, {}) for name in pair)
    ]
    first = [_difference(claim, pair, numbers, 0.95) for claim, pair in tested]
    levels = holm_levels([difference.p for difference in first], alpha)
    corrected: dict[tuple[Claim, tuple[str, str]], Estimate] = {}
    for (claim, pair), level in zip(tested, levels, strict=True):
        level = level if claim.rule == "higher" else 1 - alpha / len(tested)
        corrected[claim, pair] = _difference(claim, pair, numbers, level)
    return [_of_pairs(claim, corrected) if claim.rule in COMPARED else _of_runs(claim, numbers) for claim in claims]


def _difference(claim: Claim, pair: tuple[str, str], numbers: Numbers, level: float) -> Estimate:
    first, second = (numbers[claim.quantity][name] for name in pair)
    return paired([value - claim.by for value in first], second, level)


def _of_pairs(claim: Claim, corrected: Mapping[tuple[Claim, tuple[str, str]], Estimate]) -> Verdict:
    differences = {pair: corrected.get((claim, pair)) for pair in claim.pairs}
    rule = COMPARED[claim.rule]
    outcomes = [rule(difference) if difference else "not measured" for difference in differences.values()]
    return Verdict(claim, verdict_all(outcomes), tuple(_line(claim, *item) for item in differences.items()))


def _of_runs(claim: Claim, numbers: Numbers) -> Verdict:
    holds, text = COUNTED[claim.rule]
    count = total = 0
    lines = []
    for name, *_ in claim.pairs:
        values = numbers.get(claim.quantity, {}).get(name, ())
        holding = sum(holds(value) for value in values)
        count, total = count + holding, total + len(values)
        spread = "" if claim.rule == "diverges" or not values else f" (mean share {estimate(values).mean:.3g})"
        lines.append(text.format(name, holding, len(values)) + spread if values else f"{name}: not measured")
    return Verdict(claim, verdict_share(count, total), tuple(lines))


def _line(claim: Claim, pair: tuple[str, str], difference: Estimate | None) -> str:
    label = " − ".join(pair)
    if difference is None:
        return f"{label}: not measured"
    low, mean, high = (f"{value + claim.by:+.2f}" for value in (difference.low, difference.mean, difference.high))
    return f"{label} = {mean} [{low}, {high}]"


def _all(first: str, others: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((first, other) for other in others if other != first)


CLAIMS = (
    Claim(
        "Vanilla linear attention is worse than softmax attention.",
        "MALA, table 1 (69.8 against 72.2); RALA, introduction",
        (("softmax", "linear"),),
    ),
    Claim(
        "Softmax attention loses accuracy when its queries are normalized to unit length.",
        "MALA, table 1 (72.2 to 70.0)",
        (("softmax", "softmax_unit_query"),),
    ),
    Claim(
        "Softmax attention with unit-length queries is only as good as vanilla linear attention.",
        "MALA, table 1 (70.0 against 69.8)",
        (("softmax_unit_query", "linear"),),
        "equal",
    ),
    Claim("RALA is better than vanilla linear attention.", "RALA, table 8", (("rala", "linear"),)),
    Claim("RALA is better than softmax attention.", "RALA, table 8", (("rala", "softmax"),)),
    Claim(
        "RALA is better than softmax attention in the same block (rotation, LePE, gate).",
        "our control, in no paper",
        (("rala", "softmax_gated"),),
    ),
    Claim(
        "RALA is better than every earlier linear attention.",
        "RALA, table 8",
        _all("rala", OTHERS[1:]),
    ),
    Claim("Weighting the keys by the mean query helps.", "RALA, table 9", (("rala", "rala_uniform"),)),
    Claim(
        "The gate on the output helps more than the same number of parameters in the feed-forward network.",
        "RALA, table 9",
        (("rala", "rala_wide"),),
    ),
    Claim(
        "A learned linear gate φ is better than the identity or tanh.",
        "RALA, table 10 (the paper's choice)",
        (("rala", "rala_identity"), ("rala", "rala_tanh")),
    ),
    Claim(
        "The choice of the positive feature map κ matters little to RALA.",
        "RALA, table 10 (the paper chooses elu + 1)",
        (("rala", "rala_relu"), ("rala", "rala_softmax")),
        "equal",
    ),
    Claim(
        "Key weights from the mean query are better than learned ones.", "RALA, table 10", (("rala", "rala_learned"),)
    ),
    Claim(
        "MALA is better than vanilla linear attention.",
        "MALA, table 9 (75.1 against 69.8)",
        (("mala", "linear"),),
    ),
    Claim("MALA is better than softmax attention.", "MALA, table 9 (75.1 against 72.2)", (("mala", "softmax"),)),
    Claim(
        "MALA is better than softmax attention in the same block (rotation, LePE, gate).",
        "our control, in no paper",
        (("mala", "softmax_gated"),),
    ),
    Claim(
        "MALA is better than every earlier linear attention.",
        "MALA, table 9 (Focused 74.1, InLine 74.5)",
        _all("mala", OTHERS[1:]),
    ),
    Claim("MALA is better than RALA.", "MALA, table 9", (("mala", "rala"),)),
    Claim(
        "The magnitude normalizer itself helps: division in the same block (rala_uniform) is worse.",
        "MALA, section 3",
        (("mala", "rala_uniform"),),
    ),
    Claim(
        f"MALA without β loses much accuracy (more than {FAR:g} points).",
        "MALA, table 11 (52.3)",
        (("mala", "mala_no_beta"),),
        by=FAR,
    ),
    Claim(
        "MALA without γ cannot be trained: the loss becomes NaN.",
        "MALA, table 11 (NaN)",
        (("mala_no_gamma", ""),),
        "diverges",
    ),
    Claim("Learned β and γ are worse than computed ones.", "MALA, table 11 (71.7)", (("mala", "mala_learned"),)),
    Claim(
        "The choice of the feature map κ does not matter to MALA.",
        "MALA, table 10 (82.9, 82.8, 82.9 for elu + 1, relu, exp)",
        (("mala", "mala_relu"), ("mala", "mala_exp")),
        "equal",
    ),
    Claim(
        "RALA's output features have a higher rank than those of vanilla linear attention.",
        "RALA, figures 2 and 8",
        (("rala", "linear"),),
        quantity="output_rank",
    ),
    Claim(
        "RALA's state (the KV buffer) has a higher rank than that of vanilla linear attention.",
        "RALA, figure 4",
        (("rala", "linear"),),
        quantity="state_rank",
    ),
    Claim("MALA has no negative scores.", "MALA, section 3", (("mala", ""),), "zero", "negative_share"),
    Claim(
        "MALA's scores are more concentrated than those of vanilla linear attention, less than those of softmax.",
        "MALA, figures 4 and 7",
        (("linear", "mala"), ("mala", "softmax")),
        quantity="entropy",
    ),
)
