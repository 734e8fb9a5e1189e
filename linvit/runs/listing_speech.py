"""`linvit models --speech`: the Conformers with each mechanism, their sizes beside the published one."""

from typing import Any

import torch
from rich.table import Table

from linvit.models.conformer import SIZES
from linvit.models.registry import create
from linvit.runs.screen import show as show_table

MECHANISMS = ("softmax", "linear", "mala", "rala")
PIECES = {"conformer_nano": 11, "conformer_small": 1024}
PUBLISHED = "10.3"  # millions, of all three rows of MALA's Table 7 and of Conformer (S)
CAPTION = (
    "CTC: encoder and one projection to the pieces. Transducer: with predictor and joint network of 320 channels, as"
    " published."
)


def describe_conformers() -> list[dict[str, Any]]:
    """name, mechanism, pieces, ctc and transducer (parameters), published (millions or None), for each mechanism."""
    return [_describe(name, mechanism) for name in SIZES for mechanism in MECHANISMS]


def _describe(name: str, mechanism: str) -> dict[str, Any]:
    pieces = PIECES[name]
    counted = {}
    for head in ("ctc", "transducer"):
        with torch.device("meta"):
            network = create(name, pieces, mechanism=mechanism, head=head)
        counted[head] = sum(parameter.numel() for parameter in network.parameters())
    published = PUBLISHED if name == "conformer_small" and mechanism != "rala" else None
    return {"name": name, "mechanism": mechanism, "pieces": pieces, **counted, "published": published}


def show_conformers(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table."""
    table = Table(caption=CAPTION)
    for heading in ("model", "mechanism"):
        table.add_column(heading)
    for heading in ("pieces", "with CTC", "as transducer", "published M"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("pieces", "ctc", "transducer"))
        table.add_row(row["name"], row["mechanism"], *counts, row["published"] or "–")
    show_table(table)
