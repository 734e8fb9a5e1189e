"""Objects in YOLO's format: a text file for each image, with boxes or polygons in shares of its width and height."""

import contextlib
import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from linvit.data.dense.annotations import Annotations, Collected, area_of, is_number_in_text
from linvit.data.dense.objects import HeldOutObjects
from linvit.data.disk import files_below, read_lines, read_text
from linvit.data.images.image import SUFFIXES, size_of
from linvit.errors import SettingError, quoted, refuse
from linvit.ranges import Amount, allows

SPLITS = {"train": ("train", "train2017", "training"), "val": ("val", "val2017", "valid", "validation")}
IMAGES, LABELS, YAML = "images", "labels", "*.y*ml"
NO_LABELS = ("classes.txt", "train.txt", "val.txt", "test.txt")  # lists that may lie next to the label files
DEEPEST, LONGEST = 16, 10_000  # levels of a .yaml file, and characters of a value
OUTSIDE = 0.01  # by which rounding moves a point out of its image
BOX, POLYGON = 5, 7  # numbers on a line: the class and a box, or the class and three points or more


class Yolo(HeldOutObjects):
    """Objects in YOLO's format: lines of class, centre x, centre y, width and height, or of class and polygon.

    root: folder with images/train and labels/train, or train/images and train/labels, or images next to their text
    files in train/; the same for val (or valid, validation, train2017 and val2017). Without such folders, a share
    held_out of all images is held out. An image without a text file has no objects. class_names: the classes in order;
    by default those of a .yaml file in root with `names`, or the lines of classes.txt. held_out, split, options: see
    HeldOutObjects.

    Of lines with keypoints, which `kpt_shape` in that .yaml file announces, the boxes are read.
    """

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        words: list[str] = []
        for image in itertools.chain.from_iterable(_images(root).values()):
            with contextlib.suppress(ValueError):
                words = next(filter(None, map(str.split, read_text(label_file(image)).split("\n"))), [])
            if words:
                break
        if len(words) < BOX or not all(map(is_number_in_text, words)):
            return None
        with contextlib.suppress(ValueError):
            words = words[:BOX] if any(_settings_in(path)[1] for path in root.glob(YAML)) else words
        return {"name": "yolo", "root": str(root)} | ({"needs_masks": False} if len(words) == BOX else {})

    def folder(self, split: str) -> Path:
        return self.root

    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        name_of, keypoints = self._names(class_names)
        classes = class_names or list(name_of.values())
        collected = Collected(classes)
        label_of = {number: classes.index(name) for number, name in name_of.items() if name in classes}
        by_split = _images(self.root)
        images = by_split.get(split, [])
        if "" in by_split:
            names = [path.relative_to(self.root).as_posix() for path in by_split[""]]
            images = [self.root / name for name in self.divided(names, split)]
        present = {image: label_file(image) for image in images if os.path.lexists(label_file(image))}
        expected = " or ".join(f"images/{name}, {name}/images" for name in SPLITS[split][:2])
        refuse(
            not images and f"The data folder {self.root} has no {split} images: expected {expected}.",
            not present and f"None of the {len(images)} {split} images of {self.root} has a text file: add labels.",
        )
        for image in images:
            try:
                size = size_of(image)
                lines = read_text(present[image]).split("\n") if image in present else []
            except ValueError as error:
                collected.unusable.append(str(error))
                continue
            collected.add_image(image.relative_to(self.root).as_posix(), size)
            seen = {"": 0}
            for number, line in enumerate(map(str.strip, lines), start=1):
                place = f"{present[image]}, line {number}"
                if seen.setdefault(line, number) != number:
                    if line:
                        collected.complaints.append(f"{place} repeats line {seen[line]}: remove it.")
                    continue
                try:
                    label, entry = read_line(line, label_of, size, keypoints)
                    collected.add_object(place, label, **entry)
                except ValueError as error:
                    collected.complaints.append(f"{place} {error}: correct or remove it.")
        of_images = {label_file(image) for images in by_split.values() for image in images}
        lonely = sorted({other for path in present.values() for other in path.parent.glob("*.txt")} - of_images)
        collected.unusable += [
            f"{path} has no image: add it, or remove the file." for path in lonely if path.name not in NO_LABELS
        ]
        return collected.annotations(self.root, self.needs_masks)

    def _names(self, class_names: list[str] | None) -> tuple[dict[int, str], int]:
        """The name of each class by its number in the files, and how many numbers of a line describe keypoints."""
        for path in sorted(self.root.glob(YAML)):
            names, keypoints = _settings_in(path)
            if names:
                return names, keypoints
        for path in (self.root / "classes.txt", self.root / LABELS / "classes.txt"):
            if path.exists() and class_names is None:
                class_names = read_lines(path)
        if not class_names:
            raise SettingError(
                f"The data folder {self.root} names no classes: set `class_names`, or add a .yaml file with `names`,"
                " or classes.txt."
            )
        return dict(enumerate(class_names)), 0


