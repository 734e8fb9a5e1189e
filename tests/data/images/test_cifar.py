import numpy as np
import pytest
import torch

from linvit.data.generation import CifarImages
from linvit.data.images.small import Cifar

PLAIN = {"batch_size": 4, "num_workers": 0, "auto_augment": None, "color_jitter": 0.0, "random_erasing": 0.0}


def records(labels, seed, coarse=False):
    """Bytes of images with these labels, and their pixels, uint8 (images, 3, 32, 32)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    head = [[7, label] if coarse else [label] for label in labels]
    return np.hstack([np.array(head, np.uint8), pixels.reshape(len(labels), -1)]).tobytes(), pixels


@pytest.fixture
def ten(tmp_path):
    """A root with a CIFAR-10 of 3 classes, 60 training and 6 test images, and the pixels of the test images."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\nbird\n\n")
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records([0, 1, 2] * 4, number)[0])
    content, pixels = records([2, 0, 1, 1, 0, 2], 9)
    (folder / "test_batch.bin").write_bytes(content)
    return tmp_path, pixels


def test_images_and_labels_are_those_of_the_files(ten):
    root, pixels = ten
    data = Cifar(str(root), mean=(0.0,) * 3, std=(1.0,) * 3, **PLAIN)
    assert data.class_names == ["airplane", "automobile", "bird"]
    images, targets = map(torch.cat, zip(*data.val_dataloader(), strict=True))
    assert targets.tolist() == [2, 0, 1, 1, 0, 2]
    assert torch.equal((255 * images).round().to(torch.uint8), torch.from_numpy(pixels))
    assert len(data.train_set()) == 60
    assert Cifar(str(root / "cifar-10-batches-bin"), **PLAIN).class_names == data.class_names


def test_cifar_100_has_its_fine_labels(tmp_path):
    (tmp_path / "fine_label_names.txt").write_text("apple\nbee\n")
    (tmp_path / "coarse_label_names.txt").write_text("\n".join(map(str, range(8))))
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(records([1, 0, 1, 1], 0, coarse=True)[0])
    assert [target for _, target in Cifar(str(tmp_path), **PLAIN).val_set()] == [1, 0, 1, 1]


def test_a_share_of_the_training_images_takes_the_place_of_the_test_images(ten):
    root, _ = ten

    def splits(split):
        data = Cifar(str(root), held_out=0.25, split=split, **PLAIN)
        train, val = data.train_set(), data.val_set()
        assert np.bincount(val.targets).tolist() == [5, 5, 5]
        assert np.bincount(train.targets).tolist() == [15, 15, 15]
        return {image.tobytes() for image in train.pixels}, {image.tobytes() for image in val.pixels}

    train, val = splits(0)
    assert not train & val
    assert splits(0) == (train, val)
    assert splits(1)[1] != val
    with pytest.raises(ValueError, match="has 60 images, but none of them is to train on: set `held_out`"):
        Cifar(str(root), held_out=1.0, **PLAIN).train_set()


def test_known_classes_keep_their_order_and_grey_is_one_channel(ten):
    data = Cifar(str(ten[0]), class_names=["bird", "airplane", "automobile"], channels=1, **PLAIN)
    assert [target for _, target in data.val_set()] == [0, 1, 2, 2, 1, 0]
    assert data.val_set()[0][0].shape == (1, 32, 32)
    with pytest.raises(ValueError, match="has the class 'airplane', but the 1 classes known here are bird"):
        Cifar(str(ten[0]), class_names=["bird"], **PLAIN)


def test_files_that_are_missing_or_damaged_are_named(ten):
    root = ten[0]
    file = root / "cifar-10-batches-bin" / "test_batch.bin"
    content = file.read_bytes()
    for damaged, sentence in (
        (content[:-1], "test_batch.bin has 18,437 bytes, expected 3,073 for each image: copy it again"),
        (b"\x05" + content[1:], "has a label of 3 or more, but batches.meta.txt names 3 classes"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=sentence):
            Cifar(str(root), **PLAIN).val_set()


def test_the_format_is_recognized(ten, tmp_path):
    assert Cifar.found_in(ten[0]) == {"name": "cifar", "root": str(ten[0])}
    assert Cifar.found_in(tmp_path / "cifar-10-batches-bin" / "none") is None


def test_generators_train_on_colours_around_zero_and_mirror_half_of_them(ten):
    root, pixels = ten
    data = CifarImages(str(root), batch_size=60)
    images, targets = map(torch.cat, zip(*data.val_dataloader(), strict=True))
    assert targets.tolist() == [2, 0, 1, 1, 0, 2]
    assert torch.equal((255 * data.preprocessing.values(images)).round().to(torch.uint8), torch.from_numpy(pixels))
    assert images.aminmax() == (-1, 1)
    ((first, _),) = data.train_dataloader()
    plain = data.images("train", data.val_set().transform)
    mirrored = 0
    for image in first:
        same = [bool((image == other).all() or (image.flip(-1) == other).all()) for other, _ in plain]
        assert sum(same) == 1
        mirrored += bool((image.flip(-1) == plain[same.index(True)][0]).all())
    assert 15 < mirrored < 45
