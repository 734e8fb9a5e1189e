import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from images_by_class import write_classes

from linvit.data.images import ImageFolder

HELD_OUT = ["ant/3.png", "ant/6.png", "bee/12.png", "bee/13.png", "bee/16.png", "bee/17.png", "cow/1.png"]


@pytest.fixture
def root(tmp_path):
    for part in ("train", "val"):
        write_classes(tmp_path / part, {"zebra": 3, "ant": 3})
    return tmp_path


def source(root, **options):
    return ImageFolder(str(root), size=32, batch_size=4, num_workers=0, **options)


def test_classes_are_the_sorted_folders(root):
    data = source(root)
    assert data.class_names == ["ant", "zebra"]
    images, targets = zip(*data.val_dataloader(), strict=True)
    assert torch.cat(images).shape == (6, 3, 32, 32)
    assert torch.cat(targets).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_val_folder_alone_does_for_evaluation(root):
    shutil.rmtree(root / "train")
    assert len(source(root).val_set()) == 6
    with pytest.raises(ValueError, match=r"has no train/ in it"):
        source(root).train_dataloader()


@pytest.fixture
def photos(tmp_path):
    return write_classes(tmp_path / "photos", {"ant": 10, "bee": 20, "cow": 2, "doe": 1})


def names(data, split):
    return [Path(path).relative_to(data.root).as_posix() for path, _ in data.files(split)]


def test_class_folders_alone_are_split_class_by_class(photos):
    data = source(photos)
    train, val = names(data, "train"), names(data, "val")
    assert not set(train) & set(val)
    assert Counter(name[:3] for name in val) == {"ant": 2, "bee": 4, "cow": 1}
    assert Counter(name[:3] for name in train) == {"ant": 8, "bee": 16, "cow": 1, "doe": 1}
    assert [target for _, target in data.files("train")] == [0] * 8 + [1] * 16 + [2, 3]
    assert (len(data.train_set()), len(data.val_set())) == (26, 7)


def test_the_same_files_are_held_out_everywhere(photos, tmp_path):
    """Whatever the machine: the names are written down here."""
    assert names(source(photos), "val") == HELD_OUT
    photos.rename(tmp_path / "moved")
    moved = source(tmp_path / "moved")
    assert names(moved, "val") == HELD_OUT
    assert names(source(tmp_path / "moved", seed=3), "val") == HELD_OUT
    other = source(tmp_path / "moved", split=1)
    assert len(names(other, "val")) == 7
    assert names(other, "val") != HELD_OUT
    assert other.digest() != moved.digest() == source(tmp_path / "moved").digest()


def test_a_share_of_all_is_for_evaluation_alone(photos):
    data = source(photos, held_out=1)
    assert len(data.val_set()) == 33
    with pytest.raises(ValueError, match=r"has 33 images, but none of them is to train on: set `held_out`"):
        data.train_dataloader()


def test_a_class_may_be_called_train_or_val(tmp_path):
    data = source(write_classes(tmp_path, {"bus": 4, "plane": 4, "train": 4}))
    assert (data.divided, data.class_names) == (False, ["bus", "plane", "train"])
    assert len(data.files("train")) + len(data.files("val")) == 12


@pytest.mark.parametrize(
    ("present", "missing", "others"), [("train", "val", ("test", "valid")), ("val", "train", ("a",))]
)
def test_one_split_beside_other_folders_is_unclear(tmp_path, present, missing, others):
    for name in (present, *others):
        write_classes(tmp_path / name, {"ant": 3})
    says = rf"has {present}/ with class folders in it, but no {missing}/ next to it, only {', '.join(others)}: rename"
    with pytest.raises(ValueError, match=says):
        source(tmp_path)


def test_images_beside_the_classes_are_warned_of(root, caplog):
    source(root)
    assert not caplog.messages
    for number in range(2):
        shutil.copy(root / "train" / "ant" / f"{number}.png", root / "train")
    source(root)
    assert caplog.messages == [
        f"2 image files next to the class folders of {root / 'train'} are not used: 0.png, 1.png",
    ]


def test_hidden_files_and_folders_are_ignored(root):
    before = source(root).files("train")
    for name in ("._0.png", ".ipynb_checkpoints/0.png"):
        path = root / "train" / "ant" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"hidden")
    write_classes(root / "train", {".trash": 3})
    assert source(root).files("train") == before


def test_a_corrupt_image_stops_with_its_name_alone(root):
    (root / "val" / "ant" / "1.png").write_bytes(b"broken")
    data = ImageFolder(str(root), size=32, batch_size=4, num_workers=1)
    with pytest.raises(ValueError, match=r"^\S*val/ant/1\.png is not a readable image[^\n]*$"):
        list(data.val_dataloader())


def test_tiny_imagenets_table_names_the_classes_of_the_validation_images(tmp_path):
    for name in ("n02", "n01"):
        write_classes(tmp_path / "train" / name, {"images": 3})
    write_classes(tmp_path / "val", {"images": 4})
    table = tmp_path / "val" / "val_annotations.txt"
    table.write_text("2.png\tn01\t0\t0\t9\t9\n0.png\tn02\t1\t2\t3\t4\n1.png\tn01\t0\t0\t1\t1\n")
    data = source(tmp_path)
    assert data.class_names == ["n01", "n02"]
    assert len(data.train_set()) == 6
    assert {(Path(path).name, target) for path, target in data.files("val")} == {
        ("1.png", 0),
        ("2.png", 0),
        ("0.png", 1),
    }
    assert len(torch.cat([targets for _, targets in data.val_dataloader()])) == 3
    shutil.rmtree(tmp_path / "train")
    assert source(tmp_path).class_names == ["n01", "n02"]
    for wrong in ("0.png n01", "../0.png\tn01", "0.png\tn01\n0.png\tn02"):
        table.write_text(wrong)
        with pytest.raises(ValueError, match=r"val_annotations\.txt, line \d is .*, expected the name of an image"):
            source(tmp_path).val_set()
    table.write_text("0.png\tn01\n1.png\tn02\n9.png\tn01\n")
    with pytest.raises(ValueError, match=r"9\.png is not a readable image"):
        list(source(tmp_path).val_dataloader())
