"""Detectors and segmentors train, are evaluated and predict on every format of their data."""

import json
from pathlib import Path

import numpy as np
import pytest
from dense_formats import (
    CLASSES,
    VOID,
    write_id_maps,
    write_label_maps,
    write_masks,
    write_panoptic,
    write_voc,
    write_yolo,
)
from PIL import Image
from tiny_dense import write_dense_recipe

from linvit.runs import load_run, train

DETECTION = {
    "voc": (write_voc, "retinanet", {}),
    "yolo": (lambda root: write_yolo(root, polygons=True), "mask_rcnn", {}),
    "instance_masks": (write_masks, "mask_rcnn", {"class_names": ["animal"]}),
    "maps": (write_id_maps, "mask_rcnn", {"name": "instance_masks"}),
}


def recipe(tmp_path, framework, data):
    path = write_dense_recipe(tmp_path, Path("unused"), framework, trainer={"max_epochs": 1}, data=data)
    content = path.read_text()
    if data["name"] == "voc":
        content = content.replace("  needs_masks: false\n", "")
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "name", ["voc", *(pytest.param(name, marks=pytest.mark.slow) for name in DETECTION if name != "voc")]
)
def test_a_detector_learns_from_every_format(tmp_path, name):
    write, framework, options = DETECTION[name]
    root = write(tmp_path / "data")
    train(recipe(tmp_path, framework, {"name": name, "root": str(root)} | options))
    run = load_run(tmp_path / "run")
    assert run.class_names == {"voc": CLASSES, "yolo": CLASSES, "instance_masks": ["animal"]}.get(name, ["object"])
    assert run.stored["category_ids"] == list(range(1, len(run.class_names) + 1))
    first, *_ = run.evaluate().by_weights.values()
    assert 0 <= first["box_ap"] <= 1


@pytest.mark.parametrize("name", ["label_maps", pytest.param("coco_panoptic", marks=pytest.mark.slow)])
def test_a_segmentor_learns_from_every_format_and_writes_its_labels(tmp_path, name):
    write, options = {
        "label_maps": (write_label_maps, {"void": [0, VOID], "class_names": CLASSES}),
        "coco_panoptic": (write_panoptic, {}),
    }[name]
    root = write(tmp_path / "data")
    data = {"name": name, "root": str(root), "crop": [64, 64], "flip": 0.0} | options
    train(recipe(tmp_path, "semantic_fpn", data))
    run = load_run(tmp_path / "run")
    assert (run.class_names, run.stored["labels"]) == (CLASSES, [1, 2])
    assert len(run.evaluate().by_weights) == 1
    image = next(path for path in sorted(root.rglob("d.*")) if "annot" not in str(path))
    run.predict(image, output=tmp_path / "out")
    written = np.asarray(Image.open(tmp_path / "out" / "maps" / "d.png"))
    assert set(np.unique(written)) <= {1, 2}
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == {"1": "cat", "2": "dog"}
