import json

import pytest

from linvit.data.dense.annotations import read_annotations
from linvit.data.disk import warn_or_raise


def written(folder, **changes):
    """Two images and two categories with gaps between their ids; one object each, and changes to the first."""
    square = [[2, 3, 8, 3, 8, 9, 2, 9]]
    content = {
        "images": [
            {"id": 9, "file_name": "a.jpg", "height": 20, "width": 30},
            {"id": 4, "file_name": "b.jpg", "height": 30, "width": 20},
        ],
        "annotations": [
            {"id": 1, "image_id": 9, "category_id": 90, "bbox": [2, 3, 6, 6], "segmentation": square, "area": 36.0},
            {"id": 2, "image_id": 4, "category_id": 13, "bbox": [2, 3, 6, 6], "segmentation": square, "iscrowd": 1},
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 13, "name": "stop sign"}],
    }
    content["annotations"][0] |= changes
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def test_categories_with_gaps_become_classes_from_0_and_back(tmp_path):
    known = read_annotations(written(tmp_path))
    assert (known.category_ids, known.class_names) == ([13, 90], ["stop sign", "toothbrush"])
    assert [known.of_image(index)[0]["label"] for index in range(2)] == [1, 0]
    assert known.num_objects == [1, 0]
    assert known.of_image(0)[0]["box"] == [2, 3, 8, 9]
    assert known.of_image(0)[0]["area"] == 36
    assert known.complaints == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.jpg", "x/../../a.jpg", "C:\\a.jpg", "..\\a.jpg", "", "a\0.jpg"])
def test_an_image_outside_the_folder_is_refused(tmp_path, name):
    path = written(tmp_path)
    content = json.loads(path.read_text())
    content["images"][0]["file_name"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"entry 0 of images has .* as file_name, expected a path inside the folder of the images"
    ):
        read_annotations(path)


def test_class_names_fix_the_order(tmp_path):
    known = read_annotations(written(tmp_path), class_names=["toothbrush", "stop sign"])
    assert known.category_ids == [90, 13]
    assert known.of_image(0)[0]["label"] == 0
    with pytest.raises(ValueError, match=r"instances\.json has other categories .*'fork' is only in one"):
        read_annotations(written(tmp_path), class_names=["toothbrush", "stop sign", "fork"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bbox": [2, 3, 0, 6]}, "has a box of 0×6 px"),
        ({"bbox": [40, 3, 6, 6]}, r"has the box \[40, 3, 6, 6\] outside its image of 20×30 px"),
        ({"bbox": [2, 22, 6, 6]}, "outside its image of 20×30 px .*, whose EXIF data may turn it"),
    ],
)
def test_what_is_wrong_with_an_annotation_is_said_with_file_and_id(tmp_path, changes, says):
    known = read_annotations(written(tmp_path, **changes))
    with pytest.raises(ValueError, match=rf"^\S*instances\.json: annotation 1 of image \d+ .*{says}[^\n]*$"):
        warn_or_raise(known.complaints, 0, "max_bad_annotations")
    assert known.num_objects == [0, 0]
    assert len(known.of_image(1)) == 1


def test_ground_truth_for_the_tools_is_the_file_without_what_was_left_out(tmp_path):
    known = read_annotations(written(tmp_path, category_id=91))
    truth = known.ground_truth()
    assert {"info", "licenses", "images", "categories"} < truth.keys()
    (entry,) = truth["annotations"]
    assert (entry["image_id"], entry["category_id"], entry["bbox"]) == (4, 13, [2, 3, 6, 6])
    assert (entry["iscrowd"], entry["area"]) == (1, 36)
    assert read_annotations(written(tmp_path)).ground_truth()["annotations"][0]["area"] == 36


def test_an_id_given_twice_is_said(tmp_path):
    known = read_annotations(written(tmp_path, id=2))
    assert known.complaints == [
        f"{known.path}: annotation 2 of image 4 has the id of another annotation: correct or remove it."
    ]


def test_masks_are_not_looked_at_where_nobody_needs_them(tmp_path):
    known = read_annotations(written(tmp_path, segmentation=[]), needs_masks=False)
    assert known.complaints == []
    assert known.of_image(0)[0]["segmentation"] is None


@pytest.mark.parametrize(
    ("bbox", "box", "clipped"),
    [
        ([25, 15, 10, 10], [25, 15, 30, 20], 1),
        ([-4, -5, 10, 10], [0, 0, 6, 5], 1),
        ([20, 10, 10.05, 10.0], [20, 10, 30, 20], 0),
    ],
)
def test_boxes_are_cut_at_the_border_and_counted_beyond_rounding(tmp_path, bbox, box, clipped):
    known = read_annotations(written(tmp_path, bbox=bbox))
    assert known.of_image(0)[0]["box"] == box
    assert known.clipped == clipped


def test_what_is_allowed_is_left_out_and_counted(caplog):
    warn_or_raise(["a.", "b."], 2, "max_bad_annotations")
    assert caplog.messages == ["Left out (2 of at most 2): a.\n  b."]
    with pytest.raises(ValueError, match=r"^a\. More than `max_bad_annotations`=1\.\n  b\.$"):
        warn_or_raise(["a.", "b."], 1, "max_bad_annotations")


def test_of_many_complaints_five_are_named_and_the_rest_counted(caplog):
    complaints = [f"{number}." for number in range(12)]
    named = "0.{}\n  1.\n  2.\n  3.\n  4.\n  and 7 more."
    warn_or_raise(complaints, 12, "max_corrupt")
    assert caplog.messages == ["Left out (12 of at most 12): " + named.format("")]
    with pytest.raises(ValueError, match="more") as raised:
        warn_or_raise(complaints, 3, "max_corrupt")
    assert str(raised.value) == named.format(" More than `max_corrupt`=3.")
