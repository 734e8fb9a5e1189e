"""`linvit compare`."""

import argparse
from pathlib import Path

from linvit_cli.tables import show_rows

HELP = "Train recipes over seeds, side by side, with intervals."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit compare RECIPE ... --folder FOLDER [--seeds N] [--workers N] [--over KEY=V,V,…] [--set KEY=V ...]"
        " [--also MEASURE ...]"
    )
    command.add_argument(
        "recipes",
        metavar="RECIPE",
        nargs="+",
        type=Path,
        help="recipes of one task: files, or names of `linvit recipes`",
    )
    command.add_argument("--folder", type=Path, required=True, help="where runs, table and figure go")
    command.add_argument("--seeds", type=int, default=3, help="seeds per recipe (3)")
    command.add_argument("--workers", type=int, default=1, help="runs at once, one thread each (1)")
    command.add_argument("--over", metavar="KEY=V,V,…", help="train at each of these values, with a figure over them")
    command.add_argument("--set", metavar="KEY=V", nargs="+", default=(), help="settings of every run")
    command.add_argument("--also", metavar="MEASURE", nargs="+", default=(), help="columns for these measures too")


def run(options: argparse.Namespace) -> int:
    from linvit.studies import compare
    from linvit.studies.table import STEM, about_line

    chosen = (options.seeds, options.workers, options.over, options.set, options.also)
    comparison = compare(options.recipes, options.folder, *chosen, lambda line: print(line, flush=True))
    show_rows([comparison.cells(row) for row in comparison.rows])
    print(about_line(comparison.about).strip("*"))
    print(f"{options.folder / STEM}.md holds the table.")
    return 0
