import html
import re

import pytest
from markdown_it import MarkdownIt

from linvit.analysis.markdown import check_marks, markdown_table, plain, printable, replace_between_marks

BEGIN, END = "<!-- x:begin -->", "<!-- x:end -->"
ABOUT = f"a page\n\n{BEGIN}\nold\n{END}\nits end\n"


def test_the_first_columns_are_aligned_left_and_bars_stay_in_their_cell():
    table = markdown_table(["a", "b"], [["x|y", "1"]], left=1)
    assert table.splitlines() == ["| a | b |", "| --- | ---: |", "| x\\|y | 1 |"]


@pytest.mark.parametrize(
    "text",
    [
        "x\n---\n# y", "# y", "---", "- y", "+ y", "* y", "1. y", "2026) y", "    y", "> y", "~~~", "```", "=", "~y~",
        "<script>", "[l](javascript:x)", "![i](x)", "**y**", "_y_", "`y`", "&lt;", "\\*y*", "a|b", "a\\|b", "<a@b.c>",
        "\x1b[31m", "\u202ey", "\u2028y", "polar_bear", "_", "12.5", "\udc80", "é 犬",
    ],
)  # fmt: skip
def test_text_of_users_is_shown_as_it_is(text):
    parser = MarkdownIt("gfm-like", {"linkify": False})
    expected = html.escape(printable(text.strip()))
    assert parser.render(f"- {plain(text)}") == f"<ul>\n<li>{expected}</li>\n</ul>\n"
    cells = re.findall("<td[^>]*>(.*)</td>", parser.render(markdown_table(["", ""], [[plain(text), "1"]], left=2)))
    assert cells == [expected, "1"]
    assert text.isprintable() or plain(text) != text


def test_the_text_between_the_marks_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(ABOUT)
    replace_between_marks(page, "new\n", BEGIN, END)
    replace_between_marks(page, "newer\n", BEGIN, END)
    assert page.read_text() == ABOUT.replace("old", "newer")


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, BEGIN + END + BEGIN, None])
def test_a_page_without_one_place_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(ValueError, match="no place for the tables"):
        check_marks(page, BEGIN, END)
