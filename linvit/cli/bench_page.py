"""What a benchmark measured, as a table on the screen and as a part of a Markdown page."""

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table

from linvit.bench import machine
from linvit.bench.rows import Report, Row, measured
from linvit.files import replacing
from linvit.runs.screen import show as show_table
from linvit.studies.page import check_marks, markdown_table, replace_between_marks

CLOCKS = {"cpu": "CPU time", "wall": "time on the wall", "gpu": "GPU time"}


def show(report: Report) -> None:
    """The rows as one table, then what follows from them."""
    headings, left = _headings(report)
    table = Table(box=box.MARKDOWN)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right")
    for row in report.rows:
        table.add_row(*_cells(row, report.kind == "op"))
    show_table(table)
    for sentence in sentences(report):
        print(sentence)


def marks(part: str) -> tuple[str, str]:
    """The lines of a page between which a part of the benchmark stands."""
    return f"<!-- bench {part}:begin -->", f"<!-- bench {part}:end -->"


def check_page(page: Path, folder: Path) -> None:
    """Raises ValueError where the page has no place for the part that the folder is named after."""
    check_marks(page, *marks(folder.name))


def write_page(report: Report, page: Path, folder: Path) -> None:
    """Puts machine, table and pictures of a folder between the marks of its name; pictures are copied beside page."""
    headings, left = _headings(report)
    cells = [_cells(row, report.kind == "op") for row in report.rows]
    parts = [f"{machine.sentence(report.machine)}.", markdown_table(headings, cells, left=left)]
    parts.append("\n".join(f"- {sentence}" for sentence in sentences(report)))
    for picture in sorted(folder.glob("*.svg")):
        name = f"bench_{folder.name}_{picture.name}"
        with replacing(page.parent / name) as temporary:
            temporary.write_bytes(picture.read_bytes())
        parts.append(f"![{picture.stem.replace('_', ' ')}]({name})")
    replace_between_marks(page, "\n".join(["", "\n\n".join(parts), "", ""]), *marks(folder.name))


def _headings(report: Report) -> tuple[list[str], int]:
    """The columns, and how many of them are words."""
    if report.kind == "op":
        words, numbers = ["operator", "variant", "dtype"], ["tokens", "batch"]
    else:
        words, numbers = ["network", "pattern", "px", "variant", "dtype"], ["batch"]
    ratios = ["× plain", "× reference", *(["× sdpa"] if report.kind == "op" else [])]
    return [*words, *numbers, "ms", "± IQR", *ratios, "error", "peak MiB"], len(words)


def _cells(row: Row, op: bool) -> list[str]:
    size = "–" if row.size is None else f"{row.size[0]} × {row.size[1]}"
    names = [row.name] if op else [row.name, row.pattern or "–", size]
    names += [row.variant, row.dtype, *([f"{row.tokens:,}"] if op else []), str(row.batch)]
    ratios = [row.ratio, row.against.get("reference"), *([row.against.get("sdpa")] if op else [])]
    return [
        *names,
        _number(row.median_ms),
        _number(row.spread_ms),
        *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "–" if row.error is None else f"{row.error:.0e}",
        _number(row.peak_mib),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sentences(report: Report) -> Iterator[str]:
    """What is missing and why, what the table's columns are, growth, crossovers, and whether loss curves agree."""
    for row in report.rows:
        if row.skipped is not None:
            extent = f" at {row.tokens:,} tokens" if row.tokens is not None else ""
            yield f"{row.name} {row.variant} {row.dtype}{extent}: {row.skipped}"
    clocks = {row.clock for row in measured(report.rows)}
    for clock in sorted(filter(None, clocks)):
        yield f"ms: median over the rounds of {CLOCKS[clock]} a call; IQR: interquartile range; ×: times as fast as."
    what = "tokens" if report.kind == "op" else "pixels"
    for name, value in report.findings.get("growth", {}).items():
        yield f"{name} grows with {what}^{value:.2f}"
    for name, value in report.findings.get("crossover", {}).items():
        rival = "" if " against " in name else " against sdpa"
        yield f"{name}{rival}: faster {'at every size' if value == 0 else f'from about {value:,.0f} {what} on'}"
    for name, variants in report.findings.get("curves", {}).items():
        for variant, found in variants.items():
            words = "agrees" if found["agrees"] else "DOES NOT AGREE"
            yield (
                f"loss curve of {name} {variant}: {words} with plain, at most {found['deviation']:.1e} off in "
                f"{len(found['losses'])} steps (noise of its dtype: {found['noise']:.1e})"
            )
