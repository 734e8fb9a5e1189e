"""`linvit bench`: speeds, memory and errors as a table, JSON and figures, after a check of every result."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from linvit_cli.failures import STOPPED, say
from linvit_cli.parser import examples, image_size, listing, number, whole
from linvit_cli.run_arguments import add_keep_memory, set_allocator
from linvit_cli.streams import printable, show, show_rows

if TYPE_CHECKING:
    from linvit.bench.rows import Progress, Report

HELP = "Time operators, networks and training steps next to named peers."
EXAMPLES = ("linvit bench op rala --tokens 196 784", "linvit bench model ravlt_tiny --sizes 224 512")
WRONG = 1
CLEARED, WIDEST, SECONDS_APART = "\r\x1b[K", 79, 10


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit bench KIND [NAME ...] [options]"
    command.description = f"{HELP}\n\nkinds:\n{listing({name: text for name, (_, text, _) in KINDS.items()})}"
    kinds = command.add_subparsers(
        dest="kind", required=True, metavar="KIND", prog="linvit bench", help=argparse.SUPPRESS
    )
    for name, (add, text, shown) in KINDS.items():
        # the defaults are in each kind's Options, in linvit.bench
        kind = kinds.add_parser(name, description=text, epilog=examples(*shown), argument_default=argparse.SUPPRESS)
        kind.usage = f"linvit bench {name} [NAME ...] [options]"
        add(kind)
        add_output(kind)


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

    from linvit.bench import kinds, page

    table = page.cells(report)
    show_rows(table, left=page.words(table), box=box.MARKDOWN)
    for sentence in page.sentences(report):
        show(sentence)
    if options.output is not None:
        kinds.save(report, options.output)
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


def add_output(kind: argparse.ArgumentParser) -> None:
    output = kind.add_argument_group("output")
    text = "folder for bench.json and the figures (default: none)"
    output.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    output.add_argument(
        "--json", action="store_true", help="also print everything as one JSON object, on the last line"
    )
    add_keep_memory(kind.add_argument_group("other"))
    kind.set_defaults(keep_memory=False, json=False, output=None)


def _add_measuring(kind: argparse.ArgumentParser, rounds: int) -> None:
    group = kind.add_argument_group("how to measure")
    text = "cuda is timed by GPU events and CUDA graphs (default: cpu)"
    group.add_argument("--device", choices=("cpu", "cuda"), help=text)
    text = "threads of torch: one is timed in CPU time, more in wall time (default: 1)"
    group.add_argument("--threads", metavar="N", type=whole, help=text)
    text = f"rounds; in each, every variant is timed once (default: {rounds})"
    group.add_argument("--rounds", metavar="N", type=whole, help=text)
    text = "time budget per size; at least three rounds are always made (default: none)"
    group.add_argument("--seconds", metavar="S", type=number, help=text)
    group.add_argument("--seed", metavar="N", type=whole, help="seed of inputs and weights (default: 0)")
    group.add_argument("--memory", action="store_true", help="also measure the peak memory of each variant")


def _add_op(kind: argparse.ArgumentParser) -> None:
    what = kind.add_argument_group("what to measure")
    text = "mechanisms of `linvit models` (default: rala mala linear)"
    what.add_argument("operators", metavar="OPERATOR", nargs="*", help=text)
    text = "plain, compiled, cpp, triton, reference (the released order), sdpa (default: plain reference sdpa)"
    what.add_argument("--variants", nargs="+", metavar="VARIANT", help=text)
    text = "float32, bfloat16, float16 (default: float32)"
    what.add_argument("--dtypes", nargs="+", metavar="DTYPE", help=text)
    text = "numbers of tokens (default: 49 196 784 3136 12544 50176)"
    what.add_argument("--tokens", nargs="+", type=whole, metavar="N", help=text)
    what.add_argument("--batch", metavar="N", type=whole, help="batch size (default: 1)")
    what.add_argument("--heads", metavar="N", type=whole, help="number of heads (default: 4)")
    what.add_argument("--width", metavar="N", type=whole, help="channels per head (default: 64)")
    what.add_argument("--backward", action="store_true", help="time forward and backward pass together")
    text = "order of the inputs in memory: heads, tokens or map, or own: the best for each variant (default: heads)"
    what.add_argument("--layout", metavar="LAYOUT", help=text)
    text = "largest number of tokens for softmax attention (default: 12544)"
    what.add_argument("--sdpa-tokens", type=whole, metavar="N", help=text)
    _add_measuring(kind, rounds=9)


def _add_model(kind: argparse.ArgumentParser) -> None:
    what = kind.add_argument_group("what to measure")
    text = "networks of `linvit models` (default: ravlt_tiny mavit_tiny care_s0)"
    what.add_argument("names", metavar="NETWORK", nargs="*", help=text)
    text = "such as fused+bf16; docs/evidence/benchmarks.md lists the parts (default: plain reference fused)"
    what.add_argument("--variants", nargs="+", metavar="VARIANT", help=text)
    text = "networks of timm to compare with (default: six, from swin_tiny to mobilenetv4; none: --peers without names)"
    what.add_argument("--peers", nargs="*", metavar="NETWORK", help=text)
    text = "variants of the peers (default: plain fused)"
    what.add_argument("--peer-variants", nargs="+", metavar="VARIANT", help=text)
    _add_sizes(what, "sides, or HEIGHTxWIDTH such as 1024x2048, in pixels (default: 224)")
    _add_measuring(kind, rounds=7)


def _add_sizes(group: argparse._ArgumentGroup, text: str) -> None:
    group.add_argument("--sizes", nargs="+", type=image_size, metavar="SIZE", help=text)
    group.add_argument("--batch", dest="batches", nargs="+", type=whole, metavar="N", help="batch sizes (default: 1)")


def _add_train(kind: argparse.ArgumentParser) -> None:
    what = kind.add_argument_group("what to measure")
    text = "networks of `linvit models` (default: ravlt_tiny mavit_tiny care_s0)"
    what.add_argument("names", metavar="NETWORK", nargs="*", help=text)
    text = "such as channels_last+bf16 (default: plain reference channels_last bf16 checkpointing)"
    what.add_argument("--variants", nargs="+", metavar="VARIANT", help=text)
    text = "side, or HEIGHTxWIDTH, in pixels (default: 224)"
    what.add_argument("--size", type=image_size, metavar="SIZE", help=text)
    what.add_argument("--batch", type=whole, metavar="N", help="batch size, 2 or more (default: 4)")
    text = "also compare the loss curves of this many steps (default: 0, off)"
    what.add_argument("--curves", dest="curve_steps", type=whole, metavar="STEPS", help=text)
    text = "side of the images of the loss curves, in pixels (default: 64)"
    what.add_argument("--curve-size", type=image_size, metavar="SIZE", help=text)
    _add_measuring(kind, rounds=3)


KINDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, tuple[str, ...]]] = {
    "op": (
        _add_op,
        "Time the attention operator against softmax attention.",
        ("linvit bench op rala --tokens 196 784 --memory",),
    ),
    "model": (
        _add_model,
        "Time whole networks next to networks of timm.",
        ("linvit bench model ravlt_tiny --variants plain fused --peers convnext_tiny --batch 1 8",),
    ),
    "train": (
        _add_train,
        "Time training steps, and compare loss curves.",
        ("linvit bench train care_s0 --variants plain bf16 --curves 50",),
    ),
}
