"""`linvit predict` of detectors and segmentors: a table, or a folder of pictures with COCO's JSON or label maps."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torchvision.ops import box_convert

from linvit.analysis.dense_images import draw_map, draw_objects, shares
from linvit.data.dense.coco import to_original, to_results
from linvit.data.dense.masks import to_mask
from linvit.data.dense.source import read_image
from linvit.data.images.image import SMALLEST, CorruptImageError
from linvit.files import check_writable, replacing
from linvit.runs.predict import WRITERS, find_images, ready_network
from linvit.runs.restore import Restored
from linvit.runs.screen import show as show_table
from linvit.tasks import Detection

THRESHOLD = 0.5
AT_ONCE = 1 << 26  # numbers of masks or logits at a file's size that are in memory together
NAMED = 8  # classes in a row of the table
PICTURES, MAPS, PREDICTIONS, LABELS = "pictures", "maps", "predictions.json", "labels.json"


def predict_dense(
    restored: Restored,
    images: Sequence[str | Path],
    threshold: float | None = None,
    weights: str | None = None,
    output: str | Path | None = None,
) -> tuple[list[tuple[Path, str]], list[str]]:
    """What is in image files of any size: (file, words) of each, and sentences that name the unreadable ones.

    Args:
        restored: A detector or segmentor.
        images: Files and folders.
        threshold: Score from which on objects are counted and drawn (0.5); a segmentor has none.
        weights: "raw" or "ema"; by default the moving average where there is one.
        output: Folder for pictures, and for predictions.json in COCO's format, with all that the detector found, or
            for maps of labels.

    Raises ValueError for paths without images, weights that the checkpoint does not hold, a threshold outside of 0..1,
    and an output that is no folder or holds the images.
    """
    kind = Objects if isinstance(restored.task, Detection) else Maps
    answers = kind(restored, threshold, _folder(output, images) if output is not None else None)
    paths = _outside(find_images(images), answers.folder)
    network, device = ready_network(restored, weights)
    if answers.folder is not None:
        check_writable(answers.folder)
    transform = restored.preprocessing.transform()
    names = unique_names(paths)
    told: list[tuple[Path, str]] = []
    complaints: list[str] = []
    for number, path in enumerate(track(paths, "Looking", console=Console(stderr=True), transient=True), start=1):
        try:
            picture = read_image(path).as_subclass(Tensor)
        except CorruptImageError as error:
            complaints.append(str(error))
            continue
        image = transform(picture).to(device)
        told.append((path, answers.take(number, path, names[number - 1], picture, network, image)))
    answers.finish()
    return told, complaints


class Objects:
    """A detector's answers, as the rows of a COCO file and as pictures of those whose score reaches the threshold."""

    def __init__(self, restored: Restored, threshold: float | None, folder: Path | None) -> None:
        self.threshold = THRESHOLD if threshold is None else threshold
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"--threshold is {threshold}, but scores lie between 0 and 1: set it to one of them.")
        self.folder = folder
        self.names = restored.class_names
        self.ids: list[int] = restored.category_ids  # type: ignore[assignment]
        self.about = f"Detections of {restored.path}"
        self.images: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    def take(self, number: int, path: Path, name: str, picture: Tensor, network: nn.Module, image: Tensor) -> str:
        """Words for the table; with a folder, the picture is written there."""
        height, width = picture.shape[-2:]
        rows = detections(network, image, (height, width), number, self.ids)
        clear = [row for row in rows if row["score"] >= self.threshold]
        if self.folder is not None:
            self.images.append({"id": number, "file_name": str(path), "height": height, "width": width})
            self.rows += rows
            drawn = object_picture(picture, clear, self.names, self.ids)
            save(drawn, self.folder / PICTURES / f"{name}.jpg")
        return self._words(clear)

    def _words(self, rows: Sequence[dict[str, Any]]) -> str:
        counts = Counter(row["category_id"] for row in rows)
        best = {key: max(row["score"] for row in rows if row["category_id"] == key) for key in counts}
        parts = [
            f"{counts[key]} × {self.names[self.ids.index(key)]} ({100 * best[key]:.1f} %)"
            for key in sorted(counts, key=lambda key: -best[key])
        ]
        return _first(parts) or f"nothing with a score of {100 * self.threshold:g} % or more"

    def finish(self) -> None:
        if self.folder is None:
            return
        content = {
            "info": {"description": self.about},
            "licenses": [],
            "images": self.images,
            "categories": [{"id": key, "name": name} for key, name in zip(self.ids, self.names, strict=True)],
            "annotations": [_annotation(number, row) for number, row in enumerate(self.rows, start=1)],
        }
        with replacing(self.folder / PREDICTIONS) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


class Maps:
    """A segmentor's answers, as maps of labels in the convention of its training data and as pictures with legends."""

    def __init__(self, restored: Restored, threshold: float | None, folder: Path | None) -> None:
        if threshold is not None:
            raise ValueError("--threshold is for detectors, but this is a segmentor: leave it out.")
        self.folder = folder
        self.names = restored.class_names
        self.first = int((restored.data or {}).get("reduces_zero_label", True))

    def take(self, number: int, path: Path, name: str, picture: Tensor, network: nn.Module, image: Tensor) -> str:
        """Words for the table; with a folder, map and picture are written there."""
        labels = label_map(network, image, tuple(picture.shape[-2:]))
        if self.folder is not None:
            save(labels + self.first, self.folder / MAPS / f"{name}.png")
            save(draw_map(picture, labels, self.names), self.folder / PICTURES / f"{name}.jpg")
        return _first([f"{self.names[place]} {100 * share:.1f} %" for place, share in shares(labels, len(self.names))])

    def finish(self) -> None:
        if self.folder is None:
            return
        with replacing(self.folder / LABELS) as temporary:
            content = {str(number): name for number, name in enumerate(self.names, start=self.first)}
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


