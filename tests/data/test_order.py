import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import Dataset

from linvit.data import order
from linvit.data.order import Augmented, Batches, GroupedOrder, ResumableBatches, ShuffledOrder, plain_order


class Noise(Dataset):
    """Everything a transform can draw from."""

    def __getitem__(self, index):
        drawn = torch.rand(1).item() + np.random.rand() + random.random()
        return torch.tensor([index, drawn], dtype=torch.float64), index

    def __len__(self):
        return 20


def batches(epoch=0, reached=(0, 0), workers=0, seed=0, repeats=1):
    order = ShuffledOrder(20, seed, repeats)
    loader = ResumableBatches(
        Augmented(Noise(), seed), sampler=order, reached=reached, batch_size=4, num_workers=workers, drop_last=True
    )
    order.set_epoch(epoch)
    return loader


def drawn(loader):
    return torch.stack([images for images, _ in loader])


def test_order_and_noise_depend_on_seed_and_epoch_alone():
    first = drawn(batches())
    assert torch.equal(first, drawn(batches()))
    assert sorted(first[..., 0].flatten().tolist()) == list(range(20))
    assert not torch.equal(first, drawn(batches(epoch=1)))
    assert not torch.equal(first, drawn(batches(seed=1)))


def test_worker_processes_change_nothing():
    assert torch.equal(drawn(batches()), drawn(batches(workers=2)))


def test_an_epoch_goes_on_in_its_middle_and_the_next_starts_at_its_beginning():
    loader = batches(epoch=3, reached=(3, 2))
    assert torch.equal(drawn(loader), drawn(batches(epoch=3))[2:])
    assert loader.reached == (3, 5)
    loader.sampler.set_epoch(4)
    assert torch.equal(drawn(loader), drawn(batches(epoch=4)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_every_image_without_padding(ranks, world):
    shares = []
    for _ in ranks(world):
        shares += plain_order(20)
    assert sorted(shares) == list(range(20))


def test_two_processes_see_the_batches_of_one(ranks):
    whole = [index for _, index in ShuffledOrder(20, 0)]
    for rank in ranks(2):
        assert [index for _, index in ShuffledOrder(20, 0)] == whole[rank::2]


class SomeCorrupt(Dataset):
    def __getitem__(self, index):
        return f"file {index} is broken." if index in (2, 5) else (torch.zeros(1), index)

    def __len__(self):
        return 8


def test_corrupt_images_are_named_and_left_out_up_to_the_limit(caplog):
    loader = Batches(SomeCorrupt(), batch_size=4, max_corrupt=2)
    assert torch.cat([targets for _, targets in loader]).tolist() == [0, 1, 3, 4, 6, 7]
    assert torch.cat([targets for _, targets in loader]).tolist() == [0, 1, 3, 4, 6, 7]
    assert caplog.messages == [
        "Left out (1 of at most 2): file 2 is broken.",
        "Left out (2 of at most 2): file 5 is broken.",
    ]


def test_of_many_corrupt_images_the_first_five_are_named_and_all_are_counted(caplog):
    broken = [f"file {index} is broken." for index in range(12)]
    loader = Batches([*broken, (torch.zeros(1), 0)], batch_size=4, max_corrupt=20)
    assert len(list(loader)) == len(list(loader)) == 1
    *named, summary = caplog.messages
    assert named == [f"Left out ({index + 1} of at most 20): file {index} is broken." for index in range(5)]
    assert summary == "12 samples were left out, of at most 20; the first 5 are named above."


@pytest.mark.parametrize(
    ("limit", "says"),
    [(0, "file 2 is broken."), (1, "file 2 is broken. More than `max_corrupt`=1.\n  file 5 is broken.")],
)
def test_one_corrupt_image_too_many_stops(limit, says):
    with pytest.raises(ValueError, match="broken") as raised:
        list(Batches(SomeCorrupt(), batch_size=4, max_corrupt=limit))
    assert str(raised.value) == says


def test_data_of_which_nothing_can_be_read_is_an_error_whatever_the_limit():
    broken = [f"file {index} is broken." for index in range(7)]
    names = "\n  ".join(broken[:5])
    for loader in (
        Batches(broken, batch_size=4, max_corrupt=100),
        ResumableBatches(Augmented(broken, 0), batch_size=1, sampler=InOrder(7, 0), max_corrupt=100),
    ):
        with pytest.raises(ValueError, match="None of") as raised:
            list(loader)
        assert str(raised.value) == f"None of the 7 samples can be used:\n  {names}\n  and 2 more."


def test_an_epoch_that_resumes_before_its_unreadable_end_is_no_error():
    samples = [(torch.zeros(1), 0), "file 1 is broken."]
    loader = ResumableBatches(Augmented(samples, 0), batch_size=1, sampler=InOrder(2, 0), max_corrupt=1, reached=(0, 1))
    assert list(loader) == []
    loader.reached = (0, 0)
    assert len(list(loader)) == 1


class InOrder(ShuffledOrder):
    def shuffled(self, generator):
        return list(range(self.length))


@pytest.mark.parametrize(("length", "world"), [(20, 1), (20, 2), (600, 1), (600, 4)])
def test_repeated_augmentation_is_that_of_timm(monkeypatch, ranks, length, world):
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))
    for rank in ranks(world):
        ours = ShuffledOrder(length, 0, repeats=3)
        theirs = list(RepeatAugSampler(range(length), world, rank, shuffle=False, num_repeats=3))
        assert [index for _, index, _ in ours] == theirs
        assert len(ours) == len(theirs)


