"""`predict` with `strips`: images at their own size, strip by strip."""

import json
import sys

import numpy as np
import pytest
import torch
from dense_answers import write_scenes, write_untrained
from PIL import Image
from torch.testing import assert_close

from linvit.runs import load_run
from linvit.runs.images import filled
from linvit.streaming.images import open_image
from linvit_cli import main

pyvips = pytest.importorskip("pyvips", reason="needs the extra stream")


@pytest.fixture
def photos(tmp_path):
    """An image 100 px high, and a file that is not an image."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.effect_noise((70, 100), 60).convert("RGB").save(folder / "a.png")
    (folder / "broken.png").write_bytes(b"broken")
    return folder


def opened(image):
    return open_image(image, {}, image.dtype)


def normalized(run, path):
    """(1, 3, height, width)."""
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (run.preprocessing.mean, run.preprocessing.std))
    return ((pixels - mean) / std)[None]


@pytest.fixture(scope="module")
def segmentor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentor")
    return write_untrained(folder / "segmentor.ckpt", "semantic_fpn", write_scenes(folder / "scenes"))


def test_classes_of_an_image_at_its_own_size(photos, tmp_path, capsys):
    run = load_run(model="mavit_nano.cifar10")
    Image.new("RGB", (31, 64)).save(photos / "small.png")
    predictions = run.predict(photos, topk=3, strips={"rows": 32, "spill": tmp_path / "spill"})
    with torch.no_grad():
        expected = run.network(normalized(run, photos / "a.png"))[0].softmax(-1).topk(3)
    assert_close(torch.tensor(predictions[0].probabilities), expected.values)
    assert predictions[0].classes == [run.class_names[place] for place in expected.indices]
    broken, small = predictions.unreadable
    assert broken.startswith(f"{photos / 'broken.png'} is not a readable image")
    assert small == f"{photos / 'small.png'} is 64×31 px, expected 32×32 px or more: leave it out or take a larger one."
    assert (tmp_path / "spill" / "a" / "progress.pt").is_file()
    assert main(["predict", "--model", "mavit_nano.cifar10", str(photos / "a.png"), "--strips", "--rows", "64"]) == 0
    assert predictions[0].classes[0] in capsys.readouterr().out


def test_a_label_map_as_a_pyramid(segmentor, photos, tmp_path):
    run, output = load_run(segmentor), tmp_path / "out"
    (row,) = run.predict(photos / "a.png", output=output, strips={"rows": 32})
    written = pyvips.Image.new_from_file(str(output / "maps" / "a.tif")).numpy()
    assert written.shape == (100, 70)
    image = filled(opened(normalized(run, photos / "a.png")), torch.float32).read(0, 128)
    with torch.no_grad():
        labels = run.network(image)[0, :, :100].argmax(0)
    assert (torch.from_numpy(written) == labels + 1).float().mean() > 0.999
    names = json.loads((output / "labels.json").read_text())
    assert names["1"] == run.class_names[0]
    assert sum(share for _, share in row.shares) == pytest.approx(1)
    assert [path.name for path in (output / "maps").iterdir()] == ["a.tif"]


def test_spilled_maps_make_the_same_pyramid(segmentor, photos, tmp_path):
    for name, spill in (("whole", {}), ("spilled", {"spill": tmp_path / "spill"})):
        load_run(segmentor).predict(photos / "a.png", output=tmp_path / name, strips={"rows": 32, **spill})
    first, second = (Image.open(tmp_path / name / "maps" / "a.tif") for name in ("whole", "spilled"))
    assert (np.asarray(first) == np.asarray(second)).all()


def test_images_with_the_same_name_have_folders_of_their_own(photos, tmp_path):
    (photos / "more").mkdir()
    Image.effect_noise((64, 64), 60).convert("RGB").save(photos / "more" / "a.png")
    strips = {"rows": 32, "spill": tmp_path / "spill"}
    run = load_run(model="mavit_nano.cifar10")
    assert len(run.predict([photos / "a.png", photos / "more"], strips=strips)) == 2
    assert sorted(path.name for path in (tmp_path / "spill").iterdir()) == ["a", "a_2"]
    assert len(run.predict([photos / "a.png", photos / "more"], strips=strips)) == 2


def test_without_libvips_nothing_is_computed_for_a_pyramid(segmentor, photos, tmp_path, monkeypatch):
    run = load_run(segmentor)
    monkeypatch.setitem(sys.modules, "pyvips", None)
    monkeypatch.setattr("linvit.runs.images.run_in_strips", lambda *_, **__: pytest.fail("something was computed"))
    with pytest.raises(ImportError, match=r"written as a TIFF pyramid by pyvips: `pip install 'linvit\[stream\]'`"):
        run.predict(photos / "a.png", output=tmp_path / "out", strips={})


def test_rows_of_zeros_below_an_image():
    image = torch.randn(1, 3, 40, 5)
    more = filled(opened(image), torch.float32)
    assert more.shape == (1, 3, 64, 5)
    rows = torch.cat([more.read(0, 33), more.read(33, 64)], 2)
    assert torch.equal(rows[:, :, :40], image)
    assert not rows[:, :, 40:].any()


def test_one_sentence_for_each_mistake(segmentor, photos, capsys):
    with pytest.raises(ValueError, match="`strips` is given without `output`"):
        load_run(segmentor).predict(photos, strips={})
    with pytest.raises(ValueError, match="Unknown option of strips 'row', expected one of rows, memory"):
        load_run(model="mavit_nano.cifar10").predict(photos / "a.png", strips={"row": 3})
    assert main(["predict", "--model", "mavit_nano.cifar10", str(photos), "--spill", "there"]) == 2
    assert "--rows, --strip-memory and --spill need --strips: add it." in capsys.readouterr().err
