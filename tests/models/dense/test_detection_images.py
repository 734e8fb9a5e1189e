"""Masks pasted into images, crowds, suppression."""

import torch
from torchvision.ops import roi_align

from linvit.models.dense.inputs import ImageBatch, pasted, suppressed
from linvit.models.dense.roi_heads import RegionPool


def test_a_full_mask_fills_its_box_and_what_hangs_over_is_cut():
    boxes = torch.tensor([[10.0, 20, 30, 25], [-5, -5, 5, 5], [38, 28, 60, 60]])
    masks = pasted(torch.ones(3, 28, 28), boxes, 30, 40)
    inside = masks[0, 20:25, 10:30]
    assert inside.all()
    assert masks[0].sum() == inside.sum()
    assert masks[1, :5, :5].all()
    assert masks[1].sum() == 25
    assert masks[2].sum() == 4


def test_the_left_half_of_a_mask_is_the_left_half_of_its_box():
    half = (torch.arange(28) < 14).float().expand(1, 28, 28)
    mask = pasted(half, torch.tensor([[10.0, 20, 30, 25]]), 30, 40)[0]
    assert mask[20:25, 10:20].all()
    assert mask.sum() == 50


def test_a_mask_cut_out_as_for_training_comes_back():
    rows, columns = torch.meshgrid(torch.arange(90.0), torch.arange(120.0), indexing="ij")
    disc = ((rows - 44.5) ** 2 + (columns - 63.5) ** 2) < 30**2
    box = torch.tensor([[33.5, 14.5, 94.5, 75.5]])
    region = torch.cat((torch.zeros(1, 1), box), dim=1)
    cut = roi_align(disc[None, None].float(), region, 28, 1.0, 0, aligned=True)[:, 0] >= 0.5
    back = pasted(cut.float(), box, 90, 120)[0]
    assert (back & disc).sum() / (back | disc).sum() > 0.95


def test_suppression_works_within_a_class_and_on_each_classs_own_boxes():
    near = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]])
    scores = torch.tensor([[0.9, 0.0], [0.8, 0.7], [0.01, 0.6]])
    found = suppressed(near, scores, 0.05, 0.5, 100)
    assert found["labels"].tolist() == [0, 1, 1]
    torch.testing.assert_close(found["scores"], torch.tensor([0.9, 0.7, 0.6]))
    own = torch.stack((near, near + 1), dim=1)
    torch.testing.assert_close(suppressed(own, scores, 0.05, 0.5, 2)["boxes"], torch.stack((near[0], near[1] + 1)))


def test_images_are_padded_at_right_and_bottom_to_multiples_of_32():
    images = [torch.rand(3, 33, 50), torch.rand(3, 20, 70)]
    batch, _ = ImageBatch()(images)
    assert batch.tensors.shape == (2, 3, 64, 96)
    assert batch.image_sizes == [(33, 50), (20, 70)]
    for image, row in zip(images, batch.tensors, strict=True):
        height, width = image.shape[-2:]
        assert torch.equal(row[:, :height, :width], image)
        assert row.sum() == image.sum() or torch.isclose(row.sum(), image.sum())


def test_regions_are_cut_from_the_level_of_their_size():
    maps = [torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i)) for i in range(4)]
    sides = (20.0, 111.0, 112.0, 223.0, 224.0, 448.0, 900.0)
    boxes = torch.tensor([[0.0, 0, side, side] for side in sides])
    cut = RegionPool(7)([*maps, maps[-1]], [boxes])
    assert cut.shape == (7, 1, 7, 7)
    assert cut[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 3, 3]
    ramp = torch.arange(256.0).expand(1, 1, 256, 256).contiguous()
    middle = RegionPool(7)([ramp, *maps[1:]], [torch.tensor([[40.0, 40, 68, 68]])])
    # Cell centres at 42, 46, … px; a pixel of the map covers 4 px, its value stands in its middle.
    torch.testing.assert_close(middle[0, 0, 0], torch.arange(10.0, 17.0))
