"""HTML pages with tables and figures, each in a single file that loads nothing."""

import base64
import hashlib
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from linvit import environment
from linvit.analysis.figures import figure_rows, svg
from linvit.files import csv_text, write_text

PAGE = "report.html"
SORTED = 3  # rows: tables with fewer are not sorted
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LONG = 30  # characters: longer cells may be broken into lines
DARK = (  # of figures with pictures, whose own colours stay
    '<style>@media (prefers-color-scheme: dark) { text { fill: #ddd } path[style*="fill: #ffffff"]'
    ' { fill: #181a1b !important } [style*="stroke: #000000"] { stroke: #ddd !important } }</style></svg>'
)
NUMBER = re.compile(r"–?|(?=.*\d)[-+–±×\d.,:%eE<>\[\] ]*(?:[kMG]|ms|s|px|MiB)?")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as an HTML table with the columns of all rows, sorted by a click on a heading, and a link to them as CSV.

    It scrolls if it is wider than the page.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "–")) for column in columns] for row in rows]
    words = [not all(map(NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    head = "".join(_cell("th", *pair) for pair in zip(columns, words, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", *pair) for pair in zip(row, words, strict=True)) + "</tr>" for row in cells
    )
    kind = ' class="sorts"' if len(rows) >= SORTED else ""
    content = f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scrolls">{content}</div>{_csv_link(rows, "table")}'


def _csv_link(rows: Sequence[Mapping[str, object]], name: str) -> str:
    """A link that saves more than one row as NAME.csv."""
    if len(rows) < 2:
        return ""
    content = base64.b64encode(csv_text(rows).encode(errors="backslashreplace")).decode()
    address = f"data:text/csv;charset=utf-8;base64,{content}"
    return f'<p class="csv"><a download="{name}.csv" href="{address}">Save as CSV</a></p>'


def _cell(kind: str, text: str, words: bool) -> str:
    classes = " ".join(["words"] * words + ["long"] * (words and (len(text) > LONG or "\n" in text)))
    attribute = f' class="{classes}"' if classes else ""
    return f"<{kind}{attribute}>{html.escape(text)}</{kind}>"


def figure_image(figure: Figure, description: str) -> str:
    """A figure as an embedded image, and a link to its numbers as CSV; description is its alternative text."""
    return svg_image(svg(figure), description) + _csv_link(figure_rows(figure), "figure")


def svg_image(image: str, description: str) -> str:
    """An SVG image, given as text, as an embedded image; in dark mode it is dark, but for pictures in it."""
    kind = "pictured" if "<image" in image else "drawn"
    if kind == "pictured":
        image = image.replace("</svg>", DARK)
    return _image(image.encode(errors="backslashreplace"), "svg+xml", description, kind)


def pixel_image(pixels: Tensor, description: str) -> str:
    """uint8 (3, height, width) as an embedded image."""
    buffer = io.BytesIO()
    to_pil_image(pixels).save(buffer, format="JPEG", quality=88, subsampling=0)
    return _image(buffer.getvalue(), "jpeg", description, "photo")


def _image(content: bytes, kind: str, description: str, shown: str) -> str:
    data = base64.b64encode(content).decode()
    words = html.escape(description)
    return f'<div class="scrolls"><img class={shown} alt="{words}" src="data:image/{kind};base64,{data}"></div>'


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    """Lines of plain text as a list; "" without any."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return items and f"<ul>{items}</ul>"


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
    script = _beside("sort.js") if 'class="sorts"' in body else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    about = environment.describe(1, 1)
    commit = f", commit {short_commit(about['commit'])}" if about["commit"] else ""
    versions = f"linvit {about['packages']['linvit']}{commit}, torch {about['packages']['torch']}"
    origin = f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {versions} on {', '.join(about['devices'])}."
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_beside('page.css')}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}<footer>{html.escape(origin)}</footer>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )
    write_text(path, page)


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def short_commit(commit: str) -> str:
    """Seven digits of the commit that `environment.describe` found, with `-dirty` if files differ from it."""
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")
