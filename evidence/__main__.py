"""The command line of the evidence, from the root of a clone: what there is, what is left, and what runs it."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from evidence import bench as bench  # adds our kinds
from evidence import reproduce, reproduction, speeds, summaries, understand
from evidence.rows import ROOT, Bench, Call
from evidence.study import add_arguments as add_study
from evidence.table import GROUPS, chosen
from linvit.bench.kinds import KINDS
from linvit.ranges import lookup
from linvit.runs.folder import RunStoppedError
from linvit_cli import bench as measuring
from linvit_cli.parser import whole

WRONG, STOPPED = 2, 130

PAGES = {
    "summaries": summaries.write,
    "reproduce": reproduce.write,
    "figures": understand.write,
    "speeds": speeds.redraw_all,
}
"""What pages take from ledgers and tables, headers of recipes, formulas, and tables of speeds."""


def main(argv: Sequence[str] | None = None) -> int:
    os.chdir(ROOT)
    options = arguments().parse_args(argv)
    try:
        return options.run(options) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return WRONG
    except (RunStoppedError, KeyboardInterrupt) as stopped:
        print(str(stopped) or "Stopped.", file=sys.stderr)
        return STOPPED


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="rows of the table by group, and what is left of each")
    listed.add_argument("names", nargs="*", metavar="NAME", help="rows or groups (default: every one)")
    listed.set_defaults(run=show)
    running = commands.add_parser("run", help="train or measure what is left of rows or groups")
    running.add_argument(
        "names", nargs="+", metavar="NAME", help="rows or groups of `list`, or all: six groups of studies"
    )
    running.add_argument("--left", action="store_true", help="only say what is left, and its cost")
    running.add_argument("--on", default="", metavar="DEVICE", help="train on this accelerator, such as gpu")
    running.add_argument("--workers", type=whole, default=2, metavar="N", help="runs at once, one thread each")
    running.add_argument("--seeds", type=whole, metavar="N", help="seeds of the studies, not those of the table")
    running.add_argument("--again", action="store_true", help="train also what a ledger has, where weights are needed")
    running.add_argument("--note", default="", help="a sentence for model cards")
    running.add_argument("--cifar", default="data/cifar", metavar="FOLDER", help="the folder of CIFAR-10")
    running.add_argument("--encoder", default="data/minilm", metavar="FOLDER", help="the files of MiniLM, for minilm")
    running.add_argument(
        "--recognizer", default=Call.recognizer, metavar="FILE", help="the ONNX file of the text recognizer, for ocr"
    )
    running.add_argument(
        "--books", default="data/books", metavar="FOLDER", help="books in Markdown, for minilm and ocr"
    )
    running.set_defaults(run=run)
    pages = commands.add_parser("pages", help="compute what pages take from ledgers, tables, recipes and formulas")
    pages.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PAGES)} (default: all but speeds)")
    pages.set_defaults(run=write_pages)
    add_study(commands.add_parser("study", help="a study of the papers' claims with a folder of recipes"))
    text = "train and evaluate the networks of a published table, each beside its published value"
    reproduction.add_arguments(commands.add_parser("reproduce", help=text))
    kinds = commands.add_parser("bench", help="`linvit bench`, also of kinds that only our pages need")
    add_kinds(kinds.add_subparsers(dest="kind", required=True))
    return parser


def show(options: argparse.Namespace) -> None:
    """Prints the rows with what is left of them, group by group."""
    wanted, call = chosen(options.names or [*GROUPS]), Call()
    for group, rows in GROUPS.items():
        if shown := [row for row in rows if row in wanted]:
            print(f"{group}:")
            for row in shown:
                print(f"  {row.name:28} {row.left(call)}")


def run(options: argparse.Namespace) -> None:
    """Runs rows in turn. After one that fails, because data are missing for example, the others go on."""
    names = [field.name for field in fields(Call)]
    call, failures = Call(**{name: getattr(options, name) for name in names}), []
    rows = chosen(options.names)
    if not any(isinstance(row, Bench) for row in rows):
        os.nice(19)  # speeds are measured as usual, trainings wait for others
    for row in rows:
        if options.left:
            print(f"{row.name}: {row.left(call)}")
            continue
        print(f"{row.name}:", flush=True)
        try:
            row.run(call)
        except (ValueError, OSError, ImportError, subprocess.CalledProcessError) as error:
            failures.append(f"{row.name}: {error}")
    if failures:
        raise ValueError("\n".join(["not everything is done.", *failures]))


def write_pages(options: argparse.Namespace) -> None:
    """Writes the parts of pages that are asked for; figures of speeds only by name, when their form has changed."""
    for name in options.parts or [name for name in PAGES if name != "speeds"]:
        lookup("part", name, PAGES)()


def add_kinds(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The kinds of `linvit bench` with its flags; ours have one for each field of their options."""
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, argument_default=argparse.SUPPRESS)
        measuring.add_kind(parser, kind.options, {field.name: (None, "") for field in fields(kind.options)})
        parser.add_argument(
            "--write", type=Path, metavar="PAGE", help="put table and figures between the marks of --output"
        )
        parser.set_defaults(run=measure, write=None, debug=False)


def measure(options: argparse.Namespace) -> int:
    """Measures, and puts the results into a page if one is given."""
    if options.write is not None:
        speeds.check_page(options.write, options.output)
    code = measuring.run(options)
    if code == 0 and options.write is not None:
        speeds.write_page(options.write, options.output)
    return code


if __name__ == "__main__":
    sys.exit(main())
