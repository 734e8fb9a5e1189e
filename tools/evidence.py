"""What the pages of evidence say beyond the tables of single studies and benchmarks, from these and the ledgers.

make summaries writes docs/evidence/claims.csv and the tables between the marks named below; tests compare them with the
files. Nothing is trained or measured.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from linvit.analysis.markdown import markdown_rows, marks, replace_between_marks
from linvit.bench.page import marks as bench_marks
from linvit.files import write_text
from linvit.studies import inside
from linvit.studies.claims import ACCURACY, ALPHA, CLAIMS, CONTROL, MARGIN, Claim, Numbers, Verdict, verdicts
from linvit.studies.papers import CLAIM_COLUMNS, claim_lines
from linvit.studies.plan import compared
from linvit.studies.statistics import UNCLEAR, Estimate, estimate, holm, p_above
from linvit.studies.table import Row
from linvit.tasks.classification import Classification
from linvit.tasks.detection import Detection
from linvit.tasks.diffusion import Diffusion
from linvit.tasks.language import Language
from linvit.tasks.measures import Measure
from linvit.tasks.segmentation import Segmentation
from linvit.tasks.speech import Speech
from linvit.tasks.students import ERRORS

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
STUDIES = {
    "vit": ("vit", "cifar", range(6)),
    "vit_from_6": ("vit", "cifar", range(6, 18)),
    "pyramid": ("pyramid", "imagenette-80", range(8)),
    "care": ("care", "imagenette-80", range(10)),
}
SUPERSEDED = {"vit": "no, vit_from_6 does"}
LATER = "no, asked after the results"
SHOWN = {"vit_from_6": "plain ViT", "pyramid": "pyramid", "care": "CARE"}


def _same(first: str, second: str) -> Claim:
    statement = f"{first} and {second} differ by less than {MARGIN:g} point."
    return Claim(statement, CONTROL, ((first, second),), "equal")


ASKED_LATER = {
    "vit_from_6": (
        Claim(
            "The features of vanilla linear attention have a lower rank than those of softmax attention.",
            (("RALA, Figure 2",),),
            (("softmax", "linear"),),
            quantity="output_rank",
        ),
        Claim(
            "α raises the rank of RALA's state.",
            (("RALA, Figure 4",),),
            (("rala", "rala_uniform"),),
            quantity="state_rank",
        ),
        Claim(
            "α raises the effective rank of RALA's state.",
            (("RALA, Figure 4",),),
            (("rala", "rala_uniform"),),
            quantity="state_effective",
        ),
        Claim(
            "RALA's state has a higher effective rank than that of vanilla linear attention.",
            (("RALA, Figure 4",),),
            (("rala", "linear"),),
            quantity="state_effective",
        ),
        Claim(
            "The gate raises the rank of RALA's features.",
            (("RALA, Figure 5",),),
            (("rala", "rala_wide"),),
            quantity="output_rank",
        ),
        Claim(
            "In RALA's and MALA's block plain division without key weights is better than softmax attention.",
            CONTROL,
            (("rala_uniform", "softmax_gated"),),
        ),
        _same("mala", "rala_uniform"),
    ),
    "pyramid": (
        Claim(
            "The features of vanilla linear attention have a lower rank than those of softmax attention.",
            (("RALA, Figure 2",),),
            (("softmax", "linear"),),
            quantity="output_rank",
        ),
        Claim("MALA is better with β.", (("MALA, Table 11", "MAViT-T", "w/o β"),), (("mala", "mala_no_beta"),)),
        Claim("MALA is better with γ.", (("MALA, Table 11", "MAViT-T", "w/o γ"),), (("mala", "mala_no_gamma"),)),
        _same("softmax", "linear"),
        _same("softmax", "rala"),
        _same("rala", "linear"),
        _same("mala", "softmax"),
        _same("mala", "linear"),
        _same("mala", "rala"),
    ),
}
"""Claims that were asked when the results were known, by study: each has Holm's procedure to itself."""

