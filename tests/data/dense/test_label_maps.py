import numpy as np
import pytest
import torch
from dense_formats import IMAGES, VOID, labels_of, write_array, write_label_maps

from linvit.data.dense import LabelMaps
from linvit.data.dense.label_maps import LAYOUTS


def source(root, **options):
    settings = {"long_side": 64, "short_side": 64, "crop": (32, 32), "num_workers": 0, "void": (VOID,)}
    return LabelMaps(str(root), **settings | options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[1])
def test_images_and_maps_are_found_in_every_layout(tmp_path, layout):
    root = write_label_maps(tmp_path, *layout)
    for split, images in IMAGES.items():
        maps = source(root).maps(split, lambda image, labels: (image, labels))
        assert len(maps) == len(images)
        for (image, labels), about in zip((maps[index] for index in range(len(maps))), images.values(), strict=True):
            truth = labels_of(*about)
            assert tuple(image.shape[-2:]) == about[0]
            assert np.array_equal(labels.numpy(), np.where(truth == VOID, 255, truth))
    assert LabelMaps.found_in(root) == {"name": "label_maps", "root": str(root)}


def test_batches_have_a_class_for_each_pixel(tmp_path):
    images, labels = next(iter(source(write_label_maps(tmp_path), batch_size=3).train_dataloader()))
    assert (images.shape, labels.shape, labels.dtype) == ((3, 3, 32, 32), (3, 32, 32), torch.int64)
    assert set(labels.unique().tolist()) <= {0, 1, 2, 255}


def test_void_labels_before_and_between_the_classes_are_ignored(tmp_path):
    root = write_label_maps(tmp_path)
    assert source(root).labels == [0, 1, 2]
    data = source(root, void=(0, VOID), class_names=["cat", "dog"])
    assert (data.labels, data.class_names) == ([1, 2], ["cat", "dog"])
    _, labels = data.val_set()[0]
    truth = labels_of(*IMAGES["val"]["d"])
    assert np.array_equal(labels.numpy(), np.where(truth == 2, 1, 255))
    write_array(root / "valannot/d.png", np.full((36, 64), 9, np.uint8))
    assert "expected 1 to 2, and 0 and 7 and 255 for ignored pixels" in data.val_set()[0]


def test_splits_may_have_other_names(tmp_path):
    root = write_label_maps(tmp_path)
    data = source(root, train="val", val="train")
    assert (len(data.train_set()), len(data.val_set())) == (2, 3)


def test_classes_are_named_by_a_file_a_number_or_a_list(tmp_path):
    root = write_label_maps(tmp_path / "data")
    assert source(root).class_names == ["background", "cat", "dog"]
    (tmp_path / "other.txt").write_text("a\nb\nc\n")
    assert source(root, classes=str(tmp_path / "other.txt")).class_names == ["a", "b", "c"]
    assert source(root, num_labels=3).class_names == ["0", "1", "2"]
    (root / "classes.txt").unlink()
    with pytest.raises(ValueError, match="have no names: set `class_names`, `classes` or `num_labels`, or add classes"):
        source(root)
    assert LabelMaps.found_in(root)["num_labels"] == VOID + 1


def test_what_does_not_fit_together_is_named(tmp_path):
    root = write_label_maps(tmp_path / "data")
    with pytest.raises(ValueError, match="`num_labels` is 3, but `class_names` has 1 names"):
        source(root, num_labels=3, class_names=["a"])
    with pytest.raises(ValueError, match="`void` leaves 2 labels for 3 classes"):
        source(root, void=tuple(range(2, 255)))
    with pytest.raises(ValueError, match=r"has no val images with maps: expected the folders none and noneannot or"):
        source(root, val="none").val_set()
    with pytest.raises(ValueError, match=r"nowhere does not exist: set `root`"):
        source(root / "nowhere", num_labels=3).val_set()
