"""Annotations in COCO's format, checked entry by entry before anything trains on them.

Masks are polygons, or run lengths along the columns, plain or compressed to a string.
"""

import dataclasses
import math
import pickle
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from linvit.data.disk import read_json, stays_inside
from linvit.errors import quoted, refuse

SMALLEST_SIDE = 1  # pixels; smaller boxes are what mmdetection ignores too
ROUNDING = 0.1  # pixels; COCO's own boxes leave their images by less
LONGEST_SIDE = 2**16  # pixels
FARTHEST = 2  # times the longer side of the image; time and memory for a polygon grow with its size
LARGEST_ID = 2**53  # exact in the COCO tools and every JSON reader
Segmentation = dict[str, Any] | list[list[float]]


def is_id(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number that the COCO tools can tell from its neighbours."""
    return type(value) is int and abs(value) <= LARGEST_ID


def is_number(value: Any) -> bool:
    """Whether it is a finite number that pixels can be counted with."""
    return type(value) in (int, float) and abs(value) <= LONGEST_SIDE**2  # NaN is not


class Field(NamedTuple):
    """A condition on a value of an entry, and the values that meet it, in words."""

    holds: Callable[[Any], bool]
    expected: str


ID = Field(is_id, "a whole number")
SIDE = Field(lambda value: is_id(value) and 0 < value <= LONGEST_SIDE, f"a whole number from 1 to {LONGEST_SIDE:,}")
NAME = Field(lambda value: isinstance(value, str), "text")
LIST = Field(lambda value: isinstance(value, list), "a list, as in COCO's format")
FILE_NAME = Field(
    lambda value: isinstance(value, str) and stays_inside(value), "a path inside the folder of the images"
)
FIELDS: Mapping[str, Mapping[str, Field]] = {
    "images": {"id": ID, "file_name": FILE_NAME, "height": SIDE, "width": SIDE},
    "annotations": {},  # are checked one by one
    "categories": {"id": ID, "name": NAME},
}


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
    records: list[bytes] = dataclasses.field(default_factory=list)
    num_objects: list[int] = dataclasses.field(default_factory=list)
    complaints: list[str] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    clipped: int = 0
    present: set[int] = dataclasses.field(default_factory=set)
    unusable: list[str] = dataclasses.field(default_factory=list)

    def of_image(self, index: int) -> list[dict[str, Any]]:
        """The annotations of one image: id, box (xyxy, pixels), label (from 0), segmentation, iscrowd, area."""
        return pickle.loads(self.records[index])

    def ground_truth(self) -> dict[str, Any]:
        """The content for the COCO tools, without the annotations that were left out; boxes are not cut."""
        content = self.read()
        entries = [content["annotations"][place] for place in self.kept]
        complete = [
            {**entry, "id": number, "iscrowd": int(bool(entry.get("iscrowd"))), "area": stated_area(entry)}
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
        annotations = check_annotations(path, self.content, read, needs_masks, places=self.places)
        annotations.complaints[:0] = self.complaints
        annotations.unusable = self.unusable
        return annotations


def read_annotations(path: str | Path, needs_masks: bool = True, class_names: list[str] | None = None) -> Annotations:
    """Reads a file in COCO's format. Annotations that cannot be used are left out, with a sentence in `complaints`.

    class_names: fixes the order of the classes; by default it is that of the category ids. Raises ValueError for a file
    that is missing or damaged, and for images and categories that cannot be used.
    """
    path = Path(path)
    content = read_lists(path, FIELDS)
    return check_annotations(path, content, partial(read_json, path), needs_masks, class_names)


def read_lists(path: Path, fields: Mapping[str, Mapping[str, Field]]) -> dict[str, list[Any]]:
    """The lists of a JSON file in one of COCO's formats; ValueError, naming the entry, if one of them is amiss."""
    content = read_json(path)
    check_fields(str(path), content, dict.fromkeys(fields, LIST))
    for name, of_entry in fields.items():
        for number, entry in enumerate(content[name] if of_entry else ()):
            check_fields(f"{path}: entry {number} of {name}", entry, of_entry)
    categories = content["categories"]
    ids, names = ({category[key] for category in categories} for key in ("id", "name"))
    if not categories or min(len(ids), len(names)) < len(categories):
        raise ValueError(
            f"{path} has {len(categories)} categories with {len(ids)} ids and {len(names)} names: expected one or more,"
            " each with an id and a name of its own."
        )
    return dict(content)


def check_fields(place: str, entry: Any, fields: Mapping[str, Field]) -> None:
    """Raises ValueError for an entry without such fields; place: of the entry in its file, in words."""
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is {quoted(entry)}, expected an object with {', '.join(fields)}: correct it.")
    for key, field in fields.items():
        value = entry.get(key)
        if not field.holds(value):
            raise ValueError(f"{place} has {quoted(value)} as {key}, expected {field.expected}: correct it.")


def names_by_id(categories: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The names of the categories by their ids, in the order of the ids."""
    return dict(sorted((category["id"], category["name"]) for category in categories))


def check_annotations(
    path: Path,
    content: Mapping[str, list[Any]],
    read: Callable[[], dict[str, Any]],
    needs_masks: bool,
    class_names: list[str] | None = None,
    places: Sequence[str] | None = None,
) -> Annotations:
    """Checks the annotations of a dictionary in COCO's format, which `read` returns again; see read_annotations.

    places: the place of each annotation in the files, if they have another format.
    """
    images = {image["id"]: {key: image[key] for key in FIELDS["images"]} for image in content["images"]}
    ids = Counter(image["id"] for image in content["images"])
    names = names_by_id(content["categories"])
    class_names = list(names.values() if class_names is None else class_names)
    odd = set(names.values()) ^ set(class_names)
    refuse(
        len(ids) < ids.total()
        and f"{path}: two images have the id {ids.most_common(1)[0][0]}: number them differently.",
        odd
        and f"{path} has other categories than the {len(class_names)} classes known here ({min(odd)!r} is only in one):"
        " use files with the same categories.",
    )
    label_of = {category: class_names.index(name) for category, name in names.items()}
    category_ids = sorted(label_of, key=label_of.__getitem__)
    checked = Annotations(path, read, list(images.values()), category_ids, class_names)
    records: dict[int, list[dict[str, Any]]] = {number: [] for number in images}
    seen: set[int] = set()
    for number, entry in enumerate(content["annotations"]):
        entry = entry if isinstance(entry, dict) else {}
        fault = fault_in(entry, images, label_of, seen, needs_masks)
        has_id = is_id(entry.get("id"))
        if has_id:
            seen.add(entry["id"])
        if fault:
            place = f"{path}: annotation {entry.get('id')} of image {quoted(entry.get('image_id'))}"
            place = place if has_id else f"{path}: entry {number} of annotations"
            checked.complaints.append(f"{places[number] if places else place} {fault}: correct or remove it.")
            continue
        image, label, crowd = images[entry["image_id"]], label_of[entry["category_id"]], bool(entry.get("iscrowd"))
        left, top, width, height = entry["bbox"]
        corners, limits = (left, top, left + width, top + height), (image["width"], image["height"]) * 2
        box = [min(max(side, 0.0), float(limit)) for side, limit in zip(corners, limits, strict=True)]
        checked.clipped += any(abs(new - old) > ROUNDING for new, old in zip(box, corners, strict=True))
        checked.present |= set() if crowd else {label}
        checked.kept.append(number)
        records[entry["image_id"]].append(
            {
                "id": entry["id"],
                "box": box,
                "label": label,
                "segmentation": entry.get("segmentation") if needs_masks else None,
                "iscrowd": int(crowd),
                "area": stated_area(entry),
            }
        )
    checked.num_objects = [sum(not record["iscrowd"] for record in entries) for entries in records.values()]
    checked.records = [pickle.dumps(entries) for entries in records.values()]
    return checked


def fault_in(
    entry: Mapping[str, Any],
    images: Mapping[int, Mapping[str, Any]],
    categories: Container[int],
    seen: Container[int],
    needs_masks: bool,
) -> str:
    """Why an annotation cannot be used, as the end of a sentence; "" if it can be.

    images, categories: those of the file, by their ids. seen: the ids of the annotations before it.
    """
    number, image, category = entry.get("id"), entry.get("image_id"), entry.get("category_id")
    box, area, crowd = entry.get("bbox"), entry.get("area"), entry.get("iscrowd")
    if not is_id(number):
        return f"has the id {quoted(number)}, expected a whole number"
    if number in seen:
        return "has the id of another annotation"
    if not is_id(image) or image not in images:
        return "belongs to no image of the file"
    if not is_id(category) or category not in categories:
        return f"has the unknown category {quoted(category)}"
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        return f"has the bbox {quoted(box)}, expected [x, y, width, height] in pixels"
    if area is not None and not (is_number(area) and area >= 0):
        return f"has the area {quoted(area)}, expected a number of pixels"
    if crowd not in (None, 0, 1):
        return f"has iscrowd {quoted(crowd)}, expected 0 or 1"
    left, top, width, height = box
    tall, wide = images[image]["height"], images[image]["width"]
    if min(width, height) < SMALLEST_SIDE:
        return f"has a box of {width:g}×{height:g} px (width × height), smaller than a pixel"
    inside = min(left + width, wide) - max(left, 0), min(top + height, tall) - max(top, 0)
    if min(inside) < SMALLEST_SIDE:
        turned = left + width <= tall and top + height <= wide
        hint = ", whose EXIF data may turn it after the boxes were drawn" if turned else ""
        return f"has the box {box} outside its image of {tall}×{wide} px (height × width){hint}"
    return mask_fault(entry.get("segmentation"), (tall, wide)) if needs_masks else ""


def is_number_in_text(word: str) -> bool:
    """Whether a word of a text file is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def stated_area(entry: Mapping[str, Any]) -> float:
    """The area that the file states, otherwise that of the box."""
    return float(entry["bbox"][2] * entry["bbox"][3] if entry.get("area") is None else entry["area"])


def to_mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
    """Draws polygons (their union) or run lengths without a fault: uint8 (height, width), 1 inside."""
    if isinstance(segmentation, list):
        segmentation = _runs().merge(_runs().frPyObjects(segmentation, *size))
    elif isinstance(segmentation["counts"], list):
        segmentation = _runs().frPyObjects(segmentation, *size)
    return _runs().decode(segmentation)


def mask_fault(segmentation: Any, size: tuple[int, int]) -> str:
    """Why a segmentation cannot be used, as the end of a sentence; "" if it can be. Polygons are not drawn for this."""
    pixels = f"{size[0]}×{size[1]} px"
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if not isinstance(segmentation.get("size"), list | tuple) or tuple(segmentation["size"]) != tuple(size):
            size_of_mask = quoted(segmentation.get("size"))
            return f"has a mask of the size {size_of_mask}, but its image has {pixels} (height × width)"
        if isinstance(counts, list):
            are_counts = all(type(count) is int and count >= 0 for count in counts)
            if not are_counts or sum(counts) != size[0] * size[1]:
                return f"has run lengths that do not fill its {pixels}"
        try:
            return "" if to_mask(segmentation, size).any() else "has a mask without a pixel in it"
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            return f"has run lengths that do not fill its {pixels}"
    if not isinstance(segmentation, list) or not segmentation:
        return "has no mask, expected polygons or run lengths"
    farthest = FARTHEST * max(size)
    for polygon in segmentation:
        has_pairs = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0
        if not has_pairs or set(map(type, polygon)) - {int, float} or any(map(ne, polygon, polygon)):  # as NaN is
            return "has a polygon that is not a list of three or more pairs of numbers x, y"
        if not -farthest <= min(polygon) <= max(polygon) <= farthest:
            return f"has a polygon far outside its image of {pixels} (height × width)"
    return "" if any(map(area_of, segmentation)) else "has a polygon without an area"


def to_runs(mask: np.ndarray) -> dict[str, Any]:
    """Compressed run lengths of a mask (height, width), as a string for JSON."""
    encoded = _runs().encode(np.asfortranarray(mask, dtype=np.uint8))
    counts = encoded["counts"]
    return {"size": list(mask.shape), "counts": counts if isinstance(counts, str) else counts.decode()}


def to_counts(mask: np.ndarray) -> dict[str, Any]:
    """Plain run lengths of a mask (height, width), beginning with zeros, as in COCO's crowds."""
    flat = np.asarray(mask, dtype=np.uint8).ravel(order="F")
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    lengths = np.diff(bounds).tolist()
    return {"size": list(mask.shape), "counts": [0, *lengths] if flat[0] else lengths}


def box_around(runs: dict[str, Any]) -> tuple[float, float, float, float]:
    """x, y, width and height of the smallest box around the pixels of compressed run lengths; zeros without pixels."""
    return tuple(_runs().toBbox(runs).tolist())


@cache
def _runs() -> Any:
    """Imported with the first mask, because sources without masks do not need it."""
    from faster_coco_eval import mask

    return mask


def area_of(polygon: Sequence[float]) -> float:
    """The area of a polygon x, y, x, y … in square pixels (the shoelace formula)."""
    across, down = polygon[::2], polygon[1::2]
    doubled = sum(across[i - 1] * down[i] - across[i] * down[i - 1] for i in range(len(across)))
    return abs(doubled) / 2
