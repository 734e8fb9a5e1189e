"""The same images with the same objects, written in every format of detection and segmentation."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["cat", "dog"]
# split → name → (height, width) and objects: class, left, top, right, bottom in pixels, the last ones excluded
IMAGES = {
    "train": {
        "a": ((40, 60), [(0, 2, 3, 12, 20), (1, 30, 8, 58, 36)]),
        "b": ((48, 36), [(1, 0, 0, 10, 9)]),
        "c": ((44, 44), [(0, 20, 21, 43, 44), (0, 1, 1, 9, 17)]),
    },
    "val": {"d": ((36, 64), [(1, 5, 6, 25, 26)]), "e": ((50, 40), [(0, 3, 30, 39, 49), (1, 10, 2, 30, 12)])},
}
EVERY = {name: about for images in IMAGES.values() for name, about in images.items()}
VOID = 7


def write_image(path: Path, size: tuple[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)).save(path)


def write_array(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def xml(size, objects, difficult=()) -> str:
    """One of VOC's annotations; its boxes count from 1 and include their last pixels."""
    entries = "".join(
        f"<object><name>{CLASSES[label]}</name><difficult>{int(number in difficult)}</difficult><bndbox>"
        f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for number, (label, left, top, right, bottom) in enumerate(objects)
    )
    about = f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>"
    return f"<annotation><filename>any.jpg</filename>{about}{entries}</annotation>"


def write_voc(root: Path, lists: bool = True) -> Path:
    for name, (size, objects) in EVERY.items():
        write_image(root / "JPEGImages" / f"{name}.jpg", size)
        path = root / "Annotations" / f"{name}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(xml(size, objects))
    for split, images in IMAGES.items() if lists else ():
        path = root / "ImageSets" / "Main" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*images, ""]))
    return root


def yolo_lines(size, objects, polygons=False) -> str:
    height, width = size
    lines = []
    for label, left, top, right, bottom in objects:
        box = [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        polygon = [value for x, y in corners for value in (x / width, y / height)]
        lines.append(" ".join(map(str, [label, *(polygon if polygons else box)])))
    return "\n".join([*lines, ""])


def write_yolo(root: Path, shape: str = "images/{}", polygons: bool = False) -> Path:
    """shape: the folder of a split's images; without {}, both splits are in the same one."""
    for split, images in IMAGES.items():
        for name, (size, objects) in images.items():
            folder = shape.format(split)
            write_image(root / folder / f"{name}.jpg", size)
            labels = root / folder.replace("images", "labels") / f"{name}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text(yolo_lines(size, objects, polygons))
    (root / "data.yaml").write_text(json.dumps({"names": CLASSES}))
    return root


def mask_of(size, box) -> np.ndarray:
    left, top, right, bottom = box
    mask = np.zeros(size, np.uint8)
    mask[top:bottom, left:right] = 255
    return mask


def write_masks(root: Path, divided: bool = True) -> Path:
    """One folder for each image, one mask for each object."""
    for split, images in IMAGES.items():
        for name, (size, objects) in images.items():
            folder = root / (split if divided else "") / name
            write_image(folder / "images" / f"{name}.png", size)
            for number, (_, *box) in enumerate(objects):
                write_array(folder / "masks" / f"{number}.png", mask_of(size, box))
    return root


def write_id_maps(root: Path, images: str = "PNGImages", maps: str = "PedMasks", ending: str = "_mask") -> Path:
    """A map for each image, with a number for each object."""
    for split, by_name in IMAGES.items():
        for name, (size, objects) in by_name.items():
            write_image(root / split / images / f"{name}.png", size)
            values = sum(mask_of(size, box) // 255 * (number + 3) for number, (_, *box) in enumerate(objects))
            write_array(root / split / maps / f"{name}{ending}.png", values)
    return root


def labels_of(size, objects) -> np.ndarray:
    """0 without an object, and 1 + class of an object; the first row is void."""
    labels = np.zeros(size, np.uint8)
    for label, *box in objects:
        labels[mask_of(size, box) > 0] = 1 + label
    labels[0] = VOID
    return labels


def write_label_maps(root: Path, images: str = "{}", maps: str = "{}annot") -> Path:
    for split, by_name in IMAGES.items():
        for name, (size, objects) in by_name.items():
            write_image(root / images.format(split) / f"{name}.png", size)
            write_array(root / maps.format(split) / f"{name}.png", labels_of(size, objects))
    (root / "classes.txt").write_text("background\ncat\ndog\n")
    return root


def write_panoptic(root: Path) -> Path:
    """Segments of the classes cat (3) and dog (900), numbered beyond one byte; everything else has no segment."""
    for split, by_name in IMAGES.items():
        annotations, images = [], []
        for number, (name, (size, objects)) in enumerate(by_name.items()):
            write_image(root / "images" / f"{split}2017" / f"{name}.jpg", size)
            values = np.zeros((*size, 3), np.uint8)
            segments = []
            for place, (label, *box) in enumerate(objects):
                values[mask_of(size, box) > 0] = (place, 1, 2 + place)
                segments.append({"id": place + 256 + 256**2 * (2 + place), "category_id": (3, 900)[label]})
            write_array(root / "annotations" / f"panoptic_{split}2017" / f"{name}.png", values)
            images.append({"id": number, "file_name": f"{name}.jpg", "height": size[0], "width": size[1]})
            annotations.append({"image_id": number, "file_name": f"{name}.png", "segments_info": segments})
        categories = [{"id": 900, "name": "dog"}, {"id": 3, "name": "cat"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"panoptic_{split}2017.json").write_text(json.dumps(content))
    return root
