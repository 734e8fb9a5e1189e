"""`linvit bench op | model | train`: speeds and memory in tables, JSON and pictures, after a check of every result."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from linvit.bench import inference, machine, operators, training
from linvit.bench.checks import WrongResultError
from linvit.bench.progress import Progress
from linvit.bench.rows import Report, Row, measured
from linvit.cli.environment import commit
from linvit.cli.published import PUBLISHED
from linvit.cli.screen import show as show_table
from linvit.files import check_writable, replacing, write_json

WRONG, STOPPED = 1, 130


def run(options: argparse.Namespace) -> int:
    """Measures, shows what was measured (interrupted: so far), and returns the exit code; a wrong variant gives 1."""
    measure, chosen = KINDS[options.kind](options)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"--device is {options.device!r}, but torch sees no GPU here: leave it out to measure the CPU."
        )
    if options.output is not None:
        check_writable(options.output)
    report = Report(options.kind, {**machine.describe(options.device, options.threads), "commit": commit()})
    say(machine.sentence(report.machine))
    status = 0
    with threads(options.threads):
        try:
            measure(chosen, report, Shown())
        except WrongResultError as error:
            print(f"linvit: {error}.", file=sys.stderr)
            return WRONG
        except KeyboardInterrupt:
            say("Stopped: what follows was measured before.")
            status = STOPPED
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
    """One line a group on stderr; on a terminal its last line says what is done at the moment."""

    def __init__(self) -> None:
        self.start, self.name, self.rounds, self.done = time.monotonic(), "", 0, 0
        self.console = Console(stderr=True)
        self.live = self.console.status("") if self.console.is_terminal else None

    def group(self, name: str, rounds: int) -> None:
        self.name, self.rounds, self.done = name, rounds, 0
        say(f"{time.monotonic() - self.start:5.0f} s  {name}")

    def say(self, sentence: str) -> None:
        if self.live is not None:
            self.live.update(sentence)
            self.live.start()

    def advance(self) -> None:
        self.done += 1
        self.say(f"{self.name}: round {self.done} of {self.rounds}")
        if self.done == self.rounds and self.live is not None:
            self.live.stop()


def accuracies(report: Report) -> dict[str, tuple[float, str]]:
    """Published top-1 and its source of every network in the report that has one."""
    names = dict.fromkeys(row.name for row in report.rows)
    ours = {name: (PUBLISHED[name].top1, PUBLISHED[name].source) for name in names if name in PUBLISHED}
    return {**inference.published(list(names)), **ours} if report.kind == "model" else {}


def show(report: Report) -> None:
    """The rows as one table, then what follows from them."""
    op = report.kind == "op"
    table = Table(box=box.MARKDOWN)
    for heading in ("operator" if op else "network", *(() if op else ("pattern", "px")), "variant", "dtype"):
        table.add_column(heading)
    for heading in (*(("tokens",) if op else ()), "batch", "ms", "± IQR", "× plain", "× reference"):
        table.add_column(heading, justify="right")
    for heading in (*(("× sdpa",) if op else ()), "error", "peak MiB"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(*_cells(row, op))
    show_table(table)
    for sentence in sentences(report):
        print(sentence)


def _cells(row: Row, op: bool) -> list[str]:
    size = "–" if row.size is None else f"{row.size[0]} × {row.size[1]}"
    names = [row.name] if op else [row.name, row.pattern or "–", size]
    names += [row.variant, row.dtype, *([f"{row.tokens:,}"] if op else []), str(row.batch)]
    if row.skipped is not None:
        return [*names, f"– ({row.skipped})"]
    reference = row.against.get("reference", row.against.get(f"{row.name} reference"))
    ratios = [row.ratio, reference, *([row.against.get("sdpa")] if op else [])]
    return [
        *names,
        _number(row.median_ms),
        _number(row.spread_ms),
        *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "–" if row.error is None else f"{row.error:.0e}",
        "–" if row.peak_mib is None else _number(row.peak_mib),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sentences(report: Report) -> Iterator[str]:
    """What the table's columns are, growth, crossovers, and whether loss curves agree."""
    clocks = {row.clock for row in measured(report.rows)}
    for clock in sorted(filter(None, clocks)):
        yield f"ms: median over the rounds of {CLOCKS[clock]} a call; IQR: interquartile range; ×: times as fast as."
    what = "tokens" if report.kind == "op" else "pixels"
    for name, value in report.findings.get("growth", {}).items():
        yield f"{name} grows with {what}^{value:.2f}"
    for name, value in report.findings.get("crossover", {}).items():
        rival = "" if " against " in name else " against sdpa"
        yield f"{name}{rival}: faster {'at every size' if value == 0 else f'from about {value:,.0f} {what} on'}"
    for name, variants in report.findings.get("curves", {}).items():
        for variant, found in variants.items():
            words = "agrees" if found["agrees"] else "DOES NOT AGREE"
            yield (
                f"loss curve of {name} {variant}: {words} with plain, at most {found['deviation']:.1e} off in "
                f"{len(found['losses'])} steps (noise of its dtype: {found['noise']:.1e})"
            )


CLOCKS = {"cpu": "CPU time", "wall": "time on the wall", "gpu": "GPU time"}


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
