"""`linvit new`."""

import argparse
import shlex

from linvit_cli.streams import show

HELP = "Write a recipe for your own folder of images."
EXAMPLES = ("linvit new my.yaml --model mavit_tiny --data photos",)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit new FILE.yaml --model NAME --data FOLDER [options]"
    command.add_argument("path", metavar="FILE.yaml", help="recipe to write; an existing file is not overwritten")
    command.add_argument("--model", required=True, metavar="NAME", help="network, such as mavit_tiny")
    text = "one folder per class, or train/ and val/ with a folder per class in each"
    command.add_argument("--data", required=True, metavar="FOLDER", help=text)
    text = (
        "fine-tune these weights: a run, a checkpoint, a weight file, or weights that come with linvit, such as"
        " mavit_nano.cifar10 (default: none, train from scratch)"
    )
    command.add_argument("--init", metavar="WEIGHTS", help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.runs.own_images import new_recipe

    written = new_recipe(options.path, options.model, options.data, options.init)
    show(f"{written.path}: {written.describe()}.")
    show(f"Train with: linvit train {shlex.quote(options.path)}")
    return 0
