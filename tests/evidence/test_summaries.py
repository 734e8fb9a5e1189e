"""What the pages of evidence say is what ledgers and tables give: tables, claims.csv, and the numbers in sentences."""

import re
from pathlib import Path

import pytest
from tiers import quick

from evidence import speeds
from evidence import summaries as evidence
from evidence.published import ROWS
from evidence.rows import EVIDENCE
from linvit.analysis.markdown import marks

ROOT = Path(__file__).parents[2]
AGAIN = "make summaries writes it again"
COUNTED = [
    f"{name}_networks" for name in ("patterns", "parts", "scale")
]  # by building 26 networks; the referee's is quick


def text(page):
    """A page in one line, so that sentences may be broken anywhere."""
    return " ".join((ROOT / page).read_text().split())


def block(page, name):
    begin, end = marks(name)
    return (EVIDENCE / f"{page}.md").read_text().partition(begin)[2].partition(end)[0]


def test_claims_csv_is_what_the_ledgers_give():
    assert (EVIDENCE / "claims.csv").read_text() == evidence.claims_csv(), AGAIN


@pytest.mark.parametrize("name", quick(evidence.TABLES, evidence.TABLES.keys() - COUNTED))
def test_a_table_is_what_ledgers_and_tables_give(name):
    page, table = evidence.TABLES[name]
    assert block(page, name).strip() == table().strip(), AGAIN


@pytest.mark.parametrize("study", evidence.STUDIES)
def test_claims_of_a_study_are_those_of_its_page(study):
    shown = block("real-images", study)
    for verdict in evidence.decided(study):
        (row,) = [line for line in shown.splitlines() if line.startswith(f"| {verdict.claim.statement} |")]
        assert all(effect.words in row for effect in verdict.effects)
        assert row.endswith(f"| {verdict.outcome} |")
        assert verdict.claim.differs.replace("|", "\\|") in row


@pytest.mark.parametrize("name", evidence.COMPARISONS)
def test_comparisons_are_those_of_their_page(name):
    comparison = evidence.COMPARISONS[name]
    digits, shown = evidence.measure_of(comparison).digits, block(comparison.page, name)
    for row in evidence.rows(comparison):
        for difference in row.differences.values():
            assert f"{evidence.interval(difference, digits)} |" in shown


def accuracy(study, first, second=None, quantity="accuracy"):
    """The mean of a variant, or the paired difference of two."""
    values = evidence.numbers(study)[quantity]
    if second is None:
        return evidence.estimate(values[first])
    return evidence.estimate([a - b for a, b in zip(values[first], values[second], strict=True)])


def vit(first, second=None, quantity="accuracy"):
    return accuracy("vit_from_6", first, second, quantity).mean


def pyramid(first, second=None, quantity="accuracy"):
    return accuracy("pyramid", first, second, quantity).mean


def published(table, first, second):
    return float(ROWS[f"{table}, {first}"].values["top-1"]) - float(ROWS[f"{table}, {second}"].values["top-1"])


def spread(values):
    return min(values), max(values)


SEVEN = ("softmax", "linear", "rala", "mala", "rala_mala", "inline", "efficient")
TESTS = {name: sum(v.p is not None for v in evidence.decided(name)) for name in ("vit_from_6", "pyramid")}
OF_VIT = accuracy("vit_from_6", "mala", "rala_uniform")
BOOKS = {other: evidence.difference("books", "mala", other) for other in ("softmax", "linear")}
PENN = {score: evidence.difference("penn_fudan", "mala", "softmax", score) for score in ("mask_ap", "box_ap")}
OVER_SEVEN = {name: p for name, (_, p) in evidence.against("softmax").items()}
FASTER = speeds.speeds()
REAL, LINEAR = "docs/evidence/real-images.md", "docs/evidence/linearize.md"
CHOOSE, BENCH, README = "docs/understand/choose.md", "docs/evidence/benchmarks.md", "README.md"
PLAIN, KERNEL = (f"faster than softmax attention from, tokens: {words}" for words in ("plain PyTorch", "kernel"))
TIMES, TIMES_KERNEL = (f"× softmax attention at 12,544 tokens: {words}" for words in ("plain PyTorch", "kernel"))
CPUS, GPU = ("AMD EPYC", "Intel Xeon"), "H200, bfloat16"


