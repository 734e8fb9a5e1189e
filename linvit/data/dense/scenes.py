"""Scenes of real handwritten digits in COCO's and ADE20K's formats and with a table of labels; nothing to download.

The digits come with scikit-learn and are split once, stratified by class: training scenes show 1,400 of them,
validation scenes the 397 others.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from scipy.ndimage import binary_dilation, zoom

from linvit.data.dense.annotations import box_around, to_counts, to_runs
from linvit.data.dense.label_maps import ADE20K_SPLITS
from linvit.files import replacing, write_json
from linvit.ranges import Count, Range, Seed, check

VERSION = 1  # increased when the scenes of a seed change
CLASSES = 10
HELD_OUT = 397
FEWEST, MOST = 3, 7
SMALLEST, LARGEST = 1 / 8, 3 / 8  # side of a digit, as a share of the scene's
INK = 0.5  # pixels with at least this share of ink belong to the digit
TRIES, COVERED_SHARE = 10, 0.3
VISIBLE_PIXELS, VISIBLE_SHARE = 20, 0.25  # a digit of which less is visible is a crowd, which is not scored
SETTINGS = "scenes.json"
CANVAS_LABEL, FIRST_DIGIT_LABEL = 1, 2


@dataclass(frozen=True)
class Scene:
    """A scene of digits.

    image: uint8 (height, width, 3). owners: int16 (height, width), the number of the topmost digit, −1 for the canvas.
    digits: class of each digit. areas: pixels of each digit before others covered it.
    """

    image: np.ndarray
    owners: np.ndarray
    digits: list[int]
    areas: list[int]


def source_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The digits of a split's scenes: ink in 0..1, float64 (n, 8, 8), and classes, int64 (n,)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    train, val = train_test_split(np.arange(len(classes)), test_size=HELD_OUT, random_state=0, stratify=classes)
    chosen = {"train": train, "val": val}[split]
    return pixels[chosen].reshape(-1, 8, 8) / 16, classes[chosen]


def draw_scene(sources: tuple[np.ndarray, np.ndarray], size: int, generator: np.random.Generator) -> Scene:
    """Three to seven digits of random sizes and colours on a noisy canvas, size × size px; later ones cover others."""
    inks, classes = sources
    canvas = _canvas(size, generator)
    owners = np.full((size, size), -1, np.int16)
    digits: list[int] = []
    areas: list[int] = []
    for number in range(generator.integers(FEWEST, MOST + 1)):
        chosen = generator.integers(len(classes))
        side = int(generator.integers(round(size * SMALLEST), round(size * LARGEST) + 1))
        ink = np.clip(zoom(inks[chosen], side / 8, order=1, grid_mode=True, mode="nearest"), 0, 1)
        inside = ink >= INK
        window = _place(inside, owners, areas, generator)
        color = generator.uniform(0.2, 1.0, 3)
        canvas[window] += ink[..., None] * (color * generator.uniform(0.75, 1.0) / color.max() - canvas[window])
        owners[window][inside] = number
        digits.append(int(classes[chosen]))
        areas.append(int(inside.sum()))
    canvas += generator.normal(0, 0.03, canvas.shape)
    return Scene((canvas.clip(0, 1) * 255).round().astype(np.uint8), owners, digits, areas)


def coco_annotations(scene: Scene, image_id: int, first_id: int) -> list[dict[str, Any]]:
    """An annotation for each visible digit: box, area and run lengths of its visible pixels; fragments are crowds."""
    annotations: list[dict[str, Any]] = []
    for number, (digit, whole) in enumerate(zip(scene.digits, scene.areas, strict=True)):
        mask = scene.owners == number
        area = int(mask.sum())
        if not area:
            continue
        fragment = area < max(VISIBLE_PIXELS, VISIBLE_SHARE * whole)
        annotations.append(
            {
                "id": first_id + len(annotations),
                "image_id": image_id,
                "category_id": digit + 1,
                "bbox": list(box_around(to_runs(mask))),
                "area": area,
                "iscrowd": int(fragment),
                "segmentation": to_counts(mask) if fragment else to_runs(mask),
            }
        )
    return annotations


def label_map(scene: Scene) -> np.ndarray:
    """A label map like ADE20K's, uint8 (height, width): 1 canvas, 2 to 11 digits, 0 in a thin band between digits."""
    label_of = np.array([CANVAS_LABEL, *(FIRST_DIGIT_LABEL + digit for digit in scene.digits)], np.uint8)
    labels: np.ndarray = label_of[scene.owners + 1]
    near = [binary_dilation(scene.owners == number, np.ones((3, 3))) for number in range(len(scene.digits))]
    labels[(scene.owners >= 0) & (np.sum(near, 0) > 1)] = 0
    return labels


