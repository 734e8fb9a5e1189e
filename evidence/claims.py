"""The papers' claims, each as comparisons that small networks can make, and the rules that decide them.

The statements are in our words. The published numbers beside them are ImageNet-1k top-1 accuracies.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from evidence.published import ROWS, TOP1
from linvit.studies.table import Estimate, differences, estimate, holm

MARGIN = 1.0  # percentage points within which two accuracies count as equal
RELEVANT = 0.5  # percentage points: an advantage below it is none
FAR = 10.0  # percentage points: a large loss
ALPHA = 0.05
ACCURACY = "accuracy"
HOLDS, FAILS, UNCLEAR = "holds here", "not reproduced here", "undecided"

Numbers = Mapping[str, Mapping[str, Sequence[float]]]


def cited(*sources: Sequence[str], quantity: str = TOP1) -> str:
    """Sources as text, each a table and its rows: "RALA, Table 9 (RAVLT-T 82.8 %, w/o KV aug 82.1 %)".

    A source without rows is any place in words, such as ["RALA, Figure 4"]. Raises KeyError for an unknown row, or one
    without the quantity.
    """
    texts = []
    for place, *names in sources:
        numbers = (f"{name} {ROWS[f'{place}, {name}'].with_unit(quantity)}" for name in names)
        texts.append(f"{place} ({', '.join(numbers)})" if names else place)
    return "; ".join(texts)


def p_above(values: Sequence[float], bound: float) -> float:
    """The p-value of the one-sided t-test that the mean is above a bound; 1 for fewer than two values."""
    if len(values) < 2:
        return 1.0
    if np.ptp(values) == 0:
        return float(values[0] <= bound)
    return float(stats.ttest_1samp(values, bound, alternative="greater").pvalue)


def p_higher(values: Sequence[float], bound: float) -> float:
    """The two-sided p-value if the mean is above a bound, else 1."""
    return min(1.0, 2 * p_above(values, bound))


def p_within(values: Sequence[float], margin: float) -> float:
    """The p-value of the equivalence test that the mean lies within ±margin: two one-sided tests (Schuirmann, 1987)."""
    return max(p_above(values, -margin), p_above([-value for value in values], -margin))


def power(effect: float, deviation: float, count: int, alpha: float) -> float:
    """The probability that a two-sided paired t-test at level alpha finds an effect.

    effect, deviation: mean and standard deviation of the differences. count: number of seeds.
    """
    critical = stats.t.ppf(1 - alpha / 2, count - 1)
    return float(stats.nct.sf(critical, count - 1, effect / deviation * math.sqrt(count)))


def power_within(margin: float, deviation: float, count: int, alpha: float) -> float:
    """The probability that the equivalence test at level alpha finds a difference of 0 to be within ±margin."""
    critical = stats.t.ppf(1 - alpha, count - 1)
    return max(0.0, 2 * float(stats.nct.sf(critical, count - 1, margin / deviation * math.sqrt(count))) - 1)


def found_with(probability: float, deviation: float, count: int, alpha: float) -> float:
    """The smallest effect that `power` says is found with that probability."""
    high = deviation
    while power(high, deviation, count, alpha) < probability:
        high *= 2
    return float(brentq(lambda effect: power(effect, deviation, count, alpha) - probability, 0.0, high))


COMPARED: dict[str, Callable[[Sequence[float], float, float], tuple[float, float]]] = {
    "higher": lambda values, by, relevant: (p_higher(values, by), p_higher(_negative(values), -by - relevant)),
    "equal": lambda values, by, relevant: (
        p_within(values, MARGIN),
        min(p_higher(values, MARGIN), p_higher(_negative(values), MARGIN)),
    ),
}
"""Rules for a pair: differences by seed, `by`, `relevant` → the p-values that speak for the claim, and against it."""

COUNTED: dict[str, tuple[Callable[[float], bool], str]] = {
    "diverges": (math.isnan, "{}: {} of {} runs diverged"),
    "zero": (lambda value: value == 0, "{}: {} of {} networks have none"),
}
"""Rules for one variant: the condition that every run must meet, and the words that report how many do."""


@dataclass(frozen=True)
class Claim:
    """A claim: every pair (first, second) of variants is compared seed by seed in one quantity.

    sources: tables with the rows meant, or places in words, as `cited` takes them. differs:
    what this test does otherwise than its source, beyond the size of networks and data. rule: "higher" (first − second
    > by; an accuracy that is higher by less than RELEVANT speaks against it), "equal" (|first − second| < MARGIN),
    "diverges" (every run of the first ends with a loss that is not finite) or "zero" (the quantity of the first is
    exactly 0 in every run); the second of the last two is "".
    """

    statement: str
    sources: tuple[tuple[str, ...], ...]
    pairs: tuple[tuple[str, str], ...]
    rule: str = "higher"
    quantity: str = ACCURACY
    by: float = 0.0
    differs: str = ""

    @property
    def source(self) -> str:
        """The sources as text, with the published numbers."""
        return cited(*self.sources)

    @property
    def relevant(self) -> float:
        return RELEVANT if self.quantity == ACCURACY and not self.by else 0.0

    def concerns(self, variants: Collection[str]) -> bool:
        """Whether one of the comparisons can be made between these variants; the others are then "not measured"."""
        return any(all(name in variants for name in pair if name) for pair in self.pairs)


@dataclass(frozen=True)
class Effect:
    """A measured comparison in words; of a difference also the estimate and the standard deviation over the seeds.

    counted: in how many runs the condition is met, and the number of runs.
    """

    pair: tuple[str, str]
    words: str
    difference: Estimate | None = None
    deviation: float = 0.0
    counted: tuple[int, int] | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and the effects that decide it. p: after Holm's procedure; None for runs counted."""

    claim: Claim
    outcome: str
    effects: tuple[Effect, ...]
    p: float | None = None


