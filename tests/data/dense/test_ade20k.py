import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.dense.label_maps import Ade20k, read_map
from linvit.data.dense.scenes import make_scenes

SIZE = 64


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "new"
    list(make_scenes(folder, 6, 4, SIZE, 0))
    return folder / "segmentation"


def source(root, **options):
    settings = {"long_side": 4 * SIZE, "short_side": SIZE, "crop": (SIZE, SIZE), "num_workers": 0, "batch_size": 3}
    return Ade20k(str(root), **settings | options)


def small_set(root, sizes=((20, 30), (30, 20))):
    """Plain images with maps of the labels 0 to 4, one a column."""
    for part in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / part).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes):
            Image.fromarray(np.full((height, width, 3), 50, np.uint8)).save(root / "images" / part / f"{number}.jpg")
            labels = np.tile(np.arange(width, dtype=np.uint8) % 5, (height, 1))
            Image.fromarray(labels).save(root / "annotations" / part / f"{number}.png")
    return root


def test_zero_is_ignored_and_one_is_the_first_class(tmp_path):
    path = tmp_path / "map.png"
    values = np.array([[0, 1, 2], [149, 150, 255]], np.uint8)
    Image.fromarray(values).save(path)
    assert read_map(path, range(1, 151), (0, 255)).tolist() == [[255, 0, 1], [148, 149, 255]]
    assert read_map(path, range(151)).tolist() == values.tolist()


def test_palettes_are_read_as_labels(tmp_path):
    path = tmp_path / "map.png"
    image = Image.fromarray(np.array([[1, 2], [3, 0]], np.uint8), mode="L").convert("P")
    image.putpalette([200, 100, 50] * 256)
    image.save(path)
    assert read_map(path, [1, 2, 3], (0,)).tolist() == [[0, 1], [2, 255]]


def test_training_gives_windows_of_images_and_maps(scenes):
    data = source(scenes, ratio=(0.5, 2.0))
    assert data.class_names == ["canvas", *map(str, range(10))]
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype) == ((3, 3, SIZE, SIZE), torch.float32)
    assert (labels.shape, labels.dtype) == ((3, SIZE, SIZE), torch.int64)
    assert set(labels.unique().tolist()) <= {*range(11), 255}


def test_evaluation_keeps_the_map_of_the_file_and_scales_the_image(tmp_path):
    data = source(small_set(tmp_path), num_labels=4, long_side=128, short_side=40)
    shapes = [(tuple(images.shape), tuple(labels.shape)) for images, labels in data.val_dataloader()]
    assert shapes == [((1, 3, 40, 60), (1, 20, 30)), ((1, 3, 60, 40), (1, 30, 20))]
    _, labels = data.val_set()[0]
    assert labels[0, :6].tolist() == [255, 0, 1, 2, 3, 255]


def test_flip_and_scale_move_images_and_maps_together(tmp_path):
    for kind, suffix in (("images", "png"), ("annotations", "png")):
        (tmp_path / kind / "training").mkdir(parents=True)
        values = np.repeat(np.arange(1, 5, dtype=np.uint8), 10)[None].repeat(40, 0)
        pixels = values if kind == "annotations" else np.repeat(values[..., None] * 50, 3, 2)
        Image.fromarray(pixels).save(tmp_path / kind / "training" / f"0.{suffix}")
    data = source(
        tmp_path, num_labels=4, short_side=40, long_side=160, crop=(40, 40), mean=(1e-9,) * 3, std=(1.0,) * 3, flip=1.0,
        distorts_colors=False, ratio=(1.0, 1.0), cat_max_ratio=1.0,
    )  # fmt: skip
    image, labels = data.train_set()[0]
    assert labels[0, ::10].tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(image[0] * 255 / 50, labels + 1.0)


def test_images_of_different_sizes_in_one_batch_are_explained(tmp_path):
    data = source(small_set(tmp_path), num_labels=4, val_batch_size=2)
    with pytest.raises(ValueError, match=r"do not fit into one batch: set `val_batch_size` to 1"):
        list(data.val_dataloader())


def test_files_without_partner_are_named_and_left_out_up_to_the_limit(tmp_path, caplog):
    root = small_set(tmp_path)
    (root / "annotations/validation/1.png").unlink()
    with pytest.raises(ValueError, match=r"validation/1\.jpg has no map \S+annotations/validation/1\.png"):
        source(root, num_labels=4).val_dataloader()
    assert len(list(source(root, num_labels=4, max_corrupt=1).val_dataloader())) == 1
    assert "Left out (1 of at most 1)" in caplog.text


def test_missing_folders_and_odd_numbers_of_classes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected the folders images/training and annotations/training\."):
        source(tmp_path).train_dataloader()
    with pytest.raises(ValueError, match="300 classes, but maps of 8 bits"):
        source(tmp_path, class_names=list(map(str, range(300))))
    assert source(tmp_path).num_classes == 150
