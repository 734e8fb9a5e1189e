"""Standard streams that are safe even if they are closed, full, broken pipes, or not UTF-8; tables and text on them.

Names given by users are never read as markup or escape sequences.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.box import Box

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # all control characters but \t and \n
BROKEN_PIPE = 128 + 13
UNBOUND = 1000  # columns: no terminal, so nothing to wrap for
LEAST_WORDS, LEAST_WORDS_NARROW = 28, 12  # a column of words is not wrapped below these widths
NARROW = 60  # columns
FRAME = 3  # columns that each column's padding and line take


def printable(text: str) -> str:
    """The text with control characters escaped, so that no name of a file or class can steer the terminal."""
    return RAW.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: str) -> None:
    """Prints lines on standard output at once."""
    print(printable(text), flush=True)


def complain(text: str) -> None:
    """Prints lines on standard error, if that is possible."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


class _Written(io.FileIO):
    """An open file that keeps its first error and ignores later writes: Python flushes again when it exits."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
                raise
        return len(data)


def open_streams() -> bool:
    """Makes the three streams safe to use, and returns whether standard output was open.

    A file opened while one of them is closed would get its number and receive its output. Characters
    that the encoding lacks, and bytes of file names that are not UTF-8, are printed escaped.
    """
    was_open = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is sys.__stdout__:  # not a notebook's or a test's
        sys.stdout = _stream(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2)
    return was_open


def _stream(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None:
        stream.flush()
    raw = _Written(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )


def output_error() -> OSError | None:
    """The error that kept output from being written; None if there was none."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", None)
    return raw.error if isinstance(raw, _Written) else None


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM stops a command as Ctrl-C does, with everything saved."""
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child
            os._exit(128 + number)
        raise KeyboardInterrupt

    try:
        handler = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


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
    least = LEAST_WORDS if console.width >= NARROW else LEAST_WORDS_NARROW
    widths = {
        heading: _least_width(heading, cells[heading], least if number < left else None)
        for number, heading in enumerate(headings)
    }
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


def _least_width(heading: str, cells: Sequence[str], of_words: int | None) -> int:
    """of_words: the width at which words are wrapped, None for a column of numbers."""
    if of_words is not None:
        return min(of_words, max(map(len, [heading, *cells])))
    return max(map(len, [*heading.split(), *cells]))


def show_pieces(pieces: Iterable[str]) -> None:
    """Prints text as it comes."""
    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print(flush=True)
