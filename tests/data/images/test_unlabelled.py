"""Folders of images without labels."""

import pytest
import torch
from dense_formats import write_image

from linvit.data.images.folder import UnlabelledImages

OPTIONS = {"size": 32, "batch_size": 2, "num_workers": 0}


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        write_image(tmp_path / ("" if number % 2 else "a/b/c") / f"{number}.png", (40, 50))
    (tmp_path / "notes.txt").write_text("no image")
    write_image(tmp_path / ".hidden" / "11.png", (40, 50))
    return tmp_path


def test_files_of_any_depth_each_in_one_split(folder):
    source = UnlabelledImages(str(folder), held_out=0.3, **OPTIONS)
    train, val = source.files("train"), source.files("val")
    assert (len(train), len(val)) == (7, 3)
    assert {path.name for path in (*train, *val)} == {f"{number}.png" for number in range(10)}
    assert source.files("val") == UnlabelledImages(str(folder), held_out=0.3, **OPTIONS).files("val")
    assert source.files("val") != UnlabelledImages(str(folder), held_out=0.3, split=1, **OPTIONS).files("val")
    assert len(UnlabelledImages(str(folder), held_out=1.0, **OPTIONS).files("val")) == 10


def test_train_and_val_are_the_splits(tmp_path):
    for name in ("train/x/0.png", "val/1.png", "2.png"):
        write_image(tmp_path / name, (40, 50))
    source = UnlabelledImages(str(tmp_path), **OPTIONS)
    assert [path.name for path in source.files("train")] == ["0.png"]
    assert [path.name for path in source.files("val")] == ["1.png"]


def test_batches(folder):
    source = UnlabelledImages(str(folder), held_out=0.3, **OPTIONS)
    images, zeros = next(iter(source.train_dataloader()))
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == torch.float32
    assert not zeros.any()
    assert source.class_names == []
    assert source.num_classes == 0
    assert sum(len(batch[0]) for batch in source.val_dataloader()) == 3
