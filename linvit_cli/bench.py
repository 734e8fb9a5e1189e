"""`linvit bench`: speeds, memory and errors as a table, JSON and figures, after a check of every result."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, cast, get_args, get_origin

from linvit.bench.options import NetworkOptions, OperatorOptions, Options, TrainingOptions
from linvit.ranges import OneOf
from linvit_cli.failures import STOPPED, say
from linvit_cli.parser import examples, image_size, listing, number, whole
from linvit_cli.run_arguments import add_keep_memory, set_allocator
from linvit_cli.streams import printable, show, show_rows

if TYPE_CHECKING:
    from linvit.bench.rows import Progress, Report

HELP = "Time operators, networks and training steps next to named peers."
EXAMPLES = ("linvit bench op rala --tokens 196 784", "linvit bench model ravlt_tiny --sizes 224 512")
WRONG = 1
Words = dict[str, tuple[str | None, str]]
"""Field → metavar and help."""
CLEARED, WIDEST, SECONDS_APART = "\r\x1b[K", 79, 10


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit bench KIND [NAME ...] [options]"
    command.description = f"{HELP}\n\nkinds:\n{listing({name: kind.text for name, kind in KINDS.items()})}"
    kinds = command.add_subparsers(
        dest="kind", required=True, metavar="KIND", prog="linvit bench", help=argparse.SUPPRESS
    )
    for name, kind in KINDS.items():
        parser = kinds.add_parser(
            name, description=kind.text, epilog=examples(kind.example), argument_default=argparse.SUPPRESS
        )
        parser.usage = f"linvit bench {name} [NAME ...] [options]"
        add_kind(parser, kind.options, kind.words | HOW)


def run(options: argparse.Namespace) -> int:
    """Measures, shows the results (after Ctrl-C, those so far) and returns the exit code, 1 for a wrong variant."""
    from linvit.bench import kinds, machine
    from linvit.bench.exactness import WrongResultError
    from linvit.files import check_writable

    if options.output is not None:
        check_writable(options.output)
    set_allocator(options)
    chosen = kinds.options_of(options.kind, vars(options))
    report = kinds.new_report(options.kind, chosen, options.keep_memory)
    say(machine.sentence(report.machine), 0)
    status, shown = 0, Shown()
    try:
        kinds.fill(report, chosen, cast("Progress", shown))
    except WrongResultError as error:
        return say(f"linvit: {error}.", WRONG)
    except KeyboardInterrupt:
        status = say("Stopped: these are the results so far.", STOPPED)
    finally:
        shown.clear()
    finish(report, options)
    return status


def finish(report: "Report", options: argparse.Namespace) -> None:
    """Shows the table, with --json one more line, and writes the files of --output."""
    from rich import box

    from linvit.bench import page

    table = page.cells(report)
    show_rows(table, left=page.words(table), box=box.MARKDOWN)
    for sentence in page.sentences(report):
        show(sentence)
    if options.output is not None:
        page.save(report, options.output)
        say(f"Page: {options.output}/report.html; the figures and bench.json are next to it.", 0)
    if options.json:
        show(json.dumps(report.as_dict()))


class Shown:
    """A line per group on stderr, and the current step: a terminal's last line, elsewhere a line every ten seconds.

    It has no thread of its own, whose time would be counted as the calls' time.
    """

    def __init__(self) -> None:
        self.start = self.printed = time.monotonic()
        self.name, self.step, self.rounds, self.round = "", "", 0, 0

    def group(self, name: str, rounds: int) -> None:
        self.name, self.step, self.rounds, self.round = name, "", rounds, 0
        self.clear()
        self._print(name)

    def say(self, sentence: str) -> None:
        self.step = sentence
        line = f"{self.name}: {self.round} of {self.rounds}{sentence and f', {sentence}'}"
        if sys.stderr.isatty():
            print(f"{CLEARED}{printable(line)[:WIDEST]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.printed >= SECONDS_APART:
            self._print(line)

    def advance(self) -> None:
        self.round += 1
        self.say(self.step)

    def clear(self) -> None:
        """Removes the last line of a terminal."""
        print(CLEARED if sys.stderr.isatty() else "", end="", file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        self.printed = time.monotonic()
        say(f"{self.printed - self.start:.0f} s  {line}", 0)


def add_kind(command: argparse.ArgumentParser, options: type[Options], words: Words) -> None:
    """A flag for each field of the options that has words, then those of the output; names come without a flag."""
    what, how = (command.add_argument_group(f"{word} to measure") for word in ("what", "how"))
    shared = [field.name for field in fields(Options)]
    for field in fields(options):
        if field.name not in words:
            continue
        group, values = how if field.name in shared else what, _values(field.type)
        metavar, text = words[field.name]
        if field.type is not bool:
            values["metavar"] = metavar
            text = text if "default: " in text else f"{text} (default: {_typed(field.default)})"
        if field.name in ("names", "operators", "peers"):
            values["nargs"] = "*"
        if field.name in ("names", "operators"):
            group.add_argument(field.name, help=text, **values)
        else:
            flag = FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
            group.add_argument(flag, dest=field.name, help=text, **values)
    output = command.add_argument_group("output")
    text = "folder for bench.json and the figures (default: none)"
    output.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    output.add_argument(
        "--json", action="store_true", help="also print everything as one JSON object, on the last line"
    )
    add_keep_memory(command.add_argument_group("other"))
    command.set_defaults(keep_memory=False, json=False, output=None)


def _values(annotation: Any) -> dict[str, Any]:
    """Type, choices and number of the values of an annotation, as argparse takes them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return {"action": "store_true"}
    if origin is Sequence:
        return {**_values(inner[0]), "nargs": "+"}
    if origin in (Union, UnionType):
        return _values(inner[0])
    if origin is Annotated:
        return _values(inner[0]) | ({"choices": inner[1].values} if isinstance(inner[1], OneOf) else {})
    return {"type": image_size if origin is tuple else {int: whole, float: number}.get(annotation, str)}


