"""Runs of semantic segmentation."""

from typing import ClassVar

from linvit.data.dense.ade20k import Ade20k
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.runs.dense import DenseSpec
from linvit.tasks.segmentation import Segmentation


class SegmentationSpec(DenseSpec):
    """A class for each pixel."""

    name = "segmentation"
    task = Segmentation
    sources: ClassVar = {"ade20k": Ade20k}
    folder_source = "ade20k"
    frameworks = SEGMENTORS
