"""The base of the sources of objects with boxes and masks; every format is read into COCO's and served from there."""

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert

from linvit.data.dense.annotations import Annotations, to_mask, to_runs
from linvit.data.dense.source import DenseSource, as_lists, read_image
from linvit.data.dense.transforms import CROP_RANGE, CROP_SHORT_SIDES, RESIZINGS, SHORT_SIDES, detection_transform
from linvit.data.disk import data_folder, warn_or_raise
from linvit.data.images.image import CorruptImageError, Side
from linvit.data.order import GroupedOrder, ShuffledOrder, batches_of_one_size
from linvit.data.source import Content, Contents, check_split, of_split, untrained, untransformed
from linvit.errors import SettingError
from linvit.ranges import Amount, OneOf, Seed, Share

logger = logging.getLogger(__name__)


class ObjectSource(DenseSource):
    """Batches (images, targets): lists of float32 (3, height, width) and of dictionaries.

    A target has boxes (n, 4) float32 xyxy in pixels of the scaled image, labels (n,) int64 from 0, masks
    (n, height, width) uint8 if needs_masks, iscrowd (n,) int64, area (n,) float32 in pixels of the file, image_id, and
    original_size (height, width). Training leaves out crowds and, unless keeps_empty, images without other objects;
    evaluation has every image once, with its crowds.

    root: folder of the data. resizing: of training images, one of single, multiscale (short side from short_sides),
    detr (multiscale, or first scaled to one of crop_short_sides and cropped to crop_range) and jitter (large-scale, to
    a square of jitter_size). flip: probability. groups_shapes: puts wide and tall images into different batches where
    possible. max_bad_annotations: number of unusable annotations that may be left out. class_names: fixes the order of
    the classes. options: see DenseSource.

    A subclass has `read` and `folder`, and sets its own attributes before it calls this constructor.
    """

    task = "detection"
    assemble = staticmethod(as_lists)

    def __init__(
        self,
        root: str,
        long_side: Side = 1333,
        short_side: Side = 800,
        resizing: Annotated[str, OneOf(tuple(RESIZINGS))] = "single",
        short_sides: Sequence[Side] = SHORT_SIDES,
        crop_short_sides: Sequence[Side] = CROP_SHORT_SIDES,
        crop_range: tuple[Side, Side] = CROP_RANGE,
        jitter_size: Side = 1024,
        flip: Share = 0.5,
        needs_masks: bool = True,
        keeps_empty: bool = False,
        groups_shapes: bool = True,
        max_bad_annotations: Amount = 0,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(long_side, short_side, **options)
        resize = RESIZINGS[resizing](
            long_side,
            short_side,
            short_sides=short_sides,
            crop_short_sides=crop_short_sides,
            crop_range=tuple(crop_range),
            jitter_size=jitter_size,
            mean=self.mean,
        )
        self.transform = detection_transform(resize, flip, self.mean, self.std)
        self.root = data_folder(root)
        self.needs_masks = needs_masks
        self.keeps_empty = keeps_empty
        self.groups_shapes = groups_shapes
        self.max_bad_annotations = max_bad_annotations
        self._read: dict[str, Annotations] = {}
        self.class_names = self.annotations(self.first_split(), class_names).class_names

    @abstractmethod
    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        """Reads and checks the annotations of "train" or "val"; class_names: the known classes, if any."""

    @abstractmethod
    def folder(self, split: str) -> Path:
        """The folder that the file names of a split's images are relative to."""

    def first_split(self) -> str:
        """The split whose annotations are read by the constructor: evaluation needs no other than "val"."""
        return "val"

    def annotations(self, split: str, class_names: list[str] | None = None) -> Annotations:
        """The checked annotations of "train" or "val"; read once."""
        if split not in self._read:
            annotations = self.read(split, class_names or getattr(self, "class_names", None))
            warn_or_raise(annotations.unusable, self.max_corrupt, "max_corrupt")
            warn_or_raise(annotations.complaints, self.max_bad_annotations, "max_bad_annotations")
            if annotations.clipped:
                cut = "%s: %d boxes that reached beyond their images were cut at the border."
                logger.info(cut, annotations.path, annotations.clipped)
            self._read[split] = annotations
        return self._read[split]

    def train_set(self) -> Dataset[Any]:
        annotations = self.annotations("train")
        indices = [index for index, count in enumerate(annotations.num_objects) if count or self.keeps_empty]
        if not indices:
            raise SettingError(f"{annotations.path} has no image with an object in it: set `root` to other data.")
        if len(indices) < len(annotations.images):
            empty = len(annotations.images) - len(indices)
            logger.info("%s: %d images without objects are not used for training.", annotations.path, empty)
        if absent := untrained(annotations.class_names, annotations.present, "object"):
            logger.warning(absent)
        return ObjectImages(self.folder("train"), annotations, self.transform, indices, self.needs_masks, False)

    def val_set(self) -> Dataset[Any]:
        annotations = self.annotations("val")
        about = self.preprocessing
        resizing = RESIZINGS["single"](about.long_side, about.short_side)
        transform = detection_transform(resizing, 0.0, about.mean, about.std)
        indices = range(len(annotations.images))
        return ObjectImages(self.folder("val"), annotations, transform, indices, self.needs_masks, True)

    def contents(self, split: str) -> Contents:
        annotations = self.annotations(split)
        indices = range(len(annotations.images))
        images = ObjectImages(self.folder(split), annotations, untransformed, indices, self.needs_masks, True)
        return Contents(images, _content, {"boxes cut at the border": annotations.clipped})

    def ground_truth(self) -> dict[str, Any]:
        """The content of the validation file in the form that the COCO tools take."""
        return self.annotations("val").ground_truth()

    def results(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Any]],
        predictions: Sequence[Mapping[str, Tensor]],
    ) -> list[dict[str, Any]]:
        """The entries of a COCO results file for a validation batch, in pixels of the image files."""
        category_ids = self.annotations("val").category_ids
        return [
            row
            for image, target, prediction in zip(images, targets, predictions, strict=True)
            for row in to_results(
                target["image_id"],
                to_original(prediction, (image.shape[-2], image.shape[-1]), target["original_size"]),
                category_ids,
            )
        ]

    def train_order(self, dataset: Any) -> ShuffledOrder:
        if not self.groups_shapes:
            return super().train_order(dataset)
        images = self.annotations("train").images
        shapes = [images[index]["width"] > images[index]["height"] for index in dataset.indices]
        return GroupedOrder(shapes, self.batch_size, self.seed)

    def val_order(self, dataset: Any) -> dict[str, Any]:
        """Batches of images of one size: the padding to a larger one would change what is detected."""
        sizes = [(image["height"], image["width"]) for image in self.annotations("val").images]
        return {"batch_size": 1, "batch_sampler": batches_of_one_size(sizes, self.val_batch_size, sys.maxsize)}


