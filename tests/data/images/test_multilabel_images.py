import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.images.multilabel import MultiLabelImages

COLUMNS = "file,cat,dog,sun\na.png,1,0,1\ndeep/b.png,0,0,0\nc.png,0,1,0\nd.png,1,1,1\n"
NAMES = 'file,labels\na.png,cat|sun\ndeep/b.png,\nc.png,"dog"\nd.png,sun | cat|dog\n'
TARGETS = {"a.png": [1, 0, 1], "deep/b.png": [0, 0, 0], "c.png": [0, 1, 0], "d.png": [1, 1, 1]}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "deep").mkdir()
    for number, file in enumerate(TARGETS, start=1):
        Image.fromarray(np.full((40, 50, 3), 40 * number, np.uint8)).save(tmp_path / file)
    return tmp_path


def source(root, table=COLUMNS, **options):
    (root / "labels.csv").write_text(table, encoding="utf-8")
    return MultiLabelImages(str(root), **{"size": 32, "batch_size": 2, "num_workers": 0, "held_out": 0.5} | options)


def split_of(data):
    return {entry.file: split for split, entries in data.entries.items() for entry in entries}


@pytest.mark.parametrize("table", [COLUMNS, NAMES])
def test_targets_are_those_of_the_table(root, table):
    data = source(root, table, held_out=1.0)
    assert data.task == "multilabel"
    assert data.class_names == ["cat", "dog", "sun"]
    images, targets = zip(*data.val_dataloader(), strict=True)
    assert torch.cat(images).shape == (4, 3, 32, 32)
    assert (targets[0].dtype, targets[0].shape) == (torch.float32, (2, 3))
    assert torch.cat(targets).tolist() == list(TARGETS.values())
    assert torch.cat(images).flatten(1).mean(1).diff().min() > 0, "each image has its own targets"


def test_the_split_is_a_hash_of_the_name_or_a_column(root):
    rows = [f"{number}.png,1\n" for number in range(200)]
    for number in range(200):
        (root / f"{number}.png").touch()
    whole = source(root, "file,cat\n" + "".join(rows), held_out=0.2)
    assert 20 < len(whole.entries["val"]) < 60
    half = source(root, "file,cat\n" + "".join(rows[100:]), held_out=0.2)
    assert len(split_of(half)) == 100
    assert split_of(half).items() <= split_of(whole).items()
    chosen = source(root, "file,split,cat\na.png,val,1\nc.png,train,0\n")
    assert split_of(chosen) == {"a.png": "val", "c.png": "train"}
    with pytest.raises(ValueError, match=r"has no image for the split 'val': set `held_out`"):
        source(root, "file,split,cat\na.png,train,1\n").val_set()


def test_known_classes_keep_their_order(root):
    data = source(root, class_names=["sun", "moon", "dog", "cat"], held_out=1.0)
    assert data.val_set()[0][1].tolist() == [1, 0, 0, 1]
    with pytest.raises(ValueError, match=r"has the class 'sun', but the 2 classes known here are cat, dog: remove"):
        source(root, NAMES, class_names=["cat", "dog"])


def test_a_class_that_no_training_image_has_is_warned_about(root, caplog):
    data = source(root, "file,split,cat,dog\na.png,train,1,0\nc.png,val,0,1\n")
    assert not caplog.messages
    data.train_set()
    assert caplog.messages == ["No training image has 1 of the classes: dog."]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("file,cat\na.png,2\n", r"labels\.csv, line 2 has '2' for the class 'cat', expected 0 or 1"),
        ("file,cat\na.png,1\nnone.png,1\n", r"lists 1 images that are not in .* \(none\.png\): add the files"),
        ("file,cat\n../a.png,1\n", r"line 2 has the file '\.\./a\.png', expected a path relative to the data folder"),
        ("cat,dog\n1,0\n", r"has the columns cat, dog, expected 'file', then either 'labels' or one for each class"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_sentence(root, table, says):
    with pytest.raises(ValueError, match=says) as raised:
        source(root, table)
    assert "\n" not in str(raised.value)
