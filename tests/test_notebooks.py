"""The notebooks: committed without results, each with a question at its end, and each a page of the site."""

import ast
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("nbconvert")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import notebook_pages  # noqa: E402

NOTEBOOKS = sorted(notebook_pages.SOURCES.glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_committed_without_results(notebook):
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)
            assert not cell.outputs
            assert cell.execution_count is None


def test_starts_with_a_title_and_ends_with_a_question(notebook):
    assert notebook.cells[0].source.startswith("# ")
    _, heading, task = notebook.cells[-1].source.rpartition("## Your turn\n")
    assert heading
    assert "?" in task
    assert "**" in task


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_pages, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(notebook_pages, "EXECUTED", tmp_path / "executed")
    (tmp_path / "sources").mkdir()

    def write(code):
        cells = [nbformat.v4.new_markdown_cell("# A title\n\nText."), nbformat.v4.new_code_cell(code)]
        path = tmp_path / "sources" / "small.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


def test_the_page_has_the_results_and_their_figures(folders):
    source = folders("from matplotlib import pyplot\n# a comment\npyplot.plot([1, 2])\nprint(6 * 7)\npyplot.show()")
    notebook_pages.execute(source)
    pages = dict(notebook_pages.pages())
    page = pages["notebooks/small.md"]
    assert page.startswith("# A title\n\n[Download this notebook](small.ipynb)")
    assert re.search(r"^\s+42$", page, re.MULTILINE)
    (figure,) = [name for name in pages if name.endswith(".png")]
    assert f"![Figure: A title](./{Path(figure).name})" in page
    assert pages[figure].startswith(b"\x89PNG")
    assert pages["notebooks/small.ipynb"] == source.read_bytes()


def test_the_page_says_when_results_are_missing(folders):
    folders("print(1)")
    assert "`make notebooks` executes it" in dict(notebook_pages.pages())["notebooks/small.md"]


def test_a_failing_cell_ends_it_and_leaves_nothing(folders):
    source = folders("1 / 0")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        notebook_pages.execute(source)
    assert not notebook_pages.EXECUTED.exists()


@pytest.mark.parametrize("prefix", ["", "trainer."])
def test_trying_takes_few_steps_and_keeps_nothing(folders, prefix):
    few = {f"{prefix}limit_train_batches": 4, f"{prefix}max_epochs": 8}
    notebook_pages.attempt(folders(f'assert {{"{prefix}max_epochs": 8}} == {few}'))
    assert not notebook_pages.EXECUTED.exists()
