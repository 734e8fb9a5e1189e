import struct

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.images.image import CorruptImageError, Preprocessing, converted, open_image


def write_tiff(path, values, photometric=1):
    """A TIFF of one strip, as Pillow does not write it: kind "f", "i" or "u" of `values`, (height, width)."""
    bits, form = values.itemsize * 8, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = {256: values.shape[1], 257: values.shape[0], 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1}
    tags |= {278: values.shape[0], 279: values.nbytes, 339: form}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    content = values.astype(values.dtype.newbyteorder("<")).tobytes()
    head = b"II*\0" + struct.pack("<I", 8 + len(content))
    path.write_bytes(head + content + struct.pack("<H", len(tags)) + entries + bytes(4))


GREY = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "1", "LA", "I", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_becomes_grey_or_rgb_with_the_same_brightness(tmp_path, mode, channels):
    if mode.startswith("I"):
        image = Image.fromarray(GREY.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(GREY).convert(mode)
    path = tmp_path / f"image.{'tiff' if mode == 'CMYK' else 'png'}"
    image.save(path)
    read = np.asarray(open_image(path, channels), dtype=float)
    assert read.shape == ((30, 40) if channels == 1 else (30, 40, 3))
    if mode != "1":
        expected = GREY if channels == 1 else GREY[..., None]
        assert np.abs(read - expected).max() <= 6  # a palette has 6 steps a colour at worst; others are within 1


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint32, np.int16, np.int8])
def test_values_of_unknown_range_are_refused(tmp_path, kind):
    write_tiff(tmp_path / "image.tif", GREY.astype(kind))
    with pytest.raises(CorruptImageError, match=r"image\.tif has .* range is unknown, .*: scale them to 0\.\.255"):
        open_image(tmp_path / "image.tif")
    if kind != np.int8:  # which only a file can be
        with pytest.raises(CorruptImageError, match=r"The image has .* range is unknown"):
            converted(Image.fromarray(GREY.astype(kind if kind == np.float32 else np.int32)), 3)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_white_is_zero(tmp_path, kind):
    values = np.iinfo(kind).max - GREY.astype(kind) * (np.iinfo(kind).max // 255)
    write_tiff(tmp_path / "image.tif", values, photometric=0)
    assert np.array_equal(open_image(tmp_path / "image.tif", 1), GREY)


@pytest.mark.parametrize(("mode", "shape"), [("L", (32, 64)), ("RGB", (32, 64, 3))])
def test_a_normalized_image_is_displayed_as_it_was(mode, shape):
    picture = Image.linear_gradient("L").resize((64, 32)).convert(mode)
    channels = len(picture.getbands())
    preprocessing = Preprocessing((32, 64), (0.3,) * channels, (0.2,) * channels, crop_pct=1.0)
    found = preprocessing.displayed(preprocessing.transform()(picture))
    assert found.shape == shape
    torch.testing.assert_close(found, torch.from_numpy(np.array(picture)) / 255)
