"""The measures of a task: heading, unit and direction of each, declared in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AVERAGED = "ema_"  # before the name of a measure of the moving average


@dataclass(frozen=True)
class Measure:
    """A number about a network.

    heading: in tables, curves and lines. unit: "share", 0..1 and shown in percent; "number"; or "count". panel: the
    axis of the training curves that it is drawn on; None for none.
    """

    heading: str
    unit: Literal["share", "number", "count"] = "share"
    lower_is_better: bool = False
    panel: str | None = None

    @property
    def factor(self) -> int:
        """The factor by which shown values are multiplied."""
        return 100 if self.unit == "share" else 1

    @property
    def digits(self) -> int:
        """Decimal places of an estimate over seeds."""
        return {"share": 2, "number": 3, "count": 0}[self.unit]

    @property
    def label(self) -> str:
        """The heading with its unit, for axes and columns of plain numbers."""
        return f"{self.heading}, %" if self.unit == "share" else self.heading

    def cell(self, value: float) -> str:
        """A value as shown in tables and lines."""
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{100 * value:.2f} %" if self.unit == "share" else f"{value:.4f}"


Measured = Mapping[str, Measure]
LOSS = {"loss": Measure("loss", "number", lower_is_better=True, panel="loss")}


def counted(name: str) -> dict[str, Measure]:
    """The measure that counts the samples."""
    return {name: Measure(name, "count")}


def column(name: str) -> str:
    """The column of a measure in metrics.csv: its name, but val_loss for the loss."""
    return "val_loss" if name == "loss" else name


def line(row: Mapping[str, float], epochs: int | None, headline: tuple[str, ...], measures: Measured) -> str:
    """`epoch 2/30: train loss 0.1234, val top-1 91.24 % (moving average 91.50 %), 2.1 s` of a row of metrics.csv."""
    shown = [f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f}"]
    for name in headline:
        raw, average = (measures[name].cell(row[key]) if key in row else None for key in (name, AVERAGED + name))
        if raw or average:
            both = f"{raw} (moving average {average})" if raw and average else raw or f"{average} (moving average)"
            shown.append(f"val {measures[name].heading} {both}")
    return ", ".join([*shown, f"{row['seconds']:.1f} s"])
