"""`linvit models`."""

import argparse
import json

from linvit.cli.tables import show_rows

HELP = "List the models with size, cost and published accuracy."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--task", metavar="NAME", help="networks of another task: detection, language, speech …")
    command.add_argument("--family", metavar="NAME", help="only this family, such as ravlt or swin_tiny")
    command.add_argument(
        "--recipes", metavar="RECIPE", nargs="+", help="what recipes, or folders of them, train, against their bases"
    )
    command.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def run(options: argparse.Namespace) -> int:
    from linvit.runs.listing import list_networks, list_recipes, readable
    from linvit.runs.tasks import TASKS

    if options.recipes and (options.family or options.task):
        raise ValueError("--recipes excludes --family and --task: leave them out.")
    task = options.task or "classification"
    rows = list_recipes(options.recipes, True) if options.recipes else list_networks(task, options.family, True)
    if options.json:
        print(json.dumps(rows))
    elif options.recipes:
        from rich import box

        show_rows(readable(rows), box=box.MARKDOWN)
    else:
        show_rows(readable(rows), left=2, caption=TASKS[task].listing_caption)
    return 0