class HeldOutObjects(ObjectSource):
    """Objects of a format that may leave open which images are held out.

    held_out: share of the images that is never trained on, if the data name no splits; 1 holds out all, for
    evaluation. split: seed that chooses those images by their names, the same on every machine; independent of the
    run's seed. options: see ObjectSource.
    """

    def __init__(self, root: str, held_out: Share = 0.2, split: Seed = 0, **options: Any) -> None:
        self.held_out, self.split = held_out, split
        super().__init__(root, **options)

    def divided(self, names: Sequence[str], split: str) -> list[str]:
        """The names of one split, sorted; raises ValueError if it has none."""
        chosen = of_split(sorted(set(names)), split, self.held_out, self.split)
        check_split(split, chosen, f"The data folder {self.root} has {len(names)} images with annotations")
        return chosen


@dataclass(eq=False)
class ObjectImages(Dataset[Any]):
    """(image, target) for images at some indices of the annotations; a sentence for one that cannot be used."""

    folder: Path
    annotations: Annotations
    transform: Callable[..., Any]
    indices: Sequence[int]
    needs_masks: bool
    keeps_crowds: bool

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]] | str:
        about = self.annotations.images[self.indices[index]]
        entries = self.annotations.of_image(self.indices[index])
        path = self.folder / about["file_name"]
        try:
            image = read_image(path)
        except CorruptImageError as error:
            return str(error)
        size = about["height"], about["width"]
        if tuple(image.shape[-2:]) != size:
            height, width = image.shape[-2:]
            turned = " after its EXIF data turned it" if size == (width, height) else ""
            return (
                f"{path} has {height}×{width} px{turned}, but {self.annotations.path} says that it has"
                f" {size[0]}×{size[1]} px (height × width): use images and annotations that belong together."
            )
        kept = [entry for entry in entries if self.keeps_crowds or not entry["iscrowd"]]
        boxes = torch.tensor([entry["box"] for entry in kept], dtype=torch.float32).reshape(-1, 4)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor([entry["label"] for entry in kept], dtype=torch.int64),
            "iscrowd": torch.tensor([entry["iscrowd"] for entry in kept], dtype=torch.int64),
            "area": torch.tensor([entry["area"] for entry in kept], dtype=torch.float32),
            "image_id": about["id"],
            "original_size": size,
        }
        if self.needs_masks:
            masks = [to_mask(entry["segmentation"], size) for entry in kept]
            stacked = np.stack(masks) if masks else np.zeros((0, *size), np.uint8)
            target["masks"] = tv_tensors.Mask(torch.from_numpy(stacked))
        return self.transform(image, target)

    def __len__(self) -> int:
        return len(self.indices)


