"""The language models of a comparison on LAMBADA, PIQA, HellaSwag and WinoGrande, beside the accuracy of guessing."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linvit.analysis.markdown import check_marks, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import short_commit
from linvit.runs import load_run
from linvit.runs.recipe_values import read_recipe
from linvit.studies.comparison import Say, silent
from linvit.studies.pool import Ledger

COLUMNS = {
    "LAMBADA, %": ("lambada_openai", "acc,none"),
    "PIQA, %": ("piqa", "acc,none"),
    "HellaSwag (norm), %": ("hellaswag", "acc_norm,none"),
    "WinoGrande, %": ("winogrande", "acc,none"),
}
"""Heading → task of lm-evaluation-harness and its accuracy: those of MALA, Table 6."""
BEGIN, END = marks("books_benchmarks")
Measured = Mapping[str, Any]


def write_benchmarks(
    recipes: Sequence[Path], folder: Path, task_data: str | Path, ledger: Path, page: Path, progress: Say = silent
) -> None:
    """Evaluates the run with seed 0 of each recipe; the table goes between the marks of a page.

    Args:
        recipes: those of the comparison.
        folder: where `linvit compare` trained them; not read if the ledger has all networks.
        task_data: a folder with the files of the tasks, see `linvit.data.text.benchmarks.read_benchmark`.
        ledger: networks in it are not evaluated again, and each evaluated one is added.
        page: the page with the marks.
        progress: called with a line for each evaluated network.
    """
    check_marks(page, BEGIN, END)
    evaluated = Ledger(ledger)
    measured = {recipe.stem: _measured(recipe, folder, task_data, evaluated, progress) for recipe in recipes}
    commits = [short_commit(commit) for commit in evaluated.origins(map(_label, recipes))["commits"]]
    of = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    line = f"Seed 0; ±: half of a 95 % interval over the items; {of}."
    replace_between_marks(page, f"\n{to_markdown(measured)}\n\n*{line}*\n", BEGIN, END)


def to_markdown(measured: Mapping[str, Mapping[str, Measured]]) -> str:
    """The table of network → task → accuracy (a share), chance and items, with the last two as rows."""
    some = next(iter(measured.values()))
    rows = [
        {"network": f"`{name}`"} | {head: _accuracy(of[task]) for head, (task, _) in COLUMNS.items()}
        for name, of in measured.items()
    ]
    rows += [
        {"network": "guessing"} | {head: _percent(some[task]["chance"]) for head, (task, _) in COLUMNS.items()},
        {"network": "items"} | {head: f"{some[task]['items']:,}" for head, (task, _) in COLUMNS.items()},
    ]
    return markdown_rows(rows, left=1)


def _measured(recipe: Path, folder: Path, task_data: str | Path, ledger: Ledger, progress: Say) -> dict[str, Measured]:
    """Task → accuracy, chance and items of one network, from the ledger or from now."""
    values = read_recipe(recipe, ["seed=0"])
    result = ledger.result(_label(recipe), values)
    if result is None:
        from linvit.runs.harness import evaluate_tasks

        started = time.monotonic()
        run = load_run(folder / recipe.stem / "seed0")
        measures = evaluate_tasks(run, tasks=[task for task, _ in COLUMNS.values()], task_data=task_data)
        accuracies = {
            task: {"accuracy": measures[task][name], **{key: measures[task][key] for key in ("chance", "items")}}
            for task, name in COLUMNS.values()
        }
        result = {"seconds": round(time.monotonic() - started, 1), "measures": accuracies}
        ledger.add(_label(recipe), values, result)
        progress(f"{recipe.stem}: {result['seconds']:.0f} s")
    return dict(result["measures"])


def _label(recipe: Path) -> str:
    return f"{recipe.stem} seed 0"


def _accuracy(measures: Measured) -> str:
    share = measures["accuracy"]
    half = 1.96 * (share * (1 - share) / measures["items"]) ** 0.5
    return f"{_percent(share)} ± {_percent(half)}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
