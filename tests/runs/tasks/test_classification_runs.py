import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from images_by_class import write_classes
from PIL import Image

from linvit.analysis.answers import Answers
from linvit.runs import ClassificationRun, load_run, train
from linvit.runs.report import _per_class, answers_of
from linvit_cli import main


@pytest.fixture(scope="module")
def run(trained):
    return load_run(trained)


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    noise = Image.effect_noise((40, 50), 60)
    noise.save(tmp_path / "photos" / "a.png")
    noise.resize((64, 33)).save(tmp_path / "photos" / "b.jpg")
    (tmp_path / "photos" / "broken.png").write_bytes(b"broken")
    return tmp_path / "photos"


def test_report_is_one_file_with_every_section(run, tmp_path):
    page = run.report(tmp_path / "report.html").read_text()
    per_class = ("Accuracy per class", "Precision, recall and F1 per class")
    for heading in ("Measures", "Training", "Predictions", *per_class, "Most confused classes", "Calibration"):
        assert f"<h2>{heading}</h2>" in page
    assert "Expected calibration error" in page
    assert '<meta name="viewport"' in page
    assert len(re.findall("<img ", page)) == 6
    assert len(re.findall("<img class=drawn ", page)) == 4, "those without pixels are dark in dark mode"
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page), "nothing is read from elsewhere"
    assert "10 classes, 32×32 px" in page
    assert "judg" not in page


@pytest.mark.slow
def test_a_report_holds_the_measures_that_it_is_given(run, tmp_path):
    measures = run.evaluate()
    page = run.report(tmp_path / "given.html", measures).read_text()
    for row in measures.table():
        assert all(f">{cell}</td>" in page for cell in row.values())


def test_answers_of_a_folder_leave_an_unreadable_image_out(run, tmp_path):
    root = write_classes(tmp_path / "data", {"3": 2, "7": 2})
    (root / "3" / "0.png").write_bytes(b"broken")
    answers = answers_of(run, run.source(root, num_workers=0))
    assert answers.indices.tolist() == [1, 2, 3]
    assert answers.targets.tolist() == [3, 7, 7]
    assert (answers.confidences > 0).all()
    assert (answers.confidences <= 1).all()


def test_answers_are_those_of_the_network(run):
    answers = answers_of(run, run.source())
    dataset = run.source().val_set()
    with torch.inference_mode():
        expected = run.network(dataset.images).argmax(-1)
    assert answers.predictions.equal(expected)
    assert answers.targets.equal(dataset.targets)


def test_files_arrays_and_images_are_predicted_alike(run, photos):
    path = photos / "a.png"
    pixels = np.asarray(Image.open(path))
    colour = np.repeat(pixels[..., None], 3, -1)
    rows = run.predict([path, Image.open(path), pixels, colour], topk=3)
    assert [row.file for row in rows] == [str(path), "image 2", "image 3", "image 4"]
    assert all(row.classes == rows[0].classes for row in rows)
    assert len(rows[0].classes) == 3
    assert rows[0].probabilities == sorted(rows[0].probabilities, reverse=True)
    assert run.predict(pixels)[0].classes[:3] == rows[0].classes
    with pytest.raises(ValueError, match=r"image 1 is an array of float32 \(3, 4, 4\), expected uint8"):
        run.predict(np.zeros((3, 4, 4), np.float32))


def test_16_bit_grey_in_memory_is_read_as_from_a_file(run, tmp_path):
    ramp = Image.fromarray(np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64))
    ramp.save(tmp_path / "ramp.png")
    of_file, of_image = run.predict([tmp_path / "ramp.png", ramp])
    assert of_file.probabilities == of_image.probabilities


