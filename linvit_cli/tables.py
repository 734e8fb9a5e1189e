"""Tables and text on the terminal; names given by users are never read as markup or escape sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from linvit_cli.streams import printable, show

if TYPE_CHECKING:
    from rich.box import Box

UNBOUND = 1000  # columns: no terminal, so nothing to wrap for
LEAST_WORDS = 12  # a column of words is not wrapped below this width
FRAME = 3  # columns that each column's padding and line take


def show_rows(
    rows: Sequence[Mapping[str, str]],
    left: int = 1,
    title: str | None = None,
    caption: str | None = None,
    box: Box | None = None,
) -> None:
    """Prints rows as a table; the first `left` columns are words, the others numbers.

    Without a terminal, columns have their full width. On a narrow terminal, headings and words are wrapped, then the
    last columns are left out, with a line that says so; numbers are never cut.
    """
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else UNBOUND)
    headings = list(dict.fromkeys(key for row in rows for key in row))
    cells = {heading: [printable(str(row.get(heading, "–"))) for row in rows] for heading in headings}
    full = sum(max(map(len, [heading, *cells[heading]])) + FRAME for heading in headings)
    widths = {heading: _least_width(heading, cells[heading], number < left) for number, heading in enumerate(headings)}
    shown = headings
    while full >= console.width and len(shown) > left + 1 and sum(widths[h] + FRAME for h in shown) >= console.width:
        shown = shown[:-1]
    table = Table(title=title and Text(printable(title)), caption=caption and Text(printable(caption)))
    table.box = box or HEAVY_HEAD
    for number, heading in enumerate(shown):
        words = number < left
        table.add_column(
            Text(heading if words or full < console.width else heading.replace(" ", "\n")),
            justify="left" if words else "right",
            overflow="fold",
            min_width=widths[heading],
            no_wrap=not words,
        )
    for number in range(len(rows)):
        table.add_row(*(Text(cells[heading][number]) for heading in shown))
    console.print(table)
    if len(shown) < len(headings):
        hidden = ", ".join(headings[len(shown) :])
        show(f"Not shown, because the terminal is too narrow: {hidden}. Widen it, or pipe the output to a file.")


def _least_width(heading: str, cells: Sequence[str], words: bool) -> int:
    if words:
        return min(LEAST_WORDS, max(map(len, [heading, *cells])))
    return max(map(len, [*heading.split(), *cells]))


def show_pieces(pieces: Iterable[str]) -> None:
    """Prints text as it comes."""
    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print(flush=True)
