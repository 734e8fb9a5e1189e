"""Published numbers, read from published.yaml next to this file, the only place where they are written.

A citation names a row by source, table and row: "RALA, Table 9, w/o KV aug".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# A base loader keeps every number as the string that is written in the file, with all its digits; C's is faster.
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
CONTENT: Mapping[str, Any] = yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), Loader=_LOADER)
MISSING = "–"
SIZE, FLOPS, MACS, TOP1 = "parameters", "FLOPs", "MACs", "top-1"


class Row(NamedTuple):
    """A row of a published table.

    table: source and table, such as "RALA, Table 9". name: label of the row. values: quantity → number with the digits
    of the source, without the cells that are missing there. units: quantity → unit, "" if it has none.
    """

    table: str
    name: str
    values: Mapping[str, str]
    units: Mapping[str, str]

    def with_unit(self, quantity: str) -> str:
        """Such as "82.1 %"; NaN has no unit."""
        value, unit = self.values[quantity], self.units[quantity]
        return f"{value} {unit}" if unit and value != "NaN" else value

    def cells(self) -> list[str]:
        """Each quantity with its number and unit, such as "top-1 82.1 %"."""
        return [f"{quantity} {self.with_unit(quantity)}" for quantity in self.values]


class Published(NamedTuple):
    """Millions of parameters, billions of MACs (FLOPs in most papers), ImageNet-1k top-1 in %, and the source.

    Sizes have the digits of the source; None is not printed there. Accuracies are for 224 px, unless the source says
    otherwise.
    """

    parameters: str | None
    macs: str | None
    top1: float
    source: str


ROWS: Mapping[str, Row] = {
    f"{source}, {table}, {name}": Row(
        f"{source}, {table}",
        name,
        {key: cell for key, cell in zip(content["columns"], cells, strict=True) if cell != MISSING},
        content["columns"],
    )
    for source, paper in CONTENT["papers"].items()
    for table, content in paper["tables"].items()
    for name, cells in content["rows"].items()
}
"""Citation → row."""


def _published(first: str, *others: str) -> Published:
    row = ROWS[first]
    also = "".join(f"; {other.values[TOP1]} in {other.table}" for other in map(ROWS.__getitem__, others))
    macs = row.values.get(FLOPS) or row.values.get(MACS)
    return Published(row.values.get(SIZE), macs, float(row.values[TOP1]), row.table + also)


PUBLISHED: Mapping[str, Published] = {name: _published(*rows) for name, rows in CONTENT["networks"].items()}
"""The networks with a published accuracy, by their names in timm."""
