from collections import Counter

import pytest
from tiny_dense import tiny_scenes

from linvit.data.dense import Coco
from linvit.tasks.detection import average_precision, average_precision_by_class


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    scenes = tiny_scenes(tmp_path_factory.mktemp("data") / "scenes")
    return Coco(str(scenes / "detection"), long_side=64, short_side=64).ground_truth()


def as_results(truth, **changes):
    keys = ("image_id", "category_id", "bbox", "segmentation")
    objects = [entry for entry in truth["annotations"] if not entry["iscrowd"]]
    return [{key: entry[key] for key in keys} | {"score": 0.9} | changes for entry in objects]


def ids(truth):
    return [image["id"] for image in truth["images"]]


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_the_truth_scores_one(truth, kind):
    measured = average_precision(truth, as_results(truth), ids(truth), kind)
    assert {measured[name] for name in ("ap", "ap50", "ap75", "ap_small")} == {1.0}
    assert "ap_large" not in measured


def test_nothing_found_scores_zero(truth):
    assert average_precision(truth, [], ids(truth), "bbox") == {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}


def test_boxes_shifted_by_a_third_pass_the_loose_measure_alone(truth):
    shifted = as_results(truth)
    for row in shifted:
        left, top, width, height = row["bbox"]
        row["bbox"] = [left + 0.3 * width, top, width, height]  # IoU 0.7 / 1.3 = 0.538
    measured = average_precision(truth, shifted, ids(truth), "bbox")
    assert measured["ap50"] == pytest.approx(1.0)
    assert measured["ap75"] == 0.0
    assert measured["ap"] == pytest.approx(0.1)


def test_images_that_were_not_looked_at_do_not_count(truth):
    seen = ids(truth)[:2]
    found = [row for row in as_results(truth) if row["image_id"] in seen]
    assert average_precision(truth, found, seen, "bbox")["ap"] == 1.0
    assert average_precision(truth, found, ids(truth), "bbox")["ap"] < 1.0


def test_crowds_are_no_objects_of_a_class(truth):
    first, *others = [entry for entry in truth["annotations"] if not entry["iscrowd"]]
    crowd = {**first, "id": 10_000, "iscrowd": 1}
    crowded = {**truth, "annotations": [first, *others, crowd]}
    counts = Counter(entry["category_id"] for entry in (first, *others))
    for results in (as_results(truth), []):
        by_class = average_precision_by_class(crowded, results, ids(truth), "bbox")
        assert {category: count for category, (*_, count) in by_class.items()} == counts


@pytest.mark.parametrize("detections", [[], [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "score": 0.9}]])
def test_without_objects_there_is_no_precision(detections):
    image = {"id": 1, "file_name": "1", "width": 99, "height": 99}
    truth = {"images": [image], "categories": [{"id": 1, "name": "a"}], "annotations": []}
    assert average_precision(truth, detections, [1], "bbox") == {}
