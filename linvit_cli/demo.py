"""`linvit demo`."""

import argparse
from pathlib import Path

from linvit_cli.tables import show_rows

HELP = "Train four small networks on real digits and write a report."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, metavar="FOLDER", help="of other recipes *_nano_digits.yaml")
    command.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where runs and report go (runs/demo)")
    command.add_argument("--workers", type=int, default=2, help="networks trained at once, one thread each (2)")


def run(options: argparse.Namespace) -> int:
    from linvit.studies.demo import PAGE, demo

    comparison = demo(options.recipes, options.folder, options.workers, lambda line: print(line, flush=True))
    show_rows([comparison.cells(row) for row in comparison.rows], left=2, title="Handwritten digits, held-out images")
    print(f"Report: {options.folder / PAGE}")
    return 0
