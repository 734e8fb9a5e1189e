"""`linvit predict`."""

import argparse

from linvit_cli.failures import say_unreadable
from linvit_cli.overrides import data_settings
from linvit_cli.run_arguments import (
    add_decoding,
    add_keep_memory,
    add_network,
    add_weights,
    chosen,
    load,
    set_allocator,
)
from linvit_cli.tables import show_pieces, show_rows

HELP = "Predict from files: classes, objects, regions, or transcripts of speech."
TAKES_OVERRIDES = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit predict (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) PATH ..."
        " [--topk N] [--threshold SCORE] [--beam N [--lm FILE] | --stream SECONDS] [--weights raw|ema]"
        " [--output FILE|FOLDER] [--keep-memory]"
    )
    command.add_argument("paths", metavar="PATH", nargs="+", help="a run or checkpoint, then files or folders")
    add_network(command)
    command.add_argument("--topk", metavar="N", type=int, help="classification: classes for each image (5)")
    command.add_argument("--threshold", metavar="SCORE", type=float, help="lowest score that counts (0.5)")
    add_decoding(command)
    command.add_argument(
        "--stream", metavar="SECONDS", dest="seconds", type=float, help="speech: transcribe a file piece by piece"
    )
    add_weights(command)
    command.add_argument("--output", metavar="PATH", help="a .csv or .json file; a folder for detectors and segmentors")
    add_keep_memory(command)


def run(options: argparse.Namespace) -> int:
    path, *inputs = options.paths if options.model is None else [None, *options.paths]
    if not inputs:
        raise ValueError("There is nothing to predict: give files or folders after the run or checkpoint.")
    set_allocator(options)
    loaded = load(options, path)
    loaded.prepare(**data_settings(options.overrides))
    decoding = chosen(options, "beam", "language_model", "lm_weight", "word_bonus", "topk", "threshold", "weights")
    if options.seconds is not None:
        show_pieces(loaded.stream(inputs, options.seconds, **decoding, **chosen(options, "output")))
        return 0
    predictions = loaded.predict(inputs, progress=True, **decoding, **chosen(options, "output"))
    if options.output:
        print(f"{len(predictions)} predictions are in {options.output}.")
    else:
        show_rows(predictions.table(), left=2)
    return say_unreadable(predictions.unreadable)
