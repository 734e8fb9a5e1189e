"""Measured rows, and the growth and crossovers computed from them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


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
