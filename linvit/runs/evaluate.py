"""`linvit eval`: the task's measures over every image once, for the raw weights and their moving average."""

import json
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from rich.table import Table

from linvit.data import SpeechFolder
from linvit.runs.restore import Restored, source_for
from linvit.runs.screen import bars, quiet_lightning
from linvit.runs.screen import show as show_table

HEADINGS = {
    "top1": "top-1",
    "top5": "top-5",
    "miou": "mIoU",
    "pixel_accuracy": "pixels",
    "class_accuracy": "mean of classes",
    "bits_per_byte": "bits per byte",
    "next_accuracy": "next token",
    "recall_accuracy": "answers",
    "wer": "word error rate",
    "fid": "FID-like",
    "drawn_accuracy": "drawn right",
    "guided_fid": "FID-like, guided",
    "guided_accuracy": "drawn right, guided",
    "floor_fid": "floor",
    "noise_fid": "noise",
    "judge_accuracy": "judge",
    **{
        f"{part}_{name}": f"{part} {heading}"
        for part in ("box", "mask")
        for name, heading in {
            "ap": "AP",
            "ap50": "AP50",
            "ap75": "AP75",
            "ap_small": "AP small",
            "ap_medium": "medium",
            "ap_large": "large",
        }.items()
    },
}

COUNTED = ("images", "bytes", "sequences", "utterances")
NUMBERS = ("loss", "bits_per_byte", "perplexity", "fid", "guided_fid", "floor_fid", "noise_fid")


def evaluate(
    restored: Restored, data: str | None = None, num_workers: int | None = None, **trainer: Any
) -> dict[str, dict[str, float]]:
    """{"raw": …, "ema": …}, each with the task's measures, in 0..1 but for the loss, and the number of images.

    They are top1, top5 and loss; miou, pixel_accuracy and class_accuracy; or box_ap, box_ap50 … and mask_ap …; of text
    bits_per_byte, perplexity and next_accuracy and the number of bytes; of speech wer and the number of utterances.
    `trainer` are Lightning's arguments.
    """
    shown = bars()
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": bool(shown),
        "callbacks": shown,
        "use_distributed_sampler": False,
    }
    if restored.drawing:
        settings["default_root_dir"] = restored.folder  # where the classifier that judges is kept
    source = source_for(restored, data, num_workers)
    if isinstance(source, SpeechFolder) and len(parts := source.subset_names()) > 1:
        told = f"{source.root} holds the parts {', '.join(parts)}, which are measured together: name one for it alone."
        print(told, file=sys.stderr)
    with quiet_lightning():
        logged = Trainer(**settings | trainer).validate(restored.task, datamodule=source, verbose=False)
    if not logged:
        raise ValueError(f"The data of {restored.path} has nothing to measure on: name some with --data.")
    measured = {key.removeprefix("val/"): value for key, value in logged[0].items()}
    counted = restored.task.counted
    images = {counted: round(measured.pop(counted))}
    ema = {key.removeprefix("ema_"): value for key, value in measured.items() if key.startswith("ema_")}
    raw = {key: value for key, value in measured.items() if not key.startswith("ema_")}
    return {"raw": raw | images} | ({"ema": ema | images} if ema else {})


def show(measured: dict[str, dict[str, float]], path: Path, as_json: bool = False) -> None:
    """Prints what evaluate measured as one table, or as one JSON object."""
    if as_json:
        print(json.dumps(measured))
        return
    table = Table(title=str(path))
    table.add_column("weights")
    names = list(dict.fromkeys(name for row in measured.values() for name in row))
    for name in names:
        table.add_column(HEADINGS.get(name, name), justify="right")
    for kind, row in measured.items():
        table.add_row(kind, *(cell(name, row[name]) if name in row else "–" for name in names))
    show_table(table)


def table_rows(measured: dict[str, dict[str, float]]) -> list[dict[str, str]]:
    """What evaluate measured as rows of a page's table, a row for each kind of weights."""
    return [
        {"weights": kind} | {HEADINGS.get(name, name): cell(name, value) for name, value in row.items()}
        for kind, row in measured.items()
    ]


def cell(name: str, value: float) -> str:
    """A measure as it stands in tables."""
    if name in COUNTED:
        return f"{value:,}"
    return f"{value:.4f}" if name in NUMBERS else f"{100 * value:.2f} %"
