"""Images with boxes and masks, or with label maps."""

from linvit.data.dense.coco import Coco, CocoPanoptic
from linvit.data.dense.instance_masks import InstanceMasks
from linvit.data.dense.label_maps import Ade20k, LabelMaps
from linvit.data.dense.source import DensePreprocessing
from linvit.data.dense.voc import Voc
from linvit.data.dense.yolo import Yolo

__all__ = ["Ade20k", "Coco", "CocoPanoptic", "DensePreprocessing", "InstanceMasks", "LabelMaps", "Voc", "Yolo"]
