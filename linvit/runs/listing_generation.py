"""`linvit models --generation`: the generators, their sizes beside the published ones."""

from typing import Any

import torch
from rich.table import Table

from linvit.analysis.cost import count_batch
from linvit.layers.mechanisms import at
from linvit.models.registry import create
from linvit.runs.screen import show as show_table

# Further arguments of dit_small_patch2, and billions of MACs a pass as MALA's Table 8 prints them.
VARIANTS: dict[str, dict[str, Any]] = {
    "DiT-S/2": {},
    "with local=true": {"local": True},
    "with mlp_ratio=2": {"mlp_ratio": 2.0},
    "with both": {"local": True, "mlp_ratio": 2.0},
}
PUBLISHED = {("DiT-S/2", "softmax"): "6.06"}
CAPTION = (
    "MACs of one pass for one 4×32×32 latent: layers, then all, with the products inside the attention. MALA's Table 8"
    " prints 4.26 G for its network, which is not released: no row here is known to be it."
)


def describe_generators() -> list[dict[str, Any]]:
    """variant, mechanism, parameters, macs (layers), macs_attention (on top), published_macs (billions or None)."""
    return [_describe(variant, mechanism) for variant in VARIANTS for mechanism in at("images")]


def _describe(variant: str, mechanism: str) -> dict[str, Any]:
    with torch.device("meta"):
        network = create("dit_small_patch2", 1000, mechanism=mechanism, learn_sigma=True, **VARIANTS[variant])
    one = torch.zeros(1, dtype=torch.long)
    side = network.input_size
    cost = count_batch(network, torch.zeros(1, network.channels, side, side), one, one)
    return {
        "variant": variant,
        "mechanism": mechanism,
        "parameters": cost.parameters,
        "macs": cost.macs,
        "macs_attention": cost.macs_attention,
        "published_macs": PUBLISHED.get((variant, mechanism)),
    }


def show_generators(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table."""
    table = Table(caption=CAPTION)
    for heading in ("model", "mechanism"):
        table.add_column(heading)
    for heading in ("parameters", "G of layers", "G of all", "published G"):
        table.add_column(heading, justify="right")
    for row in rows:
        layers, every = row["macs"] / 1e9, (row["macs"] + row["macs_attention"]) / 1e9
        counted = (f"{row['parameters']:,}", f"{layers:.3f}", f"{every:.3f}", row["published_macs"] or "–")
        table.add_row(row["variant"], row["mechanism"], *counted)
    show_table(table)
