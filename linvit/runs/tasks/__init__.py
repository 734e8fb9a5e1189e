"""The tasks that runs and recipes know: one file each, listed here."""

from linvit.data.source import Source
from linvit.runs.spec import TaskSpec
from linvit.runs.tasks.classification import ClassificationSpec
from linvit.runs.tasks.detection import DetectionSpec
from linvit.runs.tasks.diffusion import DiffusionSpec
from linvit.runs.tasks.language import LanguageSpec
from linvit.runs.tasks.recall import RecallSpec
from linvit.runs.tasks.segmentation import SegmentationSpec
from linvit.runs.tasks.speech import SpeechSpec

_SPECS = (ClassificationSpec, DetectionSpec, SegmentationSpec, LanguageSpec, RecallSpec, DiffusionSpec, SpeechSpec)
TASKS: dict[str, TaskSpec] = {kind.name: kind() for kind in _SPECS}
SOURCES: dict[str, type[Source]] = {name: source for spec in TASKS.values() for name, source in spec.sources.items()}
