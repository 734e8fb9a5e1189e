"""The commands by name; each module has HELP, add_arguments(parser) and run(options)."""

from linvit_cli import (
    analyze,
    bench,
    compare,
    convert,
    data,
    demo,
    evaluate,
    generate,
    models,
    new,
    predict,
    recipes,
    study,
    train,
)

COMMANDS = {
    "new": new,
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
    "data": data,
    "models": models,
    "recipes": recipes,
}
