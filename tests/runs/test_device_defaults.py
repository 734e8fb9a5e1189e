"""What a recipe leaves to the device: precision, memory format, and where images are augmented."""

import pytest
import torch
import yaml
from imagenet_folder import write_imagenet
from tiny_run import TINY, check_resumes_bit_for_bit, content, curve, write_merged, write_recipe

from linvit.runs import trainer
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.runs.training import train_folder


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """The precision and memory format of a recipe on a device."""

    def settle(device, stored=None, bfloat16=True, **groups):
        monkeypatch.setattr(trainer, "present_device", lambda accelerator: device)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bfloat16)
        recipe = Recipe(read_recipe(write_recipe(tmp_path, **groups)))
        recipe.settle(stored)
        values = recipe.resolved()
        return values["trainer"]["precision"], values["task"]["channels_last"]

    return settle


def test_a_new_run_takes_what_suits_the_device(settled):
    assert settled("cuda") == ("bf16-mixed", True)
    assert settled("cuda", bfloat16=False) == ("16-mixed", True)
    for device in ("cpu", "mps", None):
        assert settled(device) == ("32-true", False)


def test_a_recipe_that_says_more_is_obeyed(settled):
    said = {"trainer": {"precision": "32-true"}, "task": {"channels_last": False}}
    assert settled("cuda", **said) == ("32-true", False)
    plugin = {"class_path": "MixedPrecision", "init_args": {"precision": "bf16-mixed", "device": "cuda"}}
    assert settled("cuda", trainer={"plugins": [plugin]}) == (None, True)
    assert settled("cuda", trainer={"plugins": plugin}) == (None, True)


def test_a_resumed_run_keeps_what_it_had(settled):
    stored = {"trainer": {"precision": None}, "task": {}}  # from before there was a choice
    assert settled("cuda", stored) == (None, False)
    stored = {"trainer": {"precision": "bf16-mixed"}, "task": {"channels_last": True}}
    assert settled("cpu", stored) == ("bf16-mixed", True)


def test_the_run_records_what_was_chosen(tmp_path):
    run = train_folder(write_recipe(tmp_path, trainer={"max_epochs": 1, "limit_train_batches": 1, "threads": 1}))
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (values["trainer"]["precision"], values["task"]["channels_last"]) == ("32-true", False)
    assert content(run)["linvit"]["recipe"]["trainer"]["precision"] == "32-true"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("images"), train=4)


def device_recipe(folder, images, **groups):
    data = {"name": "imagefolder", "root": str(images), "size": 32, "batch_size": 4, "num_workers": 0}
    values = {**TINY, "folder": str(folder / "run"), "data": {**data, "augment_on": "device"}}
    trainer = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "threads": 1}
    return write_merged(folder / "device.yaml", values, {"trainer": trainer, **groups})


def test_a_run_that_augments_on_the_device_resumes_bit_for_bit(images, tmp_path):
    whole = train_folder(device_recipe(tmp_path / "whole", images))
    check_resumes_bit_for_bit(device_recipe(tmp_path / "stopped", images), whole, step=4)


def test_a_run_may_go_on_with_its_images_augmented_elsewhere(images, tmp_path):
    recipe = device_recipe(tmp_path / "one", images, trainer={"max_epochs": 1, "threads": 1})
    run = train_folder(recipe)
    train_folder(recipe, ["data.augment_on=cpu", "trainer.max_epochs=2"], resume=True)
    assert len(curve(run)) == 2
