"""`linvit models --dense`: detectors and segmentors of the papers, their sizes beside the published ones."""

from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from linvit.analysis.dense_cost import count_dense_cost
from linvit.models.dense.frameworks import FRAMEWORKS
from linvit.runs.screen import show as show_table

FAMILIES = ("ravlt", "mavit")
SIZES = ("tiny", "small", "base", "large")

# Millions of parameters and billions of MACs as both papers print them, for backbones of pattern LLSS.
PUBLISHED = {
    "retinanet": ((24, 201), (34, 244), (57, 353), (104, 482)),
    "mask_rcnn": ((33, 219), (44, 262), (67, 372), (114, 501)),
    "cascade_mask_rcnn": (None, (82, 741), (105, 851), (152, 979)),
    "semantic_fpn": ((18, 136), (28, 180), (51, 292), (98, 424)),
    "upernet": ((44, 893), (55, 937), (77, 1050), (125, 1182)),
}


def describe_dense(family: str | None = None) -> list[dict[str, Any]]:
    """Every framework on every size of RAVLT and MAViT, as released (pattern LLSS) and linear throughout (LLLL).

    Keys: framework, backbone, pattern, parameters, macs (layers, as the papers count), macs_attention (products
    between tensors, which come on top), published_parameters (millions), published_macs (billions), None without.

    Args:
        family: ravlt or mavit, both for None.

    Raises:
        ValueError: for another family.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"Unknown dense family {family!r}: the known ones are {', '.join(FAMILIES)}.")
    cells = [
        (framework, name, index, pattern)
        for name in FAMILIES
        if family in (None, name)
        for index in range(len(SIZES))
        for pattern in ("LLSS", "LLLL")
        for framework in FRAMEWORKS
    ]
    rows = []
    for framework, name, index, pattern in track(cells, "Counting", console=Console(stderr=True), transient=True):
        backbone = f"{name}_{SIZES[index]}{'_linear' if pattern == 'LLLL' else ''}"
        cost = count_dense_cost(framework, backbone)
        published = PUBLISHED[framework][index] if pattern == "LLSS" else None
        rows.append(
            {
                "framework": framework,
                "backbone": backbone,
                "pattern": pattern,
                "parameters": cost.parameters,
                "macs": cost.macs,
                "macs_attention": cost.macs_attention,
                "published_parameters": published[0] if published else None,
                "published_macs": published[1] if published else None,
            }
        )
    return sorted(rows, key=lambda row: list(FRAMEWORKS).index(row["framework"]))


def show_dense(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table in Markdown."""
    table = Table(box=box.MARKDOWN)
    for heading in ("framework", "backbone", "pattern"):
        table.add_column(heading)
    for heading in ("parameters", "MACs", "+ attention", "published"):
        table.add_column(heading, justify="right")
    for row in rows:
        known = row["published_macs"] is not None
        table.add_row(
            row["framework"],
            row["backbone"],
            row["pattern"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['macs'] / 1e9:.1f} G",
            f"{row['macs_attention'] / 1e9:.1f} G",
            f"{row['published_parameters']} M / {row['published_macs']} G" if known else "–",
        )
    show_table(table)
