"""HTML pages with tables and figures, each in a single file without links to others."""

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from linvit import environment
from linvit.analysis.figures import svg
from linvit.files import write_text

STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --block: #f6f6f6; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #181a1b; --line: #444; --block: #26292b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 68rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } p { max-width: 50rem; }
.scrolls { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; overflow-wrap: normal; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.words { text-align: left; } td.long { white-space: normal; min-width: 12rem; }
img { max-width: max(100%, 40rem); background: #fff; padding: .4rem; border-radius: .3rem; box-sizing: border-box; }
footer { margin-top: 3rem; padding-top: .6rem; border-top: 1px solid var(--line); font-size: .85rem; }
pre { background: var(--block); padding: .6rem 1rem; overflow-x: auto; white-space: pre-wrap; }
"""
LONG = 30  # characters: longer cells may be broken into lines
NUMBER = re.compile(r"–?|(?=.*\d)[-+–±×\d.,:%eE<>\[\] ]*(?:[kMG]|ms|s|px|MiB)?")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as an HTML table with the columns of all rows; it scrolls if it is wider than the page."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "–")) for column in columns] for row in rows]
    words = [
        number > 0 and not all(map(NUMBER.fullmatch, column)) for number, column in enumerate(zip(*cells, strict=True))
    ]
    head = "".join(_cell("th", *pair) for pair in zip(columns, words, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", *pair) for pair in zip(row, words, strict=True)) + "</tr>" for row in cells
    )
    return f'<div class="scrolls"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(kind: str, text: str, words: bool) -> str:
    classes = " ".join(["words"] * words + ["long"] * (words and len(text) > LONG))
    attribute = f' class="{classes}"' if classes else ""
    return f"<{kind}{attribute}>{html.escape(text)}</{kind}>"


def figure_image(figure: Figure, description: str) -> str:
    """A figure as an embedded image; description is its alternative text."""
    return svg_image(svg(figure), description)


def svg_image(image: str, description: str) -> str:
    """An SVG image, given as text, as an embedded image."""
    return _image(image.encode(errors="backslashreplace"), "svg+xml", description)


def pixel_image(pixels: Tensor, description: str) -> str:
    """uint8 (3, height, width) as an embedded image."""
    buffer = io.BytesIO()
    to_pil_image(pixels).save(buffer, format="JPEG", quality=88, subsampling=0)
    return _image(buffer.getvalue(), "jpeg", description)


def _image(content: bytes, kind: str, description: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<div class="scrolls"><img alt="{html.escape(description)}" src="data:image/{kind};base64,{data}"></div>'


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def preformatted(text: str) -> str:
    """Plain text with its line breaks and spaces."""
    return f"<pre>{html.escape(text)}</pre>"


def write_page(path: Path, title: str, sections: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Writes a page, completely or not at all; its footer has date, commit and machine.

    Args:
        path: the file to write.
        title: heading of the page.
        sections: heading and HTML parts of each section.
    """
    body = "".join(f"<h2>{html.escape(heading)}</h2>{''.join(parts)}" for heading, parts in sections)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}<footer>{html.escape(_origin())}</footer></body></html>\n"
    )
    write_text(path, page)


def short_commit(about: Mapping[str, Any]) -> str:
    """Seven digits of the commit that `environment.describe` found, with `-dirty` if files differ from it."""
    commit = about["commit"] or "unknown"
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


def _origin() -> str:
    """Date, version, commit and machine of the page."""
    about = environment.describe(1, 1)
    commit = f", commit {short_commit(about)}" if about["commit"] else ""
    versions = f"linvit {about['packages']['linvit']}{commit}, torch {about['packages']['torch']}"
    return f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {versions} on {', '.join(about['devices'])}."
