"""The commands by name; each module has HELP, add_arguments(parser) and run(options)."""

from types import SimpleNamespace

from linvit.cli import analyze, bench, compare, convert, data, demo, evaluate, generate, predict, study, train
from linvit.cli import study_commands as studies


def _command(add_arguments, run, text):
    return SimpleNamespace(HELP=text, add_arguments=add_arguments, run=run)


COMMANDS = {
    "train": train,
    "eval": evaluate,
    "predict": predict,
    "generate": generate,
    "analyze": analyze,
    "bench": bench,
    "convert": convert,
    "demo": demo,
    "study": study,
    "compare": compare,
    "data": _command(
        data.data_arguments,
        data.run_data,
        "Make scenes of digits or spoken digits, or check detection and segmentation data.",
    ),
    "models": _command(
        studies.models_arguments, studies.run_models, "List the models with size, cost and published accuracy."
    ),
}