def read_line(
    line: str, label_of: Mapping[int, int], size: tuple[int, int], keypoints: int = 0
) -> tuple[int, dict[str, Any]]:
    """The class of an object, and its box or polygon under COCO's keys; raises ValueError that states the fault.

    label_of: the class of each number that the files may have. size: height and width of the image. keypoints: numbers
    after each box that are not read.
    """
    words = line.split()
    count = len(words)
    refuse(
        not all(map(is_number_in_text, words)) and f"is {quoted(line)}, expected numbers",
        keypoints
        and count != BOX + keypoints
        and f"has {count} numbers, expected {BOX + keypoints}: a class, a box and its keypoints",
        not keypoints
        and count != BOX
        and (count < POLYGON or count % 2 == 0)
        and f"has {count} numbers, expected a class and a box (5) or a polygon (7, 9, 11 …)",
    )
    words = words[:BOX] if keypoints else words
    number, *shape = map(float, words)
    if number not in label_of:
        choices = f"one of {len(label_of)} from {min(label_of)} to {max(label_of)}" if label_of else "a known one"
        raise ValueError(f"has the class {words[0]}, expected {choices}")
    label, (height, width) = label_of[int(number)], size
    if len(words) == BOX:
        x, y, w, h = shape
        return label, {"bbox": [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]}
    if not -OUTSIDE <= min(shape) <= max(shape) <= 1 + OUTSIDE:
        raise SettingError("has a polygon that leaves 0..1 (keypoints need `kpt_shape` in the .yaml file)")
    across, down = [x * width for x in shape[::2]], [y * height for y in shape[1::2]]
    polygon = [value for point in zip(across, down, strict=True) for value in point]
    box = [min(across), min(down), max(across) - min(across), max(down) - min(down)]
    return label, {"bbox": box, "segmentation": [polygon], "area": area_of(polygon)}


def label_file(image: Path) -> Path:
    """The text file of an image: in the folder labels/ parallel to the last images/ in its path, else next to it."""
    names = list(image.parts)
    places = [place for place, name in enumerate(names[:-1]) if name == IMAGES]
    if places:
        names[places[-1]] = LABELS
        parallel = Path(*names).with_suffix(".txt")
        if parallel.parent.is_dir():
            return parallel
    return image.with_suffix(".txt")


def _images(root: Path) -> dict[str, list[Path]]:
    """The image files of each split that has a folder; without such folders, all of them under ""."""
    by_split = {}
    for split, names in SPLITS.items():
        places = (root / shape.format(name) for name in names for shape in (f"{IMAGES}/{{}}", f"{{}}/{IMAGES}", "{}"))
        folder = next((place for place in places if place.is_dir()), None)
        if folder:
            by_split[split] = files_below(folder, SUFFIXES)
    if by_split:
        return by_split
    everything = [*files_below(root, SUFFIXES), *files_below(root / IMAGES, SUFFIXES)]
    return {"": sorted(set(everything))}  # a link, which is not followed, may lead to images/


def _settings_in(path: Path) -> tuple[dict[int, str], int]:
    """The `names` of a .yaml file, a list or a mapping from whole numbers, and the product of its `kpt_shape`, or 0."""
    text = read_text(path)
    try:
        depth = 0
        for event in yaml.parse(text):  # the time for what is refused here would have no bound
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST or len(getattr(event, "value", "")) > LONGEST:
                raise ValueError(f"it has an alias, over {DEEPEST} levels, or over {LONGEST:,} characters in a value")
        content = yaml.safe_load(text)
    except Exception as error:  # a wrong date, boolean or key each has its own
        raise ValueError(f"{path} is not valid YAML ({' '.join(str(error).split()):.100}): correct it.") from error
    names = content.get("names", {}) if isinstance(content, dict) else {}
    names = dict(enumerate(names)) if isinstance(names, list) else names
    are_names = allows(dict, names) and all(type(key) is int and type(names[key]) in (str, int) for key in names)
    shape = content.get("kpt_shape", [0]) if names else [0]
    refuse(
        not are_names and f"{path} has the names {quoted(names)}, expected a list, or numbers with a name each.",
        are_names and len(set(names.values())) < len(names) and f"{path} names two classes alike: rename one of them.",
        not allows(list[Amount], shape)
        and f"{path} has the kpt_shape {quoted(shape)}, expected two whole numbers: correct it.",
    )
    return {key: str(names[key]) for key in sorted(names)}, math.prod(shape or [0])
