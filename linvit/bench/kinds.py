"""The kinds of benchmarks by name: each is a module with `Options` and `measure(options, report, progress)`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from linvit.bench import inference, machine, memory, operators, training
from linvit.bench.clock import exact_float32, using_threads
from linvit.bench.rows import Options, Progress, Report
from linvit.environment import commit
from linvit.files import write_json
from linvit.ranges import check_names, known

KINDS: dict[str, Any] = {"op": operators, "model": inference, "train": training}


def options_of(kind: str, given: Mapping[str, Any]) -> Options:
    """The Options of a kind, from the given values that are fields of it.

    Raises ValueError for values that are not allowed.
    """
    names = {field.name for field in fields(KINDS[kind].Options)}
    options: Options = KINDS[kind].Options(**{name: value for name, value in given.items() if name in names})
    return options


def new_report(kind: str, options: Options, keeps_memory: bool = False) -> Report:
    """An empty report with a description of the machine.

    Raises ValueError for a missing device, and for sizes that do not fit into its memory.
    """
    machine.check_device(options.device)
    memory.check_fits(options.least_bytes(), options.device)
    about = {**machine.describe(options.device, options.threads), "commit": commit()}
    return Report(kind, about | {"keeps_memory": keeps_memory})


def measure(kind: str, progress: Progress | None = None, **options: Any) -> Report:
    """Measures and returns a report, with `.rows`, `.findings` and `.as_dict()`.

    Args:
        kind: a name in KINDS.
        progress: its methods are called at each step; None shows nothing.
        options: fields of the kind's Options.

    Raises ValueError for options that are not known, WrongResultError if something computes a wrong result.
    """
    kind_options = known("kind", kind, KINDS).Options
    check_names("option", options, [field.name for field in fields(kind_options)])
    chosen = kind_options(**options)
    report = new_report(kind, chosen)
    fill(report, chosen, progress or Progress())
    return report


def fill(report: Report, options: Options, progress: Progress) -> None:
    """Fills a report with measurements; if interrupted, it contains those so far. Raises as `measure`."""
    with using_threads(options.threads), exact_float32():
        KINDS[report.kind].measure(options, report, progress)


def save(report: Report, folder: Path) -> None:
    """Writes bench.json, report.html and the figures, each whole or not at all."""
    from linvit.analysis.figures import write_figure  # matplotlib, which measuring does not need
    from linvit.bench.figures import figures, write_report

    write_json(folder / "bench.json", report.as_dict(), indent=1)
    drawn = dict(figures(report))
    write_report(report, drawn, folder / "report.html")
    for name, figure in drawn.items():
        write_figure(figure, folder / name)
