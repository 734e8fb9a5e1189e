"""The networks that come with trained weights on two photographs: what they predict and where their attention looks."""

import html
from pathlib import Path
from typing import cast

from linvit.analysis.report import figure_image, paragraph, table
from linvit.models.by_name import bundled_names
from linvit.runs import load_run
from linvit.runs.images import PHOTOS, photos
from linvit.runs.tasks import ClassificationRun
from linvit.studies.plan import Say

SIZE = 128  # px: at the 32 px of the training the largest score maps would have 8×8 tokens
MISSING = "No trained weights come with this copy of linvit, so the part on photographs is left out."
ABOUT = """These networks know these classes: {classes}. Neither photograph shows one of them, and each network must
choose one all the same: the table shows what it takes them for, and how sure it is."""
ABOUT_SCORES = """The scores of the query in the middle of each photograph, in every attention layer, for photographs of
{size}×{size} px. The networks were trained at 32×32 px."""
CREDITS = f"""The photographs come with scikit-learn and are licensed CC BY 2.0:
{", ".join(f"{name} by {photographer}" for name, photographer in PHOTOS.items())} (Flickr)."""


def on_photographs(folder: Path, progress: Say) -> list[str]:
    """The parts of a page about the networks with weights; one sentence if there are none.

    Args:
        folder: that of the page; the analysis of each network goes into photographs/NAME in it.
        progress: called with a line for each network.
    """
    names = bundled_names()
    if not names:
        progress(MISSING)
        return [paragraph(MISSING)]
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
    about = ABOUT.format(classes=", ".join(runs[names[0]].class_names))
    return [table(rows), paragraph(about), paragraph(ABOUT_SCORES.format(size=SIZE)), *shown, paragraph(CREDITS)]
