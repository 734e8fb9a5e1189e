"""A self-contained HTML page: tables and figures in one file that opens anywhere."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from linvit.analysis.figures import svg
from linvit.files import replacing

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; } p { max-width: 50rem; }
pre { background: #f6f6f6; padding: .6rem 1rem; overflow-x: auto; white-space: pre-wrap; }
"""


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys as an HTML table."""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def picture(figure: Figure, description: str) -> str:
    """A figure as an image inside the page."""
    return drawn(svg(figure), description)


def photo(pixels: Tensor, description: str) -> str:
    """uint8 (3, height, width) as an image inside the page."""
    buffer = io.BytesIO()
    to_pil_image(pixels).save(buffer, format="JPEG", quality=88, subsampling=0)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/jpeg;base64,{data}">'


def drawn(image: str, description: str) -> str:
    """The text of an SVG image as an image inside the page."""
    data = base64.b64encode(image.encode()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}">'


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def preformatted(text: str) -> str:
    """Plain text with its lines and spaces as they are."""
    return f"<pre>{html.escape(text)}</pre>"


def write_page(path: Path, title: str, sections: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Write the page, whole or not at all.

    Args:
        path: the file to write.
        title: heading of the page.
        sections: heading and HTML parts of each section.
    """
    body = "".join(f"<h2>{html.escape(heading)}</h2>{''.join(parts)}" for heading, parts in sections)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n"
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
