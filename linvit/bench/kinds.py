"""The kinds of benchmarks by name, and what measures one from beginning to end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from linvit.bench import inference, machine, operators, training
from linvit.bench.clock import exact_float32
from linvit.bench.options import NetworkOptions, OperatorOptions, Options, TrainingOptions
from linvit.bench.rows import Progress, Report
from linvit.environment import using_threads
from linvit.ranges import check_names, lookup


@dataclass(frozen=True)
class Kind:
    """options: its settings. measure: fills a report. check: raises ValueError for names in the options that do not
    exist."""

    options: type[Options]
    measure: Callable[[Any, Report, Progress], None]
    check: Callable[[Any], None] = lambda options: None


KINDS = {
    "op": Kind(OperatorOptions, operators.measure, operators.check_options),
    "model": Kind(NetworkOptions, inference.measure, inference.check_options),
    "train": Kind(TrainingOptions, training.measure, training.check_options),
}


def options_of(kind: str, values: Mapping[str, Any]) -> Options:
    """The options of a kind, from the values that are fields of it; ValueError for values that are not allowed."""
    names = {field.name for field in fields(KINDS[kind].options)}
    options = KINDS[kind].options(**{name: value for name, value in values.items() if name in names})
    KINDS[kind].check(options)
    return options


def new_report(kind: str, options: Options, keeps_memory: bool = False) -> Report:
    """An empty report with a description of the machine; raises as `machine.check_device`."""
    machine.check_device(options.device, options.least_bytes())
    return Report(kind, machine.describe(options.device, options.threads) | {"keeps_memory": keeps_memory})


def measure(kind: str, progress: Progress | None = None, **options: Any) -> Report:
    """Measures and returns a report, with `.rows`, `.findings` and `.as_dict()`.

    Args:
        kind: a name in KINDS.
        progress: its methods are called at each step; None shows nothing.
        options: fields of the kind's options.

    Raises ValueError for options that do not exist, WrongResultError if something computes a wrong result.
    """
    check_names("option", options, [field.name for field in fields(lookup("kind", kind, KINDS).options)])
    chosen = options_of(kind, options)
    report = new_report(kind, chosen)
    fill(report, chosen, progress or Progress())
    return report


def fill(report: Report, options: Options, progress: Progress) -> None:
    """Fills a report with measurements; if interrupted, it contains those so far. Raises as `measure`."""
    with using_threads(options.threads), exact_float32():
        KINDS[report.kind].measure(options, report, progress)
