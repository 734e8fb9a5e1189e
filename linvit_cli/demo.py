"""`linvit demo`."""

import argparse
from pathlib import Path

from linvit_cli.parser import whole
from linvit_cli.streams import show, show_rows

HELP = "Train four small networks on handwritten digits and write a report."
EXAMPLES = ("linvit demo",)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit demo [options]"
    text = "folder with other recipes *_nano_digits.yaml (default: those that come with linvit)"
    command.add_argument("--recipes", type=Path, metavar="FOLDER", help=text)
    text = "where the runs and the report go"
    command.add_argument("--folder", type=Path, metavar="FOLDER", default=Path("runs/demo"), help=text)
    text = "networks trained in parallel, one thread each"
    command.add_argument("--workers", type=whole, metavar="N", default=2, help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.analysis.report import PAGE
    from linvit.studies.demo import demo

    comparison = demo(options.recipes, options.folder, options.workers, show)
    show_rows([comparison.cells(row) for row in comparison.rows], left=2, title="Handwritten digits, held-out images")
    show(f"Report: {options.folder / PAGE}")
    return 0
