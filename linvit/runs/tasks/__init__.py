"""The tasks that runs and recipes know: one file each, whose SPEC describes it; a file is listed here."""

from importlib import import_module

from linvit.data.source import Source
from linvit.runs.spec import TaskSpec

FILES = (
    "classification",
    "multilabel",
    "detection",
    "segmentation",
    "language",
    "recall",
    "diffusion",
    "speech",
    "alignment",
    "transfer",
)
TASKS: dict[str, TaskSpec] = {name: import_module(f"{__name__}.{name}").SPEC for name in FILES}
SOURCES: dict[str, type[Source]] = {name: source for spec in TASKS.values() for name, source in spec.sources.items()}
