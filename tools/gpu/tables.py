"""The tables of docs/evidence/gpu.md, made from the rows alone."""

from collections.abc import Sequence
from pathlib import Path

from linvit.analysis.markdown import markdown_rows, marks, replace_between_marks
from tools.gpu.carry import ROOT
from tools.gpu.jobs import JOBS
from tools.gpu.rows import Row, finished, read

PAGE = ROOT / "docs" / "evidence" / "gpu.md"
NOT_MEASURED = "Not measured yet."


def write_tables(folder: Path, page: Path = PAGE) -> None:
    """Puts the tables of every job between its marks in the page."""
    for name in JOBS:
        replace_between_marks(page, f"\n{section(read(folder, name))}\n\n", *marks(f"gpu {name}"))


def section(rows: Sequence[Row]) -> str:
    """The tables of a job, card by card, of the newest row of every case; what has failed stands below them."""
    cards: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in finished(rows).values():
        cards.setdefault((row["card"], row["torch"], row["triton"]), {})[row["case"]] = row
    parts = []
    for card, by_case in cards.items():
        parts.append(sentence(card, list(by_case.values())))
        tables: dict[tuple[str, ...], list[dict[str, object]]] = {}
        for cells in (cells for row in by_case.values() for cells in row.get("cells", ())):
            tables.setdefault(tuple(cells), []).append(cells)
        for table in tables.values():
            words = sum(isinstance(value, str | None) for value in table[0].values())
            parts.append(markdown_rows([{name: shown(x) for name, x in cells.items()} for cells in table], left=words))
        failures = [(case, row.get("failed")) for case, row in by_case.items() if "cells" not in row]
        parts += ["\n".join(f"- {case}: {reason or 'took longer than a job may'}" for case, reason in failures)]
    return "\n\n".join(filter(None, parts)) or NOT_MEASURED


def sentence(card: tuple[str, ...], rows: Sequence[Row]) -> str:
    """Where, and of what code, rows are."""
    about = [row["about"] for row in rows]
    commits = sorted({f"{one['commit'][:12]}{'-dirty' * one['commit'].endswith('-dirty')}" for one in about})
    clocks = sorted(one["clocks.sm"] for one in about if "clocks.sm" in one)
    facts = [f"{card[0]}, torch {card[1]}, Triton {card[2]}", f"{about[0]['cores']} cores of {about[0]['processor']}"]
    if clocks:
        facts.append(f"driver {about[0]['driver_version']}, limit {about[0]['power.limit']}")
        facts.append(f"multiprocessors at {clocks[0]} to {clocks[-1]} after a row")
    return f"{'; '.join(facts)}; commit {', '.join(commits)}."


def shown(value: object) -> str:
    """A cell: three digits of a number, a dash where there is none."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)
