"""`linvit bench op | model | train`: speeds and memory in tables, JSON and pictures, after a check of every result."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linvit.bench import inference, machine, operators, training
from linvit.bench.checks import WrongResultError
from linvit.bench.progress import Progress
from linvit.bench.rows import Report
from linvit.cli.bench_page import check_page, show, write_page
from linvit.environment import commit
from linvit.files import check_writable, replacing, write_json
from linvit.models.published import PUBLISHED

WRONG, STOPPED = 1, 130
CLEARED, WIDEST = "\r\x1b[K", 79


def run(options: argparse.Namespace) -> int:
    """Measures, shows what was measured (interrupted: so far), and returns the exit code; a wrong variant gives 1."""
    measure, chosen = KINDS[options.kind](options)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"--device is {options.device!r}, but torch sees no GPU here: leave it out to measure the CPU."
        )
    if options.output is not None:
        check_writable(options.output)
    if options.write is not None:
        if options.output is None:
            raise ValueError("--write needs --output, whose name is that of the part of the page: give both")
        check_page(options.write, options.output)
    about = {**machine.describe(options.device, options.threads), "commit": commit()}
    report = Report(options.kind, about | {"keeps_memory": options.keep_memory})
    say(machine.sentence(report.machine))
    status, shown = 0, Shown()
    with threads(options.threads):
        try:
            measure(chosen, report, shown)
        except WrongResultError as error:
            print(f"linvit: {error}.", file=sys.stderr)
            return WRONG
        except KeyboardInterrupt:
            say("Stopped: what follows was measured before.")
            status = STOPPED
        finally:
            shown.clear()
    finish(report, options)
    return status


def finish(report: Report, options: argparse.Namespace) -> None:
    """Table on stdout, with --json a last line, with --output files."""
    show(report)
    if options.output is not None:
        from linvit.bench.figures import figures

        write_json(options.output / "bench.json", report.as_dict(), indent=1)
        for name, figure in figures(report, accuracies(report)):
            with replacing(options.output / name) as temporary:
                figure.savefig(temporary, format="svg")
        say(f"{options.output} holds bench.json and the plots.")
        if options.write is not None:
            write_page(report, options.write, options.output)
    if options.json:
        print(json.dumps(report.as_dict()))


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads in torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Shown(Progress):
    """One line a group on stderr; on a terminal a last line that says what is done at the moment.

    It is written by no thread of its own, whose time would count as that of the calls.
    """

    def __init__(self) -> None:
        self.start, self.name, self.rounds, self.done = time.monotonic(), "", 0, 0

    def group(self, name: str, rounds: int) -> None:
        self.name, self.rounds, self.done = name, rounds, 0
        self.clear()
        say(f"{time.monotonic() - self.start:5.0f} s  {name}")

    def say(self, sentence: str) -> None:
        if sys.stderr.isatty():
            print(f"{CLEARED}{sentence[:WIDEST]}", end="", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.done += 1
        self.say(f"{self.name}: round {self.done} of {self.rounds}")

    def clear(self) -> None:
        """Takes the last line away."""
        if sys.stderr.isatty():
            print(CLEARED, end="", file=sys.stderr, flush=True)


def accuracies(report: Report) -> dict[str, tuple[float, str]]:
    """Published top-1 and its source of every network in the report that has one."""
    names = dict.fromkeys(row.name for row in report.rows)
    ours = {name: (PUBLISHED[name].top1, PUBLISHED[name].source) for name in names if name in PUBLISHED}
    return {**inference.published(list(names)), **ours} if report.kind == "model" else {}


def _op(options: argparse.Namespace) -> tuple[Callable[..., None], Any]:
    chosen = operators.Options(
        operators=options.names or operators.Options.operators,
        variants=options.variants or operators.Options.variants,
        dtypes=options.dtypes,
        tokens=options.tokens,
        batch=options.batch,
        heads=options.heads,
        width=options.width,
        backward=options.backward,
        layout=options.layout,
        sdpa_tokens=options.sdpa_tokens,
        **_common(options, operators.Options),
    )
    return operators.measure, chosen


def _model(options: argparse.Namespace) -> tuple[Callable[..., None], Any]:
    chosen = inference.Options(
        names=options.names or inference.OURS,
        variants=options.variants or inference.Options.variants,
        peers=inference.PEERS if options.peers is None else options.peers,
        peer_variants=options.peer_variants,
        sizes=options.sizes,
        batches=options.batch,
        **_common(options, inference.Options),
    )
    return inference.measure, chosen


def _train(options: argparse.Namespace) -> tuple[Callable[..., None], Any]:
    chosen = training.Options(
        names=options.names or training.Options.names,
        variants=options.variants or training.Options.variants,
        size=options.size,
        batch=options.batch,
        curve_steps=options.curves,
        curve_size=options.curve_size,
        **_common(options, training.Options),
    )
    return training.measure, chosen


def _common(options: argparse.Namespace, defaults: Any) -> dict[str, Any]:
    return {
        "device": options.device,
        "threads": options.threads,
        "rounds": options.rounds or defaults.rounds,
        "seconds": options.seconds,
        "memory": options.memory,
        "seed": options.seed,
    }


KINDS = {"op": _op, "model": _model, "train": _train}