@torch.inference_mode()
def detections(
    network: nn.Module, image: Tensor, size: tuple[int, int], image_id: int, category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The entries of a COCO results file for one normalized image, in pixels of its file's size, best score first."""
    found = {key: value.cpu() for key, value in network([image])[0].items()}
    order = found["scores"].argsort(descending=True, stable=True)
    rows: list[dict[str, Any]] = []
    for part in order.split(max(1, AT_ONCE // (size[0] * size[1]))):
        chosen = {key: value[part] for key, value in found.items()}
        rows += to_results(image_id, to_original(chosen, tuple(image.shape[-2:]), size), category_ids)
    return rows


@torch.inference_mode()
def label_map(network: nn.Module, image: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (height, width), the class of each pixel at its file's size, of one normalized image."""
    height, width = image.shape[-2:]
    filled = pad(image, (0, max(0, SMALLEST - width), 0, max(0, SMALLEST - height)))
    logits = network(filled[None]).float()[..., :height, :width]
    best = torch.full(size, -torch.inf, device=logits.device)
    labels = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    each = max(1, AT_ONCE // (size[0] * size[1]))
    for first in range(0, logits.shape[1], each):
        part = logits[:, first : first + each]
        if (height, width) != size:
            part = interpolate(part, size, mode="bilinear", align_corners=False)
        largest, places = part[0].max(0)
        labels = torch.where(largest > best, (places + first).to(torch.uint8), labels)
        best = torch.maximum(best, largest)
    return labels.cpu()


def object_picture(
    picture: Tensor, rows: Sequence[dict[str, Any]], class_names: Sequence[str], category_ids: Sequence[int]
) -> Tensor:
    """A picture with entries of a COCO file drawn onto it, the first ones on top; score and crowd stand in words."""
    size = tuple(picture.shape[-2:])
    boxes = torch.tensor([row["bbox"] for row in rows], dtype=torch.float32).reshape(-1, 4)
    labels = [category_ids.index(row["category_id"]) for row in rows]
    words = [
        class_names[label]
        + (f": {100 * row['score']:.0f} %" if "score" in row else "")
        + " (crowd)" * row.get("iscrowd", 0)
        for label, row in zip(labels, rows, strict=True)
    ]
    masked = all("segmentation" in row for row in rows)
    masks = (torch.from_numpy(to_mask(row["segmentation"], size)).bool() for row in rows) if masked else None
    return draw_objects(picture, box_convert(boxes, "xywh", "xyxy"), labels, words, len(class_names), masks)


def save(pixels: Tensor, path: Path) -> None:
    """uint8 (3, height, width) or (height, width), whole or not at all, in the format of the ending."""
    array = pixels.movedim(0, -1).contiguous().numpy() if pixels.ndim == 3 else pixels.numpy()
    options = {"format": "PNG"} if path.suffix == ".png" else {"format": "JPEG", "quality": 92, "subsampling": 0}
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(array)).save(temporary, **options)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The paths' names without endings; those that came before, in any case of letters, get a number behind them."""
    taken: set[str] = set()
    return [_untaken(path.stem, taken) for path in paths]


def _untaken(stem: str, taken: set[str]) -> str:
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name.lower())
    return name


def show(told: Sequence[tuple[Path, str]]) -> None:
    """Prints one row an image."""
    table = Table("image", "what is in it")
    for path, words in told:
        table.add_row(escape(str(path)), escape(words))
    show_table(table)


def _annotation(number: int, row: dict[str, Any]) -> dict[str, Any]:
    area = pixels_inside(row["segmentation"]) if "segmentation" in row else row["bbox"][2] * row["bbox"][3]
    return {"id": number, **row, "area": area, "iscrowd": 0}


def pixels_inside(runs: dict[str, Any]) -> int:
    """Area of a mask that to_results wrote."""
    from faster_coco_eval import mask  # part of the extra `dense`

    return int(mask.area(runs))


def _first(parts: Sequence[str]) -> str:
    return ", ".join([*parts[:NAMED], *(["…"] if len(parts) > NAMED else [])])


def _folder(output: str | Path, images: Sequence[str | Path]) -> Path:
    folder = Path(output)
    if folder.suffix in WRITERS or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"The output {folder} is a file, but detectors and segmentors write many: give a folder.")
    for path in map(Path, images):
        if path.exists() and path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"The output folder {folder} holds the images {path}: choose another folder.")
    return folder


def _outside(paths: list[Path], folder: Path | None) -> list[Path]:
    """Without what an earlier call left in the output folder, where that lies among the images."""
    if folder is None:
        return paths
    kept = [path for path in paths if not path.resolve().is_relative_to(folder.resolve())]
    if not kept:
        raise ValueError(f"All images lie in the output folder {folder}: choose another folder.")
    return kept
