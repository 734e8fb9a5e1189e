"""The demo: three families and a softmax twin trained on handwritten digits, and trained ones on photographs."""

import html
from dataclasses import replace
from pathlib import Path
from typing import cast

from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.analysis.run_figures import training_curve
from linvit.bundled import bundled_folder
from linvit.errors import SettingError
from linvit.files import user_path
from linvit.models.by_name import bundled_names
from linvit.runs import load_run
from linvit.runs.images import PHOTOS, photos
from linvit.runs.tasks import ClassificationRun
from linvit.studies import inside
from linvit.studies.comparison import Say, compare, silent
from linvit.studies.table import Comparison

ABOUT = """All networks were trained for {epochs} epochs with the same seed on the 1,797 handwritten digits that come
with scikit-learn; the accuracy is that on held-out images after the last epoch. A pattern has one letter per stage: L
linear attention, S softmax attention, C strip convolutions. MACs are those of convolutions and linear layers, as the
papers count; "+ attention" are the products inside the attention. "s per run" is the training time: a
stage has at most 64 tokens at 32 px, so linear attention has nothing to save, and softmax attention, a single call in
torch, can be faster. Differences of a few images do not show that one mechanism is better."""
ABOUT_INSIDE = """Each row is a network, each dot one of its attention layers over more than one token, the first on
top: the mean over {images} held-out images and all heads; bars are one standard deviation. Rank at 1e-2: number of
singular values above 1 % of the largest; effective rank: exp of the entropy of the singular values. Features of low
rank are nearly the same for all tokens."""
SIZE = 128  # px: at the 32 px of the training the largest score maps would have 8×8 tokens
NO_WEIGHTS = "No trained weights come with this copy of linvit, so the part on photographs is left out."
ABOUT_PHOTOGRAPHS = """These networks know these classes: {classes}. Neither photograph shows one of them, and each
network must choose one all the same: the table shows what it takes them for, and how sure it is."""
ABOUT_SCORES = """The scores of the query in the middle of each photograph, in every attention layer, for photographs of
{size}×{size} px. The networks were trained at 32×32 px."""
CREDITS = f"""The photographs come with scikit-learn and are licensed CC BY 2.0:
{", ".join(f"{name} by {photographer}" for name, photographer in PHOTOS.items())} (Flickr)."""


def demo(recipes: str | Path | None, folder: str | Path, workers: int = 2, progress: Say = silent) -> Comparison:
    """Trains the recipes of a folder and writes a report on each network and a page that compares them.

    The page also shows the networks that come with trained weights on photographs. Complete runs are kept, and
    unfinished ones resume.

    Args:
        recipes: a folder of recipes *_nano_digits.yaml with the same data; None for the bundled ones.
        folder: gets the runs and report.html.
        workers: how many networks are trained at once, one thread each.
        progress: called with a line whenever a step is complete; `print`, for example.

    Raises ValueError if there are no recipes, and otherwise as `compare`.
    """
    folder = user_path(folder)
    recipes = bundled_folder() / "demo" if recipes is None else user_path(recipes)
    paths = sorted(recipes.glob("*_nano_digits.yaml"))
    if not paths:
        raise SettingError(f"The folder {recipes} has no recipes *_nano_digits.yaml: give another folder as `recipes`.")
    progress(f"Training {len(paths)} networks, {workers} at a time.")
    comparison = replace(compare(paths, folder, seeds=1, workers=workers, progress=progress), baselines=())
    runs = {row.name.removesuffix("_digits"): load_run(folder / row.name / "seed0") for row in comparison.rows}
    for name, run in runs.items():
        if not (run.folder / PAGE).is_file():
            progress(f"Writing the report on {name}")
            run.report()
    rows = [comparison.cells(row) for row in comparison.rows]
    sections = [("What was trained", [table(rows), paragraph(ABOUT.format(epochs=comparison.about["epochs"]))])]
    for name, run in runs.items():
        curves = figure_image(training_curve(run.history, run.task.measures), f"training curves of {name}")
        link = html.escape(str((run.folder / PAGE).relative_to(folder)))
        words = "accuracy of each class, confused classes and calibration"
        sections.append((name, [curves, f'<p><a href="{link}">Report on {name}</a>: {words}.</p>']))
    networks = {name: inside.of_run(run.folder) for name, run in runs.items()}
    figures = [figure_image(draw(networks), inside.DESCRIPTIONS[name]) for name, draw in inside.FIGURES.items()]
    sections.append(("Inside the attention", [*figures, paragraph(ABOUT_INSIDE.format(images=inside.IMAGES))]))
    sections.append(("Photographs", on_photographs(folder, progress)))
    write_page(folder / PAGE, "linvit demo: handwritten digits with linear attention", sections)
    return comparison


def on_photographs(folder: Path, progress: Say) -> list[str]:
    """The parts of a page about the networks with weights; one sentence if there are none.

    Args:
        folder: that of the page; the analysis of each network goes into photographs/NAME in it.
        progress: called with a line for each network.
    """
    names = bundled_names()
    if not names:
        progress(NO_WEIGHTS)
        return [paragraph(NO_WEIGHTS)]
    runs = {name: cast(ClassificationRun, load_run(model=name)) for name in names}
    rows: list[dict[str, str]] = [{"photograph": name} for name in PHOTOS]
    shown = []
    for name, run in runs.items():
        progress(f"Showing photographs to {name}")
        for row, prediction in zip(rows, run.predict(photos(), topk=2), strict=True):
            row[name] = ", ".join(f"{label} {100 * share:.0f} %" for label, share in prediction.pairs)
        run.prepare(size=SIZE)
        analysis = run.analyze("scores", output=folder / "photographs" / name)
        link = html.escape(analysis.page.relative_to(folder).as_posix())
        shown.append(f'<p>{html.escape(name)} (<a href="{link}">its analysis</a>):</p>')
        shown.append(figure_image(analysis.figures["score_maps"], f"scores of {name} on the photographs"))
    about = ABOUT_PHOTOGRAPHS.format(classes=", ".join(runs[names[0]].class_names))
    return [table(rows), paragraph(about), paragraph(ABOUT_SCORES.format(size=SIZE)), *shown, paragraph(CREDITS)]
