"""Checks every file of a detection or segmentation data set and lists the problems."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from linvit.data.dense import ade20k, coco
from linvit.data.dense.annotations import read_annotations
from linvit.data.dense.transforms import IGNORED

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


@dataclass(frozen=True)
class Checked:
    """The result for one split: its name, counts by their headings, and a sentence for each problem."""

    name: str
    counts: dict[str, Any]
    problems: list[str]


def check_dense(
    path: str | Path,
    num_labels: int | None = None,
    needs_masks: bool = True,
    progress: Progress = lambda items, name, total: items,
) -> list[Checked]:
    """Reads every image, box, mask and label map of a data set.

    Args:
        path: a folder in COCO's or ADE20K's layout, one that make_scenes wrote, or a COCO .json.
        num_labels: number of classes of label maps; by default those of the folder's table, or 150 without one.
        needs_masks: whether objects must have masks besides boxes.
        progress: called with items, their name and their number; returns the items.

    Raises:
        ValueError: for a path that is not such a data set, and for annotation files that cannot be read at all.
    """
    path = Path(path)
    if not path.is_dir():
        return [_check_objects(path, _images_of(path), needs_masks, progress)]
    checked: list[Checked] = []
    for folder in (path, path / "detection", path / "segmentation"):
        if any((folder / "annotations").glob("instances_*.json")):
            files = {split: coco.find_file(folder, split) for split in coco.SPLITS}
            checked += [
                _check_objects(file, coco.find_images(folder, split), needs_masks, progress)
                for split, file in files.items()
                if os.path.exists(file)
            ]
        elif (folder / "images" / "training").is_dir() or (folder / "images" / "validation").is_dir():
            checked += _check_maps(folder, num_labels, progress)
    if not checked:
        raise ValueError(
            f"{path} is not a known data set: expected a COCO .json, or a folder with annotations/instances_*.json or"
            " with images/training and annotations/training."
        )
    return checked


def _check_objects(file: Path, images: Path | None, needs_masks: bool, progress: Progress) -> Checked:
    known = read_annotations(file, needs_masks)
    problems = list(known.complaints)
    if images is not None:
        indices = range(len(known.images))
        dataset = coco.CocoImages(images, known, lambda image, target: (image, target), indices, needs_masks, True)
        problems += [sample for sample in _samples(dataset, file.name, progress) if isinstance(sample, str)]
    objects = sum(known.num_objects)
    entries = sum(len(known.of_image(index)) for index in range(len(known.images)))
    counts = {
        "images": len(known.images),
        "without objects": known.num_objects.count(0),
        "classes": len(known.class_names),
        "objects": objects,
        "crowds": entries - objects,
        "boxes cut at the border": known.clipped,
    }
    return Checked(str(file) if images else f"{file} alone: no images found", counts, problems)


def _check_maps(folder: Path, num_labels: int | None, progress: Progress) -> Iterator[Checked]:
    source = ade20k.Ade20k(str(folder), num_labels=num_labels)
    for split, subfolder in ade20k.SPLITS.items():
        if not (folder / "images" / subfolder).is_dir():
            continue
        pairs, problems = ade20k.find_pairs(folder, split)
        dataset = ade20k.LabelledMaps(pairs, lambda *sample: sample, source.num_classes, source.reduces_zero_label)
        seen, ignored, pixels, images = set(), 0, 0, 0
        for sample in _samples(dataset, subfolder, progress):
            if isinstance(sample, str):
                problems.append(sample)
                continue
            labels = sample[1]
            seen |= set(labels.unique().tolist()) - {IGNORED}
            ignored += int((labels == IGNORED).sum())
            pixels += labels.numel()
            images += 1
        counts = {
            "images": images,
            "classes": source.num_classes,
            "classes seen": len(seen),
            "ignored pixels": f"{100 * ignored / max(pixels, 1):.2f} %",
        }
        yield Checked(str(folder / "images" / subfolder), counts, problems)


def _images_of(file: Path) -> Path | None:
    """The folder of an annotation file's images in COCO's layout, if there is one."""
    name = file.stem.removeprefix("instances_")
    root = file.parent.parent
    return next((folder for folder in (root / name, root / "images" / name) if folder.is_dir()), None)


def _samples(dataset: Dataset[Any], name: str, progress: Progress) -> Iterable[Any]:
    count = len(dataset)  # type: ignore[arg-type]
    return progress((dataset[index] for index in range(count)), name, count)
