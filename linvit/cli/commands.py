"""The commands by name; each module has HELP, add_arguments(parser) and run(options)."""

from types import SimpleNamespace

from linvit.cli import analyze, compare, convert, data, demo, evaluate, generate, models, predict, study, train
from linvit.cli import bench_commands as benches


def _command(add_arguments, run, text):
    return SimpleNamespace(HELP=text, add_arguments=add_arguments, run=run)


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "predict": predict,
    "generate": generate,
    "analyze": analyze,
    "bench": _command(
        benches.bench_arguments,
        benches.run_bench,
        "Time operator, networks and training steps next to named peers, after a check of every result.",
    ),
    "convert": convert,
    "demo": demo,
    "study": study,
    "compare": compare,
    "data": _command(
        data.data_arguments,
        data.run_data,
        "Make scenes of digits or spoken digits, or check detection and segmentation data.",
    ),
    "models": models,
}
