"""`linvit analyze`."""

import argparse

from linvit_cli.failures import say_unreadable
from linvit_cli.parser import number, whole
from linvit_cli.run_arguments import add_network, call, chosen, data_settings, load
from linvit_cli.streams import show

HELP = "Measure ranks, scores and magnitudes inside a network's attention."
EXAMPLES = (
    "linvit analyze runs/ravlt_nano_digits",
    "linvit analyze rank --model ravlt_tiny --images photos --output analysis",
)
TAKES_OVERRIDES = True
ANALYSES = ("rank", "scores", "magnitude", "all")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit analyze [rank | scores | magnitude | all]\n"
        "         (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])\n"
        "         [data.key=value ...] [options]"
    )
    network = command.add_argument_group("what to analyze")
    text = "rank, scores, magnitude or all (default: all); then the folder of a run, or a checkpoint of it"
    network.add_argument("paths", metavar="WHAT", nargs="*", help=text)
    add_network(network, framework=False)
    text = "image files or folders (default: held-out images of the run, or two photos without one)"
    network.add_argument("--images", metavar="PATH", nargs="+", help=text)
    network.add_argument("--count", metavar="N", type=whole, help="images that ranks are averaged over (default: 64)")
    text = "names or numbers of attention layers (default: all)"
    network.add_argument("--layers", metavar="LAYER", nargs="+", help=text)
    text = "query whose scores are shown, as shares of the height and width (default: 0.5 0.5)"
    network.add_argument("--query", type=number, nargs=2, metavar=("Y", "X"), help=text)
    output = command.add_argument_group("output")
    text = "where figures, numbers and the report go (default: RUN/analysis)"
    output.add_argument("--output", metavar="FOLDER", help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.models.by_name import bundled_weights

    names_analysis = bool(options.paths) and options.paths[0] in ANALYSES
    what, paths = (options.paths[0], options.paths[1:]) if names_analysis else ("all", options.paths)
    if len(paths) > 1:
        raise ValueError(
            f"analyze got {' '.join(paths)}, expected one of {', '.join(ANALYSES)} and one run or checkpoint."
        )
    without_weights = options.model is not None and options.checkpoint is None and not bundled_weights(options.model)
    untrained = without_weights and not paths
    analyzed = load(options, paths[0] if paths else None, untrained=untrained)
    choices = chosen(options, "images", "output", "layers", "count", "query")
    settings = data_settings(options.overrides)
    analysis = call(analyzed, "analyze", what, settings=settings, progress=True, **choices)
    show(f"The report is {analysis.page}.")
    return say_unreadable(analysis.unreadable)
