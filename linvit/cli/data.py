"""`linvit data make-…` writes stand-ins for COCO, ADE20K and LibriSpeech; `linvit data check` reads dense data."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table
from torch.utils.data import Dataset

from linvit.data.dense import ade20k
from linvit.data.dense.annotations import read_annotations
from linvit.data.dense.coco import PARTS, CocoImages, find_file, find_images
from linvit.data.dense.scenes import make_scenes
from linvit.data.dense.transforms import IGNORED
from linvit.data.generation.latents import make_latents
from linvit.data.speech.spoken_digits import make_speech
from linvit.runs.screen import show as show_table

UNLIMITED = 2**63
DETECTION, SEGMENTATION = "detection", "segmentation"


@dataclass(frozen=True)
class Checked:
    """What was found in one part of a data set: names and values for people, and a sentence for each thing wrong."""

    name: str
    found: dict[str, Any]
    complaints: list[str]


def make(folder: str, train: int, val: int, size: int, seed: int) -> None:
    """Makes the scenes asked for, and says where they are."""
    count = sum(1 for _ in _bar(make_scenes(folder, train, val, size, seed), "scenes", train + val))
    print(f"{count} scenes: {folder}/{DETECTION} is in COCO's format, {folder}/{SEGMENTATION} in ADE20K's.")


def speak(folder: str, train: int, val: int, seed: int) -> None:
    """Makes the utterances asked for, and says where they are."""
    count = sum(1 for _ in _bar(make_speech(folder, train, val, seed), "utterances", train + val))
    print(f"{count} utterances: {folder}/train and {folder}/val are in LibriSpeech's layout.")


def encode(images: str, folder: str, vae: str, size: int) -> None:
    """Encodes an image folder, and says after each file how far it is."""
    for part, done, total in make_latents(images, folder, vae, size):
        print(f"{part}: {done:,} of {total:,} images", flush=True)
    print(f"{folder} holds the latents: train on them with data.name=latents data.root={folder}")


def check(path: Path, num_labels: int | None = None, needs_masks: bool = True) -> list[Checked]:
    """Reads all of a data set; raises ValueError for a path that is none, and for files that cannot be read at all."""
    if path.is_file():
        return [_check_file(path, _images_of(path), needs_masks)]
    checked = []
    for folder in (path, path / DETECTION, path / SEGMENTATION):
        if any((folder / "annotations").glob("instances_*.json")):
            files = [find_file(folder, part) for part in PARTS]
            parts = [
                (file, find_images(folder, part)) for file, part in zip(files, PARTS, strict=True) if file.is_file()
            ]
            checked += [_check_file(file, images, needs_masks) for file, images in parts]
        elif (folder / "images" / "training").is_dir() or (folder / "images" / "validation").is_dir():
            checked += _check_maps(folder, num_labels)
    if not checked:
        raise ValueError(
            f"{path} is no data set known here: expected a COCO .json, or a folder with annotations/instances_*.json or"
            " with images/training and annotations/training."
        )
    return checked


def show(checked: Sequence[Checked]) -> None:
    """Prints what was found as tables, one for each kind of data."""
    for columns in dict.fromkeys(tuple(part.found) for part in checked):
        table = Table()
        for heading in ("data", *columns, "wrong"):
            table.add_column(heading, justify="left" if heading == "data" else "right")
        for part in checked:
            if tuple(part.found) == columns:
                table.add_row(part.name, *map(str, part.found.values()), str(len(part.complaints)))
        show_table(table)


def _check_file(file: Path, images: Path | None, needs_masks: bool) -> Checked:
    known = read_annotations(file, needs_masks)
    complaints = list(known.complaints)
    if images is not None:
        indices = range(len(known.images))
        dataset = CocoImages(images, known, lambda image, target: (image, target), indices, needs_masks, True)
        complaints += [sample for sample in _samples(dataset, file.name) if isinstance(sample, str)]
    objects = sum(known.num_objects)
    entries = sum(len(known.of_image(index)) for index in range(len(known.images)))
    found = {
        "images": len(known.images),
        "without objects": known.num_objects.count(0),
        "classes": len(known.class_names),
        "objects": objects,
        "crowds": entries - objects,
        "boxes cut at the border": known.clipped,
    }
    return Checked(f"{file} {'alone: no images found' if images is None else ''}".strip(), found, complaints)


def _check_maps(folder: Path, num_labels: int | None) -> Iterator[Checked]:
    source = ade20k.Ade20k(str(folder), num_labels=num_labels, max_corrupt=UNLIMITED)
    for part, subfolder in ade20k.PARTS.items():
        if not (folder / "images" / subfolder).is_dir():
            continue
        complaints, seen, ignored, pixels, pairs = [], set(), 0, 0, 0
        dataset, lonely = source.maps_as_they_are(part)
        for sample in _samples(dataset, subfolder):
            if isinstance(sample, str):
                complaints.append(sample)
                continue
            labels = sample[1]
            seen |= set(labels.unique().tolist()) - {IGNORED}
            ignored += int((labels == IGNORED).sum())
            pixels += labels.numel()
            pairs += 1
        found = {
            "images": pairs,
            "classes": source.num_classes,
            "classes seen": len(seen),
            "ignored pixels": f"{100 * ignored / max(pixels, 1):.2f} %",
        }
        yield Checked(str(folder / "images" / subfolder), found, lonely + complaints)


def _images_of(file: Path) -> Path | None:
    """The folder of a file's images in COCO's layout, where there is one."""
    name = file.stem.removeprefix("instances_")
    root = file.parent.parent
    return next((folder for folder in (root / name, root / "images" / name) if folder.is_dir()), None)


def _samples(dataset: Dataset[Any], name: str) -> Iterator[Any]:
    count = len(dataset)  # type: ignore[arg-type]
    return _bar((dataset[index] for index in range(count)), name, count)


def _bar(items: Iterable[Any], name: str, total: int) -> Iterator[Any]:
    """On a terminal, a bar that goes with the items."""
    return iter(track(items, name, total, transient=True, disable=not sys.stdout.isatty()))