def verdicts(claims: Sequence[Claim], numbers: Numbers, alpha: float = ALPHA) -> list[Verdict]:
    """Decides every claim by rules that were fixed before the experiments.

    A claim holds only if all of its comparisons do, so the largest of their p-values speaks for it (an
    intersection-union test); it fails if one of them does, so the smallest times their number speaks against it
    (Bonferroni). The smaller of both is corrected for the number of claims by Holm's procedure.

    Args:
        claims: the claims.
        numbers: quantity → variant → one number per seed, seeds in the same order; NaN if a run diverged.
        alpha: family-wise error rate.

    A comparison without numbers is "not measured", and its claim can only fail.
    """
    compared = [claim for claim in claims if claim.rule in COMPARED and _measured(claim, numbers)]
    pairs = [_p_values(claim, numbers) for claim in compared]
    corrected = holm([min(pair) for pair in pairs])
    tested = dict(zip(compared, zip(pairs, corrected, strict=True), strict=True))
    return [
        _of_runs(claim, numbers)
        if claim.rule in COUNTED
        else _of_pairs(claim, numbers, *tested.get(claim, ((1.0, 1.0), 1.0)), alpha)
        for claim in claims
    ]


def _measured(claim: Claim, numbers: Numbers) -> list[tuple[str, str]]:
    return [pair for pair in claim.pairs if all(name in numbers.get(claim.quantity, {}) for name in pair)]


def _p_values(claim: Claim, numbers: Numbers) -> tuple[float, float]:
    """What speaks for the claim, and what against it."""
    pairs = _measured(claim, numbers)
    tested = [COMPARED[claim.rule](_differences(claim, pair, numbers), claim.by, claim.relevant) for pair in pairs]
    holding = max(p for p, _ in tested) if len(pairs) == len(claim.pairs) else 1.0
    return holding, min(1.0, len(pairs) * min(p for _, p in tested))


def _differences(claim: Claim, pair: tuple[str, str], numbers: Numbers) -> list[float]:
    first, second = (numbers[claim.quantity][name] for name in pair)
    return differences(first, second)


def _negative(values: Sequence[float]) -> list[float]:
    return [-value for value in values]


def _of_pairs(claim: Claim, numbers: Numbers, p_values: tuple[float, float], p: float, alpha: float) -> Verdict:
    holding, failing = p_values
    outcome = UNCLEAR if p > alpha else HOLDS if holding < failing else FAILS
    measured = _measured(claim, numbers)
    effects = []
    for pair in claim.pairs:
        label = " − ".join(pair)
        if pair not in measured:
            effects.append(Effect(pair, f"{label}: not measured"))
            continue
        values = _differences(claim, pair, numbers)
        difference, deviation = estimate(values), stdev(values) if len(values) > 1 else 0.0
        low, mean, high = (f"{value:+.2f}" for value in (difference.low, difference.mean, difference.high))
        effects.append(Effect(pair, f"{label} = {mean} [{low}, {high}]", difference, deviation))
    return Verdict(claim, outcome, tuple(effects), p)


def _of_runs(claim: Claim, numbers: Numbers) -> Verdict:
    holds, text = COUNTED[claim.rule]
    count = total = 0
    effects = []
    for pair in claim.pairs:
        name = pair[0]
        values = numbers.get(claim.quantity, {}).get(name, ())
        holding = sum(holds(value) for value in values)
        count, total = count + holding, total + len(values)
        spread = "" if claim.rule == "diverges" or not values else f" (mean share {estimate(values).mean:.3g})"
        words = text.format(name, holding, len(values)) + spread if values else f"{name}: not measured"
        effects.append(Effect(pair, words, counted=(holding, len(values))))
    outcome = HOLDS if count == total > 0 else FAILS if count == 0 < total else UNCLEAR
    return Verdict(claim, outcome, tuple(effects))


