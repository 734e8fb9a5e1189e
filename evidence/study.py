"""The study: every mechanism and every part of RALA and MALA in one small network, and the papers' claims tested."""

import argparse
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from evidence import inside
from evidence.claims import ACCURACY, CLAIMS, verdicts
from evidence.study_page import Study
from linvit.analysis.markdown import check_marks, copy_figures, marks, replace_between_marks
from linvit.bundled import bundled_folder
from linvit.errors import SettingError
from linvit.files import LAST, user_path
from linvit.layers.mechanisms import MECHANISMS
from linvit.runs.recipe_values import read_recipe
from linvit.studies.comparison import Candidate, Cell, Plan, Say, check_shared, silent
from linvit.studies.inside import of_run
from linvit.studies.pool import Ledger
from linvit.studies.table import Row

BASELINES = ("softmax", "linear")
TAKEN_APART = ("rala", "mala")


@dataclass(frozen=True)
class Runs:
    """The runs of a study: every recipe of a folder with every seed. Complete ones are kept.

    recipes: the folder of recipes, which gives the study its name. folder: gets a folder for each variant and seed, and
    the files of `Study.save`. seeds: two or more; if they do not begin at 0, the first one is part of the name:
    vit_from_6, for example. ledger: a file of finished runs, which are not repeated; each new one is added. overrides:
    `key.key=value` for every run.
    """

    recipes: Path
    folder: Path
    seeds: range
    ledger: Path | None = None
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_shared(self.overrides)
        if len(self.seeds) < 2:
            raise ValueError(f"A study has {len(self.seeds)} seeds, expected 2 or more, because intervals need two.")

    @property
    def name(self) -> str:
        first = self.seeds.start
        return f"{self.recipes.name}_from_{first}" if first else self.recipes.name

    def plan(self) -> Plan:
        """Every recipe of the folder except base.yaml with every seed, the baselines first."""
        baselines, paths = baselines_of(self.recipes), variants_of(self.recipes)
        epochs = read_recipe(paths[0], self.overrides)["trainer"]["max_epochs"]
        cells = [
            Cell(
                path,
                tuple(self.overrides),
                group=_group(path.stem),
                look=inside.numbers_of if path.stem in inside.MEASURED else None,
            )
            for path in sorted(paths, key=lambda path: (path.stem not in baselines, path.stem))
        ]

        def of_seed(seed: int) -> tuple[str, ...]:  # order, augmentation and initialization follow the seed already
            return f"data.split={seed}", f"trainer.check_val_every_n_epoch={epochs}"

        ledger = None if self.ledger is None else Ledger(self.ledger)
        return Plan(cells, user_path(self.folder), self.seeds, baselines, ledger=ledger, each_seed=of_seed)

    def left(self) -> str:
        """How many runs are complete, and what the others cost, see `pool.remaining`."""
        return self.plan().left()

    def study(self, workers: int = 2, write: Path | None = None, progress: Say = silent) -> Study:
        """Trains what is left, and decides the papers' claims.

        Args:
            workers: how many runs are trained at once, one thread each.
            write: a Markdown file; the text between its two marks with the name of the study is replaced, and the SVG
                figures go next to it. Figures of the inside are drawn only if the runs with the first seed are in
                `folder`; else those next to the page stay in it.
            progress: called with a line whenever a run is complete; `print`, for example.
        """
        name, folder = self.name, user_path(self.folder)
        if write is not None:
            check_marks(write, *marks(name))
        plan = self.plan()
        check_alike(plan.candidates)
        comparison = plan.train(workers, progress=progress)
        about = _about(plan.candidates[0], comparison.about)
        comparison = replace(comparison, rows=best_first(comparison.rows), about=about)
        numbers = inside.by_quantity({row.name: row.inside for row in comparison.rows if row.name in inside.MEASURED})
        runs = _measured_runs(comparison.rows, folder, self.seeds.start)
        first = {name: of_run(run) for name, run in runs.items()}
        shown = {name: inside.shown_of_run(runs[name]) for name in inside.SHOWN if name in runs}
        accuracies = {row.name: row.measures for row in comparison.rows}
        claims = [claim for claim in CLAIMS if claim.concerns(accuracies)]
        kept = [each for each in inside.DESCRIPTIONS if write and write.with_name(f"{name}_{each}.svg").is_file()]
        result = Study(
            name, comparison, verdicts(claims, {ACCURACY: accuracies, **numbers}), numbers, first, shown, kept
        )
        page = result.save(folder)
        if write is not None:
            copy_figures(folder, f"{name}*.svg", write)
            replace_between_marks(write, page.read_text(encoding="utf-8"), *marks(name))
        return result


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `python -m evidence study`."""
    command.add_argument("--recipes", type=Path, metavar="FOLDER", default=bundled_folder() / "study", help="recipes")
    command.add_argument("--folder", type=Path, metavar="FOLDER", default=Path("runs/study"), help="of the runs")
    command.add_argument("--seeds", type=int, metavar="N", default=5, help="seeds per recipe")
    command.add_argument("--first-seed", type=int, metavar="N", default=0, help="lowest seed")
    command.add_argument("--workers", type=int, metavar="N", default=2, help="parallel runs, one thread each")
    command.add_argument("--set", metavar="KEY=V", nargs="+", action="extend", default=[], help="for every run")
    command.add_argument("--write", type=Path, metavar="FILE", help="a page with the marks of the study")
    command.add_argument("--ledger", type=Path, metavar="FILE", help="finished runs, which are not repeated")
    command.add_argument("--left", action="store_true", help="only say what is left, and its cost")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the study, or says what is left of it."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = Runs(options.recipes, options.folder, seeds, options.ledger, options.set)
    if options.left:
        print(f"{options.folder}: {runs.left()}")
        return
    runs.study(options.workers, options.write, print)
    print(f"Page: {options.folder}/report.html; tables and verdicts are also in {options.folder / runs.name}.md.")


def baselines_of(recipes: Path) -> tuple[str, ...]:
    """The recipes that all others are compared with: the one named after its folder, or softmax and linear."""
    return (recipes.name,) if (recipes / f"{recipes.name}.yaml").is_file() else BASELINES


def variants_of(recipes: Path) -> list[Path]:
    """Every recipe of the folder except base.yaml; raises ValueError if a baseline is missing."""
    paths = sorted(path for path in recipes.glob("*.yaml") if path.stem != "base")
    missing = [name for name in baselines_of(recipes) if name not in {path.stem for path in paths}]
    if missing:
        raise SettingError(
            f"The folder {recipes} has no recipe {missing[0]}.yaml, a baseline of the study: give another folder as"
            " `recipes`."
        )
    return paths


def check_alike(candidates: Sequence[Candidate]) -> None:
    """Raises ValueError if two recipes differ in more than model and learning rate."""
    common = [_common(candidate.values) for candidate in candidates]
    for candidate, values in zip(candidates, common, strict=True):
        if values != common[0]:
            raise ValueError(
                f"The recipes {candidates[0].cell.recipe} and {candidate.cell.recipe} differ in more than model and"
                " learning rate, but a study trains all alike: move the other settings to base.yaml."
            )


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    """What all recipes of a study must have in common: everything but the model and the learning rate."""
    optimizer = {key: value for key, value in values["optimizer"].items() if key != "lr"}
    return {key: value for key, value in values.items() if key not in ("model", "folder")} | {"optimizer": optimizer}


def _group(name: str) -> str:
    parent = name.partition("_")[0]
    return f"Parts of {parent.upper()}" if parent in TAKEN_APART and name not in MECHANISMS else "Mechanisms"


def best_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by group, each group from best to worst; rows whose runs all diverged come last."""
    return sorted(rows, key=lambda row: (row.group, -row.mean.mean if row.mean.count else float("inf")))


def _about(candidate: Candidate, about: Mapping[str, Any]) -> dict[str, Any]:
    source = candidate.source
    images = {"train_images": source.train_set(), "held_out_images": source.val_set()}
    counts = {name: len(cast(Sized, data)) for name, data in images.items()}
    drawn = candidate.values["data"].get("held_out") and not getattr(source, "divided", False)
    seeded = "the split, " if drawn else ""
    return {**about, "size": list(source.preprocessing.size), "seeded": seeded, **counts}


def _measured_runs(rows: Sequence[Row], folder: Path, seed: int) -> dict[str, Path]:
    """The runs with this seed that are measured; none if one is not in the folder, because it was trained elsewhere."""
    runs = {row.name: folder / row.name / f"seed{seed}" for row in rows if row.inside and row.inside[0]}
    return runs if all((run / "checkpoints" / LAST).is_file() for run in runs.values()) else {}
