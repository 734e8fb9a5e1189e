"""The part of a map that is in memory: some rows of it, and what a layer must know of all others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from linvit.layers.operator import Operator
from linvit.ops.shard import joined_means
from linvit.ops.state import State, joined

Total = tuple[Tensor, Tensor] | State


@dataclass(frozen=True)
class Rows:
    """Rows of a map: those that are computed, and those around them that the layers read as well.

    start, stop: the rows that are computed. first, last: the first row that is read, and the one after the last.
    """

    start: int
    stop: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def of_output(self, stride: int, height: int, end: bool) -> tuple[int, slice]:
        """Of a layer's output, which is `height` rows high in all: the first row, and its place in the strip's output.

        end: whether the rows reach the last row of the input.
        """
        start, first = self.start // stride, self.first // stride
        stop = height if end else self.stop // stride
        return start, slice(start - first, stop - first)


def cut(height: int, rows: int, reach: int, stride: int = 1) -> list[Rows]:
    """Strips of `rows` rows, of which layers read `reach` rows more above and below; all start at multiples of stride.

    The last strip also has the rows beyond the last multiple.
    """
    rows, reach = (-(-number // stride) * stride for number in (rows, reach))
    starts = range(0, max(height // stride, 1) * stride, rows)
    stops = [*starts[1:], height]
    return [
        Rows(start, stop, max(start - reach, 0), min(stop + reach, height))
        for start, stop in zip(starts, stops, strict=True)
    ]


class Pending(Exception):  # noqa: N818 - not an error: the strip's contribution to a total that is not known yet
    """Ends the computation of a strip at the first total that is not known; holds what the strip adds to it."""

    def __init__(self, adds: Total) -> None:
        super().__init__()
        self.adds = adds


class Strip:
    """The shard of attention (see `linvit.ops.shard`) that the tokens of some rows are.

    totals: means and states of all rows that are known, in the order in which the layers ask for them. whole: whether
    there are no other rows.
    """

    def __init__(self, rows: Rows, totals: Sequence[Total], whole: bool) -> None:
        self.rows, self._totals, self._whole = rows, iter(totals), whole

    def visible(self, tokens: int) -> Tensor | None:
        """The tokens of the rows that are computed; the others count in other strips."""
        if (self.rows.start, self.rows.stop) == (self.rows.first, self.rows.last):
            return None
        number = torch.arange(tokens) // (tokens // len(self.rows)) + self.rows.first
        return (number >= self.rows.start) & (number < self.rows.stop)

    def mean(self, mean: Tensor, count: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self._total((mean, count)))

    def state(self, state: State, *, before: bool) -> State:
        return cast(State, self._total(state))

    def _total(self, adds: Total) -> Total:
        if self._whole:
            return adds
        known = next(self._totals, None)
        if known is None:
            raise Pending(adds)
        return known


def together(first: Total, second: Total) -> Total:
    """The total of two groups of tokens."""
    if isinstance(first, State) and isinstance(second, State):
        return joined(first, second)
    means, counts = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return joined_means(means, counts), counts.sum(0)


@contextmanager
def attending(layer: nn.Module, strip: Strip) -> Iterator[None]:
    """Lets the attention of a layer have only the tokens of a strip."""
    operators = [module for module in layer.modules() if isinstance(module, Operator)]
    try:
        for operator in operators:
            operator.shard = strip
        yield
    finally:
        for operator in operators:
            operator.shard = None
