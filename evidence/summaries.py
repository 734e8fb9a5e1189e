"""What the pages of evidence say beyond the tables of single studies and benchmarks, from these and the ledgers.

These are docs/evidence/claims.csv and the tables between the marks named in TABLES; tests compare them with the files.
Nothing is trained or measured.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from evidence import design_figures, design_page, inside, speeds
from evidence.claims import (
    ACCURACY,
    ALPHA,
    CLAIMS,
    CONTROL,
    MARGIN,
    UNCLEAR,
    Claim,
    Numbers,
    Verdict,
    p_above,
    verdicts,
)
from evidence.rows import EVIDENCE, Claims, Comparison
from evidence.study_page import CLAIM_COLUMNS, claim_lines, p_text
from evidence.table import AN4, BOOKS, CIFAR10, DENSE, LINEARIZE, PAPERS
from linvit.analysis.markdown import markdown_rows, marks, replace_between_marks
from linvit.files import write_text
from linvit.runs.tasks import RUNS
from linvit.studies.comparison import compared
from linvit.studies.table import Estimate, Row, estimate, holm
from linvit.tasks.measures import Measure
from linvit.tasks.students import ERRORS

STUDIES = {row.name: row for row in PAPERS if isinstance(row, Claims)}
TABLES_OF_TASKS = {row.name: row for row in (*DENSE, AN4, BOOKS, CIFAR10)}
STUDENTS = {row.name: row for row in (*PAPERS, *LINEARIZE) if isinstance(row, Comparison) and row.counted}
COMPARISONS = TABLES_OF_TASKS | STUDENTS
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

FIRST_VALUES = ("linear", "LLLLLL")  # the baselines of a single recipe
LABEL = re.compile(r"(\w+?)(?: at (\S+))? seed (\d+)")
TEACHERS = {"linearize_tune": "teachers/vit.md", "linearize_pyramid_tune": "bodies/softmax.md"}


def results(ledger: str) -> dict[tuple[str, str | None, int], Mapping[str, Mapping[str, float]]]:
    """(recipe, value, seed) → the result of the run."""
    by_run = {}
    for line in (EVIDENCE / f"{ledger}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        match = LABEL.fullmatch(row["run"])
        assert match, row["run"]
        by_run[match[1], match[2], int(match[3])] = row["result"]
    return by_run


def numbers(study: str) -> Numbers:
    """Accuracy and what was measured inside the networks, as `verdicts` takes them."""
    runs, seeds = results(STUDIES[study].ledger), STUDIES[study].every_seed
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


def measure_of(row: Comparison, score: str = "") -> Measure:
    """The score of a comparison, or another measure of its task."""
    known: Mapping[str, Measure] = ERRORS if row.task == "students" else RUNS[row.task].task_class.measures
    return known[score or row.score]


def rows(row: Comparison, score: str = "", names: Sequence[str] = ()) -> list[Row]:
    """The rows of a comparison with their differences, in its score or another measure; of some recipes alone."""
    names, runs = names or row.names, results(row.ledger or row.name)
    values = sorted({value for name, value, _ in runs if name in names}, key=str)
    pairs = [(name, value) for value in values for name in names]
    facts = [{"name": name, "value": value, "parameters": 0} for name, value in pairs]
    each = [[runs[name, value, seed] for seed in row.every_seed] for name, value in pairs]
    baselines = [names[0]] if len(names) > 1 else [value for value in values if value in FIRST_VALUES]
    return compared(facts, each, {score or row.score: measure_of(row, score)}, baselines)


def compared_lines(name: str) -> Iterator[list[str]]:
    """The lines of claims.csv of a comparison: what differs from its baseline, in which direction."""
    comparison = COMPARISONS[name]
    measure = measure_of(comparison)
    data = {"pyramid": "imagenette-80", "linearize": "cifar"}.get(name.partition("_")[0], name.partition("_")[0])
    data = "imagenette-80" if name.startswith("linearize_pyramid") else data
    for row in rows(comparison):
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
    for study, row in STUDIES.items():
        counted = [(SUPERSEDED.get(study, "yes"), decided(study))]
        counted += [(LATER, asked_later(study))] if study in ASKED_LATER else []
        for counts, made in counted:
            writer.writerows([line[0], counts, *line[1:]] for line in claim_lines(study, row.data, made))
    for name in COMPARISONS:
        writer.writerows(compared_lines(name))
    return text.getvalue()


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


def difference(name: str, first: str, second: str, score: str = "") -> Estimate:
    """The paired difference of two mechanisms in a table of another task, in its score or another measure."""
    row = TABLES_OF_TASKS[name]
    of = {mechanism: next(each for each in row.names if _mechanism(each) == mechanism) for mechanism in (first, second)}
    return rows(row, score, [of[second], of[first]])[1].differences[of[second]]


def _mechanism(recipe: str) -> str:
    return recipe.rpartition("_")[2]


def interval(value: Estimate, digits: int) -> str:
    """Such as `+0.55 [+0.23, +0.87]`."""
    mean, low, high = (f"{number:+.{digits}f}" for number in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def against(other: str) -> dict[str, tuple[Estimate, float]]:
    """MALA against another mechanism in every table of another task that has both, p corrected over these tables."""
    names = [name for name, row in TABLES_OF_TASKS.items() if other in map(_mechanism, row.names)]
    estimates = [difference(name, "mala", other) for name in names]
    corrected = holm([value.p for value in estimates])
    return {name: (value, p) for name, value, p in zip(names, estimates, corrected, strict=True)}


def tasks_table() -> str:
    """MALA against softmax and linear attention in the other tasks, corrected over all of them."""
    columns = {other: against(other) for other in ("softmax", "linear")}
    cells = []
    for name, row in TABLES_OF_TASKS.items():
        measure = measure_of(row)
        shown = {"table": row.title, "score": f"{measure.label}{' (lower is better)' * measure.lower_is_better}"}
        for other, estimates in columns.items():
            value, p = estimates.get(name, (None, 1.0))
            shown[f"MALA − {other}"] = interval(value, measure.digits) if value else "–"
            shown[f"p {other}"] = p_text(value.p) if value else "–"
            shown[f"p {other}, over the tables"] = p_text(p) if value else "–"
        cells.append(shown)
    return markdown_rows(cells, left=2)


def teacher(page: str) -> float:
    """Top-1 of a card, in %."""
    match = re.search(r"top-1, held out \| ([\d.]+) %", (EVIDENCE / page).read_text(encoding="utf-8"))
    assert match, page
    return float(match[1])


def kept() -> dict[str, dict[str, tuple[Estimate, float]]]:
    """Ledger → mechanism → tuned student minus teacher, and the corrected p of a loss of less than a point."""
    by_ledger = {}
    for ledger, page in TEACHERS.items():
        runs = results(ledger)
        each = {
            value: [100 * runs["tune", value, seed]["measures"]["top1"] - teacher(page) for seed in range(3)]
            for name, value, seed in runs
            if (name, seed) == ("tune", 0)
        }
        corrected = holm([p_above(values, -MARGIN) for values in each.values()])
        by_ledger[ledger] = {
            str(value): (estimate(values), p) for (value, values), p in zip(each.items(), corrected, strict=True)
        }
    return by_ledger


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


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "asked_later": ("real-images", later_table),
    "other_tasks": ("real-images", tasks_table),
    "linearize_kept": ("linearize", kept_table),
    "speeds": ("benchmarks", speeds.table),
    **design_page.TABLES,
    **design_figures.TABLES,
}
"""The names of marks → page, and the table between them."""


def write() -> None:
    """Writes claims.csv, the tables, and the figures of trainings for GPUs."""
    write_text(EVIDENCE / "claims.csv", claims_csv())
    design_figures.write()
    for name, (page, table) in TABLES.items():
        replace_between_marks(EVIDENCE / f"{page}.md", f"{table()}\n", *marks(name))
