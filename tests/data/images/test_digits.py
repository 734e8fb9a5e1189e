import pytest
import torch
from sklearn.datasets import load_digits

from linvit.data.images import Digits
from linvit.data.images.small import DIGITS_MEAN as MEAN
from linvit.data.images.small import DIGITS_STD as STD


def test_split_is_stratified_disjoint_and_the_same_for_every_seed():
    one, two = Digits(seed=0), Digits(seed=5)
    train, val = one.train_set(), one.val_set()
    assert (len(train), len(val)) == (1437, 360)
    assert torch.equal(val.images, two.val_set().images)
    counts = torch.bincount(val.targets)
    assert counts.min() >= 34
    assert counts.max() <= 37
    pixels = torch.cat([train.images[:, 0].flatten(1), val.images[:, 0].flatten(1)])
    assert len(pixels.unique(dim=0)) == len(torch.from_numpy(load_digits().data).unique(dim=0))


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (64, 1)])
def test_images_have_the_size_and_channels_asked_for(size, channels):
    images, targets = next(iter(Digits(size=size, channels=channels, batch_size=16).val_dataloader()))
    assert images.shape == (16, channels, size, size)
    assert images.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert all(torch.equal(images[:, 0], images[:, channel]) for channel in range(channels))


def test_shift_moves_by_at_most_max_shift():
    still = Digits(max_shift=0).train_set()
    moved = Digits(max_shift=2).train_set()
    for index in range(20):
        image, shifted = still[index][0], moved[index][0]
        room = torch.nn.functional.pad(image, (2,) * 4, value=-MEAN / STD)
        windows = [room[:, top : top + 32, left : left + 32] for top in range(5) for left in range(5)]
        assert any(torch.equal(shifted, window) for window in windows)


def test_share_and_split_choose_the_held_out_images():
    small, other = Digits(held_out=0.7, split=1), Digits(held_out=0.7, split=2)
    assert (len(small.train_set()), len(small.val_set())) == (539, 1258)
    assert not torch.equal(small.val_set().images, other.val_set().images)
    assert torch.equal(small.val_set().images, Digits(held_out=0.7, split=1, seed=9).val_set().images)
    counts = torch.bincount(small.train_set().targets)
    assert counts.max() - counts.min() <= 3
    assert torch.equal(Digits().val_set().images, Digits(held_out=0.2, split=0).val_set().images)


def test_pixels_are_those_of_the_originals():
    source = Digits(size=32)
    images = torch.cat([source.train_set().images, source.val_set().images]) * STD + MEAN
    assert images.min() >= -1e-5
    assert images.max() <= 1 + 1e-5
    assert images.mean() == pytest.approx(load_digits().data.mean() / 16, abs=1e-4)


def test_fewer_validation_samples_than_processes_are_one_sentence(monkeypatch):
    source = Digits()
    monkeypatch.setattr("linvit.data.source.replica", lambda: (0, len(source.val_set()) + 1))
    with pytest.raises(ValueError, match=r"There are \d+ validation images, but \d+ processes: use fewer processes"):
        source.val_dataloader()
