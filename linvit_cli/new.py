"""`linvit new`."""

import argparse
import shlex

from linvit_cli.parser import whole
from linvit_cli.streams import show

HELP = "Write a recipe for your own folder of images."
EXAMPLES = ("linvit new my.yaml --model mavit_nano --data photos",)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit new FILE.yaml --model NAME --data FOLDER [options]"
    command.add_argument("path", metavar="FILE.yaml", help="recipe to write; an existing file is not overwritten")
    command.add_argument("--model", required=True, metavar="NAME", help="network, such as mavit_tiny")
    text = "one folder per class, or train/ and val/ with a folder per class in each"
    command.add_argument("--data", required=True, metavar="FOLDER", help=text)
    text = (
        "weights to fine-tune: a run, a checkpoint or a weight file; none: train from scratch (default: those that come"
        " with linvit for this network, if there are any)"
    )
    command.add_argument("--init", metavar="WEIGHTS", help=text)
    text = "side of the images in pixels (default: as the weights or the images suggest)"
    command.add_argument("--size", type=whole, metavar="PX", help=text)
    text = "how often to go through the images (default: 20 from weights, on a slow machine fewer; 100 from scratch)"
    command.add_argument("--epochs", type=whole, metavar="N", help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.runs.own_images import SHIPPED, new_recipe

    init = None if options.init == "none" else options.init or SHIPPED
    written = new_recipe(options.path, options.model, options.data, init, size=options.size, epochs=options.epochs)
    show(f"{written.path}: {written.describe()}.")
    show(f"Train with: linvit train {shlex.quote(options.path)}")
    return 0
