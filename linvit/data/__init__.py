"""Batches of labelled images: each source is a LightningDataModule, listed here by the name that recipes use."""

from linvit.data.ade20k import Ade20k as Ade20k
from linvit.data.coco import Coco as Coco
from linvit.data.dense import DensePreprocessing as DensePreprocessing
from linvit.data.digits import Digits as Digits
from linvit.data.imagefolder import ImageFolder as ImageFolder
from linvit.data.images import Preprocessing as Preprocessing
from linvit.data.images import open_image as open_image
from linvit.data.readers import TimmImages as TimmImages
from linvit.data.source import ImageSource as ImageSource

SOURCES: dict[str, type[ImageSource]] = {
    "digits": Digits,
    "imagefolder": ImageFolder,
    "timm": TimmImages,
    "coco": Coco,
    "ade20k": Ade20k,
}
