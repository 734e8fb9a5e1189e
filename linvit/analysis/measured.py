"""Measurements of a network's attention layers over many images, in the same table for every analysis."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linvit.analysis.probe import Inputs, Probe, visit
from linvit.arguments import check_dense, check_floating, kind
from linvit.errors import SettingError

Condition = tuple[tuple[str, object], ...]
Values = Iterable[tuple[Mapping[str, object], Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Layer:
    """The description of an attention layer in the tables; `width` is that of a head."""

    name: str
    mechanism: str
    grid: tuple[int, int]
    num_prefix: int
    heads: int
    width: int
    rotated: bool

    @classmethod
    def of(cls, probe: Probe) -> "Layer":
        """The layer that a probe was taken from."""
        value = probe.outputs()
        return cls(
            name=probe.name,
            mechanism=probe.mechanism,
            grid=probe.grid,
            num_prefix=probe.num_prefix,
            heads=value.shape[1],
            width=value.shape[-1],
            rotated=probe.operands.rotary is not None,
        )


@dataclass(frozen=True)
class Measured:
    """The measurements of one layer under one condition.

    condition: what was measured, such as {"matrix": "state"}. values: a measure's name → (images, heads), or
    (images, heads, points) for a curve.
    """

    layer: Layer
    condition: Mapping[str, object]
    values: Mapping[str, Tensor]

    def mean(self, measure: str) -> Tensor:
        """Mean over images and heads: a number, or a curve."""
        return self.values[measure].double().mean((0, 1))

    def deviation(self, measure: str) -> Tensor:
        """Standard deviation over images and heads, 0 if there is only one value."""
        return self.values[measure].double().flatten(0, 1).std(0, correction=0)


class Gathered:
    """Collects measurements of the same layers batch by batch."""

    def __init__(self) -> None:
        self._layers: dict[str, Layer] = {}
        self._batches: dict[str, dict[Condition, list[Mapping[str, Tensor]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, layer: Layer, condition: Mapping[str, object], values: Mapping[str, Tensor]) -> None:
        """Add the values (images, heads, …) of more images."""
        self._layers.setdefault(layer.name, layer)
        self._batches[layer.name][tuple(condition.items())].append({name: x.cpu() for name, x in values.items()})

    def result(self) -> list[Measured]:
        """An entry for each layer and condition, layers in the network's order, conditions in order of arrival."""
        return [
            Measured(
                self._layers[name],
                dict(condition),
                {measure: torch.cat([values[measure] for values in batches]) for measure in batches[0]},
            )
            for name, conditions in self._batches.items()
            for condition, batches in conditions.items()
        ]


def gather(
    network: nn.Module, batches: Iterable[Inputs], layers: Sequence[str] | None, measure: Callable[[Probe], Values]
) -> list[Measured]:
    """The results of `measure` for every attention over more than one token, concatenated over the batches.

    measure: called with each Probe; returns conditions and values, (images, heads, …). Others: see `measure_ranks`.
    """
    if isinstance(batches, Tensor | str | dict) or not isinstance(batches, Iterable):
        raise TypeError(f"`batches` is {kind(batches)}, expected an iterable of inputs: put one batch into a list")
    gathered = Gathered()

    def look(probe: Probe) -> None:
        if probe.grid != (1, 1):
            for condition, values in measure(probe):
                gathered.add(Layer.of(probe), condition, values)

    for inputs in batches:
        visit(network, inputs, look, layers)
    return gathered.result()


def rows(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """A row for each layer, condition, head and measure that is a number: mean and deviation over the images."""
    table = []
    for entry in measured:
        layer = entry.layer
        for measure, values in entry.values.items():
            if values.dim() > 2:
                continue
            means, deviations = values.double().mean(0).tolist(), values.double().std(0, correction=0).tolist()
            for head, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
                table.append(
                    {
                        "layer": layer.name,
                        "mechanism": layer.mechanism,
                        **entry.condition,
                        "head": head,
                        "measure": measure,
                        "mean": mean,
                        "deviation": deviation,
                        "images": len(values),
                    }
                )
    return table


def check_matrix(name: str, matrix: Tensor, axes: int = 2) -> None:
    """Raises unless it is a dense floating-point tensor with at least this many axes."""
    check_dense(name, matrix)
    check_floating(name, matrix.dtype)
    if matrix.ndim < axes or 0 in matrix.shape[-axes:]:
        raise SettingError(f"`{name}` has shape {tuple(matrix.shape)}, expected {axes} or more axes, none of length 0")


def select(measured: Sequence[Measured], **condition: object) -> list[Measured]:
    """The entries whose condition has these values."""
    return [entry for entry in measured if all(entry.condition.get(key) == value for key, value in condition.items())]
