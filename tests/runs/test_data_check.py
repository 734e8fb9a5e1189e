import json
from functools import partial

import numpy as np
import pytest
import soundfile
import torch
import yaml
from benchmark_files import HELLASWAG, LAMBADA, PIQA, WINOGRANDE, write_benchmarks
from dense_formats import (
    write_array,
    write_id_maps,
    write_image,
    write_label_maps,
    write_masks,
    write_panoptic,
    write_voc,
    write_yolo,
)
from images_by_class import write_classes
from PIL import Image
from safetensors.torch import save_file

from linvit.data.dense.scenes import make_scenes
from linvit.runs.data_check import check_data
from linvit.runs.recipe import Recipe


def write_labelled(root):
    for number in range(8):
        write_image(root / f"{number}.png", (40, 40))
    rows = [
        f"{number}.png,{'cat|dog' if number % 2 else 'cat'},{'val' if number < 2 else 'train'}" for number in range(8)
    ]
    (root / "labels.csv").write_text("\n".join(["file,labels,split", *rows]))
    return root


def write_scenes(root, kind):
    list(make_scenes(root, 2, 1, 64, 0))
    (root / "detection" / "labels.csv").unlink()
    return root / kind


def write_texts(root):
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        (root / split / "a.txt").write_text("Ünder the tree.\n")
    return root


def write_speech(root):
    for split in ("train-clean", "dev-clean"):
        chapter = root / split / "1" / "2"
        chapter.mkdir(parents=True)
        soundfile.write(chapter / "1-2-0.wav", np.zeros(8_000), 16_000)
        soundfile.write(chapter / "1-2-1.wav", np.zeros(24_000), 16_000)
        (chapter / "1-2.trans.txt").write_text("1-2-0 ONE\n1-2-1 ONE TWO\n")
    return root


def write_latents(root):
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        tensors = {"moments": torch.zeros(3, 2, 8, 4, 5).half(), "labels": torch.tensor([0, 1, 1])}
        save_file(tensors, root / split / "0.safetensors")
    about = {"class_names": ["cat", "dog"], "vae": "any", "scale": 0.2, "channels": 4, "size": [4, 5]}
    (root / "latents.json").write_text(json.dumps(about))
    return root


