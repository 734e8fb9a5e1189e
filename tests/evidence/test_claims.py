import csv
import math
import re
from pathlib import Path

import pytest

from evidence.claims import ACCURACY, CLAIMS, FAILS, HOLDS, UNCLEAR, Claim, verdicts
from linvit.bundled import bundled_folder

FAR_APART = {"good": (90.0, 90.4, 90.1, 89.9, 90.2), "bad": (70.0, 70.3, 70.2, 69.8, 70.1)}
NEAR = {"near": (90.1, 90.3, 90.1, 90.0, 90.1), "noisy": (85.0, 95.2, 88.1, 93.0, 90.4)}
LOST = {"lost": (math.nan,) * 5, "half": (math.nan, 90.0, 90.0, math.nan, 90.0)}
NUMBERS = {ACCURACY: FAR_APART | NEAR | LOST, "share": {"good": (0.0,) * 5, "bad": (0.0, 0.2, 0.1, 0.3, 0.2)}}


def claim(*pairs, **settings):
    return Claim("a claim", (("a paper",),), pairs, **settings)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (claim(("good", "bad")), HOLDS),
        (claim(("bad", "good")), FAILS),
        (claim(("good", "noisy")), UNCLEAR),
        (claim(("good", "near")), FAILS),
        (claim(("good", "bad"), ("good", "noisy")), UNCLEAR),
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


def test_an_effect_is_told_as_it_was_measured():
    (verdict,) = verdicts([claim(("good", "bad"), by=10.0)], NUMBERS)
    assert verdict.effects[0].words.startswith("good − bad = +20.04 [")
    assert verdict.effects[0].difference.mean == pytest.approx(20.04)
    assert verdict.p < 1e-4


def test_an_advantage_too_small_to_matter_speaks_against_a_claim():
    slightly = {"one": (1.0, 2.0, 3.0, 4.0, 5.0), "other": (0.9, 2.1, 3.0, 3.9, 5.1)}
    made = claim(("one", "other"))
    assert verdicts([made], {ACCURACY: slightly})[0].outcome == FAILS
    assert verdicts([claim(("one", "other"), quantity="rank")], {"rank": slightly})[0].outcome == UNCLEAR


def test_a_claim_needs_all_of_its_comparisons_and_falls_with_one():
    both, one = claim(("good", "bad"), ("near", "bad")), claim(("good", "bad"))
    assert verdicts([both], NUMBERS)[0].p == max(
        verdicts([claim(pair)], NUMBERS)[0].p for pair in (("good", "bad"), ("near", "bad"))
    )
    wrong = claim(("bad", "good"), ("near", "bad"))
    assert verdicts([wrong], NUMBERS)[0].p == pytest.approx(2 * verdicts([claim(("bad", "good"))], NUMBERS)[0].p)
    assert verdicts([one, both], NUMBERS)[0].p == pytest.approx(2 * verdicts([one], NUMBERS)[0].p)


def test_claims_name_their_source_and_no_comparison_twice():
    asked = [(made.rule, made.quantity, pair) for made in CLAIMS for pair in made.pairs]
    assert len(asked) == len(set(asked))
    assert all(made.source.startswith(("RALA", "MALA", "CARE", "our ")) for made in CLAIMS)


def test_numbers_of_a_source_are_the_published_ones():
    made = Claim("a claim", (("RALA, Table 9", "RAVLT-T", "w/o KV aug"), ("RALA, Figure 4",)), ())
    assert made.source == "RALA, Table 9 (RAVLT-T 82.8 %, w/o KV aug 82.1 %); RALA, Figure 4"
    assert not [made.statement for made in CLAIMS if re.search(r"\d\d\.\d", f"{made.statement} {made.sources}")]


def test_a_claim_concerns_a_study_that_can_make_one_of_its_comparisons():
    several = claim(("good", "bad"), ("good", "absent"))
    assert several.concerns({"good", "bad"})
    assert not several.concerns({"good", "other"})
    assert claim(("good", ""), rule="zero").concerns({"good"})
    assert verdicts([several], NUMBERS)[0].effects[1].words == "good − absent: not measured"


def test_the_study_of_digits_leaves_out_the_claims_about_care():
    names = {path.stem for path in (bundled_folder() / "study").glob("*.yaml")}
    left_out = [made for made in CLAIMS if not made.concerns(names)]
    assert len(left_out) == 8
    assert all(name == "care" for made in left_out for name, _ in made.pairs)


def test_the_page_of_results_has_the_claims_and_sources_of_the_code():
    path = Path(__file__).parents[2] / "docs" / "evidence" / "small-studies.md"
    page = path.read_text().partition("study:begin")[2]
    table = page.partition("| verdict |\n")[2].partition("\n\n")[0].splitlines()[1:]
    names = {path.stem for path in (bundled_folder() / "study").glob("*.yaml")}
    shown = [tuple(line.strip("| ").split(" | ")[:2]) for line in table]
    assert shown == [(made.statement, made.source) for made in CLAIMS if made.concerns(names)]


def test_the_page_counts_the_claims_that_are_decided_in_a_network():
    folder = Path(__file__).parents[2] / "docs" / "evidence"
    found: dict[str, set[str]] = {}
    with (folder / "claims.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["study"] in ("vit_from_6", "pyramid", "care") and row["counts"] == "yes":
                found.setdefault(row["claim"], set()).add(row["verdict"])
    open_claims = sum(found_in == {UNCLEAR} for found_in in found.values())
    page = (folder / "real-images.md").read_text()
    assert f"Of {len(found)} claims {len(found) - open_claims} are decided in at least one of the three" in page
    assert f"[{open_claims} are not]" in page
