import csv
import json
import re

import pytest
import timm
import torch
from dense_answers import write_scenes, write_untrained
from PIL import Image
from tiers import quick
from tiny_diffusion import write_diffusion_recipe
from tiny_run import ONE_STEP, write_recipe

import linvit  # noqa: F401
from linvit.analysis.rank import measure_ranks
from linvit.data.images import Digits, Preprocessing
from linvit.runs import load_run, train
from linvit.runs.analyze import resolve_layers
from linvit.runs.images import crops, from_photos, from_source
from linvit_cli import main

FILES = {
    f"{name}.{ending}" for name in ("rank", "scores", "magnitude") for ending in ("csv", "json", "pdf", "png", "svg")
}
FILES |= {f"{name}.{ending}" for name in ("spectrum", "score_maps", "readouts") for ending in ("pdf", "png", "svg")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(write_recipe(tmp_path_factory.mktemp("trained"), trainer=ONE_STEP))


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_all_of_a_run_goes_into_its_folder_with_every_number(run):
    analysis = run.analyze(count=6, layers=[1, "2"])
    folder = run.folder / "analysis"
    assert analysis.page == folder / "report.html"
    assert analysis.unreadable == []
    assert set(analysis.figures) == {"rank", "spectrum", "score_maps", "scores", "readouts", "magnitude"}
    assert {path.name for path in folder.iterdir()} == FILES | {"report.html"}
    page = (folder / "report.html").read_text()
    assert "6 held-out images of Digits, evenly chosen" in page
    assert "moving average" in page
    assert len(re.findall('src="data:image/svg', page)) == 6
    assert "http:" not in page.replace("http://www.w3.org", "")
    rows = table(folder / "rank.csv")
    assert list(rows[0]) == ["layer", "mechanism", "matrix", "head", "measure", "mean", "deviation", "images"]
    assert {row["matrix"] for row in rows} == {"state", "mixed", "local", "modulated"}
    assert {row["images"] for row in rows} == {"6"}
    assert {row["rotation"] for row in table(folder / "scores.csv")} == {"on", "off"}
    assert {row["readout"] for row in table(folder / "magnitude.csv")} >= {"of the layer", "softmax", "linear", "mala"}
    for name in ("rank", "scores", "magnitude"):
        text = (folder / f"{name}.json").read_text()
        content = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
        assert len(content["rows"]) == len(table(folder / f"{name}.csv")) == len(analysis.rows[name])
        assert content["curves"]


def test_a_single_analysis_of_some_layers_of_an_untrained_model_on_the_photos(tmp_path):
    untrained = load_run(model="ravlt_nano", untrained=True)
    layers = ["2", "stages.0.blocks.0.attn"]
    untrained.analyze("scores", output=tmp_path, layers=layers, query=(0.2, 0.8))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.html", *(n for n in FILES if n.startswith("score"))}
    page = (tmp_path / "report.html").read_text()
    assert "random weights, never trained (seed 0)" in page
    assert "china.jpg and flower.jpg, and for averages 64 regular crops" in page
    rows = table(tmp_path / "scores.csv")
    assert {row["layer"] for row in rows} == {"stages.0.blocks.0.attn", "stages.1.blocks.0.attn"}
    maps = json.loads((tmp_path / "scores.json").read_text())["curves"]
    assert [score_map["query"] for score_map in maps] == [[1, 6], [0, 3]] * 2


def test_files_are_read_cut_up_and_named_where_they_cannot_be(tmp_path):
    for name, size in (("good", (90, 64)), ("small", (20, 40))):
        Image.effect_noise(size, 60).save(tmp_path / f"{name}.png")
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    untrained = load_run(model="care_nano", untrained=True)
    analysis = untrained.analyze("rank", images=tmp_path, count=5, output=tmp_path / "out")
    assert len(analysis.unreadable) == 2
    assert "small.png is 40×20 px, expected 32×32 px or more" in analysis.unreadable[0]
    assert "torn.png is not a readable image" in analysis.unreadable[1]
    assert {row["images"] for row in analysis.rows["rank"]} == {5}
    assert "1 image files, and for averages 5 regular crops" in analysis.page.read_text()


def test_the_command_names_the_report_and_what_is_unreadable(run, tmp_path, capsys):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    Image.effect_noise((40, 40), 60).save(tmp_path / "good.png")
    paths = ["--images", str(tmp_path), "--output", str(tmp_path / "out"), "--count", "2", "--layers", "1"]
    assert main(["analyze", "rank", str(run.folder), *paths]) == 1
    out, said = capsys.readouterr()
    assert str(tmp_path / "out" / "report.html") in out
    assert "torn.png is not a readable image" in said


@pytest.mark.parametrize(("size", "shape"), [(64, (64, 64)), ((48, 96), (48, 96))])
def test_images_of_ones_own_are_read_at_another_size(size, shape, tmp_path, monkeypatch):
    seen = []

    def watched(network, batches, layers):
        seen.extend(batches)
        return measure_ranks(network, seen, layers)

    monkeypatch.setattr("linvit.runs.analyze.measure_ranks", watched)
    run = load_run(model="ravlt_nano", untrained=True)
    run.analyze("rank", images=[Image.new("RGB", (224, 224))], size=size, output=tmp_path, layers=[1])
    assert {image.shape[-2:] for image in seen} == {shape}
    with pytest.raises(ValueError, match="only the `size` of a classifier's images applies"):
        run.analyze("rank", images=[Image.new("RGB", (224, 224))], mean=(0.5,), output=tmp_path)
    with pytest.raises(ValueError, match="`size` is -4"):
        run.analyze("rank", images=[Image.new("RGB", (224, 224))], size=-4, output=tmp_path)


def test_all_that_can_be_analyzed_of_a_nonlinear_read_is_its_rank(tmp_path):
    run = load_run(model="deit_tiny_vittt", untrained=True)
    analysis = run.analyze(images=[Image.new("RGB", (224, 224))], output=tmp_path, layers=[1])
    assert set(analysis.rows) == {"rank"}
    said = "No scores and no magnitude: the attention reads its values nonlinearly, so it has no matrix of scores"
    assert said in analysis.page.read_text()
    with pytest.raises(ValueError, match="choose layers with another mechanism, or analyze ranks"):
        run.analyze("scores", images=[Image.new("RGB", (224, 224))], output=tmp_path)


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    first, second = (load_run(model="mavit_nano", untrained=True).network.state_dict() for _ in range(2))
    assert all(value.equal(second[key]) for key, value in first.items())
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("name", quick(["ravlt_nano", "deit_tiny_rala", "vit_tiny_patch16_224"], ["ravlt_nano"]))
def test_a_model_with_weights_from_a_file(name, tmp_path):
    network = timm.create_model(name, num_classes=7)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    loaded = load_run(model=name, checkpoint=tmp_path / "weights.pth")
    assert all(value.equal(network.state_dict()[key]) for key, value in loaded.network.state_dict().items())
    assert loaded.class_names == [str(number) for number in range(7)]
    assert loaded.weights == "raw weights"


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return train(
        write_diffusion_recipe(tmp_path_factory.mktemp("diffusion"), task={"generates": False}, trainer=ONE_STEP)
    )


@pytest.mark.slow
def test_an_image_generator_is_analyzed_at_a_fixed_time_and_the_class_of_each_image(generator, tmp_path):
    analysis = generator.analyze(count=6, output=tmp_path)
    assert {row["layer"] for row in analysis.rows["rank"]} == {"blocks.0.attn", "blocks.1.attn"}
    assert {row["images"] for row in analysis.rows["rank"]} == {6}
    assert "at time 250 of 1,000, with the class of each image" in analysis.page.read_text()
    subject = generator.subject()
    images, labels = from_source(generator.source(), 6, 2).many, torch.arange(6)
    noised, times, classes = subject.inputs(images, labels)
    assert classes is labels
    assert times.tolist() == [250] * 6
    assert (noised - images).abs().mean() > 0.1
    with pytest.raises(ValueError, match="analyzed on the data of their run: leave `images` out"):
        generator.analyze(images="photos")


@pytest.mark.parametrize("framework", quick(["retinanet", "semantic_fpn"], ["semantic_fpn"]))
def test_of_a_detector_or_segmentor_the_backbone_is_analyzed(framework, tmp_path):
    scenes = write_scenes(tmp_path / "scenes")
    loaded = load_run(write_untrained(tmp_path / "dense.ckpt", framework, scenes))
    analysis = loaded.analyze("scores", count=3, output=tmp_path / "out", layers=[1])
    assert {row["layer"] for row in analysis.rows["scores"]} == {"body.stages.0.blocks.0.attn"}
    assert "its backbone" in analysis.page.read_text()
    photos = loaded.analyze("scores", count=1, output=tmp_path / "photos", layers=[1], images=scenes)
    assert photos.rows["scores"]


def test_layers_by_name_and_number_in_the_networks_order():
    network = timm.create_model("ravlt_nano")
    layers = resolve_layers(network, ["5", "stages.0.blocks.0.attn"])
    assert layers == ["stages.0.blocks.0.attn", "stages.3.blocks.0.attn"]


def test_crops_reach_every_edge():
    image = Image.linear_gradient("L").resize((640, 427))
    squares = crops(image, 32)
    assert len(squares) >= 32
    assert {square.size for square in squares} == {(214, 214)}
    assert min(square.getextrema()[0] for square in squares) == image.getextrema()[0]
    assert max(square.getextrema()[1] for square in squares) == image.getextrema()[1]


def test_photos_come_in_grey_too():
    photos = from_photos(Preprocessing((32, 48), (0.5,), (0.5,)).transform(), 1, 10, 2)
    assert photos.whole.shape == (2, 1, 32, 48)
    assert len(photos.many) >= 10


def test_held_out_images_are_chosen_evenly():
    images = from_source(Digits(), 3, 2)
    dataset = Digits().val_set()
    chosen = [dataset[place] for place in (0, 180, 359)]
    torch.testing.assert_close(images.many, torch.stack([image for image, _ in chosen]))
    assert images.many_labels.tolist() == [int(label) for _, label in chosen]
    assert len(images.whole) == len(images.whole_labels) == 2
