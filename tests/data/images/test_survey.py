import os

import numpy as np
import pytest
from images_by_class import write_classes
from PIL import Image

from linvit.data.images import ImageFolder
from linvit.data.images.folder import LEAST_STD, survey


def test_mean_and_deviation_are_those_of_the_training_images(tmp_path):
    source = ImageFolder(str(write_classes(tmp_path, {"ant": 10, "bee": 5})))
    found = survey(source)
    pixels = np.stack([np.asarray(Image.open(path), np.float64) / 255 for path, _ in source.files("train")])
    assert found.mean == pytest.approx(pixels.mean((0, 1, 2)), abs=1e-4)
    assert found.std == pytest.approx(pixels.std((0, 1, 2)), abs=1e-4)
    assert (found.counts, found.held_out, found.sampled, found.side) == ({"ant": 8, "bee": 4}, 3, 12, 40)


def test_a_sample_is_even_over_the_classes(tmp_path):
    source = ImageFolder(str(write_classes(tmp_path, {"ant": 10, "bee": 10})))
    whole, half = survey(source), survey(source, sample=8)
    assert half.sampled == 8
    assert half.counts == whole.counts
    assert half.mean == pytest.approx(whole.mean, abs=0.01)


def test_one_colour_has_a_deviation_to_divide_by(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("L", (64, 300), 51).save(tmp_path / name / f"{number}.png")
    found = survey(ImageFolder(str(tmp_path)))
    assert (found.mean, found.std, found.side) == ((0.2,) * 3, (LEAST_STD,) * 3, 64)


def test_what_cannot_be_read_is_named(tmp_path):
    root = write_classes(tmp_path, {"ant": 5, "bee": 5})
    (root / "ant" / "0.png").write_bytes(b"broken")
    (root / "bee" / "0.png").unlink()
    os.mkfifo(root / "bee" / "0.png")
    found = survey(ImageFolder(str(root), held_out=0.2, split=1))
    assert len(found.unreadable) + found.sampled > 8
    for path in root.rglob("*.png"):
        path.unlink()
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"None of the 8 sampled images can be used:\n  \S*png is not a readable"):
        survey(ImageFolder(str(root)))
