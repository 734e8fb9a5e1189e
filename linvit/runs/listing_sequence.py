"""`linvit models --sequence`: the decoders, with what each mechanism keeps of the tokens it has read."""

from typing import Any

import torch
from rich.table import Table

from linvit.layers.mechanisms import MECHANISMS, at
from linvit.models.registry import create
from linvit.models.sequence import SIZES, DecoderCache
from linvit.runs.screen import show as show_table

VOCABULARIES = {"sequence_nano": 257, "sequence_340m": 32_000}
CONTEXT = 2048


def describe_sequences() -> list[dict[str, Any]]:
    """name, mechanism, vocabulary, parameters, memory (bytes after CONTEXT tokens, float32) and grows, for each."""
    return [_describe(name, mechanism) for name in SIZES for mechanism in at("sequences")]


def _describe(name: str, mechanism: str) -> dict[str, Any]:
    vocabulary = VOCABULARIES[name]
    with torch.device("meta"):
        network = create(name, vocabulary, mechanism=mechanism)
        memory = DecoderCache()
        network.read(torch.zeros(1, CONTEXT, dtype=torch.long), memory)
    return {
        "name": name,
        "mechanism": mechanism,
        "vocabulary": vocabulary,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "memory": memory.num_bytes(),
        "grows": MECHANISMS[mechanism].axes is None,
    }


def show_sequences(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table."""
    table = Table(caption=f"memory: of one sequence after {CONTEXT:,} tokens, float32; that of softmax grows with them")
    for heading in ("model", "mechanism"):
        table.add_column(heading)
    for heading in ("tokens known", "parameters", "memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = f"{row['memory'] / 2**20:.2f} MiB"
        table.add_row(row["name"], row["mechanism"], f"{row['vocabulary']:,}", f"{row['parameters']:,}", memory)
    show_table(table)
