"""What the tasks measure, by the names that stand in metrics.csv. INTERIM: until every task declares `measures`."""

from collections.abc import Mapping
from dataclasses import dataclass

from linvit.runs.evaluate import HEADINGS, NUMBERS
from linvit.tasks import Task

NAMES = {
    "Classification": ("top1", "top5", "loss"),
    "BuiltDetection": tuple(name for name in HEADINGS if name.startswith(("box_", "mask_"))),
    "BuiltSegmentation": ("miou", "pixel_accuracy", "class_accuracy"),
    "BuiltLanguage": ("bits_per_byte", "perplexity", "next_accuracy"),
    "BuiltRecall": ("recall_accuracy", "loss"),
    "BuiltDiffusion": ("loss", "fid", "drawn_accuracy", "guided_fid", "guided_accuracy", "floor_fid", "noise_fid"),
    "BuiltSpeech": ("wer", "loss"),
}


@dataclass(frozen=True)
class Measure:
    heading: str
    unit: str


def measures_of(task: Task) -> Mapping[str, Measure]:
    """The measures of a task by name."""
    return {
        name: Measure(HEADINGS.get(name, name), "number" if name in (*NUMBERS, "perplexity") else "share")
        for name in NAMES[type(task).__name__]
    }
