import json
import math
import shutil

import pytest
import torch
from tiers import quick
from tiny_dense import tiny_scenes, write_dense_recipe
from tiny_run import ONE_STEP, check_resumes_bit_for_bit, command, curve
from trained import trained_run

from linvit.runs import load_run
from linvit.runs.training import train_folder
from linvit_cli import main

COLUMNS = {
    "retinanet": {"box_ap", "box_ap50", "box_ap75"},
    "mask_rcnn": {"box_ap", "mask_ap", "mask_ap50"},
    "cascade_mask_rcnn": {"box_ap", "mask_ap"},
    "semantic_fpn": {"miou", "pixel_accuracy", "class_accuracy"},
    "upernet": {"miou"},
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return tiny_scenes(tmp_path_factory.mktemp("data") / "scenes")


@pytest.fixture(scope="module")
def runs(scenes, tmp_path_factory):
    held = {}

    def run(framework):
        if framework not in held:
            folder = tmp_path_factory.mktemp(framework)
            held[framework] = train_folder(write_dense_recipe(folder, scenes, framework))
        return held[framework]

    return run


@pytest.mark.parametrize("framework", quick(COLUMNS, ["mask_rcnn", "semantic_fpn"]))
def test_every_framework_trains_and_is_measured_again(framework, runs):
    run = runs(framework)
    rows = curve(run)
    assert [int(row["step"]) for row in rows] == [3, 6]
    assert COLUMNS[framework] <= set(rows[0])
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    assert {float(row["images"]) for row in rows} == {4.0}
    assert float(rows[1]["lr"]) == pytest.approx(float(rows[0]["lr"]) * 0.1)
    restored = load_run(run / "checkpoints" / "last.ckpt")
    measured = restored.evaluate().by_weights["raw"]
    assert measured["images"] == 4
    for name in COLUMNS[framework]:
        assert measured[name] == pytest.approx(float(rows[1][name]), abs=1e-6)


@pytest.mark.parametrize(
    ("framework", "part"),
    [pytest.param("retinanet", "backbone.body", marks=pytest.mark.slow), ("semantic_fpn", "backbone")],
)
def test_a_frozen_backbone_keeps_weights_and_statistics(framework, part, runs, scenes, tmp_path):
    start = runs(framework) / "checkpoints" / "last.ckpt"
    task, once = {"frozen": [part], "ema_decay": 0.5}, {"max_epochs": 1}
    recipe = write_dense_recipe(tmp_path, scenes, framework, init=str(start), task=task, trainer=once)
    before, after = (
        torch.load(path)["state_dict"] for path in (start, train_folder(recipe) / "checkpoints" / "last.ckpt")
    )
    kept = [key for key in before if key.startswith(f"network.{part}.")]
    assert any(key.endswith("running_mean") for key in kept)
    for key, value in before.items():
        if key.startswith("network.") and value.is_floating_point() and key not in kept and "norm" not in key:
            assert not torch.equal(value, after[key]), key
    for key in kept:
        assert torch.equal(before[key], after[key]), key
        assert torch.equal(before[key], after[key.replace("network.", "ema.module.", 1)]), key


def test_what_is_frozen_is_a_part_of_the_network(scenes, tmp_path):
    for frozen, words in (
        (["backbonee"], "`?task.frozen`? has 'backbonee'"),
        (["backbone", "neck", "head"], "nothing to train"),
    ):
        with pytest.raises(ValueError, match=words):
            train_folder(write_dense_recipe(tmp_path, scenes, "semantic_fpn", task={"frozen": frozen}))


@pytest.mark.parametrize("framework", quick(["mask_rcnn", "semantic_fpn"], ["semantic_fpn"]))
def test_a_stopped_run_goes_on_bit_for_bit(framework, runs, scenes, tmp_path):
    recipe = write_dense_recipe(tmp_path, scenes, framework)
    check_resumes_bit_for_bit(recipe, runs(framework), step=4, fewest=100)


def test_a_bad_annotation_is_named_before_anything_trains(scenes, tmp_path, capsys):
    copy = shutil.copytree(scenes / "detection", tmp_path / "copy")
    path = copy / "annotations" / "instances_train.json"
    path = path if path.is_file() else copy / "annotations" / "instances_train2017.json"
    known = json.loads(path.read_text())
    known["annotations"][2]["category_id"] = 77
    path.write_text(json.dumps(known))
    recipe = write_dense_recipe(tmp_path, scenes, "retinanet", data={"root": str(copy)})
    assert main(["train", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert path.name in said
    assert f"{known['annotations'][2]['id']}" in said
    assert "77" in said
    mended = ["data.max_bad_annotations=1", "trainer.max_epochs=1"]
    assert main(["train", str(recipe), *mended, "--resume"]) == 0
    assert "1 of at most 1" in capsys.readouterr().err


def test_epochs_without_validation_have_no_measures(scenes, tmp_path):
    seldom = {"max_epochs": 3, "check_val_every_n_epoch": 2}
    run = train_folder(write_dense_recipe(tmp_path, scenes, "semantic_fpn", trainer=seldom))
    assert [bool(row["miou"]) for row in curve(run)] == [False, True, False]
    assert all(row["train_loss"] for row in curve(run))
    assert (run / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_half_precision_trains(scenes, tmp_path):
    half = {"max_epochs": 1, "precision": "bf16-mixed"}
    for framework in ("mask_rcnn", "upernet"):
        run = train_folder(write_dense_recipe(tmp_path / framework, scenes, framework, trainer=half))
        assert math.isfinite(float(curve(run)[0]["train_loss"]))


def test_a_classifier_s_run_is_the_backbone_to_start_from(scenes, tmp_path, tmp_path_factory, capsys):
    digits = trained_run(tmp_path_factory, model={"name": "mavit_nano"}, trainer=ONE_STEP)
    recipe = write_dense_recipe(tmp_path, scenes, "mask_rcnn", init=str(digits), trainer=ONE_STEP)
    train_folder(recipe, progress=True)
    assert "best.ckpt: its backbone; neck and heads keep their initial weights" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["mask_rcnn", "semantic_fpn"])
def test_two_processes_measure_every_image_once_on_the_network_that_is_saved(framework, scenes, tmp_path):
    recipe = write_dense_recipe(tmp_path, scenes, framework, optimizer={"lr": 1e-2})
    done = command("train", recipe, "trainer.devices=2", "trainer.strategy=ddp")
    assert done.returncode == 0, done.stdout
    row = curve(tmp_path / "run")[-1]
    assert float(row["images"]) == 4
    assert int(row["step"]) == 2  # 7 images: one batch of 2 in each process, twice
    measured = load_run(tmp_path / "run" / "checkpoints" / "last.ckpt").evaluate().by_weights["raw"]
    for name in COLUMNS[framework]:
        assert measured[name] == pytest.approx(float(row[name]), abs=1e-6)
