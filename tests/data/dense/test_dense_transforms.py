import colorsys

import pytest
import torch
from torch.nn.functional import interpolate
from torchvision import tv_tensors
from torchvision.transforms import v2

from linvit.data.dense.transforms import (
    RESIZINGS,
    KeepVisible,
    PadTo,
    PhotometricDistortion,
    RandomSizeCrop,
    Resize,
    VariedCrop,
    detection_transform,
    normalize,
    scale_saturation,
)

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
SETTINGS = {
    "short_sides": range(480, 801, 32),
    "crop_short_sides": (400, 500, 600),
    "crop_range": (384, 600),
    "jitter_size": 256,
    "mean": MEAN,
}


def image_of(height, width):
    return tv_tensors.Image(torch.randint(256, (3, height, width), dtype=torch.uint8))


def rectangles(height, width, corners):
    """A target whose masks are exactly its boxes."""
    boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
    masks = torch.zeros(len(corners), height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, corners, strict=True):
        mask[top:bottom, left:right] = 1
    return {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
        "labels": torch.arange(len(corners)),
        "iscrowd": torch.zeros(len(corners), dtype=torch.int64),
        "area": masks.sum((1, 2)).float(),
        "masks": tv_tensors.Mask(masks),
        "image_id": 3,
        "original_size": (height, width),
    }


def boxes_of(masks):
    """xyxy of what is set in each mask."""
    found = []
    for mask in masks:
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        found.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return torch.tensor(found, dtype=torch.float32)


@pytest.mark.parametrize(
    ("size", "sides", "expected"),
    [
        ((480, 640), (1333, 800), (800, 1067)),  # 1066.67; RandomShortestSize gives 1066
        ((640, 480), (1333, 800), (1067, 800)),
        ((427, 640), (1333, 800), (800, 1199)),
        ((300, 1000), (1333, 800), (400, 1333)),
        ((512, 683), (2048, 512), (512, 683)),
        ((256, 2000), (2048, 512), (262, 2048)),
    ],
)
def test_sizes_are_those_of_the_papers_libraries(size, sides, expected):
    image = tv_tensors.Image(torch.zeros(3, *size, dtype=torch.uint8))
    assert Resize(sides[0], [sides[1]])(image).shape[-2:] == expected


def test_images_are_scaled_without_antialiasing_and_masks_by_the_nearest_pixel():
    image, mask = image_of(40, 60), tv_tensors.Mask(torch.randint(2, (40, 60), dtype=torch.uint8))
    small, labels = Resize(30, [20])(image, mask)
    expected = interpolate(image[None].float(), (20, 30), mode="bilinear", align_corners=False)[0]
    assert (small.float() - expected).abs().max() <= 1  # rounded once along each side
    assert torch.equal(labels.as_subclass(torch.Tensor), mask[::2, ::2].as_subclass(torch.Tensor))


def test_a_ratio_is_drawn_for_both_sides():
    resize = Resize(2048, [512], (0.5, 2.0))
    short = [min(resize(tv_tensors.Mask(torch.zeros(51, 68, dtype=torch.uint8))).shape) for _ in range(60)]
    assert 256 <= min(short) < 350
    assert 900 < max(short) <= 1024


@pytest.mark.parametrize("resizing", RESIZINGS)
def test_boxes_masks_and_labels_stay_together(resizing):
    transform = detection_transform(RESIZINGS[resizing](1333, 800, **SETTINGS), 0.5, MEAN, STD)
    # nearest-pixel masks are off by less than one pixel of each grid; the second of "detr" is up to 800/384 finer
    bound = 1 + (800 / 384 if resizing == "detr" else 0)
    corners = [(3, 4, 90, 70), (20, 30, 27, 41), (101, 60, 150, 100), (60, 2, 64, 99)]
    seen = 0
    for _ in range(6):
        image, target = transform(image_of(100, 150), rectangles(100, 150, corners))
        assert all(len(target[key]) == len(target["boxes"]) for key in ("labels", "masks", "iscrowd", "area"))
        assert target["masks"].shape[1:] == image.shape[1:]
        assert (target["image_id"], target["original_size"]) == (3, (100, 150))
        assert all(type(value) is torch.Tensor for value in (image, target["boxes"], target["masks"]))
        assert (boxes_of(target["masks"]) - target["boxes"]).abs().max() < bound + 1e-3
        areas = torch.tensor(
            [
                (corners[label][2] - corners[label][0]) * (corners[label][3] - corners[label][1])
                for label in target["labels"]
            ]
        )
        assert torch.equal(target["area"], areas.float())
        seen += len(target["boxes"])
    assert seen > 12


def test_flip_moves_boxes_with_masks_exactly():
    target = rectangles(100, 150, [(3, 4, 90, 70)])
    _, flipped = detection_transform([], 1.0, MEAN, STD)(image_of(100, 150), target)
    assert flipped["boxes"].tolist() == [[60, 4, 147, 70]]
    assert torch.equal(boxes_of(flipped["masks"]), flipped["boxes"])


