"""Folders of images without labels."""

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.images.folder import UnlabelledImages

OPTIONS = {"size": 32, "batch_size": 2, "num_workers": 0}


def photo(path, shade=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((40, 50, 3), shade, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        photo(tmp_path / ("" if number % 2 else "a/b/c") / f"{number}.png", 10 * number)
    (tmp_path / "notes.txt").write_text("no image")
    photo(tmp_path / ".hidden" / "11.png")
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
    photo(tmp_path / "train" / "x" / "0.png"), photo(tmp_path / "val" / "1.png"), photo(tmp_path / "2.png")
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