def on_cpus(measure):
    return spread([int(value) for cpu in CPUS for value in FASTER[measure][cpu].split(", ")])


def pair(measure, processor):
    return FASTER[measure][processor].split(", ")


SENTENCES = [
    (
        REAL,
        "in the same block** (rotation, LePE, gate), by {:.1f} and {:.1f} points",
        (vit("mala", "softmax_gated"), vit("rala", "softmax_gated")),
    ),
    (REAL, "without it by {:.1f} and {:.1f}.", (vit("mala", "softmax"), vit("rala", "softmax"))),
    (REAL, "MALA is {:.1f} points better than RALA. What", (vit("mala", "rala"),)),
    (
        REAL,
        "RALA without its key weights has the highest mean ({:.1f} %), {:.1f} points above RALA",
        (vit("rala_uniform"), vit("rala_uniform", "rala")),
    ),
    (REAL, "it gains at most {:.1f} points ([a plain ViT]", (OF_VIT.high,)),
    (REAL, "than those of softmax attention, by {:.1f}.", (vit("softmax", "linear", "output_rank"),)),
    (REAL, "lowers it, by {:.1f} ([asked later]", (vit("rala_uniform", "rala", "state_rank"),)),
    (REAL, "which of seven mechanisms between {:.1f} and {:.1f} % is best", spread([pyramid(name) for name in SEVEN])),
    (
        REAL,
        "they reach {:.1f} to {:.1f} % on CIFAR-10",
        spread([vit(name) for name in evidence.numbers("vit_from_6")["accuracy"]]),
    ),
    (REAL, "on text**, by {:.3f} to {:.3f} bits per byte", (-BOOKS["softmax"].high, -BOOKS["softmax"].low)),
    (
        REAL,
        "with p = {:.3f} in its own table and {:.3f} over the seven, and its box AP by {:.1f} [{:.1f}, {:+.1f}]",
        (PENN["mask_ap"].p, OVER_SEVEN["penn_fudan"], -PENN["box_ap"].mean, PENN["box_ap"].low, PENN["box_ap"].high),
    ),
    (
        REAL,
        "by {:.3f} bits [{:.3f}, {:.3f}], which was asked later",
        (-BOOKS["linear"].mean, -BOOKS["linear"].high, -BOOKS["linear"].low),
    ),
    (REAL, "linear attention is another [{:.1f} points better]", (vit("rala_uniform", "softmax_gated"),)),
    (
        REAL,
        "changes the accuracy by {:.1f} points [{:.1f}, {:+.1f}]: undecided. One seed (8)",
        (OF_VIT.mean, OF_VIT.low, OF_VIT.high),
    ),
    (
        REAL,
        "is {:.1f} points in MALA's favour",
        (
            max(
                a - b
                for a, b in zip(
                    evidence.numbers("vit_from_6")["accuracy"]["mala"],
                    evidence.numbers("vit_from_6")["accuracy"]["rala_uniform"],
                    strict=True,
                )
            ),
        ),
    ),
    (REAL, "by {:.2f} nats of {:.1f}", (vit("mala", "linear", "entropy"), vit("linear", quantity="entropy"))),
    (REAL, "Of MALA's scores {:.0f} % are negative", (100 * vit("mala", quantity="negative_share"),)),
    (REAL, "level of Holm's procedure for the {} tests of the ViT", (TESTS["vit_from_6"],)),
    (REAL, "at the strictest level for {} tests", (TESTS["pyramid"],)),
    (REAL, "so are its {:.1f} points without β and γ", (pyramid("mala", "mala_no_beta"),)),
    (
        REAL,
        "{:.1f} points for RALA's gate, {:.1f} to {:.1f} for φ and κ, {:.1f} to {:.1f} for MALA over RALA in the",
        (
            published("RALA, Table 9", "RAVLT-T", "w/o out aug"),
            *spread(
                [
                    abs(published("RALA, Table 9", "RAVLT-T", row))
                    for row in ("φ identity", "φ tanh", "κ ReLU", "κ Softmax")
                ]
            ),
            *spread([published("MALA, Table 2", f"MAViT-{size}", f"RAVLT-{size}") for size in "TSBL"]),
        ),
    ),
    (
        BENCH,
        "{} and {} times as fast as softmax attention at 12,544 tokens on an AMD EPYC",
        pair(TIMES_KERNEL, CPUS[0]),
    ),
    (
        BENCH,
        "and {} and {} times on an Intel Xeon; plain PyTorch {} and {}, and {} and {}.",
        (*pair(TIMES_KERNEL, CPUS[1]), *pair(TIMES, CPUS[0]), *pair(TIMES, CPUS[1])),
    ),
    (
        BENCH,
        "takes {} and {} of the time of ConvNeXt-T",
        [FASTER["`ravlt_tiny`: time over that of ConvNeXt-T"][cpu] for cpu in CPUS],
    ),
    (BENCH, "stays ahead up to {} (MALA) and {} tokens (RALA)", pair(KERNEL, GPU)[::-1]),
    (
        BENCH,
        "`ravlt_tiny` takes {:.0f} ms on the AMD processor instead of {:.0f}, ConvNeXt-T {:.0f} instead of {:.0f}",
        (
            speeds.network("onnxruntime", "ravlt_tiny", "onnxruntime", "ms", "deployment"),
            speeds.network("model", "ravlt_tiny", "fused+cpp", "ms"),
            speeds.network("onnxruntime", "convnext_tiny", "onnxruntime", "ms", "deployment"),
            speeds.network("model", "convnext_tiny", "fused", "ms"),
        ),
    ),
    *(
        (page, words, values)
        for page in (README, CHOOSE)
        for words, values in (
            ("from {} to {}", on_cpus(PLAIN)),
            ("from {} to {}", on_cpus(KERNEL)),
            ("{} to {} times as fast", on_cpus(TIMES)),
            ("{} to {} times with the kernel", on_cpus(TIMES_KERNEL)),
            ("from {} (MALA) and {} (RALA) tokens on", pair(KERNEL, GPU)[::-1]),
        )
    ),
    (
        CHOOSE,
        "{} and {} times as fast at 12,544; plain PyTorch only from {} and {} on",
        (*pair(TIMES_KERNEL, GPU)[::-1], *pair(PLAIN, GPU)[::-1]),
    ),
    (
        CHOOSE,
        "MALA is {:.1f} points better than softmax attention, RALA {:.1f}, and MALA {:.1f} better than RALA",
        (vit("mala", "softmax"), vit("rala", "softmax"), vit("mala", "rala")),
    ),
    (CHOOSE, "softmax attention gains {:.1f} points with the same gate", (vit("softmax_gated", "softmax"),)),
]