def test_an_image_without_objects_passes_every_resizing():
    for build in RESIZINGS.values():
        resizing = build(
            200, 120, **SETTINGS | {"short_sides": (96, 120), "crop_short_sides": (90,), "crop_range": (40, 80)}
        )
        _, target = detection_transform(resizing, 0.5, MEAN, STD)(image_of(100, 150), rectangles(100, 150, []))
        assert target["boxes"].shape == (0, 4)
        assert target["masks"].shape[0] == 0


def test_objects_cut_away_are_dropped_whole():
    target = rectangles(50, 50, [(0, 0, 10, 10), (30, 30, 40, 40), (0, 30, 10, 40)])
    image, cut = v2.Compose([v2.CenterCrop((30, 30))])(image_of(50, 50), target)
    _, kept = KeepVisible()(image, cut)
    assert kept["labels"].tolist() == [1]
    assert kept["boxes"].tolist() == [[20, 20, 30, 30]]
    assert kept["masks"].shape == (1, 30, 30)


def test_a_box_without_width_is_dropped():
    boxes = tv_tensors.BoundingBoxes([[0, 2, 0, 9], [1, 1, 4, 4]], format="XYXY", canvas_size=(10, 10))
    _, kept = KeepVisible()(image_of(10, 10), {"boxes": boxes, "labels": torch.tensor([0, 1])})
    assert kept["labels"].tolist() == [1]


def test_crops_prefer_windows_with_more_than_one_label():
    labels = torch.zeros(16, 64, dtype=torch.uint8)
    labels[:, 32:] = 1
    labels[:4] = 255
    shares = []
    for _ in range(300):
        window = VariedCrop((16, 16), 0.75)(tv_tensors.Mask(labels))
        counts = torch.bincount(window[4:].flatten().int(), minlength=2)
        shares.append((counts.max() / counts.sum()).item() < 0.75)
    expected = 1 - (42 / 49) ** 11  # 7 of 49 windows will do, eleven are drawn
    deviation = (expected * (1 - expected) / 300) ** 0.5
    assert abs(sum(shares) / 300 - expected) < 4 * deviation


def test_crops_of_smaller_images_are_filled_up():
    image, labels = image_of(20, 70), tv_tensors.Mask(torch.ones(20, 70, dtype=torch.uint8))
    steps = v2.Compose([VariedCrop((32, 64)), *normalize(MEAN, STD), PadTo((32, 64))])
    image, labels = steps(image, labels)
    assert image.shape == (3, 32, 64)
    assert (image[:, 20:] == 0).all()
    assert (labels[20:] == 255).all()
    assert (labels[:20] == 1).all()


def test_normalization_is_minus_mean_over_std():
    image = image_of(5, 6)
    expected = (image.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(v2.Compose(normalize(MEAN, STD))(image).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_saturation_is_scaled_in_hsv_and_nothing_else(factor):
    image = torch.randint(256, (3, 8, 8), dtype=torch.uint8)
    scaled = scale_saturation(image, factor)
    for pixel, new in zip(image.flatten(1).T.tolist(), scaled.flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(part / 255 for part in pixel))
        expected = colorsys.hsv_to_rgb(hue, min(saturation * factor, 1), value)
        assert max(abs(part - 255 * right) for part, right in zip(new, expected, strict=True)) <= 0.5 + 1e-3


def test_distortion_does_each_of_its_steps_half_of_the_time_within_bounds():
    distortion = PhotometricDistortion()
    image = image_of(4, 4)
    counts = {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0}
    for _ in range(400):
        for step in distortion.make_params([image])["steps"]:
            given = step.keywords
            if "hue_factor" in given:
                assert abs(given["hue_factor"]) <= 0.1
                counts["hue"] += 1
            elif "shift" not in given:
                assert 0.5 <= given["factor"] <= 1.5
                counts["saturation"] += 1
            elif given["shift"]:
                assert abs(given["shift"]) <= 32
                counts["brightness"] += 1
            else:
                assert 0.5 <= given["factor"] <= 1.5
                counts["contrast"] += 1
    assert all(abs(count - 200) < 4 * 10 for count in counts.values())  # four standard deviations


def test_crop_sizes_are_drawn_within_their_range():
    sizes = [tuple(RandomSizeCrop(40, 60)(image_of(50, 100)).shape[1:]) for _ in range(80)]
    heights, widths = zip(*sizes, strict=True)
    assert set(heights) <= set(range(40, 51))
    assert {min(heights), max(heights)} == {40, 50}
    assert set(widths) <= set(range(40, 61))
    assert max(widths) > 55


def test_distortion_leaves_labels_and_shapes_alone():
    image, labels = image_of(9, 7), tv_tensors.Mask(torch.randint(5, (9, 7), dtype=torch.uint8))
    new, same = PhotometricDistortion()(image, labels)
    assert torch.equal(same, labels)
    assert (new.shape, new.dtype) == (image.shape, torch.uint8)