WRITTEN = {
    "voc": write_voc,
    "yolo": partial(write_yolo, polygons=True),
    "instance_masks": write_masks,
    "label_maps": write_label_maps,
    "coco_panoptic": write_panoptic,
    "coco": partial(write_scenes, kind="detection"),
    "ade20k": partial(write_scenes, kind="segmentation"),
    "imagefolder": partial(write_classes, counts={"cat": 5, "dog": 5}),
    "labelled": write_labelled,
    "textfolder": write_texts,
    "librispeech": write_speech,
    "latents": write_latents,
}
COUNTED = {
    "voc": {"images": 3, "objects": 5},
    "yolo": {"images": 3, "objects": 5},
    "instance_masks": {"images": 3, "objects": 5},
    "label_maps": {"images": 3, "ignored pixels": 0},
    "coco_panoptic": {"images": 3},
    "coco": {"images": 2},
    "ade20k": {"images": 2},
    "imagefolder": {"images": 8},
    "labelled": {"images": 6},
    "textfolder": {"files": 1, "characters": 16},
    "librispeech": {"utterances": 2, "words": 3},
    "latents": {"images": 3},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_is_found_and_the_data_are_counted(tmp_path, name):
    root = WRITTEN[name](tmp_path / "data")
    options = {"void": [7]} if name == "label_maps" else {}
    if name == "label_maps":
        problems = check_data(root).problems
        assert len(problems) == 5
        assert all("has the label 7 at row 0" in problem for problem in problems)
        COUNTED[name]["ignored pixels"] = 60 + 36 + 44
    checked = check_data(root, overrides=options)
    few = ["No training"] if name in ("coco", "ade20k") else []  # two scenes do not have all digits
    assert [problem[:11] for problem in checked.problems] == few
    assert checked.settings["name"] == name
    train, val = checked.splits
    assert (train.name, val.name) == ("train", "val")
    assert {key: train.counts[key] for key in COUNTED[name]} == COUNTED[name]
    values = yaml.safe_load(checked.recipe)
    assert values["task"]["name"] == checked.task
    model = {"backbone": "mavit_nano", "framework": {"detection": "mask_rcnn"}.get(checked.task, "upernet")}
    model = model if checked.task in ("detection", "segmentation") else {"name": "mavit_nano"}
    if checked.task in ("detection", "segmentation", "classification", "multilabel"):
        Recipe(values | {"model": model, "folder": "run"}).resolved()


def test_amounts_by_class_and_sizes_are_those_of_the_files(tmp_path):
    train, val = check_data(write_voc(tmp_path / "voc")).splits
    assert train.classes == {"cat": {"objects": 3, "pixels": 170 + 529 + 128}, "dog": {"objects": 2, "pixels": 874}}
    assert val.classes["dog"] == {"objects": 2, "pixels": 400 + 200}
    assert train.sizes == [(48, 36), (44, 44), (40, 60)]
    train, _ = check_data(write_label_maps(tmp_path / "maps"), overrides={"void": [7]}).splits
    assert train.classes["cat"] == {"images": 2, "pixels": 170 + 529 + 128}
    train, _ = check_data(write_labelled(tmp_path / "labelled")).splits
    assert train.classes == {"cat": {"images": 6}, "dog": {"images": 3}}
    train, _ = check_data(write_latents(tmp_path / "latents")).splits
    assert (train.classes, train.sizes[0]) == ({"cat": {"images": 1}, "dog": {"images": 2}}, (4, 5))


def test_sound_is_measured_in_seconds_and_text_in_bytes(tmp_path):
    checked = check_data(write_speech(tmp_path / "speech"))
    assert (checked.settings["train"], checked.settings["val"]) == (["train-clean"], ["dev-clean"])
    assert checked.splits[0].sizes == [(0.5,), (0.5,), (1.5,)]
    (tmp_path / "speech/dev-clean/1/2/1-2-0.wav").write_bytes(b"broken")
    assert ["1-2-0.wav" in problem for problem in check_data(tmp_path / "speech").problems] == [True]
    (tmp_path / "speech/dev-clean/1/2/1-2.trans.txt").write_text(f"1-2-1 {'ONE ' * 20}\n")
    (problem,) = check_data(tmp_path / "speech").problems
    assert "1-2-1.wav has 80 tokens, for which CTC needs 80 frames of the encoder, but only 37" in problem
    root = write_texts(tmp_path / "text")
    assert check_data(root).splits[0].sizes[0] == (17,)
    (root / "train/a.txt").write_bytes(b"\xff\xfe")
    assert ["a.txt is not text in UTF-8" in problem for problem in check_data(root).problems] == [True]


def test_every_problem_is_listed_whatever_the_limits(tmp_path, caplog):
    root = write_voc(tmp_path)
    (root / "JPEGImages/a.jpg").write_bytes(b"broken")
    (root / "JPEGImages/d.jpg").unlink()
    path = root / "Annotations/b.xml"
    path.write_text(path.read_text().replace("<xmin>1</xmin>", "<xmin>x</xmin>"))
    checked = check_data(root)
    assert {problem.split()[0].rpartition("/")[2] for problem in checked.problems} == {"b.xml,", "a.jpg", "d.xml", "No"}
    assert len(checked.problems) == 4
    assert checked.splits[0].counts["images"] == 2
    assert "Left out" not in caplog.text


def test_classes_without_training_data_are_problems(tmp_path):
    root = write_scenes(tmp_path / "scenes", "detection")
    for path in (root / "annotations").glob("*.json"):  # as Roboflow writes a category that only groups others
        content = json.loads(path.read_text())
        content["categories"].append({"id": 99, "name": "digits", "supercategory": "none"})
        path.write_text(json.dumps(content))
    assert any(problem.endswith("digits.") for problem in check_data(root).problems)
    for split in ("train", "val"):
        write_image(tmp_path / "b" / split / "images" / "a.png", (40, 36))
        write_array(tmp_path / "b" / split / "masks" / "a.png", np.tri(40, 36, dtype=np.uint8) * 255)
    (problem,) = check_data(tmp_path / "b", "label_maps", {"num_labels": 2}).problems
    assert problem.startswith("No training image has 1 of the classes: 1; 255 is ignored")
    assert check_data(tmp_path / "b", "label_maps").problems == []
    write_voc(tmp_path / "v")
    (tmp_path / "v/ImageSets/Main/train.txt").write_text("")
    assert "The train data have no image that can be used: add some." in check_data(tmp_path / "v").problems


@pytest.mark.parametrize(
    ("overrides", "classes"),
    [
        ({"class_names": ["road", "car", "tram"]}, ["road", "car", "tram"]),
        ({"void": [1]}, ["0", "1"]),
        ({"values": [2, 0], "void": [1, 7]}, ["2", "0"]),
        ({"classes": "names.txt"}, ["a", "b", "c"]),
    ],
)
def test_guesses_give_way_to_what_is_given(tmp_path, monkeypatch, overrides, classes):
    root = write_label_maps(tmp_path / "data")
    (root / "classes.txt").unlink()
    for path in root.glob("*annot/*.png"):  # labels 0, 1 and 2
        write_array(path, np.minimum(np.asarray(Image.open(path)), 2))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    assert list(check_data(root, overrides=overrides).splits[0].classes) == classes


def test_two_formats_in_a_folder_need_a_choice(tmp_path):
    list(make_scenes(tmp_path / "scenes", 2, 1, 64, 0))
    root = tmp_path / "scenes" / "detection"
    with pytest.raises(
        ValueError, match=r"fits the formats labelled and coco: choose one with `format`, such as"
    ) as error:
        check_data(root)
    assert "\n" not in str(error.value)
    assert check_data(root, format="coco").task == "detection"
    assert check_data(root, format="labelled").task == "multilabel"
    with pytest.raises(ValueError, match=r"`format` is 'cocoo', expected one of .*Did you mean 'coco'"):
        check_data(root, format="cocoo")


def test_maps_of_objects_may_be_maps_of_classes(tmp_path):
    root = write_id_maps(tmp_path, "images", "masks", "")
    with pytest.raises(ValueError, match="fits the formats instance_masks and label_maps"):
        check_data(root)
    assert check_data(root, "instance_masks").splits[0].counts["objects"] == 5


def test_files_of_benchmarks_are_counted_and_damaged_ones_are_problems(tmp_path):
    pytest.importorskip("datasets", reason="the extra `language` is not installed")
    checked = check_data(write_benchmarks(tmp_path))
    assert checked.benchmarks == ["lambada_openai", "piqa", "hellaswag", "winogrande"]
    assert [split.counts["items"] for split in checked.splits] == list(map(len, (LAMBADA, PIQA, HELLASWAG, WINOGRANDE)))
    assert checked.problems == []
    (tmp_path / "piqa" / "valid-labels.lst").write_text("0\n")
    checked = check_data(tmp_path)
    assert checked.benchmarks == ["lambada_openai", "hellaswag", "winogrande"]
    assert ["has 1 labels for 3 items" in problem for problem in checked.problems] == [True]
    with pytest.raises(ValueError, match="files of benchmarks, which have no settings, got size: leave it out"):
        check_data(tmp_path, overrides={"size": 3})


def test_a_split_that_is_not_there_is_a_problem(tmp_path):
    root = write_scenes(tmp_path / "scenes", "detection")
    (root / "annotations/instances_train.json").unlink()
    checked = check_data(root)
    assert [split.name for split in checked.splits] == ["val"]
    (problem,) = checked.problems
    assert "instances_train2017.json" in problem
    assert "there is no such file" in problem


def test_a_file_in_cocos_format_is_checked_without_its_images(tmp_path):
    path = write_scenes(tmp_path / "scenes", "detection") / "annotations/instances_val.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 99
    path.write_text(json.dumps(content))
    checked = check_data(path)
    assert ["the unknown category 99" in problem for problem in checked.problems] == [True]
    assert checked.splits[0].counts["objects"] == len(content["annotations"]) - 1
    with pytest.raises(
        ValueError, match="Unknown setting of a file in COCO's format 'void', expected one of needs_masks"
    ):
        check_data(path, overrides={"void": 3})
    with pytest.raises(ValueError, match="`needs_masks` is 3, expected true or false"):
        check_data(path, overrides={"needs_masks": 3})
