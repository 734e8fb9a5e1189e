"""How every benchmark measures: each call of a group is checked, then all of them are timed in turn, into rows."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from linvit.bench.clock import Call, Timing, clock_for, interleave
from linvit.bench.exactness import check
from linvit.bench.options import Options
from linvit.bench.rows import Report, Row
from linvit.files import reason_of


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
        time_in_turn(list(_checked(trials, options, report, progress)), options, progress, graphs)


def _checked(
    trials: Iterable[Trial], options: Options, report: Report, progress: Progress
) -> Iterator[tuple[Trial, Call]]:
    """The trials whose call gives what is expected, with the call."""
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
        yield trial, call


def time_in_turn(
    calls: Sequence[tuple[Trial, Call]], options: Options, progress: Progress, graphs: bool = True
) -> None:
    """Times calls in turn into the rows of their trials; if interrupted, the complete rounds so far."""
    progress.say("timing")
    timings: dict[str, Timing] = {}
    clock = clock_for(options.device, options.threads, graphs)
    named = {trial.label: call for trial, call in calls}
    try:
        interleave(named, clock, options.rounds, timings, progress.advance, options.seconds or math.inf)
    finally:
        for trial, _ in calls:
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
