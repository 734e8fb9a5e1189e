"""`linvit compare`."""

import argparse
from pathlib import Path

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_ledger
from linvit_cli.streams import show, show_rows

HELP = "Train recipes over several seeds and compare them, with intervals."
EXAMPLES = (
    "linvit compare demo/ravlt_nano_digits demo/softmax_nano_digits --folder runs/compared",
    "linvit compare language/memory/recall_mala --folder runs/recall --over data.pairs=4,8,16",
    "linvit compare language/memory/recall_mala --folder runs/recall --ledger recall.jsonl --left",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit compare RECIPE ... --folder FOLDER [options]"
    compared = command.add_argument_group("what to compare")
    text = "recipes of one task, the baseline first: files, or names that `linvit recipes` lists"
    compared.add_argument("recipes", metavar="RECIPE", nargs="+", type=Path, help=text)
    compared.add_argument("--seeds", metavar="N", type=whole, default=3, help="seeds per recipe")
    compared.add_argument("--first-seed", metavar="N", type=whole, default=0, help="lowest seed")
    text = "train at each of these values of a setting, for a single recipe the baseline first (default: none)"
    compared.add_argument("--over", metavar="KEY=V,V,…", help=text)
    text = "settings for every run, such as trainer.max_epochs=5 (default: those of the recipes)"
    compared.add_argument("--set", metavar="KEY=V", nargs="+", action="extend", default=[], help=text)
    compared.add_argument("--workers", metavar="N", type=whole, default=1, help="parallel runs, one thread each")
    text = "let the recipes run code of any package and write outside their runs' folders"
    compared.add_argument("--trust-recipe", action="store_true", help=text)
    output = command.add_argument_group("output")
    text = "where the runs, the table and the figure go"
    output.add_argument("--folder", metavar="FOLDER", type=Path, required=True, help=text)
    text = "further measures, each in its own column (default: none)"
    output.add_argument("--also", metavar="MEASURE", nargs="+", default=(), help=text)
    text = "also put the table between the marks of a Markdown file that are named after FOLDER (default: none)"
    output.add_argument("--write", metavar="FILE", type=Path, help=text)
    add_ledger(output)


def run(options: argparse.Namespace) -> int:
    from linvit.studies import compare
    from linvit.studies.comparison import plan_comparison
    from linvit.studies.table import STEM, about_line

    if options.left:
        settings = (options.seeds, options.over, options.set, options.ledger, options.first_seed)
        show(f"{options.folder}: {plan_comparison(options.recipes, options.folder, *settings).left()}")
        return 0
    chosen = (options.seeds, options.workers, options.over, options.set, options.also)
    rest = (options.ledger, options.write, options.first_seed)
    comparison = compare(options.recipes, options.folder, *chosen, show, options.trust_recipe, *rest)
    show_rows([comparison.cells(row) for row in comparison.rows])
    show(about_line(comparison.about))
    written = "" if options.write is None else f" and between the marks of {options.write}"
    show(f"Page: {options.folder}/report.html; the table is also in {options.folder / STEM}.md{written}.")
    return 0
