import json

import pytest
from PIL import Image

from linvit_cli import main


@pytest.fixture
def scenes(tmp_path, capsys):
    folder = tmp_path / "scenes"
    assert main(["data", "make-scenes", str(folder), "--train", "3", "--val", "2", "--size", "64", "--seed", "5"]) == 0
    assert capsys.readouterr().out.startswith("5 scenes: ")
    return folder


def test_made_scenes_are_found_sound(scenes, capsys):
    assert main(["data", "check", str(scenes)]) == 0
    shown = capsys.readouterr()
    assert "instances_train.json" in shown.out
    assert "images/validation" in shown.out
    assert shown.err == ""
    assert main(["data", "check", str(scenes / "detection/annotations/instances_val.json")]) == 0


def test_everything_wrong_is_named(scenes, capsys):
    path = scenes / "detection/annotations/instances_val.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 99
    path.write_text(json.dumps(content))
    (scenes / "detection/images/train/000002.jpg").unlink()
    Image.new("L", (64, 64), 77).save(scenes / "segmentation/annotations/training/000001.png")
    (scenes / "segmentation/annotations/training/000003.png").unlink()
    assert main(["data", "check", str(scenes)]) == 1
    first, *listed = capsys.readouterr().err.splitlines()
    assert first == "linvit: 4 problems found:"
    said = "\n".join(listed)
    assert "train/000002.jpg is not a readable image" in said
    assert "instances_val.json: annotation 1 of image 1 has the unknown category 99" in said
    assert "000003.jpg has no map" in said
    assert "000001.png has the label 77" in said


def test_boxes_alone_are_checked_if_asked(scenes, capsys):
    path = scenes / "detection/annotations/instances_val.json"
    content = json.loads(path.read_text())
    for entry in content["annotations"]:
        del entry["segmentation"]
    path.write_text(json.dumps(content))
    assert main(["data", "check", str(path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + len(content["annotations"]) > 9, "all are listed"
    assert said[0] == f"linvit: {len(said) - 1} problems found:"
    assert all("has no mask" in line for line in said[1:])
    assert main(["data", "check", str(path), "--boxes"]) == 0


def test_a_single_problem_is_singular(scenes, capsys):
    (scenes / "detection/images/train/000002.jpg").unlink()
    assert main(["data", "check", str(scenes)]) == 1
    assert capsys.readouterr().err.startswith("linvit: 1 problem found:\n")


def test_a_file_without_its_images_is_checked_alone(scenes, tmp_path, capsys):
    alone = tmp_path / "instances_val.json"
    alone.write_bytes((scenes / "detection/annotations/instances_val.json").read_bytes())
    assert main(["data", "check", str(alone)]) == 0
    assert "no images found" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["check", "."], ["make-scenes", "."], ["make-scenes", "new", "--size", "8"]])
def test_what_cannot_be_is_one_sentence(tmp_path, monkeypatch, capsys, argv):
    (tmp_path / "letter.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["data", *argv]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").exists()