def make_scenes(folder: str | Path, train: int, val: int, size: int, seed: int) -> Iterator[str]:
    """Writes a detection set into folder/detection and a segmentation set into folder/segmentation.

    folder/detection/labels.csv lists the digits of each image, fragments left out, for multi-label classification.

    Yields the name of each scene as soon as it is written, train + val in total. The same arguments produce the same
    bytes; files of a stopped call are kept. Raises ValueError for a folder with anything else in it, and for sizes and
    counts that are too small.
    """
    folder = Path(folder)
    settings = {"version": VERSION, "train": train, "val": val, "size": size, "seed": seed}
    _check(folder, settings)
    write_json(folder / SETTINGS, settings)
    labels = ["file,labels,split"]
    for number, (split, count) in enumerate((("train", train), ("val", val))):
        sources = source_digits(split)
        content = _coco_header(settings, split)
        for index in range(1, count + 1):
            scene = draw_scene(sources, size, np.random.default_rng([seed, number, index]))
            name = f"{index:06d}.jpg"
            about = {"id": index, "file_name": name, "width": size, "height": size, "license": 1}
            content["images"].append(about)
            annotations = coco_annotations(scene, index, len(content["annotations"]) + 1)
            content["annotations"] += annotations
            digits = sorted({str(entry["category_id"] - 1) for entry in annotations if not entry["iscrowd"]})
            labels.append(f"images/{split}/{name},{'|'.join(digits)},{split}")
            jpeg, segmentation = {"format": "JPEG", "quality": 95, "subsampling": 0}, folder / "segmentation"
            _save(scene.image, folder / "detection" / "images" / split / name, jpeg)
            _save(scene.image, segmentation / "images" / ADE20K_SPLITS[split] / name, jpeg)
            labels_path = (segmentation / "annotations" / ADE20K_SPLITS[split] / name).with_suffix(".png")
            _save(label_map(scene), labels_path, {"format": "PNG"})
            yield f"{split} {index}"
        write_json(folder / "detection" / "annotations" / f"instances_{split}.json", content)
    with replacing(folder / "detection" / "labels.csv") as temporary:
        temporary.write_text("\n".join([*labels, ""]))
    names = ["canvas", *map(str, range(CLASSES))]
    rows = [f"{number}\t0\t0\t0\t{int(number == 1)}\t{name}" for number, name in enumerate(names, start=1)]
    with replacing(folder / "segmentation" / "objectInfo11.txt") as temporary:
        temporary.write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows, ""]))


def _canvas(size: int, generator: np.random.Generator) -> np.ndarray:
    """A dark canvas with a light tint and a smooth change of brightness: float64 (size, size, 3) in 0..1."""
    corners = generator.uniform(0.05, 0.35, (2, 2))
    steps = np.linspace(0, 1, size)
    light = np.stack([1 - steps, steps], 1) @ corners @ np.stack([1 - steps, steps])
    return light[..., None] * generator.uniform(0.7, 1.3, 3)


def _place(
    inside: np.ndarray, owners: np.ndarray, areas: list[int], generator: np.random.Generator
) -> tuple[slice, slice]:
    """A random window for a digit; up to ten are tried until one does not cover too much of another digit."""
    for _ in range(TRIES):
        top, left = generator.integers(0, np.array(owners.shape) - inside.shape + 1)
        window = slice(top, top + inside.shape[0]), slice(left, left + inside.shape[1])
        covered = np.bincount(owners[window][inside] + 1, minlength=len(areas) + 1)[1:]
        if (covered <= COVERED_SHARE * np.array(areas)).all():
            break
    return window


def _check(folder: Path, settings: dict[str, int]) -> None:
    check({"seed": Seed, "size": Annotated[int, Range(64)], "train": Count, "val": Count}, settings)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        before = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError):
        raise ValueError(f"{folder} is neither empty nor a folder of scenes: choose another one.") from None
    if before != settings:
        shown = ", ".join(f"{key} {value}" for key, value in before.items())
        raise ValueError(
            f"{folder} has scenes made with other settings ({shown}): choose another folder, or delete it."
        )


def _coco_header(settings: dict[str, int], split: str) -> dict[str, Any]:
    about = f"Scenes of scikit-learn's handwritten digits, {split}, seed {settings['seed']}"
    return {
        "info": {"description": about, "version": str(VERSION), "year": 2026, "contributor": "", "date_created": ""},
        "licenses": [{"id": 1, "name": "that of scikit-learn's digits", "url": ""}],
        "images": [],
        "annotations": [],
        "categories": [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(CLASSES)],
    }


def _save(pixels: np.ndarray, path: Path, options: dict[str, Any]) -> None:
    if not path.is_file():
        with replacing(path) as temporary:
            Image.fromarray(pixels).save(temporary, **options)
