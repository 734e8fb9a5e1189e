"""A file of annotations in COCO's format, read whole and checked entry by entry before anything trains on it."""

import json
import logging
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linvit.data.dense.masks import check_mask
from linvit.data.order import NAMED

SMALLEST_SIDE = 1  # pixels; smaller boxes are what mmdetection ignores too
ROUNDING = 0.1  # pixels; COCO's own boxes leave their images by less
LISTS = ("images", "annotations", "categories")

logger = logging.getLogger(__name__)


@dataclass
class Annotations:
    """What a file says, with classes numbered from 0.

    images: id, file_name, height, width each. records: each image's annotations, pickled: reading processes share
    bytes, but would copy millions of numbers. num_objects: how many of each image's are no crowds. category_ids: the
    file's number of each class. complaints: one sentence for each annotation that was left out. kept: places in the
    file of those that were not. clipped: how many boxes were cut at their image's border.
    """

    path: Path
    images: list[dict[str, Any]]
    category_ids: list[int]
    class_names: list[str]
    records: list[bytes] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    clipped: int = 0

    def of_image(self, index: int) -> list[dict[str, Any]]:
        """Annotations of one image: id, box (xyxy, pixels), label (from 0), segmentation, iscrowd, area."""
        return pickle.loads(self.records[index])

    def ground_truth(self) -> dict[str, Any]:
        """The file's content as the COCO tools take it, without what was left out; boxes are not cut."""
        content = _content(self.path)
        entries = [content["annotations"][place] for place in self.kept]
        complete = [
            {**entry, "id": number, "iscrowd": int(bool(entry.get("iscrowd"))), "area": _area(entry)}
            for number, entry in enumerate(entries, start=1)  # the tools take an id of 0 for "not matched"
        ]
        return {"info": {}, "licenses": [], **content, "annotations": complete}


def read_annotations(path: str | Path, needs_masks: bool = True, class_names: list[str] | None = None) -> Annotations:
    """Reads a file in COCO's format; entries that cannot be used are left out and complained about.

    class_names fixes the order of the classes, else it is that of the category ids. Raises ValueError for what no
    entry can be used after: no such file, a file that is cut short, images without id, name or size, odd categories.
    """
    path = Path(path)
    content = _content(path)
    category_ids, names = _categories(path, content["categories"], class_names)
    known = Annotations(path, _images(path, content["images"]), category_ids, names)
    place = {image["id"]: index for index, image in enumerate(known.images)}
    label_of = {category: label for label, category in enumerate(category_ids)}
    records: list[list[dict[str, Any]]] = [[] for _ in known.images]
    seen: set[Any] = set()
    for number, entry in enumerate(content["annotations"]):
        try:
            index, record = _checked(entry, place, known.images, label_of, needs_masks, seen)
        except ValueError as error:
            known.complaints.append(f"{path}: {error}: correct or remove it.")
            continue
        known.kept.append(number)
        known.clipped += _clip(record["box"], known.images[index])
        records[index].append(record)
    known.num_objects = [sum(not record["iscrowd"] for record in entries) for entries in records]
    known.records = [pickle.dumps(entries) for entries in records]
    return known


def allow(complaints: Sequence[str], limit: int, argument: str) -> None:
    """Warns about what is left out; raises ValueError where that is more than limit. Both name the first few."""
    if not complaints:
        return
    named = "\n  ".join(complaints[:NAMED])
    if len(complaints) > NAMED:
        named += f"\n  and {len(complaints) - NAMED} more."
    if len(complaints) > limit:
        first, *others = named.split("\n", 1)
        more = f" More than `{argument}`={limit} ({len(complaints)} in all)." if limit or others else ""
        raise ValueError("\n".join([first + more, *others]))
    logger.warning("Left out (%d of at most %d): %s", len(complaints), limit, named)


def _content(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"The annotation file {path} does not exist: set `root` to the folder that holds it.")
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not complete JSON ({error}), probably cut short: use another copy.") from None
    for name in LISTS:
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise ValueError(f"{path} has no list {name!r}: expected COCO's format with {', '.join(LISTS)}.")
    return content


