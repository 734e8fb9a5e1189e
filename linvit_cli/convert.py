"""`linvit convert`."""

import argparse
from pathlib import Path

HELP = "Convert released weights to a file that timm reads."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="IN.pth", help="released weights")
    command.add_argument("target", metavar="OUT.safetensors", help="for timm.create_model(…, checkpoint_path=…)")
    command.add_argument("--model", required=True, metavar="NAME", help="the model that the weights belong to")


def run(options: argparse.Namespace) -> int:
    from linvit.released import convert

    convert(options.source, Path(options.target), options.model)
    print(f"{options.target}: read it with timm.create_model({options.model!r}, checkpoint_path={options.target!r})")
    return 0
