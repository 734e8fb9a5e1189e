"""`linvit study`."""

import argparse
from pathlib import Path

HELP = "Train every mechanism over seeds, compare them, and test the papers' claims."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, metavar="FOLDER", help="of other recipes")
    command.add_argument("--folder", type=Path, default=Path("runs/study"), help="for runs and tables (runs/study)")
    command.add_argument("--seeds", type=int, default=5, help="seeds per variant (5)")
    command.add_argument("--workers", type=int, default=2, help="runs at once, one thread each (2)")
    command.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the marks of a .md file")


def run(options: argparse.Namespace) -> int:
    from linvit.studies import study

    chosen = (options.folder, options.seeds, options.workers, options.write)
    study(options.recipes, *chosen, lambda line: print(line, flush=True))
    print(f"{options.folder}/study.md holds the tables and the verdicts, {options.folder}/study.png the figure.")
    if options.write is not None:
        print(f"{options.write} has them between its marks.")
    return 0
