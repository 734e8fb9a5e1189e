"""Text and tables in Markdown, written between two marks of a page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from linvit.files import replacing, write_text

MARKUP = re.compile(r"(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])|[\\`*\[\]<>&~$]|^[#+-]")
NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def printable(text: str) -> str:
    """Text without line breaks, control characters and marks of direction: they become escapes such as `\\n`."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def plain(text: str) -> str:
    """Text of users (names of classes, notes) as Markdown that shows it, on one line, as it is."""
    return NUMBERED.sub(r"\1\\\2", MARKUP.sub(r"\\\g<0>", printable(text.strip())))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table with the first `left` columns aligned left and the others right."""
    lines = [[printable(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---" if number < left else "---:" for number in range(len(head))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_rows(rows: Sequence[Mapping[str, str]], left: int) -> str:
    """A Markdown table of rows with the same headings, at least one; see markdown_table."""
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows], left)


def marks(name: str) -> tuple[str, str]:
    """The lines of a page that enclose the results with that name."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def check_marks(path: Path, begin: str, end: str) -> None:
    """Raises ValueError unless path is a file with one begin mark followed by one end mark."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{path} has no place for the tables: add the lines {begin} and {end} where they belong.")


def replace_between_marks(path: Path, text: str, begin: str, end: str) -> None:
    """Replaces the text between the two marks in path, completely or not at all; raises as check_marks."""
    check_marks(path, begin, end)
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    write_text(path, f"{before}{begin}\n{text}{end}{after}")


def copy_figures(folder: Path, pattern: str, page: Path, prefix: str = "") -> list[Path]:
    """Copies the figures of a folder that match a pattern next to a page; returns them by name."""
    figures = sorted(folder.glob(pattern))
    for figure in figures:
        with replacing(page.parent / f"{prefix}{figure.name}") as temporary:
            temporary.write_bytes(figure.read_bytes())
    return figures