TASKS = {
    "camvid_fpn": ("CamVid, Semantic FPN", "semantic_fpn_{}", Segmentation, "miou"),
    "camvid_upernet": ("CamVid, UperNet", "upernet_{}", Segmentation, "miou"),
    "bccd": ("BCCD, RetinaNet", "retinanet_{}", Detection, "box_ap"),
    "penn_fudan": ("Penn-Fudan, Mask R-CNN", "mask_rcnn_{}", Detection, "mask_ap"),
    "an4": ("AN4", "an4_{}", Speech, "wer"),
    "books": ("books", "books_{}", Language, "bits_per_byte"),
    "cifar10": ("CIFAR-10, generated", "{}", Diffusion, "fid"),
}
TOP1 = Classification.measures["top1"]
ERROR = ERRORS["error"]
COPIES = ["nothing_none"] + [
    f"{copied}_{learned}"
    for copied in ("nothing", "attention", "mlp", "all")
    for learned in ("none", "outputs", "maps")
    if (copied, learned) != ("nothing", "none")
]
STUDENTS: dict[str, tuple[str, Measure, Sequence[str], range]] = {
    "pyramid_llss_rala": ("pyramid_llss_rala", TOP1, ["rala", "rala_relu"], range(3)),
    "pyramid_llss_mala": ("pyramid_llss_mala", TOP1, ["mala", "mala_relu"], range(3)),
    "linearize_align": ("linearize_align", ERROR, ["align"], range(4)),
    "linearize_transfer": ("linearize_transfer", ERROR, ["transfer"], range(3)),
    "linearize_tune": ("linearize_tune", TOP1, ["new", "copied", "tune"], range(3)),
    "linearize_tuned": ("linearize_tune", TOP1, ["tune"], range(3)),
    "linearize_steps": ("linearize_tune", TOP1, ["copied", "tune"], range(3)),
    "linearize_pyramid_align": ("linearize_pyramid_align", ERROR, ["align"], range(3)),
    "linearize_pyramid_transfer": ("linearize_pyramid_transfer", ERROR, ["transfer"], range(3)),
    "linearize_pyramid_tune": ("linearize_pyramid_tune", TOP1, ["new", "copied", "tune"], range(3)),
    "linearize_pyramid_tuned": ("linearize_pyramid_tune", TOP1, ["tune"], range(3)),
    "linearize_pyramid_steps": ("linearize_pyramid_tune", TOP1, ["copied", "tune"], range(3)),
    "linearize_copies": ("linearize_copies", TOP1, COPIES, range(1, 4)),
    "linearize_attention": ("linearize_copies", TOP1, ["mlp_none", "all_none"], range(1, 4)),
    "linearize_attention_outputs": ("linearize_copies", TOP1, ["mlp_outputs", "all_outputs"], range(1, 4)),
    "linearize_learned": ("linearize_copies", TOP1, ["all_none", "all_outputs", "all_maps"], range(1, 4)),
    "linearize_maps": ("linearize_copies", TOP1, ["all_outputs", "all_maps"], range(1, 4)),
    "linearize_hybrid_align": ("linearize_hybrid_align", ERROR, ["align"], range(3)),
    "linearize_hybrid": ("linearize_hybrid", TOP1, ["hybrid"], range(3)),
}
"""Comparisons by the names of their marks: ledger, score, recipes with the baseline first, and seeds."""

FIRST_VALUES = ("linear", "LLLLLL")  # the baselines of a single recipe
LABEL = re.compile(r"(\w+?)(?: at (\S+))? seed (\d+)")
TEACHERS = {"linearize_tune": "teachers/vit.md", "linearize_pyramid_tune": "bodies/softmax.md"}


