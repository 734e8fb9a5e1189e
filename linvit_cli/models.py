"""`linvit models`."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from linvit.bundled import caption, list_networks
from linvit_cli.streams import show, show_rows

HELP = "List the models with size, cost and published accuracy."
EXAMPLES = ("linvit models --family ravlt", "linvit models --task detection", "linvit models --recipes demo ravlt")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit models [options]"
    listed = command.add_argument_group("what to list")
    text = "networks of a task: classification, detection, segmentation, language, speech … (default: classification)"
    listed.add_argument("--task", metavar="NAME", help=text)
    listed.add_argument("--family", metavar="NAME", help="one family, such as ravlt or swin_tiny (default: all)")
    text = "compare the networks of these recipes, or folders of recipes, with those of their bases (default: none)"
    listed.add_argument("--recipes", metavar="RECIPE", nargs="+", help=text)
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def run(options: argparse.Namespace) -> int:
    if options.recipes and (options.family or options.task):
        raise ValueError("--recipes excludes --family and --task: leave them out.")
    task = options.task or "classification"
    if options.recipes:
        from linvit.runs.listing import compare_recipes

        rows = compare_recipes(options.recipes, progress=True)
    else:
        rows = list_networks(task, options.family)
    if options.json:
        show(json.dumps(rows))
    elif options.recipes:
        from rich import box

        show_rows(readable(rows, {**COLUMNS, "parameters": ("parameters", "{:,}".format)}), box=box.MARKDOWN)
    elif rows:
        show_rows(readable(rows), left=2, caption=caption(task))
    else:
        show(caption(task))
    return 0


def _giga(value: int) -> str:
    return f"{value / 1e9:.3f} G"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "recipe": ("recipe", str),
    "framework": ("framework", str),
    "name": ("model", str),
    "variant": ("model", str),
    "backbone": ("backbone", str),
    "mechanism": ("mechanism", str),
    "pattern": ("pattern", str),
    "vocabulary": ("vocabulary", "{:,}".format),
    "tokens": ("tokens", "{:,}".format),
    "parameters": ("parameters", lambda value: f"{value / 1e6:.2f} M"),
    "more_parameters": ("parameters over base", "{:+,}".format),
    "macs": ("MACs", _giga),
    "more_macs": ("MACs over base", lambda value: f"{value / 1e9:+.3f} G"),
    "published_top1": ("published top-1", "{} %".format),
    "weights": ("weights", str),
    "macs_attention": ("+ attention", _giga),
    "input_size": ("px", lambda size: str(size[-1])),
    "memory": ("memory", lambda value: f"{value / 2**20:.2f} MiB"),
    "ctc": ("with CTC", "{:,}".format),
    "transducer": ("as transducer", "{:,}".format),
    "published_parameters": ("published size", "{} M".format),
    "published_macs": ("published FLOPs", "{} G".format),
    "published": ("published", str),
}
"""The heading of each key, and how its values are shown; a narrow terminal leaves the last ones out."""


def readable(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, Callable[[Any], str]]] = COLUMNS
) -> list[dict[str, str]]:
    """The rows with a heading and unit for each key, formatted for people."""
    return [
        {heading: "–" if row[key] is None else cell(row[key]) for key, (heading, cell) in columns.items() if key in row}
        for row in rows
    ]
