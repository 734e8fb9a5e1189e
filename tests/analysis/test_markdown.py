import pytest

from linvit.analysis.markdown import check_marks, markdown_table, replace_between_marks

BEGIN, END = "<!-- x:begin -->", "<!-- x:end -->"
ABOUT = f"a page\n\n{BEGIN}\nold\n{END}\nits end\n"


def test_the_first_columns_are_aligned_left_and_bars_stay_in_their_cell():
    table = markdown_table(["a", "b"], [["x|y", "1"]], left=1)
    assert table.splitlines() == ["| a | b |", "| --- | ---: |", "| x\\|y | 1 |"]


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
