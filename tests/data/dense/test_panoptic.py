import json

import numpy as np
import pytest
from dense_formats import IMAGES, labels_of, write_array, write_panoptic

from linvit.data.dense import CocoPanoptic

FILE = "annotations/panoptic_val2017.json"


def source(root, **options):
    settings = {"long_side": 64, "short_side": 64, "crop": (32, 32), "num_workers": 0}
    return CocoPanoptic(str(root), **settings | options)


def change(root, alter):
    content = json.loads((root / FILE).read_text())
    alter(content)
    (root / FILE).write_text(json.dumps(content))


@pytest.mark.parametrize("split", ["train", "val"])
def test_segments_become_classes_in_the_order_of_the_categories(tmp_path, split):
    data = source(write_panoptic(tmp_path))
    assert data.class_names == ["cat", "dog"]
    maps = data.maps(split, lambda image, labels: (image, labels))
    for index, about in enumerate(IMAGES[split].values()):
        truth = labels_of(about[0], []) * 0
        for label, left, top, right, bottom in about[1]:
            truth[top:bottom, left:right] = 1 + label
        assert np.array_equal(maps[index][1].numpy(), np.where(truth == 0, 255, truth - 1))


def test_class_names_fix_the_order(tmp_path):
    root = write_panoptic(tmp_path)
    labels = [source(root, class_names=names).val_set()[0][1] for names in (["cat", "dog"], ["bird", "dog", "cat"])]
    assert (labels[0] == 1).sum() == (labels[1] == 1).sum() > 0
    with pytest.raises(ValueError, match=r"val2017\.json has the category 'cat', which the 1 classes known here lack"):
        source(root, class_names=["dog"]).val_set()


def test_images_may_be_elsewhere(tmp_path):
    root = write_panoptic(tmp_path / "panoptic")
    (root / "images").rename(tmp_path / "images")
    assert CocoPanoptic.found_in(root) == {
        "name": "coco_panoptic",
        "root": str(root),
        "images": str(tmp_path / "images"),
    }
    assert len(source(root, images=str(tmp_path / "images")).val_set()) == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros((36, 64), np.uint8), "has the mode L, expected RGB"),
        (np.full((36, 64, 3), 9, np.uint8), "has the segment 592137, which its annotation does not list"),
        (np.zeros((64, 36, 3), np.uint8), "has 64×36 px, but its image 36×64 px"),
        (None, "is not a readable label map"),
    ],
)
def test_a_map_that_cannot_be_used_is_left_out_up_to_the_limit(tmp_path, values, says):
    root = write_panoptic(tmp_path)
    path = root / "annotations/panoptic_val2017/d.png"
    path.write_bytes(b"broken") if values is None else write_array(path, values)
    with pytest.raises(ValueError, match=rf"d\.png {says}"):
        list(source(root).val_dataloader())
    assert len(list(source(root, max_corrupt=1).val_dataloader())) == 1


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (
            lambda content: content.pop("categories"),
            "has null as categories, expected a list, as in COCO's format",
        ),
        (lambda content: content["annotations"][1].pop("image_id"), "entry 1 of annotations has null as image_id"),
        (lambda content: content["categories"][0].update(name="cat"), "has 2 categories with 2 ids and 1 names"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, alter, says):
    root = write_panoptic(tmp_path)
    change(root, alter)
    with pytest.raises(ValueError, match=says):
        source(root)
