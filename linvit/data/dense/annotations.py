"""Annotations in COCO's format, checked entry by entry before anything trains on them."""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from linvit.data.dense.masks import check_mask
from linvit.data.disk import read_json, stays_inside

SMALLEST_SIDE = 1  # pixels; smaller boxes are what mmdetection ignores too
ROUNDING = 0.1  # pixels; COCO's own boxes leave their images by less
MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # of an image that Pillow opens
LARGEST_ID = 2**53  # exact in the COCO tools and every JSON reader
SHOWN = 80  # characters
LISTS = ("images", "annotations", "categories")


class UnusableEntryError(ValueError):
    """An annotation that cannot be used: its name in the file, and the fault, which completes a sentence."""

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(fault)
        self.name = name


@dataclass
class Annotations:
    """The annotations of one split, with classes numbered from 0.

    path: file or folder that they come from. read: reads them again, as a dictionary in COCO's format. images: id,
    file_name, height and width of each. category_ids: the category id of each class. records: the annotations of each
    image, pickled, because worker processes share bytes but would copy millions of numbers. num_objects: number of
    annotations per image that are not crowds. complaints: a sentence for each annotation that was left out. kept:
    positions in the dictionary of the others. clipped: number of boxes that were cut at the image border. present: the
    classes that have an object. unusable: a sentence for each image that was left out.
    """

    path: Path
    read: Callable[[], dict[str, Any]]
    images: list[dict[str, Any]]
    category_ids: list[int]
    class_names: list[str]
    records: list[bytes] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    clipped: int = 0
    present: set[int] = field(default_factory=set)
    unusable: list[str] = field(default_factory=list)

    def of_image(self, index: int) -> list[dict[str, Any]]:
        """The annotations of one image: id, box (xyxy, pixels), label (from 0), segmentation, iscrowd, area."""
        records: list[dict[str, Any]] = pickle.loads(self.records[index])
        return records

    def ground_truth(self) -> dict[str, Any]:
        """The content for the COCO tools, without the annotations that were left out; boxes are not cut."""
        content = self.read()
        entries = [content["annotations"][place] for place in self.kept]
        complete = [
            {**entry, "id": number, "iscrowd": int(bool(entry.get("iscrowd"))), "area": _area(entry)}
            for number, entry in enumerate(entries, start=1)  # to the tools an id of 0 means "not matched"
        ]
        return {"info": {}, "licenses": [], **content, "annotations": complete}


class Collected:
    """Annotations of another format, collected as a dictionary in COCO's format.

    complaints: a sentence for each annotation that cannot be used. unusable: the same for images.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        categories = [{"id": number, "name": name} for number, name in enumerate(class_names, start=1)]
        self.content: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": categories}
        self.places: list[str] = []
        self.complaints: list[str] = []
        self.unusable: list[str] = []

    def add_image(self, file_name: str, size: tuple[int, int]) -> None:
        """Adds an image of size (height, width), with its path in the folder of the images."""
        number = len(self.content["images"]) + 1
        self.content["images"].append({"id": number, "file_name": file_name, "height": size[0], "width": size[1]})

    def add_object(self, place: str, label: int, **entry: Any) -> None:
        """Adds an object to the last image: its place in the files, for messages, its class, and COCO's other keys."""
        number = len(self.places) + 1
        about = {"id": number, "image_id": len(self.content["images"]), "category_id": label + 1}
        self.content["annotations"].append(about | entry)
        self.places.append(place)

    def annotations(self, path: Path, needs_masks: bool) -> Annotations:
        """The annotations after all checks. path: file or folder that they come from."""
        read = partial(pickle.loads, pickle.dumps(self.content))
        known = check_annotations(path, read, needs_masks, places=self.places)
        known.complaints[:0] = self.complaints
        known.unusable = self.unusable
        return known


