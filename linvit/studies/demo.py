"""Three families and a softmax twin learn to read real handwritten digits: one table, one page, a report for each."""

import html
from dataclasses import replace
from pathlib import Path

from linvit.analysis.curves import training_curve
from linvit.analysis.report import figure_image, paragraph, table, write_page
from linvit.runs import Run, load_run
from linvit.runs.bundled import bundled_folder
from linvit.runs.report import PAGE
from linvit.studies import inside
from linvit.studies.comparison import compare
from linvit.studies.plan import Say, silent
from linvit.studies.table import Comparison

ABOUT = """Same seed and same budget of {epochs} epochs. The data are the 1,797 handwritten digits that ship with
scikit-learn; accuracy is on those held out, after the last epoch. A pattern has one letter per stage: L linear
attention, S softmax attention, C strip convolutions. MACs count convolutions and linear layers, as the papers do; the
products inside the attention come on top. Differences of a few images between networks of this size say nothing about
the mechanisms."""
ABOUT_INSIDE = """Every attention over more than one token, from the first to the last: means over {images} held-out
images and all heads, shaded by one standard deviation. Rank at 1e-2: singular values above 1 % of the largest;
effective rank: exp of their entropy. A low rank means features that are nearly the same for all tokens."""


def demo(recipes: str | Path | None, folder: str | Path, workers: int = 2, progress: Say | None = None) -> Comparison:
    """Trains every recipe of a folder, each where it left off, and writes report.html there and for each network.

    Args:
        recipes: a folder of recipes *_nano_digits.yaml, which share their data; None for those of linvit.
        folder: where the runs and the page go.
        workers: how many networks are trained at once, one thread each.
        progress: gets a line when something is complete; `print`, for example.

    Raises ValueError where there are no recipes, and as `compare`.
    """
    folder = Path(folder)
    recipes = bundled_folder() / "demo" if recipes is None else recipes
    paths = sorted(Path(recipes).glob("*_nano_digits.yaml"))
    if not paths:
        raise ValueError(f"The folder {recipes} holds no recipes *_nano_digits.yaml: give another folder as `recipes`.")
    say = progress or silent
    say(f"Training {len(paths)} networks, {workers} at a time.")
    comparison = replace(compare(paths, folder, seeds=1, workers=workers, progress=progress), baselines=())
    runs = {row.name.removesuffix("_digits"): load_run(folder / row.name / "seed0") for row in comparison.rows}
    for name, run in runs.items():
        if not (run.folder / PAGE).is_file():
            say(f"Writing the report on {name}")
            run.report()
    rows = [comparison.cells(row) for row in comparison.rows]
    sections = [("What was trained", [table(rows), paragraph(ABOUT.format(epochs=comparison.about["epochs"]))])]
    sections += [(name, _training(name, run, folder)) for name, run in runs.items()]
    networks = {name: inside.of_run(run.folder) for name, run in runs.items()}
    figures = [figure_image(draw(networks), "ranks and scores") for draw in inside.FIGURES.values()]
    sections.append(("Inside the attention", [*figures, paragraph(ABOUT_INSIDE.format(images=inside.IMAGES))]))
    write_page(folder / PAGE, "linvit: reading digits with linear attention", sections)
    return comparison


def _training(name: str, run: Run, folder: Path) -> list[str]:
    """A network's curves and a link to its report."""
    link = html.escape(str((run.folder / PAGE).relative_to(folder)))
    words = "accuracy of each class, confused classes and calibration"
    return [
        figure_image(training_curve(run.metrics, run.task.measures), f"training of {name}"),
        f'<p><a href="{link}">Report on {name}</a>: {words}.</p>',
    ]
