from datetime import UTC, datetime

import pytest
from matplotlib.figure import Figure

from linvit.analysis import report


def test_page_holds_everything_in_one_file(tmp_path):
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    parts = [
        report.table([{"model": "<b>", "top1": "99 %"}]),
        report.figure_image(figure, "a curve"),
        report.paragraph("x < y"),
    ]
    report.write_page(tmp_path / "page.html", "Title", [("Section", parts)])
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Title</h1>" in page
    assert "<td>&lt;b&gt;</td><td>99 %</td>" in page
    assert "x &lt; y" in page
    assert 'src="data:image/svg+xml;base64,' in page
    assert "http" not in page
    assert 'lang="en"' in page
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    footer = page[page.index("<footer>") :]
    assert f"{datetime.now(UTC):%Y-%m-%d}" in footer
    assert "torch" in footer
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")

    def sections():
        yield "one", ["fine"]
        raise RuntimeError("a figure failed")

    with pytest.raises(RuntimeError, match="a figure failed"):
        report.write_page(path, "Title", sections())
    assert path.read_text() == "old"


def test_columns_of_words_are_aligned_as_words_and_long_ones_broken():
    cells = report.table([{"class": "cat", "file": "a.png", "share": "1.5 %", "text": "x" * 40}])
    assert "<td>cat</td>" in cells
    assert '<td class="words">a.png</td><td>1.5 %</td>' in cells
    assert f'<td class="words long">{"x" * 40}</td>' in cells
    assert cells.startswith('<div class="scrolls"><table>'), "wide tables scroll on phones"


@pytest.mark.parametrize(
    "number", ["–", "1,797", "0.01 M", "91.24 ± 0.35", "+8.51 [+1.24, +15.78]", "< 0.001", "1e-08"]
)
def test_numbers_are_aligned_right(number):
    assert f"<td>{number.replace('<', '&lt;')}</td>" in report.table([{"recipe": "rala", "value": number}])


@pytest.mark.parametrize("text", ["M1 max", "8×8 + class", "Es", "nan"])
def test_words_are_aligned_left(text):
    assert f'<td class="words">{text}</td>' in report.table([{"recipe": "rala", "value": text}])


def test_text_that_is_no_unicode_is_written_escaped(tmp_path):
    report.write_page(tmp_path / "page.html", "caf\udce9", [("<i>", [report.table([{"file": "a\udcff.png"}])])])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>caf\\udce9</h1>" in page
    assert "<td>a\\udcff.png</td>" in page
    assert "<i>" not in page
