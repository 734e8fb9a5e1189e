import pytest
import torch

from linvit.layers import ConvStem, PatchStem
from linvit.layers.patches import checked_image


@pytest.mark.parametrize("stem", [ConvStem(3, 16), PatchStem(3, 16)], ids=["conv", "patch"])
def test_maps_are_channels_last_in_inference_on_a_cpu(stem):
    stem, image = stem.eval(), torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        map_ = stem(image)
        assert map_.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(map_, stem.double()(image.double()).float())
        assert stem(image.double()).is_contiguous()
    assert stem.float()(image).is_contiguous(), "with gradients"


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
