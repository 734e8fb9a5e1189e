"""Safe standard streams, even if they are closed, full, broken pipes, or not UTF-8."""

import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # all control characters but \t and \n
BROKEN_PIPE = 128 + 13


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
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
