import numpy as np
import pytest
from dense_formats import IMAGES, VOID, labels_of, write_array, write_image, write_label_maps

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


def write_binary(root, value=255):
    for split in ("train", "val"):
        write_image(root / split / "images" / "a.tif", (40, 36))
        write_array(root / split / "masks" / "a.png", np.tri(40, 36, dtype=np.uint8) * value)
    return root


def test_values_say_which_class_a_label_is(tmp_path, caplog):
    root = write_binary(tmp_path)
    assert LabelMaps.found_in(root) == {"name": "label_maps", "root": str(root), "values": [0, 255]}
    data = source(root, values=[0, 255])
    data.train_set()
    assert (data.class_names, data.val_set()[0][1].tolist(), caplog.text) == (["0", "255"], np.tri(40, 36).tolist(), "")
    assert source(root, values=[255, 0]).val_set()[0][1].tolist() == (1 - np.tri(40, 36)).tolist()
    write_array(root / "val/masks/a.png", np.full((40, 36), 9, np.uint8))
    assert "has the label 9 at row 0, column 0, expected 0, 255, and 7 for ignored" in data.val_set()[0]
    assert "has the label 9 at row 0, column 0, expected 255, 0" in source(root, values=[255, 0]).val_set()[0]
    for wrong in ({"values": [0, 0]}, {"values": [0, VOID]}, {"values": [0, 1], "class_names": ["a"]}):
        with pytest.raises(ValueError, match=r"`values` has 2 labels, expected \d, one for each class"):
            source(root, **wrong)


@pytest.mark.parametrize("copies", [1, 230])
def test_a_class_that_no_map_has_is_said_when_training_starts(tmp_path, caplog, copies):
    root = write_binary(tmp_path)
    for number in range(copies - 1):
        for folder, name in (("images", "a.tif"), ("masks", "a.png")):
            (root / "train" / folder / f"{number}{name[-4:]}").symlink_to(root / "train" / folder / name)
    source(root, num_labels=2).train_set()
    assert caplog.text.count("No training image has 1 of the classes: 1; 255 is ignored: if it is a class") == 1
    assert ("(115 of 230 maps were read)" in caplog.text) == (copies == 230)


@pytest.mark.parametrize("kind", [bool, np.uint16])
def test_maps_of_1_and_16_bits(tmp_path, kind):
    labels = np.tri(40, 36, dtype=np.uint8).astype(kind)
    root = write_binary(tmp_path)
    write_array(root / "val/masks/a.png", labels)
    assert source(root, num_labels=2).val_set()[0][1].tolist() == labels.astype(int).tolist()
    if kind is np.uint16:
        write_array(root / "val/masks/a.png", labels * 300)
        assert "has the label 300" in source(root, num_labels=2).val_set()[0]
