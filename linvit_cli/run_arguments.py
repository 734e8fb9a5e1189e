"""Arguments that several commands on runs share, and `data.key=value`, spelled as in a recipe."""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit_cli.parser import number, whole

if TYPE_CHECKING:
    from linvit.runs import Run


def add_network(group: argparse._ArgumentGroup, framework: bool = True) -> None:
    """A network without a run: its name and a file of weights."""
    text = (
        "architecture of the weight file, or a network that comes with weights, see linvit models"
        " (default: none, a run is given)"
    )
    group.add_argument("--model", metavar="NAME", help=text)
    text = "weight file for --model, released (.pth) or converted (default: none)"
    group.add_argument("--checkpoint", metavar="FILE", help=text)
    if framework:
        text = "released detector or segmentor on --model, such as mask_rcnn or upernet (default: none)"
        group.add_argument("--framework", metavar="NAME", help=text)


def add_decoding(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How transcripts are decoded."""
    group = command.add_argument_group("speech recognition")
    group.add_argument("--beam", metavar="N", type=whole, help="beam width of CTC decoding (default: 1, greedy)")
    text = (
        "n-gram language model over words, in ARPA or KenLM's binary format, or train: counted in the training"
        " transcripts (default: none)"
    )
    group.add_argument("--lm", metavar="FILE", dest="language_model", help=text)
    text = "weight of the language-model score (default: 0.5)"
    group.add_argument("--lm-weight", metavar="W", type=number, help=text)
    group.add_argument("--word-bonus", metavar="B", type=number, help="score added for each word (default: 0)")
    return group


def add_weights(group: argparse._ArgumentGroup) -> None:
    text = "raw weights or their moving average (default: ema if the run has it, otherwise raw)"
    group.add_argument("--weights", choices=("raw", "ema"), help=text)


def add_ledger(group: argparse._ActionsContainer) -> None:
    """The file of finished runs, and what is left of them."""
    text = "file of finished runs: those in it are not repeated, new ones are added (default: none)"
    group.add_argument("--ledger", type=Path, metavar="FILE", help=text)
    group.add_argument("--left", action="store_true", help="only say how many runs are left, and their cost")


def add_processes(group: argparse._ArgumentGroup) -> None:
    text = "classification: processes to start that share the rows of every image (default: 1)"
    group.add_argument("--processes", metavar="N", type=whole, help=text)


def add_keep_memory(group: argparse._ArgumentGroup) -> None:
    text = (
        "keep freed memory: faster with large tensors, but a larger process; Linux only (the page Fusing of the"
        " documentation explains it)"
    )
    group.add_argument("--keep-memory", action="store_true", help=text)


def set_allocator(options: argparse.Namespace) -> None:
    """Applies --keep-memory; raises ValueError if the C library does not support it."""
    from linvit.allocator import keep_memory

    if options.keep_memory and not keep_memory():
        raise ValueError("--keep-memory needs glibc, the usual C library of Linux: leave it out.")


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, by name."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


CANNOT = {
    "predict": "predict",
    "generate": "generate",
    "analyze": "be analyzed, because it has no attention over images",
    "save_weights": "be converted, because timm reads classifiers only",
    "push_to_hub": "be pushed, because the hub's folder is that of a classifier",
}
"""What a run cannot do whose task lacks a method, in words."""
COMMANDS = {"predict": "predict", "generate": "generate", "evaluate": "eval"}
"""The commands that a task may have instead, by their methods."""


def call(run: "Run", verb: str, *values: Any, settings: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Calls a method of a run. settings: further arguments, which are settings of the data.

    Raises ValueError if its task lacks the method, naming the commands that it has, or an option.
    """
    if not hasattr(run, verb):
        commands = [f"`linvit {command}`" for name, command in COMMANDS.items() if hasattr(run, name)]
        raise ValueError(f"A run of the task {run.task_name} cannot {CANNOT[verb]}: use {' or '.join(commands)}.")
    method = getattr(run, verb)
    accepted = [name for name, p in inspect.signature(method).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options.keys() - {*accepted, "progress"}:
        others = ", ".join(f"`{other}`" for other in accepted if other != "progress")
        accepts = f"which accepts {others}" if others else "which accepts none"
        raise ValueError(f"`{name}` is not an option of {verb} for the task {run.task_name}, {accepts}: leave it out.")
    return method(*values, **(settings or {}), **options)


def load(options: argparse.Namespace, path: str | None, **more: Any) -> "Run":
    """The run that the arguments name; from now on torch has at most the threads of its training."""
    import torch

    from linvit.runs.loading import load_run

    framework = getattr(options, "framework", None)
    run = load_run(path, model=options.model, checkpoint=options.checkpoint, framework=framework, **more)
    if threads := (run.recipe or {}).get("trainer", {}).get("threads"):
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    return run


OVERRIDE = re.compile(r"(?:--)?(data(?:\.[\w.]+)?=.*)", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `data.key=value`, and those overrides; everything after -- is an argument."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest, overrides = [], []
    for argument in arguments[:end]:
        match = OVERRIDE.fullmatch(argument)
        if match:
            overrides.append(match[1])
        else:
            rest.append(argument)
    return [*rest, *arguments[end:]], overrides


def data_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of the data as keyword arguments: `data.root=x data.batch_size=8`, or `data=x` for a folder or name.

    Raises ValueError for a value that is not YAML, and for a setting that is given twice.
    """
    from linvit.runs.recipe_values import parsed_override

    settings: dict[str, Any] = {}
    for override in overrides:
        key, value = parsed_override(override)
        given = value if key == "data" and isinstance(value, dict) else {key.removeprefix("data."): value}
        twice = next((name for name in given if name in settings), None)
        if twice is not None:
            raise ValueError(f"data.{twice.removeprefix('data.')} is given twice, expected once: leave one out.")
        settings |= given
    return settings


def recipe_overrides(rest: Sequence[str]) -> list[str]:
    """Both `a.b=c` and `--a.b c` or `--a.b=c`, as `a.b=c`."""
    overrides: list[str] = []
    flag = ""
    for argument in rest:
        if flag:
            overrides.append(f"{flag}={argument}")
            flag = ""
        elif argument.startswith("--") and "=" not in argument:
            flag = argument[2:]
        else:
            overrides.append(argument.removeprefix("--"))
    return [*overrides, flag] if flag else overrides
