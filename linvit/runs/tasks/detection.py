"""Runs of object detection and instance segmentation."""

from typing import Any, ClassVar

from linvit.data.dense.coco import Coco
from linvit.data.source import Source
from linvit.models.dense.frameworks import DETECTORS
from linvit.runs.dense import DenseSpec
from linvit.tasks.detection import Detection


class DetectionSpec(DenseSpec):
    """Boxes, and masks where the framework has them."""

    name = "detection"
    task = Detection
    sources: ClassVar = {"coco": Coco}
    folder_source = "coco"
    frameworks = DETECTORS

    def stored(self, source: Source) -> dict[str, Any]:
        return {"category_ids": list(source.annotations("train").category_ids)}
