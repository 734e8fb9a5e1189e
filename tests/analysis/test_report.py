import base64
import csv
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

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
    assert '<td class="words">&lt;b&gt;</td><td>99 %</td>' in page
    assert "x &lt; y" in page
    assert 'src="data:image/svg+xml;base64,' in page
    assert "http:" not in page
    assert "https:" not in page
    assert 'lang="en"' in page
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    footer = page[page.index("<footer>") :]
    assert f"{datetime.now(UTC):%Y-%m-%d}" in footer
    assert "torch" in footer
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def page_of(tmp_path, *parts):
    report.write_page(tmp_path / "page.html", "Title", [("Section", parts)])
    return (tmp_path / "page.html").read_text()


def test_only_a_page_with_a_table_to_sort_has_a_script_and_it_is_the_only_one_allowed(tmp_path):
    rows = [{"recipe": name, "top1": "1"} for name in "abc"]
    assert "<script" not in page_of(tmp_path, report.table(rows[:2]))
    page = page_of(tmp_path, report.table(rows))
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def saved_csv(text, name):
    link = re.search(rf'download="{name}.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', text)
    return list(csv.DictReader(io.StringIO(base64.b64decode(link[1]).decode())))


def test_a_table_can_be_saved_with_all_its_columns():
    rows = [{"recipe": "<a>", "top1": "91.2, best"}, {"recipe": "b", "note": "é"}]
    assert saved_csv(report.table(rows), "table") == [
        {"recipe": "<a>", "top1": "91.2, best", "note": ""},
        {"recipe": "b", "top1": "", "note": "é"},
    ]


def test_the_numbers_of_a_figure_can_be_saved():
    figure = Figure()
    lines, bars = figure.subplots(1, 2)
    lines.plot([1, 2], [0.5, math.nan], label="train")
    lines.set_title("loss")
    bars.bar(["cat", "dog"], [3, 4])
    bars.set_ylabel("count")
    rows = saved_csv(report.figure_image(figure, "curves"), "figure")
    assert rows == [
        {"panel": "loss", "series": "train", "x": "1.0", "y": "0.5", "x name": ""},
        {"panel": "count", "series": "", "x": "0.0", "y": "3", "x name": "cat"},
        {"panel": "count", "series": "", "x": "1.0", "y": "4", "x name": "dog"},
    ]


NODE = shutil.which("node")
ORDERS = [
    (["10.0 ± 0.1", "9.5 ± 0.2", "–", "1,797"], ["9.5 ± 0.2", "10.0 ± 0.1", "1,797", "–"]),
    (["2.41 M", "900 k", "12"], ["12", "900 k", "2.41 M"]),
    (["< 0.001", "0.020", "0.003"], ["< 0.001", "0.003", "0.020"]),
    (["rala", "linear", "Élan"], ["Élan", "linear", "rala"]),
    (["−3", "+2", "-10", "1e-3"], ["-10", "−3", "1e-3", "+2"]),
]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_cells_are_sorted_by_their_numbers():
    script = (Path(report.__file__).parent / "sort.js").read_text()
    columns = json.dumps([column for column, _ in ORDERS])
    code = f"globalThis.document = {{querySelectorAll: () => []}}; {script};"
    code += f"console.log(JSON.stringify({columns}.map((column) => column.sort(compare))))"
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [ordered for _, ordered in ORDERS]


def test_columns_of_words_are_aligned_as_words_and_long_ones_broken():
    cells = report.table([{"class": "cat", "file": "a.png", "share": "1.5 %", "text": "x" * 40}])
    assert '<td class="words">cat</td>' in cells
    assert '<td class="words">a.png</td><td>1.5 %</td>' in cells
    assert f'<td class="words long">{"x" * 40}</td>' in cells
    assert cells.startswith('<div class="scrolls"><table>'), "wide tables scroll on phones"


@pytest.mark.parametrize(
    "number", ["–", "1,797", "0.01 M", "91.24 ± 0.35", "+8.51 [+1.24, +15.78]", "< 0.001", "1e-08"]
)
def test_numbers_are_aligned_right_and_words_left(number):
    assert f"<td>{number.replace('<', '&lt;')}</td>" in report.table([{"recipe": "rala", "value": number}])
    for text in ("M1 max", "8×8 + class", "Es", "nan"):
        assert f'<td class="words">{text}</td>' in report.table([{"recipe": "rala", "value": text}])


def test_text_that_is_no_unicode_is_written_escaped(tmp_path):
    report.write_page(tmp_path / "page.html", "caf\udce9", [("<i>", [report.table([{"file": "a\udcff.png"}])])])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>caf\\udce9</h1>" in page
    assert '<td class="words">a\\udcff.png</td>' in page
    assert "<i>" not in page


def test_on_dark_pages_pictures_in_a_figure_keep_their_colours():
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([0, 1])
    assert 'class=drawn alt="a line"' in report.figure_image(figure, "a line")
    axes.imshow([[0, 1]])
    page = report.figure_image(figure, "a picture")
    assert 'class=pictured alt="a picture"' in page
    content = base64.b64decode(page.partition("base64,")[2].partition('"')[0]).decode()
    styles = ElementTree.fromstring(content).findall("{http://www.w3.org/2000/svg}style")
    assert "prefers-color-scheme: dark" in str(styles[-1].text)