def _typed(value: Any) -> str:
    """A default as it is typed: 49 196, or 64 for a square of 64 px."""
    if isinstance(value, tuple):
        square = len(value) == 2 and value[0] == value[1]
        return _typed(value[0]) if square else " ".join(map(_typed, value))
    return "none" if value is None else str(value)


FLAGS = {"batches": "--batch"}
NETWORKS = ("NETWORK", "networks of `linvit models`")
HOW: Words = {
    "device": (None, "cuda is timed by GPU events and CUDA graphs"),
    "threads": ("N", "threads of torch: one is timed in CPU time, more in wall time"),
    "rounds": ("N", "rounds; in each, every variant is timed once"),
    "seconds": ("S", "time budget per size; at least three rounds are always made"),
    "seed": ("N", "seed of inputs and weights"),
    "memory": (None, "also measure the peak memory of each variant"),
}
"""Those of every kind."""


class Kind(NamedTuple):
    """A kind of benchmark: its options, whose fields are the flags, and the words of its help."""

    options: type[Options]
    text: str
    example: str
    words: Words


KINDS = {
    "op": Kind(
        OperatorOptions,
        "Time the attention operator against softmax attention.",
        "linvit bench op rala --tokens 196 784 --memory",
        {
            "operators": ("OPERATOR", "mechanisms of `linvit models`"),
            "variants": ("VARIANT", "plain, compiled, cpp, triton, reference (the released order), sdpa"),
            "dtypes": ("DTYPE", "float32, bfloat16, float16"),
            "tokens": ("N", "numbers of tokens"),
            "batch": ("N", "batch size"),
            "heads": ("N", "number of heads"),
            "width": ("N", "channels per head"),
            "backward": (None, "time forward and backward pass together"),
            "layout": (
                "LAYOUT",
                "order of the inputs in memory: heads, tokens, map, or own: the best for each variant",
            ),
            "sdpa_tokens": ("N", "largest number of tokens for softmax attention"),
        },
    ),
    "model": Kind(
        NetworkOptions,
        "Time whole networks next to networks of timm.",
        "linvit bench model ravlt_tiny --variants plain fused --peers convnext_tiny --batch 1 8",
        {
            "names": NETWORKS,
            "variants": (
                "VARIANT",
                "plain, or some joined by +: reference, fused, channels_last, bf16, compiled, autotuned, frozen, cpp,"
                " triton, onnxruntime, openvino, executorch, int8",
            ),
            "peers": (
                "NETWORK",
                "networks of timm to compare with (default: six, from swin_tiny to mobilenetv4; none: --peers without"
                " names)",
            ),
            "peer_variants": ("VARIANT", "variants of the peers"),
            "sizes": ("SIZE", "sides, or HEIGHTxWIDTH such as 1024x2048, in pixels"),
            "batches": ("N", "batch sizes"),
        },
    ),
    "train": Kind(
        TrainingOptions,
        "Time training steps.",
        "linvit bench train care_s0 --variants plain bf16",
        {
            "names": NETWORKS,
            "variants": ("VARIANT", "such as channels_last+bf16"),
            "size": ("SIZE", "side, or HEIGHTxWIDTH, in pixels"),
            "batch": ("N", "batch size, 2 or more"),
        },
    ),
}
