"""Multi-label classification from a table of labels to predictions, by its Python face and on the command line."""

import json

import pytest
import torch
from sklearn.metrics import average_precision_score
from tiny_dense import tiny_scenes, write_multilabel_recipe

import linvit
from linvit_cli import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return tiny_scenes(tmp_path_factory.mktemp("scenes"), 6, 5) / "detection"


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    return linvit.train(write_multilabel_recipe(tmp_path_factory.mktemp("run"), scenes))


@torch.inference_mode()
def test_evaluation_is_what_the_network_says_of_the_held_out_images(run):
    network, batches = run.network.cpu(), list(run.source().val_dataloader())
    probabilities = torch.cat([network(images).sigmoid() for images, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    occurs = targets.any(0)
    expected = average_precision_score(targets[:, occurs], probabilities[:, occurs], average="macro")
    assert run.evaluate()["map"] == pytest.approx(expected, abs=1e-5)
    assert run.evaluate()["images"] == 5


def test_predictions_name_the_classes_above_the_threshold(run, scenes, tmp_path):
    images = scenes / "images" / "val"
    everything = run.predict([images], threshold=0.0, output=tmp_path / "all.json")
    assert [len(row.classes) for row in everything] == [len(run.class_names)] * 5
    assert all(row.probabilities == sorted(row.probabilities, reverse=True) for row in everything)
    limit = sorted(value for row in everything for value in row.probabilities)[-7]
    named = run.predict([images], threshold=limit)
    assert sum(len(row.classes) for row in named) == 7
    assert len(json.loads((tmp_path / "all.json").read_text())) == 5
    with pytest.raises(ValueError, match="`threshold` is 2"):
        run.predict([images], threshold=2)


def test_the_command_line_evaluates_reports_predicts_and_analyzes(run, scenes, tmp_path, capsys):
    folder = str(run.folder)
    assert main(["eval", folder, "--json", f"data.root={scenes}", "data.batch_size=2", "--report"]) == 0
    assert "map" in json.loads(capsys.readouterr().out)["raw"]
    page = (run.folder / "report.html").read_text()
    assert "Average precision per class" in page
    assert main(["predict", folder, str(scenes / "images" / "val"), "--output", str(tmp_path / "table.csv")]) == 0
    assert (tmp_path / "table.csv").read_text().startswith("image")
    assert main(["analyze", "rank", folder, "--output", str(tmp_path / "analysis")]) == 0
