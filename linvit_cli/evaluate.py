"""`linvit eval`."""

import argparse
import json
import sys
from pathlib import Path

from linvit_cli.overrides import data_settings
from linvit_cli.run_arguments import add_decoding, add_network, chosen, load
from linvit_cli.tables import show_rows

HELP = "Evaluate a run: accuracy, AP, mIoU, word error rate …, every held-out sample once."
TAKES_OVERRIDES = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit eval (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) [data.key=value ...]"
        " [--json] [--report [FILE]] [--beam N [--lm FILE]] [--tasks TASK ... [--include FOLDER] [--limit N]]"
    )
    command.add_argument("path", metavar="RUN", nargs="?", help="a run's folder or a checkpoint of it")
    add_network(command)
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--report", metavar="FILE", nargs="?", const="", help="write a page (RUN/report.html)")
    add_decoding(command)
    command.add_argument("--tasks", metavar="TASK", nargs="+", help="language: tasks of lm-evaluation-harness")
    command.add_argument("--include", metavar="FOLDER", type=Path, help="folder of your own harness tasks")
    command.add_argument("--limit", metavar="N", type=int, help="items of each harness task (all)")


def run(options: argparse.Namespace) -> int:
    evaluated = load(options, options.path)
    settings = data_settings(options.overrides)
    choices = chosen(options, "beam", "language_model", "lm_weight", "word_bonus", "tasks", "include", "limit")
    if options.tasks and options.report is not None:
        raise ValueError("--tasks bring data of their own and have no report: leave --report out.")
    measures = evaluated.evaluate(progress=not options.json, **settings, **choices)
    if options.json:
        print(json.dumps(measures.by_weights, default=str))
    else:
        show_rows(measures.table(), title=str(evaluated.path))
    if options.report is not None:
        page = evaluated.report(options.report or None, measures, **settings, **choices)
        print(f"The report is {page}.", file=sys.stderr)
    return 0
