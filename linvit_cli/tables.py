"""Tables and text on the terminal."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

UNBOUND = 1000  # columns: no terminal, so nothing to wrap for


def show_rows(
    rows: Sequence[Mapping[str, str]],
    left: int = 1,
    title: str | None = None,
    caption: str | None = None,
    **style: object,
) -> None:
    """Prints rows with the same keys as a table, in full width where there is no terminal; `left` columns are words."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title and escape(title), caption=caption and escape(caption), **style)  # type: ignore[arg-type]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for number, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*(escape(str(row.get(column, "–"))) for column in columns))
    Console(width=None if sys.stdout.isatty() else UNBOUND).print(table)


def show_pieces(pieces: Iterable[str]) -> None:
    """Prints text as it comes, until the reader, `head` for example, has enough."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
