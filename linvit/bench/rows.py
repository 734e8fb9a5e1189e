"""Rows of a benchmark: how each is checked and timed, and the growth and crossovers computed from them."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from linvit.bench.clock import Call, Timing, clock_for, interleave
from linvit.bench.exactness import check
from linvit.bench.options import Options
from linvit.files import reason_of


@dataclass
class Row:
    """One variant at one size.

    name: operator or network; pattern: of a network of ours. variant: how it is computed. work: forward,
    forward_backward or step. clock: cpu (of the process), wall or gpu. median_ms, spread_ms (interquartile range): of
    one call. ratio: how many times as fast as the plain eager float32 row named in base. against: the same against
    other rows of the run. error: relative L2 error of the check; errors: of other arrangements. peak_mib: memory above
    inputs and weights; of an exported file, with its weights. file_mib: its size. skipped: why nothing was measured.
    """

    name: str
    variant: str
    dtype: str
    batch: int
    threads: int
    work: str = "forward"
    tokens: int | None = None
    size: tuple[int, int] | None = None
    pattern: str | None = None
    clock: str | None = None
    rounds: int = 0
    median_ms: float | None = None
    spread_ms: float | None = None
    base: str | None = None
    ratio: float | None = None
    against: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    peak_mib: float | None = None
    file_mib: float | None = None
    skipped: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant} {self.dtype}"

    @property
    def extent(self) -> int:
        """Tokens, or pixels."""
        return self.tokens if self.tokens is not None else math.prod(self.size or (0, 0))


@dataclass
class Report:
    """Rows in the order of measurement, and findings; filled during the measurement."""

    kind: str
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    findings: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Progress:
    """Shows nothing; subclasses do."""

    def group(self, name: str, rounds: int) -> None:
        """A new group of cases is measured, in this many rounds."""

    def say(self, sentence: str) -> None:
        """The current step, in words."""

    def advance(self) -> None:
        """A round is finished."""


@dataclass(frozen=True)
class Trial:
    """One call of a group, before it is measured.

    row: what it fills, with a reason in `skipped` if there is nothing to measure. label: its name, unique in the group.
    make: makes the call. expected: what the call must return, within `tolerance`; None if that was checked elsewhere.
    results: what a call returns, for the check. excused: the errors of make and check that the row keeps as the reason
    why it has no speed; others end the benchmark. peak: the peak memory of the call in MiB. base: the label with ratio
    1. rivals: the labels of its rivals, by name.
    """

    row: Row
    label: str
    make: Callable[[], Any] = lambda: None
    expected: Callable[[], Sequence[Tensor]] | None = None
    tolerance: float = 0.0
    results: Callable[[Any], Sequence[Tensor]] = lambda call: call()
    excused: tuple[type[Exception], ...] = (ValueError, ImportError)
    peak: Callable[[Call], float | None] = lambda call: None
    base: str = ""
    rivals: Mapping[str, str] = field(default_factory=dict)


Groups = Iterable[tuple[str, Iterable[Trial]]]
"""Heading and trials of each group; the trials may be made one after another."""


def measure_groups(groups: Groups, options: Options, report: Report, progress: Progress, graphs: bool = True) -> None:
    """Checks, then times every trial, group by group, into report; what was measured stays if it is interrupted.

    graphs: whether calls on a GPU are replayed from CUDA graphs.

    Raises WrongResultError, before anything of that group is timed, if a result is wrong.
    """
    for heading, trials in groups:
        progress.group(heading, options.rounds)
        checked: list[tuple[Trial, Call]] = []
        for trial in trials:
            report.rows.append(trial.row)
            if trial.row.skipped is not None:
                continue
            progress.say(f"checking {trial.label}")
            try:
                call = trial.make()
                if trial.expected is not None:
                    trial.row.error = check(trial.label, trial.results(call), trial.expected(), trial.tolerance)
            except trial.excused as error:
                trial.row.skipped = reason_of(error)
                continue
            if options.memory:
                progress.say(f"memory of {trial.label}")
                trial.row.peak_mib = trial.peak(call)
            checked.append((trial, call))
        progress.say("timing")
        timings: dict[str, Timing] = {}
        clock = clock_for(options.device, options.threads, graphs)
        named = {trial.label: call for trial, call in checked}
        try:
            interleave(named, clock, options.rounds, timings, progress.advance, options.seconds or math.inf)
        finally:  # if interrupted, the complete rounds so far
            for trial, _ in checked:
                fill(trial, timings, clock.name)


def fill(trial: Trial, timings: Mapping[str, Timing], clock: str) -> None:
    """Writes the timing of a trial into its row, if there is one; all labels are keys of timings."""
    if trial.label not in timings:
        return
    row, timing = trial.row, timings[trial.label]
    row.clock, row.rounds = clock, len(timing.seconds)
    row.median_ms, row.spread_ms = timing.median_ms, timing.spread_ms
    if trial.base in timings:
        row.base, row.ratio = f"{row.name} plain float32", timing.ratio_to(timings[trial.base])
    for name, rival in trial.rivals.items():
        if rival != trial.label and rival in timings:
            row.against[name] = timing.ratio_to(timings[rival])


def measured(rows: Sequence[Row]) -> list[Row]:
    """The rows that have a time."""
    return [row for row in rows if row.median_ms is not None]


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Measured rows that differ in nothing but their extent, by label, smallest first."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(measured(rows), key=lambda row: row.extent):
        work = "" if row.work == "forward" else f", {row.work.replace('_', ' + ')}"
        batch = "" if row.batch == 1 else f", batch {row.batch}"
        lines.setdefault(f"{row.label}{work}{batch}", []).append(row)
    return lines


def growth(rows: Sequence[Row], least_extent: int = 0, quantity: str = "median_ms") -> dict[str, float]:
    """The exponent of every curve that has one, by label."""
    exponents = {name: exponent(line, least_extent, quantity) for name, line in curves(rows).items()}
    return {name: value for name, value in exponents.items() if value is not None}


def exponent(rows: Sequence[Row], least_extent: int = 0, quantity: str = "median_ms") -> float | None:
    """The power of the extent with which time, or memory, grows; None for one extent.

    It is fitted by least squares to the logarithms.
    """
    values = [(row.extent, getattr(row, quantity)) for row in measured(rows) if row.extent >= least_extent]
    points = [(math.log(extent), math.log(value)) for extent, value in values if value]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def crossover(ours: Sequence[Row], other: Sequence[Row]) -> float | None:
    """The extent from which on the first is the faster of two curves, on straight lines between the logarithms.

    0 if it is faster at every common extent, None if it is slower at the last one, or nothing is common.
    """
    times = {row.extent: row.median_ms for row in other if row.median_ms}
    gaps = [
        (math.log(row.extent), math.log(row.median_ms / times[row.extent]))
        for row in sorted(ours, key=lambda row: row.extent)
        if row.median_ms and row.extent in times
    ]
    if not gaps or gaps[-1][1] > 0:
        return None
    slower = [index for index, (_, gap) in enumerate(gaps) if gap > 0]
    if not slower:
        return 0.0
    (x0, gap0), (x1, gap1) = gaps[slower[-1] : slower[-1] + 2]
    return math.exp(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