def _all(first: str, others: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((first, other) for other in others)


EARLIER = {"hydra": "Hydra", "efficient": "Efficient", "linear_angular": "Linear Angular"}
EARLIER |= {"enhanced": "Enhanced", "focused": "Focused"}
"""The mechanisms that RALA's and MALA's tables both compare with, and their names there."""

TABLE_8, RALA = "RALA, Table 8", "DeiT-T with RALA"
TABLE_9, MALA = "MALA, Table 9", "DeiT-T with MALA"
VANILLA = ("MALA, Table 1", "Softmax → Linear")
CONTROL = (("our control, in no paper",),)
PYRAMID = "The source's network is a pyramid."
LATE = "The source's network is a pyramid with softmax attention in the late stages."
REMOVED = "The source removes the part, and with it MACs; here the widths grow until the MACs are equal."

CLAIMS = (
    Claim(
        "Vanilla linear attention is worse than softmax attention.",
        (VANILLA, (TABLE_9, "DeiT-T"), ("RALA, Section 1",)),
        (("softmax", "linear"),),
    ),
    Claim(
        "Softmax attention loses accuracy when its queries are normalized to unit length.",
        (("MALA, Table 1", "Q/‖Q‖"), (TABLE_9, "DeiT-T")),
        (("softmax", "softmax_unit_query"),),
    ),
    Claim(
        "Softmax attention with unit-length queries is only as good as vanilla linear attention.",
        (("MALA, Table 1", "Q/‖Q‖", "Softmax → Linear"),),
        (("softmax_unit_query", "linear"),),
        "equal",
    ),
    Claim("RALA is better than vanilla linear attention.", ((TABLE_8, RALA), VANILLA), (("rala", "linear"),)),
    Claim("RALA is better than softmax attention.", ((TABLE_8, RALA, "DeiT-T"),), (("rala", "softmax"),)),
    Claim(
        "RALA is better than softmax attention in the same block (rotation, LePE, gate).",
        CONTROL,
        (("rala", "softmax_gated"),),
    ),
    Claim(
        "RALA is better than the earlier linear attentions in its paper's table.",
        ((TABLE_8, RALA, *(f"DeiT-T with {name}" for name in EARLIER.values())),),
        _all("rala", tuple(EARLIER)),
    ),
    Claim(
        "RALA is better than InLine, MLLA and Agent attention.",
        (("our addition, not in RALA's Table 8",),),
        _all("rala", ("inline", "mlla", "agent")),
    ),
    Claim(
        "Weighting the keys by the mean query helps.",
        (("RALA, Table 9", "RAVLT-T", "w/o KV aug"),),
        (("rala", "rala_uniform"),),
        differs=PYRAMID,
    ),
    Claim(
        "The gate on the output helps more than the same number of parameters in the feed-forward network.",
        (("RALA, Table 9", "RAVLT-T", "w/o out aug"),),
        (("rala", "rala_wide"),),
        differs=PYRAMID,
    ),
    Claim(
        "The choice of the gate φ hardly matters to RALA: the identity and tanh are as good as a linear layer.",
        (("RALA, Table 9", "RAVLT-T", "φ identity", "φ tanh"),),
        (("rala", "rala_identity"), ("rala", "rala_tanh")),
        "equal",
        differs=LATE,
    ),
    Claim(
        "The choice of the positive feature map κ hardly matters to RALA.",
        (("RALA, Table 9", "RAVLT-T", "κ ReLU", "κ Softmax"),),
        (("rala", "rala_relu"), ("rala", "rala_softmax")),
        "equal",
        differs=LATE,
    ),
    Claim(
        "Key weights from the mean query are better than learned ones.",
        (("RALA, Table 10", "α attention score", "α learnable"),),
        (("rala", "rala_learned"),),
        differs="The source learns one α per token of DeiT-T; here a learned vector replaces the mean query.",
    ),
    Claim("MALA is better than vanilla linear attention.", ((TABLE_9, MALA), VANILLA), (("mala", "linear"),)),
    Claim("MALA is better than softmax attention.", ((TABLE_9, MALA, "DeiT-T"),), (("mala", "softmax"),)),
    Claim(
        "MALA is better than softmax attention in the same block (rotation, LePE, gate).",
        CONTROL,
        (("mala", "softmax_gated"),),
    ),
    Claim(
        "MALA is better than the earlier linear attentions in its paper's table.",
        ((TABLE_9, MALA, *(f"DeiT-T with {name}" for name in (*EARLIER.values(), "InLine"))),),
        _all("mala", (*EARLIER, "inline")),
    ),
    Claim(
        "MALA is better than MLLA and Agent attention.",
        (("our addition, not in MALA's Table 9",),),
        _all("mala", ("mlla", "agent")),
    ),
    Claim(
        "MALA is better than RALA.",
        (
            ("MALA, Table 2", *(f"{name}-{size}" for size in "TSBL" for name in ("MAViT", "RAVLT"))),
            (TABLE_9, MALA),
            (TABLE_8, RALA),
        ),
        (("mala", "rala"),),
        differs="The published MAViTs have a wider last convolution than the RAVLTs; here the two are alike.",
    ),
    Claim(
        "The magnitude normalizer itself helps: division in the same block (rala_uniform) is worse.",
        (("MALA, Section 3.3, an argument without a measurement",),),
        (("mala", "rala_uniform"),),
    ),
    Claim(
        f"MALA without β loses much accuracy (more than {FAR:g} points).",
        (("MALA, Table 11", "MAViT-T", "w/o β"),),
        (("mala", "mala_no_beta"),),
        by=FAR,
        differs=f"{LATE} Its formula lacks the released code's factor 1/(N√d), which is used here.",
    ),
    Claim(
        "MALA without γ cannot be trained: the loss becomes NaN.",
        (("MALA, Table 11", "MAViT-T", "w/o γ"),),
        (("mala_no_gamma", ""),),
        "diverges",
        differs=f"{LATE} Its formula lacks the released code's factor 1/(N√d), which is used here, in float32.",
    ),
    Claim(
        "Learned β and γ are worse than computed ones.",
        (("MALA, Table 11", "MAViT-T", "Learnable"),),
        (("mala", "mala_learned"),),
        differs=LATE,
    ),
    Claim(
        "The choice of the feature map κ does not matter to MALA.",
        (("MALA, Table 10", "ELU + 1", "ReLU", "exp"),),
        (("mala", "mala_relu"), ("mala", "mala_exp")),
        "equal",
        differs=LATE,
    ),
    Claim(
        "RALA's output features have a higher rank than those of vanilla linear attention.",
        (("RALA, Figures 2 and 8",),),
        (("rala", "linear"),),
        quantity="output_rank",
    ),
    Claim(
        "RALA's state (the KV buffer) has a higher rank than that of vanilla linear attention.",
        (("RALA, Figure 4",),),
        (("rala", "linear"),),
        quantity="state_rank",
        differs="The source adds α to the same attention; these two differ in the whole block.",
    ),
    Claim(
        "MALA has no negative scores.",
        (("MALA, Section 3.3",),),
        (("mala", ""),),
        "zero",
        "negative_share",
        differs="The source's formula has no rotation; the released code, and this network, rotate the numerator.",
    ),
    Claim(
        "MALA's scores are more concentrated than those of vanilla linear attention, less than those of softmax.",
        (("MALA, Figures 4 and 7",),),
        (("linear", "mala"), ("mala", "softmax")),
        quantity="entropy",
        differs="With rotation scores can be negative, so |A|/Σ|A| is used, which is no distribution of MALA's.",
    ),
    Claim(
        "CARE's asymmetric split of the channels is as accurate as a symmetric one.",
        (("CARE, Section 4.4 (Table 3)",),),
        (("care", "care_symmetric"),),
        "equal",
    ),
    Claim(
        "Local and global features side by side, as in CARE, are better than stacked ones.",
        (("CARE, Table 1", "CARE-S2"), ("CARE, Table 3", "w/ Sta")),
        (("care", "care_stacked"),),
    ),
    Claim(
        "CARE is better than the same network without local convolutions.",
        (("CARE, Section 4.4 (Table 3)",),),
        (("care", "care_attended"),),
    ),
    *(
        Claim(
            f"The {removed} of CARE helps.",
            (("CARE, Table 4", "CARE-S0", row),),
            (("care", f"care_no_{variant}"),),
            differs=REMOVED,
        )
        for removed, row, variant in (
            ("first interaction", "w/o Inter1", "interaction1"),
            ("second interaction", "w/o Inter2", "interaction2"),
            ("memory", "w/o Mem", "memory"),
        )
    ),
    Claim(
        "Strip convolutions in the first two stages of CARE are better than linear attention there.",
        (("CARE, Section 4.4 (Table 5)",),),
        (("care", "care_early_linear"),),
    ),
    Claim(
        "Local convolutions of two sizes in CARE are better than those of one size.",
        (("CARE, Section 4.4 (Table 5)",),),
        (("care", "care_local3"), ("care", "care_local7")),
    ),
)
