import json

import pytest
from benchmark_files import LAMBADA, write_json_lines
from PIL import Image

from linvit_cli import main


@pytest.fixture
def scenes(tmp_path, capsys):
    folder = tmp_path / "scenes"
    assert main(["data", "make-scenes", str(folder), "--train", "30", "--val", "2", "--size", "64", "--seed", "5"]) == 0
    assert capsys.readouterr().out.startswith("32 scenes: ")
    return folder


def test_made_scenes_are_found_sound_and_shown_as_tables(scenes, capsys):
    assert main(["data", "check", str(scenes / "segmentation")]) == 0
    shown = capsys.readouterr()
    assert "segmentation: ade20k" in shown.out
    assert "64×64 px" in shown.out
    assert "canvas" in shown.out
    assert "data:\n  name: ade20k\n  root: " in shown.out
    assert shown.err == ""
    assert main(["data", "check", str(scenes / "detection"), "--format", "coco"]) == 0
    assert "train objects" in capsys.readouterr().out


def test_benchmarks_of_language_models_are_shown_with_the_command_that_reads_them(tmp_path, capsys):
    write_json_lines(tmp_path / "lambada_test.jsonl", LAMBADA)
    assert main(["data", "check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "lambada_openai" in shown
    assert f"linvit eval RUN --tasks lambada_openai --task-data {tmp_path}" in shown
    assert "In a recipe" not in shown


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
    assert main(["data", "check", str(path), "data.needs_masks=false"]) == 0


def test_many_problems_and_long_names_are_cut(scenes, capsys):
    path = scenes / "detection/annotations/instances_val.json"
    content = json.loads(path.read_text())
    content["categories"][0]["name"] = "long name " * 500
    content["annotations"] = [{"id": number, "image_id": 99} for number in range(20_000)]
    path.write_text(json.dumps(content))
    assert main(["data", "check", str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("linvit: 20,000 problems found:\n")
    assert shown.err.endswith("\n  … and 19,900 more\n")
    assert len(shown.out) < 10_000


def test_of_many_classes_only_the_first_are_shown(tmp_path, capsys):
    for number in range(33):
        for name in ("a", "b"):
            path = tmp_path / f"class {number:02d}" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (40, 40)).save(path)
    assert main(["data", "check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "class 29" in shown
    assert "class 30" not in shown
    assert "and 3 more classes" in shown


def test_an_unclear_format_is_one_sentence_that_names_the_option(scenes, capsys):
    assert main(["data", "check", str(scenes / "detection")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "fits the formats labelled and coco: choose one with --format, such as --format labelled." in said