def _content(sample: tuple[Tensor, dict[str, Any]]) -> Content:
    """Objects by class, and their areas as the files state them."""
    image, target = sample
    single = target["iscrowd"] == 0
    labels, areas = target["labels"][single], target["area"][single]
    objects, pixels = (torch.bincount(labels, weights) for weights in (None, areas.double()))
    amounts = {
        "objects": {label: int(count) for label, count in enumerate(objects.tolist()) if count},
        "pixels": {label: round(count) for label, count in enumerate(pixels.tolist()) if count},
    }
    others = {"images without objects": int(not len(labels)), "crowds": int((~single).sum())}
    return Content((image.shape[-2], image.shape[-1]), amounts, others)


def to_original(prediction: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]) -> dict[str, Any]:
    """Scales predicted boxes and masks to the size of the image file.

    prediction: boxes (n, 4) xyxy, labels, scores, and masks (n, height, width) or (n, 1, height, width), boolean or
    probabilities, which are thresholded at 0.5 after scaling. size, original: (height, width) of the network's input
    and of the image file.
    """
    factor = torch.tensor([original[1] / size[1], original[0] / size[0]] * 2, device=prediction["boxes"].device)
    moved = {**prediction, "boxes": prediction["boxes"] * factor}
    if "masks" in prediction:
        masks = prediction["masks"].float().reshape(-1, 1, *size)
        if tuple(size) != tuple(original) and len(masks):
            masks = interpolate(masks, original, mode="bilinear", align_corners=False)
        moved["masks"] = masks.reshape(-1, *original) >= 0.5
    return moved


def to_results(image_id: int, prediction: Mapping[str, Tensor], category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The entries of a COCO results file for one image; its prediction is in pixels of the image file."""
    boxes = box_convert(prediction["boxes"].float(), "xyxy", "xywh").tolist()
    rows = zip(boxes, prediction["labels"].tolist(), prediction["scores"].tolist(), strict=True)
    results = [
        {"image_id": image_id, "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in rows
    ]
    if "masks" in prediction:
        for result, mask in zip(results, prediction["masks"].cpu().numpy(), strict=True):
            result["segmentation"] = to_runs(mask)
    return results
