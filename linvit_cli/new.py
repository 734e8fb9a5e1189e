"""`linvit new`."""

import argparse
import shlex

HELP = "Write a recipe for your own folder of images."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit new FILE.yaml --model NAME --data FOLDER [--init WEIGHTS] [--debug]"
    command.add_argument("path", metavar="FILE.yaml", help="the new recipe; one that exists is not overwritten")
    command.add_argument("--model", required=True, metavar="NAME", help="the network, such as mavit_tiny")
    command.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="one folder for each class, or train/ and val/ with these in each",
    )
    command.add_argument("--init", metavar="WEIGHTS", help="fine-tune these: a run, a checkpoint or a file of weights")


def run(options: argparse.Namespace) -> int:
    from linvit.runs.own_images import new_recipe

    written = new_recipe(options.path, options.model, options.data, options.init)
    print(f"{written.path}: {written.describe()}.")
    print(f"Train with: linvit train {shlex.quote(options.path)}")
    return 0
