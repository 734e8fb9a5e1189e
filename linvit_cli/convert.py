"""`linvit convert`."""

import argparse
from pathlib import Path

from linvit_cli.run_arguments import call, chosen, data_settings
from linvit_cli.streams import show

HELP = "Write the weights of a run, or released ones, to a file for timm."
EXAMPLES = (
    "linvit convert runs/ravlt_nano_digits digits.safetensors --half",
    "linvit convert RAVLT_T.pth ravlt_tiny.safetensors --model ravlt_tiny",
)
TAKES_OVERRIDES = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit convert (RUN | CHECKPOINT) OUT.safetensors\n"
        "         [data.root=FOLDER] [options]\n"
        "       linvit convert IN.pth OUT.safetensors --model NAME [--half]"
    )
    text = "folder of a run of classification, or a checkpoint of it; with --model the released weights"
    command.add_argument("source", metavar="RUN", help=text)
    text = "the file to write, for timm.create_model(…, checkpoint_path=…)"
    command.add_argument("target", metavar="OUT.safetensors", help=text)
    text = "model that released weights belong to (default: none, a run is given)"
    command.add_argument("--model", metavar="NAME", help=text)
    command.add_argument("--half", action="store_true", help="round the weights to float16 (default: float32)")
    card = command.add_argument_group("model card, written next to the file of a run as .md")
    card.add_argument("--license", metavar="NAME", help="license of the weights, such as apache-2.0 (default: none)")
    card.add_argument("--note", metavar="TEXT", help="a sentence about the data or limits (default: none)")


def run(options: argparse.Namespace) -> int:
    card = chosen(options, "license", "note")
    if options.model is not None:
        from linvit.released import convert

        if card or options.overrides:
            raise ValueError("--model converts released weights, which get no model card: leave the other options out.")
        convert(options.source, Path(options.target), options.model, half=options.half)
        show(f"Load it with timm.create_model({options.model!r}, checkpoint_path={options.target!r}).")
        return 0
    from linvit.runs.loading import load_run

    settings = data_settings(options.overrides)
    loaded = load_run(options.source)
    path = call(loaded, "save_weights", options.target, settings=settings, half=options.half, progress=True, **card)
    show(f"The weights are in {path}, their model card in {path.with_suffix('.md')}.")
    return 0
