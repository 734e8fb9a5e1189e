"""The recipes of linearized networks take two steps, from random weights and with narrow networks."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiers import quick

from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.runs.training import train_folder

RECIPES = Path(__file__).parents[1] / "recipes" / "linearize"
LARGE = sorted(path for path in RECIPES.glob("*.yaml") if path.name != "base.yaml")
SOME = [
    path for path in LARGE if path.stem.startswith("deit") or path.stem in ("dinov2_base_align", "care_nano_from_deit")
]
NARROW = {"embed_dim": 32, "depth": 2, "num_heads": 2}
FEW = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 2, "trainer.limit_val_batches": 1}


@pytest.fixture
def photos(tmp_path):
    for number in range(8):
        path = tmp_path / "photos" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (70, 80, 3), np.uint8)).save(path)
    return str(tmp_path / "photos")


@pytest.mark.parametrize("path", quick(LARGE, SOME), ids=lambda path: path.stem)
def test_recipes_of_published_size_take_two_steps(path, photos, tmp_path):
    values = read_recipe(path)
    side = 56 if "dinov2" in path.stem else 64
    group = "task.teacher_model" if "teacher_model" in values["task"] else "model.base"
    overrides = {f"{group}.{key}": value for key, value in {**NARROW, "img_size": side}.items()}
    overrides |= {"data.root": photos, "data.size": side, "data.batch_size": 2, "data.num_workers": 0, "init": None}
    overrides |= {"data.held_out": 0.25, "trainer.accelerator": "cpu"}
    overrides |= {"distillation.teacher": None, "distillation.checkpoint": None} if "distillation" in values else {}
    overrides |= {} if "distillation" in values else {"task.teacher": None}
    run = train_folder(path, {**overrides, **FEW}, folder=tmp_path / "run")
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_the_steps_of_a_network_belong_together():
    """Each starts from the folder of the one before, with the same model."""
    for path in (*RECIPES.glob("*_transfer.yaml"), *RECIPES.glob("*_tune.yaml"), *RECIPES.glob("cifar/t*.yaml")):
        values = Recipe(read_recipe(path)).resolved()
        if values["init"] is None:
            continue
        before = [each for each in path.parent.glob("*.yaml") if read_recipe(each)["folder"] == values["init"]]
        assert len(before) == 1, path
        assert Recipe(read_recipe(before[0])).resolved()["model"] == values["model"]
