"""`linvit eval`."""

import argparse
import json
from pathlib import Path

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_decoding, add_network, add_processes, call, chosen, data_settings, load
from linvit_cli.streams import complain, show, show_rows

HELP = "Evaluate a run on held-out data: accuracy, AP, mIoU, word errors…"
EXAMPLES = (
    "linvit eval runs/ravlt_nano_digits --report",
    "linvit eval --model ravlt_tiny --checkpoint RAVLT_T.pth data=imagenet data.batch_size=64",
)
TAKES_OVERRIDES = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit eval (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])\n"
        "         [data.key=value ...] [options]; data=FOLDER evaluates on other data"
    )
    network = command.add_argument_group("what to evaluate")
    network.add_argument("path", metavar="RUN", nargs="?", help="folder of a run, or a checkpoint of it")
    add_network(network)
    add_processes(command.add_argument_group("images"))
    add_decoding(command)
    language = command.add_argument_group("language")
    text = "tasks of lm-evaluation-harness (default: none, the held-out text of the run)"
    language.add_argument("--tasks", metavar="TASK", nargs="+", help=text)
    text = "folder with the data of LAMBADA, PIQA, HellaSwag or WinoGrande (default: none, download it)"
    language.add_argument("--task-data", metavar="FOLDER", type=Path, help=text)
    text = "folder with your own harness tasks (default: none)"
    language.add_argument("--include", metavar="FOLDER", type=Path, help=text)
    language.add_argument("--limit", metavar="N", type=whole, help="items per harness task (default: all)")
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    text = "also write an HTML report (default: off; without FILE: RUN/report.html)"
    output.add_argument("--report", metavar="FILE", nargs="?", const="", help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.files import check_output_file

    if options.tasks and options.report is not None:
        raise ValueError("--tasks bring their own data and have no report: leave --report out.")
    if options.report:
        check_output_file(options.report)
    evaluated = load(options, options.path)
    settings = data_settings(options.overrides)
    decoding = chosen(options, "beam", "language_model", "lm_weight", "word_bonus")
    others = chosen(options, "tasks", "task_data", "include", "limit", "processes")
    measures = call(evaluated, "evaluate", settings=settings, progress=not options.json, **decoding, **others)
    if options.json:
        show(json.dumps(measures.by_weights, default=str))
    else:
        rows = measures.table()
        named = next(iter(rows[0])) in ("weights", "task")
        show(f"{evaluated.path}:")  # a path as a title would be broken to the width of the table
        show_rows(rows, left=int(named))
    if options.report is not None:
        page = evaluated.report(options.report or None, measures, **settings, **decoding)
        complain(f"The report is {page}.")
    return 0
