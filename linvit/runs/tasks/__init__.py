"""The tasks that runs and recipes know, each with the class of its runs; a new class is added to the list."""

from linvit.data.source import Source
from linvit.runs.run import Run
from linvit.runs.tasks.classification import ClassificationRun as ClassificationRun
from linvit.runs.tasks.detection import DetectionRun as DetectionRun
from linvit.runs.tasks.diffusion import DiffusionRun as DiffusionRun
from linvit.runs.tasks.language import LanguageRun as LanguageRun
from linvit.runs.tasks.language import RecallRun as RecallRun
from linvit.runs.tasks.multilabel import MultiLabelRun as MultiLabelRun
from linvit.runs.tasks.segmentation import SegmentationRun as SegmentationRun
from linvit.runs.tasks.speech import SpeechRun as SpeechRun
from linvit.runs.tasks.students import AlignmentRun as AlignmentRun
from linvit.runs.tasks.students import TransferRun as TransferRun

LISTED: tuple[type[Run], ...] = (
    ClassificationRun,
    MultiLabelRun,
    DetectionRun,
    SegmentationRun,
    LanguageRun,
    RecallRun,
    DiffusionRun,
    SpeechRun,
    AlignmentRun,
    TransferRun,
)
RUNS: dict[str, type[Run]] = {run.task_name: run for run in LISTED}
SOURCES: dict[str, type[Source]] = {name: source for run in LISTED for name, source in run.sources.items()}
