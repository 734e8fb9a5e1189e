"""Arguments that several commands on runs share."""

import argparse
from typing import Any


def add_network(command: argparse.ArgumentParser, framework: bool = True) -> None:
    command.add_argument("--model", metavar="NAME", help="architecture, for weight files that do not record it")
    command.add_argument("--checkpoint", metavar="FILE", help="weights of --model: released (.pth) or converted")
    if framework:
        command.add_argument("--framework", metavar="NAME", help="mask_rcnn, upernet …: a released one on --model")


def add_decoding(command: argparse.ArgumentParser) -> None:
    command.add_argument("--beam", metavar="N", type=int, help="speech: beam width of CTC decoding (1 = greedy)")
    command.add_argument("--lm", metavar="FILE", dest="language_model", help="speech: n-gram language model of words")
    command.add_argument("--lm-weight", metavar="W", type=float, help="weight of the language-model score (0.5)")
    command.add_argument("--word-bonus", metavar="B", type=float, help="speech: score added for each word (0)")


def add_weights(command: argparse.ArgumentParser) -> None:
    command.add_argument("--weights", choices=("raw", "ema"), help="raw, or the moving average (default where kept)")


def add_keep_memory(command: argparse.ArgumentParser) -> None:
    text = "keep freed memory in the process: fewer page faults, a larger process (Linux, docs/fuse.md)"
    command.add_argument("--keep-memory", action="store_true", help=text)


def set_allocator(options: argparse.Namespace) -> None:
    """Does what --keep-memory asks for; a ValueError where the C library cannot."""
    from linvit.allocator import keep_memory

    if options.keep_memory and not keep_memory():
        raise ValueError("--keep-memory needs glibc, Linux's usual C library, which is not here: leave it out.")


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def load(options: argparse.Namespace, path: str | None, **more: Any) -> Any:
    """The run that the arguments name."""
    from linvit.runs.run import load_run

    framework = getattr(options, "framework", None)
    return load_run(path, model=options.model, checkpoint=options.checkpoint, framework=framework, **more)