def test_copies_of_an_image_are_augmented_differently():
    pairs = drawn(batches(repeats=3)).flatten(0, 1)
    assert torch.equal(pairs[:3, 0], pairs[:1, 0].expand(3))
    assert len(set(pairs[:, 1].tolist())) == 20
    assert len(set(pairs[:, 0].tolist())) == 7


def test_repeated_augmentation_resumes_exactly():
    whole = drawn(batches(epoch=2, repeats=3))
    assert torch.equal(drawn(batches(epoch=2, reached=(2, 3), repeats=3)), whole[3:])
    assert torch.equal(drawn(batches(epoch=2, workers=2, repeats=3)), whole)


@pytest.mark.parametrize("world", [1, 2])
def test_grouped_batches_hold_one_group_in_every_process(ranks, world):
    groups = [index % 3 == 0 for index in range(50)]
    seen = []
    for _ in ranks(world):
        mine = [index for _, index in GroupedOrder(groups, 4, seed=0)]
        seen += mine
        full = (17 // (4 * world) + 33 // (4 * world)) * 4
        assert all(len({groups[index] for index in mine[start : start + 4]}) == 1 for start in range(0, full, 4))
    assert sorted(seen) == list(range(50))


def test_grouped_order_changes_with_the_epoch_and_goes_on_in_its_middle():
    order = GroupedOrder([index % 2 for index in range(20)], 4, seed=0)
    first = list(order)
    assert first == list(order)
    order.skipped = 8
    assert list(order) == first[8:]
    order.skipped = 0
    order.set_epoch(1)
    assert [index for _, index in order] != [index for _, index in first]


@pytest.mark.parametrize(("busy", "share"), [(0.0, 1.0), (3.0, 6 / 18)])
def test_the_share_of_the_time_in_which_no_batch_was_ready(busy, share, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(order, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Noise):
        def __getitem__(self, index):
            now[0] += 1.0
            return super().__getitem__(index)

        def __len__(self):
            return 8

    loader = Batches(Slow(), batch_size=2)
    assert loader.waited == (0.0, 0.0)
    for _ in loader:
        now[0] += busy
    assert loader.waited == (6.0, share)  # of four batches, the first one does not count
