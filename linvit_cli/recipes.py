"""`linvit recipes`."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from linvit.bundled import recipes
from linvit_cli.streams import show_pieces

HELP = "List or search the recipes that come with linvit."
EXAMPLES = ("linvit recipes", "linvit recipes language rala")
WIDEST, INDENT = 100, "    "
FACTS = ("published", "ours", "cost", "command")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit recipes [WORD ...] [options]"
    text = "show only the recipes whose name or header contains all these words, in more detail (default: all recipes)"
    command.add_argument("words", metavar="WORD", nargs="*", help=text)
    command.add_argument("--json", action="store_true", help="print everything in the headers as one JSON list")


def run(options: argparse.Namespace) -> int:
    rows = recipes(*options.words)
    show_pieces([json.dumps(rows)] if options.json else _lines(rows, bool(options.words)))
    return 0


def _lines(rows: Sequence[Mapping[str, str]], in_detail: bool) -> Iterator[str]:
    width = min(WIDEST, shutil.get_terminal_size().columns)
    for row in rows:
        yield f"{row['name']}\n{textwrap.fill(row['about'], width, initial_indent=INDENT, subsequent_indent=INDENT)}\n"
        for fact in FACTS if in_detail else ():
            first = f"{INDENT}{fact + ':':11}"
            if row[fact]:
                yield _filled(row[fact], first, width, " \\" if fact == "command" else "") + "\n"
    count = "1 recipe" if len(rows) == 1 else f"{len(rows)} recipes"
    more = "" if in_detail else " `linvit recipes WORD …` shows results, cost and command of the matching recipes."
    yield "\n" + textwrap.fill(f"{count}. Train one with `linvit train NAME`.{more}", width)


def _filled(text: str, first: str, width: int, end: str) -> str:
    """The text after its heading; `end` closes every line but the last, such as the backslash of a command."""
    lines = textwrap.wrap(
        text,
        width - len(end),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{end}\n".join(lines)
