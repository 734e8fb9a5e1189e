import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from linvit.data.dense.annotations import box_around, to_mask, to_runs
from linvit.data.dense.scenes import (
    HELD_OUT,
    Scene,
    coco_annotations,
    label_map,
    make_scenes,
    source_digits,
)


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "new"
    assert len(list(make_scenes(folder, 4, 3, 96, 0))) == 7
    return folder


def scene(owners, digits):
    """Every digit as large as it shows."""
    areas = [int((owners == number).sum()) for number in range(len(digits))]
    return Scene(np.zeros((*owners.shape, 3), np.uint8), owners, digits, areas)


def test_train_and_val_are_made_of_different_digits():
    parts = {part: source_digits(part) for part in ("train", "val")}
    assert [len(classes) for _, classes in parts.values()] == [1797 - HELD_OUT, HELD_OUT]
    assert all(set(classes) == set(range(10)) for _, classes in parts.values())
    train, val = ([*map(bytes, np.ascontiguousarray(inks))] for inks, _ in parts.values())
    from sklearn.datasets import load_digits

    everything = [*map(bytes, load_digits().images / 16)]
    assert sorted(train + val) == sorted(everything)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(scenes, tmp_path):
    list(make_scenes(tmp_path / "again", 4, 3, 96, 0))
    assert digests(tmp_path / "again") == digests(scenes)
    list(make_scenes(tmp_path / "other", 4, 3, 96, 1))
    other = digests(tmp_path / "other")
    assert other.keys() == digests(scenes).keys()
    assert not [name for name in other if name.endswith(".jpg") and other[name] == digests(scenes)[name]]


def test_a_stopped_call_goes_on_and_keeps_what_is_there(scenes, tmp_path):
    stopped = make_scenes(tmp_path / "stopped", 4, 3, 96, 0)
    for _ in range(5):
        next(stopped)
    stopped.close()
    first = tmp_path / "stopped/detection/images/train/000001.jpg"
    written = first.stat().st_mtime_ns
    list(make_scenes(tmp_path / "stopped", 4, 3, 96, 0))
    assert digests(tmp_path / "stopped") == digests(scenes)
    assert first.stat().st_mtime_ns == written


def test_a_folder_with_anything_else_in_it_is_refused(scenes, tmp_path):
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ValueError, match="is neither empty nor a folder of scenes"):
        list(make_scenes(tmp_path, 4, 3, 96, 0))
    with pytest.raises(ValueError, match=r"made with other settings \(version 1, train 4, val 3, size 96, seed 0\)"):
        list(make_scenes(scenes, 4, 3, 96, 1))
    with pytest.raises(ValueError, match="`train` is 0"):
        list(make_scenes(tmp_path / "none", 0, 3, 96, 0))


def test_detection_files_agree_with_each_other(scenes):
    for part, count in (("train", 4), ("val", 3)):
        content = json.loads((scenes / f"detection/annotations/instances_{part}.json").read_text())
        assert {"info", "licenses"} < content.keys()
        assert [category["id"] for category in content["categories"]] == list(range(1, 11))
        assert len(content["images"]) == count
        for entry in content["annotations"]:
            mask = to_mask(entry["segmentation"], (96, 96))
            assert entry["area"] == mask.sum()
            assert tuple(entry["bbox"]) == box_around(to_runs(mask))
        for about in content["images"]:
            with Image.open(scenes / "detection/images" / part / about["file_name"]) as image:
                assert (image.size, image.mode) == ((96, 96), "RGB")


def test_label_maps_show_the_digits_of_the_annotations(scenes):
    content = json.loads((scenes / "detection/annotations/instances_train.json").read_text())
    for about in content["images"]:
        path = scenes / "segmentation/annotations/training" / about["file_name"].replace("jpg", "png")
        with Image.open(path) as image:
            assert image.mode == "L"
            labels = np.asarray(image)
        digits = np.zeros((96, 96), np.uint8)
        for entry in content["annotations"]:
            if entry["image_id"] == about["id"]:
                digits[to_mask(entry["segmentation"], (96, 96)) == 1] = entry["category_id"] + 1
        counted = labels != 0
        assert (np.where(digits == 0, 1, digits)[counted] == labels[counted]).all()
        assert (digits[~counted] > 0).all()


def test_a_covered_digit_keeps_what_shows_and_a_fragment_becomes_a_crowd():
    owners = np.full((40, 40), -1, np.int16)
    owners[0:20, 0:20] = 0
    owners[10:30, 10:30] = 1
    owners[35:39, 35:39] = 2
    parts = coco_annotations(scene(owners, [3, 4, 5]), image_id=7, first_id=11)
    assert [part["id"] for part in parts] == [11, 12, 13]
    assert [part["category_id"] for part in parts] == [4, 5, 6]
    assert [part["area"] for part in parts] == [300, 400, 16]
    assert [part["bbox"] for part in parts] == [[0, 0, 20, 20], [10, 10, 20, 20], [35, 35, 4, 4]]
    assert [part["iscrowd"] for part in parts] == [0, 0, 1]
    assert isinstance(parts[2]["segmentation"]["counts"], list)


def test_only_pixels_where_two_digits_touch_are_unlabelled():
    owners = np.full((9, 9), -1, np.int16)
    owners[2:7, 1:4] = 0
    owners[2:7, 4:8] = 1
    labels = label_map(scene(owners, [0, 9]))
    assert (labels[2:7, 3:5] == 0).all()
    assert (labels[2:7, 1:3] == 2).all()
    assert (labels[2:7, 5:8] == 11).all()
    assert (labels == 0).sum() == 10


def test_the_table_of_labels_names_the_digits_that_detection_knows(scenes):
    lines = (scenes / "detection" / "labels.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("file,labels,split", 1 + 4 + 3)
    rows = {tuple(line.split(",")) for line in lines[1:]}
    for split in ("train", "val"):
        content = json.loads((scenes / "detection" / "annotations" / f"instances_{split}.json").read_text())
        for image in content["images"]:
            whole = [entry for entry in content["annotations"] if entry["image_id"] == image["id"]]
            digits = sorted({str(entry["category_id"] - 1) for entry in whole if not entry["iscrowd"]})
            assert (f"images/{split}/{image['file_name']}", "|".join(digits), split) in rows