def results(ledger: str) -> dict[tuple[str, str | None, int], Mapping[str, Mapping[str, float]]]:
    """(recipe, value, seed) → the result of the run."""
    found = {}
    for line in (EVIDENCE / f"{ledger}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        match = LABEL.fullmatch(row["run"])
        assert match, row["run"]
        found[match[1], match[2], int(match[3])] = row["result"]
    return found


def numbers(study: str) -> Numbers:
    """Accuracy and what was measured inside the networks, as `verdicts` takes them."""
    ledger, _, seeds = STUDIES[study]
    runs = results(ledger)
    names = sorted({name for name, _, _ in runs})
    measured = inside.by_quantity(
        {name: [runs[name, None, seed]["inside"] for seed in seeds] for name in names if name in inside.MEASURED}
    )
    top1 = {
        name: [100 * runs[name, None, seed]["measures"].get("top1", float("nan")) for seed in seeds] for name in names
    }
    return {ACCURACY: top1, **measured}


def decided(study: str) -> list[Verdict]:
    """The claims of a study, as its page has them."""
    known = numbers(study)
    return verdicts([claim for claim in CLAIMS if claim.concerns(known[ACCURACY])], known)


def asked_later(study: str) -> list[Verdict]:
    """The claims of ASKED_LATER."""
    return verdicts(ASKED_LATER[study], numbers(study))


def comparison(name: str) -> tuple[Measure, list[Row]]:
    """A comparison of TASKS or STUDENTS: its score, and its rows with their differences."""
    if name in TASKS:
        _, recipe, task, score = TASKS[name]
        ledger, measure, seeds = name, task.measures[score], range(3)
        first = recipe.format("softmax")
        names = [first, *sorted({run for run, _, _ in results(ledger)} - {first})]
    else:
        ledger, measure, names, seeds = STUDENTS[name]
        score = "error" if measure is ERROR else "top1"
    return measure, rows(ledger, score, measure, names, seeds)


def rows(ledger: str, score: str, measure: Measure, names: Sequence[str], seeds: range) -> list[Row]:
    """The rows of a comparison in any measure."""
    runs = results(ledger)
    values = sorted({value for name, value, _ in runs if name in names}, key=str)
    facts = [{"name": name, "value": value, "parameters": 0} for value in values for name in names]
    each = [[runs[fact["name"], fact["value"], seed] for seed in seeds] for fact in facts]
    baselines = [names[0]] if len(names) > 1 else [value for value in values if value in FIRST_VALUES]
    return compared(facts, each, {score: measure}, baselines)


def compared_lines(name: str) -> Iterator[list[str]]:
    """The lines of claims.csv of a comparison: what differs from its baseline, in which direction."""
    measure, found = comparison(name)
    data = {"pyramid": "imagenette-80", "linearize": "cifar"}.get(name.partition("_")[0], name.partition("_")[0])
    data = "imagenette-80" if name.startswith("linearize_pyramid") else data
    for row in found:
        for baseline, difference in row.differences.items():
            at = f", {row.value}" if row.value and row.value != baseline and baseline not in FIRST_VALUES else ""
            first = row.name if baseline not in FIRST_VALUES else str(row.value)
            p = row.corrected[baseline]
            higher = difference.mean > 0
            answer = ("worse" if higher == measure.lower_is_better else "better") if p <= ALPHA else UNCLEAR
            effect = [f"{value:.{measure.digits + 1}f}" for value in (difference.mean, difference.low, difference.high)]
            claim = f"{measure.label} of {first} and {baseline}{at} differ."
            yield [name, "yes", claim, "", "", data, first, baseline, *effect, "", "", f"{p:.3g}", answer]


def claims_csv() -> str:
    """A line for every comparison on the pages; `counts` says whether a verdict is superseded or was asked later."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([CLAIM_COLUMNS[0], "counts", *CLAIM_COLUMNS[1:]])
    for study, (_, data, _) in STUDIES.items():
        counted = [(SUPERSEDED.get(study, "yes"), decided(study))]
        counted += [(LATER, asked_later(study))] if study in ASKED_LATER else []
        for counts, made in counted:
            writer.writerows([line[0], counts, *line[1:]] for line in claim_lines(study, data, made))
    for name in (*TASKS, *STUDENTS):
        writer.writerows(compared_lines(name))
    return text.getvalue()


def p_text(p: float) -> str:
    """As on the pages."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def later_table() -> str:
    """The claims that were asked later."""
    cells = [
        {
            "network": SHOWN[study],
            "claim": verdict.claim.statement,
            "source": verdict.claim.source,
            "measured": "<br>".join(effect.words for effect in verdict.effects),
            "p": p_text(verdict.p or 0.0),
            "answer": verdict.outcome,
        }
        for study in ASKED_LATER
        for verdict in asked_later(study)
    ]
    return markdown_rows(cells, left=6)


def difference(name: str, first: str, second: str, score: str | None = None) -> tuple[Measure, Estimate]:
    """The paired difference of two recipes of TASKS in its score, or in another measure."""
    _, recipe, task, known = TASKS[name]
    measure = task.measures[score or known]
    found = rows(name, score or known, measure, [recipe.format(second), recipe.format(first)], range(3))
    return measure, found[1].differences[recipe.format(second)]


def interval(value: Estimate, digits: int) -> str:
    """Such as `+0.55 [+0.23, +0.87]`."""
    mean, low, high = (f"{number:+.{digits}f}" for number in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def against(other: str) -> dict[str, tuple[Measure, Estimate, float]]:
    """MALA against another mechanism in every table of TASKS that has both, p corrected over these tables."""
    names = [name for name, (_, recipe, *_) in TASKS.items() if (recipe.format(other), None, 0) in results(name)]
    found = [difference(name, "mala", other) for name in names]
    corrected = holm([value.p for _, value in found])
    return {name: (*pair, p) for name, pair, p in zip(names, found, corrected, strict=True)}


def tasks_table() -> str:
    """MALA against softmax and linear attention in the other tasks, corrected over all of them."""
    columns = {other: against(other) for other in ("softmax", "linear")}
    cells = []
    for name, (shown, *_) in TASKS.items():
        measure = columns["softmax"][name][0]
        row = {"table": shown, "score": f"{measure.label}{' (lower is better)' * measure.lower_is_better}"}
        for other, found in columns.items():
            _, value, p = found.get(name, (measure, None, 1.0))
            row[f"MALA − {other}"] = interval(value, measure.digits) if value else "–"
            row[f"p {other}"] = p_text(value.p) if value else "–"
            row[f"p {other}, over the tables"] = p_text(p) if value else "–"
        cells.append(row)
    return markdown_rows(cells, left=2)


def teacher(page: str) -> float:
    """Top-1 of a card, in %."""
    found = re.search(r"top-1, held out \| ([\d.]+) %", (EVIDENCE / page).read_text(encoding="utf-8"))
    assert found, page
    return float(found[1])


def kept() -> dict[str, dict[str, tuple[Estimate, float]]]:
    """Ledger → mechanism → tuned student minus teacher, and the corrected p of a loss of less than a point."""
    found = {}
    for ledger, page in TEACHERS.items():
        runs = results(ledger)
        each = {
            value: [100 * runs["tune", value, seed]["measures"]["top1"] - teacher(page) for seed in range(3)]
            for name, value, seed in runs
            if (name, seed) == ("tune", 0)
        }
        corrected = holm([p_above(values, -MARGIN) for values in each.values()])
        found[ledger] = {
            str(value): (estimate(values), p) for (value, values), p in zip(each.items(), corrected, strict=True)
        }
    return found


def kept_table() -> str:
    """What linear students keep of their teacher's accuracy."""
    networks = {"linearize_tune": "ViT", "linearize_pyramid_tune": "pyramid"}
    cells = [
        {
            "network": networks[ledger],
            "mechanism": f"`{mechanism}`",
            "student − teacher, points": interval(value, 2),
            "p of losing less than a point": p_text(p),
        }
        for ledger, mechanisms in kept().items()
        for mechanism, (value, p) in mechanisms.items()
    ]
    return markdown_rows(cells, left=2)


def bench_rows(page: str, part: str) -> list[dict[str, str]]:
    """The rows of a benchmark's table on a page, by their headings."""
    begin, end = bench_marks(part)
    text = (EVIDENCE / f"{page}.md").read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def crossover(part: str, variant: str, mechanism: str) -> str:
    """The tokens from which on a mechanism is faster than softmax attention, as the page says."""
    text = (EVIDENCE / "benchmarks-operator.md").read_text(encoding="utf-8")
    begin, end = bench_marks(part)
    section = text.partition(begin)[2].partition(end)[0]
    found = re.search(
        rf"- {mechanism} {variant} \w+(?:, batch 8)? against sdpa: faster from about ([\d,]+) tokens", section
    )
    assert found, (part, variant, mechanism)
    return found[1]


def times_softmax(part: str, variant: str, mechanism: str, tokens: str = "12,544") -> str:
    """How many times as fast as softmax attention, without digits that say little."""
    for row in bench_rows("benchmarks-operator", part):
        if (row["operator"], row["variant"], row["tokens"]) == (mechanism, variant, tokens):
            times = float(row["× sdpa"])
            return f"{times:.0f}" if times >= 5 else f"{times:.1f}"
    raise KeyError(part)


def network(part: str, name: str, variant: str, column: str, page: str = "benchmarks-networks") -> float:
    """A cell of a table of networks, at the largest batch."""
    found = [row for row in bench_rows(page, part) if (row["network"], row["variant"]) == (name, variant)]
    return float(found[-1][column])


def share(part: str, ours: str, peer: str) -> str:
    """Our time, folded and with the kernel, over the peer's, folded."""
    return f"{network(part, ours, 'fused+cpp', 'ms') / network(part, peer, 'fused', 'ms'):.2f}"


OPERATORS = ("rala", "mala")
NETWORKS = ("ravlt_tiny", "mavit_tiny", "care_s0")


def both(values: Iterator[str]) -> str:
    return ", ".join(values)


def speeds() -> dict[str, dict[str, str]]:
    """Measure → processor → values: the numbers that README, the advice and the page of benchmarks repeat."""
    cpus = {"AMD EPYC": ("op", "model_batch8"), "Intel Xeon": ("op_own", "model_kept")}
    found: dict[str, dict[str, str]] = {}

    def add(measure: str, processor: str, values: Iterator[str]) -> None:
        found.setdefault(measure, {})[processor] = both(values)

    for processor, (op, batch8) in cpus.items():
        for variant, words in (("plain", "plain PyTorch"), ("cpp", "kernel")):
            add(
                f"faster than softmax attention from, tokens: {words}",
                processor,
                (crossover(op, variant, m) for m in OPERATORS),
            )
            add(
                f"× softmax attention at 12,544 tokens: {words}",
                processor,
                (times_softmax(op, variant, m) for m in OPERATORS),
            )
        for variant, words in (("plain", "as created"), ("fused+cpp", "folded, with the kernel")):
            ratios = (f"{network(batch8, name, variant, '× reference'):.2f}" for name in NETWORKS)
            add(f"× released order, eight images: {words}", processor, ratios)
        add(
            "`ravlt_tiny`: time over that of ConvNeXt-T",
            processor,
            iter([share(batch8, "ravlt_tiny", "convnext_tiny")]),
        )
        peers = ("efficientvit_b1", "mobilenetv4_conv_medium")
        add(
            "`care_s0`: time over those of EfficientViT-B1, MobileNetV4-M",
            processor,
            (share(batch8, "care_s0", peer) for peer in peers),
        )
    for variant, words in (("plain", "plain PyTorch"), ("triton", "kernel")):
        values = (crossover("gpu_softmax", variant, m) for m in OPERATORS)
        add(f"faster than softmax attention from, tokens: {words}", "H200, bfloat16", values)
        values = (times_softmax("gpu_softmax", variant, m) for m in OPERATORS)
        add(f"× softmax attention at 12,544 tokens: {words}", "H200, bfloat16", values)
    return found


def speeds_table() -> str:
    """The speeds of both processors and the GPU side by side."""
    processors = ("AMD EPYC", "Intel Xeon", "H200, bfloat16")
    cells = [
        {"": measure, **{processor: values.get(processor, "–") for processor in processors}}
        for measure, values in speeds().items()
    ]
    return markdown_rows(cells, left=1)


TABLES = {
    "asked_later": ("real-images", later_table),
    "other_tasks": ("real-images", tasks_table),
    "linearize_kept": ("linearize", kept_table),
    "speeds": ("benchmarks", speeds_table),
}
"""The names of marks → page, and the table between them."""


def main() -> None:
    """Writes claims.csv and the tables."""
    write_text(EVIDENCE / "claims.csv", claims_csv())
    for name, (page, table) in TABLES.items():
        replace_between_marks(EVIDENCE / f"{page}.md", f"{table()}\n", *marks(name))


if __name__ == "__main__":
    main()
