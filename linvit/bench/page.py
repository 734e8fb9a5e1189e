"""The results of a benchmark as a table, as sentences, as figures and as a page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from linvit.analysis.figures import colours_of, subplots, write_figure
from linvit.analysis.markdown import markdown_rows
from linvit.analysis.report import bullets, figure_image, paragraph, table, write_page
from linvit.bench import machine
from linvit.bench.rows import Report, Row, curves, measured
from linvit.files import write_json

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
    "model": {**OF_NETWORKS, "file MiB": lambda row: number(row.file_mib)},
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
    """Sentences on skipped rows, the table's columns, growth and crossovers, and the notes of the report."""
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
    yield from report.findings.get("notes", ())


LINES = ("-", "--", ":", "-.")
FONT = 10
DASHES: dict[str, Any] = {"handlelength": 4.0}  # a shorter sample of a dashed line looks solid
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
FURTHER: list[Callable[[Report], Iterator[tuple[str, Figure]]]] = []
"""Further figures of reports, as `figures` returns them."""


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything that the report has numbers for."""
    if any(len(line) > 1 for line in curves(report.rows).values()):
        yield "growth", growth(report)
    for more in FURTHER:
        yield from more(report)


def growth(report: Report) -> Figure:
    """Time, and memory if it was measured, over tokens or pixels, all axes logarithmic."""
    rows, exponents = report.rows, report.findings.get("growth", {})
    lines = {name: line for name, line in curves(rows).items() if len(line) > 1}
    names = list(dict.fromkeys(line[0].name for line in lines.values()))
    colours = colours_of(names)
    variants = list(dict.fromkeys((line[0].variant, line[0].dtype, line[0].batch) for line in lines.values()))
    with_memory = any(row.peak_mib for line in lines.values() for row in line)
    size = 6.2 * (1 + with_memory), 4.6 + 0.13 * len(lines)
    figure, (panels,) = subplots(size, 1, 1 + with_memory, squeeze=False)
    work = {name.partition(", ")[2] for name in lines}
    common = f", {work.pop()}" if len(work) == 1 and "" not in work else ""
    for name, line in lines.items():
        style = {
            "color": colours[line[0].name],
            "linestyle": LINES[variants.index((line[0].variant, line[0].dtype, line[0].batch)) % len(LINES)],
            "marker": MARKERS[names.index(line[0].name) % len(MARKERS)],
            "markersize": 4,
        }
        power = f": power {exponents[name]:.2f}" if name in exponents else ""
        label = f"{name.removesuffix(common)}{power}"
        panels[0].plot([row.extent for row in line], [row.median_ms for row in line], label=label, **style)
        known = [row for row in line if row.peak_mib]
        if with_memory and known:
            panels[1].plot([row.extent for row in known], [row.peak_mib for row in known], **style)
    what = "tokens" if rows[0].tokens is not None else "pixels"
    memory = "memory of the cache" if rows[0].work == "token" else "peak memory above inputs and weights"
    labels = (f"ms per call{common}", f"{memory}, MiB")
    marked = sorted({row.extent for line in lines.values() for row in line})
    for axes, label in zip(panels, labels, strict=False):
        axes.set(xlabel=what, ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(marked, [_short(extent) for extent in marked], fontsize=FONT, minor=False)
        axes.minorticks_off()
    columns = 1 if len(lines) < 8 else 2
    figure.legend(frameon=False, fontsize=FONT, loc="outside lower center", ncols=columns * len(panels), **DASHES)
    return figure


def _short(extent: int) -> str:
    if extent < 100_000:
        return f"{extent:,}"
    return f"{extent / 1e6:.0f}M" if extent >= 10_000_000 else f"{extent / 1e6:.2g}M"


def save(report: Report, folder: Path) -> None:
    """Writes bench.json, report.html and the figures, each whole or not at all."""
    write_json(folder / "bench.json", report.as_dict(), indent=1)
    about = paragraph(f"{machine.sentence(report.machine)}.")
    sections = [("Results", [about, table(cells(report)), bullets(sentences(report))])]
    for name, figure in figures(report):
        words = name.replace("_", " ").capitalize()
        sections.append((words, [figure_image(figure, words)]))
        write_figure(figure, folder / name)
    write_page(folder / "report.html", f"linvit bench {report.kind}", sections)
