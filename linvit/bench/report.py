"""The results of a benchmark as an HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from linvit.analysis.report import bullets, figure_image, paragraph, table, write_page
from linvit.bench import machine
from linvit.bench.page import cells, sentences
from linvit.bench.rows import Report


def write_report(report: Report, figures: Mapping[str, Figure], path: Path) -> None:
    """Writes table, sentences and figures (by name) of a benchmark as a page."""
    about = paragraph(f"{machine.sentence(report.machine)}.")
    sections: list[tuple[str, Sequence[str]]] = [("Results", [about, table(cells(report)), bullets(sentences(report))])]
    sections += [(words, [figure_image(figure, words)]) for words, figure in _named(figures).items()]
    write_page(path, f"linvit bench {report.kind}", sections)


def _named(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    return {name.replace("_", " ").capitalize(): figure for name, figure in figures.items()}
