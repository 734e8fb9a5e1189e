"""Evaluation and prediction of images in their own sizes: `data.resize=none`."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiers import quick

from linvit.data.images.folder import ImageFiles
from linvit.data.images.image import ORIENTATION, Preprocessing, open_image, size_of
from linvit.data.order import batches_of_one_size
from linvit.runs import load_run
from linvit_cli import main

NAME = "mavit_nano.cifar10"
SIZES = [(32, 32), (40, 33), (64, 48), (32, 32), (97, 32), (40, 33)]


@pytest.fixture(scope="module")
def run():
    return load_run(model=NAME)


@pytest.fixture
def photos(run, tmp_path):
    """Three noisy images of different sizes in each of the ten class folders."""
    generator = np.random.default_rng(0)
    sizes = itertools.cycle(SIZES)
    for name in run.class_names:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = generator.integers(0, 256, (*next(sizes), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def alone(run, file, network=None):
    image = run.preprocessing.transform()(open_image(file))
    with torch.inference_mode():
        return (network or run.network)(image[None].to(next((network or run.network).parameters()).dtype))[0]


@pytest.mark.parametrize("name", quick(["mavit_nano", "ravlt_nano", "care_nano"], ["mavit_nano"]))
def test_a_batch_is_each_image_alone(name, photos):
    run = load_run(model=f"{name}.cifar10")
    run.prepare(resize="none")
    network = run.network.double()
    source = run.source(photos, resize="none", batch_size=4, num_workers=0)
    files = [path for path, _ in source.files("val")]
    loader = source.val_dataloader()
    seen, shapes = [], set()
    for indices, (images, _) in zip(loader.batch_sampler, loader, strict=True):
        with torch.inference_mode():
            logits = network(images.double())
        for index, row in zip(indices, logits, strict=True):
            torch.testing.assert_close(row, alone(run, files[index], network), rtol=0, atol=1e-12)
        seen += indices
        shapes.add(tuple(images.shape[-2:]))
    assert sorted(seen) == list(range(30))
    assert shapes == set(SIZES)


def test_measures_are_those_of_the_images_alone(run, photos):
    measures = run.evaluate(photos, resize="none", batch_size=4, num_workers=0)
    native = load_run(model=NAME)
    native.prepare(resize="none")
    right = [
        int(alone(native, file).argmax()) == place
        for place, name in enumerate(native.class_names)
        for file in sorted((photos / name).iterdir())
    ]
    assert measures["images"] == 30
    assert measures["top1"] == pytest.approx(np.mean(right))
    assert measures["loss"] != run.evaluate(photos, num_workers=0)["loss"]


def test_predictions_keep_the_order_of_the_files(photos):
    run = load_run(model=NAME)
    run.prepare(resize="none")
    predictions = run.predict(photos, topk=10)
    files = sorted(photos.rglob("*.png"))
    assert [row.file for row in predictions] == list(map(str, files))
    for row, file in zip(predictions, files, strict=True):
        logits = alone(run, file)
        assert row.classes[0] == run.class_names[logits.argmax()]
        assert row.probabilities[0] == pytest.approx(logits.softmax(-1).max().item(), rel=1e-5)


def test_the_command_line(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["data.resize=none", "data.num_workers=0"]
    assert main(["eval", "--model", NAME, f"data={photos}", *settings, "--json", "--report", "page.html"]) == 0
    assert json.loads(capsys.readouterr().out)["raw"]["images"] == 30
    assert "images in their own sizes" in (tmp_path / "page.html").read_text()
    assert main(["predict", "--model", NAME, str(photos), "data.resize=none", "--output", "classes.json"]) == 0
    assert len(json.loads((tmp_path / "classes.json").read_text())) == 30
    assert main(["eval", "--model", NAME, f"data={photos}", "data.resize=stretch"]) == 2
    assert "data.resize is 'stretch', expected one of crop, none" in capsys.readouterr().err


def test_a_small_image_is_named(run, photos):
    small = photos / "cat" / "small.png"
    Image.new("RGB", (50, 31)).save(small)
    sentence = rf"{small} is 31×50 px, expected 32×32 px or more"
    with pytest.raises(ValueError, match=sentence):
        run.evaluate(photos, resize="none", num_workers=0)
    assert run.evaluate(photos, resize="none", num_workers=0, max_corrupt=1)["images"] == 30
    assert run.evaluate(photos, num_workers=0)["images"] == 31
    native = load_run(model=NAME)
    native.prepare(resize="none")
    predictions = native.predict([small, photos / "cat" / "0.png"])
    assert [row.file for row in predictions] == [str(photos / "cat" / "0.png")]
    (unreadable,) = predictions.unreadable
    assert unreadable == f"{small} is 31×50 px, expected 32×32 px or more: leave it out or take a larger one."


def test_batches_have_one_size_and_at_most_so_many_pixels(monkeypatch):
    sizes = [(32, 32)] * 9 + [(64, 64)] * 5 + [(320, 320)] * 2 + [(32, 32)]
    batches = batches_of_one_size(sizes, batch_size=8, pixels=8 * 48 * 48)
    assert [len(batch) for batch in batches] == [8, 2, 4, 1, 1, 1]
    assert all(len({sizes[index] for index in batch}) == 1 for batch in batches)
    assert sorted(itertools.chain(*batches)) == list(range(17))
    shares = []
    for rank in range(4):
        monkeypatch.setattr("linvit.data.order.replica", lambda rank=rank: (rank, 4))
        shares += batches_of_one_size(sizes, batch_size=8, pixels=8 * 48 * 48)
    assert sorted(shares) == sorted(batches)
    monkeypatch.setattr("linvit.data.order.replica", lambda: (3, 4))
    assert batches_of_one_size([(32, 32)] * 5, batch_size=8, pixels=8 * 48 * 48), "a process without a batch"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_header_says_the_size_of_the_upright_image(orientation, tmp_path):
    image = Image.new("RGB", (60, 40))
    image.getexif()[ORIENTATION] = orientation
    image.save(tmp_path / "photo.jpg", exif=image.getexif())
    height, width = size_of(tmp_path / "photo.jpg")
    assert (width, height) == open_image(tmp_path / "photo.jpg").size
    (tmp_path / "text.jpg").write_text("no image")
    files = [(str(tmp_path / name), 0) for name in ("text.jpg", "photo.jpg", "none.jpg")]
    assert ImageFiles(files, None, 3).sizes() == [(0, 0), (height, width), (0, 0)]


def test_pixels_are_not_changed():
    image = Image.effect_noise((45, 33), 80)
    preprocessing = Preprocessing((64, 64), (0.3,), (0.2,), resize="none")
    tensor = preprocessing.transform()(image)
    assert tensor.shape == (1, 33, 45)
    torch.testing.assert_close(preprocessing.displayed(tensor), torch.from_numpy(np.array(image)) / 255)
