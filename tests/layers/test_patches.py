import pytest
import torch

from linvit.layers import ConvDownsample, ConvStem, PatchDownsample, PatchStem
from linvit.layers.patches import checked_image


@pytest.mark.parametrize(("side", "rounded_up", "rounded_down"), [(32, 8, 8), (33, 9, 8), (63, 16, 15), (64, 16, 16)])
def test_stems_have_stride_four(side, rounded_up, rounded_down):
    x = torch.randn(2, 3, side, 40)
    assert ConvStem(3, 8)(x).shape == (2, 8, rounded_up, 10)
    assert PatchStem(3, 8)(x).shape == (2, 8, rounded_down, 10)


@pytest.mark.parametrize(("side", "rounded_up", "rounded_down"), [(8, 4, 4), (9, 5, 4)])
def test_downsamples_have_stride_two(side, rounded_up, rounded_down):
    x = torch.randn(2, 8, side, 6)
    assert ConvDownsample(8, 12)(x).shape == (2, 12, rounded_up, 3)
    assert PatchDownsample(8, 12)(x).shape == (2, 12, rounded_down, 3)


@pytest.mark.parametrize("stem", [ConvStem, PatchStem])
def test_stem_starts_with_a_convolution_of_the_image(stem):
    assert stem(5, 8)[0].in_channels == 5


@pytest.mark.parametrize("stem", [ConvStem(3, 16), PatchStem(3, 16)], ids=["conv", "patch"])
def test_maps_are_channels_last_in_inference_on_a_cpu(stem):
    stem, image = stem.eval(), torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        map_ = stem(image)
        assert map_.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(map_, stem.double()(image.double()).float())
        assert stem(image.double()).is_contiguous()
    assert stem.float()(image).is_contiguous(), "with gradients"


def test_conv_stem_ends_with_a_norm():
    stem = ConvStem(3, 8)
    assert [type(layer).__name__ for layer in stem] == ["Conv2d", "BatchNorm2d", "GELU"] * 3 + ["Conv2d", "BatchNorm2d"]


def test_checked_image_passes_the_smallest():
    x = torch.zeros(1, 3, 32, 32)
    assert checked_image(x, 3) is x


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 32, 31), "`input` is 32 × 31 px, expected sides of at least 32 px .*: enlarge the images"),
        ((1, 4, 32, 32), r"shape \(1, 4, 32, 32\), expected \(batch, 3, height, width\).*in_chans=4"),
        ((32, 32), r"shape \(32, 32\), expected \(batch, 3, height, width\)"),
    ],
)
def test_checked_image_says_what_is_wrong(shape, message):
    with pytest.raises(ValueError, match=message):
        checked_image(torch.zeros(shape), 3)