def test_predictions_are_saved_whole_and_unreadable_files_named(run, photos, tmp_path):
    predictions = run.predict([photos, tmp_path / "nowhere.png"], topk=2, output=tmp_path / "predictions.csv")
    assert len(predictions) == 2
    assert ["nowhere.png" in line or "broken.png is not a readable image" in line for line in predictions.unreadable]
    assert len(predictions.unreadable) == 2
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert list(rows[0]) == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    predictions.save(tmp_path / "predictions.json")
    entries = json.loads((tmp_path / "predictions.json").read_text())
    assert [entry["image"] for entry in entries] == [row["image"] for row in rows]
    assert entries[0]["predictions"][0]["class"] == rows[0]["class_1"]
    assert f"{entries[0]['predictions'][0]['probability']:.6f}" == rows[0]["probability_1"]
    assert predictions.table()[0]["classes, most probable first"].startswith(rows[0]["class_1"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topk": 0}, "`topk` is 0, expected a whole number of 1 or more"),
        ({"weights": "best"}, "`weights` is 'best', but the checkpoint contains raw and ema"),
    ],
)
def test_values_that_an_option_does_not_allow_are_refused(run, photos, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        run.predict(photos, **options)


def test_a_classifier_has_the_methods_and_options_of_its_task_alone(run, photos, capsys):
    assert isinstance(run, ClassificationRun)
    assert not {"generate", "transcriber", "stream"} & set(dir(run))
    with pytest.raises(TypeError, match="beam"):
        run.predict(photos, beam=3)
    for command, sentence in {
        "predict --beam 3": "--beam is not an option of predict for the task classification, which accepts --topk",
        "predict --pieces 1": "--pieces is for sound, but this is a run of the task classification",
        "generate": "A run of the task classification cannot generate: use `linvit predict` or `linvit eval`.",
    }.items():
        name, *options = command.split()
        inputs = [str(photos)] if name == "predict" else []
        assert main([name, str(run.folder), *inputs, *options]) == 2
        assert sentence in capsys.readouterr().err


def test_a_size_that_is_asked_for_is_the_one_evaluated_at(run):
    assert run.source().preprocessing == run.preprocessing
    assert run.source(size=48).preprocessing.size == (48, 48)
    assert run.source(size=48).preprocessing.mean == run.preprocessing.mean
    with pytest.raises(ValueError, match="`channels` is 1, but the network expects 3"):
        run.source(channels=1)


def test_released_classes_are_the_sorted_folders_or_their_numbers(tmp_path):
    run = load_run(model="ravlt_nano", untrained=True)
    count = len(run.class_names)
    for number in range(count):
        (tmp_path / "named" / f"class {number:04d}").mkdir(parents=True)
    for number in (3, 1):
        (tmp_path / "numbered" / str(number)).mkdir(parents=True)
    (tmp_path / "few" / "cat").mkdir(parents=True)
    assert run.source(tmp_path / "named").class_names[1] == "class 0001"
    assert run.source(tmp_path / "numbered").class_names == [str(index) for index in range(count)]
    with pytest.raises(ValueError, match="has one class, 'cat', expected two or more"):
        run.source(tmp_path / "few")


def test_classes_come_in_the_order_of_the_network(run, tmp_path):
    for name in ("7", "3", "10"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="The data has the class '10', but the network knows 0, 1, 2, 3, 4 …"):
        run.source(tmp_path)
    (tmp_path / "10").rmdir()
    assert run.source(tmp_path).class_names == run.class_names


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """A run on ten images in each of two class folders, and their folder."""
    folder = tmp_path_factory.mktemp("undivided")
    root = write_classes(folder / "data", {"bright": 10, "dark": 10})
    data = {"name": "imagefolder", "root": str(root), "size": 32, "num_workers": 0, "batch_size": 4}
    recipe = folder / "mine.yaml"
    trainer = {"max_epochs": 1, "accelerator": "cpu", "limit_train_batches": 1}
    recipe.write_text(json.dumps({"model": {"name": "ravlt_nano"}, "data": data, "trainer": trainer}))
    return train(recipe, folder=folder / "run"), root


def test_a_run_is_evaluated_on_what_it_held_out(undivided, tmp_path):
    run, data = undivided
    held_out = [path.rpartition("data/")[2] for path, _ in run.source().files("val")]
    assert (len(held_out), run.evaluate(num_workers=0)["images"]) == (4, 4)
    moved = shutil.copytree(data, tmp_path / "data")
    assert [path.rpartition("data/")[2] for path, _ in run.source(moved).files("val")] == held_out
    (moved / "dark" / "9.png").unlink()
    assert len(run.source(moved).files("val")) == 19  # another folder: all of it
    assert len(run.source(moved, held_out=0.5).files("val")) == 9


def test_a_changed_folder_is_named(undivided, tmp_path, caplog):
    run, data = undivided
    source = run.source(data, num_workers=0)
    shutil.copyfile(data / "dark" / "0.png", data / "dark" / "more.png")
    try:
        assert caplog.messages == []
        assert len(run.source(data).files("val")) == len(source.files("val"))
        assert "have changed since the run was trained" in caplog.text
    finally:
        (data / "dark" / "more.png").unlink()


def test_precision_recall_and_f1_of_each_class_by_hand():
    answers = Answers(
        torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 1, 0]), torch.ones(6), list("abcd")
    )
    page = "".join(_per_class(answers))
    rows = [re.findall(r">([^<>]+)</td>", row) for row in page.split("<tr>")[2:6]]
    assert rows == [
        ["c", "1", "–", "0.00 %", "0.00 %"],
        ["a", "3", "66.67 %", "66.67 %", "66.67 %"],
        ["b", "2", "66.67 %", "100.00 %", "80.00 %"],
        ["d", "0", "–", "–", "–"],
    ]
    assert "(macro) 48.89 %" in page
    assert "<svg" in page or "<img" in page
