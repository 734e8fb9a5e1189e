"""The commands, in their usual order; each module has HELP, EXAMPLES, add_arguments(parser) and run(options)."""

from types import ModuleType

from linvit_cli import (
    analyze,
    bench,
    check_gpu,
    compare,
    convert,
    data,
    demo,
    evaluate,
    explore,
    export,
    generate,
    linearize,
    models,
    new,
    predict,
    push,
    recipes,
    train,
)
from linvit_cli.parser import listing

GROUPS: dict[str, dict[str, ModuleType]] = {
    "start": {"demo": demo, "recipes": recipes, "models": models, "new": new},
    "train": {"train": train, "linearize": linearize},
    "use a trained network": {
        "eval": evaluate,
        "predict": predict,
        "generate": generate,
        "convert": convert,
        "export": export,
        "push": push,
    },
    "look inside": {"analyze": analyze, "explore": explore},
    "measure": {"bench": bench, "check-gpu": check_gpu, "compare": compare},
    "data": {"data": data},
}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


def overview() -> str:
    """The commands by group, one line each."""
    return "\n\n".join(
        f"{group}:\n" + listing({f"{name:9}": module.HELP for name, module in commands.items()})
        for group, commands in GROUPS.items()
    )
