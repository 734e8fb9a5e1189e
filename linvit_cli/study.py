"""`linvit study`."""

import argparse
from pathlib import Path

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_ledger
from linvit_cli.streams import show

HELP = "Train every mechanism over seeds and test the papers' claims."
EXAMPLES = ("linvit study --seeds 3 --workers 4",)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit study [options]"
    text = "folder with other recipes (default: the study's, which come with linvit)"
    command.add_argument("--recipes", type=Path, metavar="FOLDER", help=text)
    text = "where the runs and the tables go"
    command.add_argument("--folder", type=Path, metavar="FOLDER", default=Path("runs/study"), help=text)
    command.add_argument("--seeds", type=whole, metavar="N", default=5, help="seeds per recipe")
    command.add_argument("--first-seed", type=whole, metavar="N", default=0, help="lowest seed")
    command.add_argument("--workers", type=whole, metavar="N", default=2, help="parallel runs, one thread each")
    text = "settings for every run, such as trainer.max_epochs=5 (default: those of the recipes)"
    command.add_argument("--set", metavar="KEY=V", nargs="+", action="extend", default=[], help=text)
    text = "also put the tables between their marks in a Markdown file (default: none)"
    command.add_argument("--write", type=Path, metavar="FILE", help=text)
    add_ledger(command)


def run(options: argparse.Namespace) -> int:
    from linvit.studies import study
    from linvit.studies.papers import remaining_runs

    if options.left:
        settings = (options.seeds, options.ledger, options.first_seed, options.set)
        show(f"{options.folder}: {remaining_runs(options.recipes, options.folder, *settings)}")
        return 0
    result = study(
        options.recipes,
        options.folder,
        options.seeds,
        options.workers,
        options.write,
        show,
        options.ledger,
        options.first_seed,
        options.set,
    )
    files = options.folder / result.name
    show(f"Page: {options.folder}/report.html; tables and verdicts are also in {files}.md, the figure in {files}.pdf.")
    if options.write is not None:
        show(f"{options.write} has the tables between its marks.")
    return 0
