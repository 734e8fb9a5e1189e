"""`linvit convert`."""

import argparse
from pathlib import Path

from linvit_cli.streams import show

HELP = "Convert released weights to a file that timm can load."
EXAMPLES = ("linvit convert RAVLT_T.pth ravlt_tiny.safetensors --model ravlt_tiny",)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit convert IN.pth OUT.safetensors --model NAME"
    command.add_argument("source", metavar="IN.pth", help="the released weights")
    text = "the file to write, for timm.create_model(…, checkpoint_path=…)"
    command.add_argument("target", metavar="OUT.safetensors", help=text)
    command.add_argument("--model", required=True, metavar="NAME", help="model that the weights belong to")


def run(options: argparse.Namespace) -> int:
    from linvit.released import convert

    convert(options.source, Path(options.target), options.model)
    show(f"Load it with timm.create_model({options.model!r}, checkpoint_path={options.target!r}).")
    return 0
