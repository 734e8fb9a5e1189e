"""`linvit analyze`."""

import argparse

from linvit_cli.failures import say_unreadable
from linvit_cli.overrides import data_settings
from linvit_cli.run_arguments import add_network, chosen, load

HELP = "Measure ranks, scores and magnitudes inside a network's attention."
TAKES_OVERRIDES = True
ANALYSES = ("rank", "scores", "magnitude", "all")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit analyze [rank | scores | magnitude | all] (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])"
        " [data.key=value ...] [--images PATH ...] [--output FOLDER]"
    )
    command.add_argument("paths", metavar="WHAT", nargs="*", help="what to measure (all), then a run or a checkpoint")
    add_network(command, framework=False)
    command.add_argument("--images", metavar="PATH", nargs="+", help="image files or folders (the run's held-out data)")
    command.add_argument("--output", metavar="FOLDER", help="folder of figures, numbers and report (RUN/analysis)")
    command.add_argument("--layers", metavar="LAYER", nargs="+", help="names or numbers of attention layers (all)")
    command.add_argument("--count", metavar="N", type=int, help="images that ranks are averaged over (64)")
    command.add_argument(
        "--query", type=float, nargs=2, metavar=("Y", "X"), help="place whose scores are shown (0.5 0.5)"
    )


def run(options: argparse.Namespace) -> int:
    names_analysis = bool(options.paths) and options.paths[0] in ANALYSES
    what, paths = (options.paths[0], options.paths[1:]) if names_analysis else ("all", options.paths)
    if len(paths) > 1:
        raise ValueError(
            f"analyze got {' '.join(paths)}, expected one of {', '.join(ANALYSES)} and one run or checkpoint."
        )
    untrained = options.model is not None and options.checkpoint is None and not paths
    analyzed = load(options, paths[0] if paths else None, untrained=untrained)
    choices = chosen(options, "images", "output", "layers", "count", "query")
    analysis = analyzed.analyze(what, progress=True, **choices, **data_settings(options.overrides))
    print(f"The report is {analysis.page}.")
    return say_unreadable(analysis.unreadable)
