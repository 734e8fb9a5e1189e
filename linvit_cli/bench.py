"""`linvit bench`: speeds, memory and errors as a table, JSON and figures, after a check of every result."""

import argparse
import json
import sys
import time
from pathlib import Path

from linvit_cli.failures import STOPPED, say
from linvit_cli.run_arguments import add_keep_memory, set_allocator
from linvit_cli.tables import show_rows

HELP = "Time operators, networks and training steps next to named peers, after a check of every result."
WRONG = 1
CLEARED, WIDEST = "\r\x1b[K", 79


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = f"linvit bench ({' | '.join(KINDS)}) [NAME ...] [options]; linvit bench op --help lists them"
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND", prog="linvit bench")
    for name, (add, text) in KINDS.items():
        # an argument that is not given keeps the default of the kind's Options, which stand in linvit.bench
        kind = kinds.add_parser(
            name, help=text, description=text, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        add(kind)
        _add_output(kind)
        flags = {action.dest: action.option_strings[-1] for action in kind._actions if action.option_strings}
        kind.set_defaults(flags=flags, settings=tuple(action.dest for action in kind._actions))


def run(options: argparse.Namespace) -> int:
    """Measures, shows what was measured (interrupted: so far), and returns the exit code; a wrong variant gives 1."""
    from linvit.bench import kinds, machine
    from linvit.bench.checks import WrongResultError
    from linvit.bench.page import check_page
    from linvit.files import check_writable

    set_allocator(options)
    given = {name: getattr(options, name) for name in options.settings if name in options and name not in OUTPUTS}
    chosen = kinds.KINDS[options.kind].Options(**given)
    report = kinds.new_report(options.kind, chosen, options.keep_memory)
    if options.output is not None:
        check_writable(options.output)
    if options.write is not None:
        if options.output is None:
            raise ValueError("--write needs --output, whose name is that of the place in the page: give both.")
        check_page(options.write, options.output)
    say(machine.sentence(report.machine), 0)
    status, shown = 0, Shown()
    try:
        kinds.fill(report, chosen, shown)
    except WrongResultError as error:
        return say(f"linvit: {error}.", WRONG)
    except KeyboardInterrupt:
        status = say("Stopped: what follows was measured before.", STOPPED)
    finally:
        shown.clear()
    finish(report, options)
    return status


def finish(report, options: argparse.Namespace) -> None:
    """Table on stdout, with --json a last line, with --output files."""
    from rich import box

    from linvit.bench import kinds, page

    show_rows(page.cells(report), left=page.words(report), box=box.MARKDOWN)
    for sentence in page.sentences(report):
        print(sentence)
    if options.output is not None:
        kinds.save(report, options.output)
        say(f"{options.output} holds bench.json and the figures.", 0)
        if options.write is not None:
            page.write_page(report, options.write, options.output)
    if options.json:
        print(json.dumps(report.as_dict()))


class Shown:
    """One line per group on stderr; on a terminal a last line that says what is done at the moment.

    It is written by no thread of its own, whose time would count as that of the calls.
    """

    def __init__(self) -> None:
        self.start, self.name, self.rounds, self.round = time.monotonic(), "", 0, 0

    def group(self, name: str, rounds: int) -> None:
        self.name, self.rounds, self.round = name, rounds, 0
        self.clear()
        say(f"{time.monotonic() - self.start:5.0f} s  {name}", 0)

    def say(self, sentence: str) -> None:
        if sys.stderr.isatty():
            print(f"{CLEARED}{sentence[:WIDEST]}", end="", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.round += 1
        self.say(f"{self.name}: round {self.round} of {self.rounds}")

    def clear(self) -> None:
        """Takes the last line away."""
        self.say("")


OUTPUTS = ("help", "keep_memory", "json", "output", "write")


def _add_output(kind: argparse.ArgumentParser) -> None:
    add_keep_memory(kind)
    kind.add_argument("--json", action="store_true", help="print everything as one JSON object in a last line")
    kind.add_argument("--output", type=Path, metavar="FOLDER", help="where bench.json and the figures go")
    text = "put table and figures between the marks of --output's name in a .md file"
    kind.add_argument("--write", type=Path, metavar="FILE", help=text)
    kind.set_defaults(keep_memory=False, json=False, output=None, write=None)


def _add_common(kind: argparse.ArgumentParser, memory: bool = True) -> None:
    kind.add_argument("--device", choices=("cpu", "cuda"), help="cuda: events and CUDA graphs (cpu)")
    kind.add_argument("--threads", type=_positive, help="1 is timed in CPU time, more in wall time (1)")
    kind.add_argument("--rounds", type=_positive, help="how often every variant is timed, in turn")
    kind.add_argument("--seconds", type=float, help="time budget; at least three rounds are always made")
    kind.add_argument("--seed", type=int, help="of inputs and weights (0)")
    if memory:
        kind.add_argument("--memory", action="store_true", help="measure the peak memory of every variant too")


def _add_op(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("operators", metavar="OPERATOR", nargs="*", help="such as rala (rala mala linear)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="plain compiled cpp triton reference sdpa")
    kind.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="float32 bfloat16 float16 (float32)")
    kind.add_argument("--tokens", nargs="+", type=_positive, metavar="N", help="numbers of tokens (49 to 50,176)")
    kind.add_argument("--batch", type=_positive, help="(1)")
    kind.add_argument("--heads", type=_positive, help="(4)")
    kind.add_argument("--width", type=_positive, help="channels of a head (64)")
    kind.add_argument("--backward", action="store_true", help="time forward and backward together")
    text = "how inputs lie in memory: heads, tokens, map, or own: as each gets them (heads)"
    kind.add_argument("--layout", help=text)
    kind.add_argument("--sdpa-tokens", type=int, metavar="N", help="no softmax attention beyond so many (12544)")
    _add_common(kind)


def _add_model(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="NETWORK", nargs="*", help="ours (ravlt_tiny mavit_tiny care_s0)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="of ours, such as plain reference fused+bf16")
    kind.add_argument("--peers", nargs="*", metavar="NETWORK", help="of timm, measured beside (six of them)")
    kind.add_argument("--peer-variants", nargs="+", metavar="VARIANT", help="(plain fused)")
    _add_sizes(kind, "224 or 1024x2048 … (224)")
    _add_common(kind)


def _add_sizes(kind: argparse.ArgumentParser, text: str) -> None:
    kind.add_argument("--sizes", nargs="+", type=image_size, metavar="SIZE", help=text)
    kind.add_argument("--batch", dest="batches", nargs="+", type=_positive, metavar="N", help="one or several (1)")


def _add_train(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="NETWORK", nargs="*", help="(ravlt_tiny mavit_tiny care_s0)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="such as plain reference channels_last+bf16")
    kind.add_argument("--size", type=image_size, metavar="SIZE", help="224 or 1024x2048 … (224)")
    kind.add_argument("--batch", type=int, metavar="N", help="(4)")
    text = "compare loss curves of so many steps (0: none)"
    kind.add_argument("--curves", dest="curve_steps", type=int, metavar="STEPS", help=text)
    kind.add_argument("--curve-size", type=image_size, metavar="SIZE", help="of their images (64)")
    _add_common(kind)


def _add_decoding(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="MECHANISM", nargs="*", help="(softmax linear mala rala)")
    kind.add_argument("--network", metavar="NAME", help="from `linvit models --task language` (sequence_nano)")
    kind.add_argument("--contexts", nargs="+", type=_positive, metavar="N", help="tokens read before (1024 8192 65536)")
    _add_common(kind, memory=False)


def _add_sampling(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="MECHANISM", nargs="*", help="(softmax mala)")
    kind.add_argument("--network", metavar="NAME", help="from `linvit models --task diffusion` (dit_nano_patch2)")
    kind.add_argument("--sides", nargs="+", type=_positive, metavar="N", help="of the images, in pixels (16 to 256)")
    _add_common(kind)


def _add_memory(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="BACKBONE", nargs="*", help="(ravlt_tiny ravlt_tiny_linear)")
    kind.add_argument("--framework", metavar="NAME", help="semantic_fpn or upernet (semantic_fpn)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="such as plain fused+bf16 (plain)")
    _add_sizes(kind, "such as 512x2048 (four from 256x1024 to 768x3072)")
    _add_common(kind, memory=False)


def _add_precision(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="OPERATOR", nargs="*", help="(rala mala)")
    kind.add_argument("--tokens", nargs="+", type=_positive, metavar="N", help="numbers of tokens (196 to 50,176)")
    kind.add_argument("--seed", type=int, help="of the inputs (0)")


def image_size(text: str) -> tuple[int, int]:
    """224 or 1024x2048 (height × width) as (height, width)."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a side such as 224, or 1024x2048")
    return int(sides[0]), int(sides[-1])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: expected 1 or more")
    return int(text)


KINDS = {
    "op": (_add_op, "Time the operator over token counts, against softmax and the released order."),
    "model": (_add_model, "Time whole networks in every variant next to named peers."),
    "train": (_add_train, "Time training steps and compare their loss curves."),
    "decoding": (_add_decoding, "Time generating text token by token, and measure what a decoder keeps."),
    "sampling": (_add_sampling, "Time one step of generating an image as images grow."),
    "memory": (_add_memory, "Measure memory and time of a segmentor as images grow."),
    "precision": (_add_precision, "Measure the error of the operators in half precision."),
}