def _images(path: Path, entries: list[Any]) -> list[dict[str, Any]]:
    images: dict[Any, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        image = {key: entry.get(key) for key in ("id", "file_name", "height", "width")} if type(entry) is dict else {}
        sizes = (image.get("height"), image.get("width"))
        if type(image.get("id")) is not int or not isinstance(image["file_name"], str) or not all(map(_is_size, sizes)):
            raise ValueError(f"{path}: image number {number} is {entry}, expected id, file_name, height and width.")
        if image["id"] in images:
            raise ValueError(f"{path}: two images have the id {image['id']}: number them differently.")
        images[image["id"]] = image
    return list(images.values())


def _categories(path: Path, entries: list[Any], class_names: list[str] | None) -> tuple[list[int], list[str]]:
    try:
        named = dict(sorted((int(entry["id"]), str(entry["name"])) for entry in entries))
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path} has categories without id or name: expected both in each.") from None
    id_of = {name: category for category, name in named.items()}
    if not entries or len(id_of) != len(entries):
        raise ValueError(f"{path} has {len(entries)} categories of {len(id_of)} names: expected one id and name each.")
    if class_names is None:
        return list(named), list(named.values())
    if set(id_of) != set(class_names):
        odd = min(set(id_of) ^ set(class_names))
        raise ValueError(
            f"{path} has other categories than the {len(class_names)} classes known here ({odd!r} is in one alone): use"
            " files with the same categories."
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
    """(index of the image, record) of one annotation; a ValueError's text says what is wrong with it."""
    if not isinstance(entry, dict) or type(entry.get("id")) is not int:
        raise ValueError(f"an annotation has no id that is a whole number ({str(entry)[:80]})")
    name = f"annotation {entry['id']} of image {entry.get('image_id')}"
    if entry["id"] in seen:
        raise ValueError(f"{name} has the id of another annotation")
    seen.add(entry["id"])
    if not _hashable(entry.get("image_id")) or entry.get("image_id") not in place:
        raise ValueError(f"{name} belongs to no image of the file")
    if not _hashable(entry.get("category_id")) or entry.get("category_id") not in label_of:
        raise ValueError(f"{name} has the unknown category {entry.get('category_id')}")
    index = place[entry["image_id"]]
    size = images[index]["height"], images[index]["width"]
    try:
        box = _box(entry.get("bbox"), size)
        if needs_masks:
            check_mask(entry.get("segmentation"), size)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    return index, {
        "id": entry["id"],
        "box": box,
        "label": label_of[entry["category_id"]],
        "segmentation": entry.get("segmentation") if needs_masks else None,
        "iscrowd": int(bool(entry.get("iscrowd"))),
        "area": _area(entry),
    }


def _box(bbox: Any, size: tuple[int, int]) -> list[float]:
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        raise ValueError(f"has the bbox {bbox}, expected [x, y, width, height] in pixels")
    left, top, width, height = bbox
    if min(width, height) < SMALLEST_SIDE:
        raise ValueError(f"has a box of {width:g}×{height:g} px (width × height), less than a pixel")
    inside = min(left + width, size[1]) - max(left, 0), min(top + height, size[0]) - max(top, 0)
    if min(inside) < SMALLEST_SIDE:
        raise ValueError(f"has the box {bbox} outside its image of {size[0]}×{size[1]} px (height × width)")
    return [left, top, left + width, top + height]


def _area(entry: dict[str, Any]) -> float:
    """As written, else that of the box."""
    return float(entry["area"]) if _is_number(entry.get("area")) else float(entry["bbox"][2] * entry["bbox"][3])


def _clip(box: list[float], image: dict[str, Any]) -> bool:
    """Cuts a box at its image's border, in place; says whether that was more than rounding."""
    before = list(box)
    box[:] = [
        min(max(side, 0.0), float(limit))
        for side, limit in zip(box, (image["width"], image["height"]) * 2, strict=True)
    ]
    return max(abs(new - old) for new, old in zip(box, before, strict=True)) > ROUNDING


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _hashable(value: Any) -> bool:
    return isinstance(value, (int, str))
