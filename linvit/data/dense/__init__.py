"""Images with boxes and masks, or with label maps."""

from linvit.data.dense.ade20k import Ade20k
from linvit.data.dense.coco import Coco
from linvit.data.dense.source import DensePreprocessing

__all__ = ["Ade20k", "Coco", "DensePreprocessing"]