def read_annotations(path: str | Path, needs_masks: bool = True, class_names: list[str] | None = None) -> Annotations:
    """Reads a file in COCO's format. Annotations that cannot be used are left out, with a sentence in `complaints`.

    class_names: fixes the order of the classes; by default it is that of the category ids. Raises ValueError for a file
    that is missing or damaged, and for images and categories that cannot be used.
    """
    path = Path(path)
    return check_annotations(path, partial(_content, path), needs_masks, class_names)


def check_annotations(
    path: Path,
    read: Callable[[], dict[str, Any]],
    needs_masks: bool,
    class_names: list[str] | None = None,
    places: Sequence[str] | None = None,
) -> Annotations:
    """Checks what `read` returns, a dictionary in COCO's format; see read_annotations.

    places: the place of each annotation in the files, if they have another format.
    """
    content = read()
    category_ids, names = _categories(path, content["categories"], class_names)
    known = Annotations(path, read, _images(path, content["images"]), category_ids, names)
    place = {image["id"]: index for index, image in enumerate(known.images)}
    label_of = {category: label for label, category in enumerate(category_ids)}
    records: list[list[dict[str, Any]]] = [[] for _ in known.images]
    seen: set[Any] = set()
    for number, entry in enumerate(content["annotations"]):
        try:
            index, record = _checked(entry, place, known.images, label_of, needs_masks, seen)
        except UnusableEntryError as error:
            where = places[number] if places else " ".join(filter(None, (f"{path}:", error.name)))
            known.complaints.append(f"{where} {error}: correct or remove it.")
            continue
        known.kept.append(number)
        known.clipped += _clip(record["box"], known.images[index])
        records[index].append(record)
        known.present |= set() if record["iscrowd"] else {record["label"]}
    known.num_objects = [sum(not record["iscrowd"] for record in entries) for entries in records]
    known.records = [pickle.dumps(entries) for entries in records]
    return known


def _content(path: Path) -> dict[str, Any]:
    if not os.path.exists(path):
        raise ValueError(f"The annotation file {path} does not exist: check the path.")
    content = read_json(path)
    for name in LISTS:
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise ValueError(f"{path} has no list {name!r}: expected COCO's format with {', '.join(LISTS)}.")
    return dict(content)


