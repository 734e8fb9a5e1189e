"""`linvit predict`."""

import argparse
from typing import Any

from linvit_cli.failures import say_unreadable
from linvit_cli.parser import number, whole
from linvit_cli.run_arguments import (
    add_decoding,
    add_keep_memory,
    add_network,
    add_processes,
    add_weights,
    call,
    chosen,
    data_settings,
    load,
    set_allocator,
)
from linvit_cli.streams import complain, show, show_pieces, show_rows

HELP = "Predict classes, objects, regions or transcripts from files."
EXAMPLES = (
    "linvit predict runs/ravlt_nano_digits photos scan.png --output predictions.csv",
    "linvit predict runs/spoken_mala speech.flac --beam 16 --lm words.arpa",
    "linvit predict runs/segmentor slide.tif --strips --output maps",
)
TAKES_OVERRIDES = True
GIVEN = (
    "beam", "language_model", "lm_weight", "word_bonus", "topk", "threshold", "weights", "processes", "output"
)  # fmt: skip


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit predict (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])\n"
        "         PATH ... [data.key=value ...] [options]"
    )
    network = command.add_argument_group("what to predict")
    text = "folder of a run, or a checkpoint of it; then image or sound files, or folders of them"
    network.add_argument("paths", metavar="PATH", nargs="+", help=text)
    add_network(network)
    add_weights(network)
    images = command.add_argument_group("images")
    text = "classification: number of classes shown per image, most likely first (default: 5)"
    images.add_argument("--topk", metavar="K", type=whole, help=text)
    text = "detection and multi-label classification: lowest score shown (default: 0.5)"
    images.add_argument("--threshold", metavar="SCORE", type=number, help=text)
    text = "classes and label maps: read each image at its own size and strip by strip (default: off)"
    images.add_argument("--strips", action="store_true", help=text)
    text = "--strips: height of a strip in pixels (default: what fits the memory)"
    images.add_argument("--rows", metavar="PX", type=whole, help=text)
    text = "--strips: GiB for the maps of a strip (default: 1)"
    images.add_argument("--strip-memory", metavar="GIB", dest="memory", type=number, help=text)
    text = "--strips: folder for maps on disk; the same command goes on after an interruption (default: none)"
    images.add_argument("--spill", metavar="FOLDER", help=text)
    add_processes(images)
    text = "transcribe one file while it is read, in pieces of this length; for causal networks (default: off)"
    add_decoding(command).add_argument("--pieces", metavar="SECONDS", dest="seconds", type=number, help=text)
    output = command.add_argument_group("output")
    text = "a .csv or .json file, for detectors and segmentors a folder (default: a table on the terminal)"
    output.add_argument("--output", metavar="PATH", help=text)
    add_keep_memory(command.add_argument_group("other"))


def _strips(options: argparse.Namespace) -> dict[str, Any]:
    """The option `strips` of `predict`."""
    strips = chosen(options, "rows", "memory", "spill")
    if not options.strips:
        if strips:
            raise ValueError("--rows, --strip-memory and --spill need --strips: add it.")
        return {}
    return {"strips": {**strips, "progress": complain}}


def run(options: argparse.Namespace) -> int:
    from linvit.runs.tasks.speech import SpeechRun

    path, *inputs = options.paths if options.model is None else [None, *options.paths]
    if not inputs:
        raise ValueError("There is nothing to predict: give files or folders after the run or checkpoint.")
    set_allocator(options)
    loaded = load(options, path)
    loaded.prepare(**data_settings(options.overrides))
    settings = chosen(options, *GIVEN) | _strips(options)
    if options.seconds is not None:
        if not isinstance(loaded, SpeechRun):
            raise ValueError(f"--pieces is for sound, but this is a run of the task {loaded.task_name}: leave it out.")
        show_pieces(call(loaded, "stream", inputs, options.seconds, **settings))
        return 0
    predictions = call(loaded, "predict", inputs, progress=True, **settings)
    if options.output:
        count = "1 prediction is" if len(predictions) == 1 else f"{len(predictions)} predictions are"
        show(f"{count} in {options.output}.")
    else:
        show_rows(predictions.table(), left=2)
    return say_unreadable(predictions.unreadable)
