import math

import pytest

from linvit.studies.claims import ACCURACY, CLAIMS, Claim, verdicts
from linvit.studies.statistics import FAILS, HOLDS, UNCLEAR

FAR_APART = {"good": (90.0, 90.4, 90.1, 89.9, 90.2), "bad": (70.0, 70.3, 70.2, 69.8, 70.1)}
NEAR = {"near": (90.1, 90.3, 90.1, 90.0, 90.1)}
LOST = {"lost": (math.nan,) * 5, "half": (math.nan, 90.0, 90.0, math.nan, 90.0)}
NUMBERS = {ACCURACY: FAR_APART | NEAR | LOST, "share": {"good": (0.0,) * 5, "bad": (0.0, 0.2, 0.1, 0.3, 0.2)}}


def claim(*pairs, **settings):
    return Claim("a claim", "a paper", pairs, **settings)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (claim(("good", "bad")), HOLDS),
        (claim(("bad", "good")), FAILS),
        (claim(("good", "near")), UNCLEAR),
        (claim(("good", "bad"), ("good", "near")), UNCLEAR),
        (claim(("good", "bad"), ("bad", "near")), FAILS),
        (claim(("good", "bad"), by=10.0), HOLDS),
        (claim(("good", "bad"), by=30.0), FAILS),
        (claim(("good", "near"), rule="equal"), HOLDS),
        (claim(("good", "bad"), rule="equal"), FAILS),
        (claim(("good", "absent")), UNCLEAR),
        (claim(("good", "lost")), UNCLEAR),
        (claim(("lost", ""), rule="diverges"), HOLDS),
        (claim(("half", ""), rule="diverges"), UNCLEAR),
        (claim(("good", ""), rule="diverges"), FAILS),
        (claim(("absent", ""), rule="diverges"), UNCLEAR),
        (claim(("good", ""), rule="zero", quantity="share"), HOLDS),
        (claim(("bad", ""), rule="zero", quantity="share"), UNCLEAR),
        (claim(("good", "bad"), quantity="unmeasured"), UNCLEAR),
    ],
)
def test_verdict_by_the_rule(made, verdict):
    assert verdicts([made], NUMBERS)[0].outcome == verdict


def test_more_comparisons_make_each_harder():
    slightly = {"one": (1.0, 2.0, 1.5, 0.4, 1.2), "other": (0.0,) * 5, "none": (0.3, -0.2, 0.1, -0.3, 0.2)}
    alone = claim(("one", "other"))
    noise = [claim(("none", "other")) for _ in range(200)]
    assert verdicts([alone], {ACCURACY: slightly})[0].outcome == HOLDS
    assert verdicts([alone, *noise], {ACCURACY: slightly})[0].outcome == UNCLEAR


def test_measurement_is_told_with_its_margin_added_back():
    (verdict,) = verdicts([claim(("good", "bad"), by=10.0)], NUMBERS)
    assert verdict.measured[0].startswith("good − bad = +20.04 [")


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"'lower'.*higher, equal, diverges, zero"):
        claim(("good", "bad"), rule="lower")


def test_claims_name_their_source_and_no_comparison_twice():
    asked = [(made.rule, made.quantity, pair) for made in CLAIMS for pair in made.pairs]
    assert len(asked) == len(set(asked))
    assert all(made.source.startswith(("RALA", "MALA", "our control")) for made in CLAIMS)
