"""The notebooks: executes them into build/notebooks, and turns them into pages of the site.

python docs/hooks/notebook_pages.py NOTEBOOK executes one of them; `make notebooks` all. With --try it trains for a few
steps per epoch and keeps no results; `make try-notebooks` does so with all.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

from linvit.files import write_text

ROOT = Path(__file__).parents[2]
SOURCES, EXECUTED = ROOT / "notebooks", ROOT / "build" / "notebooks"
SECONDS = 600  # per cell, on a busy machine
EPOCHS = re.compile(r'"(trainer\.)?max_epochs": ')
# A limit that a notebook has itself stands before max_epochs, because the last one counts.
FEW_STEPS = r'"\1limit_train_batches": 4, \g<0>'
QUIET = ["--log-level=ERROR"]  # without the kernel's warning that it talks over TCP
DOWNLOAD = "[Download this notebook]({name}.ipynb) to run and change it in Jupyter."
NOT_EXECUTED = "Its results are missing here: `make notebooks` executes it."


def execute(source: Path) -> Path:
    """Runs a notebook in an empty folder and writes it with its outputs; raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(source, as_version=4)
    run(notebook)
    target = EXECUTED / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, nbformat.writes(notebook) + "\n")
    return target


def attempt(source: Path) -> None:
    """Runs a notebook with four training steps per epoch: shows that its cells work, in a third of the time."""
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        cell.source = EPOCHS.sub(FEW_STEPS, cell.source)
    run(notebook)


def run(notebook: nbformat.NotebookNode) -> None:
    with TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=SECONDS, coalesce_streams=True, resources=place, extra_arguments=QUIET
        ).execute()


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Path in the site and content of each notebook's page, of its figures and of the notebook itself."""
    for source in sorted(SOURCES.glob("*.ipynb")):
        executed = EXECUTED / source.name
        about = DOWNLOAD.format(name=source.stem) + ("" if executed.is_file() else f" {NOT_EXECUTED}")
        notebook = nbformat.read(executed if executed.is_file() else source, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(
            notebook, resources={"unique_key": source.stem, "output_files_dir": "."}
        )
        title, _, rest = with_alternatives(text.lstrip()).partition("\n")
        yield f"notebooks/{source.stem}.md", f"{title}\n\n{about}\n{rest}"
        yield f"notebooks/{source.name}", source.read_bytes()
        for name, figure in resources["outputs"].items():
            yield f"notebooks/{Path(name).name}", figure


def with_alternatives(text: str) -> str:
    """Names every figure after the heading above it, for those who cannot see it."""
    heading, code, lines = "", False, []
    for line in text.splitlines():
        code ^= line.startswith("```")
        heading = line.lstrip("# ") if line.startswith("#") and not code else heading
        lines.append(line.replace("![png](", f"![Figure: {heading}]("))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--try" in sys.argv:
        attempt(Path(sys.argv[1]))
    else:
        print(execute(Path(sys.argv[1])))
