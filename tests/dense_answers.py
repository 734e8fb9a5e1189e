"""Scenes with odd category ids, networks that answer with the truth, and untrained ones in a checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit.data.dense import Ade20k, Coco
from linvit.data.dense.scenes import make_scenes
from linvit.runs.run import Run
from linvit.runs.stored import FORMAT
from linvit.runs.tasks import RUNS
from linvit.tasks import Detection, Segmentation

SIDE, SEEN = 100, 200  # pixels of the scenes, no multiple of 32, and of what the networks see
IDS = 7  # category ids are multiples of it


def write_scenes(folder: Path, val: int = 3) -> Path:
    list(make_scenes(folder, 1, val, SIDE, 0))
    for path in (folder / "detection" / "annotations").iterdir():
        content = json.loads(path.read_text())
        for entry in content["categories"]:
            entry["id"] *= IDS
        for entry in content["annotations"]:
            entry["category_id"] *= IDS
        path.write_text(json.dumps(content))
    return folder


def pixels(image: Tensor) -> tuple[float, ...]:
    """Enough of an image to know it again."""
    return tuple(image[:, 3::40, 3::40].flatten().tolist())


class TrueObjects(nn.Module):
    """Finds what the annotations say, of images that come through the same preprocessing."""

    has_masks = True

    def __init__(self, source: Coco) -> None:
        super().__init__()
        self.targets = {pixels(image): target for image, target in source.val_set()}

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.answer(self.targets[pixels(image)]) for image in images]

    def answer(self, target: dict) -> dict[str, Tensor]:
        single = target["iscrowd"] == 0
        objects = {key: target[key][single] for key in ("boxes", "labels", "masks")}
        return {**objects, "masks": objects["masks"].bool(), "scores": torch.linspace(0.6, 1.0, int(single.sum()))}


class TrueMaps(nn.Module):
    """Logits of the true classes, and of class 0 where there is none."""

    def __init__(self, source: Ade20k) -> None:
        super().__init__()
        self.classes = source.num_classes
        self.maps = {pixels(image): labels for image, labels in source.val_set()}

    def forward(self, images: Tensor) -> Tensor:
        maps = torch.stack([self.maps[pixels(image)] for image in images])
        known = torch.where(maps == 255, 0, maps).repeat_interleave(2, 1).repeat_interleave(2, 2)
        return nn.functional.one_hot(known, self.classes).movedim(-1, 1).float()


def knows_objects(scenes: Path) -> Run:
    """A detector that is always right."""
    root = str(scenes / "detection")
    source = Coco(root, long_side=SEEN, short_side=SEEN, num_workers=0)
    data = {"name": "coco", "root": root, "long_side": SEEN, "short_side": SEEN, "num_workers": 0}
    stored = {"category_ids": source.annotations("val").category_ids}
    return _run("detection", Detection(TrueObjects(source)), source, data, stored)


def knows_maps(scenes: Path, first: int = 1) -> Run:
    """A segmentor that is always right; the label of its first class is `first`."""
    root = str(scenes / "segmentation")
    source = Ade20k(root, long_side=SEEN, short_side=SEEN, num_workers=0)
    data = {"name": "ade20k", "root": root, "long_side": SEEN, "short_side": SEEN, "num_workers": 0}
    stored = {"labels": [*range(first, first + source.num_classes)]}
    return _run("segmentation", Segmentation(TrueMaps(source), source.num_classes), source, data, stored)


def _run(name: str, task, source, data: dict, stored: dict) -> Run:
    return RUNS[name](task, source.class_names, source.preprocessing, Path("run"), "truth", {"data": data}, stored)


def write_untrained(path: Path, framework: str, scenes: Path) -> Path:
    """A checkpoint as `linvit train` writes it, of a narrow network that has learned nothing."""
    detects = framework not in ("semantic_fpn", "upernet")
    kind = "detection" if detects else "segmentation"
    data = {"name": "coco" if detects else "ade20k", "root": str(scenes / kind), "long_side": 96, "short_side": 64}
    source = (Coco if detects else Ade20k)(data["root"], long_side=96, short_side=64)
    model = {"framework": framework, "backbone": "mavit_nano", "heads": {"width": 16}}
    run = RUNS[kind]
    task = run.create_task(run.create_network(model, source.num_classes, 3), source.num_classes)
    about = {
        "format": FORMAT,
        "num_classes": source.num_classes,
        "recipe": {"model": model, "task": {"name": kind, "ema_decay": None}, "data": data},
        "class_names": source.class_names,
        "preprocessing": asdict(source.preprocessing),
    }
    torch.save({"linvit": about, "state_dict": task.state_dict()}, path)
    return path
