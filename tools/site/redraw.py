"""Figures of accuracy drawn again from the tables on a page, when only their form has changed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linvit.analysis.figures import svg
from linvit.bench.figures import figures
from linvit.bench.page import CLOCKS, MISSING, marks
from linvit.bench.rows import Report, Row
from linvit.files import write_text

BEGIN = re.compile(marks(r"(\w+)")[0])
USED = re.compile(r"cores, (\d+) used")


def redraw(page: Path) -> list[Path]:
    """Draws the figures of accuracy next to a page again, from the numbers in its tables; returns their files.

    Other figures need more than the tables have. Raises FileNotFoundError if there is no such page.
    """
    text = page.read_text(encoding="utf-8")
    written = []
    for bench in BEGIN.findall(text):
        report = report_on_page(text, bench)
        for name, figure in figures(report):
            file = page.parent / f"bench_{bench}_{name}.svg"
            if name.startswith("accuracy") and f"({file.name})" in text:
                write_text(file, svg(figure))
                written.append(file)
    return written


def report_on_page(text: str, bench: str) -> Report:
    """The networks with a time in the table of a benchmark, with no more than their figures of accuracy need."""
    begin, end = marks(bench)
    section = text.partition(begin)[2].partition(end)[0]
    used = USED.search(section)
    threads = int(used[1]) if used else 1
    clock = next((clock for clock, words in CLOCKS.items() if f" of {words} per call" in section), "cpu")
    rows = [
        Row(
            row["network"],
            row["variant"],
            row["dtype"],
            int(row["batch"]),
            threads,
            size=_size(row["px"]),
            pattern=None if row["pattern"] == MISSING else row["pattern"],
            clock=clock,
            median_ms=None if row["ms"] == MISSING else float(row["ms"]),
        )
        for row in _table(section)
        if {"network", "pattern", "variant", "px", "ms"} <= row.keys()
    ]
    return Report("model", rows=rows)


def _size(cell: str) -> tuple[int, int]:
    height, width = map(int, cell.split(" × "))
    return height, width


def _table(section: str) -> Iterator[dict[str, Any]]:
    """The rows of a Markdown table by their headings."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield dict(zip(lines[0], line, strict=True))


if __name__ == "__main__":
    for page in Path("docs").rglob("*.md"):
        redraw(page)