@pytest.mark.parametrize(("page", "words", "values"), SENTENCES)
def test_numbers_in_a_sentence_are_those_of_ledgers_and_tables(page, words, values):
    assert words.format(*values) in text(page)


def test_care_beside_its_peers_in_other_runtimes():
    ratios = []
    for runtime in ("onnxruntime", "openvino", "openvino+bf16", "executorch"):
        part = runtime.partition("+")[0]
        ours, *others = (
            speeds.network(part, name, runtime, "ms", "deployment")
            for name in ("care_s0", "efficientvit_b1", "mobilenetv4_conv_medium")
        )
        ratios += [ours / other for other in others]
    assert "`care_s0` takes {:.1f} to {:.1f} times as long as".format(*spread(ratios)) in text(CHOOSE)


@pytest.mark.parametrize("page", ["benchmarks-networks", "deployment", "linearize"])
def test_published_accuracy_stands_beside_rows_of_its_own_kind_only(page):
    file = (EVIDENCE / f"{page}.md").read_text()
    rows = [row for part in re.findall(r"bench (\w+):begin", file) for row in speeds.bench_rows(page, part)]
    shown = [row for row in rows if row.get("published top-1, %", "–") != "–"]
    assert shown
    assert all(row["px"] == "224 × 224" and "int8" not in row["variant"] for row in shown)


def test_students_that_keep_their_teacher_s_accuracy():
    found = [p for mechanisms in evidence.kept().values() for _, p in mechanisms.values()]
    assert (sum(p <= 0.05 for p in found), len(found)) == (8, 9)
    assert "eight of nine students are at most one point behind" in text(LINEAR)
