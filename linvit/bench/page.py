"""The results of a benchmark as a table and as sentences."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from linvit.analysis.markdown import markdown_rows
from linvit.bench import machine
from linvit.bench.rows import Report, Row, measured
from linvit.models.published import PUBLISHED

CLOCKS = {"cpu": "CPU time", "wall": "wall time", "gpu": "GPU time"}
MISSING = "–"

Cell = Callable[[Row], str]


def number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def formatted(value: float | None, form: str = ".2f") -> str:
    return MISSING if value is None else format(value, form)


def against(rival: str) -> Cell:
    return lambda row: formatted(row.against.get(rival))


def has_published_accuracy(row: Row) -> bool:
    """Whether the network has a published accuracy, and the row is of that: floating-point numbers, at 224 px."""
    return row.name in PUBLISHED and row.size == (224, 224) and "int8" not in row.variant


def _top1(row: Row) -> str:
    return f"{PUBLISHED[row.name].top1:g}" if has_published_accuracy(row) else MISSING


VARIANT: dict[str, Cell] = {"variant": lambda row: row.variant, "dtype": lambda row: row.dtype}
TOKENS: dict[str, Cell] = {"tokens": lambda row: f"{row.tokens:,}"}
SIZE: dict[str, Cell] = {"px": lambda row: f"{row.size[0]} × {row.size[1]}" if row.size else MISSING}
BATCH: dict[str, Cell] = {"batch": lambda row: str(row.batch)}
TIME: dict[str, Cell] = {"ms": lambda row: number(row.median_ms), "± IQR": lambda row: number(row.spread_ms)}
RATIOS: dict[str, Cell] = {"× plain": lambda row: formatted(row.ratio), "× reference": against("reference")}
ERROR: dict[str, Cell] = {"error": lambda row: formatted(row.error, ".0e")}
PEAK: dict[str, Cell] = {"peak MiB": lambda row: number(row.peak_mib)}
NETWORK: dict[str, Cell] = {"network": lambda row: row.name, "pattern": lambda row: row.pattern or MISSING}

OF_NETWORKS = {**NETWORK, **SIZE, **VARIANT, **BATCH, **TIME, **RATIOS, **ERROR, **PEAK}
COLUMNS: dict[str, dict[str, Cell]] = {
    "op": {
        "operator": lambda row: row.name,
        **VARIANT, **TOKENS, **BATCH, **TIME, **RATIOS, "× sdpa": against("sdpa"), **ERROR, **PEAK,
    },
    "model": {**OF_NETWORKS, "file MiB": lambda row: number(row.file_mib), "published top-1, %": _top1},
    "train": OF_NETWORKS,
}  # fmt: skip
WORDS = {"operator", "network", "mechanism", "pattern", "px", "variant", "dtype", "inputs"}


def cells(report: Report) -> list[dict[str, str]]:
    """The cells of the table, by heading, without columns in which nothing was measured."""
    rows = [{heading: cell(row) for heading, cell in COLUMNS[report.kind].items()} for row in report.rows]
    filled = {heading for row in rows for heading, cell in row.items() if cell != MISSING}
    return [{heading: cell for heading, cell in row.items() if heading in filled} for row in rows]


def words(table: Sequence[Mapping[str, str]]) -> int:
    """How many of the first columns of a table contain words."""
    return sum(heading in WORDS for row in table[:1] for heading in row)


def to_markdown(report: Report) -> str:
    """Machine, table and sentences."""
    rows = cells(report)
    text = markdown_rows(rows, left=words(rows)) if rows else ""
    sections = [f"{machine.sentence(report.machine)}.", text, "\n".join(f"- {line}" for line in sentences(report))]
    return "\n\n".join(filter(None, sections))


def sentences(report: Report) -> Iterator[str]:
    """Sentences on skipped rows, the table's columns, growth, crossovers, and whether loss curves agree."""
    for row in report.rows:
        if row.skipped is not None:
            extent = f" at {row.tokens:,} tokens" if row.tokens is not None else ""
            yield f"{row.name} {row.variant} {row.dtype}{extent}: {row.skipped}"
    clocks = {row.clock for row in measured(report.rows)}
    for clock in sorted(filter(None, clocks)):
        yield f"ms: median over the rounds of {CLOCKS[clock]} per call; IQR: interquartile range; ×: times as fast as."
    extent = "tokens" if any(row.tokens is not None for row in report.rows) else "pixels"
    for name, value in report.findings.get("growth", {}).items():
        yield f"{name} grows with {extent}^{value:.2f}"
    for name, value in report.findings.get("memory_growth", {}).items():
        yield f"{name}: memory grows with {extent}^{value:.2f}"
    for name, value in report.findings.get("crossover", {}).items():
        rival = "" if " against " in name else " against sdpa"
        yield f"{name}{rival}: faster {'at every size' if value == 0 else f'from about {value:,.0f} {extent} on'}"
    for name, variants in report.findings.get("curves", {}).items():
        for variant, curve in variants.items():
            agreement = "agrees" if curve["agrees"] else "DOES NOT AGREE"
            yield (
                f"loss curve of {name} {variant}: {agreement} with plain, at most {curve['deviation']:.1e} off in "
                f"{len(curve['losses'])} steps (noise of its dtype: {curve['noise']:.1e})"
            )
