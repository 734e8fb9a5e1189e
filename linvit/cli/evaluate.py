"""`linvit eval`: top-1 and top-5 over every image once, for the raw weights and their moving average."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from rich.table import Table

from linvit.cli.restore import Restored, source_for
from linvit.cli.screen import bars, quiet_lightning
from linvit.cli.screen import show as show_table


def evaluate(
    restored: Restored, data: str | None = None, num_workers: int | None = None, **trainer: Any
) -> dict[str, dict[str, float]]:
    """{"raw": …, "ema": …}, each with top1 and top5 in 0..1, loss and images; `trainer` are Lightning's arguments."""
    shown = bars()
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": bool(shown),
        "callbacks": shown,
        "use_distributed_sampler": False,
    }
    loader = source_for(restored, data, num_workers).val_dataloader()
    with quiet_lightning():
        measured = Trainer(**settings | trainer).validate(restored.task, loader, verbose=False)[0]
    return {
        kind: {name: measured[f"val/{_prefix(kind)}{name}"] for name in ("top1", "top5", "loss")}
        | {"images": int(measured["val/images"])}
        for kind in restored.task.networks()
    }


def _prefix(kind: str) -> str:
    return "" if kind == "raw" else f"{kind}_"


def show(measured: dict[str, dict[str, float]], path: Path, as_json: bool = False) -> None:
    """Prints what evaluate measured as one table, or as one JSON object."""
    if as_json:
        print(json.dumps(measured))
        return
    table = Table(title=str(path))
    table.add_column("weights")
    for heading in ("top-1", "top-5", "loss", "images"):
        table.add_column(heading, justify="right")
    for kind, row in measured.items():
        shares = (f"{100 * row[name]:.2f} %" for name in ("top1", "top5"))
        table.add_row(kind, *shares, f"{row['loss']:.4f}", f"{row['images']:,}")
    show_table(table)
