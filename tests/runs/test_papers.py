"""The papers' recipes from `linvit train` to `linvit eval`, with nano networks on a small folder like ImageNet's."""

import json
from pathlib import Path

import pytest
import timm
import torch
from imagenet_folder import CLASSES, fill, write_imagenet
from tiny_run import content, curve

from linvit_cli import main

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = [
    *("data.size=32", "data.batch_size=4", "data.num_workers=0", "trainer.accelerator=cpu"),
    *("trainer.precision=32-true", "trainer.sync_batchnorm=false", "trainer.max_steps=3"),
]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data") / "imagenet")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "teacher.pth"
    torch.save({"model": timm.create_model("ravlt_nano", num_classes=3).state_dict()}, path)
    return path


def shrunk(family, imagenet, folder, *more):
    size = "s0" if family == "care" else "tiny"
    recipe = str(RECIPES / family / f"{size}_imagenet_300e.yaml")
    return [recipe, f"model.name={family}_nano", f"data.root={imagenet}", f"folder={folder}", *SMALL, *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, imagenet, teacher):
    """One finished run of each family."""
    folder = tmp_path_factory.mktemp("runs")
    distilled = [f"distillation.checkpoint={teacher}", "distillation.teacher=ravlt_nano"]
    for family in ("ravlt", "mavit", "care"):
        more = distilled if family == "care" else []
        assert main(["train", *shrunk(family, imagenet, folder / family, *more)]) == 0
    return folder


def measured(capsys, *arguments):
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("family", ["ravlt", "mavit", "care"])
def test_a_papers_recipe_trains_and_is_measured(runs, family, capsys):
    assert content(runs / family)["global_step"] == 3
    assert float(curve(runs / family)[-1]["train_loss"]) > 0
    kinds = measured(capsys, runs / family)
    assert set(kinds) == ({"raw"} if family == "care" else {"raw", "ema"})
    assert all(row["images"] == 7 for row in kinds.values())


def test_the_teacher_is_not_saved_and_not_needed_afterwards(runs):
    held = content(runs / "care")["state_dict"]
    assert {key.partition(".")[0] for key in held} <= {"network", "train_loss", "measures", "images"}


def test_fine_tuning_at_another_size_and_for_other_classes(runs, imagenet, tmp_path, capsys):
    start = shrunk("ravlt", imagenet, tmp_path / "large", f"init={runs / 'ravlt'}", "trainer.max_steps=1")
    assert main(["train", *start, "data.size=[64,96]"]) == 0
    assert "classifier included" in capsys.readouterr().out
    other = write_imagenet(tmp_path / "two", val=(1, 1), names=("cat", "dog"))
    start = shrunk("ravlt", other, tmp_path / "other", f"init={runs / 'ravlt'}", "trainer.max_steps=1")
    assert main(["train", *start]) == 0
    assert "without its classifier, which has 3 classes instead of 2." in capsys.readouterr().out


def test_a_run_on_names_is_measured_on_folders_of_class_indices(runs, tmp_path, capsys):
    for index in range(3):
        fill(tmp_path / str(index), 2, hue=index)
    for name, index in zip(CLASSES, range(3), strict=True):
        fill(tmp_path / "named" / name, 2, hue=index)
    by_name = measured(capsys, runs / "ravlt", f"data={tmp_path / 'named'}")
    (tmp_path / "named").rename(tmp_path.parent / "elsewhere")
    assert measured(capsys, runs / "ravlt", f"data={tmp_path}") == by_name


def test_a_teacher_of_other_classes_is_refused_before_training(imagenet, tmp_path, capsys):
    assert main(["train", *shrunk("care", imagenet, tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert "have 1000 classes, but the data has 3: set distillation.checkpoint" in said
    assert not (tmp_path / "run").exists()
