import csv
import json
import re

import pytest
import timm
import torch
from linvit.runs.analyzed_images import crops, from_photos, from_source
from PIL import Image
from tiny_run import write_recipe

import linvit  # noqa: F401
from linvit.cli import main
from linvit.data import Digits, Preprocessing
from linvit.runs.analyze import read_subject, resolve_layers

FILES = {f"{name}.{ending}" for name in ("rank", "scores", "magnitude") for ending in ("csv", "json", "png", "svg")}
FILES |= {f"{name}.{ending}" for name in ("spectrum", "score_maps", "readouts") for ending in ("png", "svg")}


def analyze(*arguments):
    return main(["analyze", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, trainer={"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1})
    assert main(["train", str(recipe)]) == 0
    return folder / "run"


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_all_of_a_run_goes_into_its_folder_with_every_number(run, capsys):
    assert analyze(run, "--count", 6, "--layers", 1, 2) == 0
    folder = run / "analysis"
    assert capsys.readouterr().out == f"{folder}/report.html is the page to look at.\n"
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
    assert {row["readout"] for row in table(folder / "magnitude.csv")} >= {"own", "softmax", "linear", "mala"}
    for name in ("rank", "scores", "magnitude"):
        text = (folder / f"{name}.json").read_text()
        content = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
        assert len(content["rows"]) == len(table(folder / f"{name}.csv"))
        assert content["curves"]


def test_one_analysis_of_some_layers_of_an_untrained_model_on_the_photos(tmp_path):
    arguments = ["--model", "ravlt_nano", "--output", tmp_path, "--layers", "2", "stages.0.blocks.0.attn"]
    assert analyze("scores", *arguments, "--query", "0.2", "0.8") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.html", *(n for n in FILES if n.startswith("score"))}
    page = (tmp_path / "report.html").read_text()
    assert "random weights, never trained (seed 0)" in page
    assert "china.jpg and flower.jpg, and for averages 64 regular crops" in page
    rows = table(tmp_path / "scores.csv")
    assert {row["layer"] for row in rows} == {"stages.0.blocks.0.attn", "stages.1.blocks.0.attn"}
    maps = json.loads((tmp_path / "scores.json").read_text())["curves"]
    assert [one["query"] for one in maps] == [[1, 6], [0, 3]] * 2


def test_files_are_read_cut_up_and_complained_about(tmp_path, capsys):
    for name, size in (("good", (90, 64)), ("small", (20, 40))):
        Image.effect_noise(size, 60).save(tmp_path / f"{name}.png")
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    where = tmp_path / "out"
    arguments = ["--model", "care_nano", "--images", tmp_path, "--count", 5, "--output", where]
    assert analyze("rank", *arguments) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "small.png is 40×20 px, but at least 32×32 px" in said[0]
    assert "torn.png is not a readable image" in said[1]
    assert {row["images"] for row in table(where / "rank.csv")} == {"5"}
    assert "1 image files, and for averages 5 regular crops" in (where / "report.html").read_text()


def test_random_weights_are_the_same_every_time():
    first, second = (read_subject(None, "mavit_nano", None).network.state_dict() for _ in range(2))
    assert all(value.equal(second[key]) for key, value in first.items())


@pytest.mark.parametrize("name", ["ravlt_nano", "deit_tiny_rala"])
def test_a_model_with_weights_from_a_file(name, tmp_path):
    network = timm.create_model(name, num_classes=7)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    subject = read_subject(None, name, str(tmp_path / "weights.pth"))
    assert all(value.equal(network.state_dict()[key]) for key, value in subject.network.state_dict().items())
    assert subject.weights == f"weights from {tmp_path}/weights.pth"


def test_layers_by_name_and_number_in_the_networks_order():
    network = timm.create_model("ravlt_nano")
    found = resolve_layers(network, ["5", "stages.0.blocks.0.attn"])
    assert found == ["stages.0.blocks.0.attn", "stages.3.blocks.0.attn"]


def test_crops_reach_every_edge():
    picture = Image.linear_gradient("L").resize((640, 427))
    found = crops(picture, 32)
    assert len(found) >= 32
    assert {crop.size for crop in found} == {(214, 214)}
    assert min(crop.getextrema()[0] for crop in found) == picture.getextrema()[0]
    assert max(crop.getextrema()[1] for crop in found) == picture.getextrema()[1]


def test_photos_come_in_grey_too():
    pictures = from_photos(Preprocessing((32, 48), (0.5,), (0.5,)), 10, 2)
    assert pictures.whole.shape == (2, 1, 32, 48)
    assert len(pictures.many) >= 10


def test_held_out_images_are_chosen_evenly():
    pictures = from_source(Digits(), 3, 2)
    everything = Digits().val_set()
    everything = [everything[place][0] for place in (0, 180, 359)]
    torch.testing.assert_close(pictures.many, torch.stack(everything))
    assert len(pictures.whole) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["rank", "--model", "ravlt_nano", "--layers", "9"],
            "There is no attention layer '9': give numbers from 1 to 5",
        ),
        (["--model", "resnet18"], "ResNet has no attention to look at, expected Attention2d"),
        (["--model", "nonesuch"], "nonesuch"),
        (["--model", "ravlt_nano", "--images", "nowhere"], "There is no image or folder at nowhere"),
        (["--model", "ravlt_nano", "--count", "0"], "--count is 0"),
        (["--model", "ravlt_nano", "--query", "2", "0"], "--query is 2 0, expected height and width"),
        (["--model", "deit_tiny_rala", "--checkpoint", "nowhere.pth"], "nowhere.pth does not exist"),
        (["ranks", "run"], "analyze got ranks run, expected one of rank, scores, magnitude, all and one run"),
        ([], "Nothing to read"),
        (["scores", "--model", "ravlt_nano", "--layers", "5"], "sees a single token"),
        (["--model", "swin_tiny_patch4_window7_224"], "SwinTransformer has no attention to look at"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    assert analyze(*arguments, "--output", tmp_path) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_weights_of_another_network_are_refused(tmp_path, capsys):
    torch.save(timm.create_model("deit_tiny_mala", depth=2).state_dict(), tmp_path / "other.pth")
    assert analyze("--model", "deit_tiny_linear", "--checkpoint", tmp_path / "other.pth", "--output", tmp_path) == 2
    said = capsys.readouterr().err
    assert "do not fit the model 'deit_tiny_linear'" in said
    assert said.count("\n") == 1