def _images(path: Path, entries: list[Any]) -> list[dict[str, Any]]:
    images: dict[Any, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        image = {key: entry.get(key) for key in ("id", "file_name", "height", "width")} if type(entry) is dict else {}
        if not _is_id(image.get("id")) or not isinstance(image["file_name"], str) or not _has_size(image):
            raise ValueError(
                f"{path}: image number {number} is {_short(entry)}, expected a file_name, and whole numbers as id,"
                f" height and width (at most {MOST_PIXELS:,} pixels)."
            )
        if not stays_inside(image["file_name"]):
            raise ValueError(
                f"{path}: image {image['id']} has the file_name {_short(image['file_name'])}, expected a path inside"
                " the folder of the images: correct it."
            )
        if image["id"] in images:
            raise ValueError(f"{path}: two images have the id {image['id']}: number them differently.")
        images[image["id"]] = image
    return list(images.values())


def _categories(path: Path, entries: list[Any], class_names: list[str] | None) -> tuple[list[int], list[str]]:
    for entry in entries:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{path} has the category {_short(entry)}, expected a whole number as id, and a name.")
    named = dict(sorted((entry["id"], entry["name"]) for entry in entries))
    id_of = {name: category for category, name in named.items()}
    if not entries or len(id_of) != len(entries):
        raise ValueError(
            f"{path} has {len(entries)} categories with {len(named)} ids and {len(id_of)} names: expected one or more,"
            " each with an id and a name of its own."
        )
    if class_names is None:
        return list(named), list(named.values())
    if set(id_of) != set(class_names):
        odd = min(set(id_of) ^ set(class_names))
        raise ValueError(
            f"{path} has other categories than the {len(class_names)} classes known here ({odd!r} is only in one):"
            " use files with the same categories."
        )
    return [id_of[name] for name in class_names], list(class_names)


def _checked(
    entry: Any,
    place: dict[Any, int],
    images: list[dict[str, Any]],
    label_of: dict[Any, int],
    needs_masks: bool,
    seen: set[Any],
) -> tuple[int, dict[str, Any]]:
    """(index of the image, record) of one annotation; raises UnusableEntryError."""
    if not isinstance(entry, dict) or not _is_id(entry.get("id")):
        raise UnusableEntryError("", f"an annotation has no whole number as id ({_short(entry)})")
    name = f"annotation {entry['id']} of image {_short(entry.get('image_id'))}"
    if entry["id"] in seen:
        raise UnusableEntryError(name, "has the id of another annotation")
    seen.add(entry["id"])
    if not _is_id(entry.get("image_id")) or entry["image_id"] not in place:
        raise UnusableEntryError(name, "belongs to no image of the file")
    if not _is_id(entry.get("category_id")) or entry["category_id"] not in label_of:
        raise UnusableEntryError(name, f"has the unknown category {_short(entry.get('category_id'))}")
    index = place[entry["image_id"]]
    size = images[index]["height"], images[index]["width"]
    try:
        box = _box(entry.get("bbox"), size)
        area = _area(entry)
        if entry.get("iscrowd") not in (None, 0, 1):
            raise ValueError(f"has iscrowd {_short(entry['iscrowd'])}, expected 0 or 1")
        if needs_masks:
            check_mask(entry.get("segmentation"), size)
    except ValueError as error:
        raise UnusableEntryError(name, str(error)) from None
    return index, {
        "id": entry["id"],
        "box": box,
        "label": label_of[entry["category_id"]],
        "segmentation": entry.get("segmentation") if needs_masks else None,
        "iscrowd": int(bool(entry.get("iscrowd"))),
        "area": area,
    }


def _box(bbox: Any, size: tuple[int, int]) -> list[float]:
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        raise ValueError(f"has the bbox {_short(bbox)}, expected [x, y, width, height] in pixels")
    left, top, width, height = bbox
    if min(width, height) < SMALLEST_SIDE:
        raise ValueError(f"has a box of {width:g}×{height:g} px (width × height), smaller than a pixel")
    inside = min(left + width, size[1]) - max(left, 0), min(top + height, size[0]) - max(top, 0)
    if min(inside) < SMALLEST_SIDE:
        turned = left + width <= size[0] and top + height <= size[1]
        hint = ", whose EXIF data may turn it after the boxes were drawn" if turned else ""
        raise ValueError(f"has the box {bbox} outside its image of {size[0]}×{size[1]} px (height × width){hint}")
    return [left, top, left + width, top + height]


def _area(entry: dict[str, Any]) -> float:
    """The area that the file states, otherwise that of the box."""
    area = entry.get("area")
    if area is None:
        return float(entry["bbox"][2] * entry["bbox"][3])
    if not _is_number(area) or not 0 <= area <= MOST_PIXELS:
        raise ValueError(f"has the area {_short(area)}, expected a number of pixels")
    return float(area)


def _clip(box: list[float], image: dict[str, Any]) -> bool:
    """Cuts a box at the image border, in place; returns whether that was more than rounding."""
    before = list(box)
    box[:] = [
        min(max(side, 0.0), float(limit))
        for side, limit in zip(box, (image["width"], image["height"]) * 2, strict=True)
    ]
    return max(abs(new - old) for new, old in zip(box, before, strict=True)) > ROUNDING


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST_PIXELS  # NaN is not


def _is_id(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST_ID


def _has_size(image: dict[str, Any]) -> bool:
    height, width = image["height"], image["width"]
    return type(height) is type(width) is int and min(height, width) > 0 and height * width <= MOST_PIXELS


def _short(value: Any) -> str:
    """The beginning of a value of the file, on one line."""
    text = " ".join(repr(value).split()) if not isinstance(value, int) or _is_id(value) else "a huge number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
