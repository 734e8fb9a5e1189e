"""The report on a run: measures, training curves, and the sections of the task."""

from pathlib import Path
from typing import Any

from linvit.analysis.curves import training_curve
from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.files import check_output_file
from linvit.runs.evaluate import Measures, evaluate
from linvit.runs.run import Run
from linvit.runs.spec import Section


def write_report(
    run: Run,
    path: str | Path | None = None,
    measures: Measures | None = None,
    data: str | Path | None = None,
    **overrides: Any,
) -> Path:
    """Writes a self-contained HTML page and returns its path, see Run.report; raises as Run.evaluate."""
    page = check_output_file(path or run.folder / PAGE)
    source = run.source(data, **run.spec.configure(run, **overrides))
    measures = evaluate(run, source) if measures is None else measures
    parameters = f"{sum(parameter.numel() for parameter in run.network.parameters()):,} parameters"
    weights = "random weights" if run.path is None else f"weights from {run.path}"
    about = ", ".join((run.name, parameters, *run.spec.facts(run, source), weights))
    words = [f"{about}."]
    if len(measures.by_weights) > 1:
        words.append(f"All sections below are about the {run.weights}.")
    sections: list[Section] = [("Measures", [table(measures.table()), *map(paragraph, words)])]
    if run.metrics:
        figure = training_curve(run.metrics, run.task.measures)
        sections.append(("Training", [figure_image(figure, "losses, measures and learning rate over the epochs")]))
    sections += run.spec.sections(run, source)
    write_page(page, f"{run.name}, run {run.folder.resolve().name}", sections)
    return page
